"""Training on the error rate over sampled answers: drawn once, resumed, fitted softly, measured by greedy labels."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hallutracer_research.data.judge_audit import sample
from probes_store.store import Store
from service.data import collection
from service.data.labels import read_samples
from service.data.options import SampleOptions
from service.data.training_rows import read_dataset
from service.engines.base import Completion, Sampling
from service.errors import TrainingError
from service.scoring import Scorer
from service.trainer.options import TrainOptions
from service.trainer.run import train
from tests.fitting.planted import PlantedEngine, Quiet, planted_rows, write_rows
from tests.trainer.test_run import FAST, run

SOFT: dict[str, Any] = {"labels": "sample", "samples": 5, "temperature": 0.7}
GREEDY, DRAWN = "answers.jsonl", "samples-t0.7.jsonl"


class SamplingEngine(PlantedEngine):
    """Sampled answers are right three times in four where the greedy one is, else one time in four; one in ten is
    empty.  A draw depends on prompt and seed alone."""

    def __init__(self, strength: float = 0.5) -> None:
        super().__init__(strength)
        self.drawn: list[tuple[int, float]] = []  # prompts and temperature of each call for samples
        self.fail_at: int | None = None

    def generate(self, prompts: Any, sampling: Sampling) -> list[Completion]:
        if sampling.temperature == 0:
            return super().generate(prompts, sampling)
        if self.fail_at == len(self.drawn):
            raise KeyboardInterrupt
        self.drawn.append((len(prompts), sampling.temperature))
        answers = []
        for prompt in prompts:
            text = self.detokenize(prompt)
            draw = hashlib.sha256(f"{sampling.seed} {text}".encode()).digest()[0] / 256
            right = draw < (0.75 if "known" in text else 0.25)
            said = "" if draw > 0.9 else "It is Paris." if right else "It is Rome."
            answers.append(Completion(said, (1, 2), "stop"))
        return answers


@pytest.fixture(scope="module")
def soft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("soft")
    test = write_rows(folder / "test.jsonl", planted_rows(120, seed=3))
    run(folder, SamplingEngine(), test=test, **SOFT)
    return folder


def test_the_bundle_says_what_it_was_fitted_on_and_measured_by(soft: Path) -> None:
    bundle = Store(soft / "store").load("planted")
    assert (bundle.manifest.training.labels, bundle.manifest.training.judge) == ("generate", "contains")
    found = bundle.evaluation()["data"]["soft_labels"]
    assert (found["samples"], found["temperature"]) == (5, 0.7)
    assert found["right_where_the_greedy_answer_is"] > 0.7
    assert 0.5 < found["rows_with_right_and_wrong_answers"] < 1
    card = " ".join(bundle.card().split())
    assert "the share of right ones among 5 answers sampled at temperature 0.7" in card
    assert "by the greedy answers' labels" in card
    crossed = bundle.evaluation()["cross_validation"]["signals"]["depth_mean_unit_norm"]
    assert crossed["auroc"]["mean"] > 0.85
    # An answer is right three times in four: greedy labels are surer than risks that are those of a sampled answer.
    assert crossed["calibration_slope"]["mean"] > 1.3
    assert not (soft / "run" / "test" / DRAWN).exists()  # held-out rows are only measured on


def test_the_risk_is_that_of_a_sampled_answer(tmp_path: Path) -> None:
    rows = planted_rows(200, seed=9)
    known = np.array(["known" in row["prompt"] for row in rows])
    spread = []
    for name, changes in (("soft", SOFT), ("hard", {"labels": "generate"})):
        bundle, _ = run(tmp_path / name, SamplingEngine(2.0), evaluate=False, **changes)
        scorer = Scorer(PlantedEngine(2.0), bundle)
        risks = np.array([scorer.score([scorer.render(row["prompt"])])[0].risk for row in rows])
        spread.append((risks[known].mean(), risks[~known].mean()))
    # Of the answers that are not empty, these shares are wrong.
    assert spread[0] == pytest.approx((1 - 0.75 / 0.9, 1 - 0.25 / 0.9), abs=0.06)
    assert spread[1] == pytest.approx((0, 1), abs=0.06)  # of greedy answers


def test_an_interrupted_run_goes_on_with_the_sample_where_it_stopped(
    soft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "SAMPLED_TOGETHER", 100)  # three calls for each sample
    engine = SamplingEngine()
    engine.fail_at = 7
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, engine, evaluate=False, **SOFT)
    done = (tmp_path / "run" / "train" / DRAWN).read_text()
    assert len(done.splitlines()) == 2 * 240 + 100
    (tmp_path / "run" / "train" / DRAWN).write_text(done[:-20])  # the last call's end never reached the disk
    engine = SamplingEngine()
    bundle, _ = run(tmp_path, engine, evaluate=False, **SOFT)
    assert [count for count, _ in engine.drawn] == [100, 100, 40] * 3
    whole, _ = run(tmp_path / "whole", SamplingEngine(), evaluate=False, **SOFT)
    assert bundle.manifest.digest == whole.manifest.digest
    engine = SamplingEngine()
    run(tmp_path, engine, evaluate=False, **SOFT | {"samples": 6})  # one more keeps the five
    assert [count for count, _ in engine.drawn] == [100, 100, 40]
    folder = tmp_path / "run" / "train"
    for count in (5, 6):
        found = read_samples(folder, SampleOptions(count, 0.7))
        assert len(found) == count * 240
        assert {answer["sample"] for answer in found} == set(range(count))
    again, _ = run(tmp_path, SamplingEngine(), evaluate=False, **SOFT)  # and five of six are the five
    assert again.manifest.digest == bundle.manifest.digest


def test_samples_of_a_row_differ(soft: Path) -> None:
    texts: dict[int, set[str]] = {}
    for answer in read_samples(soft / "run" / "train", SampleOptions(5, 0.7)):
        texts.setdefault(answer["row"], set()).add(answer["answer"])
    assert np.mean([len(found) > 1 for found in texts.values()]) > 0.5


def test_greedy_verdicts_alone_are_audited(soft: Path) -> None:
    dataset = read_dataset(soft / "rows.jsonl", "generate", folds=0)
    found = sample(dataset, soft / "run", 20)
    answers = {}
    for line in (soft / "run" / "train" / GREEDY).read_text().splitlines():
        record = json.loads(line)
        answers[record["id"]] = record["answer"]
    assert all(row["answer"] == answers[row["id"]] for row in found)


@pytest.mark.parametrize("change", [{"samples": 1}, {"temperature": 0.0}, {"class_balance": "downsample"}])
def test_senseless_options_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(TrainingError) as caught:
        TrainOptions(name="n", **SOFT | change).check()
    assert caught.value.param in change


class Sure(SamplingEngine):
    """Every sampled answer is as the greedy one."""

    def generate(self, prompts: Any, sampling: Sampling) -> list[Completion]:
        return PlantedEngine.generate(self, prompts, sampling)


def test_samples_without_doubt_train_the_bundle_of_the_greedy_labels(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", planted_rows(240))
    bundles = []
    for name, changes in (("a", SOFT), ("b", {"labels": "generate"})):
        options = TrainOptions(data=(str(data),), name=name, run_dir=tmp_path / name, evaluate=False, **FAST | changes)
        bundles.append(train(options, Sure, Store(tmp_path / "store"), console=Quiet()))
    one, other = bundles
    assert one.manifest.classifier == other.manifest.classifier
    assert one.probes.direction.tobytes() == other.probes.direction.tobytes()
