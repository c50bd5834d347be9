"""Canary and shadows: who judges, that shadows cost no forward and decide nothing, and what is told
of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle
from service.annexes.guardrails import CLASSIFY_ROUTE, LITELLM_ROUTE
from service.errors import NonFiniteReadout
from service.policies.guard import Action, Policy
from service.scoring import Scorer
from service.serving.catalogue import Rollout, RolloutPlan
from tests.engine_kinds import KINDS
from tests.kit.api import CHAT, bodies_by_route, note_of, reads_answers, request_of
from tests.kit.bundles import GUARANTEE
from tests.kit.tables import values
from tests.matching import matching_bundle
from tests.running import App

PROMPTS = [f"question {number}" for number in range(40)]
FIXED = b"a secret, so that each run of the tests draws alike"
BOTH = ("one", "two")
PLAN = RolloutPlan("two:1", 0.3, ("three:1",), FIXED)
ALWAYS = RolloutPlan("two:1", 1.0)  # the canary judges whatever names no bundle


def app_with(tmp_path: Path, plan: RolloutPlan, kind: str = KINDS[0], **settings: Any) -> App:
    app = App(tmp_path, kind, **{"names": ("one", "two", "three"), "callers_may": ()} | settings)
    app.state.catalogue.plan = plan
    return app


@pytest.fixture
def app(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[App]:
    """On one engine; a test where engines could differ asks for both."""
    with app_with(tmp_path, PLAN, getattr(request, "param", KINDS[0])).started() as app:
        yield app


def alone(app: App, bundle: Bundle, prompts: Sequence[str]) -> dict[str, float]:
    """The risk of each prompt by this bundle."""
    scorer = Scorer(app.served, bundle)
    reports = scorer.score([scorer.render(prompt) for prompt in prompts])
    return {prompt: report.risk for prompt, report in zip(prompts, reports, strict=True)}


def judge(app: App, **body: Any) -> str:
    """The name of the bundle that judges."""
    return str(app.ask(**body)["bundle"]["name"])


def card(app: App, name: str) -> Any:
    cards = app.client.get("/v1/bundles").json()["data"]
    return {card["name"]: card for card in cards}[name]


def gives_no_number(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    judging = Scorer.judge

    def fails(self: Scorer, *given: Any, **more: Any) -> Any:
        if self is scorer:
            raise NonFiniteReadout("a NaN")
        return judging(self, *given, **more)

    monkeypatch.setattr(Scorer, "judge", fails)


def test_the_canary_has_its_share_and_a_key_stays(app: App) -> None:
    default, _, other = app.state.catalogue.scorers
    canary = app.state.catalogue.rollout.canary

    def drawn(
        scorer: Scorer | None, share: float, count: int = 20_000, secret: bytes = b"a secret"
    ) -> list[bool]:
        rollout = Rollout(scorer, share, secret=secret)
        return [rollout.chosen(default, number.__str__) is scorer for number in range(count)]

    assert app.state.catalogue.rollout.secret == FIXED, "replicas that share it draw alike"
    first = drawn(canary, 0.3)
    assert np.mean(first) == pytest.approx(
        0.3, abs=0.012
    )  # 3.7 standard errors, and the draw is fixed
    assert drawn(canary, 0.3, 2_000) == first[:2_000]
    assert np.mean(np.array(first) & drawn(other, 0.3)) == pytest.approx(0.09, abs=0.01), (
        "another canary, other keys"
    )
    assert np.mean(np.array(first) & drawn(canary, 0.3, secret=b"another")) == pytest.approx(
        0.09, abs=0.01
    )
    assert (set(drawn(canary, 0.0, 500)), set(drawn(canary, 1.0, 500))) == ({False}, {True})


def by_session(app: App, number: int) -> set[str]:
    """The bundles that judge one session, on every route."""
    headers = {"x-session-id": f"s{number}"}
    names = {judge(app, prompt=prompt, headers=headers) for prompt in PROMPTS[:4]}
    for turn in ("a", "b"):
        bodies = bodies_by_route(turn)
        for path in (CHAT.route, LITELLM_ROUTE):
            answer = app.ask(path, headers=headers, **bodies[path])
            names.add(note_of(answer)["bundle"]["name"])
        classified = app.client.post(CLASSIFY_ROUTE, json=bodies[CLASSIFY_ROUTE], headers=headers)
        names.add(classified.headers["x-hallutracer-bundle"].partition(":")[0])
    return names


def by_conversation(app: App, number: int) -> set[str]:
    """The bundles that judge one conversation, without a header."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"question {number}"},
    ]
    names = set()
    for _ in range(3):
        names.add(judge(app, messages=messages))
        messages += [
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "And then?"},
        ]
    return names


