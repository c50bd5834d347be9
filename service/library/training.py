"""``train``: rows to a published bundle, as ``hallutracer train`` does."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from probes_store.local import atomic_write
from service.data.bank import bank_rows
from service.errors import RequestError, TrainingError
from service.library.detector import as_prompts, frame, text_or_messages
from service.library.engine import FILES, SHIPPED, Engine, default_model, load_engine, open_store
from service.progress import Report, note
from service.settings import DEFAULT_STORE

MINUTES = "minutes.json"  # in the run folder: how many questions --minutes chose
THREADS = "threads.json"  # in the run folder: how many threads its first call chose
BANK_ANSWER_TOKENS = 24  # the bank's questions have short answers

if TYPE_CHECKING:
    from pandas import DataFrame

    from probes_store.bundle import Bundle
    from probes_store.manifest import SiteName
    from probes_store.store import Store
    from service.data.options import TrainingLabels
    from service.engines.base import Engine as LoadedEngine
    from service.engines.base import EngineOptions
    from service.fitting.estimator import DepthMeanProbe
    from service.library.detector import Prompts
    from service.prompts import PromptFormat
    from service.trainer.options import Console, TrainOptions


@dataclass(frozen=True)
class SignalFigures:
    """How well one signal tells hallucinated answers, on rows that its fits did not see; a rival,
    or the bundle's."""

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
        row = self.own
        figures = (
            "not evaluated"
            if row is None
            else f"AUROC {row.auroc:.3f} [{row.low:.3f}, {row.high:.3f}]"
        )
        return f"<Trained: {self.reference}, {figures}; {self.folder}>"

    @property
    def reference(self) -> str:
        """Return NAME:VERSION."""
        return self.bundle.reference

    @property
    def folder(self) -> Path:
        """Return the folder of the bundle's files."""
        return self.bundle.path

    @property
    def card(self) -> str:
        """Return the model card, Markdown."""
        from service.trainer.cards import card_of

        return card_of(self.bundle)

    @property
    def own(self) -> SignalFigures | None:
        """Return the figures of the bundle's own risk; None without ``evaluate``."""
        return next((row for row in self.figures if row.own), None)

    def to_frame(self) -> DataFrame:
        """Return the figures, a row for each signal.  Needs pandas."""
        return frame([vars(row) for row in self.figures])


@dataclass
class Lines:
    """A trainer's console that hands each line on."""

    report: Report

    def print(self, *objects: Any) -> None:
        """Report one line."""
        self.report(" ".join(map(str, objects)))


