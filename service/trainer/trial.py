"""Measures on this machine, before a run starts, how long it will take and what memory and disk it
needs."""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from service.data.collection import render_all
from service.data.labels import SAMPLES_FILE
from service.data.options import SAMPLE_TEMPERATURE, SAMPLES
from service.data.training_rows import Dataset
from service.engines.base import Engine, Sampling
from service.errors import TrainingError
from service.fitting.joint import joined
from service.fitting.probes import ActivationArray, Index, ProbeFit, Readouts, Task, fit_probes
from service.progress import size_text
from service.prompts import PromptFormat
from service.readout import Geometry, Site
from service.trainer.options import MIXTURE, Console, TrainOptions
from service.trainer.prepare import collect_rows, labels_itself
from service.trainer.training_set import (
    ASKED_ALONE,
    FIRST_ROWS,
    WITH_OWN_ANSWERS,
    first_part,
    forms_of,
    has_first_bundle,
    no_fact_count,
    sample_prompts,
)

SAMPLED = 300  # questions whose rows in forms stand for those of all
READ_S, ANSWER_S = 4.0, 8.0  # about as long prompts are read, and answered
FIRST_CALL = 8  # rows of the call that warms the engine
FIT_ROWS = 2000  # most rows of a trial's fits
REPEATS, ENOUGH_S = 3, 0.5  # of a timed fit, since a short one may be disturbed
JOINT_BYTES = 20  # of each activation while all layers are fitted together: two copies, one float64
AFTER_S = 6.0  # scores, plots and golden prompts of any run
ROW_S = 2.5e-3  # intervals and scores of the nested evaluation, for each row and seed
ASKS_SIDES, STATED_SHARE = 4, 0.5  # rows of a context probe: of each no-fact request, of all rows
FEWEST = 100  # questions of a run that --minutes cuts
COLLECTIONS = ("train-said", "test-said", "first/train", "train", "test")  # folders of a run
Clock = Callable[[], float]


@dataclass(frozen=True)
class Volume:
    """What a run reads, answers, stores and fits."""

    answered_rows: float  # prompts that the model answers
    answered_tokens: float  # of these prompts
    read_rows: float  # prompts that are read and not answered
    read_tokens: float
    training_rows: float
    fitted_rows: float  # training rows that get a label
    no_fact_rows: float
    test_rows: float
    sampled_rows: float = 0.0  # prompts of which the model samples several answers
    sampled_tokens: float = 0.0  # of these prompts

    @property
    def rows(self) -> float:
        """Return all prompts that are read."""
        return self.answered_rows + self.read_rows


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


@dataclass(frozen=True)
class Estimate:
    """What a run will take from here on."""

    reading_s: float  # readouts and answers
    fitting_s: float  # fits, evaluation and the rest
    memory: float  # bytes, of this process and those that fit
    disk: float  # bytes in the run folder

    @property
    def seconds(self) -> float:
        """Return the whole time."""
        return self.reading_s + self.fitting_s


@dataclass(frozen=True)
class Sampled:
    """A sample of questions as the run asks them."""

    prompts: tuple[tuple[int, ...], ...]  # token ids, in a drawn order
    rows: float  # rows of one question
    tokens: float  # mean of a row
    alone: float  # mean tokens of a question by itself
    no_fact: float  # mean tokens of a request that asks for no fact

    def volume(
        self,
        options: TrainOptions,
        questions: int,
        held_out: int,
        chat: bool,
        *,
        held_out_sampled: bool = False,
    ) -> Volume:
        """Return what a run with so many questions reads.

        ``held_out_sampled``: the held-out ones are labelled by the model itself, too."""
        names = {form.name for form in forms_of(options, "chat" if chat else "text")}
        own = bool(names & set(WITH_OWN_ANSWERS))
        alone = sum(min(ASKED_ALONE, count) for count in (questions, held_out)) if own else 0
        mixture = options.wanted_forms == (MIXTURE,)
        no_fact = no_fact_count(questions) if mixture and chat else 0
        train, test = questions * self.rows, held_out * self.rows
        sampled_rows = train + held_out_sampled * test if options.answers == "self" else 0.0
        return Volume(
            answered_rows=alone + train + test,
            answered_tokens=alone * self.alone + (train + test) * self.tokens,
            read_rows=no_fact,
            read_tokens=no_fact * self.no_fact,
            training_rows=train + no_fact,
            fitted_rows=train,
            no_fact_rows=no_fact,
            test_rows=test,
            sampled_rows=sampled_rows,
            sampled_tokens=sampled_rows * self.tokens,
        )


