"""The engine for production traffic: vLLM, with the readout inside its compiled forward pass.

The way of a prompt: ``engine`` (request side) -> vLLM's scheduler -> ``runners`` (which row is t*) around the model
that ``graph`` has taught to write truth logits as its layers run -> ``reader`` (gather, gate, payload) -> ``engine``.
``worker`` is what vLLM is told to load; ``directive`` is what the two sides say to each other; ``starting`` starts
vLLM, ``slots`` keeps book of the probes in the graph, ``self_test`` decides whether any of it may serve.
"""
