"""Prompts that ask for no fact, on the wire and in everything that counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hallutracer_client.results import ScoreResult, parse
from service.feedback.databases import location
from service.judging.drift import DriftLimits
from service.judging.guarantee import guarantee_status, outside_as_calibrated
from service.policies.guard import GATE, Action, Policy
from service.serving.feedback import Feedback
from service.serving.judgement import Judgement
from service.serving.monitor import Monitor, digest_of
from service.vllm_plugin.middleware import Note
from tests.feedback.made import rows
from tests.matching import contextual_bundle
from tests.probes_store.factory import GUARANTEE
from tests.running import App

ALL = Policy("all", Action.ABSTAIN, message="Not sure.", withhold_no_fact=True)
OPEN = Policy("open", Action.ABSTAIN, message="Not sure.", withhold_outside=False)
KINDS = [(high, applies) for high in (True, False) for applies in (True, False)]


def serving(folder: Path, reach: float = 1e3, **options: Any) -> App:
    """An app whose first bundle has context probes, and a reference that ends at ``reach``."""
    app = App(folder, policies={"all": ALL, "open": OPEN}, **options)
    app.bundles.insert(0, contextual_bundle(app.engine, folder, reach=reach))
    return app


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with serving(tmp_path_factory.mktemp("bundles")).started() as app:
        yield app


@pytest.fixture(scope="module")
def prompts(service: App) -> dict[tuple[bool, bool], list[str]]:
    """By whether the risk is at or above the bundle's threshold, and whether it applies."""
    found: dict[tuple[bool, bool], list[str]] = {kind: [] for kind in KINDS}
    scorer = service.state.catalogue.scorers[0]
    texts = [f"prompt {number}" for number in range(80)]
    for text, report in zip(texts, scorer.score([scorer.render(prompt=text) for text in texts]), strict=True):
        found[report.risk >= scorer.bundle.manifest.threshold, report.context.applies].append(text)
    assert all(len(found[kind]) >= 3 for kind in KINDS)
    return found


def told(app: App, text: str, **body: Any) -> dict[str, Any]:
    response = app.client.post("/score", json={"prompt": text} | body)
    assert response.status_code == 200, response.text
    (row,) = response.json()["data"]
    (parsed,) = parse(ScoreResult, response.content).data
    assert (parsed.applies, parsed.asks) == (row.get("applies"), row.get("asks"))
    return dict(row)


def metric(app: App, name: str) -> float:
    """Of the first bundle."""
    start = f'hallutracer_{name}{{bundle="context:1"'
    values = [line for line in app.client.get("/metrics").text.splitlines() if line.startswith(start)]
    assert values, name
    return sum(float(line.split()[-1]) for line in values)


