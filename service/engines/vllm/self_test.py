"""What a started vLLM is tested with: random prompts, and answers to them, read in different
company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from service.engines.base import LoadedModel, Prompts, Sampling, Update
from service.engines.vllm.launch import RANGE
from service.engines.vllm.wire import Plan
from service.errors import EngineError
from service.readout import Probes

# Relative to the largest truth logit: kernels round differently in batches of other shapes.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
# prompts whose end is changed: in a long one it may weigh little, in a short one it does not
ENDS = (0, 2, 3)
DECODED = (1, 3, 7)  # batch sizes; vLLM pads those between the sizes that it captured
DECODE = Sampling(max_tokens=4)


class Answering(LoadedModel, Protocol):
    """An engine that may read answers' own tokens."""

    def read_answers(
        self, prompts: Prompts, probes: Probes, sampling: Sampling
    ) -> Sequence[Update]:
        """Decode an answer to each prompt; return its last update, with what ``probes`` read of its
        own tokens."""


def self_test(engine: Answering, plan: Plan, vocabulary: int) -> None:
    """Raise EngineError unless each prompt gets its own readout, at t*, with the probe written, and
    answers decode.

    Where ``plan`` reads answers' own tokens, their readings have to be those of the same tokens as
    ends of prompts.

    Random prompts show what one recorded (golden) prompt cannot: readouts of another prompt or of
    the token before t*, a forward pass without the readout, or one with an earlier probe."""

    def trajectories(prompts: Prompts, probes: Probes) -> NDArray[np.float64]:
        return np.stack([result.trajectories[0] for result in engine.score(prompts, [probes])])

    def apart(values: NDArray[np.float64], other: NDArray[np.float64]) -> float:
        return float(np.abs(values - other).max())

    generator, geometry = np.random.default_rng(0), plan.geometry
    layers = geometry.num_layers
    # 17: when it is repeated, a cached block, and t* alone like a decoded token
    lengths = [2, 5, 3, 40, 1, 17, 2, 9]
    prompts = [generator.integers(0, vocabulary, length).tolist() for length in lengths]
    changed = [[*prompts[row][:-1], (prompts[row][-1] + 1) % vocabulary] for row in ENDS]
    for site in plan.sites:
        direction = generator.normal(size=(layers, geometry.dim(site)))
        direction = (direction / np.linalg.norm(direction, axis=1, keepdims=True)).astype(
            np.float32
        )
        head = generator.integers(0, geometry.heads(site), layers)
        ones = np.ones(layers, np.float32)
        probes = Probes(site, head, direction, 0 * ones, ones)
        together = trajectories([*prompts, *changed], probes)
        alone = np.concatenate([trajectories([prompt], probes) for prompt in prompts])
        mirrored = trajectories(prompts[:2], replace(probes, direction=-direction))
        size = float(np.abs(together).max())
        most = TOLERANCE[str(getattr(engine.identity, "dtype", "float32"))] * size
        mixed = apart(together[: len(prompts)], alone)
        ends = [
            apart(together[row], other)
            for row, other in zip(ENDS, together[len(prompts) :], strict=True)
        ]
        for holds, problem in (
            (size > 0.0, "is zero everywhere: no probe was written"),
            (
                mixed <= most,
                f"depends on the other prompts of the batch, by {mixed:.2g}: rows are mixed up",
            ),
            (
                min(ends) > most / 100 and max(ends) > most / 10,
                "does not depend on the prompt's last token: it is read one row too early",
            ),
            (
                apart(mirrored, -alone[:2]) <= most,
                "ignores a change of its probe: clear vLLM's compile cache too",
            ),
        ):
            if not holds:
                raise EngineError(
                    f"self-test: the readout at {site} {problem}; install vLLM {RANGE}"
                )
        for rows in DECODED if plan.answers else ():
            _test_answers(engine, prompts[:rows], probes, most)
    for rows in () if plan.answers else DECODED:
        engine.generate(prompts[:rows], DECODE)  # raises if a step of decoding kills the worker


def _test_answers(engine: Answering, prompts: Prompts, probes: Probes, most: float) -> None:
    answered = zip(prompts, engine.read_answers(prompts, probes, DECODE), strict=True)
    ended = [
        (prompt, last.completion, last.answer)
        for prompt, last in answered
        if last.completion and last.answer
    ]
    if not ended:  # each ended with its first token
        return
    texts = [[*prompt, *completion.token_ids[:-1]] for prompt, completion, _ in ended]
    counts = [answer.tokens for *_, answer in ended]
    read = np.stack([answer.trajectory for *_, answer in ended])

    def apart(texts: Prompts) -> float:
        written = [result.trajectories[0] for result in engine.score(texts, [probes], last=counts)]
        return float(np.abs(read - np.stack(written)).max())

    right, early = apart(texts), apart([text[:-1] for text in texts])
    if not (right <= most and right < early / 2):  # nor of a NaN
        raise EngineError(
            f"self-test: what is read of {len(ended)} answers' own tokens at {probes.site} is not"
            f" that of the same text as a prompt, by {right:.2g}; install vLLM {RANGE}"
        )
