"""Directives and payloads survive encoding; invalid payloads are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from probes_store.records import Context
from service.engines.base import sigmoid
from service.engines.vllm.wire import (
    CERTAIN,
    EXTRAS,
    KEY,
    NO_CONTEXT,
    Directive,
    Payload,
    Plan,
    answer_read,
    context_terms,
)
from service.errors import EngineError, NonFiniteReadout
from service.readout import Geometry, Site
from tests.engines import tiny
from tests.kit.bundles import APPLICABILITY, ASKS, PASSAGE, STATED

GEOMETRY = Geometry(num_layers=3, num_heads=4, head_dim=2, hidden_size=6)
PLAN = Plan(GEOMETRY, tuple(Site), 2, True, True)
COLUMNS = 4  # 2 sites x 2 slots
LOGITS = COLUMNS * 3  # layers
GATE = tiny.gate(0.7, (0.1, 0.0, -2.5), 1e-3)
GATED = Directive(gate=GATE, end_token=5, slot=1).encode()[KEY]
TERMS = (3.0, 0.0, 2.0, 0.1, 1 / 3, 7.0, -1e-9, 2.0, 50.0, 0.25)


def wire(*, activations: bool = False) -> np.ndarray:
    """A payload of distinct numbers."""
    count = PLAN.payload + (PLAN.activation_floats() if activations else 0)
    values = np.arange(count, dtype=np.float32) / 8
    values[LOGITS : LOGITS + EXTRAS] = [-0.5, 1.25, 17, 0]
    return values


@pytest.mark.parametrize(
    "directive",
    [
        Directive(),
        Directive(first_token=True, slot=3),
        Directive(probes=((0, "a1"), (3, "b2"))),
        Directive(weights=7),
        Directive(probes=((0, "a1"),), answer=(3, "b2")),
        Directive(activations=True),
        Directive(gate=GATE, end_token=5, slot=1),
        Directive(
            gate=replace(GATE, weight=(0.1, 0.0, 0.0, 1.5, -2.5, 0.3)), end_token=5, context=TERMS
        ),
        Directive(
            first_token=True,
            gate=tiny.gate(1.0, (1 / 3,), -7.0),
            end_token=0,
        ),
    ],
)
def test_a_directive_round_trips(directive: Directive) -> None:
    sent = json.loads(json.dumps(directive.encode()))  # plain values only
    assert Directive.decode(sent, PLAN) == directive
    assert Directive.decode({"other": "plugin", **sent}, PLAN) == directive


def test_the_terms_of_a_record_are_by_name_not_by_its_order() -> None:
    made = context_terms(Context((STATED, ASKS, PASSAGE), APPLICABILITY), [3, 1, 2, 0])
    assert made == (1, 2, 3, 1.5, 0.75, 0.5, 0.25, -0.5, 0.0, 0.2)
    # Of a probe that is not there the probability is 1, and where none tells, the risk applies.
    made = context_terms(Context((PASSAGE,), None), [2])
    assert made == (0, 2, 0, 0.0, 0.75, 0.0, CERTAIN, -0.5, CERTAIN, -1.0)
    assert context_terms(None, [1, 2, 3]) == NO_CONTEXT
    assert sigmoid(CERTAIN) == 1.0


WRONG = [
    *({name: value} for name in GATED for value in ("x", [], {}, "nan", 1e400, -1, 2**80)),
    {"slot": COLUMNS},
    {"gate": [[0.0]] * 8},
    {"end_token": None},
    {"rows": True},
    *({"probes": probes} for probes in ([[0]], [["a", "b"]], 3, [[10**30, "b"]])),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_a_caller_could_write_never_raises_in_a_worker(wrong: dict[str, object]) -> None:
    directive = Directive.decode({KEY: GATED | wrong}, replace(PLAN, activations=False))
    if directive is not None:
        assert 0 <= directive.slot < COLUMNS
        assert not directive.activations
        assert directive.answer is None
        assert directive.gate is None or 0 <= (directive.end_token or 0) < 2**31
    [name] = wrong
    Directive.decode({KEY: {field: value for field, value in GATED.items() if field != name}}, PLAN)


def with_number(name: str, position: int, value: object) -> dict[str, object]:
    return {name: [*GATED[name][:position], value, *GATED[name][position + 1 :]]}


NO_DIRECTIVES = [
    *(
        with_number(name, position, bad)
        for name in ("context", "gate")
        for position in range(len(GATED[name]))
        for bad in (math.nan, math.inf, -math.inf, "nan", None, [], "x")
    ),
    *(
        with_number("context", position, slot)
        for position in range(3)
        for slot in (-1, COLUMNS, 2**40, -(2**70), 1e300)
    ),
    *({"context": [0.0] * length} for length in (0, 9, 11)),
    *({"gate": [0.0] * length} for length in (4, 7)),
    *({"answer": [column, "a"]} for column in (-1, COLUMNS, 2**70, "x")),
    *({"answer": answer} for answer in ([0], [0, "a", 1], "x", 1)),
]


def test_what_is_no_directive_of_this_plan_is_none() -> None:
    for extra_args in (None, {}, {"other": 1}, {KEY: None}, {KEY: "text"}):
        assert Directive.decode(extra_args, PLAN) is None
    for change in NO_DIRECTIVES:
        assert Directive.decode({KEY: GATED | change}, PLAN) is None, change
    reads = {KEY: GATED | {"answer": [1, "a"]}}
    assert Directive.decode({KEY: GATED}, PLAN) is not None
    assert Directive.decode(reads, PLAN) is not None
    assert Directive.decode(reads, replace(PLAN, answers=False)) is None, "it reads no answers"


def test_numbers_that_were_not_asked_for_are_ignored_and_rounding_leaves_no_range() -> None:
    """The first token is summarised only if it is used."""
    for weight, needed in (((1.0,), False), ((1.0, 0.0, 0.1), True)):
        assert Directive(gate=tiny.gate(0.5, weight), end_token=1).needs_first_token is needed
    values = wire()
    values[LOGITS : LOGITS + 3] = math.nan
    payload = Payload.decode(values, PLAN, Directive())
    assert (payload.first_token, payload.activations) == (None, {})
    values[LOGITS : LOGITS + 3] = [1e-7, -1e-7, 3]
    first = Payload.decode(values, PLAN, Directive(first_token=True)).first_token
    assert first is not None
    assert (first.log_max_prob, first.entropy) == (0.0, 0.0)


@pytest.mark.parametrize("activations", [True, False])
def test_a_payload_of_another_length_is_refused(activations: bool) -> None:
    plain, whole = PLAN.payload, PLAN.payload + PLAN.activation_floats()
    right = whole if activations else plain
    for count in (right - 1, right + 1, right - PLAN.payload, plain + whole - right):
        with pytest.raises(EngineError, match=f"sent {count} numbers"):
            Payload.decode(np.zeros(count, np.float32), PLAN, Directive(activations=activations))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("position", "message"),
    [
        (0, "layer 0"),
        (3 * 3 + 2, "layer 2"),
        (LOGITS, "first token"),
        (LOGITS + 1, "first token"),
        (PLAN.payload, "attention_head"),
        (PLAN.payload + PLAN.activation_floats() - 1, "residual_stream"),
    ],
)
def test_a_nan_or_infinity_is_refused(position: int, message: str, bad: float) -> None:
    values = wire(activations=True)
    values[position] = bad
    with pytest.raises(NonFiniteReadout, match=message):
        Payload.decode(values, PLAN, Directive(activations=True))


def test_what_was_read_of_an_answer_s_token_is_a_trajectory() -> None:
    """Or says why not: test_reader.py."""
    sent = np.array([[0.5, -1.25, math.inf, 0.0]], np.float32)
    assert answer_read(sent, PLAN).tolist() == [0.5, -1.25, math.inf]
    assert answer_read(sent, PLAN).dtype == np.float64
    for count in (3, 5, PLAN.payload):
        with pytest.raises(EngineError, match=f"sent {count} numbers"):
            answer_read(np.zeros(count, np.float32), PLAN)
