"""The whole run on a planted signal: it is found, survives kill -9, and leaves a bundle that serves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from probes_store.bundle import Bundle
from probes_store.errors import StoreNotWritable
from probes_store.store import Store
from service.errors import DataError, RunMismatch, TrainingError
from service.readout import Site
from service.scoring import Scorer
from service.trainer.cards import group_warning
from service.trainer.options import TrainOptions
from service.trainer.run import train
from tests.fitting.planted import PlantedEngine, Quiet, planted_rows, write_rows

FAST: dict[str, Any] = {
    "folds": 3, "inner_folds": 2, "seeds": (0, 1), "c_grid": (0.1, 0.3), "jobs": 1, "forms": "none",
    "keep_sample": False,
}  # fmt: skip
NO_SIGNAL = "The interval of the bundle's own AUROC reaches chance"
FUSED = ("depth_mean", "log_max_prob", "entropy")


def run(folder: Path, engine: PlantedEngine | None = None, rows: Any = None, **changes: Any) -> tuple[Bundle, Quiet]:
    folder.mkdir(exist_ok=True)
    data = folder / "rows.jsonl"
    if not data.exists():
        write_rows(data, planted_rows(240) if rows is None else rows)
    options: dict[str, Any] = FAST | {"data": (str(data),), "name": "planted", "run_dir": folder / "run"} | changes
    console = Quiet()
    return train(
        TrainOptions(**options), lambda: engine or PlantedEngine(), Store(folder / "store"), console=console
    ), console


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("trained")
    test = write_rows(folder / "test.jsonl", planted_rows(200, seed=3))
    return run(folder, test=test, signals="depth_mean,first_token", sites=(Site.RESIDUAL_STREAM,))[0]


def test_the_planted_signal_is_found_and_recorded(trained: Bundle) -> None:
    evaluation = trained.evaluation()
    signals = evaluation["cross_validation"]["signals"]
    assert signals["depth_mean_unit_norm"]["auroc"]["mean"] > 0.85
    assert signals["prompt_length"]["auroc"]["mean"] < 0.62
    assert signals["depth_mean_unit_norm"]["auroc_within_kind_x_template"]["mean"] > 0.8
    assert evaluation["held_out"]["signals"]["bundle"]["auroc"] > 0.85
    assert evaluation["held_out"]["rows"] == 200
    for name in ("depth_mean_unit_norm", "fused_unit_norm"):
        found = signals[name]["auroc"]
        assert 0.75 < found["low"] < found["mean"] < found["high"] < 1
    assert NO_SIGNAL not in trained.card()
    gate = evaluation["cross_validation"]["at_threshold"]
    counts = evaluation["data"]
    assert gate["wrong_among_answered"] < 0.5 * counts["hallucinated"] / (counts["factual"] + counts["hallucinated"])
    assert f"{gate['answered']:.0%} of the prompts are answered" in " ".join(trained.card().split())
    for found, rows in ((evaluation["cross_validation"]["signals"]["fused_unit_norm"], "never saw the row"),
                        (evaluation["held_out"]["calibration"], "on the held-out rows")):  # fmt: skip
        slope, intercept = found["calibration_slope"], found["calibration_intercept"]
        assert slope["low"] < slope["mean"] < slope["high"]
        assert intercept["low"] < intercept["mean"] < intercept["high"]
        said = f"{rows}: slope {slope['mean']:.3f} [{slope['low']:.3f}, {slope['high']:.3f}], intercept "
        assert said + f"{intercept['mean']:.3f} [" in " ".join(trained.card().split())
    gate = evaluation["held_out"]["at_threshold"]
    assert f"held-out rows: {gate['answered']:.0%} of the prompts" in " ".join(trained.card().split())
    assert evaluation["data"]["groups"] == pytest.approx(evaluation["data"]["effective_groups"], rel=0.05)
    assert evaluation["data"]["largest_group_share"] < 0.02
    manifest = trained.manifest
    assert manifest.classifier.weight[0] > 0
    assert manifest.signals == FUSED
    assert manifest.training.rows == 240
    assert manifest.training.groups == 120
    assert manifest.training.c in manifest.training.c_grid
    assert set(trained.probes.head.tolist()) <= {1, 2}  # head 0 carries noise alone
    assert np.all(trained.probes.trajectory_mean[1] > trained.probes.trajectory_mean[0])


def test_the_bundle_serves_what_was_evaluated(trained: Bundle) -> None:
    engine = PlantedEngine()
    scorer = Scorer(engine, trained)  # replays the golden prompts
    risks, labels = [], []
    for row in planted_rows(200, seed=3):
        risks.append(scorer.score([scorer.render(prompt=row["prompt"])])[0].risk)
        labels.append(row["label"])
    label, risk = np.array(labels), np.array(risks)
    held_out = trained.evaluation()["held_out"]["signals"]["bundle"]
    assert np.mean((label - (1 - risk)) ** 2) == pytest.approx(held_out["brier"], abs=1e-5)
    golden = trained.golden
    assert len(golden.risk) == 8
    assert np.all(np.diff(golden.risk) >= 0)
    assert golden.risk[-1] - golden.risk[0] > 0.6


def test_the_card_is_valid_and_names_what_carries_the_bundle(trained: Bundle) -> None:
    card = trained.card()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "hallutracer"
    assert front["base_model"] == "scripted"
    results = front["model-index"][0]["results"][0]
    held_out = trained.evaluation()["held_out"]["signals"]["bundle"]
    assert results["metrics"][0]["value"] == pytest.approx(held_out["auroc"], abs=1e-4)
    assert [metric["type"] for metric in results["metrics"]] == front["metrics"] == ["roc_auc", "brier_score"]
    for text in (
        card,
        (trained.path / "evaluation.json").read_text(),
    ):  # to call every answer wrong may have a high one
        assert "accuracy" not in text.lower()
    assert "`depth_mean` carries this bundle" in card
    assert "240 rows" in card or "| rows | 240" in card
    for name in ("roc", "precision_recall", "reliability", "trajectories", "layers"):
        assert f"plots/{name}.png" in card
        data = (trained.path / "plots" / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < 60_000


def test_nothing_in_the_bundle_tells_the_machine_or_the_hour(trained: Bundle) -> None:
    for name in ("evaluation.json", "README.md"):
        text = (trained.path / name).read_text()
        assert str(trained.path.parents[2]) not in text
        assert "seconds" not in text


@pytest.mark.parametrize("scale", ["unit_norm", pytest.param("standardized", marks=pytest.mark.long)])
def test_shuffled_labels_leave_nothing(tmp_path: Path, scale: str) -> None:
    rows = planted_rows(300, shuffled=True, per_group=1)
    with pytest.raises(TrainingError, match="no signal: the nested AUROC is 0"):
        run(tmp_path, rows=rows, logit_scale=scale)
    assert not list((tmp_path / "store").rglob("bundle.json"))
    bundle, _ = run(tmp_path, logit_scale=scale, allow_no_signal=True)
    assert NO_SIGNAL in bundle.card()
    signals = bundle.evaluation()["cross_validation"]["signals"]
    for name in ("depth_mean_unit_norm", "depth_mean_standardized", "best_head", "best_layer", "fused_unit_norm"):
        assert 0.4 < signals[name]["auroc"]["mean"] < 0.6
    out_of_fold = bundle.evaluation()["out_of_fold"]["depth_mean_auroc"]
    assert 0.4 < out_of_fold < 0.6


def test_the_residual_stream_and_downsampling_and_a_fixed_c(tmp_path: Path) -> None:
    bundle, _ = run(
        tmp_path, readout="residual_stream", logit_scale="standardized", class_balance="downsample", c=0.2,
        prompt_format="text",
    )  # fmt: skip
    manifest = bundle.manifest
    assert manifest.readout.site == "residual_stream"
    assert (manifest.training.c, manifest.training.c_grid) == (0.2, ())
    assert manifest.prompt_format == "text"
    assert np.all(bundle.probes.scale != 1)
    assert bundle.evaluation()["cross_validation"]["signals"]["depth_mean_standardized"]["auroc"]["mean"] > 0.75
    Scorer(PlantedEngine(), bundle)


def test_generated_labels_are_judged_and_abstentions_left_out(tmp_path: Path) -> None:
    bundle, console = run(tmp_path, labels="generate", judge="contains", evaluate=False)
    training = bundle.manifest.training
    known = sum("known" in row["prompt"] for row in planted_rows(240))
    assert training.factual == known
    assert training.left_out > 10
    assert training.factual + training.hallucinated + training.left_out == 240
    assert (training.labels, training.judge) == ("generate", "contains")
    assert f"| left out | {training.left_out} ({training.left_out} abstained)" in bundle.card()
    assert "how well it works is not known" in bundle.card()
    assert "cross_validation" not in bundle.evaluation()
    engine = PlantedEngine()
    again, _ = run(tmp_path, engine, labels="generate", judge="regex", evaluate=False)
    assert engine.extracts == engine.generates == 0  # another judge reads the answers that are there
    assert again.manifest.training.judge == "regex"


def test_a_group_with_much_of_the_rows_is_named_at_the_end_and_in_the_card(tmp_path: Path) -> None:
    rows = [{**row, "group": "one" if number < 70 else row["group"]} for number, row in enumerate(planted_rows(240))]
    bundle, console = run(tmp_path, rows=rows, evaluate=False)
    assert console.lines[-1] == "One group has 29% of the rows: how well the bundle does elsewhere is hardly known"
    assert console.lines[-1] in bundle.card()
    assert group_warning({"largest_group_share": 0.2}) is None


def test_answers_of_one_class_are_reported(tmp_path: Path) -> None:
    rows = [{**row, "answers": ["Paris", "Rome"]} for row in planted_rows(60)]
    with pytest.raises(TrainingError, match=r"labelled by its answers.*no row is hallucinated"):
        run(tmp_path, rows=rows, labels="generate")


def killed(folder: Path, kill_at: int, **changes: Any) -> None:
    """The run in a process of its own, which ends without a word at the engine's call number ``kill_at``."""
    options = FAST | {"data": str(folder / "rows.jsonl"), "run_dir": str(folder / "run")} | changes
    options |= {"store": str(folder / "store"), "name": "planted", "kill_at": kill_at}
    command = [sys.executable, "-m", "tests.fitting.planted", json.dumps(options)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.mark.long
def test_kill_9_and_resume_give_the_same_bundle(tmp_path: Path) -> None:
    rows, options = planted_rows(160), {"labels": "generate", "evaluate": False, "batch_rows": 16}
    folders = tmp_path / "whole", tmp_path / "killed"
    folders[1].mkdir()
    write_rows(folders[1] / "rows.jsonl", rows)
    for kill_at in (5, 8, 2):  # each batch is two calls of this engine: in the readouts; in the answers, twice
        killed(folders[1], kill_at, **options)
    whole, resumed = (run(folder, rows=rows, **options)[0].manifest.digest for folder in folders)
    assert whole == resumed
    contents = [{path.name: path.read_bytes() for path in (f / "run" / "train").iterdir()} for f in folders]
    assert contents[0] == contents[1]


def test_the_same_run_twice_publishes_once(tmp_path: Path) -> None:
    first, _ = run(tmp_path / "a", evaluate=False)
    again, _ = run(tmp_path / "a", evaluate=False)
    elsewhere, _ = run(tmp_path / "b", evaluate=False, jobs=2)
    assert again.manifest.version == 1
    assert first.manifest.digest == again.manifest.digest == elsewhere.manifest.digest
    other, _ = run(tmp_path / "a", evaluate=False, seeds=(0, 2))
    assert other.manifest.digest != first.manifest.digest


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"rows": [{"id": "a"}]}, DataError, "line 1"),
        ({"name": "../x"}, TrainingError, "name must be"),
        ({"name": "Bad Name"}, TrainingError, "name must be"),
        ({"name": ""}, TrainingError, "name must be"),
        ({"name": "a" * 65}, TrainingError, "name must be"),
        ({"store": "rows.jsonl/store"}, StoreNotWritable, "rows.jsonl"),
        ({"inner_folds": 5, "rows": [{"id": str(n), "prompt": f"q{n}", "label": int(n >= 6)} for n in range(200)]},
         TrainingError, "inner fold"),
    ],
)  # fmt: skip
def test_what_can_be_refused_is_refused_before_a_model_is_loaded(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", change.pop("rows", planted_rows(40)))
    store = Store(tmp_path / change.pop("store", "store"))

    def never() -> PlantedEngine:
        raise AssertionError("a model was loaded")

    options = TrainOptions(**({"data": (str(data),), "name": "planted", "run_dir": tmp_path / "run"} | change))
    with pytest.raises(error, match=match):
        train(options, never, store, console=Quiet())
    assert not (tmp_path / "run").exists()


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    run(tmp_path, evaluate=False)
    with pytest.raises(RunMismatch):
        run(tmp_path, evaluate=False, batch_rows=8)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"signals": "entropy"}, "signals"),
        ({"folds": 1}, "folds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"c": 0.0}, "c"),
        ({"c_grid": ()}, "c_grid"),
        ({"abstain_pattern": "("}, "abstain_pattern"),
        ({"labels": "generate", "judge": "openai"}, "judge"),
    ],
)
def test_senseless_options_are_refused(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    with pytest.raises(TrainingError) as caught:
        TrainOptions(**({"name": "x"} | change)).check()
    assert caught.value.param == field
