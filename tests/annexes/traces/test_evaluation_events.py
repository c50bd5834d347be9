"""Risks as ``gen_ai.evaluation.result`` events, as a real OTLP receiver gets them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.annexes.traces import tracing
from service.annexes.traces.tracing import MOST_PROMPTS, Tracing
from service.errors import HalluTracerError
from tests.api.test_answer_risk import ANSWERED
from tests.api.test_reply import known
from tests.kit.api import two_parts
from tests.kit.bundles import ANSWER
from tests.matching import SMALL_TALKS, contextual_bundle
from tests.otlp import Collector, collector
from tests.running import Running, running

ASKED = "What is the capital of the Solomon Islands?"


@contextmanager
def told(tmp_path: Path, **options: Any) -> Iterator[tuple[Running, Collector]]:
    """A service, and what its collector has once it has ended."""
    with collector() as sink:
        traced = Tracing(sink.endpoint, sink.events_endpoint)
        with running(tmp_path, **{"names": ("one",), "tracing": traced} | options) as service:
            yield service, sink


def test_a_risk_and_the_risk_of_its_answer(tmp_path: Path) -> None:
    body = {
        "messages": [{"role": "user", "content": ASKED}],
        "model": "scripted",
        "max_tokens": 6,
        "temperature": 0,
    }
    xargs = {"hallutracer_bundle": "both", "hallutracer_threshold": 1.0}
    with told(tmp_path, add=[two_parts]) as (service, sink):
        url = f"{service.url}/v1/chat/completions"
        answer = httpx.post(url, json=body | {"vllm_xargs": xargs}, timeout=60).json()
        text = answer["choices"][0]["message"]["content"]
    spans = {one.name: one for one in sink.spans}
    first, second = sorted(sink.events, key=lambda one: one.at_ns)
    row, chat = answer["hallutracer"]["data"][0], spans["chat scripted"]
    same = {"gen_ai.response.id": answer["id"], "hallutracer.index": 0}
    assert first.attributes == same | {
        "gen_ai.evaluation.name": "hallucination_risk",
        "gen_ai.evaluation.score.value": pytest.approx(row["risk"]),
        "gen_ai.evaluation.score.label": "pass",
        "gen_ai.evaluation.explanation": "threshold 1; decision continue",
    }
    assert second.attributes == same | {
        "gen_ai.evaluation.name": "answer_risk",
        "gen_ai.evaluation.score.value": pytest.approx(row["answer_risk"]),
        "gen_ai.evaluation.score.label": "fail" if row["answer_flagged"] else "pass",
        "gen_ai.evaluation.explanation": (
            f"threshold {ANSWER.threshold:g}; {row['answer_tokens']} tokens read"
        ),
    }
    assert (first.at_ns, second.at_ns) == (spans["gate"].end_ns, spans["decode"].end_ns)
    for one in (first, second):
        assert (one.name, one.trace_id, one.span_id) == (
            "gen_ai.evaluation.result",
            chat.trace_id,
            chat.span_id,
        )
        assert one.resource["service.name"] == "hallutracer"
        assert text
        assert not any(private in one.raw for private in ("Solomon", text))


def test_the_labels_of_prompts_and_answers(tmp_path: Path) -> None:
    """Of every kind of row there is one; else this tells nothing."""
    prompts = [*SMALL_TALKS[:8], "one"]  # some ask for no fact, as one of the bundles reads them
    bundles = [
        two_parts,
        known,
        lambda engine, folder: contextual_bundle(engine, folder, applies_from=0.99),
    ]
    with told(tmp_path, add=bundles) as (service, sink):
        answers = [
            service.post(prompt=prompts, **ANSWERED).json(),
            service.post(prompt=prompts, bundle="known").json(),
            service.post(prompt=prompts, bundle=service.bundles[-1].reference).json(),
            service.post(prompt=prompts, threshold=0.0).json(),
        ]
    got = {
        (
            one.attributes["gen_ai.response.id"],
            one.attributes["gen_ai.evaluation.name"],
            one.attributes["hallutracer.index"],
        ): one.attributes
        for one in sink.events
    }
    assert len(got) == len(sink.events) == 5 * len(prompts)
    seen = set()
    for answer in answers:
        for row in answer["data"]:
            event = got[answer["id"], "hallucination_risk", row["index"]]
            label = event["gen_ai.evaluation.score.label"]
            why = event["gen_ai.evaluation.explanation"]
            no_fact = row.get("applies") is False
            assert label == ("fail" if row["flagged"] else "not_applicable" if no_fact else "pass")
            assert ("asks for no fact" in why) is no_fact
            assert ("outside training" in why) is bool(row.get("outside_training"))
            assert f"threshold {row['threshold']:g}; decision {row['decision']}" in why
            seen |= {label} | ({"outside"} if row.get("outside_training") else set())
            if "answer_risk" in row:
                of_answer = got[answer["id"], "answer_risk", row["index"]][
                    "gen_ai.evaluation.score.label"
                ]
                assert of_answer == ("fail" if row["answer_flagged"] else "pass")
                seen.add(f"answer {of_answer}")
    assert seen == {"pass", "fail", "not_applicable", "outside", "answer pass", "answer fail"}


def test_a_prompt_that_is_never_judged_has_an_error(tmp_path: Path) -> None:
    with told(tmp_path, deadline_s=0.2) as (service, sink):
        service.engine.sleep_s = 1.0
        assert service.post(prompt=ASKED).status_code == 504
    (event,) = sink.events
    assert event.attributes.pop("gen_ai.response.id").startswith("risk-")
    assert event.attributes == {
        "gen_ai.evaluation.name": "hallucination_risk",
        "error.type": "deadline_exceeded",
        "hallutracer.index": 0,
    }


def test_events_are_of_what_is_traced(tmp_path: Path) -> None:
    unsampled = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}
    with told(tmp_path) as (service, sink):
        httpx.post(f"{service.url}/score", json={"prompt": ASKED}, headers=unsampled, timeout=60)
        service.post(prompt=[ASKED] * (MOST_PROMPTS + 4))
    assert sorted(event.attributes["hallutracer.index"] for event in sink.events) == list(
        range(MOST_PROMPTS)
    )


def test_a_variable_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BLRP_MAX_QUEUE_SIZE", "many")
    Tracing("http://127.0.0.1:9/v1/traces").close()
    with pytest.raises(HalluTracerError, match="OTEL_BLRP"):
        Tracing("http://127.0.0.1:9/v1/traces", "http://127.0.0.1:9/v1/logs")


def test_a_collector_that_hangs_holds_up_neither_requests_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BLRP_SCHEDULE_DELAY", "10")
    monkeypatch.setattr(tracing, "FLUSH_S", 0.3)
    with told(tmp_path) as (service, sink):
        sink.free.clear()
        for _ in range(3):
            assert service.post(prompt=ASKED).status_code == 200
        began = time.monotonic()
        service.state.tracing.close()  # type: ignore[union-attr]
        assert time.monotonic() - began < 2
        assert not sink.events
