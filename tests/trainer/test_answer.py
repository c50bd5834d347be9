"""The second look: probes of the answers' own tokens, fitted, published, replayed and served; or
left out, and why."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hallutracer as ht
from probes_store.bundle import Bundle
from probes_store.errors import GoldenMismatch
from service.data.collection import read_given, render_all
from service.data.run_folder import RowsFile
from service.data.training_rows import read_dataset
from service.demo import MODEL_DIR
from service.demo.questions import questions as demo_questions
from service.engines.base import EngineOptions, Sampling
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.errors import DataError, EngineError, TrainingError
from service.fitting.probes import Readouts
from service.judging.guarantee import decoding_violations, guarantee_status
from service.policies.guard import OBSERVE, Action, Policy
from service.prompts import render
from service.readout import Geometry, Probes, Site
from service.risk import depth_mean, risk
from service.scoring import Scorer
from service.trainer.guarantee import guarantee
from service.trainer.options import GuaranteeOptions
from service.trainer.prepare import trajectories
from tests.fitting.planted import PlantedEngine, Quiet, planted_rows, write_rows
from tests.kit.rows import only, without
from tests.trainer.made import ONE, run, section, store_of

ASKED = ("id", "prompt", "answers", "group", "kind")
GENERATED: dict[str, Any] = {"labels": "generate", "judge": "contains"}


def questions(count: int = 240) -> list[dict[str, Any]]:
    return without(planted_rows(count), "label")


class Confesses(PlantedEngine):
    """What it knows is plain in its answers' tokens, and dim before them."""

    def activations(self, prompt: Any, site: Any) -> Any:
        self.strength = 1.2 if list(prompt[-1:]) == [1] else 0.15
        return super().activations(prompt, site)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return run(tmp_path_factory.mktemp("answer"), Confesses(), questions(), **GENERATED)[0]


def test_the_bundle_has_a_second_part_and_says_what_it_is_worth(trained: Bundle) -> None:
    record = trained.manifest.answer
    stored = trained.answer
    evaluation = trained.evaluation()["answer"]
    assert record is not None
    assert stored is not None
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
    engine = Confesses()
    scorer = Scorer(Scheduled(engine), trained)
    prompts = [
        scorer.render(f"Is it {word}, number {number}?")
        for number, word in enumerate(["known", "hidden"] * 6)
    ]
    engine.answer = "\x01!"  # one token that the model goes on from
    reports = scorer.score_or_continue(prompts, Sampling(max_tokens=5), OBSERVE)
    for place, report in enumerate(reports):
        assert report.answer is not None
        assert report.answer.tokens == 1
        assert report.answer.flagged == bool(place % 2) == (report.answer.risk >= 0.5)
        assert report.before_answer().answer is None
    engine.answer = "!"
    [short] = scorer.score_or_continue(prompts[:1], Sampling(max_tokens=5), OBSERVE)
    assert short.answer is None, "the model went on from no token"
    assert scorer.score(prompts[:1])[0].answer is None


def test_an_engine_that_reads_no_answers_serves_the_rest(trained: Bundle) -> None:
    engine = Confesses()
    engine.reads_answers = False
    scorer = Scorer(Scheduled(engine), trained)
    [report] = scorer.score_or_continue(
        [scorer.render("Is it known?")], Sampling(max_tokens=5), OBSERVE
    )
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


@pytest.mark.parametrize(
    ("changes", "engine", "said"),
    [
        ({"answer_probes": False}, Confesses, ""),
        ({}, "blind", ""),
        ({"labels": "given"}, Confesses, ""),
        ({}, "dumb", "no probes of the answers' tokens"),
    ],
)
def test_the_second_part_is_left_out(
    tmp_path: Path, changes: dict[str, Any], engine: Any, said: str
) -> None:
    class Blind(Confesses):
        def __init__(self) -> None:
            super().__init__()
            self.reads_answers = False

    class Dumb(PlantedEngine):
        """Its answers' tokens tell nothing."""

        def activations(self, prompt: Any, site: Any) -> Any:
            self.strength = 0.0 if list(prompt[-1:]) == [1] else 0.5
            return super().activations(prompt, site)

    made = {"blind": Blind, "dumb": Dumb}.get(engine, engine)()
    rows = planted_rows(240) if changes.get("labels") == "given" else questions()
    bundle, console = run(tmp_path, made, rows, **ONE | GENERATED | changes)
    assert bundle.manifest.answer is bundle.answer is None
    assert "answer" not in bundle.evaluation()
    assert "The answer itself" not in bundle.card()
    told = [line for line in console.lines if line.startswith("no probes")]
    assert [said in line for line in told] == [True] * bool(said)


