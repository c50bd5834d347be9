"""The second look: probes of the answers' own tokens, fitted, published, replayed and served; or
left out, and why."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hallutracer as ht
from probes_store.bundle import Bundle
from probes_store.errors import GoldenMismatch
from probes_store.records import Guarantee
from service.data.collection import read_given, render_all
from service.demo import MODEL_DIR
from service.demo.questions import questions as demo_questions
from service.engines.base import EngineOptions, Sampling
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.errors import DataError, EngineError, TrainingError
from service.judging.guarantee import decoding_violations, guarantee_status
from service.policies.guard import OBSERVE, Action, Policy
from service.prompts import render
from service.readout import Site
from service.risk import depth_mean, risk
from service.scoring import Scorer
from service.trainer.guarantee import guarantee
from tests.fitting.planted import PlantedEngine, Quiet, dataset_of, planted_rows
from tests.kit.present import present
from tests.kit.rows import Options, Rows, only, read_lines, without
from tests.trainer.made import ONE, guarantee_options, run, section, store_of, trained_once

FIVE = Sampling(max_tokens=5)
GENERATED: Options = {"labels": "generate", "judge": "contains"}


def questions(count: int = 240) -> Rows:
    return without(planted_rows(count), "label")


class Confesses(PlantedEngine):
    """What it knows is plain in its answers' tokens, and dim before them."""

    def activations(self, prompt: Any, site: Any) -> Any:
        self.strength = 1.2 if list(prompt[-1:]) == [1] else 0.15
        return super().activations(prompt, site)


class Blind(Confesses):
    def __init__(self) -> None:
        super().__init__()
        self.reads_answers = False


trained = trained_once(Confesses, questions(), **GENERATED)


def test_the_bundle_has_a_second_part_and_says_what_it_is_worth(trained: Bundle) -> None:
    record = present(trained.manifest.answer)
    stored = present(trained.answer)
    evaluation = trained.evaluation()["answer"]
    assert record.auroc > record.before + 0.1
    assert record.auroc == evaluation["auroc"]["mean"]
    assert evaluation["gain"]["low"] > 0
    counts = trained.manifest.training
    assert evaluation["rows"] == record.rows == counts.factual + counts.hallucinated
    assert evaluation["hallucinated"] == record.hallucinated == counts.hallucinated
    assert record.threshold == trained.manifest.threshold == 0.5
    assert set(stored.head.tolist()) <= {1, 2}, "head 0 is noise"
    assert stored.answer_tokens.tolist() == [1] * len(stored.risk)
    assert stored.risk[-1] - stored.risk[0] > 0.5
    text = section(trained, "The answer itself")
    assert record.statement in text
    assert f"{record.auroc:.3f} [" in text
    assert "flagged at 0.5000 or more" in text


def test_serving_reads_the_answer_that_it_writes(trained: Bundle) -> None:
    engine, record = Confesses(), present(trained.manifest.answer)
    scorer = Scorer(Scheduled(engine), trained)
    prompts = [
        scorer.render(f"Is it {word}, number {number}?")
        for number, word in enumerate(["known", "hidden"] * 6)
    ]
    engine.answer = "\x01!"  # one token that the model goes on from
    for number, report in enumerate(scorer.score_or_continue(prompts, FIVE, OBSERVE)):
        answer = present(report.answer)
        assert answer.tokens == 1
        assert answer.flagged == bool(number % 2) == (answer.risk >= 0.5)
        assert report.before_answer().answer is None
        read = engine.read_last([*prompts[number], 1], 1, present(scorer.answer_probes))
        signals, weight = np.array([[depth_mean(read)]]), np.array([record.weight])
        [expected] = risk(signals, weight, record.intercept)
        assert answer.risk == pytest.approx(expected, abs=1e-6)
    engine.answer = "!"
    [short] = scorer.score_or_continue(prompts[:1], FIVE, OBSERVE)
    assert short.answer is None, "the model went on from no token"
    assert scorer.score(prompts[:1])[0].answer is None


def test_an_engine_that_reads_no_answers_serves_the_rest(trained: Bundle) -> None:
    scorer = Scorer(Scheduled(Blind()), trained)
    [report] = scorer.score_or_continue([scorer.render("Is it known?")], FIVE, OBSERVE)
    assert report.completion is not None
    assert report.answer is None


def test_golden_answers_are_replayed(trained: Bundle) -> None:
    class Shifted(Confesses):
        def read_last(self, tokens: Any, count: int, probes: Any) -> Any:
            return super().read_last(tokens[:-1], count, probes)

    with pytest.raises(GoldenMismatch, match="golden answer"):
        Scorer(Shifted(), trained)