@pytest.mark.parametrize("judges", [by_session, by_conversation])
def test_a_session_stays_with_one_bundle(app: App, judges: Callable[[App, int], set[str]]) -> None:
    results = [judges(app, number) for number in range(12)]
    assert {len(names) for names in results} == {1}
    assert set[str]().union(*results) == {"one", "two"}


def test_a_named_bundle_is_not_rerouted_and_still_the_operators_to_allow(tmp_path: Path) -> None:
    with app_with(tmp_path, ALWAYS).started() as app:
        assert judge(app, prompt="a") == "two"
        assert judge(app, prompt="a", bundle="one") == "one"
        refused = app.ask(status=403, prompt="a", bundle="two")
        assert refused["error"]["param"] == "bundle"


@pytest.mark.parametrize("app", KINDS, indirect=True)
def test_each_request_is_judged_by_one_bundle_and_a_shadow_reads_the_same_forward(
    app: App,
) -> None:
    """The risk is that bundle's; the shadow decides nothing."""
    counters, threshold = app.engine.counters, app.bundles[2].manifest.threshold
    risks = {bundle.manifest.name: alone(app, bundle, PROMPTS) for bundle in app.bundles}
    before, seen = counters.prefills, Counter[str]()
    for prompt in PROMPTS:
        answer = app.ask(prompt=prompt, generate={"max_tokens": 2})
        row, name = answer["data"][0], answer["bundle"]["name"]
        assert row["risk"] == pytest.approx(risks[name][prompt], abs=1e-6)
        assert row["flagged"] == (risks[name][prompt] >= threshold)
        assert "three" not in str(answer)
        seen[name] += 1
        if (stricter := risks["three"][prompt] >= threshold) != row["flagged"]:
            seen["stricter" if stricter else "looser"] += 1
    assert min(seen[name] for name in ("one", "two", "stricter", "looser")) > 0
    assert counters.prefills - before == len(PROMPTS)
    compared = card(app, "three")["compared"]
    assert compared["prompts"] == seen["one"] + seen["two"] == len(PROMPTS)
    assert [compared[kind] - seen[kind] for kind in ("stricter", "looser")] == [0, 0]
    disagreement = (seen["stricter"] + seen["looser"]) / len(PROMPTS)
    assert compared["disagreement"] == pytest.approx(disagreement)
    assert 0 < compared["mean_difference"] < 1
    assert app.series("shadow_prompts_total") == len(PROMPTS)
    assert app.series("shadow_prompts_total", verdict="looser") == seen["looser"]


def test_a_shadow_that_a_request_names_is_not_compared_with_itself(tmp_path: Path) -> None:
    with app_with(tmp_path, PLAN, callers_may=("bundle",)).started() as app:
        for body, compared in (({"bundle": "three"}, 0), ({}, 1)):
            app.ask(prompt="a", **body)
            assert card(app, "three")["compared"]["prompts"] == compared


