"""Collects activations, first-token signals and answers of every prompt into a run folder that can
resume."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from probes_store.local import atomic_write
from service.data.labels import SAMPLES_FILE, answer_texts
from service.data.options import SAMPLE_TEMPERATURE, SAMPLES
from service.data.rows import rendered
from service.data.run_folder import AppendLog, RowsFile, claim, json_lines, write_at
from service.data.training_rows import Dataset, Row
from service.engines.base import Completion, Engine, LoadedModel, Sampling
from service.engines.checks import beyond_onset
from service.errors import (
    DataError,
    EngineError,
    NonFiniteReadout,
    RequestError,
    RunMismatch,
    TrainingError,
)
from service.progress import size_text
from service.prompts import PromptFormat, continuation, render
from service.readout import Pooling, Site

COPIED_TOGETHER = 256  # rows of an earlier collection
SAMPLED_TOGETHER = 32  # prompts in one call; what an interruption loses


@dataclass(frozen=True, eq=False)
class Prompts:
    """Rendered prompts: row i is ``ids[offsets[i] : offsets[i + 1]]``."""

    ids: NDArray[np.int32]  # [total]
    offsets: NDArray[np.int64]  # [N + 1]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each prompt, [N]."""
        return np.diff(self.offsets)

    def of(self, row: int) -> list[int]:
        """Return the token ids of one row."""
        ids: list[int] = self.ids[self.offsets[row] : self.offsets[row + 1]].tolist()
        return ids


@dataclass(frozen=True, eq=False)
class Collection:
    """The collected files of one data file; row i is data row i."""

    folder: Path
    prompts: Prompts
    rows: dict[Site, RowsFile]
    first_token: NDArray[np.float64]  # [N, 2] log maximum probability, entropy (nats)
    pooled: dict[tuple[Site, Pooling], RowsFile] = field(
        default_factory=dict
    )  # never last_1, which is ``rows``
    answers: RowsFile | None = None  # means over an answer's own tokens; zeros if none was read


@dataclass(frozen=True, eq=False)
class Earlier:
    """Rows of a data file that another collection has read."""

    collection: Collection
    dataset: Dataset
    positions: NDArray[np.int64]  # in the data file, of the other collection's rows in their order


