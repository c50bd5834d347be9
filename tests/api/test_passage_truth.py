"""A policy that takes only a share of passages for true: the risk beside a passage, before the
threshold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from service.engines.base import PromptContext
from service.errors import RequestError
from service.judging.guarantee import UNKNOWN, Shape, Standing
from service.policies.guard import OBSERVE, Action, Policy, risk_beside_passage
from service.scoring import beside_passage
from tests.api.test_reply import guaranteed
from tests.kit.api import WIRES, note_of, send_to
from tests.running import App, app_of_module

TRUTH = 0.5
HALF = Policy("half", Action.ABSTAIN, message="No.", passage_truth=TRUTH)
WATCH = replace(OBSERVE, name="watch")
POLICIES = {"half": HALF, "watch": replace(WATCH, passage_truth=TRUTH), "plain": WATCH}
QUESTION = "Why?"
BESIDE = f"Context: {'A fact. ' * 60}\n\n{QUESTION}"


app = app_of_module(add=[guaranteed], policies=POLICIES, policy="plain")


def scored(app: App, policy: str, **body: Any) -> dict[str, Any]:
    response = app.ask(**({"policy": policy} | body))
    document: dict[str, Any] = response
    return document


def test_the_risk_beside_a_passage_rises_before_the_threshold_and_is_said(app: App) -> None:
    [alone, beside] = scored(app, "plain", prompt=[QUESTION, BESIDE])["data"]
    [same, raised] = scored(app, "watch", prompt=[QUESTION, BESIDE])["data"]
    assert same == alone
    assert "passage_truth" not in beside
    assert raised["risk"] == pytest.approx(1 - TRUTH * (1 - beside["risk"]))
    assert raised["passage_truth"] == TRUTH
    for past, flagged in ((1e-6, False), (-1e-6, True)):
        [row] = scored(app, "half", prompt=BESIDE, threshold=raised["risk"] + past)["data"]
        assert (row["flagged"], row["decision"]) == (flagged, "abstain" if flagged else "continue")
    [unknown] = scored(app, "watch", input_ids=[1, 2])["data"]
    [read_so] = scored(app, "plain", input_ids=[1, 2])["data"]
    assert unknown["risk"] == pytest.approx(1 - TRUTH * (1 - read_so["risk"])), (
        "it may be a passage"
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
def test_each_protocol_withholds_by_it(app: App, wire: str, stream: bool) -> None:
    [own] = scored(app, "plain", prompt=BESIDE)["data"]
    between = (own["risk"] + 1 - TRUTH * (1 - own["risk"])) / 2
    messages = [{"role": "user", "content": BESIDE}]
    for policy, withheld in (("half", True), ("plain", False)):
        decoded = app.engine.counters.decode_steps
        chosen = {"policy": policy, "threshold": between}
        response = send_to(app, WIRES[wire], messages=messages, chosen=chosen, stream=stream)
        assert (app.engine.counters.decode_steps == decoded) is withheld, policy
        assert (f'"passage_truth": {TRUTH}' in response.text) is withheld
        if withheld and not stream:
            assert note_of(response.json())["data"][0]["passage_truth"] == TRUTH


def test_a_guarantee_is_void(app: App) -> None:
    void = scored(app, "half", prompt=QUESTION, bundle="sure")["guarantee"]["void"]
    assert void == ["policy: 'half' takes 0.5 of passages for true, the calibration all"]


@pytest.mark.parametrize(
    ("form", "reads", "beside"),
    [
        (True, None, True),
        (False, None, False),
        (None, None, True),
        (False, 0.6, True),
        (True, 0.1, True),
        (False, 0.4, False),
        (None, 0.4, False),
        (None, 0.6, True),
    ],
)
def test_a_passage_is_told_by_its_form_or_by_what_the_bundle_reads(
    form: bool | None, reads: float | None, beside: bool
) -> None:
    standing = UNKNOWN if form is None else Standing(Shape("0", form, system=False))
    assert beside_passage(standing, PromptContext(passage=reads)) is beside


def test_the_arithmetic() -> None:
    assert [risk_beside_passage(risk, 0.8) for risk in (0.0, 0.5, 1.0)] == pytest.approx(
        [0.2, 0.6, 1.0]
    )
    assert risk_beside_passage(0.123456789, 1.0) == 0.123456789
    for truth in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(RequestError, match="passage_truth"):
            Policy("a", Action.BLOCK, passage_truth=truth)
