"""deploy/nginx/nginx.conf run by a real nginx, in front of replicas with scripted faults."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.kit.local_server import listening
from tests.kit.prometheus import ROOT, binary, started

CONFIGURATION = ROOT / "deploy" / "nginx" / "nginx.conf"
FIRST, SECOND = "127.0.0.1:8765", "127.0.0.1:8766"
LISTEN = "listen 127.0.0.1:8080;"
Edit = tuple[str, str]


def configuration(folder: Path, replicas: Sequence[str], port: int, *edits: Edit) -> Path:
    """Ours, but for the addresses, the folder of its files, and what a test changes on purpose."""
    text = CONFIGURATION.read_text().replace("/tmp/hallutracer-nginx", f"{folder}/nginx")
    text = re.sub(rf" *server {SECOND} .*\n", "", text)
    ours = list[Edit]()
    for line in re.findall(rf" *server {FIRST} .*\n", text):
        ours.append((line, "".join(line.replace(FIRST, replica) for replica in replicas)))
    tries = "place of the last one.\n            proxy_next_upstream_tries "
    ours += [(f"{tries}4;", f"{tries}{2 * len(replicas)};")]
    ours += [
        (LISTEN, f"listen 127.0.0.1:{port};"),
        ("access_log /dev/stdout", f"access_log {folder}/lines"),
    ]
    ours += [("worker_processes auto", "worker_processes 1")]  # two cores run all of this
    for old, new in (*ours, *edits):
        assert text.count(old) == 1, f"nginx.conf should say {old} once"
        text = text.replace(old, new)
    (path := folder / "nginx.conf").write_text(text)
    return path


@dataclass(frozen=True)
class Balancer:
    """A running nginx: its address and its log."""

    url: str
    log: Path

    def lines(self, count: int) -> list[dict[str, Any]]:
        """The log, once it has ``count`` lines: nginx writes each after the answer has gone out."""
        for _ in range(500):
            found = self.log.read_text().splitlines()
            if len(found) >= count:
                return [json.loads(line) for line in found]
            time.sleep(0.02)
        raise AssertionError(f"{len(found)} lines in nginx's log, not {count}")


@contextmanager
def balancing(folder: Path, replicas: Sequence[str], *edits: Edit) -> Iterator[Balancer]:
    """nginx in front of the replicas on a free port."""
    nginx = binary("nginx")

    def command(port: int) -> list[str]:
        return [
            nginx,
            "-c",
            str(configuration(folder, replicas, port, *edits)),
            "-g",
            "daemon off;",
        ]

    def listens(port: int) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    with started(command, folder / "errors", listens) as port:
        yield Balancer(f"http://127.0.0.1:{port}", folder / "lines")


@dataclass(frozen=True)
class Replica:
    """A server with a scripted behaviour; ``began`` holds the ids of the requests that reached
    it."""

    address: str
    began: list[str]


@contextmanager
def replica(behave: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Replica]:
    """A replica of one behaviour; the handler's body has been read when it is called."""
    began: list[str] = []

    def begin(request: BaseHTTPRequestHandler, _: bytes) -> None:
        began.append(request.headers["X-Request-Id"])
        behave(request)

    with listening(begin, "HTTP/1.1") as address:
        yield Replica(address, began)
