"""Padded micro-batches of prompts, and the activations that hooks take from their forward passes.

A *sink* takes the activations at t* [batch, width], views in the model's dtype that are valid only
during the call: ``TruthLogits`` computes one number per probe from them (Eq. logit),
``ActivationBuffer`` keeps them for training."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from os.path import commonprefix
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from service.engines.base import PrefillResult, TokenIds
from service.engines.chat import Message
from service.engines.checks import check_probe, first_token_of
from service.engines.families import SITES, ModelModules, geometry, text_config
from service.errors import EngineError, ModelLoadError, NonFiniteReadout, RequestError
from service.readout import Geometry, Probes, Site

SAME = 0.02  # of the largest number: two kernels' roundings of one thing, in half types, too
MIN_PREFIX = 8  # tokens; shorter beginnings are not worth a cache
# RoPE variants whose frequencies follow the longest position in the batch.
LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "dynamic"})
# Else a large model's cache would take as much memory as its weights: of 7B with 8 key-value heads
# 4 GiB instead of 14.
MAX_DECODE_TOKENS = 32_768
# ``PassCost`` on a CPU: torch's kernel takes an operation of attention about twice as slowly as a
# product of matrices, and each pass copies all kept keys and values of each layer (the cache grows,
# key-value heads are repeated).
CPU_ATTENTION, CPU_COPIED = 2.0, 40.0


@dataclass(frozen=True)
class Batch:
    """Prompts padded behind their ends to one length: causal attention alone hides the padding."""

    index: tuple[int, ...]
    lengths: tuple[int, ...]
    input_ids: Tensor  # [batch, columns]
    position_ids: Tensor | None = None  # None: by the columns
    prefix: int = 0  # tokens before the first column, whose keys and values are there already

    @property
    def prompt_tokens(self) -> list[int]:
        """Tokens of each row's whole prompt."""
        return [self.prefix + length for length in self.lengths]

    @property
    def onsets(self) -> list[int]:
        """Column of t* per row."""
        return [length - 1 for length in self.lengths]


def micro_batches(
    lengths: Sequence[int], budget: int, *, equal_lengths: bool = False
) -> list[list[int]]:
    """Group by length: rows x longest <= budget, or one prompt.  ``equal_lengths`` forbids padding
    (longrope)."""
    groups: list[list[int]] = []
    for index in sorted(
        range(len(lengths)), key=lengths.__getitem__
    ):  # ascending: the newest is the longest
        current = groups[-1] if groups else []
        fits = bool(current) and (len(current) + 1) * lengths[index] <= budget
        if fits and not (equal_lengths and lengths[index] != lengths[current[0]]):
            current.append(index)
        else:
            groups.append([index])
    return groups


def pad(
    prompts: Sequence[TokenIds],
    index: Sequence[int],
    filler: int,
    device: torch.device,
    prefix: int = 0,
) -> Batch:
    """Make a micro-batch of ``prompts[i] for i in index`` without their first ``prefix`` tokens."""
    beyond_prefix = [prompts[i][prefix:] for i in index]
    lengths = [len(prompt) for prompt in beyond_prefix]
    ids = np.full((len(index), max(lengths)), filler, np.int64)
    for row, prompt in enumerate(beyond_prefix):
        ids[row, : len(prompt)] = prompt
    input_ids = torch.from_numpy(ids).to(device)
    return Batch(tuple(index), tuple(lengths), input_ids, prefix=prefix)


