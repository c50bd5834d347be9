"""The model's own answers, for the methods that read them: the greedy one, what the model thinks of it, and samples.

Each of the three is kept in the run's folder in files of a few rows, ``sets/NAME/answers/WHAT/00000.npz``.  The plan
and the samples' seeds depend on the data alone, and an unfinished file is computed again as a whole: a run that was
killed and started again goes on to the same files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hallutracer_research.evaluation.methods.base import AnswerReadings, Floats
from hallutracer_research.evaluation.methods.eigenscore import eigen_score, middle
from hallutracer_research.evaluation.methods.mind import features
from hallutracer_research.evaluation.methods.p_true import asked, candidates, log_odds
from hallutracer_research.evaluation.methods.semantic_entropy import clusters, semantic_entropy
from hallutracer_research.evaluation.options import OF_OWN_ANSWERS, SAMPLED, EvaluateOptions
from hallutracer_research.evaluation.prepare import PreparedSet, SetRows
from hallutracer_research.evaluation.splits import kept
from service.data.collection import batches
from service.data.run_folder import claim
from service.engines.base import Engine, Sampling
from service.errors import EngineError
from service.prompts import PromptFormat, render

AT_ONCE = 320  # answers in one file; a kill loses at most these
SAMPLING = Sampling(temperature=1.0, top_p=0.9)  # Farquhar et al.'s, without their top-k of 50
SEED = 0
Arrays = dict[str, NDArray[np.generic]]


def check(engine: Engine, methods: Sequence[str]) -> None:
    """Raise EngineError, before anything slow, where the engine cannot do what the methods need."""
    if set(methods) & set(OF_OWN_ANSWERS):
        engine.sample([], SAMPLING, [])
    if "p-true" in methods:
        engine.next_token([], [token for side in candidates(engine) for token in side])


def methods_of(rows: SetRows, options: EvaluateOptions) -> tuple[str, ...]:
    """The methods for one set: where its labels are its own, they say nothing of the model's answers."""
    left_out = OF_OWN_ANSWERS if rows.labels == "given" else ()
    return tuple(name for name in options.methods if name not in left_out)


def left_out(rows: SetRows, options: EvaluateOptions) -> str:
    """A note on the methods that ``methods_of`` leaves out, "" where there are none."""
    names = [name for name in options.methods if name not in methods_of(rows, options)]
    return f"left out: {', '.join(names)}: the labels are the set's own, not of the model's answers" if names else ""


def with_answers(
    engine: Engine, prepared: PreparedSet, options: EvaluateOptions, prompt_format: PromptFormat
) -> PreparedSet:
    """Add what the set's methods read of the model's own answers.

    Raises EngineError, PromptTooLong where a prompt that asks for P(True) does not fit, and RunMismatch.
    """
    methods = methods_of(prepared.rows, options)
    folder = options.out / "sets" / prepared.rows.name / "answers"
    notes: list[str] = []
    readings = AnswerReadings()
    judged = _judged(prepared) if {"perplexity", "mind", "p-true"} & set(methods) else []
    if "p-true" in methods:
        readings = replace(readings, **_p_true(engine, prepared, folder, judged, prompt_format))
    if {"perplexity", "mind"} & set(methods):
        greedy = _greedy(engine, prepared, folder, prompt_format)
        other = sum(own != text for own, text in zip(greedy.pop("text").tolist(), judged, strict=True))
        if other:
            notes.append(
                f"{other} of {len(judged)} answers, decoded again for their scores, differ from the judged ones"
            )
        readings = replace(readings, **greedy)
    if set(SAMPLED) & set(methods):
        readings = replace(readings, **_samples(engine, prepared, folder, options.samples, prompt_format))
    rows = replace(prepared.rows, notes=(*prepared.rows.notes, *notes))
    return replace(prepared, rows=rows, inputs=replace(prepared.inputs, answers=readings))


def _greedy(engine: Engine, prepared: PreparedSet, folder: Path, prompt_format: PromptFormat) -> dict[str, Any]:
    sampling = Sampling(max_tokens=prepared.rows.max_new_tokens)

    def make(rows: NDArray[np.int64]) -> Arrays:
        traced = [one for (one,) in engine.sample(_prompts(prepared, rows), sampling, [[0]] * len(rows))]
        return {
            "text": np.array([one.completion.text for one in traced]),
            "log_prob": np.array([one.log_prob.mean() for one in traced]),
            "states": np.stack([features(one) for one in traced]),
        }

    owner = _owner(engine, prepared, prompt_format)
    return _by_row(folder / "greedy", owner, prepared.inputs.prompt_tokens, AT_ONCE, make, "greedy answers")


