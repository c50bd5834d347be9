"""``serve`` on a real S3 server: from copies, signed and pinned, following aliases, through an outage and back."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from benchmarks.fleet import two_versions
from probes_store.store import Store
from probes_store.trust import Signing
from tests import running
from tests.probes_store.keys import key_pair
from tests.probes_store.s3_server import BUCKET, VARIABLES, s3_server, use
from tests.serve_process import ServeProcess

URL = f"s3://{BUCKET}/probes"
pytestmark = pytest.mark.long


class Way:
    """A TCP proxy to the S3 server: open, closed (hangs up) or silent (takes what comes and says nothing)."""

    def __init__(self, target: str) -> None:
        self.state = "open"
        self._target = (str(urlsplit(target).hostname), int(urlsplit(target).port or 0))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._links: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, state: str) -> None:
        self.state = state
        for link in self._links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self._links.clear()

    def close(self) -> None:
        self._listener.close()
        self.set("closed")

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            if self.state == "closed":
                here.close()
                continue
            self._links.append(here)
            if self.state == "open":
                there = socket.create_connection(self._target)
                self._links.append(there)
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def to_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    with s3_server() as address:
        for name, value in {**VARIABLES, "AWS_ENDPOINT_URL": address}.items():
            monkeypatch.setenv(name, value)
        use(address)  # another file's server may have been asked before
        opened = Way(address)
        try:
            yield opened
        finally:
            opened.close()


until = partial(running.until, seconds=60.0)


def test_a_service_on_s3_through_an_outage_and_back(tmp_path: Path, to_s3: Way) -> None:
    keys, cache = key_pair(tmp_path, "ours"), tmp_path / "cache"
    publisher, found = two_versions(URL, tmp_path / "publisher")
    digests = list(found)
    publisher.sign("mine:1", Signing(keys.private))
    options = ["--store", URL, "--store-cache", str(cache), "--require-signature", str(keys.public)]
    options += ["--bundle", f"mine@production@{digests[0]}", "--bundle", "mine@production", "--threads", "1"]
    options += ["--canary", "mine@canary", "--canary-share", "1", "--shadow", "mine@shadow", "--watch-s", "0.5"]
    variables = VARIABLES | {"AWS_ENDPOINT_URL": to_s3.url, "HALLUTRACER_CALLERS_MAY": "bundle"}
    Store(URL, cache=cache).load("mine@production")  # it was here before
    to_s3.set("closed")
    with ServeProcess(*options, **variables) as served:

        def ask(**body: str) -> httpx.Response:
            return httpx.post(f"{served.url}/score", json={"prompt": "Why?"} | body, timeout=60)

        def judge() -> Any:
            return ask().json()["bundle"]["digest"]

        def status() -> Any:
            return httpx.get(f"{served.url}/v1/bundles", timeout=60).json()["status"]

        assert f"going on with the copies in {cache}" in served.log()
        assert f"aliases of mine as they were when {URL} last answered: production -> 1" in served.log()
        assert judge() == digests[0]
        until(lambda: "no answer" in (status()["reload_error"] or ""))
        assert status()["reload_failing_since"] is not None
        assert httpx.post(f"{served.url}/v1/admin/reload", timeout=120).status_code == 409
        to_s3.set("open")
        until(lambda: status()["reload_error"] is None)

        publisher.set_alias("mine", "canary", 2)  # by somebody without the key
        until(lambda: any("a signature is required here" in one["reason"] for one in status()["left_out"]))
        assert judge() == digests[0]
        publisher.sign("mine:2", Signing(keys.private))  # and nothing else moves
        until(lambda: judge() == digests[1])
        publisher.set_alias("mine", "production", 2)  # which is not what is pinned
        until(lambda: "not the bundle that the reference pins" in (status()["reload_error"] or ""))
        assert ask(bundle="mine@production").json()["bundle"]["digest"] == digests[0]
        publisher.set_alias("mine", "production", 1)
        publisher.set_alias("mine", "canary", 1)
        until(lambda: status()["reload_error"] is None and judge() == digests[0])

        to_s3.set("closed")
        until(lambda: status()["reload_error"] is not None)
        since = status()["since"]
        os.kill(served.process.pid, signal.SIGHUP)
        until(lambda: served.log().count("the bundles were not swapped") >= 3)
        assert (status()["since"], judge()) == (since, digests[0])
        to_s3.set("open")
        until(lambda: status()["reload_error"] is None)
        os.kill(served.process.pid, signal.SIGHUP)
        until(lambda: status()["since"] != since)
        assert judge() == digests[0]
        to_s3.set("silent")
        time.sleep(1.5)  # the watch is asking now
        stopping = time.monotonic()
    assert served.process.returncode == 0
    assert time.monotonic() - stopping < 15, "a store that hangs holds the stop up"
