"""What a bundle's evaluation.json keeps: its gate over thresholds, the table by form, the sample of held-out questions.

The format does not say what that file holds: whatever reads otherwise than our trainer's counts as not kept.  Each
reader raises a subclass of BundleDamaged where the file changed since the bundle was loaded."""

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
"""Where the shares are given: 0, 0.01 ... 1."""
ENOUGH = 100  # rows: ten in each tenth


def _says(description: str) -> Any:
    return Field(description=description)


@dataclass(frozen=True, slots=True)
class CoverageGate:
    """What answering below one threshold does, as shares of the training rows."""

    threshold: Share
    answered: Share
    wrong_among_answered: Annotated[Share | None, _says("null where nothing is answered")]
    right_withheld: Annotated[Share, _says("of the rows that the model answers right")]


@dataclass(frozen=True, slots=True)
class Tenth:
    """A tenth of the training rows, ordered by risk."""

    low: Annotated[Share, _says("its smallest risk")]
    high: Annotated[Share, _says("its largest")]
    right: Annotated[Share, _says("share that the model answered right")]


_COUNTED_FROM = "the out-of-fold risks of the training rows; or nothing but the bundle's own threshold is known"


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a bundle would answer and get wrong over thresholds, on questions like its training rows."""

    source: Annotated[CoverageSource, _says(f"counted from {_COUNTED_FROM}")]
    rows: int
    hallucinated: Annotated[Share, _says("share of the rows: what is wrong where everything is answered")]
    gates: Annotated[tuple[CoverageGate, ...], _says("at the thresholds 0, 0.01 ... 1; may be empty")]
    own: Annotated[CoverageGate | None, _says("measured at the bundle's own threshold, by cross-validation")]
    tenths: Annotated[
        tuple[Tenth, ...], _says("lowest risks first; empty where the rows' risks were not kept, or are too few")
    ]


def coverage(bundle: Bundle) -> Coverage:
    """Return the bundle's gates; of one that keeps no risks of its rows, that at its own threshold alone."""
    manifest, evaluation = bundle.manifest, bundle.evaluation()
    training, own, kept = manifest.training, _own_gate(manifest, evaluation), _row_risks(manifest, evaluation)
    rows = training.factual + training.hallucinated
    share = training.hallucinated / rows
    if kept is None:
        return Coverage("own_threshold", rows, share, (), own, ())
    risk, wrong = kept
    parts = np.array_split(np.argsort(risk, kind="stable"), 10) if len(risk) >= ENOUGH else []
    tenths = [Tenth(float(risk[part[0]]), float(risk[part[-1]]), float((~wrong[part]).mean())) for part in parts]
    gates = tuple(gate_at(threshold, risk < threshold, wrong) for threshold in THRESHOLDS)
    return Coverage("out_of_fold_risks", rows, share, gates, own, tuple(tenths))


def gate_at(threshold: float, answered: NDArray[np.bool_], wrong: NDArray[np.bool_]) -> CoverageGate:
    """answered [n], wrong [n] -> the rows' shares; a risk at the threshold is withheld."""
    among = float(wrong[answered].mean()) if answered.any() else None
    withheld = float((~answered)[~wrong].mean()) if (~wrong).any() else 0.0
    return CoverageGate(threshold, float(answered.mean()), among, withheld)


def kept_risks(bundle: Bundle) -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
    """Return the risk of each training row and whether it is hallucinated; None where the bundle keeps none."""
    return _row_risks(bundle.manifest, bundle.evaluation())


def training_risks(bundle: Bundle) -> NDArray[np.float64] | None:
    """Return the risks of the training rows; None where the bundle keeps none."""
    kept = kept_risks(bundle)
    return None if kept is None else kept[0]


