"""Loading, training and evaluating from Python; ``import hallutracer`` has what is public of it.

The command line calls the same functions.  Importing this package loads neither torch nor vLLM.
"""
