"""Which rows are answer onsets, for any schedule, and when a gate closes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probes_store.records import Context
from service.engines.base import EngineGate, PrefillResult, PromptContext, prompt_context
from service.engines.checks import summarise
from service.engines.vllm.attach import SiteReadout
from service.engines.vllm.reader import (
    AnswerRow,
    OnsetRow,
    Reader,
    StepLayout,
    answer_rows,
    onset_rows,
)
from service.engines.vllm.wire import EXTRAS, Directive, Payload, Plan, answer_read, context_terms
from service.errors import HalluTracerError, NonFiniteReadout, ProbeReplaced, WeightsChanged
from service.readout import Geometry, Site
from service.risk import risk
from tests.engines import tiny
from tests.kit.bundles import APPLICABILITY, CONTEXT

GEOMETRY = Geometry(num_layers=2, num_heads=2, head_dim=2, hidden_size=6)
SLOTS, TOKENS, VOCABULARY = 2, 10, 11
CPU = torch.device("cpu")
OURS = Directive()
END = 7


def reader(*, answers: bool = False) -> Reader:
    """With a probe in every slot."""
    plan, sites = Plan(GEOMETRY, tuple(Site), SLOTS, True, answers), {}
    for site in Site:
        heads = 0, GEOMETRY.heads(site)
        rows = TOKENS if answers else 0
        sites[site] = SiteReadout(plan, site, range(2), heads, leading=True, device=CPU, rows=rows)
        for slot in range(SLOTS):
            sites[site].write(slot, tiny.probes(GEOMETRY, site, slot, scaled=True))
    return Reader(plan, sites, None, CPU)


def forward(made: Reader, layers: int = 2) -> torch.Tensor:
    """A forward pass with random activations; what it reads, [layers, n, columns]."""
    generator = torch.Generator().manual_seed(0)
    for readout in made.sites.values():
        for _ in range(layers):
            readout.keep(torch.randn(TOKENS, readout.width, generator=generator))
    return torch.cat([readout.read() for readout in made.sites.values()], dim=-1)


def test_every_request_is_read_alike_but_one_whose_own_numbers_come_back_there() -> None:
    made, everyone = reader(), Directive(first_token=True)
    asks = SimpleNamespace(extra_args=OURS.encode(), prompt_logprob_token_ids=None)
    own = SimpleNamespace(extra_args=None, prompt_logprob_token_ids=np.zeros((1, 1), np.int32))
    assert made.directive_of(asks) == OURS
    made.for_all = everyone
    assert [made.directive_of(parameters) for parameters in (asks, own, None)] == [
        everyone,
        None,
        None,
    ]


# ---- onset_rows and answer_rows


Row = tuple[int, int]  # a token: its request and its position


@dataclass
class Step:
    """One step of a schedule: its layout, the tokens of its rows and of its logits' rows."""

    layout: StepLayout
    tokens: list[Row]
    logits: list[Row]
    sampled: list[int]  # tokens that each request has sampled before it


def schedule(
    requests: list[tuple[int, int, bool]],
    budget: int,
    preemptions: int,
    chance: Random,
    *,
    drafts: bool,
) -> Iterator[Step]:
    """Random steps with chunks, cached prefixes, mixed prefills and decodes, preemptions and
    resumptions, and draft tokens, of which some are accepted, behind any request that samples.

    requests: prompt tokens, answer tokens, whether they have a directive."""
    computed = [chance.randrange(prompt) for prompt, _, _ in requests]  # prefix hits
    sampled = [0] * len(requests)
    for _ in range(2000):
        running = [n for n, (_, answer, _) in enumerate(requests) if sampled[n] < answer]
        if not running:
            return
        room, parts = budget, list[tuple[int, int, int, int, bool, int]]()
        tokens, logits = list[Row](), list[Row]()
        for number in chance.sample(running, len(running)):
            prompt, _, _ = requests[number]
            left = prompt + sampled[number] - computed[number]
            count = min(left, room)
            if count == 0:
                continue
            room -= count
            emits = count == left
            more = chance.randrange(3) if emits and drafts else 0
            parts.append((number, count + more, computed[number], prompt, emits, more))
            own = [(number, computed[number] + offset) for offset in range(count + more)]
            tokens += own
            logits += own[count - 1 :]
        numbers, counts, *columns = zip(*parts, strict=True)
        starts = np.cumsum([0, *counts])
        layout = StepLayout([*map(str, numbers)], starts, *map(np.array, columns))
        yield Step(layout, tokens, logits, [*sampled])
        for number, count, _, _, emits, more in parts:
            accepted = chance.randint(0, more)
            computed[number] += count - more + accepted
            sampled[number] += accepted + 1 if emits else 0
        if preemptions and chance.random() < 0.2:
            preemptions -= 1
            # Everything but a cached prefix is computed again, like a prompt.
            again = chance.choice(running)
            computed[again] = chance.choice([0, chance.randrange(computed[again] + 1)])
    pytest.fail("the scheduler of this test does not end")


