"""Trajectories from padded micro-batches: independent of the other prompts, without unneeded
computation."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from service.engines.base import EngineOptions, Sampling
from service.engines.families import family_of
from service.engines.transformers.engine import TransformersEngine
from service.engines.transformers.hooks import Prefix, micro_batches
from service.errors import EmptyPrompt, EngineError, NonFiniteReadout, PromptTooLong, RequestError
from service.readout import Site
from service.risk import truth_logits
from tests.engines import tiny
from tests.engines.test_families import EVERY
from tests.engines.transformers.test_decoding import KINDS, check_trace, decoded, reference
from tests.matching import Held

LENGTHS = [3, 20, 7, 20, 1, 33, 12, 7]


def hooks_of(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("name", EVERY)
def test_prompts_together_are_read_as_the_formula_and_the_models_logits_say_of_each(name: str):
    engine = tiny.shared_engine(name, 60)
    model, shape = tiny.modules(engine).model, engine.identity.geometry
    prompts, sites = tiny.prompts(LENGTHS), family_of(model.config).sites
    probes = [tiny.probes(shape, site, seed, scaled=seed > 1) for site in sites for seed in (1, 2)]
    extracted = engine.extract(prompts, sites)
    both = (engine.score(prompts, probes, first_token=first_token) for first_token in (False, True))
    for number, (prompt, plain, scored) in enumerate(zip(prompts, *both, strict=True)):
        assert (plain.prompt_tokens, plain.first_token) == (len(prompt), None)
        alone = engine.extract([prompt], sites).activations
        for site in sites:
            rows = extracted.activations[site][number], alone[site][0]
            np.testing.assert_allclose(*rows, rtol=1e-4, atol=1e-5)
        for probe, *trajectories in zip(
            probes, plain.trajectories, scored.trajectories, strict=True
        ):
            readout = shape.select(alone[probe.site][0], probe.head, probe.site)
            expected = truth_logits(readout, probe.direction, probe.bias, probe.scale)
            for trajectory in trajectories:
                assert trajectory.dtype == np.float64
                np.testing.assert_allclose(trajectory, expected, rtol=0, atol=1e-5)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        log_probabilities = torch.log_softmax(logits.double(), -1)
        first = scored.first_token
        assert first.token == extracted.first_tokens[number].token == int(logits.argmax())
        assert first.log_max_prob == pytest.approx(float(log_probabilities.max()), abs=1e-4)
        entropy = float(-(log_probabilities.exp() * log_probabilities).sum())
        assert first.entropy == pytest.approx(entropy, abs=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_nothing_runs_after_the_last_readout(name: str) -> None:
    engine = tiny.engine(name)
    modules, prompts = tiny.modules(engine), tiny.prompts([5, 6])
    ran: list[tuple[str, tuple[int, ...]]] = []
    watched = {
        "head": modules.model.get_output_embeddings(),
        "projection": tiny.projections(engine)[-1],
        "block": modules.blocks[-1],
    }
    for label, module in watched.items():
        module.register_forward_hook(
            lambda _, given, __, label=label: ran.append((label, tuple(given[0].shape[:-1])))
        )
    heads, residual = tiny.probes_of(engine), tiny.probes_of(engine, Site.RESIDUAL_STREAM)
    engine.score(prompts, [heads])
    assert ran == []
    engine.score(prompts, [residual, heads])
    assert {label for label, _ in ran} == {"projection", "block"}  # the head does not run
    engine.score(prompts, [heads], first_token=True)
    assert [rows for label, rows in ran if label == "head"] == [(len(prompts), 1)]


@pytest.mark.parametrize("lengths", [[6, 6], [5, 6]])
def test_the_head_is_given_contiguous_rows(lengths: list[int]) -> None:
    """Of a view into [batch, positions, width] torch multiplies each row by a weight of its own: a
    copy in bfloat16."""
    engine = tiny.shared_engine("llama")
    probe, contiguous = tiny.probes_of(engine), []
    handle = tiny.modules(engine).head.register_forward_pre_hook(
        lambda _, given: contiguous.append(given[0].is_contiguous())
    )
    try:
        engine.score(tiny.prompts(lengths), [probe], first_token=True)
        engine.extract(tiny.prompts(lengths), [Site.ATTENTION_HEAD])
    finally:
        handle.remove()
    assert contiguous == [True, True]


def test_hooks_are_gone_after_success_and_after_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.engine("gpt2")
    model, block = tiny.modules(engine).model, tiny.modules(engine).blocks[1]
    before = hooks_of(model)
    prompts, probe = tiny.prompts([5, 8]), tiny.probes_of(engine)
    engine.score(prompts, [probe])
    engine.extract(prompts, list(Site))
    for continuation in engine.begin(prompts, [probe]):
        continuation.close()
    assert hooks_of(model) == before
    monkeypatch.setattr(block, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.score(prompts, [probe])
    assert hooks_of(model) == before
    monkeypatch.undo()
    assert len(engine.score(prompts, [probe])) == 2  # the engine is not locked
    for _ in range(2):
        engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.score(prompts, [probe])


def test_a_second_thread_is_refused():
    engine, holding = tiny.engine("llama"), Held()
    handle = tiny.modules(engine).blocks[0].register_forward_pre_hook(lambda *_: holding(""))
    probe, prompts = tiny.probes_of(engine), tiny.prompts([4])
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(engine.score, prompts, [probe])
        assert holding.entered.wait(20)
        with pytest.raises(EngineError, match="one thread at a time"):
            engine.score(prompts, [probe])
        holding.release.set()
        assert len(first.result(20)) == 1
    handle.remove()


@pytest.mark.parametrize(
    ("bad", "error", "named"),
    [
        ([], EmptyPrompt, "prompt 1"),
        ([7] * (tiny.CONTEXT + 1), PromptTooLong, f"prompt 1 .*{tiny.CONTEXT + 1}"),
        *((bad, RequestError, "0 to 263") for bad in ([1, tiny.VOCABULARY], [-1, 3])),
        *(
            (bad, RequestError, "integer")
            for bad in ([1.5, 2.0], [True], [[1], [2, 3]], [[1, 2]], ["a"])
        ),
    ],
)
def test_bad_prompts_are_named_and_never_truncated(
    bad: Any, error: type[RequestError], named: str
) -> None:
    engine = tiny.shared_engine("llama")
    probe, site, [good] = [tiny.probes_of(engine)], Site.ATTENTION_HEAD, tiny.prompts([4])
    reads: Any = ((engine.score, probe), (engine.begin, probe), (engine.extract, [site]))
    for read, what in reads:
        with pytest.raises(error, match=named):
            read([good, bad], what)


def test_the_longest_prompt_and_none_are_read() -> None:
    engine, site = tiny.shared_engine("llama"), Site.ATTENTION_HEAD
    probe = [tiny.probes_of(engine)]
    assert len(engine.score(tiny.prompts([tiny.CONTEXT]), probe)) == 1
    assert engine.score([], probe) == []
    assert engine.extract([], [site]).activations[site].shape == (0, 3, 64)


def test_a_nan_is_refused_with_its_layer_and_prompt() -> None:
    engine = tiny.engine("llama")
    prompts = tiny.prompts([4, 6, 5])
    probe = tiny.probes_of(engine)
    poison = prompts[1][0]
    others = {token for index in (0, 2) for token in prompts[index]}
    assert poison not in others
    with torch.no_grad():
        tiny.projections(engine)[0].weight[:] = 0.0  # layer 0 still has finite activations
        tiny.modules(engine).model.get_input_embeddings().weight[poison] = float("nan")
    for read, what in ((engine.score, probe), (engine.extract, Site.RESIDUAL_STREAM)):
        with pytest.raises(NonFiniteReadout, match="layer 0 .* prompt 1"):
            read(prompts, [what])
    with pytest.raises(NonFiniteReadout):
        engine.begin(prompts, [])
    assert engine.counters.open_continuations == 0
    assert len(engine.score([prompts[0], prompts[2]], [probe])) == 2


def test_probes_of_another_geometry_are_refused() -> None:
    engine = tiny.shared_engine("llama")
    for changed, named in (
        ({"head": np.array([0, 1])}, "head has shape"),
        ({"head": np.array([0, 4, 0])}, r"head .*\[0, 4\)"),
        ({"site": Site.RESIDUAL_STREAM}, "direction has shape"),
    ):
        with pytest.raises(EngineError, match=named):
            engine.score(tiny.prompts([4]), [replace(tiny.probes_of(engine), **changed)])


def test_no_probes_means_no_trajectories_but_still_first_tokens_and_counts_real_tokens() -> None:
    engine = tiny.engine("llama", max_batch_tokens=40)
    onsets = engine.score(tiny.prompts([3, 20, 9]), [], first_token=True)
    assert [onset.trajectories for onset in onsets] == [(), (), ()]
    assert all(onset.first_token is not None for onset in onsets)
    counters = engine.counters
    assert (counters.forward_tokens, counters.prefills, counters.decode_steps) == (32, 3, 0)


def test_a_limited_number_of_probe_stacks_is_cached() -> None:
    engine = tiny.engine("llama")
    prompts = tiny.prompts([4])
    probes = [tiny.probes_of(engine, seed=seed) for seed in range(9)]
    engine.score(prompts, probes[:1])
    first = next(iter(engine._stacks.values()))
    for probe in (*probes[1:8], probes[0]):
        engine.score(prompts, [probe])
    assert list(engine._stacks.values())[-1] is first
    engine.score(prompts, probes[8:])  # the least recently used one is dropped
    assert len(engine._stacks) == 8
    assert (id(probes[1]),) not in engine._stacks


def test_half_precision_gives_float32_logits_near_the_full_ones() -> None:
    full = tiny.shared_engine("llama")
    probe, prompts = tiny.probes_of(full), tiny.prompts([12, 5])
    for dtype in (torch.bfloat16, torch.float16):
        half = tiny.TransformersEngine(tiny.model("llama").to(dtype), tiny.tokenizer())
        assert half.identity.dtype == str(dtype).removeprefix("torch.")
        results = half.score(prompts, [probe], first_token=True)
        halves = np.stack([result.trajectories[0] for result in results])
        differences = np.abs(halves - tiny.trajectories(full, prompts, probe)).max(axis=1)
        assert ((differences > 0) & (differences < 0.1)).all()


# Micro-batches


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200), st.booleans())
def test_every_prompt_is_in_one_batch_within_budget(
    lengths: list[int], budget: int, equal: bool
) -> None:
    groups = micro_batches(lengths, budget, equal_lengths=equal)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[index] for index in group) <= budget
        assert not equal or len({lengths[index] for index in group}) == 1
    assert micro_batches([4, 4, 4, 5], 16) == [[0, 1, 2], [3]]  # as full as the budget allows


# The fixed beginning of chats

TEMPLATE = (
    "<s>system: be brief\n{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor"
    " %}<|assistant|>"
)
NOT_SHARED = ("gemma2", "mistral")  # windows
CONTENTS = ["a", "what is it?", "b" * 30, "ä"]


def chatting(family: str = "llama", model: Any = None) -> TransformersEngine:
    tokenizer, options = tiny.tokenizer(template=TEMPLATE), EngineOptions(f"tiny-{family}")
    return TransformersEngine(model or tiny.model(family), tokenizer, options=options)


def chats(made: TransformersEngine) -> list[list[int]]:
    rendered = [made.render_chat([{"role": "user", "content": content}]) for content in CONTENTS]
    texts = "no chat", "no chat, and longer than the shorter ones of the chats"
    return [*rendered, *map(made.tokenize, texts), [*made._prefix.tokens] or rendered[0][:9]]


@pytest.mark.parametrize("family", KINDS)
def test_numbers_and_answers_are_those_of_whole_prompts(family: str) -> None:
    ours, plain = chatting(family), chatting(family)
    plain._prefix = Prefix(())
    prompts, probe = chats(chatting()), tiny.probes_of(ours)
    scores = (engine.score(prompts, [probe], first_token=True) for engine in (ours, plain))
    for result, expected in zip(*scores, strict=True):
        tiny.check_same(result, expected, tokens=True, rtol=1e-7)
    rows, whole = (engine.extract(prompts, list(Site)).activations for engine in (ours, plain))
    for site in Site:
        np.testing.assert_allclose(rows[site], whole[site], atol=1e-5)
    fewer = ours.counters.forward_tokens < plain.counters.forward_tokens
    assert fewer is bool(ours._prefix.tokens) is (family not in NOT_SHARED)
    for prompt, continuation in zip(prompts, ours.begin(prompts, [probe]), strict=True):
        answer = decoded(continuation, Sampling(max_tokens=8)).token_ids
        assert list(answer) == reference(ours, prompt, 8)
    traced = ours.sample(prompts, Sampling(max_tokens=4), [[0]] * len(prompts))
    for prompt, (trace,) in zip(prompts, traced, strict=True):
        check_trace(ours, prompt, trace)


def newer(self: Any, cache: Any = None, **rest: Any) -> Any:
    return self.run(cache, rest)


def older(self: Any, past_key_values: Any = None, **rest: Any) -> Any:
    return self.run(past_key_values, rest)


@pytest.mark.parametrize("forward", [newer, older])
def test_the_cache_is_given_by_the_name_that_the_model_has_for_it(forward: Any) -> None:
    """By either name, whatever the installed transformers calls it: a model can come with code of
    its own."""
    model, plain = tiny.model("llama"), chatting()
    names, caches = {"cache", "past_key_values"}, set()
    kind = type(model)
    [name] = names & set(inspect.signature(kind.forward).parameters)

    def run(self: Any, cache: Any, rest: dict[str, Any]) -> Any:
        assert not names & set(rest)
        caches.add(type(cache).__name__)
        return kind.forward(self, **{name: cache}, **rest)

    model.__class__ = type("Renamed", (kind,), {"forward": forward, "run": run})
    ours = chatting(model=model)
    prompts, probe = chats(plain), tiny.probes_of(ours)
    both = (tiny.trajectories(engine, prompts, probe) for engine in (ours, plain))
    np.testing.assert_allclose(*both, atol=1e-5)

    sampling = Sampling(max_tokens=6)
    assert ours.generate(prompts, sampling) == plain.generate(prompts, sampling)
    assert caches == {"NoneType", "DynamicCache", "_RowCaches"}


def test_the_beginning_is_run_once() -> None:
    made = chatting()
    prefix, probe = made._prefix.tokens, tiny.probes_of(made)
    assert made.detokenize(prefix).endswith("user: ")
    prompts = chats(made)[: len(CONTENTS)]
    for _ in range(3):
        before = made.counters.forward_tokens
        made.score(prompts, [probe])
        read = made.counters.forward_tokens - before
        assert read == sum(len(prompt) - len(prefix) for prompt in prompts)
    without = "{% for m in messages %}{{ m.content }}{% endfor %}"  # a fixed beginning
    for template in (None, without):
        tokenizer = tiny.tokenizer(template=template)
        assert TransformersEngine(tiny.model("llama"), tokenizer)._prefix.tokens == ()
