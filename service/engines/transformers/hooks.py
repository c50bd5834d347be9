"""Activations from a running forward pass, through hooks that exist for one call, and the results made of them.

A *sink* takes the activations at t* [batch, width], views in the model's dtype that are valid only during the call:
``TruthLogits`` computes one number per probe from them (Eq. logit), ``ActivationBuffer`` keeps them for training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from service.engines.base import PrefillResult
from service.engines.checks import check_probe, first_token_of
from service.engines.families import SITES, ModelModules
from service.engines.transformers.batching import Batch
from service.errors import NonFiniteReadout
from service.readout import Geometry, Probes, Site

Tensor = torch.Tensor


class LastReadout(Exception):  # noqa: N818 - not an error: it ends a forward pass early
    """Raised by the last hook, so that nothing runs after the last readout."""


class OnsetIndex:
    """Selects t* from [batch, positions, width] tensors."""

    def __init__(self, positions: Sequence[int], device: torch.device) -> None:
        self._common = positions[0] if len(set(positions)) == 1 else None  # one column: a view, no gather
        if self._common is None:
            self._batch = torch.arange(len(positions), device=device)
            self._position = torch.tensor(positions, device=device)

    def of(self, states: Tensor) -> Tensor:
        """Return [batch, width] of [batch, positions, width]."""
        if self._common is not None:
            return states.select(1, self._common)
        return states[self._batch, self._position]


class ProbeStack:
    """Several bundles' probes on the device, one weight [m, width, P] per site.

    A column holds a probe's direction in the slice of its head and zeros elsewhere, so one small matrix product per
    layer serves all probes of a site.
    """

    def __init__(self, probes: Sequence[Probes], geometry: Geometry, device: torch.device) -> None:
        self.probes = tuple(probes)
        self.sites = tuple(site for site in Site if any(probe.site is site for probe in probes))
        self.columns = {site: [i for i, probe in enumerate(probes) if probe.site is site] for site in self.sites}
        self.weights = {site: self._weights(site, geometry, device) for site in self.sites}
        shape = geometry.num_layers, 1, 1
        none = np.empty((geometry.num_layers, 1, 0))
        self._bias, self._scale = (  # [m, 1, P] in float64, applied after the transfer from the device
            np.concatenate([none, *(getattr(one, name).astype(np.float64).reshape(shape) for one in probes)], axis=-1)
            for name in ("bias", "scale")
        )

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
        """Return truth logits [m, n, P] in the order of ``probes`` (Eq. logit) of products per site [m, n, P_site]."""
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
            site: torch.empty(len(weights), batch, weights[0].shape[1], dtype=torch.float32, device=device)
            for site, weights in stack.weights.items()
        }
        self._layers = {site: buffer.unbind(0) for site, buffer in self.buffers.items()}

    def take(self, site: Site, layer: int, activations: Tensor) -> None:
        """Compute v_l . a_l in float32 for all probes at once."""
        torch.mm(activations.float(), self._stack.weights[site][layer], out=self._layers[site][layer])


class ActivationBuffer:
    """The sink for training: keeps activations, [m, batch, width] float32 per site."""

    def __init__(self, sites: Sequence[Site], geometry: Geometry, batch: int, device: torch.device) -> None:
        self.sites = tuple(sites)
        self.buffers = {
            site: torch.empty(geometry.num_layers, batch, geometry.width(site), dtype=torch.float32, device=device)
            for site in self.sites
        }

    def take(self, site: Site, layer: int, activations: Tensor) -> None:
        """Copy the activations, before the model may overwrite them."""
        self.buffers[site][layer].copy_(activations)


Sink = TruthLogits | ActivationBuffer


@contextmanager
def reading(
    modules: ModelModules, head: torch.nn.Module, sink: Sink, onset: OnsetIndex, *, stop: bool
) -> Iterator[None]:
    """Attach the hooks of one forward pass at the sink's sites (``families.SITES``), and remove them in any case.

    With ``stop`` the last readout raises LastReadout.  Without it the language-model head gets only the hidden states
    at t*: logits are [batch, 1, vocab] whatever the prompts' lengths, in every family and with its own soft-capping.
    """
    left = set(sink.sites)  # to be read in the last layer

    def reader(site: Site, layer: int) -> Any:
        def hook(_module: torch.nn.Module, *tensors: Tensor | tuple[Tensor, ...]) -> None:
            given = tensors[-1]  # a module's output, or its inputs
            sink.take(site, layer, onset.of(given[0] if isinstance(given, tuple) else given))
            if stop and layer == modules.geometry.num_layers - 1:
                left.remove(site)
                if not left:
                    raise LastReadout

        return hook

    def before_head(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (onset.of(inputs[0]).unsqueeze(1),)

    handles = []
    try:
        for site in sink.sites:
            for layer, module in enumerate(modules.at[site]):
                attach = module.register_forward_pre_hook if SITES[site].is_input else module.register_forward_hook
                handles.append(attach(reader(site, layer)))
        if not stop:
            handles.append(head.register_forward_pre_hook(before_head))
        yield
    finally:
        for handle in handles:
            handle.remove()


Prefilled = tuple[Batch, TruthLogits, Tensor | None]  # one micro-batch's, still on the device; [batch, 3] if asked for


def prefill_results(stack: ProbeStack, done: Sequence[Prefilled]) -> list[PrefillResult]:
    """Return all micro-batches' results, transferred at once, in the caller's order.  Raises NonFiniteReadout."""
    order = [index for batch, _, _ in done for index in batch.index]
    if not order:
        return []
    lengths = [tokens for batch, _, _ in done for tokens in batch.prompt_tokens]
    trajectories: list[tuple[NDArray[np.float64], ...]] = [()] * len(order)
    if stack.probes:
        sums = {
            site: torch.cat([sink.buffers[site] for _, sink, _ in done], dim=1).cpu().numpy() for site in stack.sites
        }
        logits = stack.finish(sums)  # [m, n, P]
        refuse_non_finite(logits, order, "truth logit")
        trajectories = [tuple(of_prompt) for of_prompt in np.ascontiguousarray(logits.transpose(1, 2, 0))]
    summaries = [summary for _, _, summary in done if summary is not None]
    first = list(map(first_token_of, torch.cat(summaries).cpu().numpy())) if summaries else [None] * len(order)
    # ``argsort`` is the inverse permutation.
    return [PrefillResult(trajectories[row], first[row], lengths[row]) for row in np.argsort(order)]


def refuse_non_finite(values: NDArray[np.floating], prompts: Sequence[int], what: Site | str) -> None:
    """Raise NonFiniteReadout naming the layer and prompt of the first number of ``values`` [m, n, ...] at fault."""
    if np.isfinite(values).all():
        return
    layer, row = (int(axis) for axis in np.argwhere(~np.isfinite(values))[0][:2])
    raise NonFiniteReadout(
        f"layer {layer} gave a NaN or infinity ({what}) for prompt {prompts[row]}; the model overflowed: load it with "
        "dtype bfloat16 or float32, and check its weights and the bundle's"
    )
