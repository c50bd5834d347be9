"""Readers of public sets, mixtures of rows, and the audit of a judge."""