@pytest.mark.parametrize("aliases", [1, 2])
def test_a_canary_that_is_a_shadow_too_is_compared_where_it_does_not_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aliases: int
) -> None:
    with app_with(tmp_path, RolloutPlan("two:1", 0.3, ("two:1",), FIXED)).started() as app:
        if aliases == 2:  # each alias is loaded by itself
            again = Scorer(
                app.served, next(bundle for bundle in app.bundles if bundle.manifest.name == "two")
            )
            rollout = replace(app.state.catalogue.rollout, shadows=(again,))
            app.state.catalogue.rollout = rollout
        names = [judge(app, prompt=text) for text in PROMPTS]
        assert set(names) == {"one", "two"}
        assert card(app, "two")["role"] == "canary"
        assert card(app, "two")["compared"]["prompts"] == names.count("one")


def test_a_shadow_that_gives_no_number_costs_no_request(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    gives_no_number(app.state.catalogue.rollout.shadows[0], monkeypatch)
    app.ask(prompt="a")
    compared = card(app, "three")["compared"]
    expected = {"failed": 1, "disagreement": 1.0, "mean_difference": None}
    assert compared.items() >= expected.items()


def test_what_each_bundle_does_is_told(app: App) -> None:
    roles = [("one", "default", 0.7), ("two", "canary", 0.3), ("three", "shadow", None)]
    for name, role, share in roles:
        told = card(app, name)
        assert (told["role"], told.get("share")) == (role, share)
        assert told["golden"]["risk"] <= told["golden"]["risk_tolerance"]
        assert app.series("bundle_role_info", bundle=f"{name}:1", role=role) == 1
        assert app.series("bundle_role_info", bundle=f"{name}:1") == 1


@pytest.mark.parametrize(
    ("plan", "reference", "reason"),
    values(
        """
        {"canary": "one:1"} | "one:1" | "judges already"
        {"shadows": ["one:1"]} | "one:1" | "judges already"
        {"shadows": ["two:1"]} | "two:1" | "trained on text prompts and one:1 on chat ones"
        """
    ),
)
def test_what_cannot_be_used_is_left_out_and_told(
    tmp_path: Path, plan: dict[str, Any], reference: str, reason: str
) -> None:
    two = [lambda engine, folder: matching_bundle(engine, folder, "two", 1, prompt_format="text")]
    with app_with(tmp_path, RolloutPlan(**plan), names=("one",), add=two).started() as app:
        rollout = app.state.catalogue.rollout
        assert (rollout.shadows, rollout.canary) == ((), None)
        (left_out,) = app.client.get("/v1/bundles").json()["status"]["left_out"]
        assert left_out["reference"] == reference
        assert reason in left_out["reason"]
        assert judge(app, prompt="a") == "one"


# --- a caller who draws again until its session is the canary's ---


def withheld_alone(app: App, name: str, prompts: Sequence[str]) -> list[str]:
    """The prompts that this bundle alone would withhold."""
    [bundle] = [bundle for bundle in app.bundles if bundle.manifest.name == name]
    threshold = bundle.manifest.threshold
    return [prompt for prompt, risk in alone(app, bundle, prompts).items() if risk >= threshold]


MANY = [f"question {number}" for number in range(200)]


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (Policy("gate", Action.ABSTAIN), "scheduled"),
        (Policy("block", Action.BLOCK), "own loop"),
        (Policy("fetch", Action.RETRIEVE), "scheduled"),
    ],
)
def test_no_session_gets_past_the_default_bundle(tmp_path: Path, policy: Policy, kind: str) -> None:
    plan = RolloutPlan("two:1", 0.5, ("three:1",), FIXED)
    with app_with(
        tmp_path, plan, kind, policy=policy.name, policies={policy.name: policy}
    ).started() as app:
        asked = withheld_alone(app, "one", MANY)[:25]
        assert len(asked) == 25
        canary_passes = set(asked) - set(withheld_alone(app, "two", asked))
        assert canary_passes, "the canary alone would let some of them through"
        seen, told = set(), set()
        for prompt in asked:
            for session in range(8):
                headers = {"x-session-id": f"{prompt} {session}"}
                answer = app.ask(prompt=prompt, generate={"max_tokens": 4}, headers=headers)
                (row,), judging = answer["data"], answer["bundle"]["name"]
                seen.add(judging)
                assert row["decision"] != "continue", (prompt, session, judging)
                assert "completion" not in row
                if judging == "two" and prompt in canary_passes:
                    told.add(row["decided_by"])
                    assert not row["flagged"]
                else:
                    assert "decided_by" not in row
                if session < 2:
                    turns = [{"role": "user", "content": prompt}]
                    for stream in (False, True):
                        body = request_of(CHAT, turns, stream=stream)
                        text = app.client.post(CHAT.route, json=body, headers=headers).text
                        assert '"content_filter"' in text
                        assert "It is" not in text
        assert (seen, told) == ({"one", "two"}, {"one:1"})
        overruled = [app.series("canary_overruled_total", bundle=f"{name}:1") for name in BOTH]
        assert overruled[0] == 0
        assert overruled[1] >= len(canary_passes)


