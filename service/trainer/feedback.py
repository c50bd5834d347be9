"""Recalibrates a bundle by feedback: fits a map on stored risks, some with labels, and publishes
the next version."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.manifest import PROBES
from probes_store.store import Store
from service.errors import TrainingError
from service.feedback.databases import location
from service.feedback.rows import CONTINUE, LabelledAnswer, read_answers
from service.fitting.nested_cv import rounded
from service.fitting.recalibration import (
    MapFit,
    Traffic,
    estimate_share,
    prior_shift_test,
    shift_to,
)
from service.fitting.scores import number_together
from service.risk import served_risk
from service.trainer.cards import CAUTION, feedback_lines
from service.trainer.new_rows import Marks, seen_by
from service.trainer.options import Console, RecalibrateOptions
from service.trainer.recalibrate import (
    check_not_recalibrated,
    choose_and_publish,
    prior_of,
    recorded_risks,
)

LEAST_LABELLED = 20  # prompts of each class; with fewer, the folds' maps are noise
LEAST_TRAFFIC = 100  # answers that an estimate without labels needs


def _described(
    answers: Sequence[LabelledAnswer],
    risk: NDArray[np.float64],
    used: list[int],
    label: NDArray[np.int64],
) -> dict[str, Any]:
    tenth = np.minimum((risk * 10).astype(np.int64), 9)
    all_answers = np.bincount(tenth, minlength=10)
    labelled = np.bincount(tenth[used], minlength=10)
    wrong = np.bincount(tenth[used], (label == 0).astype(np.float64), minlength=10)
    known = labelled > 0
    decisions = [answer.decision for answer in answers]
    judged = [decisions[position] for position in used]
    tenths = (column.astype(int).tolist() for column in (all_answers, labelled, wrong))
    return {
        "answers": len(answers),
        "labelled": len(used),
        "share": float((label == 0).mean()),
        "weighted": float(
            (all_answers[known] * wrong[known] / labelled[known]).sum() / all_answers[known].sum()
        ),
        "covered": float(all_answers[known].sum() / all_answers.sum()),
        "highest": float(risk[used].max()),
        "highest_answer": float(risk.max()),
        "by_tenth": list(map(list, zip(*tenths, strict=True))),
        "by_decision": {
            decision: [decisions.count(decision), judged.count(decision)]
            for decision in sorted(set(decisions))
        },
    }


def _values(answer: LabelledAnswer, signals: Sequence[str]) -> list[float]:
    return [answer.signals[name] for name in signals]


def recalibrate_by_feedback(
    bundle: Bundle, options: RecalibrateOptions, store: Store, *, console: Console
) -> Bundle | None:
    """Publish a version whose risk fits the feedback; return None for a dry run, or if no map is
    better.

    Raises FeedbackUnavailable, TrainingError (too few labels; recalibrated already), and DataError
    (a training file).
    """
    evaluation, signals = bundle.evaluation(), bundle.manifest.signals
    check_not_recalibrated(bundle, evaluation)
    seen = frozenset[str]().union(
        *(
            marks.prompts
            for _, marks in seen_by(bundle, evaluation, options.trained_on, options.names)
        )
    )
    where = location(options.feedback)
    database = where.open(create=False)
    try:
        stored = read_answers(database, bundle.manifest.files[PROBES].sha256)
    finally:
        database.close()
    answers = tuple(answer for answer in stored if answer.signals.keys() >= set(signals))
    if not answers:
        raise TrainingError(
            f"{where} holds no answer that the probes of {bundle.reference} scored",
            param="feedback",
        )
    matrix = np.array([_values(answer, signals) for answer in answers], np.float64)
    judged = [position for position, answer in enumerate(answers) if answer.label is not None]
    left_out = {
        "callers disagree": sum(answer.conflict for answer in answers),
        "unclear": sum(answer.unclear for answer in answers),
        "no answer of this model": sum(
            answers[position].decision != CONTINUE for position in judged
        ),
        "among the rows of training": sum(
            answers[position].usable and answers[position].mark in seen for position in judged
        ),
    }
    used = [
        position
        for position in judged
        if answers[position].usable and answers[position].mark not in seen
    ]
    risk = served_risk(matrix, bundle.manifest)
    labelled_marks = {(answers[position].label, answers[position].mark) for position in used}
    prompts = Counter(value for value, _ in labelled_marks)
    if min(prompts[1], prompts[0]) < LEAST_LABELLED:
        reasons = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
        raise TrainingError(
            f"too few labels: {prompts[1]} prompts answered right and {prompts[0]} hallucinated, of"
            f" {len(answers)} answers; {LEAST_LABELLED} of each are needed"
            + (f" (left out: {reasons})" if reasons else ""),
            param="feedback",
        )
    marks = [answer.mark for answer in answers]
    label = np.array([answers[position].label for position in used], np.int64)
    described = _described(answers, risk, used, label) | {"left_out": left_out}
    (groups,) = number_together([marks[position] for position in used])
    console.print(
        f"{len(answers)} answers of the probes of {bundle.reference}, {len(used)} with a label that"
        f" is used, of {len(np.unique(groups))} prompts"
    )
    prior_fit = _prior_shift(bundle, evaluation, options, risk, marks, described)
    for key, text in feedback_lines(described).items():
        console.print(f"{key}: {text}")
    console.print(CAUTION)
    if options.dry_run:
        return None
    store.check_writable()
    rows = [answers[position] for position in used]
    digest = hashlib.sha256()
    for row in rows:
        digest.update(
            json.dumps([row.mark, row.time, row.signals, row.label], sort_keys=True).encode()
            + b"\n"
        )
    record = {
        "data": {
            "file": "feedback",
            "digest": f"sha256:{digest.hexdigest()}",
            "rows": len(rows),
            "factual": int(label.sum()),
            "hallucinated": int((label == 0).sum()),
            "groups": len(np.unique(groups)),
            "left_out": sum(left_out.values()),
        },
        "labels": "feedback",
        "judge": None,
        "feedback": rounded(described),
        "spent": Marks(frozenset(row.mark for row in rows), frozenset()).document(),
    }
    published = choose_and_publish(
        bundle, evaluation, options, (label, risk[used], groups), prior_fit, record, store, console
    )
    if published is not None and "production" not in store.aliases(name := published.manifest.name):
        console.print(
            f"{name} has no alias 'production', so whoever asks for {name} gets its highest"
            f" version, this one: 'hallutracer bundle alias {name} production N' keeps another"
        )
    return published


def _prior_shift(
    bundle: Bundle,
    evaluation: dict[str, Any],
    options: RecalibrateOptions,
    risk: NDArray[np.float64],
    marks: list[str],
    described: dict[str, Any],
) -> MapFit | None:
    """Return the map by prior shift, which needs no labels, or None; add its figures, or why not,
    to ``described``."""
    prior, source = prior_of(bundle), recorded_risks(evaluation)
    (groups,) = number_together(marks)
    traffic = Traffic(risk, groups)
    test = None if source is None else prior_shift_test(source, traffic, options.seed)
    if bundle.manifest.training.labels == "self":
        described["no_traffic"] = "the model labelled the bundle's training rows itself"
    elif len(risk) < LEAST_TRAFFIC:
        described["no_traffic"] = f"there are fewer than {LEAST_TRAFFIC}"
    elif test is None and not options.allow_other_shift:
        described["no_traffic"] = "the bundle records no risks of its training rows to compare with"
    elif test is not None and not test.explained and not options.allow_other_shift:
        described["no_traffic"] = (
            f"prior shift alone does not explain them (distance {test.distance:.3f},"
            f" {test.limit:.3f} would pass)"
        )
    else:
        share = estimate_share(traffic, prior, seed=options.seed)
        described["traffic"] = {
            "share": asdict(share),
            "test": None if test is None else asdict(test),
            "explained": None if test is None else test.explained,
        }
        shift = shift_to(share.value, prior, len(traffic.risk))
        return lambda label, risk: shift  # it does not depend on the labelled rows
    return None
