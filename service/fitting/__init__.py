"""From activations and labels to probes, a classifier and measured performance.  No engine, no bundle files."""
