"""``train``: rows to a published bundle, as ``hallutracer train`` does."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from service.library.detector import Engine
from service.library.engine import load_engine
from service.library.results import frame
from service.library.stores import open_store
from service.progress import Report, note
from service.settings import DEFAULT_STORE

if TYPE_CHECKING:
    from pandas import DataFrame

    from probes_store.bundle import Bundle
    from probes_store.store import Store
    from service.engines.base import EngineOptions
    from service.trainer.options import Console, TrainOptions

ROWS = "rows.jsonl"  # in the run folder: rows that were given as objects


@dataclass(frozen=True)
class SignalFigures:
    """How well one signal tells hallucinated answers, on rows that its fits did not see; a rival, or the bundle's."""

    signal: str
    title: str
    own: bool  # whether the bundle's risk is made of it
    auroc: float
    low: float  # of the 95 % interval of the AUROC, over groups
    high: float
    ece: float  # 15 bins of equal mass
    brier: float


@dataclass(frozen=True, eq=False, repr=False)
class Trained:
    """A published bundle, and what its training measured."""

    bundle: Bundle
    run_dir: Path  # activations and progress: the same call resumes from here
    store: str  # its folder or URL
    figures: tuple[SignalFigures, ...] = ()  # of the nested cross-validation; () without evaluate

    def __repr__(self) -> str:
        own = self.own
        figures = "not evaluated" if own is None else f"AUROC {own.auroc:.3f} [{own.low:.3f}, {own.high:.3f}]"
        return f"<Trained: {self.reference}, {figures}; {self.folder}>"

    @property
    def reference(self) -> str:
        """NAME:VERSION."""
        return self.bundle.reference

    @property
    def folder(self) -> Path:
        """The bundle's files."""
        return self.bundle.path

    @property
    def card(self) -> str:
        """The model card, Markdown."""
        return self.bundle.card()

    @property
    def own(self) -> SignalFigures | None:
        """The figures of the bundle's own risk; None without ``evaluate``."""
        return next((one for one in self.figures if one.own), None)

    def to_frame(self) -> DataFrame:
        """The figures, a row for each signal.  Needs pandas."""
        return frame([vars(one) for one in self.figures])


class Lines:
    """A trainer's console that hands each line on."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def print(self, *objects: Any) -> None:
        """Report one line."""
        self._report(" ".join(map(str, objects)))


def train(
    rows: str | Path | Iterable[Mapping[str, Any]],
    name: str,
    model: str | Path | None = None,
    *,
    labels: Literal["given", "generate", "sample"] = "given",
    store: str | Path = DEFAULT_STORE,
    run_dir: str | Path | None = None,
    engine: Engine | None = None,
    report: Report = note,
    **options: Any,
) -> Trained:
    """Train a bundle on your own model and publish it; the same call resumes a run that was interrupted.

    Args:
        rows: A JSONL file, or the rows themselves: ``prompt`` or ``messages``, ``label`` (1 factual, 0 hallucinated)
            or ``answers``, and where several rows share a question or an entity their ``group``.
        name: Name of the bundle.
        model: As of ``load``.
        labels: "given": each row's label.  "generate": the model answers and a judge compares with ``answers``.
            "sample": as generate, with sampled answers as well.
        store: Folder or URL that the bundle is published in.
        run_dir: Activations and progress.  None: runs/NAME.
        engine: How the model is loaded.
        report: Takes the lines of progress; the default writes them to standard error.
        options: Any other field of ``service.trainer.options.TrainOptions``, such as ``test``, ``judge``, ``seeds``,
            ``folds``, ``c``, ``readout``, ``evaluate`` or ``forms``; as of ``hallutracer train``, except that ``seeds``
            may also be the seeds themselves, and ``forms`` several names.

    Raises:
        DataError: Rows are at fault, by line number.
        TrainingError: An option is invalid, or the rows carry no signal.
        RunMismatch: The run folder belongs to another run.
        TypeError: An option that does not exist.

    >>> import tempfile
    >>> import hallutracer as ht
    >>> from service.demo.questions import questions
    >>> rows = [  # what the demo model has read often it mostly knows; your rows have labels that someone looked at
    ...     {"prompt": row["prompt"], "label": int(row["exposures"] > 4), "group": row["group"]}
    ...     for row in questions("train")[::15]
    ... ]
    >>> folder = tempfile.mkdtemp()
    >>> trained = ht.train(  # one seed, three folds and a given C: quick, and without intervals for each risk
    ...     rows, "mine", "demo", store=folder, run_dir=f"{folder}/run", report=lambda line: None,
    ...     seeds=(0,), folds=3, c=0.1, jobs=1,
    ... )
    >>> trained.reference, trained.own.signal
    ('mine:1', 'depth_mean_unit_norm')
    >>> trained.own.low < trained.own.auroc < trained.own.high
    True
    """
    from service.trainer.options import TrainOptions

    folder = Path(run_dir) if run_dir is not None else Path("runs") / name
    if not isinstance(options.get("forms", ""), str):
        options["forms"] = ",".join(options["forms"]) or "none"
    options |= {key: Path(value) for key, value in options.items() if key in ("test", "calibration") and value}
    wanted = TrainOptions(name=name, data=(str(rows_file(rows, folder)),), run_dir=folder, labels=labels, **options)
    chosen = engine or Engine()
    return run_training(
        wanted,
        chosen.options(None if model is None else str(model)),
        open_store(store),
        threads=chosen.threads,
        console=Lines(report),
        report=report,
    )


def run_training(
    options: TrainOptions,
    engine: EngineOptions,
    store: Store,
    *,
    threads: int | None,
    console: Console,
    report: Report = note,
) -> Trained:
    """What the command line and ``train`` share: a run from checked options to the published bundle."""
    from service.trainer.run import train as run

    bundle = run(
        options,
        lambda: load_engine(engine, rows=[options.site], threads=threads, report=report),
        store,
        console=console,
    )
    return Trained(bundle, options.folder, store.where, figures_of(bundle.evaluation()))


def figures_of(evaluation: Mapping[str, Any]) -> tuple[SignalFigures, ...]:
    """From a bundle's evaluation.json; () where it was trained without an evaluation."""
    from service.trainer.cards import SIGNALS

    crossed = evaluation.get("cross_validation")
    if crossed is None:
        return ()
    own = evaluation["signal_of_the_bundle"]
    return tuple(
        SignalFigures(
            signal=name,
            title=SIGNALS[name],
            own=name == own,
            auroc=row["auroc"]["mean"],
            low=row["auroc"]["low"],
            high=row["auroc"]["high"],
            ece=row["ece"]["mean"],
            brier=row["brier"]["mean"],
        )
        for name, row in crossed["signals"].items()
    )


def rows_file(rows: str | Path | Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """The file of the rows: the one that is named, or one that is written into the run folder."""
    if isinstance(rows, str | Path):
        return Path(rows).expanduser()
    path = folder / ROWS
    lines = [json.dumps(_given(row), ensure_ascii=False, default=_plain) for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="surrogatepass")
    return path


def _given(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what a DataFrame has where nothing was: None and NaN."""
    missing = {key for key, value in row.items() if value is None or (isinstance(value, float) and math.isnan(value))}
    return {key: value for key, value in row.items() if key not in missing}


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy, as they come out of a DataFrame."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence | set):
        return list(value)
    raise TypeError(f"a row holds {type(value).__name__}, which JSON has no form for")
