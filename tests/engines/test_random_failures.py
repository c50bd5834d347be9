"""A thousand failures in all that the engine does: each request is answered as alone, or told; none
twice, no leak."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from random import Random
from typing import Any

import pytest

from service.engines.base import Sampling, Turn, Update
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from tests.engines import tiny

pytestmark = pytest.mark.anyio
FAILURES, CLIENTS = 1000, 40
CHANCES = {"score": 0.5, "begin": 0.3, "pass": 0.3, "step": 0.6, "half": 0.4, "detokenize": 0.05}
SAMPLING = Sampling(max_tokens=6)
OVER = object()


class Injected(Exception):
    """What was injected."""


class Failing:
    """Makes calls of an engine fail by chance, in or before some layer; ``counts`` them by what was
    called."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.counts = Counter[str]()
        self._chance = Random(0)
        self._layer = -1
        self._on_half = False
        for layer, block in enumerate(tiny.modules(engine).blocks):
            block.register_forward_hook(lambda *_, layer=layer: self._run(layer))

    def begin(self) -> None:
        """From now on calls fail."""
        engine: Any = self.engine
        step = engine.step_together
        chunks = engine.in_chunks
        detokenize = engine.detokenize

        def failing(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **options: Any) -> Any:
                with self._at(what):
                    return work(*given, **options)

            return call

        def stepped(rows: Sequence[Any]) -> None:
            with self._at("half" if self._on_half else "step"):
                self._on_half = len(rows) > 1  # what follows is a half, if this fails
                step(rows)
                self._on_half = False

        def in_chunks(*given: Any, **options: Any) -> Iterator[Any]:
            with closing(chunks(*given, **options)) as passes:
                read = failing("pass", lambda: next(passes, OVER))
                while (item := read()) is not OVER:
                    yield item

        def detokenized(token_ids: Sequence[int]) -> str:
            if self._chance.random() < CHANCES["detokenize"]:
                self._fail("detokenize")
            return str(detokenize(token_ids))

        engine.score = failing("score", engine.score)
        engine.begin = failing("begin", engine.begin)
        engine.step_together = stepped
        engine.in_chunks = in_chunks
        engine.detokenize = detokenized

    @contextmanager
    def _at(self, what: str) -> Iterator[None]:
        self._what = what
        self._layer = self._chance.randrange(3) if self._chance.random() < CHANCES[what] else -1
        yield
        self._layer = -1

    def _run(self, layer: int) -> None:
        if layer == self._layer:
            self._layer = -1
            self._fail(self._what)

    def _fail(self, what: str) -> None:
        self.counts[what] += 1
        raise Injected(what)


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
