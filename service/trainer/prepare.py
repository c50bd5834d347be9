"""From a data file to readouts and labels, and the context probes that are fitted on them: what a prompt is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.manifest import Signal
from probes_store.records import CONTEXT_SIGNALS, Applicability, Context
from service.data.collection import Collection, collect, read_given
from service.data.forms import FORMS
from service.data.forms.crossed import PLAIN_WORDING, WORDING
from service.data.judges import contains
from service.data.labels import UNFINISHED, Labelled, given_labels, judged_labels, unfinished_thoughts
from service.data.training_rows import FORM, Dataset, class_problems
from service.engines.base import Engine, prompt_context
from service.errors import TrainingError
from service.fitting.context import (
    LEAST,
    ContextFit,
    PromptLabels,
    context_columns,
    fit_context_probe,
    fit_passage_probes,
)
from service.fitting.estimator import DepthMeanProbe, extra_signals, signal_matrix
from service.fitting.nested_cv import Inputs
from service.fitting.probes import Floats, Index, ProbeFit, Readouts
from service.judging.guarantee import shape_around
from service.judging.passages import has_passage
from service.prompts import PromptFormat
from service.readout import Probes, Site
from service.risk import depth_mean, truth_logits
from service.trainer.cards import say
from service.trainer.options import NewRowsOptions, TrainOptions

LEAST_AUROC = 0.9  # of ``asks``: one that tells less would let questions pass for something else
QUESTIONS_BELOW = 0.003  # share of the training questions that may pass for no question: users ask in more ways
LONE_BELOW = 0.001  # the same of questions that stand alone, where these were asked in other words
UNKNOWN_LABEL = -1  # of a row that is scored before it is labelled
WITH_PASSAGE = ("passages", "long")  # families of forms


@dataclass(frozen=True, eq=False)
class PreparedData:
    """One data file, collected and labelled; ``inputs`` has the labelled rows."""

    dataset: Dataset
    collection: Collection
    labelled: Labelled
    inputs: Inputs
    answers: Readouts | None = None  # of the labelled rows' own answers; zeros where no token was read

    @property
    def counts(self) -> dict[str, int]:
        """Return rows by class, as the manifest and the evaluation name them; ``rows`` are those that apply."""
        label = self.labelled.label
        return {
            "rows": len(self.dataset.asking),
            "others": len(self.dataset.others),
            "factual": int(label.sum()),
            "hallucinated": int(len(label) - label.sum()),
            "left_out": sum(self.labelled.left_out.values()),
            "groups": len(np.unique(self.inputs.group)),
        }


def prepare(
    engine: Engine,
    dataset: Dataset,
    options: TrainOptions | NewRowsOptions,
    prompt_format: PromptFormat,
    name: str,
    *,
    sites: Sequence[Site],
    folds: int | None,
    answer_probes: bool = False,
    labelled: bool = True,
) -> PreparedData:
    """Run one file through the engine, into the folder ``name`` of the run, where it resumes, and label it.

    sites: what is collected, the site that the probes read first; folds: how many groups each class must have once the
    answers are judged; None: any number, also none; answer_probes: read answers, too, where the engine can; labelled:
    false has no answer decoded and no label read, and every row that applies has the label ``UNKNOWN_LABEL``.
    Raises what ``collect`` and ``judged_labels`` raise, and TrainingError for a class with too few groups."""
    folder, generate = options.folder / name, labelled and options.answers == "generate"
    collection = collect(
        engine,
        dataset,
        folder,
        sites=sites,
        prompt_format=prompt_format,
        batch_rows=options.batch_rows,
        max_new_tokens=options.answer_tokens if generate else None,
        answer_site=sites[0] if answer_probes and generate and engine.reads_answers else None,
    )
    if not labelled:
        found = Labelled(dataset.asking, np.full(len(dataset.asking), UNKNOWN_LABEL, np.int64), {})
    elif not generate:
        found = given_labels(dataset)
    else:
        found = judged_labels(dataset, folder, options)
        groups = dataset.groups[found.index]
        problems = [] if folds is None else class_problems(found.label, groups, folds)
        if problems and (unfinished := found.left_out.get(UNFINISHED)):
            problems.append(unfinished_thoughts(unfinished, len(dataset.asking)))
        if problems:
            raise TrainingError(f"{dataset.path}, labelled by its answers: {'; '.join(problems)}", param="labels")
    index = found.index
    tokens = collection.prompts.lengths[index]
    inputs = Inputs(
        readouts=Readouts(collection.rows[sites[0]], index, found.label),
        group=dataset.groups[index],
        first_token=collection.first_token[index],
        prompt_tokens=tokens,
        strata=tuple(dataset.rows[row].strata for row in index.tolist()),
        prompts=prompt_labels(dataset, index, tokens),
    )
    read = collection.answers
    if answer_probes and engine.reads_answers and any(row.answer for row in dataset.rows):
        read = read_given(engine, dataset, collection.prompts, folder / "answers", sites[0], options.batch_rows)
    answers = None if read is None else Readouts(read, index, found.label)
    return PreparedData(dataset, collection, found, inputs, answers)


def was_read(answers: Readouts) -> NDArray[np.bool_]:
    """Return whether any token of each row's answer was read: [n]."""
    return np.asarray(answers.file.head(0, 0)[answers.index].any(axis=1))


