"""The whole run: a planted signal is found, survives kill -9, and leaves a bundle that serves what
was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from probes_store.bundle import Bundle
from probes_store.errors import StoreNotWritable
from probes_store.records import GREEDY, Decoding
from probes_store.store import Store
from service.data.rows import decoding_of
from service.errors import DataError, EngineError, RunMismatch, TrainingError
from service.fitting import nested_cv
from service.readout import Probes, Site
from service.scoring import Scorer
from service.trainer import run as trainer_run
from service.trainer.cards import cell, group_warning
from service.trainer.guarantee import plan
from service.trainer.options import TrainOptions
from service.trainer.publish import golden_rows, model_record, read_risks
from service.trainer.run import train
from tests.fitting.planted import PlantedEngine, Quiet, planted_rows
from tests.kit.rows import Options
from tests.kit.tables import cells, lines
from tests.trainer.made import (
    FUSED,
    ONE,
    Never,
    contents,
    guarantee_options,
    killed,
    options_on,
    run,
    section,
    served,
    trained_once,
)

NO_SIGNAL = "The interval of the bundle's own AUROC reaches chance"
WARM = Decoding(0.7, 1.0)


trained = trained_once(
    test=planted_rows(200, seed=3),
    signals="depth_mean,first_token",
    sites=(Site.RESIDUAL_STREAM,),
    c=None,
    pictures=True,
)


def test_the_planted_signal_is_found_and_recorded(trained: Bundle) -> None:
    evaluation = trained.evaluation()
    manifest = trained.manifest
    card = " ".join(trained.card().split())
    signals = evaluation["cross_validation"]["signals"]
    held = evaluation["held_out"]
    counts = evaluation["data"]
    assert signals["depth_mean_unit_norm"]["auroc"]["mean"] > 0.85
    assert signals["prompt_length"]["auroc"]["mean"] < 0.62
    assert signals["depth_mean_unit_norm"]["auroc_within_kind_x_template"]["mean"] > 0.8
    assert (held["signals"]["bundle"]["auroc"] > 0.85, held["rows"]) == (True, 200)
    assert set(signals) == set(nested_cv.NAMES) - set(nested_cv.CONTEXT_NAMES)
    for name in ("depth_mean_unit_norm", "depth_mean_standardized", "fused_unit_norm"):
        found = signals[name]["auroc"]
        assert 0.75 < found["low"] < found["mean"] < found["high"] < 1
    assert NO_SIGNAL not in card
    gate = evaluation["cross_validation"]["at_threshold"]
    assert gate["wrong_among_answered"] < 0.5 * counts["hallucinated"] / 240
    assert f"{gate['answered']:.0%} of the prompts are answered" in card
    assert f"held-out rows: {held['at_threshold']['answered']:.0%} of the prompts" in card
    for row, rows in (
        (signals["fused_unit_norm"], "never saw the row"),
        (held["calibration"], "on the held-out rows"),
    ):
        slope, intercept = row["calibration_slope"], row["calibration_intercept"]
        assert all(one["low"] < one["mean"] < one["high"] for one in (slope, intercept))
        shown = f"slope {cell(slope)}, intercept {cell(intercept)}"
        assert f"{rows}: {shown}" in card
    assert counts["groups"] == pytest.approx(counts["effective_groups"], rel=0.05)
    assert counts["largest_group_share"] < 0.02
    assert manifest.classifier.weight[0] > 0
    assert (manifest.signals, manifest.training.rows, manifest.training.groups) == (FUSED, 240, 120)
    assert manifest.training.c in manifest.training.c_grid
    assert set(trained.probes.head.tolist()) <= {1, 2}  # head 0 carries noise alone
    assert np.all(trained.probes.trajectory_mean[1] > trained.probes.trajectory_mean[0])
    risks = read_risks(evaluation["out_of_fold"]["risks"])
    assert len(risks.risk) == len(risks.label) == len(risks.group) == 240
    assert (risks.label == 0).sum() == manifest.training.hallucinated
    assert risks.risk[risks.label == 0].mean() > risks.risk[risks.label == 1].mean() + 0.1
    assert len(set(risks.group)) == 120


def test_the_bundle_serves_what_was_evaluated(trained: Bundle) -> None:
    rows = planted_rows(200, seed=3)
    wrong = np.array([1 - row["label"] for row in rows])
    risk = np.array([report.risk for report in served(trained, rows)])
    held_out = trained.evaluation()["held_out"]["signals"]["bundle"]
    assert np.mean((wrong - risk) ** 2) == pytest.approx(held_out["brier"], abs=1e-5)
    golden = trained.golden.risk
    assert len(golden) == 8
    assert np.all(np.diff(golden) >= 0)
    assert golden[-1] - golden[0] > 0.6


def test_the_card_is_valid_and_tells_neither_the_machine_nor_the_hour(trained: Bundle) -> None:
    card, document = trained.card(), (trained.path / "evaluation.json").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["library_name"], front["base_model"]) == ("hallutracer", "scripted")
    metrics = front["model-index"][0]["results"][0]["metrics"]
    held_out = trained.evaluation()["held_out"]["signals"]["bundle"]
    assert metrics[0]["value"] == pytest.approx(held_out["auroc"], abs=1e-4)
    assert [metric["type"] for metric in metrics] == front["metrics"] == ["roc_auc", "brier_score"]
    # Calling every answer wrong may score a high accuracy.
    for never in ("accuracy", "seconds", str(trained.path.parents[2])):
        assert never not in (card + document).lower()
    assert "`depth_mean` carries this bundle" in card
    assert "| rows | 240" in card
    for name in ("roc", "precision_recall", "reliability", "trajectories", "layers"):
        picture = trained.files()[f"plots/{name}.png"]
        assert f"plots/{name}.png" in card
        assert picture[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "scale", ["unit_norm", pytest.param("standardized", marks=pytest.mark.long)]
)
def test_shuffled_labels_leave_nothing(tmp_path: Path, scale: str) -> None:
    rows = planted_rows(300, shuffled=True, per_group=1)
    bundle, _ = run(tmp_path, rows=rows, logit_scale=scale, seeds=(0,), allow_no_signal=True)
    assert NO_SIGNAL in bundle.card()
    check_no_interval(bundle)  # by one seed
    signals = bundle.evaluation()["cross_validation"]["signals"]
    for name in (
        "depth_mean_unit_norm",
        "depth_mean_standardized",
        "depth_mean_joint",
        "best_head",
        "best_layer",
        "fused_unit_norm",
    ):
        assert 0.4 < signals[name]["auroc"]["mean"] < 0.6
    assert 0.4 < bundle.evaluation()["out_of_fold"]["depth_mean_auroc"] < 0.6


def test_the_residual_stream_and_downsampling_and_a_fixed_c(tmp_path: Path) -> None:
    bundle, _ = run(
        tmp_path,
        readout="residual_stream",
        logit_scale="standardized",
        class_balance="downsample",
        **ONE | {"c": 0.2, "prompt_format": "text"},
    )
    manifest = bundle.manifest
    assert (manifest.readout.site, manifest.prompt_format) == ("residual_stream", "text")
    assert (manifest.training.c, manifest.training.c_grid) == (0.2, ())
    assert np.all(bundle.probes.scale != 1)
    assert bundle.evaluation()["out_of_fold"]["depth_mean_auroc"] > 0.75
    Scorer(PlantedEngine(), bundle)  # it replays the golden prompts: read as from disk


def test_generated_labels_are_judged_and_abstentions_left_out(tmp_path: Path) -> None:
    bundle, _ = run(tmp_path, labels="generate", judge="contains", **ONE)
    training = bundle.manifest.training
    assert training.factual == sum("known" in row["prompt"] for row in planted_rows(240))
    assert training.left_out > 10
    assert training.factual + training.hallucinated + training.left_out == 240
    assert (training.labels, training.judge) == ("generate", "contains")
    assert training.decoding == GREEDY
    assert training.shapes == ("0 earlier turns, no passage, no system prompt",)
    assert training.scripts == ("Latin",)
    assert f"| left out | {training.left_out} ({training.left_out} abstained)" in bundle.card()
    assert "how well it works is not known" in bundle.card()
    assert "cross_validation" not in bundle.evaluation()
    engine = PlantedEngine()
    again, _ = run(tmp_path, engine, labels="generate", judge="regex", **ONE)
    assert (
        engine.extracts == engine.generates == 0
    )  # another judge reads the answers that are there
    assert (again.manifest.training.judge, engine.closed) == ("regex", True)


# What the rows say, the option, and what is recorded.
DECODED = cells(
    """
    - | - | -
    greedy | - | greedy
    - | greedy | greedy
    temperature=0 | greedy | greedy
    temperature=0.7 | - | temperature=0.7
    - | temperature=0.7 | temperature=0.7
    temperature=0.7 | temperature=0.7 | temperature=0.7
    """
)


@pytest.mark.parametrize("case", DECODED)
def test_how_given_answers_were_decoded_is_told_by_an_option_or_the_rows(case: list[str]) -> None:
    of_rows, option, expected = (None if cell == "-" else cell for cell in case)
    rows, recorded = {decoding_of(of_rows)}, decoding_of(expected)
    options = TrainOptions(name="a", data=("rows.jsonl",), answers_decoding=option)
    assert options.decoding(rows) == recorded
    some = {None, *rows}
    assert options.decoding(some) == (recorded if option else None if len(some) > 1 else recorded)


def test_options_and_rows_that_differ_are_refused() -> None:
    cases: list[tuple[Options, str]] = [
        ({"answers_decoding": "warm"}, "temperature=T"),
        ({"answers_decoding": "greedy"}, "say sampled at temperature"),
        ({"answers_decoding": "temperature=1", "labels": "generate"}, "belongs to given ones"),
    ]
    for options, problem in cases:
        with pytest.raises(TrainingError, match=problem) as refused:
            TrainOptions(name="a", data=("rows.jsonl",), **options).decoding({WARM})
        assert refused.value.param == "answers_decoding"
    assert TrainOptions(name="a", labels="generate").decoding({None}) == GREEDY


def test_what_rows_say_of_themselves_is_recorded(tmp_path: Path) -> None:
    """How their answers were decoded, which group has many of them, and which ask for no fact."""
    rows = [row | {"decoding": "temperature=0.7"} for row in planted_rows(160)]
    for row in rows[:46]:
        row["group"] = "one"
    rows += [{"prompt": f"Write poem {number}.", "applies": False} for number in range(30)]
    bundle, console = run(tmp_path, rows=rows, **ONE | {"forms": None})
    card, training = bundle.card(), bundle.manifest.training
    assert training.decoding == bundle.manifest.decoding == WARM
    assert "the data file's own, of answers that were sampled at temperature 0.7" in card
    assert "29%" in console.lines[-1]
    assert console.lines[-1] in card
    assert group_warning({"largest_group_share": 0.2}) is None
    assert (training.rows, bundle.evaluation()["data"]["others"]) == (160, 30)
    assert "30 that ask for no fact" in console.text
    greedy = [row | {"decoding": "greedy"} for row in planted_rows(200, seed=5)]
    options, store = guarantee_options(tmp_path, greedy), Store(tmp_path / "store")
    differ = "answers that were greedy, and under planted:1 answers are sampled at"
    with pytest.raises(TrainingError, match=differ):
        plan(bundle, options, store)
    with pytest.raises(TrainingError, match="answers_decoding says"):
        run(tmp_path, Never, answers_decoding="greedy", **ONE)


def test_answers_of_one_class_are_reported(tmp_path: Path) -> None:
    rows = [{**row, "answers": ["Paris", "Rome"]} for row in planted_rows(60)]
    with pytest.raises(TrainingError, match=r"labelled by its answers.*no row is hallucinated"):
        run(tmp_path, rows=rows, labels="generate")


def test_kill_9_and_resume_give_the_same_bundle(tmp_path: Path) -> None:
    options: Options = ONE | {
        "rows": planted_rows(160),
        "labels": "generate",
        "batch_rows": 16,
    }
    for kill_at in (
        5,
        8,
        2,
    ):  # each batch is two calls of this engine: in the readouts; in the answers, twice
        engine = PlantedEngine()
        engine.kill_at = kill_at
        killed(partial(run, tmp_path / "killed", engine, **options))
    folders = tmp_path / "whole", tmp_path / "killed"
    assert len({run(folder, **options)[0].manifest.digest for folder in folders}) == 1
    whole, resumed = (contents(folder / "run" / "train") for folder in folders)
    assert whole == resumed


FEW_WRONG = [{"prompt": f"q{n}", "label": int(n >= 6)} for n in range(200)]


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        ({"rows": [{"id": "a"}]}, DataError, "line 1"),
        *(
            ({"name": name}, TrainingError, "name must be")
            for name in ("../x", "Bad Name", "", "a" * 65)
        ),
        ({"store": "new.jsonl/store"}, StoreNotWritable, "new.jsonl"),
        ({"labels": "generate", "judge": "calls"}, DataError, "more lines: the judge 'calls'"),
        ({"inner_folds": 5, "rows": FEW_WRONG}, TrainingError, "inner fold"),
    ],
)
def test_refused_before_a_model_is_loaded(
    tmp_path: Path, change: Options, error: type[Exception], problem: str
) -> None:
    rows = change.pop("rows", planted_rows(40))
    store = Store(tmp_path / change.pop("store", "store"))
    options = options_on(TrainOptions, tmp_path, rows, **{"name": "planted"} | change)
    with pytest.raises(error, match=problem):
        train(options, Never, store, console=Quiet())
    assert not (tmp_path / "run").exists()


# Options, of which the last one is refused.
SENSELESS = lines(
    """
    {"signals": "entropy"}
    {"folds": 1}
    {"seeds": [1, 1]}
    {"seeds": [4294967296]}
    {"seeds": "3"}
    {"seeds": 0}
    {"c": 0.0}
    {"c": "auto"}
    {"c_grid": []}
    {"c_grid": [0.1, -1]}
    {"inner_folds": 1}
    {"labels": "guess"}
    {"labels": "sample"}
    {"test": "rows.jsonl"}
    {"abstain_pattern": "("}
    {"judge_key": 7}
    {"target": "wrong"}
    {"target": ""}
    {"wrong_costs": 1.0, "target": "wrong<=0.2"}
    {"wrong_costs": 0.0}
    {"answer_pattern": "It is"}
    {"answer_pattern": "("}
    {"forms": "mixture"}
    {"alpha": ""}
    {"alpha": "0.1,0.1"}
    {"alpha": "1.0"}
    {"delta": 0.0}
    {"delta": 1.0}
    {"labels": "generate", "judge": "openai"}
    {"labels": "generate", "forms": "chat"}
    {"labels": "generate", "forms": "mixture,lone"}
    {"labels": "generate", "forms": "lone,none"}
    {"labels": "generate", "forms": " ,"}
    {"labels": "self", "class_balance": "downsample"}
    {"labels": "self", "answers_decoding": "temperature=0.7"}
    """
)


@pytest.mark.parametrize("text", SENSELESS)
def test_senseless_options_are_refused_by_field(text: str) -> None:
    options: Options = json.loads(text)
    *_, field = options
    with pytest.raises(TrainingError, match=field) as caught:
        TrainOptions(name="x", **options).check()
    assert caught.value.param == field
    assert "7" not in str(caught.value) or field != "judge_key"  # a secret is not told


def test_numbers_of_numpy_and_lists_are_options() -> None:
    options: Any = {"folds": np.int64(3), "c": np.float64(0.1), "c_grid": np.array([0.1, 1.0])}
    TrainOptions(name="x", seeds=[0, 1], **options).check()  # type: ignore[arg-type]


# Guards between what is fitted and what is tested, of which each removal would flatter the figures.


def test_the_served_classifier_is_fitted_on_logits_that_its_probes_never_saw(
    tmp_path: Path,
) -> None:
    """Probes that fit noise separate their own rows well; a classifier fitted there would be sure
    of everything."""
    bundle, _ = run(
        tmp_path,
        PlantedEngine(strength=0.12),
        planted_rows(200),
        test=planted_rows(600, seed=3),
        c=30.0,
        evaluate=False,
    )
    found = bundle.evaluation()["held_out"]
    share = found["hallucinated"] / found["rows"]
    assert (
        found["signals"]["bundle"]["brier"] < share * (1 - share) + 0.01
    )  # no worse than the share alone


def watched(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments and the result of each call of a function, from now on."""
    calls: list[tuple[Any, ...]] = []
    function = getattr(where, name)

    def watch(*given: Any, **named: Any) -> Any:
        calls.append((*given, *([named] if named else []), function(*given, **named)))
        return calls[-1][-1]

    monkeypatch.setattr(where, name, watch)
    return calls


