"""The paper's diagnostics on labelled trajectories and readouts: arrays in, frozen results out, float64 inside.

Each module is one table or test of the paper.  None of them reads a file, runs a model or fits a probe; label is 1 for
factual and 0 for hallucinated throughout.
"""
