"""Loading, training and evaluating from Python; ``import hallutracer`` has what is public of it."""
