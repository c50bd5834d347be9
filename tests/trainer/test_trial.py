"""What a run prints before it starts, and how many questions fit into minutes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from probes_store.store import Store
from service.data.bank import SPLITS, bank_rows
from service.data.options import SAMPLES
from service.data.training_rows import read_dataset
from service.engines.base import EngineOptions, Extraction
from service.engines.transformers import threads as threads_module
from service.errors import TrainingError
from service.library.training import MINUTES, THREADS, completed, run_training, with_questions
from service.readout import Site
from service.trainer import rates as measuring
from service.trainer.options import TrainOptions
from service.trainer.rates import REPEATS, Rates, engine_rates, fit_rates, kept_rates
from service.trainer.trial import (
    AFTER_S,
    FEWEST,
    duration_text,
    estimated,
    questions_within,
)
from service.trainer.volume import Volume, sampled
from tests.fitting.planted import PlantedEngine, Quiet, dataset_of, planted_rows, write_rows
from tests.kit.rows import Options
from tests.trainer.made import run

TOKEN_S, ANSWER_S, SAMPLE_S = 0.001, 0.5, 0.4


class Loaded(Exception):
    """The model would have been loaded."""


class Timed(PlantedEngine):
    """Takes a made time for each prompt token and answer, which its clock shows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_tokens=6000, **options)
        self.now = 0.0
        self.seen: list[tuple[int, ...]] = []

    def clock(self) -> float:
        return self.now

    def sample(self, prompts: Any, sampling: Any, seeds: Any) -> Any:
        self.now += TOKEN_S * sum(map(len, prompts)) + SAMPLE_S * sum(map(len, seeds))
        return []

    def extract(
        self, prompts: Any, sites: Any, poolings: Any = (), sampling: Any = None, **read: Any
    ) -> Extraction:
        self.now += self.takes(prompts, sampling is not None)
        self.seen += map(tuple, prompts)
        return super().extract(prompts, sites, poolings, sampling, **read)

    def takes(self, prompts: Any, answered: bool) -> float:
        """The seconds of one call."""
        return TOKEN_S * sum(map(len, prompts)) + (ANSWER_S * len(prompts) if answered else 0.0)


def of_the_bank(folder: Path, **changes: Any) -> TrainOptions:
    options: Options = {"labels": "generate", "max_new_tokens": 24, "jobs": 1, "seeds": 1}
    return TrainOptions(name="planted", run_dir=folder, **options | changes)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("bank") / "bank.jsonl"
    return read_dataset(write_rows(path, bank_rows("train")[:120]), "generate", folds=None)


PROMPTS = [tuple(range(5 + number % 40)) for number in range(600)]


def rates_of(engine: Timed, options: TrainOptions, prompts: Any = PROMPTS) -> Rates:
    return engine_rates(engine, prompts, options, engine.clock)


@pytest.mark.parametrize("labels", ["generate", "given", "self"])
def test_rates_are_those_of_the_engine(labels: str, tmp_path: Path) -> None:
    engine = Timed()
    rates = rates_of(engine, of_the_bank(tmp_path, labels=labels))
    assert rates.token_s == pytest.approx(TOKEN_S)
    assert rates.answer_s == pytest.approx(0.0 if labels == "given" else ANSWER_S)
    assert rates.sample_s == pytest.approx(SAMPLES * SAMPLE_S if labels == "self" else 0.0)
    assert len(engine.seen) <= 600, "an engine that remembers prompts must not see one twice"


@pytest.mark.parametrize(("each", "shared"), [(0.1, 2.4), (0.0, 2.4), (0.5, 0.0), (2.0, 40.0)])
def test_answers_are_timed_as_in_calls_of_the_run(
    each: float, shared: float, tmp_path: Path
) -> None:
    class Steps(Timed):
        """Its answers share the reading of the weights."""

        def takes(self, prompts: Any, answered: bool) -> float:
            return super().takes(prompts, False) + (shared + each * len(prompts)) * answered

    rates = rates_of(Steps(), of_the_bank(tmp_path, batch_rows=64))
    assert rates.answer_s == pytest.approx(each + shared / 64, rel=0.01)


