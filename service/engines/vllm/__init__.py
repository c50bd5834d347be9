"""The engine for production traffic: vLLM, with the readout beside its compiled forward pass.

A prompt passes through ``engine`` and ``client`` (request side), vLLM's scheduler, ``runners`` (which row of the step
is t*), the model's layers, which ``attach`` has made keep their activations at t*, ``sites`` (truth logits of what was
kept) and ``reader`` (gate, payload), and back to ``engine``.  ``worker`` is the worker class that vLLM loads; ``wire``
defines the messages between the request side and the worker; ``launch`` starts vLLM; ``slots`` tracks which probe is in
which slot of the worker; ``self_test`` checks the readout before anything is served.
"""
