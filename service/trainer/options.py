"""The options of a training run, and of a calibration."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

from joblib import cpu_count

from probes_store.manifest import Signal
from service.data.forms.registry import chosen
from service.data.options import ABSTAIN, BATCH_ROWS, JudgeName, JudgeOptions, Labels, TrainingLabels
from service.data.sampled_answers import SampleOptions
from service.errors import HalluTracerError, TrainingError
from service.fitting.calibration import FitOptions
from service.fitting.options import C_GRID, DEPTH_MEAN, FIRST_TOKEN, ClassBalance, LogitScale
from service.fitting.thresholds import Rule, Target, WrongCosts
from service.readout import Site
from service.trainer.prepare import Preparation

MIXTURE = "mixture"  # of all forms of conversation, by weight, with requests that ask for no fact
ThresholdRule = Literal["map", "keep"]


def parse_signals(text: str) -> tuple[Signal, ...]:
    """``depth_mean`` or ``depth_mean,first_token`` from the command line -> the manifest's names."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if parts == [DEPTH_MEAN]:
        return (DEPTH_MEAN,)
    if sorted(parts) == [DEPTH_MEAN, "first_token"]:
        return (DEPTH_MEAN, *FIRST_TOKEN)
    raise TrainingError(f"signals must be 'depth_mean' or 'depth_mean,first_token', not {text!r}", param="signals")


def parse_forms(text: str | None) -> tuple[str, ...] | None:
    """``none``, ``mixture``, or names of forms with commas, from the command line -> ``TrainOptions.forms``."""
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise TrainingError("forms is empty: none, mixture, or names of forms with commas", param="forms")
    return () if names == ("none",) else names


class Console(Protocol):
    """Where progress is printed, such as a ``rich.console.Console``."""

    def print(self, *objects: Any) -> None:
        """Print a line."""


@dataclass(frozen=True)
class PromiseOptions:
    """What is promised, on which rows.  Raises TrainingError for an invalid value."""

    data: Path  # JSONL rows that took part in nothing else
    alphas: tuple[float, ...] = (0.1,)  # the first one that a threshold qualifies for is served
    delta: float = 0.05  # split evenly among the alphas
    seed: int = 0  # of the order of the rows
    publish_closed: bool = False  # where no threshold qualifies: publish a gate that answers nothing

    def __post_init__(self) -> None:
        """Check values, not types."""
        fine = all(0 < alpha < 1 for alpha in self.alphas) and len(set(self.alphas)) == len(self.alphas) > 0
        if not fine:
            raise TrainingError(f"alpha must be distinct numbers between 0 and 1, not {self.alphas}", param="alpha")
        if not 0 < self.delta < 1:
            raise TrainingError(f"delta must be a number between 0 and 1, not {self.delta}", param="delta")
        if self.seed < 0:
            raise TrainingError(f"seed must be 0 or more, not {self.seed}", param="seed")

    def of(self, reference: str, training: TrainOptions) -> CalibrateOptions:
        """The calibration of the bundle that a training run has just published, labelled as its rows were."""
        return CalibrateOptions(
            **vars(self),
            bundle=reference,
            run_dir=training.run_dir,
            labels=training.answers,
            judge=training.judge,
            abstain_pattern=training.abstain_pattern,
            max_new_tokens=training.max_new_tokens,
            batch_rows=training.batch_rows,
        )


@dataclass(frozen=True, kw_only=True)
class NewRowsOptions:
    """Rows that a published bundle has never seen, and what is published from them."""

    bundle: str  # its reference
    run_dir: Path  # readouts and answers; resumes from here
    name: str | None = None  # of the new bundle; None: the same, one version on
    trained_on: tuple[Path, ...] = ()  # the bundle's own rows, where it does not record them
    labels: Labels | None = None  # None: as the bundle's own rows were labelled
    judge: JudgeOptions | None = None  # None: the judge that the bundle records
    abstain_pattern: str = ABSTAIN
    max_new_tokens: int = 48
    batch_rows: int = BATCH_ROWS
    dry_run: bool = False  # say what would be done, and look at no label

    def preparation(self, labels: Labels, judged_by: str | None, site: Site) -> Preparation:
        """How the rows become readouts and labels; the arguments are what the bundle records of its training.

        Raises TrainingError where a judge is needed that the record does not describe wholly.
        """
        judge, wanted = self.judge, self.labels or labels
        if judge is None:
            described, _, pattern = (judged_by or "contains").partition(" of ")
            judge = JudgeOptions(cast(JudgeName, described.partition(":")[0]), answer_pattern=pattern)
            if wanted == "generate" and judged_by is not None and judge.described() != judged_by:
                raise TrainingError(f"the answers were judged by {judged_by!r}: name the judge", param="judge")
        return Preparation(
            run_dir=self.run_dir,
            readout=site,
            sites=(site,),
            labels=wanted,
            judge=judge,
            abstain_pattern=self.abstain_pattern,
            max_new_tokens=self.max_new_tokens,
            batch_rows=self.batch_rows,
        )


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(PromiseOptions, NewRowsOptions):
    """One calibration of a published bundle."""


