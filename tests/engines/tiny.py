"""Tiny random models of every family, and a byte-level tokenizer: nothing is downloaded.

GQA wherever the family has it, head_dim apart from hidden / heads wherever the config permits, and
weights large enough that a mistake shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from probes_store.manifest import SIGNALS
from probes_store.records import Context
from service.engines.base import EngineGate, EngineOptions, FirstToken, PrefillResult, TorchModel
from service.engines.families import locate
from service.engines.loading import loader
from service.engines.transformers.engine import TransformersEngine
from service.readout import Geometry, Probes, Site

VOCABULARY, BOS, EOS, PAD, CHAT = 264, 256, 257, 258, 259
CONTEXT = 96
WINDOW = 8  # of the sliding families: shorter than the tests' prompts
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{%"
    " endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}<|assistant|>{% endif %}"
)

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
WIDE = BASE | {"head_dim": 16}  # 4 heads x 16 = 64, while hidden is 32


def families(
    base: dict[str, Any], wide: dict[str, Any], window: int, expert: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration's maker for each family of ``families.json``, of two shapes; those that are
    compared in fewer ways apart.  Hybrids have attention in the second block.

    There a row has what its parts have, ``of``, and options of its own; a text that names an option
    of ``base``, or a size, stands for it.  ``expert``: hidden size of an expert.  A maker raises
    ValueError where this version of transformers does not have the family."""
    table = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
    no_gqa = {key: value for key, value in base.items() if key != "num_key_value_heads"}
    parts = table["parts"] | {"base": base, "wide": wide, "no_gqa": no_gqa}
    hidden = base["hidden_size"]
    sizes = base | {f"hidden_size / {divisor}": hidden // divisor for divisor in (2, 16, 32)}
    sizes |= {"2 hidden_size": 2 * hidden, "expert": expert, "2 expert": 2 * expert}
    sizes |= {"head_dim": wide["head_dim"], "window": window}

    def options(value: Any) -> Any:
        if isinstance(value, list):
            return [*map(options, value)]
        if not isinstance(value, dict):
            return sizes.get(value, value)
        whole: dict[str, Any] = {}
        for part in value.get("of", ()):
            whole |= options(parts[part])
        return whole | {name: options(item) for name, item in value.items() if name != "of"}

    compared, fewer = (
        {name: partial(hf.AutoConfig.for_model, name, **options(row)) for name, row in rows.items()}
        for rows in (table["compared"], table["compared in fewer ways"])
    )
    return compared, fewer


CONFIGS, MORE = families(BASE, WIDE, WINDOW, 24)
ALL = sorted(CONFIGS)


def from_config(config: Any) -> Any:
    """A random model, of the class that the engine loads a checkpoint with."""
    return loader(config).from_config(config)


def model(family: str, seed: int = 0) -> Any:
    """A fresh random model in float32."""
    torch.manual_seed(seed)
    built = from_config((CONFIGS | MORE)[family]()).float().eval()
    built.generation_config = hf.GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD
    )
    return built


def tokenizer(*, template: str | None = CHAT_TEMPLATE) -> Any:
    """One token per UTF-8 byte, a BOS in front of plain text, and a chat template."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = byte_level(
        models.BPE(vocab=vocabulary, merges=[]), ["<s>", "</s>", "<pad>", "<|assistant|>"]
    )
    fast.pad_token, fast.model_max_length = "<pad>", CONTEXT
    if template is not None:
        fast.chat_template = template
    return fast


def byte_level(model: models.BPE, special: list[str]) -> Any:
    """A tokenizer of bytes with special tokens, of which <s> stands in front of plain text."""
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    first = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=first)
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def engine(family: str = "llama", **options: Any) -> TransformersEngine:
    """A fresh engine; options as in EngineOptions."""
    return TransformersEngine(
        model(family), tokenizer(), options=EngineOptions(model=f"tiny-{family}", **options)
    )


def load_engine(
    model: Path | str, sites: Sequence[Site] = (), **options: Any
) -> TransformersEngine:
    """The embedded engine of a model on disk; options as in EngineOptions."""
    return TransformersEngine.load(EngineOptions(str(model), **options), sites)


@cache
def shared_engine(family: str, max_batch_tokens: int = 8192) -> TransformersEngine:
    """One engine for tests that neither count nor close."""
    return engine(family, max_batch_tokens=max_batch_tokens)


def modules(engine: Any) -> TorchModel:
    """A model's modules, of an engine that is not closed."""
    assert engine.torch_model is not None
    return engine.torch_model  # type: ignore[no-any-return]


