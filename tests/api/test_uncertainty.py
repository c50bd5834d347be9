"""Interval and distance on the wire, and what a policy may make of a prompt outside training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hallutracer_client.results import BundleList, ScoreResult, parse
from probes_store.bundle import Bundle
from service.judging.guarantee import guarantee_status
from service.policies.guard import GATE, Action, Policy
from service.serving.judgement import Judgement
from service.vllm_plugin.middleware import Note
from tests.matching import matching_draft
from tests.probes_store.factory import GUARANTEE, UNCERTAINTY, write_bundle
from tests.running import App
from tests.scripted_engine import ScriptedEngine

CAREFUL = Policy("careful", Action.ABSTAIN, threshold=1.0, message="Never heard of it.", withhold_outside=True)
FIELDS = ("interval", "outside_training", "distance")
NEAR, FAR = [256, 65, 66], [256, 67]


def known(engine: ScriptedEngine, folder: Path) -> Bundle:
    """A bundle whose reference lies at the first golden prompt, and ends before the second."""
    draft = matching_draft(engine, "known", 0)
    near, far = draft.golden.trajectory
    reach = float(np.linalg.norm(far - near)) / 2
    draft.manifest = dataclasses.replace(draft.manifest, uncertainty=UNCERTAINTY)
    draft.probes = dataclasses.replace(
        draft.probes, reference_mean=near, reference_whitening=np.eye(len(near), dtype=np.float32) / reach
    )
    return write_bundle(draft, folder / "known")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("bundles")
    app = App(folder, policies={"careful": CAREFUL})
    app.bundles.insert(0, known(app.engine, folder))
    with app.started():
        yield app


def told(service: App, ids: list[int], **body: Any) -> dict[str, Any]:
    response = service.client.post("/score", json={"input_ids": ids} | body)
    assert response.status_code == 200, response.text
    (row,) = response.json()["data"]
    (parsed,) = parse(ScoreResult, response.content).data
    interval = None if parsed.interval is None else list(parsed.interval)
    assert (interval, parsed.outside_training, parsed.distance) == tuple(row.get(field) for field in FIELDS)
    return dict(row)


def test_an_answer_tells_it(service: App) -> None:
    near, far = told(service, NEAR), told(service, FAR)
    assert (near["outside_training"], far["outside_training"]) == (False, True)
    assert (near["distance"], far["distance"]) == (pytest.approx(0, abs=1e-5), pytest.approx(2, rel=1e-5))
    for row in (near, far):
        low, high = row["interval"]
        assert 0 < low < row["risk"] < high < 1
        z = np.log((1 - row["risk"]) / row["risk"])
        half = UNCERTAINTY.interval.half_width(z, row["distance"])  # type: ignore[union-attr]
        assert np.log((1 - low) / low) - z == pytest.approx(half, rel=1e-4)


def test_a_stream_tells_it_with_the_risk(service: App) -> None:
    body = {"input_ids": FAR, "generate": {"max_tokens": 2}, "stream": True, "policy": "observe"}
    first = service.client.post("/score", json=body).text.split("\n\n")[0]
    row = json.loads(first.removeprefix("data: "))["data"][0]
    assert (row["outside_training"], len(row["interval"])) == (True, 2)


def test_the_list_of_bundles_has_the_record(service: App) -> None:
    response = service.client.get("/v1/bundles")
    first, second, _ = response.json()["data"]
    assert first["uncertainty"] == dataclasses.asdict(UNCERTAINTY)
    assert second["uncertainty"]["interval"] is None
    parsed = parse(BundleList, response.content).data[0].uncertainty
    assert parsed is not None
    assert parsed.statement == UNCERTAINTY.statement


def test_the_metrics_count_what_lies_outside(service: App) -> None:
    def count() -> float:
        (line,) = [line for line in service.client.get("/metrics").text.splitlines()
                   if line.startswith('hallutracer_outside_training_total{bundle="known:1"')]  # fmt: skip
        return float(line.split()[-1])

    before = count()
    told(service, NEAR)
    assert count() == before
    told(service, FAR)
    assert count() == before + 1


@pytest.mark.parametrize("generate", [None, {"max_tokens": 2}])
def test_a_policy_may_withhold_what_lies_outside(service: App, generate: Any) -> None:
    far = told(service, FAR, policy="careful", generate=generate)
    assert (far["decision"], far["flagged"], far["message"]) == ("abstain", False, "Never heard of it.")
    assert "completion" not in far
    near = told(service, NEAR, policy="careful", generate=generate)
    assert near["decision"] == "continue"
    assert ("completion" in near) == (generate is not None)


def test_a_stream_withholds_it(service: App) -> None:
    body = {"input_ids": FAR, "generate": {"max_tokens": 2}, "stream": True, "policy": "careful"}
    events = service.client.post("/score", json=body).text.strip().split("\n\n")
    assert len(events) == 2
    assert json.loads(events[0].removeprefix("data: "))["data"][0]["decision"] == "abstain"


def test_a_caller_may_not_choose_a_policy_that_lets_it_through(tmp_path: Path) -> None:
    app = App(tmp_path, policies={"careful": CAREFUL}, policy="careful", callers_may=("bundle", "threshold"))
    app.bundles.insert(0, known(app.engine, tmp_path))
    with app.started():
        answer = app.client.post("/score", json={"input_ids": FAR, "policy": "block"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "policy")
        assert app.client.post("/score", json={"input_ids": FAR}).json()["data"][0]["decision"] == "abstain"


def test_withholding_more_than_the_calibration_voids_a_guarantee(service: App) -> None:
    manifest = dataclasses.replace(service.bundles[0].manifest, guarantee=GUARANTEE, threshold=GUARANTEE.threshold)
    careful = dataclasses.replace(CAREFUL, threshold=None)
    stands, plain = guarantee_status(manifest, careful, "float32"), guarantee_status(manifest, GATE, "float32")
    assert stands is not None
    assert plain is not None
    assert stands.violations == ("policy: 'careful' also withholds prompts outside training, the calibration did not",)
    assert plain.holds


def test_vllms_note_has_it(service: App) -> None:
    scorer = service.state.catalogue.scorers[0]
    note = Note([Judgement.of(scorer, GATE, scorer.score([FAR]))])
    body = note.body()
    assert body is not None
    assert body["data"][0]["outside_training"] is True
    assert len(body["data"][0]["interval"]) == 2
