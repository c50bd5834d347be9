"""Answers held to a schema in the embedded engine: beside others, sampled, stopped, cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from service.engines.base import Completion, Sampling
from service.engines.formats import Format
from service.engines.scheduler import Scheduled
from service.engines.transformers.decoding import only
from service.errors import RequestError
from tests.engines import tiny

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["city", "n"],
    "additionalProperties": False,
    "properties": {
        "city": {"enum": ["Paris", "Bern"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
}
PROMPT = [1, 5, 9, 40]


@pytest.fixture(scope="module")
def served() -> Iterator[Scheduled]:
    yield (scheduled := Scheduled(tiny.engine()))
    scheduled.close()


def answers(served: Scheduled, *samplings: Sampling) -> list[Any]:
    """All at once: they share the steps of decoding.  An error in an answer's stead."""
    together, all_are_there = list[int](), False
    queue: Any = served._queue
    step, next_batch = served.batch.step_together, queue.next_batch

    def noted(continuations: Any) -> None:
        together.append(len(continuations))
        step(continuations)

    def batch() -> list[Any]:
        """None before all are there: the first would have ended before the last has come."""
        nonlocal all_are_there
        all_are_there = all_are_there or len(queue.waiting) == len(samplings)
        return next_batch() if all_are_there else []

    async def ask(number: int, sampling: Sampling) -> Any:
        async with aclosing(served.answer([*PROMPT, number], [], sampling=sampling)) as updates:
            return [update async for update in updates][-1].completion

    async def every() -> list[Any]:
        requests = [ask(number, sampling) for number, sampling in enumerate(samplings)]
        return await asyncio.gather(*requests, return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.batch, "step_together", noted)
        patch.setattr(queue, "next_batch", batch)
        completions = asyncio.run(every())
    assert max(together) == len(samplings)
    return completions


def valid(completion: Completion) -> Any:
    assert completion.finish_reason == "stop"
    document = json.loads(completion.text)
    jsonschema.validate(document, SCHEMA)
    return document


def held(served: Scheduled, schema: dict[str, Any] = SCHEMA, **options: Any) -> Sampling:
    prepared = served.prepared(Format(json.dumps(schema), "response_format"))
    return Sampling(**{"max_tokens": 200} | options, format=prepared)


def test_rows_with_and_without_a_schema_share_the_steps(served: Scheduled) -> None:
    free = [Sampling(max_tokens=12, temperature=0.8, seed=seed) for seed in range(3)]
    sampled = [held(served, temperature=1.0, seed=seed) for seed in (7, 8)]
    word = held(served, {"enum": ["ab", "cd"]}, temperature=0.7, top_p=0.5, seed=9)
    beside = answers(served, *free, *sampled, word)
    for completion in beside[3:5]:
        valid(completion)
    assert beside[5].text in ('"ab"', '"cd"')
    alone = answers(served, *free)
    assert [answer.token_ids for answer in beside[:3]] == [answer.token_ids for answer in alone], (
        "theirs do not change"
    )


def test_one_prepared_format_serves_answers_of_their_own(served: Scheduled) -> None:
    shared = held(served, temperature=1.0, seed=1)
    first, other = (valid(answer) for answer in answers(served, shared, replace(shared, seed=2)))
    assert first.keys() == other.keys()


def test_an_answer_that_is_cut_or_stopped_ends_as_any(served: Scheduled) -> None:
    cut, stopped = answers(
        served, held(served, max_tokens=3), held(served, {"const": "a<stop>b"}, stop=("<stop>",))
    )
    assert (cut.finish_reason, len(cut.token_ids), cut.text[0]) == ("length", 3, "{")
    assert (stopped.finish_reason, stopped.text, stopped.stop) == ("stop", '"a', "<stop>")
    [whole] = answers(served, held(served, {"const": "ab"}, max_tokens=4))
    assert (whole.finish_reason, whole.text) == ("stop", '"ab"'), "complete with its last token"


def test_a_grammar_that_becomes_too_much_ends_its_own_answer_alone(served: Scheduled) -> None:
    broken = held(served)
    assert broken.format is not None
    assert broken.format.compiled is not None
    broken.format.compiled.close()  # as where its process has become too large
    failed, whole = answers(served, broken, held(served, {"const": "ab"}))
    assert isinstance(failed, RequestError)
    assert failed.param == "response_format"
    assert whole.text == '"ab"'
    assert served.counters.open_continuations == 0


def test_tokens_beyond_the_mask_are_not_allowed() -> None:
    logits = only(torch.zeros(20), np.packbits([0, 1] * 8, bitorder="little").tobytes())
    assert (logits == 0).nonzero()[:, 0].tolist() == [1, 3, 5, 7, 9, 11, 13, 15]
