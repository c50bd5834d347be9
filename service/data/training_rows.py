"""Reads training rows and unlabelled traffic, and reports every problem by line number before a
model is loaded.

A training row has these keys:

``id``                      optional; the default is the line number
``prompt`` or ``messages``  the question
``label``                   "factual" or 1, "hallucinated" or 0
``answer``, ``decoding``    optional: the answer that ``label`` is about, and how it was decoded
                            (``rows.decoding_of``); ``messages`` may end with the answer instead
``answers``                 accepted answers, for labels that are generated and judged; with labels
                            by the model itself, both may be missing
``group``                   optional: folds keep the rows of a group together.  They also keep
                            together rows with the same prompt, and rows without a group that ask
                            the same in other words
``answer_tokens``           optional: tokens that a generated answer to this row may need, where
                            that is more than the run's length of answers
``relation``, ``subject``   optional: what an English fact is about, for wordings of its relation
                            (``forms/relations.toml``)
``applies``                 false for a row that asks for no fact; it has neither ``label`` nor
                            ``answers``

``kind``, ``template`` and ``form`` name strata of the evaluation; any other key is ignored.

A row of traffic has ``risk``, as ``hallutracer score`` writes it, or ``prompt`` or ``messages``
that are to be scored, and optionally ``group``, for rows that depend on each other.  Other keys,
labels above all, are not read."""

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
from service.data.options import TrainingLabels
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
SHOWN = 60  # characters of a prompt that a message shows as an example
ANSWERS = (
    "completion",
    "response",
    "output",
    "generation",
    "generated_answer",
    "model_answer",
    "prediction",
)
WRITTEN_LIST = re.compile(r"\[\s*(['\"].*)?\]", re.DOTALL)  # as JSON, Python and pandas write one
WITHOUT_LABELS = (
    " (questions alone are enough to train on with --labels self: the model's own sampled answers"
    " then say where it contradicts itself)"
)
KEYS_SHOWN = 120  # characters that a message spends on the keys of a row
REMARKED = (
    0.01  # share of rows; from it on, near-duplicates in different named groups cause a remark
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line; exactly one of ``prompt`` and ``messages`` is set."""

    line: int  # 1-based
    id: str
    prompt: str | None
    messages: list[Message] | None
    group: str  # "" if the row has none
    label: int | None  # 1 factual, 0 hallucinated; None if it is to be generated
    answers: tuple[str, ...]
    strata: dict[str, str]  # those of STRATA that the row has
    prompt_digest: bytes
    applies: bool = True  # False: it asks for no fact, so an answer is neither right nor wrong
    statement: str = ""  # a sentence that gives the answer, for the forms that state facts
    answer: str = ""  # the answer that ``label`` is about, exactly as it stands behind the prompt
    decoding: Decoding | None = None  # how that answer was decoded; None if the row does not say
    answer_tokens: int = 0  # that a generated answer may need, if more than the run's length
    relation: str = ""  # of a fact, with its subject
    subject: str = ""

    @property
    def question(self) -> str:
        """Return the question for a judge: the prompt, or the conversation as text."""
        if self.prompt is not None:
            return self.prompt
        return "\n".join(
            f"{message['role']}: {message['content']}" for message in self.messages or ()
        )

    @property
    def texts(self) -> list[str]:
        """Return the prompt, or the text of each message."""
        return (
            [self.prompt]
            if self.prompt is not None
            else [message["content"] for message in self.messages or ()]
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """A checked file.  ``digest`` is sha256 over the canonical rows, so spacing and key order do
    not matter."""

    path: Path
    rows: tuple[Row, ...]
    digest: str
    own_groups: bool  # whether any row names its group
    alike: NDArray[np.int64]  # [N] near-duplicates have the same number
    made_of: Dataset | None = None  # the user's file, if the rows are its questions in forms
    part_of: str | None = None  # digest of the whole file, if these are some of its rows
    unread_answers: str = ""  # an unread key that probably holds the ``answer`` of rows with labels
    left_out_forms: tuple[
        str, ...
    ] = ()  # forms in which the model can be asked none of the questions
    clustered: bool = False  # the rows' kinds are clusters of their words, and not the file's

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

    def part(self, positions: Sequence[int]) -> Dataset:
        """Return the rows at these positions; their digest depends on the whole file and the
        positions."""
        return replace(
            self,
            rows=tuple(self.rows[position] for position in positions),
            digest=(
                f"sha256:{hashlib.sha256(f'{self.digest} {list(positions)}'.encode()).hexdigest()}"
            ),
            alike=self.alike[np.asarray(positions, np.int64)],
            part_of=self.file_digest,
        )

    @cached_property
    def applies(self) -> NDArray[np.bool_]:
        """Return whether each row asks for a fact: [N]."""
        return np.array([row.applies for row in self.rows], np.bool_)

    @property
    def asking(self) -> NDArray[np.int64]:
        """Return the rows that ask for a fact; only they have a label."""
        return np.flatnonzero(self.applies)

    @property
    def others(self) -> NDArray[np.int64]:
        """Return the rows that do not apply."""
        return np.flatnonzero(~self.applies)

    @property
    def decodings(self) -> set[Decoding | None]:
        """Return how the labelled answers were decoded; None stands for rows that do not say it."""
        return {row.decoding for row in self.rows if row.applies}

    @cached_property
    def groups(self) -> NDArray[np.int64]:
        """Return the group number of each row, in order of first appearance: [N].

        Rows of a named group share a number.  Rows with the same prompt do, too: their readouts are
        equal, so a copy on the other side of a fold would leak the label.  So would a
        near-duplicate: if one of several near-duplicates has no group, they share a number, too."""
        return _merged(self.rows, self.alike)

    @property
    def remarks(self) -> list[str]:
        """Return remarks on near-duplicates that share a group, or do not, on unread answers and on
        decodings."""
        rows = self.rows
        group = _merged(rows)
        has_group = np.array([row.group != "" for row in rows], np.bool_)
        apart = [positions for positions in _sets(self.alike) if np.ptp(group[positions]) > 0]
        remarks = []
        for named in (False, True):
            sets = [positions for positions in apart if has_group[positions].all() == named]
            count = sum(map(len, sets))
            if not count or (named and count < REMARKED * len(rows)):
                continue
            first = sets[0][0]
            second = next(position for position in sets[0] if group[position] != group[first])
            example, counterpart = (
                f"line {rows[position].line}, {_shown(rows[position])}"
                for position in (second, first)
            )
            remarks.append(
                f"{count} rows of different groups ask the same in other words, such as {example},"
                f" as {counterpart}: give them one group, or folds and guarantee take them as"
                " independent"
                if named
                else (
                    f"{count} rows ask the same as another one in other words and share its group,"
                    f" such as {example}, as {counterpart}"
                )
            )
        if key := self.unread_answers:
            remarks.append(
                f"the rows have {key!r}, which is not read: if that is the answer which 'label' is"
                f" about, --columns answer={key} reads its tokens, too"
            )
        if len(decodings := self.decodings) > 1:
            listed = ", ".join(
                sorted("none" if decoding is None else str(decoding) for decoding in decodings)
            )
            remarks.append(
                f"the rows' 'decoding' differs ({listed}), so no decoding of the answers is"
                " recorded"
            )
        return remarks


def read_dataset(
    path: Path,
    labels: TrainingLabels,
    *,
    folds: int | None,
    columns: Mapping[str, str] = MappingProxyType({}),
    all_labelled: bool = True,
) -> Dataset:
    """Read and check a whole file; ``labels`` decides which of ``label`` and ``answers`` each row
    must have.

    ``columns`` maps our fields to the file's keys.  If ``all_labelled`` is false, a given ``label``
    may be missing. Each class must have ``folds`` groups; 0 requires only a row of each class (a
    held-out file), None nothing. Raises DataError: every problem of the file, by line number."""
    problems: list[str] = []
    rows: list[Row] = []
    own_groups = False
    first: dict[str, int] = {}
    numbered: set[int] = set()
    values, digest = _checked(
        path, problems, lambda value: _check_row(value, labels, all_labelled), columns
    )
    for line, value in values:
        problems += [
            f"line {line}: {problem}" for problem in id_problem(value, line, first, numbered)
        ]
        own_groups |= "group" in value
        messages, answer = split_answer(value.get("messages", ()))
        # A row with a label keeps its answers, too: they tell whether a passage states the answer.
        answers = accepted_of(value.get("answers"))
        texts = isinstance(answers, list) and all(isinstance(text, str) for text in answers)
        rows.append(
            Row(
                line=line,
                id=id_of(value, line),
                prompt=value.get("prompt"),
                messages=messages or None,
                group=value.get("group", ""),
                label=None if labels == "generate" else label_of(value.get("label")),
                answers=tuple(answers) if texts else (),
                prompt_digest=prompt_digest(value),
                strata={key: str(value[key]) for key in STRATA if value.get(key) is not None},
                applies=value.get("applies", True),
                statement=_text(value.get("statement")),
                answer=(value.get("answer") or answer) if labels == "given" else "",
                decoding=decoding_of(value.get("decoding")) if labels == "given" else None,
                answer_tokens=0 if labels == "given" else value.get("answer_tokens") or 0,
                relation=_text(value.get("relation")),
                subject=_text(value.get("subject")),
            )
        )
    problems += _across(rows)
    if not problems and not any(row.applies for row in rows):
        problems.append(
            'every row has "applies": false: add rows that ask for a fact, with a label or answers'
        )
    if problems:
        raise DataError(str(path), sorted(problems, key=_line_of))
    unread = (
        _unread_answers(values) if labels == "given" and not any(row.answer for row in rows) else ""
    )
    alike = near_duplicates([row.texts for row in rows])
    dataset = Dataset(path, tuple(rows), digest, own_groups, alike, unread_answers=unread)
    if labels == "given" and folds is not None and (problems := missing_groups(dataset, folds)):
        raise DataError(str(path), [*problems, *dataset.remarks])
    return dataset


def _checked(
    path: Path,
    problems: list[str],
    check: Callable[[dict[str, Any]], Iterable[str]],
    columns: Mapping[str, str],
) -> tuple[list[tuple[int, dict[str, Any]]], str]:
    """Return line number and object of the rows without problems, and their digest; add to
    ``problems``."""
    digest = hashlib.sha256()
    values: list[tuple[int, dict[str, Any]]] = []
    for line, value in objects(path, problems, columns):
        line_problems = [f"line {line}: {problem}" for problem in check(value)]
        problems += line_problems
        if not line_problems:
            digest.update(json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n")
            values.append((line, value))
    if not values and not problems:
        problems.append("the file has no rows: one JSON object per line is expected")
    return values, f"sha256:{digest.hexdigest()}"


def _text(value: object) -> str:
    """Return a string as it is, and "" for anything else."""
    return value if isinstance(value, str) else ""


def _check_row(value: dict[str, Any], labels: TrainingLabels, all_labelled: bool) -> Iterator[str]:
    yield from check_id(value)
    yield from check_text(value, "group", required=False)
    fields = [] if {"prompt", "messages"} & value.keys() else ["prompt", "messages"]
    wanted = {"given": ["label"], "generate": ["answers"], "self": []}[labels]
    likely = likely_columns(value, *fields, *wanted)
    renamed = "".join(f",{field}={key}" for field, key in likely.items())[1:]
    renamed = f": --columns {renamed} would read this row" if renamed else ""
    for problem in check_prompt(value):
        keys_text = (
            f"; the row has {', '.join(map(repr, value))}"[:KEYS_SHOWN]
            if fields and not renamed
            else ""
        )
        yield problem + (renamed if {"prompt", "messages"} & likely.keys() else keys_text)
    tokens = value.get("answer_tokens") or 0
    if labels != "given" and not (type(tokens) is int and tokens >= 0):
        yield (
            "'answer_tokens', the tokens that this row's answer may need, must be a whole number,"
            f" found {json.dumps(tokens)[:60]}"
        )
    applies = value.get("applies", True)
    if not isinstance(applies, bool):
        yield f"'applies' must be true or false, found {json.dumps(applies)[:60]}"
    elif not applies:
        for key in ("label", "answers"):
            if key in value:
                yield (
                    f'has {key!r} and "applies": false: what asks for no fact has no right answer,'
                    " remove one"
                )
    elif labels == "given":
        if "label" not in value and not all_labelled:
            pass
        elif "label" not in value:
            cure = (
                " (there are 'answers': generate the labels, --labels generate)"
                if "answers" in value
                else ""
            )
            cure = cure or (renamed if "label" in likely else WITHOUT_LABELS)
            yield f"'label' is missing{cure}"
        else:
            yield from _check_label(value)
        if not isinstance(value.get("answer", ""), str):
            excerpt = json.dumps(value["answer"])[:60]
            yield f"'answer' must be a string, the answer that 'label' is about, found {excerpt}"
        elif value.get("answer") and _answer_in(value) not in ("", value["answer"]):
            yield "'messages' ends with an answer, and 'answer' is another: keep one"
        if value.get("decoding") is not None and decoding_of(value["decoding"]) is None:
            excerpt = json.dumps(value["decoding"])[:60]
            yield (
                "'decoding', how the answer that 'label' is about was decoded, must be"
                f" {DECODINGS}, found {excerpt}"
            )
    elif labels == "self" and "answers" not in value:
        if "label" in value:
            yield from _check_label(value)
    elif "answers" not in value:
        cure = (
            " (there is a 'label': use the given labels, --labels given)"
            if "label" in value
            else ""
        )
        cure = cure or (renamed if "answers" in likely else WITHOUT_LABELS)
        yield f"'answers' is missing{cure}"
    elif isinstance(value["answers"], str) and WRITTEN_LIST.fullmatch(value["answers"].strip()):
        # No model's answer holds it, so that each label would be "hallucinated".
        yield (
            '\'answers\' is a text that looks like a list: write it as JSON has it, ["a", "b"], not'
            " in quotes"
        )
    elif not isinstance(answers := accepted_of(value["answers"]), list) or not answers:
        yield "'answers' must be a string or a non-empty list of strings"
    elif not all(isinstance(answer, str) and answer.strip() for answer in answers):
        yield "'answers' must hold non-empty strings only"
    else:
        yield from check_text({"answers": " ".join(answers)}, "answers", required=True)


def _check_label(value: dict[str, Any]) -> Iterator[str]:
    if label_of(value["label"]) is None:
        excerpt = json.dumps(value["label"])[:60]
        yield (
            '\'label\' must be "factual" or "hallucinated", or the number 1 or 0 for these,'
            f" found {excerpt}"
        )


def _answer_in(value: dict[str, Any]) -> str:
    """Return the answer with which valid messages end; else ""."""
    return (
        ""
        if "messages" not in value or [*check_prompt(value)]
        else split_answer(value["messages"])[1]
    )


def _unread_answers(values: Sequence[tuple[int, dict[str, Any]]]) -> str:
    """Return the key of the first row that probably holds the model's answer; "" if there is
    none."""
    return next((key for key in values[0][1] if key.lower() in ANSWERS), "")


def class_problems(label: NDArray[Any], group: NDArray[Any], folds: int) -> list[str]:
    """Return a problem for each class that is missing or has fewer groups than folds.  label [N],
    group [N]."""
    problems = []
    for value, name in ((1, "factual (label 1)"), (0, "hallucinated (label 0)")):
        count = len(set(group[label == value].tolist()))
        if count == 0:
            problems.append(f"no row is {name}: a probe needs rows of both classes")
        elif count < folds:
            cure = f", or give --folds {count}" if count > 1 else ""
            problems.append(
                f"only {count} group(s) have {name} rows, fewer than the {folds} folds: add"
                f" rows{cure}"
            )
    return problems


def missing_groups(dataset: Dataset, folds: int) -> list[str]:
    """Return ``class_problems`` of the labels in a file."""
    asking = dataset.asking
    label = np.array([dataset.rows[row].label for row in asking.tolist()], np.int64)
    return class_problems(label, dataset.groups[asking], folds)


def check_all_apply(dataset: Dataset) -> None:
    """Raise DataError that names the rows that do not apply, for a file whose rows all need a
    label."""
    problems = [
        f'line {dataset.rows[row].line}: "applies" is false, and it has no right answer: leave'
        " it out"
        for row in dataset.others.tolist()
    ]
    if problems:
        raise DataError(str(dataset.path), problems)


def check_disjoint(train: Dataset, test: Dataset) -> None:
    """Raise DataError if a held-out row shares its prompt or its named group with a training
    row."""
    prompts = {row.prompt_digest: row.line for row in train.rows}
    groups = (
        {row.group: row.line for row in train.rows} if train.own_groups and test.own_groups else {}
    )
    alike = near_duplicates([row.texts for row in (*train.rows, *test.rows)])
    known: dict[
        tuple[int, bool], Row
    ] = {}  # key: the number of near-duplicates, and whether the row has a group
    for row, number in zip(train.rows, alike.tolist(), strict=False):
        known.setdefault((number, row.group != ""), row)
    problems = []
    for row, number in zip(test.rows, alike[len(train) :].tolist(), strict=True):
        similar = known.get((number, False)) or (None if row.group else known.get((number, True)))
        if row.prompt_digest in prompts:
            problems.append(
                f"line {row.line}: its prompt is also {train.path} line"
                f" {prompts[row.prompt_digest]}"
            )
        elif row.group and row.group in groups:
            there = f"{train.path} line {groups[row.group]}"
            problems.append(f"line {row.line}: its group {row.group!r} is also in {there}")
        elif similar is not None:
            problems.append(
                f"line {row.line}: it asks what {train.path} line {similar.line} asks,"
                f" {_shown(similar)}, in other words: leave it out, or give both a 'group' if they"
                " ask different things"
            )
    if problems:
        raise DataError(str(test.path), problems)


def _merged(rows: Sequence[Row], alike: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Return a group number for each row.  Rows of a named group or with the same prompt share it.

    So do near-duplicates by ``alike``, if one of them has no group."""
    from scipy.cluster.hierarchy import (
        DisjointSet,
    )  # a service imports this module, and joins no rows

    joined = DisjointSet(row.prompt_digest for row in rows)
    for row in rows:
        if row.group:
            joined.add(row.group)
            joined.merge(row.group, row.prompt_digest)
    for positions in () if alike is None else _sets(alike):
        if not all(rows[position].group for position in positions):
            for position in positions[1:]:
                joined.merge(rows[positions[0]].prompt_digest, rows[position].prompt_digest)
    codes: dict[object, int] = {}
    return np.array(
        [codes.setdefault(joined[row.prompt_digest], len(codes)) for row in rows], np.int64
    )


def _sets(alike: NDArray[np.int64]) -> list[list[int]]:
    by_number: dict[int, list[int]] = {}
    for position, number in enumerate(alike.tolist()):
        by_number.setdefault(number, []).append(position)
    return [positions for positions in by_number.values() if len(positions) > 1]


def _shown(row: Row) -> str:
    return json.dumps(" ".join(row.texts[-1].split())[-SHOWN:], ensure_ascii=False)


def _across(rows: list[Row]) -> Iterator[str]:
    seen: dict[tuple[bytes, str], Row] = {}
    answered: dict[
        tuple[bytes, str, str], Row
    ] = {}  # a prompt may have several rows with different answers
    for row in rows:
        earlier = seen.setdefault((row.prompt_digest, row.group), row)
        same = answered.setdefault((row.prompt_digest, row.group, row.answer), row)
        if earlier.applies != row.applies:
            yield (
                f"line {row.line}: same prompt and group as line {earlier.line}, but only one of"
                " them applies"
            )
        elif same.label != row.label and None not in (same.label, row.label):
            yield (
                f"line {row.line}: same prompt and group as line {same.line}, but another label:"
                " remove one"
            )
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
    group: str  # the row's group, or a name that rows with the same prompt share
    prompt_digest: bytes | None  # None if the line has a risk and no prompt


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


def read_traffic(
    path: Path, bundle_digest: str, columns: Mapping[str, str] = MappingProxyType({})
) -> TrafficFile:
    """Read and check a whole file; a risk that names its bundle must be of the bundle with
    ``bundle_digest``.

    Raises DataError: every problem of the file, by line number."""
    problems: list[str] = []
    rows: list[TrafficRow] = []
    values, digest = _checked(
        path, problems, lambda value: _check_traffic(value, bundle_digest), columns
    )
    for line, value in values:
        row_digest = prompt_digest(value) if "prompt" in value or "messages" in value else None
        own_group = f"line {line}" if row_digest is None else f"prompt {row_digest.hex()}"
        group = f"group {value['group']}" if "group" in value else own_group
        risk = float(value["risk"]) if "risk" in value else None
        messages = None if "messages" not in value else split_answer(value["messages"])[0]
        rows.append(TrafficRow(line, risk, value.get("prompt"), messages, group, row_digest))
    if odd := next((row for row in rows if (row.risk is None) != (rows[0].risk is None)), None):
        problems.append(
            f"line {odd.line}: some lines have a 'risk' and others not: score all of them, or none"
        )
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
        yield (
            f"its risk is of the bundle {bundle.get('name')}:{bundle.get('version')}: score with"
            f" {bundle_digest}"
        )
