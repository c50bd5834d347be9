"""Declares the options of training, guarantee and recalibration as dataclasses for the library and
the commands."""

import json
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, TypeVar, cast

from cyclopts import Group, Parameter

from probes_store.manifest import Signal, SiteName, TrainingRecord
from probes_store.records import GREEDY, Decoding, TemplateArgument, template_arguments
from service.data.options import (
    BATCH_ROWS,
    DRY_RUN,
    PYTHON,
    BatchRows,
    Data,
    JudgeName,
    JudgeOptions,
    LabelOptions,
    Labels,
    LabelSource,
    Questions,
    RunDir,
    Seed,
    TrainingLabels,
    outside_training,
)
from service.data.rows import DECODINGS, decoding_of
from service.errors import HalluTracerError, TrainingError
from service.fitting import C_GRID, DEPTH_MEAN, FIRST_TOKEN, ClassBalance, LogitScale
from service.readout import Site
from service.settings import DATABASE, Range, option, section

if TYPE_CHECKING:
    from service.fitting.estimator import DepthMeanProbe
    from service.fitting.thresholds import GateRule

FIELDS = (
    "prompt",
    "messages",
    "answers",
    "answer",
    "label",
    "group",
    "id",
    "kind",
    "applies",
    "decoding",
)
LEAST_ROWS = 40  # with fewer rows a signal cannot be recognised
MIXTURE = "mixture"  # all forms of conversation, by weight, and requests that ask for no fact
SIGNALS: dict[str, tuple[Signal, ...]] = {
    "depth_mean": (DEPTH_MEAN,),
    "depth_mean,first_token": (DEPTH_MEAN, *FIRST_TOKEN),
}
_FITS, _GUARANTEE = Group("Fits and folds", sort_key=40), Group("Guarantee", sort_key=36)
_RECALIBRATION = Group("Recalibration", sort_key=6)
Options = TypeVar("Options")


def made_of(kind: type[Options], *sources: object, **changes: Any) -> Options:
    """Return options of ``kind`` with the fields that it shares with ``sources``, and with
    ``changes``."""
    names = [declared.name for declared in fields(kind)]  # type: ignore[arg-type]
    shared = {
        name: getattr(source, name) for source in sources for name in names if hasattr(source, name)
    }
    return kind(**shared | changes)


def other_decoding(decodings: Collection[Decoding | None], expected: Decoding) -> Decoding | None:
    """Return a known decoding that differs from ``expected``; None if there is none."""
    return next(
        (known for known in decodings if known is not None and not known.same(expected)), None
    )


class Console(Protocol):
    """Where progress is printed, such as a ``rich.console.Console``."""

    def print(self, *objects: Any) -> None:
        """Print a line."""


@section("Fits and folds", 40)
@dataclass(frozen=True, kw_only=True)
class FoldOptions:
    """How probes are fitted and cross-validated."""

    # Python code may also pass a tuple of seeds.
    seeds: Annotated[
        int, option("Shuffles of the folds: seeds 0 .. K-1.", limits=Range(1, 100), group=_FITS)
    ] = 3
    folds: Annotated[
        int, option("Group-disjoint stratified folds.", limits=Range(2), group=_FITS)
    ] = 5
    c: Annotated[
        float | None,
        option(
            "Inverse strength of the probes' regularisation.  Default: chosen by inner grouped"
            " cross-validation.",
            limits=Range(positive=True),
            group=_FITS,
        ),
    ] = None
    jobs: Annotated[
        int, option("Processes for the probe fits; 0: all cores.", limits=Range(0), group=_FITS)
    ] = 0
    batch_rows: Annotated[BatchRows, Parameter(group=_FITS)] = (
        BATCH_ROWS  # part of the run's identity, since padding changes rounding
    )

    @property
    def shuffles(self) -> tuple[int, ...]:
        """Return the seeds, one for each shuffle of the folds."""
        seeds = cast("int | tuple[int, ...]", self.seeds)
        return tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)


