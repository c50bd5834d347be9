"""Turns a data file into readouts and labels, and fits the context probes on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.manifest import Signal
from probes_store.records import CONTEXT_SIGNALS, Applicability, Context
from service.data.collection import Collection, Earlier, collect, read_given, sample_answers
from service.data.forms import FORMS
from service.data.forms.crossed import PLAIN_WORDING, WORDING
from service.data.judges import contains
from service.data.labels import (
    UNFINISHED,
    Labelled,
    given_labels,
    has_answers,
    has_labels,
    judged_labels,
    self_labels,
    unfinished_thoughts,
)
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

LEAST_AUROC = (
    0.9  # a probe ``asks`` with less is dropped: it would let questions through as something else
)
QUESTIONS_BELOW = 0.003  # share of the training questions that may count as no question
LONE_BELOW = (
    0.001  # the same for questions that stand alone, if training asked these in other words, too
)
UNKNOWN_LABEL = -1  # label of a row that is scored but not labelled
WITH_PASSAGE = ("passages", "long")  # families of forms


@dataclass(frozen=True, eq=False)
class PreparedData:
    """One data file, collected and labelled; ``inputs`` has the labelled rows."""

    dataset: Dataset
    collection: Collection
    labelled: Labelled
    inputs: Inputs
    answers: Readouts | None = (
        None  # readouts of the labelled rows' answers; zeros if no token was read
    )

    @property
    def counts(self) -> dict[str, int]:
        """Return rows by class, as the manifest and the evaluation name them; ``rows`` are those
        that apply."""
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
    learnt: bool = True,
    earlier: Earlier | None = None,
) -> PreparedData:
    """Collect the readouts of one file in the folder ``name`` of the run, where it can resume, and
    label its rows.

    ``sites``: the sites to collect; the probes read the first.
    ``folds``: the groups that each class must have once the answers are judged; None: no minimum.
    ``answer_probes``: read the answers' tokens, too, if the engine can.
    ``labelled``: if false, decode no answers, read no labels, and give ``UNKNOWN_LABEL`` to every
    row that applies.
    ``learnt``: if false, the rows are measured on and not learnt from, so those that bring accepted
    answers or labels need no label by the model itself.
    ``earlier``: rows that were collected before.

    Raises what ``collect`` and ``judged_labels`` raise, and TrainingError for a class with too few
    groups."""
    folder, generates = options.folder / name, labelled and options.generates
    collection = collect_rows(
        engine,
        dataset,
        options,
        prompt_format,
        name,
        sites=sites,
        answer_probes=answer_probes,
        labelled=labelled,
        earlier=earlier,
    )
    if not labelled:
        labels = Labelled(dataset.asking, np.full(len(dataset.asking), UNKNOWN_LABEL, np.int64), {})
    elif not generates:
        labels = given_labels(dataset)
    else:
        labels = _generated_labels(engine, dataset, options, collection, learnt=learnt)
        groups = dataset.groups[labels.index]
        problems = [] if folds is None else class_problems(labels.label, groups, folds)
        if problems and (unfinished := labels.left_out.get(UNFINISHED)):
            problems.append(unfinished_thoughts(unfinished, len(dataset.asking)))
        if problems:
            own = labels.agreement is not None
            by = "how far the model's answers agree" if own else "its answers"
            raise TrainingError(
                f"{dataset.path}, labelled by {by}: {'; '.join(problems)}", param="labels"
            )
    index = labels.index
    tokens = collection.prompts.lengths[index]
    inputs = Inputs(
        readouts=Readouts(collection.rows[sites[0]], index, labels.label, labels.agreement),
        group=dataset.groups[index],
        first_token=collection.first_token[index],
        prompt_tokens=tokens,
        strata=tuple(dataset.rows[row].strata for row in index.tolist()),
        prompts=prompt_labels(dataset, index, tokens),
        truth=labels.truth,
    )
    read = collection.answers
    if answer_probes and engine.reads_answers and any(row.answer for row in dataset.rows):
        read = read_given(
            engine, dataset, collection.prompts, folder / "answers", sites[0], options.batch_rows
        )
    answers = None if read is None else Readouts(read, index, labels.label, labels.agreement)
    return PreparedData(dataset, collection, labels, inputs, answers)


def labels_itself(held_out: Dataset, options: TrainOptions | NewRowsOptions) -> bool:
    """Return whether held-out rows get their label by the model's samples: those that bring neither
    accepted answers nor labels."""
    return options.answers == "self" and not has_answers(held_out) and not has_labels(held_out)


def _generated_labels(
    engine: Engine,
    dataset: Dataset,
    options: TrainOptions | NewRowsOptions,
    collection: Collection,
    *,
    learnt: bool,
) -> Labelled:
    """Return labels of the model's answers: by a judge, or with labels "self" by its samples."""
    folder = collection.folder
    if not learnt and not labels_itself(dataset, options):
        judged = options.answers == "generate" or has_answers(dataset)
        return judged_labels(dataset, folder, options) if judged else given_labels(dataset)
    if options.answers == "generate":
        return judged_labels(dataset, folder, options)
    sample_answers(engine, dataset, collection.prompts, folder, options.answer_tokens)
    labels = self_labels(dataset, folder, options)
    if labels.truth is None or not learnt:
        return labels
    groups = dataset.groups[labels.index]
    folds = options.folds if isinstance(options, TrainOptions) else 0
    if class_problems(labels.truth, groups, folds):  # too few of a class to measure anything by
        return replace(labels, truth=None, figures_by="agreement")
    return labels


