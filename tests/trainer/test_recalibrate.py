"""Recalibration of a published bundle: for another base rate, on new rows, shown, and served in one
place."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle
from probes_store.records import Guarantee
from probes_store.store import Store
from service.errors import DataError, RunMismatch, TrainingError
from service.trainer.guarantee import guarantee, plan
from service.trainer.options import RecalibrateOptions
from service.trainer.recalibrate import recalibrate
from tests.fitting.planted import PlantedEngine, Quiet, planted_rows, write_rows
from tests.kit.present import present
from tests.kit.rows import Options, Rows
from tests.kit.tables import lines
from tests.trainer.made import (
    Never,
    check_answer_kept,
    guarantee_options,
    no_picture_of_the_change,
    options_on,
    republished,
    section,
    served,
    store_of,
    with_answer,
)


def rare(count: int, seed: int) -> Rows:
    """Mostly hallucinated, 9 of 10: training has 4 of 10."""
    rows = planted_rows(6 * count, seed=seed, per_group=1)
    right = [row for row in rows if row["label"]][: count // 10]
    return right + [row for row in rows if not row["label"]][: count - count // 10]


def recalibrated(
    store: Store,
    rows: Rows | None = None,
    engine: type[PlantedEngine] = PlantedEngine,
    *,
    bundle: str = "planted",
    pictures: bool = False,
    **changes: Any,
) -> tuple[Bundle | None, Quiet]:
    folder = store.root.parent
    if isinstance(changes.get("traffic"), list):
        changes["traffic"] = write_rows(folder / "traffic.jsonl", changes["traffic"])
    rows = rare(150, 5) if rows is None else rows
    console, options = Quiet(), options_on(RecalibrateOptions, folder, rows, **changes)
    with nullcontext() if pictures else no_picture_of_the_change():
        return recalibrate(store.load(bundle), options, engine, store, console=console), console


def published(store: Store, rows: Rows | None = None, **changes: Any) -> tuple[Bundle, Any]:
    """The bundle, and its entry of the ledger."""
    bundle, console = recalibrated(store, rows, **changes)
    assert bundle is not None, console.lines
    (record,) = bundle.evaluation()["recalibrations"]
    return bundle, record


def unlabelled(rows: Rows) -> Rows:
    return [{"prompt": row["prompt"], "group": row["group"]} for row in rows]


def scored(bundle: Bundle, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Risks and whether they were flagged, as served."""
    reports = served(bundle, rows)
    flagged = [report.verdict.flagged for report in reports]
    return np.array([report.risk for report in reports]), np.array(flagged)


def check_served(before: Bundle, after: Bundle) -> None:
    """Fresh traffic has the recalibrated risks, which hold there, and the decisions that it had."""
    manifest, fresh = after.manifest, rare(300, 9)
    moved = present(manifest.recalibration)
    (old, flagged), (new, still) = scored(before, fresh), scored(after, fresh)
    wrong = [row["label"] == 0 for row in fresh]
    np.testing.assert_allclose(new, moved(old), rtol=1e-9)
    np.testing.assert_array_equal(flagged, still)
    assert 0 < flagged.mean() < 1
    loss = [-np.log(np.where(wrong, risk, 1 - risk)).mean() for risk in (old, new)]
    assert loss[1] < loss[0] - 0.02
    assert new.mean() == pytest.approx(0.9, abs=0.06)  # training's 400 rows are no more exact
    assert manifest.threshold == pytest.approx(float(moved(before.manifest.threshold)))


def test_the_served_risk_is_recalibrated_and_the_decisions_stay(
    store: Store, trained: Bundle
) -> None:
    before = with_answer(trained, store)
    bundle, _ = published(store)
    assert (bundle.reference, bundle.manifest.format_version) == ("planted:3", 1)
    check_served(before, bundle)
    check_answer_kept(before, bundle)
    # The risk before the answer is another one.
    assert (bundle.golden.risk != before.golden.risk).all()
    assert bundle.files()["probes.safetensors"] == trained.files()["probes.safetensors"]
    assert bundle.manifest.classifier == trained.manifest.classifier


PRINTED = lines(
    """
    | **
    labelled rows: 90.0% [
    traffic alone:
    calibration error, debiased
    distance 0.
    """
)


