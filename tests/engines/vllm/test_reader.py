"""Which rows are answer onsets, for any schedule, and when a gate closes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probes_store.records import Applicability, Context, ContextName, ContextProbe
from service.engines.base import EngineGate, PrefillResult, prompt_context
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
from service.errors import NonFiniteReadout, ProbeReplaced, WeightsChanged
from service.readout import Geometry, Site
from service.risk import risk
from tests.engines import tiny

GEOMETRY = Geometry(num_layers=2, num_heads=2, head_dim=2, hidden_size=4)
SLOTS, TOKENS, VOCABULARY = 2, 10, 11
CPU = torch.device("cpu")
OURS = Directive()
READS = Directive(answer=(2, "its own"))


def reader(
    sites: tuple[Site, ...] = tuple(Site), *, activations: bool = False, answers: bool = False
) -> Reader:
    """With a probe in every slot."""
    plan = Plan(GEOMETRY, sites, SLOTS, activations, answers)
    readouts = {
        site: SiteReadout(
            plan,
            site,
            range(2),
            (0, GEOMETRY.heads(site)),
            leading=True,
            device=CPU,
            rows=TOKENS if answers else 0,
        )
        for site in sites
    }
    for site, readout in readouts.items():
        for slot in range(SLOTS):
            readout.write(slot, tiny.probes(GEOMETRY, site, slot, scaled=True))
    return Reader(plan, readouts, None, CPU)


def forward(made: Reader, seed: int = 0, layers: int = 2) -> torch.Tensor:
    """A forward pass with random activations; what it reads, [layers, n, columns]."""
    generator = torch.Generator().manual_seed(seed)
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


# ---- onset_rows


@dataclass(frozen=True)
class Part:
    """One request's part of a step."""

    request: str
    count: int
    computed: int
    prompt: int
    ours: bool = True
    emits: bool = True
    drafts: int = 0  # of ``count``


def layout_of(parts: list[Part]) -> StepLayout:
    counts = np.array([(part.computed, part.prompt) for part in parts], np.int32).reshape(-1, 2)
    starts = np.cumsum([0, *(part.count for part in parts)])
    emits = np.array([part.emits for part in parts], np.bool_)
    drafts = np.array([part.drafts for part in parts], np.int32)
    return StepLayout(
        [part.request for part in parts], starts, counts[:, 0], counts[:, 1], emits, drafts
    )


def onsets_of(parts: list[Part]) -> list[OnsetRow]:
    return onset_rows(layout_of(parts), {part.request: OURS for part in parts if part.ours}.get)


def answers_of(parts: list[Part]) -> list[AnswerRow]:
    return answer_rows(layout_of(parts), {part.request: READS for part in parts if part.ours})


REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 6), st.booleans()), min_size=1, max_size=6
)
Row = tuple[int, int]  # a token: its request and its position


@dataclass
class Step:
    """One step of a schedule: its parts in order, the tokens of its rows and of its logits'
    rows."""

    parts: list[Part]
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
        order = chance.sample(running, len(running))
        step, room = Step([], [], [], [*sampled]), budget
        for number in order:
            prompt, _, ours = requests[number]
            left = prompt + sampled[number] - computed[number]
            count = min(left, room)
            if count == 0:
                continue
            room -= count
            emits = count == left
            more = chance.randrange(3) if emits and drafts else 0
            step.parts.append(
                Part(str(number), count + more, computed[number], prompt, ours, emits, more)
            )
            own = [(number, computed[number] + offset) for offset in range(count + more)]
            step.tokens += own
            step.logits += own[count - 1 :]
        yield step
        for part in step.parts:
            accepted = chance.randint(0, part.drafts)
            computed[int(part.request)] += part.count - part.drafts + accepted
            sampled[int(part.request)] += accepted + 1 if part.emits else 0
        if preemptions and chance.random() < 0.2:
            preemptions -= 1
            again = chance.choice(
                running
            )  # everything but a cached prefix is computed again, like a prompt
            computed[again] = chance.choice([0, chance.randrange(computed[again] + 1)])
    pytest.fail("the scheduler of this test does not end")


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS, budget=st.integers(1, 24), preemptions=st.integers(0, 4), chance=st.randoms()
)
def test_every_prompt_has_exactly_one_onset_and_it_is_its_last_token(
    requests: list[tuple[int, int, bool]], budget: int, preemptions: int, chance: Random
) -> None:
    onsets: list[int] = []
    for step in schedule(requests, budget, preemptions, chance, drafts=True):
        samples = {int(part.request) for part in step.parts if part.emits}
        for onset in onsets_of(step.parts):
            number = int(onset.request)
            assert step.tokens[onset.token_row] == (number, requests[number][0] - 1)
            assert step.logits[onset.logits_row] == (number, requests[number][0] - 1)
            assert step.parts[onset.request_row].request == onset.request
            assert onset.prompt_tokens == requests[number][0]
            if step.sampled[number] == 0:
                assert number in samples, (
                    "an onset whose step emits nothing: its payload would be lost"
                )
                onsets.append(number)
    assert sorted(onsets) == [number for number, (_, _, ours) in enumerate(requests) if ours]


