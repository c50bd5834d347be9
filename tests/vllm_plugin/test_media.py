"""A prompt with an image is read at its last token as any other, and lies outside training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.policies.guard import Action, Decision, Policy, Verdict
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from service.judging.conversation import ConversationReader  # noqa: E402
from service.judging.guarantee import MEDIA, Standing  # noqa: E402
from service.serving.adapters import Adapters  # noqa: E402
from service.vllm_plugin import generation  # noqa: E402
from service.vllm_plugin.engine_gate import Gate  # noqa: E402
from service.vllm_plugin.note import Note  # noqa: E402

IDS = [1, 2, 3, 3, 3, 3, 4, 5]  # 3: what an image was expanded to


class Judge(SimpleNamespace):
    """A scorer: a key in a gate's places."""

    __hash__ = object.__hash__


def scorer(judged: list[Policy]) -> Any:
    def judge(result: Any, policy: Policy, *, standing: Standing, first_trajectory: int = 0) -> Any:
        assert result == len(IDS)
        judged.append(policy)
        verdict = Verdict(Decision.CONTINUE, flagged=False, threshold=0.5, message=None)
        return SimpleNamespace(verdict=verdict, context=SimpleNamespace(applies=True), risk=0.1)

    return Judge(prompt_format="chat", chat_ending=(4, 5), judge=judge)


def reason(
    own: Any, features: Any = None, action: Action = Action.ABSTAIN, **asked: Any
) -> str | None:
    """Why the gate in the engine withholds the answer to a prompt with such features, and with
    ``asked`` among its sampling parameters."""
    lease: Any = SimpleNamespace(result=lambda wire, tokens: tokens)
    request = SimpleNamespace(
        prompt_token_ids=IDS,
        prompt_embeds=None,
        resumable=False,
        mm_features=features,
        lora_request=None,
        request_id="a",
        sampling_params=SimpleNamespace(
            **{"prompt_logprob_token_ids": None, "prompt_logprobs": None} | asked
        ),
    )
    own.conversations = ConversationReader(lambda messages: [], str)
    policy = Policy("gate", action)
    gate = Gate(own, policy, lease, {own: 0}, Adapters({}, str), frozenset())
    return gate.reason(request, SimpleNamespace(numpy=lambda: np.zeros(1)))


@pytest.mark.parametrize("features", [None, [], [object()]])
def test_the_gate_in_the_engine_withholds_an_image_outside_training(features: Any) -> None:
    judged: list[Policy] = []
    assert reason(scorer(judged), features) is None
    assert [policy.withhold_outside for policy in judged] == [True if features else None]


@pytest.mark.parametrize(("flagged", "why"), [(True, ""), (False, ", outside training")])
def test_the_stop_reason_says_what_withholds_an_answer_whose_risk_is_low(
    flagged: bool, why: str
) -> None:
    report = SimpleNamespace(
        risk=0.1,
        verdict=Verdict(Decision.ABSTAIN, flagged, 0.05, None),
        context=SimpleNamespace(applies=True),
        uncertain=SimpleNamespace(outside=True),
    )
    own = Judge(prompt_format="chat", chat_ending=(4, 5), judge=lambda *given, **named: report)
    assert reason(own) == f"hallutracer: withheld, risk 0.100{why}"


def test_the_gate_of_vllms_server_says_what_voids_a_guarantee() -> None:
    note = Note(carries=True)
    note.templated = True
    for more, violations in (
        ({}, ()),
        ({"mm_placeholders": {}}, ()),
        ({"mm_placeholders": {"image": [object()]}}, (MEDIA,)),
    ):
        assert (
            generation._rendering(note, scorer([]), {"prompt_token_ids": IDS, **more}) == violations
        )
