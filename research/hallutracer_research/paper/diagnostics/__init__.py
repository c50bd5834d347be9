"""The paper's diagnostics on labelled trajectories and readouts: arrays in, frozen results out,
float64 inside."""
