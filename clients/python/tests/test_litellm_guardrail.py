"""LiteLLM's generic guardrail, the code that its proxy runs before a call, against the service."""

import asyncio
import os
from typing import Any

import pytest
from litellm.exceptions import GuardrailRaisedException
from litellm.proxy.guardrails.guardrail_hooks.generic_guardrail_api import GenericGuardrailAPI

URL = os.environ["HALLUTRACER_URL"]
KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
AWAY = "http://127.0.0.1:9"
LOOP = asyncio.new_event_loop()  # one for all: LiteLLM keeps its connections


def check(question: str, url: str = URL, input_type: Any = "request", more: Any = None, **options: Any) -> Any:
    async def applied() -> Any:
        guardrail = GenericGuardrailAPI(api_base=url, guardrail_name="hallutracer", event_hook="pre_call", **options)
        inputs = {"texts": [question], "structured_messages": [{"role": "user", "content": question}], "model": "any"}
        return await guardrail.apply_guardrail(inputs | (more or {}), {"metadata": {}}, input_type)

    return LOOP.run_until_complete(applied())


def test_a_known_question_passes_unchanged() -> None:
    assert check(KNOWN)["texts"] == [KNOWN]


def test_an_unknown_one_is_blocked_with_the_policys_message() -> None:
    with pytest.raises(GuardrailRaisedException, match="I am not sure"):
        check(UNKNOWN)


def test_parameters_of_ours_are_taken() -> None:
    assert check(UNKNOWN, additional_provider_specific_params={"threshold": 1.0})["texts"] == [UNKNOWN]
    with pytest.raises(GuardrailRaisedException, match="withheld: risk"):
        check(KNOWN, additional_provider_specific_params={"threshold": 0.0, "policy": "block"})
    with pytest.raises(Exception, match="422"):
        check(KNOWN, additional_provider_specific_params={"treshold": 1.0})


def test_what_cannot_be_read_is_blocked() -> None:
    with pytest.raises(GuardrailRaisedException, match="images"):
        check(KNOWN, more={"images": ["data:image/png;base64,AA"]})


def test_answers_are_not_judged() -> None:
    with pytest.raises(Exception, match="422"):
        check(KNOWN, input_type="response")


def test_it_fails_closed_unless_told_otherwise() -> None:
    with pytest.raises(Exception, match="Guardrail API failed"):
        check(KNOWN, url=AWAY)
    assert check(KNOWN, url=AWAY, unreachable_fallback="fail_open")["texts"] == [KNOWN]