def collect(
    engine: Engine,
    dataset: Dataset,
    folder: Path,
    *,
    sites: Sequence[Site],
    prompt_format: PromptFormat,
    batch_rows: int,
    max_new_tokens: int | None = None,
    poolings: Sequence[Pooling] = (),
    answer_site: Site | None = None,
    earlier: Earlier | None = None,
    enough: Callable[[NDArray[np.int64], NDArray[np.int64]], bool] = lambda rows, lengths: False,
) -> Collection:
    """Extract every prompt's activations at ``sites`` and, with ``max_new_tokens``, its greedy
    answer from one prefill.

    A row that does not apply has no answer; ``max_new_tokens`` holds for rows that do not name
    more ``answer_tokens`` themselves.  ``poolings`` adds activations pooled over other
    positions (App. pooling) from the same forward passes.  ``answer_site`` adds the means over the
    answers' own tokens at that site.  Rows that were read ``earlier``, with the same options, are
    copied and not read again.  ``enough`` is called after each batch, with its rows and the
    lengths of their prompts; where it returns true, the rest is left to a later call.

    Raises DataError (prompts that the model cannot take, by line number), RunMismatch (the folder
    belongs to another run), TrainingError (the disk is too small), NonFiniteReadout, and
    EngineError (the engine cannot pool or reads no answers)."""
    other_poolings = beyond_onset(poolings)
    if other_poolings:
        engine.extract([], (), other_poolings)  # raises before the folder is made
    prompts = render_all(engine, dataset, prompt_format, max_new_tokens or 0)
    geometry, identity = engine.identity.geometry, asdict(engine.identity)
    if identity["adapter"] is None:
        del identity["adapter"]  # run folders of older releases have no such key
    if identity["template_arguments"] is None:
        del identity["template_arguments"]  # likewise
    del identity[
        "model"
    ]  # a model's folder may have two names; the fingerprint identifies the model
    run = {
        "data": dataset.digest,
        "model": identity,
        "sites": sorted(sites),
        "prompt_format": prompt_format,
        "batch_rows": batch_rows,
        "max_new_tokens": max_new_tokens,
    }
    extra_fields: dict[str, Any] = {"poolings": sorted(other_poolings)} if other_poolings else {}
    extra_fields |= {"earlier": earlier.dataset.digest} if earlier is not None else {}
    claim(folder, run | extra_fields | ({"answer_site": answer_site} if answer_site else {}))
    atomic_write(folder / "input_ids.i32", prompts.ids.astype("<i4").tobytes())
    atomic_write(folder / "offsets.i64", prompts.offsets.astype("<i8").tobytes())
    files = {
        site: RowsFile(folder / f"rows-{site}.f32", geometry, site, len(dataset)) for site in sites
    }
    pooled = {
        (site, pooling): RowsFile(
            folder / f"rows-{site}-{pooling}.f32", geometry, site, len(dataset)
        )
        for site in sites
        for pooling in other_poolings
    }
    # First the rows that apply, then the others, which get no answer. No batch has both kinds,
    # because one call of the engine answers all of its prompts or none.
    copied = np.zeros(len(dataset), np.bool_)
    if earlier is not None:
        copied[earlier.positions] = True
    # Likewise no batch has answers of two lengths.
    limits = np.zeros(len(dataset), np.int64)
    if max_new_tokens is not None:
        limits = answer_limits(dataset, max_new_tokens)
    asking = dataset.asking[~copied[dataset.asking]]
    others = dataset.others[~copied[dataset.others]]
    plan = _planned((*_by_limit(asking, limits), others), prompts.lengths, batch_rows)
    first_token = folder / "first_token.f64"
    answer_file = (
        None
        if answer_site is None
        else RowsFile(
            folder / f"rows-{answer_site}-answer.f32", geometry, answer_site, len(dataset)
        )
    )
    row_files = (*files.values(), *pooled.values(), *filter(None, [answer_file]))
    with ExitStack() as stack:
        sizes = {file.path: file.nbytes for file in row_files} | {first_token: len(dataset) * 16}
        journal, done = _resumed(stack, folder, sizes, len(plan))
        if max_new_tokens is not None:
            answers = stack.enter_context(closing(AppendLog(folder / "answers.jsonl")))
            finished = sum(int(dataset.applies[batch].sum()) for batch in plan[:done])
            if done:
                finished += int(dataset.applies[copied].sum())
            if answers.count < finished:
                raise RunMismatch(
                    f"{answers.path} lacks answers of batches that are done: delete {folder}"
                )
            answers.keep(finished)
        targets = {path: os.open(path, os.O_WRONLY) for path in sizes}
        for descriptor in targets.values():
            stack.callback(os.close, descriptor)
        if earlier is not None and not done:
            pairs = [(earlier.collection.rows[site], file) for site, file in files.items()]
            if answer_file is not None and earlier.collection.answers is not None:
                pairs.append((earlier.collection.answers, answer_file))
            _copy_rows(earlier, pairs, targets, first_token)
            if max_new_tokens is not None:
                answers.append(_renumbered(earlier))
        bar = stack.enter_context(
            _bar("readouts" + (" and answers" if limits.any() else ""), prompts.lengths, plan, done)
        )
        for number, batch in list(enumerate(plan))[done:]:
            limit = int(limits[batch[0]])
            answered = Sampling(max_tokens=limit, temperature=0.0) if limit else None
            answer_options: dict[str, Any] = (
                {} if answer_file is None or answered is None else {"answer_site": answer_file.site}
            )
            extraction = engine.extract(
                [prompts.of(int(row)) for row in batch],
                list(files),
                (Pooling.LAST_1, *other_poolings),
                answered,
                **answer_options,
            )
            outputs = [
                (file, extraction.activations[site], str(site)) for site, file in files.items()
            ]
            outputs += [
                (file, extraction.pooled[key], ", ".join(key)) for key, file in pooled.items()
            ]
            if answer_file is not None and extraction.answers is not None:
                outputs.append(
                    (answer_file, extraction.answers, f"{answer_file.site} of the answers")
                )
            for file, activations, where in outputs:
                if not np.all(np.isfinite(activations)):
                    raise NonFiniteReadout(
                        f"batch {number} of {len(plan)} gave a NaN or an infinity at {where}: try "
                        "another dtype (float16 overflows)"
                    )
                file.write(targets[file.path], batch, activations)
            signals = np.array(
                [[t.log_max_prob, t.entropy] for t in extraction.first_tokens], "<f8"
            )
            if not np.all(np.isfinite(signals)):
                raise NonFiniteReadout(
                    f"batch {number} of {len(plan)} gave a first token without a probability"
                )
            for position, row in enumerate(batch):
                write_at(targets[first_token], signals[position].tobytes(), int(row) * 16)
            for descriptor in targets.values():
                os.fsync(descriptor)
            if answered is not None:
                records = _records(
                    engine,
                    dataset,
                    prompts,
                    batch,
                    extraction.completions,
                    tokens=answer_file is not None,
                )
                answers.append(records)
            journal.append(
                [{"batch": number, "rows": len(batch)}]
            )  # now all of the batch is on disk
            bar.update(int(prompts.lengths[batch].sum()))
            if enough(batch, prompts.lengths[batch]):
                break
    return Collection(
        folder, prompts, files, np.fromfile(first_token, "<f8").reshape(-1, 2), pooled, answer_file
    )


