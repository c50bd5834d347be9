"""A guaranteed threshold: new rows only, asked once, and served with the words that say for whom it
holds."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probes_store.bundle import Bundle, BundleDraft
from probes_store.errors import BundleRefused
from probes_store.manifest import Manifest
from probes_store.records import OUTSIDE, Guarantee
from probes_store.store import Store
from service.demo import MODEL_DIR
from service.demo.questions import questions
from service.engines.base import EngineOptions
from service.engines.transformers.engine import TransformersEngine
from service.errors import DataError, NoThreshold, RunMismatch, TrainingError
from service.scoring import Scorer
from service.trainer import new_rows
from service.trainer.guarantee import guarantee, plan, rows_to_label
from service.trainer.options import GuaranteeOptions
from tests.fitting.planted import PlantedEngine, Quiet, planted_rows, write_rows
from tests.kit.rows import without
from tests.trainer.made import Never, Rows, check_answer_kept, run, served, store_of, with_answer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return run(tmp_path_factory.mktemp("trained"), test=planted_rows(80, seed=3), evaluate=False)[0]


def calibrated(
    folder: Path,
    store: Store,
    rows: Rows | None = None,
    engine: type[PlantedEngine] = PlantedEngine,
    **changes: Any,
) -> tuple[Bundle | None, Quiet]:
    data = folder / "calibration.jsonl"
    if rows is not None or not data.exists():
        write_rows(data, planted_rows(400, seed=5) if rows is None else rows)
    given: dict[str, Any] = {
        "data": (str(data),),
        "run_dir": folder / "run",
        "alpha": "0.2",
    } | changes
    bundle = store.load(given.pop("bundle", "planted"))
    console = Quiet()
    return guarantee(bundle, GuaranteeOptions(**given), engine, store, console=console), console


def published(
    folder: Path, store: Store, rows: Rows | None = None, **changes: Any
) -> tuple[Bundle, Guarantee, Any]:
    """The bundle, its guarantee, and the last entry of its ledger."""
    bundle, _ = calibrated(folder, store, rows, **changes)
    assert bundle is not None
    assert bundle.manifest.guarantee is not None
    return bundle, bundle.manifest.guarantee, bundle.evaluation()["calibrations"][-1]


def test_each_shape_is_named_once_whatever_its_rows_ask(tmp_path: Path, store: Store) -> None:
    def shapes(*forms: str) -> tuple[str, ...] | None:
        rows = planted_rows(400, seed=5)
        data = tmp_path / f"{len(forms)}.jsonl"
        write_rows(
            data,
            [
                row | {"prompt": forms[at % len(forms)].format(row["prompt"])}
                for at, row in enumerate(rows)
            ],
        )
        options = GuaranteeOptions(
            data=(str(data),), run_dir=tmp_path / f"run{len(forms)}", alpha="0.2"
        )
        return plan(store.load("planted"), options, store).shapes

    alone = "0 earlier turns, no passage, no system prompt"
    several = "Who wrote Emma? And what is {}?"
    assert shapes("{}", "Write a note that answers: {}", several) == (alone,)
    assert shapes(several) == (f"{alone}, several questions",)


def test_the_guarantee_is_published_and_served(
    tmp_path: Path, store: Store, trained: Bundle
) -> None:
    assert trained.manifest.guarantee is None
    bundle, found, record = published(tmp_path, store)
    manifest = bundle.manifest
    assert (bundle.reference, manifest.format_version) == ("planted:2", 1)
    assert manifest.guarantee_shapes == ("0 earlier turns, no passage, no system prompt",)
    assert (
        "The calibration's conversations: 0 earlier turns, no passage, no system prompt."
        in found.statement
    )
    assert (found.alpha, found.delta, found.rows, found.all_groups) == (0.2, 0.05, 400, 200)
    assert (
        found.threshold
        == manifest.threshold
        == record["promises"][0]["threshold"]
        != trained.manifest.threshold
    )
    assert found.p_value <= 0.05
    assert 14 <= found.groups <= 200
    assert found.hallucinated < 0.2 * found.groups
    rows = planted_rows(400, seed=5)
    reports = served(bundle, rows)
    answered = [
        row for row, report in zip(rows, reports, strict=True) if not report.verdict.flagged
    ]
    assert (len(answered) / len(rows), len({row["group"] for row in answered})) == (
        found.answered,
        found.groups,
    )
    assert sum(1 - row["label"] for row in answered) <= 0.2 * len(answered)
    assert record["thresholds_from"] == "training's out-of-fold risks"
    for file in ("probes.safetensors", "golden.safetensors"):
        assert (bundle.path / file).read_bytes() == (trained.path / file).read_bytes()


def test_an_answer_probe_comes_along(tmp_path: Path, store: Store, trained: Bundle) -> None:
    before = with_answer(trained, store)
    check_answer_kept(before, published(tmp_path, store)[0])


def test_rows_outside_training_count_as_withheld(
    tmp_path: Path, store: Store, trained: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a policy that says nothing serves them; else the guarantee would be of answers that nobody
    gets."""
    _, plain, _ = published(tmp_path, store)
    every_second_group = np.arange(400) % 4 < 2
    monkeypatch.setattr(Manifest, "tells_outside", True)
    monkeypatch.setattr(new_rows, "distance", lambda *_: np.where(every_second_group, OUTSIDE, 0.0))
    (folder := tmp_path / "outside").mkdir()
    _, found, _ = published(folder, store_of(trained, folder))
    assert found.answered < 0.7 * plain.answered
    assert found.groups <= 100 < plain.groups


