"""Which rows a bundle has seen: those it was fitted and tested on, and the sets that (re)calibrations have spent.

A promise rests on rows that took part in nothing else, so evaluation.json keeps marks of all of them: digests of the
prompts, of their words of content and of the groups' names, no text.  A mark is 64 bits; that two of a million rows
share one by chance has a probability of 3e-8.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes_store.bundle import Bundle
from probes_store.manifest import PROBES
from probes_store.store import Store
from service.data.near_duplicates import content_of
from service.data.rows import MARK_DIGITS, prompt_mark
from service.data.training_rows import Dataset, Row, read_dataset
from service.errors import DataError, TrainingError


@dataclass(frozen=True)
class Marks:
    """Digests of the prompts and of the named groups of some rows."""

    prompts: frozenset[str]  # of the prompts, and of the words that they ask by
    groups: frozenset[str]

    @classmethod
    def of(cls, dataset: Dataset) -> Marks:
        """Of all rows, also of those that were left out later; of rows in forms, those that they were made of, too.

        Only groups of the user's own file count: in forms a row without one has its id as a group, which another file
        may call a group of its own.
        """
        groups = {group_mark(row.group) for row in dataset.origin.rows if row.group}
        rows = [*dataset.origin.rows, *(dataset.rows if dataset.made_of else ())]
        prompts = {prompt_mark(row.prompt_digest) for row in rows} | {words_mark(row) for row in rows}
        return cls(frozenset(prompts), frozenset(groups))

    @classmethod
    def read(cls, document: Mapping[str, str]) -> Marks:
        """What ``document`` wrote."""
        return cls(frozenset(document["prompts"].split()), frozenset(document["groups"].split()))

    def document(self) -> dict[str, str]:
        """For evaluation.json: two texts, since a list would take a line for each mark."""
        return {"prompts": " ".join(sorted(self.prompts)), "groups": " ".join(sorted(self.groups))}


def group_mark(name: str) -> str:
    """Of a group's name."""
    return hashlib.blake2b(name.encode(), digest_size=MARK_DIGITS // 2).hexdigest()


def words_mark(row: Row) -> str:
    """Of a row's words of content, which a copy in another case, order or punctuation has too."""
    words, digits = content_of("\n".join(row.texts))
    return group_mark(json.dumps([sorted(words), digits]))


def seen_by(bundle: Bundle, evaluation: Mapping[str, Any], trained_on: Sequence[Path]) -> Iterator[tuple[str, Marks]]:
    """The rows that a bundle was fitted and tested on, each set with what it is called.

    A bundle of an older trainer records only the digests of its files: ``trained_on`` must name them.
    Raises TrainingError naming the file that is wanted, and DataError.
    """
    recorded = evaluation.get("rows_seen", {})
    for what, marks in recorded.items():
        yield f"the {what} rows of {bundle.manifest.name}", Marks.read(marks)
    files = [read_dataset(path, bundle.manifest.training.labels, folds=None) for path in trained_on]
    for dataset in files:
        yield str(dataset.path), Marks.of(dataset)
    wanted = {} if recorded else {"training": bundle.manifest.training.data_digest}
    if not recorded and evaluation.get("held_out"):
        wanted["held-out"] = evaluation["held_out"]["digest"]
    for what, digest in wanted.items():
        if digest not in {dataset.digest for dataset in files}:
            raise TrainingError(
                f"{bundle.reference} does not record which rows it has seen, so nobody could tell whether these "
                f"rows are new: name its {what} file ({digest}) with --trained-on",
                param="trained_on",
            )


def spent_sets(store: Store, bundle: Bundle) -> list[tuple[str, Bundle, dict[str, Any]]]:
    """Every calibration and recalibration of these probes: which, the first version with it, its record."""
    probes = bundle.manifest.files[PROBES].sha256
    found: dict[tuple[str, str], tuple[str, Bundle, dict[str, Any]]] = {}
    for summary in store.list():
        if summary.manifest is None or summary.manifest.files[PROBES].sha256 != probes:
            continue
        version = store.load(summary.reference)
        evaluation = version.evaluation()
        for what in ("calibration", "recalibration"):
            for record in evaluation.get(f"{what}s", []):
                found.setdefault((what, record["data"]["digest"]), (what, version, record))
    return list(found.values())


def check_unspent(dataset: Dataset, seen: Sequence[tuple[str, Marks]]) -> None:
    """Raise DataError where a row's prompt or group is among those already seen: every such row, by line.

    So is a row without a group that has the words of content of one already seen.
    """
    problems = []
    for row in dataset.rows:
        for what, marks in seen:
            if prompt_mark(row.prompt_digest) in marks.prompts:
                problems.append(f"line {row.line}: its prompt is among {what}")
            elif row.group and group_mark(row.group) in marks.groups:
                problems.append(f"line {row.line}: its group is among {what}")
            elif not row.group and words_mark(row) in marks.prompts:
                problems.append(f"line {row.line}: it asks in other words what is among {what}")
            else:
                continue
            break
    if problems:
        raise DataError(str(dataset.path), problems)