@settings(max_examples=60, deadline=None)
@given(
    requests=REQUESTS, budget=st.integers(1, 24), preemptions=st.integers(0, 4), chance=st.randoms()
)
def test_every_token_that_an_answer_goes_on_from_is_read_once_whatever_is_computed_again(
    requests: list[tuple[int, int, bool]], budget: int, preemptions: int, chance: Random
) -> None:
    """It comes with the token that follows it, so that a step that emits nothing reads nothing."""
    read: list[Row] = []
    for step in schedule(requests, budget, preemptions, chance, drafts=False):
        samples = {int(part.request) for part in step.parts if part.emits}
        for row in answers_of(step.parts):
            assert int(row.request) in samples
            assert step.tokens[row.token_row][0] == int(row.request)
            read.append(step.tokens[row.token_row])
    goes_on = [
        (number, prompt + token)
        for number, (prompt, answer, ours) in enumerate(requests)
        for token in range(answer - 1)
        if ours
    ]
    assert sorted(read) == goes_on


# ---- one step


PROMPT = 5


def step(*directives: Directive) -> list[OnsetRow]:
    """Onsets at rows 1, 3, 5, ... of the tokens and of the logits; requests 1, 2, 3, ..., of
    ``PROMPT`` tokens each."""
    return [
        OnsetRow(f"r{n}", directive, 2 * n + 1, n + 1, 2 * n + 1, PROMPT)
        for n, directive in enumerate(directives)
    ]


def run(
    made: Reader,
    onsets: list[OnsetRow],
    logits: torch.Tensor | None = None,
    sampled: torch.Tensor | None = None,
    *,
    layers: int = 2,
) -> dict[str, torch.Tensor]:
    made.before(onsets)
    forward(made, layers=layers)
    made.after()
    made.observe_logits(logits)
    if sampled is not None:
        made.gate(sampled)
    return made.payloads()


def test_each_request_gets_its_own_rows_numbers_and_the_steps_first_logits() -> None:
    """V2 also computes logits of the prompt, for requests that want its log probabilities: they are
    not looked at."""
    made = reader()
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1))
    onsets = step(Directive(first_token=True), Directive(), Directive(first_token=True))
    made.before(onsets)
    read = forward(made)
    made.after()
    made.observe_logits(logits)
    made.observe_logits(torch.flip(logits, [1])[:2])
    payloads, expected = made.payloads(), summarise(logits)
    for number, row in enumerate(onsets):
        payload = Payload.decode(payloads[row.request].numpy(), made.plan, row.directive)
        np.testing.assert_array_equal(payload.trajectories, read[:, number].T.numpy())
        if row.directive.first_token:
            assert payload.first_token is not None
            assert payload.first_token.token == int(logits[2 * number + 1].argmax())
            assert payload.first_token.entropy == pytest.approx(float(expected[2 * number + 1, 1]))
    assert made.payloads() == {}, "a payload is sent once"