Prompts = dict[tuple[bool, bool], list[str]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("generate", [None, {"max_tokens": 2}])
def test_an_answer_tells_whether_its_risk_applies(service: App, prompts: Prompts, kind: Any, generate: Any) -> None:
    high, applies = kind
    row = told(service, prompts[kind][0], generate=generate)
    assert row["applies"] is applies is (row["asks"] >= 0.5)
    assert (row["risk"] >= row["threshold"], row["flagged"]) == (high, high and applies)
    assert row["decision"] == ("abstain" if high and applies else "continue")
    assert ("completion" in row) == (generate is not None and row["decision"] == "continue")
    assert ("message" in row) == (row["decision"] == "abstain")


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_may_judge_what_asks_for_no_fact(service: App, prompts: Prompts, kind: Any) -> None:
    high, applies = kind
    row = told(service, prompts[kind][0], policy="all", generate={"max_tokens": 2})
    assert (row["applies"], row["flagged"], row["decision"]) == (applies, high, "abstain" if high else "continue")
    assert ("completion" in row, row.get("message")) == (not high, "Not sure." if high else None)


def test_a_bundle_that_cannot_tell_says_nothing(service: App, prompts: Prompts) -> None:
    assert not {"applies", "asks"} & set(told(service, prompts[True, False][0], bundle="one"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["gate", "all"])
def test_a_chat_is_answered_by_the_same_rule(service: App, prompts: Prompts, kind: Any, policy: str) -> None:
    high, applies = kind
    body = {"model": "scripted", "messages": [{"role": "user", "content": prompts[kind][0]}], "max_tokens": 3}
    answer = service.client.post("/v1/chat/completions", json=body | {"vllm_xargs": {"hallutracer_policy": policy}})
    assert answer.status_code == 200, answer.text
    (row,) = answer.json()["hallutracer"]["data"]
    assert (row["applies"], row["asks"] >= 0.5) == (applies, applies)
    withheld = high and (applies or policy == "all")
    (choice,) = answer.json()["choices"]
    assert row["decision"] == ("abstain" if withheld else "continue")
    assert choice["message"]["content"] == (None if withheld else service.engine.answer[:3])


def test_vllms_note_has_it(service: App, prompts: Prompts) -> None:
    scorer = service.state.catalogue.scorers[0]
    reports = scorer.score([scorer.render(prompt=prompts[True, False][0])])
    body = Note([Judgement.of(scorer, GATE, reports)]).body()
    assert body is not None
    assert body["data"][0]["applies"] is False


def test_no_caller_lets_prompts_that_ask_for_no_fact_through(tmp_path: Path, prompts: Prompts) -> None:
    rights: Any = ("bundle", "threshold")
    with serving(tmp_path, policy="all", callers_may=rights).started() as app:
        text = prompts[True, False][0]
        assert told(app, text)["decision"] == "abstain"
        answer = app.client.post("/score", json={"prompt": text, "policy": "gate"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "policy")
        assert "'gate' lets prompts that ask for no fact through" in answer.json()["error"]["message"]
        # By default the policy withholds what lies outside, so to open that is no less a choice.
        answer = app.client.post("/score", json={"prompt": text, "policy": "open"})
        assert "lets prompts outside training through" in answer.json()["error"]["message"]
    with serving(tmp_path / "may", policy="all", callers_may=("policy",)).started() as app:
        assert told(app, text, policy="gate")["decision"] == "continue"
    with serving(tmp_path / "stricter", callers_may=()).started() as app:
        assert told(app, text, policy="all")["decision"] == "abstain"


def test_by_default_what_lies_outside_is_withheld_where_the_bundle_can_tell(tmp_path: Path, prompts: Prompts) -> None:
    with serving(tmp_path, reach=1e-3).started() as app:
        for kind in KINDS:
            row = told(app, prompts[kind][0], generate={"max_tokens": 2})
            assert (row["outside_training"], row["decision"]) == (True, "abstain")
            row = told(app, prompts[kind][0], policy="open", generate={"max_tokens": 2})
            assert (row["decision"] == "abstain") is (kind == (True, True))


def test_metrics_count_it_apart(service: App, prompts: Prompts) -> None:
    names = ("no_fact_total", "risk_count", "risk_by_conversation_count", "flagged_total", "prompts_total")

    def counted(text: str, **body: Any) -> tuple[float, ...]:
        before = [metric(service, name) for name in names]
        told(service, text, **body)
        return tuple(metric(service, name) - old for name, old in zip(names, before, strict=True))

    assert counted(prompts[True, False][1]) == (1, 0, 0, 0, 1)
    assert counted(prompts[False, False][1]) == (1, 0, 0, 0, 1)
    assert counted(prompts[True, True][1]) == (0, 1, 1, 1, 1)
    assert counted(prompts[False, True][1]) == (0, 1, 1, 0, 1)
    assert counted(prompts[True, False][1], policy="all") == (1, 0, 0, 1, 1)


def test_the_series_is_there_before_anything_is_counted(tmp_path: Path) -> None:
    with serving(tmp_path).started() as app:
        assert metric(app, "no_fact_total") == 0


def test_the_monitor_does_not_watch_it(service: App, prompts: Prompts) -> None:
    scorer = service.state.catalogue.scorers[0]
    monitor = Monitor(scorer, DriftLimits(window=50, every=10), lambda _: None)
    monitor.reference = object()  # type: ignore[assignment]  # compared with nothing: its window is never full
    for kind in KINDS:
        for text in prompts[kind][:3]:
            ids = scorer.render(prompt=text)
            monitor.observe(scorer.score([ids]), [digest_of(ids)])
    assert len(monitor._window) == monitor._seen == 6


def test_feedback_never_draws_it(tmp_path: Path, prompts: Prompts) -> None:
    where = location(str(tmp_path / "feedback.db"))
    with serving(
        tmp_path, policy="observe", feedback=lambda metrics: Feedback(where, metrics, share=1.0)
    ).started() as app:
        for kind in KINDS:
            for text in prompts[kind][:2]:
                told(app, text, policy="gate")
                told(app, text, policy="all")
        app.state.feedback.close()
        told_of = {row[:2]: row[2:] for row in rows(
            where, "SELECT policy, flagged, SUM(drawn), COUNT(*) FROM hallutracer_answers GROUP BY policy, flagged"
        )}  # fmt: skip
    # Of each kind two: only those that ask, and are answered, are what a guarantee is about.
    assert told_of == {("gate", 0): (2, 6), ("gate", 1): (0, 2), ("all", 0): (2, 4), ("all", 1): (0, 4)}


VOID = {
    (True, True): None,
    (True, None): None,
    (True, False): "does not withhold prompts outside training, the calibration did",
    (False, True): "also withholds prompts outside training, the calibration did not",
    (False, None): None,
    (False, False): None,
}


@pytest.mark.parametrize(("context", "outside"), VOID)
def test_a_guarantee_is_void_where_outside_is_treated_otherwise(
    service: App, context: bool, outside: bool | None
) -> None:
    scorer = service.state.catalogue.scorers[0]
    manifest = dataclasses.replace(scorer.bundle.manifest, guarantee=GUARANTEE, threshold=GUARANTEE.threshold)
    if not context:
        manifest = dataclasses.replace(manifest, context=None)
    policy = Policy("mine", Action.BLOCK, withhold_outside=outside)
    stands, why = guarantee_status(manifest, policy, "float32"), VOID[context, outside]
    assert stands is not None
    assert stands.violations == (() if why is None else (f"policy: 'mine' {why}",))
    assert outside_as_calibrated(manifest, policy) is (why is None)
