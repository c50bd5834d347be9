"""The readout as part of the model's own forward pass, compiled with it.  Touches vLLM's modules, not its runners.

Each attention output projection and, at the residual site, each block gets a subclass of its own class whose
``forward`` first takes a few products: a_l (Eq. readout) of every probe slot times v_l, plus b_l, over scale_l
(Eq. logit), written for every token of the step into a buffer, and added to a running depth mean (Eq. detector).
Probes are tensors that the graph reads, so another bundle is a copy into a slot: no recompilation, no restart.

The price per token and layer is one slice of ``dim`` numbers per slot.  Buffers are filled with NaN before a step whose
readings are wanted: a graph that does not write them (a stale compile cache) cannot be mistaken for a reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from service.engines.families import Family
from service.engines.vllm.wire import Plan
from service.errors import EngineError
from service.readout import Probes, Site

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that split each layer (tensor parallel)."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest step: tokens, padding included, and prompts."""

    tokens: int
    prompts: int


class SiteTensors:
    """One site's buffers and probe slots on this rank.

    ``heads`` are the rank's own (first, count): other heads' directions are zeros here, and the ranks' sums add up.
    Where every rank holds all heads (``split`` False), only the one that is ``leading`` counts.
    """

    def __init__(
        self,
        plan: Plan,
        site: Site,
        layers: range,
        heads: tuple[int, int],
        ranks: Ranks,
        sizes: Sizes,
        device: torch.device,
    ) -> None:
        geometry = plan.geometry
        self.site, self.layers, self.heads = site, layers, heads
        self.dim = geometry.dim(site)
        self.width = heads[1] * self.dim
        self.split = heads[1] < geometry.heads(site)
        self.leading = ranks.rank == 0
        tokens, prompts = sizes.tokens, sizes.prompts

        def numbers(*shape: int, fill: float = 0.0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.float32, device=device)

        self.logits = numbers(len(layers), tokens, plan.slots, fill=math.nan)
        self.mean = numbers(tokens, plan.slots, fill=math.nan)
        self.index = [torch.zeros(plan.slots, dtype=torch.int64, device=device) for _ in layers]  # each slot's head
        self.direction = [numbers(plan.slots, self.dim) for _ in layers]  # v / scale
        self.offset = [numbers(plan.slots) for _ in layers]  # b / scale
        self.rows = numbers(len(layers), prompts, self.width, fill=math.nan) if plan.rows else None

    def write(self, slot: int, probes: Probes) -> None:
        """Put a probe into a slot: [m] heads, [m, dim] directions, [m] biases and scales, this rank's part of them."""
        first, count = self.heads
        for place, layer in enumerate(self.layers):
            scale = float(probes.scale[layer])
            head = int(probes.head[layer]) - first
            mine = 0 <= head < count and (self.split or self.leading)
            direction = torch.from_numpy(np.asarray(probes.direction[layer], np.float64) / scale).to(torch.float32)
            self.index[place][slot].fill_(head if mine else 0)
            self.direction[place][slot].copy_(direction if mine else torch.zeros(self.dim))
            self.offset[place][slot].fill_(float(probes.bias[layer]) / scale if self.leading else 0.0)

    def clear(self, tokens: int) -> None:
        """NaN into the rows of the coming step."""
        self.logits[:, :tokens].fill_(math.nan)
        self.mean[:tokens].fill_(math.nan)
        if self.rows is not None:
            self.rows.fill_(math.nan)

    def gather(self, rows: Tensor) -> Tensor:
        """Readings at ``rows`` [n] -> [layers + 1, n, slots]; the last is the depth mean's part of these layers."""
        return torch.cat([self.logits[:, rows], self.mean[rows].unsqueeze(0)])


def read(
    states: Tensor,
    index: Tensor,
    direction: Tensor,
    offset: Tensor,
    logits: Tensor,
    mean: Tensor,
    place: int,
    share: float,
) -> None:
    """One layer's truth logits of every token and slot, written and added up.  ``states`` [..., width].

    Plain tensor operations, so that the compiler may fuse them with their neighbours.
    """
    rows = states.reshape(-1, states.shape[-1])
    tokens = rows.shape[0]
    # A head is looked up as a whole, so that within it vector instructions can read; a whole row needs no looking up.
    heads = rows.view(tokens, -1, direction.shape[-1])
    readout = heads if heads.shape[1] == 1 else heads[:, index]  # [tokens, 1 or slots, dim]
    values = (readout.float() * direction).sum(-1) + offset  # [tokens, slots]
    logits[place, :tokens].copy_(values)
    if place == 0:
        mean[:tokens].copy_(values * share)
    else:
        mean[:tokens].add_(values * share)


def keep(states: Tensor, onsets: Tensor, rows: Tensor, place: int) -> None:
    """Whole rows at the step's answer onsets, for training.  ``onsets`` [prompts], padded with 0."""
    rows[place].copy_(states.reshape(-1, states.shape[-1]).index_select(0, onsets).float())


READ = ("index", "direction", "offset", "logits", "mean")  # what ``read`` takes, in its order
KEPT = ("onsets", "rows")  # and ``keep``


