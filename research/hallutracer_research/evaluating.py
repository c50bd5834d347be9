"""``evaluate``: every method on the same rows, and a report, as ``hallutracer evaluate`` does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from service.library.detector import frame
from service.library.engine import SHIPPED, Engine, load_engine
from service.library.training import Lines
from service.progress import Report, note

if TYPE_CHECKING:
    from pandas import DataFrame

    from hallutracer_research.evaluation.options import EvaluateOptions, EvaluationSource
    from hallutracer_research.evaluation.run import EvaluationResult
    from service.engines.base import EngineOptions
    from service.trainer.options import Console


EvaluationData: TypeAlias = (
    str | Path | Iterable[Mapping[str, Any]] | Mapping[str, str | Path] | None
)


class BadSource(ValueError):
    """What was named is no data to evaluate on."""


@dataclass(frozen=True)
class MethodFigures:
    """One method on one set: means over the test sides of all folds and seeds."""

    set: str
    method: str
    auroc: float
    low: float | None  # of the 95 % interval over groups, where the method has one
    high: float | None
    auprc_hallucinated: float
    auprc_factual: float
    cost: float  # prefills of the same prompt


@dataclass(frozen=True, eq=False)
class Evaluated:
    """A finished evaluation: its figures, and its files."""

    folder: Path
    files: tuple[Path, ...]  # report.html, report.md, results.json
    figures: tuple[MethodFigures, ...]
    result: EvaluationResult = field(repr=False)  # everything: sets, splits, scores

    @property
    def report(self) -> Path:
        """Return the report as a page."""
        return self.files[0]

    def to_frame(self) -> DataFrame:
        """Return the main table, a row for each method and set.  Needs pandas."""
        return frame([vars(one) for one in self.figures])


def evaluate(
    data: EvaluationData = None,
    model: str | Path | None = None,
    *,
    out: str | Path = "evaluation",
    methods: str | Sequence[str] | None = None,
    suite: Literal["main", "paper"] = "main",
    limit: int | None = None,
    engine: Engine | None = None,
    report: Report = note,
    **options: Any,
) -> Evaluated:
    """Put HalluTracer and the baselines on the same rows of your model, and write a report.

    Args:
        data: A JSONL file; the rows themselves; or {NAME: FOLDER} of public sets that were
            downloaded ("hallutracer data list").  None: the demo's questions, for the shipped
            models.
        model: As of ``load``.
        out: Folder of the results; the same call resumes from it.
        methods: Names, as of ``hallutracer evaluate --methods``.  None: those that decode nothing.
        suite: "paper" adds every table and figure of the paper.
        limit: About so many rows of each set, in whole groups.
        engine: How the model is loaded.
        report: Takes the lines of progress.
        options: Any other field of ``hallutracer_research.evaluation.options.EvaluateOptions``,
            such as ``seeds``.

    Raises:
        BadSource: The data is neither a file nor a known set.
        DataError: Rows are at fault, by line number.
        TrainingError: An option is invalid, or the rows are too few.

    >>> import tempfile
    >>> import hallutracer as ht
    >>> from service.demo.questions import questions
    >>> rows = [
    ...     {"prompt": row["prompt"], "label": int(row["exposures"] > 4), "group": row["group"]}
    ...     for row in questions("train")[::15]
    ... ]
    >>> found = ht.evaluate(
    ...     rows, "demo", out=tempfile.mkdtemp(), methods=["hallutracer", "prompt-length"],
    ...     report=lambda line: None, seeds=1, folds=3, c=0.1, jobs=1,
    ... )
    >>> [one.method for one in found.figures]
    ['HalluTracer (depth mean)', 'Prompt length']
    >>> found.figures[0].auroc > found.figures[1].auroc
    True
    >>> found.report.name
    'report.html'"""
    from hallutracer_research.evaluation.options import EvaluateOptions, method_names

    name = None if model is None else str(model)
    if methods is not None and not isinstance(methods, str):
        methods = ",".join(methods)
    folder = Path(out)
    sources = tuple(replace(source, limit=limit) for source in sources_of(data, name))
    models = {name: options.get(name) for name in ("other_model", "embedder")}
    names = method_names(methods, **models)
    wanted = EvaluateOptions(sources=sources, out=folder, suite=suite, methods=names, **options)
    chosen = engine or Engine()
    return run_evaluation(
        wanted,
        chosen.options(name),
        threads=chosen.threads,
        console=Lines(report),
        report=report,
        command="hallutracer.evaluate, from Python",
    )


def run_evaluation(
    options: EvaluateOptions,
    engine: EngineOptions,
    *,
    threads: int | None,
    console: Console,
    command: str,
    report: Report = note,
) -> Evaluated:
    """Run what the command line and ``evaluate`` share, from checked options to the report."""
    from hallutracer_research.evaluation.run import evaluate as run
    from hallutracer_research.paper.report import write_report
    from service.readout import Site

    other = (
        None
        if options.other_model is None
        else replace(Engine().options(options.other_model), device=engine.device)
    )

    def load(model: EngineOptions) -> Any:
        return load_engine(model, rows=list(Site), threads=threads, report=report)

    other_factory = None if other is None else partial(load, other)
    result = run(options, partial(load, engine), other_factory=other_factory, console=console)
    files = write_report(result, command)
    figures = [
        MethodFigures(
            set=row["set"],
            method=row["method"],
            auroc=row["auroc"]["mean"],
            low=row["auroc"].get("low"),
            high=row["auroc"].get("high"),
            auprc_hallucinated=row["auprc_hallucinated"]["mean"],
            auprc_factual=row["auprc_factual"]["mean"],
            cost=row["cost"],
        )
        for row in cast(Sequence[Mapping[str, Any]], result.main.rows)
    ]
    return Evaluated(options.out, tuple(files), tuple(figures), result)


def sources_of(data: EvaluationData, model: str | None) -> tuple[EvaluationSource, ...]:
    """Return what ``evaluate`` takes as data: for a shipped model the demo's questions.  Raises
    BadSource."""
    from hallutracer_research.evaluation.options import EvaluationSource
    from service.demo.questions import questions

    if data is None:
        if model is not None and model not in SHIPPED:
            raise BadSource("name the data to evaluate this model on")
        title = "questions about real facts (the training split), answered by the model itself"
        return (
            EvaluationSource("demo-questions", None, rows=lambda: questions("train"), title=title),
        )
    if isinstance(data, str | Path):
        return (source(str(data)),)
    if isinstance(data, Mapping):
        return tuple(source(f"{name}={folder}") for name, folder in data.items())
    rows = [dict(row) for row in data]
    return (EvaluationSource("rows", None, rows=lambda: rows, title="rows given in Python"),)


def source(text: str) -> EvaluationSource:
    """Return ``NAME=FOLDER`` of a known set, or a JSONL file, as a source.  Raises BadSource."""
    from hallutracer_research.data.registry import SETS
    from hallutracer_research.evaluation.options import EvaluationSource

    name, equals, folder = text.partition("=")
    if equals and name in SETS:
        return EvaluationSource(name, Path(folder).expanduser(), name)
    path = Path(text).expanduser()
    if path.is_file():
        return EvaluationSource(path.stem, path)
    raise BadSource(
        f"{text!r} is neither a JSONL file nor NAME=FOLDER with NAME one of {', '.join(SETS)}"
    )
