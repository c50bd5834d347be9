"""What vLLM reads of answers' own tokens, against the reference engine on the same text.

Of many at once, chunked, preempted and cached: tests/parity."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.engines.base import Sampling, Update
from service.engines.transformers.engine import TransformersEngine
from service.errors import EngineError
from service.readout import Probes, Site
from tests.engines import tiny
from tests.engines.vllm.installed import vllm_or_skip
from tests.parity import models
from tests.running import until

vllm_or_skip()

from service.engines.bridge import run_on  # noqa: E402
from service.engines.vllm.engine import VllmEngine  # noqa: E402
from tests.engines.vllm.asking import loaded, updates, wait  # noqa: E402

pytestmark = pytest.mark.long

CLOSE = 1e-5  # truth logits, as in tests/parity
SLOTS = 2
PROMPT = models.questions()[5].prompt
MANY = Sampling(max_tokens=40)
BySite = dict[Site, list[Probes]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VllmEngine]:
    with loaded(folder, models.CONTEXT, 48, slots=SLOTS, answers=True) as engine:
        assert engine.reads_answers
        yield engine


@pytest.fixture(scope="module")
def reference(folder: Path) -> TransformersEngine:
    return tiny.load_engine(folder, dtype="float32")


@pytest.fixture(scope="module")
def probes(reference: TransformersEngine) -> BySite:
    return {
        site: [tiny.probes_of(reference, site, seed, scaled=True) for seed in (7, 8, 9)]
        for site in Site
    }


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: VllmEngine) -> Iterator[None]:
    """No slot is held after a test, and the worker knows of no answer."""
    yield
    until(lambda: engine.counters.open_continuations == 0)
    until(lambda: run_on(engine.loop, engine._describe())["answering"] == 0)
    assert not any(slot.users for slot in engine.slots._slots)


def check(
    received: list[Update], prompt: Any, probes: Probes, reference: TransformersEngine
) -> int:
    """Each update has what ``reference`` reads of the answer's text so far; return how many tokens
    were read at the end."""
    completion, decoded = received[-1].completion, 0
    assert completion is not None
    for update in received:
        decoded += update.tokens
        if decoded < 2:
            assert update.answer is None
            continue
        assert update.answer is not None
        assert update.answer.tokens == decoded - 1
        written = [*prompt, *completion.token_ids[: decoded - 1]]
        [expected] = reference.score([written], [probes], last=[decoded - 1])
        logits = expected.trajectories[0]
        np.testing.assert_allclose(update.answer.trajectory, logits, rtol=0, atol=CLOSE)
    return max(0, decoded - 1)


@pytest.mark.parametrize("site", list(Site))
def test_each_update_has_the_mean_so_far(
    site: Site,
    engine: VllmEngine,
    reference: TransformersEngine,
    probes: BySite,
) -> None:
    sampling, probe = Sampling(max_tokens=9), probes[site][0]
    received = updates(engine, PROMPT, [], sampling=sampling, answer_probes=probe)
    assert check(received, PROMPT, probe, reference) > 3


def test_a_reader_that_is_late_misses_nothing(
    engine: VllmEngine, reference: TransformersEngine, probes: BySite
) -> None:
    """vLLM adds outputs that were not taken to one another, and keeps what came with the first."""
    asked = probes[Site.ATTENTION_HEAD]
    received = updates(engine, PROMPT, asked[:1], sampling=MANY, answer_probes=asked[1], pause=0.3)
    assert max(update.tokens for update in received) > 5, "it was not late"
    assert check(received, PROMPT, asked[1], reference) > 10
    assert received[0].prefill is not None
    [onset] = reference.score([PROMPT], asked[:1])
    tiny.check_same(received[0].prefill, onset, tokens=False, rtol=0, atol=CLOSE)


def test_an_answer_that_is_given_up_is_forgotten_at_once(
    engine: VllmEngine, probes: BySite
) -> None:
    probe = probes[Site.ATTENTION_HEAD][0]
    received = updates(engine, PROMPT, [], sampling=MANY, answer_probes=probe, count=5)
    assert received[-1].answer is not None
    assert not any(slot.users for slot in engine.slots._slots)


def test_its_slot_is_its_own_until_the_answer_has_ended(
    engine: VllmEngine, reference: TransformersEngine, probes: BySite
) -> None:
    """The prompt's slots are free once the prompt was read."""
    first, *others = probes[Site.ATTENTION_HEAD]

    async def meanwhile() -> list[Update]:
        stream, received = engine.answer(PROMPT, others[:1], sampling=MANY, answer_probes=first), []
        async with aclosing(stream):
            async for update in stream:
                received.append(update)
                if len(received) == 2:
                    for other in others:  # each in the place of the one before
                        async with aclosing(engine.answer(PROMPT, [other])) as prefill:
                            await anext(prefill)
                    with pytest.raises(
                        EngineError, match="probe slots at attention_head are in use"
                    ):
                        async with aclosing(engine.answer(PROMPT, others)) as prefill:
                            await anext(prefill)
        return received

    assert check(wait(engine, meanwhile()), PROMPT, first, reference) > 10


def test_an_answer_that_ends_early_is_read_as_far_as_it_went(
    engine: VllmEngine, reference: TransformersEngine, probes: BySite
) -> None:
    first, second, _ = probes[Site.ATTENTION_HEAD]
    [whole] = engine.generate([PROMPT], MANY)
    late = Sampling(max_tokens=90, until=time.monotonic())
    for sampling in (
        late,
        Sampling(max_tokens=40, stop=(whole.text[9:12],)),
        Sampling(max_tokens=2),
    ):
        received = updates(engine, PROMPT, [second], sampling=sampling, answer_probes=first)
        assert check(received, PROMPT, first, reference) >= 1
        assert received[-1].completion is not None
        assert len(received[-1].completion.token_ids) < 40
        assert received[-1].completion.stop == next(iter(sampling.stop), None)
    shut = tiny.gate(0.0)
    for more in ({"sampling": Sampling(max_tokens=1)}, {"sampling": MANY, "gate": shut}, {}):
        [update] = updates(engine, PROMPT, [second], answer_probes=first, **more)
        assert update.answer is None


def test_a_written_text_is_read_over_its_last_tokens(
    engine: VllmEngine, reference: TransformersEngine, probes: BySite
) -> None:
    prompts, last = [question.prompt for question in models.questions()[2:6]], [5, 1, 9, 3]
    every = [probes[site][0] for site in Site]
    scored, read = (
        reader.score(prompts, every, first_token=True, last=last) for reader in (engine, reference)
    )
    for ours, theirs in zip(scored, read, strict=True):  # a first token is of the last one alone
        tiny.check_same(ours, theirs, tokens=False, rtol=0, atol=CLOSE)
    with pytest.raises(EngineError, match="vllm engine gives no answer's own tokens to train on"):
        engine.extract(
            prompts, [Site.ATTENTION_HEAD], sampling=MANY, answer_site=Site.ATTENTION_HEAD
        )
