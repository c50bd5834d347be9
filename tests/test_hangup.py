"""SIGHUP to ``hallutracer serve``: an alias that moved takes effect then, and neither before nor halfway."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import httpx

from probes_store.bundle import BundleDraft
from probes_store.store import SHIPPED, Store
from tests.serve_process import ServeProcess

PROMPT = "What is the capital of the Solomon Islands?"


def test_a_moved_alias_takes_effect_at_a_hangup_even_one_while_loading(tmp_path: Path) -> None:
    store = Store(tmp_path, fallbacks=[SHIPPED])
    digests = []
    for source in ("demo", "demo-fused"):
        bundle = store.load(source)
        manifest = dataclasses.replace(bundle.manifest, name="mine")
        draft = BundleDraft(manifest, bundle.probes, bundle.golden, bundle.evaluation(), bundle.card())
        digests.append(store.publish(draft).manifest.digest)
    store.set_alias("mine", "production", 1)

    def move(process: int) -> None:
        store.set_alias("mine", "production", 2)
        os.kill(process, signal.SIGHUP)

    arguments = ("--bundle", "mine@production", "--threads", "1")
    with ServeProcess(*arguments, on_listening=move, HALLUTRACER_STORE=str(tmp_path)) as served:

        def digest() -> str:
            body = {"prompt": PROMPT, "bundle": "mine@production"}
            found: str = httpx.post(f"{served.url}/score", json=body, timeout=60).json()["bundle"]["digest"]
            return found

        def wait_for(expected: str) -> None:
            limit = time.monotonic() + 30
            while digest() != expected:
                assert time.monotonic() < limit
                time.sleep(0.05)

        wait_for(digests[1])  # the one that came while the model was loading
        store.set_alias("mine", "production", 1)
        assert digest() == digests[1]  # an alias means what it meant when it was loaded
        os.kill(served.process.pid, signal.SIGHUP)
        wait_for(digests[0])
        (tmp_path / "mine" / "aliases.json").write_text("{")
        assert digest() == digests[0]
        os.kill(served.process.pid, signal.SIGHUP)
        limit = time.monotonic() + 30
        while "not swapped" not in served.log():
            assert time.monotonic() < limit
            time.sleep(0.05)
        assert digest() == digests[0]
    assert served.process.returncode == 0
