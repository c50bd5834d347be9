"""Requests to other servers go through the proxies of the environment, whatever NO_PROXY holds."""

from __future__ import annotations

import asyncio
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest

from service.data.judges import OpenAIJudge
from service.data.options import JudgeOptions
from service.errors import TrainingError
from service.policies.guard import Action, Policy, Upstream
from service.proxies import AsyncProxyTransport, Proxies, ProxyTransport
from tests.kit.local_server import answer, listening
from tests.running import App

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
NETWORKS = (
    "fd00::/8",
    "[::1]",
    "::1",
    "10.0.0.0/8,fe80::/10,[fd00::]/8,.svc",
    "[::1]:8080",
    "::/0",
    "]",
    "a:b:c",
)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize("entries", NETWORKS)
def test_no_entry_of_no_proxy_keeps_a_service_or_a_judge_from_starting(
    entries: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", entries)
    OpenAIJudge(JudgeOptions("openai", "http://127.0.0.1:9/v1", "grader"))
    with App(tmp_path).started() as service:
        assert service.client.get("/health/ready").status_code == 200


@pytest.mark.parametrize(
    ("entry", "url", "direct"),
    [
        ("fd00::/8", "http://[fd12::1]:80/v1", True),
        ("fd00::/8", "http://[2001:db8::1]/v1", False),
        ("[fd00::]/8", "http://[fd12::1]/v1", True),
        ("::1", "http://[::1]:8000/v1", True),
        ("[::1]", "http://[::1]:8000/v1", True),
        ("[::1]:8000", "http://[::1]:8000/v1", True),
        ("[::1]:8001", "http://[::1]:8000/v1", False),
        ("10.0.0.0/8", "http://10.1.2.3/v1", True),
        ("10.0.0.1/8", "http://10.1.2.3/v1", True),
        ("10.0.0.0/8", "http://11.0.0.1/v1", False),
        ("10.0.0.0/8", "http://ten.example/v1", False),
        ("10.1.2.3", "http://10.1.2.3/v1", True),
        ("example.com", "http://example.com/v1", True),
        ("example.com", "http://a.example.com/v1", True),
        ("example.com", "http://badexample.com/v1", False),
        (".example.com", "http://a.example.com/v1", True),
        (".example.com", "http://example.com/v1", False),
        ("*.example.com", "http://a.example.com/v1", True),
        ("EXAMPLE.com", "http://example.COM/v1", True),
        ("example.com:443", "https://example.com/v1", True),
        ("example.com:80", "https://example.com/v1", False),
        ("http://example.com", "http://example.com/", True),
        ("http://example.com", "https://example.com/", False),
        ("a, *", "http://example.com/", True),
        ("", "http://example.com/", False),
        ("a b", "http://b/v1", True),
    ],
)
def test_no_proxy_names_hosts_addresses_and_networks(
    entry: str, url: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://me:secret@proxy.invalid:3128")
    monkeypatch.setenv("NO_PROXY", entry)
    told = Proxies.of_environment().described(httpx.URL(url))
    assert told == (
        ""
        if direct
        else " through the proxy proxy.invalid:3128 (ALL_PROXY; NO_PROXY lists hosts to be "
        "reached without it)"
    )


def test_a_request_goes_through_its_proxy_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def proxy(request: BaseHTTPRequestHandler, body: bytes) -> None:
        seen.append(request.path)
        answer(request, 200, b"{}")

    with listening(proxy) as address:
        monkeypatch.setenv("HTTP_PROXY", address)  # without a scheme, as many write it
        monkeypatch.setenv("NO_PROXY", "127.0.0.0/8")
        with httpx.Client(transport=ProxyTransport(Proxies.of_environment())) as client:
            client.get("http://far.invalid/a")
            client.get(f"http://{address}/b")

        async def ask() -> None:
            async with httpx.AsyncClient(
                transport=AsyncProxyTransport(Proxies.of_environment())
            ) as client:
                await client.get("http://far.invalid/c")
                await client.get(f"http://{address}/d")

        asyncio.run(ask())
    assert seen == ["http://far.invalid/a", "/b", "http://far.invalid/c", "/d"]


@pytest.mark.parametrize(
    ("proxy", "why"),
    [
        ("http://me:secret@127.0.0.1:9", "ConnectError"),
        ("gopher://me:secret@127.0.0.1:9", "ProxyError: the proxy's"),
    ],
)
def test_a_proxy_that_fails_is_named_without_its_password(
    proxy: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("NO_PROXY", "fd00::/8")
    named = "through the proxy 127.0.0.1:9 (HTTP_PROXY; NO_PROXY lists hosts"
    policy = Policy(
        "send", Action.FALLBACK, 0.0, upstream=Upstream("http://far.invalid/v1", "other")
    )
    with App(tmp_path, policies={"send": policy}).started() as service:
        body = {
            "model": "scripted",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        }
        said = service.client.post(
            "/v1/chat/completions", json=body | {"vllm_xargs": {"hallutracer_policy": "send"}}
        )
    assert said.status_code == 502
    message = said.json()["error"]["message"]
    assert f"far.invalid {named}" in message
    assert why in message
    judge = OpenAIJudge(
        JudgeOptions("openai", "http://far.invalid/v1", "grader"), sleep=lambda seconds: None
    )
    with pytest.raises(TrainingError) as error:
        judge("Where?", "In Paris", ["Paris"])
    assert named in str(error.value)
    assert why.partition(":")[0] in str(error.value)
    assert "secret" not in message + str(error.value) + json.dumps(said.json())