def _p_true(
    engine: Engine, prepared: PreparedSet, folder: Path, judged: Sequence[str], prompt_format: PromptFormat
) -> dict[str, Any]:
    texts = map(asked, prepared.inputs.text, judged)
    prompts = [render(engine, text, None, prompt_format) for text in texts]

    def make(rows: NDArray[np.int64]) -> Arrays:
        return {"true": log_odds(engine, [prompts[row] for row in rows.tolist()])}

    lengths = np.array([len(prompt) for prompt in prompts])  # longest first: what does not fit is told at once
    owner = _owner(engine, prepared, prompt_format) | {"answers": _digest(judged)}
    true = _by_row(folder / "p-true", owner, lengths, AT_ONCE, make, "P(True)")
    return true | {"asked": lengths.astype(np.float64)}


def _samples(
    engine: Engine, prepared: PreparedSet, folder: Path, count: int, prompt_format: PromptFormat
) -> dict[str, Any]:
    sampling = replace(SAMPLING, max_tokens=prepared.rows.max_new_tokens)
    layer = middle(engine.identity.geometry.num_layers)

    def make(rows: NDArray[np.int64]) -> Arrays:
        seeds = [seeds_of(SEED, int(row), count) for row in prepared.index[rows]]
        traced = engine.sample(_prompts(prepared, rows), sampling, seeds)
        return {
            "text": np.array([[one.completion.text for one in of_row] for of_row in traced]),
            "log_prob": np.array([[one.log_prob.mean() for one in of_row] for of_row in traced]),
            "eigenscore": np.array([eigen_score(np.stack([one.last[layer] for one in of_row])) for of_row in traced]),
        }

    owner = _owner(engine, prepared, prompt_format) | {"samples": count, "sampling": asdict(sampling), "seed": SEED}
    at_once = max(1, AT_ONCE // count)
    found = _by_row(folder / f"samples-{count}", owner, prepared.inputs.prompt_tokens, at_once, make, "samples")
    return {"eigenscore": found["eigenscore"]} | entropies(prepared.inputs.text, found["text"], found["log_prob"])


def entropies(questions: Sequence[str], texts: NDArray[np.str_], log_prob: Floats) -> dict[str, Floats]:
    """Both semantic entropies, [n] each: answers ``texts`` [n, K], their tokens' mean log-probability [n, K]."""
    groups = [clusters(question, said.tolist()) for question, said in zip(questions, texts, strict=True)]
    return {
        "entropy": np.array([semantic_entropy(group) for group in groups]),
        "entropy_weighted": np.array([semantic_entropy(*one) for one in zip(groups, log_prob, strict=True)]),
    }


def seeds_of(seed: int, row: int, count: int) -> list[int]:
    """Seeds of one data row's samples; more samples begin with the same ones."""
    return [int(np.random.SeedSequence([seed, row, number]).generate_state(1)[0]) for number in range(count)]


def _by_row(
    folder: Path,
    owner: Mapping[str, Any],
    lengths: NDArray[np.integer],
    at_once: int,
    make: Callable[[NDArray[np.int64]], Arrays],
    name: str,
) -> dict[str, Any]:
    """Arrays of all n rows, made in files of ``at_once`` of them, longest prompts first, or read from them."""
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


def _owner(engine: Engine, prepared: PreparedSet, prompt_format: PromptFormat) -> dict[str, Any]:
    return {
        "data": prepared.rows.dataset.digest,
        "rows": _digest(prepared.index.tolist()),
        "model": engine.identity.fingerprint,
        "prompt_format": prompt_format,
        "max_new_tokens": prepared.rows.max_new_tokens,
    }


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()


def _prompts(prepared: PreparedSet, rows: NDArray[np.int64]) -> list[list[int]]:
    return [prepared.prompts.prompts.of(int(row)) for row in prepared.index[rows]]


def _judged(prepared: PreparedSet) -> list[str]:
    """The labelled rows' answers, as the judge read them."""
    with (prepared.prompts.folder / "answers.jsonl").open(encoding="utf-8") as file:
        answers = {record["row"]: str(record["answer"]) for record in map(json.loads, file)}
    return [answers[row] for row in prepared.index.tolist()]
