"""Fits strictly increasing maps from risk to risk, on labelled rows or by the share of
hallucinations in traffic.

The chosen map is the simplest whose log loss, on groups that it was not fitted on, is within one
standard error of the best; errors and intervals are by jackknife over groups.

Prior shift (label shift) means: given the class, risks have the same distribution in traffic as in
training; only the share pi of hallucinated rows differs.  Then the odds of every risk change by one
factor,

    logit(risk') = logit(risk) + logit(pi) - logit(pi_0),

and unlabelled rows are enough to estimate pi (Saerens, Latinne and Decaestecker 2002, Neural
Computation 14, 21-41). If something else shifts, the estimate is wrong without notice;
``prior_shift_test`` tests for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit
from sklearn.isotonic import isotonic_regression

from probes_store.records import EDGE, Method, Recalibration
from service.fitting import scores
from service.fitting.estimator import fit_classifier
from service.fitting.folds import Pairs, group_folds
from service.fitting.scores import ConfidenceInterval, Floats, Labels, group_draws, standard_error
from service.fitting.scores import t_interval as interval

MapFit = Callable[[Labels, Floats], Recalibration | None]

FOLDS = 5
SEEDS = (0, 1, 2)  # shuffles of the folds; losses are averaged over them
COX_KEYS = ("calibration_slope", "calibration_intercept")
# factor on the last value at the end of the scale, so that risks beyond all rows stay in order
_TAIL = 0.99


def fit_intercept(label: Labels, risk: Floats) -> Recalibration | None:
    """Return the most likely shift of the log odds; it makes the mean risk equal the share of
    hallucinated rows."""
    x, bad = _log_odds(risk), np.asarray(label) == 0
    if not bad.any() or bad.all():
        return None
    low, high = -60.0, 60.0
    for _ in range(60):  # to the last bit, since the result is part of a served risk
        middle = (low + high) / 2
        low, high = (middle, high) if expit(x + middle).sum() < bad.sum() else (low, middle)
    return Recalibration("intercept", c=(low + high) / 2)


def fit_isotonic(label: Labels, risk: Floats) -> Recalibration | None:
    """Return pool-adjacent-violators, linear between its blocks' means, so that rows of a block
    keep their order.

    Values are shrunk towards the rows' share with the weight of one row, since a block without an
    error does not prove a risk of 0.  None if one block has all rows."""
    order = np.argsort(risk, kind="stable")
    x, bad = np.asarray(risk, np.float64)[order], (np.asarray(label)[order] == 0).astype(np.float64)
    levels, level, size = np.unique(x, return_inverse=True, return_counts=True)
    fitted = isotonic_regression(
        np.bincount(level, bad) / size, sample_weight=size.astype(np.float64)
    )
    values, block = np.unique(fitted.round(12), return_inverse=True)
    if len(values) < 2:
        return None
    centres = np.bincount(block, levels * size) / np.bincount(block, size)
    values = (values * len(x) + bad.mean()) / (len(x) + 1)
    knots = np.concatenate([[0.0], centres, [1.0]])
    ends = np.concatenate([[_TAIL * values[0]], values, [1 - _TAIL * (1 - values[-1])]])
    inner = np.concatenate([[True], (centres > 0) & (centres < 1), [True]])
    return Recalibration(
        "isotonic", knots=tuple(knots[inner].tolist()), values=tuple(ends[inner].tolist())
    )


FITS: dict[Method, MapFit] = {
    "intercept": fit_intercept,
    "isotonic": fit_isotonic,
}  # from simple to flexible


def _log_odds(risk: Floats, edge: float = EDGE) -> NDArray[np.float64]:
    return np.asarray(logit(np.clip(np.asarray(risk, np.float64), edge, 1 - edge)))


@dataclass(frozen=True, eq=False)
class MapCandidate:
    """One map, and its figures on rows that it was not fitted on."""

    name: Method | Literal["identity"]
    map: Recalibration | None  # fitted on all rows; None: the risk as it is
    held_out: Floats  # [seeds, n] risks by maps that were fitted without the row's group
    loss: Floats  # [n] negative log likelihood in nats, mean over seeds
    log_loss: float
    log_loss_interval: ConfidenceInterval
    gain: float  # in log loss, over the risk as it is
    gain_interval: ConfidenceInterval
    error: float  # debiased calibration error
    error_interval: ConfidenceInterval


@dataclass(frozen=True, eq=False)
class ChosenMap:
    """All candidates, from simple to flexible with the risk ``before`` first, and the chosen
    one."""

    candidates: tuple[MapCandidate, ...]
    before: MapCandidate  # the risk as it is
    chosen: MapCandidate
    best: MapCandidate  # the one with the least loss
    left_out: tuple[str, ...]  # candidates that have no fit which keeps the order of risks


def choose_map(
    label: Labels,
    risk: Floats,
    group: Labels,
    prior_shift: MapFit | None = None,
    seed: int = 0,
    *,
    as_it_is: bool = True,
) -> ChosenMap:
    """Measure every candidate on labelled rows: label, risk, group [n]; ``prior_shift`` adds one
    fitted on traffic.

    ``as_it_is``: if false, the risk is no probability of these labels, so any map that can be
    fitted is chosen before none.
    Raises TrainingError if a fold lacks a class."""
    fits: dict[Method, MapFit] = (
        FITS if prior_shift is None else {"prior_shift": prior_shift, **FITS}
    )
    folds = [
        group_folds(label, group, np.arange(len(label)), FOLDS, shuffle + seed) for shuffle in SEEDS
    ]
    unchanged = np.tile(risk, (len(SEEDS), 1))
    before = _loss(label, unchanged)
    candidates, left_out = [_candidate("identity", None, unchanged, label, before, group)], []
    for name, fit in fits.items():
        whole, held_out = fit(label, risk), _held_out(fit, label, risk, folds)
        if whole is None or held_out is None:
            left_out.append(name)
        else:
            candidates.append(_candidate(name, whole, held_out, label, before, group))
    eligible = candidates if as_it_is else candidates[1:] or candidates
    best = min(eligible, key=lambda candidate: candidate.log_loss)
    errors = (
        standard_error(means_without(candidate.loss - best.loss, group)) for candidate in eligible
    )
    near = (
        candidate
        for candidate, error in zip(eligible, errors, strict=True)
        if candidate.log_loss - best.log_loss <= error + 1e-9
    )
    return ChosenMap(tuple(candidates), candidates[0], next(near), best, tuple(left_out))


def _held_out(fit: MapFit, label: Labels, risk: Floats, folds: Sequence[Pairs]) -> Floats | None:
    """Return risks by maps that were fitted without the row's group, [seeds, n]; None if a fold has
    no map."""
    table = np.empty((len(folds), len(label)))
    for shuffle, pairs in enumerate(folds):
        for train, test in pairs:
            fitted = fit(label[train], risk[train])
            if fitted is None:
                return None
            table[shuffle, test] = fitted(risk[test])
    return table


def _loss(label: Labels, risks: Floats) -> Floats:
    """Return -log P(label), mean over seeds: risks [seeds, n] -> [n]."""
    inside = np.clip(risks, EDGE, 1 - EDGE)
    return np.asarray(
        np.where(np.asarray(label) == 0, -np.log(inside), -np.log1p(-inside)).mean(axis=0)
    )


def _candidate(
    name: Method | Literal["identity"],
    fitted: Recalibration | None,
    held_out: Floats,
    label: Labels,
    before: Floats,
    group: Labels,
) -> MapCandidate:
    loss, folds = _loss(label, held_out), None if fitted is None else FOLDS
    squared, without = scores.squared_calibration_error(label, held_out[0], group)
    error, low, high = (
        float(np.sqrt(max(0.0, x))) for x in (squared, *interval(squared, without, folds))
    )
    gain = before - loss
    log_loss, mean_gain = float(loss.mean()), float(gain.mean())
    return MapCandidate(
        name,
        fitted,
        held_out,
        loss,
        log_loss,
        interval(log_loss, means_without(loss, group), folds),
        mean_gain,
        interval(mean_gain, means_without(gain, group), folds),
        error,
        ConfidenceInterval(low, high),
    )


def means_without(values: Floats, group: Labels) -> NDArray[np.float64]:
    """Return the mean without each group: values, group [n] -> [G]."""
    member = np.unique(group, return_inverse=True)[1]
    return np.asarray(
        (values.sum() - np.bincount(member, values)) / (len(values) - np.bincount(member))
    )


# --- calibration of a risk ---


class CoxLine(NamedTuple):
    """log odds of hallucinated = intercept + slope x log odds of the risk (Cox 1958, Biometrika 45,
    562-565).

    Slope 1 and intercept 0 are perfect; with a slope below 1 the risks are too extreme."""

    slope: float
    intercept: float


def fit_cox_line(label: Labels, risk: Floats) -> CoxLine | None:
    """Return the line for label, risk [n]; None if the risks separate the classes, or are all
    equal."""
    x, bad = _log_odds(risk, 1e-9), np.asarray(label) == 0
    if not bad.any() or bad.all() or x[bad].max() <= x[~bad].min() or x[~bad].max() <= x[bad].min():
        return None
    of_factual = fit_classifier(x[:, None], np.asarray(label))  # of hallucinated: every sign turns
    return CoxLine(-float(of_factual.weight[0]), -of_factual.intercept)


def cox_line(
    label: Labels, group: Labels, risks: Floats, folds: int | None = None
) -> dict[str, Any]:
    """Return by ``COX_KEYS`` mean and deviation over seeds, low and high of a 95 % interval: risks
    [seeds, n].

    label, group [n]; ``folds`` as in ``t_interval``.  None if a seed has no line.  The interval is
    a jackknife's.  The line without a group is one Newton step from the line of all data (Shao and
    Tu 1995, The Jackknife and Bootstrap), which needs only sums over groups; if there is no such
    step, low and high are left out."""
    lines = [fit_cox_line(label, risk) for risk in risks]
    if any(line is None for line in lines):
        return dict.fromkeys(COX_KEYS)
    coefficients = np.array(lines, np.float64)  # [seeds, 2]
    table: dict[str, Any] = {}
    without = _lines_without(np.asarray(label) == 0, group, risks, coefficients)
    for column, key in enumerate(COX_KEYS):
        table[key] = {
            "mean": float(coefficients[:, column].mean()),
            "std": float(coefficients[:, column].std()),
        }
        if without is not None:
            table[key] |= interval(table[key]["mean"], without[:, column], folds)._asdict()
    return table


def _lines_without(
    bad: NDArray[np.bool_], group: Labels, risks: Floats, lines: Floats
) -> Floats | None:
    """Return the mean line over seeds without each group, [groups, 2]; None if a Newton step is not
    finite."""
    names, member = np.unique(group, return_inverse=True)
    steps = []
    for risk, (slope, intercept) in zip(risks, lines, strict=True):
        x = _log_odds(risk, 1e-9)
        p = expit(intercept + slope * x)
        residual, spread = bad - p, p * (1 - p)
        steps.append(
            [
                np.bincount(member, part)
                for part in (residual, residual * x, spread, spread * x, spread * x * x)
            ]
        )
    sums = np.array(steps)  # gradient and Hessian by group: [seeds, 5, G]
    g0, g1, h00, h01, h11 = (sums.sum(axis=2, keepdims=True) - sums).transpose(
        1, 2, 0
    )  # [G, seeds] each
    determinant = h00 * h11 - h01**2
    if len(names) < 2 or not (determinant > 1e-9 * h00 * h11).all():
        return None
    step = np.stack([h00 * g1 - h01 * g0, h11 * g0 - h01 * g1], axis=-1) / determinant[..., None]
    return np.asarray((lines + step).mean(axis=1))


# --- the share of hallucinations in traffic, and the test of prior shift ---

LEVELS = 512  # distinct likelihood ratios
LEVEL = 0.01  # significance level of the test
# a distance that always passes: refitted probes differ from cross-fitted ones by about as much
NEGLIGIBLE = 0.03
CUTS = 50  # risks at which the distribution functions are compared


class Traffic(NamedTuple):
    """Unlabelled rows: the risks that the bundle serves for them, and groups of rows that depend on
    each other, [n]."""

    risk: Floats
    group: Labels


class LabelledRisks(NamedTuple):
    """Out-of-fold risks of training rows, labels (1 factual) and groups, [n]."""

    risk: Floats
    label: Labels
    group: Labels


@dataclass(frozen=True)
class ShareEstimate:
    """A share of hallucinated rows with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PriorShiftTest:
    """The traffic against the best mixture of the classes."""

    share: float  # of hallucinated rows in the best mixture, by black-box shift estimation
    distance: float  # largest difference between the two distribution functions
    limit: float  # above it prior shift is rejected
    p_value: float

    @property
    def explained(self) -> bool:
        """Whether prior shift alone can explain the traffic."""
        return self.distance <= self.limit


