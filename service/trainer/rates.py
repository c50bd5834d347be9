"""Measures on this machine how fast a training run reads, answers and fits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from service.data.collection import render_all
from service.data.options import SAMPLE_TEMPERATURE, SAMPLES
from service.data.training_rows import Dataset
from service.engines.base import Engine, Sampling
from service.fitting.joint import joined
from service.fitting.probes import (
    ActivationArray,
    Index,
    ProbeFit,
    Readouts,
    Task,
    fit_probes,
    start_processes,
)
from service.prompts import PromptFormat
from service.readout import Geometry, Site
from service.trainer.options import TrainOptions
from service.trainer.prepare import collect_rows

READ_S, ANSWER_S = 4.0, 16.0  # about as long prompts are read, and answered
FIRST_CALL = 8  # rows of the first call
# Share of the prompts that is timed apart, the longest: a token of theirs takes longer.
LONGEST = 1 / 8
FIT_ROWS = 2000  # most rows of a trial's fits
REPEATS = 3  # of a timed fit, of which the middle one counts: one may be disturbed
Clock = Callable[[], float]


@dataclass(frozen=True)
class Rates:
    """Seconds on this machine: for each prompt token, answer and fit."""

    token_s: float
    answer_s: float
    choice_s: float = 0.0  # of a head's fits for the choice of C, for each training row
    call_s: float = 0.0  # of a head in any other call for fits, for each row
    task_s: float = 0.0  # of each fit in such a call, for each of its training rows
    joint_s: float = 0.0  # of a fit of all layers together, for each training row
    sample_s: float = 0.0  # of a prompt's sampled answers, beside its reading
    slowdown: float = 1.0  # seconds of the clock for each of the processor, where one core is busy


@dataclass(frozen=True)
class Call:
    """A timed call of the engine."""

    rows: int
    tokens: int  # of its prompts
    seconds: float


def engine_rates(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    options: TrainOptions,
    clock: Clock = time.monotonic,
    limit: int | None = None,
) -> Rates:
    """Return the engine's rates at these prompts, of which no call has more than ``limit``.

    A prompt token's rate is the mean over the prompts that are among the longest, and the
    others."""
    ordered = sorted(prompts, key=len)
    longest = max(1, round(LONGEST * len(ordered)))
    others = _Waiting(ordered[:-longest] or ordered)
    long_ones = _Waiting(ordered[-longest:])
    limit = max(1, min(options.batch_rows, len(ordered) // 4, limit or len(ordered)))

    def calls(
        waiting: _Waiting, seconds: float, least: int = 1, first: int = FIRST_CALL, **more: Any
    ) -> list[Call]:
        """Time at least so many calls, each with more rows, until one takes about ``seconds``."""
        timed: list[Call] = []
        most = min(limit, len(waiting.prompts))
        count = min(first, most)
        while True:
            part = waiting.take(count)
            began = clock()
            engine.extract(part, [options.site], **more)
            timed.append(Call(count, sum(map(len, part)), clock() - began))
            took = timed[-1].seconds
            if count >= most or (took >= seconds / 2 and len(timed) >= least):
                return timed
            count = min(most, int(count * min(8.0, max(2.0, 0.7 * seconds / max(took, 1e-3)))))

    calls(others, 0.0, first=1)  # warms the engine
    reading = calls(others, READ_S)[-1]
    token_s = reading.seconds / reading.tokens
    long_tokens = sum(map(len, long_ones.prompts))
    long_s = token_s * long_tokens / longest  # of one, at least
    long = calls(long_ones, READ_S, first=max(1, min(FIRST_CALL, int(2 * READ_S / long_s))))[-1]
    share = long_tokens / sum(map(len, ordered))
    rates = Rates((1 - share) * token_s + share * long.seconds / long.tokens, 0.0)
    if options.answers == "given":
        return rates
    site = options.site if options.answer_probes and engine.reads_answers else None
    answering: dict[str, Any] = {} if site is None else {"answer_site": site}
    sampling = Sampling(max_tokens=options.answer_tokens, temperature=0.0)
    answered = calls(others, ANSWER_S, 2, sampling=sampling, **answering)
    rates = replace(rates, answer_s=_answer_seconds(answered, token_s, options.batch_rows))
    if options.answers != "self":
        return rates
    return replace(
        rates, sample_s=sample_seconds(engine, others.take(FIRST_CALL), options, token_s, clock)
    )


class _Waiting:
    """Prompts in the order of their lengths, of which a call takes some.

    An engine that remembers prompts must not see one again, so each is taken once before any is
    taken twice."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts
        self.unseen = list(prompts)

    def take(self, count: int) -> list[list[int]]:
        """Return so many prompts of all lengths, evenly spaced."""
        if len(self.unseen) < count:
            self.unseen = list(self.prompts)
        taken = {(2 * number + 1) * len(self.unseen) // (2 * count) for number in range(count)}
        part = [list(self.unseen[position]) for position in sorted(taken)]
        self.unseen = [
            prompt for position, prompt in enumerate(self.unseen) if position not in taken
        ]
        return part


def _answer_seconds(calls: Sequence[Call], token_s: float, rows: int) -> float:
    """Return the seconds of an answer, beside its reading, in a call of so many rows.

    A step of decoding reads the weights once for all answers of a call.  The last two calls, which
    differ in size, separate that shared time from the time of each answer."""
    beside = [max(0.0, call.seconds - token_s * call.tokens) for call in calls]
    many, each = calls[-1].rows, beside[-1] / calls[-1].rows
    if len(calls) > 1:
        more = (beside[-1] - beside[-2]) / (many - calls[-2].rows)
        each = min(max(0.0, more), each)
    shared = beside[-1] - each * many
    return each + shared / max(many, rows)


def sample_seconds(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    options: TrainOptions,
    token_s: float,
    clock: Clock,
) -> float:
    """Return the seconds that the sampled answers of a prompt take beside its reading, by one call
    of some of these prompts."""
    part = [list(prompt) for prompt in prompts[:FIRST_CALL]]
    sampling = Sampling(max_tokens=options.answer_tokens, temperature=SAMPLE_TEMPERATURE)
    began = clock()
    engine.sample(part, sampling, [list(range(SAMPLES))] * len(part))
    took = clock() - began
    return max(0.0, took - token_s * sum(map(len, part))) / len(part)


def fit_rates(
    rates: Rates,
    options: TrainOptions,
    geometry: Geometry,
    rows: float,
    clock: Clock = time.monotonic,
) -> Rates:
    """Return the rates with those of fits: of made rows, with a head for each process."""
    probe, site = options.probe, options.site
    count = int(min(max(rows, options.folds * 8), FIT_ROWS))
    jobs = min(probe.n_jobs, geometry.num_layers)
    readouts = _made_rows(count, jobs, geometry.dim(site), site)
    grid = sorted(set(probe.c_grid)) if probe.C == "auto" else [float(probe.C)]
    middle, every = grid[len(grid) // 2], np.arange(count)

    def parts(folds: int, seed: int = 0) -> list[Index]:
        fold_of = np.random.default_rng(seed).permutation(count) % folds
        return [np.flatnonzero(fold_of != fold) for fold in range(folds)]

    def timed(tasks: Sequence[Task]) -> float:
        """Return the seconds of a head's fits of these tasks for each row."""

        def fit() -> object:
            return fit_probes(
                readouts, tasks, balance=probe.class_balance, jobs=jobs, zero_layers=True
            )

        return _middle(fit, clock) / jobs / count

    whole = [Task(every, every, middle)]
    start_processes(jobs)
    timed(whole)  # compiles the solver in each
    choice = [Task(train, every, c) for c in grid for train in parts(probe.inner_folds)]
    crossed = []
    for seed in probe.seeds:
        crossed += [Task(train, every, middle) for train in parts(probe.folds, seed)]
    choice_s = timed(choice) if len(grid) > 1 else 0.0
    # A call costs as much as reading the rows, and each task as much as its training rows.
    once, many = timed(whole), timed(crossed)
    more = len(crossed) * (probe.folds - 1) / probe.folds - 1
    task_s = min(once, max(0.0, many - once) / more) if more > 0 else once
    began, busy = clock(), time.process_time()
    wide = _made_rows(count, geometry.num_layers, geometry.dim(site), site)
    joint_s = 0.0
    if site is Site.ATTENTION_HEAD:
        heads = _first_heads(geometry.num_layers, count)
        task = Task(every, every, middle)

        def fit_jointly() -> object:
            return joined(wide, task, heads, probe.class_balance, zero_layers=True)

        fit_jointly()  # the first one loads what it needs
        joint_s = _middle(fit_jointly, clock) / count
    slowdown = max(1.0, (clock() - began) / max(time.process_time() - busy, 1e-3))
    return replace(
        rates,
        choice_s=choice_s,
        call_s=once - task_s,
        task_s=task_s,
        joint_s=joint_s,
        slowdown=slowdown,
    )


def _middle(work: Callable[[], object], clock: Clock) -> float:
    """Return the seconds of the work, the middle of ``REPEATS``."""
    took = []
    for _ in range(REPEATS):
        began = clock()
        work()
        took.append(clock() - began)
    return sorted(took)[REPEATS // 2]


def _made_rows(count: int, layers: int, dim: int, site: Site) -> Readouts:
    """Return rows that a probe tells apart about as well as a model's, with columns of unequal
    spread."""
    draw = np.random.default_rng(0)
    label = np.arange(count) % 2
    spread = 1 / np.sqrt(1 + np.arange(dim))
    values = draw.standard_normal((count, layers, 1, dim)) * spread
    values[:, :, 0, : max(1, dim // 8)] += 0.25 * label[:, None, None]
    mixing = np.linalg.qr(draw.standard_normal((dim, dim)))[0]
    return Readouts(
        ActivationArray((values @ mixing).astype(np.float32), site), np.arange(count), label
    )


def _first_heads(layers: int, rows: int) -> ProbeFit:
    zeros = np.zeros(layers)
    return ProbeFit(
        zeros.astype(np.int32), zeros[:, None], zeros, zeros + 1, zeros, np.zeros((rows, layers))
    )


def with_samples(
    rates: Rates,
    options: TrainOptions,
    dataset: Dataset,
    engine: Engine,
    prompt_format: PromptFormat,
    clock: Clock,
) -> Rates:
    """Return the rates with that of sampled answers, by some of the rows."""
    prompts = render_all(engine, dataset, prompt_format, 0)
    drawn = random.Random("trial").sample(dataset.asking.tolist(), min(FIRST_CALL, len(dataset)))
    few = [prompts.of(row) for row in drawn]
    return replace(rates, sample_s=sample_seconds(engine, few, options, rates.token_s, clock))


def kept_rates(
    options: TrainOptions,
    dataset: Dataset,
    engine: Engine,
    prompt_format: PromptFormat,
    sites: Sequence[Site],
    clock: Clock,
) -> Rates:
    """Return the engine's rates at the run's first rows, which stay in its folder."""
    calls: list[tuple[float, int, int]] = [(clock(), 0, 0)]
    most = len(dataset) // 4

    def enough(batch: Index, lengths: Index) -> bool:
        calls.append((clock(), len(batch), int(lengths.sum())))
        waited = calls[-1][0] - calls[0][0]
        return waited >= READ_S + ANSWER_S or sum(rows for _, rows, _ in calls) >= most

    collect_rows(
        engine,
        dataset,
        options,
        prompt_format,
        "train",
        sites=sites,
        answer_probes=options.answer_probes,
        enough=enough,
    )
    # The first calls also warm the engine, and find out how many threads pay.
    first = max(1, len(calls) // 2) if len(calls) > 2 else 0
    took = calls[-1][0] - calls[first][0]
    rows = sum(rows for _, rows, _ in calls[first + 1 :])
    tokens = sum(tokens for _, _, tokens in calls[first + 1 :])
    if not rows:  # the training rows were read before, the held-out ones were not
        return Rates(0.0, 0.0)
    if options.answers == "given":
        return Rates(took / tokens, 0.0)
    token_s = took / tokens
    if took >= 1:
        prompts = render_all(engine, dataset, prompt_format, 0)
        drawn = random.Random("trial").sample(range(len(dataset)), min(64, len(dataset)))
        few = [prompts.of(row) for row in drawn]
        token_s = engine_rates(engine, few, replace(options, labels="given"), clock).token_s
    return Rates(token_s, max(0.0, took - token_s * tokens) / rows)