def test_a_real_model_s_answers_are_read_in_training_and_in_service_alike(tmp_path: Path) -> None:
    rows = only(demo_questions("train")[::10], *ASKED)
    quick: dict[str, Any] = {
        "seeds": (0,),
        "folds": 3,
        "c": 0.1,
        "jobs": 1,
        "forms": "none",
        "evaluate": False,
        "keep_sample": False,
        "report": lambda line: None,
    }
    made = ht.train(
        rows, "mine", "demo", labels="generate", store=tmp_path, run_dir=tmp_path / "run", **quick
    )
    record, stored = made.bundle.manifest.answer, made.bundle.answer
    assert record is not None
    assert stored is not None
    assert record.auroc > 0.7
    with ht.load("demo", made.reference, store=tmp_path) as detector:  # replays the golden answers
        found = detector.score([row["prompt"] for row in rows[:12]], generate=24)
    folder = tmp_path / "run" / "train"
    with (folder / "answers.jsonl").open() as lines:
        said = {line["id"]: line["answer"].strip() for line in map(json.loads, lines)}
    site, shape = Site.ATTENTION_HEAD, made.bundle.manifest.model
    geometry = Geometry(shape.num_layers, shape.num_heads, shape.head_dim, shape.hidden_size)
    collected = RowsFile(folder / f"rows-{site}-answer.f32", geometry, site, len(rows))
    probes = Probes.of(site, stored)
    logits = trajectories(Readouts(collected, np.arange(12), np.zeros(12, np.int64)), [probes])
    risks = risk(depth_mean(logits)[:, None], np.array([record.weight]), record.intercept)
    answered = [place for place, one in enumerate(found) if one.answer is not None]
    assert len(answered) > 3
    for place in answered:
        assert found[place].answer == said[rows[place]["id"]]
        assert found[place].answer_risk == pytest.approx(risks[place], abs=1e-4)
    assert np.ptp(risks[answered]) > 0.05, "else any number would do"
    assert found.to_frame()["answer_risk"].notna().sum() == len(answered)


def test_given_answers_are_read_behind_their_prompts(tmp_path: Path) -> None:
    rows = planted_rows(240)
    for place, row in enumerate(rows):
        row |= {"answer": "\x01\x01"} if place % 6 else {"answer": ""} if place % 12 else {}
    engine = Confesses()
    bundle, _ = run(tmp_path, engine, rows, **ONE)
    record, stored = bundle.manifest.answer, bundle.answer
    assert record is not None
    assert stored is not None
    assert record.rows == 200
    assert record.auroc > record.before + 0.1
    assert stored.answer_tokens.tolist() == [2] * len(stored.risk)
    assert Scorer(Confesses(), bundle).answer_probes is not None
    read, again = engine.extracts, Confesses()
    assert run(tmp_path, again, rows, **ONE)[0].manifest.digest == bundle.manifest.digest
    assert (read > 2, again.extracts) == (True, 0)
    with pytest.raises(
        DataError, match=r"line 1: \d+ tokens with its 'answer' are more than the model's"
    ):
        run(tmp_path / "long", Confesses(), [rows[1] | {"answer": "no " * 4000}, *rows[2:]], **ONE)
    with pytest.raises(DataError, match=r"line 1: 'answer' must be a string.*found 7"):
        run(tmp_path / "number", Confesses(), [rows[1] | {"answer": 7}, *rows[2:]], **ONE)


def test_a_given_answer_is_read_as_one_that_the_model_wrote(tmp_path: Path) -> None:
    rows = only(demo_questions("train")[:24], *ASKED)
    rows = [row | {"label": place % 2} for place, row in enumerate(rows)]
    site = Site.ATTENTION_HEAD
    with closing(Scheduled(TransformersEngine.load(EngineOptions(str(MODEL_DIR))))) as engine:
        prompts = [render(engine, row["prompt"], None, "text") for row in rows]
        made = engine.extract(prompts, [site], sampling=Sampling(max_tokens=24), answer_site=site)
        assert made.answers is not None
        told = [
            row | {"answer": said.text} for row, said in zip(rows, made.completions, strict=True)
        ]
        path = tmp_path / "told.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in told))
        dataset = read_dataset(path, "given", folds=None)
        drawn = render_all(engine, dataset, "text", 0)
        file = read_given(engine, dataset, drawn, tmp_path / "read", site, 7)
    alike = [place for place, said in enumerate(made.completions) if said.finish_reason == "stop"]
    assert len(alike) > 12
    for layer in range(file.geometry.num_layers):
        np.testing.assert_allclose(
            file.layer(layer)[alike], made.answers[alike, layer], rtol=1e-3, atol=1e-4
        )


