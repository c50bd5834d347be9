"""A service that listens: its socket and server, its greeting, and bundles swapped and replayed
while it runs."""

from __future__ import annotations

import asyncio
import atexit
import errno
import json
import logging
import math
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from service.access.callers import address_in, on_loopback
from service.cli.held_out import SHOWN
from service.cli.loading import OptionalBundles, load_bundles, load_scorers
from service.cli.options import UsageError
from service.cli.output import print_line
from service.errors import HalluTracerError
from service.policies.guard import OBSERVE, Action
from service.settings import ServiceSettings

if TYPE_CHECKING:
    import uvicorn

    from probes_store.store import Store
    from service.engines.base import Engine
    from service.scoring import Scorer
    from service.serving.log_queue import Fate
    from service.serving.service import Lifecycle, Service

log = logging.getLogger("hallutracer")
Stamps = Mapping[str, str | None]
Say = Callable[[str], None]  # prints a line for people
HOST_NAME = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", re.ASCII)  # as it stands in ``Host``
SELDOM_S = 300.0
SENDING_S = 1  # that the last events of streams may take that are cut
FALLBACK = ("What is the capital of France?",)  # of a bundle without a sample
_tasks: set[asyncio.Task[None]] = set()  # the event loop itself keeps none alive


def make_server(app: object, lifecycle: Lifecycle) -> uvicorn.Server:
    """Return uvicorn around the app; ``lifecycle`` is told when it will stop, and when its time to
    drain is over."""
    import uvicorn

    from service.api.connections import LeavingServer, connections

    settings = lifecycle.settings
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=settings.host,
        port=settings.port,
        http=connections(settings.max_connections),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        # an address that a client could choose would get it another one's share
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(settings.drain_s) + SENDING_S,
        # seconds, and a fraction will do
        timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]
    )
    return LeavingServer(config, lifecycle)


@contextmanager
def standard_streams(count: Callable[[Fate, int], None]) -> Iterator[Say]:
    """Have every log line as JSON on standard error; yield what prints a line on standard output.

    Nobody but two threads of their own waits for whoever reads them.  ``count``: is told of the
    log's lines."""
    from service.serving.log_queue import LineQueue, QueuedLog, descriptor_of

    lines, out = QueuedLog(count), LineQueue(descriptor_of(sys.stdout, 1))
    logging.basicConfig(level=logging.INFO, handlers=[lines])
    logging.captureWarnings(True)
    for library in ("httpx", "uvicorn", "torch"):  # the last tells of its caches as it ends
        logging.getLogger(library).setLevel(logging.WARNING)

    def at_exit() -> None:
        lines.close()
        # libraries print as the interpreter ends: no JSON, and it may wait for the reader
        lines.lines.silence()

    atexit.register(at_exit)
    try:
        yield out.send
    finally:
        out.close()
        lines.close()


def listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded: a taken port is said at once, not after minutes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name TCP; with it a lone answer
    # waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        taken = f"port {port} on {host} is taken; choose another with --port (0: any free)"
        failed = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise HalluTracerError(taken if error.errno == errno.EADDRINUSE else failed) from None
    return listener


def known_hosts(settings: ServiceSettings, *, keyed: bool) -> tuple[str, ...]:
    """Return the names that requests may be addressed to, besides addresses (``service.api.auth``);
    "*": any.

    Those given; else loopback's on loopback, and beyond it this machine's own, or any where every
    caller has a key (``keyed``), which a foreign page has not.  Raises UsageError for what no
    ``Host`` could be."""
    for name in settings.allowed_hosts:
        if name != "*" and not HOST_NAME.fullmatch(name):
            raise UsageError(
                "--allowed-host",
                f"{name!r} is not a host's name, without scheme and port, or * for any",
            )
    if settings.allowed_hosts or on_loopback(settings.host):
        return settings.allowed_hosts or ("localhost",)
    named = (settings.host,) if address_in(settings.host) is None else ()
    return ("*",) if keyed else ("localhost", socket.gethostname(), *named)


