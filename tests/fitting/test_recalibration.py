"""Maps of the risk: what they find, their order, which is chosen; slope and intercept; the share
under prior shift."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit

from probes_store.bundle import render
from probes_store.manifest import sealed
from probes_store.records import Method, Recalibration
from service.errors import TrainingError
from service.fitting import recalibration as maps
from service.fitting.scores import debiased_calibration_error, number_together, t_interval
from tests.fitting.made import APART, PRIOR, rows
from tests.kit.bundles import make_draft

MANIFEST = render(make_draft())[0]


STEP = Recalibration("isotonic", knots=(0, 0.3, 0.31, 1), values=(0.04, 0.05, 0.8, 0.85))


def drawn(
    truth: Recalibration, count: int = 40_000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Labels by ``truth`` of risks, and the risks."""
    rng = np.random.default_rng(seed)
    risk = rng.beta(1.2, 1.6, count)
    return (rng.random(count) >= truth(risk)).astype(int), risk


def fitted(name: Method, label: np.ndarray, risk: np.ndarray) -> Recalibration:
    found = maps.FITS[name](label, risk)
    assert found is not None
    return found


def test_the_intercept_is_found_and_makes_the_mean_risk_the_share() -> None:
    label, risk = drawn(Recalibration("intercept", c=1.3))
    fit = fitted("intercept", label, risk)
    assert (fit.a, fit.b, fit.c) == (1.0, 1.0, pytest.approx(1.3, abs=0.05))
    assert fit(risk).mean() == pytest.approx(np.mean(label == 0), abs=1e-9)


def test_isotonic_follows_a_step_a_pure_block_is_no_certainty_and_falling_risks_have_no_map() -> (
    None
):
    found = fitted("isotonic", *drawn(STEP))
    risk = np.array([0.1, 0.25, 0.35, 0.8])
    np.testing.assert_allclose(found(risk), STEP(risk), atol=0.04)
    found = fitted("isotonic", np.array([1] * 10 + [0] * 10), np.linspace(0.1, 0.9, 20))
    ends = [0.024, 0.024, 0.976, 0.976]
    assert found(np.array([0.0, 0.1, 0.9, 1.0])) == pytest.approx(ends, abs=0.001)
    label, risk = drawn(Recalibration("intercept"), 2_000)
    assert [name for name, fit in maps.FITS.items() if fit(1 - label, risk)] == ["intercept"]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(4, 60), st.integers(1, 4))
def test_every_map_is_strictly_increasing(seed: int, count: int, digits: int) -> None:
    rng = np.random.default_rng(seed)
    risk = rng.uniform(0, 1, count).round(digits)  # also ties, 0 and 1
    label = np.append([0, 1], rng.integers(0, 2, count - 2))
    grid = np.linspace(0.001, 0.999, 200)
    for found in filter(None, (fit(label, risk) for fit in maps.FITS.values())):
        sealed(dataclasses.replace(MANIFEST, recalibration=found))  # a bundle may have it
        made = found(np.concatenate([[0.0], grid, [1.0]]))
        assert np.all(np.diff(made) >= 0)
        assert np.all((made >= 0) & (made <= 1))
        steep = max(found.a, found.b, abs(found.c)) > 5  # then doubles are all alike at the ends
        assert steep or np.all(np.diff(found(grid)) > 0)


def test_a_calibrated_risk_stays_as_it_is() -> None:
    drawings = [drawn(Recalibration("intercept"), 200, seed) for seed in range(12)]
    names = [maps.choose_map(label, risk, np.arange(200)).chosen.name for label, risk in drawings]
    assert names.count("identity") >= 9
    label, risk = drawings[0]
    choice = maps.choose_map(label, risk, np.arange(200), as_it_is=False)
    assert choice.before.name == choice.candidates[0].name == "identity"
    assert "identity" not in (choice.chosen.name, choice.best.name)


@pytest.mark.parametrize(
    ("truth", "count"),
    [
        (Recalibration("intercept", c=1.5), 300),
        (STEP, 2_000),
    ],
)
def test_the_simplest_map_that_fits_is_chosen(truth: Recalibration, count: int) -> None:
    for seed in range(2):
        choice = maps.choose_map(*drawn(truth, count, seed), np.arange(count))
        chosen, before = choice.chosen, choice.before
        assert (chosen.name, chosen.log_loss) == (
            truth.method,
            pytest.approx(before.log_loss - chosen.gain),
        )
        assert chosen.gain_interval.low > 0
        assert chosen.error < before.error
        assert choice.best.log_loss <= chosen.log_loss
        assert [one.name for one in choice.candidates] == ["identity", "intercept", "isotonic"]


