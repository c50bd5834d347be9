"""Recalibrates a bundle for another base rate: fits a map of the risk on labelled rows and
unlabelled traffic.

It publishes the next version.  Every candidate map is measured on labelled rows that it was not
fitted on, and the console shows the table.  If no map is better than the risk as it is, nothing is
published."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.local import atomic_write
from probes_store.records import Recalibration
from probes_store.store import Store
from service.data.rows import rendered
from service.data.run_folder import locked
from service.data.training_rows import Dataset, TrafficFile, read_dataset, read_traffic
from service.engines.base import Engine
from service.errors import TrainingError
from service.fitting.decisions import at_threshold
from service.fitting.nested_cv import rounded
from service.fitting.recalibration import (
    FOLDS,
    LabelledRisks,
    MapCandidate,
    MapFit,
    PriorShiftTest,
    Traffic,
    choose_map,
    estimate_share,
    most_likely_share,
    prior_shift_test,
    shift_to,
)
from service.fitting.scores import number_together, share_interval
from service.scoring import Scorer
from service.trainer.cards import candidates_table, card_of, recalibrated_card
from service.trainer.new_rows import (
    Marks,
    NewRows,
    check_unspent,
    draft_of,
    read_new_rows,
    risks_of,
    seen_by,
)
from service.trainer.options import Console, RecalibrateOptions
from service.trainer.plots import draw_before_after
from service.trainer.prepare import PreparedData
from service.trainer.publish import read_risks

Floats = NDArray[np.floating]
LabelsRisksGroups = tuple[
    NDArray[np.integer], Floats, NDArray[np.integer]
]  # label [n] (1 factual), risk, group [n]
_OPEN = 1e-9  # a threshold without a guarantee lies strictly between 0 and 1


def _plan(
    bundle: Bundle, options: RecalibrateOptions, store: Store
) -> tuple[NewRows[RecalibrateOptions], TrafficFile | None, LabelledRisks | Dataset | None]:
    """Check and return labelled rows, traffic, and training's risks, or the held-out rows that can
    replace them."""
    rows = read_new_rows(bundle, options, store, folds=FOLDS)
    evaluation = rows.evaluation
    check_not_recalibrated(bundle, evaluation)
    if options.traffic is not None and bundle.manifest.training.labels == "self":
        raise TrainingError(
            f"the model labelled the training rows of {bundle.reference} itself, so traffic without"
            " labels tells nothing of wrong answers: leave --traffic out",
            param="traffic",
        )
    traffic = (
        None
        if options.traffic is None
        else read_traffic(options.traffic, bundle.manifest.digest, options.names)
    )
    check_unspent(
        rows.dataset, list(seen_by(bundle, evaluation, options.trained_on, options.names))
    )
    if traffic is None:
        return rows, None, None
    source: LabelledRisks | Dataset | None = recorded_risks(evaluation)
    if source is None:  # the held-out file, if --trained-on names it
        held_out = evaluation.get("held_out") or {}
        labels = bundle.manifest.training.labels
        files = (
            read_dataset(Path(path), labels, folds=None, columns=options.names)
            for path in rows.options.trained_on
        )
        source = next(
            (dataset for dataset in files if dataset.digest == held_out.get("digest")), None
        )
    if source is None and not options.allow_other_shift:
        raise TrainingError(
            f"{bundle.reference} records no risks of its training rows to compare the traffic with:"
            " name its held-out file with --trained-on, leave --traffic out, or give"
            " --allow-other-shift",
            param="traffic",
        )
    return rows, traffic, source


def recalibrate(
    bundle: Bundle,
    options: RecalibrateOptions,
    engine_factory: Callable[[], Engine],
    store: Store,
    *,
    console: Console,
) -> Bundle | None:
    """Publish a version of a bundle with a recalibrated risk; return None for a dry run, or if no
    map is better.

    Raises DataError, TrainingError (also if prior shift alone does not explain the traffic), and
    BundleError."""
    rows, traffic, source = _plan(bundle, options, store)
    dataset = rows.dataset
    groups = len(np.unique(dataset.groups))
    lines = [
        f"{len(dataset)} labelled rows in {groups} groups, new to {bundle.reference}",
        *dataset.remarks,
        f"{bundle.reference} was fitted on rows of which {prior_of(bundle):.1%} are hallucinated",
    ]
    if traffic is not None:
        lines.append(
            f"{len(traffic.rows)} rows of traffic{'' if traffic.scored else ', to be scored'}"
        )
    if traffic is not None and source is None:
        lines.append(
            "whether prior shift alone explains the traffic cannot be tested: going on because of"
            " --allow-other-shift"
        )
    if bundle.manifest.guarantee is not None:
        lines.append(
            f"the guarantee of {bundle.reference} will not be carried over: run 'hallutracer"
            " guarantee' on the new version, with other rows"
        )
    for line in lines:
        console.print(line)
    if options.dry_run:
        return None
    store.check_writable()
    options = rows.options
    with locked(options.folder), closing(engine_factory()) as engine:
        scorer = Scorer(
            engine, bundle
        )  # raises if the bundle belongs to another model, or does not replay
        if traffic is not None:  # it may raise, so it comes before a label is read
            risk_of_traffic = _score(traffic, scorer, options.batch_rows)
            test = _tested(rows, traffic, source, risk_of_traffic, engine, console)
        data = rows.prepare(engine, folds=FOLDS)
        if not rows.question.exists():  # a guarantee must not use rows whose labels were read
            atomic_write(
                rows.question, (json.dumps({"recalibrated": bundle.reference}) + "\n").encode()
            )
        risk = risks_of(bundle, data)
        label, group = data.inputs.label, data.inputs.group
        share = float(np.mean(label == 0))
        low, high = share_interval(share, group)
        console.print(
            f"labelled rows: {share:.1%} [{low:.1%}, {high:.1%}] of {len(label)} hallucinated"
        )
        record: dict[str, Any] = {
            "data": {"file": rows.dataset.path.name, "digest": rows.dataset.digest} | data.counts,
            "labels": options.answers,
            "judge": rows.judge,
            "spent": Marks.of(rows.dataset).document(),
        }
        fit = None
        if traffic is not None:
            prior = prior_of(bundle)
            fit, record["traffic"] = _prior_shift(
                traffic, risk_of_traffic, test, prior, data, options.seed, console
            )
        published = choose_and_publish(
            bundle, rows.evaluation, options, (label, risk, group), fit, record, store, console
        )
        if published is None:
            console.print(
                "the labels of these rows were looked at: do not use them for 'hallutracer"
                " guarantee'"
            )
        return published


def prior_of(bundle: Bundle) -> float:
    """Return the share of hallucinated rows in training, for which a bundle's risk is
    calibrated."""
    training = bundle.manifest.training
    return training.hallucinated / (training.factual + training.hallucinated)


def recorded_risks(evaluation: Mapping[str, Any]) -> LabelledRisks | None:
    """Return training's out-of-fold risks, or None if the bundle does not record them."""
    recorded = evaluation.get("out_of_fold", {}).get("risks")
    return None if recorded is None else read_risks(recorded)


