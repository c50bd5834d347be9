"""Tables as Markdown, the page and its figures: cells as they are written, nothing loaded, hostile
text stays text."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import cache
from html import unescape
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hallutracer_research.evaluation import figures
from hallutracer_research.evaluation.options import Cost
from hallutracer_research.evaluation.page import (
    Cell,
    Claim,
    Column,
    Figure,
    ReportData,
    Section,
    Table,
    best_rows,
    blocks,
    cell_text,
    header_text,
    table_markdown,
    to_html,
    to_markdown,
)
from hallutracer_research.paper.tables import PUBLISHED
from service.fitting.scores import ece, risk_auroc
from tests.kit.tables import cells

METHODS = [
    Column("set", "Set", "text"),
    Column("method", "Method", "text"),
    Column("auroc", "AUROC", higher=True),
    Column("ece", "ECE", higher=False),
]
ROWS = [
    {"set": "A", "method": "ours", "auroc": {"mean": 0.9, "std": 0.012}, "ece": 0.04},
    {"set": "B", "method": "ours", "auroc": 0.7, "ece": None},
    {"set": "A", "method": "theirs", "auroc": 0.8, "ece": 0.03},
    {"set": "B", "method": "theirs", "auroc": 0.75, "ece": 0.01},
]
TABLE = Table("main", "Main", METHODS, ROWS, "tab:main-results", "By set.", ["Seeds: 3."], "set")


@pytest.mark.parametrize(
    ("column", "cell", "text"),
    cells(
        """
        number 3 | 0.68711 | 0.687
        number 1 | -1234.56 | −1,234.6
        number 3 | -0.0001 | 0.000
        number 3 | {"mean": 0.5, "std": 0.0123} | 0.500 ± 0.012
        number 3 | {"mean": 0.5} | 0.500
        number 3 | null | –
        percent 3 | 0.6871 | 68.7
        percent 4 | {"mean": 0.6871, "std": 0.003} | 68.71 ± 0.30
        percent 3 | {"mean": 0.687, "std": 0.1, "low": 0.679, "high": 0.694} | 68.7 [67.9, 69.4]
        percent 2 | 1 | 100
        integer 3 | 3793 | 3,793
        p_value 3 | 0.00099 | < 0.001
        p_value 3 | 0.05 | 0.050
        p_value 3 | 1.0 | 1.0
        text 3 | "a|b" | a|b
        text 3 | 7 | 7
        """
    ),
)
def test_a_cell_is_written_by_its_column(column: str, cell: str, text: str) -> None:
    kind, digits = column.split()
    described: Any = ("x", "X", kind, int(digits))
    assert cell_text(Column(*described), json.loads(cell)) == text


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), {"mean": 0.5, "std": float("nan")}, "high"]
)
def test_a_number_that_is_none_is_refused(bad: Cell) -> None:
    with pytest.raises(ValueError, match="'auroc'"):
        cell_text(METHODS[2], bad)


def test_the_best_is_sought_in_the_columns_direction_and_as_shown() -> None:
    a, b = blocks(TABLE)
    shown = [(row["set"], row["method"]) for row in (*a, *b)]
    assert shown == [("A", "ours"), ("A", "theirs"), ("B", "ours"), ("B", "theirs")]
    found = [best_rows(METHODS[place], rows) for rows in (a, b) for place in (2, 3, 1)]
    assert found == [{0}, {1}, set(), {1}, set(), set()]  # one number has nothing to be better than
    ties: list[dict[str, Cell]] = [{"auroc": 0.90001}, {"auroc": 0.90002}, {"auroc": 0.8}]
    assert best_rows(METHODS[2], ties) == {0, 1}, "a difference that is not shown is none"


def test_a_table_in_full() -> None:
    assert to_markdown([TABLE], "# Report\n") == (
        "# Report\n\n## Main (paper: `tab:main-results`)\n\nBy set.\n\n"
        "| Set | Method | AUROC | ECE |\n| --- | --- | ---: | ---: |\n"
        "| A | ours | **0.900 ± 0.012** | 0.040 |\n| A | theirs | 0.800 | **0.030** |\n"
        "| B | ours | 0.700 | – |\n| B | theirs | **0.750** | 0.010 |\n\n- Seeds: 3.\n"
    )
    titles = [
        header_text(Column("x", title, kind))
        for title, kind in (("AUROC", "percent"), ("in %", "percent"), ("AUROC", "number"))
    ]  # type: ignore[arg-type]
    assert titles == ["AUROC, %", "in %", "AUROC"]


@settings(deadline=None)
@given(
    st.text(st.sampled_from("ab_*|`<>&$~[]\\ \n#"), min_size=1).filter(
        lambda text: text.strip() != ""
    )
)
def test_any_name_is_shown_as_it_is_and_stays_in_its_cell(name: str) -> None:
    table = Table(
        "t", "T", [Column("a", "A", "text"), Column("b", "B", "text")], [{"a": name, "b": "end"}]
    )
    *_, row = table_markdown(table).splitlines()
    cells = re.split(r"(?<!\\)(?:\\\\)*\|", row)
    assert len(cells) == 4, row
    assert cells[2] == " end "
    assert unescape(re.sub(r"\\(.)", r"\1", row)) == f"| {' '.join(name.split())} | end |"
    assert not re.search(r"(?<!\\)(?:\\\\)*[*`$]|<", row), "nothing is left that would be markup"


def test_notes_keep_their_code_and_nothing_else() -> None:
    table = Table(
        "t", "T", [Column("a", "A")], [{"a": 1.0}], notes=["`a_b|c` is <b>not</b> a *word*, `d`."]
    )
    assert table_markdown(table).endswith(r"- `a_b|c` is &lt;b&gt;not&lt;/b&gt; a \*word\*, `d`.")


RNG = np.random.default_rng(5)
LABEL = RNG.integers(0, 2, 400)
RISK = 1 / (1 + np.exp(2.0 * LABEL - 1 + RNG.normal(size=400)))
CHANCE = np.random.default_rng(6).random(400)
TRAJECTORY = RNG.normal(size=(400, 12)) + (2 * LABEL - 1)[:, None] * np.linspace(0, 1, 12)
DRAWINGS: dict[str, Callable[[], Figure]] = {
    "depth_subsampling": lambda: figures.depth_subsampling(
        {
            "HELM": ([1, 2, 4, 8], [0.7, 0.75, 0.8, 0.82], [0.01] * 4),
            "a <b> & c": ([1, 2], [0.6, 0.7], None),
        }
    ),
    "trajectories": lambda: figures.trajectories(TRAJECTORY, LABEL),
    "roc_pr": lambda: figures.roc_pr(LABEL, {"ours": RISK, "chance": CHANCE}),
    "cost": lambda: figures.cost(
        {
            "ours": (Cost("A", 1.0), [0.8, 0.7]),
            "text": (Cost("none", 0.0), [0.5, 0.6]),
            "entropy": (Cost("B", 1.0132), [0.7, 0.7]),
            "iti": (Cost("A", 1.0), [0.6, 0.7]),
        }
    ),
    "reliability": lambda: figures.reliability(LABEL, {"ours": RISK}),
    "geometry": lambda: figures.geometry([0.05, 0.1, 0.07], [0.004, 0.003, 0.005, 0.006], 128),
}


@cache
def drawing(name: str) -> Figure:
    return DRAWINGS[name]()


def texts(figure: Figure) -> list[str]:
    root = ElementTree.fromstring(figure.svg)
    return [
        "".join(element.itertext()).strip()
        for element in root.iter()
        if element.tag.endswith("}text")
    ]


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_same_numbers_draw_the_same_small_plain_svg(name: str) -> None:
    figure = drawing(name)
    assert figure == DRAWINGS[name]()
    assert figure.name == name
    assert figure.caption.endswith(".")
    assert figure.alt.endswith(".")
    assert len(figure.svg) < 60_000
    assert ElementTree.fromstring(figure.svg).tag == "{http://www.w3.org/2000/svg}svg"
    text = figure.svg.decode("utf-8")
    assert "currentColor" in text, "ink follows the page"
    assert not re.search(r"#010203|#000000|#ffffff|<dc:date|Matplotlib v", text)
    assert not re.search(r'(?:href="|url\()(?!#)', text), "nothing is loaded"


def test_a_curve_goes_through_the_points_given() -> None:
    """Four collinear points in data are four collinear points on the page, evenly spaced, markers
    and all."""
    figure = figures.depth_subsampling({"line": ([4, 1, 2, 3], [0.8, 0.5, 0.6, 0.7], None)})
    marks = re.findall(
        r'<use xlink:href="#\w+" x="([-\d.]+)" y="([-\d.]+)" style="fill: #0072b2',
        figure.svg.decode(),
    )
    steps = np.diff(np.array(marks, float)[:4], axis=0)
    assert len(steps) == 3
    assert np.allclose(steps, steps[0], atol=0.02), "sorted by the number of layers"
    assert steps[0, 0] > 0 > steps[0, 1], "right and up"
    assert "line: 0.500 with 1, 0.800 with 4" in figure.alt


def test_legends_and_texts_say_the_measures_and_names_are_escaped() -> None:
    assert any(
        text.startswith(f"ours ({risk_auroc(LABEL, RISK):.3f}, ")
        for text in texts(drawing("roc_pr"))
    )
    assert f"(ECE {ece(LABEL, RISK):.3f})" in " ".join(texts(drawing("reliability")))
    figure = drawing("trajectories")
    assert f"factual (n = {int(LABEL.sum())})" in texts(figure)
    assert f"hallucinated rows average {TRAJECTORY[LABEL == 0].mean():.2f} over depth" in figure.alt
    assert "a <b> & c" in texts(drawing("depth_subsampling"))
    figure = figures.geometry([0.05, 0.1], [0.004, 0.003, 0.005], 128)
    assert "0.071 = √(2/(πd))" in figure.caption
    assert "0.781% = 1/d" in figure.caption


def test_methods_stand_in_the_band_of_their_cost_cheapest_first() -> None:
    figure = drawing("cost")
    assert figure.alt.endswith(
        "no model, 0 prefills: text 0.550; A: prefill only, 1 prefill: ours 0.750, "
        "iti 0.650; B: one lm_head, 1.013 prefills: entropy 0.700."
    )
    names = [text for text in texts(figure) if text in ("ours", "text", "entropy", "iti")]
    assert names == ["text", "iti", "ours", "entropy"]
    unknown = figures.cost({"ours": (Cost("A", 1.0), [0.8]), "entropy": (Cost("B", None), [0.7])})
    assert "B: one lm_head: entropy" in unknown.alt
    prices = {
        "ours": Cost("A", 1.0),
        "p-true": Cost("C", 9.25),
        "perplexity": Cost("C", 8.0),
        "se": Cost("D", 71.0),
    }
    several = figures.cost({name: (price, [0.7]) for name, price in prices.items()})
    assert "C: one answer, or its beginning, 8 to 9.25 prefills:" in several.alt
    assert "D: sampled answers, 71 prefills: se" in several.alt


@pytest.mark.parametrize(("rows", "bins"), [(15, 1), (45, 2), (2000, 15)])
def test_few_rows_have_few_bins(rows: int, bins: int) -> None:
    """Each holds twenty or more; their number, sizes and shares are told."""
    label, risk = np.resize([0, 1, 1], rows), np.linspace(0.1, 0.9, rows)
    figure = figures.reliability(label, {"ours": risk})
    sizes = np.bincount(np.arange(rows) * bins // rows)
    assert sizes.min() >= min(20, rows)
    told = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
    assert f"{rows:,} rows in {bins} bins of {told};" in figure.caption
    shares = [float(np.mean(part == 0)) for part in np.split(label, np.cumsum(sizes)[:-1])]
    found = [
        (float(share), int(size)) for share, size in re.findall(r"([\d.]+) of (\d+) at", figure.alt)
    ]
    assert found == [(round(share, 2), size) for share, size in zip(shares, sizes, strict=True)]


def test_bands_are_wider_where_rows_depend_on_each_other() -> None:
    alone, own, grouped = (
        figures.reliability(LABEL, {"ours": RISK}, group).svg
        for group in (None, np.arange(400), np.arange(400) // 8)
    )
    assert alone == own != grouped


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: figures.trajectories(TRAJECTORY, np.ones(400)), "no hallucinated row"),
        (lambda: figures.trajectories([0.1, 0.2], [0, 1]), "2-dimensional"),
        (lambda: figures.reliability(LABEL, {"ours": 3 * RISK}), "leaves"),
        (lambda: figures.geometry([np.nan], [0.1, 0.2], 4), "adjacent_cos"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Callable[[], Figure], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        draw()


HOSTILE = "<script>alert('x')</script> & \"quoted\""
VOID = {"meta", "br", "hr", "img", "link", "input"}
MAIN = Table(
    "main",
    "Main table",
    [*METHODS[:2], Column("auroc", "AUROC", "percent", higher=True)],
    [
        {"set": "A", "method": "ours", "auroc": {"mean": 0.912, "std": 0.004}},
        {"set": "A", "method": HOSTILE, "auroc": 0.85},
        {"set": "B", "method": "ours", "auroc": None},
    ],
    "tab:main-results",
    "Caption with `code`.",
    [f"A note: {HOSTILE}"],
    "set",
)
FREE = Table("free", "Free references", [Column("x", "X", higher=True)], [{"x": 1.0}])
TRAJECTORIES = figures.trajectories([[0.0, 1.0], [1.0, 3.0], [2.0, 2.0]], [0, 1, 1])
GEOMETRY = figures.geometry([0.1, 0.2], [0.01, 0.02, 0.03], 64)
REPORT = ReportData(
    f"Report on {HOSTILE}",
    {
        "model": "demo",
        "versions": {"torch": "2.13", "numpy": None},
        "command": "hallutracer evaluate --out <dir>",
    },
    [
        Claim("The mean suffices.", ["AUROC `0.90` against 0.91."], "supported", "never"),
        Claim(HOSTILE, [HOSTILE, HOSTILE], "not testable", HOSTILE),
        Claim("Third.", ["Third."], "not supported", ""),
        Claim("Fourth.", ["Fourth."], "not supported", ""),
    ],
    [
        Section("Main", "First paragraph.\n\nSecond.", [MAIN, FREE], [TRAJECTORIES]),
        Section(
            "Geometry", HOSTILE, [dataclasses.replace(MAIN, name="again")], [GEOMETRY, TRAJECTORIES]
        ),
    ],
    PUBLISHED,
)


class Page(HTMLParser):
    """Tags in order, with a check that each is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:  # of ``<br/>``, say
            assert self.stack, f"</{tag}> closes nothing"
            assert self.stack.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def attributes(self, name: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(name)) is not None]


