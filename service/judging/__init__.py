"""From a reading to a decision: uncertainty, guarantees, coverage, drift, and the forms of conversation."""
