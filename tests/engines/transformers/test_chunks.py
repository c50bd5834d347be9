"""Prompts read by several passes on one cache: what is read and answered is as of one pass, in
every family."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from service.engines.base import Sampling
from service.engines.families import FAMILIES, family_of
from service.engines.transformers import hooks
from service.engines.transformers.decoding import KvContinuation
from service.engines.transformers.hooks import PassCost, chunks, pad
from service.errors import NonFiniteReadout, PromptTooLong
from tests.engines import tiny
from tests.engines.test_families import EVERY
from tests.engines.transformers.test_decoding import decoded

# tokens of a pass, and of the prompts: windows are shorter, and passes are not alike
MOST, LENGTHS = 20, (83, 61)
WHOLE = {"bamba", "jamba"}
EQUAL = PassCost(math.inf)
OVER = object()


@pytest.mark.parametrize(
    "cost", [PassCost(40.0), PassCost(40.0, 2.0), PassCost(400.0, 2.0, 12.0)], ids=repr
)
@pytest.mark.parametrize(("columns", "prefix"), [(1, 0), (20, 0), (21, 0), (83, 0), (200, 7)])
def test_passes_are_of_about_the_same_work(columns: int, prefix: int, cost: PassCost) -> None:
    [whole] = [pad([list(range(columns + prefix))], [0], 0, torch.device("cpu"), prefix)]
    cut = chunks(whole, MOST, cost)
    assert torch.cat([part.input_ids for part in cut], dim=1).tolist() == whole.input_ids.tolist()
    ends = prefix
    for part in cut:
        assert part.prefix == ends
        assert part.position_ids is not None
        assert part.position_ids.tolist() == [list(range(ends, ends + part.lengths[0]))]
        assert cost.of(part.lengths[0], ends) <= MOST
        ends += part.lengths[0]
    sizes = [part.lengths[0] for part in cut]
    assert sizes == sorted(sizes, reverse=True)
    assert len(cut) == 1 or sizes[-1] >= sizes[-2] / 2
    equal = [part.lengths[0] for part in chunks(whole, MOST, EQUAL)]
    assert len(equal) == -(-columns // MOST)


# What passes of SmolLM2 took on one core: tokens, tokens before them, milliseconds.
FIRST_PASS_MS = 1590
PASSES = json.loads(Path(__file__).with_name("passes.json").read_text(encoding="utf-8"))


def test_no_pass_over_a_long_prompt_takes_longer_than_its_first() -> None:
    shape = replace(tiny.engine().identity.geometry, num_layers=30, num_heads=9, head_dim=64)
    block = torch.nn.Linear(106_200_000 // 64, 64, bias=False, device="meta")
    modules: Any = SimpleNamespace(geometry=shape, blocks=[block])
    cost = hooks.pass_cost(modules, torch.device("cpu"))
    of_first = cost.of_pass(512, 0)
    for tokens, cached, milliseconds in PASSES:
        assert 1 <= cost.of(tokens, cached) / 512 * FIRST_PASS_MS / milliseconds <= 1.4
        expected = cost.of_pass(tokens, cached) / of_first * FIRST_PASS_MS
        assert 0.85 <= expected / milliseconds <= 1.25
    for cached in range(0, 8192, 64):
        tokens = cost.most_tokens(512, cached)
        assert cost.of(tokens, cached) <= 512
        assert cost.of(tokens + 1, cached) > 512
    assert hooks.pass_cost(modules, torch.device("cuda")) == PassCost(cost.doubled_at)


def test_a_pass_reads_at_least_as_much_as_it_copies() -> None:
    cost = PassCost(100.0, 2.0, 40.0)
    for cached in (0, 25, 50, 100, 10_000):
        tokens = cost.most_tokens(20, cached)
        copies = cost.of(0, cached)
        assert 1 <= tokens <= 20
        assert cost.of(tokens, cached) <= max(20, 2 * copies)
        assert cost.of(tokens + 1, cached) > min(20, 2 * copies)


def result_of(passes: Iterator[Any], count: int, *, more: bool = False) -> Any:
    """What so many passes give, or some more, all but the last of which give nothing."""
    *before, result = passes
    assert set(before) <= {None}
    assert len(before) + 1 == count or (more and len(before) + 1 > count)
    return result


@pytest.mark.parametrize("name", EVERY)
def test_passes_on_one_cache_read_as_one_pass_does(name: str) -> None:
    """Two prompts in turn, with the probes of a bundle and of its context, at every site that the
    family has."""
    engine = tiny.shared_engine(name, MOST)
    shape, sites = engine.identity.geometry, family_of(tiny.modules(engine).model.config).sites
    probes = [tiny.probes(shape, site, seed, scaled=True) for site in sites for seed in (1, 2)]
    prompts = tiny.prompts([*LENGTHS])
    expected = engine.score(prompts, probes, first_token=True)
    count = [1, 1] if name in WHOLE else [5, 4]
    for options in ({}, {"first_token": True}, {"kept": True}):
        both = [engine.in_chunks(prompt, probes, **options) for prompt in prompts]
        items = zip(*zip_longest(*both, fillvalue=OVER), strict=True)
        for prompt, passes, whole, many in zip(prompts, items, expected, count, strict=True):
            results = (item for item in passes if item is not OVER)
            result = result_of(results, many, more=name not in WHOLE)
            if not options.get("kept"):
                tiny.check_same(result, whole, tokens=bool(options))
                continue
            tiny.check_same(result.prefill, whole, tokens=True)
            sampling = Sampling(max_tokens=6)
            [answer] = engine.generate([prompt], sampling)
            assert decoded(result, sampling).token_ids == answer.token_ids
    assert engine.counters.open_continuations == 0


def test_the_families_that_take_one_pass_are_those_whose_caches_do_not_go_on() -> None:
    assert {name for family in FAMILIES if family.whole for name in family.model_types} == WHOLE


def in_passes(cost: PassCost = EQUAL, most: int = MOST, engine: Any = None) -> Any:
    """An engine whose passes take so many tokens, at this cost."""
    engine = engine or tiny.engine()
    engine.max_batch_tokens, engine._pass_cost = most, cost
    return engine


def test_what_chats_begin_with_is_read_once_in_front_of_passes_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hooks, "MIN_PREFIX", 4)
    engine = in_passes()
    chat = engine.render_chat([{"role": "user", "content": "x" * 60}])
    probes = [tiny.probes_of(engine)]
    [whole] = engine.score([chat], probes)
    shared, before = len(engine._prefix.tokens), engine.counters.forward_tokens
    assert 0 < shared < MOST
    result = result_of(engine.in_chunks(chat, probes), -(-(len(chat) - shared) // MOST))
    tiny.check_same(result, whole, tokens=False)
    assert engine.counters.forward_tokens - before == len(chat) - shared
    assert engine.counters.prefills == 2
    assert sum(engine.pass_costs(chat)) == len(chat) - shared
    assert sum(engine.pass_costs(chat[1:])) == len(chat) - 1


def test_costs_are_of_the_passes_that_a_prompt_takes_one_where_positions_would_differ() -> None:
    """Positions that depend on the longest are encoded otherwise beyond 16."""
    engine = in_passes(PassCost(10.0, 2.0, 1.0), 6, tiny.longrope_engine())
    probes = [tiny.probes_of(engine)]
    for length in (1, 6, 7, 16, 17, 40):
        [prompt] = tiny.prompts([length])
        [whole] = engine.score([prompt], probes)
        costs, cached, passes = iter(engine.pass_costs(prompt)), 0, list[Any]()
        before = engine.counters.forward_tokens
        for result in engine.in_chunks(prompt, probes):
            tokens = engine.counters.forward_tokens - before
            before = engine.counters.forward_tokens
            attended = cached + tokens // 2
            assert next(costs) == pytest.approx(tokens * (1 + attended / 5) + attended / 10)
            cached += tokens
            passes.append(result)
        assert next(costs, None) is None
        assert cached == length
        assert length < 16 or (len(passes) > 1) == (length == 16)
        tiny.check_same(passes[-1], whole, tokens=False)


def test_passes_raise_what_one_pass_raises() -> None:
    engine = in_passes()
    probes = [tiny.probes_of(engine)]
    with pytest.raises(PromptTooLong):
        next(engine.in_chunks([1] * (tiny.CONTEXT + 1), probes))
    tiny.modules(engine).model.model.norm.weight.data[:] = np.nan
    for block in tiny.modules(engine).blocks:
        block.mlp.down_proj.weight.data[:] = np.nan
    passes = engine.in_chunks(tiny.prompts([30])[0], probes, kept=True)
    assert next(passes) is None
    with pytest.raises(NonFiniteReadout):
        next(passes)
    assert engine.counters.open_continuations == 0


def test_a_pass_that_is_not_the_last_ends_with_the_blocks() -> None:
    engine = in_passes()
    called: list[str] = []
    engine._head.register_forward_hook(lambda *_: called.append("head"))
    passes = engine.in_chunks(tiny.prompts([30])[0], [], kept=True)
    assert next(passes) is None
    assert called == []
    last = next(passes)
    assert isinstance(last, KvContinuation)
    assert called == ["head"]
    last.close()
    assert not tiny.modules(engine).blocks[-1]._forward_hooks
