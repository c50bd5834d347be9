"""Reads a bundle's evaluation.json: its gate over thresholds, the table by form, the sample of
held-out questions.

The bundle format does not define that file, so content that our trainer did not write counts as
missing.  Each reader raises a subclass of BundleDamaged if the file changed since the bundle was
loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, TypeAdapter

from probes_store.bundle import Bundle
from probes_store.manifest import Manifest

_UNREADABLE = (KeyError, TypeError, ValueError, IndexError, AttributeError, re.error)
Share = Annotated[float, Field(strict=True, ge=0.0, le=1.0, allow_inf_nan=False)]
CoverageSource = Literal["out_of_fold_risks", "own_threshold"]
FormsSource = Literal["held_out", "out_of_fold"]
THRESHOLDS = tuple(round(step / 100, 2) for step in range(101))
"""The thresholds of a coverage: 0, 0.01 ... 1."""
ENOUGH = 100  # rows, ten in each tenth


@dataclass(frozen=True, slots=True)
class CoverageGate:
    """The gate at one threshold, in shares of the training rows."""

    threshold: Share
    answered: Share
    wrong_among_answered: Share | None  # None where nothing is answered
    right_withheld: Share  # of the rows that the model answers right


@dataclass(frozen=True, slots=True)
class Tenth:
    """A tenth of the training rows, ordered by risk."""

    low: Share  # its smallest risk
    high: Share
    right: Share  # that the model answered right


@dataclass(frozen=True, slots=True)
class Coverage:
    """The answered and wrong shares of a bundle's gate over thresholds, on questions like its
    training rows."""

    source: CoverageSource  # of the gates and tenths; with "own_threshold" there are none
    rows: int
    hallucinated: Share  # of the rows: what is wrong where everything is answered
    gates: tuple[CoverageGate, ...]  # at THRESHOLDS; may be empty
    own: CoverageGate | None  # measured at the bundle's own threshold, by cross-validation
    tenths: tuple[
        Tenth, ...
    ]  # lowest risks first; empty where the rows' risks were not kept, or are too few


def coverage(bundle: Bundle) -> Coverage:
    """Return the bundle's gates; if it does not record the risks of its rows, only that at its own
    threshold."""
    manifest, evaluation = bundle.manifest, bundle.evaluation()
    training = manifest.training
    own_gate = _own_gate(manifest, evaluation)
    row_risks = _row_risks(manifest, evaluation)
    rows = training.factual + training.hallucinated
    share = training.hallucinated / rows
    if row_risks is None:
        return Coverage("own_threshold", rows, share, (), own_gate, ())
    risk, wrong = row_risks
    parts = np.array_split(np.argsort(risk, kind="stable"), 10) if len(risk) >= ENOUGH else []
    tenths = [
        Tenth(float(risk[part[0]]), float(risk[part[-1]]), float((~wrong[part]).mean()))
        for part in parts
    ]
    gates = tuple(gate_at(threshold, risk < threshold, wrong) for threshold in THRESHOLDS)
    return Coverage("out_of_fold_risks", rows, share, gates, own_gate, tuple(tenths))


def gate_at(
    threshold: float, answered: NDArray[np.bool_], wrong: NDArray[np.bool_]
) -> CoverageGate:
    """Return the gate's shares by answered [n] and wrong [n]; a risk at the threshold is
    withheld."""
    among = float(wrong[answered].mean()) if answered.any() else None
    withheld = float((~answered)[~wrong].mean()) if (~wrong).any() else 0.0
    return CoverageGate(threshold, float(answered.mean()), among, withheld)


def kept_risks(bundle: Bundle) -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
    """Return the risk of each training row and whether it is hallucinated; None if the bundle
    records none."""
    return _row_risks(bundle.manifest, bundle.evaluation())


def training_risks(bundle: Bundle) -> NDArray[np.float64] | None:
    """Return the risks of the training rows; None if the bundle records none."""
    risks = kept_risks(bundle)
    return None if risks is None else risks[0]


def _row_risks(
    manifest: Manifest, evaluation: dict[str, Any]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
    """Return the out-of-fold risk, after a recalibration, and the class of each training row."""
    try:
        recorded = evaluation["out_of_fold"]["risks"]
        risk = np.array(recorded["risk"].split(), np.float64)
        wrong = np.array(recorded["hallucinated"].split(), np.int64) == 1
    except _UNREADABLE:
        return None
    if not risk.size or risk.shape != wrong.shape or not np.all((risk >= 0) & (risk <= 1)):
        return None
    return (risk if manifest.recalibration is None else manifest.recalibration(risk)), wrong


def _own_gate(manifest: Manifest, evaluation: dict[str, Any]) -> CoverageGate | None:
    """Return the gate that was measured at the bundle's threshold, or None."""
    if manifest.guarantee is not None:  # a calibration has set another threshold since
        return None
    try:
        moved = evaluation.get("recalibrations")
        gate = (
            moved[-1]["at_threshold"]["after"]
            if moved
            else evaluation["cross_validation"]["at_threshold"]
        )
        answered, wrong = float(gate["answered"]), float(gate["wrong_among_answered"])
        among = wrong if answered > 0 else None
        return CoverageGate(manifest.threshold, answered, among, float(gate["right_withheld"]))
    except _UNREADABLE:
        return None