def collect_rows(
    engine: Engine,
    dataset: Dataset,
    options: TrainOptions | NewRowsOptions,
    prompt_format: PromptFormat,
    name: str,
    *,
    sites: Sequence[Site],
    answer_probes: bool = False,
    labelled: bool = True,
    **more: Any,
) -> Collection:
    """Collect the readouts that ``prepare`` needs, which says what the arguments are; ``more`` is
    handed to ``collect``."""
    generates = labelled and options.generates
    return collect(
        engine,
        dataset,
        options.folder / name,
        sites=sites,
        prompt_format=prompt_format,
        batch_rows=options.batch_rows,
        max_new_tokens=options.answer_tokens if generates else None,
        answer_site=sites[0] if answer_probes and generates and engine.reads_answers else None,
        **more,
    )


def was_read(answers: Readouts) -> NDArray[np.bool_]:
    """Return whether any token of each row's answer was read: [n]."""
    return np.asarray(answers.file.head(0, 0)[answers.index].any(axis=1))


def trajectories(readouts: Readouts, probes: Sequence[Probes]) -> Floats:
    """Return scaled logits of collected rows as a service computes them: [n, probes m], probe by
    probe."""
    columns = []
    for probe in probes:
        for layer, head in enumerate(probe.head.tolist()):
            a = readouts.file.head(layer, head)[readouts.index]
            only = slice(layer, layer + 1)
            columns.append(
                truth_logits(a[:, None], probe.direction[only], probe.bias[only], probe.scale[only])
            )
    return np.concatenate(columns, axis=1)


