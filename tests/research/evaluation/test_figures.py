"""Figures: well-formed SVG, a function of the numbers alone, drawing the numbers they were given."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest

from hallutracer_research.evaluation.figures import cost, depth_subsampling, geometry, reliability, roc_pr, trajectories
from hallutracer_research.evaluation.options import Cost
from hallutracer_research.evaluation.page import Figure
from service.fitting.scores import ece, risk_auroc

RNG = np.random.default_rng(5)
LABEL = RNG.integers(0, 2, 400)
RISK = 1 / (1 + np.exp(2.0 * LABEL - 1 + RNG.normal(size=400)))
CHANCE = np.random.default_rng(6).random(400)
TRAJECTORY = RNG.normal(size=(400, 12)) + (2 * LABEL - 1)[:, None] * np.linspace(0, 1, 12)

DRAWINGS: dict[str, Callable[[], Figure]] = {
    "depth_subsampling": lambda: depth_subsampling(
        {"HELM": ([1, 2, 4, 8], [0.7, 0.75, 0.8, 0.82], [0.01] * 4), "a <b> & c": ([1, 2], [0.6, 0.7], None)}
    ),
    "trajectories": lambda: trajectories(TRAJECTORY, LABEL),
    "roc_pr": lambda: roc_pr(LABEL, {"ours": RISK, "chance": CHANCE}),
    "cost": lambda: cost(
        {
            "ours": (Cost("A", 1.0), [0.8, 0.7]),
            "text": (Cost("none", 0.0), [0.5, 0.6]),
            "entropy": (Cost("B", 1.0132), [0.7, 0.7]),
            "iti": (Cost("A", 1.0), [0.6, 0.7]),
        }
    ),
    "reliability": lambda: reliability(LABEL, {"ours": RISK}),
    "geometry": lambda: geometry([0.05, 0.1, 0.07], [0.004, 0.003, 0.005, 0.006], 128),
}


def texts(figure: Figure) -> list[str]:
    root = ElementTree.fromstring(figure.svg)
    return ["".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("}text")]


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_same_numbers_draw_the_same_bytes(name: str) -> None:
    figure = DRAWINGS[name]()
    assert figure == DRAWINGS[name]()
    assert figure.name == name
    assert figure.caption.endswith(".")
    assert figure.alt.endswith(".")


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_small_plain_svg_without_date_ground_or_black(name: str) -> None:
    svg = DRAWINGS[name]().svg
    assert len(svg) < 60_000
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = svg.decode("utf-8")
    assert "currentColor" in text, "ink follows the page"
    assert not re.search(r"#010203|#000000|#ffffff|<dc:date|Matplotlib v", text)
    assert not re.search(r'(?:href="|url\()(?!#)', text), "nothing is loaded"


def test_a_curve_goes_through_the_points_given() -> None:
    """Four collinear points in data are four collinear points on the page, evenly spaced, markers and all."""
    figure = depth_subsampling({"line": ([4, 1, 2, 3], [0.8, 0.5, 0.6, 0.7], None)})
    marks = re.findall(r'<use xlink:href="#\w+" x="([-\d.]+)" y="([-\d.]+)" style="fill: #0072b2', figure.svg.decode())
    points = np.array(marks, float)[:4]
    assert len(points) == 4
    steps = np.diff(points, axis=0)
    assert np.allclose(steps, steps[0], atol=0.02), "sorted by the number of layers"
    assert steps[0, 0] > 0 > steps[0, 1], "right and up"
    assert "line: 0.500 with 1, 0.800 with 4" in figure.alt


def test_legends_and_alt_texts_say_the_measures() -> None:
    shown = f"ours ({risk_auroc(LABEL, RISK):.3f}, "
    assert any(text.startswith(shown) for text in texts(DRAWINGS["roc_pr"]()))
    assert f"(ECE {ece(LABEL, RISK):.3f})" in " ".join(texts(DRAWINGS["reliability"]()))
    figure = DRAWINGS["trajectories"]()
    assert f"factual (n = {int(LABEL.sum())})" in texts(figure)
    mean = TRAJECTORY[LABEL == 0].mean()
    assert f"hallucinated rows average {mean:.2f} over depth" in figure.alt


def test_methods_stand_in_the_band_of_their_cost_cheapest_first() -> None:
    figure = DRAWINGS["cost"]()
    assert figure.alt == (
        "AUROC of each method by its cost. no model, 0 prefills: text 0.550; A: prefill only, 1 prefill: ours 0.750, "
        "iti 0.650; B: one lm_head, 1.013 prefills: entropy 0.700."
    )
    names = [text for text in texts(figure) if text in ("ours", "text", "entropy", "iti")]
    assert names == ["text", "iti", "ours", "entropy"]
    unknown = cost({"ours": (Cost("A", 1.0), [0.8]), "entropy": (Cost("B", None), [0.7])})
    assert "B: one lm_head: entropy" in unknown.alt
    prices = {
        "ours": ("A", 1.0), "p-true": ("C", 9.25), "perplexity": ("C", 8.0), "mind": ("C", 8.0), "se": ("D", 71.0),
    }  # fmt: skip
    several = cost({name: (Cost(cls, price), [0.7]) for name, (cls, price) in prices.items()})  # type: ignore[arg-type]
    assert "C: one answer, 8 to 9.25 prefills:" in several.alt
    assert "D: sampled answers, 71 prefills: se" in several.alt


def test_chance_lines_of_geometry_are_the_formulas() -> None:
    figure = geometry([0.05, 0.1], [0.004, 0.003, 0.005], 128)
    assert "0.071 = √(2/(πd))" in figure.caption
    assert "0.781% = 1/d" in figure.caption
    assert "0.075 against 0.071" in figure.alt


@pytest.mark.parametrize(("rows", "bins"), [(15, 1), (45, 2), (140, 7), (300, 15), (2000, 15)])
def test_few_rows_have_few_bins(rows: int, bins: int) -> None:
    """Each holds twenty or more; their number, sizes and shares are told."""
    label, risk = np.resize([0, 1, 1], rows), np.linspace(0.1, 0.9, rows)
    figure = reliability(label, {"ours": risk})
    sizes = np.bincount(np.arange(rows) * bins // rows)
    assert sizes.min() >= min(20, rows)
    told = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    assert f"{rows:,} rows in {bins} bins of {told};" in figure.caption
    assert ("So few rows give" in figure.caption) is (bins < 15)
    shares = [float(np.mean(part == 0)) for part in np.split(label, np.cumsum(sizes)[:-1])]
    told = re.findall(r"([\d.]+) of (\d+) at", figure.alt)
    assert [(float(share), int(size)) for share, size in told] == [
        (round(share, 2), size) for share, size in zip(shares, sizes, strict=True)
    ]


def test_bands_are_wider_where_rows_depend_on_each_other() -> None:
    def bands(group: np.ndarray | None) -> str:
        return reliability(LABEL, {"ours": RISK}, group).svg.decode()

    assert bands(None) == bands(np.arange(400))
    assert bands(None) != bands(np.arange(400) // 8)


def test_names_are_escaped() -> None:
    assert "a <b> & c" in texts(DRAWINGS["depth_subsampling"]())


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: trajectories(TRAJECTORY, np.ones(400)), "no hallucinated row"),
        (lambda: trajectories([0.1, 0.2], [0, 1]), "2-dimensional"),
        (lambda: reliability(LABEL, {"ours": 3 * RISK}), "leaves"),
        (lambda: geometry([np.nan], [0.1, 0.2], 4), "adjacent_cos"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Callable[[], Figure], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        draw()