def projections(engine: Any) -> tuple[torch.nn.Module, ...]:
    """Each layer's attention output projection."""
    return locate(modules(engine).model).at[Site.ATTENTION_HEAD]


def longrope_engine() -> TransformersEngine:
    """A Phi-3 whose positions are encoded differently once the longest prompt of a batch passes 16
    tokens."""
    config = CONFIGS["phi3"]()
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
        "rope_theta": 10000.0,
    }
    config.rope_parameters = rope | {
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 1.0,
    }
    config.original_max_position_embeddings = 16
    torch.manual_seed(0)
    return TransformersEngine(hf.Phi3ForCausalLM(config).eval(), tokenizer())


def prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths, without special tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, size=length).tolist() for length in lengths]


def come_and_go(
    engine: TransformersEngine, continuations: Sequence[Any], streams: Sequence[Iterator[str]]
) -> None:
    """Decode answers to their ends, of which some take part in each step."""
    chance, running = Random(0), list(range(len(streams)))
    while running:
        some = chance.sample(running, chance.randint(1, len(running)))
        engine.step_together([continuations[number] for number in some])
        for number in some:
            if next(streams[number], None) is None:
                running.remove(number)


def probes(
    geometry: Geometry, site: Site = Site.ATTENTION_HEAD, seed: int = 2, *, scaled: bool = False
) -> Probes:
    """Random unit probes for a geometry.  Of an engine's: ``probes_of``."""
    generator = np.random.default_rng(seed)
    m, d = geometry.num_layers, geometry.dim(site)
    direction = generator.standard_normal((m, d))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    scale = generator.uniform(0.5, 2.0, m) if scaled else np.ones(m)
    return Probes(
        site=site,
        head=generator.integers(0, geometry.heads(site), m),
        direction=direction.astype(np.float32),
        bias=generator.standard_normal(m).astype(np.float32),
        scale=scale.astype(np.float32),
    )


def probes_of(engine: Any, *arguments: Any, **options: Any) -> Probes:
    """Random unit probes for an engine's model; the rest as of ``probes``."""
    return probes(engine.identity.geometry, *arguments, **options)


def gate(
    threshold: float,
    weight: Sequence[float] = (1.0,),
    intercept: float = 0.0,
    context: Context | None = None,
) -> EngineGate:
    """A gate on the depth mean, and on the signals behind it that have a weight."""
    unread = [0.0] * (len(SIGNALS) - len(weight))
    return EngineGate((*weight, *unread), intercept, threshold, context)


def logits(engine: Any, prompts: Any, probes: Sequence[Probes]) -> NDArray[np.float64]:
    """Truth logits [prompts, probes, m]."""
    return np.array([result.trajectories for result in engine.score(prompts, probes)])


def trajectories(engine: Any, prompts: Sequence[list[int]], probes: Probes) -> NDArray[np.float64]:
    """Truth logits [prompts, m] of these probes."""
    return logits(engine, prompts, [probes])[:, 0]


def check_same(
    result: PrefillResult,
    expected: PrefillResult,
    *,
    tokens: bool,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    first_atol: float = 1e-5,
) -> None:
    """Two readings of one prompt are alike, with first tokens where ``tokens`` says so."""
    assert result.prompt_tokens == expected.prompt_tokens
    for ours, theirs in zip(result.trajectories, expected.trajectories, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)
    assert (result.first_token is not None) == tokens
    if tokens:
        check_first(result.first_token, expected.first_token, first_atol)


def check_first(first: FirstToken | None, expected: FirstToken | None, atol: float = 1e-5) -> None:
    """Two distributions of a prompt's first token are alike."""
    assert first is not None
    assert expected is not None
    assert first.token == expected.token
    assert first.log_max_prob == pytest.approx(expected.log_max_prob, abs=atol)
    assert first.entropy == pytest.approx(expected.entropy, abs=atol)
