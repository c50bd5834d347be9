"""The audit log: who did what, and what was decided, in lines that show when one was changed or is gone."""
