"""A real headless Chromium, and what each page of ours has to keep: no request elsewhere, no error,
open to all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Request

from tests.kit.prometheus import REQUIRE

TOOLS = Path(__file__).parent.parent.parent / ".tools" / "bin"
PROGRAMS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
WAIT_MS = 20_000  # until a step counts as failed; a busy machine takes seconds


def executable() -> str:
    """Chromium's path: on PATH, else in .tools/bin; skips without it, fails where tools are
    required."""
    for name in PROGRAMS:
        result = shutil.which(name) or shutil.which(name, path=str(TOOLS))
        if result is not None:
            return result
    reason = "chromium is neither on PATH nor in .tools/bin; get it with deploy/tools.sh"
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{reason} ({REQUIRE}=1)")
    pytest.skip(reason)


@dataclass
class Tab:
    """A page under watch; ``close`` fails on what it should not have done."""

    context: BrowserContext
    page: Page
    origin: str
    elsewhere: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    allowed: tuple[str, ...] = ()  # parts of console errors that the test is about

    def open(self, path: str = "/") -> Page:
        self.page.goto(self.origin + path)
        return self.page

    def close(self) -> None:
        self.context.close()
        assert self.elsewhere == []
        for part in self.allowed:
            self.errors = [error for error in self.errors if part not in error]
        assert self.errors == []


@contextmanager
def tab(
    browser: Browser,
    origin: str,
    width: int = 1280,
    scheme: Any = "light",
    allowed: tuple[str, ...] = (),
) -> Iterator[Tab]:
    """A new tab with storage of its own; motion is reduced, so that a page is still when its text
    is there."""
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
        reduced_motion="reduce",
        base_url=origin,
    )
    context.set_default_timeout(WAIT_MS)
    opened = Tab(context, context.new_page(), origin, allowed=allowed)

    def requested(request: Request) -> None:
        if not request.url.startswith((f"{origin}/", "data:")):
            opened.elsewhere.append(request.url)

    opened.page.on("request", requested)
    opened.page.on("pageerror", lambda error: opened.errors.append(f"{error}"))
    opened.page.on(
        "console", lambda said: opened.errors.append(said.text) if said.type == "error" else None
    )
    try:
        yield opened
    except BaseException:
        context.close()
        raise
    opened.close()


def faults(page: Page) -> list[str]:
    """What axe finds, WCAG 2 A and AA and its best practices: rule and place."""
    result = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {node['target']}" for rule in result for node in rule["nodes"]]


def sideways(page: Page) -> int:
    """Pixels that the page is wider than its window."""
    return int(
        page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    )
