"""Tables and figures as people read them: one HTML page, Markdown, drawings.  Knows no method and no model."""
