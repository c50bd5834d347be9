"""Says, before a run starts, how long it will take on this machine and what memory and disk it
needs; and how many questions fit into minutes."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from service.data.labels import SAMPLES_FILE
from service.data.options import SAMPLES
from service.data.training_rows import Dataset
from service.engines.base import Engine
from service.errors import TrainingError
from service.progress import size_text
from service.prompts import PromptFormat
from service.readout import Site
from service.trainer.options import MIXTURE, Console, TrainOptions
from service.trainer.prepare import labels_itself
from service.trainer.rates import (
    Clock,
    Rates,
    engine_rates,
    fit_rates,
    kept_rates,
    with_samples,
)
from service.trainer.training_set import (
    FIRST_ROWS,
    first_part,
    has_first_bundle,
)
from service.trainer.volume import Sampled, Volume, as_they_are, sampled

JOINT_BYTES = 20  # of each activation while all layers are fitted together: two copies, one float64
KV_COPIES = 1.5  # of keys and values, while answers grow (benchmarks/LOG.md)
# Seconds of an idle core (benchmarks/LOG.md), times the slowdown that the trial measures.
AFTER_S = 3.5  # plots, golden prompts and publishing of any run
ROW_S = 4e-4  # intervals and scores of the nested evaluation, for each row and seed
ASKS_SIDES, STATED_SHARE = 4, 0.5  # rows of a context probe: of each no-fact request, of all rows
FEWEST = 100  # questions of a run that --minutes cuts
COLLECTIONS = ("train-said", "test-said", "first/train", "train", "test")  # folders of a run


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
    geometry = engine.identity.geometry
    site = options.site
    probe = options.probe
    heads = geometry.num_layers * geometry.heads(site)
    few = min(8, geometry.num_layers) * min(8, geometry.heads(site))
    grid = len(set(probe.c_grid)) if probe.C == "auto" else 1
    folds, inner = probe.folds, probe.inner_folds
    seeds = len(probe.seeds)

    def fit(rows: float, folds: int, seeds: int, *, joint: bool, choose: bool = True) -> float:
        passes = seeds * (folds - 1) + 1  # over the rows: a cross-fit, and a fit of all
        seconds = rows * heads * (2 * rates.call_s + passes * rates.task_s)
        if choose and grid > 1:
            seconds += rows * few * rates.choice_s
        return seconds + (rows * passes * rates.joint_s if joint else 0.0)

    rows, together = volume.fitted_rows, options.scale == "joint"
    mixture = options.wanted_forms == (MIXTURE,)
    seconds = rates.slowdown * AFTER_S + fit(rows, folds, seeds, joint=together)
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
        seconds += folds * seeds * fold + rates.slowdown * ROW_S * rows * seeds
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
    ) * rates.token_s + volume.usual_answers * rates.answer_s
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
    answers_of_a_call = KV_COPIES * engine.answer_bytes if volume.answered_rows else 0.0
    peak, now, workers = memory_of()
    memory = max(peak, now + answers_of_a_call, now + (together if joint else 0.0)) + workers
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
    half a minute; return it.

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
        volume = as_they_are(options, dataset, test, engine, prompt_format)
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
        rates = kept_rates(*begins, engine, prompt_format, sites, clock)
        done = min(1.0, _rows_done(options.folder) / volume.rows)
    rates = fit_rates(rates, options, engine.identity.geometry, volume.fitted_rows, clock)
    if sampled_before < 1 and not rates.sample_s:  # its rows stand as they are, or all were read
        rates = with_samples(rates, options, dataset, engine, prompt_format, clock)
    estimate = estimated(volume, rates, options, engine, done, min(1.0, sampled_before))
    console.print(_measured(rates, estimate, options, clock() - began))
    return estimate


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
    longer = ", some of them longer" if volume.usual_answers > volume.answered_rows else ""
    answers = (
        f"; {volume.answered_rows:,.0f} answers of up to {options.answer_tokens} tokens{longer}"
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
    that it started for fits.

    The files that these map, libraries and readouts, are counted once, with this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    now, children = _status("self").get("VmRSS", peak), 0.0
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            names = path.read_text().split()
        except OSError:
            continue
        for status in map(_status, names):
            children += max(0.0, status.get("VmHWM", 0.0) - status.get("RssFile", 0.0))
    return peak, now, children


def _status(process: str) -> Mapping[str, float]:
    """Return the sizes that Linux gives of a process, in bytes; {} elsewhere."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): float(size) * 1024 for name, size, _ in pairs}