def test_everything_is_recorded_and_shown(store: Store) -> None:
    options: Options = {"traffic": unlabelled(rare(600, 7)), "pictures": True}
    bundle, console = recalibrated(store, **options)
    assert bundle is not None
    (record,) = bundle.evaluation()["recalibrations"]
    candidates, traffic = record["candidates"], record["traffic"]
    chosen = candidates[record["chosen"]]
    assert (record["from"], record["had_guarantee"]) == ("planted:1", False)
    assert record["prior"] == pytest.approx(0.4, abs=0.1)
    assert set(candidates) >= {"identity", "prior_shift", "intercept"}
    assert chosen["gain"]["low"] > 0
    assert chosen["log_loss"]["mean"] < candidates["identity"]["log_loss"]["mean"]
    for share in (traffic["share"], traffic["share_with_labels"]):
        assert share["low"] < share["value"] < share["high"]
        assert share["value"] == pytest.approx(0.9, abs=0.06)
    assert traffic["explained"]
    printed, card = console.text, bundle.card()
    for text in PRINTED:
        assert text in printed
    assert card.count("## Recalibration\n") == 1
    assert card.index("## Recalibration\n") < card.index("## Limits\n")
    for text in (
        "planted:1",
        f"{chosen['log_loss']['mean']:.4f}",
        "plots/recalibration.png",
        "carried along",
        f"{bundle.manifest.threshold:.4f} after",
        "the risk as it is",
    ):
        assert text in section(bundle, "Recalibration")
    picture = bundle.files()["plots/recalibration.png"]
    assert (picture[:4], len(picture) < 60_000) == (b"\x89PNG", True)
    again, _ = published(store, bundle="planted:1", **options)
    assert again.manifest.digest == bundle.manifest.digest


def test_traffic_of_risks_and_of_prompts_is_the_same(tmp_path: Path, trained: Bundle) -> None:
    rows = rare(200, 7)
    scores, prompts = scored(trained, rows)[0], unlabelled(rows)
    digest = {"name": "planted", "version": 1, "digest": trained.manifest.digest}
    risks = [
        row | {"risk": float(risk), "bundle": digest}
        for risk, row in zip(scores, prompts, strict=True)
    ]
    shares = []
    for name, traffic in (("a", prompts), ("b", risks)):
        _, record = published(store_of(trained, tmp_path / name), traffic=traffic)
        shares.append(record["traffic"]["share"])
    assert shares[0] == pytest.approx(shares[1], abs=1e-5)


def test_labelled_rows_in_the_traffic_count_once(store: Store) -> None:
    labelled = rare(150, 5)
    _, record = published(store, labelled, traffic=unlabelled(rare(100, 7) + labelled))
    assert (record["traffic"]["rows"], record["traffic"]["left_out"]) == (100, 150)
    with pytest.raises(TrainingError, match="every row of the traffic"):
        recalibrated(store, labelled, bundle="planted:1", traffic=unlabelled(labelled))


def test_another_shift_is_refused_before_a_label_is_looked_at(store: Store) -> None:
    # Neither known nor hidden.
    plain = [{"prompt": f"unheard {n} {'y' * (n % 7)}"} for n in range(400)]
    unexplained = "prior shift alone does not explain the traffic.*--allow-other-shift"
    with pytest.raises(TrainingError, match=unexplained):
        recalibrated(store, traffic=plain)
    assert not list((store.root.parent / "run").rglob("question.json"))
    assert store.load("planted").reference == "planted:1"
    bundle, console = recalibrated(store, traffic=plain, allow_other_shift=True)
    assert "; going on because of --allow-other-shift" in console.text
    insisted = "**Prior shift does not explain the traffic: someone insisted**"
    assert bundle is None or insisted in bundle.card()


def test_where_nothing_is_better_nothing_is_published(tmp_path: Path, store: Store) -> None:
    rows = planted_rows(300, seed=11, per_group=1)
    bundle, console = recalibrated(store, rows)
    assert bundle is None
    printed = console.text
    assert "nothing was published" in printed
    assert "**the risk as it is**" in printed
    assert store.load("planted").reference == "planted:1"
    options = guarantee_options(tmp_path, rows, alpha="0.3")
    with pytest.raises(RunMismatch, match="recalibrated"):  # the labels were looked at
        guarantee(store.load("planted"), options, PlantedEngine, store, console=Quiet())


