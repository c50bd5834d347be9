"""An alias that moved takes effect at a SIGHUP or where it is watched, and neither before nor halfway."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fleet import NAME, two_versions
from tests.running import until
from tests.serve_process import ServeProcess


def digest_of(served: ServeProcess, **body: str) -> str:
    body = {"prompt": "What is the capital of the Solomon Islands?"} | body
    found: str = httpx.post(f"{served.url}/score", json=body, timeout=60).json()["bundle"]["digest"]
    return found


def bundles(served: ServeProcess) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{served.url}/v1/bundles").json()
    return found


def test_a_moved_alias_takes_effect_at_a_hangup_even_one_while_loading(tmp_path: Path) -> None:
    store, digests = two_versions(tmp_path)
    first, second = digests

    def move(process: int) -> None:
        store.set_alias(NAME, "production", 2)
        os.kill(process, signal.SIGHUP)

    production = f"{NAME}@production"
    arguments = ("--bundle", production, "--threads", "1")
    with ServeProcess(*arguments, on_listening=move, HALLUTRACER_STORE=str(tmp_path)) as served:
        until(lambda: digest_of(served, bundle=production) == second)  # the one that came while the model was loading
        store.set_alias(NAME, "production", 1)
        assert digest_of(served, bundle=production) == second  # an alias means what it meant when it was loaded
        os.kill(served.process.pid, signal.SIGHUP)
        until(lambda: digest_of(served, bundle=production) == first)
        (tmp_path / NAME / "aliases.json").write_text("{")
        assert digest_of(served, bundle=production) == first
        os.kill(served.process.pid, signal.SIGHUP)
        until(lambda: "not swapped" in served.log())
        assert digest_of(served, bundle=production) == first
    assert served.process.returncode == 0


def test_a_watched_alias_brings_a_canary_and_takes_it_back(tmp_path: Path) -> None:
    store, digests = two_versions(tmp_path)
    first, second = digests
    arguments = ("--bundle", f"{NAME}@production", "--canary", f"{NAME}@canary", "--canary-share", "1", "--watch-s=0.2")

    def move(process: int) -> None:  # while the model loads, and after the bundles were read
        store.set_alias(NAME, "canary", 2)

    with ServeProcess(*arguments, "--threads", "1", on_listening=move, HALLUTRACER_STORE=str(tmp_path)) as served:
        until(lambda: digest_of(served) == second)
        assert bundles(served)["status"]["left_out"] == []
        store.set_alias(NAME, "canary", 1)  # what judges already
        until(lambda: digest_of(served) == first)
        assert "judges already" in bundles(served)["status"]["left_out"][0]["reason"]
        store.set_alias(NAME, "production", 2)  # promoted, with the old one as canary
        until(lambda: [one["role"] for one in bundles(served)["data"]] == ["default", "canary"])
        assert digest_of(served) == first
    assert served.process.returncode == 0