def trajectories(readouts: Readouts, probes: Sequence[Probes]) -> Floats:
    """Return scaled logits of collected rows as a server computes them: [n, probes m], probe by probe."""
    columns = []
    for probe in probes:
        for layer, head in enumerate(probe.head.tolist()):
            a = readouts.file.head(layer, head)[readouts.index]
            own = slice(layer, layer + 1)
            columns.append(truth_logits(a[:, None], probe.direction[own], probe.bias[own], probe.scale[own]))
    return np.concatenate(columns, axis=1)


def prompt_labels(dataset: Dataset, index: Index, tokens: Index) -> PromptLabels:
    """Return what prompts of so many ``tokens`` show: a passage, by form or shape, and an accepted answer."""
    rows = [dataset.rows[row] for row in index.tolist()]
    forms = [FORMS.get(row.strata.get(FORM, "")) for row in rows]
    passage = np.array(
        [
            has_passage(row.texts[-1]) if form is None else form.family in WITH_PASSAGE
            for row, form in zip(rows, forms, strict=True)
        ],
        np.bool_,
    )
    stated = np.array([contains("", "\n".join(row.texts), row.answers) for row in rows], np.bool_)
    return PromptLabels(passage, stated & passage, tokens)


@dataclass(frozen=True, eq=False)
class BundleContext:
    """The context fits of one run; n labelled rows and k that do not apply, which stand last."""

    fits: tuple[ContextFit, ...]
    labelled: int  # n
    columns: Floats | None  # [n, 2 or 3] what the classifier reads; None where it reads none
    alone: NDArray[np.bool_]  # [n] whether a labelled row's question stands alone
    reworded: int | None  # rows with a lone question in other words; None where these are too few groups

    @property
    def logits(self) -> Floats:
        """Return [n + k, A m]; out of fold where a probe learnt from the row."""
        return np.concatenate([fit.logits for fit in self.fits], axis=1)

    def record(self) -> Context:
        """Return the manifest's record, with the threshold below which a prompt asks for no fact."""
        lone = None if self.reworded is None else self.alone
        asks = (_applicability(fit.probability, self.labelled, lone) for fit in self.fits if fit.record.name == "asks")
        return Context(tuple(fit.record for fit in self.fits), next(asks, None))

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return the ``context_`` arrays of ``ProbeTensors``."""
        names = ("head", "direction", "bias", "scale")
        stacked = {name: np.stack([getattr(fit.probe, name) for fit in self.fits]) for name in names}
        return {
            f"context_{name}": array if name == "head" else array.astype(np.float32) for name, array in stacked.items()
        }


def fit_context(data: PreparedData, probe: DepthMeanProbe) -> BundleContext | None:
    """Fit what the rows allow; None where they allow no probe."""
    n, k = len(data.inputs.label), len(data.dataset.others)
    index = np.concatenate([data.inputs.readouts.index, data.dataset.others])
    group = data.dataset.groups[index]
    every = Readouts(data.inputs.readouts.file, index, np.repeat([1, 0], [n, k]))
    labels = data.inputs.prompts
    assert labels is not None, "prepared rows have them"
    tokens = data.collection.prompts.lengths[index]
    padded = PromptLabels(np.pad(labels.passage, (0, k)), np.pad(labels.stated, (0, k)), tokens)
    passages = fit_passage_probes(every, padded, group, np.arange(n), probe)
    if passages is not None and not all(map(_has_directions, passages)):
        passages = None
    asks = fit_context_probe("asks", every, group, np.arange(n + k), probe)
    use = asks is not None and _has_directions(asks) and asks.record.auroc >= LEAST_AUROC
    fits = (*([asks] if asks is not None and use else ()), *(passages or ()))
    columns = None if passages is None else context_columns(passages, padded)[:n]
    rows = [data.dataset.rows[row] for row in data.inputs.readouts.index.tolist()]
    # As ``Standing.no_fact_below`` tells it where the bundle serves.
    alone = np.array([shape_around(row.messages or ()).turns == "0" for row in rows], np.bool_)
    other_words = alone & np.array([_in_other_words(row.strata.get(FORM, "")) for row in rows], np.bool_)
    enough = len(np.unique(group[:n][other_words])) >= LEAST
    reworded = int(other_words.sum()) if enough else None
    return BundleContext(fits, n, columns, alone, reworded) if fits else None


def _in_other_words(form: str) -> bool:
    return form.startswith(WORDING) and form != PLAIN_WORDING


def all_logits(
    out_of_fold: Floats, data: PreparedData, final: ProbeFit, scale: Floats, context: BundleContext | None
) -> tuple[Floats, tuple[Floats, Index]]:
    """Return logits [seeds, n, (1 + A) m] for the reference, and those of the rows that do not apply, with groups [k].

    ``out_of_fold`` [seeds, n, m] are the risk's; no row that does not apply took part in ``final``."""
    n, others = len(data.inputs.label), data.dataset.others
    arrays = (array.astype(np.float32) for array in (final.direction, final.bias, scale))
    probe = Probes(data.inputs.readouts.file.site, final.head, *arrays)
    own = trajectories(Readouts(data.inputs.readouts.file, others, np.zeros(len(others), np.int64)), [probe])
    group = data.dataset.groups[others]
    if context is None:
        return out_of_fold, (own, group)
    more = np.broadcast_to(context.logits[:n], (len(out_of_fold), n, context.logits.shape[1]))
    return np.concatenate([out_of_fold, more], axis=2), (np.concatenate([own, context.logits[n:]], axis=1), group)


