"""How answers are decoded, and what risk and guarantee say where that departs from training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from probes_store.bundle import Bundle
from probes_store.records import GREEDY, Decoding
from service.engines.base import Sampling
from tests.kit.api import (
    CHAT,
    MESSAGES,
    QUESTION,
    RESPONSES,
    SCORE,
    TEXT,
    WIRES,
    Wire,
    note_of,
    request_of,
    stream_events,
)
from tests.kit.bundles import GUARANTEE, write_bundle
from tests.matching import matching_draft, with_answer
from tests.running import App
from tests.scripted_engine import ScriptedEngine

WARM = Decoding(0.7, 0.9)
# Name -> what the labels' answers are and how they were decoded, by the manifest; and how a silent
# request is.
BUNDLES: dict[str, tuple[str, Decoding | None, Decoding]] = {
    "greedy": ("given", GREEDY, GREEDY),
    "warm": ("given", WARM, WARM),
    "generated": ("generate", None, GREEDY),
    "unknown": ("given", None, GREEDY),
}
EACH = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
NOT_RECORDED = "how the answers were decoded that the risk was trained on is not recorded"
TRAINED = "where the answers that the risk was trained on were"
CALIBRATED = "where the calibration's answers were"
AT_HALF, HALF = Decoding(0.5, 1.0), "sampled at temperature 0.5"
NOT_GREEDY = "temperature 0.5, not greedy"
# Bundle, a request's fields, how it is decoded, what its risk and its guarantee say of that.
CASES: list[tuple[str, dict[str, Any], Decoding, str, str]] = [
    ("greedy", {"temperature": 0.5}, AT_HALF, f"{TRAINED} {GREEDY}", NOT_GREEDY),
    ("generated", {"temperature": 0.5}, AT_HALF, f"{TRAINED} {GREEDY}", NOT_GREEDY),
    ("unknown", {"temperature": 0.5}, AT_HALF, NOT_RECORDED, NOT_GREEDY),
    ("warm", {"temperature": 0.5}, AT_HALF, f"{TRAINED} {WARM}", f"{HALF}, {CALIBRATED} {WARM}"),
    (
        "warm",
        {"temperature": 0},
        GREEDY,
        f"greedy, {TRAINED} {WARM}",
        f"greedy, {CALIBRATED} {WARM}",
    ),
    ("warm", {"temperature": 0.7, "top_p": 0.9}, WARM, "", ""),
    ("greedy", {"temperature": 0, "top_p": 0.3}, Decoding(0.0, 0.3), "", ""),  # it changes nothing
]
NULLS = {"temperature": None, "top_p": None}
for silence in ({}, NULLS):
    CASES += [(name, silence, silent, "", "") for name, (_, _, silent) in BUNDLES.items()]


def add(name: str) -> Any:
    labels: Any
    labels, decoding, _ = BUNDLES[name]

    def make(engine: ScriptedEngine, folder: Path) -> Bundle:
        draft = with_answer(matching_draft(engine, name, 0, threshold=GUARANTEE.threshold), engine)
        training = replace(draft.manifest.training, labels=labels, judge=None, decoding=decoding)
        guarantee = replace(GUARANTEE, labels=labels)
        draft.manifest = replace(draft.manifest, guarantee=guarantee, training=training)
        return write_bundle(draft, folder / name)

    return make


class Watched(App):
    """An app with these bundles that keeps how each answer is decoded."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        bundles = [add(name) for name in BUNDLES]
        super().__init__(folder, names=(), add=bundles, policy="observe", **settings)
        self.sampled = list[Sampling]()
        answer = self.served.answer

        def watched(*args: Any, sampling: Sampling, **named: Any) -> Any:
            self.sampled.append(sampling)
            return answer(*args, sampling=sampling, **named)

        self.served.answer = watched  # type: ignore[method-assign,assignment]

    def decoded(self) -> Decoding:
        """How the last answer was."""
        return Decoding(self.sampled[-1].temperature, self.sampled[-1].top_p)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with Watched(tmp_path_factory.mktemp("bundle")).started() as app:
        yield app


def departures(note: dict[str, Any]) -> list[str]:
    """What the guarantee says of the decoding."""
    prefix = "decoding: "
    reasons = [reason for reason in note["guarantee"]["void"] if reason.startswith(prefix)]
    return [reason.removeprefix(prefix) for reason in reasons]


def body_of(wire: Wire, bundle: str, *, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """A request that names no temperature; ``fields``: how to decode."""
    body = request_of(wire, chosen={"bundle": bundle}, stream=stream)
    if wire is SCORE:
        return body | {"generate": body["generate"] | fields}
    body.pop("temperature")
    return body | fields


def note_in(app: App, wire: Wire, bundle: str, **fields: Any) -> dict[str, Any]:
    """Bundle, policy and risks of a whole answer."""
    return note_of(app.ask(wire.route, **body_of(wire, bundle, **fields)))


@EACH
def test_an_answer_is_decoded_as_it_is_asked_for_or_as_the_labels_answers_were(
    app: Watched,
    wire: Wire,
) -> None:
    for bundle, fields, decoding, words, reason in CASES:
        note = note_in(app, wire, bundle, **fields)
        assert app.decoded() == decoding, (bundle, fields)
        assert note["data"][0].get("decoding", "").endswith(words)
        assert ("decoding" in note["data"][0]) is bool(words)
        assert departures(note) == ([reason] if reason else [])
    for bundle, (_, _, silent) in BUNDLES.items():
        note_in(app, wire, bundle, top_p=0.5)
        assert app.decoded() == replace(silent, top_p=0.5), "only the temperature is the bundle's"


@EACH
def test_a_stream_says_so_with_the_risk_of_the_prompt_and_of_the_answer(
    app: Watched,
    wire: Wire,
) -> None:
    for bundle in BUNDLES:
        for fields, notes in (({"temperature": 0.5}, 3 if wire is RESPONSES else 2), ({}, 0)):
            body = body_of(wire, bundle, stream=True, **fields)
            text = app.client.post(wire.route, json=body).text
            assert len(re.findall(rf'"decoding": ?"{HALF}', text)) == notes
            assert app.decoded() == (AT_HALF if fields else BUNDLES[bundle][2])


def test_where_no_answer_is_wanted_nothing_is_said_of_it(app: Watched) -> None:
    for bundle in BUNDLES:
        [row] = app.ask(messages=QUESTION, bundle=bundle)["data"]
        assert "decoding" not in row


def test_a_response_has_the_temperature_that_was_used(app: Watched) -> None:
    for bundle, (_, _, decoding) in BUNDLES.items():
        body = body_of(RESPONSES, bundle)
        *_, last = stream_events(
            app.client.post(RESPONSES.route, json=body | {"stream": True}).text,
        )
        for document in (app.ask(RESPONSES.route, **body), last["response"]):
            assert (document["temperature"], document["top_p"]) == (
                decoding.temperature,
                decoding.top_p,
            )


def test_an_operator_may_have_it_as_openai_does(tmp_path: Path) -> None:
    with Watched(tmp_path, decoding="openai").started() as app:
        for wire in (CHAT, TEXT, RESPONSES, MESSAGES):
            for bundle in BUNDLES:
                note = note_in(app, wire, bundle)
                assert app.decoded() == Decoding(1.0, 1.0)
                assert note["data"][0]["decoding"].startswith("sampled at temperature 1")
                assert departures(note)
                note_in(app, wire, bundle, temperature=0)
                assert app.decoded().same(GREEDY)
        note_in(app, SCORE, "greedy")
        assert app.decoded() == GREEDY, "which is no API of OpenAI's"