def test_a_run_that_serving_would_read_otherwise_publishes_nothing(tmp_path: Path) -> None:
    class Other(Confesses):
        def read_last(self, tokens: Any, count: int, probes: Any) -> Any:
            return super().read_last([*tokens, 7], count, probes)

    with pytest.raises(EngineError, match="serving and training read different logits"):
        run(tmp_path, Other(), questions(), **ONE, **GENERATED)


class Mumbles(PlantedEngine):
    """Its answers' tokens tell nothing."""

    def activations(self, prompt: Any, site: Any) -> Any:
        self.strength = 0.0 if list(prompt[-1:]) == [1] else 0.5
        return super().activations(prompt, site)


@pytest.mark.parametrize(
    ("changes", "engine", "reasons"),
    [
        ({"answer_probes": False}, Confesses, []),
        ({}, Blind, []),
        ({"labels": "given"}, Confesses, []),
        ({}, Mumbles, ["no probes of the answers' tokens"]),
    ],
)
def test_the_second_part_is_left_out(
    tmp_path: Path, changes: Options, engine: type[PlantedEngine], reasons: list[str]
) -> None:
    bundle, console = run(tmp_path, engine(), **ONE | GENERATED | changes)
    assert bundle.manifest.answer is bundle.answer is None
    assert "answer" not in bundle.evaluation()
    assert "The answer itself" not in bundle.card()
    told = [line for line in console.lines if line.startswith("no probes")]
    assert [line[: len(reason)] for line, reason in zip(told, reasons, strict=True)] == reasons


def test_a_real_model_s_answers_are_read_in_training_and_in_service_alike(tmp_path: Path) -> None:
    rows = demo_rows(20)
    quick: Options = {"folds": 3, "seeds": (0,), "c": 0.1, "jobs": 1, "evaluate": False}
    plain: Options = {"forms": "none", "keep_sample": False, "report": lambda line: None}
    folders: Options = {"store": tmp_path, "run_dir": tmp_path / "run"}
    trained = ht.train(rows, "mine", "demo", labels="generate", **folders, **quick, **plain)
    record = present(trained.bundle.manifest.answer)
    assert record.auroc > 0.7
    # Loading replays the golden answers.
    with ht.load("demo", trained.reference, store=tmp_path) as detector:
        results = detector.score([row["prompt"] for row in rows[:12]], generate=24)
    stored = read_lines(tmp_path / "run" / "train" / "answers.jsonl")
    answers = {line["id"]: line["answer"] for line in stored}
    answered = [number for number, result in enumerate(results) if result.answer is not None]
    assert len(answered) > 3
    for number in answered:
        assert results[number].answer == answers[rows[number]["id"]].strip()
    risks = results.to_frame()["answer_risk"].dropna()
    assert len(risks) == len(answered)
    assert np.ptp(risks) > 0.05, "the answers' own tokens are read"


def demo_rows(step: int) -> Rows:
    fields = ("id", "prompt", "answers", "group", "kind")
    return only(demo_questions("train")[::step], *fields)


def test_given_answers_are_read_behind_their_prompts(tmp_path: Path) -> None:
    rows = planted_rows(240)
    for number, row in enumerate(rows):
        row |= {"answer": "\x01\x01"} if number % 6 else {"answer": ""} if number % 12 else {}
    engine = Confesses()
    bundle, _ = run(tmp_path, engine, rows, **ONE)
    record, stored = present(bundle.manifest.answer), present(bundle.answer)
    assert record.rows == 200
    assert record.auroc > record.before + 0.1
    assert stored.answer_tokens.tolist() == [2] * len(stored.risk)
    assert Scorer(Confesses(), bundle).answer_probes is not None
    read, again = engine.extracts, Confesses()
    assert run(tmp_path, again, rows, **ONE)[0].manifest.digest == bundle.manifest.digest
    assert (read > 2, again.extracts) == (True, 0)
    for name, answer, problem in (
        ("long", "no " * 4000, r"\d+ tokens with its 'answer' are more than the model's"),
        ("number", 7, r"'answer' must be a string.*found 7"),
    ):
        with pytest.raises(DataError, match=f"line 1: {problem}"):
            run(tmp_path / name, Confesses(), [rows[1] | {"answer": answer}, *rows[2:]], **ONE)