def train(
    rows: str | Path | Iterable[Mapping[str, Any]] | None = None,
    name: str = "",
    model: str | Path | None = None,
    *,
    labels: TrainingLabels | None = None,
    store: str | Path = DEFAULT_STORE,
    run_dir: str | Path | None = None,
    engine: Engine | None = None,
    report: Report = note,
    probe: DepthMeanProbe | None = None,
    **options: Any,
) -> Trained:
    """Train a bundle on your own model and publish it; the same call resumes a run that was
    interrupted.

    Args:
        rows: A JSONL file, a .txt file with a question a line, or the rows themselves: ``prompt``
            or ``messages``, ``label`` (1 factual, 0 hallucinated) or ``answers`` (neither is needed
            with labels "self"), and where several rows share a question or an entity their
            ``group``.  None: the questions that come with the package.
        name, model: Name of the bundle, by default made of the model's; the model as of ``load``.
        labels: "given": each row's label.  "generate": the model answers and a judge compares with
            ``answers``.  "self": no judge and no accepted answers, the share of sampled answers
            that agree with the greedy one.  None: given, or generate without rows.
        store, run_dir: Folder or URL that the bundle is published in; folder of activations and
            progress (runs/NAME, or runs/NAME-2 and so on where a finished run that read something
            else has that).
        engine, report: How the model is loaded; what takes the lines of progress (None: standard
            error).
        probe: What ``publish`` publishes; None: fitted on the rows.
        options: Any other field of ``service.trainer.options.TrainOptions``, such as ``test``,
            ``judge``, ``seeds``, ``folds``, ``c``, ``readout``, ``evaluate`` or ``forms``; as of
            ``hallutracer train``, except that ``seeds`` may also be the seeds themselves, and
            ``forms`` several names.

    Raises DataError (rows at fault, by line number), TrainingError (an invalid option, no signal),
    RunMismatch (the run folder is another run's), and TypeError for an option that does not exist.

    >>> import tempfile
    >>> import hallutracer as ht
    >>> from service.demo.questions import questions
    >>> rows = [  # the demo model mostly knows what it has read often; check the labels of yours
    ...     {"prompt": row["prompt"], "label": int(row["exposures"] > 4), "group": row["group"]}
    ...     for row in questions("train")[::15]
    ... ]
    >>> folder = tempfile.mkdtemp()
    >>> trained = ht.train(  # one seed, three folds and a given C: quick, without intervals
    ...     rows, "mine", "demo", store=folder, run_dir=f"{folder}/run",
    ...     report=lambda line: None, seeds=(0,), folds=3, c=0.1, jobs=1,
    ... )
    >>> trained.reference, trained.own.signal
    ('mine:1', 'depth_mean_unit_norm')
    >>> trained.own.low < trained.own.auroc < trained.own.high
    True"""
    from service.trainer.options import TrainOptions

    named = None if model is None else str(model)
    folder = Path(run_dir) if run_dir is not None else Path("runs") / (name or bundle_name(named))
    if not isinstance(options.get("forms", ""), str):
        options["forms"] = ",".join(options["forms"]) or "none"
    if isinstance(arguments := options.get("chat_template_kwargs"), Mapping):
        options["chat_template_kwargs"] = json.dumps(arguments)
    options |= {
        key: Path(value)
        for key, value in options.items()
        if key in ("test", "calibration") and value
    }
    data = () if rows is None else (str(rows_file(rows, folder)),)
    wanted = TrainOptions(
        name=name, data=data, labels=labels, run_dir=None if run_dir is None else folder, **options
    )
    chosen = engine or Engine()
    return run_training(
        completed(wanted, named),
        chosen.options(named),
        open_store(store),
        threads=chosen.threads,
        console=Lines(report),
        report=report,
        probe=probe,
    )


def publish(
    probe: DepthMeanProbe,
    rows: str | Path | Iterable[Mapping[str, Any]],
    name: str,
    model: str | Path | None = None,
    **options: Any,
) -> Trained:
    """Publish a fitted ``DepthMeanProbe`` as a bundle: ``train``, without fitting it again.

    Args:
        probe: Fitted on the activations (``extract``) of the labelled rows, in their order, with
            their groups.
        rows: Its rows, as ``train`` takes them.
        name, model: As of ``train``.
        options: Any other of ``train``; folds, seeds, penalty and readout are the probe's.

    Raises TrainingError where the model reads other activations at these rows.

    >>> import tempfile
    >>> import hallutracer as ht
    >>> from service.demo.questions import questions
    >>> asked = questions("train")[::15]
    >>> rows = [
    ...     {"prompt": row["prompt"], "label": int(row["exposures"] > 4), "group": row["group"]}
    ...     for row in asked
    ... ]
    >>> x = ht.extract([row["prompt"] for row in rows], "demo")
    >>> y, groups = [row["label"] for row in rows], [row["group"] for row in rows]
    >>> probe = ht.DepthMeanProbe(0.1, folds=3, seeds=(0,)).fit(x, y, groups=groups)
    >>> folder = tempfile.mkdtemp()
    >>> made = ht.publish(
    ...     probe, rows, "mine", "demo", evaluate=False, store=folder, run_dir=f"{folder}/run",
    ...     report=lambda line: None,
    ... )
    >>> fitted = probe.probes_.direction.astype("float32")
    >>> made.reference, bool((made.bundle.probes.direction == fitted).all())
    ('mine:1', True)"""
    fitted: dict[str, Any] = {
        "c": None if probe.C == "auto" else probe.C,
        "c_grid": probe.c_grid,
        "logit_scale": probe.logit_scale,
        "class_balance": probe.class_balance,
        "folds": probe.folds,
        "inner_folds": probe.inner_folds,
        "seeds": probe.seeds,
        "readout": "attention_head" if len(probe.shape_) == 3 else "residual_stream",
    }
    return train(rows, name, model, probe=probe, **fitted, **options)