def test_the_card_has_the_statement_once(tmp_path: Path, store: Store) -> None:
    first = published(tmp_path, store)
    again = published(tmp_path, store, planted_rows(400, seed=6), alpha="0.3")
    for bundle, found, _ in (first, again):
        card = bundle.card()
        assert card.count("## Guarantee\n") == card.count(found.statement) == 1
        assert (
            card.index("## Guarantee\n")
            < card.index("## Limits\n")
            < card.index("## How to load\n")
        )
        for words in (
            f"below {found.threshold:g}",
            f"at most a share of {found.alpha:g}",
            "confidence 0.95",
            "groups",
            "counted equally",
            "by row",
            "another model",
            "chat template",
            "float32",
            "decoding",
            "policy",
            "drift alarm",
            found.data_digest,
        ):
            assert words in found.statement
    assert len(again[0].evaluation()["calibrations"]) == 2


def test_the_share_by_row_stands_beside_the_guarantee_which_counts_groups_equally(
    tmp_path: Path, store: Store
) -> None:
    rows = planted_rows(300, seed=5, per_group=1)
    known = [row for row in rows if row["label"]]
    for large in known[
        :6
    ]:  # few large groups that are confidently wrong, many small ones that are right
        more = [
            large | {"id": f"{large['id']}-{copy}", "prompt": f"{large['prompt']} {copy}"}
            for copy in range(20)
        ]
        rows = [row for row in rows if row is not large] + [row | {"label": 0} for row in more]
    bundle, console = calibrated(tmp_path, store, rows)
    assert bundle is not None
    found, (record,) = bundle.manifest.guarantee, bundle.evaluation()["calibrations"]
    assert found is not None
    step = next(
        step for step in record["promises"][0]["steps"] if step["threshold"] == found.threshold
    )
    answered, wrong = step["rows"], step["wrong_rows"]
    assert answered == round(found.answered * found.rows)
    assert found.hallucinated < 0.2 * found.groups
    assert wrong > 0.3 * answered  # far above alpha
    said = (
        f"{wrong} of {answered} answered rows were hallucinated, {wrong / answered:.1%}, which is"
        " above 0.2"
    )
    assert f"Not guaranteed: by row, {said}" in found.statement
    assert (
        "counted equally whatever their size, at most a share of 0.2 is answered" in found.statement
    )
    assert f"| by row, not guaranteed | {said}" in bundle.card()
    assert "groups, counted equally" in bundle.card()
    assert any(f"{answered:13}  {wrong:12}" in line for line in console.lines)


@pytest.mark.parametrize(("seed", "what"), [(0, "the training rows"), (3, "the held-out rows")])
@pytest.mark.parametrize("by", ["prompt", "group"])
def test_rows_that_the_bundle_has_seen_are_refused(
    tmp_path: Path, store: Store, seed: int, what: str, by: str
) -> None:
    rows = planted_rows(400, seed=5)
    rows[7] = rows[7] | {by: planted_rows(40, seed=seed)[4][by]}
    with pytest.raises(DataError, match=f"line 8: its {by} is among {what}"):
        calibrated(tmp_path, store, rows, Never)


def test_another_model_is_refused_before_its_answers_are_asked(
    tmp_path: Path, store: Store
) -> None:
    class Other(PlantedEngine):
        def __init__(self) -> None:
            super().__init__(strength=0.1)

    with pytest.raises(BundleRefused):
        calibrated(tmp_path, store, engine=Other)
    assert not list((tmp_path / "run").iterdir())


