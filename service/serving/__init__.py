"""Between HTTP and the engine: jobs wait, are gathered into batches, scored, gated and decoded by one thread."""