def sampled(
    options: TrainOptions, dataset: Dataset, engine: Engine, prompt_format: PromptFormat
) -> Sampled:
    """Return a sample of the questions of ``dataset`` in the forms that the options name."""
    draw = random.Random(f"{options.shuffles[0]} trial")
    positions = sorted(draw.sample(range(len(dataset)), min(SAMPLED, len(dataset))))
    questions, alone, no_fact = sample_prompts(
        options, dataset.part(positions), engine, prompt_format
    )
    draw.shuffle(questions)
    return Sampled(
        prompts=tuple(map(tuple, questions)),
        rows=len(questions) / len(positions),
        tokens=_mean_length(questions),
        alone=_mean_length(alone),
        no_fact=_mean_length(no_fact),
    )


def _mean_length(prompts: Sequence[Sequence[int]]) -> float:
    return float(np.mean([len(prompt) for prompt in prompts])) if prompts else 0.0


def engine_rates(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    options: TrainOptions,
    clock: Clock = time.monotonic,
    limit: int | None = None,
) -> Rates:
    """Return the engine's rates at these prompts; no call has more than ``limit`` of them."""
    waiting = list(prompts)
    limit = max(1, min(options.batch_rows, len(waiting) // 4, limit or len(waiting)))

    def timed(seconds: float, **more: Any) -> tuple[int, int, float]:
        """Time one call that takes about ``seconds``: its rows, prompt tokens and duration."""
        count = min(FIRST_CALL, limit)
        while True:
            part = [list(prompt) for prompt in waiting[:count]]
            waiting[:count] = []  # an engine that remembers prompts must not see them again
            waiting.extend(map(tuple, part))
            began = clock()
            engine.extract(part, [options.site], **more)
            took = clock() - began
            if took >= seconds / 2 or count >= limit:
                return count, sum(map(len, part)), took
            count = min(limit, int(count * min(8.0, max(2.0, 0.7 * seconds / max(took, 1e-3)))))

    _, tokens, took = timed(READ_S)
    token_s = took / tokens
    if options.answers == "given":
        return Rates(token_s, 0.0)
    site = options.site if options.answer_probes and engine.reads_answers else None
    answering: dict[str, Any] = {} if site is None else {"answer_site": site}
    sampling = Sampling(max_tokens=options.answer_tokens, temperature=0.0)
    rows, tokens, took = timed(ANSWER_S, sampling=sampling, **answering)
    rates = Rates(token_s, max(0.0, took - token_s * tokens) / rows)
    if options.answers != "self":
        return rates
    return replace(rates, sample_s=sample_seconds(engine, waiting, options, token_s, clock))


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
        """Return the seconds of a head's fits of these tasks for each row: the fastest of some."""
        took: list[float] = []
        while len(took) < REPEATS and sum(took) < ENOUGH_S:
            began = clock()
            fit_probes(readouts, tasks, balance=probe.class_balance, jobs=jobs, zero_layers=True)
            took.append(clock() - began)
        return min(took) / jobs / count

    whole = [Task(every, every, middle)]
    timed(whole)  # starts the processes and compiles the solver
    choice = [Task(train, every, c) for c in grid for train in parts(probe.inner_folds)]
    crossed = []
    for seed in probe.seeds:
        crossed += [Task(train, every, middle) for train in parts(probe.folds, seed)]
    choice_s = timed(choice) if len(grid) > 1 else 0.0
    # A call costs as much as reading the rows, and each task as much as its training rows.
    once, many = timed(whole), timed(crossed)
    more = len(crossed) * (probe.folds - 1) / probe.folds - 1
    task_s = min(once, max(0.0, many - once) / more) if more > 0 else once
    joint_s = 0.0
    if site is Site.ATTENTION_HEAD:
        wide = _made_rows(count, geometry.num_layers, geometry.dim(site), site)
        began = clock()
        heads = _first_heads(geometry.num_layers, count)
        joined(wide, Task(every, every, middle), heads, probe.class_balance, zero_layers=True)
        joint_s = (clock() - began) / count
    return replace(rates, choice_s=choice_s, call_s=once - task_s, task_s=task_s, joint_s=joint_s)


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


def fitting_seconds(volume: Volume, rates: Rates, options: TrainOptions, engine: Engine) -> float:
    """Return the time of all fits and of the evaluation, those of a first bundle included."""
    seconds = _fits(volume, rates, options, engine)
    if has_first_bundle(options, volume.training_rows):
        share = FIRST_ROWS / volume.training_rows
        few = replace(
            volume,
            fitted_rows=share * volume.fitted_rows,
            no_fact_rows=share * volume.no_fact_rows,
        )
        one_shuffle: dict[str, Any] = {"seeds": options.shuffles[:1]}
        seconds += _fits(few, rates, replace(options, **one_shuffle), engine)
    return seconds


def _fits(volume: Volume, rates: Rates, options: TrainOptions, engine: Engine) -> float:
    """Return the time of the fits that one bundle of so many rows takes."""
    geometry, site, probe = engine.identity.geometry, options.site, options.probe
    heads = geometry.num_layers * geometry.heads(site)
    few = min(8, geometry.num_layers) * min(8, geometry.heads(site))
    grid = len(set(probe.c_grid)) if probe.C == "auto" else 1
    folds, inner, seeds = probe.folds, probe.inner_folds, len(probe.seeds)

    def fit(rows: float, folds: int, seeds: int, *, joint: bool, choose: bool = True) -> float:
        passes = seeds * (folds - 1) + 1  # over the rows: a cross-fit, and a fit of all
        seconds = rows * heads * (2 * rates.call_s + passes * rates.task_s)
        if choose and grid > 1:
            seconds += rows * few * rates.choice_s
        return seconds + (rows * passes * rates.joint_s if joint else 0.0)

    rows, together = volume.fitted_rows, options.scale == "joint"
    mixture = options.wanted_forms == (MIXTURE,)
    seconds = AFTER_S + fit(rows, folds, seeds, joint=together)
    if options.generates and options.answer_probes and engine.reads_answers:
        seconds += fit(rows, folds, seeds, joint=together)
    if volume.no_fact_rows:
        asking = ASKS_SIDES * volume.no_fact_rows
        seconds += fit(min(asking, rows), folds, 1, joint=together, choose=False)
    if mixture:
        seconds += 2 * fit(STATED_SHARE * rows, folds, 1, joint=False, choose=False)
    if options.evaluate:
        part = rows * (folds - 1) / folds
        fold = fit(part, inner, 1, joint=site is Site.ATTENTION_HEAD)
        if mixture:
            fold += 2 * fit(STATED_SHARE * part, inner, 1, joint=False, choose=False)
        seconds += folds * seeds * fold + ROW_S * rows * seeds
    return seconds


def estimated(
    volume: Volume,
    rates: Rates,
    options: TrainOptions,
    engine: Engine,
    done: float = 0.0,
    sampled_before: float = 0.0,
) -> Estimate:
    """Return what a run of this volume takes, of which a share ``done`` was read before, and a
    share ``sampled_before`` of the prompts' answers was sampled."""
    geometry, site = engine.identity.geometry, options.site
    reading_s = (
        volume.answered_tokens + volume.read_tokens
    ) * rates.token_s + volume.answered_rows * rates.answer_s
    sampling_s = volume.sampled_tokens * rates.token_s + volume.sampled_rows * rates.sample_s
    sites = {site, *options.sites}
    numbers = sum(geometry.num_layers * geometry.width(each) for each in sites)
    answers = options.generates and options.answer_probes and engine.reads_answers
    stored = volume.training_rows + volume.test_rows
    disk = 4 * stored * numbers
    if answers:
        disk += 4 * volume.training_rows * geometry.num_layers * geometry.width(site)
    joint = site is Site.ATTENTION_HEAD and (options.evaluate or options.scale == "joint")
    together = volume.fitted_rows * geometry.num_layers * geometry.dim(site) * JOINT_BYTES
    peak, now, workers = memory_of()
    memory = max(peak, now + (together if joint else 0.0)) + workers
    fitting_s = fitting_seconds(volume, rates, options, engine)
    left_s = reading_s * (1 - done) + sampling_s * (1 - sampled_before)
    return Estimate(left_s, fitting_s, memory, disk)


def announce(
    options: TrainOptions,
    dataset: Dataset,
    test: Dataset | None,
    engine: Engine,
    prompt_format: PromptFormat,
    sites: Sequence[Site],
    console: Console,
    clock: Clock = time.monotonic,
) -> Estimate:
    """Print what the run will do and what that takes on this machine, measured by a trial of about
    20 seconds; return it.

    Rows that stand as they are, are read into the run folder by the trial, and not again.  Forms
    with the model's own answers have no rows yet, so the trial reads others in their stead."""
    began = clock()
    held_out = 0 if test is None else len(test)
    sample: Sampled | None = None
    if options.wanted_forms:
        sample = sampled(options, dataset, engine, prompt_format)
        chat, own = prompt_format == "chat", test is not None and labels_itself(test, options)
        volume = sample.volume(options, len(dataset), held_out, chat, held_out_sampled=own)
    else:
        volume = _as_they_are(options, dataset, test, engine, prompt_format)
    console.print(_described(volume, options))
    done = min(1.0, _rows_done(options.folder) / volume.rows)
    sampled_before = (
        _samples_done(options.folder) / volume.sampled_rows if volume.sampled_rows else 1.0
    )
    rates = Rates(0.0, 0.0)
    if done < 1 and sample is not None:
        rates = engine_rates(engine, sample.prompts, options, clock, int(volume.rows / 8))
    elif done < 1:
        first = first_part(options, dataset)
        begins = (options, dataset) if first is None else (first.options, first.dataset)
        rates = _kept_rates(*begins, engine, prompt_format, sites, clock)
        done = min(1.0, _rows_done(options.folder) / volume.rows)
    rates = fit_rates(rates, options, engine.identity.geometry, volume.fitted_rows, clock)
    if sampled_before < 1 and not rates.sample_s:  # its rows stand as they are, or all were read
        rates = _with_samples(rates, options, dataset, engine, prompt_format, clock)
    estimate = estimated(volume, rates, options, engine, done, min(1.0, sampled_before))
    console.print(_measured(rates, estimate, options, clock() - began))
    return estimate


def _with_samples(
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


def _as_they_are(
    options: TrainOptions,
    dataset: Dataset,
    test: Dataset | None,
    engine: Engine,
    prompt_format: PromptFormat,
) -> Volume:
    """Return what a run reads whose rows are those of the files."""
    generate = options.generates
    reserve = options.answer_tokens if generate else 0
    answered_rows = answered_tokens = read_rows = read_tokens = 0.0
    sampled_rows = sampled_tokens = 0.0
    for data in filter(None, (dataset, test)):
        lengths = render_all(engine, data, prompt_format, reserve).lengths
        asking = lengths[data.asking] if generate else lengths[:0]
        answered_rows += len(asking)
        answered_tokens += asking.sum()
        read_rows += len(lengths) - len(asking)
        read_tokens += lengths.sum() - asking.sum()
        if options.answers == "self" and (data is dataset or labels_itself(data, options)):
            sampled_rows += len(asking)
            sampled_tokens += asking.sum()
        if not generate and options.answer_probes and engine.reads_answers:
            given = [row for row, each in enumerate(data.rows) if each.answer]
            read_rows += len(given)
            read_tokens += lengths[given].sum() + options.answer_tokens * len(given)
    asking_rows = len(dataset.asking)
    return Volume(
        answered_rows=answered_rows,
        answered_tokens=float(answered_tokens),
        read_rows=read_rows,
        read_tokens=float(read_tokens),
        training_rows=len(dataset),
        fitted_rows=asking_rows,
        no_fact_rows=len(dataset) - asking_rows,
        test_rows=0 if test is None else len(test),
        sampled_rows=sampled_rows,
        sampled_tokens=float(sampled_tokens),
    )


def _kept_rates(
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
    # The first call also warms the engine.
    first = 1 if len(calls) > 2 else 0
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


def _rows_done(folder: Path) -> int:
    """Return how many rows an earlier call has read into the run folder."""
    count = 0
    for name in COLLECTIONS:
        path = folder / name / "journal.jsonl"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            count += sum(json.loads(line)["rows"] for line in lines if line.endswith("}"))
    return count


def _samples_done(folder: Path) -> int:
    """Return of how many rows an earlier call has sampled answers."""
    paths = (folder / name / SAMPLES_FILE for name in COLLECTIONS)
    return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())


def _described(volume: Volume, options: TrainOptions) -> str:
    about = "about " if options.wanted_forms else ""
    tokens = volume.answered_tokens + volume.read_tokens
    rows = [f"{volume.fitted_rows:,.0f} training rows"]
    rows += [f"{volume.no_fact_rows:,.0f} that ask for no fact"] if volume.no_fact_rows else []
    rows += [f"{volume.test_rows:,.0f} held-out rows"] if volume.test_rows else []
    answers = (
        f"; {volume.answered_rows:,.0f} answers of up to {options.answer_tokens} tokens"
        if volume.answered_rows
        else ""
    )
    if volume.sampled_rows:
        answers += f", and {SAMPLES} sampled ones of {volume.sampled_rows:,.0f} rows"
    return f"to do: {about}{', '.join(rows)}; {tokens:,.0f} prompt tokens{answers}"


def _measured(rates: Rates, estimate: Estimate, options: TrainOptions, took: float) -> str:
    speeds = [f"{1 / rates.token_s:,.0f} prompt tokens a second"] if rates.token_s else []
    speeds += [f"{1 / rates.answer_s:,.1f} answers a second"] if rates.answer_s else []
    if rates.sample_s:
        speeds.append(f"{SAMPLES / rates.sample_s:,.1f} sampled answers a second")
    speed = f"{' and '.join(speeds)}; " if speeds else ""
    return (
        f"measured in {took:.0f} s on this machine: {speed}the run takes about"
        f" {duration_text(estimate.seconds)} (readouts and answers"
        f" {duration_text(estimate.reading_s)}, fits {duration_text(estimate.fitting_s)}),"
        f" {size_text(estimate.memory)} of memory and {size_text(estimate.disk)} of disk in"
        f" {options.folder}"
    )


def took_text(estimate: Estimate, seconds: float) -> str:
    """Return how long a run took and what memory it had, beside what was estimated."""
    peak, _, workers = memory_of()
    return (
        f"took {duration_text(seconds)} and {size_text(peak + workers)} of memory (estimated:"
        f" {duration_text(estimate.seconds)}, {size_text(estimate.memory)})"
    )


def duration_text(seconds: float) -> str:
    """Return a duration for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def questions_within(
    minutes: float,
    options: TrainOptions,
    bank: Dataset,
    most: int,
    held_out_of: Callable[[int], int],
    engine: Engine,
    prompt_format: PromptFormat,
    console: Console,
    clock: Clock = time.monotonic,
    began: float | None = None,
) -> int:
    """Return how many questions a run asks that takes so many minutes since it ``began`` by the
    clock, the trial included; at most ``most``.

    ``bank`` has some of the questions; ``held_out_of`` returns how many held-out ones belong to a
    number of questions.  Raises TrainingError if the minutes are too few for any run."""
    began = clock() if began is None else began
    sample = sampled(options, bank, engine, prompt_format)
    chat = prompt_format == "chat"

    def volume(questions: int) -> Volume:
        return sample.volume(options, questions, held_out_of(questions), chat)

    rates = engine_rates(engine, sample.prompts, options, clock)
    geometry = engine.identity.geometry
    rates = fit_rates(rates, options, geometry, volume(most).fitted_rows, clock)

    def seconds(questions: int) -> float:
        return estimated(volume(questions), rates, options, engine).seconds

    left = 60 * minutes - (clock() - began)
    low, high = FEWEST, max(FEWEST, most)
    if seconds(low) > left:
        raise TrainingError(
            f"{minutes:g} minutes are too few here: {low} questions, the fewest, take about"
            f" {duration_text(seconds(low) + clock() - began)}",
            param="minutes",
        )
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if seconds(middle) <= left else (low, middle - 1)
    console.print(f"in {minutes:g} minutes this machine can do {low:,} of {most:,} questions")
    return low


def memory_of() -> tuple[float, float, float]:
    """Return bytes of memory: this process's peak, what it has now, and the peaks of the processes
    that it started for fits."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    now, children = _status("self").get("VmRSS", peak), 0.0
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            names = path.read_text().split()
        except OSError:
            continue
        children += sum(_status(name).get("VmHWM", 0.0) for name in names)
    return peak, now, children


def _status(process: str) -> Mapping[str, float]:
    """Return the sizes that Linux gives of a process, in bytes; {} elsewhere."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): float(size) * 1024 for name, size, _ in pairs}
