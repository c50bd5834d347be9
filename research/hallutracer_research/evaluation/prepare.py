"""From a data set to labelled rows and what the methods read of them: read, render, extract in one
pass, label. What the trainer does for one data file, with both sites, and for the paper suite also
the other poolings, in the same forward passes; resumable like a training run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hallutracer_research.data.registry import SETS, read_set
from hallutracer_research.documents import Row, json_lines
from hallutracer_research.evaluation.methods.base import MethodInputs
from hallutracer_research.evaluation.options import (
    OF_OWN_ANSWERS,
    EvaluateOptions,
    EvaluationSource,
)
from probes_store.local import atomic_write
from service.data.collection import Collection, collect
from service.data.labels import check_answers, given_labels, judged_labels
from service.data.options import JudgeName, JudgeOptions, Labels
from service.data.rows import id_of, objects
from service.data.training_rows import Dataset, class_problems, read_dataset
from service.engines.base import Engine
from service.errors import TrainingError
from service.fitting.probes import Index, Readouts
from service.prompts import PromptFormat, render
from service.readout import Pooling, Site


class TooFewOfAClass(TrainingError):
    """A set's labels, which are known only once the model has answered, leave a fold without one of
    the classes."""


@dataclass(frozen=True, eq=False)
class SetRows:
    """A set's rows before a model has seen them."""

    name: str
    title: str
    dataset: Dataset
    labels: Labels
    judge: JudgeOptions
    max_new_tokens: int
    kind: tuple[str, ...]  # [N] sub-dataset of each row, "" where it names none
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PreparedSet:
    """A set's labelled rows and readouts; n rows are labelled."""

    rows: SetRows
    inputs: MethodInputs
    pooled: dict[tuple[Site, Pooling], Readouts]
    prompts: Collection
    index: Index  # [n] data rows
    left_out: dict[str, int]

    def subset(self, rows: Index) -> PreparedSet:
        """Return only these of the n rows."""
        pooled = {key: readouts.subset(rows) for key, readouts in self.pooled.items()}
        return replace(self, inputs=self.inputs.subset(rows), pooled=pooled, index=self.index[rows])


def read_rows(source: EvaluationSource, options: EvaluateOptions) -> SetRows:
    """Read and check a set's rows, and keep them in the run's folder as JSONL.  Raises DataError,
    TrainingError."""
    info = SETS[source.known] if source.known else None
    notes: list[str] = []
    if source.path is None:
        assert source.rows is not None, "a source without a path makes its rows"
        rows, title = source.rows(), source.title
    elif info is not None:
        rows, counts = read_set(info.name, source.path)
        title = info.title
        counted = ", ".join(f"{key} {value}" for key, value in counts.items())
        notes += [info.caveat, f"rows: {counted}"]
    else:
        rows = [row for _, row in _with_ids(source.path)]
        title = source.path.name
    labels: Labels = "given" if any("label" in row for row in rows) else "generate"
    labels = options.labels or (info.labels if info else labels)
    folds = options.folds if labels == "given" else 0
    path = options.out / "sets" / source.name / "rows.jsonl"
    own = source.path if info is None else None
    if own is not None:
        dataset = read_dataset(own, labels, folds=folds)  # reports problems by the user's own lines
        if others := len(dataset.others):
            rows = [row for row in rows if row.get("applies", True)]
            notes.append(f"{others} rows that ask for no fact left out")
    if source.limit is not None:
        rows = _sample_groups(rows, source.limit)
        notes.append(f"only {len(rows)} rows (--limit)")
    if own is None or len(rows) < len(dataset):
        _write_rows(path, rows)
        dataset = read_dataset(path, labels, folds=folds)
    if own is not None:
        notes += dataset.remarks
    judge: JudgeName = options.judge or (info.judge if info else None) or "contains"
    set_rows = SetRows(
        name=source.name,
        title=title,
        dataset=dataset,
        labels=labels,
        judge=JudgeOptions(judge, abstain_pattern=info.abstain_pattern if info else None),
        max_new_tokens=options.max_new_tokens or (info.max_new_tokens if info else None) or 48,
        kind=_kinds(dataset),
        notes=tuple(notes),
    )
    if labels == "generate":
        check_answers(dataset, set_rows.judge)
    return set_rows