@dataclass(frozen=True, kw_only=True)
class RowsOptions(JudgeOptions, LabelOptions):
    """The rows of a run, and its folder."""

    data: Data = ()
    labels: LabelSource = None
    run_dir: RunDir = None
    columns: Annotated[
        str,
        option(
            "What your files call the fields of a row: FIELD=YOURS with commas, such as "
            "prompt=question,answers=answer.",
            metavar="NAMES",
        ),
    ] = ""

    def check(self) -> None:
        """Raise TrainingError for an invalid value."""
        super().check()
        _ = self.names

    @property
    def names(self) -> dict[str, str]:
        """Return the files' name of each renamed field.  Raises TrainingError for text that is not
        FIELD=YOURS."""
        pairs = [part.strip().partition("=") for part in self.columns.split(",") if part.strip()]
        wrong = [field for field, _, column in pairs if field not in FIELDS or not column]
        if wrong:
            raise TrainingError(
                f"columns: FIELD=YOURS is expected, where FIELD is one of {', '.join(FIELDS)}, and"
                f" not {wrong[0]!r}",
                param="columns",
            )
        return {field: column for field, _, column in pairs}

    @property
    def file(self) -> Path:
        """Return the file of the rows.  Raises TrainingError unless there is exactly one."""
        if len(self.data) != 1:
            raise TrainingError("name one file of rows, such as rows.jsonl", param="data")
        return Path(self.data[0])

    @property
    def answers(self) -> TrainingLabels:
        """Return where the labels come from: the rows, or greedy answers of the model, which a
        judge or the model's own sampled answers label."""
        return self.labels or "given"

    @property
    def generates(self) -> bool:
        """Return whether the model answers the rows."""
        return self.answers != "given"


@dataclass(frozen=True, kw_only=True)
class ConfidenceOptions(RowsOptions):
    """The limit that a guaranteed threshold keeps, and the confidence."""

    alpha: Annotated[
        str,
        option(
            "Largest share of hallucinations among the answered question groups, counted equally;"
            " several with commas, of which the first that a threshold qualifies for is served.",
            group=_GUARANTEE,
        ),
    ] = "0.1"
    delta: Annotated[
        float,
        option(
            "Probability of calibration rows that mislead, split evenly among the alphas.",
            limits=Range(1e-9, 0.5),
            group=_GUARANTEE,
        ),
    ] = 0.05
    publish_closed: Annotated[
        bool,
        option(
            "Where no threshold qualifies, publish a gate that answers nothing.", group=_GUARANTEE
        ),
    ] = False

    def check(self) -> None:
        """Raise TrainingError for an invalid value, such as an ``alpha`` that is no share."""
        super().check()
        try:
            alphas = self.alphas
        except ValueError:
            alphas = ()
        if (
            not alphas
            or not all(0 < alpha < 1 for alpha in alphas)
            or len(set(alphas)) < len(alphas)
        ):
            raise TrainingError(
                f"alpha must be one or more distinct numbers between 0 and 1, not {self.alpha!r}",
                param="alpha",
            )

    @property
    def alphas(self) -> tuple[float, ...]:
        """Return the numbers of ``alpha``."""
        return tuple(float(part) for part in self.alpha.split(","))


@section("New rows", 5)
@dataclass(frozen=True, kw_only=True)
class NewRowsOptions(RowsOptions):
    """Options of commands that publish a bundle's next version from rows that it has never seen."""

    new_name: Annotated[
        str | None,
        option("Name to publish under.  Default: the bundle's own, as its next version."),
    ] = None
    trained_on: Annotated[
        tuple[str, ...],
        option(
            "The bundle's own training and held-out files, repeatable: for bundles that do not"
            " record which rows they have seen."
        ),
        Parameter(metavar="FILE"),
    ] = ()
    seed: Seed = 0
    dry_run: Annotated[bool, DRY_RUN] = False
    batch_rows: BatchRows = BATCH_ROWS

    def check(self) -> None:
        """Raise TrainingError for an invalid value, and for an option of training."""
        super().check()
        _ = self.file
        outside_training(self.labels)
        if self.prompt_format != "auto":
            raise TrainingError(
                "prompt_format is that of the bundle's training rows", param="prompt_format"
            )

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return self.run_dir or Path("runs") / (self.new_name or "")

    def of(self, name: str, training: TrainingRecord) -> Self:
        """Return the options, completed from the training record of the bundle ``name``.

        Raises TrainingError if they need a judge that the record does not describe completely."""
        as_trained: Labels = "given" if training.labels == "self" else training.labels
        filled = replace(self, labels=self.labels or as_trained, new_name=self.new_name or name)
        if self.judge is not None:
            return filled
        described, _, pattern = (training.judge or "contains").partition(" of ")
        kind = described.partition(":")[0]
        if kind != "openai":
            filled = replace(filled, judge=cast(JudgeName, kind), answer_pattern=pattern)
        if filled.labels == "generate" and training.judge not in (None, filled.judged_by):
            raise TrainingError(
                f"the answers were judged by {training.judge!r}: name the judge", param="judge"
            )
        return filled


