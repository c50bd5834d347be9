"""What both backends are asked: prompts, probes and who wants what.  The same on each side, by seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.engines.base import Sampling
from service.readout import Geometry, Probes, Site

PROMPTS = {"llama": 200}  # the family that is run in most ways
FEWER_PROMPTS = 100  # of the others: what differs between families shows in any prompt
LONGEST = 150
TEXT_TOKENS = 94  # printable ASCII: a prompt that ends within a character would begin its answer's text, in vLLM
BUNDLES = 3  # probes at each site, at the same time


@dataclass(frozen=True)
class Question:
    """One prompt and what is wanted of it."""

    prompt: tuple[int, ...]
    bundles: tuple[int, ...]  # whose probes read it, at both sites
    sampling: Sampling | None  # None: the onset is all
    cancelled: bool  # the client leaves after a few tokens


def questions(family: str, seed: int = 5) -> list[Question]:
    """Mixed lengths, some with a beginning in common, two fifths with answers, some of those given up halfway."""
    generator = np.random.default_rng(seed)
    beginnings = [generator.integers(0, TEXT_TOKENS, length).tolist() for length in (64, 96, 100)]
    found = []
    count = PROMPTS.get(family, FEWER_PROMPTS)
    for number in range(count):
        length = 1 + int(generator.integers(0, LONGEST)) if number >= 3 else (1, 2, LONGEST)[number]
        prompt = generator.integers(0, TEXT_TOKENS, length).tolist()
        if number % 4 == 0:
            beginning = beginnings[number // 4 % len(beginnings)]
            prompt = [*beginning, *prompt[: LONGEST - len(beginning)]]
        wanted = tuple(np.flatnonzero(generator.random(BUNDLES) < 0.6).tolist()) or (number % BUNDLES,)
        sampling = Sampling(max_tokens=int(generator.integers(1, 64))) if number % 5 < 2 else None
        found.append(Question(tuple(prompt), wanted, sampling, sampling is not None and number % 15 == 0))
    return found


def repeated(asked: list[Question]) -> list[Question]:
    """Long prompts that are asked once more, when their blocks are in the prefix cache."""
    return [question for question in asked if len(question.prompt) > LONGEST - 20][:4]


def probes(geometry: Geometry, bundle: int) -> list[Probes]:
    """One bundle's probes at every site: random heads, biases and scales."""
    made = []
    for number, site in enumerate(Site):
        generator = np.random.default_rng([bundle, number])
        m, d = geometry.num_layers, geometry.dim(site)
        direction = generator.standard_normal((m, d))
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
        made.append(
            Probes(
                site=site,
                head=generator.integers(0, geometry.heads(site), m),
                direction=direction.astype(np.float32),
                bias=generator.standard_normal(m).astype(np.float32),
                scale=generator.uniform(0.5, 2.0, m).astype(np.float32),
            )
        )
    return made
