"""Between HTTP and the engine: jobs wait, are gathered into batches, scored, gated and decoded by one thread;

or, where the engine has a scheduler of its own, are handed to it one by one, and judged as their news comes.
"""
