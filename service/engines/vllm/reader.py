"""One step's readings: which rows are answer onsets, what they say, which gates close.  Knows no runner.

A runner calls, in this order: ``before`` (the step's onsets are known, the forward pass is not), ``after`` (it is),
``saw_logits``, ``gate`` (the sampled tokens are there) and ``payloads``.  Steps without onsets cost nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from service.engines.transformers.results import summarise
from service.engines.vllm.graph import SiteTensors
from service.engines.vllm.wire import EXTRAS, Directive, Plan
from service.errors import EngineError
from service.readout import Site

Tensor = torch.Tensor
Counts = npt.NDArray[np.integer[Any]]
SURE = 1e-6  # nats inside the threshold: nearer than that, the request side decides, in float64


@dataclass(frozen=True, slots=True)
class OnsetRow:
    """One request whose prompt ends in this step."""

    request: str
    directive: Directive
    token_row: int  # of t*, among the step's tokens
    request_row: int  # of the request, among the step's requests


@dataclass(frozen=True, slots=True)
class Layout:
    """A step's n requests in the order of their rows, as its runner tells them."""

    requests: Sequence[str]
    starts: Counts  # [n + 1]: each one's first token's row, and the end
    computed: Counts  # [n]: tokens that earlier steps, or the prefix cache, have done
    prompts: Counts  # [n]: the prompt's tokens
    emits: npt.NDArray[np.bool_]  # [n]: whether the step gives it a token


def onset_rows(step: Layout, directive_of: Callable[[str], Directive | None]) -> list[OnsetRow]:
    """The requests whose t*, the prompt's last token, is the last token of their part of this step.

    Then, and only then, the step samples their first token, and the payload may travel with it: after a preemption t*
    can also come by in the middle of a chunk, and vLLM takes no payload from a step that emits nothing.  Most requests
    of most steps are decoding: theirs are the rows that cost nothing here.
    """
    ends = step.emits & (step.computed + np.diff(step.starts) == step.prompts)
    found = []
    for row in map(int, np.flatnonzero(ends)):
        request = step.requests[row]
        if (directive := directive_of(request)) is not None:
            found.append(OnsetRow(request, directive, int(step.starts[row + 1]) - 1, row))
    return found


class StageLink:
    """How ranks add up: within a stage by all-reduce, between stages by what is handed on.  This one: a single rank."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks that split a layer."""
        return values

    def join(self, rows: Tensor) -> Tensor:
        """Put the ranks' parts of rows together, along the last axis."""
        return rows


