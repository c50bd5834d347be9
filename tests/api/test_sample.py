"""The questions that a bundle carries, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.judging.evaluation import SampleQuestion
from service.serving.sampled import TOGETHER, Sampled
from tests.judging.test_sample import SAMPLE
from tests.matching import matching_bundle
from tests.running import App


def carrying(engine: Any, folder: Path) -> Any:
    return matching_bundle(engine, folder, "carrying", evaluation={"sample": SAMPLE.document()})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with App(tmp_path_factory.mktemp("bundles"), add=[carrying], threshold=0.25).started() as app:
        yield app


def asked(app: App, number: int | str, status: int = 200) -> dict[str, Any]:
    response = app.client.get(f"/v1/bundles/carrying/sample/{number}")
    assert response.status_code == status, response.text
    return dict(response.json())


def test_the_catalogue_tells_the_questions(service: App) -> None:
    found = service.client.get("/v1/bundles/carrying").json()["sample"]
    assert found["file"] == "rows.jsonl"
    assert found["questions"][0] == {"prompt": "Capital of France?", "answers": ["Paris"], "kind": "capital"}
    assert service.client.get("/v1/bundles/one").json()["sample"] is None


def test_an_answer_has_the_risk_that_score_gives(service: App) -> None:
    one = asked(service, 0)
    scored = service.client.post("/score", json={"prompt": "Capital of France?", "bundle": "carrying"}).json()
    assert one["risk"] == pytest.approx(scored["data"][0]["risk"], abs=1e-6)
    assert (one["threshold"], one["flagged"]) == (0.25, scored["data"][0]["flagged"])
    assert (one["number"], one["kind"], one["accepted"]) == (0, "capital", ["Paris"])
    assert one["verdict"] in ("right", "wrong", "abstained")


def counted(app: App) -> list[str]:
    """Counters of prompts, risks and answers."""
    lines = app.client.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith("hallutracer_") and "_total{" in line and "http" not in line]


def test_it_is_answered_once_and_is_no_traffic(service: App) -> None:
    asked(service, 0)
    before, prompts = counted(service), service.engine.counters.prefills
    first = asked(service, 1)
    assert service.engine.counters.prefills == prompts + 1
    assert asked(service, 1) == first
    assert service.engine.counters.prefills == prompts + 1
    assert before
    assert counted(service) == before


@pytest.mark.parametrize("number", ["2", "-1", "48"])
def test_what_it_does_not_carry_is_not_found(service: App, number: str) -> None:
    message = asked(service, number, 404)["error"]["message"]
    assert message == f"carrying:1 carries 2 questions, and none of number {number}"


def test_a_bundle_without_questions_says_so(service: App) -> None:
    response = service.client.get("/v1/bundles/one/sample/0")
    assert (response.status_code, response.json()["error"]["message"]) == (
        404, "one:1 carries 0 questions, and none of number 0",
    )  # fmt: skip


def test_a_key_is_asked_for(tmp_path: Path) -> None:
    with App(tmp_path, add=[carrying], api_keys=["secret"]).started() as app:
        assert app.client.get("/v1/bundles/carrying/sample/0").status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert app.client.get("/v1/bundles/carrying/sample/0", headers=headers).status_code == 200


def test_only_a_few_are_asked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 0, 0

    async def slow(scorer: Any, sample: Any, number: int, threshold: float | None) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return SampleQuestion(str(number), ("a",), "")

    monkeypatch.setattr("service.serving.sampled.ask", slow)

    scorer: Any = SimpleNamespace(bundle=SimpleNamespace(manifest=SimpleNamespace(digest="sha256:0")))

    async def every() -> list[Any]:
        sampled = Sampled()
        return await asyncio.gather(*(sampled.answer(scorer, SAMPLE, number) for number in range(12)))

    assert [one.prompt for one in asyncio.run(every())] == [str(number) for number in range(12)]
    assert most == TOGETHER
