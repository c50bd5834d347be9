"""How many files the process may open: raised where that suffices, refused where it leaves no service to speak of."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.serve_process import PATHS, ROOT, inherited

LIMITS = "from service.api.connections import places; import resource; n = places(300); "


def limited(limit: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python under ``ulimit``, in a process of its own: a hard limit cannot be raised again."""
    command = ["bash", "-c", f'ulimit {limit} && exec "$@"', "bash", sys.executable, *arguments]
    environment = inherited() | {"PYTHONPATH": PATHS}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("limit", [64, 143])
def test_a_service_with_next_to_no_connections_does_not_start(limit: int) -> None:
    done = limited(f"-n {limit}", "-m", "service.cli", "serve", "--port", "0", "--max-connections", "1000")
    assert done.returncode == 1
    assert done.stdout == ""
    for said in (f"may open {limit} files", "at least 144", "ulimit -n 1128"):
        assert said in done.stderr


def test_doctor_says_the_same() -> None:
    done = limited("-n 64", "-m", "service.cli", "doctor", "--port", "0", "--max-connections", "1000", "--json")
    [found] = [check for check in json.loads(done.stdout)["checks"] if check["check"] == "files"]
    assert done.returncode == 1
    assert found["status"] == "fail"
    assert "64 open files" in found["found"]
    assert "at least 144" in found["found"]
    assert "ulimit -n 1128" in found["cure"]


@pytest.mark.parametrize(
    ("limit", "connections", "soft"),
    [("-Sn 64", 300, 428), ("-n 144", 16, 144), ("-n 200", 72, 200), ("-n 4000", 300, 4000)],
)
def test_the_soft_limit_is_raised_as_far_as_it_goes(limit: str, connections: int, soft: int) -> None:
    done = limited(limit, "-c", LIMITS + "print(n, resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    assert done.stdout.split() == [str(connections), str(soft)], done.stderr