@pytest.mark.parametrize("policy", ["gate", "warn", "observe"])
def test_the_stricter_verdict_counts_and_where_nothing_is_withheld_the_canary_s_alone(
    tmp_path: Path, policy: str
) -> None:
    warns = {"warn": Policy("warn", Action.ANNOTATE, message="Careful ({risk}).")}
    with app_with(tmp_path, ALWAYS, policy=policy, policies=warns).started() as app:
        by_default, by_canary = (set(withheld_alone(app, name, MANY)) for name in BOTH)
        assert by_canary - by_default
        assert set(MANY) - by_default - by_canary
        for prompt in MANY:
            row = app.ask(prompt=prompt, generate={"max_tokens": 2})["data"][0]
            either = prompt in by_default | by_canary
            assert (row["decision"] != "continue") is (either and policy == "gate")
            assert ("message" in row) is (either and policy != "observe")
            assert policy != "observe" or "decided_by" not in row


@pytest.mark.parametrize("canary", [0.9, 0.3])
def test_a_threshold_is_held_to_both_bundles(tmp_path: Path, canary: float) -> None:
    other = [lambda engine, folder: matching_bundle(engine, folder, "two", 1, threshold=canary)]
    with app_with(tmp_path, ALWAYS, names=("one",), add=other).started() as app:
        stricter = min(canary, app.bundles[0].manifest.threshold)
        refused = app.ask(status=403, prompt="a", threshold=stricter + 0.1)
        assert refused["error"]["param"] == "threshold"
        app.ask(prompt="a", threshold=stricter - 0.1)


def test_where_the_default_bundle_gives_no_number_the_canary_s_answer_is_withheld(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with app_with(tmp_path, ALWAYS).started() as app:
        asked = set(MANY).difference(*(withheld_alone(app, name, MANY) for name in BOTH))
        gives_no_number(app.state.catalogue.scorers[0], monkeypatch)
        row = app.ask(prompt=min(asked), generate={"max_tokens": 2})["data"][0]
        assert (row["decision"], row["decided_by"], row["flagged"]) == ("abstain", "one:1", False)


def test_a_policy_that_reads_answers_has_the_default_bundle_alone(tmp_path: Path) -> None:
    """An engine reads an answer with one bundle's probes: the canary's alone could let it go on."""
    held = {"again": Policy("again", Action.ABSTAIN, recheck=True)}

    bundles = [reads_answers(name) for name in BOTH]
    with app_with(tmp_path, ALWAYS, names=(), add=bundles, policies=held).started() as app:
        assert judge(app, prompt="a") == "two"
        assert judge(app, prompt="a", policy="again") == "one"


def test_the_guarantee_of_a_canary_is_void_beside_another_verdict(tmp_path: Path) -> None:
    sure = [
        lambda engine, folder: matching_bundle(
            engine, folder, "two", 1, guarantee=GUARANTEE, threshold=0.25
        )
    ]
    with app_with(tmp_path, ALWAYS, names=("one",), add=sure).started() as app:
        answer = app.ask(prompt="a", generate={"max_tokens": 2})["guarantee"]
        assert not answer["holds"]
        assert any(reason.startswith("canary: ") for reason in answer["void"])
