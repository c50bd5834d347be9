"""What proves: the paper's tables and diagnostics, rivals, public sets, the making of the demo
model."""
