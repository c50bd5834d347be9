"""A guaranteed threshold: new rows only, asked once, and served with the words that say for whom it holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from probes_store.bundle import Bundle
from probes_store.errors import BundleRefused
from probes_store.store import Store
from service.errors import DataError, NoThreshold, RunMismatch, TrainingError
from service.scoring import Scorer
from service.trainer.guarantee import guarantee, plan
from service.trainer.options import GuaranteeOptions
from tests.fitting.planted import PlantedEngine, Quiet, planted_rows, write_rows
from tests.trainer.test_run import run

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("trained")
    return run(folder, rows=planted_rows(240), test=write_rows(folder / "test.jsonl", planted_rows(80, seed=3)),
               evaluate=False)[0]  # fmt: skip


@pytest.fixture
def store(trained: Bundle, tmp_path: Path) -> Store:
    """With the trained bundle alone."""
    target = tmp_path / "store" / "planted" / "1"
    target.mkdir(parents=True)
    for file in trained.path.rglob("*.*"):
        copy = target / file.relative_to(trained.path)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(file.read_bytes())
    return Store(tmp_path / "store")


def calibrated(
    folder: Path, store: Store, rows: Rows | None = None, engine: type[PlantedEngine] = PlantedEngine, **changes: Any
) -> tuple[Bundle | None, Quiet]:
    data = folder / "calibration.jsonl"
    if rows is not None or not data.exists():
        write_rows(data, planted_rows(400, seed=5) if rows is None else rows)
    given: dict[str, Any] = {"data": (str(data),), "run_dir": folder / "run", "alpha": "0.2"} | changes
    bundle = store.load(given.pop("bundle", "planted"))
    console = Quiet()
    return guarantee(bundle, GuaranteeOptions(**given), engine, store, console=console), console


def published(folder: Path, store: Store, rows: Rows | None = None, **changes: Any) -> Bundle:
    bundle, _ = calibrated(folder, store, rows, **changes)
    assert bundle is not None
    return bundle


class Never(PlantedEngine):
    def __init__(self) -> None:
        raise AssertionError("a model was loaded")


def test_the_promise_is_published_and_served(tmp_path: Path, store: Store, trained: Bundle) -> None:
    assert trained.manifest.guarantee is None
    bundle = published(tmp_path, store)
    manifest, guarantee = bundle.manifest, bundle.manifest.guarantee
    assert guarantee is not None
    assert (bundle.reference, manifest.format_version) == ("planted:2", 1)
    assert manifest.guarantee_shapes == ("0 earlier turns, no passage, no system prompt",)
    assert "The calibration's conversations: 0 earlier turns, no passage, no system prompt." in guarantee.statement
    assert (guarantee.alpha, guarantee.delta, guarantee.rows, guarantee.all_groups) == (0.2, 0.05, 400, 200)
    assert guarantee.threshold == manifest.threshold != trained.manifest.threshold
    assert guarantee.p_value <= 0.05
    assert 14 <= guarantee.groups <= 200
    assert guarantee.hallucinated < 0.2 * guarantee.groups
    scorer = Scorer(PlantedEngine(), bundle)
    rows = planted_rows(400, seed=5)
    reports = [scorer.score([scorer.render(row["prompt"])])[0] for row in rows]
    answered = [row for row, report in zip(rows, reports, strict=True) if not report.verdict.flagged]
    assert len(answered) / len(rows) == guarantee.answered
    assert len({row["group"] for row in answered}) == guarantee.groups
    assert sum(1 - row["label"] for row in answered) <= 0.2 * len(answered)
    (record,) = bundle.evaluation()["calibrations"]
    assert record["promises"][0]["threshold"] == guarantee.threshold
    assert record["thresholds_from"] == "training's out-of-fold risks"
    for field in ("probes", "golden"):
        assert (bundle.path / f"{field}.safetensors").read_bytes() == (
            trained.path / f"{field}.safetensors"
        ).read_bytes()


def test_the_card_has_the_statement_once(tmp_path: Path, store: Store) -> None:
    first = published(tmp_path, store)
    again = published(tmp_path, store, planted_rows(400, seed=6), alpha="0.3")
    for bundle in (first, again):
        card, guarantee = bundle.card(), bundle.manifest.guarantee
        assert guarantee is not None
        assert card.count("## Guarantee\n") == card.count(guarantee.statement) == 1
        assert card.index("## Guarantee\n") < card.index("## Limits\n") < card.index("## How to load\n")
        for words in (f"below {guarantee.threshold:g}", f"at most a share of {guarantee.alpha:g}", "confidence 0.95",
                      "groups", "counted equally", "by row",
                      "another model", "chat template", "float32", "decoding", "policy", "drift alarm",
                      guarantee.data_digest):  # fmt: skip
            assert words in guarantee.statement
    assert len(again.evaluation()["calibrations"]) == 2


def test_the_share_by_row_stands_beside_the_promise_which_counts_groups_equally(tmp_path: Path, store: Store) -> None:
    rows = planted_rows(300, seed=5, per_group=1)
    known = [row for row in rows if row["label"]]
    for large in known[:6]:  # few large groups that are confidently wrong, many small ones that are right
        more = [large | {"id": f"{large['id']}-{copy}", "prompt": f"{large['prompt']} {copy}"} for copy in range(20)]
        rows = [row for row in rows if row is not large] + [row | {"label": 0} for row in more]
    bundle, console = calibrated(tmp_path, store, rows)
    assert bundle is not None
    guarantee, (record,) = bundle.manifest.guarantee, bundle.evaluation()["calibrations"]
    assert guarantee is not None
    step = next(step for step in record["promises"][0]["steps"] if step["threshold"] == guarantee.threshold)
    answered, wrong = step["rows"], step["wrong_rows"]
    assert answered == round(guarantee.answered * guarantee.rows)
    assert guarantee.hallucinated < 0.2 * guarantee.groups
    assert wrong > 0.3 * answered  # far above alpha
    said = f"{wrong} of {answered} answered rows were hallucinated, {wrong / answered:.1%}, which is above 0.2"
    assert f"Not promised: by row, {said}" in guarantee.statement
    assert "counted equally whatever their size, at most a share of 0.2 is answered" in guarantee.statement
    assert f"| by row, not promised | {said}" in bundle.card()
    assert "groups, counted equally" in bundle.card()
    assert any(f"{answered:13}  {wrong:12}" in line for line in console.lines)


@pytest.mark.parametrize(("seed", "what"), [(0, "the training rows"), (3, "the held-out rows")])
@pytest.mark.parametrize("by", ["prompt", "group"])
def test_rows_that_the_bundle_has_seen_are_refused(tmp_path: Path, store: Store, seed: int, what: str, by: str) -> None:
    rows = planted_rows(400, seed=5)
    rows[7] = rows[7] | {by: planted_rows(40, seed=seed)[4][by]}
    with pytest.raises(DataError, match=f"line 8: its {by} is among {what}"):
        calibrated(tmp_path, store, rows, Never)


def test_another_model_is_refused_before_its_answers_are_asked(tmp_path: Path, store: Store) -> None:
    class Other(PlantedEngine):
        def __init__(self) -> None:
            super().__init__(strength=0.1)

    with pytest.raises(BundleRefused):
        calibrated(tmp_path, store, engine=Other)
    assert not list((tmp_path / "run").iterdir())


def test_a_set_is_spent_once(tmp_path: Path, store: Store) -> None:
    bundle = published(tmp_path, store)
    again, console = calibrated(tmp_path, store, engine=Never)  # the same question has the same answer
    assert again is not None
    assert again.reference == bundle.reference
    assert "this very guarantee" in console.lines[0]
    for changes in ({"alpha": "0.3"}, {"seed": 1}, {"bundle": "planted:1", "delta": 0.1}):
        with pytest.raises(DataError, match="has spent"):
            calibrated(tmp_path, store, engine=Never, **changes)
    rows = planted_rows(400, seed=6)
    rows[0] = planted_rows(1, seed=5)[0]
    with pytest.raises(DataError, match=r"line 1: its prompt is among .*planted:2 has spent"):
        calibrated(tmp_path, store, rows, Never)


def test_no_threshold_qualifies(tmp_path: Path, store: Store) -> None:
    rows = planted_rows(400, seed=5, shuffled=True)
    with pytest.raises(NoThreshold, match=r"least alpha .* 0\.\d+; no number of rows") as caught:
        calibrated(tmp_path, store, rows)
    assert "--publish-closed" in str(caught.value)
    assert store.load("planted").reference == "planted:1"
    with pytest.raises(RunMismatch, match=r"spent.*alphas = \[0\.2\]"):  # asked because of the answer
        calibrated(tmp_path, store, alpha="0.5")
    bundle = published(tmp_path, store, publish_closed=True)
    guarantee = bundle.manifest.guarantee
    assert guarantee is not None
    assert guarantee.closed
    assert "nothing is answered" in guarantee.statement
    scorer = Scorer(PlantedEngine(), bundle)
    assert all(report.verdict.flagged for report in scorer.score(bundle.golden.prompts()))


def test_the_rows_still_wanted_are_named(tmp_path: Path, store: Store) -> None:
    rows = [row for row in planted_rows(120, seed=5, per_group=1) if row["label"]][:30]
    rows[:4] = [row | {"label": 0} for row in rows[:4]]
    with pytest.raises(NoThreshold, match=r"\d+ more answering groups are wanted, about \d+ rows"):
        calibrated(tmp_path, store, rows)


def test_too_few_groups_are_said_before_a_model_is_loaded(tmp_path: Path, store: Store) -> None:
    with pytest.raises(TrainingError, match="10 groups.*less than 14 answering ones"):
        calibrated(tmp_path, store, planted_rows(20, seed=5), Never)


def test_several_alphas_share_delta_and_the_first_that_qualifies_is_served(tmp_path: Path, store: Store) -> None:
    bundle = published(tmp_path, store, alpha="0.03,0.2,0.4", delta=0.09)
    guarantee, (record,) = bundle.manifest.guarantee, bundle.evaluation()["calibrations"]
    assert guarantee is not None
    assert guarantee.alpha == 0.2
    assert [promise["alpha"] for promise in record["promises"]] == [0.03, 0.2, 0.4]
    assert {round(promise["delta"], 9) for promise in record["promises"]} == {0.03}
    assert record["promises"][0]["threshold"] is None
    assert record["promises"][2]["threshold"] > guarantee.threshold


def test_a_dry_run_says_what_would_be_tested_and_spends_nothing(tmp_path: Path, store: Store) -> None:
    bundle, console = calibrated(tmp_path, store, engine=Never, dry_run=True)
    assert bundle is None
    assert "400 rows in 200 groups" in console.lines[0]
    assert "at least 14 answering groups" in console.lines[1]
    assert not (tmp_path / "run").exists()
    assert published(tmp_path, store, alpha="0.3").reference == "planted:2"


def older(store: Store) -> None:
    """The trained bundle as an older trainer would have published it: without marks and out-of-fold risks."""
    from probes_store.bundle import BundleDraft

    bundle = store.load("planted:1")
    evaluation = bundle.evaluation()
    del evaluation["rows_seen"], evaluation["out_of_fold"]["gates"]
    manifest = dataclasses.replace(bundle.manifest, name="older")
    store.publish(BundleDraft(manifest, bundle.probes, bundle.golden, evaluation, bundle.card()))


def test_an_older_bundle_needs_its_own_rows_and_gives_up_a_part_of_the_new_ones(tmp_path: Path, store: Store) -> None:
    older(store)
    train, test = (tmp_path / name for name in ("a.jsonl", "b.jsonl"))
    write_rows(train, planted_rows(240)), write_rows(test, planted_rows(80, seed=3))
    with pytest.raises(TrainingError, match="training file.*--trained-on"):
        calibrated(tmp_path, store, engine=Never, bundle="older", trained_on=(str(test),))
    with pytest.raises(TrainingError, match="held-out file.*--trained-on"):
        calibrated(tmp_path, store, engine=Never, bundle="older", trained_on=(str(train),))
    with pytest.raises(DataError, match=r"line 1 and 239 more lines: its prompt is among .*a\.jsonl"):
        calibrated(tmp_path, store, planted_rows(400), Never, bundle="older", trained_on=(str(train), str(test)))
    rows = planted_rows(400, seed=5)
    bundle = published(tmp_path, store, rows, bundle="older", trained_on=(str(train), str(test)))
    guarantee = bundle.manifest.guarantee
    assert guarantee is not None
    assert guarantee.all_groups == 150
    assert bundle.evaluation()["calibrations"][0]["thresholds_from"] == "one group of 4"


def test_rows_that_ask_for_no_fact_are_no_calibration(tmp_path: Path, store: Store) -> None:
    rows = [*planted_rows(400, seed=5), {"id": "poem", "prompt": "Write a poem.", "applies": False}]
    with pytest.raises(DataError, match='line 401: "applies" is false.*leave it out here'):
        calibrated(tmp_path, store, rows, Never)
    with pytest.raises(DataError, match='line 401: "applies" is false.*leave it out here'):
        run(tmp_path / "a", rows=planted_rows(240), calibration=tmp_path / "calibration.jsonl")
    assert not (tmp_path / "a" / "run").exists()  # said before a model is loaded


def test_a_bundle_of_a_read_only_store_needs_a_name(tmp_path: Path, store: Store) -> None:
    own = Store(tmp_path / "own", fallbacks=[store.root])
    with pytest.raises(TrainingError, match="--new-name"):
        calibrated(tmp_path, own, engine=Never)
    assert published(tmp_path, own, new_name="mine").reference == "mine:1"


def test_generated_answers_are_judged_as_the_bundle_records(tmp_path: Path) -> None:
    trained, _ = run(tmp_path / "a", labels="generate", evaluate=False)
    store = Store(tmp_path / "a" / "store")
    bundle = published(tmp_path, store)
    guarantee, record = bundle.manifest.guarantee, bundle.evaluation()["calibrations"][0]
    assert guarantee is not None
    assert (guarantee.labels, guarantee.judge) == ("generate", "contains")
    assert "greedy with up to 48 tokens" in guarantee.statement
    assert record["data"]["left_out"] > 0
    assert guarantee.rows == 400 - record["data"]["left_out"]
    assert trained.manifest.guarantee is None


def test_training_ends_with_a_calibration(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "new.jsonl", planted_rows(400, seed=5))
    engine = PlantedEngine()
    bundle, console = run(tmp_path, engine, evaluate=False, calibration=data, alpha="0.25")
    assert bundle.reference == "planted:2"
    assert bundle.manifest.guarantee is not None
    assert sum(line.startswith("published") for line in console.lines) == 2
    again, _ = run(tmp_path, evaluate=False, calibration=data, alpha="0.25")
    assert again.reference == "planted:2"
    overlap = write_rows(tmp_path / "old.jsonl", planted_rows(240))
    with pytest.raises(DataError, match="its prompt is also"):
        run(tmp_path, evaluate=False, name="other", calibration=overlap)


@pytest.mark.parametrize("change", [{"alpha": ""}, {"alpha": "0.1,0.1"}, {"alpha": "1.0"}, {"delta": 0.0}])
def test_senseless_options_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(TrainingError):
        GuaranteeOptions(data=("x",), **change).check()


def test_a_plan_reads_no_label(tmp_path: Path, store: Store) -> None:
    """What is decided before the test, the thresholds above all, is the same whatever the labels are."""
    plans = []
    for value in (0, 1):
        rows = [row | {"label": value} for row in planted_rows(400, seed=5)]
        data = write_rows(tmp_path / f"{value}.jsonl", rows)
        made = plan(store.load("planted"), GuaranteeOptions(data=(str(data),), run_dir=tmp_path / "run"), store)
        assert made.gates is not None
        plans.append(json.dumps([made.groups, dataclasses.asdict(made.gates)]))
    assert plans[0] == plans[1]
