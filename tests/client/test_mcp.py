"""The MCP server, asked by the SDK's own client: in this process, over stdio and over streamable
HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import CallToolResult, Tool

from hallutracer_client import AsyncClient
from hallutracer_client.mcp import LONGEST, TOKEN, TokenCheck, main, make_server
from tests.client.conftest import Script, failing
from tests.kit import bodies
from tests.kit.local_server import free_port
from tests.kit.tables import cells
from tests.running import running, until
from tests.serve_process import PATHS, ServeProcess, inherited

ASKED = "What is the capital of the Solomon Islands?"
TOOL = "hallucination_risk"
COMMAND = ("-m", "hallutracer_client.mcp")
KEY = "a-key-of-the-service"
SECRET = "the-token-of-this-server"


def ask(server: Any, question: str = ASKED) -> CallToolResult:
    """What the tool says of a question."""

    async def asked() -> CallToolResult:
        async with Client(server) as client:
            return await client.call_tool(TOOL, {"question": question})

    return asyncio.run(asked())


def ask_with(token: str, url: str) -> CallToolResult:
    """What the tool says over HTTP to a host that sends this token."""

    async def asked() -> CallToolResult:
        async with (
            create_mcp_http_client(headers={"Authorization": f"Bearer {token}"}) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            return await client.call_tool(TOOL, {"question": ASKED})

    return asyncio.run(asked())


def text(result: CallToolResult) -> str:
    (block,) = result.content
    assert block.type == "text"
    return block.text


def answered(**row: Any) -> CallToolResult:
    """What the tool makes of one row of the service's answer."""
    row = {"risk": 0.2, **row}
    return ask(scripted(lambda _: httpx.Response(200, json=bodies.result(bodies.row(**row)))))


def scripted(handler: Callable[[httpx.Request], httpx.Response]) -> Any:
    return make_server(
        AsyncClient("http://guard.test", transport=httpx.MockTransport(handler), max_retries=0)
    )


def says_what_the_service_says(result: CallToolResult, service: ServeProcess) -> None:
    body = httpx.post(f"{service.url}/score", json={"prompt": ASKED}, timeout=60).json()
    (row,), bundle = body["data"], body["bundle"]
    same = ("risk", "flagged", "threshold", "decision", "message", "outside_training", "applies")
    assert result.structured_content == {
        name: row[name] for name in same if row.get(name) is not None
    } | {
        "model": body["model"],
        "bundle": f"{bundle['name']}:{bundle['version']}",
    }
    assert text(result).startswith(
        f"Risk {row['risk']:.2f} of a wrong answer from memory, at or above the threshold"
    )
    assert not result.is_error


def test_over_stdio_it_has_one_tool_and_logs_no_question(
    demo_service: ServeProcess, tmp_path: Path
) -> None:
    process = StdioServerParameters(
        command=sys.executable,
        args=list(COMMAND),
        env={"PYTHONPATH": PATHS, "HALLUTRACER_URL": demo_service.url},
    )

    async def asked() -> tuple[list[Tool], CallToolResult, CallToolResult]:
        with (tmp_path / "log").open("w") as log:
            async with Client(stdio_client(process, errlog=log)) as client:
                arguments = ({"question": ASKED}, {"question": ASKED * LONGEST})
                first, refused = [await client.call_tool(TOOL, argument) for argument in arguments]
                return (await client.list_tools()).tools, first, refused

    (tool,), found, refused = asyncio.run(asked())
    says_what_the_service_says(found, demo_service)
    assert refused.is_error
    assert f"at most {LONGEST} characters" in text(refused)
    assert "Solomon" not in (tmp_path / "log").read_text()
    assert tool.name == TOOL
    assert "need not be the model that you are" in (tool.description or "")
    assert tool.annotations is not None
    assert tool.annotations.model_dump(exclude={"title"}) == {
        "read_only_hint": True,
        "destructive_hint": False,
        "idempotent_hint": True,
        "open_world_hint": False,
    }
    assert tool.input_schema["required"] == ["question"]
    assert tool.output_schema is not None
    assert set(tool.output_schema["properties"]) >= set(found.structured_content or {})


# What is answered to a header in the place of the client's own.
HEADERS = cells(
    f"""
    200 | Accept: application/json, text/event-stream
    200 | Host: localhost:{{port}}
    200 | Origin: http://localhost:{{port}}
    421 | Host: evil.test:{{port}}
    421 | Host: 127.0.0.1
    403 | Origin: http://evil.test
    403 | Origin: null
    403 | Origin: http://localhost:3000
    401 | Authorization:
    401 | Authorization: Bearer {SECRET}x
    401 | Authorization: Bearer {SECRET[:-1]}
    401 | Authorization: Basic {SECRET}
    401 | Authorization: {SECRET}
    """
)