@pytest.mark.parametrize("drafts", [False, True])
@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 6), st.booleans()), min_size=1, max_size=6
    ),
    budget=st.integers(1, 24),
    preemptions=st.integers(0, 4),
    chance=st.randoms(),
)
def test_each_prompts_last_token_and_each_that_an_answer_goes_on_from_is_read_once(
    drafts: bool,
    requests: list[tuple[int, int, bool]],
    budget: int,
    preemptions: int,
    chance: Random,
) -> None:
    """Whatever is computed again.  An answer's token, of answers without drafts, comes with the one
    that follows it, so that a step that emits nothing reads nothing."""
    read = {str(number): OURS for number, (_, _, ours) in enumerate(requests) if ours}
    onsets, goes_on = list[int](), list[Row]()
    for step in schedule(requests, budget, preemptions, chance, drafts=drafts):
        layout = step.layout
        samples = {layout.requests[row] for row in np.flatnonzero(layout.emits)}
        for onset in onset_rows(layout, read.get):
            number = int(onset.request)
            last = number, requests[number][0] - 1
            assert step.tokens[onset.token_row] == step.logits[onset.logits_row] == last
            assert layout.requests[onset.request_row] == onset.request
            assert onset.prompt_tokens == requests[number][0]
            if step.sampled[number] == 0:
                assert onset.request in samples, (
                    "an onset whose step emits nothing: its payload would be lost"
                )
                onsets.append(number)
        for answer in [] if drafts else answer_rows(layout, read):
            token = step.tokens[answer.token_row]
            assert answer.request in samples
            assert token[0] == int(answer.request)
            goes_on.append(token)
    assert sorted(onsets) == [*map(int, read)]
    assert drafts or sorted(goes_on) == [
        (number, prompt + token)
        for number, (prompt, answer, ours) in enumerate(requests)
        for token in range(answer - 1)
        if ours
    ]


# ---- one step


PROMPT = 5


def step(*directives: Directive) -> list[OnsetRow]:
    """Onsets at rows 1, 3, 5, ... of the tokens and of the logits; requests 1, 2, 3, ..., of
    ``PROMPT`` tokens each."""
    return [
        OnsetRow(f"r{n}", directive, 2 * n + 1, n + 1, 2 * n + 1, PROMPT)
        for n, directive in enumerate(directives)
    ]


def answer_steps(*directives: Directive) -> list[AnswerRow]:
    """Answers' tokens at rows 0, 2, 4, ..."""
    return [AnswerRow(f"a{n}", directive, 2 * n) for n, directive in enumerate(directives)]


def run(
    made: Reader,
    onsets: list[OnsetRow],
    answers: Sequence[AnswerRow] = (),
    *,
    logits: torch.Tensor | None = None,
    sampled: torch.Tensor | None = None,
    layers: int = 2,
) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    """A step: what its forward pass reads, [layers, n, columns], and the payloads."""
    made.before(onsets, answers)
    read = forward(made, layers=layers)
    made.after()
    made.observe_logits(logits)
    if sampled is not None:
        made.gate(sampled)
    return read, {request: payload.numpy() for request, payload in made.payloads().items()}


