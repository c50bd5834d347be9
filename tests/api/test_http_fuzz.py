"""Bytes that no client sends, on raw sockets against the server as it is served; thousands of them
in the long run.

Every answer must be HTTP with a documented status and no 5xx; no request that was hidden in another
is answered; the service gives the same risk as before, lets its connections go, and its memory
stays within bounds."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest

from service.errors import NotHttp
from tests.running import Running, served_of_module, until
from tests.serve_process import ServeProcess

BODY = json.dumps({"prompt": "What is the capital of Italy?"}).encode()
HEAD = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
PLAIN = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
LIVE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: localhost\r\n\r\n"  # a 404, where it is answered at all
KNOWN = {200, 400, 401, 404, 405, 408, 413, 415, 421, 422, 429, 431}
MOST = 8 << 20  # bytes of one answer that are read
Attack = Callable[[random.Random], list[bytes]]  # what is sent, piece by piece


def noise(draw: random.Random) -> list[bytes]:
    return [draw.randbytes(draw.choice((1, 10, 1000, 70_000)))]


def mutated(draw: random.Random) -> list[bytes]:
    """A request with a few bytes changed, left out, doubled or moved; in one piece or in many."""
    data = bytearray(draw.choice((PLAIN, CHUNKED, LIVE, PLAIN + LIVE)))
    odd = (b"\0", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\xff", b": ", b"HTTP/1.1")
    for _ in range(draw.choice((1, 1, 2, 5, 30))):
        at = draw.randrange(len(data))
        match draw.randrange(4):
            case 0:
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + draw.choice((1, 3, 20))]
            case 2:
                data[at:at] = data[at : at + draw.choice((1, 5, 50))]
            case _:
                data[at:at] = draw.choice(odd)
        data = data or bytearray(b" ")
    return pieces(draw, bytes(data))


def pieces(draw: random.Random, data: bytes) -> list[bytes]:
    if draw.random() < 0.7:
        return [data]
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice((1, 2, 10))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def heads(draw: random.Random) -> list[bytes]:
    """Heads that are too long, in one line or in many; or long, and not too long."""
    size = draw.choice((1_000, 20_000, 60_000, 65_500, 66_000, 300_000))
    line = (
        draw.choice((b"x-a: ", b"authorization: Bearer ", b"cookie: ", b"x-request-id: ", b""))
        + b"a" * size
    )
    lines = b"".join(b"x-%d: b\r\n" % n for n in range(draw.choice((1, 90, 99, 101, 5_000))))
    where = draw.randrange(4)
    if where == 0:
        return [b"GET /" + b"a" * size + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"]
    if where == 1:
        return [b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n" + line + b"\r\n\r\n"]
    if where == 2:
        return [b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n" + lines + b"\r\n"]
    return [CHUNKED[:-2], lines, line, b"\r\n\r\n"]  # trailers


def chunks(draw: random.Random) -> list[bytes]:
    """Sizes that are no sizes, too large, negative, unended; chunks without their end; endless
    extensions."""
    size = draw.choice(
        (
            b"zz",
            b"-1",
            b"+5",
            b"0x10",
            b"ffffffffffffffff",
            b"fffffffffffffffff",
            b"7fffffffffffffff",
            b"",
            b" 5",
            b"5 ",
            b"1" * 1000,
            b"5;" + b"a" * 100_000,
            b'5;a="\r\n"',
            b"00000000000000005",
            b"\x005",
            b"1e1",
        )
    )
    data = draw.choice(
        (b"hello\r\n", b"hello", b"hell\r\n", b"hello\n", b"hello\r\n\r\n", b"\r\n" * 1000)
    )
    end = draw.choice((b"0\r\n\r\n", b"0\r\n", b"", b"0\r\nx: y\r\n\r\n", b"0\n\n", HIDDEN))
    return pieces(
        draw,
        HEAD
        + b"transfer-encoding: chunked\r\n\r\n"
        + size
        + draw.choice((b"\r\n", b"\n"))
        + data
        + end,
    )


def pipelined(draw: random.Random) -> list[bytes]:
    """Several requests at once, sound ones; a second before the answer ends the connection."""
    return pieces(
        draw,
        b"".join(draw.choice((PLAIN, LIVE, CHUNKED)) for _ in range(draw.choice((2, 5, 50, 500)))),
    )


def lies(draw: random.Random) -> list[bytes]:
    """A length that is not the body's; the rest is left open, or the client leaves."""
    claimed = draw.choice(
        (0, 1, len(BODY) - 1, len(BODY) + 1, 10**6, 10**7, 10**18, 2**63, 2**64, 10**30)
    )
    return pieces(draw, HEAD + b"content-length: %d\r\n\r\n" % claimed + BODY)


