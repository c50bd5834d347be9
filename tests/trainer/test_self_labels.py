"""Training on questions alone: labels by how far the model's sampled answers agree with its greedy
one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle
from service.data.labels import SAMPLES_FILE
from service.data.options import SAMPLE_TEMPERATURE, SAMPLES
from service.data.training_rows import read_dataset
from service.engines.base import Completion, Sampling, TokenIds, TracedAnswer
from service.errors import DataError, TrainingError
from service.trainer.options import GuaranteeOptions, RecalibrateOptions, TrainOptions
from service.trainer.rates import FIRST_CALL
from service.trainer.recalibrate import recalibrate
from tests.fitting.planted import PlantedEngine, Quiet, dataset_of, planted_rows, write_rows
from tests.kit.rows import Options, Rows, lines_named
from tests.kit.tables import lines
from tests.trainer.made import Never, options_on, run, served, store_of

ROWS = ("rows.jsonl",)
OWN: Options = {"labels": "self", "seeds": (0,), "answer_probes": False}
KNOWN, UNKNOWN = 0.85, 0.2  # probability that a sample agrees


class SamplingEngine(PlantedEngine):
    """Samples agree with the greedy answer with the probability ``KNOWN`` or ``UNKNOWN``; each
    depends on prompt and seed alone."""

    def __init__(self, strength: float = 0.5, fail_at: int | None = None) -> None:
        super().__init__(strength)
        self.sampled: list[int] = []  # prompts of each call
        self.fail_at = fail_at

    def sample(
        self, prompts: Sequence[TokenIds], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[TracedAnswer]]:
        if self.fail_at == len(self.sampled):
            raise KeyboardInterrupt
        if prompts:
            self.sampled.append(len(prompts))
            assert sampling.temperature == SAMPLE_TEMPERATURE
        greedy = PlantedEngine.generate(self, prompts, sampling)
        return [
            [traced(self.sampled_text(self.detokenize(prompt), answer.text, seed)) for seed in own]
            for prompt, answer, own in zip(prompts, greedy, seeds, strict=True)
        ]

    def sampled_text(self, prompt: str, greedy: str, seed: int) -> str:
        draw = int(hashlib.sha256(f"{seed} {prompt}".encode()).hexdigest()[:8], 16) / 2**32
        return greedy if draw < (KNOWN if "known" in prompt else UNKNOWN) else "In Lyon, perhaps."


def questions(count: int = 240, seed: int = 0) -> Rows:
    """Planted rows of which only the prompt is kept."""
    return [{"prompt": row["prompt"].strip()} for row in planted_rows(count, seed=seed)]


def traced(text: str) -> TracedAnswer:
    state = np.zeros((1, 1), np.float32)
    return TracedAnswer(Completion(text, (1, 2), "stop"), np.zeros(2), state, state)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Quiet]:
    """A bundle of questions alone, one a line."""
    folder = tmp_path_factory.mktemp("self")
    text = "\n".join(row["prompt"] for row in questions())
    (folder / "questions.txt").write_text(f"{text}\n\n", encoding="utf-8")
    return run(folder, SamplingEngine(), data=(str(folder / "questions.txt"),), **OWN)


CARD = lines(
    """
    **As trained, this risk says how likely the model contradicts itself
    hallutracer recalibrate.**
    AUROC, nested cross-validation, of the model's contradictions
    it does not say how likely the answer is wrong
    wrong stands for an answer that the model contradicts
    """
)


def test_questions_alone_train_a_bundle_that_says_what_its_risk_means(
    trained: tuple[Bundle, Quiet],
) -> None:
    bundle, console = trained
    record, evaluation = bundle.manifest.training, bundle.evaluation()
    assert (record.labels, record.samples, record.judge) == ("self", SAMPLES, None)
    assert record.sample_temperature == SAMPLE_TEMPERATURE
    own = evaluation["data"]["self_labels"]
    assert (own["samples"], own["figures_by"]) == (SAMPLES, "agreement")
    assert own["agreement"] == pytest.approx((KNOWN + UNKNOWN) / 2, abs=0.1)
    card = " ".join(bundle.card().split())
    for words in CARD:
        assert words in card
    assert "contradicts itself" in console.text
    assert "recommendation" not in evaluation, "nobody knows what is wrong"
    crossed = evaluation["cross_validation"]["signals"]["depth_mean_unit_norm"]
    assert crossed["auroc"]["mean"] > 0.8


def test_the_risk_is_the_probability_that_a_sample_contradicts(tmp_path: Path) -> None:
    bundle, _ = run(tmp_path, SamplingEngine(2.0), questions(), evaluate=False, **OWN)
    rows = planted_rows(200, seed=9)
    known = np.array(["known" in row["prompt"] for row in rows])
    risks = np.array([report.risk for report in served(bundle, rows, SamplingEngine(2.0))])
    assert risks[known].mean() == pytest.approx(1 - KNOWN, abs=0.06)
    assert risks[~known].mean() == pytest.approx(1 - UNKNOWN, abs=0.06)


def test_an_interrupted_run_resumes_and_gives_the_same_bundle(tmp_path: Path) -> None:
    def work(name: str, engine: SamplingEngine) -> str:
        bundle, _ = run(tmp_path / name, engine, questions(), evaluate=False, **OWN)
        return bundle.manifest.digest

    whole = work("whole", SamplingEngine())
    with pytest.raises(KeyboardInterrupt):
        work("torn", SamplingEngine(fail_at=4))
    path = tmp_path / "torn" / "run" / "train" / SAMPLES_FILE
    done = path.read_text(encoding="utf-8")
    path.write_text(done[:-20], encoding="utf-8")  # the end of the last call was never written
    engine, again = SamplingEngine(), SamplingEngine()
    assert work("torn", engine) == whole
    assert engine.sampled[0] == 32, "the call that was cut is made again as a whole"
    work("torn", again)
    assert again.sampled == []


@pytest.mark.parametrize("by", ["answers", "label"])
def test_rows_that_bring_the_truth_are_measured_by_it_and_not_learnt_from_it(
    trained: tuple[Bundle, Quiet], tmp_path: Path, by: str
) -> None:
    """The labels are turned round: the model agrees with itself where it is wrong."""
    rows = questions()
    for number, row in enumerate(rows):
        known = "known" in row["prompt"]
        right = "Paris" if known else "Rome"
        row[by] = int(not known) if by == "label" else [right if number % 3 else "Nice"]
    bundle, _ = run(tmp_path / "truth", SamplingEngine(), rows, **OWN, allow_no_signal=True)
    evaluation, plain = bundle.evaluation(), trained[0].manifest
    assert evaluation["data"]["self_labels"]["figures_by"] == by
    assert bundle.manifest.classifier == plain.classifier
    for count in ("factual", "left_out"):
        assert getattr(bundle.manifest.training, count) == getattr(plain.training, count)
    if by == "label":
        auroc = evaluation["cross_validation"]["signals"]["depth_mean_unit_norm"]["auroc"]
        assert auroc["mean"] < 0.3
        assert evaluation["recommendation"]["use"] == "no"


@pytest.mark.parametrize("answers", [True, False])
def test_held_out_rows_with_answers_need_no_samples(tmp_path: Path, answers: bool) -> None:
    engine = SamplingEngine()
    test = planted_rows(60, seed=3) if answers else questions(60, 3)
    bundle, _ = run(tmp_path, engine, questions(), test=test, evaluate=False, **OWN)
    held = bundle.evaluation()["held_out"]
    assert sum(engine.sampled) == (240 if answers else 240 + 60)
    if answers:
        assert held["signals"]["bundle"]["auroc"] > 0.8
        assert "figures_by" not in held
    else:
        assert held["figures_by"] == "agreement"
        assert "by the model's own samples) that took no part in training" in bundle.card()


def test_fifty_labels_put_it_on_the_scale_of_wrong_answers(
    trained: tuple[Bundle, Quiet], tmp_path: Path
) -> None:
    """Every answer is wrong that the model does not know, and one in three that it knows."""
    rows = [
        {"prompt": row["prompt"], "label": int("known" in row["prompt"] and number % 3 > 0)}
        for number, row in enumerate(planted_rows(50, seed=5))
    ]
    store, options = store_of(trained[0], tmp_path), options_on(RecalibrateOptions, tmp_path, rows)
    own = store.load("planted:1")
    bundle = recalibrate(own, options, SamplingEngine, store, console=Quiet())
    assert bundle is not None
    assert bundle.reference == "planted:2"
    assert bundle.manifest.training.labels == "self"
    [record] = bundle.evaluation()["recalibrations"]
    assert record["chosen"] != "identity", "the risk was never a probability of a wrong answer"


def test_traffic_without_labels_tells_nothing_of_wrong_answers(
    trained: tuple[Bundle, Quiet], tmp_path: Path
) -> None:
    rows = planted_rows(50, seed=5)
    traffic = write_rows(tmp_path / "traffic.jsonl", rows)
    options = options_on(RecalibrateOptions, tmp_path, rows, traffic=traffic)
    store = store_of(trained[0], tmp_path)
    with pytest.raises(TrainingError, match="leave --traffic out"):
        recalibrate(store.load("planted:1"), options, Never, store, console=Quiet())


def test_an_engine_that_cannot_sample_is_refused_before_it_reads(tmp_path: Path) -> None:
    engine = PlantedEngine()
    with pytest.raises(TrainingError, match="the transformers engine") as caught:
        run(tmp_path, engine, questions(), **OWN)
    assert (caught.value.param, engine.extracts) == ("labels", 0)


def test_a_model_that_always_agrees_has_nothing_to_teach(tmp_path: Path) -> None:
    class Sure(SamplingEngine):
        def sampled_text(self, prompt: str, greedy: str, seed: int) -> str:
            return greedy

    with pytest.raises(TrainingError, match=r"answers agree: no row is hallucinated"):
        run(tmp_path, Sure(), questions(), **OWN)


def test_the_trial_says_what_the_samples_take(tmp_path: Path) -> None:
    options = OWN | {"evaluate": False, "measure": True, "test": planted_rows(60, seed=3)}
    first, second = SamplingEngine(), SamplingEngine()
    _, console = run(tmp_path, first, questions(), **options)
    to_do = console.line("to do: ")
    assert "300 answers of up to 48 tokens, and 5 sampled ones of 240 rows" in to_do
    assert first.sampled[0] == FIRST_CALL, "the trial"
    assert sum(first.sampled[1:]) == 240
    run(tmp_path, second, **options, wrong_costs=4)
    assert second.sampled == [], "they are in the run folder"


# --- files of questions ---


@pytest.mark.parametrize("labels", ["given", "generate"])
def test_questions_alone_are_told_of_the_labels_that_need_no_more(
    tmp_path: Path, labels: Any
) -> None:
    with pytest.raises(DataError, match="--labels self") as caught:
        run(tmp_path, Never, questions(3), labels=labels)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (
            "\ufeffWho, what, when?\r\n\n  Où est Lyon ? \n",
            [(1, "Who, what, when?"), (3, "Où est Lyon ?")],
        ),
        ('\n{"prompt": "Where?"}\n', [(2, "Where?")]),  # lines of JSON
    ],
)
def test_a_text_has_a_question_a_line(
    tmp_path: Path, text: str, asked: list[tuple[int, str]]
) -> None:
    path = tmp_path / "my questions.txt"
    path.write_bytes(text.encode())
    rows = read_dataset(path, "self", folds=None).rows
    assert [(row.line, row.prompt) for row in rows] == asked
    path.write_bytes(b"Who?\nWh\xe9re?\n")
    with pytest.raises(DataError, match="line 2: not UTF-8 at byte 3"):
        read_dataset(path, "self", folds=None)


def test_labels_and_answers_of_self_labelled_rows_are_checked(tmp_path: Path) -> None:
    rows: Rows = [{"prompt": "Who?", "label": "perhaps"}, {"prompt": "What?", "answers": []}]
    with pytest.raises(DataError) as caught:
        dataset_of(tmp_path, rows, "self")
    assert lines_named(caught.value.problems) == ["line 1", "line 2"]


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        (RecalibrateOptions(data=ROWS, labels="self"), "labels", "which train alone can use"),
        (GuaranteeOptions(data=ROWS, labels="self"), "labels", "which train alone can use"),
        (
            TrainOptions(name="x", data=ROWS, labels="self", calibration=Path("more.jsonl")),
            "calibration",
            "a guaranteed threshold needs labelled rows",
        ),
    ],
)
def test_what_needs_labels_refuses_them(options: Any, field: str, problem: str) -> None:
    with pytest.raises(TrainingError, match=problem) as caught:
        options.check()
    assert caught.value.param == field