@pytest.mark.parametrize("labels", ["generate", "given"])
def test_the_longest_prompts_are_timed_too(labels: str, tmp_path: Path) -> None:
    """The run of a whole sample takes as long as the rates say, where few prompts are costly."""
    long_s = 3 * TOKEN_S

    class Attention(Timed):
        """Reads long prompts slowly."""

        def takes(self, prompts: Any, answered: bool) -> float:
            long = sum(len(prompt) for prompt in prompts if len(prompt) >= 400)
            return super().takes(prompts, answered) + (long_s - TOKEN_S) * long

    prompts = [(7,) * (400 if number % 8 == 0 else 40) for number in range(600)]
    rates = rates_of(Attention(), of_the_bank(tmp_path, labels=labels), prompts)
    told = rates.token_s * sum(map(len, prompts)) + rates.answer_s * len(prompts)
    takes = 525 * 40 * TOKEN_S + 75 * 400 * long_s
    takes += 600 * ANSWER_S if labels == "generate" else 0.0
    assert told == pytest.approx(takes, rel=0.01)


def test_a_sample_in_forms_stands_for_the_volume_of_all(tmp_path: Path, bank: Any) -> None:
    options, engine = of_the_bank(tmp_path), Timed()
    sample = sampled(options, bank, engine, "chat")
    # A quarter of the questions has three more wordings, a sixth is asked among others.
    assert 1.7 < sample.rows < 1.95
    assert 1.0 < sample.answer_length < 1.2, "some answers may be longer"
    volume = sample.volume(options, 9593, 1800, chat=True)
    assert volume.no_fact_rows == pytest.approx(0.25 * 9593, abs=1)
    assert volume.answered_rows == pytest.approx(1200 + (9593 + 1800) * sample.rows)
    estimate = estimated(volume, Rates(TOKEN_S, ANSWER_S), options, engine)
    tokens = volume.answered_tokens + volume.read_tokens
    usual_answers = 1200 + (volume.answered_rows - 1200) * sample.answer_length
    expected = TOKEN_S * tokens + ANSWER_S * usual_answers
    assert estimate.reading_s == pytest.approx(expected)
    half = estimated(volume, Rates(TOKEN_S, ANSWER_S), options, engine, done=0.5)
    assert half.reading_s == pytest.approx(expected / 2)
    engine.answer_bytes = 1 << 36  # 64 GiB of keys and values, which are copied as they grow
    for read_only, least, most in ((False, 1.5, 1.6), (True, 0.0, 0.3)):
        kept = replace(volume, answered_rows=0.0) if read_only else volume
        memory = estimated(kept, Rates(TOKEN_S, ANSWER_S), options, engine).memory
        assert least < memory / engine.answer_bytes < most
    plain = sampled(of_the_bank(tmp_path, forms="none"), bank, engine, "chat")
    assert plain.rows == 1.0


def test_sampled_answers_count_and_those_of_an_earlier_call_do_not(
    tmp_path: Path, bank: Any
) -> None:
    options, engine = of_the_bank(tmp_path, labels="self"), Timed()
    sample = sampled(options, bank, engine, "chat")
    assert sample.volume(options, 1000, 200, chat=True).sampled_rows == 1000 * sample.rows
    volume = sample.volume(options, 1000, 200, chat=True, held_out_sampled=True)
    assert volume.sampled_rows == 1200 * sample.rows
    rates = Rates(TOKEN_S, ANSWER_S, sample_s=SAMPLES * SAMPLE_S)
    greedy = estimated(volume, replace(rates, sample_s=0.0), options, engine, 1.0, 1.0)
    assert greedy.reading_s == 0
    left = estimated(volume, rates, options, engine, done=1.0, sampled_before=0.25)
    per_row = SAMPLES * SAMPLE_S + TOKEN_S * sample.tokens
    assert left.reading_s == pytest.approx(0.75 * per_row * volume.sampled_rows)