def test_a_set_is_spent_once(tmp_path: Path, store: Store) -> None:
    bundle, *_ = published(tmp_path, store)
    again, console = calibrated(
        tmp_path, store, engine=Never
    )  # the same question has the same answer
    assert again is not None
    assert again.reference == bundle.reference
    assert "this very guarantee" in console.lines[0]
    for changes in ({"alpha": "0.3"}, {"seed": 1}, {"bundle": "planted:1", "delta": 0.1}):
        with pytest.raises(DataError, match="has spent"):
            calibrated(tmp_path, store, engine=Never, **changes)
    with pytest.raises(DataError, match=r"line 1: its prompt is among .*planted:2 has spent"):
        calibrated(
            tmp_path, store, [planted_rows(1, seed=5)[0], *planted_rows(400, seed=6)[1:]], Never
        )


def test_no_threshold_qualifies(tmp_path: Path, store: Store) -> None:
    with pytest.raises(NoThreshold, match=r"least alpha .* 0\.\d+; no number of rows") as caught:
        calibrated(tmp_path, store, planted_rows(400, seed=5, shuffled=True))
    assert "--publish-closed" in str(caught.value)
    assert store.load("planted").reference == "planted:1"
    with pytest.raises(
        RunMismatch, match=r"spent.*alphas = \[0\.2\]"
    ):  # asked because of the answer
        calibrated(tmp_path, store, alpha="0.5")
    bundle, found, _ = published(tmp_path, store, publish_closed=True)
    assert (found.closed, "nothing is answered" in found.statement) == (True, True)
    assert all(report.verdict.flagged for report in served(bundle, planted_rows(20)))


def test_the_rows_still_wanted_are_named(tmp_path: Path, store: Store) -> None:
    rows = [row for row in planted_rows(120, seed=5, per_group=1) if row["label"]][:30]
    with pytest.raises(NoThreshold, match=r"\d+ more answering groups are wanted, about \d+ rows"):
        calibrated(tmp_path, store, [row | {"label": 0} for row in rows[:4]] + rows[4:])
    with pytest.raises(TrainingError, match="10 groups.*less than 14 answering ones"):
        calibrated(tmp_path, store, planted_rows(20, seed=5), Never)


def test_several_alphas_share_delta_and_the_first_that_qualifies_is_served(
    tmp_path: Path, store: Store
) -> None:
    _, found, record = published(tmp_path, store, alpha="0.03,0.2,0.4", delta=0.09)
    assert found.alpha == 0.2
    tests = record["promises"]
    assert [(one["alpha"], round(one["delta"], 9)) for one in tests] == [
        (0.03, 0.03),
        (0.2, 0.03),
        (0.4, 0.03),
    ]
    assert tests[0]["threshold"] is None
    assert tests[2]["threshold"] > found.threshold


def test_a_dry_run_says_what_would_be_tested_and_spends_nothing(
    tmp_path: Path, store: Store
) -> None:
    bundle, console = calibrated(tmp_path, store, engine=Never, dry_run=True)
    assert bundle is None
    assert "400 rows in 200 groups" in console.lines[0]
    assert "at least 14 answering groups" in console.lines[1]
    assert not (tmp_path / "run").exists()
    assert published(tmp_path, store, alpha="0.3")[0].reference == "planted:2"


class Counting(PlantedEngine):
    """It notes what it is asked to answer, and not only to read."""

    answered: list[str] = []  # noqa: RUF012 - of the class: each run makes an engine of its own

    def extract(self, prompts: Any, sites: Any, *others: Any, **read: Any) -> Any:
        if len(others) > 1 and others[1] is not None:
            self.answered += [self.detokenize(prompt) for prompt in prompts]
        return super().extract(prompts, sites, *others, **read)


def in_messages(rows: Rows, passages: int = 0) -> Rows:
    """The rows, the first of which have a passage beside their question."""
    return [
        row | {"prompt": f"Context: it is so.\n{row['prompt']}"} if place < passages else row
        for place, row in enumerate(rows)
    ]


def listed(
    folder: Path, store: Store, rows: Rows, engine: Any = PlantedEngine, **changes: Any
) -> list[dict[str, Any]]:
    data = write_rows(folder / "calibration.jsonl", rows)
    given: dict[str, Any] = {
        "data": (str(data),),
        "run_dir": folder / "run",
        "alpha": "0.2",
    } | changes
    options = GuaranteeOptions(**given)
    return rows_to_label(store.load("planted"), options, engine, store, console=Quiet())


