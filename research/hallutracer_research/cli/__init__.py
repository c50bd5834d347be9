"""The commands of the research distribution."""
