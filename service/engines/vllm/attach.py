"""The readout in a loaded vLLM model: where it is read, and what a step keeps for the probes of
this rank.

At the attention site nothing of ours is in the compiled graph: vLLM runs attention between the
graph's pieces, as an operator that the compiler does not look into, and its result is what the
output projection reads (which is checked).

In each layer a forward pass keeps the step's rows that are read, answer onsets and answers' own
tokens, and nothing
else: one copy a layer.  The truth logits (Eq. logit) of every probe slot are computed from them
after it, for all layers at once.  Probes are tensors: another bundle is copied into a slot, without
recompilation or restart."""

from __future__ import annotations

import inspect
import math
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from service.engines.families import SITES, Family, block_list
from service.engines.vllm.wire import Plan
from service.errors import EngineError
from service.readout import Geometry, Probes, Site

Tensor = torch.Tensor
TOKENS = 3  # of the input with which an attention block is checked


def captured(states: Tensor) -> bool:
    """Return whether what is done with ``states`` now becomes part of a CUDA graph."""
    return states.is_cuda and torch.cuda.is_current_stream_capturing()


class SiteReadout:
    """One site's probe slots and the step's activations on this rank, whose own heads are (first,
    count).

    Results of all ranks are summed; where each has all heads (``split`` False), only ``leading``
    contributes.

    ``rows``: at most so many of a step are kept, at one address: a CUDA graph that is captured
    whole then keeps them, too.  0: a step's own number, at an address of its own."""

    def __init__(
        self,
        plan: Plan,
        site: Site,
        layers: range,
        heads: tuple[int, int],
        *,
        leading: bool,
        device: torch.device,
        rows: int = 0,
    ) -> None:
        geometry = plan.geometry
        # else the heads of the probes are kept alone
        self.whole = plan.activations or heads[1] <= plan.slots
        self.site = site
        self.layers = layers
        self.heads = heads
        self.dim = geometry.dim(site)
        self.width = heads[1] * self.dim
        self.split = heads[1] < geometry.heads(site)
        self.leading = leading
        size = (len(layers), plan.slots)
        self.head = torch.zeros(size, dtype=torch.int64, device=device)  # of this rank's
        # v / scale
        self.direction = torch.zeros(*size, self.dim, dtype=torch.float32, device=device)
        self.offset = torch.zeros(size, dtype=torch.float32, device=device)  # b / scale
        self._unit = self.width if self.whole else self.dim  # numbers that are kept together
        picks = 1 if self.whole else plan.slots
        self._rows = rows
        # among a step's units
        self._places = torch.zeros(len(layers), rows, picks, dtype=torch.int64, device=device)
        self._kept: Tensor | None = None  # [layers, rows, picks, unit]
        # rows of the step, and how often its forward pass has kept them
        self._count = self._calls = 0
        self._parts: list[tuple[Tensor, ...]] = []  # by layer, the step's part of both tensors

    def write(self, slot: int, probes: Probes) -> None:
        """Write this rank's part of a probe into a slot."""
        of_rank = slice(self.layers.start, self.layers.stop)
        first, count = self.heads
        head = torch.from_numpy(np.asarray(probes.head[of_rank], np.int64)) - first
        local = (head >= 0) & (head < count) & (self.split or self.leading)
        scale = np.asarray(probes.scale[of_rank], np.float64)
        direction = torch.from_numpy(
            np.asarray(probes.direction[of_rank], np.float64) / scale[:, None]
        )
        offset = torch.from_numpy(
            np.asarray(probes.bias[of_rank], np.float64) / scale * self.leading
        )
        self.head[:, slot] = torch.where(local, head, 0).to(self.head)
        self.direction[:, slot] = torch.where(local[:, None], direction, 0.0).to(self.direction)
        self.offset[:, slot] = offset.to(self.offset)

    def start(self, rows: Tensor | None) -> None:
        """Have the next forward pass keep these rows [n] in each of its layers; None: it keeps
        nothing."""
        before = self._count
        self._count = 0 if rows is None else len(rows)
        self._calls = 0
        self._parts = []
        if self._rows and before:
            # a graph keeps as many as it was captured for: each has to be in every step
            self._places[:, :before] = 0
        if not self._rows:
            self._kept = None
        if rows is None:
            return
        indices = rows[None, :, None].expand(len(self.layers), -1, 1)
        if not self.whole:
            indices = indices * self.heads[1] + self.head[:, None]
        if not self._rows:
            self._places = indices
            return
        self._places[:, : self._count] = indices
        if self._kept is not None:
            self._kept[:, : self._count] = math.nan  # as it stays where a graph keeps nothing

    def keep(self, states: Tensor, residual: Tensor | None = None) -> None:
        """Keep the next layer's rows of ``states`` [tokens, ..], or of its sum with
        ``residual``."""
        count = self._count
        if self._rows and captured(states):
            count = min(self._rows, states.numel() // self.width)  # what a replay may be asked for
        if not (count or (self._rows and self._kept is None)):
            return
        parts = [part.reshape(-1, self._unit) for part in (states, residual) if part is not None]
        if self._kept is None:
            dtype = parts[0].dtype if residual is None else torch.result_type(*parts)
            size = len(self.layers), self._rows or count, self._places.shape[2], self._unit
            with torch.inference_mode(False):  # which it outlives
                self._kept = torch.empty(size, dtype=dtype, device=states.device)
        if not count:
            return
        layer, self._calls = self._calls % len(self.layers), self._calls + 1
        if not self._parts or layer == 0:  # at once for all layers
            both = self._places[:, :count].flatten(1), self._kept[:, :count].flatten(1, 2)
            self._parts = list(zip(*(part.unbind() for part in both), strict=True))
        indices, target = self._parts[layer]
        if residual is None:
            torch.index_select(parts[0], 0, indices, out=target)
        else:
            torch.add(*(part.index_select(0, indices) for part in parts), out=target)

    def _step(self) -> Tensor | None:
        """Return what was kept of the step; None unless every layer was kept once, or a captured
        graph may have."""
        is_whole = self._calls == len(self.layers) or (self._rows > 0 and self._calls == 0)
        return self._kept[:, : self._count] if is_whole and self._kept is not None else None

    def read(self) -> Tensor:
        """Return truth logits [layers, n, slots] at the step's rows; NaN unless every layer was
        kept once."""
        step, count = self._step(), self._count
        if step is None:
            return self.offset.new_full((len(self.layers), count, self.offset.shape[1]), math.nan)
        heads = step.reshape(len(self.layers), count, -1, self.dim)
        if self.whole and self.heads[1] > 1:
            heads = heads.gather(2, self.head[:, None, :, None].expand(-1, count, -1, self.dim))
        return (heads.float() * self.direction[:, None]).sum(-1) + self.offset[:, None]

    def activations(self) -> Tensor:
        """Return what was kept, [layers, n, width] float32."""
        step = self._step()
        if step is None:
            return self.offset.new_full((len(self.layers), self._count, self.width), math.nan)
        return step.flatten(2).float()


# Outputs of modules exist only within the compiled graph, so there an operator that the compiler
# cannot look into hands it over. It is the same in every layer, so that identical layers share one
# compiled artifact, as in bare vLLM.
KEEP = "hallutracer::keep_residual"
_library = torch.library.Library("hallutracer", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "keep_residual(Tensor hidden, Tensor? residual, Tensor(a!) order, int site) -> ()"
)
_sites: list[SiteReadout] = []


def _keep_residual(hidden: Tensor, residual: Tensor | None, order: Tensor, site: int) -> None:
    """Say that it changes ``order``, which keeps the calls in the order of the layers."""
    if hidden.shape[-1] != _sites[site].width:
        raise EngineError(
            f"a block hands on {hidden.shape[-1]} numbers, not hidden states of"
            f" {_sites[site].width}"
        )
    _sites[site].keep(hidden, residual)


_library.impl(  # type: ignore[no-untyped-call]
    "keep_residual", _keep_residual, "CompositeExplicitAutograd"
)
torch.library.register_fake(KEEP, lambda hidden, residual, order, site: None)


def install(
    model: nn.Module,
    family: Family,
    plan: Plan,
    rank: int,
    ranks: int,
    device: torch.device,
    dtype: torch.dtype,
    rows: int = 0,
) -> dict[Site, SiteReadout]:
    """Add the readout to a model that computes in ``dtype``.  Raises EngineError if it contradicts
    its family.

    ``rows``: as ``SiteReadout`` takes it."""
    like = torch.empty(0, dtype=dtype, device=device)
    blocks = blocks_of(model, family, plan.geometry.num_layers)
    layers = range(min(blocks), max(blocks) + 1)
    readouts: dict[Site, SiteReadout] = {}
    for site in plan.sites:
        heads, where = (0, 1), SITES[site]
        if where.is_input:
            count = _local_heads(blocks, plan.geometry, ranks, family)
            heads = (rank * count if count < plan.geometry.num_heads else 0, count)
        readouts[site] = SiteReadout(
            plan, site, layers, heads, leading=rank == 0, device=device, rows=rows
        )
        if where.is_input:
            for layer in layers:
                attention = _checked_attention(
                    blocks[layer], family, layer, plan.geometry.hidden_size, like
                )
                _read_attention(attention, readouts[site])
            continue
        summed = _stream_is_sum(model, blocks, family, plan.geometry, like)
        _sites.append(readouts[site])
        order = torch.zeros(1, device=device)
        for layer in layers:
            _read_output(
                blocks[layer].get_submodule(where.path(family) or ""),
                len(_sites) - 1,
                order,
                summed=summed,
            )
    return readouts


def _language(model: Any) -> nn.Module:
    if hasattr(model, "get_language_model"):
        model = model.get_language_model()
    return model  # type: ignore[no-any-return]


def blocks_of(model: nn.Module, family: Family, num_layers: int) -> dict[int, nn.Module]:
    """Return this rank's blocks by layer, also inside modules that vLLM's backends add.  Raises
    EngineError."""
    _, blocks = block_list(_language(model), num_layers, f"{family.name} in vLLM")
    return {
        layer: block
        for layer, block in enumerate(blocks)
        if type(block).__name__ != "PPMissingLayer"
    }


def _stream_is_sum(
    model: nn.Module, blocks: dict[int, nn.Module], family: Family, geometry: Geometry, like: Tensor
) -> bool:
    """Return whether the residual stream is the sum of two tensors that a block returns, or else
    the first.

    Runs the decoder with its blocks replaced: each must be given what the one before returned, and
    what follows the last must read their sum alone, or the first alone.  Raises EngineError where
    it is otherwise."""
    if family.summed is not None:
        return family.summed
    decoder, _ = block_list(_language(model), geometry.num_layers, family.name)
    takes = inspect.signature(type(decoder).forward).parameters
    calls = list[list[Any]]()
    returned = list[list[Tensor]]()
    # norms take lines for one another
    angles = torch.linspace(0, 99, TOKENS * geometry.hidden_size).view(TOKENS, -1)
    positions = torch.arange(TOKENS, device=like.device)
    if "attention_mask" in takes:  # transformers' own module, which vLLM's backend for it runs
        angles, positions = angles[None], positions[None]
    sines, cosines = angles.sin().to(like), angles.cos().to(like)
    values = {
        "input_ids": None,
        "positions": positions,
        "position_ids": positions,
        "intermediate_tensors": None,
        "use_cache": False,
    }

    def run(*parts: Tensor) -> Tensor:
        def stub(*args: Any, **kwargs: Any) -> Any:
            calls.append([*args, *kwargs.values()])
            returned.append([part.clone() for part in parts])
            return tuple(returned[-1]) if len(parts) > 1 else returned[-1][0]

        calls.clear()
        returned.clear()
        values["inputs_embeds"] = sines.clone()  # which some scale in place
        for block in blocks.values():
            block.forward = stub
        try:
            with torch.inference_mode():
                output = type(decoder).forward(
                    decoder, **{name: values[name] for name in takes if name in values}
                )
        finally:
            for block in blocks.values():
                del block.forward
        return output if isinstance(output, Tensor) else output[0]

    def handed_on() -> bool:
        def gets(call: list[Any], part: Tensor) -> bool:
            return any(received is part for received in call)

        after = zip(returned, calls[1:], strict=False)
        given_on = [gets(next_call, part) for parts, next_call in after for part in parts]
        return len(calls) == geometry.num_layers > 1 and all(given_on)

    problem, pair = "returns neither one tensor nor two that the next is given", None
    try:
        with suppress(Exception):  # of what takes one tensor and is given two
            pair = run(sines, cosines)
        if pair is not None and handed_on():
            whole, first = (
                torch.allclose(pair, run(*pair_read), atol=0.05)
                for pair_read in ((sines + cosines, 0 * cosines), (sines, 0 * cosines))
            )
            if whole != first:
                return whole
            problem = "returns two tensors of which neither the sum nor the first is read"
        else:
            run(sines)
            problem = "" if handed_on() else problem
    except Exception as error:  # whatever a kernel raises
        problem += f" ({type(error).__name__}: {error})"
    if problem or len(blocks) < geometry.num_layers:
        raise EngineError(
            f"{family.name}: a block of vLLM's {type(model).__name__}"
            f" {problem or 'cannot be checked across pipeline stages'}; use --engine transformers"
        )
    return False


def _local_heads(
    blocks: dict[int, nn.Module], geometry: Geometry, tp_size: int, family: Family
) -> int:
    """Return the number of QUERY heads on this rank.  Raises EngineError if a projection's width
    does not fit them."""
    heads, head_dim = geometry.num_heads, geometry.head_dim
    for layer, block in blocks.items():
        projection = block.get_submodule(family.in_vllm or family.projection)
        width: Any = getattr(projection, "input_size_per_partition", None) or getattr(
            projection, "input_size", None
        )
        if width not in (heads * head_dim, heads * head_dim // tp_size) or width % head_dim:
            raise EngineError(
                f"{family.name}: layer {layer}'s {family.projection} takes {width} inputs on one"
                f" of {tp_size} ranks, not {heads} heads of {head_dim}; use --engine transformers"
            )
    return int(width) // head_dim


class _Reached(Exception):
    """The output projection was called."""


def _checked_attention(
    block: nn.Module, family: Family, layer: int, hidden_size: int, like: Tensor
) -> Any:
    """Return vLLM's attention layer, whose result must be what the output projection is given, else
    raise EngineError.

    Runs the block with its attention replaced, in the dtype and on the device of ``like``, which
    finds gates and norms.
    """
    path, _, name = (family.in_vllm or family.projection).rpartition(".")
    parent: Any = block.get_submodule(path)
    projection = parent.get_submodule(name)

    def refused(problem: str) -> EngineError:
        return EngineError(f"{family.name}: layer {layer}{problem}; use --engine transformers")

    layers: list[Any] = [
        module
        for module in parent.modules()
        if hasattr(module, "impl") and hasattr(module, "layer_name")
    ]
    if len(layers) != 1 or getattr(layers[0], "use_direct_call", False):
        raise refused(
            f" has {len(layers)} attention layers that are read between pieces of the graph, not"
            " one"
        )
    [attention] = layers
    size = (
        getattr(attention, "v_head_dim", None)
        or getattr(attention, "head_size_v", None)
        or attention.head_size
    )
    width = attention.num_heads * size
    attended = torch.linspace(-1, 1, TOKENS * width).view(TOKENS, width).to(like)
    received: list[Tensor] = []

    def projected(states: Tensor, *args: Any, **kwargs: Any) -> Any:
        received.append(states)
        raise _Reached

    # Adapters' wrappers, which compute with tables that a step of the runner writes.
    wrappers: list[Any] = [module for module in parent.modules() if hasattr(module, "base_layer")]
    hidden = torch.linspace(-1, 1, TOKENS * hidden_size).view(TOKENS, -1).to(like)
    positions = torch.arange(TOKENS, device=like.device)
    values: dict[str, Any] = {"positions": positions, "hidden_states": hidden, "residual": None}
    takes = inspect.signature(parent.forward).parameters
    if "position_embeddings" in takes:  # transformers' own module, which vLLM's backend for it runs
        ones = hidden.new_ones(1, TOKENS, 1)
        values = {
            "hidden_states": hidden[None],
            "position_embeddings": (ones, 0 * ones),
            "attention_mask": None,
        }
    for wrapper in wrappers:
        wrapper.forward = wrapper.base_layer.forward
    attention.forward, projection.forward = lambda *args, **kwargs: attended, projected
    try:
        with torch.inference_mode(), suppress(_Reached):
            parent(**{name: value for name, value in values.items() if name in takes})
    except Exception as error:  # whatever a kernel raises
        raise refused(
            f"'s attention block cannot be checked: {type(error).__name__}: {error}"
        ) from error
    finally:
        for changed in {attention, projection, *wrappers}:
            del changed.forward
    if (
        len(received) != 1
        or received[0].numel() != attended.numel()
        or not torch.equal(received[0].reshape(attended.shape), attended)
    ):
        raise refused(f"'s {family.projection} does not read its attention's result as it is")
    return attention


def _read_attention(attention: Any, site: SiteReadout) -> None:
    # Latent attention makes its heads from its implementation's results.
    owner, name = (
        (attention, "forward_impl")
        if hasattr(attention, "forward_impl")
        else (attention.impl, "forward")
    )
    forward = getattr(owner, name)

    def reading(*args: Any, output: Tensor, **kwargs: Any) -> Any:
        result = forward(*args, output=output, **kwargs)
        if kwargs.get("output_scale") is None:
            # quantized results are not what the probes were trained on
            site.keep(output)
        return result

    setattr(owner, name, reading)


def _read_output(module: nn.Module, site: int, order: Tensor, *, summed: bool) -> None:
    """Make ``module`` an instance of a subclass with the readout; its parameters and their names do
    not change."""
    base: Any = type(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.forward(self, *args, **kwargs)
        # vLLM's blocks return (hidden states, residual) and leave the addition to the next block's
        # norm.
        hidden, residual = output if isinstance(output, tuple) else (output, None)
        torch.ops.hallutracer.keep_residual(
            hidden, residual if summed else None, self.hallutracer_order, site
        )
        return output

    module.register_buffer("hallutracer_order", order, persistent=False)
    module.__class__ = type(f"Reading{base.__name__}", (base,), {"forward": forward})