def sample_answers(
    engine: LoadedModel, dataset: Dataset, prompts: Prompts, folder: Path, max_new_tokens: int
) -> None:
    """Sample ``SAMPLES`` answers of each row that applies into ``SAMPLES_FILE`` of a collection's
    folder; an interrupted run resumes.

    A sample depends on the row's id, its number and the prompt alone.  Raises TrainingError where
    the engine cannot sample, and RunMismatch for a file of another run."""
    check_samples(engine)
    limits = answer_limits(dataset, max_new_tokens)
    plan = _planned(_by_limit(dataset.asking, limits), prompts.lengths, SAMPLED_TOGETHER)
    with closing(AppendLog(folder / SAMPLES_FILE)) as log:
        ends = np.cumsum([len(batch) for batch in plan])
        done = int(np.searchsorted(ends, log.count, side="right"))
        rows = np.concatenate(plan[:done]) if done else dataset.asking[:0]
        log.keep(len(rows))  # a call that was cut is made again as a whole
        if [record["row"] for record in log.read()] != rows.tolist():
            raise RunMismatch(f"{log.path} does not hold the samples of this run: delete it")
        with _bar("sampled answers", prompts.lengths, plan, done) as bar:
            for batch in plan[done:]:
                numbers = batch.tolist()
                limit = int(limits[batch[0]])
                sampling = Sampling(max_tokens=limit, temperature=SAMPLE_TEMPERATURE)
                sampled = engine.sample(
                    [prompts.of(row) for row in numbers],
                    sampling,
                    [_seeds(dataset.rows[row].id) for row in numbers],
                )
                records = []
                for row, answers in zip(numbers, sampled, strict=True):
                    texts = [
                        answer_texts(answer.completion, prompts.of(row), engine)[1]
                        for answer in answers
                    ]
                    records.append({"id": dataset.rows[row].id, "row": row, "answers": texts})
                log.append(records)
                bar.update(int(prompts.lengths[batch].sum()))


def answer_limits(dataset: Dataset, usual: int) -> NDArray[np.int64]:
    """Return the most tokens of each row's answer, [N]: ``usual``, or what the row names, if that
    is more; 0 for a row that does not apply."""
    named = np.array([row.answer_tokens for row in dataset.rows], np.int64)
    return np.where(dataset.applies, np.maximum(named, usual), 0)


