"""Named policies, the decision on a risk, and who answers instead."""
