"""The readouts of one step: which rows are answer onsets or answers' tokens, their numbers, and
which gates close.

A runner calls, in this order: ``before`` the forward pass, ``after`` it, ``observe_logits``,
``gate`` once tokens are sampled, and ``payloads``.  A step that reads copies once to the device,
and onsets and answers once each back, and waits for none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from probes_store.manifest import SIGNALS
from service.engines.checks import summarise
from service.engines.vllm.attach import SiteReadout
from service.engines.vllm.wire import EXTRAS, REPLACED, STALE, Directive, Plan
from service.readout import Site

Tensor = torch.Tensor
Counts = npt.NDArray[np.integer[Any]]
GATE_MARGIN = 1e-6  # nats: closer to the threshold than this, the request side decides, in float64


@dataclass(frozen=True, slots=True)
class OnsetRow:
    """One request whose prompt ends in this step."""

    request: str
    directive: Directive
    token_row: int  # of t*, among the step's tokens
    request_row: int  # of the request, among the step's requests
    # of t*, among the rows of the step's logits: one for each request and for each draft token
    logits_row: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """One request whose answer goes on from a token of its own in this step."""

    request: str
    directive: Directive
    token_row: int  # of that token, the answer's last one so far, among the step's tokens


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step's n requests in the order of their rows, as reported by its runner."""

    requests: Sequence[str]
    starts: Counts  # [n + 1]: row of each request's first token, and the end
    computed: Counts  # [n]: tokens already computed by earlier steps or found in the prefix cache
    prompts: Counts  # [n]: tokens of the prompt
    emits: npt.NDArray[np.bool_]  # [n]: whether the step samples a token for it
    # [n]: draft tokens at the end of its part, also after its prompt's last: vLLM pads such a step
    drafts: Counts


def onset_rows(step: StepLayout, directive_of: Callable[[str], Directive | None]) -> list[OnsetRow]:
    """Return the requests whose t* is the last token before drafts of their part of this step,
    which samples."""
    if not np.count_nonzero(
        step.computed < step.prompts
    ):  # most steps: what follows would cost them 0.1 ms
        return []
    onsets = []
    ends = step.emits & (step.computed + np.diff(step.starts) - step.drafts == step.prompts)
    for row in map(int, np.flatnonzero(ends)):
        request = step.requests[row]
        if (directive := directive_of(request)) is not None:
            onset = int(step.starts[row + 1] - step.drafts[row]) - 1
            logits_row = row + int(step.drafts[:row].sum())
            onsets.append(
                OnsetRow(request, directive, onset, row, logits_row, int(step.prompts[row]))
            )
    return onsets


def answer_rows(step: StepLayout, read: Mapping[str, Directive]) -> list[AnswerRow]:
    """Return the requests of ``read`` that sample behind a token of their own answer, which is
    their part's last.

    Without drafts.  A token is the last of a part that samples once, whatever is computed again."""
    if not read:
        return []
    own = step.emits & (step.computed + np.diff(step.starts) > step.prompts)
    onsets = (
        (step.requests[row], int(step.starts[row + 1]) - 1) for row in map(int, np.flatnonzero(own))
    )
    return [AnswerRow(request, read[request], row) for request, row in onsets if request in read]


