"""Recalibration for another base rate: labelled rows, and unlabelled traffic -> a map of the risk -> the next version.

Nothing is changed silently: every candidate is judged on labelled rows that it was not fitted on, the table is printed,
and where the risk as it is does as well nothing is published.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle, BundleDraft
from probes_store.local import atomic_write
from probes_store.store import Store
from service.data.run_folder import locked
from service.data.traffic import TrafficFile, read_traffic
from service.data.training_rows import Dataset, read_dataset
from service.engines.base import Engine
from service.errors import TrainingError
from service.fitting.nested_cv import rounded
from service.fitting.prior_shift import LabelledRisks
from service.fitting.recalibration import FOLDS, ChosenMap, choose_map
from service.fitting.scores import at_threshold, share_interval
from service.prompts import as_prompt_format
from service.scoring import Scorer
from service.trainer.cards import candidates_table, recalibrated_card
from service.trainer.new_rows import Marks, NewRows, check_unspent, draft_of, read_new_rows, risks_of, seen_by
from service.trainer.options import Console, RecalibrateOptions
from service.trainer.plots import draw_before_after
from service.trainer.prepare import prepare
from service.trainer.publish import read_risks
from service.trainer.traffic import prior_shift, score_traffic, tested

Floats = NDArray[np.floating]
_OPEN = 1e-9  # a threshold without a guarantee lies strictly between 0 and 1


@dataclass(frozen=True, eq=False)
class RecalibrationPlan:
    """What is going to be done, on rows that were found to be new."""

    rows: NewRows[RecalibrateOptions]
    traffic: TrafficFile | None
    source: LabelledRisks | Dataset | None  # of training's kind; or held-out rows still to be read

    def described(self) -> list[str]:
        """Return what is going to be done, in lines."""
        dataset, bundle = self.rows.dataset, self.rows.bundle
        groups = len(np.unique(dataset.groups))
        lines = [f"{len(dataset)} labelled rows in {groups} groups, new to {bundle.reference}", *dataset.remarks]
        lines.append(f"{bundle.reference} was fitted on rows of which {prior_of(bundle):.1%} are hallucinated")
        if self.traffic is not None:
            scored = "" if self.traffic.scored else ", to be scored"
            lines.append(f"{len(self.traffic.rows)} rows of traffic{scored}")
            if self.source is None:
                lines.append("whether prior shift alone explains the traffic cannot be tested: you insisted")
        if bundle.manifest.guarantee is not None:
            lines.append(
                f"the guarantee of {bundle.reference} will not be carried over: run 'hallutracer guarantee' on the "
                "new version, with other rows"
            )
        return lines


def plan(bundle: Bundle, options: RecalibrateOptions, store: Store) -> RecalibrationPlan:
    """Check everything that needs no model.  Raises DataError, TrainingError, and what the store raises."""
    rows = read_new_rows(bundle, options, store, folds=FOLDS)
    check_not_recalibrated(bundle, rows.evaluation)
    traffic = None if options.traffic is None else read_traffic(options.traffic, bundle.manifest.digest)
    check_unspent(rows.dataset, list(seen_by(bundle, rows.evaluation, options.trained_on)))
    source = None if traffic is None else _source(rows)
    if traffic is not None and source is None and not options.allow_other_shift:
        raise TrainingError(
            f"{bundle.reference} records no risks of its training rows by class, so nobody could tell whether prior "
            "shift alone explains the traffic: name its held-out file with --trained-on, leave --traffic out, or "
            "insist with --allow-other-shift",
            param="traffic",
        )
    return RecalibrationPlan(rows, traffic, source)


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
    for line in made.described():
        console.print(line)
    if options.dry_run:
        return None
    store.check_writable()
    with locked(made.rows.options.folder), closing(engine_factory()) as engine:
        return _carry_out(made, engine, store, console)


def _source(rows: NewRows[RecalibrateOptions]) -> LabelledRisks | Dataset | None:
    """Return training's risks by class: recorded, or those of the held-out file where it is named."""
    recorded = rows.evaluation.get("out_of_fold", {}).get("risks")
    if recorded is not None:
        return read_risks(recorded)
    held_out = rows.evaluation.get("held_out") or {}
    labels = rows.bundle.manifest.training.labels
    files = (read_dataset(Path(path), labels, folds=None) for path in rows.options.trained_on)
    return next((dataset for dataset in files if dataset.digest == held_out.get("digest")), None)


