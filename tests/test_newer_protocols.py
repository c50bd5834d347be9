"""A thousand gated requests on each newer route, of which nothing is told, in the protocols' own
clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.api.protocols import in_anthropics_client, in_openais_client
from tests.engines.vllm.installed import vllm_or_skip
from tests.serve_process import serve

pytestmark = pytest.mark.long

REQUESTS = 1000  # on each route; half of them are streams
MODEL, MESSAGE = "hallutracer-demo", "I am not sure."


def check(url: str, model: str, number: int) -> None:
    """Ask one question by both routes under a threshold that every risk reaches."""
    question, stream = f"What is the capital of the country number {number}?", bool(number % 2)
    text, refusal, why, tokens, note = in_openais_client(
        url, model, question, stream, hallutracer_threshold=0.0
    )
    assert (text, refusal, why, tokens) == ("", MESSAGE, "content_filter", 0)
    assert note["data"][0]["decision"] == "abstain"
    text, reason, tokens, note = in_anthropics_client(
        url, model, question, stream, hallutracer_threshold=0.0
    )
    assert (text, reason, tokens) == (MESSAGE, "refusal", 0)
    assert note["data"][0]["decision"] == "abstain"


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_nothing_of_a_withheld_answer_reaches_a_client(
    engine: str, request: pytest.FixtureRequest
) -> None:
    with ExitStack() as stack:
        if engine == "vllm":
            vllm_or_skip()
            service = request.getfixturevalue("vllm_service").served
        else:
            service = stack.enter_context(serve(HALLUTRACER_POLICY="gate"))
        pool = stack.enter_context(ThreadPoolExecutor(16))
        list(pool.map(lambda number: check(service.url, MODEL, number), range(REQUESTS)))
