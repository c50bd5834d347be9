"""JSONL training rows, parsed once; every problem is reported by line number before a model is loaded.

A row: ``id``, else it is called by the number of its line; ``prompt`` or ``messages``; ``label`` ("factual" or
"hallucinated", or 1 and 0) and, where they are known, the ``answer`` that it is about, with which ``messages`` may end
instead, and its ``decoding`` (``rows.decoding_of``), or ``answers`` (accepted answers, or one, for labels that are
generated and judged); ``group`` (rows that folds keep together; rows with the same prompt always are, and so are rows
without a group that ask the same in other words);
``applies``, false for a row that asks for no fact: it has neither ``label`` nor ``answers``.
Other keys are metadata; ``kind``, ``template`` and ``form`` name strata of the evaluation.

A row of unlabelled traffic has ``risk``, as ``hallutracer score`` writes it, or ``prompt`` or ``messages`` that are to
be scored; ``group`` where several depend on each other.  Other keys, labels above all, are not read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from probes_store.records import Decoding
from service.data.near_duplicates import near_duplicates
from service.data.options import Labels
from service.data.rows import (
    DECODINGS,
    Message,
    accepted_of,
    check_id,
    check_prompt,
    check_text,
    decoding_of,
    id_of,
    id_problem,
    label_of,
    likely_columns,
    objects,
    prompt_digest,
    split_answer,
)
from service.errors import DataError

FORM = "form"  # the key of a row that names its form
STRATA = ("kind", "template", FORM)
SHOWN = 60  # characters of a prompt that is named as an example
ANSWERS = ("completion", "response", "output", "generation", "generated_answer", "model_answer", "prediction")
WRITTEN_LIST = re.compile(r"\[\s*(['\"].*)?\]", re.DOTALL)  # as JSON, Python and pandas write one
KEYS_SHOWN = 120  # characters in which the keys of a row are named
REMARKED = 0.01  # share of rows from which on a likeness between named groups is remarked on


@dataclass(frozen=True, slots=True)
class Row:
    """One line; exactly one of ``prompt`` and ``messages`` is set."""

    line: int  # 1-based
    id: str
    prompt: str | None
    messages: list[Message] | None
    group: str  # "" where the row has none
    label: int | None  # 1 factual, 0 hallucinated; None where it is to be generated
    answers: tuple[str, ...]
    strata: dict[str, str]  # those of STRATA that the row has
    prompt_digest: bytes
    applies: bool = True  # False: it asks for no fact, so that no answer to it is right or wrong
    statement: str = ""  # a sentence that gives the answer, for the forms that state facts
    answer: str = ""  # the answer that ``label`` is about, character for character as it stands behind the prompt
    decoding: Decoding | None = None  # how that answer was decoded; None where the row does not say

    @property
    def question(self) -> str:
        """Return what a judge is shown: the prompt, or the conversation."""
        if self.prompt is not None:
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.messages or ())

    @property
    def texts(self) -> list[str]:
        """Return the prompt, or what each message of the conversation says."""
        return [self.prompt] if self.prompt is not None else [message["content"] for message in self.messages or ()]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A checked file.  ``digest`` is sha256 over the canonical rows, so spacing and key order do not matter."""

    path: Path
    rows: tuple[Row, ...]
    digest: str
    own_groups: bool  # whether any row names its group
    alike: NDArray[np.int64]  # the same number for rows whose prompts are near-duplicates: [N]
    made_of: Dataset | None = None  # the user's file, where the rows are its questions in forms
    part_of: str | None = None  # digest of the whole file, where these are some of its rows
    unread_answers: str = ""  # a key of rows with labels that seems to hold what ``answer`` would, and is not read
    left_out_forms: tuple[str, ...] = ()  # that the model's context or chat template takes from none of the questions

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def origin(self) -> Dataset:
        """Return the file that the user named."""
        return self if self.made_of is None else self.made_of

    @property
    def file_digest(self) -> str:
        """Return the digest of all rows of the file."""
        return self.digest if self.part_of is None else self.part_of

    def part(self, places: Sequence[int]) -> Dataset:
        """Return some of the rows; the digest is of the whole and the places."""
        return replace(
            self, rows=tuple(self.rows[place] for place in places),
            digest=f"sha256:{hashlib.sha256(f'{self.digest} {list(places)}'.encode()).hexdigest()}",
            alike=self.alike[np.asarray(places, np.int64)], part_of=self.file_digest,
        )  # fmt: skip

    @cached_property
    def applies(self) -> NDArray[np.bool_]:
        """Return whether each row asks for a fact: [N]."""
        return np.array([row.applies for row in self.rows], np.bool_)

    @property
    def asking(self) -> NDArray[np.int64]:
        """Return the rows that ask for a fact, which alone have a label."""
        return np.flatnonzero(self.applies)

    @property
    def others(self) -> NDArray[np.int64]:
        """Return the rows that do not apply."""
        return np.flatnonzero(~self.applies)

    @property
    def decodings(self) -> set[Decoding | None]:
        """Return how the answers were decoded that the rows' own labels are about; None of rows that do not say."""
        return {row.decoding for row in self.rows if row.applies}

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """Return the group number of each row, in order of first appearance: [N].

        Rows of one named group share a number, and so do rows with the same prompt: their readouts are equal, so a copy
        on the other side of a fold would leak the label.  So does a near-duplicate: where one of several has no group,
        they share a number, too."""
        return _merged(self.rows, self.alike)

    @property
    def remarks(self) -> list[str]:
        """Return what to say of near-duplicates: rows that were joined, and rows of named groups that were not."""
        rows, before = self.rows, _merged(self.rows).tolist()
        apart = [places for places in _sets(self.alike) if len({before[place] for place in places}) > 1]
        remarks = []
        for named in (False, True):
            sets = [places for places in apart if all(rows[place].group for place in places) == named]
            count = sum(map(len, sets))
            if not count or (named and count < REMARKED * len(rows)):
                continue
            first = sets[0][0]
            second = next(place for place in sets[0] if before[place] != before[first])
            example, other = (f"line {rows[place].line}, {_shown(rows[place])}" for place in (second, first))
            remarks.append(
                f"{count} rows of different groups ask the same in other words, such as {example}, as {other}: give "
                "them one group, or folds and guarantee take them as independent"
                if named
                else f"{count} rows ask the same as another one in other words and share its group, such as {example}, "
                f"as {other}"
            )
        if key := self.unread_answers:
            remarks.append(
                f"the rows have {key!r}, which is not read: if that is the answer which 'label' is about, "
                f"--columns answer={key} reads its tokens, too"
            )
        if len(decodings := self.decodings) > 1:
            listed = ", ".join(sorted("none" if one is None else str(one) for one in decodings))
            remarks.append(f"the rows' 'decoding' differs ({listed}), so no decoding of the answers is recorded")
        return remarks


