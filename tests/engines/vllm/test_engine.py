"""``VllmEngine`` on the demo model: one engine for the module, whose last test kills it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from service.demo import MODEL_DIR
from service.engines.base import Engine, Sampling
from service.engines.formats import Format
from service.engines.transformers.engine import TransformersEngine
from service.errors import EmptyPrompt, EngineError, PromptTooLong, RequestError
from service.policies.guard import GATE
from service.readout import Probes, Site
from service.scoring import Scorer
from tests.engines import tiny
from tests.engines.vllm.installed import vllm_or_skip
from tests.matching import SMALL_TALK, contextual_bundle
from tests.running import until

vllm_or_skip()

from service.engines.vllm.engine import VllmEngine  # noqa: E402
from tests.engines.vllm.asking import loaded, updates, wait  # noqa: E402

CONTEXT = 128
PROMPTS = tiny.prompts([1, 30, 7, 90, 30, 126], seed=4)
OPEN, SHUT = map(tiny.gate, (1.0, 0.0))


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    with loaded(MODEL_DIR, CONTEXT, 32, slots=2, rows=True) as engine:
        yield engine
    engine.close()  # safe to call twice
    with pytest.raises(EngineError, match="closed"):
        engine.score(PROMPTS, [])


@pytest.fixture(scope="module")
def reference() -> TransformersEngine:
    return tiny.load_engine(MODEL_DIR, dtype="float32")


@pytest.fixture(scope="module")
def probes(reference: TransformersEngine) -> list[Probes]:
    return [tiny.probes_of(reference, site, seed, scaled=True) for seed in (2, 3) for site in Site]


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest, engine: VllmEngine) -> Iterator[None]:
    """After each test no request runs in our client, nor in vLLM a short time later, and every slot
    can be leased."""
    yield
    if "killed" in request.node.name:
        return

    def running() -> list[float]:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        samples = [
            sample
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name in names
        ]
        assert samples, "vLLM's metrics have other names"
        return [sample.value for sample in samples]

    until(lambda: engine.counters.open_continuations == 0 and not any(running()), 20)
    probes = [tiny.probes_of(engine, site, seed) for seed in (20, 21) for site in Site]
    assert tiny.logits(engine, PROMPTS[:1], probes).shape[1] == 4


def test_the_identity_equals_the_references(engine: Engine, reference: TransformersEngine) -> None:
    theirs = replace(reference.identity, max_tokens=CONTEXT)
    assert (engine.identity, engine.max_batch_tokens) == (theirs, 32)


def test_scores_are_the_references(
    engine: VllmEngine, reference: TransformersEngine, probes: list[Probes]
) -> None:
    results = engine.score(PROMPTS, probes, first_token=True)
    expected = reference.score(PROMPTS, probes, first_token=True)
    for ours, theirs in zip(results, expected, strict=True):  # activations are ~10
        tiny.check_same(ours, theirs, tokens=True, rtol=0, atol=1e-4, first_atol=2e-5)
    assert engine.score([], probes) == []
    assert engine.score(PROMPTS[:1], probes)[0].first_token is None


def test_activations_are_the_references(engine: VllmEngine, reference: TransformersEngine) -> None:
    for sites in (list(Site), [Site.RESIDUAL_STREAM]):
        here, there = engine.extract(PROMPTS, sites), reference.extract(PROMPTS, sites)
        assert list(here.activations) == sites
        for site in sites:
            np.testing.assert_allclose(
                here.activations[site], there.activations[site], rtol=0, atol=2e-4
            )
        assert [first.token for first in here.first_tokens] == [
            first.token for first in there.first_tokens
        ]
    before, sampling = engine.counters.prefills, Sampling(max_tokens=9)
    answered = engine.extract(PROMPTS, list(Site), sampling=sampling)
    assert engine.counters.prefills == before + len(PROMPTS)
    assert list(answered.completions) == engine.generate(PROMPTS, sampling)
    for site in Site:
        expected_rows = reference.extract(PROMPTS, [site]).activations[site]
        np.testing.assert_allclose(answered.activations[site], expected_rows, rtol=0, atol=2e-4)
    empty, expected = (loaded.extract([], list(Site)) for loaded in (engine, reference))
    assert (
        empty.activations[Site.ATTENTION_HEAD].shape
        == expected.activations[Site.ATTENTION_HEAD].shape
    )
    assert empty.first_tokens == ()


def test_generated_and_streamed_answers_are_the_same_and_the_references(
    engine: VllmEngine, reference: TransformersEngine, probes: list[Probes]
) -> None:
    sampling = Sampling(max_tokens=9)
    generated = engine.generate(PROMPTS[1:4], sampling)
    expected_answers = reference.generate(PROMPTS[1:4], sampling)
    assert [answer.token_ids for answer in generated] == [
        answer.token_ids for answer in expected_answers
    ]
    for prompt, expected in zip(PROMPTS[1:4], generated, strict=True):
        first, *later = received = updates(engine, prompt, probes[:1], sampling=sampling)
        assert first.prefill is not None
        # A block has 128 tokens, as many as the context.
        assert 0 <= first.cached_tokens < len(prompt)
        assert (first.queue_s >= 0.0, first.prefill_s > 0.0) == (True, True)
        assert all(update.prefill is None for update in later)
        completions = [update.completion for update in received]
        assert completions == [None] * len(later) + [expected]
        assert "".join(update.piece for update in received) == expected.text
        assert sum(update.tokens for update in received) == len(expected.token_ids)
    # It begins where the context ends.
    [answer] = engine.generate([PROMPTS[-1]], Sampling(max_tokens=50))
    assert (len(answer.token_ids), answer.finish_reason) == (CONTEXT - len(PROMPTS[-1]), "length")
    *_, last = updates(engine, PROMPTS[1], probes, sampling=Sampling(max_tokens=90, until=0.0))
    assert last.completion is not None  # it ends at its time as one of full length
    assert last.completion.finish_reason == "length"
    assert 1 < len(last.completion.token_ids) < 90


def check_closed(engine: VllmEngine, probes: list[Probes], **options: Any) -> None:
    """The gate ends a request with its prefill, and nothing is decoded."""
    before = engine.counters.decode_steps
    [update] = updates(engine, PROMPTS[1], probes[:1], **options)
    assert update.prefill is not None
    assert (update.piece, update.tokens, update.completion) == ("", 0, None)
    assert engine.counters.decode_steps == before, "tokens were decoded behind a closed gate"


def test_a_closed_gate_ends_a_request_at_its_onset_and_an_open_one_changes_nothing(
    engine: VllmEngine, probes: list[Probes]
) -> None:
    sampling = Sampling(max_tokens=6)
    for gate in (SHUT, tiny.gate(0.9, (0.5, 0.2, 0.1), -99.0)):
        check_closed(engine, probes, sampling=sampling, gate=gate)
    received = updates(engine, PROMPTS[1], probes[:1], sampling=sampling, gate=OPEN)
    assert received[-1].completion == engine.generate([PROMPTS[1]], sampling)[0]


def test_a_bundle_with_context_reads_and_gates_as_the_reference_does(
    engine: VllmEngine, reference: TransformersEngine, tmp_path: Path
) -> None:
    def scorer_of(loaded: Any, name: str, applies_from: float) -> Scorer:
        options = {"names": ("asks",), "applies_from": applies_from}
        return Scorer(loaded, contextual_bundle(reference, tmp_path, name, **options))

    prompts, standings = PROMPTS[:5], [SMALL_TALK] * 5
    expected = scorer_of(reference, "half", 0.5).score(prompts)
    low, high = sorted(report.context.asks or 0.0 for report in expected)[2:4]
    assert high - low > 1e-4, "choose other prompts: these are too much alike"
    scorer = scorer_of(engine, "between", (low + high) / 2)
    reports = scorer.score_or_continue(prompts, Sampling(max_tokens=2), GATE.at(0.0), standings)
    for ours, theirs in zip(reports, expected, strict=True):
        assert ours.risk == pytest.approx(theirs.risk, abs=1e-4)
        assert ours.context.asks == pytest.approx(theirs.context.asks, abs=1e-4)
        assert (ours.completion is None) is ours.verdict.flagged is ours.context.applies
    assert [report.context.applies for report in reports].count(True) == 2
    before = engine.counters.decode_steps
    judging_all = replace(GATE, threshold=0.0, withhold_no_fact=True)
    judged = scorer.score_or_continue(prompts, Sampling(), judging_all, standings)
    assert all(report.completion is None for report in judged)
    assert engine.counters.decode_steps == before


def test_answers_are_held_to_a_schema_beside_others_and_behind_the_gate(
    engine: VllmEngine, probes: list[Probes]
) -> None:
    prepared = engine.prepared(Format('{"enum": ["ab", "cd"]}', "response_format"))
    with pytest.raises(RequestError, match="response_format: the schema cannot be compiled"):
        engine.prepared(Format('{"type": "text"}', "response_format"))
    held = [
        Sampling(max_tokens=40, temperature=temperature, format=prepared)
        for temperature in (1.0, 0.0)
    ]
    free = Sampling(max_tokens=6)

    async def last(sampling: Sampling, prompt: int) -> Any:
        stream = engine.answer(PROMPTS[prompt], probes[:1], sampling=sampling, gate=OPEN)
        async with aclosing(stream):
            return [update async for update in stream][-1].completion

    async def together() -> list[Any]:
        return await asyncio.gather(last(held[0], 1), last(free, 1), last(held[1], 2))

    first, other, third = wait(engine, together())
    for completion in (first, third):
        # By its tokens: vLLM's text begins with what the prompt's last bytes, no whole character,
        # become.
        text = engine.detokenize(completion.token_ids)
        assert (text in ('"ab"', '"cd"'), completion.finish_reason) == (True, "stop"), completion
    assert other == engine.generate([PROMPTS[1]], free)[0]
    check_closed(engine, probes, sampling=held[0], gate=SHUT)


def test_a_seeded_answer_is_the_same_in_however_many_parts_its_prompt_was_read(
    engine: VllmEngine,
) -> None:
    """vLLM's own runner ends the engine on a CPU where a seeded prompt is longer than a step."""
    for seed in (3, 2**40):
        seeded = Sampling(max_tokens=8, temperature=1.0, seed=seed)
        alone = [engine.generate([prompt], seeded)[0] for prompt in PROMPTS]
        assert engine.generate(PROMPTS, seeded) == alone
        assert (
            engine.generate([PROMPTS[3]], Sampling(max_tokens=8, temperature=1.0, seed=seed + 1))
            != alone[3:4]
        )


