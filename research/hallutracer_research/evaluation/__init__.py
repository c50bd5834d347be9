"""The main table on any model: our method and rivals on the same rows, splits and seeds; ``run`` is
the way through."""
