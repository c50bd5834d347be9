"""Versioned probe bundles: the format (FORMAT.md), the frozen bundle, the store.  Imports nothing of ours.

``store.Store`` publishes and loads; ``bundle.load_bundle`` reads one folder; ``identity`` and ``golden`` decide whether
a loaded model may serve it; ``errors`` has every way in which this can fail.
"""
