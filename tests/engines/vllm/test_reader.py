"""Which rows are answer onsets, whatever the scheduler does, and when a gate closes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engines.base import Gate
from service.engines.transformers.results import summarise
from service.engines.vllm.graph import Ranks, SiteTensors, Sizes
from service.engines.vllm.reader import Layout, OnsetRow, Reader, StageLink, onset_rows
from service.engines.vllm.wire import Directive, Payload, Plan
from service.errors import EngineError, NonFiniteReadout
from service.readout import Geometry, Site
from service.risk import risk

GEOMETRY = Geometry(num_layers=2, num_heads=2, head_dim=2, hidden_size=4)
SLOTS, TOKENS, PROMPTS, VOCABULARY = 2, 16, 8, 11
CPU = torch.device("cpu")
MINE = Directive()


def reader(sites: tuple[Site, ...] = tuple(Site), *, rows: bool = False) -> Reader:
    plan = Plan(GEOMETRY, sites, SLOTS, rows)
    sizes = Sizes(TOKENS, PROMPTS)
    tensors = {
        site: SiteTensors(plan, site, range(2), (0, GEOMETRY.heads(site)), Ranks(0, 1), sizes, CPU) for site in sites
    }
    return Reader(plan, tensors, torch.zeros(PROMPTS, dtype=torch.int64), StageLink())


def fill(made: Reader, tokens: int, seed: int = 0) -> None:
    """As the forward pass does."""
    generator = torch.Generator().manual_seed(seed)
    for tensors in made.sites.values():
        values = torch.randn(2, tokens, SLOTS, generator=generator)
        tensors.logits[:, :tokens] = values
        tensors.mean[:tokens] = values.mean(0)


# ---- onset_rows


@dataclass(frozen=True)
class Part:
    """One request's part of a step."""

    request: str
    count: int
    computed: int
    prompt: int
    mine: bool = True
    emits: bool = True


def onsets_of(parts: list[Part]) -> list[OnsetRow]:
    layout = Layout(
        requests=[part.request for part in parts],
        starts=np.cumsum([0, *(part.count for part in parts)]),
        computed=np.array([part.computed for part in parts], np.int32),
        prompts=np.array([part.prompt for part in parts], np.int32),
        emits=np.array([part.emits for part in parts], np.bool_),
    )
    mine = {part.request: MINE for part in parts if part.mine}
    return onset_rows(layout, mine.get)


REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(requests=REQUESTS, budget=st.integers(1, 24), preemptions=st.integers(0, 4), chance=st.randoms())
def test_every_prompt_has_exactly_one_onset_and_it_is_its_last_token(
    requests: list[tuple[int, int, bool]], budget: int, preemptions: int, chance: Random
) -> None:
    """A scheduler that chunks, finds prefixes cached, decodes beside prefills, preempts and resumes as it likes.

    requests: prompt tokens, answer tokens, whether they are ours.
    """
    computed = [chance.randrange(prompt) for prompt, _, _ in requests]  # prefix hits
    sampled = [0] * len(requests)
    onsets: list[int] = []
    for _ in range(2000):
        running = [n for n, (_, answer, _) in enumerate(requests) if sampled[n] < answer]
        if not running:
            break
        order = chance.sample(running, len(running))
        scheduled, tokens, room = [], [], budget
        for number in order:
            prompt, _, ours = requests[number]
            left = prompt + sampled[number] - computed[number]
            count = min(left, room)
            if count == 0:
                continue
            room -= count
            emits = count == left
            scheduled.append(Part(str(number), count, computed[number], prompt, ours, emits))
            tokens += [(number, computed[number] + offset) for offset in range(count)]
        samples = {int(one.request) for one in scheduled if one.emits}
        for found in onsets_of(scheduled):
            number = int(found.request)
            assert tokens[found.token_row] == (number, requests[number][0] - 1)
            assert scheduled[found.request_row].request == found.request
            if sampled[number] == 0:
                assert number in samples, "an onset whose step emits nothing: its payload would be lost"
                onsets.append(number)
        for one in scheduled:
            computed[int(one.request)] += one.count
        for number in samples:
            sampled[number] += 1
        if preemptions and chance.random() < 0.2:
            preemptions -= 1
            computed[chance.choice(running)] = 0  # all of it is computed again, answers so far like a prompt
    else:
        pytest.fail("the scheduler of this test does not end")
    assert sorted(onsets) == [number for number, (_, _, ours) in enumerate(requests) if ours]


def test_the_row_is_counted_from_the_requests_own_first_row() -> None:
    step = [
        Part("decoding", 1, 9, 9),
        Part("chunk", 4, 4, 12, emits=False),
        Part("other", 3, 0, 3, mine=False),
        Part("ends", 4, 8, 12),
        Part("whole", 1, 0, 1),
    ]
    assert onsets_of(step) == [OnsetRow("ends", MINE, 11, 3), OnsetRow("whole", MINE, 12, 4)]