def check_not_recalibrated(bundle: Bundle, evaluation: Mapping[str, Any]) -> None:
    """Raise TrainingError if a bundle has a recalibration already."""
    if bundle.manifest.recalibration is not None:
        raise TrainingError(
            f"{bundle.reference} is recalibrated already: recalibrate the version that it came"
            f" from, {evaluation['recalibrations'][-1]['from']}",
            param="bundle",
        )


def _score(file: TrafficFile, scorer: Scorer, batch_rows: int) -> Floats:
    if file.scored:
        return np.array([row.risk for row in file.rows], np.float64)
    prompts = rendered(
        str(file.path),
        ((row.line, row) for row in file.rows),
        lambda row: scorer.render(row.prompt, row.messages),
        scorer.engine.identity.max_tokens,
    )
    batches = (prompts[start : start + batch_rows] for start in range(0, len(prompts), batch_rows))
    return np.array([report.risk for batch in batches for report in scorer.score(batch)])


def _tested(
    rows: NewRows[RecalibrateOptions],
    traffic: TrafficFile,
    source: LabelledRisks | Dataset | None,
    risk: Floats,
    engine: Engine,
    console: Console,
) -> PriorShiftTest | None:
    """Test whether prior shift alone explains the traffic; return None if there are no risks to
    compare with.

    Raises TrainingError if it does not, unless ``allow_other_shift``."""
    options = rows.options
    if isinstance(source, Dataset):  # the held-out file
        labels = rows.bundle.manifest.training.labels
        assert labels != "self", "the traffic of such a bundle was refused"
        held = replace(rows, dataset=source, options=replace(options, labels=labels))
        data = held.prepare(engine, folds=None, name=f"held-out-{source.digest[7:19]}")
        source = LabelledRisks(risks_of(rows.bundle, data), data.inputs.label, data.inputs.group)
    if source is None:
        return None
    (groups,) = number_together([row.group for row in traffic.rows])
    test = prior_shift_test(source, Traffic(risk, groups), options.seed)
    console.print(
        f"the traffic against the best mixture of training's classes ({test.share:.1%}"
        f" hallucinated): distance {test.distance:.3f}, up to {test.limit:.3f} is chance or"
        f" negligible (p = {test.p_value:.2g})"
    )
    if test.explained:
        return test
    problem = (
        "prior shift alone does not explain the traffic: its risks differ from every mixture of"
        f" training's classes by {test.distance:.3f}, where at most {test.limit:.3f} would pass"
    )
    if not options.allow_other_shift:
        raise TrainingError(
            f"{problem}. Nothing was spent: leave --traffic out and recalibrate by the labelled"
            " rows, or give --allow-other-shift",
            param="traffic",
        )
    console.print(f"{problem}; going on because of --allow-other-shift")
    return test