SEEN, NEW = planted_rows(40)[4]["prompt"], rare(150, 5)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"prompt": SEEN, "label": 1}, *NEW], "line 1: its prompt is among the training rows"),
        ([{"prompt": "Write a poem.", "applies": False}, *NEW], 'line 1: "applies" is false'),
        ([row for row in planted_rows(60, seed=5, per_group=1) if not row["label"]], "factual"),
    ],
)
def test_seen_and_unfit_rows_are_refused_before_a_model_is_loaded(
    store: Store, rows: Rows, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        recalibrated(store, rows, Never)


def test_rows_that_were_spent_here_cannot_be_calibrated_on_nor_the_version_again(
    tmp_path: Path, store: Store
) -> None:
    published(store)
    options = guarantee_options(tmp_path, rare(150, 5), run_dir=tmp_path / "other", alpha="0.3")
    for bundle in ("planted:1", "planted:2"):
        with pytest.raises(DataError, match=r"the recalibration of planted:2 has spent"):
            plan(store.load(bundle), options, store)
    with pytest.raises(TrainingError, match="recalibrated already.*planted:1"):
        recalibrated(store, rare(150, 8), Never)


def test_a_guarantee_is_dropped_aloud_and_a_new_one_can_be_had(
    tmp_path: Path, store: Store
) -> None:
    def guaranteed(seed: int) -> tuple[Bundle, Guarantee]:
        options = guarantee_options(tmp_path / str(seed), planted_rows(400, seed=seed))
        made = guarantee(store.load("planted"), options, PlantedEngine, store, console=Quiet())
        return present(made), present(present(made).manifest.guarantee)

    first, lost = guaranteed(21)
    made, console = recalibrated(store)
    bundle = present(made)
    moved, card = present(bundle.manifest.recalibration), bundle.card()
    assert bundle.manifest.guarantee is None
    assert sum("guarantee" in line for line in console.lines) == 2
    assert "## Guarantee" not in card
    assert lost.statement not in card
    assert "guarantee of planted:2 was not carried over" in card
    assert bundle.manifest.threshold == pytest.approx(float(moved(first.manifest.threshold)))
    again, _ = guaranteed(22)
    assert again.manifest.recalibration == moved
    before, after = (b.evaluation()["out_of_fold"]["gates"] for b in (first, again))
    assert after["groups"] == before["groups"]
    for old, new in zip(before["thresholds"], after["thresholds"], strict=True):
        assert new == (1.0 if old == 1 else pytest.approx(float(moved(old))))
    assert "## Recalibration" in again.card()
    assert "## Guarantee" in again.card()


def test_the_threshold_may_stay_where_it_is(store: Store, trained: Bundle) -> None:
    """A wrong answer costs what it did: on a risk that follows the traffic the same number is
    right."""
    bundle, record = published(store, threshold_rule="keep")
    assert bundle.manifest.threshold == trained.manifest.threshold == 0.5
    # More risks lie above the same number.
    after, before = (scored(b, rare(300, 9))[1].mean() for b in (bundle, trained))
    assert after > before
    assert record["thresholds"] == {"rule": "keep", "before": 0.5, "after": 0.5}
    assert "0.5000 before, 0.5000 after: the same number, other decisions" in bundle.card()


def test_a_dry_run_loads_no_model_and_writes_nothing(store: Store) -> None:
    traffic = unlabelled(rare(50, 7))
    bundle, console = recalibrated(store, engine=Never, dry_run=True, traffic=traffic)
    assert bundle is None
    assert "150 labelled rows in 150 groups, new to planted:1" in console.lines[0]
    assert "50 rows of traffic, to be scored" in console.lines[2]
    assert not (store.root.parent / "run").exists()


def test_a_bundle_without_recorded_risks(tmp_path: Path, store: Store, trained: Bundle) -> None:
    train = str(write_rows(tmp_path / "rows.jsonl", planted_rows(400)))
    test = str(write_rows(tmp_path / "test.jsonl", planted_rows(80, seed=3)))
    evaluation, traffic = trained.evaluation(), unlabelled(rare(200, 7))
    del evaluation["out_of_fold"]["risks"], evaluation["rows_seen"]
    republished(store, trained, evaluation)
    with pytest.raises(TrainingError, match="name its training file"):
        recalibrated(store, engine=Never)
    bundle, console = recalibrated(store, traffic=traffic, trained_on=(train, test))
    assert bundle is not None
    assert "against the best mixture" in console.text
    del evaluation["held_out"]
    bare = republished(store, trained, evaluation).reference
    options: Options = {"bundle": bare, "trained_on": (train,)}
    with pytest.raises(TrainingError, match="no risks of its training rows.*--allow-other-shift"):
        recalibrated(store, engine=Never, traffic=traffic, **options)
    # Labels alone need no such comparison.
    assert "traffic" not in published(store, **options)[1]
    options |= {"traffic": traffic, "allow_other_shift": True}
    bundle, console = recalibrated(store, **options)
    assert "cannot be tested: going on because of --allow-other-shift" in console.text
    assert "was not tested: someone insisted" in present(bundle).card()