def _carry_out(made: RecalibrationPlan, engine: Engine, store: Store, console: Console) -> Bundle | None:
    """Score, estimate, choose, publish.  Raises as ``recalibrate`` does."""
    rows, options, bundle = made.rows, made.rows.options, made.rows.bundle
    scorer = Scorer(engine, bundle)  # this model's bundle, and it reads what it should
    unlabelled, test = None, None
    if made.traffic is not None:  # before a label is looked at
        unlabelled = score_traffic(made.traffic, scorer, options.batch_rows)
        source = _source_risks(rows, made.source, engine) if isinstance(made.source, Dataset) else made.source
        test = None if source is None else tested(source, unlabelled, options, console)
    data = prepare(engine, rows.dataset, options, scorer.prompt_format, rows.folder, sites=[rows.site], folds=FOLDS)
    if not rows.question.exists():  # no guarantee takes rows whose labels were looked at
        atomic_write(rows.question, (json.dumps({"recalibrated": bundle.reference}) + "\n").encode())
    risk, label, group = risks_of(bundle, data), data.inputs.label, data.inputs.group
    share = float(np.mean(label == 0))
    low, high = share_interval(share, group)
    console.print(f"labelled rows: {share:.1%} [{low:.1%}, {high:.1%}] of {len(label)} hallucinated")
    shift = None if unlabelled is None else prior_shift(unlabelled, test, prior_of(bundle), data, options.seed)
    for line in () if shift is None else shift.described():
        console.print(line)
    choice = choose_map(label, risk, group, None if shift is None else shift.fit, options.seed)
    console.print(candidates_table(choice))
    if choice.chosen.map is None:
        console.print(
            "nothing was published: no recalibration is better than the risk as it is beyond chance. The labels of "
            "these rows were looked at: do not use them for 'hallutracer guarantee'"
        )
        return None
    record = {
        "data": {"file": rows.dataset.path.name, "digest": rows.dataset.digest} | data.counts,
        "labels": options.answers,
        "judge": rows.judge,
        "spent": Marks.of(rows.dataset).document(),
    } | ({} if shift is None else {"traffic": shift.document()})
    published = store.publish(recalibrated(bundle, rows.evaluation, options, choice, (label, risk, group), record))
    console.print(f"published {published.reference}")
    if bundle.manifest.guarantee is not None:
        console.print(f"{published.reference} has no guarantee: that of {bundle.reference} was not carried over")
    return published


def _source_risks(rows: NewRows[RecalibrateOptions], held_out: Dataset, engine: Engine) -> LabelledRisks:
    """Return training's risks by class, of the held-out file, which is read now."""
    manifest = rows.bundle.manifest
    options = replace(rows.options, labels=manifest.training.labels)
    prompt_format, name = as_prompt_format(manifest.prompt_format), f"held-out-{held_out.digest[7:19]}"
    data = prepare(engine, held_out, options, prompt_format, name, sites=[rows.site], folds=None)
    return LabelledRisks(risks_of(rows.bundle, data), data.inputs.label, data.inputs.group)


def prior_of(bundle: Bundle) -> float:
    """Return the share of hallucinated rows at which a bundle's risk holds: training's."""
    training = bundle.manifest.training
    return training.hallucinated / (training.factual + training.hallucinated)


def check_not_recalibrated(bundle: Bundle, evaluation: Mapping[str, Any]) -> None:
    """Raise TrainingError where a bundle has a recalibration already."""
    if bundle.manifest.recalibration is not None:
        raise TrainingError(
            f"{bundle.reference} is recalibrated already: recalibrate the version that it came from, "
            f"{evaluation['recalibrations'][-1]['from']}",
            param="bundle",
        )


def recalibrated(
    bundle: Bundle,
    evaluation: dict[str, Any],
    options: RecalibrateOptions,
    choice: ChosenMap,
    rows: tuple[NDArray[np.integer], Floats, NDArray[np.integer]],
    record: dict[str, Any],
) -> BundleDraft:
    """Return the bundle with the chosen map, its threshold carried along, and a longer ledger.

    rows: label [n] (1 factual), risk [n] as the bundle serves it, group [n]; record: what the ledger's entry says of
    them.
    """
    recalibration, (label, risk, group) = choice.chosen.map, rows
    assert recalibration is not None
    old = bundle.manifest.threshold
    new = float(np.clip(recalibration(old) if options.threshold_rule == "map" else old, _OPEN, 1 - _OPEN))
    manifest = replace(
        bundle.manifest,
        name=options.new_name or bundle.manifest.name,
        threshold=new,
        guarantee=None,
        guarantee_shapes=None,
        recalibration=recalibration,
    )
    gates = {"before": at_threshold(label, risk, old), "after": at_threshold(label, recalibration(risk), new)}
    record |= {
        "from": bundle.reference,
        "from_digest": bundle.manifest.digest,
        "had_guarantee": bundle.manifest.guarantee is not None,
        "prior": prior_of(bundle),
        "seed": options.seed,
        "chosen": choice.chosen.name,
        "best": choice.best.name,
        "left_out": list(choice.left_out),
        "candidates": {
            one.name: rounded(
                {
                    "log_loss": {"mean": one.log_loss} | one.log_loss_interval._asdict(),
                    "gain": {"mean": one.gain} | one.gain_interval._asdict(),
                    "calibration_debiased": {"mean": one.error} | one.error_interval._asdict(),
                }
            )
            for one in choice.candidates
        },
        "thresholds": {"rule": options.threshold_rule, "before": old, "after": new},
        "at_threshold": rounded(gates),
    }
    evaluation["recalibrations"] = [*evaluation.get("recalibrations", []), record]
    if "gates" in evaluation.get("out_of_fold", {}):  # where a guarantee of the new version begins
        gate = evaluation["out_of_fold"]["gates"]  # 1, which everything lies below, stays
        gate["thresholds"] = [1.0 if at >= 1.0 else float(recalibration(at)) for at in gate["thresholds"]]
    golden = replace(bundle.golden, risk=recalibration(bundle.golden.risk))
    plot = draw_before_after(label, group, choice.before.held_out[0], choice.chosen.held_out[0])
    card = recalibrated_card(bundle.card(), manifest, record, candidates_table(choice))
    return draft_of(bundle, manifest, evaluation, card, golden=golden, plots={"recalibration.png": plot})
