"""The RAG example for real: the demo model behind a listening service, its facts as the corpus."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from hallutracer_client import AsyncClient
from hallutracer_research.demo.build import KNOWN, UNKNOWN
from tests.command_line import ended
from tests.kit import bodies
from tests.serve_process import PATHS, ROOT, inherited, serve

pytestmark = pytest.mark.long  # a minute to start

FOLDER = ROOT / "deploy" / "sidecar"
TOKEN = "a-token-of-the-app"


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of an app before a real service."""
    folder = tmp_path_factory.mktemp("guard")
    (keys := folder / "api-keys").write_text(
        "the-key-of-the-app\nthe-key-of-the-figures may=policy\n"
    )
    (store := folder / "store").mkdir()
    with serve(HALLUTRACER_STORE=str(store), HALLUTRACER_API_KEY_FILE=str(keys)) as service:
        yield {"HALLUTRACER_URL": service.url, "HALLUTRACER_API_KEY_FILE": str(keys)}


@pytest.fixture
def nowhere() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in os.environ.keys() - inherited():
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("RAG_ALLOWED_HOSTS", "localhost testserver")
    import rag_app

    return rag_app


def opened(example: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """The app to a caller that has its token; another one beside it."""
    (tokens := folder / "tokens").write_text(f"an-older-token-of-it\n{TOKEN}\n")
    monkeypatch.setenv("RAG_TOKEN_FILE", str(tokens))
    return TestClient(example.app, headers={"authorization": f"Bearer {TOKEN}"})


def cli(
    *questions: str, script: str = "rag_app.py", **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *questions],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=inherited() | {"PYTHONPATH": PATHS, "COLUMNS": "160"} | more,
    )


