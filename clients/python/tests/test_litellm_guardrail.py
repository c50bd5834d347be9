"""LiteLLM's generic guardrail, the code that its proxy runs before a call, against the service."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from litellm.exceptions import GuardrailRaisedException
from litellm.proxy.guardrails.guardrail_hooks.generic_guardrail_api import GenericGuardrailAPI

URL = os.environ["HALLUTRACER_URL"]
KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
AWAY = "http://127.0.0.1:9"
OPEN = {"unreachable_fallback": "fail_open"}
LOOP = asyncio.new_event_loop()  # one for all: LiteLLM keeps its connections


def check(question: str, url: str = URL, input_type: Any = "request", more: Any = None, **options: Any) -> Any:
    async def applied() -> Any:
        guardrail = GenericGuardrailAPI(api_base=url, guardrail_name="hallutracer", event_hook="pre_call", **options)
        inputs = {"texts": [question], "structured_messages": [{"role": "user", "content": question}], "model": "any"}
        return await guardrail.apply_guardrail(inputs | (more or {}), {"metadata": {}}, input_type)

    return LOOP.run_until_complete(applied())


def test_a_known_question_passes_and_an_unknown_one_is_blocked_with_the_policys_message() -> None:
    assert check(KNOWN)["texts"] == [KNOWN]
    with pytest.raises(GuardrailRaisedException, match="I am not sure"):
        check(UNKNOWN)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"additional_provider_specific_params": {"threshold": 0.0, "policy": "block"}}, "withheld: risk"),
     ({"additional_provider_specific_params": {"treshold": 1.0}}, "422"),
     ({"more": {"images": ["data:image/png;base64,AA"]}}, "images"), ({"input_type": "response"}, "422"),
     ({"url": AWAY}, "Guardrail API failed")],
)  # fmt: skip
def test_what_is_blocked(options: dict[str, Any], said: str) -> None:
    """A typo in a parameter of ours, what cannot be read, and an answer, which is not judged, do not pass."""
    with pytest.raises(Exception, match=said):
        check(KNOWN, **options)


def test_what_the_operator_lets_through() -> None:
    assert check(UNKNOWN, additional_provider_specific_params={"threshold": 1.0})["texts"] == [UNKNOWN]
    assert check(KNOWN, url=AWAY, **OPEN)["texts"] == [KNOWN]


class Between(ThreadingHTTPServer):
    """Passes requests on to the service, or answers with ``status`` itself."""

    status: int | None = None


@contextmanager
def between() -> Iterator[tuple[Between, str]]:
    """A server that can be stopped, and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body, status = self.rfile.read(int(self.headers["Content-Length"])), server.status
            if status is None:
                headers = {"content-type": "application/json"}
                found = httpx.post(URL + self.path, content=body, headers=headers, timeout=60)
                status, body = found.status_code, found.content
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body if server.status is None else b"{}")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = Between(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_it_was_there_and_is_stopped() -> None:
    with between() as (_, url):
        for options in ({}, OPEN):
            assert check(KNOWN, url=url, **options)["texts"] == [KNOWN]
            with pytest.raises(GuardrailRaisedException, match="I am not sure"):
                check(UNKNOWN, url=url, **options)
    with pytest.raises(Exception, match="Guardrail API failed"):
        check(UNKNOWN, url=url)
    assert check(UNKNOWN, url=url, **OPEN)["texts"] == [UNKNOWN]


@pytest.mark.parametrize(
    ("status", "opens"), [(502, True), (503, True), (504, True), (401, False), (403, False), (429, False), (500, False)]
)
def test_which_refusals_count_as_unreachable(status: int, opens: bool) -> None:
    """A revoked key, a used-up quota or a fault of the service never open it by ``unreachable_fallback``."""
    with between() as (server, url):
        server.status = status
        with pytest.raises(Exception, match="Guardrail API failed"):
            check(UNKNOWN, url=url)
        if opens:
            assert check(UNKNOWN, url=url, **OPEN)["texts"] == [UNKNOWN]
        else:
            with pytest.raises(Exception, match="Guardrail API failed"):
                check(UNKNOWN, url=url, **OPEN)
        assert check(UNKNOWN, url=url, fail_on_error=False)["texts"] == [UNKNOWN]
