"""Writes the audit log, who did what and what was decided, in lines that reveal if one was changed
or removed."""
