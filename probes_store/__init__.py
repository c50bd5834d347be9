"""Versioned probe bundles: the file format (FORMAT.md), loading, and a store.

``store.Store`` publishes and loads; ``bundle.load_bundle`` reads one folder;
``manifest.check_identity`` and ``bundle.check_golden`` (``check_answers`` of an answer probe) check
that a loaded model may serve a bundle; ``errors`` lists every failure.  Imports nothing from
``service``."""
