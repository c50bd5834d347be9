"""Tiny bundles for tests: 3 layers, 2 heads of 4 at hidden size 8, two golden rows of each kind.
All from a seed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from probes_store import manifest as manifests
from probes_store.bundle import Bundle, BundleDraft, load_bundle, render
from probes_store.local import write_files
from probes_store.manifest import (
    Classifier,
    Manifest,
    ModelRecord,
    TrainingRecord,
    manifest_bytes,
    sealed,
    timestamp,
)
from probes_store.records import (
    AnswerProbe,
    Applicability,
    Context,
    ContextProbe,
    Guarantee,
    GuaranteeStratum,
    RefitInterval,
    Uncertainty,
)
from probes_store.tensors import AnswerTensors, Golden, ProbeTensors, joined

GUARANTEE = Guarantee(
    alpha=0.1,
    delta=0.05,
    threshold=0.25,
    groups=100,
    hallucinated=3,
    p_value=0.0078,
    answered=0.5,
    risk_control_threshold=None,
    rows=400,
    all_groups=200,
    data_digest="sha256:" + "5" * 64,
    labels="given",
    judge=None,
    dtype="float32",
    seed=0,
    statement="It holds.",
)
STRATA = (
    GuaranteeStratum(
        passage=False,
        delta=0.025,
        threshold=0.25,
        groups=100,
        hallucinated=3,
        p_value=0.0078,
        answered=0.4,
        rows=300,
        labelled=150,
    ),
    GuaranteeStratum(
        passage=True,
        delta=0.025,
        threshold=0.5,
        groups=60,
        hallucinated=1,
        p_value=0.0138,
        answered=0.8,
        rows=100,
        labelled=90,
    ),
)
INTERVAL = RefitInterval(
    level=0.95, fits=15, centre=0.5, base=0.04, by_log_odds=0.01, by_distance=0.25
)
UNCERTAINTY = Uncertainty(
    outside_share=0.01, outside_rows=400, interval=INTERVAL, statement="What both mean."
)
ASKS = ContextProbe("asks", weight=1.5, intercept=0.25, rows=400, positive=300, auroc=0.99)
PASSAGE = ContextProbe("passage", weight=0.75, intercept=-0.5, rows=300, positive=100, auroc=0.95)
STATED = ContextProbe("stated", weight=0.5, intercept=0.0, rows=100, positive=60, auroc=0.8)
APPLICABILITY = Applicability(
    threshold=0.2, questions_below=0.01, others_above=0.05, statement="What it means."
)
CONTEXT = Context((ASKS, PASSAGE, STATED), APPLICABILITY)
ANSWER = AnswerProbe(
    weight=1.25,
    intercept=-0.25,
    threshold=0.6,
    rows=300,
    hallucinated=120,
    auroc=0.85,
    before=0.75,
    c=0.1,
    statement="What an answer's risk means.",
)
MODEL = ModelRecord(
    name="tiny-llama",
    revision="local",
    fingerprint="sha256:" + "1" * 64,
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=3,
    num_heads=2,
    head_dim=4,
    hidden_size=8,
)
TRAINING = TrainingRecord(
    data_digest="sha256:" + "2" * 64,
    rows=12,
    factual=6,
    hallucinated=5,
    left_out=1,
    groups=4,
    labels="given",
    judge=None,
    seeds=(0, 1),
    folds=2,
    c=0.1,
    c_grid=(0.03, 0.1, 0.3),
    class_balance="weights",
    hallutracer_version="0.1.0",
)


def make_draft(seed: int = 0, **changes: Any) -> BundleDraft:
    """A draft that publishes.

    ``changes`` are fields of BundleDraft or of its manifest; ``model`` may be a dict of ModelRecord
    fields to change, ``site``, ``tokenizer``, ``chat_template`` and ``template_arguments`` stand
    for their records.  Arrays follow the manifest, those of a ``context`` and an ``answer``
    included; nothing lies outside its reference, unless it has
    ``uncertainty``: then that is the unit ball around 0.5."""
    model = changes.pop("model", MODEL)
    if isinstance(model, dict):
        model = dataclasses.replace(MODEL, **model)
    signals = tuple(changes.pop("signals", ("depth_mean",)))
    records: dict[str, Any] = {
        "tokenizer": manifests.TokenizerRecord(changes.pop("tokenizer", "sha256:" + "3" * 64)),
        "chat_template": manifests.ChatTemplateRecord(
            changes.pop("chat_template", "sha256:" + "4" * 64),
            changes.pop("template_arguments", None),
        ),
        "readout": manifests.ReadoutRecord(changes.pop("site", "attention_head"), "last"),
    }
    fields: dict[str, Any] = {
        "name": "tiny",
        "model": model,
        "prompt_format": "chat",
        "dtype": "float32",
        "logit_scale": "unit_norm",
        "signals": signals,
        "classifier": Classifier((1.5, 0.25, -0.5, 0.125)[: len(signals)], -0.125),
        "threshold": 0.5,
        "training": TRAINING,
        "uncertainty": dataclasses.replace(UNCERTAINTY, interval=None),
    }
    near = "uncertainty" in changes
    names = {field.name for field in dataclasses.fields(Manifest)}
    fields |= {name: changes.pop(name) for name in names & changes.keys()}
    manifest = Manifest(**records, **fields)
    generator = np.random.default_rng(seed)
    layers = model.num_layers
    direction = directions(generator, layers, manifest.probe_dim)
    trajectory = generator.standard_normal((2, layers)).astype(np.float32)
    log_max_prob, entropy = np.array([-0.25, -1.5]), np.array([0.5, 2.0])
    columns = {
        "depth_mean": trajectory.mean(axis=1),
        "log_max_prob": log_max_prob,
        "entropy": entropy,
    }
    columns |= {
        "passage": np.array([0.9, 0.2]),
        "stated": np.array([0.7, 0.1]),
        "stated_length": np.array([0.8, 0.2]),
    }
    classifier, scale = manifest.classifier, scale_of(manifest)
    logit = (
        sum(w * columns[s] for w, s in zip(classifier.weight, signals, strict=False))
        + classifier.intercept
    )
    head = generator.integers(0, manifest.probe_heads, layers)
    bias = generator.standard_normal(layers)
    context, others = context_arrays(manifest)
    contents: dict[str, Any] = {
        "probes": ProbeTensors(
            head=head.astype(np.int32),
            direction=direction,
            bias=bias.astype(np.float32),
            scale=scale,
            trajectory_mean=np.stack([np.full(layers, -0.5), np.full(layers, 0.5)]).astype(
                np.float32
            ),
            trajectory_std=np.ones((2, layers), np.float32),
            reference_mean=np.full(manifest.logits, 0.5 if near else 0.0, np.float32),
            reference_whitening=np.eye(manifest.logits, dtype=np.float32)
            * np.float32(1.0 if near else 1e-3),
            **context,
        ),
        "golden": Golden.record(
            [[1, 5, 9], [1, 7, 2, 3]],
            np.concatenate([trajectory, others], axis=1),
            1.0 / (1.0 + np.exp(logit)),
            np.stack([log_max_prob, entropy], axis=1) if manifest.needs_first_token else None,
        ),
        "evaluation": {"auroc": 0.75, "folds": [0.7, 0.8]},
        "card": "# tiny\n\nA bundle for tests.\n",
        "answer": None if manifest.answer is None else answer_tensors(manifest),
        "plots": {"roc.png": b"\x89PNG\r\n\x1a\n not really a picture"},
    }
    return BundleDraft(manifest, **(contents | changes))


def scale_of(manifest: Manifest) -> np.ndarray:
    """What divides the logits [m] under the manifest's ``logit_scale``."""
    layers = manifest.model.num_layers
    return np.linspace(
        1, 2 if manifest.logit_scale == "standardized" else 1, layers, dtype=np.float32
    )


