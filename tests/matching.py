"""A scripted engine with a bundle that matches it: for tests of the HTTP layer and of scoring."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from probes_store.bundle import Bundle, BundleDraft
from probes_store.manifest import Classifier, Manifest
from probes_store.records import Applicability, Context, ContextName, ContextProbe
from probes_store.tensors import AnswerTensors, Golden
from service.engines.base import LoadedModel
from service.judging.guarantee import Shape, Standing
from service.readout import Probes, Site
from service.risk import depth_mean, risk
from service.trainer.publish import model_record
from tests.kit.bundles import ANSWER, UNCERTAINTY, answer_tensors, make_draft, write_bundle
from tests.scripted_engine import ScriptedEngine

GOLDEN = [[256, 65, 66], [256, 67]]
WEIGHT, INTERCEPT = 2.0, 0.1
PROBES: tuple[ContextName, ...] = ("asks", "passage", "stated")


def matching_draft(
    engine: LoadedModel, name: str, seed: int, prompts: list[list[int]] = GOLDEN, **changes: Any
) -> BundleDraft:
    """Random probes for ``engine``, with golden ``prompts`` recorded through ``engine.score``."""
    identity = engine.identity
    draft = make_draft(
        seed,
        name=name,
        model=model_record(identity),
        tokenizer=identity.tokenizer,
        dtype=identity.dtype,
        chat_template=identity.chat_template,
        template_arguments=identity.template_arguments,
        **{"classifier": Classifier((WEIGHT,), INTERCEPT)} | changes,
    )
    probes = Probes.of(Site.ATTENTION_HEAD, draft.probes)
    trajectory = np.stack([onset.trajectories[0] for onset in engine.score(prompts, [probes])])
    if "golden" not in changes:
        risks = risk(depth_mean(trajectory)[:, None], np.array([WEIGHT]), INTERCEPT)
        draft.golden = Golden.record(prompts, trajectory, risks, None)
    return draft


def matching_bundle(
    engine: LoadedModel, folder: Path, name: str = "tiny", seed: int = 0, **changes: Any
) -> Bundle:
    """A bundle folder of such a draft."""
    return write_bundle(matching_draft(engine, name, seed, **changes), folder / name)


def scripted(tmp_path: Path, **options: Any) -> tuple[ScriptedEngine, Bundle]:
    """A script and a bundle of its own; ``Scheduled`` makes an engine of the script."""
    script = ScriptedEngine(**options)
    return script, matching_bundle(script, tmp_path)


def answers_read(engine: LoadedModel, manifest: Manifest) -> AnswerTensors:
    """Random probes of the answer's own tokens, with golden answers as the engine reads them."""
    made, record = answer_tensors(manifest), manifest.answer
    assert record is not None
    probes = Probes.of(Site(manifest.readout.site), made)
    read = engine.score(made.rows(), [probes], last=made.answer_tokens.tolist())
    trajectory = np.stack([one.trajectories[0] for one in read])
    result = risk(depth_mean(trajectory)[:, None], np.array([record.weight]), record.intercept)
    return replace(made, trajectory=trajectory.astype(np.float32), risk=result)


def with_answer(draft: BundleDraft, engine: LoadedModel) -> BundleDraft:
    """The draft with an answer probe."""
    manifest = draft.manifest = replace(draft.manifest, answer=ANSWER)
    draft.answer = answers_read(engine, manifest)
    return draft


def with_context(
    draft: BundleDraft,
    engine: LoadedModel,
    names: Sequence[ContextName] = PROBES,
    *,
    applies_from: float = 0.5,
    reach: float | None = None,
    signals: Mapping[str, float] = MappingProxyType({"depth_mean": WEIGHT}),
    prompts: list[list[int]] = GOLDEN,
) -> BundleDraft:
    """The draft with random context probes; ``signals``: the classifier's weights.

    ``reach``: with a reference that ends at this distance from 0, and no guarantee of its own; else
        far away."""
    generator, shape = np.random.default_rng(len(names)), draft.probes.direction.shape
    drawn = generator.standard_normal((len(names), *shape))
    probes = tuple(
        ContextProbe(name, 3.0, 0.05 * index, rows=90, positive=40, auroc=0.9)
        for index, name in enumerate(names)
    )
    asks = Applicability(applies_from, 0.01, 0.02, "What it means.") if "asks" in names else None
    classifier = Classifier(tuple(signals.values()), INTERCEPT)
    changes: dict[str, Any] = {} if reach is None else {"uncertainty": UNCERTAINTY}
    manifest = draft.manifest = replace(
        draft.manifest,
        context=Context(probes, asks),
        signals=tuple(signals),
        classifier=classifier,
        **changes,
    )
    draft.probes = replace(
        draft.probes,
        context_head=generator.integers(0, manifest.probe_heads, drawn.shape[:2]).astype(np.int32),
        context_direction=(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)).astype(
            np.float32
        ),
        context_bias=generator.standard_normal(drawn.shape[:2]).astype(np.float32) / 4,
        context_scale=np.ones(drawn.shape[:2], np.float32),
        reference_mean=np.zeros(manifest.logits, np.float32),
        reference_whitening=np.eye(manifest.logits, dtype=np.float32) / (reach or 1e3),
    )
    results = engine.score(
        prompts, Probes.all_of(Site(manifest.readout.site), draft.probes), first_token=True
    )
    means = np.array([list(map(depth_mean, result.trajectories)) for result in results])
    columns = {"depth_mean": means[:, 0]}
    for index, probe in enumerate(probes, 1):
        columns[probe.name] = 1 / (1 + np.exp(-probe.weight * means[:, index] - probe.intercept))
    if "stated" in columns:
        columns["stated"] *= columns["passage"]
        columns["stated_length"] = columns["stated"] * np.log([len(prompt) for prompt in prompts])
    read = np.stack([columns[name] for name in signals], axis=1)
    risks = risk(read, np.array(list(signals.values())), INTERCEPT)
    draft.golden = Golden.record(
        prompts,
        np.stack([np.concatenate(result.trajectories) for result in results]),
        risks if manifest.recalibration is None else manifest.recalibration(risks),
    )
    return draft


def contextual_bundle(
    engine: LoadedModel,
    folder: Path,
    name: str = "context",
    seed: int = 0,
    *,
    manifest: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Bundle:
    """A bundle that tells of a prompt what it is; ``manifest``: fields to replace, ``options`` of
    ``with_context``."""
    draft = matching_draft(engine, name, seed)
    draft.manifest = replace(draft.manifest, **manifest)
    return write_bundle(with_context(draft, engine, **options), folder / name)


SMALL_TALK = Standing(
    Shape("0", passage=False, system=False, asks="small_talk")
)  # the bundle's own limit counts
SMALL_TALKS = [
    " ".join(words) for words in product(("hi", "hello", "hey", "thanks", "ok", "nice"), repeat=3)
]


class Held:
    """A script's ``before`` that stands still inside a forward pass until ``release`` is set."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self, _: str) -> None:
        self.entered.set()
        assert self.release.wait(30)
