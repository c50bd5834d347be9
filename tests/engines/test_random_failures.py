"""A thousand failures in all that the engine does: each request is answered as alone, or told; none
twice, no leak."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from random import Random
from typing import Any

import pytest

from service.engines.base import Sampling, Turn, Update
from service.engines.scheduler import Scheduled
from tests.engines import tiny

pytestmark = pytest.mark.anyio
FAILURES, CLIENTS = 1000, 40
SAMPLING = Sampling(max_tokens=6)


class Injected(Exception):
    """What was injected."""


def fail_by_chance(engine: Any, counts: Counter[str]) -> None:
    """From now on layers fail, in passes over prompts and in steps of decoding, and so does what
    decodes to text; ``counts`` says how often."""
    chance, detokenize = Random(0), engine.detokenize

    def fail(what: str, probability: float) -> None:
        if chance.random() < probability:
            counts[what] += 1
            raise Injected(what)

    def ran(layer: int, given: Any) -> None:
        work = "step" if given[0].shape[1] == 1 else "prefill"
        fail(f"{work} behind layer {layer}", 0.15)

    def detokenized(token_ids: Sequence[int]) -> str:
        fail("text", 0.05)
        return str(detokenize(token_ids))

    for layer, block in enumerate(tiny.modules(engine).blocks):
        block.register_forward_hook(lambda _, given, __, layer=layer: ran(layer, given))
    engine.detokenize = detokenized


def checked(updates: Sequence[Update], answer: str | None) -> None:
    """Check what came of a request that was not told of a failure: all of it, once."""
    first, *later = updates
    assert first.prefill is not None
    assert not any(update.prefill for update in later)
    completions = [update.completion.text for update in updates if update.completion is not None]
    assert completions == ([] if answer is None else [answer])
    assert (updates[-1].completion is None) == (later == [])
    assert (answer or "").startswith("".join(update.piece for update in updates))


async def test_a_thousand_failures_lose_nothing_but_their_own_requests() -> None:
    batch = tiny.engine(max_batch_tokens=20)
    counts, probes = Counter[str](), [tiny.probes_of(batch)]
    prompts = tiny.prompts([3, 5, 8, 12, 17, 30, 45])  # the last two take several passes
    texts = [completion.text for completion in batch.generate(prompts, SAMPLING)]
    fail_by_chance(batch, counts)
    engine = Scheduled(batch, max_kv_tokens=2000)
    chance = Random(1)
    ended = Counter[str]()

    async def ask(client: int) -> None:
        number = chance.randrange(len(prompts))
        sampling = SAMPLING if chance.random() < 0.8 else None
        leaves = chance.random() < 0.1
        updates: list[Update] = []
        turn = Turn(f"caller {client % 3}", client)
        try:
            async with aclosing(
                engine.answer(prompts[number], probes, sampling=sampling, turn=turn)
            ) as stream:
                async for update in stream:
                    updates.append(update)
                    if leaves:
                        break
        except Injected:
            ended["told, and answered" if updates and updates[-1].completion else "told"] += 1
            return
        ended["left" if leaves else "answered"] += 1
        if not leaves:
            checked(updates, texts[number] if sampling else None)

    async def client(number: int) -> None:
        while counts.total() < FAILURES:
            await ask(number)

    await asyncio.gather(*map(client, range(CLIENTS)))
    assert engine.alive
    assert len(counts) == 7, counts  # each of three layers in both, and the text
    assert set(ended) == {"told", "left", "answered"}, ended
    queue = engine._queue
    while queue.waiting or queue.reading or queue.answering:  # those who have left
        await asyncio.sleep(0.01)
    assert batch.counters.open_continuations == 0
    await asyncio.to_thread(engine.close)