COLD_S, FIT_S, DISTURBED_S = 50.0, 2.0, 9.0


def test_cold_processes_and_one_disturbance_do_not_move_the_rates_of_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, calls = Timed(), list[str]()

    def taking(name: str) -> Any:
        def work(*given: Any, **more: Any) -> None:
            before = calls.count(name)
            cold = before == 0 and (name == "jointly" or "started" not in calls)
            first = (1 + REPEATS) if name == "jointly" else 2 * REPEATS
            clock.now += COLD_S if cold else DISTURBED_S if before == first - 1 else FIT_S
            calls.append(name)

        return work

    monkeypatch.setattr(measuring, "start_processes", lambda jobs: calls.append("started"))
    monkeypatch.setattr(measuring, "fit_probes", taking("apart"))
    monkeypatch.setattr(measuring, "joined", taking("jointly"))
    engine = PlantedEngine()
    options = of_the_bank(tmp_path, readout="attention_head")
    geometry = replace(engine.identity.geometry, num_heads=2)
    rates = fit_rates(Rates(0.0, 0.0), options, geometry, 400, clock.clock)
    assert calls[0] == "started"
    assert options.site is Site.ATTENTION_HEAD
    assert rates.joint_s * 400 == pytest.approx(FIT_S)
    assert rates.choice_s * 400 == pytest.approx(FIT_S)
    assert (rates.call_s + rates.task_s) * 400 == pytest.approx(FIT_S)


def test_what_is_not_measured_by_itself_takes_longer_on_a_busy_machine(tmp_path: Path) -> None:
    options, engine = of_the_bank(tmp_path, evaluate=False), Timed()
    nothing = Volume(*[0.0] * 9)
    for slowdown in (1.0, 4.0):
        rates = Rates(0.0, 0.0, slowdown=slowdown)
        assert estimated(nothing, rates, options, engine).fitting_s == slowdown * AFTER_S


def test_the_first_calls_of_an_engine_do_not_count(tmp_path: Path) -> None:
    class Cold(Timed):
        def takes(self, prompts: Any, answered: bool) -> float:
            return super().takes(prompts, answered) + (3.0 if self.extracts < 2 else 0.0)

    options = of_the_bank(tmp_path / "run", labels="given", forms="none", batch_rows=4)
    engine, data = Cold(), dataset_of(tmp_path, planted_rows(240), "given", folds=5)
    rates = kept_rates(options, data, engine, "text", [options.site], engine.clock)
    assert rates.token_s == pytest.approx(TOKEN_S)


def within(minutes: float, folder: Path, bank: Any, most: int = 9593) -> tuple[int, list[str]]:
    engine, console = Timed(), Quiet()
    asked = of_the_bank(folder), bank, most, lambda questions: questions // 5
    count = questions_within(minutes, *asked, engine, "chat", console, engine.clock)
    return count, console.lines


def test_minutes_are_fitted_by_the_number_of_questions(tmp_path: Path, bank: Any) -> None:
    short, told = within(30, tmp_path, bank)
    assert FEWEST < short < 9593
    assert told == [f"in 30 minutes this machine can do {short:,} of 9,593 questions"]
    longer, _ = within(60, tmp_path, bank)
    assert 1.7 * short < longer < 2.6 * short, "a part of the time does not grow"
    assert within(1e6, tmp_path, bank)[0] == 9593
    assert within(1e6, tmp_path, bank, most=50)[0] == FEWEST
    with pytest.raises(TrainingError, match="1 minutes are too few here: 100 questions") as caught:
        within(1, tmp_path, bank)
    assert caught.value.param == "minutes"