@functools.cache
def _cache_argument(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def with_cache(model: Any, key_value_cache: Any) -> dict[str, Any]:
    """Return the arguments with which ``model`` uses a cache and extends it.

    transformers 5.24 calls it ``cache``; older versions, and the code that comes with a model,
    ``past_key_values``."""
    return {_cache_argument(type(model).forward): key_value_cache, "use_cache": True}


def inputs_of(model: Any, batch: Batch, key_value_cache: Any) -> dict[str, Any]:
    """Return what the model is called with, ``key_value_cache`` None: without one."""
    positions = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
    cached = {"use_cache": False} if key_value_cache is None else with_cache(model, key_value_cache)
    return {"input_ids": batch.input_ids} | positions | cached


@dataclass(frozen=True)
class PassCost:
    """What a pass behind kept tokens costs, in tokens of a pass that has none to attend to."""

    # kept tokens to which a token's attention takes as many operations as the weights' products
    doubled_at: float
    attention: float = 1.0  # how long one of attention's operations takes, over one of those
    copied: float = 0.0  # of ``doubled_at`` kept tokens, however few tokens the pass has

    def of(self, tokens: int, cached: int) -> float:
        """Return the cost of a pass of so many tokens behind ``cached``."""
        return tokens * self._of_token(cached) + self._of_copies(cached)

    def of_pass(self, tokens: int, cached: int) -> float:
        """Return the same with what its tokens attend to among themselves: half of them on
        average."""
        return self.of(tokens, cached + tokens // 2)

    def most_tokens(self, most: int, cached: int) -> int:
        """Return how many tokens behind ``cached`` cost as much as ``most`` behind none.

        Where copying alone takes more than half of that, as many as cost the same as the copying:
        fewer would read on for little else."""
        copies = self._of_copies(cached)
        return min(most, max(1, int(max(most - copies, copies) / self._of_token(cached))))

    def _of_token(self, cached: int) -> float:
        return 1 + self.attention * cached / self.doubled_at

    def _of_copies(self, cached: int) -> float:
        return self.copied * cached / self.doubled_at


def pass_cost(modules: ModelModules, device: torch.device) -> PassCost:
    """Return what passes of a model cost, from its shape and, on a CPU, from measurements of
    SmolLM2."""
    weights = sum(parameter.numel() for block in modules.blocks for parameter in block.parameters())
    shape = modules.geometry
    doubled_at = weights / (2 * shape.num_layers * shape.num_heads * shape.head_dim)
    if device.type != "cpu":
        return PassCost(doubled_at)
    return PassCost(doubled_at, CPU_ATTENTION, CPU_COPIED)


def pass_ends(columns: int, prefix: int, most: int, cost: PassCost) -> list[int]:
    """Return where the passes over so many columns behind ``prefix`` tokens begin, and 0 < the end
    of the last one.

    Each takes about as long as one of ``most`` columns behind nothing: all tokens before it are
    attended to."""
    ends = [0]
    while (left := columns - ends[-1]) > 0:
        size = cost.most_tokens(most, prefix + ends[-1])
        if size < left < 2 * size:
            size = -(-left // 2)  # so that the last one is no single token
        ends.append(ends[-1] + min(size, left))
    return ends


def chunks(batch: Batch, most: int, cost: PassCost) -> list[Batch]:
    """Cut a micro-batch of one prompt into such of at most ``most`` columns, which follow each
    other in one cache, at ``pass_ends``."""
    columns = batch.input_ids.shape[1]
    ends = pass_ends(columns, batch.prefix, most, cost)
    positions = torch.arange(batch.prefix, batch.prefix + columns, device=batch.input_ids.device)[
        None
    ]
    return [
        replace(
            batch,
            lengths=(end - start,),
            input_ids=batch.input_ids[:, start:end],
            position_ids=positions[:, start:end],
            prefix=batch.prefix + start,
        )
        for start, end in pairwise(ends)
    ]


def chat_prefix(render_chat: Callable[[Sequence[Message]], list[int]]) -> tuple[int, ...]:
    """Return the tokens with which every chat of one user message begins; () without a template, or
    where few."""
    try:
        same = commonprefix(
            [render_chat([{"role": "user", "content": content}]) for content in ("a", "0")]
        )
    except RequestError:
        return ()
    return tuple(same) if len(same) >= MIN_PREFIX else ()


class Prefix:
    """The beginning's tokens and, once it was run, its keys and values: the same in front of every
    prompt."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self._layers: list[tuple[Tensor, Tensor]] = []  # [1, heads, tokens, head_dim] each

    def begins(self, prompt: TokenIds) -> bool:
        """Return whether ``prompt`` begins with it and goes on."""
        return (
            bool(self.tokens)
            and len(prompt) > len(self.tokens)
            and tuple(prompt[: len(self.tokens)]) == self.tokens
        )

    def cache(self, model: Any, rows: int, device: torch.device) -> DynamicCache:
        """Return a new cache for ``rows`` prompts that holds the beginning.  Runs the model at the
        first call."""
        if not self._layers:
            key_value_cache: Any = DynamicCache()
            ids = torch.tensor([self.tokens], device=device)
            model(input_ids=ids, logits_to_keep=1, **with_cache(model, key_value_cache))
            self._layers = [(layer.keys, layer.values) for layer in key_value_cache.layers]
        cache = DynamicCache()
        for number, (keys, values) in enumerate(self._layers):
            cache.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1), number)
        return cache


def has_windows(config: Any) -> bool:
    """Return whether some layer sees a window only or is recurrent: its cache is not the whole
    beginning."""
    cache: Any = DynamicCache(config=config)
    # without the attribute: recurrent
    return any(getattr(layer, "is_sliding", True) for layer in cache.layers)


def is_recurrent(config: Any) -> bool:
    """Return whether some layer keeps a state that is not made of tokens."""
    cache: Any = DynamicCache(config=config)
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return those of all layers, then those of each type of layers."""
    parameters = getattr(text_config(config), "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]


def depends_on_longest(config: Any) -> bool:
    """Return whether the encoding of positions depends on the batch's longest prompt (Phi-3's
    longrope)."""
    kinds = (entry.get("rope_type") for entry in _rope_parameters(config))
    return not LENGTH_DEPENDENT_ROPE.isdisjoint(kinds)


def longest_in_chunks(config: Any, *, whole: bool) -> float:
    """Return how many tokens a prompt may have that is read in several passes, one behind the
    other's cache.

    ``whole``: as its family has it.  Where the encoding ``depends_on_longest``, one pass encodes
    all positions by the longest of them, and several would not beyond the length from which on it
    is another."""
    if whole:
        return 0
    if not depends_on_longest(config):
        return math.inf
    entries = [vars(text_config(config)), *_rope_parameters(config)]
    names = ("original_max_position_embeddings", "max_position_embeddings")
    return min(
        int(entry[name]) for entry in entries for name in names if entry.get(name) is not None
    )


def kv_bytes(model: Any) -> int:
    """Return how many bytes the keys and values of a token take, in all layers."""
    shape = geometry(model.config)
    kv_heads = getattr(text_config(model.config), "num_key_value_heads", None) or shape.num_heads
    element: int = next(model.parameters()).element_size()
    return 2 * shape.num_layers * int(kv_heads) * shape.head_dim * element


def tokens_worth_the_weights(model: Any) -> int:
    """Return how many tokens' keys and values are as large as the weights: larger batches cost
    twice."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return min(MAX_DECODE_TOKENS, int(weights // kv_bytes(model)))


def context_length(config: Any) -> int:
    """Return the longest sequence that the model supports.  Raises ModelLoadError if the config
    lacks it."""
    length = getattr(text_config(config), "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelLoadError(
            "config.json has no max_position_embeddings, by which long prompts are refused; add it"
        )
    return length


def end_tokens(model: Any) -> frozenset[int]:
    """Return the tokens that end an answer: from the generation config if it has any, else from the
    config.

    What is no token's number (a file may hold anything: an empty list, -1, a text) says nothing of
    the end."""
    for config in (
        getattr(model, "generation_config", None),
        model.config,
        text_config(model.config),
    ):
        end_tokens = getattr(config, "eos_token_id", None)
        listed = end_tokens if isinstance(end_tokens, list | tuple) else [end_tokens]
        if tokens := frozenset(int(token) for token in listed if _is_token(token)):
            return tokens
    return frozenset()


def _is_token(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value >= 0 and float(value).is_integer()


Tensor = torch.Tensor


class LastReadout(Exception):  # noqa: N818 - not an error: it ends a forward pass early
    """Raised by the last hook, so that nothing runs after the last readout."""


def at_onsets(positions: Sequence[int], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return what selects t*, [batch, width] of [batch, positions, width]."""
    if len(set(positions)) == 1:  # one column: a view, no gather
        return lambda states: states.select(1, positions[0])
    batch = torch.arange(len(positions), device=device)
    columns = torch.tensor(positions, device=device)
    return lambda states: states[batch, columns]


def over_last(ends: Sequence[int], counts: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return what averages so many positions up to ``ends``, float32 [batch, width] of
    [batch, positions, width]."""
    spans = [slice(end + 1 - count, end + 1) for end, count in zip(ends, counts, strict=True)]
    return lambda states: torch.stack(
        [states[row, span].float().mean(dim=0) for row, span in enumerate(spans)]
    )


class ProbeStack:
    """Several bundles' probes on the device: one weight [m, width, P] per site, zero outside a
    probe's head."""

    def __init__(self, probes: Sequence[Probes], geometry: Geometry, device: torch.device) -> None:
        self.probes = tuple(probes)
        self.sites = tuple(sorted({probe.site for probe in probes}, key=list(Site).index))
        self.columns: dict[Site, list[int]] = {site: [] for site in self.sites}
        for column, probe in enumerate(probes):
            self.columns[probe.site].append(column)
        self.weights = {site: self._weights(site, geometry, device) for site in self.sites}
        shape = geometry.num_layers, 1, 1
        none = np.empty((geometry.num_layers, 1, 0))
        biases = [probe.bias.astype(np.float64).reshape(shape) for probe in probes]
        scales = [probe.scale.astype(np.float64).reshape(shape) for probe in probes]
        # [m, 1, P] in float64, applied after the transfer from the device
        self._bias = np.concatenate([none, *biases], axis=-1)
        self._scale = np.concatenate([none, *scales], axis=-1)

    def _weights(self, site: Site, geometry: Geometry, device: torch.device) -> list[Tensor]:
        layers, dim = geometry.num_layers, geometry.dim(site)
        dense = np.zeros((layers, geometry.width(site), len(self.columns[site])), np.float32)
        for column, index in enumerate(self.columns[site]):
            probe = self.probes[index]
            check_probe(probe, geometry)
            for layer, head in enumerate(probe.head):
                dense[layer, head * dim : (head + 1) * dim, column] = probe.direction[layer]
        return list(torch.from_numpy(dense).to(device).unbind(0))

    def finish(self, sums: dict[Site, NDArray[np.float32]]) -> NDArray[np.float64]:
        """Return truth logits [m, n, P] in the order of ``probes`` (Eq. logit) of products per site
        [m, n, P_site]."""
        first = next(iter(sums.values()))
        logits = np.empty((*first.shape[:2], len(self.probes)), np.float64)
        for site, columns in self.columns.items():
            logits[:, :, columns] = sums[site]
        return np.asarray((logits + self._bias) / self._scale, np.float64)


class TruthLogits:
    """The sink for scoring: one product per layer into a preallocated buffer on the device."""

    def __init__(self, stack: ProbeStack, batch: int, device: torch.device) -> None:
        self._stack = stack
        self.sites = stack.sites
        self.buffers = {
            site: torch.empty(
                len(weights), batch, weights[0].shape[1], dtype=torch.float32, device=device
            )
            for site, weights in stack.weights.items()
        }
        self._layers = {site: buffer.unbind(0) for site, buffer in self.buffers.items()}

    def take(self, site: Site, layer: int, activations: Tensor) -> None:
        """Compute v_l . a_l in float32 for all probes at once."""
        torch.mm(
            activations.float(), self._stack.weights[site][layer], out=self._layers[site][layer]
        )


class ActivationBuffer:
    """The sink for training: keeps activations, [m, batch, width] float32 per site."""

    def __init__(
        self, sites: Sequence[Site], geometry: Geometry, batch: int, device: torch.device
    ) -> None:
        self.sites = tuple(sites)
        self.buffers = {
            site: torch.empty(
                geometry.num_layers, batch, geometry.width(site), dtype=torch.float32, device=device
            )
            for site in self.sites
        }

    def take(self, site: Site, layer: int, activations: Tensor) -> None:
        """Copy the activations, before the model may overwrite them."""
        self.buffers[site][layer].copy_(activations)


Sink = TruthLogits | ActivationBuffer


@contextmanager
def ended_after(block: torch.nn.Module) -> Iterator[None]:
    """End a forward pass with LastReadout behind ``block``: what comes then is for the answer
    only."""

    def hook(_module: torch.nn.Module, *_: Any) -> None:
        raise LastReadout

    handle = block.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def reading(
    modules: ModelModules,
    head: torch.nn.Module,
    sink: Sink,
    onset: Callable[[Tensor], Tensor],
    *,
    stop: bool,
) -> Iterator[None]:
    """Attach one forward pass's hooks at the sink's sites; with ``stop``, the last readout raises
    LastReadout.

    Without it the head gets the hidden states at t* only: logits are [batch, 1, vocab] in every
    family."""
    left = set(sink.sites)  # to be read in the last layer

    def reader(site: Site, layer: int) -> Any:
        def hook(_module: torch.nn.Module, *tensors: Tensor | tuple[Tensor, ...]) -> None:
            states = tensors[-1]  # a module's output, or its inputs
            sink.take(site, layer, onset(states[0] if isinstance(states, tuple) else states))
            if stop and layer == modules.geometry.num_layers - 1:
                left.remove(site)
                if not left:
                    raise LastReadout

        return hook

    def before_head(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        # A view into all positions would have torch multiply each row apart, in bfloat16 by its own
        # copy of the weight.
        return (onset(inputs[0]).unsqueeze(1).contiguous(),)

    handles = []
    try:
        for site in sink.sites:
            for layer, module in enumerate(modules.at[site]):
                hook = reader(site, layer)
                handles.append(
                    module.register_forward_pre_hook(hook)
                    if SITES[site].is_input
                    else module.register_forward_hook(hook)
                )
        if not stop:
            handles.append(head.register_forward_pre_hook(before_head))
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_decoder(model: Any, modules: ModelModules, name: str, device: torch.device) -> None:
    """Raise EngineError unless the blocks are a causal decoder's, whose residual stream is what
    each hands on.

    Runs two prompts of three tokens that differ in the last one, and one of them in two steps with
    a cache."""
    # block, what it was given, what it made
    called: list[tuple[torch.nn.Module, Tensor, Tensor]] = []

    def record(block: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        called.append((block, states, output[0] if isinstance(output, tuple) else output))

    def same(first_states: Tensor, second_states: Tensor) -> bool:
        return first_states.shape == second_states.shape and float(
            (first_states - second_states).abs().max()
        ) <= SAME * float(first_states.abs().max())

    ids, shape = torch.tensor([[0, 1, 2], [0, 1, 3]], device=device), modules.geometry
    handles = [block.register_forward_hook(record, with_kwargs=True) for block in modules.blocks]
    try:
        with torch.inference_mode():
            whole = model(input_ids=ids, use_cache=False, output_hidden_states=True)
            seen, cached = called[:], with_cache(model, DynamicCache(config=model.config))
            model(input_ids=ids[:1, :2], **cached)
            third = torch.tensor([[2]], device=device)
            stepped = model(input_ids=ids[:1, 2:], position_ids=third, **cached).logits[:, -1]
    except Exception as error:  # whatever a model's own code raises
        raise EngineError(
            f"{name}: {type(model).__name__} does not run as a decoder ({error})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    outputs = [output for _, _, output in seen]
    # by transformers' account; the last is behind a norm
    reported = getattr(whole, "hidden_states", None) or ()
    for holds, problem in (
        (
            [block for block, _, _ in seen] == [*modules.blocks],
            "does not run each of its blocks once, in their order",
        ),
        (
            all(states.shape == (*ids.shape, shape.hidden_size) for states in outputs),
            f"has blocks that do not hand on hidden states of size {shape.hidden_size}",
        ),
        (
            all(
                torch.equal(received, before)
                for before, (_, received, _) in zip(outputs, seen[1:], strict=False)
            ),
            "has blocks that are not given what the block before made",
        ),
        (
            len(reported) <= shape.num_layers or all(map(same, reported[1:-1], outputs)),
            "has other hidden states than its blocks'",
        ),
        (
            all(
                same(states[0, :2], states[1, :2]) and not same(*states[:, 2]) for states in outputs
            ),
            "has blocks that do not read a prompt from left to right",
        ),
        (
            same(whole.logits[:1, -1], stepped),
            "does not go on from a cache as it reads a whole prompt",
        ),
    ):
        if not holds:
            raise EngineError(
                f"{name}: {type(model).__name__} {problem}; its residual stream cannot be read"
            )


# one micro-batch's, still on the device; [batch, 3] if asked for
Prefilled = tuple[Batch, TruthLogits, Tensor | None]


def prefill_results(stack: ProbeStack, done: Sequence[Prefilled]) -> list[PrefillResult]:
    """Return all micro-batches' results, transferred at once, in the caller's order.  Raises
    NonFiniteReadout."""
    order = [index for batch, _, _ in done for index in batch.index]
    if not order:
        return []
    lengths = [tokens for batch, _, _ in done for tokens in batch.prompt_tokens]
    trajectories: list[tuple[NDArray[np.float64], ...]] = [()] * len(order)
    if stack.probes:
        sums = dict[Site, NDArray[np.float32]]()
        for site in stack.sites:
            parts = [sink.buffers[site] for _, sink, _ in done]
            sums[site] = torch.cat(parts, dim=1).cpu().numpy()
        logits = stack.finish(sums)  # [m, n, P]
        refuse_non_finite(logits, order, "truth logit")
        trajectories = [
            tuple(of_prompt) for of_prompt in np.ascontiguousarray(logits.transpose(1, 2, 0))
        ]
    summaries = [summary for _, _, summary in done if summary is not None]
    first = (
        list(map(first_token_of, torch.cat(summaries).cpu().numpy()))
        if summaries
        else [None] * len(order)
    )
    # ``argsort`` is the inverse permutation.
    return [PrefillResult(trajectories[row], first[row], lengths[row]) for row in np.argsort(order)]


def refuse_non_finite(
    values: NDArray[np.floating], prompts: Sequence[int], what: Site | str
) -> None:
    """Raise NonFiniteReadout naming the layer and prompt of the first number of ``values``
    [m, n, ...] at fault."""
    if np.isfinite(values).all():
        return
    layer, row = (int(axis) for axis in np.argwhere(~np.isfinite(values))[0][:2])
    raise NonFiniteReadout(
        f"layer {layer} gave a NaN or infinity ({what}) for prompt {prompts[row]}; the model"
        " overflowed: load it with dtype bfloat16 or float32, and check its weights and the"
        " bundle's"
    )
