"""The table by form of conversation in a bundle's evaluation.json: what its risk is worth in each, as it is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from probes_store.bundle import Bundle

Source = Literal["held_out", "out_of_fold"]
_PLACES: tuple[tuple[Source, str], ...] = (("held_out", "held_out"), ("out_of_fold", "cross_validation"))


@dataclass(frozen=True, slots=True)
class FormRow:
    """One form; shares of its rows."""

    form: str
    rows: int
    wrong: float
    mean_risk: float
    calibration_error: float
    auroc: float | None  # None where the rows are of one class
    answered: float | None  # None, as the next, where a calibration has set another threshold since
    wrong_among_answered: float | None  # None where nothing is answered


@dataclass(frozen=True, slots=True)
class FormTable:
    """What a bundle's risk is worth in each form."""

    source: Source
    data: tuple[FormRow, ...]


def kept_forms(evaluation: Mapping[str, Any]) -> tuple[Source, Mapping[str, Any]] | None:
    """Of held-out rows where there are some, else of folds that never saw the row; None where neither is kept."""
    for source, key in _PLACES:
        if found := (evaluation.get(key) or {}).get("by_form"):
            return source, found
    return None


def form_table(bundle: Bundle) -> FormTable | None:
    """None where it keeps none, or where a recalibration serves other risks than those that were measured.

    Raises a subclass of BundleDamaged where the file changed since the bundle was loaded.
    """
    manifest, evaluation = bundle.manifest, bundle.evaluation()
    if manifest.recalibration is not None:
        return None
    try:  # the format does not say what the file holds: what reads otherwise than our trainer's is not used
        if (kept := kept_forms(evaluation)) is None:
            return None
        source, forms = kept
        own_threshold = manifest.guarantee is None
        return FormTable(source, tuple(_row(name, row, own_threshold) for name, row in forms.items()))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _row(name: str, row: Mapping[str, Any], own_threshold: bool) -> FormRow:
    if not isinstance(row["rows"], int) or row["rows"] < 1:
        raise ValueError("no number of rows")
    return FormRow(
        name,
        row["rows"],
        _share(row["wrong"]),
        _share(row["mean_risk"]),
        _share(row["calibration_error"]),
        _known(row["auroc"]),
        _share(row["answered"]) if own_threshold else None,
        _known(row["wrong_among_answered"]) if own_threshold else None,
    )


def _known(value: Any) -> float | None:
    return None if value is None else _share(value)


def _share(value: Any) -> float:
    if not 0 <= value <= 1:  # a NaN, too
        raise ValueError("not between 0 and 1")
    return float(value)
