"""Readers of public sets: a path the user has -> rows for ``hallutracer train``.  No set is shipped."""
