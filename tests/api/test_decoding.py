"""How answers are decoded where a request names no temperature, and what is said where one departs from its risk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from probes_store.bundle import Bundle
from probes_store.records import GREEDY, Decoding
from service.access.routes import CHAT_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE, TEXT_ROUTE
from service.engines.base import Sampling
from tests.api.protocols import ASKED, body_of, post, sse
from tests.kit.bundles import GUARANTEE, write_bundle
from tests.matching import matching_draft, with_answer
from tests.running import App
from tests.scripted_engine import ScriptedEngine

WARM = Decoding(0.7, 0.9)
# Name -> what the labels' answers are and how they were decoded, by the manifest; and how a silent request is.
BUNDLES: dict[str, tuple[str, Decoding | None, Decoding]] = {
    "greedy": ("given", GREEDY, GREEDY), "warm": ("given", WARM, WARM),
    "generated": ("generate", None, GREEDY), "unknown": ("given", None, GREEDY),
}  # fmt: skip
ROUTES = (CHAT_ROUTE, RESPONSES_ROUTE, MESSAGES_ROUTE, TEXT_ROUTE)
STREAMS = pytest.mark.parametrize("stream", [False, True])
EACH = pytest.mark.parametrize("route", ROUTES)
NOT_RECORDED = "how the answers were decoded that the risk was trained on is not recorded"


def add(name: str) -> Any:
    labels, decoding, _ = BUNDLES[name]

    def make(engine: ScriptedEngine, folder: Path) -> Bundle:
        draft = with_answer(matching_draft(engine, name, 0, threshold=GUARANTEE.threshold), engine)
        training = replace(draft.manifest.training, labels=labels, judge=None, decoding=decoding)  # type: ignore[arg-type]
        draft.manifest = replace(draft.manifest, guarantee=replace(GUARANTEE, labels=labels), training=training)  # type: ignore[arg-type]
        return write_bundle(draft, folder / name)

    return make


class Watched(App):
    """An app whose engine's calls are kept."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, names=(), add=[add(name) for name in BUNDLES], policy="observe", **settings)
        self.calls: list[Sampling | None] = []
        answer = self.served.answer

        def watched(*args: Any, **named: Any) -> Any:
            self.calls.append(named.get("sampling"))
            return answer(*args, **named)

        self.served.answer = watched  # type: ignore[method-assign]

    def decoded(self) -> Decoding:
        """How the last answer was."""
        sampling = self.calls[-1]
        assert sampling is not None
        return Decoding(sampling.temperature, sampling.top_p)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with Watched(tmp_path_factory.mktemp("bundle")).started() as app:
        yield app


def asked(app: App, route: str, bundle: str, stream: bool, **fields: Any) -> tuple[dict[str, Any], Any]:
    """The note, and the whole response or the events of a stream."""
    xargs = {"hallutracer_bundle": bundle}
    body: dict[str, Any] = body_of(route, ASKED, xargs, stream=stream)
    if route == TEXT_ROUTE:
        body = {"model": "scripted", "prompt": "Why?", "max_tokens": 40, "vllm_xargs": xargs, "stream": stream}
    body.pop("temperature", None)
    response = post(app, route, body | fields)
    assert response.status_code == 200, response.text
    if not stream:
        return response.json()["hallutracer"], response.json()
    events = [event for _, event in sse(response.text)]
    first = events[0]
    note = first.get("hallutracer") or first.get("message", first.get("response", {})).get("hallutracer")
    assert isinstance(note, dict), first
    return note, events


@STREAMS
@EACH
@pytest.mark.parametrize("bundle", BUNDLES)
def test_a_request_that_names_no_temperature_is_decoded_as_the_labels_answers_were(
    app: Watched, bundle: str, route: str, stream: bool
) -> None:
    expected = BUNDLES[bundle][2]
    for named in ({}, {"temperature": None, "top_p": None}):
        note, _ = asked(app, route, bundle, stream, **named)
        assert app.decoded() == expected
        assert "decoding" not in note["data"][0]
        departs = [one for one in note["guarantee"]["void"] if one.startswith("decoding")]
        assert departs == []
    asked(app, route, bundle, stream, top_p=0.5)
    assert app.decoded() == replace(expected, top_p=0.5), "one of both is the request's own"


