"""vLLM compared with transformers, number by number.

``models`` makes a tiny model of each family, ``questions`` the requests, ``measure`` runs one backend in a process and
writes an .npz, ``compare`` compares two of those.  ``faulty`` has workers with deliberate faults, ``matrix`` lists the
families and configurations.
"""
