"""The paper on a finished evaluation: its other tables, its published numbers, verdicts on its
claims, the report."""
