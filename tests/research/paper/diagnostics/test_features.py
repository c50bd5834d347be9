from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import linregress, trim_mean

from hallutracer_research.paper.diagnostics import features
from service.errors import TrainingError


def test_zones_of_the_paper_models() -> None:
    for m, recognition, output in ((28, range(9, 21), range(21, 28)), (32, range(10, 24), range(24, 32))):
        zone = features.zones(m)
        assert zone.recognition.tolist() == list(recognition)
        assert zone.output.tolist() == list(output)
        assert zone.recognition_steps.tolist() == list(recognition)
        assert zone.output_steps.tolist() == list(output)[:-1]


@given(st.integers(3, 100))
def test_zones_are_disjoint_and_end_at_the_last_layer(m: int) -> None:
    zone = features.zones(m)
    assert zone.recognition[-1] + 1 == zone.output[0]
    assert zone.output[-1] == m - 1
    assert (len(zone.output_steps) > 0) == (m >= 5)


def test_two_layers_have_no_zones() -> None:
    with pytest.raises(TrainingError, match="at least 3"):
        features.zones(2)


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 40), st.integers(0, 1000))
def test_features_agree_with_scipy_and_plain_sums(m: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((4, m)) * 3
    found = features.trajectory_features(x)
    assert found["slope"] == pytest.approx([linregress(np.arange(m), row).slope for row in x])
    assert found["trimmed_mean"] == pytest.approx(trim_mean(x, 0.1, axis=1))
    for i, row in enumerate(x):
        assert found["total_variation"][i] == pytest.approx(sum(abs(b - a) for a, b in zip(row, row[1:], strict=False)))
        assert found["range"][i] == pytest.approx(max(row) - min(row))
        assert found["zone_shift"][i] == pytest.approx(np.mean(row[3 * m // 4 :]) - np.mean(row[m // 3 : 3 * m // 4]))
    assert list(found)[:5] == list(features.FIVE)


def test_trimming_says_how_many_layers() -> None:
    assert [features.trimmed_layers(m) for m in (9, 10, 28, 32, 80)] == [0, 1, 2, 3, 8]


def test_full_trajectory_has_2m_plus_5_columns() -> None:
    x = np.array([[1.0, 4.0, 2.0, 3.0]])
    full = features.full_trajectory(x)
    assert full.shape == (1, 13)
    assert full[0].tolist() == pytest.approx([1, 4, 2, 3, 3, -2, 1, 2.5, np.std([1, 4, 2, 3]), 1, 4, 3, 2])


def test_source_features_by_hand() -> None:
    # m = 8: recognition layers 2..5, output 6, 7; transitions 2..5 and 6
    x = np.arange(8.0)[None] ** 2
    w = np.array([[9, 9, 1.0, -1.0, 2.0, 0.0, 5.0]])
    k = np.diff(x) - w
    standard = features.Standard(np.full(8, 1.0), np.full(8, 2.0))
    found, names = features.source_features(x, w, k, standard)
    row = dict(zip(names, found[0], strict=True))
    assert row["rho_rz"] == pytest.approx((np.mean([4, 9, 16, 25]) - 1) / 2)
    assert row["l_rz"] == pytest.approx(13.5)
    assert row["l_end"] == 49
    assert row["w_rz"] == pytest.approx(0.5)
    assert row["tv_w_rz"] == pytest.approx(2 + 3 + 2)
    assert row["k_rz"] == pytest.approx(np.mean([4, 8, 7, 11]))  # dL is 5, 7, 9, 11 there
    assert row["tv_k_rz"] == pytest.approx(4 + 1 + 4)
    assert row["log_energy_ratio"] == pytest.approx(np.log(6 / (16 + 64 + 49 + 121)), rel=1e-5)
    mean = np.mean(np.arange(8.0) ** 2)
    friction = [-d / (level - mean) for d, level in zip((5, 7, 9, 11), (4, 9, 16, 25), strict=True)]
    assert row["friction_rz"] == pytest.approx(np.mean(friction), rel=1e-5)
    assert row["condition_rz"] == pytest.approx(np.mean([1, 9 / 7, 1, 1]), rel=1e-5)
    assert row["rho_oz"] == pytest.approx((np.mean([36, 49]) - 1) / 2)
    assert row["k_oz"] == pytest.approx(13 - 5)
    assert row["rho_last"] == 24


def test_groups_cover_the_13_columns_once() -> None:
    assert sorted(column for group in features.GROUPS.values() for column in group) == list(range(13))
    assert {name: len(columns) for name, columns in features.GROUPS.items()} == {
        "state": 3, "kinematic": 5, "friction": 2, "output": 3
    }  # fmt: skip


def test_source_features_need_five_layers_and_matching_shapes() -> None:
    x = np.zeros((2, 4))
    standard = features.Standard.of(x)
    assert standard.std.tolist() == [1, 1, 1, 1]
    with pytest.raises(TrainingError, match="at least 5"):
        features.source_features(x, x[:, 1:], x[:, 1:], standard)
    with pytest.raises(TrainingError, match=r"w has shape \[2, 4\]: \[2, 3\] is needed"):
        features.source_features(x, x, x[:, 1:], standard)


def test_source_features_stay_finite_where_nothing_moves() -> None:
    x = np.ones((3, 8))
    found, _ = features.source_features(x, np.zeros((3, 7)), np.zeros((3, 7)), features.Standard.of(x))
    assert np.isfinite(found).all()


def test_depth_layers_follow_the_paper() -> None:
    layers = features.depth_layers(32, 4)
    assert layers is not None
    assert layers.tolist() == [3, 11, 20, 29]
    assert features.depth_layers(32, 32) is not None
    assert features.depth_layers(32, 28) is None  # 27 layers in [3, 29]
    one = features.depth_layers(32, 1, best_layer=17)
    assert one is not None
    assert one.tolist() == [17]
    with pytest.raises(ValueError, match="best_layer"):
        features.depth_layers(32, 1)


def test_depth_sizes_say_what_is_left_out() -> None:
    assert features.depth_sizes(32) == ((1, 2, 4, 8, 12, 16, 20, 24, 32), (28,))
    assert features.depth_sizes(6) == ((1, 6), (2, 4, 8, 12, 16, 20, 24, 28))
    assert features.depth_sizes(28)[0][-1] == 28


@given(st.integers(6, 90), st.integers(2, 90))
def test_depth_layers_never_repeat(m: int, size: int) -> None:
    layers = features.depth_layers(m, size)
    if layers is not None:
        assert len(set(layers.tolist())) == size
        assert layers.min() >= 0
        assert layers.max() < m
