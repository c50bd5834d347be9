"""Labels by the thousand, all at once, to the real service with the demo model, which is killed in
the middle."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from benchmarks.harness import Pool, post
from hallutracer_research.demo.build import KNOWN, UNKNOWN
from service.feedback.databases import location
from service.feedback.rows import LABELS
from tests.kit.feedback import rows
from tests.kit.postgres import Postgres, postgres
from tests.serve_process import ServeProcess

AT_ONCE = 200  # prompts of one scoring request
STORED = (
    "SELECT a.request_id, a.place, l.label FROM hallutracer_labels l JOIN hallutracer_answers a "
    "ON a.uid = l.answer"
)
Said = tuple[
    str, int, str
]  # a label that somebody posts: the request's id, the answer's index, the label


def answered(url: str, count: int) -> list[Said]:
    """As many answers, each with the label that will be posted."""
    draw, labels = random.Random(1), list[Said]()
    while len(labels) < count:
        prompts = [draw.choice([KNOWN, UNKNOWN]) for _ in range(min(AT_ONCE, count - len(labels)))]
        answer = httpx.post(f"{url}/score", json={"prompt": prompts}, timeout=120)
        answer.raise_for_status()
        labels += [
            (answer.json()["id"], index, draw.choice(LABELS)) for index in range(len(prompts))
        ]
    return labels


async def post_all(
    url: str, labels: Sequence[Said], clients: int, kill: Callable[[], None] | None = None
) -> dict[Said, str]:
    """Post by so many clients at once; return the acknowledged, with their standing.

    ``kill`` is called once half of them are."""
    acknowledged: dict[Said, str] = {}
    address = urlsplit(url)
    pool = Pool(
        str(address.hostname), address.port or 0
    )  # light: httpx's thousand would take a core from the service

    async def post_share(share: Sequence[Said]) -> None:
        for one in share:
            body = json.dumps(dict(zip(("id", "index", "label"), one, strict=True))).encode()
            try:
                answer = await pool.exchange(post("/v1/feedback", body), 300)
            except OSError:
                if kill is None:  # the service's end is expected, and nothing else
                    raise
                return
            assert answer.status == 200, answer.body
            acknowledged[one] = json.loads(answer.body)["standing"]
            if kill is not None and len(acknowledged) == len(labels) // 2:
                kill()

    await asyncio.gather(*(post_share(labels[number::clients]) for number in range(clients)))
    pool.close()
    return acknowledged


@contextmanager
def a_database(with_postgres: bool) -> Iterator[tuple[str, Postgres | None]]:
    if with_postgres:
        with postgres() as server:
            yield server.schema("killed"), server
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield f"{folder}/feedback.db", None


@pytest.mark.long  # test_writer kills the thread that writes
@pytest.mark.parametrize("with_postgres", [False, True], ids=["sqlite", "postgresql"])
def test_nothing_that_was_acknowledged_is_lost(with_postgres: bool) -> None:
    """Post, kill, look, start again, post what was not acknowledged."""
    posts, clients = 10_000, 1_000
    with a_database(with_postgres) as (where, crash):
        arguments = (
            f"--feedback-db={where}",
            "--policy=observe",
            f"--max-connections={2 * clients}",
            "--deadline-s=300",
        )
        with ServeProcess(*arguments, HALLUTRACER_THREADS="1") as service:
            labels = answered(service.url, posts)

            def kill() -> None:
                service.process.kill()
                if crash is not None:
                    crash.stop()

            acknowledged_labels = asyncio.run(post_all(service.url, labels, clients, kill))
            service.process.wait(60)
        if crash is not None:
            crash.start()
        results = [
            (f"risk-{name}", index, label) for name, index, label in rows(location(where), STORED)
        ]
        assert len(set(results)) == len(results), "a label is there twice"
        assert acknowledged_labels.keys() <= set(results), "what was acknowledged is lost"
        assert (
            posts // 2 <= len(acknowledged_labels) <= len(results)
        )  # those that were not acknowledged in time may be there
        unacknowledged = [one for one in labels if one not in acknowledged_labels]
        with ServeProcess(*arguments, HALLUTRACER_THREADS="1") as service:
            again = asyncio.run(post_all(service.url, unacknowledged, clients))
        assert len(again) == len(unacknowledged)  # it goes on where it was
        assert list(again.values()).count("repeated") == len(results) - len(acknowledged_labels)
        assert len(rows(location(where), STORED)) == posts