def _by_limit(rows: NDArray[np.int64], limits: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the rows of each limit of an answer, the shortest first."""
    return [rows[limits[rows] == limit] for limit in np.unique(limits[rows])]


def check_samples(engine: LoadedModel) -> None:
    """Raise TrainingError if the engine cannot sample several answers of a prompt."""
    try:
        engine.sample([], Sampling(), [])
    except EngineError as error:
        raise TrainingError(
            "--labels self samples several answers to each question, which the transformers engine"
            " can: leave --engine out",
            param="labels",
        ) from error


def _seeds(name: str) -> list[int]:
    """Return a row's seeds, one for each sample."""
    texts = [f"{number} {name}".encode() for number in range(SAMPLES)]
    return [int.from_bytes(hashlib.sha256(text).digest()[:6], "big") for text in texts]


def _copy_rows(
    earlier: Earlier,
    pairs: Sequence[tuple[RowsFile, RowsFile]],
    targets: Mapping[Path, int],
    first_token: Path,
) -> None:
    """Write the rows of an earlier collection into the open files of this one; ``pairs`` are its
    files and this one's."""
    for start in range(0, len(earlier.positions), COPIED_TOGETHER):
        rows = slice(start, start + COPIED_TOGETHER)
        for source, file in pairs:
            layers = [source.layer(layer)[rows] for layer in range(source.shape[0])]
            file.write(targets[file.path], earlier.positions[rows], np.stack(layers, axis=1))
    signals = earlier.collection.first_token.astype("<f8")
    for row, position in enumerate(earlier.positions.tolist()):
        write_at(targets[first_token], signals[row].tobytes(), position * 16)
    for descriptor in targets.values():
        os.fsync(descriptor)


def _renumbered(earlier: Earlier) -> list[dict[str, Any]]:
    """Return the answers of an earlier collection with this data file's rows."""
    path, positions = earlier.collection.folder / "answers.jsonl", earlier.positions.tolist()
    return [record | {"row": positions[record["row"]]} for record in json_lines(path)]


def read_given(
    engine: Engine, dataset: Dataset, prompts: Prompts, folder: Path, site: Site, batch_rows: int
) -> RowsFile:
    """Read the answers that the rows bring, behind their prompts: the mean over an answer's tokens
    at ``site``.

    A row without an answer gets zeros.  An interrupted run resumes.  Raises DataError (the model
    cannot take a prompt with its answer), and what ``collect`` raises."""
    geometry, limit = engine.identity.geometry, engine.identity.max_tokens
    answers = [continuation(engine, row.answer) if row.applies else [] for row in dataset.rows]
    rows = np.flatnonzero([bool(tokens) for tokens in answers])
    lengths = prompts.lengths + np.array([*map(len, answers)])
    if problems := [
        f"line {dataset.rows[row].line}: {lengths[row]} tokens with its 'answer' are more than the"
        f" model's {limit}"
        for row in rows
        if lengths[row] > limit
    ]:
        raise DataError(str(dataset.path), problems)
    claim(
        folder,
        {
            "data": dataset.digest,
            "model": engine.identity.fingerprint,
            "site": site,
            "batch_rows": batch_rows,
            "prompts": hashlib.sha256(prompts.ids.tobytes()).hexdigest(),
        },
    )
    file = RowsFile(folder / f"rows-{site}.f32", geometry, site, len(dataset))
    plan = _planned([rows], lengths, batch_rows)
    with ExitStack() as stack:
        journal, done = _resumed(stack, folder, {file.path: file.nbytes}, len(plan))
        target = os.open(file.path, os.O_WRONLY)
        stack.callback(os.close, target)
        bar = stack.enter_context(_bar("answers", lengths, plan, done))
        for number, batch in list(enumerate(plan))[done:]:
            token_ids = [[*prompts.of(row), *answers[row]] for row in batch.tolist()]
            extraction = engine.extract(
                token_ids, [site], last=[len(answers[row]) for row in batch.tolist()]
            )
            file.write(target, batch, extraction.activations[site])
            os.fsync(target)
            journal.append([{"batch": number, "rows": len(batch)}])
            bar.update(int(lengths[batch].sum()))
    return file


def _planned(
    parts: Sequence[NDArray[np.int64]], lengths: NDArray[np.integer], batch_rows: int
) -> list[NDArray[np.int64]]:
    """Return the rows of each batch, part by part; ``lengths`` are those of all rows."""
    return [rows[batch] for rows in parts for batch in batches(lengths[rows], batch_rows)]


def batches(lengths: NDArray[np.integer], batch_rows: int) -> list[NDArray[np.int64]]:
    """Return the data rows of each batch of ``batch_rows``: longest prompts first, else in the
    data's order."""
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    return [order[start : start + batch_rows] for start in range(0, len(order), batch_rows)]


def render_all(
    engine: Engine, dataset: Dataset, prompt_format: PromptFormat, reserve: int
) -> Prompts:
    """Return the token ids of all prompts.  A row that applies must leave room for ``reserve``
    tokens of an answer, or for those that it names.

    Raises DataError that names every row that the model cannot take."""

    def ids_of(row: Row) -> NDArray[np.int32]:
        ids = render(engine, row.prompt, row.messages, prompt_format)
        if not ids:
            raise RequestError("the tokenizer makes no token of it")
        return np.asarray(ids, np.int32)

    parts = rendered(
        str(dataset.path),
        ((row.line, row) for row in dataset.rows),
        ids_of,
        engine.identity.max_tokens,
        lambda row: max(reserve, row.answer_tokens) if row.applies else 0,
    )
    lengths = np.array([len(part) for part in parts], np.int64)
    return Prompts(np.concatenate(parts), np.concatenate([[0], np.cumsum(lengths)]))


def _resumed(
    stack: ExitStack, folder: Path, sizes: dict[Path, int], batches: int
) -> tuple[AppendLog, int]:
    """Give the data files their full length.  Return the journal, and how many of the ``batches``
    are done.

    Raises RunMismatch (the journal is not that of one run), and what ``_reserve`` raises."""
    journal = stack.enter_context(closing(AppendLog(folder / "journal.jsonl")))
    done = journal.count
    _reserve(folder, sizes, started=done > 0)
    if [record["batch"] for record in journal.read()] != list(range(min(done, batches))):
        raise RunMismatch(
            f"{journal.path} is not the journal of one run: delete {folder} and start again"
        )
    return journal, done


def _reserve(folder: Path, sizes: dict[Path, int], *, started: bool) -> None:
    """Give each data file its full length, after checking the free space."""
    for path, size in sizes.items():
        if started and (not path.exists() or path.stat().st_size != size):
            raise RunMismatch(
                f"{path} is missing or has not {size} bytes, though batches are done: delete"
                f" {folder}"
            )
    # Count blocks, not lengths: the files are sparse until their batches are written.
    held = sum(path.stat().st_blocks * 512 for path in sizes if path.exists())
    need, free = sum(sizes.values()) - held, shutil.disk_usage(folder).free
    if need > free:
        raise TrainingError(
            f"{folder} needs {size_text(need)} more and the disk has {size_text(free)} free: name a"
            " run folder on another disk with --run-dir, or collect less",
            param="run_dir",
        )
    for path, size in sizes.items():
        with path.open("ab") as file:
            file.truncate(size)


def _records(
    engine: Engine,
    dataset: Dataset,
    prompts: Prompts,
    batch: NDArray[np.int64],
    completions: Sequence[Completion],
    *,
    tokens: bool,
) -> list[dict[str, Any]]:
    """Return a line for each answer: its text without a thought.  After a thought also the whole,
    and if it ended."""
    records: list[dict[str, Any]] = []
    for row, completion in zip(batch.tolist(), completions, strict=True):
        record: dict[str, Any] = {"id": dataset.rows[row].id, "row": row, "answer": completion.text}
        record["finish"] = completion.finish_reason
        with_thought, spoken_text = answer_texts(completion, prompts.of(row), engine)
        if spoken_text != completion.text:
            record |= {
                "answer": spoken_text or "",
                "with_thought": with_thought,
                "thought_ends": spoken_text is not None,
            }
        records.append(record | ({"tokens": list(completion.token_ids)} if tokens else {}))
    return records


def _bar(
    name: str, lengths: NDArray[np.int64], plan: Sequence[NDArray[np.int64]], done: int
) -> tqdm[Any]:
    """Return a progress bar over prompt tokens, which estimate the time left better than rows
    do."""
    sizes = [int(lengths[batch].sum()) for batch in plan]
    return tqdm(
        desc=name,
        total=sum(sizes),
        initial=sum(sizes[:done]),
        unit="tok",
        unit_scale=True,
        mininterval=0.2 if sys.stderr.isatty() else 30.0,
    )
