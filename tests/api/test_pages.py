"""The pages' files over HTTP, and the questions that a bundle carries: what is served, to whom, and what is refused."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from service.api.app import HEADERS, pages
from service.judging.evaluation import SampleQuestion
from service.serving.sampled import TOGETHER, Sampled
from tests.judging.test_evaluation import SAMPLE
from tests.matching import Held, matching_bundle
from tests.running import App, running, until

PAGES, REFERENCE = pages(playground=True), pages(playground=False)
PLAYGROUND = [path for path in PAGES if not path.startswith("/docs")]
ROOT = Path(__file__).parent.parent.parent
KEY = "a-key-of-sixteen-letters"
KINDS = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
         "svg": "image/svg+xml"}  # fmt: skip


def carrying(engine: Any, folder: Path) -> Any:
    return matching_bundle(engine, folder, "carrying", evaluation={"sample": SAMPLE.document()})


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    aliases = {"aliases_of": lambda _: {"live": 1}}
    with App(tmp_path_factory.mktemp("bundles"), add=[carrying], threshold=0.25, **aliases).started() as app:
        yield app


# --- files ---


def test_every_page_and_file_is_served_with_the_policy(app: App) -> None:
    assert {"/", "/playground/app.js", "/playground/style.css"} <= set(PLAYGROUND)
    assert {"/docs", "/docs/swagger-ui-bundle.js"} <= set(REFERENCE)
    for path in PAGES:
        found, head = app.client.get(path), app.client.head(path)
        kind = path.rpartition(".")[2] if "." in path else "html"
        assert (found.status_code, found.headers["content-type"]) == (200, KINDS[kind]), path
        assert {name: found.headers[name] for name in HEADERS} == HEADERS
        assert len(found.content) > 100
        assert (head.status_code, head.content) == (200, b"")
        assert app.client.post(path).status_code == 405


def test_a_page_names_and_imports_files_of_ours_only_and_the_package_takes_them_along() -> None:
    """A page holds no script or style of its own, which the policy would refuse."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["service"]
    own = [file for file in PAGES.values() if file.is_relative_to(ROOT / "service")]
    own.append(ROOT / "service" / "api" / "examples.json")
    assert len(own) > 10
    for file in own:
        text, name = file.read_text(), file.relative_to(ROOT / "service").as_posix()
        assert any(fnmatch(name, pattern) for pattern in patterns), name
        if file.suffix == ".html":
            assert {f"/{named}" for named in re.findall(r'(?:src|href)="([^"#]+)"', text)} <= set(PAGES), name
            assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\bstyle=|\bon[a-z]+=", text)
        if file.suffix == ".js" and file.parent.name == "playground":
            assert {f"/playground/{named}" for named in re.findall(r'from "\./([^"]+)"', text)} <= set(PAGES), name


def test_files_need_no_key_and_calls_do(tmp_path: Path) -> None:
    for options, status, code in (({"api_keys": (KEY,)}, 401, "unauthorized"), ({}, 404, "not_found")):
        with App(tmp_path / code, playground=False, **options).started() as service:
            for path in (*PLAYGROUND, "/playground/", "/playground/../v1/none", "/docs/nothing.js", "/redoc"):
                found = service.client.get(path)
                assert (found.status_code, found.json()["error"]["code"]) == (status, code), path
            assert all(service.client.get(path).status_code == 200 for path in REFERENCE)


def test_the_pages_come_while_the_queue_is_full_and_are_not_counted(tmp_path: Path) -> None:
    with running(tmp_path, max_queue=1) as service, ThreadPoolExecutor(4) as pool:
        service.engine.before = held = Held()
        try:
            sent = [pool.submit(service.post, prompt="a") for _ in range(4)]
            assert held.entered.wait(20)
            until(lambda: any(one.done() and one.result().status_code == 429 for one in sent))
            assert all(httpx.get(service.url + path).status_code == 200 for path in ("/", "/docs"))
        finally:
            held.release.set()
        until(lambda: all(one.done() for one in sent))
        assert service.metric("hallutracer_http_requests_total") == 4
        assert "/playground" not in httpx.get(f"{service.url}/metrics").text


# --- one bundle, and the questions that it carries ---


@pytest.mark.parametrize("name", ["one", "one:1", "one@live"])
def test_one_bundle_with_what_a_picture_needs(app: App, name: str) -> None:
    found = app.client.get(f"/v1/bundles/{name}").json()
    (card,) = [one for one in app.client.get("/v1/bundles").json()["data"] if one["id"] == "one:1"]
    assert {key: found[key] for key in card} == card
    means = dict(zip(("hallucinated", "factual"), app.bundles[0].probes.trajectory_mean.tolist(), strict=True))
    assert {key: found["trajectories"][key] for key in means} == means
    assert (found["coverage"]["source"], found["sample"]) == ("own_threshold", None)
    missing = app.client.get("/v1/bundles/none")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "bundle")


def asked(app: App, number: int | str, bundle: str = "carrying", status: int = 200) -> dict[str, Any]:
    response = app.client.get(f"/v1/bundles/{bundle}/sample/{number}")
    assert response.status_code == status, response.text
    return dict(response.json())


def test_an_answer_has_the_risk_that_score_gives(app: App) -> None:
    told = app.client.get("/v1/bundles/carrying").json()["sample"]
    assert told["file"] == "rows.jsonl"
    assert told["questions"][0] == {"prompt": "Capital of France?", "answers": ["Paris"], "kind": "capital"}
    one = asked(app, 0)
    scored = app.client.post("/score", json={"prompt": "Capital of France?", "bundle": "carrying"}).json()["data"][0]
    assert one["risk"] == pytest.approx(scored["risk"], abs=1e-6)
    assert (one["threshold"], one["flagged"]) == (0.25, scored["flagged"])
    assert (one["number"], one["kind"], one["accepted"]) == (0, "capital", ["Paris"])
    assert one["verdict"] in ("right", "wrong", "abstained")


def test_it_is_answered_once_and_is_no_traffic(app: App) -> None:
    def counted() -> list[str]:
        """Counters of prompts, risks and answers."""
        lines = app.client.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith("hallutracer_") and "_total{" in line and "http" not in line]

    asked(app, 0)
    before, prompts = counted(), app.engine.counters.prefills
    assert asked(app, 1) == asked(app, 1)
    assert (app.engine.counters.prefills, counted()) == (prompts + 1, before)
    assert before


@pytest.mark.parametrize(("bundle", "number"), [*(("carrying", n) for n in ("2", "-1", "48")), ("one", "0")])
def test_what_it_does_not_carry_is_not_found(app: App, bundle: str, number: str) -> None:
    message = asked(app, number, bundle, 404)["error"]["message"]
    assert message == f"{bundle}:1 carries {2 * (bundle != 'one')} questions, and none of number {number}"


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