def test_only_rows_below_the_loosest_threshold_want_a_label(tmp_path: Path, store: Store) -> None:
    rows = planted_rows(400, seed=5)
    bare = without(rows, "label")
    wanted = listed(tmp_path, store, bare)
    lines = {row["line"] for row in wanted}
    assert 100 < len(lines) < 300
    assert [
        row for row in wanted if row.keys() - {"line", "id", "prompt", "messages"}
    ] == []  # above all no risk
    assert all(rows[row["line"] - 1]["id"] == row["id"] for row in wanted)
    assert not list((tmp_path / "run").rglob("question.json")), "nothing was spent"
    some = [rows[line - 1] if line in lines else bare[line - 1] for line in range(1, 401)]
    bundle, found, record = published(tmp_path, store, some)
    (every := tmp_path / "every").mkdir()
    (every / "store").mkdir()
    whole, of_all, _ = published(every, store_of(store.load("planted:1"), every / "store"), rows)
    assert (found.threshold, found.groups, found.answered) == (
        of_all.threshold,
        of_all.groups,
        of_all.answered,
    )
    assert record["data"]["labelled"] == len(lines)
    assert f"400 rows were scored, and {len(lines)} labelled" in found.statement
    assert "conformal" not in found.statement
    assert found.risk_control_threshold is None
    assert bundle.manifest.threshold == whole.manifest.threshold


def test_a_row_that_wants_a_label_and_has_none_is_named_and_nothing_is_spent(
    tmp_path: Path, store: Store
) -> None:
    rows = planted_rows(400, seed=5)
    line = listed(tmp_path, store, rows)[3]["line"]
    del rows[line - 1]["label"]
    with pytest.raises(DataError, match=f"line {line}: 'label' is missing: .*--dry-run"):
        calibrated(tmp_path, store, rows)
    assert not list((tmp_path / "run").rglob("question.json"))
    rows[line - 1]["label"] = "perhaps"
    with pytest.raises(DataError, match=f"line {line}: 'label' must be"):
        calibrated(tmp_path, store, rows, Never)


def test_rows_below_the_loosest_threshold_are_answered_and_judged_as_the_bundle_records(
    tmp_path: Path,
) -> None:
    run(tmp_path / "a", labels="generate", evaluate=False)
    store, rows = Store(tmp_path / "a" / "store"), planted_rows(400, seed=5)
    wanted = {row["prompt"] for row in listed(tmp_path, store, rows)}
    Counting.answered = []
    _, found, record = published(tmp_path, store, rows, engine=Counting)
    assert (
        len(Counting.answered)
        == len(wanted)
        == record["data"]["labelled"] + record["data"]["left_out"]
        < 300
    )
    asked = re.compile("|".join(map(re.escape, wanted)))
    assert all(map(asked.search, Counting.answered))
    assert 0 < found.rows == 400 - record["data"]["left_out"] < 400
    assert (found.labels, found.judge) == ("generate", "contains")
    assert "greedy with up to 48 tokens" in found.statement


