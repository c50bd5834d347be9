"""Results transferred from the device: truth logits and first-token summaries, in the caller's order and finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from service.engines.base import FirstToken, PrefillResult
from service.engines.transformers.batching import Batch
from service.engines.transformers.hooks import ProbeStack, TruthLogits
from service.errors import NonFiniteReadout
from service.readout import Site

Tensor = torch.Tensor


@dataclass(frozen=True)
class Prefilled:
    """One micro-batch's results, still on the device."""

    batch: Batch
    sink: TruthLogits
    summary: Tensor | None  # [batch, 3], if first tokens were asked for


def prefill_results(stack: ProbeStack, done: Sequence[Prefilled]) -> list[PrefillResult]:
    """The results of all micro-batches of a call, transferred at once and put into the caller's order.

    Raises NonFiniteReadout naming the layer and the prompt.
    """
    order = [index for part in done for index in part.batch.index]
    if not order:
        return []
    lengths = [tokens for part in done for tokens in part.batch.prompt_tokens]
    trajectories: list[tuple[NDArray[np.float64], ...]] = [()] * len(order)
    first: list[FirstToken] | None = None
    if stack.probes:
        sums = {
            site: torch.cat([part.sink.buffers[site] for part in done], dim=1).cpu().numpy() for site in stack.sites
        }
        logits = stack.finish(sums)  # [m, n, P]
        refuse_non_finite(logits, order, "truth logit")
        by_prompt = np.ascontiguousarray(logits.transpose(1, 2, 0))  # [n, P, m]
        trajectories = [tuple(of_prompt) for of_prompt in by_prompt]
    if summaries := [part.summary for part in done if part.summary is not None]:
        first = first_tokens(torch.cat(summaries).cpu().numpy())
    rows = np.argsort(order)  # the inverse permutation
    return [PrefillResult(trajectories[row], first[row] if first else None, lengths[row]) for row in rows]


def summarise(logits: Tensor) -> Tensor:
    """Float32 logits [batch, vocab] -> [batch, 3] float64 on the device: log max probability, entropy, greedy token."""
    log_probabilities = torch.log_softmax(logits, dim=-1)
    largest, token = log_probabilities.max(dim=-1)
    entropy = torch.special.entr(log_probabilities.exp()).sum(dim=-1)  # 0 for probabilities that underflow to 0
    return torch.stack([largest.double(), entropy.double(), token.double()], dim=-1)


def first_tokens(summaries: NDArray[np.float64]) -> list[FirstToken]:
    """Summaries [n, 3] as FirstTokens, clipped to their range after rounding.  Raises NonFiniteReadout."""
    if not np.isfinite(summaries).all():
        raise NonFiniteReadout(
            "the first token's logits hold a NaN or infinity; the model overflowed: load it with dtype bfloat16 or "
            "float32, and check its weights"
        )
    return [FirstToken(min(0.0, float(p)), max(0.0, float(h)), int(token)) for p, h, token in summaries]


def refuse_non_finite(values: NDArray[np.floating], prompts: Sequence[int], what: Site | str) -> None:
    """Raise NonFiniteReadout naming the layer and prompt of the first number of ``values`` [m, n, ...] at fault."""
    if np.isfinite(values).all():
        return
    layer, row = (int(axis) for axis in np.argwhere(~np.isfinite(values))[0][:2])
    raise NonFiniteReadout(
        f"layer {layer} gave a NaN or infinity ({what}) for prompt {prompts[row]}; the model overflowed: load it with "
        "dtype bfloat16 or float32, and check its weights and the bundle's"
    )


def refuse_nan(logits: Tensor) -> Tensor:
    """Return a decode step's logits, or raise NonFiniteReadout."""
    if bool(torch.isnan(logits).any()):
        raise NonFiniteReadout(
            "the logits of a decode step hold a NaN; the model overflowed: load it with dtype bfloat16 or float32"
        )
    return logits