def test_over_http_this_machine_alone_is_served(demo_service: ServeProcess, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, *COMMAND, "--url", demo_service.url, "--port", str(port)]
    log = (tmp_path / "log").open("w")
    variables = inherited() | {"PYTHONPATH": PATHS, TOKEN: SECRET}
    with log, subprocess.Popen(command, env=variables, stdout=log, stderr=log) as process:
        try:
            until(lambda: listens("127.0.0.1", port))
            url = f"http://127.0.0.1:{port}/mcp"
            says_what_the_service_says(ask_with(SECRET, url), demo_service)
            assert url in (tmp_path / "log").read_text()
            for word in ("Solomon", SECRET):
                assert word not in (tmp_path / "log").read_text()
            body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"})
            headers = {
                "Content-Type": "application/json",
                "Accept": "application/json, text/event-stream",
                "Authorization": f"Bearer {SECRET}",
            }
            for status, line in HEADERS:
                name, value = line.format(port=port).split(":", 1)
                response = httpx.post(url, content=body, headers=headers | {name: value.strip()})
                assert response.status_code == int(status), line
            assert not listens("127.0.0.2", port)
        finally:
            process.terminate()


def test_a_port_takes_a_token_or_the_word_that_it_is_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = list[Any]()
    monkeypatch.setattr("hallutracer_client.mcp.uvicorn.run", lambda app, **_: started.append(app))
    for name, value in ((TOKEN, ""), ("HALLUTRACER_API_KEY", KEY)):
        monkeypatch.setenv(name, value)
    for token in ("", "short", KEY):
        monkeypatch.setenv(TOKEN, token)
        with pytest.raises(SystemExit) as caught:
            main(["--port", "8766"])
        assert caught.value.code == 2
        printed = capsys.readouterr().err
        assert TOKEN in printed
        assert "token_urlsafe" in printed
        assert KEY not in printed
    assert not started
    monkeypatch.setenv(TOKEN, SECRET)
    main(["--port", "8766"])
    monkeypatch.delenv(TOKEN)
    main(["--port", "8766", "--allow-anonymous"])
    assert [isinstance(app, TokenCheck) for app in started] == [True, False]


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def test_a_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock()
    monkeypatch.setattr("hallutracer_client.mcp.make_server", made)
    with running(tmp_path, api_keys=(KEY,)) as service:
        for given, wrong in (("", True), ("another-key-of-it", True), (KEY, False)):
            monkeypatch.setenv("HALLUTRACER_API_KEY", given)
            main(["--url", service.url])
            answer = ask(make_server(*made.call_args.args))
            assert answer.is_error is wrong
            assert ("401" in text(answer) and "as HALLUTRACER_API_KEY" in text(answer)) is wrong
            assert not given or given not in text(answer)


@pytest.mark.parametrize(
    ("failure", "message", "words"),
    cells(
        """
        ConnectError |  | http://guard.test; is the service running there?; --url
        401 unauthorized | because | 401 unauthorized; HALLUTRACER_API_KEY
        503 not_ready | the model is loading | 503 not_ready: the model is loading
        422 invalid_request | too long | 422 invalid_request: too long; rid-1
        200 |  | not as HalluTracer does; another service
        """
    ),
)
def test_without_a_risk_the_error_has_cause_and_cure(
    failure: str, message: str, words: str
) -> None:
    answer = ask(scripted(Script(failing(failure, message))))
    assert (answer.is_error, answer.structured_content) == (True, None)
    assert "no risk is known" in text(answer)
    assert all(word in text(answer) for word in words.split("; ")), text(answer)
    assert "Solomon" not in text(answer)


@pytest.mark.parametrize(
    ("row", "sentence"),
    cells(
        """
        {} | Risk 0.20 of a wrong answer from memory, below the threshold 0.50: it may be
        {} | it may be answered from memory.
        {"risk": 0.5, "outside_training": true} | at or above the threshold 0.50: look it up, or
        {"risk": 0.5, "outside_training": true} | look it up, or say that you are not
        {"outside_training": true} | but the question is outside training, unlike all that the
        {"outside_training": true} | unlike all that the probes were trained on: look it up
        {"decision": "block"} | below the threshold 0.50, but the question is withheld by the policy
        {"decision": "block"} | withheld by the policy: look it up
        {"applies": false, "outside_training": false} | The question asks for no fact, so the risk
        {"applies": false, "outside_training": false} | so the risk says nothing
        """
    ),
)
def test_the_sentence_can_be_acted_on(row: str, sentence: str) -> None:
    assert sentence in text(answered(**json.loads(row)))


def test_what_the_service_does_not_tell_is_left_out() -> None:
    fields = {"risk", "flagged", "threshold", "decision", "model", "bundle", "message"}
    assert set(answered(message="Hm.").structured_content or {}) == fields


@pytest.mark.parametrize(
    ("arguments", "word"),
    cells(
        """
        --url localhost:8765 | http(s)
        --port 0 | 1 to 65535
        --url http://me:it@h | key
        """
    ),
)
def test_a_wrong_command_line_is_refused(
    arguments: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert word in capsys.readouterr().err


def test_without_the_extra_the_error_names_it() -> None:
    code = "import sys; sys.modules['mcp'] = None; import hallutracer_client.mcp"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'hallutracer-client[mcp]'" in done.stderr.splitlines()[-1]