def _prior_shift(
    file: TrafficFile,
    risk: Floats,
    test: PriorShiftTest | None,
    prior: float,
    data: PreparedData,
    seed: int,
    console: Console,
) -> tuple[MapFit, dict[str, Any]]:
    """Return the map by the share of hallucinations in the traffic, and its record for
    evaluation.json.

    It assumes that only this share has shifted.  A prompt in both files counts as a labelled
    row."""
    used = [data.dataset.rows[position] for position in data.labelled.index.tolist()]
    labelled = {row.prompt_digest for row in used}
    positions = [
        position for position, row in enumerate(file.rows) if row.prompt_digest not in labelled
    ]
    if not positions:
        raise TrainingError(
            "every row of the traffic is among the labelled rows: leave --traffic out",
            param="traffic",
        )
    named = [
        f"group {row.group}" if row.group else f"prompt {row.prompt_digest.hex()}" for row in used
    ]
    groups, of_labelled = number_together(
        [file.rows[position].group for position in positions], named
    )
    traffic = Traffic(risk[positions], groups)
    alone = estimate_share(traffic, prior, seed=seed)
    with_labels = estimate_share(traffic, prior, data.inputs.label, of_labelled, seed)
    if left_out := len(file.rows) - len(positions):
        console.print(f"{left_out} rows of the traffic are among the labelled rows and count once")
    for what, share in (("traffic alone", alone), ("traffic and labels", with_labels)):
        moved = shift_to(share.value, prior, len(positions)).c
        ends = f"[{share.low:.1%}, {share.high:.1%}]"
        console.print(
            f"{what}: {share.value:.1%} {ends} hallucinated by prior shift, log odds {moved:+.3f}"
        )

    def fit(label: NDArray[np.integer], _: Floats) -> Recalibration:
        return shift_to(
            most_likely_share(traffic, prior, label), prior, len(positions) + len(label)
        )

    return fit, {
        "file": file.path.name,
        "digest": file.digest,
        "rows": len(positions),
        "left_out": left_out,
        "groups": len(np.unique(traffic.group)),
        "share": rounded(asdict(alone)),
        "share_with_labels": rounded(asdict(with_labels)),
        "test": None if test is None else rounded(asdict(test)),
        "explained": None if test is None else test.explained,
    }


