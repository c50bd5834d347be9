"""What both engines are compared on: a tiny model of each family on disk, prompts, probes and who
wants what, by seed.

The shapes are those that vLLM's CPU attention takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from service.engines.base import Sampling
from service.engines.families import FAMILIES
from service.readout import Geometry, Probes, Site
from tests.engines import tiny

CONTEXT = 256
HEAD = 32  # the least that vLLM's CPU attention takes
WINDOW = 24  # of the sliding families: several lie within a prompt

SHAPE = {"intermediate_size": 96, "max_position_embeddings": CONTEXT, "initializer_range": 0.08}
BASE: dict[str, Any] = tiny.BASE | SHAPE | {"hidden_size": 128}  # 4 heads x 32
WIDE = BASE | {"hidden_size": 96, "head_dim": HEAD}  # 4 heads x 32 = 128, while hidden is 96


def _gemma2(cap: float | None) -> hf.Gemma2Config:
    given = WIDE | {"sliding_window": WINDOW, "query_pre_attn_scalar": HEAD}
    return hf.Gemma2Config(**given, final_logit_softcapping=5.0, attn_logit_softcapping=cap)


# The cap of Gemma 2's checkpoints, 50, hardly bends the scores of a random model (leaving it out
# changes 0.004 of 8.7, at 5 it changes 0.37), and multiplies what vLLM's tanh on AVX-512 loses by
# 50: 2.3e-5 apart.
CAPPED = {"gemma2": lambda: _gemma2(None), "gemma2_capped": lambda: _gemma2(5.0)}
CONFIGS: dict[str, Any] = tiny.families(BASE, WIDE, WINDOW, 64)[0] | CAPPED
WIDER = 32  # vLLM takes Llama 4's chunks in whole blocks of the cache
_MORE = tiny.families(BASE, WIDE, WIDER, 64)[1]
# vLLM's window is a token wider than transformers' here, so that prompts of more tokens differ.
_NO_WINDOW = {"cohere2": lambda: hf.Cohere2Config(**BASE, sliding_window=CONTEXT)}
MORE: dict[str, Any] = _MORE | _NO_WINDOW  # compared in fewer ways

# Of ``MORE``, what is compared with vLLM.
COMPARED = ("gpt_oss", "glm4", "granite", "cohere2", "falcon", "opt")
TORCHVISION = "its vLLM class needs torchvision, which the CPU install leaves out"
# What vLLM 0.32's CPU build does not run, and why.
NOT_IN_VLLM = {
    "gemma3": TORCHVISION,
    "qwen2_5_vl": TORCHVISION,
    "mistral3": TORCHVISION,
    "qwen3_next": "its kernel on CPUs takes bfloat16 only",
    "bamba": "vLLM has no class for it",
}
BOUNDS: dict[str, float] = {}  # where kernels round more, relative to the largest number


def table() -> list[str]:
    """The rows of docs/vllm-plugin.md's table of families: what the engines read, and what is
    compared here."""
    alike: dict[tuple[str, str], list[str]] = {}
    for family in FAMILIES:
        tried = [name for name in family.model_types if name in CONFIGS or name in MORE]
        compared = any(
            name in COMPARED or (name in CONFIGS and name not in NOT_IN_VLLM) for name in tried
        )
        why = next(
            (f"not run: {NOT_IN_VLLM[name]}" for name in tried if name in NOT_IN_VLLM),
            "not compared",
        )
        heads = f"`{family.projection}`" if family.projection else f"none: {family.notes}"
        alike.setdefault((heads, "compared" if compared else why), []).append(family.name)
    rows = [
        f"| {'; '.join(names)} | {heads} | {tried} |" for (heads, tried), names in alike.items()
    ]
    last = "| any other decoder | none: it has no row | checked at the start; OPT is compared |"
    return [
        "| family | attention heads, at the input of | vLLM |",
        "| --- | --- | --- |",
        *rows,
        last,
    ]


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """A model folder as a user would have one: configuration, float32 weights, tokenizer."""
    torch.manual_seed(seed)
    model = tiny.from_config((CONFIGS | MORE)[family]()).float().eval()
    with (
        torch.no_grad()
    ):  # biases and norms that are all zeros or ones would hide that they are left out
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            assert torch.isfinite(parameter).all(), name
    model.generation_config = hf.GenerationConfig(
        bos_token_id=tiny.BOS, eos_token_id=tiny.EOS, pad_token_id=tiny.PAD
    )
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(folder)
    return folder


PROMPTS = 60  # what differs between families, or between ways to run one, shows in any prompt
FEW_PROMPTS = 24  # of a family that is compared in fewer ways, and of a faulty worker
MANY_PROMPTS = 200  # of one run: what depends on which prompts share a step
LONGEST = 150
# tokens of a prompt whose last one is all that is not in the prefix cache, whose blocks are 32
# tokens
ALONE = 129
# printable ASCII: a prompt that ends within a character would begin its answer's text, in vLLM
TEXT_TOKENS = 94
BUNDLES = 3  # probes at each site, at the same time


@dataclass(frozen=True)
class Question:
    """One prompt and what is wanted of it."""

    prompt: tuple[int, ...]
    bundles: tuple[int, ...]  # whose probes read it, at both sites
    sampling: Sampling | None  # None: the onset is all
    cancelled: bool  # the client leaves after a few tokens


def questions(count: int = PROMPTS, seed: int = 5) -> list[Question]:
    """Mixed lengths, some with a beginning in common, two fifths with answers, some of those given
    up halfway.  The first of more questions are those of fewer."""
    generator = np.random.default_rng(seed)
    beginnings = [generator.integers(0, TEXT_TOKENS, length).tolist() for length in (64, 96, 100)]
    asked = []
    for number in range(count):
        length = 1 + int(generator.integers(0, LONGEST)) if number >= 3 else (1, 2, LONGEST)[number]
        prompt = generator.integers(0, TEXT_TOKENS, length).tolist()
        if number % 4 == 0:
            beginning = beginnings[number // 4 % len(beginnings)]
            prompt = [*beginning, *prompt[: LONGEST - len(beginning)]]
        wanted = tuple(np.flatnonzero(generator.random(BUNDLES) < 0.6).tolist()) or (
            number % BUNDLES,
        )
        sampling = Sampling(max_tokens=int(generator.integers(1, 96))) if number % 5 < 2 else None
        asked.append(
            Question(tuple(prompt), wanted, sampling, sampling is not None and number % 10 == 0)
        )
    return asked


def repeated(asked: list[Question]) -> list[Question]:
    """Long prompts that are asked once more, when their blocks are in the prefix cache, the first
    but for its end."""
    first, *others = [question for question in asked if len(question.prompt) > LONGEST - 20][:4]
    return [replace(first, prompt=first.prompt[:ALONE]), *others]


def probes(geometry: Geometry, bundle: int, sites: Sequence[Site] = tuple(Site)) -> list[Probes]:
    """One bundle's probes at every site: random heads, biases and scales."""
    return [
        tiny.probes(geometry, site, 10 * bundle + number, scaled=True)
        for number, site in enumerate(sites)
    ]


def answer_probe(geometry: Geometry, number: int) -> Probes | None:
    """What the answer to a question is read by: a site's own probe, or none for each third
    question."""
    sites = tuple(Site)
    return (
        None
        if number % 3 == 2
        else tiny.probes(geometry, sites[number % 3], 1000 + number % 3, scaled=True)
    )
