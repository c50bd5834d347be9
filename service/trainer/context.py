"""The context probes of a training run: their labels from the prompts, their fits, and what the bundle records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.records import CONTEXT_SIGNALS, Applicability, Context
from service.engines.base import prompt_context
from service.fitting.calibration import FitOptions
from service.fitting.context import (
    ContextFit,
    PromptLabels,
    context_columns,
    fit_context_probe,
    fit_passage_probes,
)
from service.fitting.fit import Floats, Index, ProbeFit
from service.fitting.nested_cv import rounded
from service.readout import Probes
from service.risk import depth_mean
from service.trainer.prepare import PreparedData, trajectories

LEAST_AUROC = 0.9  # of ``asks``: one that tells less would let questions pass for something else
QUESTIONS_BELOW = 0.003  # share of the training questions that may pass for no question: users ask in more ways


@dataclass(frozen=True, eq=False)
class BundleContext:
    """The fits of one run; n labelled rows and k that do not apply, which stand last."""

    fits: tuple[ContextFit, ...]
    labelled: int  # n
    columns: Floats | None  # [n, 2 or 3] what the classifier reads; None where it reads none

    @property
    def logits(self) -> Floats:
        """[n + k, A m]; out of fold where a probe learnt from the row."""
        return np.concatenate([fit.logits for fit in self.fits], axis=1)

    def record(self) -> Context:
        """For the manifest, with the threshold below which a prompt asks for no fact."""
        found = next((fit for fit in self.fits if fit.record.name == "asks"), None)
        return Context(
            tuple(fit.record for fit in self.fits),
            None if found is None else _applicability(found.probability, self.labelled),
        )

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The ``context_`` arrays of ``ProbeTensors``."""
        probes = [fit.probe for fit in self.fits]
        return {
            "context_head": np.stack([probe.head for probe in probes]),
            "context_direction": np.stack([probe.direction for probe in probes]).astype(np.float32),
            "context_bias": np.stack([probe.bias for probe in probes]).astype(np.float32),
            "context_scale": np.stack([probe.scale for probe in probes]).astype(np.float32),
        }

    def document(self) -> dict[str, Any]:
        """For evaluation.json."""
        shown = {fit.record.name: {"auroc": fit.record.auroc, "rows": fit.record.rows} for fit in self.fits}
        return {"context": rounded(shown)}


def fit_context(data: PreparedData, folds: int, seed: int, options: FitOptions) -> BundleContext | None:
    """Fit what the rows allow; None where they allow no probe."""
    n, k = len(data.inputs.label), len(data.others)
    index = np.concatenate([data.inputs.readouts.index, data.others])
    group = data.dataset.groups[index]
    every = data.readouts_of(index, np.concatenate([np.ones(n, np.int64), np.zeros(k, np.int64)]))
    labels = data.inputs.prompts
    assert labels is not None, "prepared rows have them"
    tokens = data.collection.prompts.lengths[index]
    padded = PromptLabels(np.pad(labels.passage, (0, k)), np.pad(labels.stated, (0, k)), tokens)
    passages = fit_passage_probes(every, padded, group, np.arange(n), folds, seed, options)
    if passages is not None and not all(map(_has_directions, passages)):
        passages = None
    asking = fit_context_probe("asks", every, group, np.arange(n + k), folds, seed, options)
    if asking is not None and not (_has_directions(asking) and asking.record.auroc >= LEAST_AUROC):
        asking = None
    fits = (*(() if asking is None else (asking,)), *(passages or ()))
    if not fits:
        return None
    return BundleContext(fits, n, None if passages is None else context_columns(passages, padded)[:n])


def all_logits(
    out_of_fold: Floats, data: PreparedData, final: ProbeFit, scale: Floats, context: BundleContext | None
) -> tuple[Floats, tuple[Floats, Index]]:
    """What the reference is made of: logits [seeds, n, (1 + A) m]; and of the rows that do not apply, with groups [k].

    ``out_of_fold`` [seeds, n, m] are the risk's; no row that does not apply took part in ``final``.
    """
    n, others = len(data.inputs.label), data.others
    arrays = (array.astype(np.float32) for array in (final.direction, final.bias, scale))
    probe = Probes(data.inputs.readouts.file.site, final.head, *arrays)
    own = trajectories(data.readouts_of(others, np.zeros(len(others), np.int64)), [probe])
    group = data.dataset.groups[others]
    if context is None:
        return out_of_fold, (own, group)
    more = np.broadcast_to(context.logits[:n], (len(out_of_fold), n, context.logits.shape[1]))
    return np.concatenate([out_of_fold, more], axis=2), (np.concatenate([own, context.logits[n:]], axis=1), group)


def served_columns(context: Context | None, logits: Floats, layers: int, tokens: NDArray[np.integer]) -> Floats | None:
    """What a classifier reads of the context, as a server computes it: logits [n, (1 + A) m], tokens [n] -> [n, 3].

    None where the bundle has no such probes.
    """
    if context is None or any(context.place(name) is None for name in ("passage", "stated")):
        return None
    means = depth_mean(logits.reshape(len(logits), -1, layers))[:, 1:]
    told = (prompt_context(context, row, length) for row, length in zip(means.tolist(), tokens.tolist(), strict=True))
    columns = [(one.passage, one.stated, one.stated_length) for one in told]
    return np.array(columns, np.float64).reshape(-1, len(CONTEXT_SIGNALS))


def with_context(signals: Sequence[Any], context: BundleContext | None) -> tuple[Any, ...]:
    """The classifier's signals, with those of the context where there are some."""
    if context is None or context.columns is None:
        return tuple(signals)
    return (*signals, *CONTEXT_SIGNALS[: context.columns.shape[1]])


def _has_directions(fit: ContextFit) -> bool:
    """Whether every layer has one: a layer that is constant on the rows of this probe has none to serve."""
    return bool(np.all(np.any(fit.probe.direction, axis=1)))


def _applicability(probability: Floats, labelled: int) -> Applicability:
    questions, others = probability[:labelled], probability[labelled:]
    threshold = float(np.clip(np.quantile(questions, QUESTIONS_BELOW), 1e-6, 0.5))
    below, above = float((questions < threshold).mean()), float((others >= threshold).mean())
    return Applicability(
        threshold,
        below,
        above,
        f"Where P(asks) is below {threshold:.3f}, the prompt asks the model for no fact, and the risk does not apply "
        f"to it. Out of fold {below:.1%} of {labelled} training questions lie below, and {above:.1%} of {len(others)} "
        "other prompts above. A prompt that asks for a fact in the words of another task may pass for one.",
    )
