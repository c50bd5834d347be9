"""From a data set to labelled rows and what the methods read of them: read, render, extract in one pass, label, answer.
What the trainer does for one data file, with both sites, and for the paper suite also the other poolings, in the same
forward passes; resumable like a training run.  The model's own answers (the greedy one, what the model thinks of it,
and samples) are kept in files of a few rows, ``sets/NAME/answers/WHAT/00000.npz``.  The plan and the samples' seeds
depend on the data alone, and an unfinished file is computed again as a whole: a killed run goes on to the same
files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hallutracer_research.data.registry import SETS, SetInfo, read_set
from hallutracer_research.evaluation.methods.base import AnswerReadings, MethodInputs
from hallutracer_research.evaluation.methods.own_answers import asked, candidates, clusters, eigen_score, log_odds
from hallutracer_research.evaluation.methods.own_answers import semantic_entropy as entropy_of
from hallutracer_research.evaluation.options import OF_OWN_ANSWERS, SAMPLED, EvaluateOptions, EvaluationSource
from hallutracer_research.evaluation.splits import kept
from probes_store.local import atomic_write
from service.data.collection import Collection, batches, collect
from service.data.labels import check_answers, given_labels, judged_labels
from service.data.options import JudgeName, JudgeOptions, Labels
from service.data.rows import id_of, objects
from service.data.run_folder import claim
from service.data.training_rows import Dataset, check_all_apply, class_problems, read_dataset
from service.engines.base import Engine, Sampling
from service.errors import EngineError, TrainingError
from service.fitting.probes import Readouts
from service.prompts import PromptFormat, render
from service.readout import Pooling, Site

AT_ONCE = 320  # answers in one file; a kill loses at most these
SAMPLING = Sampling(temperature=1.0, top_p=0.9)  # Farquhar et al.'s, without their top-k of 50
SEED = 0


class TooFewOfAClass(TrainingError):
    """A set's labels, which are known only once the model has answered, leave a fold without one of the classes."""


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
    index: NDArray[np.int64]  # [n] data rows
    left_out: dict[str, int]

    def subset(self, rows: NDArray[np.int64]) -> PreparedSet:
        """Return only these of the n rows."""
        pooled = {key: readouts.subset(rows) for key, readouts in self.pooled.items()}
        return replace(self, inputs=self.inputs.subset(rows), pooled=pooled, index=self.index[rows])


def read_rows(source: EvaluationSource, options: EvaluateOptions) -> SetRows:
    """Read and check a set's rows, and keep them in the run's folder as JSONL.  Raises DataError, TrainingError."""
    info: SetInfo | None = SETS[source.known] if source.known else None
    notes: list[str] = []
    if source.path is None:
        assert source.rows is not None, "a source without a path makes its rows"
        rows, title = source.rows(), source.title
    elif info is not None:
        rows, counts = read_set(info.name, source.path)
        title = info.title
        notes += [info.caveat, "rows: " + ", ".join(f"{key} {value}" for key, value in counts.items())]
    else:
        rows, title = [value | {"id": id_of(value, line)} for line, value in objects(source.path, [])], source.path.name
    labels: Labels = info.labels if info else ("given" if any("label" in row for row in rows) else "generate")
    folds = options.folds if labels == "given" else 0
    path = options.out / "sets" / source.name / "rows.jsonl"
    own = source.path if info is None else None
    if own is not None:
        dataset = read_dataset(own, labels, folds=folds)  # reports problems by the user's own lines
        check_all_apply(dataset)
    if source.limit is not None:
        rows = _sample_groups(rows, source.limit)
        notes.append(f"only {len(rows)} rows (--limit)")
    if own is None or source.limit is not None:
        _write_rows(path, rows)
        dataset = read_dataset(path, labels, folds=folds)
    if own is not None:
        notes += dataset.remarks
    judge: JudgeName = options.judge or (info.judge if info else None) or "contains"
    set_rows = SetRows(
        name=source.name, title=title, dataset=dataset, labels=labels,
        judge=JudgeOptions(judge, abstain_pattern=info.abstain_pattern if info else None),
        max_new_tokens=options.max_new_tokens or (info.max_new_tokens if info else None) or 48,
        kind=_kinds(dataset), notes=tuple(notes),
    )  # fmt: skip
    if labels == "generate":
        check_answers(dataset, set_rows.judge)
    return set_rows


def within_context(engine: Engine, rows: SetRows, folder: Path, folds: int, prompt_format: PromptFormat) -> SetRows:
    """Return the set without the prompts that, with their answers, exceed the model's context; a note counts them."""
    reserve = rows.max_new_tokens if rows.labels == "generate" else 0
    long = {
        row.line
        for row in rows.dataset.rows
        if len(render(engine, row.prompt, row.messages, prompt_format)) + reserve > engine.identity.max_tokens
    }
    if not long:
        return rows
    path, read = folder / "rows-that-fit.jsonl", objects(rows.dataset.path, [])
    _write_rows(path, [value | {"id": id_of(value, line)} for line, value in read if line not in long])
    dataset = read_dataset(path, rows.labels, folds=folds if rows.labels == "given" else 0)
    note = f"{len(long)} rows longer than the model's context of {engine.identity.max_tokens} tokens left out"
    return replace(rows, dataset=dataset, kind=_kinds(dataset), notes=(*rows.notes, note))


