"""The start-up self-test: each prompt gets its own readout, at t*, with the probe that was written, and answers decode.

It sends random prompts and a random probe through the same requests that serve.  Golden prompts (``Scorer``) then
compare with recorded numbers; the self-test finds what a single recorded prompt cannot show: readouts of another
prompt or of the token before t*, a forward pass without the readout, or one with an earlier probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from service.engines.base import LoadedModel, Sampling, TokenIds
from service.engines.vllm.wire import Plan
from service.errors import EngineError
from service.readout import Probes

# Relative to the largest truth logit: kernels round differently in batches of other shapes.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}


DECODED = (1, 3, 7)  # batch sizes; vLLM pads those between the sizes that it captured


def self_test(engine: LoadedModel, plan: Plan, vocabulary: int) -> None:
    """Raise EngineError naming the property that does not hold."""
    generator = np.random.default_rng(0)
    tolerance = TOLERANCE[str(getattr(engine.identity, "dtype", "float32"))]
    lengths = [2, 5, 3, 40, 1, 17, 2, 9]  # 17: when it is repeated, a cached block, and t* alone like a decoded token
    prompts = [generator.integers(0, vocabulary, length).tolist() for length in lengths]
    changed_end = [*prompts[3][:-1], (prompts[3][-1] + 1) % vocabulary]
    for site in plan.sites:
        direction = generator.normal(size=(plan.geometry.num_layers, plan.geometry.dim(site)))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        layers = plan.geometry.num_layers
        probes = Probes(
            site,
            generator.integers(0, plan.geometry.heads(site), layers),
            direction.astype(np.float32),
            np.zeros(layers, np.float32),
            np.ones(layers, np.float32),
        )
        together = _trajectories(engine, [*prompts, changed_end], probes)
        alone = np.concatenate([_trajectories(engine, [prompt], probes) for prompt in prompts])
        size = float(np.abs(together).max())
        if not size > 0.0:
            raise EngineError(
                f"self-test: the readout at {site} is zero everywhere: no probe was written; install the "
                "supported vLLM version and restart"
            )
        apart = float(np.abs(together[:-1] - alone).max()) / size
        if apart > tolerance:
            raise EngineError(
                f"self-test: a prompt's readout at {site} depends on the other prompts of the batch, by "
                f"{apart:.2g} of its size; rows are mixed up: install the supported vLLM version and restart"
            )
        if np.abs(together[3] - together[-1]).max() <= tolerance * size / 10:
            raise EngineError(
                f"self-test: the readout at {site} does not depend on the prompt's last token: it is read one row "
                "too early; install the supported vLLM version"
            )
        mirrored = _trajectories(engine, prompts[:2], replace(probes, direction=-probes.direction))
        if np.abs(mirrored + alone[:2]).max() > tolerance * size:
            raise EngineError(
                f"self-test: the readout at {site} ignores a change of its probe; clear vLLM's compile cache and "
                "restart"
            )
    for size in DECODED:
        engine.generate(prompts[:size], Sampling(max_tokens=4))  # raises if a step of decoding kills the worker


def _trajectories(engine: LoadedModel, prompts: Sequence[TokenIds], probes: Probes) -> np.ndarray:
    return np.stack([result.trajectories[0] for result in engine.score(prompts, [probes])])