def test_each_request_gets_its_own_rows_numbers_and_the_steps_first_logits() -> None:
    """V2 also computes logits of the prompt, for requests that want its log probabilities: they are
    not looked at.  Activations are returned to who asks."""
    made = reader()
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1))
    onsets = step(Directive(first_token=True), Directive(), Directive(activations=True))
    made.before(onsets)
    read = forward(made)
    rows = {site: readout.activations() for site, readout in made.sites.items()}
    made.after()
    made.observe_logits(logits)
    made.observe_logits(torch.flip(logits, [1])[:2])
    payloads, expected = made.payloads(), summarise(logits)
    for number, row in enumerate(onsets):
        payload = Payload.decode(payloads[row.request].numpy(), made.plan, row.directive)
        np.testing.assert_array_equal(payload.trajectories, read[:, number].T.numpy())
        assert payload.trajectories.dtype == np.float64
        if row.directive.needs_first_token:
            assert payload.first_token is not None
            assert payload.first_token.token == int(logits[2 * number + 1].argmax())
            assert payload.first_token.entropy == pytest.approx(float(expected[2 * number + 1, 1]))
        for site in made.sites if row.directive.activations else ():
            np.testing.assert_array_equal(payload.activations[site], rows[site][:, number].numpy())
    assert made.payloads() == {}, "a payload is sent once"


OPEN, HALF, SHUT = map(tiny.gate, (1.0, 0.5, 0.0))


@pytest.mark.parametrize(
    ("layers", "directive", "named"),
    [
        (0, Directive(), "not keep"),  # a stale compile cache, or a graph captured as a whole
        (0, Directive(gate=HALF, end_token=END), "not keep"),
        (0, Directive(activations=True), "not keep"),
        (1, Directive(), "layer 0"),
        (3, Directive(), "layer 0"),
        (2, Directive(first_token=True), "first token"),  # no logits were observed
        (
            2,
            Directive(gate=tiny.gate(0.5, (0.0, 1.0, 1.0), -5.0), end_token=END),
            "first token",
        ),
    ],
)
def test_what_was_not_read_gives_no_number_and_closes_no_gate(
    layers: int, directive: Directive, named: str
) -> None:
    """The request side refuses the NaN; the step before was read."""
    made, sampled = reader(), torch.tensor([[1], [2]])
    run(made, step(Directive()))
    _, payloads = run(made, step(directive), sampled=sampled, layers=layers)
    assert layers or sampled[:, 0].tolist() == [1, 2]
    with pytest.raises(NonFiniteReadout, match=named):
        Payload.decode(payloads["r0"], made.plan, directive)


@pytest.mark.parametrize("steps", [(2, 0), (2, 1), (2, 3), (0,)])
def test_an_answer_s_token_that_was_not_kept_is_no_number(steps: tuple[int, ...]) -> None:
    """After a step that was, or where nothing ever was: a graph of another compilation runs."""
    made = reader(answers=True)
    made.digests = {3: ""}
    for layers in steps:
        read, payloads = run(made, [], answer_steps(Directive(answer=(3, ""))), layers=layers)
        answer = answer_read(payloads["a0"], made.plan)
        assert np.isfinite(answer).tolist() == [layers == 2] * 2
        np.testing.assert_array_equal(answer, read[:, 0, 3].numpy())
        assert made.payloads() == {}, "it is sent once"