def test_two_strata_have_thresholds_of_their_own(tmp_path: Path, store: Store) -> None:
    """Of questions with a passage half are answered wrong, whatever their risk: these are withheld,
    the others not."""
    rows = in_messages(planted_rows(600, seed=5), 300)
    rows = [
        row | {"label": place % 4 // 2} if place < 300 else row for place, row in enumerate(rows)
    ]
    bundle, found, record = published(tmp_path, store, rows)
    strata = {one.passage: one for one in bundle.manifest.guarantee_strata or ()}
    assert strata.keys() == {False, True}
    assert {one.delta for one in strata.values()} == {found.delta / 2}
    assert (strata[True].threshold, strata[True].answered, found.threshold) == (0.0, 0.0, 0.0)
    assert strata[False].threshold > 0.1
    assert [one.rows for one in strata.values()] == [300, 300]
    assert {(one["passage"], one["threshold"]) for one in record["promises"]} == {
        (False, strata[False].threshold),
        (True, None),
    }
    reports = served(bundle, rows)
    assert all(report.verdict.flagged for report in reports[:300])
    given = [
        row
        for row, report in zip(rows[300:], reports[300:], strict=True)
        if not report.verdict.flagged
    ]
    assert len(given) / 300 == strata[False].answered == 2 * found.answered
    assert {report.verdict.threshold for report in reports} == {0.0, strata[False].threshold}
    scorer = Scorer(PlantedEngine(), bundle)
    (unknown,) = scorer.score(
        [scorer.render(rows[-1]["prompt"])]
    )  # token ids alone: held to the stricter one
    assert unknown.verdict.flagged
    words = (
        "Of questions with a passage beside them none is answered",
        f"risk below {strata[False].threshold:g}",
        "confidence 0.975",
        "Both hold together with confidence 0.95",
        "0% of the answered rows had a passage",
        (
            f"without a passage, {sum(1 - row['label'] for row in given)} of {len(given)} answered"
            " rows were hallucinated"
        ),
    )
    for said in words:
        assert said in found.statement
    assert "questions with a passage beside them | no threshold qualified" in bundle.card()


def test_a_stratum_with_too_few_groups_is_closed_and_takes_no_part_of_delta(
    tmp_path: Path, store: Store
) -> None:
    rows = in_messages(planted_rows(400, seed=5), 10)
    bundle, found, _ = published(tmp_path, store, rows)
    alone, beside = bundle.manifest.guarantee_strata or ()
    assert (alone.passage, alone.delta, beside.passage) == (False, found.delta, True)
    assert (beside.threshold, beside.groups, beside.labelled, beside.rows) == (0.0, 0, 0, 10)
    assert alone.threshold > 0
    assert all(report.verdict.flagged for report in served(bundle, rows[:10]))


def test_training_records_where_the_thresholds_of_each_stratum_begin(tmp_path: Path) -> None:
    bundle, _ = run(tmp_path, rows=in_messages(planted_rows(480), 240), evaluate=False)
    kept = bundle.evaluation()["out_of_fold"]
    assert {name: gate["total"] for name, gate in kept["gates_by_passage"].items()} == {
        "true": 120,
        "false": 120,
    }
    data = write_rows(tmp_path / "new.jsonl", in_messages(planted_rows(600, seed=5), 300))
    options = GuaranteeOptions(data=(str(data),), run_dir=tmp_path / "more", alpha="0.2")
    made = plan(bundle, options, Store(tmp_path / "store"))
    for stratum in made.strata:
        own = kept["gates_by_passage"][str(stratum.passage).lower()]
        assert set(made.sequence(stratum, 0.2)) <= set(own["thresholds"])


def test_an_older_bundle_needs_its_own_rows_and_gives_up_a_part_of_the_new_ones(
    tmp_path: Path, store: Store
) -> None:
    """As an older trainer would have published it: without marks and out-of-fold risks."""
    bundle = store.load("planted:1")
    evaluation = bundle.evaluation()
    del evaluation["rows_seen"], evaluation["out_of_fold"]["gates"]
    manifest = dataclasses.replace(bundle.manifest, name="older")
    store.publish(BundleDraft(manifest, bundle.probes, bundle.golden, evaluation, bundle.card()))
    train = str(write_rows(tmp_path / "a.jsonl", planted_rows(240)))
    test = str(write_rows(tmp_path / "b.jsonl", planted_rows(80, seed=3)))
    for named, missing in ((test, "training"), (train, "held-out")):
        with pytest.raises(TrainingError, match=f"{missing} file.*--trained-on"):
            calibrated(tmp_path, store, engine=Never, bundle="older", trained_on=(named,))
    with pytest.raises(
        DataError, match=r"line 1 and 239 more lines: its prompt is among .*a\.jsonl"
    ):
        calibrated(
            tmp_path, store, planted_rows(400), Never, bundle="older", trained_on=(train, test)
        )
    rows = planted_rows(400, seed=5)
    _, found, record = published(tmp_path, store, rows, bundle="older", trained_on=(train, test))
    assert (found.all_groups, record["thresholds_from"]) == (150, "one group of 4")


def test_rows_that_ask_for_no_fact_are_no_calibration(tmp_path: Path, store: Store) -> None:
    rows = [*planted_rows(400, seed=5), {"id": "poem", "prompt": "Write a poem.", "applies": False}]
    with pytest.raises(DataError, match='line 401: "applies" is false'):
        calibrated(tmp_path, store, rows, Never)
    with pytest.raises(DataError, match='line 401: "applies" is false'):
        run(tmp_path / "a", calibration=rows)
    assert not (tmp_path / "a" / "run").exists()  # said before a model is loaded


def test_a_bundle_of_a_read_only_store_needs_a_name(tmp_path: Path, store: Store) -> None:
    own = Store(tmp_path / "own", fallbacks=[store.root])
    with pytest.raises(TrainingError, match="--new-name"):
        calibrated(tmp_path, own, engine=Never)
    assert published(tmp_path, own, new_name="mine")[0].reference == "mine:1"


def test_training_ends_with_a_calibration(tmp_path: Path) -> None:
    quick: dict[str, Any] = {
        "evaluate": False,
        "calibration": planted_rows(400, seed=5),
        "alpha": "0.25",
    }
    bundle, console = run(tmp_path, **quick)
    assert (bundle.reference, bundle.manifest.guarantee is None) == ("planted:2", False)
    assert sum(line.startswith("published") for line in console.lines) == 2
    assert run(tmp_path, **quick)[0].reference == "planted:2"
    with pytest.raises(DataError, match="its prompt is also"):
        run(tmp_path, name="other", **quick | {"calibration": planted_rows(240)})


def test_a_plan_reads_no_label(tmp_path: Path, store: Store) -> None:
    """What is decided before the test, the thresholds above all, is the same whatever the labels
    are."""
    plans = set()
    for value in (0, 1):
        data = write_rows(
            tmp_path / f"{value}.jsonl",
            [row | {"label": value} for row in planted_rows(400, seed=5)],
        )
        made = plan(
            store.load("planted"),
            GuaranteeOptions(data=(str(data),), run_dir=tmp_path / "run"),
            store,
        )
        assert made.gates is not None
        plans.add(json.dumps([made.groups, dataclasses.asdict(made.gates)]))
    assert len(plans) == 1


# Paraphrases without a group: labels drawn by a coin stay without signal, and the guarantee counts
# each question once. Where copies of a question lie on both sides of a fold, probes recognise the
# question and know its label.

COPIES = ("{}", "{} (2)", "Tell me: {}", "{} Thanks!")


@pytest.fixture
def demo() -> Iterator[TransformersEngine]:
    torch.set_num_threads(1)
    engine = TransformersEngine.load(EngineOptions(str(MODEL_DIR)))
    yield engine
    engine.close()


def copied(rows: Rows, copies: int) -> Rows:
    """The rows without their groups, in as many wordings, in a random order."""
    bare, texts = without(rows, "id", "group"), COPIES[:copies]
    worded = [row | {"prompt": form.format(row["prompt"])} for row in bare for form in texts]
    random.Random(0).shuffle(worded)
    return worded


def test_coin_labels_of_paraphrases_have_no_signal(
    tmp_path: Path, demo: TransformersEngine
) -> None:
    first = {
        row["group"]: row["prompt"]
        for row in reversed(questions("dev"))
        if row["kind"] == "city_country"
    }
    draw = random.Random(1)
    asked = draw.sample([text for text in first.values() if text.endswith("?")], 100)
    rows = copied([{"prompt": text, "label": draw.getrandbits(1)} for text in asked], 4)
    with pytest.raises(TrainingError, match="no signal: the nested AUROC is 0"):
        run(tmp_path, demo, rows, folds=4, seeds=(0,), c=0.3)
    assert not list((tmp_path / "store").rglob("bundle.json"))


def test_training_and_guarantee_count_paraphrases_once(tmp_path: Path) -> None:
    new = copied(planted_rows(200, seed=5), 3)
    bundle, console = run(
        tmp_path, rows=copied(planted_rows(80), 3), evaluate=False, calibration=new, alpha="0.2"
    )
    found = bundle.manifest.guarantee
    assert found is not None
    assert (bundle.manifest.training.groups, found.rows, found.all_groups) == (80, 600, 200)
    assert sum("ask the same as another one in other words" in line for line in console.lines) == 2


def test_paraphrases_of_training_rows_are_refused(tmp_path: Path) -> None:
    run(tmp_path, rows=copied(planted_rows(80), 1), evaluate=False)
    store, rows = Store(tmp_path / "store"), copied(planted_rows(200, seed=5), 1)
    rows[3]["prompt"] = COPIES[2].format(planted_rows(80)[7]["prompt"].upper())
    with pytest.raises(
        DataError, match="line 4: it asks in other words what is among the training rows of planted"
    ):
        calibrated(tmp_path, store, rows, Never)
    rows[3]["group"] = "another"  # whoever names a group says that it is another one
    assert calibrated(tmp_path, store, rows, dry_run=True)[0] is None