def extract(
    prompts: Prompts,
    model: str | Path | None = None,
    *,
    site: SiteName = "attention_head",
    engine: Engine | None = None,
    report: Report = note,
) -> NDArray[np.float32]:
    """Return the activations that a probe reads, at each prompt's last token, before the answer.

    Args:
        prompts, model, engine, report: As of ``Detector.score`` and ``load``.
        site: "attention_head": [n, layers, heads, d], "residual_stream": [n, layers, d].

    Raises RequestError for another site or a prompt that is empty or too long, and ModelLoadError.

    >>> import hallutracer as ht
    >>> ht.extract(["What is the capital of Italy?", "What is the capital of Palau?"], "demo").shape
    (2, 8, 4, 32)"""
    from service.data.collection import batches
    from service.data.options import BATCH_ROWS
    from service.prompts import default_prompt_format, render
    from service.readout import Site

    if site not in list(Site):
        raise RequestError(f"site is {site!r}; it must be {' or '.join(Site)}", param="site")
    where, chosen = Site(site), engine or Engine()
    options = chosen.options(None if model is None else str(model))
    with closing(
        load_engine(options, rows=[where], threads=chosen.threads, report=report)
    ) as loaded:
        prompt_format = default_prompt_format(loaded)
        ids = [
            render(loaded, *text_or_messages(prompt), prompt_format)
            for prompt in as_prompts(prompts)
        ]
        geometry = loaded.identity.geometry
        activations = np.empty((len(ids), geometry.num_layers, geometry.width(where)), np.float32)
        for batch in batches(
            np.array([len(prompt) for prompt in ids]), BATCH_ROWS
        ):  # as ``train`` reads them
            activations[batch] = loaded.extract([ids[row] for row in batch], [where]).activations[
                where
            ]
    return geometry.by_head(activations, where) if where is Site.ATTENTION_HEAD else activations


def run_training(
    options: TrainOptions,
    engine: EngineOptions,
    store: Store,
    *,
    threads: int | None,
    console: Console,
    report: Report = note,
    probe: DepthMeanProbe | None = None,
) -> Trained:
    """Return what a run made, for the command line and ``train``: from checked options to the
    published bundle."""
    from service.trainer.run import train as run

    folders = [options.folder]
    engine = replace(engine, template_arguments=options.template_arguments)
    chooses = threads is None and engine.engine == "transformers"
    if chooses and "OMP_NUM_THREADS" not in os.environ:
        threads = _threads_of(options.folder, report)
    began = time.monotonic()

    def load() -> LoadedEngine:
        loaded = load_engine(engine, rows=[options.site], threads=threads, report=report)
        if chooses and threads is not None:
            record = json.dumps({"threads": threads}) + "\n"
            atomic_write(options.folder / THREADS, record.encode())
        return loaded

    if not options.data:
        loaded = load()
        try:
            options = with_questions(options, loaded, console, began)
        except BaseException:
            loaded.close()
            raise
        load = partial(_given, loaded)
    bundle = run(
        options, load, store, console=console, probe=probe, began_in=folders.append, measure=True
    )
    return Trained(bundle, folders[-1], store.where, figures_of(bundle.evaluation()))