@section("New rows", 5)
@dataclass(frozen=True, kw_only=True)
class GuaranteeOptions(ConfidenceOptions, NewRowsOptions):
    """One guarantee for a threshold of a published bundle."""

    recheck: Annotated[
        bool,
        option(
            "Of answers that a policy with recheck gives: below the threshold, and not flagged by"
            " their own tokens.  Needs a bundle with probes of answers, and rows whose answers are"
            " generated or given.",
            group=_GUARANTEE,
        ),
    ] = False


@section("New rows", 5)
@dataclass(frozen=True, kw_only=True)
class RecalibrateOptions(NewRowsOptions):
    """One recalibration of a published bundle for another base rate; ``data`` are drawn at random
    from the traffic."""

    feedback: Annotated[
        str,
        option(
            "Instead of --data and --traffic: what a service kept with --feedback-db, the same file"
            " or URL.  Loads no model.",
            metavar=DATABASE,
            group=_RECALIBRATION,
        ),
    ] = ""
    traffic: Annotated[
        Path | None,
        option(
            "Unlabelled JSONL of the same traffic: risks as 'hallutracer score --output' writes"
            " them, or prompts to be scored.",
            group=_RECALIBRATION,
        ),
    ] = None
    threshold_rule: Annotated[
        Literal["map", "keep"],
        option(
            "map: the threshold is carried along, so that the same prompts are flagged.  keep: the"
            " same number on the new scale, right for a threshold by --wrong-costs: what a wrong"
            " answer costs has not changed, and the new risk is a probability of your traffic.",
            group=_RECALIBRATION,
        ),
    ] = "map"
    allow_other_shift: Annotated[
        bool,
        option(
            "Use the traffic although prior shift alone does not explain it, or although nobody can"
            " tell.",
            group=_RECALIBRATION,
        ),
    ] = False

    def check(self) -> None:
        """Raise TrainingError for an invalid value, and for rows beside feedback."""
        if not self.feedback:
            super().check()
        for name in ("data", "traffic", "labels"):
            if self.feedback and getattr(self, name):
                raise TrainingError(
                    "--feedback brings rows, labels and traffic of its own", param=name
                )


