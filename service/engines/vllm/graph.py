"""The readout as part of the model's own forward pass, compiled with it.

Each attention output projection and, at the residual site, each block gets a subclass of its own class whose
``forward`` also computes the truth logit (a_l . v_l + b_l) / scale_l (Eq. logit) of every token of the step for every
probe slot, writes it into a buffer and adds it to a running depth mean (Eq. detector).  Probes are tensors that the
graph reads: loading another bundle copies it into a slot, without recompilation or restart.

The cost per token and layer is one slice of ``dim`` numbers per slot.  Buffers are filled with NaN before a step with
onsets, so that a graph that does not write them (a stale compile cache) is detected.
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
class TensorParallelRank:
    """This process's rank among those that split each layer."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest step: tokens (padding included) and prompts."""

    tokens: int
    prompts: int


class SiteTensors:
    """One site's buffers and probe slots on this rank.

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
        sizes: Sizes,
        device: torch.device,
    ) -> None:
        geometry = plan.geometry
        self.site, self.layers, self.heads = site, layers, heads
        self.dim = geometry.dim(site)
        self.width = heads[1] * self.dim
        self.split = heads[1] < geometry.heads(site)
        self.leading = rank.rank == 0
        tokens, prompts = sizes.tokens, sizes.prompts

        def numbers(*shape: int, fill: float = 0.0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.float32, device=device)

        self.logits = numbers(len(layers), tokens, plan.slots, fill=math.nan)
        self.mean = numbers(tokens, plan.slots, fill=math.nan)
        self.index = [torch.zeros(plan.slots, dtype=torch.int64, device=device) for _ in layers]  # each slot's head
        self.direction = [numbers(plan.slots, self.dim) for _ in layers]  # v / scale
        self.offset = [numbers(plan.slots) for _ in layers]  # b / scale
        self.activations = numbers(len(layers), prompts, self.width, fill=math.nan) if plan.activations else None

    def write(self, slot: int, probes: Probes) -> None:
        """Write this rank's part of a probe into a slot."""
        first, count = self.heads
        for place, layer in enumerate(self.layers):
            scale = float(probes.scale[layer])
            head = int(probes.head[layer]) - first
            local = 0 <= head < count and (self.split or self.leading)
            direction = torch.from_numpy(np.asarray(probes.direction[layer], np.float64) / scale).to(torch.float32)
            self.index[place][slot].fill_(head if local else 0)
            self.direction[place][slot].copy_(direction if local else torch.zeros(self.dim))
            self.offset[place][slot].fill_(float(probes.bias[layer]) / scale if self.leading else 0.0)

    def clear(self, tokens: int) -> None:
        """Fill the rows of the coming step with NaN."""
        self.logits[:, :tokens].fill_(math.nan)
        self.mean[:tokens].fill_(math.nan)
        if self.activations is not None:
            self.activations.fill_(math.nan)

    def gather(self, rows: Tensor) -> Tensor:
        """Truth logits at ``rows`` [n], and last these layers' part of the depth mean: [layers + 1, n, slots]."""
        return torch.cat([self.logits[:, rows], self.mean[rows].unsqueeze(0)])


def write_truth_logits(
    states: Tensor,
    index: Tensor,
    direction: Tensor,
    offset: Tensor,
    logits: Tensor,
    mean: Tensor,
    place: int,
    share: float,
) -> None:
    """Write one layer's truth logits of every token and slot, and add them to the mean.  ``states`` [..., width].

    Plain tensor operations, so that the compiler can fuse them with the operations around them.
    """
    rows = states.reshape(-1, states.shape[-1])
    tokens = rows.shape[0]
    # Heads are indexed as a whole, so that vector instructions can read within them; a whole row needs no indexing.
    heads = rows.view(tokens, -1, direction.shape[-1])
    readout = heads if heads.shape[1] == 1 else heads[:, index]  # [tokens, 1 or slots, dim]
    values = (readout.float() * direction).sum(-1) + offset  # [tokens, slots]
    logits[place, :tokens].copy_(values)
    if place == 0:
        mean[:tokens].copy_(values * share)
    else:
        mean[:tokens].add_(values * share)


def write_activations(states: Tensor, onsets: Tensor, activations: Tensor, place: int) -> None:
    """Write the activations at the step's answer onsets, for training.  ``onsets`` [prompts], padded with 0."""
    activations[place].copy_(states.reshape(-1, states.shape[-1]).index_select(0, onsets).float())


READOUT_BUFFERS = ("index", "direction", "offset", "logits", "mean")  # arguments of ``write_truth_logits``, in order
ACTIVATION_BUFFERS = ("onsets", "activations")  # of ``write_activations``