def test_a_map_is_judged_on_groups_that_it_has_not_seen() -> None:
    """Each group has a risk and a class of its own: who has seen the group knows the class, who has
    not, nothing."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(60), 12)
    risk = rng.uniform(0.3, 0.7, 60)[group] + 1e-4 * rng.standard_normal(720)
    label = np.resize([0, 1], 60)[rng.permutation(60)][group]

    def remembers(of_rows: np.ndarray, risks: np.ndarray) -> Recalibration:
        """Isotonic in name: the class of every risk that it was shown, the share elsewhere."""
        knots = np.linspace(0.001, 0.999, 999)
        known = 0.9 - 0.8 * label[np.abs(risk[:, None] - knots).argmin(axis=0)]
        values = np.where(np.isin(knots.round(3), risks.round(3)), known, 0.5)
        return Recalibration("isotonic", knots=tuple(knots.tolist()), values=tuple(values.tolist()))

    choice = maps.choose_map(label, risk, group, remembers)
    as_it_is, found, *_ = choice.candidates
    assert (as_it_is.name, found.name) == ("identity", "prior_shift")
    assert found.log_loss == pytest.approx(np.log(2), abs=0.12)
    assert choice.chosen.name == "identity"


def test_intervals_count_groups_and_hold_the_calibration_error() -> None:
    risk, label, _ = rows(np.random.default_rng(4), 100, 0.6)
    alone = maps.choose_map(label, risk, np.arange(100)).before
    copied = maps.choose_map(
        np.repeat(label, 5), np.repeat(risk, 5), np.repeat(np.arange(100), 5)
    ).before
    widths = [one.log_loss_interval.high - one.log_loss_interval.low for one in (alone, copied)]
    assert widths[1] == pytest.approx(widths[0], rel=0.15)
    assert alone.error == pytest.approx(debiased_calibration_error(label, risk), abs=1e-9)
    assert alone.error_interval.low <= alone.error <= alone.error_interval.high
    with pytest.raises(TrainingError, match="hallucinated row"):
        maps.choose_map(np.array([0] * 3 + [1] * 40), np.linspace(0.1, 0.9, 43), np.arange(43))


# --- slope and intercept ---

SLOPE, INTERCEPT = maps.COX_KEYS
NO_LINE = dict.fromkeys(maps.COX_KEYS)


def test_a_known_distortion_is_found() -> None:
    risk, label, _ = rows(np.random.default_rng(0), 40_000, PRIOR)
    for slope, intercept in ((1.0, 0.0), (0.5, 0.0), (1.6, -0.7)):
        found = maps.fit_cox_line(label, expit((logit(risk) - intercept) / slope))
        assert found == pytest.approx((slope, intercept), abs=0.05)


def test_separated_or_constant_risks_and_a_single_class_have_no_line() -> None:
    label = np.repeat([0, 1], 10)
    group = np.arange(20)
    risk = np.linspace(0.9, 0.1, 20)
    for given_ in (risk, 1 - risk, np.full(20, 0.3), np.where(label == 0, 1.0, 0.0)):
        assert maps.fit_cox_line(label, given_) is None
        assert maps.cox_line(label, group, given_[None]) == NO_LINE
    assert maps.fit_cox_line(np.ones(20, int), risk) is None
    mixed = risk.copy()
    mixed[[9, 10]] = mixed[[10, 9]]
    assert np.isfinite(
        list(maps.cox_line(label, group, np.stack([mixed, mixed]))[SLOPE].values())
    ).all()
    assert maps.cox_line(label, group, np.stack([mixed, risk])) == NO_LINE  # one seed's are
    # Risks of zero and one are taken as nearly so, and seeds are averaged.
    risk, label, group = rows(np.random.default_rng(1), 200, PRIOR, size=5)
    risk[0], risk[1] = 0.0, 1.0
    alone = maps.cox_line(label, group, risk[None])
    five = maps.cox_line(label, group, np.stack([risk] * 5))
    assert np.isfinite(alone[SLOPE]["high"])
    for key in maps.COX_KEYS:
        assert five[key] == pytest.approx(alone[key], abs=1e-9)


def test_the_intervals_cover_and_rows_taken_as_independent_would_not() -> None:
    rng = np.random.default_rng(2)
    draws = 200
    hits = np.zeros(2)
    naive = np.zeros(2)
    for _ in range(draws):
        risk, label, group = rows(rng, 80, PRIOR, size=8)
        for groups, count in ((group, hits), (np.arange(len(group)), naive)):
            found = maps.cox_line(label, groups, risk[None])
            for place, (key, truth) in enumerate(((SLOPE, 1.0), (INTERCEPT, 0.0))):
                count[place] += found[key]["low"] <= truth <= found[key]["high"]
    assert hits.min() / draws > 0.9  # 95 % nominal
    assert naive.max() / draws < 0.87


def test_one_newton_step_is_close_to_refitting_without_each_group() -> None:
    risk, label, group = rows(np.random.default_rng(3), 300, PRIOR, size=2)
    found = maps.cox_line(label, group, risk[None])
    crossed = maps.cox_line(label, group, risk[None], 5)
    refitted = np.array(
        [maps.fit_cox_line(label[group != name], risk[group != name]) for name in np.unique(group)]
    )
    for key, column in zip(maps.COX_KEYS, refitted.T.astype(float), strict=True):
        exact = t_interval(found[key]["mean"], column)
        assert [found[key]["low"], found[key]["high"]] == pytest.approx(
            exact, abs=0.01 * (exact.high - exact.low)
        )
    widths = [line[SLOPE]["high"] - line[SLOPE]["low"] for line in (found, crossed)]
    assert widths[1] / widths[0] == pytest.approx(np.sqrt(1.25))


# --- prior shift ---


def em(risk: np.ndarray, prior: float, wrong: int, right: int) -> float:
    """Saerens, Latinne and Decaestecker 2002, as they wrote it; labelled rows keep their class in
    every step."""
    share = prior
    for _ in range(3_000):
        odds = risk / (1 - risk) * share / (1 - share) * (1 - prior) / prior
        share = float((np.sum(odds / (1 + odds)) + wrong) / (len(risk) + wrong + right))
    return share


def seen(rng: np.random.Generator, groups: int, share: float, size: int = 1) -> maps.Traffic:
    return maps.Traffic(*rows(rng, groups, share, size=size)[::2])


def source(rng: np.random.Generator, groups: int = 600, size: int = 1) -> maps.LabelledRisks:
    return maps.LabelledRisks(*rows(rng, groups, PRIOR, size=size))


def width(traffic: maps.Traffic, *labelled: np.ndarray) -> float:
    found = maps.estimate_share(traffic, PRIOR, *labelled)
    return found.high - found.low


def test_the_share_is_the_fixed_point_of_em_also_where_many_rows_are_binned() -> None:
    for count, labels, within in ((400, 0, 1e-6), (400, 30, 1e-6), (20 * maps.LEVELS, 0, 1e-4)):
        rng = np.random.default_rng(0)
        traffic, label = seen(rng, count, 0.6), rows(rng, labels, 0.6)[1]
        expected = em(traffic.risk, PRIOR, int((label == 0).sum()), int(label.sum()))
        assert maps.most_likely_share(traffic, PRIOR, label) == pytest.approx(expected, abs=within)


@pytest.mark.parametrize(
    ("share", "groups", "size", "labels"),
    [
        pytest.param(0.7, 150, 1, 0, marks=pytest.mark.long),
        pytest.param(0.6, 80, 4, 0, marks=pytest.mark.long),
        (0.15, 150, 1, 30),
    ],
)
def test_the_interval_holds_the_truth_as_often_as_it_says(
    share: float, groups: int, size: int, labels: int
) -> None:
    held = 0
    widths = []
    repeats = 60
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        traffic, label = seen(rng, groups, share, size), rows(rng, labels, share)[1]
        found = maps.estimate_share(traffic, PRIOR, label, groups + np.arange(labels))
        assert found.low <= found.value <= found.high
        held += found.low <= share <= found.high
        widths.append(found.high - found.low)
    assert held / repeats >= 0.88  # 0.95, less 2.5 standard errors
    assert np.mean(widths) < 0.4


def test_groups_widen_the_interval_and_labels_narrow_it_by_their_groups() -> None:
    rng = np.random.default_rng(3)
    traffic = seen(rng, 60, 0.6, 6)
    assert width(traffic) > 1.5 * width(maps.Traffic(traffic.risk, np.arange(360)))
    traffic, label = seen(rng, 100, 0.6), rows(rng, 200, 0.6)[1]
    apart, one_group = 100 + np.arange(200), np.full(200, 100)
    assert width(traffic, label, apart) < 0.6 * width(traffic)
    assert width(traffic, label, one_group) > width(traffic, label, apart)
    values = [
        maps.estimate_share(traffic, PRIOR, label, group).value for group in (apart, one_group)
    ]
    assert values[0] == values[1]


def test_the_map_gives_the_risks_of_the_new_share_and_one_at_the_end_no_certainty() -> None:
    x = np.linspace(-4, 4, 9)
    moved = maps.shift_to(0.8, PRIOR, 1_000)(expit(APART * x + logit(PRIOR)))
    np.testing.assert_allclose(moved, expit(APART * x + logit(0.8)), rtol=1e-9)
    np.testing.assert_allclose(maps.shift_to(PRIOR, PRIOR, 10)(moved), moved, rtol=1e-9)
    for risk, share in ((0.001, 0.0), (0.999, 1.0)):
        found = maps.most_likely_share(maps.Traffic(np.full(50, risk), np.arange(50)), PRIOR)
        assert found == pytest.approx(share, abs=1e-9)
        assert 0 < maps.shift_to(found, PRIOR, 50)(risk) < 1
        assert abs(maps.shift_to(found, PRIOR, 50).c) < 6
    assert [numbers.tolist() for numbers in number_together(["a", "b", "a"], ["c", "b"])] == [
        [0, 1, 0],
        [2, 1],
    ]


@pytest.mark.parametrize(("share", "size"), [(0.1, 1), (PRIOR, 1), (0.8, 1), (0.6, 4)])
def test_prior_shift_is_rarely_refused(share: float, size: int) -> None:
    found = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        traffic = seen(rng, 300 // size, share, size)
        found.append(maps.prior_shift_test(source(rng, 600 // size, size), traffic))
    assert (
        sum(not one.explained for one in found) <= 3
    )  # of 30 at a level of 1 %: P(more than 3) is below 0.001
    assert np.mean([one.share for one in found]) == pytest.approx(share, abs=0.05)


def test_other_questions_are_refused_and_their_share_would_have_been_wrong() -> None:
    """Covariate shift: x is distributed otherwise, around the middle, and P(hallucinated | x)
    stays."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        risk = expit(APART * (0.5 + 0.5 * rng.standard_normal(300)) + logit(PRIOR))
        wrong, traffic = rng.random(300) < risk, maps.Traffic(risk, np.arange(300))
        found = maps.prior_shift_test(source(rng), traffic)
        assert not found.explained
        assert found.distance > maps.NEGLIGIBLE
        share = maps.estimate_share(traffic, PRIOR)
        assert (
            not share.low <= np.mean(wrong) <= share.high
        )  # without the test nothing would have said so


