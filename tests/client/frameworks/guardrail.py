"""LiteLLM's generic guardrail, and its detector of FMS Guardrails: what its proxy runs before a
call."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest
from litellm.caching.caching import DualCache
from litellm.exceptions import GuardrailRaisedException
from litellm.proxy._types import UserAPIKeyAuth
from litellm.proxy.guardrails.guardrail_hooks.generic_guardrail_api import GenericGuardrailAPI
from litellm.proxy.guardrails.guardrail_hooks.ibm_guardrails.ibm_detector import (
    IBMGuardrailDetector,
)

from tests.kit.local_server import answer, listening

URL = os.environ["HALLUTRACER_URL"]
KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
AWAY = "http://127.0.0.1:9"
OPEN = {"unreachable_fallback": "fail_open"}
LOOP = asyncio.new_event_loop()  # one for all: LiteLLM keeps its connections


def check(
    question: str, url: str = URL, input_type: Any = "request", more: Any = None, **options: Any
) -> Any:
    async def applied() -> Any:
        guardrail = GenericGuardrailAPI(
            api_base=url, guardrail_name="hallutracer", event_hook="pre_call", **options
        )
        inputs = {
            "texts": [question],
            "structured_messages": [{"role": "user", "content": question}],
            "model": "any",
        }
        return await guardrail.apply_guardrail(inputs | (more or {}), {"metadata": {}}, input_type)

    return LOOP.run_until_complete(applied())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"additional_provider_specific_params": {"threshold": 0.0, "policy": "block"}},
            "withheld: risk",
        ),
        ({"additional_provider_specific_params": {"treshold": 1.0}}, "422"),
        ({"more": {"images": ["data:image/png;base64,AA"]}}, "images"),
        ({"input_type": "response"}, "422"),
        ({"url": AWAY}, "Guardrail API failed"),
    ],
)
def test_what_is_blocked(options: dict[str, Any], message: str) -> None:
    """A typo in a parameter of ours, what cannot be read, and an answer, which is not judged, do
    not pass."""
    with pytest.raises(Exception, match=message):
        check(KNOWN, **options)


def test_what_the_operator_lets_through() -> None:
    assert check(UNKNOWN, additional_provider_specific_params={"threshold": 1.0})["texts"] == [
        UNKNOWN
    ]
    assert check(KNOWN, url=AWAY, **OPEN)["texts"] == [KNOWN]


@contextmanager
def between(status: int | None = None) -> Iterator[str]:
    """The address of a server that can be stopped: passes requests on, or answers with ``status``
    itself."""

    def behave(request: BaseHTTPRequestHandler, body: bytes) -> None:
        if status is not None:
            return answer(request, status, b"{}")
        found = httpx.post(
            URL + request.path,
            content=body,
            headers={"content-type": "application/json"},
            timeout=60,
        )
        return answer(request, found.status_code, found.content)

    with listening(behave) as address:
        yield f"http://{address}"


def test_it_was_there_and_is_stopped() -> None:
    with between() as url:
        for options in ({}, OPEN):
            assert check(KNOWN, url=url, **options)["texts"] == [KNOWN]
            with pytest.raises(GuardrailRaisedException, match="I am not sure"):
                check(UNKNOWN, url=url, **options)
    with pytest.raises(Exception, match="Guardrail API failed"):
        check(UNKNOWN, url=url)
    assert check(UNKNOWN, url=url, **OPEN)["texts"] == [UNKNOWN]


@pytest.mark.parametrize("status", [502, 503, 504, 401, 403, 429, 500])
def test_which_refusals_count_as_unreachable(status: int) -> None:
    """A revoked key, a used-up quota or a fault of the service never open it by
    ``unreachable_fallback``."""
    opens = status in (502, 503, 504)
    with between(status) as url:
        for options, passes in (({}, False), (OPEN, opens), ({"fail_on_error": False}, True)):
            if passes:
                assert check(UNKNOWN, url=url, **options)["texts"] == [UNKNOWN]
            else:
                with pytest.raises(Exception, match="Guardrail API failed"):
                    check(UNKNOWN, url=url, **options)


def detect(question: str, **options: Any) -> Any:
    async def applied() -> Any:
        chosen: dict[str, Any] = {"base_url": URL, "detector_id": "hallutracer"} | options
        detector = IBMGuardrailDetector(
            "hallutracer", "unread", event_hook="pre_call", default_on=True, **chosen
        )
        data = {"messages": [{"role": "user", "content": question}], "metadata": {}}
        return await detector.async_pre_call_hook(UserAPIKeyAuth(), DualCache(), data, "completion")

    return LOOP.run_until_complete(applied())


def test_its_detector_of_fms_guardrails() -> None:
    assert detect(KNOWN)["messages"][0]["content"] == KNOWN
    with pytest.raises(ValueError, match="(?s)1 violation.*HALLUCINATION_RISK.*Solomon Islands"):
        detect(UNKNOWN)
    assert detect(UNKNOWN, detector_params={"threshold": 1.0})
    for wrong in (
        {"detector_params": {"treshold": 1.0}},
        {"detector_id": "nothing"},
        {"base_url": AWAY},
    ):
        with pytest.raises(httpx.HTTPError):
            detect(KNOWN, **wrong)
