"""An alias that moved takes effect at a SIGHUP or where it is watched, and neither before nor halfway."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from probes_store.bundle import BundleDraft
from probes_store.store import SHIPPED, Store
from tests.serve_process import ServeProcess

PROMPT = "What is the capital of the Solomon Islands?"


def two_versions(folder: Path) -> tuple[Store, list[str]]:
    """A store with two versions of ``mine``, and their digests."""
    store, digests = Store(folder, fallbacks=[SHIPPED]), []
    for source in ("demo", "demo-fused"):
        bundle = store.load(source)
        manifest = dataclasses.replace(bundle.manifest, name="mine")
        draft = BundleDraft(manifest, bundle.probes, bundle.golden, bundle.evaluation(), bundle.card())
        digests.append(store.publish(draft).manifest.digest)
    store.set_alias("mine", "production", 1)
    return store, digests


def digest_of(served: ServeProcess, **body: str) -> str:
    answer = httpx.post(f"{served.url}/score", json={"prompt": PROMPT} | body, timeout=60)
    found: str = answer.json()["bundle"]["digest"]
    return found


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_moved_alias_takes_effect_at_a_hangup_even_one_while_loading(tmp_path: Path) -> None:
    store, digests = two_versions(tmp_path)

    def move(process: int) -> None:
        store.set_alias("mine", "production", 2)
        os.kill(process, signal.SIGHUP)

    arguments = ("--bundle", "mine@production", "--threads", "1")
    with ServeProcess(*arguments, on_listening=move, HALLUTRACER_STORE=str(tmp_path)) as served:

        def digest() -> str:
            return digest_of(served, bundle="mine@production")

        until(lambda: digest() == digests[1])  # the one that came while the model was loading
        store.set_alias("mine", "production", 1)
        assert digest() == digests[1]  # an alias means what it meant when it was loaded
        os.kill(served.process.pid, signal.SIGHUP)
        until(lambda: digest() == digests[0])
        (tmp_path / "mine" / "aliases.json").write_text("{")
        assert digest() == digests[0]
        os.kill(served.process.pid, signal.SIGHUP)
        until(lambda: "not swapped" in served.log())
        assert digest() == digests[0]
    assert served.process.returncode == 0


def test_a_watched_alias_brings_a_canary_and_takes_it_back(tmp_path: Path) -> None:
    store, digests = two_versions(tmp_path)
    arguments = ("--bundle", "mine@production", "--canary", "mine@canary", "--canary-share", "1", "--watch-s", "0.2")

    def move(process: int) -> None:  # while the model loads, and after the bundles were read
        store.set_alias("mine", "canary", 2)

    with ServeProcess(*arguments, "--threads", "1", on_listening=move, HALLUTRACER_STORE=str(tmp_path)) as served:

        def left_out() -> list[dict[str, str]]:
            found: list[dict[str, str]] = httpx.get(f"{served.url}/v1/bundles").json()["status"]["left_out"]
            return found

        def roles() -> list[str]:
            return [one["role"] for one in httpx.get(f"{served.url}/v1/bundles").json()["data"]]

        until(lambda: digest_of(served) == digests[1])
        assert left_out() == []
        store.set_alias("mine", "canary", 1)  # what judges already
        until(lambda: digest_of(served) == digests[0])
        assert "judges already" in left_out()[0]["reason"]
        store.set_alias("mine", "production", 2)  # promoted, with the old one as canary
        until(
            lambda: (
                [one["role"] for one in httpx.get(f"{served.url}/v1/bundles").json()["data"]] == ["default", "canary"]
            )
        )
        assert digest_of(served) == digests[0]
    assert served.process.returncode == 0
