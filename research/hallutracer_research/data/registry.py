"""The public sets that have a reader, as ``sets.toml`` describes them.  The number of rows read is
checked against the published one, because another version of a set is another benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hallutracer_research.data import bfcl, knowledge, question_sets, statement_sets
from hallutracer_research.data.files import Rows, SetFiles
from hallutracer_research.documents import table_beside
from service.errors import DataError

Reader = Callable[[SetFiles], Rows]
"""A set's files -> trainer's rows, and counts of which "read" is compared with
``SetInfo.rows``."""


@dataclass(frozen=True)
class SetInfo:
    """One set; ``sets.toml`` says what each field holds."""

    name: str
    read: Reader
    title: str
    rows: int
    labels: Literal["given", "generate"]
    kinds: int
    group: str
    hallucinated: str
    onset: str
    caveat: str
    licence: str
    source: str
    found_by: str
    folders: tuple[str, ...]
    judge: Literal["contains", "regex", "similarity", "calls"] | None = None
    max_new_tokens: int | None = None
    abstain_pattern: str | None = None


MODULES = (bfcl, knowledge, question_sets, statement_sets)
"""Each set has a reader in one of them: ``read_`` and its name."""


def _reader(name: str) -> Reader:
    function = f"read_{name.replace('-', '_')}"
    (reader,) = (getattr(module, function) for module in MODULES if hasattr(module, function))
    return reader  # type: ignore[no-any-return]


def _described() -> dict[str, SetInfo]:
    described: dict[str, dict[str, Any]] = {}
    for name, entry in table_beside(__file__, "sets.toml").items():
        values = described.get(entry.pop("like", ""), {}) | entry
        if values["labels"] == "given":
            for of_judge in ("judge", "max_new_tokens", "abstain_pattern"):
                values.pop(of_judge, None)
        described[name] = values | {"folders": tuple(values["folders"])}
    return {
        name: SetInfo(name=name, read=_reader(name), **values) for name, values in described.items()
    }


SETS: Mapping[str, SetInfo] = _described()


def find_path(name: str, path: Path) -> Path:
    """Return the set's folder: ``path`` or a folder in it; ``path`` if the set is in neither."""
    info = SETS[name]
    folders = (path, *(path / folder for folder in info.folders))
    return next((folder for folder in folders if (folder / info.found_by).is_file()), path)


def read_set(name: str, path: Path, allow_other_counts: bool = False) -> Rows:
    """Return rows for the trainer and the reader's counts; ``path`` is the download.  Raises
    DataError: unknown set or folder, missing or malformed files, or not the published number of
    rows."""
    if name not in SETS:
        raise DataError(name, [f"unknown set; known are {', '.join(SETS)}"])
    info = SETS[name]
    if not path.is_dir():
        raise DataError(str(path), [f"is not a folder; download {name} from {info.source}"])
    files = SetFiles(find_path(name, path))
    rows, counts = info.read(files)
    if files.problems:
        raise DataError(str(files.folder), files.problems)
    if counts["read"] != info.rows and not allow_other_counts:
        problem = (
            f"{counts['read']:,} rows read, but {info.title} as published has {info.rows:,}:"
            f" another version is another benchmark. Get it from {info.source}, or allow other"
            " counts and say so beside the results"
        )
        raise DataError(str(path), [problem])
    return rows, counts
