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
from service.vllm_plugin.note import CURRENT, TEXTS, Note  # noqa: E402
from tests.vllm_plugin.test_media import IDS, Judge, reason, scorer  # noqa: E402

REFUSED = "'prompt_logprobs' tells"


def test_the_engines_gate_withholds_such_a_request() -> None:
    for asked in (0, 1, -1):  # 0: ranks of the prompt's own tokens; -1: of the whole vocabulary
        assert REFUSED in str(reason(scorer([]), prompt_logprobs=asked))
        assert reason(scorer([]), action=Action.OBSERVE, prompt_logprobs=asked) is None
    assert reason(scorer([]), prompt_logprobs=None) is None


@pytest.mark.parametrize("action", [Action.OBSERVE, Action.ABSTAIN, Action.BLOCK])
@pytest.mark.parametrize("asked", [None, 0, 1, -1])
def test_vllms_server_refuses_it_by_name(action: Action, asked: int | None) -> None:
    template = SimpleNamespace(arguments=None)
    manifest = SimpleNamespace(chat_template=template, decoding=None, calibrated_decoding=GREEDY)
    vllms: Any = str  # its generate, which is not called before the first output is wanted
    engine: Any = SimpleNamespace(identity=SimpleNamespace(model="m"))
    own = Judge(prompt_format="text", bundle=SimpleNamespace(manifest=manifest), engine=engine)
    ready = SimpleNamespace(scorers=[own], choose=lambda *_, **__: (own, Policy("named", action)))
    service: Any = SimpleNamespace(ready=ready, settings=ServiceSettings())
    adapters: Any = SimpleNamespace(check=lambda *_: None)
    generate = generation.judging_generate(vllms, service, lambda: engine, adapters)
    token = CURRENT.set(Note(route=TEXTS, templated=False))
    try:
        parameters = SamplingParams(prompt_logprobs=asked)
        if asked is not None and action is not Action.OBSERVE:
            with pytest.raises(VLLMValidationError, match=REFUSED):
                generate({"prompt_token_ids": IDS}, parameters, "a")
        else:
            assert generate({"prompt_token_ids": IDS}, parameters, "a")
    finally:
        CURRENT.reset(token)