def test_classifier_and_threshold_are_fitted_apart_from_what_measures_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fold's classifier comes from its training side, and those of held-out references from all
    training rows; the threshold from all out-of-fold risks of both seeds, not from the nested ones,
    which are there to measure it, nor from those of the refitted probes."""
    chosen = watched(monkeypatch, trainer_run, "choose_threshold")
    fitted = watched(monkeypatch, nested_cv, "fit_classifier")
    used = watched(monkeypatch, nested_cv.measures, "summary")
    bundle, _ = run(tmp_path, target="wrong<=0.2", test=planted_rows(90, seed=3))
    names = len(nested_cv.NAMES) - len(nested_cv.CONTEXT_NAMES)  # no row has a passage
    of_folds, of_test_sides = 2 * 3 * (names - 1), 2 * 3 * names  # seeds, folds, signals
    # The bundle's own came before; one reads no signal.
    others = len(bundle.evaluation()["held_out"]["signals"]) - 2
    assert [len(call[1]) for call in fitted[of_folds:]] == [240] * others
    of_classifiers = [
        call for number, call in enumerate(used[:of_test_sides], 1) if number % names
    ]  # the last reads no signal
    for (_, label, soft_label, _), (test_label, *_) in zip(
        fitted[:of_folds], of_classifiers, strict=True
    ):
        assert soft_label is None
        assert len(label) + len(test_label) == 240
        assert label.sum() + test_label.sum() == fitted[0][1].sum() + used[0][0].sum()

    [(_, label, risk, _)] = chosen
    assert risk.shape == (2, 240)
    assert not np.array_equal(risk[0], risk[1])
    recorded = read_risks(bundle.evaluation()["out_of_fold"]["risks"])
    np.testing.assert_allclose(recorded.risk, risk[0], atol=1e-6)
    np.testing.assert_array_equal(recorded.label, label)


# What is published.


def test_golden_rows_spread_over_the_risks() -> None:
    risk = np.random.default_rng(0).permutation(100) / 100
    chosen = risk[golden_rows(risk)]
    assert (len(chosen), chosen[0], chosen[-1]) == (8, 0.0, 0.99)
    assert np.diff(chosen).max() <= 0.15
    assert golden_rows(np.array([0.3, 0.1])).tolist() == [1, 0]


class OffByOneHead(PlantedEngine):
    """Serves another head than it extracted."""

    def score(self, prompts, own, *, first_token=False):  # type: ignore[no-untyped-def]
        wrong = [Probes(p.site, (p.head + 1) % 3, p.direction, p.bias, p.scale) for p in own]
        return super().score(prompts, wrong, first_token=first_token)


def test_an_engine_that_serves_other_readouts_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="serving and training read different logits"):
        run(tmp_path, OffByOneHead(), planted_rows(80), **ONE)
    assert list((tmp_path / "store").iterdir()) == []


def test_a_models_folder_is_recorded_by_its_name_alone(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    for given, recorded in ((str(tmp_path / "my-model"), "my-model"), ("org/model", "org/model")):
        assert model_record(PlantedEngine(model=given).identity).name == recorded


def check_no_interval(bundle: Bundle) -> None:
    uncertainty = bundle.manifest.uncertainty
    assert (uncertainty.interval, "no intervals" in uncertainty.statement) == (None, True)


def test_an_interval_and_a_reference_are_published_and_served(
    trained: Bundle, quick: tuple[Bundle, Quiet]
) -> None:
    record = trained.manifest.uncertainty
    assert record.interval is not None
    assert (record.outside_rows, record.outside_share) == (240, 0.01)
    assert (record.interval.level, record.interval.fits) == (0.95, 2 * 3)  # seeds, folds
    assert record.interval.half_width(0.0, 0.5) > 0
    text = section(trained, "Uncertainty")
    assert record.statement in text
    low, high = text.partition("| 0.5 | ")[2].partition(" |")[0].split(" to ")
    assert 0 < float(low) < 0.5 < float(high) < 1
    engine, rows = PlantedEngine(), planted_rows(600, seed=3)
    reports = served(trained, rows, engine)
    assert np.mean([report.uncertain.outside for report in reports]) < 0.04
    for report in reports:
        assert report.uncertain.interval is not None
        assert report.uncertain.interval[0] < report.risk < report.uncertain.interval[1]
    # The same prompts on an engine that reads other numbers.
    scorer = Scorer(engine, trained)
    engine.strength = 6.0
    louder = scorer.score([scorer.render(row["prompt"]) for row in rows[:50]])
    assert all(report.uncertain.outside for report in louder)
    check_no_interval(quick[0])  # which was not evaluated


def test_an_unfinished_run_is_resumed_and_a_finished_one_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs_in_turn: None
) -> None:
    monkeypatch.chdir(tmp_path)
    runs, elsewhere = tmp_path / "runs", ONE | {"batch_rows": 16}
    options, rows = elsewhere | {"run_dir": None}, planted_rows(200, seed=5)
    (engine := PlantedEngine()).kill_at = 2
    killed(partial(run, tmp_path / "a", engine, **options))
    with pytest.raises(RunMismatch, match="was begun with data .*--run-dir"):
        run(tmp_path / "b", rows=rows, **options)
    first, _ = run(tmp_path / "a", **options)
    assert [path.name for path in runs.iterdir()] == ["planted"]
    files = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    # The same run again reads nothing and publishes nothing; elsewhere it makes the same bundle.
    again, _ = run(tmp_path / "a", (engine := PlantedEngine()), **options)
    assert (again.reference, engine.extracts) == ("planted:1", 0)
    same, _ = run(tmp_path / "c", jobs=2, **elsewhere)
    assert first.manifest.digest == again.manifest.digest == same.manifest.digest
    with pytest.raises(RunMismatch):
        run(tmp_path / "c", **elsewhere | {"batch_rows": 8})
    # What read something else takes another folder, and what reads the same does not.
    second, console = run(tmp_path / "b", **options)
    assert "runs/planted-2" in console.text
    other = PlantedEngine()
    other.identity = replace(other.identity, fingerprint="0" * 64)
    third, _ = run(tmp_path / "a", other, **options)
    assert sorted(path.name for path in runs.iterdir()) == ["planted", "planted-2", "planted-3"]
    assert {path: path.read_bytes() for path in files} == files
    bundles = [first, second, third]
    for changes in ({"wrong_costs": 3.0}, {"seeds": (2,)}):
        bundles += run(tmp_path / "a", (engine := PlantedEngine()), **options | changes)[:1]
        assert (engine.extracts, len(list(runs.iterdir()))) == (0, 3)
    assert len({bundle.manifest.digest for bundle in bundles}) == 5
