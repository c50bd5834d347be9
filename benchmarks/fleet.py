"""Replicas of the service behind the shipped balancer: started, drained, killed, stopped, reloaded.  Linux only."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.service_process import ServiceProcess
from probes_store.bundle import BundleDraft
from probes_store.store import SHIPPED, Store
from service.access.routes import RELOAD_ROUTE
from tests.deploy.balancer import Balancer, free_port
from tests.deploy.balancer import balancing as nginx

NAME = "mine"
SOURCES = ("demo", "demo-fused")  # what the two versions are: their risks differ
Balancing = Callable[[Path, Sequence[str]], AbstractContextManager[Balancer]]


def two_versions(place: Path | str, cache: Path | None = None) -> tuple[Store, dict[str, str]]:
    """A store with two versions of one bundle, production at the first; digest -> reference."""
    store, digests = Store(place, fallbacks=[SHIPPED], cache=cache), {}
    for source in SOURCES:
        made = store.publish(draft(source))
        digests[made.manifest.digest] = made.reference
    store.set_alias(NAME, "production", 1)
    return store, digests


def draft(source: str) -> BundleDraft:
    """A shipped bundle under our name."""
    bundle = Store(SHIPPED).load(source)
    manifest = dataclasses.replace(bundle.manifest, name=NAME)
    return BundleDraft(manifest, bundle.probes, bundle.golden, bundle.evaluation(), bundle.card())


class Replica:
    """One address; the process behind it is another one after each start."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.port = free_port()
        self.arguments, self.variables = arguments, variables
        self.process: ServiceProcess | None = None
        self.starts = 0

    @property
    def name(self) -> str:
        """As a balancer lists it."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Until it is ready.  Raises RuntimeError as ServeProcess does."""
        process = ServiceProcess("--port", str(self.port), *self.arguments, **self.variables)
        process.__enter__()
        self.process, self.starts = process, self.starts + 1

    def drain(self) -> int:
        """SIGTERM, and its exit status."""
        process = self._take()
        process.__exit__()
        return int(process.process.returncode)

    def kill(self) -> None:
        """SIGKILL, to all its processes."""
        process = self._take()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.__exit__()

    def signal(self, number: signal.Signals) -> None:
        """To the service's own process."""
        if self.process is not None:
            os.kill(self.process.pid, number)

    def _take(self) -> ServiceProcess:
        process, self.process = self.process, None
        if process is None:
            raise RuntimeError(f"no process behind {self.name}")
        return process

    def asked(self, method: str, route: str, timeout_s: float = 60.0) -> int:
        """Status of a request to this replica alone; 0 where there was no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, route, headers={"Content-Length": "0"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def reload(self) -> int:
        """POST /v1/admin/reload: the status."""
        return self.asked("POST", RELOAD_ROUTE)

    async def ready_within(self, seconds: float) -> float | None:
        """Seconds until /health/ready says 200; None: not in that time."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if await asyncio.to_thread(self.asked, "GET", "/health/ready", 5.0) == 200:
                return time.monotonic() - start
            await asyncio.sleep(0.1)
        return None


@dataclass(frozen=True)
class Fleet:
    """Replicas, and the balancer before them."""

    replicas: tuple[Replica, ...]
    balancer: Balancer

    @property
    def address(self) -> tuple[str, int]:
        """Of the balancer."""
        parts = urlsplit(self.balancer.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def complaints(self) -> str:
        """What nginx wrote to its error log, counted."""
        lines = (self.balancer.log.parent / "errors").read_text(errors="replace").splitlines()
        found = Counter(re.sub(r"^.*?\*\d+ |, client: .*$", "", line) for line in lines if " [notice] " not in line)
        return "; ".join(f"{count} x {words}" for words, count in found.most_common(6))


@contextmanager
def fleet(folder: Path, count: int, *arguments: str, balancing: Balancing = nginx, **variables: str) -> Iterator[Fleet]:
    """So many ready replicas on one thread each, with the same arguments; whatever still runs at the end is stopped."""
    with ExitStack() as stack:
        replicas = running(stack, count, *arguments, **variables)
        folder.mkdir(parents=True, exist_ok=True)
        yield Fleet(replicas, stack.enter_context(balancing(folder, [replica.name for replica in replicas])))


def running(stack: ExitStack, count: int, *arguments: str, **variables: str) -> tuple[Replica, ...]:
    """Replicas that are ready, and stopped when ``stack`` ends."""
    replicas = tuple(Replica(*arguments, **{"HALLUTRACER_THREADS": "1"} | variables) for _ in range(count))
    for replica in replicas:
        stack.callback(lambda replica=replica: replica.process and replica.drain())
        replica.start()
    return replicas