def _threads_of(folder: Path, report: Report) -> int:
    """Return the number of threads that reads every row of a run: what its first call measured to
    be fastest.

    The last bits of a reading depend on it, and so does the bundle's digest."""
    try:
        threads = json.loads((folder / THREADS).read_text(encoding="utf-8"))["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        threads = None
    if isinstance(threads, int) and threads >= 1:
        return threads
    from joblib import cpu_count

    from service.engines.transformers.threads import threads_that_pay

    most = cpu_count()
    threads = threads_that_pay(most)
    if threads < most:
        report(
            f"the model runs on {threads} of {most} CPU threads, which is fastest now, in"
            f" the whole run; --threads N sets another number"
        )
    return threads


def _given(loaded: LoadedEngine) -> LoadedEngine:
    return loaded


def with_questions(
    options: TrainOptions, engine: LoadedEngine, console: Console, began: float
) -> TrainOptions:
    """Return the options with the bank's questions as rows, and its held-out half in proportion,
    written into the run folder.

    With ``options.minutes`` they are as many as a trial says can be asked in these.  The number is
    kept in the run folder, so that the same command resumes the same run.  Questions that are too
    long for the model are left out.  Raises TrainingError if the minutes are too few."""
    from service.data.training_rows import read_dataset
    from service.prompts import default_prompt_format
    from service.trainer.trial import questions_within
    from service.trainer.volume import SAMPLED

    named = options.prompt_format
    prompt_format = default_prompt_format(engine) if named == "auto" else named
    if options.minutes is None:
        return _of_the_bank(options, engine, prompt_format, console)
    asked_for = {"minutes": options.minutes, "model": engine.identity.fingerprint}
    if (questions := _kept_questions(options.folder, asked_for)) is None:
        whole = bank_rows("train")
        few = _readable(whole[:SAMPLED], options, engine, prompt_format)
        questions = questions_within(
            options.minutes,
            options,
            read_dataset(rows_file(few, options.folder, "trial"), options.answers, folds=None),
            len(whole),
            _held_out_of,
            engine,
            prompt_format,
            console,
            began=began,
        )
        record = asked_for | {"questions": questions}
        atomic_write(options.folder / MINUTES, (json.dumps(record) + "\n").encode())
    return _of_the_bank(replace(options, questions=questions), engine, prompt_format, console)


def _kept_questions(folder: Path, asked_for: Mapping[str, Any]) -> int | None:
    """Return the number of questions that an earlier call chose for the same minutes and model;
    None if there was none."""
    try:
        record = json.loads((folder / MINUTES).read_text(encoding="utf-8"))
        questions = int(record.pop("questions"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return questions if record == asked_for else None


def figures_of(evaluation: Mapping[str, Any]) -> tuple[SignalFigures, ...]:
    """Return the figures of a bundle's evaluation.json; () where it was trained without an
    evaluation."""
    from service.trainer.cards import SIGNALS

    crossed = evaluation.get("cross_validation")
    if crossed is None:
        return ()
    served = evaluation["signal_of_the_bundle"]
    return tuple(
        SignalFigures(
            signal=name,
            title=SIGNALS[name],
            own=name == served,
            auroc=row["auroc"]["mean"],
            low=row["auroc"]["low"],
            high=row["auroc"]["high"],
            ece=row["ece"]["mean"],
            brier=row["brier"]["mean"],
        )
        for name, row in crossed["signals"].items()
    )


def completed(options: TrainOptions, model: str | None) -> TrainOptions:
    """Return the options with what a newcomer leaves open: a name made of the model's, and how the
    bank's questions are answered, where there are no ``data``.

    Raises TrainingError for given labels without rows that have them, for ``questions`` or
    ``minutes`` beside rows of one's own, and for both of them."""
    options = replace(options, name=options.name or bundle_name(model))
    if options.questions is not None and options.minutes is not None:
        raise TrainingError(
            "minutes chooses how many questions are asked, and so does questions: give one of them",
            param="minutes",
        )
    if options.data:
        for param in ("questions", "minutes"):
            if getattr(options, param) is not None:
                raise TrainingError(
                    f"{param} counts questions that come with the package, which are asked without"
                    " --data",
                    param=param,
                )
        return options
    if options.labels == "given":
        raise TrainingError(
            "name the file of the rows that have the labels, such as rows.jsonl; without one the "
            "model answers questions that come with the package",
            param="data",
        )
    return replace(
        options,
        labels=options.labels or "generate",
        max_new_tokens=options.max_new_tokens or BANK_ANSWER_TOKENS,
    )


def _of_the_bank(
    options: TrainOptions, engine: LoadedEngine, prompt_format: PromptFormat, console: Console
) -> TrainOptions:
    questions = bank_rows("train")[: options.questions]
    held_out = bank_rows("held-out")[: _held_out_of(len(questions))]
    asked, tested = (
        _readable(rows, options, engine, prompt_format) for rows in (questions, held_out)
    )
    if too_long := len(questions) - len(asked):
        console.print(
            f"left out: {too_long:,} of the package's {len(questions):,} questions, which with an"
            f" answer are longer than the model's {engine.identity.max_tokens} tokens"
        )
    return replace(
        options,
        data=(str(rows_file(asked, options.folder, "questions")),),
        test=options.test or rows_file(tested, options.folder, "held-out"),
    )


def _readable(
    rows: Sequence[Mapping[str, Any]],
    options: TrainOptions,
    engine: LoadedEngine,
    prompt_format: PromptFormat,
) -> list[Mapping[str, Any]]:
    """Return the rows whose prompt leaves room for an answer."""
    from service.prompts import render

    most = engine.identity.max_tokens - options.answer_tokens
    return [row for row in rows if len(render(engine, row["prompt"], None, prompt_format)) <= most]


def _held_out_of(questions: int) -> int:
    """Return how many held-out questions belong to so many questions: in proportion, but enough
    for the sample that the bundle carries."""
    from service.trainer.training_set import SAMPLE_SIZE

    train, held_out = len(bank_rows("train")), len(bank_rows("held-out"))
    return max(SAMPLE_SIZE, held_out * questions // train)


def bundle_name(model: str | None) -> str:
    """Return the name of a bundle for a model that is named so; a model with a shipped bundle gets
    a name beside it."""
    model = model or default_model()
    stem = model if model in SHIPPED else Path(os.path.abspath(os.path.expanduser(model))).name
    plain = re.sub(r"[^a-z0-9._]+", "-", re.sub(r"\.\.+", ".", stem.lower().removesuffix(".gguf")))
    name = plain.strip("-._")[:64] or "bundle"
    shipped = {own for names in (*SHIPPED.values(), *FILES.values()) for own in names}
    return f"my-{name}"[:64] if name in shipped else name


def rows_file(
    rows: str | Path | Iterable[Mapping[str, Any]], folder: Path, stem: str = "rows"
) -> Path:
    """Return the file of the rows: the one that is named, or one that is written into the run
    folder."""
    if isinstance(rows, str | Path):
        return Path(os.path.expanduser(rows))
    lines = [
        json.dumps(_without_gaps(row), ensure_ascii=False, default=_plain) + "\n" for row in rows
    ]
    text = "".join(lines).encode("utf-8", "surrogatepass")
    folder.mkdir(parents=True, exist_ok=True)
    names = chain([f"{stem}.jsonl"], (f"{stem}-{number}.jsonl" for number in count(2)))
    for path in map(folder.joinpath, names):
        if not path.exists():
            path.write_bytes(text)
        if path.read_bytes() == text:  # rows of an earlier run stay as they are
            return path
    raise AssertionError


def _without_gaps(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without None and NaN, which a DataFrame has where there was nothing."""
    gaps = {
        key
        for key, value in row.items()
        if value is None or (isinstance(value, float) and math.isnan(value))
    }
    return {key: value for key, value in row.items() if key not in gaps}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Sequence | set):
        return list(value)
    raise TypeError(f"a row holds {type(value).__name__}, which JSON has no form for")
