"""The site builds without a warning, needs no network to be read, and leads everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.pages import PAGES, RECORDS, ROOT

pytest.importorskip("furo", reason="pip install 'hallutracer[docs]'")


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-c", str(ROOT / "docs")]
    return subprocess.run(
        [*command, "-d", str(target / ".doctrees"), str(source), str(target / "site")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("docs")
    done = build(ROOT, target)
    assert done.returncode == 0, done.stderr
    return target / "site"


def test_every_page_is_there_and_in_the_navigation(site: Path) -> None:
    front = (site / "README.html").read_text(encoding="utf-8")
    for page in set(PAGES) - set(RECORDS):
        name = page.relative_to(ROOT).with_suffix(".html")
        assert (site / name).is_file(), name
        assert name.name == "README.html" and name.parent == Path() or f'href="{name}"' in front, name
    assert "README.html" in (site / "index.html").read_text(encoding="utf-8")


def test_it_reads_and_searches_without_a_network(site: Path) -> None:
    assert (site / "searchindex.js").is_file()
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\bsrc="([^"]+)"|<link[^>]*\bhref="([^"]+)"', text)
        outside = [url for pair in loaded for url in pair if url.startswith(("http:", "https:", "//"))]
        assert outside == [], page
        for image in re.findall(r'<img[^>]*\bsrc="([^"]+)"', text):
            assert (page.parent / image).is_file(), f"{page}: {image}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import\s+['\"]?http", style.read_text(encoding="utf-8")), style


def test_external_links_are_well_formed(site: Path) -> None:
    for page in site.rglob("*.html"):
        for link in re.findall(r'<a[^>]*\bhref="([^"#][^"]*)"', page.read_text(encoding="utf-8")):
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme in ("https", "http", "mailto"), f"{page}: {link}"
                assert re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc), f"{page}: {link}"


@pytest.mark.parametrize(
    "text",
    ["[gone](docs/gone.md)", "[gone](docs/serving.md#gone)", "![gone](docs/gone.png)"],
    ids=["page", "anchor", "image"],
)
def test_a_broken_link_fails_the_build(tmp_path: Path, text: str) -> None:
    source = tmp_path / "source"
    (source / "docs").mkdir(parents=True)
    (source / "README.md").write_text(f"# Front\n\n[fine](docs/serving.md#errors)\n\n{text}\n")
    (source / "docs" / "serving.md").write_text("# Serving\n\n## Errors\n")
    done = build(source, tmp_path)
    assert done.returncode != 0
    assert "gone" in done.stderr