def within_context(
    engine: Engine, rows: SetRows, folder: Path, folds: int, prompt_format: PromptFormat
) -> SetRows:
    """Return the set without the prompts that, with their answers, exceed the model's context; a
    note counts them."""
    reserve = rows.max_new_tokens if rows.labels == "generate" else 0
    long = {
        row.line
        for row in rows.dataset.rows
        if len(render(engine, row.prompt, row.messages, prompt_format)) + reserve
        > engine.identity.max_tokens
    }
    if not long:
        return rows
    path = folder / "rows-that-fit.jsonl"
    _write_rows(path, [row for line, row in _with_ids(rows.dataset.path) if line not in long])
    dataset = read_dataset(path, rows.labels, folds=folds if rows.labels == "given" else 0)
    note = (
        f"{len(long)} rows longer than the model's context of {engine.identity.max_tokens} tokens"
        " left out"
    )
    return replace(rows, dataset=dataset, kind=_kinds(dataset), notes=(*rows.notes, note))


def prepare_set(
    engine: Engine,
    rows: SetRows,
    options: EvaluateOptions,
    prompt_format: PromptFormat,
    poolings: Sequence[Pooling],
) -> PreparedSet:
    """Extract and label.  Raises what ``collect`` raises, and TooFewOfAClass."""
    folder = options.out / "sets" / rows.name / "readouts"
    given = rows.labels == "given"
    collection = collect(
        engine,
        rows.dataset,
        folder,
        sites=tuple(Site),
        prompt_format=prompt_format,
        batch_rows=options.batch_rows,
        max_new_tokens=None if given else rows.max_new_tokens,
        poolings=poolings,
    )
    labelled = (
        given_labels(rows.dataset) if given else judged_labels(rows.dataset, folder, rows.judge)
    )
    index, label = labelled.index, labelled.label
    group = rows.dataset.groups[index]
    if problems := class_problems(label, group, options.folds):
        raise TooFewOfAClass(f"{rows.name}: {'; '.join(problems)}", param="data")
    inputs = MethodInputs(
        label=label,
        group=group,
        heads=Readouts(collection.rows[Site.ATTENTION_HEAD], index, label),
        residual=Readouts(collection.rows[Site.RESIDUAL_STREAM], index, label),
        first_token=collection.first_token[index],
        prompt_tokens=collection.prompts.lengths[index],
        text=tuple(rows.dataset.rows[row].question for row in index.tolist()),
        kind=np.array([rows.kind[row] for row in index.tolist()], dtype=np.str_),
    )
    pooled = {key: Readouts(file, index, label) for key, file in collection.pooled.items()}
    return PreparedSet(rows, inputs, pooled, collection, index, labelled.left_out)


def _with_ids(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield a file's rows by line number, each with its id."""
    for line, row in objects(path, []):
        yield line, row | {"id": id_of(row, line)}


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json_lines(rows).encode("utf-8", "backslashreplace"))


def _kinds(dataset: Dataset) -> tuple[str, ...]:
    return tuple(str(row.strata.get("kind", "")) for row in dataset.rows)


def _sample_groups(rows: list[Row], limit: int) -> list[Row]:
    """Return about ``limit`` rows in whole groups, evenly spaced over the file so that every
    sub-dataset is sampled."""
    names = [str(row.get("group", row.get("id", place))) for place, row in enumerate(rows)]
    order = list(dict.fromkeys(names))
    count = min(len(order), max(1, round(limit * len(order) / len(rows))))
    chosen = {order[number * len(order) // count] for number in range(count)}
    return [row for row, name in zip(rows, names, strict=True) if name in chosen]


def methods_of(rows: SetRows, options: EvaluateOptions) -> tuple[str, ...]:
    """Return the methods for one set: where its labels are its own, they say nothing of the model's
    answers."""
    left_out = OF_OWN_ANSWERS if rows.labels == "given" else ()
    return tuple(name for name in options.methods if name not in left_out)


def left_out(rows: SetRows, options: EvaluateOptions) -> str:
    """Return a note on the methods that ``methods_of`` leaves out, "" where there are none."""
    names = [name for name in options.methods if name not in methods_of(rows, options)]
    why = "the labels are the set's own, not of the model's answers"
    return f"left out: {', '.join(names)}: {why}" if names else ""
