"""The API reference, the evaluation's page, and the playground on the package's own model, in a
real browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from hallutracer_research.evaluation.page import to_html
from tests.browser.chromium import faults, sideways, tab
from tests.research.evaluation.test_report import REPORT
from tests.running import running
from tests.serve_process import MAY_CHOOSE, serve

KEY = "a-key-of-sixteen-letters"
SAMPLE = Path(__file__).parent.parent.parent / "docs" / "smollm2-report.html"
KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
WITHHELD, WOULD = "Withheld before the first token", "Would be withheld before the first token"


def test_the_reference_asks_for_the_key_lists_the_routes_and_tries_them(
    browser: Browser, tmp_path: Path
) -> None:
    with (
        running(tmp_path, api_keys=(KEY,), playground=False) as service,
        tab(browser, service.url, allowed=("401",)) as opened,
    ):
        page = opened.open("/docs")
        expect(page.locator("#key")).to_be_focused()
        assert page.locator(".opblock").count() == 0
        page.keyboard.type("another-key-of-mine")
        page.keyboard.press("Enter")
        expect(page.locator("#problem")).to_have_text("The service does not know this key.")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator(".opblock-summary-path").first).to_be_visible()
        listed = [
            path.replace("\u200b", "")
            for path in page.locator(".opblock-summary-path").all_inner_texts()
        ]
        assert {"/score", "/v1/bundles", "/v1/chat/completions", "/health/ready"} <= set(listed)
        page.locator("#operations-risk-score_score_post .opblock-summary-control").click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute", exact=True).click()
        expect(page.locator(".live-responses-table .response-col_status").last).to_contain_text(
            "200"
        )
        expect(page.locator(".live-responses-table")).to_contain_text('"risk"')


@pytest.mark.parametrize("playground", [True, False])
def test_the_reference_links_to_the_playground_where_there_is_one(
    browser: Browser, tmp_path: Path, playground: bool
) -> None:
    with running(tmp_path, playground=playground) as service, tab(browser, service.url) as opened:
        page = opened.open("/docs")
        expect(page.locator(".opblock").first).to_be_visible()
        link = page.get_by_role("link", name="Playground")
        expect(link).to_have_count(int(playground))
        if playground:
            link.click()
            expect(page.locator("#ask")).to_be_enabled()


def brightness(page: Page, selector: str, of: str) -> float:
    """Of the colour of the letters, or of the first background behind them, from 0 to 1."""
    result: list[float] = page.locator(selector).first.evaluate(
        """(node, of) => {
        const read = (element) => getComputedStyle(element)[of].match(/[\\d.]+/g).map(Number);
        while (node.parentElement && read(node)[3] === 0) node = node.parentElement;
        return read(node).slice(0, 3); }""",
        of,
    )
    return sum(result) / 3 / 255


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_reference_follows_the_colours_of_the_system(
    browser: Browser, tmp_path: Path, scheme: str
) -> None:
    with running(tmp_path) as service, tab(browser, service.url, scheme=scheme) as opened:
        page = opened.open("/docs")
        expect(page.locator(".opblock").first).to_be_visible()
        for part in ("nav a", ".info .title", ".opblock-tag", ".opblock-summary-path"):
            behind, letters = (brightness(page, part, of) for of in ("backgroundColor", "color"))
            assert (behind < letters) is (scheme == "dark"), part
            assert abs(behind - letters) > 0.25, part


def letters(page: Page) -> list[float]:
    """Heights of the drawings' letters in pixels."""
    result: list[float] = page.evaluate("""[...document.querySelectorAll("figure svg text")]
        .map((text) => [parseFloat(getComputedStyle(text).fontSize), text.getScreenCTM()])
        .map(([size, placed]) => size * Math.hypot(placed.a, placed.b))""")
    return result


def test_it_is_read_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    first, second = REPORT.sections
    second = replace(
        second, tables=[replace(table, title=f"{table.title}, again") for table in second.tables]
    )
    (tmp_path / "report.html").write_text(
        to_html(replace(REPORT, sections=[first, second], introduction="First."))
    )
    with tab(browser, f"file://{tmp_path}", width=375, scheme="dark") as opened:
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


def test_a_known_and_an_unknown_capital(browser: Browser) -> None:
    with (
        serve("--bundle", "demo", "--bundle", "demo-fused", **MAY_CHOOSE) as service,
        tab(browser, service.url, width=360) as opened,
    ):
        body = {"prompt": [KNOWN, UNKNOWN], "generate": {"max_tokens": 64}}
        known, unknown = httpx.post(f"{service.url}/score", json=body, timeout=60).json()["data"]
        assert (known["decision"], unknown["decision"]) == ("continue", "abstain")
        page = opened.open()
        rows = page.locator("#sample-rows tr[data-number]")
        expect(rows).to_have_count(24)
        marks = [row.get_attribute("data-verdict") for row in rows.all()]
        assert {"right", "wrong"} <= set(marks)
        assert marks[:12].count("right") > marks[12:].count("right")
        assert rows.first.is_visible()
        box = rows.first.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < 800  # a phone shows the first answer without scrolling
        expect(page.locator("#gate-source")).to_contain_text(
            "Counted on the bundle's 4,238 training rows"
        )
        page.fill("#question", KNOWN)
        page.keyboard.press("Enter")
        expect(page.locator(".decision")).to_have_text("Answered")
        expect(page.locator(".answer:not([aria-busy])")).to_have_text(
            known["completion"]["text"].strip()
        )
        assert float(page.get_attribute(".risk", "data-risk") or "") == pytest.approx(
            known["risk"], abs=1e-4
        )
        page.click("#choices > summary")
        page.select_option("#compare", "demo-fused:1")
        page.fill("#question", UNKNOWN)
        page.click("#ask")
        expect(page.locator(".decision")).to_have_text([WITHHELD, WOULD])
        expect(page.locator(".answer").first).to_have_text("I am not sure.")
        assert float(page.get_attribute(".risk >> nth=0", "data-risk") or "") == pytest.approx(
            unknown["risk"], abs=1e-4
        )
        assert sideways(page) == 0
        page.select_option("#bundle", "demo-fused:1")
        expect(page.locator("#gate-source")).to_contain_text(
            "Counted on the bundle's 4,238 training rows"
        )