def most_likely_share(traffic: Traffic, prior: float, label: Labels | None = None) -> float:
    """Return the share of greatest likelihood on ``traffic``, whose risks are calibrated for the
    share ``prior``.

    label [m] are the labels of further rows, drawn at random from the same traffic."""
    ratio, level = _ratios(traffic.risk, prior)
    labels = np.ones(0) if label is None else np.asarray(label)
    return float(
        _most_likely(ratio, _counts(level, labels, np.ones(len(level) + len(labels)))[None])[0]
    )


def estimate_share(
    traffic: Traffic,
    prior: float,
    label: Labels | None = None,
    group: Labels | None = None,
    seed: int = 0,
) -> ShareEstimate:
    """Return ``most_likely_share`` with its interval by bootstrap over groups, which takes
    training's risks as exact.

    group [m] of the labelled rows has the same numbers as the groups of the traffic."""
    labels = np.ones(0) if label is None else np.asarray(label)
    groups = traffic.group if group is None else np.concatenate([traffic.group, group])
    ratio, level = _ratios(traffic.risk, prior)
    drawn = np.array([_counts(level, labels, weight) for weight in group_draws(groups, seed)])
    low, high = np.quantile(_most_likely(ratio, drawn), scores.TAILS)
    return ShareEstimate(most_likely_share(traffic, prior, label), float(low), float(high))