def in_url(host: str) -> str:
    """Return a host as it stands in an address: IPv6 in brackets, "all interfaces" as loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def first_line(service: Service) -> str | None:
    """Return how to gate, where nothing is withheld; or that callers of this machine may open the
    gate."""
    policy = service.catalogue.policy(None, None)
    if policy.action is Action.OBSERVE:
        return (
            f"policy {policy.name}: every answer passes and its risk is told; --policy gate"
            " withholds answers from the threshold on"
        )
    owned = (
        "programs of this machine may ask for another policy, since no key is asked for; behind a"
        " proxy give --keys, or --callers-may none"
    )
    return owned if service.access.owned else None


async def greet(service: Service, address: str, say: Say = print_line) -> None:
    """Print that it is ready, a request of the bundle's own held-out questions (``example``), and
    where to go on."""
    scorer = service.catalogue.scorers[0]
    identity = scorer.engine.identity
    references = ", ".join(served.bundle.reference for served in service.catalogue.scorers)
    say(f"ready: {identity.model} ({identity.dtype}) read by {references}")
    body = {"prompt": await example(scorer), "generate": {"max_tokens": 16}}
    if service.catalogue.policy(None, None).action is Action.OBSERVE:
        body["policy"] = "gate"
    key = ' -H "Authorization: Bearer $KEY"' if service.access.keys.closed else ""
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    say(
        "\nTry it, on the held-out questions of the lowest and of the highest risk:\n\n"
        f"  curl -s {address}/score{key} -H 'Content-Type: application/json' -d {text}\n\n"
        f"  hallutracer try --url {address}     # all of them, sorted by risk\n"
    )
    if service.settings.playground:
        say(f"Playground: {address}/")
    say(f"API reference: {address}/docs    Stop: Ctrl-C")


async def example(scorer: Scorer) -> list[str]:
    """Return the bundle's held-out questions of the lowest and of the highest risk, among those
    that ``try`` shows.

    Their prefills alone, about a second on SmolLM2.  ``FALLBACK`` where the bundle has no sample
    that can be read."""
    from service.engines.bridge import gather_all
    from service.judging.evaluation import sample_of

    try:
        if (sample := sample_of(scorer.bundle)) is None:
            return list(FALLBACK)
        prompts = [question.prompt for question in sample.questions[:SHOWN]]
        reports = await gather_all(
            [scorer.last_report(scorer.render(prompt), OBSERVE) for prompt in prompts]
        )
    except Exception as error:  # whatever it is, the addresses are printed
        log.warning("no request could be made of the held-out questions: %s", error)
        return list(FALLBACK)
    by_risk = sorted(zip((report.risk for report in reports), prompts, strict=True))
    return [by_risk[0][1], by_risk[-1][1]]


def on_hangup(service: Service, say: Say = print_line) -> Callable[[], None]:
    """Reload on SIGHUP, keys too, and when the returned function is called.  Call on the service's
    event loop."""
    from service.audit.auditor import Who

    loop = asyncio.get_running_loop()

    async def hangup() -> None:
        _report(
            service, (await service.reload(Who(by="signal")))[1], say
        )  # which logs what is wrong with the keys

    def begin() -> None:
        in_background(hangup())

    loop.add_signal_handler(signal.SIGHUP, begin)
    return begin


def watch(
    service: Service,
    look: Callable[[], Stamps],
    before: Stamps,
    seconds: float,
    say: Say = print_line,
) -> None:
    """Reload where ``look``, called every so many seconds, gives something else.  Call on the event
    loop.

    ``before``: what it gave before the loaded bundles were read.  Where the store gives no answer,
    or a reload failed, it is tried again, ever less often, for each time is in the audit log."""
    from service.audit.auditor import Who
    from service.serving.service import in_own_thread

    async def again() -> None:
        seen = before
        wait, again_at = seconds, 0.0
        while not service.lifecycle.stopping:
            await asyncio.sleep(seconds)
            try:
                now = await asyncio.wrap_future(
                    in_own_thread(look)
                )  # a store that hangs must not hold the stop up
            except Exception:
                log.exception("the store was not looked at")
                continue
            moved = now != seen
            failing = None in now.values() or service.lifecycle.reload_error is not None
            if moved or (failing and time.monotonic() >= again_at):
                seen, reported = now, service.lifecycle.reload_error
                error = await service.lifecycle.reload_bundles(Who(by="alias"))
                if (
                    error is None or str(error) != reported
                ):  # what was said of the last one is not said again
                    _report(service, error, say)
                wait = seconds if moved else min(2 * wait, max(seconds, SELDOM_S))
                again_at = time.monotonic() + wait

    in_background(again())


def replay(service: Service, seconds: float) -> None:
    """Replay the golden prompts every so many seconds.  Call on the event loop."""

    async def again() -> None:
        while not service.lifecycle.stopping:
            await asyncio.sleep(seconds)
            try:
                await service.catalogue.replay_golden()
            except Exception as error:  # the engine's own watch says what is wrong with it
                log.warning("the golden prompts were not replayed: %s", error)

    in_background(again())


def load_again(
    left_out: dict[str, str],
    engine: Engine,
    store: Store,
    names: Sequence[str],
    may: Collection[str],
    loaded: Sequence[Scorer] = (),
) -> dict[str, Scorer]:
    """Return what the references mean now; ``may`` be left out where the store answers, and
    ``left_out`` says why.

    The golden prompts of bundles that are ``loaded`` are not replayed."""
    again = OptionalBundles(may, must_answer=True)
    scorers = load_scorers(engine, load_bundles(store, names, again), log.info, again, loaded)
    left_out.clear()
    left_out.update(again.reasons)
    return scorers


def stamps(store: Store, names: Sequence[str]) -> Stamps:
    """Return what each reference means now, or why it means nothing; None where the store gives no
    answer."""
    from probes_store.errors import BundleError, StoreUnreachable

    stamp_of: dict[str, str | None] = {}
    for name in names:
        try:
            stamp_of[name] = store.stamp(name)
        except StoreUnreachable:
            return dict.fromkeys(names)  # each further question could wait for its timeout
        except BundleError as error:
            stamp_of[name] = str(error)
    return stamp_of


def in_background(work: Coroutine[Any, Any, None]) -> None:
    """Run it on this event loop, to its end."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


def _report(service: Service, error: Exception | None, say: Say) -> None:
    if error is not None:
        log.error("the bundles were not swapped, those that are loaded stay: %s", error)
        return
    rollout, scorers = service.catalogue.rollout, service.catalogue.scorers
    roles = ((scorer.bundle.reference, rollout.role(scorer, scorers[0])) for scorer in scorers)
    judges = [name if role in ("default", "none") else f"{name} ({role})" for name, role in roles]
    say(f"read by {', '.join(judges)} from now on")
