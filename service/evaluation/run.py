"""One evaluation, top to bottom: sets -> rows -> readouts -> splits -> methods -> tables -> report.

Everything that takes long is kept in the run's folder as soon as it is there: readouts batch by batch, each method's
scores split by split.  The same command goes on where a killed one stopped.  Parses no command line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from service.data.run_folder import claim, locked
from service.engines.base import Engine, ModelIdentity
from service.engines.checks import beyond_onset
from service.errors import EngineError, NoDirection, TrainingError
from service.evaluation.gather import Gathered, answers_path, gather, read_rows, that_fit
from service.evaluation.main_table import MEASURES, Run, compare, main_table, measured, rows_of
from service.evaluation.methods import METHODS
from service.evaluation.methods.base import Material
from service.evaluation.options import OURS, RESIDUAL, EvaluateOptions
from service.evaluation.set_run import SetRun
from service.evaluation.splits import Split, kept, kept_split, outer_splits, pooled_depth_mean, residual_split
from service.evaluation.tables import Table
from service.fitting.fit import Floats, Readouts
from service.prompts import PromptFormat, default_prompt_format
from service.readout import Pooling, Site
from service.risk import depth_mean
from service.trainer.run import Console

TITLES = {OURS: "HalluTracer (depth mean)", RESIDUAL: "Residual-stream depth mean"}


@dataclass(frozen=True, eq=False)
class Result:
    """What a report is written from."""

    options: EvaluateOptions
    identity: ModelIdentity
    runs: tuple[SetRun, ...]
    main: Table
    subsets: Table | None
    titles: dict[str, str]  # of the methods
    seconds: float


def evaluate(options: EvaluateOptions, engine_factory: Callable[[], Engine], *, console: Console) -> Result:
    """Evaluate every method on every set; the paper suite also keeps what its other tables need.

    Raises:
        DataError: rows of a set are at fault.
        RunMismatch: the folder belongs to another run.
        TrainingError, NoDirection: the rows do not carry the fits under these options.
    """
    begun = time.monotonic()
    rows = [read_rows(source, options) for source in options.sources]
    for one in rows:
        console.print(f"{one.name}: {len(one.dataset)} rows of {one.title}")
    options.out.mkdir(parents=True, exist_ok=True)
    with locked(options.out):
        engine = engine_factory()
        try:
            prompt_format: PromptFormat = (
                default_prompt_format(engine) if options.prompt_format == "auto" else options.prompt_format
            )
            poolings = _poolings(engine, options, console)
            if options.skip_long:
                rows = [
                    that_fit(engine, one, options.out / "sets" / one.name, options.folds, prompt_format) for one in rows
                ]
            gathered = [gather(engine, one, options, prompt_format, poolings) for one in rows]
            identity = engine.identity
            gathered = [_with_halluguard(engine, one, options) for one in gathered]
        finally:
            engine.close()
        runs = [_evaluate_set(one, options) for one in gathered]
        found: list[dict[str, Any]] = []
        titles = TITLES | {name: METHODS[name]().title for name in options.methods if name in METHODS}
        for run in runs:
            found += rows_of(run.title, titles, {name: measured(run.label, run.runs[name]) for name in options.methods})
        subsets = _subsets(gathered, options, titles) if options.per_subset else None
    return Result(
        options,
        identity,
        tuple(runs),
        main_table(found, _notes(runs, titles)),
        subsets,
        titles,
        time.monotonic() - begun,
    )


def _poolings(engine: Engine, options: EvaluateOptions, console: Console) -> tuple[Pooling, ...]:
    """The readout positions of the paper suite; none where the engine reads the last position alone, which is said."""
    if options.suite != "paper":
        return ()
    try:
        engine.extract([], (), beyond_onset(tuple(Pooling)))
    except EngineError as error:
        console.print(f"the table of readout positions is left out: {error}")
        return ()
    return tuple(Pooling)


def _with_halluguard(engine: Engine, gathered: Gathered, options: EvaluateOptions) -> Gathered:
    """HalluGuard needs the answer and the model: its scores are computed while the model is there, and kept."""
    if "halluguard" not in options.methods:
        return gathered
    path = answers_path(options, gathered.rows.name)
    if not path.exists():
        from service.evaluation.methods.halluguard import halluguard_scores

        prompts = [gathered.prompts.prompts.of(int(row)) for row in gathered.index]
        scores = halluguard_scores(engine, prompts, gathered.rows.max_new_tokens)
        with path.with_suffix(".part").open("wb") as file:
            np.save(file, scores)
        path.with_suffix(".part").replace(path)
    return replace(gathered, material=replace(gathered.material, halluguard=np.load(path, allow_pickle=False)))


def _evaluate_set(gathered: Gathered, options: EvaluateOptions, *, only_main: bool = False, name: str = "") -> SetRun:
    """All splits, all methods of one set."""
    material = gathered.material
    folder = options.out / "sets" / gathered.rows.name / "fits" / name if name else (
        options.out / "sets" / gathered.rows.name / "fits" / "pooled"
    )  # fmt: skip
    claim(folder, _fingerprint(gathered, options))
    outer = outer_splits(material, options)
    paper = options.suite == "paper" and not only_main
    poolings = [pooling for site, pooling in gathered.pooled if site is Site.ATTENTION_HEAD] if paper else []
    steps = len(outer) * len(options.methods) + (len(poolings) * options.folds if paper else 0)
    splits: list[Split] = []
    runs: dict[str, list[Run]] = {method: [] for method in options.methods}
    pooled: dict[tuple[Site, Pooling], list[Floats]] = {(Site.ATTENTION_HEAD, one): [] for one in poolings}
    with tqdm(total=steps, desc=name or gathered.rows.name, unit="fit", mininterval=1) as bar:
        for seed, fold, train, test in outer:
            split = kept_split(folder / OURS, material, seed, fold, train, test, options)
            splits.append(split)
            for method in options.methods:
                bar.set_postfix_str(f"seed {seed} fold {fold} {method}", refresh=False)
                score = _score(folder, method, material, split, options)
                runs[method].append(Run(seed, fold, test, score))
                bar.update()
            for pooling in poolings if seed == 0 else []:
                site = Site.ATTENTION_HEAD
                path = folder / f"pooling-{pooling}" / f"fold{fold}.npz"
                pooled[site, pooling].append(_pooled(path, gathered.pooled[site, pooling], split, options))
                bar.update()
    aurocs = {method: measured(material.label, found)["auroc"]["mean"] for method, found in runs.items()}
    comparison = None if only_main else compare(material.label, material.group, runs, aurocs)
    return SetRun(gathered, splits, runs, comparison, pooled)


def _pooled(path: Path, readouts: Readouts, split: Split, options: EvaluateOptions) -> Floats:
    """Depth means of the test side from another pooling, kept."""
    found = kept(path, lambda: {"score": pooled_depth_mean(readouts, split, options)})
    return np.asarray(found["score"], np.float64)


def _score(folder: Path, method: str, material: Material, split: Split, options: EvaluateOptions) -> Floats:
    """Scores of the test side that rise with hallucination, kept."""
    if method == OURS:
        return -depth_mean(split.test_trajectory)

    def make() -> dict[str, NDArray[np.generic]]:
        if method == RESIDUAL:
            return {"score": -residual_split(material, split, options)[0]}
        made = METHODS[method](options.jobs or None)
        return {"score": made.fit(material, split.train, split.test, split.seed).test}

    found = kept(folder / method / f"seed{split.seed}-fold{split.fold}.npz", make)
    return np.asarray(found["score"], np.float64)


def _fingerprint(gathered: Gathered, options: EvaluateOptions) -> dict[str, Any]:
    """What kept fits depend on, beside the readouts' own folder."""
    material = gathered.material
    return {
        "data": gathered.rows.dataset.digest,
        "judge": asdict(gathered.rows.judge) | {"api_key": ""},
        "rows": len(material.label),
        "factual": int(material.label.sum()),
        "folds": options.folds,
        "inner_folds": options.inner_folds,
        "c": options.c if options.c is not None else list(options.c_grid),
    }


