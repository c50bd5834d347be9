"""Where activations are read: site, position, shapes.  Numpy only.

An *activation* is a vector read at one layer and one position (or pooled over several), before a
head is selected:
``attention_head``: the whole input of the attention output projection, [num_heads * head_dim];
``residual_stream``: the block's output hidden state, [hidden_size] (App. readout-ablation).
A *readout* a_l (Eq. readout) is the part of an activation that a probe reads, [dim]."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from probes_store.tensors import AnswerTensors, ProbeTensors


class Site(StrEnum):
    """Where in a block the readout is taken."""

    ATTENTION_HEAD = "attention_head"
    RESIDUAL_STREAM = "residual_stream"


class Pooling(StrEnum):
    """The prompt tokens over which an activation is pooled (App. pooling, Tab. ablation_pooling).

    ``last_1`` is the activation at t* itself, the only one that is served; the others exist for the
    ablation. ``last_k`` is the mean over the last k tokens, or over all if the prompt has fewer.
    ``mean`` and ``max`` (of each coordinate) include every token, special ones too; ``content_``
    includes content words only."""

    LAST_1 = "last_1"
    LAST_4 = "last_4"
    LAST_8 = "last_8"
    LAST_16 = "last_16"
    MEAN = "mean"
    MAX = "max"
    CONTENT_MEAN = "content_mean"
    CONTENT_MAX = "content_max"


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's shape as the readout sees it.  ``num_heads`` counts QUERY heads, also under
    grouped-query attention."""

    num_layers: int
    num_heads: int
    head_dim: int
    hidden_size: int

    def width(self, site: Site) -> int:
        """Return the length of an activation."""
        return self.num_heads * self.head_dim if site is Site.ATTENTION_HEAD else self.hidden_size

    def heads(self, site: Site) -> int:
        """Return the readouts per activation: K at the attention site, 1 at the residual stream."""
        return self.num_heads if site is Site.ATTENTION_HEAD else 1

    def dim(self, site: Site) -> int:
        """Return d, the length of one readout."""
        return self.width(site) // self.heads(site)

    def by_head(self, activations: NDArray[np.floating], site: Site) -> NDArray[np.floating]:
        """View activations [..., width] as readouts [..., heads, dim]; head k is the slice
        [k d, (k + 1) d)."""
        return activations.reshape(*activations.shape[:-1], self.heads(site), self.dim(site))

    def select(
        self, activations: NDArray[np.floating], head: NDArray[np.integer], site: Site
    ) -> NDArray[np.floating]:
        """Select each layer's head: activations [..., m, width], head [m] -> readout
        [..., m, dim]."""
        index = np.asarray(head).reshape(*(1,) * (activations.ndim - 2), -1, 1, 1)
        return np.take_along_axis(self.by_head(activations, site), index, axis=-2)[..., 0, :]


@dataclass(frozen=True)
class Probes:
    """The part of a bundle that an engine needs to compute a trajectory.

    head [m] int, direction [m, d] unit-norm, bias [m], scale [m] (all ones under ``unit_norm``)."""

    site: Site
    head: NDArray[np.integer]
    direction: NDArray[np.float32]
    bias: NDArray[np.float32]
    scale: NDArray[np.float32]

    @classmethod
    def of(cls, site: Site, stored: ProbeTensors | AnswerTensors) -> Probes:
        """Return the stored probes of the risk, or of the answer's tokens."""
        return cls(site, stored.head, stored.direction, stored.bias, stored.scale)

    @classmethod
    def all_of(cls, site: Site, stored: ProbeTensors) -> tuple[Probes, ...]:
        """Return the stored probes of the risk, and behind them the A context probes."""
        arrays = (
            stored.context_head,
            stored.context_direction,
            stored.context_bias,
            stored.context_scale,
        )
        if stored.context_head is None:
            return (cls.of(site, stored),)
        context = [
            cls(site, *parts)
            for parts in zip(*arrays, strict=True)  # type: ignore[arg-type]
        ]
        return (cls.of(site, stored), *context)
