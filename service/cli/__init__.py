"""The command line: parse first, import torch afterwards."""

from __future__ import annotations

from service.cli.main import main

__all__ = ["main"]