class Reader:
    """A worker's plan, its sites' readouts and the step's numbers.  ``group``: of ranks that split
    layers."""

    def __init__(
        self, plan: Plan, sites: dict[Site, SiteReadout], group: Any, device: torch.device
    ) -> None:
        self.plan = plan
        self.sites = sites
        self.device = device
        self._group = group
        self.for_all: Directive | None = None  # of every request, whatever it asks for itself
        self.digests: dict[int, str] = {}  # column -> digest of the probe that its slot holds
        self.weights = 0  # how often they have changed since they were loaded
        # of requests whose prompt has ended and whose answer is read
        self.answering: dict[str, Directive] = {}
        self._step: list[OnsetRow] = []
        self._answers: Sequence[AnswerRow] = ()
        self.keeps = False  # whether the coming forward pass keeps activations
        # places in the step whose directives name other probes or weights
        self._refused: dict[int, float] = {}
        self._numbers = torch.empty(0)  # [n, 24] on the device: ``_numbers``
        self._values: Tensor | None = None  # [columns, n, layers]
        self._activations: list[Tensor] = []
        self._summary: Tensor | None = None  # [n, 3]
        self._gated: Tensor | None = None  # [n] bool

    def directive_of(self, parameters: Any) -> Directive | None:
        """Return what is read for a request with these ``SamplingParams``; None: nothing."""
        if parameters is None or (
            self.for_all is not None and parameters.prompt_logprob_token_ids is not None
        ):
            return None  # the caller's own numbers come back where ours would
        return self.for_all or Directive.decode(parameters.extra_args, self.plan)

    @property
    def needs_pieces(self) -> bool:
        """Whether the coming forward pass keeps what a CUDA graph that is captured whole does
        not."""
        return self.keeps and not self.plan.answers

    def finished(self, requests: Iterable[str]) -> None:
        """Forget these requests, whose answers have ended."""
        for request in requests:
            self.answering.pop(request, None)

    def before(self, step: list[OnsetRow], answers: Sequence[AnswerRow] = ()) -> None:
        """Start a step: its forward pass keeps what is at these onsets and answers' tokens."""
        self._step = step
        self._answers = answers
        self._activations = []
        self._values = self._summary = self._gated = None
        if self.plan.answers:
            self.answering |= {
                row.request: row.directive for row in step if row.directive.answer is not None
            }
        named = [self._refusal(row.directive, row.directive.probes) for row in step]
        named += [
            self._refusal(row.directive, filter(None, [row.directive.answer])) for row in answers
        ]
        self._refused = {index: why for index, why in enumerate(named) if why}
        if not named:
            self._start_sites(None)
            return
        pinned = self.device.type == "cuda"
        numbers = [*map(_numbers, step), *map(_answer_numbers, answers)]
        on_host = torch.tensor(numbers, dtype=torch.float64, pin_memory=pinned)
        self._numbers = on_host.to(self.device, non_blocking=True)
        self._start_sites(self._numbers[:, TOKEN_ROW].long())

    def _refusal(self, directive: Directive, probes: Iterable[tuple[int, str]]) -> float | None:
        replaced = any(self.digests.get(column) != digest for column, digest in probes)
        return STALE if directive.weights != self.weights else REPLACED if replaced else None

    def _start_sites(self, onsets: Tensor | None) -> None:
        self.keeps = onsets is not None
        for site in self.sites.values():
            site.start(onsets)

    def after(self, earlier: Tensor | None = None) -> Tensor | None:
        """Compute the step's readouts and add those of ``earlier`` stages: [layers, n, columns],
        for the next."""
        if not self.keeps:
            return None
        read = torch.cat([site.read() for site in self.sites.values()], dim=-1)
        # One all-reduce of truth logits, not of activations.
        values: Tensor = read if self._group is None else self._group.all_reduce(read.contiguous())
        if self._refused:
            values[:, [*self._refused]] = math.nan  # no gate takes it for a risk
        if earlier is not None:
            values = torch.cat([earlier, values])
        if any(row.directive.activations for row in self._step):
            for site in self.sites.values():
                own = site.activations()
                self._activations.append(
                    self._group.all_gather(own.contiguous(), dim=-1) if site.split else own
                )
        self._start_sites(None)
        self._values = values.permute(2, 1, 0)
        return values

    def observe_logits(self, logits: Tensor | None) -> None:
        """Summarise the first token's distribution from the step's logits [rows, vocab], if a
        request needs it."""
        if self._summary is not None:
            # V2 computes logits of other rows, too, for requests that want log probabilities of the
            # prompt
            return
        if logits is None or not any(row.directive.needs_first_token for row in self._step):
            return
        rows = self._numbers[: len(self._step), LOGITS_ROW].long()
        self._summary = summarise(logits.index_select(0, rows).float())

    def gate(self, sampled: Tensor) -> Tensor:
        """Replace the first of the sampled tokens [requests, 1 + drafts] by an end token where a
        gate closes."""
        if self._values is None or all(row.directive.gate is None for row in self._step):
            return sampled
        count = len(self._step)
        numbers = self._numbers[:count]
        weights = numbers[:, WEIGHTS]
        intercept = numbers[:, INTERCEPT]
        bound = numbers[:, BOUND]
        signals = torch.zeros(count, len(SIGNALS), dtype=torch.float64, device=self.device)
        # Computed from the trajectory, as on the request side, so that both get the same number.
        rows = torch.arange(count, device=self.device)
        slots = numbers[:, SLOTS].long().T  # [4, n]
        means = self._values[slots, rows].double().mean(-1).T  # [n, 4]
        told = torch.sigmoid(
            numbers[:, CONTEXT_WEIGHTS] * means[:, 1:] + numbers[:, CONTEXT_INTERCEPTS]
        )
        signals[:, 0] = means[:, 0]
        if self._summary is not None:
            # rounded as the payload's are
            signals[:, 1:3] = self._summary[:, :2].float().to(signals)
        signals[:, 3], signals[:, 4] = told[:, 1], told[:, 1] * told[:, 2]
        signals[:, 5] = signals[:, 4] * numbers[:, LOG_TOKENS]
        # A signal with weight 0 may be anything, including a NaN.
        used = torch.where(weights == 0, torch.zeros_like(signals), signals)
        applies = told[:, 0] >= numbers[:, APPLIES_FROM] + GATE_MARGIN
        # Eq. detector.  vLLM's scheduler drops what is behind an end token.
        self._gated = ((weights * used).sum(-1) + intercept < bound - GATE_MARGIN) & applies
        targets = numbers[:, REQUEST_ROW].long()
        kept = sampled[targets, 0]
        sampled[targets, 0] = torch.where(self._gated, numbers[:, END_TOKEN].to(kept), kept)
        return sampled

    def payloads(self) -> dict[str, Tensor]:
        """Return request -> [1, floats] float32 on the CPU; the copy may still run on the device's
        current stream."""
        if self._values is None:
            return {}
        payloads = (
            self._onset_payloads(self._values) if self._step else {}
        ) | self._answer_payloads(self._values)
        self._step, self._answers = [], ()
        return payloads

    def _onset_payloads(self, values: Tensor) -> dict[str, Tensor]:
        count = len(self._step)
        extras = torch.zeros(count, EXTRAS, dtype=torch.float32, device=self.device)
        # NaN where no logits were observed: zeros would look like a certain first token.
        extras[:, :3] = math.nan if self._summary is None else self._summary.to(extras)
        if self._gated is not None:
            extras[:, 3] = self._gated.to(extras)
        for index, why in self._refused.items():
            if index < count:
                extras[index, 3] = why
        parts = [values[:, :count].permute(1, 0, 2).reshape(count, -1), extras]
        # Everything in one copy, also where only some ask for activations: training asks for all.
        parts += [
            activations[:, :count].transpose(0, 1).reshape(count, -1)
            for activations in self._activations
        ]
        on_host = torch.cat(parts, dim=1).to("cpu", non_blocking=True)  # pinned
        return {
            row.request: on_host[
                index : index + 1, : None if row.directive.activations else self.plan.payload
            ]
            for index, row in enumerate(self._step)
        }

    def _answer_payloads(self, values: Tensor) -> dict[str, Tensor]:
        """Return request -> [1, layers + 1], as ``wire.answer_read`` takes it."""
        if not self._answers:
            return {}
        first = len(self._step)
        columns = self._numbers[first:, SLOT].long()
        indices = torch.arange(len(self._answers), device=self.device)
        state = torch.zeros(len(indices), 1, dtype=values.dtype, device=self.device)
        for index, why in self._refused.items():
            if index >= first:
                state[index - first] = why
        on_host = torch.cat([values[columns, first + indices], state], dim=1).to(
            "cpu", non_blocking=True
        )
        return {row.request: on_host[index : index + 1] for index, row in enumerate(self._answers)}


