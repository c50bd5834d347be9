"""Engines run the model.  They know neither bundles' storage nor HTTP."""
