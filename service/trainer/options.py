"""The options of a training run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from joblib import cpu_count

from probes_store.manifest import Signal
from service.data.options import ABSTAIN, JudgeOptions, Labels
from service.errors import TrainingError
from service.fitting.calibration import FitOptions
from service.fitting.options import C_GRID, DEPTH_MEAN, FIRST_TOKEN, ClassBalance, LogitScale
from service.readout import Site


def parse_signals(text: str) -> tuple[Signal, ...]:
    """``depth_mean`` or ``depth_mean,first_token`` from the command line -> the manifest's names."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if parts == [DEPTH_MEAN]:
        return (DEPTH_MEAN,)
    if sorted(parts) == [DEPTH_MEAN, "first_token"]:
        return (DEPTH_MEAN, *FIRST_TOKEN)
    raise TrainingError(f"signals must be 'depth_mean' or 'depth_mean,first_token', not {text!r}", param="signals")


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
    labels: Labels = "given"  # the rows' own, or the model's answers judged against the rows' `answers`
    judge: JudgeOptions = JudgeOptions()  # only with labels="generate"
    abstain_pattern: str = ABSTAIN  # only with labels="generate": such answers belong to neither class
    max_new_tokens: int = 48  # only with labels="generate": length of an answer; decoding is greedy
    prompt_format: Literal["auto", "chat", "text"] = "auto"  # how a bare `prompt` is rendered; auto: chat if it can
    folds: int = 5  # outer folds of the evaluation, and of the cross-fit behind the final classifier
    inner_folds: int = 3  # folds inside a training partition: choice of C, and the classifier's cross-fit
    seeds: tuple[int, ...] = (0, 1, 2)  # one shuffle of the folds each
    c: float | Literal["auto"] = "auto"  # inverse strength of the probes' regularisation
    c_grid: tuple[float, ...] = C_GRID  # what "auto" chooses from
    class_balance: ClassBalance = "weights"  # probe fit only: class weights, or drop rows of the larger class
    batch_rows: int = 32  # prompts in one call of the engine; part of the run's identity, since padding rounds
    evaluate: bool = True  # the nested evaluation; without it the card reports no performance
    allow_no_signal: bool = False  # publish although the interval of the nested AUROC reaches chance
    jobs: int = 0  # processes for the probe fits; 0: all cores

    def __post_init__(self) -> None:
        """Check values, not types."""

        def require(fine: bool, field: str, expected: str) -> None:
            if not fine:
                raise TrainingError(f"{field} must be {expected}, not {getattr(self, field)!r}", param=field)

        require(self.signals in ((DEPTH_MEAN,), (DEPTH_MEAN, *FIRST_TOKEN)), "signals",
                f"{(DEPTH_MEAN,)} or {(DEPTH_MEAN, *FIRST_TOKEN)}")  # fmt: skip
        require(self.logit_scale in ("unit_norm", "standardized"), "logit_scale", "'unit_norm' or 'standardized'")
        require(self.labels in ("given", "generate"), "labels", "'given' or 'generate'")
        require(self.class_balance in ("weights", "downsample"), "class_balance", "'weights' or 'downsample'")
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
        if self.labels == "generate" and self.judge.name == "openai" and not (self.judge.base_url and self.judge.model):
            raise TrainingError("the openai judge needs a base url (up to /v1) and a model", param="judge")

    @property
    def collected_sites(self) -> tuple[Site, ...]:
        """All sites that are collected, the run's own first."""
        return tuple(dict.fromkeys((self.readout, *self.sites)))

    @property
    def workers(self) -> int:
        """Processes for the probe fits; by default all cores that this process may use."""
        return int(self.jobs or cpu_count())

    @property
    def fit(self) -> FitOptions:
        """The options of the probe fits."""
        c = None if self.c == "auto" else float(self.c)
        return FitOptions(self.class_balance, self.inner_folds, c, tuple(sorted(set(self.c_grid))), self.workers)