def _counts(level: Labels, label: Labels | Floats, weight: Floats) -> Floats:
    """Return the summed weight of each level of the traffic, then of hallucinated and of factual
    labelled rows."""
    known = weight[len(level) :]
    return np.append(
        np.bincount(level, weight[: len(level)]), [known[label == 0].sum(), known[label != 0].sum()]
    )


def shift_to(share: float, prior: float, rows: int) -> Recalibration:
    """Return the map from risks for the share ``prior`` to risks for ``share``, estimated on so
    many ``rows``."""
    half = 0.5 / rows  # a share of 0 or 1 would make every risk 0 or 1
    inside = float(np.clip(share, half, 1 - half))
    return Recalibration("prior_shift", c=float(logit(inside) - logit(prior)))


def _ratios(risk: Floats, prior: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return p(risk | hallucinated) / p(risk | factual) at no more than LEVELS levels [L], and each
    row's level [n]."""
    inside = np.clip(np.asarray(risk, np.float64), EDGE, 1 - EDGE)
    ratio = inside / (1 - inside) * (1 - prior) / prior
    level = scores.equal_mass_bins(ratio, min(LEVELS, len(ratio)))
    return np.bincount(level, ratio) / np.bincount(level), level


def _most_likely(ratio: Floats, counts: Floats) -> NDArray[np.float64]:
    """Return the share of greatest likelihood of each of D samples: ratio [L], counts [D, L + 2] ->
    [D].

    sum_j n_j log(1 + pi (ratio_j - 1)) + h log(pi) + f log(1 - pi) is concave.  Bisection on its
    slope, for all samples at once, finds the same maximum as the EM of Saerens et al."""
    rise = np.asarray(ratio) - 1.0
    unlabelled = counts[:, :-2]
    wrong, right = counts[:, -2], counts[:, -1]
    low, high = np.zeros(len(counts)), np.ones(len(counts))
    for _ in range(50):
        middle = (low + high) / 2
        slope = (unlabelled * (rise / (1.0 + middle[:, None] * rise))).sum(axis=1)
        rising = slope + wrong / middle - right / (1 - middle) > 0
        low, high = np.where(rising, middle, low), np.where(rising, high, middle)
    return (low + high) / 2


def prior_shift_test(source: LabelledRisks, traffic: Traffic, seed: int = 0) -> PriorShiftTest:
    """Compare the traffic with the best mixture of training's two class-conditional distributions.

    The mixture is the least squares of black-box shift estimation (Lipton, Wang and Smola 2018) on
    the distribution functions.  The largest remaining distance is compared with that of a centred
    bootstrap over groups of both samples. Traffic that happens to be such a mixture passes.  Raises
    ValueError if the source lacks a class."""
    good = np.asarray(source.label) != 0
    if not good.any() or good.all():
        raise ValueError("the source needs rows of both classes")
    cuts = np.unique(
        np.quantile(np.concatenate([source.risk, traffic.risk]), np.linspace(0, 1, CUTS + 2)[1:-1])
    )
    of_source, of_traffic = (
        np.searchsorted(cuts, risk, "left") for risk in (source.risk, traffic.risk)
    )
    bins = len(cuts) + 1
    of_source += good * bins

    def sums(source_weight: Floats, traffic_weight: Floats) -> Floats:
        """Return the summed weights up to each cut, and in all, of hallucinated, factual and
        traffic rows."""
        counts = np.append(
            np.bincount(of_source, source_weight, 2 * bins),
            np.bincount(of_traffic, traffic_weight, bins),
        )
        return np.asarray(np.cumsum(counts.reshape(3, bins), axis=1))

    def difference(share: float, hallucinated: Floats, factual: Floats, unknown: Floats) -> Floats:
        return np.asarray(unknown - share * hallucinated - (1 - share) * factual)

    whole = sums(np.ones(len(good)), np.ones(len(traffic.risk)))
    observed = whole[:, :-1] / whole[:, -1:]
    free = _best_share(*observed)
    share = float(np.clip(free, 0.0, 1.0))
    distance = float(np.abs(difference(share, *observed)).max())
    centre = difference(free, *observed)
    chance = []
    for weights in zip(
        group_draws(source.group, seed), group_draws(traffic.group, seed + 1), strict=True
    ):
        drawn = sums(*weights)
        if drawn[:, -1].all():  # a draw may lack a class of few groups
            drawn = drawn[:, :-1] / drawn[:, -1:]
            chance.append(np.abs(difference(_best_share(*drawn), *drawn) - centre).max())
    p_value = (1 + int((np.array(chance) >= distance).sum())) / (1 + len(chance))
    limit = max(NEGLIGIBLE, float(np.quantile(chance, 1 - LEVEL))) if chance else 1.0
    return PriorShiftTest(share, distance, limit, p_value)


def _best_share(hallucinated: Floats, factual: Floats, unknown: Floats) -> float:
    """Return the share by least squares, which may lie outside 0 .. 1; 0 if the classes do not
    differ."""
    direction = hallucinated - factual
    length = float(direction @ direction)
    return float((unknown - factual) @ direction) / length if length else 0.0
