"""Recalibration for another base rate: labelled rows, and unlabelled traffic -> a map of the risk -> the next version.

Nothing is changed silently: every candidate is judged on labelled rows that it was not fitted on, the table is printed,
and where the risk as it is does as well nothing is published.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.durable import atomic_write
from probes_store.store import Store
from service.data.run_folder import locked
from service.data.traffic import TrafficFile, read_traffic
from service.data.training_rows import Dataset, read_dataset
from service.engines.base import Engine
from service.errors import TrainingError
from service.fitting.group_statistics import share_interval
from service.fitting.label_shift import Source
from service.fitting.map_choice import FOLDS, Choice, choose_map
from service.prompts import as_prompt_format
from service.readout import Site
from service.scoring import Scorer
from service.trainer.ledger import Marks, check_unspent, seen_by
from service.trainer.new_rows import QUESTION, NewRows, read_new_rows, risks_of
from service.trainer.options import Console, RecalibrateOptions
from service.trainer.prepare import PreparedData, prepare
from service.trainer.recalibrated import Learnt, check_not_recalibrated, prior_of, recalibrated
from service.trainer.recalibration_card import table
from service.trainer.record import read_risks
from service.trainer.traffic import PriorShift, prior_shift, score_traffic, tested

Floats = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Plan:
    """What is going to be done, on rows that were found to be new."""

    options: RecalibrateOptions
    rows: NewRows
    traffic: TrafficFile | None
    source: Source | Dataset | None  # labelled risks of training's kind; or held-out rows that are still to be read

    @property
    def prior(self) -> float:
        """The share of hallucinated rows at which the bundle's risk holds."""
        return prior_of(self.rows.bundle)


def plan(bundle: Bundle, options: RecalibrateOptions, store: Store) -> Plan:
    """Check everything that needs no model.  Raises DataError, TrainingError, and what the store raises."""
    rows = read_new_rows(bundle, options, store, folds=FOLDS)
    options = cast(RecalibrateOptions, rows.options)
    check_not_recalibrated(bundle, rows.evaluation)
    traffic = None if options.traffic is None else read_traffic(options.traffic, bundle.manifest.digest)
    check_unspent(rows.dataset, list(seen_by(bundle, rows.evaluation, options.trained_on)))
    made = Plan(options, rows, traffic, None if traffic is None else _source(rows, options))
    if traffic is not None and made.source is None and not options.allow_other_shift:
        raise TrainingError(
            f"{bundle.reference} records no risks of its training rows by class, so nobody could tell whether prior "
            "shift alone explains the traffic: name its held-out file with --trained-on, leave --traffic out, or "
            "insist with --allow-other-shift",
            param="traffic",
        )
    return made


def recalibrate(
    bundle: Bundle,
    options: RecalibrateOptions,
    engine_factory: Callable[[], Engine],
    store: Store,
    *,
    console: Console,
) -> Bundle | None:
    """Publish a version of a bundle whose risk is recalibrated; None for a dry run, and where no map does better.

    Raises:
        DataError: rows are at fault, or not new to the bundle, by line number.
        TrainingError: see ``plan``; prior shift alone does not explain the traffic.
        probes_store.errors.BundleError: the bundle is not the model's, or the store cannot be written.
    """
    made = plan(bundle, options, store)
    for line in described(made):
        console.print(line)
    if options.dry_run:
        return None
    store.check_writable()
    with locked(made.options.folder), closing(engine_factory()) as engine:
        return _carry_out(made, engine, store, console)


def described(made: Plan) -> list[str]:
    """What is going to be done, in lines."""
    dataset, bundle = made.rows.dataset, made.rows.bundle
    groups = len(np.unique(dataset.groups))
    lines = [f"{len(dataset)} labelled rows in {groups} groups, new to {bundle.reference}", *dataset.remarks]
    lines.append(f"{bundle.reference} was fitted on rows of which {made.prior:.1%} are hallucinated")
    if made.traffic is not None:
        lines.append(f"{len(made.traffic.rows)} rows of traffic" + ("" if made.traffic.scored else ", to be scored"))
        if made.source is None:
            lines.append("whether prior shift alone explains the traffic cannot be tested: you insisted")
    if bundle.manifest.guarantee is not None:
        lines.append(
            f"the guarantee of {bundle.reference} will not be carried over: run 'hallutracer guarantee' on the new "
            "version, with other rows"
        )
    return lines


