"""Versioned probe bundles: the format (FORMAT.md), the frozen bundle, the store.  Imports nothing of ours."""