HTML = to_html(REPORT)
PAGE = Page(HTML)


def test_tags_are_closed_names_used_once_and_links_lead_to_something_on_the_page() -> None:
    assert PAGE.stack == []
    ids = PAGE.attributes("id")
    assert len(ids) == len(set(ids))
    assert sum(tag == "svg" for tag, _ in PAGE.tags) == 3, "the same drawing twice, too"
    links = (
        PAGE.attributes("href")
        + PAGE.attributes("xlink:href")
        + re.findall(r"url\((#[^)]+)\)", HTML)
    )
    links += [f"#{value}" for value in PAGE.attributes("aria-labelledby")]
    assert len(links) > 20
    assert {link for link in links if not (link.startswith("#") and link[1:] in ids)} == set()


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    names = {tag for tag, _ in PAGE.tags}
    assert not names & {"script", "link", "iframe", "img", "object", "embed", "base", "form"}
    assert not PAGE.attributes("src")
    assert all(not name.startswith("on") for _, attrs in PAGE.tags for name in attrs)
    policy = next(attrs["content"] for tag, attrs in PAGE.tags if attrs.get("http-equiv"))
    assert str(policy).startswith("default-src 'none'")
    style = re.search(r"<style>(.*?)</style>", HTML, re.DOTALL)
    assert not {"@import", "url("} & {word for word in ("@import", "url(") if word in style[1]}
    assert "prefers-color-scheme: dark" in style[1]
    assert "@media print" in style[1]


