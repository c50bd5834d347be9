"""Tables and figures for readers: one HTML page, Markdown files, SVG drawings."""
