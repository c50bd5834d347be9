"""Named keys: their file, how it is edited, which of them are in force, and how much each may ask."""