def _buffer(name: str, site: Site) -> str:
    """What a module calls one of a site's tensors: a block and its projection may be read at a site each."""
    return f"ht_{name}_{site}"


def _attach(module: nn.Module, tensors: SiteTensors, place: int, share: float, onsets: Tensor) -> None:
    """Make ``module`` an instance of a subclass that reads: parameters and their names stay as they are."""
    own = (tensors.index[place], tensors.direction[place], tensors.offset[place], tensors.logits, tensors.mean)
    for name, tensor in zip(READ + KEPT, (*own, onsets, tensors.rows), strict=True):
        module.register_buffer(_buffer(name, tensors.site), tensor, persistent=False)
    module.__class__ = _reading_class(type(module), tensors.site, place, share, tensors.rows is not None)


def _reading_class(base: type, site: Site, place: int, share: float, takes_rows: bool) -> type:
    read_names = tuple(_buffer(name, site) for name in READ)
    kept_names = tuple(_buffer(name, site) for name in KEPT)

    def take(self: Any, states: Tensor) -> None:
        index, direction, offset, logits, mean = [getattr(self, name) for name in read_names]
        read(states, index, direction, offset, logits, mean, place, share)
        if takes_rows:
            onsets, rows = [getattr(self, name) for name in kept_names]
            keep(states, onsets, rows, place)

    def before(self: Any, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        take(self, states)
        return base.forward(self, states, *args, **kwargs)  # type: ignore[attr-defined]

    def after(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        take(self, _block_output(output))
        return output

    forward = before if site is Site.ATTENTION_HEAD else after
    return type(f"Reading{base.__name__}", (base,), {"forward": forward})


def _block_output(output: Any) -> Tensor:
    """vLLM's blocks hand on (hidden states, residual) and leave the addition to the next block's norm."""
    hidden, residual = output if isinstance(output, tuple) else (output, None)
    states: Tensor = hidden if residual is None else hidden + residual
    return states


def blocks_of(model: nn.Module, family: Family, num_layers: int) -> dict[int, nn.Module]:
    """This rank's blocks by their layer.  Raises EngineError where vLLM's module tree is not one of those known.

    vLLM's own models keep the checkpoint's names; its Transformers backend and its multimodal classes put one more
    module around them.
    """
    tail = family.blocks.split(".", 1)[-1]
    for path in (family.blocks, f"model.{tail}", f"language_model.model.{tail}", f"model.language_model.{tail}"):
        try:
            found = model.get_submodule(path)
        except AttributeError:
            continue
        children = list(found.children())
        if len(children) != num_layers:
            raise EngineError(f"{family.name}: {path} has {len(children)} blocks in vLLM where {num_layers} belong")
        return {layer: block for layer, block in enumerate(children) if type(block).__name__ != "PPMissingLayer"}
    raise EngineError(
        f"{family.name}: vLLM's {type(model).__name__} has no blocks where they are looked for; this model is not "
        "supported by --engine vllm, use --engine transformers"
    )


def install(
    model: nn.Module, family: Family, plan: Plan, ranks: Ranks, sizes: Sizes, device: torch.device
) -> tuple[dict[Site, SiteTensors], Tensor]:
    """Teach a loaded model to read: tensors per site, and the onsets [prompts] that ``keep`` looks at.

    Raises EngineError where the module tree is not the one that the family's row promises.
    """
    geometry = plan.geometry
    blocks = blocks_of(model, family, geometry.num_layers)
    layers = range(min(blocks), max(blocks) + 1)
    projections = {layer: block.get_submodule(family.projection) for layer, block in blocks.items()}
    onsets = torch.zeros(sizes.prompts, dtype=torch.int64, device=device)
    tensors: dict[Site, SiteTensors] = {}
    for site in plan.sites:
        heads = (0, 1)
        if site is Site.ATTENTION_HEAD:
            count = _local_heads(projections, geometry.num_heads, geometry.head_dim, ranks.size, family)
            heads = (ranks.rank * count if count < geometry.num_heads else 0, count)
        tensors[site] = SiteTensors(plan, site, layers, heads, ranks, sizes, device)
        modules = projections if site is Site.ATTENTION_HEAD else blocks
        for place, layer in enumerate(layers):
            _attach(modules[layer], tensors[site], place, 1.0 / geometry.num_layers, onsets)
    return tensors, onsets


def _local_heads(projections: dict[int, nn.Module], heads: int, head_dim: int, tp_size: int, family: Family) -> int:
    """QUERY heads on this rank.  Raises EngineError where the projection's width does not say so."""
    for layer, projection in projections.items():
        width: Any = getattr(projection, "input_size_per_partition", None) or getattr(projection, "input_size", None)
        if width not in (heads * head_dim, heads * head_dim // tp_size) or width % head_dim:
            raise EngineError(
                f"{family.name}: layer {layer}'s {family.projection} takes {width} inputs on one of {tp_size} ranks, "
                f"where {heads} heads of {head_dim} are to be split"
            )
    return int(width) // head_dim
