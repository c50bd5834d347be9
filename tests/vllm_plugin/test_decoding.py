"""What of vLLM's sampling makes another answer than the greedy one that a guarantee was calibrated
on."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from vllm.sampling_params import (  # noqa: E402
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

from probes_store.records import GREEDY, Decoding  # noqa: E402
from service.access.routes import MESSAGES_ROUTE, RESPONSES_ROUTE  # noqa: E402
from service.judging.guarantee import LEAST_TOKENS  # noqa: E402
from service.policies.guard import BLOCK, GATE, OBSERVE  # noqa: E402
from service.vllm_plugin import generation  # noqa: E402
from service.vllm_plugin.generation import (  # noqa: E402
    SAME_ANSWER,
    _decode_as_trained,
    _own_choice,
    _violations,
)
from service.vllm_plugin.note import CHATS, EITHER, TEXTS, Note, read  # noqa: E402

# Each field that makes another answer -> a value that does.
OTHER: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "stop": ["\n"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "min_tokens": 3,
    "max_tokens": 1,
    "structured_outputs": StructuredOutputsParams(regex="a+"),
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [5],
    "extra_args": {"a_processor": 1},
    "bad_words": ["a"],
    "thinking_token_budget": 0,
    "watermarking": True,
    "repetition_detection": RepetitionDetectionParams(
        max_pattern_size=3, min_pattern_size=1, min_count=3
    ),
    "trace_decode_token_ids": [5],
}
WARM = {"top_p": 0.5, "top_k": 5, "min_p": 0.5}  # which say nothing of a greedy answer


def of(**fields: Any) -> tuple[str, ...]:
    return _violations(SamplingParams(**{"temperature": 0.0, "max_tokens": 64} | fields))


def test_every_field_that_vllm_has_is_looked_at() -> None:
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields == {*OTHER, *WARM, *SAME_ANSWER}


@pytest.mark.parametrize("name", OTHER)
def test_a_field_that_makes_another_answer_voids_a_guarantee_and_is_named(name: str) -> None:
    (violation,) = of(**{name: OTHER[name]})
    assert {"max_tokens": "at most 1 tokens", "extra_args": "vllm_xargs"}.get(
        name, name
    ) in violation


def test_what_makes_the_same_answer_voids_nothing() -> None:
    nothing = {"stop": [], "stop_token_ids": [], "bad_words": [], "logit_bias": {}}
    assert of() == of(max_tokens=None) == of(**WARM) == of(**nothing) == ()
    fields = {
        "seed": 1,
        "logprobs": 5,
        "prompt_logprobs": 1,
        "output_kind": RequestOutputKind.DELTA,
        "n": 1,
    }
    assert (
        of(**fields, detokenize=False, skip_special_tokens=False, include_stop_str_in_output=True)
        == ()
    )
    assert of(extra_args={"kv_transfer_params": {"do_remote_decode": True}}) == ()
    assert (of(max_tokens=LEAST_TOKENS), len(of(max_tokens=LEAST_TOKENS - 1))) == ((), 1)
    assert "decoding" in of(max_tokens=LEAST_TOKENS - 1)[0]


@pytest.mark.parametrize(
    "value", [1, "a", [1], {"a": 1}, object(), pytest.param(SimpleNamespace(), id="a class")]
)
def test_a_field_that_vllm_may_have_tomorrow_voids_a_guarantee_where_it_is_set(
    monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    class Tomorrow(SamplingParams):  # type: ignore[misc]  # msgspec's classes are untyped here
        beam_shape: Any = None

    monkeypatch.setattr(generation, "GREEDY", Tomorrow(temperature=0.0, max_tokens=None))
    asked = Tomorrow(temperature=0.0, max_tokens=64)
    asked.beam_shape = value
    (violation,) = _violations(asked)
    assert "beam_shape" in violation
    assert _violations(Tomorrow(temperature=0.0, max_tokens=64)) == ()


ROUTES = (TEXTS, CHATS, f"{CHATS}/batch", EITHER, RESPONSES_ROUTE, MESSAGES_ROUTE)
# A model's own, as vLLM fills them in: Qwen2.5's.
FILLED_IN: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "min_p": 0.0,
    "repetition_penalty": 1.1,
}
WARMER = Decoding(0.5, 0.9)


def decoded(
    route: str, trained: Decoding, n: int = 1, **named: Any
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """How tokens are chosen, and what that violates, of a request whose body has these fields
    alone."""
    note = Note(route=route)
    read(note, json.dumps({"model": "m", "n": n} | named).encode())
    given = FILLED_IN | {name: value for name, value in named.items() if value is not None}
    parameters = SamplingParams(max_tokens=64, n=n, seed=1, **given)
    _decode_as_trained(note, parameters, trained)
    return {name: getattr(parameters, name) for name in FILLED_IN}, _violations(parameters, trained)


@pytest.mark.parametrize("route", ROUTES)
def test_what_a_request_leaves_open_is_as_in_training_and_what_it_names_is_taken(
    route: str,
) -> None:
    plain = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert (
        decoded(route, GREEDY)
        == decoded(route, GREEDY, temperature=None, top_p=None)
        == (plain, ())
    )
    assert decoded(route, GREEDY, top_p=0.5, top_k=3)[0] == plain, (
        "which say nothing of a greedy answer"
    )
    sampling, void = decoded(route, GREEDY, repetition_penalty=1.3)
    assert (sampling, "repetition_penalty" in str(void)) == (
        plain | {"repetition_penalty": 1.3},
        True,
    )
    sampling, void = decoded(route, GREEDY, temperature=0.3)
    assert sampling == FILLED_IN | {"temperature": 0.3}
    assert "temperature 0.3" in str(void)

    warm = plain | {"temperature": 0.5, "top_p": 0.9}
    assert decoded(route, WARMER) == (warm, ())
    sampling, void = decoded(route, WARMER, top_k=3)
    assert (sampling, "top_k" in str(void)) == (warm | {"top_k": 3}, True)
    assert "temperature 0" in str(decoded(route, WARMER, temperature=0.0)[1])
    assert (
        decoded(route, WARMER, temperature=0.5, top_p=0.9, top_k=0, repetition_penalty=1.0)[1] == ()
    )


def test_several_answers_to_a_prompt_are_meant_to_differ() -> None:
    sampling, void = decoded(CHATS, GREEDY, n=2)
    assert (sampling, "temperature 0.7" in str(void)) == (FILLED_IN, True)
    assert decoded(CHATS, WARMER, n=2)[0]["temperature"] == 0.5


def test_by_default_a_gate_decodes_as_in_training_and_an_observer_as_before() -> None:
    assert [_own_choice(policy) for policy in (GATE, BLOCK, OBSERVE)] == [
        "bundle",
        "bundle",
        "openai",
    ]