def _row_risks(manifest: Manifest, evaluation: dict[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
    """Return out-of-fold risk and class of each training row, the risks as they are served."""
    try:
        kept = evaluation["out_of_fold"]["risks"]
        risk = np.array(kept["risk"].split(), np.float64)
        wrong = np.array(kept["hallucinated"].split(), np.int64) == 1
    except _UNREADABLE:
        return None
    if not risk.size or risk.shape != wrong.shape or not np.all((risk >= 0) & (risk <= 1)):
        return None
    return (risk if manifest.recalibration is None else manifest.recalibration(risk)), wrong


def _own_gate(manifest: Manifest, evaluation: dict[str, Any]) -> CoverageGate | None:
    """Return what was measured at the bundle's threshold, on the rows that its threshold is about."""
    if manifest.guarantee is not None:  # a calibration set another threshold since
        return None
    try:
        moved = evaluation.get("recalibrations")
        found = moved[-1]["at_threshold"]["after"] if moved else evaluation["cross_validation"]["at_threshold"]
        answered, wrong = float(found["answered"]), float(found["wrong_among_answered"])
        among = wrong if answered > 0 else None
        return CoverageGate(manifest.threshold, answered, among, float(found["right_withheld"]))
    except _UNREADABLE:
        return None


@dataclass(frozen=True, slots=True)
class FormRow:
    """What a bundle's risk is worth on questions that were asked in one form of conversation."""

    form: str
    rows: Annotated[int, Field(strict=True)]
    wrong: Annotated[Share, _says("share that the model answers wrong")]
    mean_risk: Annotated[Share, _says("far from 'wrong', the risk is no probability in this form")]
    calibration_error: Annotated[Share, _says("debiased")]
    auroc: Annotated[Share | None, _says("null where the rows are of one class")]
    answered: Annotated[Share | None, _says("null, as the next, where a calibration has set another threshold since")]
    wrong_among_answered: Annotated[Share | None, _says("null where nothing is answered")]


_MEASURED_ON = "held-out rows, or on the training rows by folds that never saw the row"


@dataclass(frozen=True, slots=True)
class FormTable:
    """A bundle's risk by form of conversation."""

    source: Annotated[FormsSource, _says(f"measured on {_MEASURED_ON}")]
    data: tuple[FormRow, ...]


_FORM_ROW = TypeAdapter(FormRow)


def kept_strata(evaluation: Mapping[str, Any], table: str = "by_form") -> tuple[FormsSource, Mapping[str, Any]] | None:
    """Return the table of held-out rows where there are some, else of folds that never saw the row; None: neither."""
    places: tuple[tuple[FormsSource, str], ...] = (("held_out", "held_out"), ("out_of_fold", "cross_validation"))
    found = ((source, (evaluation.get(key) or {}).get(table)) for source, key in places)
    return next(((source, rows) for source, rows in found if rows), None)


def form_table(bundle: Bundle) -> FormTable | None:
    """Return None where none is kept, or where a recalibration serves other risks than those that were measured."""
    if bundle.manifest.recalibration is not None:
        return None
    try:
        if (kept := kept_strata(bundle.evaluation())) is None:
            return None
        rows = [_FORM_ROW.validate_python(row | {"form": name}) for name, row in kept[1].items()]
        if any(row.rows < 1 for row in rows):
            return None
    except _UNREADABLE:
        return None
    if bundle.manifest.guarantee is not None:  # a calibration set another threshold since
        rows = [replace(row, answered=None, wrong_among_answered=None) for row in rows]
    return FormTable(kept[0], tuple(rows))


SAMPLE_KEY: Final = "sample"  # of evaluation.json
MOST_TOKENS: Final = 64  # of an answer, whatever the file says


def _compiles(pattern: str) -> str:
    re.compile(pattern)
    return pattern


@dataclass(frozen=True, slots=True)
class SampleQuestion:
    """A held-out question that the bundle carries."""

    prompt: str
    answers: Annotated[tuple[str, ...], _says("accepted ones")]
    kind: Annotated[str, _says("'' where the data name none")]


@dataclass(frozen=True, slots=True)
class Sample:
    """Held-out questions in the order in which they were drawn, before any risk was known: the first n are a sample.

    ``train`` draws them (service.trainer.training_set), so that a stranger can see what the risk is worth."""

    file: str  # that the rows come from
    judge: Annotated[str, Field(pattern="^(contains|exact)$")]  # how an answer is compared
    abstain_pattern: Annotated[str, AfterValidator(_compiles)]  # answers that match it are neither right nor wrong
    max_tokens: Annotated[int, Field(ge=1), AfterValidator(lambda tokens: min(tokens, MOST_TOKENS))]  # as in training
    questions: Annotated[tuple[SampleQuestion, ...], Field(min_length=1)]

    def document(self) -> dict[str, Any]:
        """Return it as evaluation.json has it."""
        return asdict(self)


_SAMPLE = TypeAdapter(Sample)


def sample_of(bundle: Bundle) -> Sample | None:
    """Return None where the bundle keeps none, or none that reads as our trainer's."""
    try:
        found = _SAMPLE.validate_python(bundle.evaluation()[SAMPLE_KEY])
    except _UNREADABLE:
        return None
    return found if all(one.answers for one in found.questions) else None
