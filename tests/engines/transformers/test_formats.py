"""Answers held to a schema in the embedded engine: beside others, sampled, stopped, cut."""

from __future__ import annotations

import asyncio
import json
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
from service.engines.transformers.engine import TransformersEngine
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
def engine() -> TransformersEngine:
    return tiny.engine()


def answers(engine: TransformersEngine, *samplings: Sampling) -> list[Completion]:
    """All at once, through the scheduler: they share the steps of decoding."""
    served = Scheduled(engine)
    together = list[int]()
    arrived = list[Any]()
    step = engine.step_together
    add = served._queue.add
    next_batch = served._queue.next_batch

    def noted(continuations: Any) -> None:
        together.append(len(continuations))
        step(continuations)

    def added(request: Any) -> None:
        arrived.append(request)
        add(request)

    async def ask(number: int, sampling: Sampling) -> Completion:
        completions: Completion | None = None
        prompt = [*PROMPT, number]
        async with aclosing(served.answer(prompt, [], sampling=sampling)) as updates:
            async for update in updates:
                completions = update.completion or completions
        assert completions is not None
        return completions

    async def every() -> list[Completion]:
        return await asyncio.gather(
            *(ask(number, sampling) for number, sampling in enumerate(samplings))
        )

    engine.step_together = noted  # type: ignore[method-assign]
    waiting: Any = served._queue
    waiting.add = added
    # Until all are there none begins: the first would have ended before the last has come.
    waiting.next_batch = lambda: next_batch() if len(arrived) == len(samplings) else []
    try:
        completions = asyncio.run(every())
    finally:
        del engine.step_together
        served._closed = True
        with served._changed:
            served._changed.notify()
        assert served._thread is not None
        served._thread.join()
    assert max(together) == len(samplings)
    return completions


def valid(completion: Completion) -> Any:
    assert completion.finish_reason == "stop"
    document = json.loads(completion.text)
    jsonschema.validate(document, SCHEMA)
    return document


def held(engine: TransformersEngine, schema: dict[str, Any] = SCHEMA, **options: Any) -> Sampling:
    prepared = engine.prepared(Format(json.dumps(schema), "response_format"))
    return Sampling(**{"max_tokens": 200} | options, format=prepared)


def test_rows_with_and_without_a_schema_share_the_steps(engine: TransformersEngine) -> None:
    free = [Sampling(max_tokens=12, temperature=0.8, seed=seed) for seed in range(3)]
    sampled = [held(engine, temperature=1.0, seed=seed) for seed in (7, 8)]
    word = held(engine, {"enum": ["ab", "cd"]}, temperature=0.7, top_p=0.5, seed=9)
    beside = answers(engine, *free, *sampled, word)
    for completion in beside[3:5]:
        valid(completion)
    assert beside[5].text in ('"ab"', '"cd"')
    alone = answers(engine, *free)
    assert [answer.token_ids for answer in beside[:3]] == [answer.token_ids for answer in alone], (
        "theirs do not change"
    )


def test_one_prepared_format_serves_answers_of_their_own(engine: TransformersEngine) -> None:
    shared = held(engine, temperature=1.0, seed=1)
    first, other = (valid(answer) for answer in answers(engine, shared, replace(shared, seed=2)))
    assert first.keys() == other.keys()


def test_an_answer_that_is_cut_or_stopped_ends_as_any(engine: TransformersEngine) -> None:
    cut, stopped = answers(
        engine, held(engine, max_tokens=3), held(engine, {"const": "a<stop>b"}, stop=("<stop>",))
    )
    assert (cut.finish_reason, len(cut.token_ids), cut.text[0]) == ("length", 3, "{")
    assert (stopped.finish_reason, stopped.text, stopped.stop) == ("stop", '"a', "<stop>")
    [whole] = answers(engine, held(engine, {"const": "ab"}, max_tokens=4))
    assert (whole.finish_reason, whole.text) == ("stop", '"ab"'), "complete with its last token"


def test_a_grammar_that_becomes_too_much_ends_its_own_answer_alone(
    engine: TransformersEngine,
) -> None:
    broken = held(engine)
    assert broken.format is not None
    assert broken.format.compiled is not None
    broken.format.compiled.close()  # as where its process has become too large
    served = Scheduled(engine)

    async def both() -> list[Any]:
        async def ask(sampling: Sampling) -> Any:
            async with aclosing(served.answer(PROMPT, [], sampling=sampling)) as updates:
                return [update async for update in updates][-1].completion

        return await asyncio.gather(
            ask(broken), ask(held(engine, {"const": "ab"})), return_exceptions=True
        )

    failed, whole = asyncio.run(both())
    assert isinstance(failed, RequestError)
    assert failed.param == "response_format"
    assert whole.text == '"ab"'
    assert engine.counters.open_continuations == 0


def test_tokens_beyond_the_mask_are_not_allowed() -> None:
    logits = only(torch.zeros(20), np.packbits([0, 1] * 8, bitorder="little").tobytes())
    assert (logits == 0).nonzero()[:, 0].tolist() == [1, 3, 5, 7, 9, 11, 13, 15]
