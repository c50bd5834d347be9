"""Versioned probe bundles: the file format (FORMAT.md), loading, and a store.

``store.Store`` publishes and loads; ``bundle.load_bundle`` reads one folder; ``errors`` lists every
failure.  Whether a loaded model may serve a bundle is checked by ``service.matching``.  Imports
nothing from ``service``."""
