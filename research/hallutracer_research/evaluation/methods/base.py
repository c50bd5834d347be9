"""The rows that all methods of the main table read, and how their fits are spread over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar

import numpy as np
from joblib import Parallel, cpu_count, delayed, parallel_config
from numpy.typing import NDArray

from service.fitting.probes import Readouts

Floats = NDArray[np.float64]
Index = NDArray[np.int64]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class AnswerReadings:
    """What was read of the model's own answers to the n rows; None where no method asked for it."""

    log_prob: Floats | None = None  # [n] of the greedy answer's tokens, mean, nats
    states: NDArray[np.float32] | None = None  # [n, 2 hidden_size] ``mind.features`` of the greedy answer
    true: Floats | None = None  # [n] log-odds that the model gives its greedy answer of being true
    asked: Floats | None = None  # [n] tokens of the prompt that asks for it
    entropy: Floats | None = None  # [n] discrete semantic entropy of the sampled answers, nats
    entropy_weighted: Floats | None = None  # [n] the same, by their likelihoods
    eigenscore: Floats | None = None  # [n]

    def subset(self, rows: Index) -> AnswerReadings:
        """Only these of the n rows."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return AnswerReadings(**{name: None if value is None else value[rows] for name, value in held.items()})


@dataclass(frozen=True, eq=False)
class MethodInputs:
    """The n labelled rows, read in one extraction pass."""

    label: NDArray[np.int64]  # [n] 1 factual, 0 hallucinated
    group: Index  # [n] rows of one group are never on both sides of a split
    heads: Readouts  # the attention-head site
    residual: Readouts  # the residual-stream site
    first_token: Floats  # [n, 2] log maximum probability, entropy (nats)
    prompt_tokens: NDArray[np.int64]  # [n]
    text: tuple[str, ...] = ()  # [n] the prompts
    kind: NDArray[np.str_] = field(default_factory=lambda: np.array([], np.str_))  # [n] sub-dataset, "" for none
    halluguard: Floats | None = None  # [n] ``halluguard_scores``; None where they were not requested
    answers: AnswerReadings = AnswerReadings()

    def subset(self, rows: Index) -> MethodInputs:
        """Only these of the n rows."""
        return MethodInputs(
            label=self.label[rows],
            group=self.group[rows],
            heads=self.heads.subset(rows),
            residual=self.residual.subset(rows),
            first_token=self.first_token[rows],
            prompt_tokens=self.prompt_tokens[rows],
            text=tuple(self.text[row] for row in rows.tolist()),
            kind=self.kind[rows],
            halluguard=None if self.halluguard is None else self.halluguard[rows],
            answers=self.answers.subset(rows),
        )


def in_processes(function: Callable[[Item], Result], items: Sequence[Item], jobs: int | None) -> list[Result]:
    """``function`` of every item, in order, in processes of one thread each (in this one where ``jobs`` is 1).

    Processes and not threads: liblinear draws its coordinate order from one random state per process, so threads would
    make a fit depend on its timing.
    """
    workers = min(cpu_count() if jobs is None else jobs, len(items))
    if workers <= 1:
        return [function(item) for item in items]
    with parallel_config(backend="loky", n_jobs=workers, inner_max_num_threads=1):
        return list(Parallel()(delayed(function)(item) for item in items))