def smuggled(draw: random.Random) -> list[bytes]:
    """Two readers of the same bytes may see other requests in them: here nobody may see ``HIDDEN``.

    Whatever a shape's framing is taken to be, the hidden request is inside the first one's body or
    after an error."""
    body, whole = b"0\r\n\r\n" + HIDDEN, len(b"0\r\n\r\n" + HIDDEN)
    shape = draw.choice(
        (
            b"content-length: %d\r\ntransfer-encoding: chunked\r\n" % whole,
            b"transfer-encoding: chunked\r\ncontent-length: %d\r\n" % whole,
            b"content-length: 5\r\ncontent-length: %d\r\n" % whole,
            b"content-length: %d\r\ncontent-length: 5\r\n" % whole,
            b"content-length: 5, %d\r\n" % whole,
            b"content-length: +5\r\n",
            b"content-length: 5 5\r\n",
            b"content-length: 0x5\r\n",
            b"content-length: -5\r\n",
            b"content-length:\r\n",
            b"content-length : 5\r\n",
            b"content-length: 5\x0b\r\n",
            b"transfer-encoding: xchunked\r\n",
            b"transfer-encoding: chunked, identity\r\n",
            b"transfer-encoding: identity\r\n",
            b"transfer-encoding : chunked\r\n",
            b"transfer-encoding:\x0bchunked\r\n",
            b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
            b'transfer-encoding: "chunked"\r\n',
            b"x: y\r\n transfer-encoding: chunked\r\n",
            b"x: y\ntransfer-encoding: chunked\r\n",
            b"x: y\rtransfer-encoding: chunked\r\n",
            b"x: \0\r\ncontent-length: 5\r\n",
            b"transfer-encoding:chunk\r\n",
        )
    )
    return pieces(draw, HEAD + shape + b"\r\n" + body)


def not_http(draw: random.Random) -> list[bytes]:
    """Other protocols, other versions, methods and targets."""
    return [
        draw.choice(
            (
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"GET /\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
                b"GET / HTTP/1.1\n\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
                b"SSH-2.0-x\r\n",
                b"CONNECT a:1 HTTP/1.1\r\n\r\n",
                b"GET http://other/ HTTP/1.1\r\nhost: localhost\r\n\r\n",
                b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
                b"GET /../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n",
                b"TRACE / HTTP/1.1\r\nhost: localhost\r\n\r\n",
                b"GET /%00%ff%2e%2e HTTP/1.1\r\nhost: localhost\r\n\r\n",
                b"get / HTTP/1.1\r\n\r\n",
                b"\r\n" * 50_000,
                b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
                b"GET / HTTP/1.1\r\n\r\n",
                b"GET /health/live HTTP/1.0\r\n\r\n",
                b"POST /score HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
                (
                    b"POST /score HTTP/1.1\r\nhost: localhost\r\nexpect:"
                    b" 100-continue\r\ncontent-length: 5\r\n\r\n"
                ),
            )
        )
    ]


ATTACKS: dict[str, Attack] = {
    "random bytes": noise,
    "mutated requests": mutated,
    "oversized heads": heads,
    "bad chunks": chunks,
    "pipelines": pipelined,
    "wrong lengths": lies,
    "hidden requests": smuggled,
    "not HTTP/1.1": not_http,
}


@dataclass
class Tally:
    """What came back."""

    statuses: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    silent: Counter[str] = field(default_factory=Counter)  # closed, or left open, with no answer
    faults: list[str] = field(default_factory=list)


def exchange(port: int, parts: list[bytes], wait_s: float, leave: bool) -> bytes:
    """Send the pieces, and read until the other side closes or is silent for so long; ``leave``: do
    not read."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            if leave:
                return b""
            connection.settimeout(wait_s)
            while len(answer) < MOST and (piece := connection.recv(65_536)):
                answer += piece
        except OSError:  # reset, or silent
            pass
    return answer


def responses(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(status, body) of each response in a row.  Raises ValueError where the bytes are no
    responses."""
    while data:
        result = re.match(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[!-9;-~]+:[^\r\n]*\r\n)*)\r\n", data)
        if result is None:
            raise ValueError(f"no response: {data[:80]!r}")
        data = data[result.end() :]
        length = re.search(rb"(?im)^content-length: *(\d+)", result[2])
        if result[1] == b"100":
            continue
        if length is None:
            raise ValueError(f"a response without length: {result[0][:200]!r}")
        body, data = data[: int(length[1])], data[int(length[1]) :]
        if len(body) < int(length[1]):
            return  # cut off by us or by a reset
        yield int(result[1]), body


