"""One answer of vLLM's server, read as it is written: ended where ``stop_at`` says, held where ``recheck`` does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.sampling_params import RequestOutputKind

from service.api.openai_routes import WITHHELD
from service.engines.base import Completion
from service.engines.vllm.client import ProbeLease
from service.errors import HalluTracerError
from service.policies.guard import Policy
from service.scoring import RiskReport, Scorer
from service.turn import AnswerRisk

log = logging.getLogger("hallutracer")


class Answer:
    """What may be shown of a request's outputs, the first of which has the prefill."""

    def __init__(self, scorer: Scorer, policy: Policy, lease: ProbeLease | None, kind: RequestOutputKind) -> None:
        """``lease`` None: nothing reads it."""
        self.tokens = 0  # decoded, of all choices
        self.over = False
        self.risk: AnswerRisk | None = None  # by the tokens so far
        self.completion: Completion | None = None  # of an answer that the policy has ended, for the count alone
        self._scorer, self._policy, self._lease, self._kind = scorer, policy, lease, kind
        self._shown = 0  # tokens
        self._before: Any = None  # what was shown last, where each output has the whole answer
        self._held = list[Any]()

    def add(self, report: RiskReport, output: Any) -> Sequence[Any]:
        """Return the outputs that may be shown now.  Raises EngineError and its kinds, NonFiniteReadout.

        An answer that cannot be read goes on without a risk, unless the policy decides by it."""
        new, first = sum(len(one.token_ids) for one in output.outputs), not self.tokens
        self.tokens = self.tokens + new if self._kind is RequestOutputKind.DELTA else new
        try:
            read = None if self._lease is None else self._lease.answer(output, self.tokens, first=first)
            self.risk = self._scorer.judge_answer(read)
        except HalluTracerError as error:
            if self._policy.reads_answers_for:
                raise
            log.warning("an answer has no risk: %s", error)
            self._lease = self.risk = None
        self.over = output.finished
        if self._scorer.stops(report, self._policy, self.risk, self._shown, last=output.finished):
            self.over, self.completion = True, Completion("", (), WITHHELD, self._shown)
            return [self._ended(output)]
        if self._policy.recheck and not output.finished:
            self._held += [output] if self._kind is RequestOutputKind.DELTA else []
            return []
        self._shown, self._before = self.tokens, output
        return [*self._held, output]

    def _ended(self, output: Any) -> Any:
        """Return the end of an answer of which this output shows nothing."""
        one = output.outputs[0]
        text, token_ids, logprobs = "", list[int](), one.logprobs and one.logprobs[:0]
        if self._kind is not RequestOutputKind.DELTA:
            before = self._before.outputs[0]
            text, token_ids = before.text, list(before.token_ids[: self._shown])
            logprobs = before.logprobs and before.logprobs[: self._shown]
        end = replace(one, text=text, token_ids=token_ids, logprobs=logprobs, cumulative_logprob=None,
                      finish_reason=WITHHELD, stop_reason=None)  # fmt: skip
        output.outputs, output.finished = [end], True
        return output
