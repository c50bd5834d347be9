"""The playground on ``hallutracer serve`` with the package's own model and both of its bundles."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.browser.chromium import WAIT_MS, chromium, sideways, tab
from tests.serve_process import MAY_CHOOSE, serve

expect.set_options(timeout=WAIT_MS)
KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
WITHHELD, WOULD = "Withheld before the first token", "Would be withheld before the first token"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


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
        expect(page.locator("#gate-source")).to_contain_text("Counted on the bundle's 4,238 training rows")
        page.fill("#question", KNOWN)
        page.keyboard.press("Enter")
        expect(page.locator(".decision")).to_have_text("Answered")
        expect(page.locator(".answer:not([aria-busy])")).to_have_text(known["completion"]["text"].strip())
        assert float(page.get_attribute(".risk", "data-risk") or "") == pytest.approx(known["risk"], abs=1e-4)
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
        expect(page.locator("#gate-source")).to_contain_text("Counted on the bundle's 4,238 training rows")
