"""The evaluation's page in a real browser: on a phone, in the dark, open to all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from hallutracer_research.evaluation.page import to_html
from tests.browser.chromium import chromium, faults, sideways, tab
from tests.research.evaluation.page.test_html import REPORT

SAMPLE = Path(__file__).parent.parent.parent / "docs" / "smollm2-report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def letters(page: Page) -> list[float]:
    """Heights of the drawings' letters in pixels."""
    found: list[float] = page.evaluate("""[...document.querySelectorAll("figure svg text")]
        .map((text) => [parseFloat(getComputedStyle(text).fontSize), text.getScreenCTM()])
        .map(([size, placed]) => size * Math.hypot(placed.a, placed.b))""")
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_read_on_a_phone(browser: Browser, tmp_path: Path, scheme: str) -> None:
    first, second = REPORT.sections
    second = replace(second, tables=[replace(table, title=f"{table.title}, again") for table in second.tables])
    (tmp_path / "report.html").write_text(to_html(replace(REPORT, sections=[first, second], introduction="First.")))
    with tab(browser, f"file://{tmp_path}", width=375, scheme=scheme) as opened:
        page = opened.open("/report.html")
        assert sideways(page) == 0
        assert faults(page) == []
        assert min(letters(page)) >= 9.5


def test_the_sample_on_a_phone(browser: Browser) -> None:
    with tab(browser, f"file://{SAMPLE.parent}", width=375) as opened:
        page = opened.open(f"/{SAMPLE.name}")
        assert sideways(page) == 0
        assert "can one tell that the answer will be wrong?" in page.inner_text("#introduction")
        sizes = letters(page)
        assert len(sizes) > 100
        assert min(sizes) >= 9.5  # pixels
        narrow = page.evaluate("""[...document.querySelectorAll("ol.claims > li > ul")]
            .map((list) => list.getBoundingClientRect().width)""")
        assert min(narrow) > 300
