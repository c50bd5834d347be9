"""From activations and labels to probes, a calibrated classifier and nested cross-validation."""