@dataclass(frozen=True, kw_only=True)
class RecalibrateOptions(NewRowsOptions):
    """One recalibration of a published bundle for another base rate."""

    data: Path  # labelled JSONL rows, drawn at random from the traffic
    traffic: Path | None = None  # unlabelled: risks, or rows to be scored
    threshold: ThresholdRule = "map"  # the same decisions; or the same number
    allow_other_shift: bool = False  # use the traffic although prior shift alone does not explain it
    seed: int = 0  # of folds and draws


@dataclass(frozen=True)
class TrainOptions:
    """One training run.  Raises TrainingError for an invalid value, before anything is loaded."""

    data: Path  # JSONL rows, see data/training_rows.py
    name: str  # the bundle's name
    run_dir: Path  # readouts, answers and the progress journal; a run resumes from here
    test: Path | None = None  # held-out rows, scored with the final bundle and used for nothing else
    readout: Site = Site.ATTENTION_HEAD  # where a_l is taken (Eq. readout)
    sites: tuple[Site, ...] = ()  # further sites to collect in the same pass, for diagnostics
    logit_scale: LogitScale = "unit_norm"  # the paper's rule, or each L_l over its within-class training std
    signals: tuple[Signal, ...] = (DEPTH_MEAN,)  # what the classifier reads; or (depth_mean, log_max_prob, entropy)
    labels: TrainingLabels = "given"  # the rows' own, or the model's answers judged against the rows' `answers`
    samples: int = 8  # only with labels="sample": answers of each prompt
    temperature: float = 1.0  # only with labels="sample": of these answers
    judge: JudgeOptions = JudgeOptions()  # not with labels="given"
    abstain_pattern: str = ABSTAIN  # not with labels="given": such answers belong to neither class
    max_new_tokens: int = 48  # not with labels="given": length of an answer
    forms: tuple[str, ...] | None = None  # that questions are asked in; None: as ``wanted_forms``, (): as they are
    prompt_format: Literal["auto", "chat", "text"] = "auto"  # how a bare `prompt` is rendered; auto: chat if it can
    folds: int = 5  # outer folds of the evaluation, and of the cross-fit behind the final classifier
    inner_folds: int = 3  # folds inside a training partition: choice of C, and the classifier's cross-fit
    seeds: tuple[int, ...] = (0, 1, 2)  # one shuffle of the folds each
    c: float | Literal["auto"] = "auto"  # inverse strength of the probes' regularisation
    c_grid: tuple[float, ...] = C_GRID  # what "auto" chooses from
    class_balance: ClassBalance = "weights"  # probe fit only: class weights, or drop rows of the larger class
    batch_rows: int = BATCH_ROWS  # prompts in one call of the engine; part of the run's identity, since padding rounds
    wrong_costs: float | None = None  # K of the threshold 1 / (1 + K), in withheld right answers; None: 1, or `target`
    target: str | None = None  # "wrong<=0.2" or "answered>=0.5": the threshold, by out-of-fold risks
    sample: bool = True  # keep held-out questions in the bundle, to show what the risk is worth
    evaluate: bool = True  # the nested evaluation; without it the card reports no performance
    allow_no_signal: bool = False  # publish although the interval of the nested AUROC reaches chance
    jobs: int = 0  # processes for the probe fits; 0: all cores
    calibration: PromiseOptions | None = None  # a guarantee for the threshold, as the last step

    def __post_init__(self) -> None:
        """Check values, not types."""

        def require(fine: bool, field: str, expected: str) -> None:
            if not fine:
                raise TrainingError(f"{field} must be {expected}, not {getattr(self, field)!r}", param=field)

        require(self.signals in ((DEPTH_MEAN,), (DEPTH_MEAN, *FIRST_TOKEN)), "signals",
                f"{(DEPTH_MEAN,)} or {(DEPTH_MEAN, *FIRST_TOKEN)}")  # fmt: skip
        require(self.logit_scale in get_args(LogitScale), "logit_scale", "'unit_norm', 'standardized' or 'weighted'")
        require(self.labels in get_args(TrainingLabels), "labels", "'given', 'generate' or 'sample'")
        require(self.samples >= 2, "samples", "2 or more")
        require(0 < self.temperature < math.inf, "temperature", "a positive number")
        require(self.class_balance in ("weights", "downsample"), "class_balance", "'weights' or 'downsample'")
        require(self.labels != "sample" or self.class_balance == "weights", "class_balance",
                "'weights' with sampled labels, whose rows have a part in both classes")  # fmt: skip
        require(self.prompt_format in ("auto", "chat", "text"), "prompt_format", "'auto', 'chat' or 'text'")
        require(self.folds >= 2, "folds", "2 or more")
        require(self.inner_folds >= 2, "inner_folds", "2 or more")
        require(len(self.seeds) > 0 and len(set(self.seeds)) == len(self.seeds), "seeds", "one or more distinct seeds")
        require(all(0 <= seed < 2**32 for seed in self.seeds), "seeds", "numbers from 0 to 2**32 - 1")
        require(self.c == "auto" or (isinstance(self.c, int | float) and 0 < self.c < math.inf), "c",
                "'auto' or a positive number")  # fmt: skip
        require(len(self.c_grid) > 0 and all(0 < c < math.inf for c in self.c_grid), "c_grid", "positive numbers")
        require(self.batch_rows >= 1, "batch_rows", "1 or more")
        require(self.max_new_tokens >= 1, "max_new_tokens", "1 or more")
        require(self.jobs >= 0, "jobs", "0 (all cores) or more")
        _ = self.rule
        for field, pattern in (
            ("abstain_pattern", self.abstain_pattern),
            ("answer_pattern", self.judge.answer_pattern),
        ):
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise TrainingError(f"{field} is not a regular expression: {error}", param=field) from error
            if field == "answer_pattern" and pattern and groups < 1:
                raise TrainingError(
                    f"answer_pattern has no group: put (...) around the answer in {pattern!r}", param=field
                )
        self._check_forms()
        if (
            self.answers == "generate"
            and self.judge.name == "openai"
            and not (self.judge.base_url and self.judge.model)
        ):
            raise TrainingError("the openai judge needs a base url (up to /v1) and a model", param="judge")

    def _check_forms(self) -> None:
        if not self.forms:
            return
        if self.labels == "given":
            raise TrainingError(
                "given labels belong to the prompts as they are, and the model may answer otherwise in a conversation: "
                "forms must be none, or let the labels be generated (--labels generate)",
                param="forms",
            )
        try:
            chosen(() if self.forms == (MIXTURE,) else self.forms)
        except HalluTracerError as error:
            raise TrainingError(f"{error.message}; or {MIXTURE} alone, or none alone", param="forms") from None

    @property
    def wanted_forms(self) -> tuple[str, ...]:
        """Names of the forms, or the mixture: the default where the model answers anyway, as labels then allow it."""
        if self.forms is not None:
            return self.forms
        return (MIXTURE,) if self.answers == "generate" else ()

    @property
    def answers(self) -> Labels:
        """Where the labels that everything is measured by come from: the rows, or the model's greedy answers."""
        return "given" if self.labels == "given" else "generate"

    @property
    def sampled(self) -> SampleOptions | None:
        """The sampled answers that soft labels come from, if any do."""
        return SampleOptions(self.samples, self.temperature) if self.labels == "sample" else None

    @property
    def collected_sites(self) -> tuple[Site, ...]:
        """All sites that are collected, the run's own first."""
        return tuple(dict.fromkeys((self.readout, *self.sites)))

    @property
    def preparation(self) -> Preparation:
        """How the rows become readouts and labels."""
        return Preparation(
            run_dir=self.run_dir,
            readout=self.readout,
            sites=self.collected_sites,
            labels=self.answers,
            judge=self.judge,
            abstain_pattern=self.abstain_pattern,
            max_new_tokens=self.max_new_tokens,
            batch_rows=self.batch_rows,
            sampled=self.sampled,
        )

    @property
    def rule(self) -> Rule:
        """Of the threshold.  Raises TrainingError where there are two, or one that cannot be read."""
        if self.target is None:
            return WrongCosts() if self.wrong_costs is None else WrongCosts(self.wrong_costs)
        if self.wrong_costs is not None:
            raise TrainingError("target and wrong_costs exclude each other: give one of them", param="target")
        return Target.parse(self.target)

    @property
    def workers(self) -> int:
        """Processes for the probe fits; by default all cores that this process may use."""
        return int(self.jobs or cpu_count())

    @property
    def fit(self) -> FitOptions:
        """The options of the probe fits."""
        c = None if self.c == "auto" else float(self.c)
        return FitOptions(self.class_balance, self.inner_folds, c, tuple(sorted(set(self.c_grid))), self.workers)
