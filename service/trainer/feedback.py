"""Recalibration by feedback: stored risks, some with labels -> a map of the risk -> the next version, for review."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
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
from service.fitting.prior_shift import Traffic, estimate_share, number_together, prior_shift_test, shift_to
from service.fitting.recalibration import MapFit
from service.risk import served_risk
from service.trainer.cards import CAUTION, feedback_lines
from service.trainer.new_rows import Marks, seen_by
from service.trainer.options import Console, RecalibrateOptions
from service.trainer.recalibrate import check_not_recalibrated, choose_and_publish, prior_of, recorded_risks

LEAST_LABELLED = 20  # prompts of each class; fewer and the folds' maps are noise
LEAST_TRAFFIC = 100  # answers, for an estimate without labels


@dataclass(frozen=True, eq=False)
class FeedbackPlan:
    """The stored answers of a bundle's probes, and which of their labels are used."""

    options: RecalibrateOptions
    bundle: Bundle
    evaluation: dict[str, Any]
    answers: tuple[LabelledAnswer, ...]
    risk: NDArray[np.float64]  # [n] of every answer, as this bundle serves it
    used: NDArray[np.int64]  # [k] places of the answers whose label is used
    left_out: dict[str, int]

    @property
    def label(self) -> NDArray[np.int64]:
        """Return the labels of the used answers, 1 factual: [k]."""
        return np.array([self.answers[place].label for place in self.used.tolist()], np.int64)

    def described(self) -> dict[str, Any]:
        """Return who was labelled: for evaluation.json, the card and the console."""
        label, tenth = self.label, np.minimum((self.risk * 10).astype(np.int64), 9)
        answers = np.bincount(tenth, minlength=10)
        labelled = np.bincount(tenth[self.used], minlength=10)
        wrong = np.bincount(tenth[self.used], (label == 0).astype(np.float64), minlength=10)
        known = labelled > 0
        decisions = [answer.decision for answer in self.answers]
        judged = [decisions[place] for place in self.used.tolist()]
        tenths = (column.astype(int).tolist() for column in (answers, labelled, wrong))
        return {
            "answers": len(self.answers), "labelled": len(self.used), "left_out": self.left_out,
            "share": float((label == 0).mean()),
            "weighted": float((answers[known] * wrong[known] / labelled[known]).sum() / answers[known].sum()),
            "covered": float(answers[known].sum() / answers.sum()),
            "highest": float(self.risk[self.used].max()), "highest_answer": float(self.risk.max()),
            "by_tenth": list(map(list, zip(*tenths, strict=True))),
            "by_decision": {one: [decisions.count(one), judged.count(one)] for one in sorted(set(decisions))},
        }  # fmt: skip


def _plan(bundle: Bundle, options: RecalibrateOptions) -> FeedbackPlan:
    """Read the feedback and sort out what can be used.  Raises what ``recalibrate_by_feedback`` raises."""
    evaluation, signals = bundle.evaluation(), bundle.manifest.signals
    check_not_recalibrated(bundle, evaluation)
    seen = frozenset[str]().union(*(marks.prompts for _, marks in seen_by(bundle, evaluation, options.trained_on)))
    database = location(options.feedback).open(create=False)
    try:
        found = read_answers(database, bundle.manifest.files[PROBES].sha256)
    finally:
        database.close()
    answers = tuple(answer for answer in found if all(name in answer.signals for name in signals))
    if not answers:
        raise TrainingError(
            f"{location(options.feedback)} holds no answer that the probes of {bundle.reference} scored",
            param="feedback",
        )
    matrix = np.array([[answer.signals[name] for name in signals] for answer in answers], np.float64)
    judged = [place for place, answer in enumerate(answers) if answer.label is not None]
    left_out = {
        "callers disagree": sum(answer.conflict for answer in answers),
        "unclear": sum(answer.unclear for answer in answers),
        "no answer of this model": sum(answers[place].decision != CONTINUE for place in judged),
        "among the rows of training": sum(answers[place].usable and answers[place].mark in seen for place in judged),
    }
    used = [place for place in judged if answers[place].usable and answers[place].mark not in seen]
    made = FeedbackPlan(options, bundle, evaluation, answers, served_risk(matrix, bundle.manifest),
                        np.array(used, np.int64), left_out)  # fmt: skip
    prompts = {value: len({answers[place].mark for place in used if answers[place].label == value}) for value in (1, 0)}
    if min(prompts.values()) < LEAST_LABELLED:
        reasons = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
        raise TrainingError(
            f"too few labels: {prompts[1]} prompts answered right and {prompts[0]} hallucinated, of {len(answers)} "
            f"answers; {LEAST_LABELLED} of each are needed" + (f" (left out: {reasons})" if reasons else ""),
            param="feedback",
        )
    return made


