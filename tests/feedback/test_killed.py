"""Labels by the thousand, all at once, to the real service with the demo model, which is killed in the middle."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from hallutracer_research.demo.build import KNOWN, UNKNOWN
from service.feedback.databases import location
from service.feedback.rows import LABELS
from tests.feedback.made import rows
from tests.feedback.postgres import Postgres, postgres
from tests.serve_process import ServeProcess

AT_ONCE = 200  # prompts of one scoring request
STORED = ("SELECT a.request_id, a.place, l.label FROM hallutracer_labels l JOIN hallutracer_answers a "
          "ON a.uid = l.answer")  # fmt: skip
Said = tuple[str, int, str]  # a label that somebody posts: the request's id, the answer's index, the label
Acknowledged = list[tuple[Said, str]]  # with the standing


def answered(url: str, count: int) -> list[Said]:
    """As many answers, each with the label that will be posted."""
    draw, said = random.Random(1), list[Said]()
    while len(said) < count:
        prompts = [draw.choice([KNOWN, UNKNOWN]) for _ in range(min(AT_ONCE, count - len(said)))]
        answer = httpx.post(f"{url}/score", json={"prompt": prompts}, timeout=120)
        answer.raise_for_status()
        found = answer.json()["id"].removeprefix("risk-")
        said += [(found, index, draw.choice(LABELS)) for index in range(len(prompts))]
    return said


async def post_all(url: str, said: Sequence[Said], clients: int, stop_after: int, stop: asyncio.Event) -> Acknowledged:
    """Posted by so many clients at once, whose connections are all open by then; the acknowledged, with their standing.

    ``stop`` is set once there are ``stop_after`` of them.
    """
    acknowledged: Acknowledged = []
    shares = [share for number in range(clients) if (share := said[number::clients])]
    opening, all_open, opened = asyncio.Semaphore(200), asyncio.Event(), 0  # a listening socket's own queue is short

    async def post(share: Sequence[Said]) -> None:
        nonlocal opened
        async with opening:
            reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        opened += 1
        if opened == len(shares):
            all_open.set()
        try:
            await all_open.wait()
            for one in share:
                body = json.dumps({"id": f"risk-{one[0]}", "index": one[1], "label": one[2]}).encode()
                head = "POST /v1/feedback HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                writer.write(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
                got = await reader.readuntil(b"\r\n\r\n")
                [length] = [int(line[15:]) for line in got.lower().splitlines() if line.startswith(b"content-length:")]
                answer = json.loads(await reader.readexactly(length))
                assert got.startswith(b"HTTP/1.1 200"), answer
                acknowledged.append((one, answer["standing"]))
                if len(acknowledged) >= stop_after:
                    stop.set()
        finally:
            writer.close()

    done = await asyncio.gather(*(post(share) for share in shares), return_exceptions=True)
    stop.set()
    for error in done:  # the service's end is expected, and nothing else
        if isinstance(error, BaseException) and not isinstance(error, OSError | asyncio.IncompleteReadError):
            raise error
    return acknowledged


async def kill_it(service: ServeProcess, said: Sequence[Said], clients: int, crash: Postgres | None) -> Acknowledged:
    """The labels that were acknowledged before the service, and the database with it, was killed half-way."""
    stop = asyncio.Event()
    posting = asyncio.create_task(post_all(service.url, said, clients, len(said) // 2, stop))
    await stop.wait()
    service.process.kill()
    if crash is not None:
        crash.stop()
    return await posting


@contextmanager
def a_database(with_postgres: bool) -> Iterator[tuple[str, Postgres | None]]:
    if with_postgres:
        with postgres() as server:
            yield server.schema("killed"), server
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield f"{folder}/feedback.db", None


@pytest.mark.long  # test_writer kills the thread that writes
@pytest.mark.parametrize("clients", [1_000, 10_000])
@pytest.mark.parametrize("with_postgres", [False, True], ids=["sqlite", "postgresql"])
def test_nothing_that_was_acknowledged_is_lost(with_postgres: bool, clients: int) -> None:
    """Post, kill, look, start again, post what was not acknowledged."""
    posts = 10_000
    with a_database(with_postgres) as (where, crash):
        arguments = (f"--feedback-db={where}", "--policy=observe", f"--max-connections={clients + 100}",
                     "--deadline-s=300")  # fmt: skip
        with ServeProcess(*arguments, HALLUTRACER_THREADS="1") as service:
            said = answered(service.url, posts)
            told = dict(asyncio.run(kill_it(service, said, clients, crash)))
            service.process.wait(60)
        if crash is not None:
            crash.start()
        found = rows(location(where), STORED)
        assert len(set(found)) == len(found), "a label is there twice"
        assert told.keys() <= set(found), "what was acknowledged is lost"
        assert posts // 2 <= len(told) <= len(found)  # those that were not acknowledged in time may be there
        rest = [one for one in said if one not in told]
        with ServeProcess(*arguments, HALLUTRACER_THREADS="1") as service:
            again = asyncio.run(post_all(service.url, rest, clients, posts + 1, asyncio.Event()))
        assert len(again) == len(rest)  # it goes on where it was
        assert sum(standing == "repeated" for _, standing in again) == len(found) - len(told)
        assert len(rows(location(where), STORED)) == posts