def read_dataset(
    path: Path, labels: Labels, *, folds: int | None, columns: Mapping[str, str] = MappingProxyType({}),
    all_labelled: bool = True,
) -> Dataset:  # fmt: skip
    """Read and check a whole file; ``labels`` says which of ``label`` and ``answers`` each row must have.

    ``columns``: what the file calls fields of ours, by these.  ``all_labelled``: false where a given ``label`` may be
    missing.

    Each class must have ``folds`` groups; 0 requires one row of each class only (a held-out file), None nothing.
    Raises DataError: every problem of the file, by line number."""
    problems: list[str] = []
    rows: list[Row] = []
    own_groups = False
    first: dict[str, int] = {}
    numbered: set[int] = set()
    values, digest = _checked(path, problems, lambda value: _check_row(value, labels, all_labelled), columns)
    for line, value in values:
        problems += [f"line {line}: {problem}" for problem in id_problem(value, line, first, numbered)]
        own_groups |= "group" in value
        messages, answer = split_answer(value.get("messages", ()))
        # Also of a row that has a label: they tell whether a passage states one.
        answers = accepted_of(value.get("answers"))
        texts = isinstance(answers, list) and all(isinstance(one, str) for one in answers)
        rows.append(Row(
            line=line, id=id_of(value, line), prompt=value.get("prompt"), messages=messages or None,
            group=value.get("group", ""), label=label_of(value.get("label")) if labels == "given" else None,
            answers=tuple(answers) if texts else (), prompt_digest=prompt_digest(value),
            strata={key: str(value[key]) for key in STRATA if value.get(key) is not None},
            applies=value.get("applies", True),
            statement=value["statement"] if isinstance(value.get("statement"), str) else "",
            answer=(value.get("answer") or answer) if labels == "given" else "",
            decoding=decoding_of(value.get("decoding")) if labels == "given" else None,
        ))  # fmt: skip
    problems += _across(rows)
    if not problems and not any(row.applies for row in rows):
        problems.append('every row has "applies": false: add rows that ask for a fact, with a label or answers')
    if problems:
        raise DataError(str(path), sorted(problems, key=_line_of))
    unread = _unread_answers(values) if labels == "given" and not any(row.answer for row in rows) else ""
    alike = near_duplicates([row.texts for row in rows])
    dataset = Dataset(path, tuple(rows), digest, own_groups, alike, unread_answers=unread)
    if labels == "given" and folds is not None and (problems := missing_groups(dataset, folds)):
        raise DataError(str(path), [*problems, *dataset.remarks])
    return dataset