def test_rows_of_a_group_are_no_evidence_of_their_own() -> None:
    """The same rows, each fifteen times: taken as rows of their own they refuse what is nothing but
    chance."""
    refused = np.zeros(2, int)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        known, risk = source(rng), np.repeat(rows(rng, 40, 0.6)[0], 15)
        for place, group in enumerate((np.repeat(np.arange(40), 15), np.arange(600))):
            refused[place] += not maps.prior_shift_test(known, maps.Traffic(risk, group)).explained
    assert refused[0] <= 1
    assert refused[1] >= 5


def test_a_large_traffic_is_not_refused_for_a_hair_and_both_classes_are_needed() -> None:
    """Refitted probes separate the classes a little better than cross-fitted ones."""
    rng = np.random.default_rng(0)
    known, traffic = source(rng, 20_000), seen(rng, 20_000, 0.6)
    found = maps.prior_shift_test(
        known, maps.Traffic(1 / (1 + (1 / traffic.risk - 1) ** 1.04), traffic.group)
    )
    assert found.explained
    assert found.limit == maps.NEGLIGIBLE
    with pytest.raises(ValueError, match="both classes"):
        maps.prior_shift_test(
            maps.LabelledRisks(np.array([0.1, 0.2]), np.ones(2, int), np.arange(2)), traffic
        )