@STREAMS
@EACH
@pytest.mark.parametrize("bundle", BUNDLES)
def test_a_temperature_that_is_named_is_taken_and_said(app: Watched, bundle: str, route: str, stream: bool) -> None:
    note, rest = asked(app, route, bundle, stream, temperature=0.5)
    assert app.decoded() == Decoding(0.5, 1.0)
    _, recorded, silent = BUNDLES[bundle]
    trained = silent if bundle != "unknown" else None
    said = note["data"][0]["decoding"]
    where = NOT_RECORDED if trained is None else f"where the answers that the risk was trained on were {trained}"
    assert said.startswith("sampled at temperature 0.5")
    assert said.endswith(where)
    void = [one for one in note["guarantee"]["void"] if one.startswith("decoding")]
    calibrated = recorded or GREEDY
    wanted = "temperature 0.5, not greedy"
    if not calibrated.same(GREEDY):
        wanted = f"sampled at temperature 0.5, where the calibration's answers were {WARM}"
    assert void == [f"decoding: {wanted}"]
    if stream and route != RESPONSES_ROUTE:  # which says all again at its end
        notes = [one.get("hallutracer", {}) for one in rest[1:]]
        assert [one["decoding"] for one in notes if "answer_risk" in one] == [said], "the answer's own risk says so"


def test_the_same_temperature_as_in_training_departs_from_nothing(app: Watched) -> None:
    note, _ = asked(app, CHAT_ROUTE, "warm", False, temperature=0.7, top_p=0.9)
    assert "decoding" not in note["data"][0]
    note, _ = asked(app, CHAT_ROUTE, "warm", False, temperature=0)
    assert note["data"][0]["decoding"] == f"greedy, where the answers that the risk was trained on were {WARM}"
    assert [one for one in note["guarantee"]["void"] if one.startswith("decoding")] == [
        f"decoding: greedy, where the calibration's answers were {WARM}"
    ]
    note, _ = asked(app, CHAT_ROUTE, "greedy", False, temperature=0, top_p=0.3)
    assert "decoding" not in note["data"][0], "of a greedy answer top_p changes nothing"


@STREAMS
@pytest.mark.parametrize("bundle", BUNDLES)
def test_our_own_route_decodes_so_too(app: Watched, bundle: str, stream: bool) -> None:
    def score(**generate: Any) -> dict[str, Any]:
        body = {"prompt": "Why?", "bundle": bundle, "generate": {"max_tokens": 12, **generate}, "stream": stream}
        text = app.client.post("/score", json=body).text
        document: dict[str, Any] = next(data for _, data in sse(text)) if stream else json.loads(text)
        return document

    for silent in ({}, {"temperature": None, "top_p": None}):
        first = score(**silent)
        assert app.decoded() == BUNDLES[bundle][2]
        assert "decoding" not in first["data"][0]
        assert [one for one in first["guarantee"]["void"] if one.startswith("decoding")] == []
    assert "decoding" in score(temperature=1.0)["data"][0]
    assert app.decoded() == Decoding(1.0, 1.0)
    only_read = app.client.post("/score", json={"prompt": "Why?", "bundle": bundle}).json()
    assert "decoding" not in only_read["data"][0], "no answer is wanted"


def test_a_response_tells_the_temperature_that_was_used(app: Watched) -> None:
    for bundle, (_, _, decoding) in BUNDLES.items():
        _, whole = asked(app, RESPONSES_ROUTE, bundle, False)
        assert (whole["temperature"], whole["top_p"]) == (decoding.temperature, decoding.top_p)
        _, events = asked(app, RESPONSES_ROUTE, bundle, True)
        for event in (events[0], events[-1]):
            assert (event["response"]["temperature"], event["response"]["top_p"]) == (
                decoding.temperature, decoding.top_p,
            )  # fmt: skip


@STREAMS
def test_an_operator_may_have_it_as_openai_does(tmp_path: Path, stream: bool) -> None:
    with Watched(tmp_path, decoding="openai").started() as app:
        for route in ROUTES:
            for bundle in BUNDLES:
                note, _ = asked(app, route, bundle, stream)
                assert app.decoded() == Decoding(1.0, 1.0)
                assert note["data"][0]["decoding"].startswith("sampled at temperature 1")
                assert any(one.startswith("decoding") for one in note["guarantee"]["void"])
                asked(app, route, bundle, stream, temperature=0)
                assert app.decoded().same(GREEDY)
        app.client.post("/score", json={"prompt": "Why?", "bundle": "greedy", "generate": {}})
        assert app.decoded() == GREEDY, "which is no API of OpenAI's"
