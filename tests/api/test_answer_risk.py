"""The risk of a finished answer on the wire: where an answer was given, after its last token, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hallutracer_client import Client, Generate
from probes_store.bundle import Bundle
from service.engines.base import AnswerReading
from service.errors import NonFiniteReadout
from service.readout import Probes, Site
from service.risk import depth_mean, risk
from service.scoring import Scorer
from tests.api.test_score import events
from tests.kit.bundles import ANSWER, write_bundle
from tests.matching import matching_bundle, matching_draft, with_answer
from tests.running import Running, running
from tests.scripted_engine import ScriptedEngine

NOTE = {"answer_risk", "answer_tokens", "answer_flagged"}


def two_parts(engine: ScriptedEngine, folder: Path) -> Bundle:
    return write_bundle(with_answer(matching_draft(engine, "both", 3), engine), folder / "both")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("app"), names=("one",), add=[two_parts]) as service:
        yield service


def by_hand(service: Running, prompt: list[int], answer: str) -> float:
    stored = service.bundles[1].answer
    assert stored is not None
    probes = Probes.of(Site.ATTENTION_HEAD, stored)
    went_on = answer.encode()[:-1]
    mean = depth_mean(service.engine.read_last([*prompt, *went_on], len(went_on), probes))
    return float(risk(mean[None], np.array([ANSWER.weight]), ANSWER.intercept))


ANSWERED: dict[str, Any] = {"bundle": "both", "threshold": 1, "generate": {"max_tokens": 6}}


def test_a_finished_answer_has_a_risk_of_its_own(service: Running) -> None:
    prompts = ["one", "two", "three", "four"]
    rows = service.post(prompt=prompts, **ANSWERED).json()["data"]
    ids = [service.engine.render_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    found = [row["answer_risk"] for row in rows]
    assert found == pytest.approx([by_hand(service, one, "It is ") for one in ids])
    assert [row["answer_flagged"] for row in rows] == [one >= ANSWER.threshold for one in found]
    assert {row["answer_flagged"] for row in rows} == {True, False}, "else this tells nothing"


@pytest.mark.parametrize(
    "body",
    [{"bundle": "both"}, {"bundle": "both", "threshold": 0, "generate": {}}, {**ANSWERED, "bundle": "one"},
     {**ANSWERED, "generate": {"max_tokens": 1}}],
    ids=["score alone", "withheld", "a bundle without", "no token that the model went on from"],
)  # fmt: skip
def test_there_is_none_elsewhere(service: Running, body: dict[str, Any]) -> None:
    [row] = service.post(prompt="one", **body).json()["data"]
    assert not NOTE & set(row)


def test_a_stream_tells_it_at_its_end(service: Running) -> None:
    [whole] = service.post(prompt="one", **ANSWERED).json()["data"]
    first, *pieces, last = events(service.post(prompt="one", stream=True, **ANSWERED).text)
    assert not NOTE & set(first["data"][0])
    assert not any(NOTE & set(piece) for piece in pieces)
    assert {name: last[name] for name in NOTE} == {name: whole[name] for name in NOTE}


def test_the_client_says_it(service: Running) -> None:
    with Client(service.url) as client:
        [row] = service.post(prompt="one", **ANSWERED).json()["data"]
        assert client.score(prompt="one", bundle="both").only.answer_risk is None
        with client.stream(prompt="one", bundle="both", threshold=1, generate=Generate(max_tokens=6)) as answer:
            assert answer.answer_risk is None
            assert "".join(answer) == "It is "
            assert (answer.answer_risk, answer.answer_flagged) == (row["answer_risk"], row["answer_flagged"])


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_openai_s_routes_tell_it_under_our_name(service: Running, route: str) -> None:
    import httpx

    asked = {"messages": [{"role": "user", "content": "one"}]} if route.startswith("chat") else {"prompt": "one"}
    body = {"model": "scripted", "max_tokens": 6, "temperature": 0, "hallutracer_bundle": "both"}
    body |= asked | {"vllm_xargs": {"hallutracer_bundle": "both", "hallutracer_threshold": 1.0}}
    del body["hallutracer_bundle"]
    whole = httpx.post(f"{service.url}/v1/{route}", json=body, timeout=30).json()
    [row] = whole["hallutracer"]["data"]
    assert set(row) >= NOTE
    chunks = events(httpx.post(f"{service.url}/v1/{route}", json=body | {"stream": True}, timeout=30).text)
    assert not NOTE & set(chunks[0]["hallutracer"]["data"][0])
    ends = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"]]
    assert [chunk["hallutracer"] for chunk in ends] == [{name: row[name] for name in NOTE}]
    assert sum("hallutracer" in chunk for chunk in chunks) == 2


def test_what_only_the_second_look_flags_is_counted(tmp_path: Path) -> None:
    with running(tmp_path, names=("one",), add=[two_parts]) as service:
        rows = service.post(prompt=["one", "two", "three", "four"], **ANSWERED).json()["data"]
        service.post(prompt="five", bundle="one", threshold=1, generate={})
        assert service.metric("hallutracer_answer_risk_count") == 4
        assert service.metric("hallutracer_answer_risk_sum") == pytest.approx(sum(row["answer_risk"] for row in rows))
        assert service.metric("hallutracer_answers_flagged_total") == sum(row["answer_flagged"] for row in rows) > 0


def test_no_nan_is_served_as_a_risk(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    scorer = Scorer(engine, two_parts(engine, tmp_path))
    with pytest.raises(NonFiniteReadout):
        scorer.judge_answer(AnswerReading(3, np.array([0.1, np.nan, 0.2, 0.3])))
    without = Scorer(engine, matching_bundle(engine, tmp_path, "without"))
    assert without.judge_answer(AnswerReading(3, np.zeros(4))) is None
    assert scorer.judge_answer(None) is None
