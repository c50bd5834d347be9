"""Named keys: who calls, which routes a key opens, the keys of a file and which of them are in
force."""
