"""Two writers in one run folder would leave rows that nobody wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from service.data.run_folder import locked
from service.errors import RunMismatch

HOLD = """
import sys, time
from pathlib import Path
from service.data.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, cwd=root
    )
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(RunMismatch, match="in use by another process"), locked(tmp_path / "run"):
            pass
    finally:
        first.kill()
        first.wait()
    with locked(tmp_path / "run"):
        pass
