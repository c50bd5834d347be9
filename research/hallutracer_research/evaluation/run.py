"""One evaluation, top to bottom: data sets -> rows -> readouts -> splits -> methods -> main table.
Slow results are kept in the run's folder as soon as they exist: readouts batch by batch, each
method's scores split by split.  The same command continues a killed run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hallutracer_research.evaluation import prepare, readings, results, scale, splits, tables
from hallutracer_research.evaluation.methods import (
    ANSWER_MAX,
    BOTH,
    METHODS,
    OTHER,
    OURS,
    RESIDUAL,
    RUNNING,
    SHUFFLED,
    TRAJECTORY,
    WITH_ANSWER,
    WITH_CONTENT,
    WITH_KIND,
    WITH_SCAFFOLD,
    fit_method,
    readouts_of,
)
from hallutracer_research.evaluation.methods.base import MethodInputs
from hallutracer_research.evaluation.options import (
    Cost,
    EvaluateOptions,
    Tokens,
    Weights,
    cost,
    count_weights,
)
from hallutracer_research.evaluation.page import Table
from hallutracer_research.evaluation.pooling import PoolingEngine
from hallutracer_research.evaluation.splits import Split, kept
from service.data.run_folder import claim, locked
from service.engines.base import Engine, ModelIdentity
from service.engines.checks import beyond_onset
from service.errors import EngineError, NoDirection, TrainingError
from service.fitting.folds import OuterFold
from service.fitting.nested_cv import nested_cv
from service.fitting.probes import Floats
from service.prompts import default_prompt_format
from service.readout import Pooling, Site
from service.risk import depth_mean
from service.trainer.options import Console

OWN_FITS = (OURS, RESIDUAL, TRAJECTORY, SHUFFLED)  # of any rows: one that fails is an error


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """All that a report is written from."""

    options: EvaluateOptions
    identity: ModelIdentity
    sets: tuple[results.SetResult, ...]
    tables: Sequence[Table]  # in the order of the report
    milliseconds: Mapping[str, float]  # by set: median of prefills, one prompt at a time
    seconds: float

    @property
    def main(self) -> Table:
        """Return the main table."""
        return next(table for table in self.tables if table.name == "main")


def evaluate(
    options: EvaluateOptions,
    engine_factory: Callable[[], Engine],
    *,
    console: Console,
    other_factory: Callable[[], Engine] | None = None,
) -> EvaluationResult:
    """Evaluate every method on every set; the paper suite also keeps what the paper's other tables
    need.
    ``other_factory``: loads ``options.other_model``, once the model that is evaluated is freed.

    A set whose own answers are too nearly all right, or all wrong, which is known only once the
    model has answered, is left out with a note.  Raises DataError (rows), RunMismatch (another
    run's folder), TrainingError and NoDirection (too few rows, too little signal)."""
    begun = time.monotonic()
    for other_run in options.beside:
        scale.finished(other_run)  # raises before anything slow
    rows = [prepare.read_rows(source, options) for source in options.sources]
    for set_rows in rows:
        console.print(f"{set_rows.name}: {len(set_rows.dataset)} rows of {set_rows.title}")
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.out / "sets"
    with locked(options.out):
        prepared: list[prepare.PreparedSet] = []
        problems: list[prepare.TooFewOfAClass] = []
        with closing(cast(Engine, PoolingEngine(engine_factory()))) as engine:
            chosen = options.prompt_format
            prompt_format = default_prompt_format(engine) if chosen == "auto" else chosen
            readings.check_engine(engine, options.methods)
            poolings = _poolings(engine, options, console)
            for set_rows in rows:
                if options.skip_long:
                    set_rows = prepare.within_context(
                        engine, set_rows, folder / set_rows.name, options.folds, prompt_format
                    )
                try:
                    prepared.append(
                        prepare.prepare_set(engine, set_rows, options, prompt_format, poolings)
                    )
                except prepare.TooFewOfAClass as problem:
                    problems.append(problem)
                    console.print(f"left out: {problem}")
            if not prepared:
                raise problems[0]
            identity, weights = engine.identity, count_weights(engine)
            milliseconds = {}
            for number, of_set in enumerate(prepared):
                prepared[number] = readings.with_readings(engine, of_set, options, prompt_format)
                milliseconds[of_set.rows.name] = _milliseconds(engine, of_set, options)
        other_weights: Weights | None = None
        if OTHER in options.methods:
            assert other_factory is not None, (
                "options that name another model come with a way to load it"
            )
            with closing(other_factory()) as engine:
                prepared = [
                    readings.with_other_model(engine, of_set, options) for of_set in prepared
                ]
                other_weights = count_weights(engine)
        if "text-embedding" in options.methods:
            prepared = [readings.with_embeddings(of_set, options) for of_set in prepared]
        sets = []
        for of_set in prepared:
            costs = _costs(of_set, options, weights, other_weights)
            sets.append(replace(_evaluate_set(of_set, options), costs=costs))
        main_rows = []
        for result in sets:
            tables.write_row_scores(result, folder / result.title / "scores.csv")
            main_rows += tables.rows_of(result.title, result.measures(), result.costs)
        subsets = _subsets(sets, options) if options.per_subset else None
        by_set = {of_set.rows.name: of_set.inputs for of_set in prepared}
        transfer = tables.transfer_table(by_set, options, options.out / "transfer")
    notes = [note for result in sets for note in _notes(result, options)]
    notes += [f"Left out: {problem}" for problem in problems]
    all_tables = (
        scale.sets_table(sets, None if weights is None else sum(weights)),
        tables.main_table(main_rows, notes),
        tables.ahead_table(sets),
        tables.decisions_table(sets),
        tables.second_look_table(sets),
        subsets,
        transfer,
        tables.form_table(sets),
    )
    return EvaluationResult(
        options,
        identity,
        tuple(sets),
        [table for table in all_tables if table is not None],
        milliseconds,
        time.monotonic() - begun,
    )


TIMED = 20  # prompts


def _milliseconds(engine: Engine, prepared: prepare.PreparedSet, options: EvaluateOptions) -> float:
    """Return the median time of a prompt's pass, of prompts evenly spaced over the rows, measured
    once in a run."""
    rows = np.linspace(0, len(prepared.index) - 1, TIMED).astype(int)

    def make() -> splits.Arrays:
        times = []
        for row in prepared.index[rows].tolist():
            begun = time.perf_counter()
            engine.extract([prepared.prompts.prompts.of(row)], (Site.ATTENTION_HEAD,))
            times.append(1000 * (time.perf_counter() - begun))
        return {"milliseconds": np.array(times)}

    path = options.out / "sets" / prepared.rows.name / "milliseconds.npz"
    return float(np.median(kept(path, make)["milliseconds"]))


def _costs(
    prepared: prepare.PreparedSet,
    options: EvaluateOptions,
    weights: Weights | None,
    other_weights: Weights | None,
) -> dict[str, Cost]:
    inputs = prepared.inputs

    def mean(values: NDArray[Any] | None) -> float:
        return 0.0 if values is None else float(values.mean())

    def tokens(method: str) -> Tokens:
        answers, reads = inputs.answers, METHODS[method].reads
        examples = method == "p-true-examples"
        scaffold = None if inputs.positions is None else inputs.positions.scaffold
        if inputs.behind is not None and reads == "behind-answer":
            scaffold = inputs.behind.question
        return Tokens(
            prompt=mean(inputs.prompt_tokens),
            answer=mean(answers.decoded) if reads == "content" else prepared.rows.max_new_tokens,
            samples=options.samples,
            p_true=mean(answers.true_tokens_examples if examples else answers.true_tokens),
            scaffold=mean(scaffold),
            other_model=mean(inputs.other_tokens),
        )

    return {
        method: cost(method, weights, tokens(method), other_weights)
        for method in prepare.methods_of(prepared.rows, options)
    }


def _poolings(engine: Engine, options: EvaluateOptions, console: Console) -> tuple[Pooling, ...]:
    """Return the paper suite's readout positions; none, and a message, where the engine reads the
    last only."""
    if options.suite != "paper":
        return ()
    try:
        engine.extract([], (), beyond_onset(tuple(Pooling)))
    except EngineError as error:
        console.print(f"the table of readout positions is left out: {error}")
        return ()
    return tuple(Pooling)


def _evaluate_set(
    prepared: prepare.PreparedSet, options: EvaluateOptions, *, subset: str = ""
) -> results.SetResult:
    """Evaluate all splits and methods of one set; of a subset the main table's numbers only."""
    inputs = prepared.inputs
    folder = options.out / "sets" / prepared.rows.name / "fits" / (subset or "pooled")
    claim(folder, _fingerprint(prepared, options))
    outer = splits.outer_splits(inputs, options)
    paper = options.suite == "paper" and not subset
    site = Site.ATTENTION_HEAD
    poolings = [pooling for where, pooling in prepared.pooled if where is site] if paper else []
    methods = prepare.methods_of(prepared.rows, options)
    steps = len(outer) * len(methods) + (len(poolings) * options.folds if paper else 0)
    fitted: list[Split] = []
    pooled: dict[tuple[Site, Pooling], list[Floats]] = {(site, pooling): [] for pooling in poolings}
    # Rivals that cannot learn from this set, which must not cost it the others.
    failed: dict[str, str] = {}

    def fit(fold: OuterFold) -> dict[str, Floats]:
        split = splits.kept_split(folder / OURS, inputs, fold, options)
        fitted.append(split)
        of_fold = {}
        for method in methods:
            bar.set_postfix_str(f"seed {fold.seed} fold {fold.fold} {method}", refresh=False)
            try:
                if method not in failed:
                    of_fold[method] = _score(folder, method, inputs, split, options)
            except TrainingError as error:
                if method in OWN_FITS:
                    raise
                failed[method] = str(error)
            bar.update()
        for pooling in poolings if fold.seed == 0 else []:
            path = folder / f"pooling-{pooling}" / f"fold{fold.fold}.npz"
            readouts = prepared.pooled[site, pooling]
            pooled[site, pooling].append(
                splits.kept_score(path, partial(splits.pooled_depth_mean, readouts, split, options))
            )
            bar.update()
        return of_fold

    with tqdm(total=steps, desc=subset or prepared.rows.name, unit="fit", mininterval=1) as bar:
        scores = nested_cv(outer, fit)
    scores = {method: of_method for method, of_method in scores.items() if method not in failed}
    result = results.SetResult(prepared, fitted, scores, None, pooled, failed=failed)
    if subset:
        return result
    return replace(result, comparison=results.compare(inputs.label, inputs.group, scores))


def _score(
    folder: Path, method: str, inputs: MethodInputs, split: Split, options: EvaluateOptions
) -> Floats:
    """Return scores of the test side that rise with hallucination, kept on disk."""
    if method == OURS:
        return -depth_mean(split.test_trajectory)

    name, positions = f"seed{split.seed}-fold{split.fold}.npz", inputs.positions
    fold = split.fold_of(inputs, options.jobs or None)
    if method in RUNNING or method == ANSWER_MAX:
        make_all = partial(splits.running, inputs, split, options)
        return np.asarray(kept(folder / "answer-running" / name, make_all)[method], np.float64)
    first_tokens = {
        WITH_CONTENT: inputs.answers.content,
        WITH_SCAFFOLD: None if positions is None else positions.first_token,
    }

    def make() -> Floats:
        if method in (BOTH, WITH_ANSWER):
            return splits.before_and_behind(readouts_of(method, inputs), inputs, split, options)
        if METHODS[method].of and METHODS[method].fit is None:
            return -splits.chosen_depth_mean(readouts_of(method, inputs), fold, options)
        if method == WITH_KIND:
            return splits.with_kind(inputs, split)
        if method in first_tokens:
            return splits.with_entropy(first_tokens[method], inputs, split)
        if method == TRAJECTORY:
            group, test_trajectory = inputs.group[split.train], split.test_trajectory
            return splits.trajectory_ridge(
                split.train_trajectory, fold.label, group, test_trajectory, split.seed
            )
        if method == SHUFFLED:
            return -splits.shuffled_depth_mean(inputs, split, options)
        return fit_method(method, fold)

    return splits.kept_score(folder / method / name, make)


def _fingerprint(prepared: prepare.PreparedSet, options: EvaluateOptions) -> dict[str, Any]:
    """Return what kept fits depend on, besides the readouts."""
    inputs = prepared.inputs
    return {
        "data": prepared.rows.dataset.digest,
        "judge": asdict(prepared.rows.judge) | {"api_key": ""},
        "rows": len(inputs.label),
        "factual": int(inputs.label.sum()),
        "folds": options.folds,
        "inner_folds": options.inner_folds,
        "c": options.c if options.c is not None else list(options.c_grid),
    }


def _mean_measures(of_kinds: Sequence[results.Measures]) -> results.Measures:
    """Return the mean over sub-datasets of each measure's mean and deviation."""
    means: dict[str, dict[str, float]] = {}
    for name in results.MEASURES:
        values = [measures[name] for measures in of_kinds]
        means[name] = {
            part: float(np.mean(list(map(itemgetter(part), values)))) for part in ("mean", "std")
        }
    return means


def _subsets(sets: Sequence[results.SetResult], options: EvaluateOptions) -> Table | None:
    """Return the main table inside each sub-dataset, probes included: the mean over those with rows
    for the folds."""
    table_rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for of_set in sets:
        prepared = of_set.prepared
        kinds = sorted(set(prepared.inputs.kind.tolist()) - {""})
        if len(kinds) < 2:
            continue
        measures: list[dict[str, results.Measures]] = []
        for kind in kinds:
            rows = np.flatnonzero(prepared.inputs.kind == kind)
            slug = "".join(char if char.isalnum() else "-" for char in kind.lower())
            try:
                of_kind = _evaluate_set(prepared.subset(rows), options, subset=f"subset-{slug}")
                measures.append(of_kind.measures())
            except (TrainingError, NoDirection) as error:
                notes.append(f"{prepared.rows.name}/{kind} is left out: {error}")
        if measures:
            mean = {}
            for method in prepare.methods_of(prepared.rows, options):
                having = [of_kind[method] for of_kind in measures if method in of_kind]
                if len(having) == len(measures):  # else it cannot learn in one of the kinds
                    mean[method] = _mean_measures(having)
            title = f"{prepared.rows.name}, mean of {len(measures)} sub-datasets"
            table_rows += tables.rows_of(title, mean, of_set.costs)
    if not table_rows:
        return None
    return replace(
        tables.main_table(table_rows, notes),
        name="subsets",
        label="",
        title="The same, trained and tested inside each sub-dataset",
        caption=(
            "Means over sub-datasets of the mean and of the standard deviation over folds and"
            " seeds.  The paper does not say whether its folds are pooled or per sub-dataset."
        ),
    )


def _notes(result: results.SetResult, options: EvaluateOptions) -> list[str]:
    label, rows = result.label, result.prepared.rows
    left = ", ".join(f"{count} {why}" for why, count in result.prepared.left_out.items())
    failed = [
        f"left out: {METHODS[method].title}: {problem}" for method, problem in result.failed.items()
    ]
    notes = [
        f"{rows.title}; {len(label)} rows, {int((1 - label).sum())} hallucinated,"
        f" {len(np.unique(result.group))} groups" + (f"; left out: {left}" if left else ""),
        *rows.notes,
        prepare.left_out(rows, options),
        *failed,
    ]
    if result.comparison is not None:
        runner_up, gain, p = result.comparison
        delong = "" if p is None else f", DeLong p = {p:.2g} (median over seeds)"
        notes.append(
            f"HalluTracer over the runner-up ({METHODS[runner_up].title}): AUROC"
            f" {100 * gain.difference:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}],"
            f" p = {gain.p_value:.2g} over groups{delong}"
        )
    return [f"{result.title}: {note}" for note in notes if note]
