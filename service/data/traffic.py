"""Unlabelled traffic, JSONL: risks as ``hallutracer score`` writes them, or prompts that are still to be scored.

A line has ``risk``, or ``prompt`` or ``messages``; ``group`` where several lines depend on each other.  Other keys,
labels above all, are not read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.data.rows import check_prompt, check_text, objects, prompt_digest
from service.data.training_rows import Message
from service.errors import DataError


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """One line."""

    line: int  # 1-based
    risk: float | None  # None: to be scored
    prompt: str | None
    messages: list[Message] | None
    group: str  # its own name, or one that rows of the same prompt share
    prompt_digest: bytes | None  # None where the line has a risk and no prompt


@dataclass(frozen=True)
class TrafficFile:
    """A checked file.  ``digest`` is sha256 over the canonical rows."""

    path: Path
    rows: tuple[TrafficRow, ...]
    digest: str

    @property
    def scored(self) -> bool:
        """Return whether the lines have risks; all of them or none."""
        return self.rows[0].risk is not None


def read_traffic(path: Path, bundle_digest: str) -> TrafficFile:
    """Read and check a whole file; a risk that names its bundle must be of the one with ``bundle_digest``.

    Raises DataError: every problem of the file, by line number.
    """
    problems: list[str] = []
    rows: list[TrafficRow] = []
    digest = hashlib.sha256()
    for line, value in objects(path, problems):
        of_line = [f"line {line}: {problem}" for problem in _check(value, bundle_digest)]
        problems += of_line
        if of_line:
            continue
        digest.update(json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n")
        asked = prompt_digest(value) if "prompt" in value or "messages" in value else None
        own = f"line {line}" if asked is None else f"prompt {asked.hex()}"
        rows.append(
            TrafficRow(
                line=line,
                risk=float(value["risk"]) if "risk" in value else None,
                prompt=value.get("prompt"),
                messages=value.get("messages"),
                group=f"group {value['group']}" if "group" in value else own,
                prompt_digest=asked,
            )
        )
    for row in rows:
        if (row.risk is None) != (rows[0].risk is None):
            problems.append(f"line {row.line}: some lines have a 'risk' and others not: score all of them, or none")
            break
    if not rows and not problems:
        problems.append("the file has no rows: one JSON object per line is expected")
    if problems:
        raise DataError(str(path), problems)
    return TrafficFile(path, tuple(rows), f"sha256:{digest.hexdigest()}")


def _check(value: dict[str, Any], bundle_digest: str) -> Iterator[str]:
    yield from check_text(value, "group", required=False)
    if "risk" not in value or "prompt" in value or "messages" in value:
        yield from check_prompt(value)
    if "risk" not in value:
        return
    risk, bundle = value["risk"], value.get("bundle")
    if type(risk) not in (int, float) or not 0 <= risk <= 1:
        yield f"'risk' must be a number from 0 to 1, found {json.dumps(risk)[:60]}"
    if isinstance(bundle, dict) and bundle.get("digest") != bundle_digest:
        yield (
            f"its risk is of the bundle {bundle.get('name')}:{bundle.get('version')} ({bundle.get('digest')}), not of "
            f"{bundle_digest}: score the rows with that one"
        )
