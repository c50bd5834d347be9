"""From fitted numbers to a bundle's draft: stored probes, golden prompts, manifest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np

from probes_store.context import Context
from probes_store.golden import spreads, tolerance_for
from probes_store.manifest import (
    ChatTemplateRecord,
    Classifier,
    DType,
    Manifest,
    ModelRecord,
    ReadoutRecord,
    Signal,
    TokenizerRecord,
    TrainingRecord,
)
from probes_store.tensors import Golden, ProbeTensors
from probes_store.uncertainty import Uncertainty
from service.engines.base import Engine, ModelIdentity
from service.errors import EngineError
from service.fitting.calibration import FinalClassifier, signal_matrix
from service.fitting.fit import Floats, Index, ProbeFit
from service.fitting.options import FIRST_TOKEN
from service.fitting.uncertainty import Reference
from service.prompts import PromptFormat
from service.readout import Probes
from service.trainer.context import BundleContext, served_columns, with_context
from service.trainer.options import TrainOptions

GOLDEN_PROMPTS = 8


def probe_tensors(
    fit: ProbeFit,
    scale: Floats,
    class_mean: Floats,
    class_std: Floats,
    reference: Reference | None = None,
    context: BundleContext | None = None,
) -> ProbeTensors:
    """A fit in the element types that are stored and served: scale [m]; class_mean, class_std [2, m] out of fold."""
    return ProbeTensors(
        head=fit.head,
        direction=fit.direction.astype(np.float32),
        bias=fit.bias.astype(np.float32),
        scale=scale.astype(np.float32),
        trajectory_mean=class_mean.astype(np.float32),
        trajectory_std=class_std.astype(np.float32),
        reference_mean=None if reference is None else reference.mean.astype(np.float32),
        reference_whitening=None if reference is None else reference.whitening.astype(np.float32),
        **({} if context is None else context.tensors()),
    )


def served_signals(
    logits: Floats,
    first_token: Floats,
    tokens: Index,
    signals: Sequence[Signal],
    context: Context | None,
    layers: int,
) -> Floats:
    """The classifier's input [n, k] of logits [n, (1 + A) m] and prompts of so many tokens, as a server computes it."""
    columns = served_columns(context, logits, layers, tokens)
    return signal_matrix(logits[:, :layers], first_token, signals, columns)


def golden_rows(risk: Floats, count: int = GOLDEN_PROMPTS) -> Index:
    """Positions of ``count`` rows spread evenly over the ranks of risk [n], lowest and highest among them."""
    order = np.argsort(risk, kind="stable")
    places = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(np.int64)
    return order[np.unique(places)]


def record_golden(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    probes: Sequence[Probes],
    classifier: FinalClassifier,
    signals: Sequence[Signal],
    collected: Floats,
    context: Context | None = None,
) -> Golden:
    """Replay G prompts of token ids through ``Engine.score`` and record what a server must reproduce.

    ``collected`` [G, (1 + A) m] are the same prompts' logits from the run folder.
    Raises EngineError: the two differ, so the probes were fitted on something that serving does not read.
    """
    needs_first_token = any(name in signals for name in FIRST_TOKEN)
    onsets = engine.score(prompts, probes, first_token=needs_first_token)
    replayed = np.stack([np.concatenate(onset.trajectories) for onset in onsets])
    dtype = engine.identity.dtype
    layers, limit = engine.identity.geometry.num_layers, tolerance_for(dtype).trajectory
    worst = float(np.max(np.abs(replayed - collected) / spreads(collected, layers)))
    if not worst <= limit:
        raise EngineError(
            f"serving and training read different logits: they differ by {worst:.3g} spreads, {limit:.3g} would pass "
            f"in {dtype}. Nothing was published; run again, and if it persists the engine does not fit this model"
        )
    first_token = np.zeros((len(prompts), 2))
    if needs_first_token:
        first_token = np.array([[t.log_max_prob, t.entropy] for t in (onset.first_token for onset in onsets) if t])
    tokens = np.array([onset.prompt_tokens for onset in onsets])
    risk = classifier.risk(served_signals(replayed, first_token, tokens, signals, context, layers))
    return Golden.record(prompts, replayed, risk, first_token if needs_first_token else None)


def model_record(identity: ModelIdentity) -> ModelRecord:
    """The manifest's record.  Of a folder only the last part is recorded: its path on this machine is private."""
    geometry = identity.geometry
    folder = Path(identity.model)
    return ModelRecord(
        name=folder.resolve().name if folder.is_dir() else identity.model,
        revision=identity.revision,
        fingerprint=identity.fingerprint,
        architecture=identity.architecture,
        model_type=identity.model_type,
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        head_dim=geometry.head_dim,
        hidden_size=geometry.hidden_size,
    )


def manifest_of(
    options: TrainOptions,
    identity: ModelIdentity,
    prompt_format: PromptFormat,
    classifier: FinalClassifier,
    threshold: float,
    training: TrainingRecord,
    uncertainty: Uncertainty | None = None,
    context: BundleContext | None = None,
) -> Manifest:
    """The manifest, without what publishing adds: version, time, digests and files."""
    return Manifest(
        name=options.name,
        model=model_record(identity),
        tokenizer=TokenizerRecord(identity.tokenizer),
        chat_template=ChatTemplateRecord(identity.chat_template),
        prompt_format=prompt_format,
        dtype=cast(DType, identity.dtype),  # checked on publishing
        readout=ReadoutRecord(options.readout, "last"),
        logit_scale=options.logit_scale,
        signals=with_context(options.reads, context),
        classifier=Classifier(tuple(classifier.weight.tolist()), classifier.intercept),
        threshold=threshold,
        uncertainty=uncertainty,
        context=None if context is None else context.record(),
        training=training,
    )