def test_the_same_minutes_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {split: bank_rows(split)[:600] for split in SPLITS}
    monkeypatch.setattr("service.library.training.bank_rows", few.__getitem__)
    options = completed(of_the_bank(tmp_path / "run", minutes=1e6), "owner/tiny")
    assert options.data == ()
    engine, console = Timed(), Quiet()
    chosen = with_questions(options, engine, console, time.monotonic())
    assert chosen.questions == 600
    assert len(Path(chosen.data[0]).read_text(encoding="utf-8").splitlines()) == 600
    calls = engine.extracts
    assert with_questions(options, engine, console, time.monotonic()) == chosen
    assert engine.extracts == calls
    path = tmp_path / "run" / MINUTES
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": "another"}))
    assert with_questions(options, engine, console, time.monotonic()) == chosen
    assert engine.extracts > calls, "another model has another speed"


def test_a_run_keeps_the_number_of_threads_that_its_first_call_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading's last bits depend on it, and so does the digest of a run that is resumed."""
    pay, told, loaded = [1, 1, 2], list[str](), list[int | None]()
    succeeds = False

    def load(*_: object, threads: int | None, **more: object) -> Timed:
        loaded.append(threads)
        if not succeeds:
            raise Loaded
        return Timed()

    def stop(*_: object) -> None:
        raise Loaded

    def run_with(threads: int | None = None) -> int | None:
        options = of_the_bank(tmp_path / "run"), EngineOptions(model="demo"), Store(tmp_path)
        with pytest.raises(Loaded):
            run_training(*options, threads=threads, console=Quiet(), report=told.append)
        return loaded[-1]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("service.library.training.load_engine", load)
    monkeypatch.setattr("service.library.training.with_questions", stop)
    monkeypatch.setattr("joblib.cpu_count", lambda: 2)
    monkeypatch.setattr(threads_module, "threads_that_pay", lambda most: pay.pop(0))
    path = tmp_path / "run" / THREADS
    assert run_with() == 1
    assert not path.exists(), "a model that cannot be loaded leaves nothing"
    told.clear()
    succeeds = True
    assert [run_with(), run_with(), run_with(threads=3)] == [1, 1, 3]
    assert told == [
        "the model runs on 1 of 2 CPU threads, which is fastest now, in the whole run; --threads N"
        " sets another number"
    ]
    for damaged in ("{", "[]", '{"threads": 0}', '{"threads": "2"}'):
        path.write_text(damaged)
        pay[:] = [2]
        assert run_with() == 2
        assert json.loads(path.read_text()) == {"threads": 2}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert run_with() is None, "the environment decides"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"minutes": 5.0, "questions": 50}, "give one of them"),
        ({"minutes": 5.0, "data": ("mine.jsonl",)}, "without --data"),
    ],
)
def test_minutes_choose_the_packages_questions_alone(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=words) as caught:
        completed(TrainOptions(**given), "owner/tiny")
    assert caught.value.param == "minutes"


@pytest.mark.parametrize("labels", ["given", "generate"])
def test_the_trial_of_rows_as_they_are_is_the_beginning_of_the_run(
    tmp_path: Path, labels: str
) -> None:
    options: Options = {"labels": labels, "batch_rows": 16, "evaluate": False}
    plain, measured = PlantedEngine(), PlantedEngine()
    expected, _ = run(tmp_path / "plain", plain, **options)
    bundle, console = run(tmp_path / "measured", measured, measure=True, **options)
    assert bundle.manifest.digest == expected.manifest.digest
    assert (measured.extracts, measured.generates) == (plain.extracts, plain.generates)
    to_do = console.line("to do: ")
    assert to_do.startswith("to do: 240 training rows; ")
    assert ("240 answers of up to 48 tokens" in to_do) == (labels == "generate")
    line = console.line("measured in ")
    assert "the run takes about" in line
    assert "of memory and" in line
    assert "(estimated: " in console.line("took ")


def test_durations_are_for_people() -> None:
    shown = [duration_text(seconds) for seconds in (4.4, 89, 91, 3600, 7260)]
    assert shown == ["4 s", "89 s", "2 min", "60 min", "2 h 01 min"]
