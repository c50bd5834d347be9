"""python -m service.cli: the same as the console script, also from a checkout that is not
installed."""

from __future__ import annotations

from service.cli import main

main()
