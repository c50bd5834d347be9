"""The API reference at /docs, in a real browser and without the internet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.chromium import WAIT_MS, chromium, tab
from tests.running import running

expect.set_options(timeout=WAIT_MS)
KEY = "a-key-of-sixteen-letters"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def test_the_reference_lists_the_routes_and_tries_them(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path, policy="observe") as service, tab(browser, service.url) as opened:
        page = opened.open("/docs")
        expect(page.locator(".opblock-summary-path").first).to_be_visible()
        listed = [path.replace("\u200b", "") for path in page.locator(".opblock-summary-path").all_inner_texts()]
        assert {"/score", "/v1/bundles", "/v1/chat/completions", "/health/ready"} <= set(listed)
        page.locator("#operations-risk-score_score_post .opblock-summary-control").click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute", exact=True).click()
        expect(page.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
        expect(page.locator(".live-responses-table")).to_contain_text('"risk"')


def test_the_reference_asks_for_the_key_and_uses_it(browser: Browser, tmp_path: Path) -> None:
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
        page.locator("#operations-catalogue-models_v1_models_get .opblock-summary-control").click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute", exact=True).click()
        expect(page.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
