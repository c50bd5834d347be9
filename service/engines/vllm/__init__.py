"""The engine for production traffic: vLLM, with the readout beside its compiled forward pass.

A prompt passes through ``engine`` and ``client`` (request side; which probe is in which slot),
vLLM's scheduler, ``worker`` (which row of the step is t*), the model's layers, which ``attach`` has
made keep their activations at t* and turns into truth logits, ``reader`` (gate, payload), and back
to ``engine``.  ``wire`` defines the messages between the request side and the worker; ``launch``
starts vLLM; ``engine.self_test`` checks the readout before anything is served.
"""