@section("Training", 5)
@dataclass(frozen=True, kw_only=True)
class TrainOptions(FoldOptions, ConfidenceOptions):
    """One training run."""

    name: Annotated[
        str, option("Name of the bundle.  Default: made of the model's.", group="Parameters")
    ] = ""
    questions: Questions = None
    minutes: Annotated[
        float | None,
        option(
            "Instead of --questions: as many of them as this machine reads, answers and fits in so"
            " many minutes, by a trial of about half a minute.",
            limits=Range(positive=True),
        ),
    ] = None
    test: Annotated[
        Path | None,
        option("Held-out rows, scored with the final bundle and used for nothing else."),
    ] = None
    labels: LabelSource = None
    answers_decoding: Annotated[
        str | None,
        option(
            f"How the answers were decoded that given labels are about: {DECODINGS}.  The bundle"
            " records it, and requests that name no temperature are decoded so.  Default: what the"
            " rows' own field 'decoding' says, if all say the same.",
            metavar="DECODING",
        ),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        option(
            "What the chat template is given besides messages and tools, as JSON, such as "
            "'{\"enable_thinking\": false}'.  The bundle records it, and is served so.",
            metavar="JSON",
        ),
    ] = None
    forms: Annotated[
        str | None,
        option(
            "Forms of conversation that questions are asked in.  mixture: all, by weight, a quarter"
            " of the questions in three more wordings each, a sixth among others, as follow-ups or"
            " inside a task, and requests that ask for no fact. "
            " none: as they are.  Else families or names of 'hallutracer data forms', with commas. "
            " Default: mixture; none with given labels, which belong to the prompts as they are.",
            metavar="NAMES",
        ),
    ] = None
    readout: Annotated[SiteName, option("attention_head is the paper's default.")] = (
        "attention_head"  # where a_l is taken (Eq. readout)
    )
    logit_scale: Annotated[
        LogitScale | None,
        option(
            "unit_norm is the paper's rule; standardized divides each layer's logit by its"
            " within-class deviation; joint fits the directions of all layers together, which reads"
            " less of a question's wording.  Default: joint where questions are asked in the"
            " mixture of forms, else unit_norm."
        ),
    ] = None
    signals: Annotated[str, option("depth_mean, or depth_mean,first_token.")] = "depth_mean"
    class_balance: Annotated[ClassBalance, option("In the probe fit only.")] = "weights"
    wrong_costs: Annotated[
        float | None,
        option(
            "K: a wrong answer costs as much as K withheld right ones, and the threshold is 1 / (1"
            " + K).  Default: 1, answer what is more likely right than wrong.",
            limits=Range(positive=True),
        ),
    ] = None
    target: Annotated[
        str | None,
        option(
            'Instead of --wrong-costs, by out-of-fold risks: "wrong<=0.2" is the largest threshold'
            " with at most this share of wrong among the answered (20 rows or more),"
            ' "answered>=0.5" the smallest that answers this share.  Out of reach: the closest'
            " threshold is published, and run and card say so.",
            metavar="TARGET",
        ),
    ] = None
    keep_sample: Annotated[
        bool,
        option(
            "Keep up to 48 questions with their accepted answers in the bundle, for 'hallutracer"
            " try' and the playground: of --test, else of rows that then leave training (5 % at"
            " most).  --no-sample where your questions are private."
        ),
        Parameter(negative="--no-sample"),
    ] = True
    answer_probes: Annotated[
        bool,
        option(
            "Also fit probes on answers' own tokens, for the risk of a finished answer: of those"
            " that --labels generate has, or that rows with a label bring as 'answer' (transformers"
            " engine)."
        ),
    ] = True
    evaluate: Annotated[
        bool,
        option(
            "Nested cross-validation for the model card; without it the card reports no"
            " performance."
        ),
    ] = True
    allow_no_signal: Annotated[
        bool,
        option(
            "Publish although the nested AUROC's interval reaches chance, as it does on labels"
            " drawn by a coin."
        ),
    ] = False
    allow_few: Annotated[
        bool, option(f"Train although fewer than {LEAST_ROWS} rows ask for a fact.")
    ] = False
    calibration: Annotated[
        Path | None,
        option(
            "Further rows, in groups of their own: the last step publishes a second version with a"
            " threshold that is guaranteed on them, as 'hallutracer guarantee' does."
        ),
    ] = None
    sites: Annotated[tuple[Site, ...], PYTHON] = ()  # further sites to collect in the same pass
    inner_folds: Annotated[int, Parameter(parse=False, validator=Range(2))] = (
        3  # inside a training partition
    )
    c_grid: Annotated[tuple[float, ...], Parameter(parse=False, validator=Range(positive=True))] = (
        C_GRID
    )

    def check(self) -> None:
        """Raise TrainingError for an invalid value; nothing is loaded before."""
        super().check()
        seeds = self.shuffles
        checks = (
            (self.signals in SIGNALS, "signals", f"one of {', '.join(map(repr, SIGNALS))}"),
            (len(set(seeds)) == len(seeds) > 0, "seeds", "one or more distinct seeds"),
            (all(0 <= seed < 2**32 for seed in seeds), "seeds", "numbers from 0 to 2**32 - 1"),
            (len(self.c_grid) > 0, "c_grid", "one or more numbers"),
            (
                self.answers != "self" or self.class_balance == "weights",
                "class_balance",
                "'weights' with --labels self, whose rows have a part in both classes",
            ),
        )
        for fine, field, expected in checks:
            if not fine:
                raise TrainingError(
                    f"{field} must be {expected}, not {getattr(self, field)!r}", param=field
                )
        if self.answers == "self" and self.calibration is not None:
            raise TrainingError(
                "a guaranteed threshold needs labelled rows, and --labels self has none: train"
                " first, then hallutracer guarantee",
                param="calibration",
            )
        _ = self.rule, self.template_arguments
        self.decoding(())
        if self.forms is not None and not self.forms.strip(" ,"):
            raise TrainingError(
                "forms is empty: none, mixture, or names of forms with commas", param="forms"
            )
        if self.forms is None or self.wanted_forms == ():
            return
        if self.answers == "given":
            raise TrainingError(
                "given labels belong to the prompts as they are: forms must be none, or let the"
                " labels be generated (--labels generate)",
                param="forms",
            )
        from service.data.forms import chosen

        try:
            chosen(() if self.wanted_forms == (MIXTURE,) else self.wanted_forms)
        except HalluTracerError as error:
            raise TrainingError(
                f"forms: {error.message}; or {MIXTURE} or none alone", param="forms"
            ) from None

    @property
    def folder(self) -> Path:
        """Return the run folder: readouts, answers and the progress journal."""
        return self.run_dir or Path("runs") / self.name

    @property
    def template_arguments(self) -> dict[str, TemplateArgument] | None:
        """Return the chat template's further arguments, or None.  Raises TrainingError."""
        if self.chat_template_kwargs is None:
            return None
        try:
            return template_arguments(json.loads(self.chat_template_kwargs)) or None
        except ValueError as error:
            raise TrainingError(
                f"chat_template_kwargs: {error}", param="chat_template_kwargs"
            ) from None

    @property
    def guarantee(self) -> GuaranteeOptions | None:
        """Return the options of the last step, or None without it; its rows get labels as those of
        training do."""
        if self.calibration is None:
            return None
        rows = {"data": (str(self.calibration),), "labels": self.answers, "run_dir": self.folder}
        return made_of(GuaranteeOptions, self, prompt_format="auto", **rows)

    @property
    def wanted_forms(self) -> tuple[str, ...]:
        """Return names of the forms, or the mixture: the default if labels are generated."""
        if self.forms is None:
            return (MIXTURE,) if self.generates else ()
        names = tuple(part.strip() for part in self.forms.split(",") if part.strip())
        return () if names == ("none",) else names

    @property
    def scale(self) -> LogitScale:
        """Return the scale of each layer's logit."""
        return self.logit_scale or ("joint" if self.wanted_forms == (MIXTURE,) else "unit_norm")

    @property
    def site(self) -> Site:
        """Return the readout's site."""
        return Site(self.readout)

    @property
    def reads(self) -> tuple[Signal, ...]:
        """Return the signals that the classifier reads, by the manifest's names."""
        return SIGNALS[self.signals]

    def decoding(self, of_rows: Collection[Decoding | None]) -> Decoding | None:
        """Return how the labelled answers were decoded; None if it is unknown.

        ``of_rows`` are the decodings that the rows state.  Raises TrainingError if they differ from
        the options."""
        stated = None if self.answers_decoding is None else decoding_of(self.answers_decoding)
        if self.answers_decoding is not None and stated is None:
            raise TrainingError(
                f"answers_decoding must be {DECODINGS}, not {self.answers_decoding!r}",
                param="answers_decoding",
            )
        if self.generates:
            if stated not in (None, GREEDY):
                raise TrainingError(
                    "generated labels are of greedy answers: answers_decoding belongs to given"
                    " ones",
                    param="answers_decoding",
                )
            return GREEDY
        if stated is None:
            return next(iter(of_rows)) if len(of_rows) == 1 else None
        if differing := other_decoding(of_rows, stated):
            raise TrainingError(
                f"answers_decoding says that the answers are {stated}, and rows of {self.file.name}"
                f" say {differing}: correct one of them",
                param="answers_decoding",
            )
        return stated

    @property
    def rule(self) -> "GateRule":
        """Return the threshold's rule.  Raises TrainingError for two rules or an invalid one."""
        from service.fitting.thresholds import Target, WrongCosts

        if self.target is None:
            return WrongCosts() if self.wrong_costs is None else WrongCosts(self.wrong_costs)
        if self.wrong_costs is not None:
            raise TrainingError(
                "target and wrong_costs exclude each other: give one of them", param="target"
            )
        return Target.parse(self.target)

    @property
    def probe(self) -> "DepthMeanProbe":
        """Return the estimator to fit; it uses ``jobs`` processes, by default one for each
        available core."""
        from joblib import cpu_count

        from service.fitting.estimator import DepthMeanProbe

        return DepthMeanProbe(
            "auto" if self.c is None else self.c,
            c_grid=self.c_grid,
            logit_scale=self.scale,
            class_balance=self.class_balance,
            folds=self.folds,
            inner_folds=self.inner_folds,
            seeds=self.shuffles,
            n_jobs=int(self.jobs or cpu_count()),
        )