def _subsets(gathered: Sequence[Gathered], options: EvaluateOptions, titles: dict[str, str]) -> Table | None:
    """The main table inside each sub-dataset, probes and all: the mean over those that carry the folds."""
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    for one in gathered:
        kinds = sorted(set(one.kind.tolist()) - {""})
        if len(kinds) < 2:
            continue
        measures: dict[str, list[dict[str, dict[str, float]]]] = {method: [] for method in options.methods}
        counted = []
        for kind in kinds:
            rows = np.flatnonzero(one.kind == kind)
            try:
                run = _evaluate_set(one.subset(rows), options, only_main=True, name=f"subset-{_slug(kind)}")
            except (TrainingError, NoDirection) as error:
                notes.append(f"{one.rows.name}/{kind} is left out: {error}")
                continue
            counted.append(kind)
            for method in options.methods:
                measures[method].append(measured(run.label, run.runs[method]))
        if counted:
            mean = {
                method: {
                    name: {"mean": float(np.mean([part[name]["mean"] for part in parts])),
                           "std": float(np.mean([part[name]["std"] for part in parts]))}
                    for name in MEASURES
                }
                for method, parts in measures.items()
            }  # fmt: skip
            found += rows_of(f"{one.rows.name}, mean of {len(counted)} sub-datasets", titles, mean)
    if not found:
        return None
    table = main_table(found, notes)
    return Table(
        name="subsets",
        title="The same, trained and tested inside each sub-dataset",
        columns=table.columns,
        rows=table.rows,
        caption="Means over sub-datasets of the mean and of the standard deviation over folds and seeds.  The paper "
        "does not say whether its folds are pooled or per sub-dataset.",
        notes=notes,
        block="set",
    )


def _slug(kind: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in kind.lower())


def _notes(runs: Sequence[SetRun], titles: dict[str, str]) -> list[str]:
    notes = []
    for run in runs:
        label, rows = run.label, run.gathered.rows
        left = ", ".join(f"{count} {why}" for why, count in run.gathered.left_out.items())
        notes.append(
            f"{run.title}: {rows.title}; {len(label)} rows, {int((1 - label).sum())} hallucinated, "
            f"{len(np.unique(run.group))} groups" + (f"; left out: {left}" if left else "")
        )
        notes += [f"{run.title}: {note}" for note in rows.notes]
        if run.comparison is not None:
            c = run.comparison
            delong = "" if c.p_delong is None else f", DeLong p = {c.p_delong:.2g} (median over seeds)"
            notes.append(
                f"{run.title}: HalluTracer over the runner-up ({titles[c.runner_up]}): AUROC {100 * c.difference:+.1f} "
                f"points [{100 * c.low:+.1f}, {100 * c.high:+.1f}], "
                f"bootstrap over groups p = {c.p_bootstrap:.2g}{delong}"
            )
    return notes
