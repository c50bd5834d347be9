"""Answers of a running service, kept in a record: what was asked once is not asked again.

The service is started for the first request that the record lacks, or one that already runs is used
(``--url``)."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tqdm import tqdm

from benchmarks.harness import ServiceProcess
from service.access.routes import CHAT_ROUTE
from service.data.judges import make_judge
from service.data.labels import verdict_on
from service.data.options import ABSTAIN, JudgeOptions
from service.data.rows import mark_of
from service.data.run_folder import AppendLog
from service.engines.thoughts import spoken
from service.errors import RunMismatch

Line = dict[str, Any]  # of a record: one request and what came of it
Body = dict[str, Any]  # of POST /score
Ask = Callable[[Body], Line]
Message = dict[str, str]
One = TypeVar("One")
Found = TypeVar("Found")

GENERATE = {"max_tokens": 24, "temperature": 0.0}
_ABSTAINS = re.compile(ABSTAIN)
_JUDGE = make_judge(JudgeOptions())


@dataclass(frozen=True)
class Job:
    """A request.  ``accepted``: answers to judge by, none where nothing is judged; ``known``: the
    line's other keys."""

    id: str
    body: Body
    accepted: Sequence[str] = ()
    known: Line = field(default_factory=dict)


class Answers:
    """A line for each job: the record's, else the service's.  Safe in threads."""

    def __init__(self, start: Callable[[], Ask], log: AppendLog) -> None:
        self._start, self._log = start, log
        self._lines: dict[str, Line] = {line["id"]: line for line in log.read()}
        self._digest = next(
            (line["bundle"] for line in self._lines.values() if "bundle" in line), None
        )
        self._ask: Ask | None = None
        self._lock = threading.Lock()

    def __call__(self, job: Job) -> Line:
        """Return the job's line.  Raises RunMismatch where the record is of other requests or of
        another bundle."""
        mark = mark_of({"body": job.body})
        if (line := self._lines.get(job.id)) is not None:
            if line["mark"] != mark:
                raise RunMismatch(
                    f"{self._log.path} has another request under {job.id!r}: name another record"
                )
            return line
        with self._lock:
            ask = self._ask = self._ask or self._start()
        line = {"id": job.id, "mark": mark, **job.known, **ask(job.body)}
        if job.accepted and line.get("answer") is not None:
            line["verdict"] = verdict_on(
                spoken(line["answer"]), "", job.accepted, _JUDGE, _ABSTAINS
            )
        with self._lock:
            digest = self._digest = self._digest or line.get("bundle")
            if line.get("bundle", digest) != digest:
                raise RunMismatch(
                    f"{self._log.path} has answers of bundle {digest}, not of {line['bundle']}"
                )
            self._log.append([line])
            self._lines[job.id] = line
        return line


def together(
    one: Callable[[One], Found], many: Sequence[One], what: str, workers: int
) -> list[Found]:
    """Return ``one`` of each, a few at a time, in their order."""
    with ThreadPoolExecutor(workers) as pool:
        return list(tqdm(pool.map(one, many), what, total=len(many), mininterval=2))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add which service answers, and where its answers are kept."""
    parser.add_argument(
        "--url", help="one that runs and lets callers choose policy (and bundle); else one starts"
    )
    parser.add_argument("--model", default="smollm2", help="of the service that is started")
    parser.add_argument("--bundle", help="else the service's first")
    parser.add_argument("--store", help="of the service that is started")
    parser.add_argument(
        "--record", type=Path, required=True, help="JSONL, a line for each request as it comes"
    )
    parser.add_argument("--workers", type=int, default=4, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)


@contextmanager
def answers(options: argparse.Namespace, *, chat: bool = False) -> Iterator[Answers]:
    """Yield the answers by ``add_options``'s choices; ``chat``: of the route for chats, else of
    ``/score``.

    SIGTERM ends the service, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as stack:

        def start() -> Ask:
            url = options.url
            if not url:
                own = {name: vars(options)[name] for name in ("model", "bundle", "store")}
                chosen = [f"--{name}={value}" for name, value in own.items() if value]
                service = ServiceProcess(*chosen, "--deadline-s", "300", HALLUTRACER_MODEL="")
                url = stack.enter_context(service).url
            client = stack.enter_context(httpx.Client(base_url=url, timeout=600))
            if chat:
                model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
                return partial(post_chat, client, model, options.bundle)
            return partial(post, client, {"bundle": options.bundle} if options.bundle else {})

        yield Answers(start, stack.enter_context(closing(AppendLog(options.record))))


def post(client: httpx.Client, more: Body, body: Body) -> Line:
    """Ask the service.  What it refuses because of the conversation, such as its length, is a line
    with the code. Raises RuntimeError for any other refusal."""
    response = client.post("/score", json=body | more)
    if response.status_code == 200:
        return line_of(response.json())
    return _refusal(response)


def post_chat(client: httpx.Client, model: str, bundle: str | None, body: Body) -> Line:
    """Ask the service as clients of OpenAI's API do, under a policy that withholds nothing.  Raises
    as ``post`` does.

    ``departs``: what the risk says of an answer that was decoded otherwise than those of
        training."""
    chosen = {"hallutracer_policy": "observe"} | ({"hallutracer_bundle": bundle} if bundle else {})
    response = client.post(CHAT_ROUTE, json={"model": model, "vllm_xargs": chosen} | body)
    if response.status_code != 200:
        return _refusal(response)
    reply = response.json()
    note = reply["hallutracer"]
    said = {
        "answer": reply["choices"][0]["message"]["content"],
        "departs": note["data"][0].get("decoding"),
    }
    return line_of(note) | said


def _refusal(response: httpx.Response) -> Line:
    """Return the line of a refused conversation.  Raises RuntimeError for any other refusal."""
    try:
        error = response.json()["error"]
    except (ValueError, LookupError):
        error = {}
    if response.status_code in (413, 422) and str(error.get("param")).startswith(
        ("messages", "prompt")
    ):
        return {"refused": error["code"]}
    raise RuntimeError(
        f"POST {response.request.url.path} answered {response.status_code}: {response.text[:300]}"
    )


def line_of(answer: dict[str, Any]) -> Line:
    [one] = answer["data"]
    completion = one.get("completion")
    return {
        "bundle": answer["bundle"]["digest"],
        "risk": one["risk"],
        "threshold": one["threshold"],
        "flagged": one["flagged"],
        "decision": one["decision"],
        "outside": one.get("outside_training"),
        "applies": one.get("applies"),
        "answer": None if completion is None else completion["text"],
    }


def user(text: str) -> Message:
    return {"role": "user", "content": text}