def recalibrate_by_feedback(
    bundle: Bundle, options: RecalibrateOptions, store: Store, *, console: Console
) -> Bundle | None:
    """Publish a version whose risk follows the feedback; None for a dry run, and where no map does better.

    Raises FeedbackUnavailable, TrainingError for too few labels and for a bundle that cannot be recalibrated, DataError
    for a training file.
    """
    made = _plan(bundle, options)
    described = made.described()
    (groups,) = number_together([made.answers[place].mark for place in made.used.tolist()])
    console.print(f"{len(made.answers)} answers of the probes of {bundle.reference}, {len(made.used)} with a label "
                  f"that is used, of {len(np.unique(groups))} prompts")  # fmt: skip
    prior_fit = _prior_shift(made, described)
    for key, text in feedback_lines(described).items():
        console.print(f"{key}: {text}")
    console.print(CAUTION)
    if options.dry_run:
        return None
    store.check_writable()
    rows = [made.answers[place] for place in made.used.tolist()]
    record = {
        "data": {
            "file": "feedback", "digest": _digest(rows), "rows": len(rows), "factual": int(made.label.sum()),
            "hallucinated": int((made.label == 0).sum()), "left_out": sum(made.left_out.values()),
            "groups": len(np.unique(groups)),
        },
        "labels": "feedback",
        "judge": None,
        "spent": Marks(frozenset(row.mark for row in rows), frozenset()).document(),
        "feedback": rounded(described),
    }  # fmt: skip
    published = choose_and_publish(bundle, made.evaluation, options, (made.label, made.risk[made.used], groups),
                                   prior_fit, record, store, console)  # fmt: skip
    if published is not None and "production" not in store.aliases(name := published.manifest.name):
        console.print(
            f"{name} has no alias 'production', so whoever asks for {name} gets its highest version, this one: "
            f"'hallutracer bundle alias {name} production N' keeps another"
        )
    return published


def _prior_shift(made: FeedbackPlan, described: dict[str, Any]) -> MapFit | None:
    """Return the candidate that all answers give without labels, noted in ``described``; None, and the reason."""
    options, prior, source = made.options, prior_of(made.bundle), recorded_risks(made.evaluation)
    (groups,) = number_together([answer.mark for answer in made.answers])
    traffic = Traffic(made.risk, groups)
    test = None if source is None else prior_shift_test(source, traffic, options.seed)
    if len(made.answers) < LEAST_TRAFFIC:
        described["no_traffic"] = f"there are fewer than {LEAST_TRAFFIC}"
    elif test is None and not options.allow_other_shift:
        described["no_traffic"] = "the bundle records no risks of its training rows to compare with"
    elif test is not None and not test.explained and not options.allow_other_shift:
        described["no_traffic"] = (
            f"prior shift alone does not explain them (distance {test.distance:.3f}, {test.limit:.3f} would pass)"
        )
    else:
        share = estimate_share(traffic, prior, seed=options.seed)
        described["traffic"] = {
            "share": asdict(share), "test": None if test is None else asdict(test),
            "explained": None if test is None else test.explained,
        }  # fmt: skip
        shift = shift_to(share.value, prior, len(traffic.risk))
        return lambda label, risk: shift  # neither labels nor risks of the labelled rows matter
    return None


def _digest(rows: list[LabelledAnswer]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.mark, row.time, row.signals, row.label], sort_keys=True).encode() + b"\n")
    return f"sha256:{digest.hexdigest()}"
