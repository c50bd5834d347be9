"""Several files of rows as one: ids and kinds name the file, and one question has one group in all
of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from scipy.cluster.hierarchy import DisjointSet

from hallutracer_research.data.files import words_of
from hallutracer_research.documents import Row
from service.data.rows import check_id, check_prompt, check_text, id_of, id_problem, objects
from service.errors import DataError

_USED = "\0"  # no file's name


class MixtureSource(NamedTuple):
    """A file, and how many of its rows are taken; ``rows`` None: all.  Its rows' ids and kinds
    begin with its stem."""

    path: Path
    rows: int | None = None


class Mixture(NamedTuple):
    """The rows, and how many groups the files had before questions that two of them share were
    found."""

    rows: list[Row]
    by_source: dict[str, int]
    groups_before: int
    groups: int


def mix(sources: Sequence[MixtureSource], seed: int = 0, without: Path | None = None) -> Mixture:
    """Return rows of each file, group after group in the order of a hash of seed and group, up to
    the wanted number. Rows of different files whose questions have the same words of content get
    one group.  Groups that ``without`` has a row of, such as a training file when held-out rows are
    drawn, are left out.  Raises DataError: damaged lines, too few rows, or two files of one
    name."""
    names = [source.path.stem for source in sources]
    for name, source in zip(names, sources, strict=True):
        if names.count(name) > 1:
            raise DataError(str(source.path), [f"two files are called {name!r}: rename one"])
    read = {name: read_rows(source.path) for name, source in zip(names, sources, strict=True)}
    used = [] if without is None else read_rows(without)
    joined: DisjointSet = DisjointSet()
    for name, rows in [*read.items(), (_USED, used)]:
        for row in rows:
            own = _own_group(name, row)
            joined.add(own)
            if words := content_words(question_of(row)):
                joined.add(words)
                joined.merge(own, words)
    taken = {joined[_own_group(_USED, row)] for row in used}
    chosen: list[Row] = []
    before: set[str] = set()
    counts = {}
    for name, (path, count) in zip(names, sources, strict=True):
        rows = [row for row in read[name] if joined[_own_group(name, row)] not in taken]
        group = {}
        for row in rows:  # the first of the names of groups among what is joined
            together = joined.subset(_own_group(name, row))
            group[row["id"]] = min(member for member in together if isinstance(member, str))
        counts[name] = wanted = len(rows) if count is None else count
        if wanted > len(rows):
            raise DataError(
                str(path), [f"has {len(rows):,} rows to draw from, and {wanted:,} are wanted"]
            )
        rows.sort(key=lambda row: (_draw(seed, group[row["id"]]), row["id"]))
        for row in rows[:wanted]:
            before.add(_own_group(name, row))
            kind = name + (f"/{row['kind']}" if row.get("kind") is not None else "")
            chosen.append(
                row | {"id": f"{name}/{row['id']}", "group": group[row["id"]], "kind": kind}
            )
    return Mixture(chosen, counts, len(before), len({row["group"] for row in chosen}))


def question_of(row: Row) -> str:
    """Return the last thing that the user says, without a passage in front of it: its last
    paragraph."""
    text = row["prompt"] if "prompt" in row else row["messages"][-1]["content"]
    return str(text).strip().rsplit("\n\n", 1)[-1]


def content_words(question: str) -> tuple[str, ...]:
    """Return the words that make two questions the same, in alphabetical order; () where they are
    fewer than two."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    plain = re.sub(r"['\u2019]s\b", "", question, flags=re.IGNORECASE)
    words = sorted(set(words_of(plain)) - ENGLISH_STOP_WORDS - {"answer", "briefly"})
    return tuple(words) if len(words) > 1 else ()


def read_rows(path: Path) -> list[Row]:
    """Return the rows as they are, each with an id.  Raises DataError: every problem of the file,
    by line number."""
    problems: list[str] = []
    rows: list[Row] = []
    seen: dict[str, int] = {}
    numbered: set[int] = set()
    for line, row in objects(path, problems):
        found = [*check_id(row), *check_text(row, "group", required=False), *check_prompt(row)]
        found = found or list(id_problem(row, line, seen, numbered))
        problems += [f"line {line}: {problem}" for problem in found]
        rows.append(row | {"id": id_of(row, line)})
    if not rows and not problems:
        problems.append("the file has no rows")
    if problems:
        raise DataError(str(path), problems)
    return rows


def _own_group(source: str, row: Row) -> str:
    """Return the row's group; one that is named is one for all files: readers name a question's
    group alike."""
    return str(row["group"]) if row.get("group") else f"{source}/{row['id']}"


def _draw(seed: int, group: str) -> str:
    return hashlib.blake2b(f"{seed} {group}".encode(), digest_size=8).hexdigest()
