"""Rows, public data sets, labels and judges, and collection of activations: what a training run reads and writes."""
