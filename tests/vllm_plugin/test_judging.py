"""What the gate in an engine's core lets pass, from a scheduler's and a worker's plain objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from service.vllm_plugin.engine_gate import Judging  # noqa: E402


def test_a_callers_own_numbers_are_not_taken_and_an_answer_that_has_begun_is_not_judged_again() -> (
    None
):
    passed: list[Any] = []
    scheduler = SimpleNamespace(
        requests={
            name: SimpleNamespace(
                request_id=name,
                num_output_tokens=tokens,
                sampling_params=SimpleNamespace(prompt_logprob_token_ids=own),
            )
            for name, own, tokens in (
                ("plain", None, 0),
                ("asks", [[1]], 0),
                ("begun", None, 3),
                ("refused", [[1]], 0),
            )
        },
        update_from_output=lambda scheduled, output: passed.append(
            (dict(output.prompt_token_id_logprobs_dict), dict(output.prompt_logprobs_dict))
        ),
        _update_request_with_output=lambda request, tokens: (tokens, False),
        add_request=None,
    )
    executor = SimpleNamespace(collective_rpc=lambda *_: [])
    core = SimpleNamespace(
        scheduler=scheduler, model_executor=executor, add_lora=lambda request: True
    )
    judging = Judging(core, lambda: None)  # type: ignore[arg-type, return-value]
    asked: list[tuple[str, Any]] = []

    def reason(request: Any, wire: Any) -> str | None:
        asked.append((request.request_id, wire))
        return "withheld" if request.request_id == "refused" else None

    judging._gate = SimpleNamespace(reason=reason)  # type: ignore[assignment]
    names = [*scheduler.requests]
    output = SimpleNamespace(
        prompt_token_id_logprobs_dict={"plain": "ours", "asks": "own", "refused": "own"},
        prompt_logprobs_dict={"asks": "of its prompt", "refused": "of its prompt"},
        sampled_token_ids=[[7]] * 4,
        req_id_to_index={name: row for row, name in enumerate(names)},
    )
    judging.update(SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1)), output)
    assert asked == [("plain", "ours"), ("asks", None), ("refused", None)]
    # of a withheld request nothing is told of its prompt, either
    assert passed == [({"asks": "own"}, {"asks": "of its prompt"})]
    plain, begun = scheduler.requests["plain"], scheduler.requests["begun"]
    assert judging.update_request(plain, [7]) == judging.update_request(begun, [7]) == ([7], False)
    assert judging.update_request(scheduler.requests["asks"], [7]) == ([7], False)
    assert judging.update_request(scheduler.requests["refused"], [7]) == ([], True)
    assert scheduler.requests["refused"].stop_reason == "withheld"
