"""A thousand failures in all that the engine does: each request is answered as alone, or told; none
twice, no leak."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, closing
from random import Random
from typing import Any

import pytest

from service.engines.base import Sampling, Turn, Update
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from tests.engines import tiny

pytestmark = pytest.mark.anyio
FAILURES, CLIENTS = 1000, 40
CHANCES = {"score": 0.5, "begin": 0.3, "pass": 0.3, "step": 0.5, "detokenize": 0.15}
SAMPLING = Sampling(max_tokens=6)
OVER = object()


class Injected(Exception):
    """What was injected."""


class Failing:
    """Makes calls of an engine fail by chance, behind some layer or before any; ``counts`` them by
    what was called.  A step that failed is run again by halves, which fail as often."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine: Any = engine
        self.counts = Counter[str]()
        self._chance, self._called, self._layer = Random(0), "", -1
        for layer, block in enumerate(tiny.modules(engine).blocks):
            block.register_forward_hook(lambda *_, layer=layer: self._reached(layer))

    def begin(self) -> None:
        """From now on calls fail."""
        engine = self.engine
        for name, what in (("score", "score"), ("begin", "begin"), ("step_together", "step")):
            setattr(engine, name, self._failing(what, getattr(engine, name)))
        chunks, detokenize = engine.in_chunks, engine.detokenize

        def in_chunks(*given: Any, **options: Any) -> Iterator[Any]:
            with closing(chunks(*given, **options)) as passes:
                read = self._failing("pass", lambda: next(passes, OVER))
                while (item := read()) is not OVER:
                    yield item

        def detokenized(token_ids: Sequence[int]) -> str:
            self._reached(0)  # before any layer
            return str(detokenize(token_ids))

        engine.in_chunks = in_chunks
        engine.detokenize = self._failing("detokenize", detokenized)

    def _failing(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            fails = self._chance.random() < CHANCES[what]
            self._called, self._layer = what, self._chance.randrange(3) if fails else -1
            result = work(*given, **options)
            self._layer = -1
            return result

        return call

    def _reached(self, layer: int) -> None:
        if layer == self._layer:
            self._layer = -1
            self.counts[self._called] += 1
            raise Injected(self._called)


def checked(updates: Sequence[Update], answer: str | None) -> None:
    """Check what came of a request that was not told of a failure: all of it, once."""
    assert updates[0].prefill is not None
    assert not any(update.prefill for update in updates[1:])
    completions = [update.completion for update in updates if update.completion is not None]
    if answer is None:
        assert (len(updates), completions) == (1, [])
        return
    assert [completion.text for completion in completions] == [answer]
    assert updates[-1].completion is not None
    assert answer.startswith("".join(update.piece for update in updates))


async def test_a_thousand_failures_lose_nothing_but_their_own_requests() -> None:
    batch = tiny.engine(max_batch_tokens=20)
    failing, probes = Failing(batch), [tiny.probes(batch.identity.geometry)]
    prompts = tiny.prompts([3, 5, 8, 12, 17, 30, 45])  # the last two take several passes
    texts = [completion.text for completion in batch.generate(prompts, SAMPLING)]
    failing.begin()
    engine = Scheduled(batch, max_kv_tokens=2000)
    chance = Random(1)
    ended = Counter[str]()

    async def ask(client: int) -> None:
        number = chance.randrange(len(prompts))
        answers = chance.random() < 0.8
        leaves = chance.random() < 0.1
        updates: list[Update] = []
        sampling = SAMPLING if answers else None
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
            checked(updates, texts[number] if answers else None)

    async def client(number: int) -> None:
        while failing.counts.total() < FAILURES:
            await ask(number)

    await asyncio.gather(*map(client, range(CLIENTS)))
    assert engine.alive
    assert min(failing.counts[what] for what in CHANCES) > 0, failing.counts
    assert set(ended) == {"told", "left", "answered"}, ended
    queue = engine._queue
    while queue.waiting or queue.reading or queue.answering:  # those who have left
        await asyncio.sleep(0.01)
    assert batch.counters.open_continuations == 0
    await asyncio.to_thread(engine.close)
