"""The documentation as a site, in a real browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.chromium import faults, sideways, tab

PAGES = ["README", "docs/cli", "docs/api", "docs/training-data"]


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    """The site, served: axe reads its style sheets."""
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(30)


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        pytest.param(1366, "light", marks=pytest.mark.long),
        pytest.param(1320, "dark", marks=pytest.mark.long),
        (375, "light"),
    ],
)
def test_its_pages_are_as_wide_as_the_window_and_open_to_all(
    url: str, browser: Browser, width: int, scheme: str
) -> None:
    for name in PAGES:
        with tab(browser, url, width=width, scheme=scheme) as opened:
            page = opened.open(f"/{name}.html")
            assert sideways(page) == 0, name
            assert faults(page) == [], name
            if page.locator(".toc-drawer").is_visible() and width > 1300:
                box = page.locator(".toc-drawer").bounding_box()
                assert box is not None
                assert box["x"] + box["width"] <= width, name


def test_a_keyboard_scrolls_a_code_block_that_is_wider_than_its_page(
    url: str, browser: Browser
) -> None:
    with tab(browser, url, width=800) as opened:
        page = opened.open("/README.html")
        wide = page.locator("pre").evaluate_all(
            "all => all.findIndex((node) => node.scrollWidth > node.clientWidth)"
        )
        block = page.locator("pre").nth(wide)
        block.focus()
        assert block.evaluate("node => node === document.activeElement")
        page.keyboard.press("ArrowRight")
        page.wait_for_function(
            "number => document.querySelectorAll('pre')[number].scrollLeft > 0", arg=wide
        )