def prepare_set(
    engine: Engine, rows: SetRows, options: EvaluateOptions, prompt_format: PromptFormat, poolings: Sequence[Pooling]
) -> PreparedSet:
    """Extract and label.  Raises what ``collect`` raises, and TooFewOfAClass."""
    folder = options.out / "sets" / rows.name / "readouts"
    given = rows.labels == "given"
    collection = collect(
        engine, rows.dataset, folder, sites=tuple(Site), prompt_format=prompt_format, batch_rows=options.batch_rows,
        max_new_tokens=None if given else rows.max_new_tokens, poolings=poolings,
    )  # fmt: skip
    labelled = given_labels(rows.dataset) if given else judged_labels(rows.dataset, folder, rows.judge)
    index, label = labelled.index, labelled.label
    group = rows.dataset.groups[index]
    if problems := class_problems(label, group, options.folds):
        raise TooFewOfAClass(f"{rows.name}: {'; '.join(problems)}", param="data")
    inputs = MethodInputs(
        label=label, group=group, heads=Readouts(collection.rows[Site.ATTENTION_HEAD], index, label),
        residual=Readouts(collection.rows[Site.RESIDUAL_STREAM], index, label),
        first_token=collection.first_token[index], prompt_tokens=collection.prompts.lengths[index],
        text=tuple(rows.dataset.rows[row].question for row in index.tolist()),
        kind=np.array([rows.kind[row] for row in index.tolist()], dtype=np.str_),
    )  # fmt: skip
    pooled = {key: Readouts(file, index, label) for key, file in collection.pooled.items()}
    return PreparedSet(rows, inputs, pooled, collection, index, labelled.left_out)


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    atomic_write(path, text.encode("utf-8", "backslashreplace"))


def _kinds(dataset: Dataset) -> tuple[str, ...]:
    return tuple(str(row.strata.get("kind", "")) for row in dataset.rows)