def _source(rows: NewRows, options: RecalibrateOptions) -> Source | Dataset | None:
    """Training's risks by class: recorded, or those of the held-out file where it is named."""
    recorded = rows.evaluation.get("out_of_fold", {}).get("risks")
    if recorded is not None:
        return read_risks(recorded)
    held_out = rows.evaluation.get("held_out") or {}
    for path in options.trained_on:
        dataset = read_dataset(path, rows.bundle.manifest.training.labels, folds=None)
        if dataset.digest == held_out.get("digest"):
            return dataset
    return None


def _carry_out(made: Plan, engine: Engine, store: Store, console: Console) -> Bundle | None:
    """Score, estimate, choose, publish.  Raises as ``recalibrate`` does."""
    rows, options = made.rows, made.options
    bundle = rows.bundle
    site = Site(bundle.manifest.readout.site)
    scorer = Scorer(engine, bundle)  # this model's bundle, and it reads what it should
    unlabelled, test = None, None
    if made.traffic is not None:  # before a label is looked at
        unlabelled = score_traffic(made.traffic, scorer, options.batch_rows)
        source = _source_risks(made, engine)
        test = None if source is None else tested(source, unlabelled, options, console)
    data = prepare(engine, rows.dataset, options, scorer.prompt_format, rows.folder, sites=[site], folds=FOLDS)
    _note_spent(made)
    risk, label, group = risks_of(bundle, data), data.inputs.label, data.inputs.group
    share = float(np.mean(label == 0))
    low, high = share_interval(share, group)
    console.print(f"labelled rows: {share:.1%} [{low:.1%}, {high:.1%}] of {len(label)} hallucinated")
    shift = None if unlabelled is None else prior_shift(unlabelled, test, made.prior, data, options.seed)
    if shift is not None:
        for line in shift.described():
            console.print(line)
    choice = choose_map(label, risk, group, None if shift is None else shift.fit, options.seed)
    console.print(table(choice))
    if choice.chosen.map is None:
        console.print(
            "nothing was published: no recalibration is better than the risk as it is beyond chance. The labels of "
            "these rows were looked at: do not use them for 'hallutracer guarantee'"
        )
        return None
    published = store.publish(recalibrated(_learnt(made, choice, shift, risk, data)))
    console.print(f"published {published.reference}")
    if bundle.manifest.guarantee is not None:
        console.print(f"{published.reference} has no guarantee: that of {bundle.reference} was not carried over")
    return published


def _source_risks(made: Plan, engine: Engine) -> Source | None:
    """Training's risks by class; a held-out file is read now."""
    if not isinstance(made.source, Dataset):
        return made.source
    manifest, rows = made.rows.bundle.manifest, made.rows
    options = replace(made.options, labels=manifest.training.labels)
    name = f"held-out-{made.source.digest.removeprefix('sha256:')[:12]}"
    data = prepare(engine, made.source, options, as_prompt_format(manifest.prompt_format), name,
                   sites=[Site(manifest.readout.site)], folds=None)  # fmt: skip
    return Source(risks_of(rows.bundle, data), data.inputs.label, data.inputs.group)


def _note_spent(made: Plan) -> None:
    """Say beside the rows that their labels were looked at, so that no calibration takes them."""
    path = made.options.folder / made.rows.folder / QUESTION
    if not path.exists():  # of a calibration: it says so already
        atomic_write(path, (json.dumps({"recalibrated": made.rows.bundle.reference}) + "\n").encode())


def _learnt(made: Plan, choice: Choice, shift: PriorShift | None, risk: Floats, data: PreparedData) -> Learnt:
    """What the next version is made of."""
    rows, options = made.rows, made.options
    return Learnt(
        bundle=rows.bundle,
        evaluation=rows.evaluation,
        label=data.inputs.label,
        risk=risk,
        group=data.inputs.group,
        choice=choice,
        rule=options.threshold_rule,
        seed=options.seed,
        name=options.new_name,
        data={"file": rows.dataset.path.name, "digest": rows.dataset.digest} | data.counts,
        labels=options.answers,
        judge=options.judged_by if options.answers == "generate" else None,
        spent=Marks.of(rows.dataset),
        more={} if shift is None else {"traffic": shift.document()},
    )
