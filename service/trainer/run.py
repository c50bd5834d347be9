"""One training run, top to bottom: dataset -> collect -> label -> fit -> calibrate -> evaluate -> publish.

Nothing slow starts before the data file and the options are known to be sound.  The same data, model, options and seeds
give a bundle of the same digest, also where a run was killed and started again.  Parses no command line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from probes_store.bundle import Bundle
from probes_store.manifest import NAME
from probes_store.store import Store
from service.data.collection import collect
from service.data.labels import check_answers, given_labels, judged_labels
from service.data.run_folder import locked
from service.data.training_rows import Dataset, check_disjoint, class_problems, read_dataset
from service.engines.base import Engine
from service.errors import TrainingError
from service.fitting.calibration import (
    OutOfFold,
    choose_c,
    cross_fit,
    fit_classifier,
    refit,
    signal_matrix,
    stacked,
)
from service.fitting.fit import Floats, ProbeFit, Readouts
from service.fitting.folds import group_folds
from service.fitting.nested_cv import Inputs, evaluate, held_out, name_of
from service.prompts import PromptFormat, default_prompt_format
from service.trainer.card import CardFacts, write_card
from service.trainer.options import TrainOptions
from service.trainer.plots import draw
from service.trainer.publish import Fitted, as_probes, draft, golden_rows, model_record, record_golden, trajectories
from service.trainer.record import Part, counts, document_of, plot_data, training_record


class Console(Protocol):
    """Where progress is told; a ``rich.console.Console`` will do."""

    def print(self, *objects: Any) -> None:
        """Print a line."""


def train(options: TrainOptions, engine_factory: Callable[[], Engine], store: Store, *, console: Console) -> Bundle:
    """Train one bundle and publish it.

    Raises:
        DataError: rows of a data file are at fault, by line number.
        RunMismatch: the run folder belongs to another run.
        NoDirection, TrainingError: the data do not carry a probe under these options.
        probes_store.errors.BundleError: the store cannot be written (said first) or refused the bundle.
    """
    if not NAME.fullmatch(options.name):
        raise TrainingError(
            "name must be 1 to 64 of a-z 0-9 . _ -, begin with a letter or digit and have no '..'; "
            f"not {options.name!r}",
            param="name",
        )
    dataset, test = _read(options)
    store.check_writable()
    console.print(f"{len(dataset)} rows in {options.data.name}" + (f", {len(test)} held out" if test else ""))

    with locked(options.run_dir):
        bundle = _run(options, dataset, test, engine_factory, store, console)
    console.print(f"published {bundle.reference} ({bundle.manifest.digest})")
    return bundle


def _run(
    options: TrainOptions,
    dataset: Dataset,
    test: Dataset | None,
    engine_factory: Callable[[], Engine],
    store: Store,
    console: Console,
) -> Bundle:
    """Everything that needs the model."""
    engine = engine_factory()
    try:
        prompt_format: PromptFormat = (
            default_prompt_format(engine) if options.prompt_format == "auto" else options.prompt_format
        )
        part = _collect(engine, dataset, options, prompt_format, "train", folds=options.folds)
        held = _collect(engine, test, options, prompt_format, "test", folds=0) if test else None
        told = counts(part)
        console.print(f"{told['factual']} factual, {told['hallucinated']} hallucinated, {told['left_out']} left out")

        # Fit and calibrate.  Every number of the bundle comes from here.
        fit_options = options.fit
        inputs = part.inputs
        rows = np.arange(len(inputs.label))
        choice = choose_c(inputs.readouts, inputs.group, rows, options.seeds[0], fit_options)
        console.print(f"C = {choice.c:g}; cross-fitting {options.folds} folds x {len(options.seeds)} seeds")
        crossed = cross_fit(inputs.readouts, inputs.group, rows, choice.c, options.folds, options.seeds, fit_options)
        final = refit(inputs.readouts, rows, rows, choice.c, fit_options)
        fitted, signals = _calibrate(options, inputs, crossed, final)

        # Evaluate.  Nothing below changes the bundle's numbers.
        nested = None
        if options.evaluate:
            nested = evaluate(inputs, folds=options.folds, seeds=options.seeds, options=fit_options)
        own = _scaled(final, options)
        document = document_of(options, part, crossed, own, choice.auroc, nested)
        if held is not None:
            scored = trajectories(held.inputs.readouts, fitted.probes)
            document["held_out"] = held_out(held.inputs, fitted.classifier, scored, options.signals, inputs)
            document["held_out"] |= {"file": held.dataset.path.name, "digest": held.dataset.digest}
            document["held_out"]["left_out"] = sum(held.labelled.left_out.values())
        plots = draw(plot_data(options, inputs, crossed, fitted, nested))

        # Publish.
        chosen = golden_rows(fitted.classifier.risk(signal_matrix(own, inputs.first_token, options.signals)))
        golden = record_golden(
            engine,
            part.collection.prompts,
            inputs.readouts.index[chosen],
            fitted,
            options.signals,
            trajectories(inputs.readouts.subset(chosen), fitted.probes),
        )
        training = training_record(options, part, choice.c)
        card = write_card(
            CardFacts(
                name=options.name,
                model=model_record(engine.identity),
                site=str(options.readout),
                logit_scale=options.logit_scale,
                signals=options.signals,
                prompt_format=prompt_format,
                dtype=engine.identity.dtype,
                classifier=fitted.classifier,
                signal_std=signals.std(axis=0).tolist(),
                training=training,
                data_name=options.data.name,
                left_out=part.labelled.left_out,
                evaluation=document,
                own_signal=name_of(options.signals, options.logit_scale),
                plots=sorted(plots),
            )
        )
        bundle = store.publish(
            draft(options, engine.identity, prompt_format, fitted, golden, training, document, card, plots)
        )
    finally:
        engine.close()
    return bundle


def _read(options: TrainOptions) -> tuple[Dataset, Dataset | None]:
    """Both data files, checked."""
    dataset = read_dataset(options.data, options.labels, folds=options.folds)
    test = read_dataset(options.test, options.labels, folds=0) if options.test is not None else None
    for one in (dataset, test):
        if one is not None and options.labels == "generate":
            check_answers(one, options.judge)
    if test is not None:
        check_disjoint(dataset, test)
    if options.labels == "given":
        _check_folds(options, dataset)
    return dataset, test


def _check_folds(options: TrainOptions, dataset: Dataset) -> None:
    """Make every fold of the run before the model is loaded: a small set may leave one without a class.

    Large sets do not, and there a split takes seconds.  Raises TrainingError naming seed, fold and cure.
    """
    label, group = np.array([row.label for row in dataset.rows], np.int64), dataset.groups
    if min(len(np.unique(group[label == value])) for value in (0, 1)) > 10 * max(options.folds, options.inner_folds):
        return
    every = np.arange(len(label))
    if options.c == "auto":
        group_folds(label, group, every, options.inner_folds, options.seeds[0], what="inner fold")
    for seed in options.seeds:
        for train, _ in group_folds(label, group, every, options.folds, seed):
            if options.evaluate:
                group_folds(label, group, train, options.inner_folds, seed, what="inner fold")


def _collect(
    engine: Engine, dataset: Dataset, options: TrainOptions, prompt_format: PromptFormat, name: str, *, folds: int
) -> Part:
    """Run one file through the engine and label it."""
    folder = options.run_dir / name
    collection = collect(
        engine,
        dataset,
        folder,
        sites=options.collected_sites,
        prompt_format=prompt_format,
        batch_rows=options.batch_rows,
        max_new_tokens=options.max_new_tokens if options.labels == "generate" else None,
    )
    if options.labels == "given":
        labelled = given_labels(dataset)
    else:
        labelled = judged_labels(dataset, folder, options.judge, options.abstain_pattern)
        problems = class_problems(labelled.label, dataset.groups[labelled.index], folds)
        if problems:
            raise TrainingError(f"{dataset.path}, labelled by its answers: {'; '.join(problems)}", param="labels")
    index = labelled.index
    inputs = Inputs(
        readouts=Readouts(collection.rows[options.readout], index, labelled.label),
        group=dataset.groups[index],
        first_token=collection.first_token[index],
        prompt_tokens=collection.prompts.lengths[index],
        strata=tuple(dataset.rows[row].strata for row in index.tolist()),
    )
    return Part(dataset, collection, labelled, inputs)


def _scaled(fit: ProbeFit, options: TrainOptions) -> Floats:
    return fit.trajectory / fit.scale if options.logit_scale == "standardized" else fit.trajectory


def _calibrate(options: TrainOptions, inputs: Inputs, crossed: OutOfFold, final: ProbeFit) -> tuple[Fitted, Floats]:
    """The classifier on out-of-fold signals, beside the refitted probes; and those signals, [seeds n, k]."""
    trajectory = crossed.trajectory(options.logit_scale)
    signals, label = stacked(signal_matrix(trajectory, inputs.first_token, options.signals), inputs.label)
    by_class = [trajectory[:, inputs.label == value].reshape(-1, trajectory.shape[-1]) for value in (0, 1)]
    fitted = Fitted(
        probes=as_probes(final, options.logit_scale, inputs.readouts),
        classifier=fit_classifier(signals, label),
        trajectory_mean=np.stack([rows.mean(axis=0) for rows in by_class]),
        trajectory_std=np.stack([rows.std(axis=0) for rows in by_class]),
    )
    return fitted, signals
