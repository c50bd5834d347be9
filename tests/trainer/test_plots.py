"""Figures: there, small, and a function of the numbers alone."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from PIL import Image

from service.fitting.scores import reliability
from service.trainer.plots import PlotData, _reliability, draw


def data(layers: int = 6, count: int = 500, seed: int = 0) -> PlotData:
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 2, count)
    risk = 1 / (1 + np.exp(2.0 * label - 1 + rng.normal(size=count)))
    mean = np.stack([-np.linspace(0, 1, layers), np.linspace(0, 1, layers)])
    risks = {"depth mean": risk, "first-token probability": rng.random(count)}
    aurocs = 0.6 + 0.2 * rng.random((3, layers))
    group, deep = np.arange(count) // 2, np.array([0.8, 0.81, 0.79])
    return PlotData(label, group, risks, mean, np.ones_like(mean), aurocs, deep, "a unit", "depth mean", 0.5)


def test_the_same_numbers_draw_the_same_bytes() -> None:
    first, again = draw(data()), draw(data())
    assert list(first) == [
        "layers.png", "coverage.png", "precision_recall.png", "reliability.png", "roc.png", "trajectories.png"
    ]  # fmt: skip
    assert first == again
    other = draw(data(seed=1))
    assert all(first[name] != other[name] for name in ("layers.png", "roc.png", "reliability.png"))


def test_they_are_small_and_carry_no_metadata() -> None:
    for layers, count in ((2, 20), (96, 20000)):
        for name, png in draw(data(layers, count)).items():
            assert len(png) < 60_000, name
            image = Image.open(io.BytesIO(png))
            assert image.info.keys() <= {"dpi", "transparency"}
            assert min(image.size) > 300


def test_without_an_evaluation_only_what_is_known_is_drawn() -> None:
    assert list(draw(dataclasses.replace(data(), risk={}))) == ["layers.png", "trajectories.png"]


def test_reliability_shows_the_bins_rows_and_the_bands_of_the_bundles_own_risk() -> None:
    def shown(given: PlotData) -> tuple[str, np.ndarray]:
        axes = Figure().add_subplot()
        _reliability(axes, given)
        (bars,) = (one for one in axes.collections if isinstance(one, LineCollection))
        return axes.get_title(), np.array([segment[:, 1] for segment in bars.get_segments()])

    given = data(count=600)
    title, bands = shown(given)
    assert "15 bins of 40 rows" in title
    predicted, observed, _ = reliability(given.label, given.risk["depth mean"])
    assert bands.shape == (15, 2)
    assert np.all((bands[:, 0] <= observed) & (observed <= bands[:, 1]))
    _, alone = shown(dataclasses.replace(given, group=np.arange(600)))
    _, few = shown(dataclasses.replace(given, group=np.arange(600) % 4))
    assert np.diff(alone).mean() < np.diff(few).mean()  # rows of few groups tell less
    rounded = {"depth mean": np.round(given.risk["depth mean"] * 2) / 2}
    assert "3 bins of " in shown(dataclasses.replace(given, risk=rounded))[0]
