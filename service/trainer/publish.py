"""Everything that was fitted -> a bundle's draft, with golden prompts read back through the serving path.

Knows the store's draft and the engine; chooses nothing about the probe.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import BundleDraft
from probes_store.golden import spread, tolerance_for
from probes_store.manifest import Classifier, ModelRecord, TrainingRecord
from probes_store.tensors import Golden, ProbeTensors
from service.data.collection import Prompts
from service.engines.base import Engine, ModelIdentity
from service.errors import EngineError
from service.fitting.calibration import FinalClassifier, signal_matrix
from service.fitting.fit import Floats, Index, ProbeFit, Readouts
from service.fitting.options import LogitScale
from service.readout import Probes
from service.risk import truth_logits
from service.trainer.options import TrainOptions

GOLDEN_PROMPTS = 8


@dataclass(frozen=True, eq=False)
class Fitted:
    """The bundle's numbers, before they are a bundle."""

    probes: Probes
    classifier: FinalClassifier
    trajectory_mean: Floats  # [2, m] out of fold; row 0 hallucinated, row 1 factual
    trajectory_std: Floats  # [2, m]


def as_probes(fit: ProbeFit, scale: LogitScale, readouts: Readouts) -> Probes:
    """A fit in the element types that are stored and served."""
    divisor = fit.scale if scale == "standardized" else np.ones_like(fit.scale)
    return Probes(
        readouts.file.site,
        fit.head,
        fit.direction.astype(np.float32),
        fit.bias.astype(np.float32),
        divisor.astype(np.float32),
    )


def trajectories(readouts: Readouts, probes: Probes) -> Floats:
    """Scaled logits of collected rows, layer by layer from the file: [n, m]."""
    geometry = readouts.file.geometry
    dim = geometry.dim(probes.site)
    columns = []
    for layer, head in enumerate(probes.head.tolist()):
        rows = readouts.file.layer(layer)[:, head * dim : (head + 1) * dim][readouts.index]
        one = slice(layer, layer + 1)
        columns.append(truth_logits(rows[:, None], probes.direction[one], probes.bias[one], probes.scale[one]))
    return np.concatenate(columns, axis=1)


def golden_rows(risk: Floats, count: int = GOLDEN_PROMPTS) -> Index:
    """Positions of ``count`` rows spread evenly over the ranks of risk [n], lowest and highest among them."""
    order = np.argsort(risk, kind="stable")
    places = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(np.int64)
    return order[np.unique(places)]


def record_golden(
    engine: Engine,
    prompts: Prompts,
    rows: Index,
    fitted: Fitted,
    signals: tuple[str, ...],
    collected: Floats,
) -> Golden:
    """Replay data rows [G] through ``Engine.score``: what a server will have to reproduce.

    ``collected`` [G, m] are the same rows' logits from the run folder; the two ways must agree, or the probe was fitted
    on something that serving does not read.

    Raises:
        EngineError: they do not.
    """
    ids = [prompts.of(int(row)) for row in rows]
    needs_first_token = len(signals) > 1
    onsets = engine.score(ids, [fitted.probes], first_token=needs_first_token)
    replayed = np.stack([onset.trajectories[0] for onset in onsets])
    dtype = engine.identity.dtype
    limit = tolerance_for(dtype).trajectory * spread(collected)
    worst = float(np.max(np.abs(replayed - collected)))
    if not worst <= limit:
        raise EngineError(
            f"serving and training read different logits: they differ by {worst:.3g}, {limit:.3g} would pass in "
            f"{dtype}. Nothing was published; run again, and if it persists the engine does not fit this model"
        )
    first_token = np.zeros((len(ids), 2))
    if needs_first_token:
        first_token = np.array([[t.log_max_prob, t.entropy] for t in (onset.first_token for onset in onsets) if t])
    risk = fitted.classifier.risk(signal_matrix(replayed, first_token, signals))
    return Golden.record(ids, replayed, risk, first_token if needs_first_token else None)


def model_record(identity: ModelIdentity) -> ModelRecord:
    """The manifest's record.  A folder is recorded by its last part: where it lay on this machine is private."""
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


def draft(
    options: TrainOptions,
    identity: ModelIdentity,
    prompt_format: str,
    fitted: Fitted,
    golden: Golden,
    training: TrainingRecord,
    evaluation: dict[str, Any],
    card: str,
    plots: dict[str, bytes],
) -> BundleDraft:
    """Put the parts into the store's draft."""
    probes, classifier = fitted.probes, fitted.classifier
    return BundleDraft(
        name=options.name,
        model=model_record(identity),
        tokenizer=identity.tokenizer,
        chat_template=identity.chat_template,
        prompt_format=prompt_format,
        dtype=identity.dtype,
        site=str(probes.site),
        logit_scale=options.logit_scale,
        signals=options.signals,
        classifier=Classifier(tuple(classifier.weight.tolist()), classifier.intercept),
        threshold=classifier.threshold,
        training=training,
        probes=ProbeTensors(
            head=probes.head.astype(np.int32),
            direction=probes.direction,
            bias=probes.bias,
            scale=probes.scale,
            trajectory_mean=_float32(fitted.trajectory_mean),
            trajectory_std=_float32(fitted.trajectory_std),
        ),
        golden=golden,
        evaluation=evaluation,
        card=card,
        plots=plots,
    )


def _float32(values: Floats) -> NDArray[np.float32]:
    return values.astype(np.float32)