def _sample_groups(rows: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """Return about ``limit`` rows in whole groups, evenly spaced over the file so that every sub-dataset is sampled."""
    names = [str(row.get("group", row.get("id", place))) for place, row in enumerate(rows)]
    order = list(dict.fromkeys(names))
    count = min(len(order), max(1, round(limit * len(order) / len(rows))))
    chosen = {order[number * len(order) // count] for number in range(count)}
    return [row for row, name in zip(rows, names, strict=True) if name in chosen]


def check_engine(engine: Engine, methods: Sequence[str]) -> None:
    """Raise EngineError, before anything slow, where the engine cannot do what the methods need."""
    if set(methods) & set(OF_OWN_ANSWERS):
        engine.sample([], SAMPLING, [])
    if "p-true" in methods:
        engine.next_token([], [token for side in candidates(engine) for token in side])


def methods_of(rows: SetRows, options: EvaluateOptions) -> tuple[str, ...]:
    """Return the methods for one set: where its labels are its own, they say nothing of the model's answers."""
    left_out = OF_OWN_ANSWERS if rows.labels == "given" else ()
    return tuple(name for name in options.methods if name not in left_out)


def left_out(rows: SetRows, options: EvaluateOptions) -> str:
    """Return a note on the methods that ``methods_of`` leaves out, "" where there are none."""
    names = [name for name in options.methods if name not in methods_of(rows, options)]
    return f"left out: {', '.join(names)}: the labels are the set's own, not of the model's answers" if names else ""


def with_answers(
    engine: Engine, prepared: PreparedSet, options: EvaluateOptions, prompt_format: PromptFormat
) -> PreparedSet:
    """Add what the set's methods read of the model's own answers, HalluGuard's scores among it.  Raises EngineError,
    PromptTooLong where a prompt that asks for P(True) does not fit, and RunMismatch."""
    methods, rows, inputs = set(methods_of(prepared.rows, options)), prepared.rows, prepared.inputs
    folder = options.out / "sets" / rows.name
    owner = {
        "data": rows.dataset.digest, "rows": _digest(prepared.index.tolist()), "model": engine.identity.fingerprint,
        "prompt_format": prompt_format, "max_new_tokens": rows.max_new_tokens,
    }  # fmt: skip
    readings: dict[str, Any] = {}

    def prompts(at: NDArray[np.int64]) -> list[list[int]]:
        return [prepared.prompts.prompts.of(int(row)) for row in prepared.index[at]]

    if "halluguard" in methods:
        path = folder / "halluguard.npy"
        if not path.exists():
            from hallutracer_research.evaluation.methods.halluguard import halluguard_scores

            scores = halluguard_scores(engine, prompts(np.arange(len(prepared.index))), rows.max_new_tokens)
            with path.with_suffix(".part").open("wb") as file:
                np.save(file, scores)
            path.with_suffix(".part").replace(path)
        inputs = replace(inputs, halluguard=np.load(path, allow_pickle=False))
    folder = folder / "answers"
    judged: list[str] = []
    if {"perplexity", "mind", "p-true"} & methods:  # the labelled rows' answers, as the judge read them
        with (prepared.prompts.folder / "answers.jsonl").open(encoding="utf-8") as lines:
            said = {record["row"]: str(record["answer"]) for record in map(json.loads, lines)}
        judged = [said[row] for row in prepared.index.tolist()]
    if "p-true" in methods:
        asking = [render(engine, text, None, prompt_format) for text in map(asked, inputs.text, judged)]
        lengths = np.array([len(prompt) for prompt in asking])  # longest first: what does not fit is told at once
        of_answers = owner | {"answers": _digest(judged)}
        readings |= _by_row(
            folder / "p-true", of_answers, lengths, AT_ONCE, "P(True)",
            lambda at: {"true": log_odds(engine, [asking[row] for row in at.tolist()])},
        ) | {"asked": lengths.astype(np.float64)}  # fmt: skip
    if {"perplexity", "mind"} & methods:
        from hallutracer_research.evaluation.methods.networks import features

        def answer(at: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
            sampling = Sampling(max_tokens=rows.max_new_tokens)
            traced = [one for (one,) in engine.sample(prompts(at), sampling, [[0]] * len(at))]
            return {
                "text": np.array([one.completion.text for one in traced]),
                "log_prob": np.array([one.log_prob.mean() for one in traced]),
                "states": np.stack([features(one) for one in traced]),
            }

        greedy = _by_row(folder / "greedy", owner, inputs.prompt_tokens, AT_ONCE, "greedy answers", answer)
        if other := sum(own != text for own, text in zip(greedy.pop("text").tolist(), judged, strict=True)):
            note = f"{other} of {len(judged)} answers, decoded again for their scores, differ from the judged ones"
            rows = replace(rows, notes=(*rows.notes, note))
        readings |= greedy
    if set(SAMPLED) & methods:
        count, sampling = options.samples, replace(SAMPLING, max_tokens=rows.max_new_tokens)
        layer = engine.identity.geometry.num_layers // 2

        def sample(at: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
            seeds = [seeds_of(SEED, int(row), count) for row in prepared.index[at]]
            by_row = engine.sample(prompts(at), sampling, seeds)
            last = [np.stack([one.last[layer] for one in of_row]) for of_row in by_row]
            return {
                "text": np.array([[one.completion.text for one in of_row] for of_row in by_row]),
                "log_prob": np.array([[one.log_prob.mean() for one in of_row] for of_row in by_row]),
                "eigenscore": np.array([eigen_score(states) for states in last]),
            }

        of_samples = owner | {"samples": count, "sampling": asdict(sampling), "seed": SEED}
        at_once = max(1, AT_ONCE // count)
        found = _by_row(folder / f"samples-{count}", of_samples, inputs.prompt_tokens, at_once, "samples", sample)
        groups = [clusters(text, said.tolist()) for text, said in zip(inputs.text, found["text"], strict=True)]
        readings["eigenscore"] = found["eigenscore"]
        readings["entropy"] = np.array([entropy_of(group) for group in groups])
        readings["entropy_weighted"] = np.array(
            [entropy_of(group, log_prob) for group, log_prob in zip(groups, found["log_prob"], strict=True)]
        )
    return replace(prepared, rows=rows, inputs=replace(inputs, answers=AnswerReadings(**readings)))


def seeds_of(seed: int, row: int, count: int) -> list[int]:
    """Return seeds of one data row's samples; more samples begin with the same ones."""
    return [int(np.random.SeedSequence([seed, row, number]).generate_state(1)[0]) for number in range(count)]


def _by_row(
    folder: Path, owner: Mapping[str, Any], lengths: NDArray[np.integer], at_once: int, name: str,
    make: Callable[[NDArray[np.int64]], dict[str, NDArray[Any]]],
) -> dict[str, Any]:  # fmt: skip
    """Return arrays of all n rows, made in files of ``at_once`` of them, longest prompts first, or read from them."""
    claim(folder, dict(owner) | {"rows_in_a_file": at_once})
    plan = batches(lengths, at_once)
    parts = []
    with tqdm(total=len(lengths), desc=name, unit="row", mininterval=1) as bar:
        for number, rows in enumerate(plan):
            parts.append(kept(folder / f"{number:05d}.npz", partial(make, rows)))
            bar.update(len(rows))
    place = np.argsort(np.concatenate(plan))
    joined: dict[str, Any] = {key: np.concatenate([part[key] for part in parts])[place] for key in parts[0]}
    if bad := [key for key, values in joined.items() if values.dtype.kind == "f" and not np.isfinite(values).all()]:
        raise EngineError(f"{name} hold a NaN or an infinity ({', '.join(bad)}): try another dtype")
    return joined


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()