def served_signals(
    logits: Floats, first_token: Floats, tokens: Index, signals: Sequence[Signal], context: Context | None, layers: int
) -> Floats:
    """Return the classifier's input [n, k] of logits [n, (1 + A) m] and prompts of so many tokens, as a server does."""
    columns: Floats | None = None
    if context is not None and all(context.place(name) is not None for name in ("passage", "stated")):
        means = depth_mean(logits.reshape(len(logits), -1, layers))[:, 1:]
        read = [prompt_context(context, *row) for row in zip(means.tolist(), tokens.tolist(), strict=True)]
        columns = np.array([(one.passage, one.stated, one.stated_length) for one in read], np.float64)
        columns = columns.reshape(-1, len(CONTEXT_SIGNALS))
    return signal_matrix(logits[:, :layers], extra_signals(signals, first_token, columns))


def with_context(signals: Sequence[Any], context: BundleContext | None) -> tuple[Any, ...]:
    """Return the classifier's signals, with those of the context where there are some."""
    if context is None or context.columns is None:
        return tuple(signals)
    return (*signals, *CONTEXT_SIGNALS[: context.columns.shape[1]])


def _has_directions(fit: ContextFit) -> bool:
    """Return whether every layer has one: a layer that is constant on the rows of this probe has none to serve."""
    return bool(np.all(np.any(fit.probe.direction, axis=1)))


def _applicability(probability: Floats, labelled: int, alone: NDArray[np.bool_] | None) -> Applicability:
    """Return where a prompt asks for no fact; ``alone`` [n]: choose by these questions only."""
    questions, others = probability[:labelled], probability[labelled:]
    lowest = np.quantile(questions, QUESTIONS_BELOW) if alone is None else np.quantile(questions[alone], LONE_BELOW)
    threshold = float(np.clip(lowest, 1e-6, 0.5))
    below, above = float((questions < threshold).mean()), float((others >= threshold).mean())
    statement = say("applicability", threshold, below, labelled, above, len(others))
    return Applicability(threshold, below, above, statement)