def _buffer(name: str, site: Site) -> str:
    """A buffer's name in a module.  It names the site, because one module may be read at both sites."""
    return f"ht_{name}_{site}"


def _attach(module: nn.Module, tensors: SiteTensors, place: int, share: float, onsets: Tensor) -> None:
    """Make ``module`` an instance of a subclass with the readout; its parameters and their names do not change."""
    own = (tensors.index[place], tensors.direction[place], tensors.offset[place], tensors.logits, tensors.mean)
    for name, tensor in zip(READOUT_BUFFERS + ACTIVATION_BUFFERS, (*own, onsets, tensors.activations), strict=True):
        module.register_buffer(_buffer(name, tensors.site), tensor, persistent=False)
    module.__class__ = _reading_class(type(module), tensors.site, place, share, tensors.activations is not None)


def _reading_class(base: type, site: Site, place: int, share: float, keeps_activations: bool) -> type:
    readout_names = tuple(_buffer(name, site) for name in READOUT_BUFFERS)
    activation_names = tuple(_buffer(name, site) for name in ACTIVATION_BUFFERS)

    def read_out(self: Any, states: Tensor) -> None:
        index, direction, offset, logits, mean = [getattr(self, name) for name in readout_names]
        write_truth_logits(states, index, direction, offset, logits, mean, place, share)
        if keeps_activations:
            onsets, activations = [getattr(self, name) for name in activation_names]
            write_activations(states, onsets, activations, place)

    def before(self: Any, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        read_out(self, states)
        return base.forward(self, states, *args, **kwargs)  # type: ignore[attr-defined]

    def after(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        read_out(self, _block_output(output))
        return output

    forward = before if site is Site.ATTENTION_HEAD else after
    return type(f"Reading{base.__name__}", (base,), {"forward": forward})


def _block_output(output: Any) -> Tensor:
    """vLLM's blocks return (hidden states, residual) and leave the addition to the next block's norm."""
    hidden, residual = output if isinstance(output, tuple) else (output, None)
    states: Tensor = hidden if residual is None else hidden + residual
    return states


def blocks_of(model: nn.Module, family: Family, num_layers: int) -> dict[int, nn.Module]:
    """This rank's blocks by layer.  Raises EngineError for an unknown module tree.

    vLLM's own models keep the checkpoint's names; its Transformers backend and multimodal classes add an outer module.
    """
    tail = family.blocks.split(".", 1)[-1]
    for path in (family.blocks, f"model.{tail}", f"language_model.model.{tail}", f"model.language_model.{tail}"):
        try:
            container = model.get_submodule(path)
        except AttributeError:
            continue
        children = list(container.children())
        if len(children) != num_layers:
            raise EngineError(f"{family.name}: {path} has {len(children)} blocks in vLLM, {num_layers} were expected")
        return {layer: block for layer, block in enumerate(children) if type(block).__name__ != "PPMissingLayer"}
    raise EngineError(
        f"{family.name}: vLLM's {type(model).__name__} has no blocks at the known paths; this model is not supported "
        "by --engine vllm, use --engine transformers"
    )


def install(
    model: nn.Module, family: Family, plan: Plan, rank: TensorParallelRank, sizes: Sizes, device: torch.device
) -> tuple[dict[Site, SiteTensors], Tensor]:
    """Add the readout to a loaded model: tensors per site, and the onsets [prompts] of ``write_activations``.

    Raises EngineError if the module tree contradicts the family's entry in ``FAMILIES``.
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
            count = _local_heads(projections, geometry.num_heads, geometry.head_dim, rank.size, family)
            heads = (rank.rank * count if count < geometry.num_heads else 0, count)
        tensors[site] = SiteTensors(plan, site, layers, heads, rank, sizes, device)
        modules = projections if site is Site.ATTENTION_HEAD else blocks
        for place, layer in enumerate(layers):
            _attach(modules[layer], tensors[site], place, 1.0 / geometry.num_layers, onsets)
    return tensors, onsets


def _local_heads(projections: dict[int, nn.Module], heads: int, head_dim: int, tp_size: int, family: Family) -> int:
    """Number of QUERY heads on this rank.  Raises EngineError if a projection's width is not a multiple of them."""
    for layer, projection in projections.items():
        width: Any = getattr(projection, "input_size_per_partition", None) or getattr(projection, "input_size", None)
        if width not in (heads * head_dim, heads * head_dim // tp_size) or width % head_dim:
            raise EngineError(
                f"{family.name}: layer {layer}'s {family.projection} takes {width} inputs on one of {tp_size} ranks, "
                f"which does not match {heads} heads of size {head_dim}; use --engine transformers"
            )
    return int(width) // head_dim
