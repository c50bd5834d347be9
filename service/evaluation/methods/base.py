"""What a method of the main table is: material in, scores of the test rows out.  Knows no single method.

Everything a method learns (standardisation, selection, hyperparameters, stopping, the sign) comes from the ``train``
rows; inner splits are group-disjoint.  Scores rise with hallucination and are not probabilities: whoever writes the
table turns ``train_oof`` into a calibration and a threshold (App. baseline-impl).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from joblib import Parallel, cpu_count, delayed, parallel_config
from numpy.typing import NDArray

from service.errors import TrainingError
from service.fitting.fit import Readouts
from service.fitting.folds import group_folds
from service.readout import Site

Floats = NDArray[np.float64]
Index = NDArray[np.int64]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Material:
    """The labelled rows that all methods share; n rows, read in one extraction pass."""

    label: NDArray[np.int64]  # [n] 1 factual, 0 hallucinated
    group: Index  # [n] rows of one group never stand on both sides of a split
    heads: Readouts  # the attention-head site
    residual: Readouts | None  # the residual-stream site, where it was extracted
    first_token: Floats  # [n, 2] log maximum probability, entropy (nats)
    prompt_tokens: NDArray[np.int64]  # [n]
    halluguard: Floats | None = None  # [n] ``halluguard_scores``; None where nothing was generated

    def readouts(self, site: Site) -> Readouts:
        """The rows of one site.  Raises TrainingError where that site was not extracted."""
        if site is Site.ATTENTION_HEAD:
            return self.heads
        if self.residual is None:
            raise TrainingError(
                f"this method reads the site {site}, which was not extracted: extract it too, or leave the method out",
                param="methods",
            )
        return self.residual


@dataclass(frozen=True, eq=False)
class Scores:
    """A method's scores under one split; higher means more likely hallucinated."""

    test: Floats  # [n_test] in the order of ``test``
    train_oof: Floats | None  # [n_train] scores of the training rows by fits that did not see them, where there are any
    note: str  # what was selected, in words


class Method(Protocol):
    """One line of the main table."""

    @property
    def name(self) -> str:
        """What the command line calls it."""
        ...

    @property
    def title(self) -> str:
        """What the table calls it."""
        ...

    @property
    def needs(self) -> tuple[Site, ...]:
        """The sites it reads."""
        ...

    def fit(self, material: Material, train: Index, test: Index, seed: int) -> Scores:
        """Fit on the rows ``train``, score the rows ``test``.  Raises TrainingError."""
        ...


class Factory(Protocol):
    """Makes a method; ``jobs`` is the number of processes that may fit at once, None for all cores."""

    def __call__(self, jobs: int | None = None) -> Method:
        """The method, ready to fit."""
        ...


def in_processes(function: Callable[[Item], Result], items: Sequence[Item], jobs: int | None) -> list[Result]:
    """``function`` of every item, in order, in processes of one thread each (in this one where ``jobs`` is 1).

    Processes and not threads: liblinear draws its coordinate order from one random state per process, so that threads
    would disturb each other and no fit could be repeated bit by bit.
    """
    workers = min(cpu_count() if jobs is None else jobs, len(items))
    if workers <= 1:
        return [function(item) for item in items]
    with parallel_config(backend="loky", n_jobs=workers, inner_max_num_threads=1):
        return list(Parallel()(delayed(function)(item) for item in items))


def inner_pairs(material: Material, train: Index, folds: int, seed: int, what: str) -> list[tuple[Index, Index]]:
    """Group-disjoint splits of ``train``: (fit, held out) as rows of the material; [] for fewer than 2 folds."""
    return group_folds(material.label, material.group, train, folds, seed, what=what) if folds >= 2 else []


def gather(train: Index, parts: Sequence[tuple[Index, Floats]]) -> Floats | None:
    """Scores of held-out rows (rows, scores) put into the order of ``train``; None where there are no parts."""
    if not parts:
        return None
    place = {int(row): number for number, row in enumerate(train)}
    scores = np.full(len(train), np.nan)
    for rows, values in parts:
        scores[[place[int(row)] for row in rows]] = values
    assert not np.isnan(scores).any(), "the parts do not cover every training row once"
    return scores
