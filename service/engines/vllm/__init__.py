"""The engine for production traffic: vLLM, with the readout inside its compiled forward pass.

A prompt passes through ``engine`` and ``client`` (request side), vLLM's scheduler, ``runners`` (which row of the step
is t*), the model's layers, which ``graph`` has extended to write truth logits, and ``reader`` (gather, gate, payload),
and back to ``engine``.  ``worker`` is the worker class that vLLM loads; ``wire`` defines the messages between the
request side and the worker; ``launch`` starts vLLM; ``slots`` tracks which probe is in which slot of the graph;
``self_test`` checks the readout before anything is served.
"""
