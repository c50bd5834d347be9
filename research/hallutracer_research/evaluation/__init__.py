"""The main table on any model: our method and the baselines on the same rows, splits and seeds.

``run.evaluate`` reads top to bottom: data sets -> rows -> readouts -> splits -> methods -> main table.  ``page`` writes
tables and figures as HTML and Markdown; the paper's other tables, its claims and the report are in ``paper``.
"""