OPEN, SHUT = (
    EngineGate((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, threshold) for threshold in (1.0, 0.0)
)
HALF = EngineGate((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, 0.5)


@pytest.mark.parametrize(
    ("layers", "directive", "named"),
    [
        (0, Directive(), "not keep"),  # a stale compile cache, or a graph captured as a whole
        (0, Directive(gate=HALF, end_token=7), "not keep"),
        (1, Directive(), "layer 0"),
        (2, Directive(first_token=True), "first token"),  # no logits were observed
        (
            2,
            Directive(gate=EngineGate((0.0, 1.0, 1.0, 0.0, 0.0, 0.0), -5.0, 0.5), end_token=7),
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
    [payload] = run(made, step(directive), None, sampled, layers=layers).values()
    assert layers or sampled[:, 0].tolist() == [1, 2]
    with pytest.raises(NonFiniteReadout, match=named):
        Payload.decode(payload.numpy(), made.plan, directive)


def test_a_prompt_whose_probe_was_replaced_gets_no_number_and_its_neighbours_theirs() -> None:
    made = reader()
    made.digests = {0: "mine", 1: "another server's", 2: "also mine"}
    directives = [
        Directive(probes=probes)
        for probes in (((0, "mine"),), ((0, "mine"), (1, "mine")), ((3, "mine"),))
    ]
    directives.append(Directive(probes=((1, "mine"),), slot=1, gate=OPEN, end_token=7))
    sampled = torch.full((10, 1), 3)
    payloads = [payload.numpy() for payload in run(made, step(*directives), None, sampled).values()]
    assert np.isfinite(Payload.decode(payloads[0], made.plan, directives[0]).trajectories).all()
    for payload, directive in zip(payloads[1:], directives[1:], strict=True):
        assert np.isnan(payload[:, :-EXTRAS]).all()
        with pytest.raises(ProbeReplaced):
            Payload.decode(payload, made.plan, directive)
    assert set(sampled.flatten().tolist()) == {3}
    [payload] = run(made, step(directives[0])).values()
    assert np.isfinite(Payload.decode(payload.numpy(), made.plan, directives[0]).trajectories).all()


def test_a_request_that_was_tested_on_other_weights_gets_no_number_whatever_its_gate() -> None:
    made, sampled = reader(), torch.full((10, 1), 3)
    made.weights = 2
    directives = [Directive(weights=weights, gate=SHUT, end_token=END) for weights in (0, 2, 3)]
    first, second, third = (
        payload.numpy() for payload in run(made, step(*directives), None, sampled).values()
    )
    for payload, directive in ((first, directives[0]), (third, directives[2])):
        assert np.isnan(payload[:, :-EXTRAS]).all()
        with pytest.raises(WeightsChanged):
            Payload.decode(payload, made.plan, directive)
    assert Payload.decode(second, made.plan, directives[1]).gated
    assert sampled[:, 0].tolist() == [3, 3, END, *[3] * 7]


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


def test_activations_are_returned_to_requests_that_ask() -> None:
    made = reader(activations=True)
    onsets = step(Directive(), Directive(activations=True))
    made.before(onsets)
    forward(made)
    rows = {site: readout.activations() for site, readout in made.sites.items()}
    made.after()
    made.observe_logits(torch.randn(4, VOCABULARY))
    payloads = made.payloads()
    assert payloads["r0"].shape == (1, made.plan.payload)
    payload = Payload.decode(payloads["r1"].numpy(), made.plan, onsets[1].directive)
    for site in made.sites:
        np.testing.assert_array_equal(payload.activations[site], rows[site][:, 1].numpy())


def answer_steps(*directives: Directive) -> list[AnswerRow]:
    """Answers' tokens at rows 0, 2, 4, ..."""
    return [AnswerRow(f"a{n}", directive, 2 * n) for n, directive in enumerate(directives)]


@pytest.mark.parametrize("prompts", [0, 2])
def test_answers_are_read_by_their_own_probes_beside_prompts_that_end(prompts: int) -> None:
    made, sampled = reader(answers=True), torch.full((10, 1), 3)
    made.digests = {column: f"of {column}" for column in range(4)}
    onsets = step(*[Directive(gate=SHUT, end_token=END, first_token=True)] * prompts)
    answers = answer_steps(*(Directive(answer=(column, f"of {column}")) for column in (3, 0)))
    made.before(onsets, answers)
    read = forward(made)
    made.after()
    made.observe_logits(torch.randn(TOKENS, VOCABULARY))
    made.gate(sampled)
    payloads = made.payloads()
    assert set(payloads) == {f"r{n}" for n in range(prompts)} | {"a0", "a1"}
    for number, column in enumerate((3, 0)):
        answer = answer_read(payloads[f"a{number}"].numpy(), made.plan)
        np.testing.assert_array_equal(answer, read[:, prompts + number, column].numpy())
    for number, row in enumerate(onsets):
        payload = Payload.decode(payloads[row.request].numpy(), made.plan, row.directive)
        np.testing.assert_array_equal(payload.trajectories, read[:, number].T.numpy())
        assert payload.gated
    assert sampled[:, 0].tolist().count(END) == prompts
    assert made.payloads() == {}


def test_an_answer_whose_probe_or_weights_were_replaced_gets_no_number() -> None:
    made = reader(answers=True)
    made.digests, made.weights = {0: "mine", 1: "another server's"}, 1
    fine, other, stale = (
        Directive(answer=(column, "mine"), weights=weights)
        for column, weights in ((0, 1), (1, 1), (0, 0))
    )
    onset = Directive(probes=((1, "mine"),), weights=1)
    made.before(step(onset), answer_steps(other, fine, stale))
    forward(made)
    made.after()
    payloads = {name: payload.numpy() for name, payload in made.payloads().items()}
    assert np.isfinite(answer_read(payloads["a1"], made.plan)).all()
    for name, error in (("a0", ProbeReplaced), ("a2", WeightsChanged)):
        assert np.isnan(payloads[name][0, :-1]).all()
        with pytest.raises(error):
            answer_read(payloads[name], made.plan)
    with pytest.raises(ProbeReplaced):
        Payload.decode(payloads["r0"], made.plan, onset)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_an_answer_s_token_that_was_not_kept_is_no_number(layers: int) -> None:
    """After a step that was."""
    made = reader(answers=True)
    made.digests = {0: ""}
    for layers_kept in (2, layers):
        made.before([], answer_steps(Directive(answer=(0, ""))))
        forward(made, layers=layers_kept)
        made.after()
        answer = answer_read(made.payloads()["a0"].numpy(), made.plan)
        assert np.isfinite(answer).all() == (layers_kept == 2)
        assert np.isnan(answer).all() == (layers_kept != 2)


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


def test_a_later_stage_adds_its_layers() -> None:
    first, last = reader(), reader()
    read = []
    for number, made in enumerate((first, last)):
        made.before(step(Directive(), Directive()))
        read.append(forward(made, seed=number))
    passed_on = first.after()
    whole = last.after(passed_on)
    assert passed_on is not None
    assert whole is not None
    assert torch.equal(whole, torch.cat(read))


def test_a_step_copies_once_to_the_device_and_never_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA ``torch.tensor(.., device=)`` and reading a number back would stop vLLM's
    asynchronous scheduling."""
    made = reader(answers=True)
    run(made, step(Directive()))
    gate = EngineGate((1.0, 0.5, 0.5, 0.0, 0.0, 0.0), 0.0, 0.5)
    directive = Directive(first_token=True, gate=gate, end_token=END, slot=1)
    onsets, logits = step(directive, Directive(), directive), torch.randn(6, VOCABULARY)
    answers = answer_steps(Directive(answer=(0, "")), Directive(answer=(2, "another's")))
    sampled = torch.zeros(4, 1).long()
    made_tensors: list[object] = []
    tensor = torch.tensor

    def counting(*arguments: object, **options: object) -> torch.Tensor:
        assert options.get("device") is None, "waits for the device"
        made_tensors.append(options)
        return tensor(*arguments, **options)

    def waits(*_: object, **__: object) -> None:
        raise AssertionError("waits for the device")

    monkeypatch.setattr(torch, "tensor", counting)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    made.before(onsets, answers)
    forward(made)
    made.after()
    made.observe_logits(logits)
    made.gate(sampled)
    payloads = made.payloads()
    monkeypatch.undo()
    assert len(made_tensors) == 1
    for rows in (onsets, answers):
        assert len({payloads[row.request].untyped_storage().data_ptr() for row in rows}) == 1


# ---- gates

END = 7


def probe(name: ContextName, weight: float, intercept: float) -> ContextProbe:
    return ContextProbe(name, weight, intercept, rows=9, positive=4, auroc=0.9)


CONTEXT = Context(
    (probe("asks", 0.8, 0.1), probe("passage", 0.5, -0.2), probe("stated", 0.7, 0.3)),
    Applicability(0.5, questions_below=0.01, others_above=0.02, statement="What it means."),
)


@pytest.mark.parametrize("columns", [(0, 1, 2, 3), (3, 2, 0, 1)])
def test_the_gate_reads_the_context_as_the_request_side_does(columns: tuple[int, ...]) -> None:
    made, weight = reader(), (1.0, 0.0, 0.0, -1.5, 2.5, 0.7)

    def read(gate: EngineGate) -> tuple[Payload, PrefillResult]:
        terms = context_terms(gate.context, columns[1:])
        directive = Directive(
            gate=gate, end_token=END, slot=columns[0], context=terms, first_token=True
        )
        [payload] = run(
            made, step(directive), torch.zeros(3, VOCABULARY), torch.tensor([[1], [2], [3]])
        ).values()
        decoded = Payload.decode(payload.numpy(), made.plan, directive)
        return decoded, PrefillResult(
            tuple(decoded.trajectories[column] for column in columns), decoded.first_token, PROMPT
        )

    _, result = read(EngineGate(weight, 0.2, 0.5, CONTEXT))
    context_read = prompt_context(
        CONTEXT, [float(trajectory.mean()) for trajectory in result.trajectories[1:]], PROMPT
    )
    assert context_read.asks is not None
    signals = np.array(
        [
            result.trajectories[0].mean(),
            0.0,
            0.0,
            context_read.passage,
            context_read.stated,
            context_read.stated_length,
        ]
    )
    exact = float(risk(signals, np.array(weight), 0.2))
    for threshold, applies_from in (
        (exact - 1e-4, context_read.asks - 1e-4),
        (exact + 1e-4, context_read.asks - 1e-4),
        (exact - 1e-4, context_read.asks + 1e-4),
    ):
        applicability = Applicability(applies_from, 0.01, 0.02, "What it means.")
        gate = EngineGate(weight, 0.2, threshold, Context(CONTEXT.probes, applicability))
        decoded, result = read(gate)
        assert (
            decoded.gated
            is gate.closes(result)
            is (threshold < exact and applies_from < context_read.asks)
        )
    never = Context(
        (replace(CONTEXT.probes[0], intercept=-99.0), *CONTEXT.probes[1:]), CONTEXT.applicability
    )
    for context, closes in (
        (never, False),
        (replace(never, applicability=None), True),
    ):  # None: a policy wants it so
        decoded, result = read(EngineGate(weight, 0.2, exact - 1e-4, context))
        assert (
            decoded.gated is EngineGate(weight, 0.2, exact - 1e-4, context).closes(result) is closes
        )


def gated(gate: EngineGate, *, slot: int = 0, seed: int = 0) -> tuple[bool, int, float]:
    """One prompt: whether the payload reports a closed gate, the sampled token, and the risk."""
    made = reader()
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    directive = Directive(gate=gate, end_token=END, slot=slot, first_token=True)
    sampled = torch.tensor([[1], [2], [3]])
    [payload] = run(made, step(directive), logits, sampled).values()
    read = Payload.decode(payload.numpy(), made.plan, directive)
    assert read.first_token is not None
    signals = [
        read.trajectories[slot].mean(),
        read.first_token.log_max_prob,
        read.first_token.entropy,
        0.0,
        0.0,
        0.0,
    ]
    assert sampled[0, 0] == 1
    assert sampled[2, 0] == 3
    return (
        read.gated,
        int(sampled[1, 0]),
        float(risk(np.array(signals), np.array(gate.weight), gate.intercept)),
    )


WEIGHTS = [(1.5, 0.0, 0.0), (1.0, 0.7, -0.4), (0.0, 0.0, 1.0)]


@pytest.mark.parametrize("slot", range(4))
def test_a_gate_closes_at_and_above_its_threshold(slot: int) -> None:
    """The risk is computed from exactly the numbers in the payload."""
    for weights, intercept in product(WEIGHTS, (-1.0, 0.3)):
        weight = (*weights, 0.0, 0.0, 0.0)
        _, _, exact = gated(EngineGate(weight, intercept, 2.0), slot=slot)
        assert gated(EngineGate(weight, intercept, exact - 1e-4), slot=slot)[:2] == (True, END)
        assert gated(EngineGate(weight, intercept, exact + 1e-4), slot=slot)[:2] == (False, 2)


@pytest.mark.parametrize("intercept", [-50.0, 0.0, 50.0])
def test_a_threshold_of_0_closes_every_gate_and_one_of_1_none(
    intercept: float,
) -> None:
    assert gated(replace(SHUT, intercept=intercept))[:2] == (True, END)
    assert gated(replace(OPEN, intercept=intercept))[:2] == (False, 2)
    _, _, exact = gated(replace(HALF, threshold=2.0))
    assert gated(replace(HALF, threshold=exact))[:2] == (False, 2)


def test_gates_of_one_step_are_independent() -> None:
    made = reader()
    onsets = step(
        Directive(gate=OPEN, end_token=END),
        Directive(),
        Directive(gate=SHUT, end_token=END),
        Directive(gate=SHUT, end_token=END + 1, slot=3),
    )
    sampled = torch.arange(6).unsqueeze(1)
    payloads = run(made, onsets, torch.randn(8, VOCABULARY), sampled)
    assert sampled[:, 0].tolist() == [0, 1, 2, END, END + 1, 5]
    closed_gates = [
        Payload.decode(payloads[row.request].numpy(), made.plan, row.directive).gated
        for row in onsets
    ]
    assert closed_gates == [False, False, True, True]
