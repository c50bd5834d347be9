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
from tests.fitting.planted import PlantedEngine, planted_rows
from tests.trainer.made import run, served

SOFT: dict[str, Any] = {"labels": "sample", "samples": 5, "temperature": 0.7, "seeds": (0,)}
DRAWN = "samples-t0.7.jsonl"


class SamplingEngine(PlantedEngine):
    """Sampled answers are right three times in four where the greedy one is, else one time in four; one in ten is
    empty.  A draw depends on prompt and seed alone."""

    def __init__(self, strength: float = 0.5, fail_at: int | None = None) -> None:
        super().__init__(strength)
        self.drawn: list[int] = []  # prompts of each call for samples
        self.fail_at = fail_at

    def generate(self, prompts: Any, sampling: Sampling) -> list[Completion]:
        if sampling.temperature == 0:
            return super().generate(prompts, sampling)
        if self.fail_at == len(self.drawn):
            raise KeyboardInterrupt
        self.drawn.append(len(prompts))
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
    run(folder, SamplingEngine(), test=planted_rows(120, seed=3), **SOFT)
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
    texts: dict[int, set[str]] = {}
    for answer in read_samples(soft / "run" / "train", SampleOptions(5, 0.7)):
        texts.setdefault(answer["row"], set()).add(answer["answer"])
    assert np.mean([len(own) > 1 for own in texts.values()]) > 0.5  # samples of a row differ


def test_the_risk_is_that_of_a_sampled_answer(tmp_path: Path) -> None:
    rows = planted_rows(200, seed=9)
    known = np.array(["known" in row["prompt"] for row in rows])
    spread = []
    for name, changes in (("soft", SOFT), ("hard", {"labels": "generate", "seeds": (0,)})):
        bundle, _ = run(tmp_path / name, SamplingEngine(2.0), evaluate=False, **changes)
        risks = np.array([report.risk for report in served(bundle, rows, PlantedEngine(2.0))])
        spread.append((risks[known].mean(), risks[~known].mean()))
    # Of the answers that are not empty, these shares are wrong.
    assert spread[0] == pytest.approx((1 - 0.75 / 0.9, 1 - 0.25 / 0.9), abs=0.06)
    assert spread[1] == pytest.approx((0, 1), abs=0.06)  # of greedy answers


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "SAMPLED_TOGETHER", 100)  # three calls for each sample
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, SamplingEngine(fail_at=7), evaluate=False, **SOFT)
    done = (tmp_path / "run" / "train" / DRAWN).read_text()
    assert len(done.splitlines()) == 2 * 240 + 100
    (tmp_path / "run" / "train" / DRAWN).write_text(done[:-20])  # the last call's end never reached the disk
    engine, more = SamplingEngine(), SamplingEngine()
    bundle, _ = run(tmp_path, engine, evaluate=False, **SOFT)
    assert engine.drawn == [100, 100, 40] * 3
    whole, _ = run(tmp_path / "whole", SamplingEngine(), evaluate=False, **SOFT)
    assert bundle.manifest.digest == whole.manifest.digest
    run(tmp_path, more, evaluate=False, **SOFT | {"samples": 6})  # one more keeps the five
    assert more.drawn == [100, 100, 40]
    for count in (5, 6):
        found = read_samples(tmp_path / "run" / "train", SampleOptions(count, 0.7))
        assert len(found) == count * 240
        assert {answer["sample"] for answer in found} == set(range(count))
    again, _ = run(tmp_path, SamplingEngine(), evaluate=False, **SOFT)  # and five of six are the five
    assert again.manifest.digest == bundle.manifest.digest


def test_greedy_verdicts_alone_are_audited(soft: Path) -> None:
    found = sample(read_dataset(soft / "rows.jsonl", "generate", folds=0), soft / "run", 20)
    records = map(json.loads, (soft / "run" / "train" / "answers.jsonl").read_text().splitlines())
    answers = {record["id"]: record["answer"] for record in records}
    assert found
    assert all(row["answer"] == answers[row["id"]] for row in found)


class Sure(SamplingEngine):
    """Every sampled answer is as the greedy one."""

    def generate(self, prompts: Any, sampling: Sampling) -> list[Completion]:
        return PlantedEngine.generate(self, prompts, sampling)


def test_samples_without_doubt_train_the_bundle_of_the_greedy_labels(tmp_path: Path) -> None:
    one, other = (run(tmp_path / changes["labels"], Sure(), evaluate=False, **changes)[0]
                  for changes in (SOFT, {"labels": "generate", "seeds": (0,)}))  # fmt: skip
    assert one.manifest.classifier == other.manifest.classifier
    assert one.probes.direction.tobytes() == other.probes.direction.tobytes()
