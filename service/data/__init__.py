"""Training rows, public data sets, labels and judges, and the collection of activations."""