def _figures(candidate: MapCandidate) -> dict[str, Any]:
    """Return evaluation.json's record of a map."""
    figures = {
        "log_loss": {"mean": candidate.log_loss} | candidate.log_loss_interval._asdict(),
        "gain": {"mean": candidate.gain} | candidate.gain_interval._asdict(),
        "calibration_debiased": {"mean": candidate.error} | candidate.error_interval._asdict(),
    }
    return dict(rounded(figures))


def choose_and_publish(
    bundle: Bundle,
    evaluation: dict[str, Any],
    options: RecalibrateOptions,
    rows: LabelsRisksGroups,
    prior_shift: MapFit | None,
    record: dict[str, Any],
    store: Store,
    console: Console,
) -> Bundle | None:
    """Publish the bundle with the best map on ``rows``; return None if no map is better than the
    risk as it is."""
    own = bundle.manifest.training.labels == "self"
    choice = choose_map(*rows, prior_shift, options.seed, as_it_is=not own)
    console.print(candidates_table(choice))
    if choice.chosen.map is None:
        console.print(
            "nothing was published: no recalibration is better than the risk as it is beyond chance"
        )
        return None

    label, risk, group = rows
    recalibration = choice.chosen.map
    old = bundle.manifest.threshold
    new = float(
        np.clip(recalibration(old) if options.threshold_rule == "map" else old, _OPEN, 1 - _OPEN)
    )
    manifest = replace(
        bundle.manifest,
        name=options.new_name or bundle.manifest.name,
        threshold=new,
        guarantee=None,
        guarantee_shapes=None,
        guarantee_reads_answers=None,
        guarantee_strata=None,
        recalibration=recalibration,
    )
    gates = {
        "before": at_threshold(label, risk, old),
        "after": at_threshold(label, recalibration(risk), new),
    }
    record |= {
        "from": bundle.reference,
        "from_digest": bundle.manifest.digest,
        "had_guarantee": bundle.manifest.guarantee is not None,
        "prior": prior_of(bundle),
        "seed": options.seed,
        "chosen": choice.chosen.name,
        "best": choice.best.name,
        "left_out": list(choice.left_out),
        "candidates": {candidate.name: _figures(candidate) for candidate in choice.candidates},
        "thresholds": {"rule": options.threshold_rule, "before": old, "after": new},
        "at_threshold": rounded(gates),
    }
    evaluation["recalibrations"] = [*evaluation.get("recalibrations", []), record]
    if "gates" in evaluation.get(
        "out_of_fold", {}
    ):  # a later guarantee of the new version needs mapped thresholds
        out_of_fold = evaluation["out_of_fold"]
        for gate in (out_of_fold["gates"], *out_of_fold.get("gates_by_passage", {}).values()):
            # A threshold of 1, which answers everything, stays.
            gate["thresholds"] = [
                1.0 if at >= 1.0 else float(recalibration(at)) for at in gate["thresholds"]
            ]
    golden = replace(bundle.golden, risk=recalibration(bundle.golden.risk))
    plot = draw_before_after(label, group, choice.before.held_out[0], choice.chosen.held_out[0])
    card = recalibrated_card(card_of(bundle), manifest, record, candidates_table(choice))
    draft = draft_of(
        bundle, manifest, evaluation, card, golden=golden, plots={"recalibration.png": plot}
    )
    published = store.publish(draft)
    console.print(
        f"published {published.reference} ({published.manifest.digest}); no alias was moved"
    )
    if bundle.manifest.guarantee is not None:
        console.print(
            f"{published.reference} has no guarantee: that of {bundle.reference} was not carried"
            " over"
        )
    return published
