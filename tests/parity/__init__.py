"""vLLM compared with transformers, number by number.

``models`` has a tiny model of each family and the requests, ``measure`` runs one backend in a
process and writes an .npz, ``faulty`` has workers with deliberate faults, and ``test_parity``
compares."""