def test_an_answer_that_is_computed_again_after_a_preemption_has_no_second_onset() -> None:
    assert onsets_of([Part("resumed", 14, 0, 12)]) == []
    assert onsets_of([Part("resumed", 12, 0, 12, emits=False)]) == []


# ---- one step


def step(*directives: Directive) -> list[OnsetRow]:
    """Onsets at rows 1, 3, 5, ...; requests 1, 2, 3, ..."""
    return [OnsetRow(f"r{n}", one, 2 * n + 1, n + 1) for n, one in enumerate(directives)]


def run(
    made: Reader, onsets: list[OnsetRow], *logits: torch.Tensor, sampled: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    made.before(onsets, 10)
    fill(made, 10)
    made.after()
    for shown in logits:
        made.saw_logits(shown)
    if sampled is not None:
        made.gate(sampled)
    return made.payloads()


def decode(made: Reader, directive: Directive) -> Payload:
    """The one payload of a step that has been read."""
    [payload] = made.payloads().values()
    return Payload.decode(payload.numpy(), made.plan, directive)


def test_each_request_gets_its_own_rows_numbers_and_its_own_logits() -> None:
    made = reader()
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(1))
    asked = step(Directive(first_token=True), Directive(), Directive(first_token=True))
    payloads = run(made, asked, logits, sampled=torch.zeros(5, 1, dtype=torch.int64))
    expected = summarise(logits)
    for number, row in enumerate(asked):
        payload = Payload.decode(payloads[row.request].numpy(), made.plan, row.directive)
        there = torch.cat([tensors.logits[:, row.token_row] for tensors in made.sites.values()], dim=-1)
        np.testing.assert_array_equal(payload.trajectories, there.T.numpy())
        np.testing.assert_allclose(payload.depth_means, there.mean(0).numpy(), rtol=1e-6)
        if row.directive.first_token:
            assert payload.first_token.token == int(logits[number + 1].argmax())
            assert payload.first_token.entropy == pytest.approx(float(expected[number + 1, 1]))
    assert made.payloads() == {}, "a payload is sent once"


def test_logits_that_nobody_showed_are_no_first_token() -> None:
    made, asked = reader(), Directive(first_token=True)
    [payload] = run(made, step(asked)).values()
    with pytest.raises(NonFiniteReadout, match="first token"):
        Payload.decode(payload.numpy(), made.plan, asked)


def test_only_the_steps_first_logits_are_the_first_tokens() -> None:
    """V2 asks the model for a prompt's logits too, where somebody wants their log probabilities, before it sends."""
    made, asked = reader(), Directive(first_token=True)
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(1))
    [payload] = run(made, step(asked), logits, torch.flip(logits, [1])[:2]).values()
    first = Payload.decode(payload.numpy(), made.plan, asked).first_token
    assert first.token == int(logits[1].argmax())


def test_a_graph_that_does_not_write_gives_no_reading() -> None:
    """A stale compile cache: the numbers of the step before still lie in the buffers, and must not be taken."""
    made = reader()
    fill(made, TOKENS)
    made.before(step(Directive()), 10)
    made.after()
    with pytest.raises(NonFiniteReadout, match="compiled graph"):
        decode(made, Directive())


def test_a_layer_that_does_not_write_gives_no_reading() -> None:
    made = reader()
    made.before(step(Directive()), 10)
    fill(made, 10)
    made.sites[Site.RESIDUAL_STREAM].logits[1] = math.nan
    made.after()
    with pytest.raises(NonFiniteReadout, match="layer 1"):
        decode(made, Directive())


def test_a_step_without_onsets_costs_and_says_nothing() -> None:
    made = reader()
    fill(made, 10)
    made.before([], 10)
    assert made.after() is None
    assert not torch.isnan(next(iter(made.sites.values())).logits[:, :10]).any()  # not even cleared
    sampled = torch.tensor([[3]])
    assert made.gate(sampled) is sampled
    assert made.payloads() == {}


def test_a_step_larger_than_the_buffers_is_refused() -> None:
    with pytest.raises(EngineError, match="17 tokens"):
        reader().before(step(Directive()), TOKENS + 1)


def test_whole_rows_are_those_of_the_requests_that_ask() -> None:
    made = reader(rows=True)
    asked = step(Directive(), Directive(rows=True))
    made.before(asked, 10)
    assert made._onsets.tolist() == [1, 3, 0, 0, 0, 0, 0, 0]
    fill(made, 10)
    for tensors in made.sites.values():
        tensors.rows[:] = torch.arange(tensors.rows.numel()).reshape(tensors.rows.shape).float()
    made.after()
    made.saw_logits(torch.randn(4, VOCABULARY))
    payloads = made.payloads()
    assert payloads["r0"].shape == (1, made.plan.payload)
    payload = Payload.decode(payloads["r1"].numpy(), made.plan, asked[1].directive)
    for site, tensors in made.sites.items():
        np.testing.assert_array_equal(payload.rows[site], tensors.rows[:, 1].numpy())
    made.before(step(Directive()), 2)
    assert made._onsets.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


