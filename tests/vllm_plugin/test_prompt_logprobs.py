"""What the model would say within a prompt is told under no gate: its likeliest token behind an
earlier question is the beginning of the answer to that, and the next request has the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from probes_store.records import GREEDY
from service.policies.guard import Action, Policy
from service.settings import ServiceSettings
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402

from service.vllm_plugin import generation  # noqa: E402
from service.vllm_plugin.note import CHATS, CURRENT, TEXTS, Note  # noqa: E402
from tests.vllm_plugin.test_media import IDS, Judge, reason, scorer  # noqa: E402

REFUSED = "'prompt_logprobs' tells"


def test_the_engines_gate_withholds_such_a_request() -> None:
    for asked in (0, 1, -1):  # 0: ranks of the prompt's own tokens; -1: of the whole vocabulary
        assert REFUSED in str(reason(scorer([]), prompt_logprobs=asked))
        assert reason(scorer([]), action=Action.OBSERVE, prompt_logprobs=asked) is None
    assert reason(scorer([]), prompt_logprobs=None) is None


@pytest.fixture(autouse=True)
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """What answers are decoded with, instead of decoding them."""
    parameters: list[SamplingParams] = []

    def driver(*given: Any, **_: Any) -> Any:
        parameters.extend(part for part in given if isinstance(part, SamplingParams))
        return SimpleNamespace(outputs=lambda start: start)

    monkeypatch.setattr(generation, "TurnDriver", driver)
    return parameters


def generate(action: Action, note: Note, asked: int | None) -> None:
    """Ask vLLM's generate as its server does."""
    template = SimpleNamespace(arguments=None)
    manifest = SimpleNamespace(chat_template=template, decoding=None, calibrated_decoding=GREEDY)
    vllms: Any = str  # its generate, which is not called before the first output is wanted
    engine: Any = SimpleNamespace(identity=SimpleNamespace(model="m"))
    own = Judge(prompt_format="text", bundle=SimpleNamespace(manifest=manifest), engine=engine)
    ready = SimpleNamespace(scorers=[own], choose=lambda *_, **__: (own, Policy("named", action)))
    service: Any = SimpleNamespace(ready=ready, settings=ServiceSettings())
    adapters: Any = SimpleNamespace(check=lambda *_: None)
    judging = generation.judging_generate(vllms, service, lambda: engine, adapters)
    token = CURRENT.set(note)
    try:
        judging({"prompt_token_ids": IDS}, SamplingParams(prompt_logprobs=asked), "a")
    finally:
        CURRENT.reset(token)


@pytest.mark.parametrize("action", [Action.OBSERVE, Action.ABSTAIN, Action.BLOCK])
@pytest.mark.parametrize("asked", [None, 0, 1, -1])
def test_vllms_server_refuses_it_by_name(
    action: Action, asked: int | None, decoded: list[SamplingParams]
) -> None:
    named = frozenset({"prompt_logprobs"})
    for note in (Note(route=TEXTS, templated=False), Note(route=CHATS, sampling=named)):
        if asked is not None and action is not Action.OBSERVE:
            with pytest.raises(VLLMValidationError, match=REFUSED):
                generate(action, note, asked)
            assert not decoded
        else:
            generate(action, note, asked)
            assert decoded.pop().prompt_logprobs == asked


@pytest.mark.parametrize("vllms_own", [0, 5])  # by a chat's ``echo``
def test_what_a_chat_did_not_ask_for_is_not_told(
    vllms_own: int, decoded: list[SamplingParams]
) -> None:
    for action, expected in ((Action.ABSTAIN, None), (Action.OBSERVE, vllms_own)):
        generate(action, Note(route=CHATS), vllms_own)
        assert decoded.pop().prompt_logprobs == expected
