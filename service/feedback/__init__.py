"""Stores scored prompts, one row each, and users' labels of their answers, in SQLite or
PostgreSQL."""
