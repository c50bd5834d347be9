"""Judges readings: uncertainty, guarantees, coverage, drift, and the shape of a conversation."""
