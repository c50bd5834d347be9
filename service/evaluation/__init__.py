"""The paper's tables on any model: methods and baselines on the same rows, ablations, diagnostics, the report.

``suite`` reads top to bottom: sets -> rows -> methods -> tables -> report.  Knows no bundle and no HTTP.
"""