def test_another_probe_or_other_weights_give_no_number_and_the_neighbours_have_theirs() -> None:
    """Of a prompt, whatever its gate, and of an answer's token."""
    made, sampled = reader(answers=True), torch.full((TOKENS, 1), 3)
    made.digests, made.weights = {0: "mine", 1: "another server's"}, 2
    mine, theirs = (0, "mine"), (1, "mine")

    def directive(probes: Sequence[tuple[int, str]], weights: int) -> Directive:
        return Directive(probes=(*probes,), weights=weights, gate=SHUT, end_token=END)

    onsets = step(
        directive([mine], 2),
        directive([mine, theirs], 2),
        directive([(3, "mine")], 2),
        directive([], 0),
        directive([], 3),
    )
    answers = answer_steps(
        *(
            Directive(answer=probe, weights=weights)
            for probe, weights in ((theirs, 2), (mine, 2), (mine, 0))
        )
    )
    read, payloads = run(made, onsets, answers, sampled=sampled)
    expected: dict[str, type[HalluTracerError]] = dict.fromkeys(("r1", "r2", "a0"), ProbeReplaced)
    expected |= dict.fromkeys(("r3", "r4", "a2"), WeightsChanged)
    for row in (*onsets, *answers):
        payload, error = payloads[row.request], expected.get(row.request)
        is_onset = isinstance(row, OnsetRow)
        is_number = np.isfinite(payload[:, : -EXTRAS if is_onset else -1])
        assert is_number.all() if error is None else not is_number.any()
        with nullcontext() if error is None else pytest.raises(error):
            if is_onset:
                Payload.decode(payload, made.plan, row.directive)
            else:
                answer_read(payload, made.plan)
    assert sampled[:, 0].tolist() == [3, END, *[3] * 8]
    first = Payload.decode(payloads["r0"], made.plan, onsets[0].directive)
    assert first.gated
    np.testing.assert_array_equal(first.trajectories, read[:, 0].T.numpy())
    answer = answer_read(payloads["a1"], made.plan)
    np.testing.assert_array_equal(answer, read[:, len(onsets) + 1, 0].numpy())
    _, payloads = run(made, onsets[:1])
    assert Payload.decode(payloads["r0"], made.plan, onsets[0].directive)


def test_a_step_without_onsets_does_nothing() -> None:
    """Nor does a dummy step of data parallelism, which may follow one whose payloads another stage
    sends."""
    made = reader()
    run(made, step(Directive()))
    assert (made.keeps, made.after()) == (False, None)
    made.before(step(Directive()))
    assert (made.keeps, made.needs_pieces) == (True, True)
    made.before([])
    assert (made.keeps, made.needs_pieces) == (False, False)
    for readout in made.sites.values():
        readout.keep(torch.zeros(TOKENS, readout.width))
        assert readout._kept is None
    assert made.after() is None
    sampled = torch.tensor([[3]])
    assert made.gate(sampled) is sampled
    assert made.payloads() == {}


def test_answers_are_known_from_their_onset_until_they_have_ended() -> None:
    made = reader(answers=True)
    reads = Directive(answer=(0, "mine"))
    run(made, step(reads, OURS, reads))
    assert made.answering == {"r0": reads, "r2": reads}
    made.before([], [AnswerRow("r0", reads, 0)])
    assert set(made.answering) == {"r0", "r2"}
    made.finished(["r2", "r1", "unknown"])
    assert made.answering == {"r0": reads}
    assert (made.keeps, made.needs_pieces) == (True, False)