# Columns of the numbers that a step copies to the device, for each onset; float64 holds every index
# and token id.
TOKEN_ROW, REQUEST_ROW, LOGITS_ROW, END_TOKEN, INTERCEPT, BOUND = range(6)
WEIGHTS, LOG_TOKENS = slice(6, 12), 12
SLOT = 13
SLOTS = slice(13, 17)
CONTEXT_WEIGHTS = slice(17, 20)
CONTEXT_INTERCEPTS = slice(20, 23)
APPLIES_FROM = 23


def _numbers(row: OnsetRow) -> list[float]:
    """Return one onset's numbers; a row without a gate gets one that never closes."""
    directive, gate = row.directive, row.directive.gate
    terms = [0.0, -math.inf] if gate is None else [gate.intercept, _bound(gate.threshold)]
    weights = [0.0] * len(SIGNALS) if gate is None else gate.weight
    tokens = [row.token_row, row.request_row, row.logits_row, directive.end_token or 0]
    return [
        *tokens,
        *terms,
        *weights,
        math.log(row.prompt_tokens),
        directive.slot,
        *directive.context,
    ]


def _answer_numbers(row: AnswerRow) -> list[float]:
    assert row.directive.answer is not None
    numbers = [0.0] * (APPLIES_FROM + 1)
    numbers[TOKEN_ROW], numbers[SLOT] = row.token_row, row.directive.answer[0]
    return numbers


def _bound(threshold: float) -> float:
    """Return the largest z with risk >= threshold, where risk = 1 - sigmoid(z) (``risk.risk``)."""
    if threshold <= 0.0:
        return math.inf
    return -math.inf if threshold >= 1.0 else math.log1p(-threshold) - math.log(threshold)
