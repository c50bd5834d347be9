"""The pages of the documentation, their fenced blocks and what the comment above a block says about
it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "clients" / "python" / "README.md",
    ROOT / "deploy" / "README.md",
    ROOT / "deploy" / "platforms" / "README.md",
    ROOT / "deploy" / "sidecar" / "README.md",
    ROOT / "probes_store" / "FORMAT.md",
    ROOT / "probes_store" / "FIELDS.md",
    ROOT / "benchmarks" / "LOG.md",
]
RECORDS = [  # not on the site: generated, a log, or the page of a package index
    ROOT / "clients" / "python" / "README.md",
    ROOT / "docs" / "licences.md",
    ROOT / "docs" / "models-report.md",
    ROOT / "docs" / "smollm2-report.md",
    ROOT / "benchmarks" / "LOG.md",
]
RUNNABLE = {"sh", "console", "python"}
SPELLINGS = {
    "bash",
    "shell",
    "shell-session",
    "py",
    "pycon",
    "zsh",
}  # of the same: one name for each language

_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
_ON = re.compile(r"run: on (?P<model>\w+)")
_LONG = re.compile(r"run: long(?:, with (?P<variables>\S+=\S*(?: \S+=\S*)*))?")


@dataclass(frozen=True)
class Block:
    """A fenced block.  ``expected`` is the text of the json block that is said to be its answer."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None = None  # why it is not run
    long: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    answers: bool = False  # the block is the answer of the one before it
    model: str = "demo"  # where the commands name none

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUNNABLE and self.reason is None


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, in order; ValueError on a comment that looks like a mark and is
    none."""
    found = []
    comment = ""
    for token in MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block":
            match = _COMMENT.fullmatch(token.content.strip())
            comment = match[1] if match else ""
            continue
        if token.type == "fence":
            assert token.map is not None
            found.append(_block(page, token.map[0] + 1, token.info.strip(), token.content, comment))
        comment = ""
    return found


def _block(page: Path, line: int, language: str, text: str, comment: str) -> Block:
    if comment == "answer of the block above":
        return Block(page, line, language, text, answers=True)
    if long := _LONG.fullmatch(comment):
        pairs = (pair.split("=", 1) for pair in (long["variables"] or "").split())
        return Block(page, line, language, text, long=True, variables=dict(pairs))
    if on := _ON.fullmatch(comment):
        return Block(page, line, language, text, model=on["model"])
    reason = comment.removeprefix("not run:").strip() if comment.startswith("not run:") else None
    if reason is None and re.match(r"(not )?run\b|answer\b", comment):
        raise ValueError(f"{page}:{line}: unknown mark {comment!r}")
    return Block(page, line, language, text, reason=reason)
