"""Activations from a running forward pass, through hooks that exist for one call.

A *sink* receives the activations at t*: ``TruthLogits`` computes one number per probe from them (Eq. logit),
``ActivationBuffer`` keeps them for training.  A *states sink* (``pooling``) receives the states of all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from service.engines.families import ModelModules
from service.errors import EngineError
from service.readout import Geometry, Probes, Site

Tensor = torch.Tensor


class LastReadout(Exception):  # noqa: N818 - not an error: it ends a forward pass early
    """Raised by the last hook, so that nothing runs after the last readout."""


class Sink(Protocol):
    """Takes activations at t* as layers run."""

    sites: tuple[Site, ...]  # the sites to read

    def take(self, site: Site, layer: int, activations: Tensor) -> None:
        """``activations`` [batch, width] at t*, in the model's dtype; a view that is valid only during the call."""


class StatesSink(Protocol):
    """Takes the states of all tokens as layers run, at the sites of the sink that it accompanies."""

    def take(self, site: Site, layer: int, states: Tensor) -> None:
        """``states`` [batch, columns, width], padding included, in the model's dtype; valid only during the call."""


class OnsetIndex:
    """Selects t* from [batch, positions, width] tensors."""

    def __init__(self, positions: Sequence[int], device: torch.device) -> None:
        self._common = positions[0] if len(set(positions)) == 1 else None  # one column: a view, no gather
        if self._common is None:
            self._batch = torch.arange(len(positions), device=device)
            self._position = torch.tensor(positions, device=device)

    def of(self, states: Tensor) -> Tensor:
        """[batch, positions, width] -> [batch, width]."""
        if self._common is not None:
            return states.select(1, self._common)
        return states[self._batch, self._position]


class ProbeStack:
    """Several bundles' probes on the device, one weight [m, width, P] per site.

    A column holds a probe's direction in the slice of its head and zeros elsewhere, so one small matrix product per
    layer serves all probes of a site.  Probes on different heads cost the same as probes on one head.
    """

    def __init__(self, probes: Sequence[Probes], geometry: Geometry, device: torch.device) -> None:
        self.probes = tuple(probes)
        self.sites = tuple(site for site in Site if any(probe.site is site for probe in probes))
        self.columns = {site: [i for i, probe in enumerate(probes) if probe.site is site] for site in self.sites}
        self.weights = {site: self._weights(site, geometry, device) for site in self.sites}
        self._bias = _columns([probe.bias for probe in probes], geometry)  # applied after the transfer from the device
        self._scale = _columns([probe.scale for probe in probes], geometry)

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
        """Products per site [m, n, P_site] -> truth logits [m, n, P] in the order of ``probes`` (Eq. logit)."""
        first = next(iter(sums.values()))
        logits = np.empty((*first.shape[:2], len(self.probes)), np.float64)
        for site, columns in self.columns.items():
            logits[:, :, columns] = sums[site]
        return np.asarray((logits + self._bias) / self._scale, np.float64)


def _columns(values: Sequence[NDArray[np.float32]], geometry: Geometry) -> NDArray[np.float64]:
    """One [m] per probe -> [m, 1, P] in float64."""
    columns = [np.asarray(value, np.float64).reshape(geometry.num_layers, 1, 1) for value in values]
    return np.concatenate(columns, axis=-1) if columns else np.empty((geometry.num_layers, 1, 0))


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
        """v_l . a_l in float32 for all probes at once."""
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


@contextmanager
def reading(
    modules: ModelModules,
    head: torch.nn.Module,
    sink: Sink,
    onset: OnsetIndex,
    *,
    stop: bool,
    states_sink: StatesSink | None = None,
) -> Iterator[None]:
    """Attach the hooks of one forward pass, and remove them in any case.

    ``attention_head`` activations are the INPUT of the output projection, ``residual_stream`` ones the block's OUTPUT.
    With ``stop`` the last readout raises LastReadout.  Without it the language-model head gets only the hidden states
    at t*: logits are [batch, 1, vocab] whatever the prompts' lengths, in every family and with its own soft-capping.
    ``states_sink`` gets all positions wherever ``sink`` gets t*.
    """
    last = modules.geometry.num_layers - 1
    stop_at = (Site.RESIDUAL_STREAM if Site.RESIDUAL_STREAM in sink.sites else Site.ATTENTION_HEAD) if stop else None

    def reader(site: Site, layer: int) -> Any:
        ends = stop_at is site and layer == last

        def hook(_module: torch.nn.Module, *tensors: Tensor | tuple[Tensor, ...]) -> None:
            given = tensors[-1]  # a block's output, or a projection's inputs
            states = given[0] if isinstance(given, tuple) else given
            sink.take(site, layer, onset.of(states))
            if states_sink is not None:
                states_sink.take(site, layer, states)
            if ends:
                raise LastReadout

        return hook

    def before_head(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (onset.of(inputs[0]).unsqueeze(1),)

    handles = []
    try:
        if Site.ATTENTION_HEAD in sink.sites:
            for layer, projection in enumerate(modules.projections):
                handles.append(projection.register_forward_pre_hook(reader(Site.ATTENTION_HEAD, layer)))
        if Site.RESIDUAL_STREAM in sink.sites:
            for layer, block in enumerate(modules.blocks):
                handles.append(block.register_forward_hook(reader(Site.RESIDUAL_STREAM, layer)))
        if not stop:
            handles.append(head.register_forward_pre_hook(before_head))
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_probe(probe: Probes, geometry: Geometry) -> None:
    """Raise EngineError, naming the array and both shapes, for probes of another geometry."""
    m, d = geometry.num_layers, geometry.dim(probe.site)
    expected = {"head": (m,), "direction": (m, d), "bias": (m,), "scale": (m,)}
    for name, shape in expected.items():
        if (actual := np.shape(getattr(probe, name))) != shape:
            raise EngineError(
                f"the probes' {name} has shape {actual} where this model needs {shape} at site {probe.site}; "
                "the bundle was fitted on another model or site: load one that matches"
            )
    heads = geometry.heads(probe.site)
    if np.any((probe.head < 0) | (probe.head >= heads)):
        raise EngineError(
            f"the probes' head must lie in [0, {heads}) at site {probe.site}; found {probe.head.tolist()}"
        )