def calibration_rows(count: int = 400) -> list[dict[str, Any]]:
    return [row | {"answer": "\x01\x01"} for row in planted_rows(count, seed=5)]


def guaranteed(folder: Path, bundle: Bundle, rows: list[dict[str, Any]], **changes: Any) -> Bundle:
    folder.mkdir(exist_ok=True)
    write_rows(folder / "new.jsonl", rows)
    store = store_of(bundle, folder)
    given: dict[str, Any] = {
        "data": (str(folder / "new.jsonl"),),
        "labels": "given",
        "run_dir": folder / "run",
        "alpha": "0.2",
    }
    made = guarantee(
        store.load("planted"),
        GuaranteeOptions(**given | changes),
        Confesses,
        store,
        console=Quiet(),
    )
    assert made is not None
    return made


def test_a_guarantee_of_answers_that_are_read_again(tmp_path: Path, trained: Bundle) -> None:
    made, rows = guaranteed(tmp_path, trained, calibration_rows(), recheck=True), calibration_rows()
    manifest, found = made.manifest, made.manifest.guarantee
    assert found is not None
    assert manifest.guarantee_reads_answers is True
    assert manifest.answer is not None
    line = f"put its risk below {manifest.answer.threshold:g} (a policy with recheck)"
    assert (
        f"with a risk below {found.threshold:g} whose answer's own tokens {line}" in found.statement
    )
    assert "or gives answers that their own tokens flag" in found.statement
    # Of all rows the served ones are counted, by a service that reads the answers which the rows
    # bring.
    engine = Confesses()
    engine.answer = "\x01\x01!"
    scorer, again = Scorer(Scheduled(engine), made), Policy("again", Action.ABSTAIN, recheck=True)
    prompts = [scorer.render(row["prompt"]) for row in rows]
    reports = scorer.score_or_continue(prompts, Sampling(max_tokens=3), again)
    given = [
        row for row, report in zip(rows, reports, strict=True) if report.completion is not None
    ]
    pilot = len({row["group"] for row in rows}) // 4
    assert found.all_groups == len({row["group"] for row in rows}) - pilot
    assert found.answered == pytest.approx(len(given) / len(rows), abs=0.06)
    assert sum(1 - row["label"] for row in given) <= 0.2 * len(given)
    first = guaranteed(tmp_path / "once", trained, rows, publish_closed=True).manifest
    assert first.guarantee is not None
    assert first.guarantee_reads_answers is None
    assert found.answered > first.guarantee.answered + 0.1, "the risk before the answer is dim here"
    for policy, holds in (
        (again, True),
        (replace(again, recheck=False), False),
        (replace(again, recheck=False, stop_at=0.5), False),
    ):
        status = guarantee_status(manifest, policy, found.dtype)
        assert status is not None
        assert status.holds == holds, status.violations
    assert decoding_violations(manifest, None) == (
        "answer: none is decoded here, and the calibration read the answers again",
    )
    assert decoding_violations(manifest, Sampling()) == decoding_violations(first, None) == ()


def test_a_guarantee_of_answers_needs_answers(tmp_path: Path, trained: Bundle) -> None:
    with pytest.raises(TrainingError, match="no answer of these rows was read") as caught:
        guaranteed(tmp_path, trained, planted_rows(400, seed=5), recheck=True)
    assert caught.value.param == "recheck"
    assert not list((tmp_path / "run").rglob("question.json")), "nothing was spent"
    plain, _ = run(tmp_path / "plain", PlantedEngine(), planted_rows(240), **ONE)
    with pytest.raises(TrainingError, match="has no probes of answers"):
        guaranteed(tmp_path / "none", plain, calibration_rows(), recheck=True)


def test_rows_without_an_answer_count_as_withheld(tmp_path: Path, trained: Bundle) -> None:
    rows = calibration_rows()
    half = [row if place % 4 > 1 else {**row, "answer": ""} for place, row in enumerate(rows)]
    whole = guaranteed(tmp_path / "whole", trained, rows, recheck=True).manifest.guarantee
    made = guaranteed(tmp_path / "half", trained, half, recheck=True).manifest.guarantee
    assert whole is not None
    assert made is not None
    assert made.answered < 0.6 * whole.answered
