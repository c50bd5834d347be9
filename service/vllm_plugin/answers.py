"""vLLM's outputs of one answer: as the chunks of its turn, and as what the caller sees of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.sampling_params import RequestOutputKind

from service.api.chat_wire import WITHHELD
from service.engines.base import Completion
from service.engines.vllm.client import ProbeLease
from service.errors import HalluTracerError
from service.policies.guard import Policy
from service.scoring import Scorer
from service.turn import AnswerRisk, Chunk, Ended, Event, Outcome, Text

log = logging.getLogger("hallutracer")


class AnswerReader:
    """Reads one answer output by output, none before its risk counts: of a call of tools no token
    is read."""

    def __init__(self, scorer: Scorer, policy: Policy, lease: ProbeLease) -> None:
        self._scorer, self._policy = scorer, policy
        self._lease: ProbeLease | None = lease  # None: the answer cannot be read any further
        # outputs, and how many tokens the answer had with each
        self._waiting = deque[tuple[Any, int]]()
        self._outputs_read = 0
        self._risk: AnswerRisk | None = None  # by the tokens of those

    def add(self, output: Any, tokens: int) -> Callable[[], AnswerRisk | None]:
        """Take the next output, with which the answer has so many tokens; return what reads its
        risk up to there.

        To be called in the outputs' order, or of the newest alone.  It raises EngineError, its
        kinds and NonFiniteReadout where the policy decides by the risk; under another policy such
        an answer has no risk."""
        self._waiting.append((output, tokens))
        return partial(self._risk_after, self._outputs_read + len(self._waiting))

    def read(self) -> None:
        """Read the outputs that were added, which are kept until then."""
        self._risk_after(self._outputs_read + len(self._waiting))

    def _risk_after(self, outputs: int) -> AnswerRisk | None:
        while self._outputs_read < outputs:
            output, tokens = self._waiting.popleft()
            self._risk = self._read(output, tokens, first=not self._outputs_read)
            self._outputs_read += 1
        assert self._outputs_read == outputs, "later outputs were read already"
        return self._risk

    def _read(self, output: Any, tokens: int, *, first: bool) -> AnswerRisk | None:
        if self._lease is None:
            return None
        try:
            return self._scorer.judge_answer(self._lease.answer(output, tokens, first=first))
        except HalluTracerError as error:
            if self._policy.reads_answers_for:
                raise
            log.warning("an answer has no risk: %s", error)
            self._lease = None
            return None


class AnswerOutputs:
    """The outputs of one request, whose answers are shown piece by piece (DELTA) or whole, as its
    last output."""

    def __init__(self, reader: AnswerReader, parameters: Any, end_token: int) -> None:
        """``parameters``: vLLM's for this request.  ``end_token`` stands for an answer of which
        nothing is shown."""
        self.tokens = 0  # decoded, of all its answers
        self._reader, self._end_token = reader, end_token
        self._in_pieces = parameters.output_kind is RequestOutputKind.DELTA
        self._answers = parameters.n
        self._text = ""  # of an only answer
        self._held = deque[Any]()  # of an answer in pieces: neither shown nor dropped

    def chunk(self, output: Any) -> Chunk:
        """Return what vLLM has decoded since its last output."""
        last = output.outputs[0]
        text = last.text if self._answers == 1 else ""
        # vLLM's list of a whole answer's tokens grows on: it is counted as it is now.
        tokens = sum(len(answer.token_ids) for answer in output.outputs)
        if self._in_pieces:
            self._held.append(output)
        else:
            text, tokens = text[len(self._text) :], tokens - self.tokens
        self._text += text
        self.tokens += tokens
        end = (
            Completion(self._text, (), last.finish_reason, self.tokens) if output.finished else None
        )
        return Chunk(text, tokens, self._reader.add(output, self.tokens), end)

    def shown(self, events: Iterable[Event], newest: Any) -> Iterator[Any]:
        """Yield the outputs that the caller sees, by what the turn makes of the chunks up to the
        newest output's."""
        for event in events:
            if isinstance(event, Text):
                if self._in_pieces:
                    yield self._held.popleft()
            elif event.outcome is Outcome.WITHHELD or event.outcome is Outcome.STOPPED:
                yield self._ended_early(newest, event)
            elif not self._in_pieces:
                yield newest

    def _ended_early(self, output: Any, ended: Ended) -> Any:
        """Return the output as the end of its answers, with no more than what the turn has shown of
        them."""
        from vllm.logprobs import Logprob

        last, shown = output.outputs[0], ended.completion
        text = ""
        token_ids = list[int]()
        logprobs = last.logprobs and last.logprobs[:0]
        if shown is None or not shown.tokens:  # vLLM's streams skip a first output without a token
            token_ids = [self._end_token]
            logprobs = None if last.logprobs is None else [{self._end_token: Logprob(0.0, 1, "")}]
        elif not self._in_pieces:
            text, token_ids = shown.text, list(last.token_ids[: shown.tokens])
            logprobs = last.logprobs and last.logprobs[: shown.tokens]
        end = replace(
            last,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            cumulative_logprob=None,
            finish_reason="stop" if ended.outcome is Outcome.WITHHELD else WITHHELD,
            stop_reason=None,
        )
        output.outputs = [replace(end, index=index) for index in range(self._answers)]
        output.finished = True
        return output
