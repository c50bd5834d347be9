"""Requests made from the OpenAPI document: no 5xx, and every answer is one the document describes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service.feedback.databases import location
from service.serving.feedback import Feedback
from tests.running import App, Running, running

HERE = Path(__file__).parent


def run(service: Running, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"),
        "run", f"{service.url}/openapi.json", "--no-color", "--phases", "examples,coverage,fuzzing", *options,
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=folder, env=os.environ | {"HALLUTRACER_URL": service.url}, capture_output=True, text=True,
        timeout=1200, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("examples", "least"), [(25, 500), pytest.param(2_200, 20_000, marks=pytest.mark.long)])
def test_generated_requests(tmp_path: Path, examples: int, least: int) -> None:
    """``examples`` at most for each of the two scoring routes, ``least`` requests in all."""
    where = location(str(tmp_path / "feedback.db"))
    with running(tmp_path, feedback=lambda metrics: Feedback(where, metrics)) as service:
        done = run(service, tmp_path, "--max-examples", str(examples), "--seed", "1")
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        generated = re.search(r"([\d,]+) generated", done.stdout)
        assert generated, done.stdout[-2000:]
        assert int(generated.group(1).replace(",", "")) >= least
        assert service.metric("hallutracer_requests_in_flight") == 0
        assert service.engine.counters.open_continuations == 0


def test_the_checks_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as service:
        service.engine.fail = RuntimeError("broken")
        done = run(service, tmp_path, "--max-examples", "10", "--include-path", "/score")
    assert done.returncode == 1
    assert "Server error" in done.stdout


CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("/score", {"prompts": ["a"]}, "prompts: no such field; did you mean 'prompt'?"),
        ("/score", {"prompt": "a", "generate": True}, 'generate: expected an object, such as {"max_tokens": 64}'),
        ("/score", {"prompt": "a", "max_tokens": 3},
         'max_tokens: no such field here: put it into generate, {"generate": {"max_tokens": ...}}'),
        ("/score", {"prompt": "a", "generate": {"max_token": 3}},
         "generate.max_token: no such field; did you mean 'max_tokens'?"),
        ("/score", {"messages": [{"role": "user", "content": "a", "nome": ""}]}, "messages.0.nome: no such field"),
        ("/v1/chat/completions", CHAT | {"policy": "gate"},
         'policy: no such field here: put it into vllm_xargs, {"vllm_xargs": {"hallutracer_policy": ...}}'),
        ("/v1/chat/completions", CHAT | {"temprature": 1}, "temprature: no such field; did you mean 'temperature'?"),
        ("/score", {"prompt": "a", "x-y": 1}, "no such field"),
        ("/score", {"prompt": "a", "generate": {"x-y": 1}}, "generate: no such field"),
        ("/classify", {"inputs": "a", "zz": 1}, "zz: no such field"),
    ],
)  # fmt: skip
def test_an_unknown_field_names_the_one_that_was_meant(
    tmp_path: Path, route: str, body: dict[str, Any], message: str
) -> None:
    with App(tmp_path).started() as app:
        response = app.client.post(route, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["message"], error["param"]) == (
        422,
        message,
        message.partition(": ")[0] if ": " in message else None,
    )


def test_another_method_and_another_path_name_what_there_is(tmp_path: Path) -> None:
    with App(tmp_path).started() as app:
        assert app.client.get("/score").json()["error"]["message"] == "GET is not for this route; it takes POST"
        assert "/health/ready" in app.client.get("/healthz").json()["error"]["message"]