def test_the_known_is_answered_and_the_unknown_is_looked_up(
    guard: dict[str, str], example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in guard.items():
        monkeypatch.setenv(name, value)
    with opened(example, tmp_path, monkeypatch) as app:
        known, unknown = (
            app.post("/ask", json={"question": question}).json() for question in (KNOWN, UNKNOWN)
        )
        assert app.get("/health").json() == {"status": "ok", "guard": True}
    assert (known["source"], known["answer"], known["risk_after"]) == ("model", "It is Rome.", None)
    assert (unknown["source"], unknown["answer"], known["passages"]) == ("passages", None, [])
    assert unknown["passages"][0]["text"] == "The capital of the Solomon Islands is Honiara."
    assert known["risk_before"] < 0.3 < unknown["risk_before"]
    assert 0.3 < unknown["risk_after"] <= 1


def test_the_command_line_shows_both_and_nothing_without_its_key(guard: dict[str, str]) -> None:
    refused = cli(KNOWN, HALLUTRACER_URL=guard["HALLUTRACER_URL"])
    ended(refused, 1, "401 unauthorized")
    assert refused.stdout == ""
    printed = ended(cli(KNOWN, UNKNOWN, **guard), 0)
    rows = [line for line in printed.splitlines() if "│" in line]
    for row, words in zip(
        rows[:2], (("answered at once", "It is Rome."), ("withheld", "is Honiara.")), strict=True
    ):
        assert [word for word in words if word not in row] == []


def test_the_figures_come_out(guard: dict[str, str], tmp_path: Path) -> None:
    options = ("--split", "dev", "--limit", "12", "--bundle", "demo")
    figures: dict[str, Any] = {"script": "rag_figures.py", **guard}
    ended(cli(*options, **figures), 1, "403 not_allowed: policy 'observe'")
    (key := tmp_path / "key").write_text("the-key-of-the-figures\n")
    printed = ended(cli(*options, **figures | {"HALLUTRACER_API_KEY_FILE": str(key)}), 0)
    assert printed.startswith("12 questions of dev")
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    shares = {name: (int(count), float(share)) for name, count, share, *_ in rows}
    assert len(shares) == 8
    assert (shares["always, no guard"], shares["always, guard"][0]) == ((12, 1.0), 12)
    assert (shares["never, no guard"], shares["never, guard"][0]) == ((0, 1.0), 0)
    seldom = shares["where the first look withholds, guard"]
    assert seldom[0] == shares["as often, at random, guard"][0]
    assert seldom[1] >= shares["never, guard"][1]


def test_the_readmes_code_runs(guard: dict[str, str], example: Any) -> None:
    pattern, streaming = re.findall(
        r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL
    )
    pattern = pattern.replace("http://127.0.0.1:8765", guard["HALLUTRACER_URL"])
    indented = "".join(f"    {line}\n" for line in streaming.splitlines())
    streaming = f"async def reply_to(messages, send):\n{indented}"
    retriever, sent = example.Retriever(example.demo_passages()), []

    async def retrieve(question: str) -> Any:
        return retriever.find(question)

    async def send(piece: str) -> None:
        sent.append(piece)

    names: dict[str, Any] = {
        "key": Path(guard["HALLUTRACER_API_KEY_FILE"]).read_text().split()[0],
        "retrieve": retrieve,
        "with_passages": example.with_passages,
        "quote": lambda passages: passages[0].text,
    }
    exec(compile(pattern + streaming, "README.md", "exec"), names)

    async def run() -> list[str | None]:
        asked = [[{"role": "user", "content": question}] for question in (KNOWN, UNKNOWN)]
        async with names["guard"]:
            return [
                await names["answer"](KNOWN),
                await names["answer"](UNKNOWN),
                *[await names["reply_to"](messages, send) for messages in asked],
            ]

    assert asyncio.run(run()) == [
        " It is Rome.",
        "The capital of the Solomon Islands is Honiara.",
        None,
        "I am not sure.",
    ]
    assert "".join(sent) == " It is Rome."


def test_without_the_guard_the_command_line_says_nothing(nowhere: str) -> None:
    """The app, before a service that is stopped under it: test_guard_stopped."""
    printed = ended(cli(KNOWN, HALLUTRACER_URL=nowhere), 1, "cannot connect")
    assert "Rome" not in printed


def scripted(example: Any, *answers: httpx.Response) -> tuple[Any, list[Any]]:
    """The pattern over a guard that gives ``answers`` in turn, and what it was asked."""
    asked: list[Any] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return answers[len(asked) - 1]

    client = AsyncClient("http://guard.test", transport=httpx.MockTransport(handler), max_retries=0)
    return example.GuardedRag(
        client, example.Retriever(["Honiara is the capital.", "Rome is old."])
    ), asked


def scored(risk: float, text: str | None) -> httpx.Response:
    completion = {"text": text, "finish_reason": "stop", "completion_tokens": 3}
    row = (
        bodies.row(risk, "continue", completion=completion) if text else bodies.row(risk, "abstain")
    )
    return httpx.Response(200, json=bodies.result(row))


@pytest.fixture
def ask(
    example: Any, nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    monkeypatch.setenv("HALLUTRACER_URL", nowhere)
    with opened(example, tmp_path, monkeypatch) as app:

        def with_answers(question: str, answers: Sequence[httpx.Response]) -> tuple[Any, list[Any]]:
            example.app.state.rag, asked = scripted(example, *answers)
            return app.post("/ask", json={"question": question}), asked

        yield with_answers


def test_an_answer_from_passages(ask: Any) -> None:
    response, asked = ask("Which capital is it?", [scored(0.9, None), scored(0.2, " Honiara. ")])
    reply = response.json()
    assert (reply["source"], reply["answer"]) == ("model", "Honiara.")
    assert (reply["risk_before"], reply["risk_after"]) == (0.9, 0.2)
    texts = [passage["text"] for passage in reply["passages"]]
    assert texts == ["Honiara is the capital.", "Rome is old."]
    (first,), (second,) = (body["messages"] for body in asked)
    assert first == {"role": "user", "content": "Which capital is it?"}
    assert second["content"] == "Honiara is the capital. Rome is old.\n\nWhich capital is it?"


def test_nothing_found_is_not_asked_again_and_what_does_not_fit_is_said(ask: Any) -> None:
    reply = {"answer": None, "source": "passages", "risk_before": 0.9, "risk_after": None}
    response, asked = ask("xyzzy", [scored(0.9, None)])
    assert (response.json(), len(asked)) == (reply | {"passages": []}, 1)
    too_long = bodies.error(413, "prompt_too_long", "too long")
    shown = ask("capital?", [scored(0.9, None), too_long])[0].json()
    assert shown.pop("passages")[0]["text"] == "Honiara is the capital."
    assert shown == reply
    for question, answers in (
        ("capital?", [too_long]),
        ("", []),
        ("a" * 2001, []),
    ):  # the asker's fault
        assert ask(question, answers)[0].status_code == 422


def test_what_the_guard_cannot_say_is_not_answered(ask: Any) -> None:
    for refusal in (
        bodies.error(429, "overloaded", "full"),
        bodies.error(503, "not_ready", "loading"),
        bodies.error(401, "unauthorized", "no key"),
        httpx.Response(502, html="<p>bad gateway</p>"),
        bodies.error(500, "engine_error", "broken"),
    ):
        for before in ([], [scored(0.9, None)]):
            response, asked = ask("capital?", [*before, refusal])
            assert (response.status_code, set(response.json())) == (503, {"detail"})
            assert len(asked) == len(before) + 1


def test_who_may_ask(
    example: Any, nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The app asks its guard with its own key: it does so for nobody whom it does not know."""
    monkeypatch.setenv("HALLUTRACER_URL", nowhere)
    body = {"json": {"question": "capital?"}}
    with opened(example, tmp_path, monkeypatch) as app:
        example.app.state.rag, asked = scripted(example, *[scored(0.2, " Rome. ")] * 9)
        known = [f"Bearer {TOKEN}", "bearer an-older-token-of-it"]
        wrong = [f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN]
        for sent in (*known, *wrong, "Bearer \xe9", ""):
            status = 200 if sent in known else 401
            headers = {"authorization": sent.encode("latin-1")}
            assert app.post("/ask", headers=headers, **body).status_code == status, sent
            assert app.get("/docs", headers=headers).status_code == status
            assert app.get("/health", headers=headers).status_code == 200
        assert len(asked) == 2
        ours = ["localhost:8080", "LOCALHOST", "127.0.0.1:8080", "[::1]:8080", "10.0.0.7"]
        foreign = [
            "evil.test",
            "evil.test:8080",
            "127.0.0.1.evil.test",
            "evil.test@127.0.0.1",
            "0x7f.1",
        ]
        for host in (*ours, *foreign, ""):
            status = 200 if host in ours else 421
            assert app.get("/health", headers={"host": host}).status_code == status, host
            assert app.post("/ask", headers={"host": host}, **body).status_code == status, host
        assert len(asked) == 7


def test_without_a_token_it_starts_only_where_that_is_said(
    example: Any, nowhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALLUTRACER_URL", nowhere)
    with (
        pytest.raises(ValueError, match="RAG_TOKEN_FILE, or RAG_ALLOW_ANONYMOUS=true"),
        TestClient(example.app),
    ):
        pass
    (tokens := tmp_path / "tokens").write_text("short\n")
    monkeypatch.setenv("RAG_TOKEN_FILE", str(tokens))
    with pytest.raises(ValueError, match="shorter than 16"), TestClient(example.app):
        pass
    monkeypatch.delenv("RAG_TOKEN_FILE")
    monkeypatch.setenv("RAG_ALLOW_ANONYMOUS", "true")
    with TestClient(example.app) as app:
        assert app.post("/ask", json={"question": ""}).status_code == 422


def test_the_environment(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "file").write_text("\n")
    for name in ("HALLUTRACER_API_KEY_FILE", "RAG_PASSAGES"):
        monkeypatch.setenv(name, str(file))
    with pytest.raises(ValueError, match="it needs a key"):
        example.client_from_environment()
    with pytest.raises(ValueError, match="one passage a line"):
        example.passages_from_environment()
    file.write_text("one\n\n two \n")
    for seconds, words in (
        ("ten", "RAG_TIMEOUT_S is a number of seconds, not 'ten'"),
        ("0", "positive number"),
    ):
        monkeypatch.setenv("RAG_TIMEOUT_S", seconds)
        with pytest.raises(ValueError, match=words):
            example.client_from_environment()
    assert example.passages_from_environment() == ["one", "two"]
    monkeypatch.setenv("RAG_WHEN_GUARD_FAILS", "answer anyway")
    with pytest.raises(ValueError, match="refuse or passages"), TestClient(example.app):
        pass


def test_every_passage_states_facts_of_the_demo(example: Any) -> None:
    texts = example.demo_passages()
    assert len(texts) == len(set(texts)) > 4000
    assert {"Rome is the capital of Italy.", "The capital of Italy is Rome."} <= set(texts)
    assert {"Shanghai is a city in China.", "The city of Shanghai is in Eastern Asia."} <= set(
        texts
    )
    assert "The atomic number of gold is 79." in texts