def directions(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Random unit vectors, [..., d]."""
    drawn = generator.standard_normal(shape)
    return (drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)).astype(np.float32)


def answer_tensors(manifest: Manifest) -> AnswerTensors:
    """The probes of the answer's tokens, and two golden answers."""
    layers = manifest.model.num_layers
    record = manifest.answer or ANSWER
    generator = np.random.default_rng(7)
    trajectory = generator.standard_normal((2, layers)).astype(np.float32)
    return AnswerTensors(
        generator.integers(0, manifest.probe_heads, layers).astype(np.int32),
        directions(generator, layers, manifest.probe_dim),
        generator.standard_normal(layers).astype(np.float32),
        scale_of(manifest),
        *joined([[1, 5, 9, 4], [1, 7, 2, 3, 8, 6]]),
        answer_tokens=np.array([1, 3], np.int32),
        trajectory=trajectory,
        risk=1.0
        / (
            1.0
            + np.exp(record.weight * trajectory.mean(axis=1, dtype=np.float64) + record.intercept)
        ),
    )


def context_arrays(manifest: Manifest) -> tuple[dict[str, Any], np.ndarray]:
    """The tensors of A context probes, and their logits of two golden prompts [2, A m]; of none,
    nothing."""
    layers, count = manifest.model.num_layers, manifest.context_probes
    generator = np.random.default_rng(count)
    direction = directions(generator, count, layers, manifest.probe_dim)
    arrays = {
        "context_head": generator.integers(0, manifest.probe_heads, (count, layers)).astype(
            np.int32
        ),
        "context_direction": direction,
        "context_bias": generator.standard_normal((count, layers)).astype(np.float32),
        "context_scale": generator.uniform(1, 2, (count, layers)).astype(np.float32),
    }
    return arrays if count else {}, generator.standard_normal((2, count * layers)).astype(
        np.float32
    )


def write_bundle(
    draft: BundleDraft, into: Path, *, version: int = 1, created: str | None = None
) -> Bundle:
    """A draft as a bundle folder outside a store."""
    manifest, files = render(draft)
    into.mkdir(parents=True)
    dated = sealed(manifest, version=version, created=created or timestamp())
    write_files(into, files | {"bundle.json": manifest_bytes(dated)})
    return load_bundle(into)


def guaranteed(**changes: Any) -> BundleDraft:
    """A draft with ``GUARANTEE``, some of it changed."""
    given = dataclasses.replace(GUARANTEE, **changes)
    return make_draft(guarantee=given, threshold=given.threshold)
