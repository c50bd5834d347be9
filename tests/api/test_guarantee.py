"""A bundle's guarantee on the wire: in each answer, with why it does not hold, and whole in the list of bundles."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hallutracer_client.results import BundleList, ScoreResult, parse
from probes_store.bundle import Bundle
from service.engines.base import Sampling
from service.judging.guarantee import TOKEN_IDS, decoding_violations, guarantee_status
from service.policies.guard import GATE, OBSERVE
from service.serving.judgement import Judgement
from service.vllm_plugin.middleware import Note
from tests.matching import matching_draft
from tests.probes_store.factory import GUARANTEE, write_bundle
from tests.running import App
from tests.scripted_engine import ScriptedEngine


def guaranteed(
    engine: ScriptedEngine, folder: Path, name: str = "sure", shapes: tuple[str, ...] | None = None, **changes: Any
) -> Bundle:
    draft = matching_draft(engine, name, 0, threshold=GUARANTEE.threshold)
    promise = dataclasses.replace(GUARANTEE, **changes)
    draft.manifest = dataclasses.replace(draft.manifest, guarantee=promise, guarantee_shapes=shapes)
    return write_bundle(draft, folder / name)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("bundles")
    app = App(folder)
    app.bundles.insert(0, guaranteed(app.engine, folder))
    with app.started():
        yield app


def told(service: App, **body: Any) -> Any:
    response = service.client.post("/score", json={"prompt": "Why?"} | body)
    assert response.status_code == 200, response.text
    guarantee = response.json().get("guarantee")
    parsed = parse(ScoreResult, response.content).guarantee
    assert (None if guarantee is None else guarantee["holds"]) == (None if parsed is None else parsed.holds)
    return guarantee


HOLDS = {"alpha": 0.1, "delta": 0.05, "holds": True, "void": []}


@pytest.mark.parametrize(
    "body", [{}, {"policy": "block"}, {"threshold": 0.25}, {"generate": {"max_tokens": 2}}, {"include": ["trajectory"]}]
)
def test_it_holds(service: App, body: dict[str, Any]) -> None:
    assert told(service, **body) == HOLDS


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ({"policy": "observe"}, ["policy: 'observe' withholds nothing"]),
        ({"threshold": 0.2}, ["threshold: 0.2 applies, 0.25 is guaranteed"]),
        ({"generate": {"max_tokens": 2, "temperature": 0.7}}, ["decoding: temperature 0.7, not greedy"]),
        ({"generate": {"max_tokens": 2, "stop": ["."]}}, ["decoding: ends at texts of the request's own"]),
        ({"prompt": None, "input_ids": [1, 2]}, [TOKEN_IDS]),
        ({"policy": "observe", "threshold": 1.0},
         ["policy: 'observe' withholds nothing", "threshold: 1 applies, 0.25 is guaranteed"]),
    ],
)  # fmt: skip
def test_it_is_void_and_says_why(service: App, body: dict[str, Any], reasons: list[str]) -> None:
    assert told(service, **body) == HOLDS | {"holds": False, "void": reasons}


ALONE = "0 earlier turns, no passage, no system prompt"
SYSTEM = {"role": "system", "content": "Be brief."}
ASKS, SAYS = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}


@pytest.fixture(scope="module")
def calibrated_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """The bundle's calibration had lone questions alone."""
    folder = tmp_path_factory.mktemp("shapes")
    app = App(folder)
    app.bundles.insert(0, guaranteed(app.engine, folder, "alone", (ALONE,)))
    with app.started():
        yield app


@pytest.mark.parametrize(
    ("body", "other"),
    [
        ({}, None),
        ({"messages": [ASKS]}, None),
        ({"messages": [SYSTEM, ASKS]}, "0 earlier turns, no passage, a system prompt"),
        ({"messages": [ASKS, SAYS, ASKS]}, "1 earlier turn, no passage, no system prompt"),
        ({"prompt": f"Context: {'A fact. ' * 60}\n\nWhy?"}, "0 earlier turns, a passage, no system prompt"),
    ],
)
def test_a_conversation_that_the_calibration_had_none_like_departs_from_it(
    calibrated_alone: App, body: dict[str, Any], other: str | None
) -> None:
    asked = body | ({"prompt": None} if "messages" in body else {})
    reasons = [] if other is None else [f"conversation: {other}; the calibration had none like it"]
    assert told(calibrated_alone, **asked) == HOLDS | {"holds": not reasons, "void": reasons}


def test_a_shape_that_is_not_known_departs_too(calibrated_alone: App) -> None:
    found = told(calibrated_alone, prompt=None, input_ids=[1, 2])
    assert found["void"] == [TOKEN_IDS, "conversation: not known; the calibration had none like it"]


def test_the_list_of_bundles_names_the_shapes(calibrated_alone: App) -> None:
    listed = calibrated_alone.client.get("/v1/bundles").json()["data"]
    assert listed[0]["guarantee_shapes"] == [ALONE]
    assert {one["guarantee_shapes"] for one in listed[1:]} == {None}


def test_a_stream_tells_it_with_the_risk(service: App) -> None:
    body = {"prompt": "Why?", "generate": {"max_tokens": 2, "temperature": 1.0}, "stream": True}
    first = service.client.post("/score", json=body).text.split("\n\n")[0]
    assert json.loads(first.removeprefix("data: "))["guarantee"]["holds"] is False


def test_a_bundle_without_one_promises_nothing(service: App) -> None:
    assert told(service, bundle="one") is None


def test_the_list_of_bundles_has_the_whole_of_it(service: App) -> None:
    response = service.client.get("/v1/bundles")
    sure, one, _ = response.json()["data"]
    assert sure["guarantee"] == dataclasses.asdict(GUARANTEE)
    assert one["guarantee"] is None
    parsed = parse(BundleList, response.content).data[0].guarantee
    assert parsed is not None
    assert parsed.statement == GUARANTEE.statement


def test_the_metrics_name_it(service: App) -> None:
    lines = [line for line in service.client.get("/metrics").text.splitlines() if "guarantee_info{" in line]
    (line,) = lines
    assert 'alpha="0.1"' in line
    assert 'bundle="sure:1"' in line
    assert 'delta="0.05"' in line
    assert line.endswith(" 1.0")
    service.state.metrics.guarantees([])
    assert "guarantee_info{" not in service.client.get("/metrics").text


def test_another_dtype_voids_it(service: App) -> None:
    manifest = service.bundles[0].manifest
    stands = guarantee_status(manifest, GATE, "bfloat16")
    assert stands is not None
    assert stands.violations == ("dtype: the engine computes in bfloat16, the calibration did in float32",)
    assert not stands.holds
    assert guarantee_status(service.bundles[1].manifest, OBSERVE, "float32") is None


def test_nothing_decoded_here_departs_from_nothing() -> None:
    assert decoding_violations(None) == decoding_violations(Sampling()) == ()


def test_vllms_note_has_it(service: App) -> None:
    judgements = [Judgement.of(one, GATE, one.score([[1, 2, 3]])) for one in service.state.catalogue.scorers]
    body = Note([judgements[0]], violations=("decoding: ...",)).body()
    assert body is not None
    assert body["guarantee"] == HOLDS | {"holds": False, "void": ["decoding: ..."]}
    assert "guarantee" not in (Note([judgements[1]]).body() or {})
