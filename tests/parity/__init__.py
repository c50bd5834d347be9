"""vLLM against transformers, number by number.

``models`` makes a tiny model of each family, ``questions`` what is asked of it, ``measure`` is one process with one
backend that answers and writes an .npz, ``compare`` holds two of those side by side.  ``faulty`` has workers with a
mistake in them, ``matrix`` says which families and ways of running vLLM there are.
"""
