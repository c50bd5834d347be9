"""Draw the playground and the terminal, of a service that runs: python docs/screenshots.py URL.

Writes docs/playground.png, docs/playground-phone.png and docs/try.svg of SmolLM2, of another model
docs/playground-BUNDLE.png, and docs/answers.png where the bundle reads answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
from playwright.sync_api import Browser, expect, sync_playwright
from rich.console import Console
from rich.text import Text

from tests.browser.chromium import executable

DOCS = Path(__file__).parent
ROWS = 24
ASKED = "Who was the first president of the United States?"
WAIT_MS = 600_000


def page(browser: Browser, url: str, target: Path, width: int, height: int) -> None:
    """The playground as it opens, once all questions are answered."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, reduced_motion="reduce"
    )
    opened = context.new_page()
    opened.goto(url)
    expect(opened.locator("#sample-rows tr[data-number]")).to_have_count(ROWS, timeout=WAIT_MS)
    opened.screenshot(path=target)
    context.close()


def answer(browser: Browser, url: str, target: Path) -> None:
    """An answer whose tokens are shaded by their own risk."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    opened = context.new_page()
    opened.goto(url)
    opened.fill("#question", ASKED)
    expect(opened.locator("#ask")).to_be_enabled(timeout=WAIT_MS)
    opened.click("#ask")
    expect(opened.locator("[data-answer-risk]")).to_be_visible(timeout=WAIT_MS)
    opened.locator("#result").screenshot(path=target)
    context.close()


def terminal(url: str, target: Path, width: int = 108) -> None:
    """What ``hallutracer try`` prints, in its colours."""
    command = [str(Path(sys.executable).with_name("hallutracer")), "try", "--url", url]
    said = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(width)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=said)
    console = Console(record=True, width=width, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(Text.from_ansi(done.stdout))
    drawn = console.export_svg(title="hallutracer try")
    own = re.sub(
        r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL
    )  # a font of others would be fetched
    target.write_text(own, encoding="utf-8")


def main(url: str) -> None:
    """All of them."""
    card = httpx.get(f"{url}/v1/bundles").raise_for_status().json()["data"][0]
    bundle = card["name"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable())
        if card["reads_answers"]:
            answer(browser, url, DOCS / "answers.png")
        if bundle != "smollm2":
            page(browser, url, DOCS / f"playground-{bundle}.png", 1280, 900)
            return
        page(browser, url, DOCS / "playground.png", 1280, 900)
        page(browser, url, DOCS / "playground-phone.png", 390, 844)
    terminal(url, DOCS / "try.svg")


if __name__ == "__main__":
    main(sys.argv[1])
