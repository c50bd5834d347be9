"""The fixed beginning of chats is run once, and changes no number."""

from __future__ import annotations

import numpy as np
import pytest

from service.engines.base import EngineOptions, Sampling
from service.engines.transformers.batching import Prefix, chat_prefix
from service.engines.transformers.engine import TransformersEngine
from service.readout import Site
from tests.engines import tiny
from tests.engines.transformers.test_decoding import decoded, reference
from tests.engines.transformers.test_tracing import check_trace

TEMPLATE = (
    "<s>system: be brief and say so\n{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<|assistant|>"
)
NOT_SHARED = (*tiny.SLIDING_FAMILIES, "phi3_longrope")  # windows; positions that depend on the longest prompt
CONTENTS = ["a", "what is it?", "b" * 30, "ä"]


def engine(family: str = "llama", **options: str) -> TransformersEngine:
    made = EngineOptions(model=f"tiny-{family}", **options)  # type: ignore[arg-type]
    return TransformersEngine(tiny.model(family), tiny.tokenizer(template=TEMPLATE), options=made)


def prompts_of(made: TransformersEngine) -> list[list[int]]:
    chats = [made.render_chat([{"role": "user", "content": content}]) for content in CONTENTS]
    return [*chats, made.tokenize("no chat"), list(made._prefix.tokens) or chats[0][:9]]


def without_prefix(made: TransformersEngine) -> TransformersEngine:
    made._prefix = Prefix(())
    return made


@pytest.mark.parametrize("family", tiny.ALL)
def test_numbers_and_answers_are_those_of_whole_prompts(family: str) -> None:
    ours, plain = engine(family), without_prefix(engine(family))
    prompts, probe = prompts_of(engine("llama")), tiny.probes(ours.identity.geometry)
    for found, expected in zip(
        ours.score(prompts, [probe], first_token=True), plain.score(prompts, [probe], first_token=True), strict=True
    ):
        np.testing.assert_allclose(found.trajectories[0], expected.trajectories[0], atol=1e-5)
        assert found.prompt_tokens == expected.prompt_tokens
        assert found.first_token is not None
        assert expected.first_token is not None
        assert found.first_token.token == expected.first_token.token
    for site in Site:
        np.testing.assert_allclose(
            ours.extract(prompts, [site]).activations[site], plain.extract(prompts, [site]).activations[site], atol=1e-5
        )
    assert (ours.counters.forward_tokens < plain.counters.forward_tokens) is bool(ours._prefix.tokens)
    assert (ours._prefix.tokens == ()) is (family in NOT_SHARED)
    for prompt, continuation in zip(prompts, ours.begin(prompts, [probe]), strict=True):
        assert list(decoded(continuation, Sampling(max_tokens=8)).token_ids) == reference(
            tiny.modules(ours).model, prompt, 8
        )


def test_the_beginning_is_run_once() -> None:
    made = engine()
    prefix, probe = made._prefix.tokens, tiny.probes(made.identity.geometry)
    assert made.detokenize(prefix).endswith("user: ")
    prompts = prompts_of(made)[: len(CONTENTS)]
    rest = sum(len(prompt) - len(prefix) for prompt in prompts)
    for _ in range(3):
        before = made.counters.forward_tokens
        made.score(prompts, [probe])
        assert made.counters.forward_tokens - before == rest
    assert [result.prompt_tokens for result in made.score(prompts, [probe])] == [len(prompt) for prompt in prompts]


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_without_a_fixed_beginning_nothing_is_kept(template: str | None) -> None:
    made = TransformersEngine(tiny.model("llama"), tiny.tokenizer(template=template))
    assert made._prefix.tokens == ()
    assert chat_prefix(made.render_chat) == ()


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_traces_of_chats_and_texts_together_are_each_its_own(family: str, tokens: int) -> None:
    made = engine(family)
    prompts = [*prompts_of(made), made.tokenize("no chat, and longer than the shorter ones of the chats")]
    traced = made.sample(prompts, Sampling(max_tokens=tokens), [[0]] * len(prompts))
    for prompt, (answer,) in zip(prompts, traced, strict=True):
        check_trace(made, prompt, answer)
