"""Training one bundle: ``run`` takes a data file through collection, labels, fits and evaluation to
the store."""
