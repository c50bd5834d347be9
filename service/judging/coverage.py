"""What a bundle's gate would answer and get wrong at each threshold, from what its evaluation.json keeps.

Newer bundles keep the out-of-fold risk of every training row: their shares are counted.  Older ones keep the mean and
the deviation of each class's depth mean: their shares are modelled, with a normal distribution for each class.  Where
there is neither, the bundle's own threshold is all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle
from probes_store.manifest import Manifest
from probes_store.records import least_reaching
from service.risk import served_risk

Source = Literal["out_of_fold_risks", "normal_model", "own_threshold"]
THRESHOLDS = tuple(round(step / 100, 2) for step in range(101))
"""Where the shares are given: 0, 0.01 ... 1."""
ENOUGH = 100  # rows: ten in each tenth
MODELLED_ROWS = 2000  # that stand for the training rows whose risks were not recorded


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

    source: Source
    rows: int  # labelled training rows behind the shares
    hallucinated: float  # share of them: what is wrong where everything is answered
    gates: tuple[Gate, ...]  # at ``THRESHOLDS``; empty where the bundle keeps too little
    own: Gate | None  # at the bundle's threshold, by its cross-validation; None where it was not recorded
    tenths: tuple[Tenth, ...]  # lowest risks first; empty where the rows' risks were not kept, or are too few


def coverage(bundle: Bundle) -> Coverage:
    """Read evaluation.json.  Raises a subclass of BundleDamaged where the file changed since the bundle was loaded."""
    evaluation, manifest = bundle.evaluation(), bundle.manifest
    training = manifest.training
    rows = training.factual + training.hallucinated
    gates, tenths, source = _gates(manifest, evaluation)
    return Coverage(source, rows, training.hallucinated / rows, gates, _own(manifest, evaluation), tenths)


def _gates(manifest: Manifest, evaluation: dict[str, Any]) -> tuple[tuple[Gate, ...], tuple[Tenth, ...], Source]:
    """The format does not say what evaluation.json holds: what reads otherwise than our trainer's is not used."""
    try:
        return _read(manifest, evaluation.get("out_of_fold", {}))
    except (KeyError, TypeError, ValueError, AttributeError):
        return (), (), "own_threshold"


def _read(manifest: Manifest, kept: dict[str, Any]) -> tuple[tuple[Gate, ...], tuple[Tenth, ...], Source]:
    if (rows := _recorded(manifest, kept)) is not None:
        return counted(*rows, THRESHOLDS), tenths_of(*rows), "out_of_fold_risks"
    if (classes := _classes(manifest, kept)) is None:
        return (), (), "own_threshold"
    return modelled(manifest, *classes, THRESHOLDS), (), "normal_model"


def tenths_of(risk: NDArray[np.floating], wrong: NDArray[np.bool_]) -> tuple[Tenth, ...]:
    """risk [n], wrong [n] -> ten parts of the rows, by rising risk; none of fewer than ``ENOUGH`` rows."""
    if len(risk) < ENOUGH:
        return ()
    parts = np.array_split(np.argsort(risk, kind="stable"), 10)
    return tuple(Tenth(float(risk[part[0]]), float(risk[part[-1]]), float((~wrong[part]).mean())) for part in parts)


def _recorded(manifest: Manifest, kept: dict[str, Any]) -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
    """Out-of-fold risk and class of each training row, if they were kept."""
    if "risks" not in kept:
        return None
    risk = np.array(kept["risks"]["risk"].split(), np.float64)
    wrong = np.array(kept["risks"]["hallucinated"].split(), np.int64) == 1
    if not risk.size or risk.shape != wrong.shape or not np.all((risk >= 0) & (risk <= 1)):
        raise ValueError("not one risk and one class for each row")
    if manifest.recalibration is not None:  # the rows' risks are the classifier's own
        risk = manifest.recalibration(risk)
    return risk, wrong


def _classes(manifest: Manifest, kept: dict[str, Any]) -> tuple[NormalDist, NormalDist, float] | None:
    """The depth mean of either class, factual first, and the share of hallucinated rows, if they were kept."""
    classes = kept.get("depth_mean_cross_fitted_and_refitted")
    # Nothing is kept of the first token's signals; and a risk that rises with the depth mean is no gate.
    if classes is None or manifest.needs_first_token or manifest.classifier.weight[0] <= 0:
        return None
    factual, hallucinated = (
        NormalDist(classes[name]["cross_fitted_mean"], classes[name]["cross_fitted_std"])
        for name in ("factual", "hallucinated")
    )
    return (
        factual,
        hallucinated,
        manifest.training.hallucinated / (manifest.training.factual + manifest.training.hallucinated),
    )


def training_risks(bundle: Bundle) -> tuple[NDArray[np.float64], Source] | None:
    """The risks of the training rows, recorded or modelled; None where the bundle keeps too little.

    Raises a subclass of BundleDamaged where the file changed since the bundle was loaded.
    """
    manifest, kept = bundle.manifest, bundle.evaluation().get("out_of_fold", {})
    try:
        if (rows := _recorded(manifest, kept)) is not None:
            return rows[0], "out_of_fold_risks"
        if (classes := _classes(manifest, kept)) is None:
            return None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    factual, hallucinated, share = classes
    count = round(share * MODELLED_ROWS)
    means = [*_spread(hallucinated, count), *_spread(factual, MODELLED_ROWS - count)]
    return np.asarray(served_risk(np.array(means)[:, None], manifest), np.float64), "normal_model"


def _spread(normal: NormalDist, count: int) -> list[float]:
    """So many values that lie as the distribution does."""
    return [normal.inv_cdf((place + 0.5) / count) for place in range(count)]


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


def modelled(
    manifest: Manifest, factual: NormalDist, hallucinated: NormalDist, share: float, thresholds: Sequence[float]
) -> tuple[Gate, ...]:
    """The same from a distribution of each class's depth mean; ``share`` of the rows is hallucinated."""
    found = []
    for threshold in thresholds:
        least = _depth_mean_at(manifest, threshold)
        right, wrong = (_above(of_class, least) for of_class in (factual, hallucinated))
        answered = (1 - share) * right + share * wrong
        found.append(Gate(threshold, answered, share * wrong / answered if answered > 0 else None, 1 - right))
    return tuple(found)


def _depth_mean_at(manifest: Manifest, threshold: float) -> float:
    """The depth mean whose risk is ``threshold``; infinite at 0 and 1."""
    if manifest.recalibration is not None:
        threshold = least_reaching(manifest.recalibration, threshold)
    if not 0 < threshold < 1:
        return np.inf if threshold <= 0 else -np.inf
    return float((np.log((1 - threshold) / threshold) - manifest.classifier.intercept) / manifest.classifier.weight[0])


def _above(of_class: NormalDist, least: float) -> float:
    if np.isinf(least):
        return 0.0 if least > 0 else 1.0
    return 1.0 - of_class.cdf(least)


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
