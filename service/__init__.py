"""HalluTracer: the risk of a hallucination before the first answer token.  Imports neither torch
nor vllm."""

__version__ = "1.0.0"