def one(port: int, number: int, seed: int, wait_s: float, tally: Tally) -> None:
    """One attack; what is wrong is added to ``tally.faults``."""
    draw = random.Random(f"{seed}:{number}")
    name = draw.choice(list(ATTACKS))
    parts = ATTACKS[name](draw)
    requests = b"".join(parts).count(b"HTTP/1.1\r\n")
    answer = exchange(port, parts, wait_s, leave=draw.random() < 0.05)
    where = f"{name}, number {number} of seed {seed}, sent {b''.join(parts)[:300]!r}"
    try:
        result = list(responses(answer))
    except ValueError as error:
        tally.faults.append(f"{where}: {error}")
        return
    if not result:
        tally.silent[name] += 1
    for status, body in result:
        tally.statuses[name][status] += 1
        if status not in KNOWN:
            tally.faults.append(f"{where}: status {status}, {body[:200]!r}")
    if name == "hidden requests" and (
        len(result) > 1 or any(status == 404 for status, _ in result)
    ):
        tally.faults.append(f"{where}: the hidden request was answered: {answer[:400]!r}")
    if name in ("pipelines", "mutated requests") and len(answers_to_requests(result)) > max(
        1, requests
    ):
        tally.faults.append(f"{where}: {len(result)} answers to {requests} requests")


def answers_to_requests(answers: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """All answers but the refusal of what follows the last request, as a byte too many in a later
    packet."""
    if (
        len(answers) > 1
        and answers[-1][0] == NotHttp.status
        and json.loads(answers[-1][1])["error"]["code"] == NotHttp.code
    ):
        return answers[:-1]
    return answers


def attack(port: int, count: int, seed: int, wait_s: float = 0.3, clients: int = 24) -> Tally:
    """``count`` attacks, some at a time: most of the time they wait for what may still come."""
    tally = Tally()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda number: one(port, number, seed, wait_s, tally), range(count)))
    return tally


def risk(url: str) -> float:
    """The risk of a sound request."""
    answer = httpx.post(
        f"{url}/score", content=BODY, headers={"content-type": "application/json"}, timeout=60
    )
    return float(answer.raise_for_status().json()["data"][0]["risk"])


def series(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    line = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert line
    return float(line[1])


# --- the attacks ---

SHORT, LONG, IDLE = 300, 20_000, 2_000


service = served_of_module()


def test_nothing_that_is_sent_disturbs_the_service(service: Running) -> None:
    before = risk(service.url)
    tally = attack(service.port, SHORT, seed=7)
    assert tally.faults == []
    for name in ATTACKS:
        assert tally.statuses[name].total() + tally.silent[name] > SHORT // 20, name
    assert {200, 400, 413, 431} <= set().union(
        *tally.statuses.values()
    )  # it comes past the parser, and to its limits
    assert risk(service.url) == before
    until(lambda: service.series("requests_in_flight") == 0)
    assert httpx.get(f"{service.url}/health/live").status_code == 200


@pytest.mark.long
def test_twenty_thousand_attacks_and_two_thousand_idle_connections() -> None:
    """On the demo model, as a process of its own; prints what came back."""
    with ServeProcess("--threads", "1", HALLUTRACER_MODEL="demo") as service:
        port, before = int(service.url.rpartition(":")[2]), risk(service.url)
        attack(port, 500, seed=12)  # warm: allocators, caches
        files = series(service.url, "process_open_fds")
        memory = series(service.url, "process_resident_memory_bytes")
        tally = attack(port, LONG, seed=11)
        idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(IDLE)]
        for number, connection in enumerate(idle):
            if number % 2:  # half a head; of the others nothing
                connection.sendall(b"GET / HTTP/1.1\r\nx-" + b"a" * (number % 50))
        assert risk(service.url) == before, "another risk while idle connections wait"
        until(
            lambda: series(service.url, "process_open_fds") <= files + 20, 60
        )  # each is closed after ten seconds
        grown = series(service.url, "process_resident_memory_bytes") - memory
        for connection in idle:
            connection.close()
        assert (risk(service.url), service.process.poll()) == (before, None)
        log = service.log()
    for name, statuses in tally.statuses.items():
        print(f"{name}: {dict(sorted(statuses.items()))}, {tally.silent[name]} without an answer")
    assert tally.faults == []
    assert grown <= 64 << 20, f"memory grew by {grown / 2**20:.0f} MiB"
    assert not any(word in log for word in ("Traceback", "unhandled")), log[-2000:]


# --- the fuzzer would tell ---

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
LOST = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n", "status 500"),
        (b"hello", "no response"),
        (OK * 4, "the hidden request was answered"),
        (LOST, "the hidden request was answered"),
        (OK * 600, "answers to"),
        (b"HTTP/1.1 200 OK\r\nx y: z\r\n\r\n", "no response"),
    ],
)
def test_the_fuzzer_would_tell(monkeypatch: pytest.MonkeyPatch, reply: bytes, message: str) -> None:
    monkeypatch.setattr(sys.modules[__name__], "exchange", lambda *_, **__: reply)
    tally = attack(0, 60, seed=3, clients=1)
    assert any(message in fault for fault in tally.faults), tally.faults[:3]
