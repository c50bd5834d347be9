"""The soak's requests and the expected answers, which are tallied for comparison with the server's metrics."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import CITIES, FORMS, post


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


class Unexpected(Exception):
    """Not the expected answer."""


def require(condition: bool, found: object) -> None:
    """Raise Unexpected with what was found, unless ``condition``."""
    if not condition:
        raise Unexpected(str(found))


Verify = Callable[[int, bytes, Tally], None]  # status, body; raises Unexpected, ValueError or LookupError


@dataclass(frozen=True)
class Request:
    """Bytes to send, and the check of the answer."""

    kind: str
    data: bytes
    verify: Verify


class Traffic:
    """Random requests of all kinds, from a seed."""

    def __init__(self, bundle: str, max_tokens: int, seed: int) -> None:
        self._bundle = bundle
        self._max_tokens = max_tokens  # the model's context
        self._random = random.Random(seed)
        self._kinds: list[tuple[int, str, Callable[[], tuple[bytes, Verify]]]] = [
            (20, "score, text", lambda: self._score({"prompt": self._text()}, 1)), (10, "score, list", self._list),
            (10, "score, messages", lambda: self._score({"messages": self._messages()}, 1)),
            (10, "score, input_ids", lambda: self._score({"input_ids": self._ids()}, 1)),
            (5, "score, lists of input_ids", lambda: self._score({"input_ids": [self._ids(), self._ids()]}, 2)),
            (5, "score, trajectory", self._trajectory),
            (10, "generate", lambda: self._generate({"prompt": self._text()}, 1)),
            (4, "generate, sampled list", self._sampled), (6, "generate, gated", self._gated),
            (10, "stream", lambda: self._stream(1.0)), (4, "stream, gated", lambda: self._stream(0.0)),
            (6, "bad request", self._bad),
        ]  # fmt: skip

    def kinds(self) -> list[str]:
        return [name for _, name, _ in self._kinds]

    def next(self) -> Request:
        weights = [weight for weight, _, _ in self._kinds]
        _, name, make = self._random.choices(self._kinds, weights)[0]
        return Request(name, *make())

    def broken_off(self, bundle: str) -> bytes:
        """A long generation or stream for ``bundle``, to be hung up on."""
        content = {"input_ids": self._ids(), "bundle": bundle, "threshold": 1.0, "generate": {"max_tokens": 100}}
        return _post(content | ({"stream": True} if self._random.random() < 0.5 else {}))

    def _text(self) -> str:
        return self._random.choice(FORMS).format(self._random.choice(CITIES))

    def _ids(self) -> list[int]:
        return [self._random.randrange(10, 4_000) for _ in range(self._random.randint(16, 96))]

    def _messages(self) -> list[dict[str, str]]:
        turns = [{"role": "system", "content": "Be brief."}] if self._random.random() < 0.5 else []
        return [*turns, {"role": "user", "content": self._text()}]

    def _score(self, content: dict[str, Any], prompts: int) -> tuple[bytes, Verify]:
        return _post(content | {"bundle": self._bundle}), _expect_scores(prompts)

    def _list(self) -> tuple[bytes, Verify]:
        texts = [self._text() for _ in range(self._random.randint(2, 8))]
        return self._score({"prompt": texts}, len(texts))

    def _trajectory(self) -> tuple[bytes, Verify]:
        content = {"prompt": self._text(), "bundle": self._bundle, "include": ["trajectory", "running_mean"]}
        return _post(content), _expect_trajectory

    def _generate(self, content: dict[str, Any], prompts: int, **sampling: Any) -> tuple[bytes, Verify]:
        most = self._random.randint(1, 24)
        full = content | {"bundle": self._bundle, "threshold": 1.0, "generate": {"max_tokens": most, **sampling}}
        return _post(full), _expect_completions(prompts, most)

    def _sampled(self) -> tuple[bytes, Verify]:
        texts = [self._text() for _ in range(self._random.randint(2, 4))]
        return self._generate(
            {"prompt": texts}, len(texts), temperature=0.8, top_p=0.9, seed=self._random.randrange(99)
        )

    def _gated(self) -> tuple[bytes, Verify]:
        content = {"prompt": self._text(), "bundle": self._bundle, "threshold": 0.0, "generate": {"max_tokens": 16}}
        return _post(content), _expect_gated

    def _stream(self, threshold: float) -> tuple[bytes, Verify]:
        content = {"prompt": self._text(), "bundle": self._bundle, "threshold": threshold, "stream": True}
        return _post(
            content | {"generate": {"max_tokens": 16}}
        ), _expect_gated_stream if threshold == 0 else _expect_stream

    def _bad(self) -> tuple[bytes, Verify]:
        text = self._text()
        cases: list[tuple[bytes, int]] = [
            (b'{"prompt": "no end', 400),
            (_body({}), 422),
            (_body({"prompt": text, "input_ids": [1, 2]}), 422),
            (_body({"prompt": text, "no_such_field": 1}), 422),
            (_body({"prompt": text, "threshold": 1.5}), 422),
            (_body({"prompt": []}), 422),
            (_body({"input_ids": [1, 10**9]}), 422),
            (_body({"prompt": text, "stream": True}), 422),
            (_body({"prompt": text, "bundle": "no-such-bundle"}), 404),
            (_body({"prompt": text, "model": "no-such-model"}), 404),
            (_body({"input_ids": [11] * (self._max_tokens + 1)}), 413),
        ]
        content, status = self._random.choice(cases)
        return post("/score", content), _expect_error(status)


def _body(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _post(content: dict[str, Any]) -> bytes:
    return post("/score", _body(content))


def _answer(status: int, body: bytes, prompts: int) -> dict[str, Any]:
    require(status == 200, f"status {status}: {body[:200]!r}")
    answer: dict[str, Any] = json.loads(body)
    _check_data(answer, prompts)
    return answer


def _check_data(answer: dict[str, Any], prompts: int) -> None:
    require([one["index"] for one in answer["data"]] == list(range(prompts)), answer)
    require(all(0.0 <= one["risk"] <= 1.0 for one in answer["data"]), answer)
    require(all(one["flagged"] == (one["risk"] >= one["threshold"]) for one in answer["data"]), answer)


def _expect_scores(prompts: int) -> Verify:
    def verify(status: int, body: bytes, tally: Tally) -> None:
        answer = _answer(status, body, prompts)
        require(not any("completion" in one for one in answer["data"]), answer)
        tally.add(answer, answer["usage"])

    return verify


def _expect_trajectory(status: int, body: bytes, tally: Tally) -> None:
    answer = _answer(status, body, 1)
    (one,) = answer["data"]
    require(len(one["trajectory"]) == len(one["running_mean"]) > 1, answer)
    require(abs(one["running_mean"][-1] - one["depth_mean"]) < 1e-6, answer)
    tally.add(answer, answer["usage"])


def _expect_completions(prompts: int, most: int) -> Verify:
    def verify(status: int, body: bytes, tally: Tally) -> None:
        answer = _answer(status, body, prompts)
        counts = [one["completion"]["completion_tokens"] for one in answer["data"] if one["decision"] == "continue"]
        require(len(counts) == prompts, answer)
        require(all(1 <= count <= most for count in counts), answer)
        require(answer["usage"]["completion_tokens"] == sum(counts), answer)
        tally.add(answer, answer["usage"])

    return verify


def _expect_gated(status: int, body: bytes, tally: Tally) -> None:
    answer = _answer(status, body, 1)
    (one,) = answer["data"]
    require(one["decision"] == "abstain", answer)
    require("completion" not in one, answer)
    require(answer["usage"]["completion_tokens"] == 0, answer)
    tally.add(answer, answer["usage"])


def events(body: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream; raises Unexpected where it does not end with [DONE] or holds an error."""
    parts = body.decode().split("\n\n")
    require(parts[-1] == "", body[-200:])
    require(parts[-2] == "data: [DONE]", body[-200:])
    found = [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]
    require(not any("error" in event for event in found), found)
    require(found[0]["object"] == "risk.list", found[0])
    return found