class Reader:
    """What a worker holds: the plan, each site's tensors, and the readings of the step under way."""

    def __init__(self, plan: Plan, sites: dict[Site, SiteTensors], onsets: Tensor, link: StageLink) -> None:
        self.plan, self.sites = plan, sites
        self._onsets, self._link = onsets, link
        self._step: list[OnsetRow] = []
        self._values: Tensor | None = None  # [columns, n, layers + 1]
        self._rows: list[Tensor] = []
        self._summary: Tensor | None = None  # [n, 3]
        self._gated: Tensor | None = None  # [n] bool

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self._onsets.device

    def before(self, step: list[OnsetRow], tokens: int) -> None:
        """Take up a step of ``tokens`` rows, padding included."""
        self._step = step
        self._values = self._summary = self._gated = None
        self._rows = []
        if self.plan.rows:
            self._onsets.zero_()  # a place of an earlier, larger step would lie outside this one
        if not step:
            return
        capacity = next(iter(self.sites.values())).mean.shape[0]
        if tokens > capacity:
            raise EngineError(f"a step of {tokens} tokens is larger than the readout's buffers ({capacity})")
        for tensors in self.sites.values():
            tensors.clear(tokens)
        if self.plan.rows:
            places = torch.tensor([row.token_row for row in step], dtype=torch.int64)
            self._onsets[: len(step)].copy_(places)

    def after(self, earlier: Tensor | None = None) -> Tensor | None:
        """Gather the step's readings, those of ``earlier`` stages included; a later stage takes up what is returned."""
        if not self._step:
            return None
        places = torch.tensor([row.token_row for row in self._step], dtype=torch.int64, device=self.device)
        gathered = torch.cat([tensors.gather(places) for tensors in self.sites.values()], dim=-1)
        values = self._link.sum(gathered)  # [layers + 1, n, columns]
        if earlier is not None:
            values = torch.cat([earlier[:-1], values[:-1], earlier[-1:] + values[-1:]])
        if any(row.directive.rows for row in self._step):
            for tensors in self.sites.values():
                assert tensors.rows is not None
                rows = tensors.rows[:, : len(self._step)]
                self._rows.append(self._link.join(rows) if tensors.split else rows.clone())
        self._values = values.permute(2, 1, 0)
        return values

    def saw_logits(self, logits: Tensor | None) -> None:
        """Sum up the first token's distribution from the step's logits [requests, vocab], where it is asked for."""
        if self._summary is not None:
            return  # V2 asks once more, for other rows, where somebody wants log probabilities of a prompt
        if logits is None or not any(row.directive.needs_first_token for row in self._step):
            return
        places = torch.tensor([row.request_row for row in self._step], dtype=torch.int64, device=logits.device)
        self._summary = summarise(logits.index_select(0, places).float())

    def gate(self, sampled: Tensor) -> Tensor:
        """The step's sampled tokens [requests, 1], an end token in place of those whose gate closes (Eq. detector)."""
        gates = [(place, row) for place, row in enumerate(self._step) if row.directive.gate is not None]
        if not gates or self._values is None:
            return sampled
        slots = torch.tensor([row.directive.slot for _, row in gates], device=self.device)
        places = torch.tensor([place for place, _ in gates], device=self.device)
        terms = [[*g.weight, g.intercept, _bound(g.threshold)] for _, row in gates if (g := row.directive.gate)]
        weights = torch.tensor(terms, dtype=torch.float64, device=self.device)
        signals = torch.zeros(len(gates), 3, dtype=torch.float64, device=self.device)
        # From the trajectory, as the request side does, so that both see the same number.
        signals[:, 0] = self._values[slots, places, :-1].double().mean(-1)
        if self._summary is not None:
            signals[:, 1:] = self._summary[places, :2].float().to(signals)  # rounded as the payload's are
        # A signal without a weight may be anything, a NaN too.
        used = torch.where(weights[:, :3] == 0, torch.zeros_like(signals), signals)
        z = (weights[:, :3] * used).sum(-1) + weights[:, 3]
        closes = z < weights[:, 4] - SURE
        self._gated = torch.zeros(len(self._step), dtype=torch.bool, device=self.device)
        self._gated[places] = closes
        targets = torch.tensor([row.request_row for _, row in gates], device=sampled.device)
        kept = sampled[targets, 0]
        ends = torch.tensor([row.directive.end_token for _, row in gates], device=sampled.device).to(kept)
        sampled[targets, 0] = torch.where(closes.to(sampled.device), ends, kept)
        return sampled

    def payloads(self) -> dict[str, Tensor]:
        """Request -> [1, n] float32 on the CPU; the copy may still be under way on the device's own stream."""
        if not self._step or self._values is None:
            return {}
        count = len(self._step)
        extras = torch.zeros(count, EXTRAS, dtype=torch.float32, device=self.device)
        # A step whose logits nobody has shown must not look like a sure first token.
        extras[:, :3] = math.nan if self._summary is None else self._summary.to(extras)
        if self._gated is not None:
            extras[:, 3] = self._gated.to(extras)
        flat = torch.cat([self._values.permute(1, 0, 2).reshape(count, -1), extras], dim=1)
        found = {}
        for place, row in enumerate(self._step):
            parts = [flat[place], *((rows[:, place].reshape(-1) for rows in self._rows) if row.directive.rows else ())]
            found[row.request] = torch.cat(parts).unsqueeze(0).to("cpu", non_blocking=True)
        self._step = []
        return found


def _bound(threshold: float) -> float:
    """risk >= threshold is z <= this, with risk = 1 - sigmoid(z) (``risk.risk``)."""
    if threshold <= 0.0:
        return math.inf
    return -math.inf if threshold >= 1.0 else math.log1p(-threshold) - math.log(threshold)
