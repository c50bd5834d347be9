"""One site's probes on this rank, and the activations that a step keeps for them.

In each layer a forward pass keeps the rows of the step's answer onsets, and nothing else: one copy a layer.  The truth
logits (Eq. logit) and the depth mean (Eq. detector) of every probe slot are computed from them after it, for all layers
at once.  A step without onsets keeps nothing.

Probes are tensors: loading another bundle copies it into a slot, without recompilation or restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from service.engines.vllm.wire import Plan
from service.readout import Probes, Site

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class TensorParallelRank:
    """This process's rank among those that split each layer."""

    rank: int
    size: int


class SiteReadout:
    """One site's probe slots, and the current step's activations, on this rank.

    ``heads`` are the rank's own, as (first, count): the directions of other heads are zeros here, and the results of
    all ranks are summed.  If every rank holds all heads (``split`` False), only the ``leading`` rank contributes.
    """

    def __init__(
        self,
        plan: Plan,
        site: Site,
        layers: range,
        heads: tuple[int, int],
        rank: TensorParallelRank,
        device: torch.device,
    ) -> None:
        geometry = plan.geometry
        self.site, self.layers, self.heads = site, layers, heads
        self.dim = geometry.dim(site)
        self.width = heads[1] * self.dim
        self.split = heads[1] < geometry.heads(site)
        self.leading = rank.rank == 0
        self._share = 1.0 / geometry.num_layers
        size = (len(layers), plan.slots)
        self.head = torch.zeros(size, dtype=torch.int64, device=device)  # of this rank's
        self.direction = torch.zeros(*size, self.dim, dtype=torch.float32, device=device)  # v / scale
        self.offset = torch.zeros(size, dtype=torch.float32, device=device)  # b / scale
        self._onsets: Tensor | None = None  # [n], rows of the step
        self._kept: list[Tensor] = []  # by layer, [n, width]

    def write(self, slot: int, probes: Probes) -> None:
        """Write this rank's part of a probe into a slot."""
        own = slice(self.layers.start, self.layers.stop)
        first, count = self.heads
        head = torch.from_numpy(np.asarray(probes.head[own], np.int64)) - first
        local = (head >= 0) & (head < count) & (self.split or self.leading)
        scale = np.asarray(probes.scale[own], np.float64)
        direction = torch.from_numpy(np.asarray(probes.direction[own], np.float64) / scale[:, None])
        offset = torch.from_numpy(np.asarray(probes.bias[own], np.float64) / scale * self.leading)
        self.head[:, slot] = torch.where(local, head, 0).to(self.head)
        self.direction[:, slot] = torch.where(local[:, None], direction, 0.0).to(self.direction)
        self.offset[:, slot] = offset.to(self.offset)

    def start(self, onsets: Tensor | None) -> None:
        """The next forward pass keeps these rows [n] in each of its layers; None: it keeps nothing."""
        self._onsets = onsets
        self._kept = []

    def keep(self, states: Tensor, residual: Tensor | None = None) -> None:
        """Keep the next layer's rows of ``states`` [tokens, ..], or of its sum with ``residual``."""
        if self._onsets is None:
            return
        kept = states.reshape(-1, self.width).index_select(0, self._onsets)
        if residual is not None:
            kept = kept + residual.reshape(-1, self.width).index_select(0, self._onsets)
        self._kept.append(kept)

    def read(self) -> Tensor:
        """Truth logits at the onsets, and last these layers' part of the depth mean: [layers + 1, n, slots].

        NaN where not every layer was kept once: a graph that runs without the readout, or a captured one.
        """
        assert self._onsets is not None
        count, layers = len(self._onsets), len(self.layers)
        slots = self.offset.shape[1]
        if len(self._kept) != layers:
            return self.offset.new_full((layers + 1, count, slots), math.nan)
        heads = torch.stack(self._kept).view(layers, count, -1, self.dim)
        if heads.shape[2] > 1:
            heads = heads.gather(2, self.head[:, None, :, None].expand(-1, count, -1, self.dim))
        logits = (heads.float() * self.direction[:, None]).sum(-1) + self.offset[:, None]
        return torch.cat([logits, logits.sum(0, keepdim=True) * self._share])

    def activations(self) -> Tensor:
        """What was kept, [layers, n, width] float32."""
        assert self._onsets is not None
        if len(self._kept) != len(self.layers):
            return self.offset.new_full((len(self.layers), len(self._onsets), self.width), math.nan)
        return torch.stack(self._kept).float()


# The residual stream exists only within the compiled graph, so there an operator that the compiler cannot look into
# hands it over.  It is the same in every layer, so that identical layers share one compiled artifact, as in bare vLLM.
KEEP = "hallutracer::keep_residual"
_library = torch.library.Library("hallutracer", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "keep_residual(Tensor hidden, Tensor? residual, Tensor(a!) order, int site) -> ()"
)
_sites: list[SiteReadout] = []


def _keep_residual(hidden: Tensor, residual: Tensor | None, order: Tensor, site: int) -> None:
    """Say that it changes ``order``, which keeps the calls in the order of the layers."""
    _sites[site].keep(hidden, residual)


_library.impl(  # type: ignore[no-untyped-call]
    "keep_residual", _keep_residual, "CompositeExplicitAutograd"
)
torch.library.register_fake(KEEP, lambda hidden, residual, order, site: None)


def register(site: SiteReadout) -> int:
    """The number of a site for ``keep_residual``."""
    _sites.append(site)
    return len(_sites) - 1