def test_a_later_stage_adds_its_layers_and_its_part_of_the_mean() -> None:
    first, last = reader(), reader()
    onsets = step(Directive(), Directive())
    for number, made in enumerate((first, last)):
        made.before(onsets, 10)
        fill(made, 10, seed=number)
    handed_on = first.after()
    whole = last.after(handed_on)
    assert handed_on is not None
    assert whole.shape == (2 + 2 + 1, 2, 4)
    for column, (site, slot) in enumerate((site, slot) for site in Site for slot in range(SLOTS)):
        expected = torch.cat([made.sites[site].logits[:, [1, 3], slot] for made in (first, last)])
        mean = first.sites[site].mean[[1, 3], slot] + last.sites[site].mean[[1, 3], slot]
        assert torch.equal(whole[:-1, :, column], expected)
        assert torch.equal(whole[-1, :, column], mean)


# ---- gates

END = 7


def gated(gate: Gate, *, slot: int = 0, seed: int = 0) -> tuple[bool, int, float]:
    """One prompt: whether its payload says that the gate closed, the token that is sampled, and the risk itself."""
    made = reader()
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    directive = Directive(gate=gate, end_token=END, slot=slot, first_token=True)
    sampled = torch.tensor([[1], [2], [3]])
    [payload] = run(made, step(directive), logits, sampled=sampled).values()
    read = Payload.decode(payload.numpy(), made.plan, directive)
    signals = [read.trajectories[slot].mean(), read.first_token.log_max_prob, read.first_token.entropy]
    assert sampled[0, 0] == 1
    assert sampled[2, 0] == 3
    return read.gated, int(sampled[1, 0]), float(risk(np.array(signals), np.array(gate.weight), gate.intercept))


@pytest.mark.parametrize("slot", range(4))
@pytest.mark.parametrize("weight", [(1.5, 0.0, 0.0), (1.0, 0.7, -0.4), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("intercept", [-1.0, 0.3])
def test_a_gate_closes_at_and_above_its_threshold(
    slot: int, weight: tuple[float, float, float], intercept: float
) -> None:
    """The risk is the classifier's over exactly the numbers that are sent."""
    _, _, exact = gated(Gate(weight, intercept, 2.0), slot=slot)
    assert gated(Gate(weight, intercept, exact - 1e-4), slot=slot)[:2] == (True, END)
    assert gated(Gate(weight, intercept, exact + 1e-4), slot=slot)[:2] == (False, 2)


def test_a_threshold_of_0_closes_every_gate_and_one_of_1_none() -> None:
    for intercept in (-50.0, 0.0, 50.0):
        assert gated(Gate((1.0, 0.0, 0.0), intercept, 0.0))[:2] == (True, END)
        assert gated(Gate((1.0, 0.0, 0.0), intercept, 1.0))[:2] == (False, 2)


def test_too_near_to_tell_is_left_to_the_request_side() -> None:
    _, _, exact = gated(Gate((1.0, 0.0, 0.0), 0.0, 2.0))
    assert gated(Gate((1.0, 0.0, 0.0), 0.0, exact))[:2] == (False, 2)


def test_gates_of_one_step_each_have_their_own_say() -> None:
    made = reader()
    opened, closed = Gate((1.0, 0.0, 0.0), 0.0, 1.0), Gate((1.0, 0.0, 0.0), 0.0, 0.0)
    asked = step(
        Directive(gate=opened, end_token=END),
        Directive(),
        Directive(gate=closed, end_token=END),
        Directive(gate=closed, end_token=END + 1, slot=3),
    )
    sampled = torch.arange(6).unsqueeze(1)
    payloads = run(made, asked, torch.randn(6, VOCABULARY), sampled=sampled)
    assert sampled[:, 0].tolist() == [0, 1, 2, END, END + 1, 5]
    said = [Payload.decode(payloads[row.request].numpy(), made.plan, row.directive).gated for row in asked]
    assert said == [False, False, True, True]


def test_a_gate_on_the_first_token_stays_open_where_its_logits_were_not_shown() -> None:
    """The request side then meets the NaN and refuses; a token must not be decided on by nothing."""
    made = reader()
    directive = Directive(gate=Gate((0.0, 1.0, 1.0), -5.0, 0.5), end_token=END)
    [payload] = run(made, step(directive), sampled=torch.tensor([[1], [2]])).values()
    with pytest.raises(NonFiniteReadout):
        Payload.decode(payload.numpy(), made.plan, directive)


def test_a_nan_closes_no_gate_and_reaches_nobody_as_a_number() -> None:
    made = reader()
    directive = Directive(gate=Gate((1.0, 0.0, 0.0), 0.0, 0.5), end_token=END)
    made.before(step(directive), 10)
    made.after()
    sampled = torch.tensor([[1], [2]])
    made.gate(sampled)
    assert sampled[:, 0].tolist() == [1, 2]
    with pytest.raises(NonFiniteReadout):
        decode(made, directive)
