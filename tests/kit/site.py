"""The documentation as a site, as `make docs` builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.kit.pages import ROOT


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build the pages in ``source`` into ``target / "site"``."""
    options = ("-W", "--keep-going", "-n", "-q", "-c", ROOT / "docs", "-d", target / ".doctrees")
    command = [sys.executable, "-m", "sphinx", *options, source, target / "site"]
    return subprocess.run(command, capture_output=True, text=True, check=False)
