"""The embedded engine: any transformers causal language model of ``families.py``."""
