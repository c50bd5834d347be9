"""The pages' files over HTTP: what is served, to whom, and what the browser is told to refuse."""

from __future__ import annotations

import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from service.api.app import HEADERS, pages
from tests.matching import Held
from tests.running import App, running, until

PLAYGROUND = [path for path in pages(playground=True) if not path.startswith("/docs")]
REFERENCE = [*pages(playground=False)]
ROOT = Path(__file__).parent.parent.parent
KEY = "a-key-of-sixteen-letters"


def test_every_page_and_file_is_served_with_the_policy(tmp_path: Path) -> None:
    assert {"/", "/playground/app.js", "/playground/style.css"} <= set(PLAYGROUND)
    assert {"/docs", "/docs/swagger-ui-bundle.js"} <= set(REFERENCE)
    kinds = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8",
             "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}  # fmt: skip
    with App(tmp_path).started() as service:
        for path in PLAYGROUND + REFERENCE:
            found = service.client.get(path)
            kind = path.rpartition(".")[2] if "." in path else "html"
            assert (found.status_code, found.headers["content-type"]) == (200, kinds[kind]), path
            assert {name: found.headers[name] for name in HEADERS} == HEADERS
            assert len(found.content) > 100
            head = service.client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert service.client.post(path).status_code == 405


def test_a_page_names_files_of_ours_only() -> None:
    """And holds no script or style of its own, which the policy would refuse."""
    for path, file in pages(playground=True).items():
        if file.suffix != ".html":
            continue
        text = file.read_text()
        named = re.findall(r'(?:src|href)="([^"#]+)"', text)
        assert {f"/{name}" for name in named} <= set(PLAYGROUND + REFERENCE), path
        assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\bstyle=|\bon[a-z]+=", text)


def test_modules_import_what_is_served() -> None:
    for path, file in pages(playground=True).items():
        if path.startswith("/playground/") and file.suffix == ".js":
            for name in re.findall(r'from "\./([^"]+)"', file.read_text()):
                assert f"/playground/{name}" in PLAYGROUND


def test_without_the_playground(tmp_path: Path) -> None:
    with App(tmp_path, playground=False).started() as service:
        for path in PLAYGROUND:
            found = service.client.get(path)
            assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")
        assert all(service.client.get(path).status_code == 200 for path in REFERENCE)


def test_files_need_no_key_and_calls_do(tmp_path: Path) -> None:
    with App(tmp_path, api_keys=(KEY,)).started() as service:
        assert all(service.client.get(path).status_code == 200 for path in PLAYGROUND + REFERENCE)
        for path in ("/openapi.json", "/v1/bundles", "/v1/bundles/one", "/playground/", "/playground/../v1/models",
                     "/docs/nothing.js", "/redoc"):  # fmt: skip
            assert service.client.get(path).status_code == 401, path
        assert service.client.post("/score", json={"prompt": "a"}).status_code == 401
        assert KEY not in service.client.get("/").text
    with App(tmp_path / "off", api_keys=(KEY,), playground=False).started() as service:
        assert service.client.get("/").status_code == 401


def test_the_pages_answer_to_our_names_only(tmp_path: Path) -> None:
    with App(tmp_path, allowed_hosts=("testserver",), cors_origins=("https://a.example",)).started() as service:
        for path in PLAYGROUND + REFERENCE:
            refused = service.client.get(path, headers={"host": "rebound.example"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (421, "wrong_host")
        foreign = service.client.get("/", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in foreign.headers


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


def test_the_package_takes_the_files_along() -> None:
    """What a wheel has is what these patterns match."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["service"]
    own = [file for file in pages(playground=True).values() if file.is_relative_to(ROOT / "service")]
    assert len(own) > 10
    for file in own:
        name = file.relative_to(ROOT / "service").as_posix()
        assert any(fnmatch(name, pattern) for pattern in patterns), name


@pytest.mark.parametrize("name", ["one", "one:1", "one@live"])
def test_one_bundle_with_what_a_picture_needs(tmp_path: Path, name: str) -> None:
    with App(tmp_path, aliases_of=lambda _: {"live": 1}).started() as service:
        found = service.client.get(f"/v1/bundles/{name}").json()
        (card,) = [one for one in service.client.get("/v1/bundles").json()["data"] if one["id"] == "one:1"]
        assert {key: found[key] for key in card} == card
        hallucinated, factual = service.bundles[0].probes.trajectory_mean.tolist()
        assert (found["trajectories"]["factual"], found["trajectories"]["hallucinated"]) == (factual, hallucinated)
        assert found["coverage"]["source"] == "own_threshold"
        missing = service.client.get("/v1/bundles/none")
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "bundle")
