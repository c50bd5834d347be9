"""Engines: they run the model and return numbers and text."""