def _expect_stream(status: int, body: bytes, tally: Tally) -> None:
    require(status == 200, f"status {status}: {body[:200]!r}")
    first, *chunks = events(body)
    _check_data(first, 1)
    require(bool(chunks), chunks)
    require(all(chunk["object"] == "completion.chunk" for chunk in chunks), chunks)
    require([chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1), chunks)
    require(chunks[-1]["finish_reason"] in ("stop", "length"), chunks)
    require(first["usage"]["completion_tokens"] == 0 < chunks[-1]["usage"]["completion_tokens"] <= 16, chunks)
    tally.add(first, chunks[-1]["usage"])


def _expect_gated_stream(status: int, body: bytes, tally: Tally) -> None:
    require(status == 200, f"status {status}: {body[:200]!r}")
    (only,) = events(body)
    _check_data(only, 1)
    require(only["data"][0]["decision"] == "abstain", only)
    tally.add(only, only["usage"])


def _expect_error(expected: int) -> Verify:
    def verify(status: int, body: bytes, tally: Tally) -> None:
        require(status == expected, f"status {status}, expected {expected}: {body[:200]!r}")
        error = json.loads(body)["error"]
        require(error["message"], error)
        require(error["type"] == "invalid_request_error", error)
        tally.codes[error["code"]] += 1

    return verify
