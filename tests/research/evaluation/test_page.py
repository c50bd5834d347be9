"""The page: one file that loads nothing, well-formed, every link leads somewhere, hostile text stays text."""

from __future__ import annotations

import dataclasses
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from hallutracer_research.evaluation.figures import geometry, trajectories
from hallutracer_research.evaluation.page import Claim, Figure, ReportData, Section, to_html
from hallutracer_research.evaluation.tables import Column, Table
from hallutracer_research.paper.tables import PUBLISHED

HOSTILE = "<script>alert('x')</script> & \"quoted\""
VOID = {"meta", "br", "hr", "img", "link", "input"}

MAIN = Table(
    "main", "Main table",
    [
        Column("set", "Set", "text"),
        Column("method", "Method", "text"),
        Column("auroc", "AUROC", "percent", higher=True),
    ],
    [
        {"set": "A", "method": "ours", "auroc": {"mean": 0.912, "std": 0.004}},
        {"set": "A", "method": HOSTILE, "auroc": 0.85},
        {"set": "B", "method": "ours", "auroc": None},
    ],
    "tab:main-results", "Caption with `code`.", [f"A note: {HOSTILE}"], "set",
)  # fmt: skip
FREE = Table("free", "Free references", [Column("x", "X", higher=True)], [{"x": 1.0}])
TRAJECTORIES = trajectories([[0.0, 1.0], [1.0, 3.0], [2.0, 2.0]], [0, 1, 1])
GEOMETRY = geometry([0.1, 0.2], [0.01, 0.02, 0.03], 64)
REPORT = ReportData(
    f"Report on {HOSTILE}",
    {"model": "demo", "versions": {"torch": "2.13", "numpy": None}, "command": "hallutracer evaluate --out <dir>"},
    [
        Claim("The mean suffices.", ["AUROC `0.90` against 0.91."], "supported", "never"),
        Claim(HOSTILE, [HOSTILE, HOSTILE], "not testable", HOSTILE),
        Claim("Third.", ["Third."], "not supported", ""),
        Claim("Fourth.", ["Fourth."], "not supported", ""),
    ],
    [
        Section("Main", "First paragraph.\n\nSecond.", [MAIN, FREE], [TRAJECTORIES]),
        Section("Geometry", HOSTILE, [dataclasses.replace(MAIN, name="again")], [GEOMETRY, TRAJECTORIES]),
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

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def attributes(self, name: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(name)) is not None]


HTML = to_html(REPORT)
PAGE = Page(HTML)


def test_every_tag_is_closed_and_every_name_is_used_once() -> None:
    assert PAGE.stack == []
    ids = PAGE.attributes("id")
    assert len(ids) == len(set(ids))
    assert sum(tag == "svg" for tag, _ in PAGE.tags) == 3, "the same drawing twice, too"


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    names = {tag for tag, _ in PAGE.tags}
    assert not names & {"script", "link", "iframe", "img", "object", "embed", "base", "form"}
    assert not PAGE.attributes("src")
    assert all(not name.startswith("on") for _, attrs in PAGE.tags for name in attrs)
    policy = next(attrs["content"] for tag, attrs in PAGE.tags if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    style = re.search(r"<style>(.*?)</style>", HTML, re.DOTALL)
    assert style is not None
    assert "@import" not in style[1]
    assert "url(" not in style[1]
    for scheme in ("prefers-color-scheme: dark", "@media print"):
        assert scheme in style[1]


def test_every_link_and_reference_leads_to_something_on_the_page() -> None:
    ids = set(PAGE.attributes("id"))
    links = PAGE.attributes("href") + PAGE.attributes("xlink:href")
    links += [f"#{value}" for value in PAGE.attributes("aria-labelledby")]
    links += re.findall(r"url\((#[^)]+)\)", HTML)
    assert len(links) > 20
    assert {link for link in links if not (link.startswith("#") and link[1:] in ids)} == set()


def test_hostile_text_is_shown_as_it_is() -> None:
    assert "<script" not in HTML
    # The title twice, claim, rule and two lines of evidence, cell and note of two tables, a section's text.
    assert "".join(PAGE.text).count(HOSTILE) == 2 + 4 + 4 + 1
    assert unescape(re.search(r"<title>(.*?)</title>", HTML)[1]) == REPORT.title  # type: ignore[index]


def test_the_summary_comes_first_and_counts_verdicts() -> None:
    assert HTML.index("What this run supports") < HTML.index("Contents") < HTML.index('id="section-1"')
    assert HTML.index('id="section-2"') < HTML.index('id="provenance"')
    assert "Of 4 claims: 1 supported, 2 not supported, 1 not testable." in HTML
    assert '<p class="verdict not-supported">✗ not supported</p>' in HTML
    assert "<code>0.90</code>" in HTML


def test_the_papers_numbers_are_folded_once_under_a_table_of_that_label() -> None:
    assert HTML.count("<details") == 1
    folded = HTML[HTML.index("<details") : HTML.index("</details>")]
    assert "<strong>97.86 ± 0.80</strong>" in folded, "HalluTracer, Qwen2.5-72B, Agentic"
    assert HTML.index("91.2 ± 0.4") < HTML.index("<details") < HTML.index("Free references</h3>")
    assert HTML.count("stand above") == 1


def test_a_block_names_its_value_once_and_the_best_is_strong() -> None:
    table = HTML[HTML.index('id="table-main"') : HTML.index("<details")]
    assert '<th scope="rowgroup" rowspan="2">A</th>' in table
    assert '<th scope="rowgroup" rowspan="1">B</th>' in table
    assert '<th scope="row">ours</th><td class="number"><strong>91.2 ± 0.4</strong></td>' in table
    assert '<td class="number">–</td>' in table
    assert '<th scope="col" class="number">AUROC, %</th>' in table


def test_a_figure_has_its_caption_and_its_alt_text() -> None:
    labels = [attrs["aria-label"] for tag, attrs in PAGE.tags if tag == "svg"]
    assert labels == [TRAJECTORIES.alt, GEOMETRY.alt, TRAJECTORIES.alt]
    assert f"<figcaption>{GEOMETRY.caption}</figcaption>" in HTML


def test_facts_stand_at_the_end() -> None:
    footer = HTML[HTML.index('id="provenance"') :]
    assert "<dt>versions</dt><dd><dl><dt>torch</dt><dd>2.13</dd><dt>numpy</dt><dd>–</dd></dl></dd>" in footer
    assert "<dd><code>hallutracer evaluate --out &lt;dir&gt;</code></dd>" in footer


def test_the_introduction_comes_first_and_is_text() -> None:
    page = to_html(dataclasses.replace(REPORT, introduction=f"What it is.\n\n{HOSTILE}"))
    assert "<p>What it is.</p>" in page
    assert page.index('id="introduction"') < page.index('id="claims"')
    assert "<script>alert" not in page
    assert 'id="introduction"' not in HTML


def test_a_report_without_claims_has_no_summary() -> None:
    page = to_html(ReportData("Empty", {}, [], []))
    assert 'id="claims"' not in page
    assert Page(page).stack == []


def svg(inside: str, attributes: str = 'viewBox="0 0 9 9"') -> Figure:
    return Figure("f", "C.", "A.", f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}>{inside}</svg>'.encode())


def with_figure(figure: Figure) -> ReportData:
    return ReportData("R", {}, [], [Section("S", figures=[figure])])


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        (svg("<script>1</script>"), "more than draw: <script>"),
        (svg('<rect onclick="x()"/>'), "onclick"),
        (svg("<foreignObject/>"), "foreignobject"),
        (svg('<image href="https://example.org/x.png"/>'), "example.org"),
        (svg("<g>"), "not well-formed"),
        (svg("", 'width="9"'), "viewBox"),
    ],
)
def test_a_drawing_that_does_more_than_draw_is_refused(figure: Figure, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        to_html(with_figure(figure))


def test_a_plain_drawing_is_let_in() -> None:
    assert 'viewBox="0 0 9 9"' in to_html(with_figure(svg("<rect/>")))


def test_two_tables_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="table-main"):
        to_html(ReportData("R", {}, [], [Section("S", tables=[MAIN, MAIN])]))


def test_an_unknown_verdict_is_refused() -> None:
    with pytest.raises(ValueError, match="perhaps"):
        to_html(ReportData("R", {}, [Claim("c", ["e"], "perhaps", "")], []))  # type: ignore[arg-type]
