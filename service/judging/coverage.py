"""What a bundle's gate would answer and get wrong at each threshold, from what its evaluation.json keeps.

The shares are counted over the out-of-fold risks of the training rows.  Where a bundle keeps none, its own threshold is
all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.manifest import Manifest

CoverageSource = Literal["out_of_fold_risks", "own_threshold"]
THRESHOLDS = tuple(round(step / 100, 2) for step in range(101))
"""Where the shares are given: 0, 0.01 ... 1."""
ENOUGH = 100  # rows: ten in each tenth


@dataclass(frozen=True, slots=True)
class Gate:
    """What answering below one threshold does, as shares of the training rows."""

    threshold: float
    answered: float  # of all rows
    wrong_among_answered: float | None  # None where nothing is answered
    right_withheld: float  # of the rows that the model answers right


@dataclass(frozen=True, slots=True)
class Tenth:
    """A tenth of the training rows, ordered by risk."""

    low: float  # its smallest risk
    high: float  # its largest
    right: float  # share that the model answered right


@dataclass(frozen=True, slots=True)
class Coverage:
    """A bundle's gates over thresholds."""

    source: CoverageSource
    rows: int  # labelled training rows behind the shares
    hallucinated: float  # share of them: what is wrong where everything is answered
    gates: tuple[Gate, ...]  # at ``THRESHOLDS``; empty where the bundle keeps too little
    own: Gate | None  # at the bundle's threshold, by its cross-validation; None where it was not recorded
    tenths: tuple[Tenth, ...]  # lowest risks first; empty where the rows' risks were not kept, or are too few


def coverage(bundle: Bundle) -> Coverage:
    """Read evaluation.json.  Raises a subclass of BundleDamaged where the file changed since the bundle was loaded."""
    manifest, evaluation = bundle.manifest, bundle.evaluation()
    training = manifest.training
    rows = training.factual + training.hallucinated
    share, own, kept = training.hallucinated / rows, _own(manifest, evaluation), _recorded(manifest, evaluation)
    if kept is None:
        return Coverage("own_threshold", rows, share, (), own, ())
    return Coverage("out_of_fold_risks", rows, share, counted(*kept, THRESHOLDS), own, tenths_of(*kept))


def tenths_of(risk: NDArray[np.floating], wrong: NDArray[np.bool_]) -> tuple[Tenth, ...]:
    """risk [n], wrong [n] -> ten parts of the rows, by rising risk; none of fewer than ``ENOUGH`` rows."""
    if len(risk) < ENOUGH:
        return ()
    parts = np.array_split(np.argsort(risk, kind="stable"), 10)
    return tuple(Tenth(float(risk[part[0]]), float(risk[part[-1]]), float((~wrong[part]).mean())) for part in parts)


def _recorded(manifest: Manifest, evaluation: dict[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
    """Return out-of-fold risk and class of each training row; None where they are not kept as our trainer keeps them.

    The format does not say what evaluation.json holds.
    """
    try:
        kept = evaluation["out_of_fold"]["risks"]
        risk = np.array(kept["risk"].split(), np.float64)
        wrong = np.array(kept["hallucinated"].split(), np.int64) == 1
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if not risk.size or risk.shape != wrong.shape or not np.all((risk >= 0) & (risk <= 1)):
        return None
    if manifest.recalibration is not None:  # the rows' risks are the classifier's own
        risk = manifest.recalibration(risk)
    return risk, wrong


def training_risks(bundle: Bundle) -> NDArray[np.float64] | None:
    """Return the risks of the training rows; None where the bundle keeps none.

    Raises a subclass of BundleDamaged where the file changed since the bundle was loaded.
    """
    kept = _recorded(bundle.manifest, bundle.evaluation())
    return None if kept is None else kept[0]


def counted(risk: NDArray[np.floating], wrong: NDArray[np.bool_], thresholds: Sequence[float]) -> tuple[Gate, ...]:
    """risk [n], wrong [n] -> the rows' shares at each threshold; a risk at the threshold is withheld."""
    found = []
    for threshold in thresholds:
        answered = risk < threshold
        found.append(
            Gate(
                threshold,
                float(answered.mean()),
                float(wrong[answered].mean()) if answered.any() else None,
                float((~answered)[~wrong].mean()) if (~wrong).any() else 0.0,
            )
        )
    return tuple(found)


def _own(manifest: Manifest, evaluation: dict[str, Any]) -> Gate | None:
    """Measured at the bundle's threshold, on the rows that its threshold is about."""
    if manifest.guarantee is not None:  # a calibration set another threshold since
        return None
    try:
        moved = evaluation.get("recalibrations")
        found = moved[-1]["at_threshold"]["after"] if moved else evaluation["cross_validation"]["at_threshold"]
        answered, wrong = float(found["answered"]), float(found["wrong_among_answered"])
        return Gate(manifest.threshold, answered, wrong if answered > 0 else None, float(found["right_withheld"]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None