def _checked(
    path: Path, problems: list[str], check: Callable[[dict[str, Any]], Iterable[str]], columns: Mapping[str, str]
) -> tuple[list[tuple[int, dict[str, Any]]], str]:
    """Return the objects of a file in which ``check`` finds nothing, by line, and their digest; add ``problems``."""
    digest, found = hashlib.sha256(), list[tuple[int, dict[str, Any]]]()
    for line, value in objects(path, problems, columns):
        of_line = [f"line {line}: {problem}" for problem in check(value)]
        problems += of_line
        if not of_line:
            digest.update(json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n")
            found.append((line, value))
    if not found and not problems:
        problems.append("the file has no rows: one JSON object per line is expected")
    return found, f"sha256:{digest.hexdigest()}"


def _check_row(value: dict[str, Any], labels: Labels, all_labelled: bool) -> Iterator[str]:
    yield from check_id(value)
    yield from check_text(value, "group", required=False)
    fields = [] if {"prompt", "messages"} & value.keys() else ["prompt", "messages"]
    likely = likely_columns(value, *fields, "label" if labels == "given" else "answers")
    renamed = "".join(f",{field}={key}" for field, key in likely.items())[1:]
    renamed = f": --columns {renamed} would read this row" if renamed else ""
    for problem in check_prompt(value):
        own = f"; the row has {', '.join(map(repr, value))}"[:KEYS_SHOWN] if fields and not renamed else ""
        yield problem + (renamed if {"prompt", "messages"} & likely.keys() else own)
    applies = value.get("applies", True)
    if not isinstance(applies, bool):
        yield f"'applies' must be true or false, found {json.dumps(applies)[:60]}"
    elif not applies:
        for key in ("label", "answers"):
            if key in value:
                yield f'has {key!r} and "applies": false: what asks for no fact has no right answer, remove one'
    elif labels == "given":
        if "label" not in value and not all_labelled:
            pass
        elif "label" not in value:
            cure = " (there are 'answers': generate the labels, --labels generate)" if "answers" in value else ""
            cure = cure or (renamed if "label" in likely else "")
            yield f"'label' is missing{cure}"
        elif label_of(value["label"]) is None:
            found = json.dumps(value["label"])[:60]
            yield f'\'label\' must be "factual" or "hallucinated", or the number 1 or 0 for these, found {found}'
        if not isinstance(value.get("answer", ""), str):
            found = json.dumps(value["answer"])[:60]
            yield f"'answer' must be a string, the answer that 'label' is about, found {found}"
        elif value.get("answer") and _answer_in(value) not in ("", value["answer"]):
            yield "'messages' ends with an answer, and 'answer' is another: keep one"
        if value.get("decoding") is not None and decoding_of(value["decoding"]) is None:
            found = json.dumps(value["decoding"])[:60]
            yield f"'decoding', how the answer that 'label' is about was decoded, must be {DECODINGS}, found {found}"
    elif "answers" not in value:
        cure = " (there is a 'label': use the given labels, --labels given)" if "label" in value else ""
        cure = cure or (renamed if "answers" in likely else "")
        yield f"'answers' is missing{cure}"
    elif isinstance(value["answers"], str) and WRITTEN_LIST.fullmatch(value["answers"].strip()):
        # No model's answer holds it, so that each label would be "hallucinated".
        yield '\'answers\' is a text that looks like a list: write it as JSON has it, ["a", "b"], not in quotes'
    elif not isinstance(answers := accepted_of(value["answers"]), list) or not answers:
        yield "'answers' must be a string or a non-empty list of strings"
    elif not all(isinstance(answer, str) and answer.strip() for answer in answers):
        yield "'answers' must hold non-empty strings only"
    else:
        yield from check_text({"answers": " ".join(answers)}, "answers", required=True)


def _answer_in(value: dict[str, Any]) -> str:
    """Return the answer with which the messages end; "" where they are none, or do not."""
    return "" if "messages" not in value or [*check_prompt(value)] else split_answer(value["messages"])[1]


def _unread_answers(values: Sequence[tuple[int, dict[str, Any]]]) -> str:
    """Return a key of the first row that names a model's answer in others' words; "" where there is none."""
    return next((key for key in values[0][1] if key.lower() in ANSWERS), "")


def class_problems(label: NDArray[Any], group: NDArray[Any], folds: int) -> list[str]:
    """Return problems with the classes: one is missing, or has fewer groups than folds.  label [N], group [N]."""
    problems = []
    for value, name in ((1, "factual (label 1)"), (0, "hallucinated (label 0)")):
        count = len(set(group[label == value].tolist()))
        if count == 0:
            problems.append(f"no row is {name}: a probe needs rows of both classes")
        elif count < folds:
            cure = f", or give --folds {count}" if count > 1 else ""
            problems.append(f"only {count} group(s) have {name} rows, fewer than the {folds} folds: add rows{cure}")
    return problems


def missing_groups(dataset: Dataset, folds: int) -> list[str]:
    """Return ``class_problems`` of a file's own labels."""
    asking = dataset.asking
    label = np.array([dataset.rows[place].label for place in asking.tolist()], np.int64)
    return class_problems(label, dataset.groups[asking], folds)


def check_all_apply(dataset: Dataset) -> None:
    """Raise DataError naming rows that do not apply, for a file whose every row is scored against a label."""
    problems = [
        f'line {dataset.rows[place].line}: "applies" is false, and it has no right answer: leave it out'
        for place in dataset.others.tolist()
    ]
    if problems:
        raise DataError(str(dataset.path), problems)


def check_disjoint(train: Dataset, test: Dataset) -> None:
    """Raise DataError if a held-out row shares its prompt or its named group with a training row."""
    prompts = {row.prompt_digest: row.line for row in train.rows}
    groups = {row.group: row.line for row in train.rows} if train.own_groups and test.own_groups else {}
    alike = near_duplicates([row.texts for row in (*train.rows, *test.rows)])
    known: dict[tuple[int, bool], Row] = {}  # by number, and whether the row has a group
    for row, number in zip(train.rows, alike.tolist(), strict=False):
        known.setdefault((number, row.group != ""), row)
    problems = []
    for row, number in zip(test.rows, alike[len(train) :].tolist(), strict=True):
        other = known.get((number, False)) or (None if row.group else known.get((number, True)))
        if row.prompt_digest in prompts:
            problems.append(f"line {row.line}: its prompt is also {train.path} line {prompts[row.prompt_digest]}")
        elif row.group and row.group in groups:
            there = f"{train.path} line {groups[row.group]}"
            problems.append(f"line {row.line}: its group {row.group!r} is also in {there}")
        elif other is not None:
            problems.append(f"line {row.line}: it asks what {train.path} line {other.line} asks, {_shown(other)}, in "
                            "other words: leave it out, or give both a 'group' if they ask different "
                            "things")  # fmt: skip
    if problems:
        raise DataError(str(test.path), problems)


def _merged(rows: Sequence[Row], alike: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return group numbers after joining those that share a prompt, or what ``alike`` joins to a row without group."""
    from scipy.cluster.hierarchy import DisjointSet  # a service imports this module, and joins no rows

    joined = DisjointSet(row.prompt_digest for row in rows)
    for row in rows:
        if row.group:
            joined.add(row.group)
            joined.merge(row.group, row.prompt_digest)
    for places in () if alike is None else _sets(alike):
        if not all(rows[place].group for place in places):
            for place in places[1:]:
                joined.merge(rows[places[0]].prompt_digest, rows[place].prompt_digest)
    codes: dict[object, int] = {}
    return np.array([codes.setdefault(joined[row.prompt_digest], len(codes)) for row in rows], np.int64)


def _sets(alike: NDArray[np.int64]) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for place, number in enumerate(alike.tolist()):
        found.setdefault(number, []).append(place)
    return [places for places in found.values() if len(places) > 1]


def _shown(row: Row) -> str:
    return json.dumps(" ".join(row.texts[-1].split())[-SHOWN:], ensure_ascii=False)


def _across(rows: list[Row]) -> Iterator[str]:
    seen: dict[tuple[bytes, str], Row] = {}
    answered: dict[tuple[bytes, str, str], Row] = {}  # several answers to a prompt may stand beside each other
    for row in rows:
        other = seen.setdefault((row.prompt_digest, row.group), row)
        same = answered.setdefault((row.prompt_digest, row.group, row.answer), row)
        if other.applies != row.applies:
            yield f"line {row.line}: same prompt and group as line {other.line}, but only one of them applies"
        elif same.label != row.label and None not in (same.label, row.label):
            yield f"line {row.line}: same prompt and group as line {same.line}, but another label: remove one"
        elif same.label is None:
            answered[row.prompt_digest, row.group, row.answer] = row


def _line_of(problem: str) -> int:
    number = problem.removeprefix("line ").split(":", 1)[0]
    return int(number) if number.isdigit() else 0


class TrafficRow(NamedTuple):
    """One line of unlabelled traffic."""

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


def read_traffic(path: Path, bundle_digest: str, columns: Mapping[str, str] = MappingProxyType({})) -> TrafficFile:
    """Read and check a whole file; a risk that names its bundle must be of the one with ``bundle_digest``.

    Raises DataError: every problem of the file, by line number."""
    problems: list[str] = []
    rows: list[TrafficRow] = []
    values, digest = _checked(path, problems, lambda value: _check_traffic(value, bundle_digest), columns)
    for line, value in values:
        asked = prompt_digest(value) if "prompt" in value or "messages" in value else None
        own = f"line {line}" if asked is None else f"prompt {asked.hex()}"
        group = f"group {value['group']}" if "group" in value else own
        risk = float(value["risk"]) if "risk" in value else None
        messages = None if "messages" not in value else split_answer(value["messages"])[0]
        rows.append(TrafficRow(line, risk, value.get("prompt"), messages, group, asked))
    if odd := next((row for row in rows if (row.risk is None) != (rows[0].risk is None)), None):
        problems.append(f"line {odd.line}: some lines have a 'risk' and others not: score all of them, or none")
    if problems:
        raise DataError(str(path), problems)
    return TrafficFile(path, tuple(rows), digest)


def _check_traffic(value: dict[str, Any], bundle_digest: str) -> Iterator[str]:
    yield from check_text(value, "group", required=False)
    if "risk" not in value or "prompt" in value or "messages" in value:
        yield from check_prompt(value)
    if "risk" not in value:
        return
    risk, bundle = value["risk"], value.get("bundle")
    if type(risk) not in (int, float) or not 0 <= risk <= 1:
        yield f"'risk' must be a number from 0 to 1, found {json.dumps(risk)[:60]}"
    if isinstance(bundle, dict) and bundle.get("digest") != bundle_digest:
        yield f"its risk is of the bundle {bundle.get('name')}:{bundle.get('version')}: score with {bundle_digest}"