def prompt_labels(dataset: Dataset, index: Index, tokens: Index) -> PromptLabels:
    """Return whether each prompt has a passage, by its form or shape, and whether it states an
    accepted answer."""
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
    """The context fits of one run, on n labelled rows and then k rows that do not apply."""

    fits: tuple[ContextFit, ...]
    labelled: int  # n
    columns: (
        Floats | None
    )  # [n, 2 or 3] the context signals of the classifier; None if it reads none
    alone: NDArray[np.bool_]  # [n] whether a labelled row's question stands alone
    reworded: (
        int | None
    )  # rows with a lone question in other words; None if their groups are too few

    @property
    def logits(self) -> Floats:
        """Return the logits of A probes, [n + k, A m]; out of fold for rows that a probe was fitted
        on."""
        return np.concatenate([fit.logits for fit in self.fits], axis=1)

    def record(self) -> Context:
        """Return the manifest's record, with the P(asks) below which a prompt asks for no fact."""
        lone = None if self.reworded is None else self.alone
        asks = (
            _applicability(fit.probability, self.labelled, lone)
            for fit in self.fits
            if fit.record.name == "asks"
        )
        return Context(tuple(fit.record for fit in self.fits), next(asks, None))

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return the ``context_`` arrays of ``ProbeTensors``."""
        arrays: dict[str, NDArray[Any]] = {}
        for name in ("head", "direction", "bias", "scale"):
            stacked = np.stack([getattr(fit.probe, name) for fit in self.fits])
            arrays[f"context_{name}"] = stacked if name == "head" else stacked.astype(np.float32)
        return arrays


def fit_context(data: PreparedData, probe: DepthMeanProbe) -> BundleContext | None:
    """Fit the context probes that the rows allow; return None if they allow none."""
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
    # By the same rule as ``Standing.no_fact_below`` in a service.
    alone = np.array([shape_around(row.messages or ()).turns == "0" for row in rows], np.bool_)
    other_words = alone & np.array(
        [_in_other_words(row.strata.get(FORM, "")) for row in rows], np.bool_
    )
    enough = len(np.unique(group[:n][other_words])) >= LEAST
    reworded = int(other_words.sum()) if enough else None
    return BundleContext(fits, n, columns, alone, reworded) if fits else None


def _in_other_words(form: str) -> bool:
    return form.startswith(WORDING) and form != PLAIN_WORDING


def all_logits(
    out_of_fold: Floats,
    data: PreparedData,
    final: ProbeFit,
    scale: Floats,
    context: BundleContext | None,
) -> tuple[Floats, tuple[Floats, Index]]:
    """Return logits [seeds, n, (1 + A) m] for the reference, and logits and groups [k] of the rows
    that do not apply.

    ``out_of_fold`` [seeds, n, m] are the logits of the risk.  ``final`` was fitted without the rows
    that do not apply.
    """
    n, no_fact = len(data.inputs.label), data.dataset.others
    arrays = (array.astype(np.float32) for array in (final.direction, final.bias, scale))
    probe = Probes(data.inputs.readouts.file.site, final.head, *arrays)
    no_fact_logits = trajectories(
        Readouts(data.inputs.readouts.file, no_fact, np.zeros(len(no_fact), np.int64)), [probe]
    )
    group = data.dataset.groups[no_fact]
    if context is None:
        return out_of_fold, (no_fact_logits, group)
    context_logits = np.broadcast_to(
        context.logits[:n], (len(out_of_fold), n, context.logits.shape[1])
    )
    return np.concatenate([out_of_fold, context_logits], axis=2), (
        np.concatenate([no_fact_logits, context.logits[n:]], axis=1),
        group,
    )


def served_signals(
    logits: Floats,
    first_token: Floats,
    tokens: Index,
    signals: Sequence[Signal],
    context: Context | None,
    layers: int,
) -> Floats:
    """Return the classifier's input [n, k] as a service computes it, from logits [n, (1 + A) m] and
    prompt lengths."""
    columns: Floats | None = None
    if context is not None and all(
        context.position(name) is not None for name in ("passage", "stated")
    ):
        means = depth_mean(logits.reshape(len(logits), -1, layers))[:, 1:]
        read = [
            prompt_context(context, *row)
            for row in zip(means.tolist(), tokens.tolist(), strict=True)
        ]
        columns = np.array(
            [(values.passage, values.stated, values.stated_length) for values in read], np.float64
        )
        columns = columns.reshape(-1, len(CONTEXT_SIGNALS))
    return signal_matrix(logits[:, :layers], extra_signals(signals, first_token, columns))


def with_context(signals: Sequence[Any], context: BundleContext | None) -> tuple[Any, ...]:
    """Return the classifier's signals, with those of the context if the bundle has some."""
    if context is None or context.columns is None:
        return tuple(signals)
    return (*signals, *CONTEXT_SIGNALS[: context.columns.shape[1]])


def _has_directions(fit: ContextFit) -> bool:
    """Return whether every layer has a direction; a layer that is constant on the probe's rows has
    none."""
    return bool(np.all(np.any(fit.probe.direction, axis=1)))


def _applicability(
    probability: Floats, labelled: int, alone: NDArray[np.bool_] | None
) -> Applicability:
    """Return the threshold of P(asks); with ``alone`` [n] it is chosen by these questions only."""
    questions, no_fact = probability[:labelled], probability[labelled:]
    lowest = (
        np.quantile(questions, QUESTIONS_BELOW)
        if alone is None
        else np.quantile(questions[alone], LONE_BELOW)
    )
    threshold = float(np.clip(lowest, 1e-6, 0.5))
    below, above = float((questions < threshold).mean()), float((no_fact >= threshold).mean())
    statement = say("applicability", threshold, below, labelled, above, len(no_fact))
    return Applicability(threshold, below, above, statement)
