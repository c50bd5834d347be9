"""Runs one training: read, ask in forms, collect, label, fit, calibrate, evaluate, publish."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from probes_store.bundle import Bundle, BundleDraft
from probes_store.local import atomic_write
from probes_store.records import Uncertainty
from probes_store.store import Store
from probes_store.syntax import NAME
from service.data.collection import Earlier, check_samples
from service.data.labels import SAMPLES_FILE, check_answers
from service.data.run_folder import finish, locked, unfinished_folder
from service.data.training_rows import Dataset, check_all_apply, check_disjoint, read_dataset
from service.engines.base import Engine
from service.errors import TrainingError
from service.fitting.decisions import at_threshold
from service.fitting.estimator import DepthMeanProbe, class_statistics, extra_signals, signal_matrix
from service.fitting.folds import group_folds, outer_folds
from service.fitting.nested_cv import Evaluation, evaluate, held_out, name_of, rounded
from service.fitting.probes import Readouts
from service.fitting.thresholds import by_wrong_costs, choose_threshold, gate_profile
from service.fitting.uncertainty import fit_interval, fit_reference
from service.judging.evaluation import RECOMMENDATION, Sample
from service.judging.evaluation import SAMPLE_KEY as SAMPLE
from service.prompts import PromptFormat, default_prompt_format
from service.readout import Probes, Site
from service.trainer import publish
from service.trainer.answer import fit_answer
from service.trainer.cards import (
    CHANCE,
    better_options,
    closing_lines,
    recommendation_page,
    say,
    write_card,
)
from service.trainer.clusters import with_clusters
from service.trainer.guarantee import carry_out, plan
from service.trainer.new_rows import Marks, standing_of
from service.trainer.options import LEAST_ROWS, Console, TrainOptions
from service.trainer.plots import draw
from service.trainer.prepare import (
    all_logits,
    collect_rows,
    fit_context,
    prepare,
    served_signals,
    trajectories,
    with_context,
)
from service.trainer.recommendation import recommend
from service.trainer.training_set import draw_sample, first_part, spread
from service.trainer.trial import announce, took_text

PUBLISHED = "published.json"  # beside a first bundle's rows: it was published


def train(
    options: TrainOptions,
    engine_factory: Callable[[], Engine],
    store: Store,
    *,
    console: Console,
    probe: DepthMeanProbe | None = None,
    began_in: Callable[[Path], object] = lambda folder: None,
    measure: bool = False,
) -> Bundle:
    """Train one bundle and publish it; with ``options.calibration`` also a version with a
    guaranteed threshold.

    ``probe``, if given, is already fitted on the labelled rows, with the options' folds and seeds.
    ``began_in`` is called with the run's folder.  ``measure``: print first what the run takes on
    this machine, by a trial of about half a minute.

    Raises NoThreshold (the bundle was published, but no threshold of it can be guaranteed),
    DataError, RunMismatch, NoDirection and TrainingError (the data allow no probe under these
    options), and BundleError (from the store)."""
    if not NAME.fullmatch(options.name):
        raise TrainingError(
            "name must be 1 to 64 of a-z 0-9 . _ -, begin with a letter or digit and have no '..';"
            f" not {options.name!r}",
            param="name",
        )
    options.check()
    dataset, test = _read(options)
    store.check_writable()
    console.print(
        f"{len(dataset)} rows in {options.file.name}" + (f", {len(test)} held out" if test else "")
    )
    for data in filter(None, (dataset, test)):
        for remark in data.remarks:
            console.print(f"{data.path.name}: {remark}")
    dataset, test = with_clusters(dataset, test)
    if dataset.clustered:
        kinds = sorted({row.strata["kind"] for row in dataset.rows if row.applies})
        console.print(
            f"no row names a kind, so kinds are {len(kinds)} clusters of the questions' words:"
            f" {'; '.join(kinds)}"
        )
    dataset, sample = draw_sample(options, dataset, test, console)

    with ExitStack() as stack:
        stack.enter_context(locked(options.folder))
        engine = stack.enter_context(closing(engine_factory()))
        if options.answers == "self":
            check_samples(engine)
        reads, run_folder = _reads(options, dataset, test, engine), options.folder
        if (
            options.run_dir is None
            and (run_folder := unfinished_folder(run_folder, reads)) != options.folder
        ):
            console.print(
                f"{options.folder} is of a finished run that read something else: this one's folder"
                f" is {run_folder}"
            )
            stack.enter_context(locked(run_folder))
        began_in(run_folder)
        options = replace(options, run_dir=run_folder)
        estimate, began = None, time.monotonic()
        if measure:
            prompt_format, sites = _prompt_format(options, engine), _sites(options)
            estimate = announce(options, dataset, test, engine, prompt_format, sites, console)
            began = time.monotonic()
        rows = _Rows(dataset, test, sample)
        draft, better = _draft(options, rows, engine, store, console, probe)
        bundle = store.publish(draft)
        finish(run_folder, reads)
        console.print(f"published {bundle.reference}")
        if estimate is not None:
            console.print(took_text(estimate, time.monotonic() - began))
        page = recommendation_page(bundle.evaluation())
        for line in (*closing_lines(bundle.evaluation()), *better, *page.splitlines()):
            console.print(line)
        if options.guarantee is not None:
            calibrating = plan(bundle, options.guarantee, store)
            for line in calibrating.described():
                console.print(line)
            bundle = calibrating.done or carry_out(calibrating, engine, store, console)
    return bundle


def _reads(
    options: TrainOptions, dataset: Dataset, test: Dataset | None, engine: Engine
) -> dict[str, Any]:
    """Return rows, model and options that the files of the run folder depend on."""
    identity = asdict(engine.identity)
    if identity["template_arguments"] is None:
        del identity["template_arguments"]  # run folders of older releases have no such key
    del identity[
        "model"
    ]  # a model's folder may have two names; the fingerprint identifies the model
    own = {"samples": SAMPLES_FILE} if options.answers == "self" else {}
    return own | {
        "data": dataset.digest,
        "test": None if test is None else test.digest,
        "model": identity,
        "sites": sorted({options.site, *options.sites}),
        "prompt_format": options.prompt_format,
        "batch_rows": options.batch_rows,
        "forms": list(options.wanted_forms),
        "max_new_tokens": options.answer_tokens if options.generates else None,
        "answer_probes": options.answer_probes,
        "seed": options.shuffles[0] if options.wanted_forms else None,
    }


def _prompt_format(options: TrainOptions, engine: Engine) -> PromptFormat:
    named = options.prompt_format
    return default_prompt_format(engine) if named == "auto" else named


def _sites(options: TrainOptions) -> tuple[Site, ...]:
    return tuple(dict.fromkeys((options.site, *options.sites)))


class _Rows(NamedTuple):
    """The rows of a run: of training, held out, and the questions that the bundle carries."""

    dataset: Dataset
    test: Dataset | None
    sample: Sample | None


def _first_bundle(
    options: TrainOptions, rows: _Rows, engine: Engine, store: Store, console: Console
) -> Earlier | None:
    """Publish a bundle of some of the training rows, unless an earlier call has; return these rows.

    Return None where the run has too few rows, or was begun without such a bundle."""
    first = first_part(options, rows.dataset)
    if first is None:
        return None
    marker = first.options.folder / PUBLISHED
    if not marker.exists():
        part, published = _Rows(first.dataset, None, rows.sample), ""
        try:
            draft, _ = _draft(first.options, part, engine, store, console, None)
        except TrainingError as error:
            console.print(f"no first bundle of {len(first.dataset):,} rows: {error}")
        else:
            published = store.publish(draft).reference
            console.print(
                f"published {published}, of {len(first.dataset):,} of the"
                f" {len(rows.dataset):,} rows: look at it while the run goes on; the bundle of all"
                " rows replaces it as the next version"
            )
        atomic_write(marker, (json.dumps({"bundle": published}) + "\n").encode())
    collection = collect_rows(
        engine,
        first.dataset,
        first.options,
        _prompt_format(options, engine),
        "train",
        sites=_sites(options),
        answer_probes=options.answer_probes,
    )
    return Earlier(collection, first.dataset, np.array(first.positions, np.int64))


def _draft(
    options: TrainOptions,
    rows: _Rows,
    engine: Engine,
    store: Store,
    console: Console,
    fitted: DepthMeanProbe | None,
) -> tuple[BundleDraft, list[str]]:
    # Collect and label.
    prompt_format = _prompt_format(options, engine)
    dataset, test = spread(options, rows.dataset, rows.test, engine, prompt_format, console)
    sample, sites = rows.sample, _sites(options)
    first = None
    if fitted is None:
        first = _first_bundle(options, _Rows(dataset, test, sample), engine, store, console)
    run = partial(prepare, engine, options=options, prompt_format=prompt_format, sites=sites)
    data = run(
        dataset,
        name="train",
        folds=options.folds,
        answer_probes=options.answer_probes,
        earlier=first,
    )
    held = run(test, name="test", folds=0, learnt=False) if test else None
    counts, inputs = data.counts, data.inputs
    learnt, soft_label = inputs.readouts.label, inputs.readouts.soft_label
    no_fact = f", {counts['others']} that ask for no fact" if counts["others"] else ""
    why = ", ".join(f"{count} {reason}" for reason, count in data.labelled.left_out.items())
    classes = (
        f"{counts['factual']} factual, {counts['hallucinated']} hallucinated, {counts['left_out']}"
        " left out"
    )
    console.print(classes + (f" ({why})" if why else "") + no_fact)

    # Fit: choose C, cross-fit for out-of-fold logits, refit the served probes on all rows.
    if fitted is None:
        console.print(f"fitting probes: {options.folds} folds x {len(options.shuffles)} seeds")
        probe = options.probe.fit_readouts(inputs.readouts, inputs.group)
        console.print(f"C = {probe.C_:g}")
    else:
        probe = copy(fitted)
        _check_fitted(probe, inputs.readouts)
    final, scaled = probe.probes_, probe.scaled_[options.scale]
    out_of_fold = scaled.out_of_fold
    class_mean, class_std = class_statistics(out_of_fold, learnt)

    # Fit the context probes (does a prompt ask for a fact, has it a passage?) and the reference of
    # training prompts.
    context = fit_context(data, probe)
    names = with_context(options.reads, context)
    columns = None if context is None else context.columns
    logits, more = all_logits(out_of_fold, data, final, scaled.scale, context)
    reference = fit_reference(logits, learnt, inputs.group, options.folds, options.shuffles, more)
    tensors = publish.probe_tensors(final, scaled.scale, class_mean, class_std, reference, context)
    probes = Probes.all_of(options.site, tensors)
    record = None if context is None else context.record()

    # Calibrate: the classifier sees out-of-fold signals only. Choose the threshold on every seed's
    # risks.
    extra = extra_signals(names, inputs.first_token, columns)
    probe.fit_risk(learnt, extra, soft_label)
    classifier, risks = probe.classifier_, probe.out_of_fold_risk_
    cut = choose_threshold(options.rule, learnt, risks)
    threshold = cut.threshold
    answer = fit_answer(data, probe, options, engine, console)

    # Evaluate.  Of this step only the width of the intervals enters the bundle's served numbers.
    served_signal = name_of(names, options.scale)
    nested: Evaluation | None = None
    recommendation: dict[str, Any] | None = None
    if options.evaluate:
        reads_context = columns is not None
        nested = evaluate(
            inputs, folds=options.folds, seeds=options.shuffles, probe=probe, context=reads_context
        )
        crossed = nested.risk[served_signal]
        nested.document["at_threshold"] = rounded(at_threshold(inputs.label, crossed, threshold))
        nested.document["by_wrong_costs"] = rounded(by_wrong_costs(inputs.label, crossed))
        nested.document.update(
            publish.strata_tables(inputs.label, crossed, inputs.strata, threshold)
        )
        nested.document.update(publish.rewording(data, crossed, threshold))
        texts = ["\n".join(data.dataset.rows[row].texts) for row in data.labelled.index.tolist()]
        if soft_label is None or inputs.truth is not None:  # else nobody knows what is wrong
            recommendation = recommend(
                inputs, texts, nested, served_signal, folds=options.folds, seed=options.shuffles[0]
            )
        auroc = nested.document["signals"][served_signal]["auroc"]
        if auroc["low"] <= CHANCE and not options.allow_no_signal:
            raise TrainingError(
                f"no signal: the nested AUROC is {auroc['mean']:.3f} [{auroc['low']:.3f}, "
                f"{auroc['high']:.3f}], and its 95 % interval reaches chance. Add rows, in more "
                "groups, or check their labels (--allow-no-signal publishes all the "
                "same)",
                param="data",
            )
    interval = (
        None
        if nested is None
        else fit_interval(nested.risk[served_signal], reference, options.folds)
    )
    uncertainty = Uncertainty(
        reference.share, reference.rows, interval, say("outside", reference, interval)
    )
    first = risks[0]  # one seed, so that each row counts once
    answering = gate_profile(inputs.label, first, inputs.group)
    document = publish.evaluation_document(options, names, data, probe, answering, first, nested)
    if prompt_format == "chat":
        labelled = [data.dataset.rows[row] for row in data.labelled.index.tolist()]
        beside = np.array(
            [standing_of(row, prompt_format).passage is True for row in labelled], np.bool_
        )
        document["out_of_fold"]["gates_by_passage"] = publish.gates_by_passage(
            inputs.label, first, inputs.group, beside
        )
    if context is not None:
        fits = [fit.record for fit in context.fits]
        document["context"] = rounded(
            {fit.name: {"auroc": fit.auroc, "rows": fit.rows} for fit in fits}
        )
    document |= {} if recommendation is None else {RECOMMENDATION: recommendation}
    document |= {} if sample is None else {SAMPLE: sample.document()}
    document |= {} if answer is None else {"answer": answer.document}
    document["threshold"] = cut.document() | {"out_of_fold": rounded(cut.gate)}
    if held is not None:
        document["rows_seen"]["held-out"] = Marks.of(held.dataset).document()
        logits = trajectories(held.inputs.readouts, probes)
        read = served_signals(
            logits,
            held.inputs.first_token,
            held.inputs.prompt_tokens,
            names,
            record,
            len(final.head),
        )
        own_file = held.dataset.origin
        document["held_out"] = held_out(held.inputs, classifier, threshold, read, inputs) | {
            "file": own_file.path.name,
            "digest": own_file.file_digest,
            "left_out": held.counts["left_out"],
        }
        if held.labelled.figures_by is not None:
            document["held_out"]["figures_by"] = held.labelled.figures_by
        risk = classifier.risk(read)[None]
        document["held_out"] |= publish.strata_tables(
            held.inputs.label, risk, held.inputs.strata, threshold
        )
        document["held_out"] |= publish.rewording(held, risk, threshold)
    plots = draw(
        publish.plot_data(
            options, names, inputs, out_of_fold, class_mean, class_std, nested, threshold
        )
    )

    # Publish: golden prompts replayed through the serving path, manifest, card.
    chosen = publish.golden_rows(classifier.risk(signal_matrix(scaled.trajectory, extra)))
    prompts = [data.collection.prompts.of(int(row)) for row in inputs.readouts.index[chosen]]
    collected = trajectories(inputs.readouts.subset(chosen), probes)
    golden = publish.record_golden(engine, prompts, probes, classifier, names, collected, record)
    manifest = publish.manifest_of(
        options,
        engine.identity,
        prompt_format,
        data,
        probe.C_,
        classifier,
        threshold,
        uncertainty,
        context,
        None if answer is None else answer.record,
    )
    card = write_card(
        manifest,
        document,
        signal_std=probe.signals_.std(axis=0).tolist(),
        left_out=data.labelled.left_out,
        plots=sorted(plots),
    )
    better = [] if nested is None else list(better_options(inputs, nested, served_signal))
    second = None if answer is None else answer.tensors
    return BundleDraft(manifest, tensors, golden, document, card, plots, second), better


def _check_fitted(probe: DepthMeanProbe, readouts: Readouts) -> None:
    fit, trajectory = probe.probes_, probe.scaled_[probe.logit_scale].trajectory
    geometry, site = readouts.file.geometry, readouts.file.site
    served = Probes(
        site,
        fit.head,
        *(array.astype(np.float32) for array in (fit.direction, fit.bias, probe.scale_)),
    )
    if (
        fit.direction.shape != (geometry.num_layers, geometry.dim(site))
        or len(trajectory) != len(readouts.label)
        or not np.allclose(
            trajectories(readouts, [served]), trajectory, rtol=1e-3, atol=1e-3 * trajectory.std()
        )
    ):
        raise TrainingError(
            "the probe was fitted on other activations than this model has at these"
            f" {len(readouts.label)} labelled rows: fit it on what extract gives for the same"
            " prompts, in the same order",
            param="probe",
        )


def _read(options: TrainOptions) -> tuple[Dataset, Dataset | None]:
    dataset = read_dataset(
        options.file, options.answers, folds=options.folds, columns=options.names
    )
    options.decoding(dataset.decodings)
    test = None
    if options.test is not None:
        test = read_dataset(options.test, options.answers, folds=0, columns=options.names)
    if (count := len(dataset.asking)) < LEAST_ROWS and not options.allow_few:
        raise TrainingError(
            f"{options.file.name} has {count} rows that ask for a fact, and a probe needs at least "
            f"{LEAST_ROWS}, better some hundreds: add rows, or give --allow-few",
            param="data",
        )
    every = (dataset,) if test is None else (dataset, test)
    for data in every:
        if options.generates:
            check_answers(data, options)
    if test is not None:
        check_disjoint(dataset, test)
    if options.calibration is not None:  # ``plan`` checks this too, but only after training
        calibration = read_dataset(
            options.calibration, options.answers, folds=None, columns=options.names
        )
        check_all_apply(calibration)
        for data in every:
            check_disjoint(data, calibration)
    if options.answers == "given":
        _check_folds(options, dataset)
    return dataset, test


def _check_folds(options: TrainOptions, dataset: Dataset) -> None:
    """Make every fold before the model is loaded, since a fold of a small set may lack a class.

    Skipped for large sets, where a split takes seconds.  Raises TrainingError that names seed, fold
    and cure."""
    asking = dataset.asking
    label = np.array([dataset.rows[row].label for row in asking.tolist()], np.int64)
    group = dataset.groups[asking]
    if min(len(np.unique(group[label == value])) for value in (0, 1)) > 10 * max(
        options.folds, options.inner_folds
    ):
        return
    rows = np.arange(len(label))
    if options.c is None:
        group_folds(label, group, rows, options.inner_folds, options.shuffles[0], what="inner fold")
    for fold in outer_folds(label, group, folds=options.folds, seeds=options.shuffles):
        if options.evaluate:
            group_folds(label, group, fold.train, options.inner_folds, fold.seed, what="inner fold")