def test_hostile_text_is_shown_as_it_is() -> None:
    assert "<script" not in HTML
    # The title twice, claim, rule and two lines of evidence, cell and note of two tables, a
    # section's text.
    assert "".join(PAGE.text).count(HOSTILE) == 2 + 4 + 4 + 1
    assert f"<title>{REPORT.title}</title>" in unescape(HTML)
    page = to_html(dataclasses.replace(REPORT, introduction=f"What it is.\n\n{HOSTILE}"))
    assert "<p>What it is.</p>" in page
    assert page.index('id="introduction"') < page.index('id="claims"')
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    "shown",
    [
        "Of 4 claims: 1 supported, 2 not supported, 1 not testable.",
        '<p class="verdict not-supported">✗ not supported</p>',
        "<code>0.90</code>",
        '<th scope="rowgroup" rowspan="2">A</th>',
        '<th scope="rowgroup" rowspan="1">B</th>',
        '<th scope="row">ours</th><td class="number"><strong>91.2 ± 0.4</strong></td>',
        '<td class="number">–</td>',
        '<th scope="col" class="number">AUROC, %</th>',
        f"<figcaption>{GEOMETRY.caption}</figcaption>",
        "<dt>versions</dt><dd><dl><dt>torch</dt><dd>2.13</dd><dt>numpy</dt><dd>–</dd></dl></dd>",
        "<dd><code>hallutracer evaluate --out &lt;dir&gt;</code></dd>",
    ],
)
def test_what_stands_on_the_page(shown: str) -> None:
    assert shown in HTML