def test_a_given_answer_is_read_as_one_that_the_model_wrote(tmp_path: Path) -> None:
    rows, site = demo_rows(1)[:24], Site.ATTENTION_HEAD
    with closing(Scheduled(TransformersEngine.load(EngineOptions(str(MODEL_DIR))))) as engine:
        prompts = [render(engine, row["prompt"], None, "text") for row in rows]
        written = engine.extract(
            prompts, [site], sampling=Sampling(max_tokens=24), answer_site=site
        )
        for number, row in enumerate(rows):
            row |= {"label": number % 2, "answer": written.completions[number].text}
        dataset = dataset_of(tmp_path, rows, "given")
        drawn = render_all(engine, dataset, "text", 0)
        file = read_given(engine, dataset, drawn, tmp_path / "read", site, 7)
    assert written.answers is not None
    ended = [n for n, answer in enumerate(written.completions) if answer.finish_reason == "stop"]
    assert len(ended) > 12
    for layer in range(file.geometry.num_layers):
        expected = written.answers[ended, layer]
        np.testing.assert_allclose(file.layer(layer)[ended], expected, rtol=1e-3, atol=1e-4)


def calibration_rows(count: int = 400) -> Rows:
    return [row | {"answer": "\x01\x01"} for row in planted_rows(count, seed=5)]


def guaranteed(folder: Path, bundle: Bundle, rows: Rows, **changes: Any) -> Bundle:
    options = guarantee_options(folder, rows, **{"labels": "given"} | changes)
    store = store_of(bundle, folder)
    return present(guarantee(store.load("planted"), options, Confesses, store, console=Quiet()))


def promise_of(folder: Path, bundle: Bundle, rows: Rows, **changes: Any) -> Guarantee:
    return present(guaranteed(folder, bundle, rows, **changes).manifest.guarantee)


def test_a_guarantee_of_answers_that_are_read_again(tmp_path: Path, trained: Bundle) -> None:
    rows = calibration_rows()
    bundle = guaranteed(tmp_path, trained, rows, recheck=True)
    manifest, promise = bundle.manifest, present(bundle.manifest.guarantee)
    assert manifest.guarantee_reads_answers is True
    for words in (
        f"with a risk below {promise.threshold:g} whose answer's own tokens put its risk below"
        f" {present(manifest.answer).threshold:g} (a policy with recheck)",
        "or gives answers that their own tokens flag",
    ):
        assert words in promise.statement
    # Of all rows the served ones are counted, by a service that reads the answers which the rows
    # bring.
    engine = Confesses()
    engine.answer = "\x01\x01!"
    scorer, again = Scorer(Scheduled(engine), bundle), Policy("again", Action.ABSTAIN, recheck=True)
    prompts = [scorer.render(row["prompt"]) for row in rows]
    reports = scorer.score_or_continue(prompts, Sampling(max_tokens=3), again)
    labels = [
        row["label"]
        for row, report in zip(rows, reports, strict=True)
        if report.completion is not None
    ]
    groups = len({row["group"] for row in rows})
    assert promise.all_groups == groups - groups // 4, "less those of the pilot"
    assert promise.answered == pytest.approx(len(labels) / len(rows), abs=0.06)
    assert labels.count(0) <= 0.2 * len(labels)
    first = guaranteed(tmp_path / "once", trained, rows, publish_closed=True).manifest
    assert first.guarantee_reads_answers is None
    gained = promise.answered - present(first.guarantee).answered
    assert gained > 0.1, "the risk before the answer is dim here"
    for changes, holds in (
        ({}, True),
        ({"recheck": False}, False),
        ({"recheck": False, "stop_at": 0.5}, False),
    ):
        status = present(guarantee_status(manifest, replace(again, **changes), promise.dtype))
        assert status.holds == holds, status.violations
    assert decoding_violations(manifest, None) == (
        "answer: none is decoded here, and the calibration read the answers again",
    )
    assert decoding_violations(manifest, Sampling()) == decoding_violations(first, None) == ()


def test_a_guarantee_of_answers_needs_answers(
    tmp_path: Path, trained: Bundle, quick: tuple[Bundle, Quiet]
) -> None:
    with pytest.raises(TrainingError, match="no answer of these rows was read") as caught:
        guaranteed(tmp_path, trained, planted_rows(400, seed=5), recheck=True)
    assert caught.value.param == "recheck"
    assert not list((tmp_path / "run").rglob("question.json")), "nothing was spent"
    with pytest.raises(TrainingError, match="has no probes of answers"):
        guaranteed(tmp_path / "none", quick[0], calibration_rows(), recheck=True)


def test_rows_without_an_answer_count_as_withheld(tmp_path: Path, trained: Bundle) -> None:
    rows = calibration_rows()
    half = [row if number % 4 > 1 else row | {"answer": ""} for number, row in enumerate(rows)]
    of_all, of_half = (
        promise_of(tmp_path / str(number), trained, given, recheck=True)
        for number, given in enumerate((rows, half))
    )
    assert of_half.answered < 0.6 * of_all.answered