def test_a_step_copies_once_to_the_device_and_never_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA ``torch.tensor(.., device=)`` and reading a number back would stop vLLM's
    asynchronous scheduling."""
    made = reader(answers=True)
    run(made, step(Directive()))
    gate = tiny.gate(0.5, (1.0, 0.5, 0.5))
    directive = Directive(first_token=True, gate=gate, end_token=END, slot=1)
    onsets, logits = step(directive, Directive(), directive), torch.randn(6, VOCABULARY)
    answers = answer_steps(Directive(answer=(0, "")), Directive(answer=(2, "another's")))
    sampled = torch.zeros(4, 1).long()
    tensor, waits = Mock(wraps=torch.tensor), Mock(side_effect=AssertionError("waits"))
    monkeypatch.setattr(torch, "tensor", tensor)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    made.before(onsets, answers)
    forward(made)
    made.after()
    made.observe_logits(logits)
    made.gate(sampled)
    payloads = made.payloads()
    monkeypatch.undo()
    [copied] = tensor.mock_calls
    assert copied.kwargs.get("device") is None, "waits for the device"
    for rows in (onsets, answers):
        assert len({payloads[row.request].untyped_storage().data_ptr() for row in rows}) == 1


# ---- gates


def judged(gate: EngineGate, columns: Sequence[int] = range(4)) -> tuple[bool, int, PrefillResult]:
    """One prompt that is read by the probes in these columns: whether its payload reports a closed
    gate, the sampled token, and what is read."""
    made, sampled = reader(), torch.tensor([[1], [2], [3]])
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    terms = context_terms(gate.context, columns[1:])
    directive = Directive(True, gate=gate, end_token=END, slot=columns[0], context=terms)
    _, payloads = run(made, step(directive), logits=logits, sampled=sampled)
    read = Payload.decode(payloads["r0"], made.plan, directive)
    first, token, last = sampled[:, 0].tolist()
    assert (first, last) == (1, 3)
    trajectories = tuple(read.trajectories[[*columns]])
    return read.gated, token, PrefillResult(trajectories, read.first_token, PROMPT)


def risk_of(gate: EngineGate, result: PrefillResult) -> tuple[float, PromptContext]:
    """The risk, from exactly the numbers in the payload, and what the context probes tell."""
    mean, *means = (float(trajectory.mean()) for trajectory in result.trajectories)
    context, first = prompt_context(gate.context, means, PROMPT), result.first_token
    assert first is not None
    of_context = (context.passage, context.stated, context.stated_length)
    signals = [mean, first.log_max_prob, first.entropy, *(value or 0.0 for value in of_context)]
    return float(risk(np.array(signals), np.array(gate.weight), gate.intercept)), context


@pytest.mark.parametrize("columns", [(0, 1, 2, 3), (3, 2, 0, 1)])
def test_the_gate_reads_the_context_as_the_request_side_does(columns: tuple[int, ...]) -> None:
    gate = tiny.gate(0.5, (1.0, 0.0, 0.0, -1.5, 2.5, 0.7), 0.2, CONTEXT)
    exact, context = risk_of(gate, judged(gate, columns)[-1])
    assert context.asks is not None
    asks, *probes = CONTEXT.probes
    never, below = replace(asks, intercept=-99.0), exact - 1e-4
    from_below, from_above = (
        replace(APPLICABILITY, threshold=context.asks + shift) for shift in (-1e-4, 1e-4)
    )
    for threshold, first, applicability, closes in (
        (below, asks, from_below, True),
        (exact + 1e-4, asks, from_below, False),
        (below, asks, from_above, False),
        (below, never, APPLICABILITY, False),
        (below, never, None, True),  # a policy wants it so
    ):
        record = Context((first, *probes), applicability)
        judging = replace(gate, threshold=threshold, context=record)
        gated, _, result = judged(judging, columns)
        assert gated is judging.closes(result) is closes


@pytest.mark.parametrize("slot", range(4))
def test_a_gate_closes_at_and_above_its_threshold(slot: int) -> None:
    """As on the request side, which decides what is closer to it than can be told here, and closes
    it at a NaN."""
    columns = slot, 0, 0, 0
    for weight, intercept in product(((1.5,), (1.0, 0.7, -0.4), (0.0, 0.0, 1.0)), (-1.0, 0.3)):
        gate = tiny.gate(2.0, weight, intercept)
        _, _, result = judged(gate, columns)
        exact, _ = risk_of(gate, result)
        for threshold, closes in ((exact - 1e-4, True), (exact + 1e-4, False)):
            at = replace(gate, threshold=threshold)
            assert judged(at, columns)[:2] == ((True, END) if closes else (False, 2))
            assert at.closes(result) is closes
        assert judged(replace(gate, threshold=exact), columns)[:2] == (False, 2)
    nothing = replace(result, trajectories=(np.full(2, np.nan),))
    assert tiny.gate(1.1).closes(nothing)


@pytest.mark.parametrize("intercept", [-50.0, 0.0, 50.0])
def test_a_threshold_of_0_closes_every_gate_and_one_of_1_none(intercept: float) -> None:
    assert judged(replace(SHUT, intercept=intercept))[:2] == (True, END)
    assert judged(replace(OPEN, intercept=intercept))[:2] == (False, 2)


def test_gates_of_one_step_are_independent() -> None:
    made = reader()
    onsets = step(
        Directive(gate=OPEN, end_token=END),
        Directive(),
        Directive(gate=SHUT, end_token=END),
        Directive(gate=SHUT, end_token=END + 1, slot=3),
    )
    sampled = torch.arange(6).unsqueeze(1)
    _, payloads = run(made, onsets, logits=torch.randn(8, VOCABULARY), sampled=sampled)
    assert sampled[:, 0].tolist() == [0, 1, 2, END, END + 1, 5]
    closed_gates = [
        Payload.decode(payloads[row.request], made.plan, row.directive).gated for row in onsets
    ]
    assert closed_gates == [False, False, True, True]