def test_summary_first_the_papers_numbers_folded_once_provenance_last() -> None:
    places = [
        HTML.index(text)
        for text in (
            "What this run supports",
            "Contents",
            'id="section-1"',
            "91.2 ± 0.4",
            "<details",
            "Free references</h3>",
            'id="section-2"',
            'id="provenance"',
        )
    ]
    assert places == sorted(places)
    assert HTML.count("<details") == HTML.count("stand above") == 1
    folded = HTML[HTML.index("<details") : HTML.index("</details>")]
    assert "<strong>97.86 ± 0.80</strong>" in folded, "HalluTracer, Qwen2.5-72B, Agentic"
    labels = [attrs["aria-label"] for tag, attrs in PAGE.tags if tag == "svg"]
    assert labels == [TRAJECTORIES.alt, GEOMETRY.alt, TRAJECTORIES.alt]
    empty = to_html(ReportData("Empty", {}, [], []))
    assert 'id="claims"' not in empty
    assert Page(empty).stack == []


def drawn(inside: str, attributes: str = 'viewBox="0 0 9 9"') -> ReportData:
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>{inside}</svg>'
    return ReportData("R", {}, [], [Section("S", figures=[Figure("f", "C.", "A.", svg.encode())])])


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (drawn("<script>1</script>"), "script"),
        (drawn('<rect onclick="x()"/>'), "onclick"),
        (drawn("<foreignObject/>"), "foreignobject"),
        (drawn('<image href="https://example.org/x.png"/>'), "example.org"),
        (drawn("<g>"), "not well-formed"),
        (drawn("", 'width="9"'), "viewBox"),
        (ReportData("R", {}, [], [Section("S", tables=[MAIN, MAIN])]), "table-main"),
        (ReportData("R", {}, [Claim("c", ["e"], "perhaps", "")], []), "perhaps"),
    ],
)
def test_a_drawing_that_does_more_than_draw_two_tables_of_a_name_and_other_verdicts_are_refused(
    report: ReportData, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        to_html(report)
