"""The soak's requests and the expected answers, which are tallied for comparison with the server's
metrics."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.harness import events, post, question, require

Content = dict[str, Any]


@dataclass
class Tally:
    """Totals over the answers with status 200, and the error codes of the others."""

    prompts: Counter[str] = field(default_factory=Counter)  # by decision
    flagged: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)

    def add(self, answer: dict[str, Any], usage: dict[str, int]) -> None:
        for risk in answer["data"]:
            self.prompts[risk["decision"]] += 1
            self.flagged += bool(risk["flagged"])
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]


Verify = Callable[
    [int, bytes, Tally], None
]  # status, body; raises Unexpected, ValueError or LookupError


@dataclass(frozen=True)
class Request:
    """Bytes to send, and the check of the answer."""

    kind: str
    data: bytes
    verify: Verify


class Traffic:
    """Random requests of all kinds, from a seed."""

    def __init__(self, bundle: str, max_tokens: int, seed: int) -> None:
        self._bundle, self._max_tokens = bundle, max_tokens  # the model's context
        self._random = random.Random(seed)
        self._kinds: list[tuple[int, str, Callable[[], tuple[bytes, Verify]]]] = [
            (20, "score, text", lambda: self._score({"prompt": self._text()}, 1)),
            (10, "score, list", self._list),
            (10, "score, messages", lambda: self._score({"messages": self._messages()}, 1)),
            (10, "score, input_ids", lambda: self._score({"input_ids": self._ids()}, 1)),
            (
                5,
                "score, lists of input_ids",
                lambda: self._score({"input_ids": [self._ids(), self._ids()]}, 2),
            ),
            (5, "score, trajectory", self._trajectory),
            (10, "generate", lambda: self._generate({"prompt": self._text()}, 1)),
            (4, "generate, sampled list", self._sampled),
            (6, "generate, gated", self._gated),
            (10, "stream", lambda: self._stream(1.0)),
            (4, "stream, gated", lambda: self._stream(0.0)),
            (6, "bad request", self._bad),
        ]

    def next(self) -> Request:
        _, name, make = self._random.choices(self._kinds, [weight for weight, _, _ in self._kinds])[
            0
        ]
        return Request(name, *make())

    def broken_off(self, bundle: str) -> bytes:
        """Return a long generation or stream for ``bundle``, to be hung up on."""
        content = {
            "input_ids": self._ids(),
            "bundle": bundle,
            "threshold": 1.0,
            "generate": {"max_tokens": 100},
        }
        return _post(content | ({"stream": True} if self._random.random() < 0.5 else {}))

    def _text(self) -> str:
        return question(self._random)

    def _ids(self) -> list[int]:
        return [self._random.randrange(10, 4_000) for _ in range(self._random.randint(16, 96))]

    def _messages(self) -> list[dict[str, str]]:
        turns = [{"role": "system", "content": "Be brief."}] if self._random.random() < 0.5 else []
        return [*turns, {"role": "user", "content": self._text()}]

    def _own(self, content: Content) -> bytes:
        return _post(content | {"bundle": self._bundle})

    def _score(self, content: Content, prompts: int) -> tuple[bytes, Verify]:
        return self._own(content), partial(_expect_scores, prompts)

    def _list(self) -> tuple[bytes, Verify]:
        texts = [self._text() for _ in range(self._random.randint(2, 8))]
        return self._score({"prompt": texts}, len(texts))

    def _trajectory(self) -> tuple[bytes, Verify]:
        return self._own(
            {"prompt": self._text(), "include": ["trajectory", "running_mean"]}
        ), _expect_trajectory

    def _generate(self, content: Content, prompts: int, **sampling: Any) -> tuple[bytes, Verify]:
        most = self._random.randint(1, 24)
        full = content | {"threshold": 1.0, "generate": {"max_tokens": most, **sampling}}
        return self._own(full), partial(_expect_completions, prompts, most)

    def _sampled(self) -> tuple[bytes, Verify]:
        texts = [self._text() for _ in range(self._random.randint(2, 4))]
        seed = self._random.randrange(99)
        return self._generate({"prompt": texts}, len(texts), temperature=0.8, top_p=0.9, seed=seed)

    def _gated(self) -> tuple[bytes, Verify]:
        return self._own(
            {"prompt": self._text(), "threshold": 0.0, "generate": {"max_tokens": 16}}
        ), _expect_gated

    def _stream(self, threshold: float) -> tuple[bytes, Verify]:
        content = {
            "prompt": self._text(),
            "threshold": threshold,
            "stream": True,
            "generate": {"max_tokens": 16},
        }
        return self._own(content), _expect_gated_stream if threshold == 0 else _expect_stream

    def _bad(self) -> tuple[bytes, Verify]:
        text = self._text()
        cases: list[tuple[Content, int]] = [
            ({}, 422),
            ({"prompt": text, "input_ids": [1, 2]}, 422),
            ({"prompt": text, "no_such_field": 1}, 422),
            ({"prompt": text, "threshold": 1.5}, 422),
            ({"prompt": []}, 422),
            ({"input_ids": [1, 10**9]}, 422),
            ({"prompt": text, "stream": True}, 422),
            ({"prompt": text, "bundle": "no-such-bundle"}, 404),
            ({"prompt": text, "model": "no-such-model"}, 404),
            ({"input_ids": [11] * (self._max_tokens + 1)}, 413),
        ]
        made = [
            (post("/score", b'{"prompt": "no end'), 400),
            *((_post(content), status) for content, status in cases),
        ]
        data, status = self._random.choice(made)
        return data, partial(_expect_error, status)


def _post(content: Content) -> bytes:
    return post("/score", json.dumps(content).encode())


def _answer(status: int, body: bytes, prompts: int) -> dict[str, Any]:
    require(status == 200, f"status {status}: {body[:200]!r}")
    answer: dict[str, Any] = json.loads(body)
    _check_data(answer, prompts)
    return answer


def _check_data(answer: dict[str, Any], prompts: int) -> None:
    require([one["index"] for one in answer["data"]] == list(range(prompts)), answer)
    require(all(0.0 <= one["risk"] <= 1.0 for one in answer["data"]), answer)
    require(
        all(one["flagged"] == (one["risk"] >= one["threshold"]) for one in answer["data"]), answer
    )


def _expect_scores(prompts: int, status: int, body: bytes, tally: Tally) -> None:
    answer = _answer(status, body, prompts)
    require(not any("completion" in one for one in answer["data"]), answer)
    tally.add(answer, answer["usage"])


def _expect_trajectory(status: int, body: bytes, tally: Tally) -> None:
    answer = _answer(status, body, 1)
    (one,) = answer["data"]
    require(len(one["trajectory"]) == len(one["running_mean"]) > 1, answer)
    require(abs(one["running_mean"][-1] - one["depth_mean"]) < 1e-6, answer)
    tally.add(answer, answer["usage"])


def _expect_completions(prompts: int, most: int, status: int, body: bytes, tally: Tally) -> None:
    answer = _answer(status, body, prompts)
    counts = [
        one["completion"]["completion_tokens"]
        for one in answer["data"]
        if one["decision"] == "continue"
    ]
    require(len(counts) == prompts and all(1 <= count <= most for count in counts), answer)
    require(answer["usage"]["completion_tokens"] == sum(counts), answer)
    tally.add(answer, answer["usage"])


def _expect_gated(status: int, body: bytes, tally: Tally) -> None:
    answer = _answer(status, body, 1)
    (one,) = answer["data"]
    require(one["decision"] == "abstain" and "completion" not in one, answer)
    require(answer["usage"]["completion_tokens"] == 0, answer)
    tally.add(answer, answer["usage"])


def _expect_stream(status: int, body: bytes, tally: Tally) -> None:
    require(status == 200, f"status {status}: {body[:200]!r}")
    first, *chunks = events(body)
    _check_data(first, 1)
    require(bool(chunks) and all(chunk["object"] == "completion.chunk" for chunk in chunks), chunks)
    require([chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1), chunks)
    require(chunks[-1]["finish_reason"] in ("stop", "length"), chunks)
    require(
        first["usage"]["completion_tokens"] == 0 < chunks[-1]["usage"]["completion_tokens"] <= 16,
        chunks,
    )
    tally.add(first, chunks[-1]["usage"])


def _expect_gated_stream(status: int, body: bytes, tally: Tally) -> None:
    require(status == 200, f"status {status}: {body[:200]!r}")
    (only,) = events(body)
    _check_data(only, 1)
    require(only["data"][0]["decision"] == "abstain", only)
    tally.add(only, only["usage"])


def _expect_error(expected: int, status: int, body: bytes, tally: Tally) -> None:
    require(status == expected, f"status {status}, expected {expected}: {body[:200]!r}")
    error = json.loads(body)["error"]
    require(error["message"] and error["type"] == "invalid_request_error", error)
    tally.codes[error["code"]] += 1
