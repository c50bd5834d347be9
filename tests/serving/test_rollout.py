"""Canary and shadows: who judges, that shadows cost no forward and decide nothing, and what is told of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from probes_store.bundle import Bundle
from probes_store.errors import BundleNotFound
from service.access.callers import ApiKey, Key, Right, Scope, digest_of
from service.engines.base import Engine
from service.errors import NonFiniteReadout
from service.scoring import Scorer
from service.serving.catalogue import Rollout, RolloutPlan
from tests.engine_kinds import KINDS
from tests.matching import matching_bundle
from tests.running import App

PROMPTS = [f"question {number}" for number in range(40)]
PLAN = RolloutPlan("two:1", 0.3, ("three:1",))


def app_with(tmp_path: Path, plan: RolloutPlan, kind: str = KINDS[0], **settings: Any) -> App:
    settings = {"names": ("one", "two", "three"), "callers_may": ()} | settings
    app = App(tmp_path, kind, **settings)
    app.state.catalogue.plan = plan
    return app


@pytest.fixture
def app(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[App]:
    """On one engine; a test where engines could differ asks for both."""
    with app_with(tmp_path, PLAN, getattr(request, "param", KINDS[0])).started() as app:
        yield app


def alone(app: App, bundle: Bundle, prompt: str) -> float:
    scorer = Scorer(app.served, bundle)
    return scorer.score([scorer.render(prompt)])[0].risk


def card(app: App, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in app.client.get("/v1/bundles").json()["data"] if one["name"] == name)
    return found


def test_the_canary_has_its_share_and_a_key_stays(tmp_path: Path) -> None:
    with app_with(tmp_path, PLAN).started() as app:
        rollout, default = app.state.catalogue.rollout, app.state.catalogue.scorers[0]
        drawn = [rollout.chosen(default, lambda n=n: str(n)) is rollout.canary for n in range(20_000)]  # type: ignore[misc]
        assert np.mean(drawn) == pytest.approx(0.3, abs=0.012)  # 3.7 standard errors, and the draw is fixed
        again = [rollout.chosen(default, lambda n=n: str(n)) is rollout.canary for n in range(2_000)]  # type: ignore[misc]
        assert again == drawn[:2_000]
        other = Rollout(app.state.catalogue.scorers[2], 0.3)
        both = np.mean([other.chosen(default, lambda n=n: str(n)) is other.canary and drawn[n] for n in range(20_000)])  # type: ignore[misc]
        assert both == pytest.approx(0.09, abs=0.01), "another canary, other keys"
        for share, expected in ((0.0, False), (1.0, True)):
            some = Rollout(rollout.canary, share)
            assert {some.chosen(default, lambda n=n: str(n)) is rollout.canary for n in range(500)} == {expected}  # type: ignore[misc]


@pytest.mark.parametrize("app", KINDS, indirect=True)
def test_each_request_is_judged_by_one_bundle_and_its_risk_is_that_bundle_s(app: App) -> None:
    by_name = {bundle.manifest.name: bundle for bundle in app.bundles}
    seen = set()
    for prompt in PROMPTS:
        answer = app.client.post("/score", json={"prompt": prompt}).json()
        name = answer["bundle"]["name"]
        seen.add(name)
        assert answer["data"][0]["risk"] == pytest.approx(alone(app, by_name[name], prompt), abs=1e-6)
        assert app.client.post("/score", json={"prompt": prompt}).json()["bundle"] == answer["bundle"]
    assert seen == {"one", "two"}


def test_a_session_stays_with_one_bundle_on_every_route(app: App) -> None:
    found = set()
    for session in range(12):
        headers = {"x-session-id": f"s{session}"}
        names = {
            app.client.post("/score", json={"prompt": prompt}, headers=headers).json()["bundle"]["name"]
            for prompt in PROMPTS[:4]
        }
        for turn in ("a", "b"):
            body = {"model": "scripted", "messages": [{"role": "user", "content": turn}], "max_tokens": 1}
            chat = app.client.post("/v1/chat/completions", json=body, headers=headers)
            names.add(chat.json()["hallutracer"]["bundle"]["name"])
            guard = {"input_type": "request", "texts": [turn]}
            told = app.client.post("/beta/litellm_basic_guardrail_api", json=guard, headers=headers).json()
            names.add(told["hallutracer"]["bundle"]["name"])
            classified = app.client.post("/classify", json={"inputs": turn}, headers=headers)
            names.add(classified.headers["x-hallutracer-bundle"].partition(":")[0])
        assert len(names) == 1
        found |= names
    assert found == {"one", "two"}


def test_a_conversation_stays_without_a_header(app: App) -> None:
    found = set()
    for number in range(12):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"question {number}"}]
        names = set()
        for _ in range(3):
            answer = app.client.post("/score", json={"messages": messages}).json()
            names.add(answer["bundle"]["name"])
            messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
        assert len(names) == 1
        found |= names
    assert found == {"one", "two"}


def test_a_named_bundle_is_not_rerouted_and_still_the_operators_to_allow(tmp_path: Path) -> None:
    with app_with(tmp_path, RolloutPlan("two:1", 1.0)).started() as app:
        assert app.client.post("/score", json={"prompt": "a"}).json()["bundle"]["name"] == "two"
        assert app.client.post("/score", json={"prompt": "a", "bundle": "one"}).json()["bundle"]["name"] == "one"
        refused = app.client.post("/score", json={"prompt": "a", "bundle": "two"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "bundle")
        assert app.client.post("/score", json={"prompt": "a", "threshold": 0.6}).status_code == 403
        assert app.client.post("/score", json={"prompt": "a", "threshold": 0.4}).status_code == 200


@pytest.mark.parametrize("app", KINDS, indirect=True)
def test_a_shadow_reads_the_same_forward_and_decides_nothing(app: App) -> None:
    (one, two, three), counters = app.bundles, app.engine.counters
    threshold = three.manifest.threshold
    flagged = {bundle.manifest.name: {} for bundle in (one, two, three)}  # type: ignore[var-annotated]
    for prompt in PROMPTS:
        for bundle in app.bundles:
            flagged[bundle.manifest.name][prompt] = alone(app, bundle, prompt) >= threshold
    before, expected = counters.prefills, {"stricter": 0, "looser": 0}
    for prompt in PROMPTS:
        answer = app.client.post("/score", json={"prompt": prompt, "generate": {"max_tokens": 2}})
        row, name = answer.json()["data"][0], answer.json()["bundle"]["name"]
        assert row["flagged"] == flagged[name][prompt]
        assert "three" not in answer.text
        if flagged["three"][prompt] != row["flagged"]:
            expected["stricter" if flagged["three"][prompt] else "looser"] += 1
    assert counters.prefills - before == len(PROMPTS)
    compared = card(app, "three")["compared"]
    assert compared["prompts"] == len(PROMPTS)
    assert {kind: compared[kind] for kind in expected} == expected
    assert min(expected.values()) > 0
    assert compared["disagreement"] == pytest.approx(sum(expected.values()) / len(PROMPTS))
    assert 0 < compared["mean_difference"] < 1
    metrics = app.client.get("/metrics").text
    counted = [line for line in metrics.splitlines() if line.startswith("hallutracer_shadow_prompts_total{")]
    assert sum(float(line.split()[-1]) for line in counted) == len(PROMPTS)
    assert sum(float(line.split()[-1]) for line in counted if 'verdict="looser"' in line) == expected["looser"]


def test_a_shadow_that_a_request_names_is_not_compared_with_itself(tmp_path: Path) -> None:
    with app_with(tmp_path, PLAN, callers_may=("bundle",)).started() as app:
        answer = app.client.post("/score", json={"prompt": "a", "bundle": "three"}).json()
        assert answer["bundle"]["name"] == "three"
        assert card(app, "three")["compared"]["prompts"] == 0
        app.client.post("/score", json={"prompt": "a"})
        assert card(app, "three")["compared"]["prompts"] == 1


@pytest.mark.parametrize("aliases", [1, 2])
def test_a_canary_that_is_a_shadow_too_is_compared_where_it_does_not_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aliases: int
) -> None:
    with app_with(tmp_path, RolloutPlan("two:1", 0.3, ("two:1",))).started() as app:
        if aliases == 2:  # each alias is loaded by itself
            again = Scorer(app.served, next(one for one in app.bundles if one.manifest.name == "two"))
            rollout = replace(app.state.catalogue.rollout, shadows=(again,))
            monkeypatch.setattr(type(app.state.catalogue), "rollout", property(lambda _: rollout))
        names = [app.client.post("/score", json={"prompt": text}).json()["bundle"]["name"] for text in PROMPTS]
        assert set(names) == {"one", "two"}
        assert card(app, "two")["role"] == "canary"
        assert card(app, "two")["compared"]["prompts"] == names.count("one")


def test_a_shadow_that_gives_no_number_costs_no_request(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, shadow = Scorer.judge, app.state.catalogue.rollout.shadows[0]

    def fails(self: Scorer, *given: Any, **more: Any) -> Any:
        if self is shadow:
            raise NonFiniteReadout("a NaN")
        return judge(self, *given, **more)

    monkeypatch.setattr(Scorer, "judge", fails)
    assert app.client.post("/score", json={"prompt": "a"}).status_code == 200
    compared = card(app, "three")["compared"]
    assert (compared["failed"], compared["disagreement"], compared["mean_difference"]) == (1, 1.0, None)


def test_what_each_bundle_does_is_told(app: App) -> None:
    cards = {one["name"]: one for one in app.client.get("/v1/bundles").json()["data"]}
    assert {name: one["role"] for name, one in cards.items()} == {"one": "default", "two": "canary", "three": "shadow"}
    assert (cards["one"]["share"], cards["two"]["share"], cards["three"].get("share")) == (0.7, 0.3, None)
    assert cards["one"]["golden"]["risk"] <= cards["one"]["golden"]["risk_tolerance"]
    metrics = app.client.get("/metrics").text
    for name, role in (("one", "default"), ("two", "canary"), ("three", "shadow")):
        assert f'hallutracer_bundle_role_info{{bundle="{name}:1",model_name="scripted",role="{role}"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("plan", "reference", "reason"),
    [
        (RolloutPlan("one:1"), "one:1", "judges already"),
        (RolloutPlan(shadows=("one:1",)), "one:1", "judges already"),
        (RolloutPlan(shadows=("two:1",)), "two:1", "trained on text prompts and one:1 on chat ones"),
    ],
)
def test_what_cannot_be_used_is_left_out_and_told(
    tmp_path: Path, plan: RolloutPlan, reference: str, reason: str
) -> None:
    two = [lambda engine, folder: matching_bundle(engine, folder, "two", 1, prompt_format="text")]
    with app_with(tmp_path, plan, names=("one",), add=two).started() as app:
        assert not app.state.catalogue.rollout.shadows
        assert app.state.catalogue.rollout.canary is None
        (left_out,) = app.client.get("/v1/bundles").json()["status"]["left_out"]
        assert left_out["reference"] == reference
        assert reason in left_out["reason"]
        assert app.client.post("/score", json={"prompt": "a"}).json()["bundle"]["name"] == "one"


def test_a_reload_by_the_api_swaps_or_changes_nothing(tmp_path: Path) -> None:
    with app_with(tmp_path, PLAN).started() as app:
        app.client = type(app.client)(app.app, client=("127.0.0.1", 5))
        assert app.client.post("/v1/admin/reload").status_code == 404
        since, served = app.state.catalogue.loaded.time, list(app.bundles)

        def load(engine: Engine) -> dict[str, Scorer]:
            if not served:
                raise BundleNotFound("bundle three:1 is gone")
            return {bundle.reference: Scorer(engine, bundle) for bundle in served}

        app.state.lifecycle.load_again = load
        served.reverse()
        swapped = app.client.post("/v1/admin/reload")
        assert [one["name"] for one in swapped.json()["data"]] == ["three", "two", "one"]
        assert swapped.json()["data"][0]["role"] == "default"
        assert app.state.catalogue.loaded.time > since
        served.clear()
        failed = app.client.post("/v1/admin/reload")
        assert (failed.status_code, failed.json()["error"]["code"]) == (409, "reload_failed")
        assert "three:1 is gone" in failed.text
        listed = app.client.get("/v1/bundles").json()
        assert "three:1 is gone" in listed["status"]["reload_error"]
        assert listed["data"] == swapped.json()["data"]
        metrics = app.client.get("/metrics").text
        for outcome in ("done", "failed"):
            assert f'hallutracer_reloads_total{{outcome="{outcome}"}} 1.0' in metrics
        served += app.bundles
        assert app.client.post("/v1/admin/reload").json()["status"]["reload_error"] is None
        metrics = app.client.get("/metrics").text
        assert 'bundle="three:1",model_name="scripted",role="default"' not in metrics


def test_only_an_administrator_reloads(tmp_path: Path) -> None:
    with app_with(tmp_path / "open", PLAN).started() as app:
        for host in ("10.0.0.7", "testclient", "::ffff:10.0.0.7"):
            client = type(app.client)(app.app, client=(host, 5))
            refused = client.post("/v1/admin/reload")
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_scope"), host
    loosens = frozenset(get_args(Right))
    keys = [
        ApiKey("plain", "user", loosens),
        Key(name="user-2", digest=digest_of("named"), may=loosens),
        Key(name="operator", digest=digest_of("operator"), scopes=frozenset({Scope.ADMIN})),
    ]
    with app_with(tmp_path / "keys", PLAN, api_keys=keys, callers_may=get_args(Right)).started() as app:
        client = type(app.client)(app.app, client=("127.0.0.1", 5))
        answers = [
            client.post("/v1/admin/reload", headers={"Authorization": f"Bearer {secret}"}).status_code
            for secret in ("plain", "named", "operator")
        ]
        assert answers == [403, 403, 404]
        assert client.post("/v1/admin/reload").status_code == 401