def test_a_consumer_that_leaves_ends_the_request(engine: VllmEngine, probes: list[Probes]) -> None:
    for count in (1, 3):
        many = Sampling(max_tokens=90)
        assert len(updates(engine, PROMPTS[1], probes, sampling=many, count=count)) == count

    async def given_up() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                async for _ in engine.answer(PROMPTS[3], probes, sampling=Sampling(max_tokens=30)):
                    pass

    wait(engine, given_up())


def test_impossible_requests_are_refused_before_anything_runs(engine: VllmEngine) -> None:
    before = engine.counters.prefills
    for prompt, error in (
        ([], EmptyPrompt),
        ([5] * CONTEXT, PromptTooLong),
        ([10**6], RequestError),
        ([-1], RequestError),
    ):
        for call in (
            lambda bad: engine.score(bad, []),
            lambda bad: engine.generate(bad, Sampling()),
            lambda bad: engine.extract(bad, list(Site)),
        ):
            with pytest.raises(error):
                call([PROMPTS[0], prompt])
    with pytest.raises(RequestError, match="max_tokens"):
        engine.generate(PROMPTS[:1], Sampling(max_tokens=0))
    with pytest.raises(RequestError, match="top_p"):
        updates(engine, PROMPTS[0], [], sampling=Sampling(top_p=0.0))
    assert engine.counters.prefills == before


def test_a_killed_worker_raises(engine: VllmEngine, probes: list[Probes]) -> None:
    """The engine's last test."""
    children = [child for child in multiprocessing.active_children() if child.pid is not None]
    assert children, "vLLM runs in this process"

    async def killed_while_decoding() -> None:
        stream = engine.answer(PROMPTS[1], probes, sampling=Sampling(max_tokens=97))
        async with aclosing(stream):
            await anext(stream)
            for child in children:
                os.kill(int(child.pid or 0), signal.SIGKILL)
            async for _ in stream:
                pass

    with pytest.raises(EngineError, match="Restart the service"):
        wait(engine, killed_while_decoding())
    with pytest.raises(EngineError):
        engine.score(PROMPTS[:1], probes)
    assert engine.counters.open_continuations == 0