@dataclass(frozen=True, slots=True)
class FormRow:
    """The quality of a bundle's risk on questions in one form of conversation."""

    form: str
    rows: Annotated[int, Field(strict=True)]
    wrong: Share  # that the model answers wrong
    mean_risk: Share  # far from ``wrong``, the risk is no probability in this form
    calibration_error: Share  # debiased
    auroc: Share | None  # None where the rows are of one class
    answered: Share | None  # None, as the next, where a calibration has set another threshold since
    wrong_among_answered: Share | None  # None where nothing is answered


@dataclass(frozen=True, slots=True)
class FormTable:
    """A bundle's risk by form of conversation."""

    source: FormsSource  # out_of_fold: on the training rows, by folds that never saw the row
    data: tuple[FormRow, ...]


_FORM_ROW = TypeAdapter(FormRow)


def kept_strata(
    evaluation: Mapping[str, Any], table: str = "by_form"
) -> tuple[FormsSource, Mapping[str, Any]] | None:
    """Return source and rows of the table of held-out rows, else of the out-of-fold table; None if
    there is neither."""
    sources: tuple[tuple[FormsSource, str], ...] = (
        ("held_out", "held_out"),
        ("out_of_fold", "cross_validation"),
    )
    tables = ((source, (evaluation.get(key) or {}).get(table)) for source, key in sources)
    return next(((source, rows) for source, rows in tables if rows), None)


def form_table(bundle: Bundle) -> FormTable | None:
    """Return the table; None if there is none, or if a recalibration changed the risks since it was
    measured."""
    if bundle.manifest.recalibration is not None:
        return None
    try:
        if (strata := kept_strata(bundle.evaluation())) is None:
            return None
        rows = [_FORM_ROW.validate_python(row | {"form": name}) for name, row in strata[1].items()]
        if any(row.rows < 1 for row in rows):
            return None
    except _UNREADABLE:
        return None
    if bundle.manifest.guarantee is not None:  # a calibration has set another threshold since
        rows = [replace(row, answered=None, wrong_among_answered=None) for row in rows]
    return FormTable(strata[0], tuple(rows))


RECOMMENDATION: Final = "recommendation"  # key of evaluation.json


def recommendation_of(bundle: Bundle) -> str | None:
    """Return the sentence that says whether the bundle pays for its model: use it, use it for some
    kinds, or do not.

    None if the bundle records none, or if the risks or the gate were changed since it was
    measured."""
    changed = bundle.manifest.recalibration or bundle.manifest.guarantee
    try:
        sentence = bundle.evaluation()[RECOMMENDATION]["sentence"]
    except _UNREADABLE:
        return None
    return sentence if isinstance(sentence, str) and sentence.strip() and not changed else None


SAMPLE_KEY: Final = "sample"  # key of evaluation.json
MOST_TOKENS: Final = 64  # most tokens of an answer, even if the file has more


def _compiles(pattern: str) -> str:
    re.compile(pattern)
    return pattern


@dataclass(frozen=True, slots=True)
class SampleQuestion:
    """A held-out question that the bundle carries."""

    prompt: str
    answers: tuple[str, ...]  # accepted ones
    kind: str  # "" where the data name none


@dataclass(frozen=True, slots=True)
class Sample:
    """Held-out questions in the order of a random draw, made before any risk was known: the first n
    are a sample.

    ``train`` draws them (service.trainer.training_set), so that anybody can test the risk."""

    file: str  # the file of the rows
    judge: Annotated[str, Field(pattern="^(contains|exact)$")]  # the judge of the answers
    abstain_pattern: Annotated[
        str, AfterValidator(_compiles)
    ]  # answers that match it are neither right nor wrong
    max_tokens: Annotated[
        int, Field(ge=1), AfterValidator(lambda tokens: min(tokens, MOST_TOKENS))
    ]  # as in training
    questions: Annotated[tuple[SampleQuestion, ...], Field(min_length=1)]

    def document(self) -> dict[str, Any]:
        """Return the part of evaluation.json."""
        return asdict(self)


_SAMPLE = TypeAdapter(Sample)


def sample_of(bundle: Bundle) -> Sample | None:
    """Return the bundle's sample; None if it has none that our trainer could have written."""
    try:
        sample = _SAMPLE.validate_python(bundle.evaluation()[SAMPLE_KEY])
    except _UNREADABLE:
        return None
    return sample if all(question.answers for question in sample.questions) else None
