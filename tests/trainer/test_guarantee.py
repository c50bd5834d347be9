"""A guaranteed threshold: new rows only, asked once, and served with the words that say for whom it
holds."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle
from probes_store.errors import BundleRefused
from probes_store.manifest import Manifest
from probes_store.records import OUTSIDE, Guarantee
from probes_store.store import Store
from service.errors import DataError, NoThreshold, RunMismatch, TrainingError
from service.readout import Geometry
from service.scoring import Scorer
from service.trainer import new_rows
from service.trainer.guarantee import GuaranteePlan, guarantee, plan, rows_to_label
from tests.fitting.planted import PlantedEngine, Quiet, planted_rows, write_rows
from tests.kit.present import present
from tests.kit.rows import Options, Rows, read_lines, without
from tests.kit.tables import lines
from tests.trainer.made import (
    ONE,
    Never,
    check_answer_kept,
    guarantee_options,
    republished,
    run,
    served,
    store_of,
    with_answer,
)


def new_rows_of(count: int = 400, **options: Any) -> Rows:
    """Rows that no bundle has seen."""
    return planted_rows(count, seed=5, **options)


def calibrated(
    store: Store,
    rows: Rows | None = None,
    engine: type[PlantedEngine] = PlantedEngine,
    *,
    bundle: str = "planted",
    **changes: Any,
) -> tuple[Bundle | None, Quiet]:
    """Without rows: those of the store's last call, or new ones."""
    folder = store.root.parent
    if rows is None:
        data = folder / "new.jsonl"
        rows = read_lines(data) if data.exists() else new_rows_of()
    console, options = Quiet(), guarantee_options(folder, rows, **changes)
    return guarantee(store.load(bundle), options, engine, store, console=console), console


def published(
    store: Store, rows: Rows | None = None, **changes: Any
) -> tuple[Bundle, Guarantee, Any]:
    """The bundle, its guarantee, and the last entry of its ledger."""
    bundle = present(calibrated(store, rows, **changes)[0])
    return bundle, present(bundle.manifest.guarantee), bundle.evaluation()["calibrations"][-1]


def spent(store: Store) -> bool:
    """Whether labels were looked at."""
    return any((store.root.parent / "run").rglob("question.json"))


def answered_of(bundle: Bundle, rows: Rows) -> Rows:
    """The rows that a service with this bundle answers."""
    reports = served(bundle, rows)
    return [row for row, report in zip(rows, reports, strict=True) if not report.verdict.flagged]


def wrong_of(rows: Rows) -> int:
    return sum(1 - row["label"] for row in rows)


ALONE = "0 earlier turns, no passage, no system prompt"


def planned(store: Store, rows: Rows) -> GuaranteePlan:
    return plan(store.load("planted"), guarantee_options(store.root.parent, rows), store)


def test_each_shape_is_named_once_whatever_its_rows_ask(store: Store) -> None:
    def shapes(*forms: str) -> tuple[str, ...] | None:
        rows = [
            row | {"prompt": forms[number % len(forms)].format(row["prompt"])}
            for number, row in enumerate(new_rows_of())
        ]
        return planned(store, rows).shapes

    several = "Who wrote Emma? And what is {}?"
    assert shapes("{}", "Write a note that answers: {}", several) == (ALONE,)
    assert shapes(several) == (f"{ALONE}, several questions",)


def test_the_guarantee_is_published_and_served(store: Store, trained: Bundle) -> None:
    before = with_answer(trained, store)
    assert before.manifest.guarantee is None
    bundle, promise, record = published(store)
    check_answer_kept(before, bundle)
    manifest, rows = bundle.manifest, new_rows_of()
    assert (bundle.reference, manifest.format_version) == ("planted:3", 1)
    assert manifest.guarantee_shapes == (ALONE,)
    assert f"The calibration's conversations: {ALONE}." in promise.statement
    assert (promise.alpha, promise.delta, promise.rows, promise.all_groups) == (0.2, 0.05, 400, 200)
    assert promise.threshold == manifest.threshold == record["promises"][0]["threshold"]
    assert promise.threshold != trained.manifest.threshold
    assert promise.p_value <= 0.05
    assert 14 <= promise.groups <= 200
    assert promise.hallucinated < 0.2 * promise.groups
    answered = answered_of(bundle, rows)
    assert len(answered) / len(rows) == promise.answered
    assert len({row["group"] for row in answered}) == promise.groups
    assert wrong_of(answered) <= 0.2 * len(answered)
    assert record["thresholds_from"] == "training's out-of-fold risks"
    for file in ("probes.safetensors", "golden.safetensors"):
        assert bundle.files()[file] == trained.files()[file]


def test_rows_outside_training_count_as_withheld(
    tmp_path: Path, store: Store, trained: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a policy that says nothing serves them; else the guarantee would be of answers that nobody
    gets."""
    _, plain, _ = published(store)
    every_second_group = np.arange(400) % 4 < 2
    monkeypatch.setattr(Manifest, "tells_outside", True)
    monkeypatch.setattr(new_rows, "distance", lambda *_: np.where(every_second_group, OUTSIDE, 0.0))
    _, withheld, _ = published(store_of(trained, tmp_path / "outside"))
    assert withheld.answered < 0.7 * plain.answered
    assert withheld.groups <= 100 < plain.groups


STATED = lines(
    """
    confidence 0.95
    groups
    counted equally
    by row
    another model
    chat template
    float32
    decoding
    policy
    drift alarm
    """
)


def test_the_card_has_the_statement_once(store: Store) -> None:
    first = published(store)
    again = published(store, planted_rows(400, seed=6), alpha="0.3")
    for bundle, promise, _ in (first, again):
        card = bundle.card()
        assert card.count("## Guarantee\n") == card.count(promise.statement) == 1
        headings = [card.index(f"## {title}\n") for title in ("Guarantee", "Limits", "How to load")]
        assert headings == sorted(headings)
        share = f"at most a share of {promise.alpha:g}"
        for words in (f"below {promise.threshold:g}", share, promise.data_digest, *STATED):
            assert words in promise.statement
    assert len(again[0].evaluation()["calibrations"]) == 2


def test_the_share_by_row_stands_beside_the_guarantee_which_counts_groups_equally(
    store: Store,
) -> None:
    """Few large groups are confidently wrong, many small ones are right."""
    rows = new_rows_of(500, per_group=1)
    for large in [row for row in rows if row["label"]][:6]:
        rows.remove(large)
        rows += [
            large | {"id": f"{large['id']}-{n}", "prompt": f"{large['prompt']} {n}", "label": 0}
            for n in range(20)
        ]
    made, console = calibrated(store, rows)
    bundle = present(made)
    promise, (record,) = present(bundle.manifest.guarantee), bundle.evaluation()["calibrations"]
    steps = {step["threshold"]: step for step in record["promises"][0]["steps"]}
    answered, wrong = (steps[promise.threshold][key] for key in ("rows", "wrong_rows"))
    assert answered == round(promise.answered * promise.rows)
    assert promise.hallucinated < 0.2 * promise.groups
    assert wrong > 0.3 * answered  # far above alpha
    share = f"{wrong} of {answered} answered rows were hallucinated, {wrong / answered:.1%}"
    for words in (
        f"Not guaranteed: by row, {share}, which is above 0.2",
        "counted equally whatever their size, at most a share of 0.2 is answered",
    ):
        assert words in promise.statement
    assert f"| by row, not guaranteed | {share}, which is above 0.2" in bundle.card()
    assert "groups, counted equally" in bundle.card()
    assert f"{answered:13}  {wrong:12}" in console.text


@pytest.mark.parametrize(("seed", "what"), [(0, "the training rows"), (3, "the held-out rows")])
@pytest.mark.parametrize("by", ["prompt", "group"])
def test_rows_that_the_bundle_has_seen_are_refused(
    store: Store, seed: int, what: str, by: str
) -> None:
    rows = new_rows_of()
    rows[7] |= {by: planted_rows(40, seed=seed)[4][by]}
    with pytest.raises(DataError, match=f"line 8: its {by} is among {what}"):
        calibrated(store, rows, Never)


def test_another_model_is_refused_before_its_answers_are_asked(store: Store) -> None:
    class Other(PlantedEngine):
        def __init__(self) -> None:
            super().__init__(strength=0.1)

    with pytest.raises(BundleRefused):
        calibrated(store, engine=Other)
    assert not list((store.root.parent / "run").iterdir())


def test_a_set_is_spent_once(store: Store) -> None:
    bundle, *_ = published(store)
    # The same question has the same answer.
    again, console = calibrated(store, engine=Never)
    assert present(again).reference == bundle.reference
    assert "this very guarantee" in console.lines[0]
    for changes in ({"alpha": "0.3"}, {"seed": 1}, {"bundle": "planted:1", "delta": 0.1}):
        with pytest.raises(DataError, match="has spent"):
            calibrated(store, engine=Never, **changes)
    rows = [new_rows_of(1)[0], *planted_rows(400, seed=6)[1:]]
    with pytest.raises(DataError, match=r"line 1: its prompt is among .*planted:2 has spent"):
        calibrated(store, rows, Never)


def test_no_threshold_qualifies(store: Store) -> None:
    with pytest.raises(NoThreshold, match=r"least alpha .* 0\.\d+; no number of rows") as caught:
        calibrated(store, new_rows_of(shuffled=True))
    assert "--publish-closed" in str(caught.value)
    assert store.load("planted").reference == "planted:1"
    # Another alpha because of the answer is another question.
    with pytest.raises(RunMismatch, match=r"spent.*alphas = \[0\.2\]"):
        calibrated(store, alpha="0.5")
    bundle, promise, _ = published(store, publish_closed=True)
    assert (promise.closed, "nothing is answered" in promise.statement) == (True, True)
    assert answered_of(bundle, planted_rows(20)) == []


def test_the_rows_still_wanted_are_named(store: Store) -> None:
    rows = [row for row in new_rows_of(120, per_group=1) if row["label"]][:30]
    rows[:4] = [row | {"label": 0} for row in rows[:4]]
    with pytest.raises(NoThreshold, match=r"\d+ more answering groups are wanted, about \d+ rows"):
        calibrated(store, rows)
    with pytest.raises(TrainingError, match="10 groups.*less than 14 answering ones"):
        calibrated(store, new_rows_of(20), Never)


def test_several_alphas_share_delta_and_the_first_that_qualifies_is_served(store: Store) -> None:
    _, promise, record = published(store, alpha="0.03,0.2,0.4", delta=0.09)
    assert promise.alpha == 0.2
    first, _, loose = promises = record["promises"]
    assert [test["alpha"] for test in promises] == [0.03, 0.2, 0.4]
    assert [test["delta"] for test in promises] == pytest.approx([0.03] * 3)
    assert first["threshold"] is None
    assert loose["threshold"] > promise.threshold


def test_a_dry_run_says_what_would_be_tested_and_spends_nothing(store: Store) -> None:
    bundle, console = calibrated(store, engine=Never, dry_run=True)
    assert bundle is None
    assert "400 rows in 200 groups" in console.lines[0]
    assert "at least 14 answering groups" in console.lines[1]
    assert not (store.root.parent / "run").exists()
    assert published(store, alpha="0.3")[0].reference == "planted:2"


class Counting(PlantedEngine):
    """It notes what it is asked to answer, and not only to read."""

    answered: list[str] = []  # noqa: RUF012 - of the class: each run makes an engine of its own

    def extract(
        self, prompts: Any, sites: Any, poolings: Any = (), sampling: Any = None, **read: Any
    ) -> Any:
        if sampling is not None:
            self.answered += [self.detokenize(prompt) for prompt in prompts]
        return super().extract(prompts, sites, poolings, sampling, **read)


def in_messages(rows: Rows, passages: int = 0) -> Rows:
    """The rows, the first of which have a passage beside their question."""
    for row in rows[:passages]:
        row["prompt"] = f"Context: it is so.\n{row['prompt']}"
    return rows


def listed(store: Store, rows: Rows) -> Rows:
    """The rows that want a label."""
    options = guarantee_options(store.root.parent, rows)
    return rows_to_label(store.load("planted"), options, PlantedEngine, store, console=Quiet())


def test_only_rows_below_the_loosest_threshold_want_a_label(
    tmp_path: Path, store: Store, trained: Bundle
) -> None:
    rows = new_rows_of()
    bare = without(rows, "label")
    wanted = listed(store, bare)
    lines = {row["line"] for row in wanted}
    assert 100 < len(lines) < 300
    for row in wanted:
        assert row.keys() <= {"line", "id", "prompt", "messages"}  # above all no risk
        assert rows[row["line"] - 1]["id"] == row["id"]
    assert not spent(store)
    some = [rows[line - 1] if line in lines else bare[line - 1] for line in range(1, 401)]
    bundle, promise, record = published(store, some)
    whole, of_all, _ = published(store_of(trained, tmp_path / "every"), rows)
    for field in ("threshold", "groups", "answered"):
        assert getattr(promise, field) == getattr(of_all, field)
    assert record["data"]["labelled"] == len(lines)
    assert f"400 rows were scored, and {len(lines)} labelled" in promise.statement
    assert "conformal" not in promise.statement
    assert promise.risk_control_threshold is None
    assert bundle.manifest.threshold == whole.manifest.threshold


def test_a_row_that_wants_a_label_and_has_none_is_named_and_nothing_is_spent(store: Store) -> None:
    rows = new_rows_of()
    line = listed(store, rows)[3]["line"]
    del rows[line - 1]["label"]
    with pytest.raises(DataError, match=f"line {line}: 'label' is missing: .*--dry-run"):
        calibrated(store, rows)
    assert not spent(store)
    rows[line - 1]["label"] = "perhaps"
    with pytest.raises(DataError, match=f"line {line}: 'label' must be"):
        calibrated(store, rows, Never)


def test_rows_below_the_loosest_threshold_are_answered_and_judged_as_the_bundle_records(
    tmp_path: Path,
) -> None:
    run(tmp_path / "a", labels="generate", evaluate=False)
    store, rows = Store(tmp_path / "a" / "store"), new_rows_of()
    wanted = {row["prompt"] for row in listed(store, rows)}
    Counting.answered = []
    _, promise, record = published(store, rows, engine=Counting)
    data = record["data"]
    assert len(Counting.answered) == len(wanted) == data["labelled"] + data["left_out"] < 300
    asked = re.compile("|".join(map(re.escape, wanted)))
    assert all(map(asked.search, Counting.answered))
    assert 0 < promise.rows == 400 - data["left_out"] < 400
    assert (promise.labels, promise.judge) == ("generate", "contains")
    assert "greedy with up to 48 tokens" in promise.statement


def test_two_strata_have_thresholds_of_their_own(store: Store) -> None:
    """Of questions with a passage half are answered wrong, whatever their risk: these are withheld,
    the others not."""
    rows = in_messages(new_rows_of(600), 300)
    for number, row in enumerate(rows[:300]):
        row["label"] = number % 4 // 2
    bundle, promise, record = published(store, rows)
    alone, beside = strata = bundle.manifest.guarantee_strata or ()
    assert [stratum.passage for stratum in strata] == [False, True]
    assert {stratum.delta for stratum in strata} == {promise.delta / 2}
    assert (beside.threshold, beside.answered, promise.threshold) == (0.0, 0.0, 0.0)
    assert alone.threshold > 0.1
    assert [stratum.rows for stratum in strata] == [300, 300]
    assert {(test["passage"], test["threshold"]) for test in record["promises"]} == {
        (False, alone.threshold),
        (True, None),
    }
    answered = answered_of(bundle, rows)
    assert all(row in rows[300:] for row in answered)
    assert len(answered) / 300 == alone.answered == 2 * promise.answered
    thresholds = {report.verdict.threshold for report in served(bundle, rows)}
    assert thresholds == {0.0, alone.threshold}
    # Token ids alone are held to the stricter one.
    scorer = Scorer(PlantedEngine(), bundle)
    (unknown,) = scorer.score([scorer.render(rows[-1]["prompt"])])
    assert unknown.verdict.flagged
    for words in (
        "Of questions with a passage beside them none is answered",
        f"risk below {alone.threshold:g}",
        "confidence 0.975",
        "Both hold together with confidence 0.95",
        "0% of the answered rows had a passage",
        f"without a passage, {wrong_of(answered)} of {len(answered)} answered rows were",
    ):
        assert words in promise.statement
    assert "questions with a passage beside them | no threshold qualified" in bundle.card()


def test_a_stratum_with_too_few_groups_is_closed_and_takes_no_part_of_delta(store: Store) -> None:
    rows = in_messages(new_rows_of(), 10)
    bundle, promise, _ = published(store, rows)
    alone, beside = bundle.manifest.guarantee_strata or ()
    assert (alone.passage, alone.delta, beside.passage) == (False, promise.delta, True)
    assert (beside.threshold, beside.groups, beside.labelled, beside.rows) == (0.0, 0, 0, 10)
    assert alone.threshold > 0
    assert answered_of(bundle, rows[:10]) == []


def test_training_records_where_the_thresholds_of_each_stratum_begin(tmp_path: Path) -> None:
    bundle, _ = run(tmp_path, rows=in_messages(planted_rows(480), 240), **ONE)
    gates = bundle.evaluation()["out_of_fold"]["gates_by_passage"]
    assert {name: gate["total"] for name, gate in gates.items()} == {"true": 120, "false": 120}
    made = planned(Store(tmp_path / "store"), in_messages(new_rows_of(600), 300))
    for stratum in made.strata:
        recorded = gates[str(stratum.passage).lower()]["thresholds"]
        assert set(made.sequence(stratum, 0.2)) <= set(recorded)


def test_an_older_bundle_needs_its_own_rows_and_gives_up_a_part_of_the_new_ones(
    tmp_path: Path, store: Store
) -> None:
    """As an older trainer would have published it: without marks and out-of-fold risks."""
    bundle = store.load("planted:1")
    evaluation = bundle.evaluation()
    del evaluation["rows_seen"], evaluation["out_of_fold"]["gates"]
    republished(store, bundle, evaluation, name="older")
    train = str(write_rows(tmp_path / "a.jsonl", planted_rows(400)))
    test = str(write_rows(tmp_path / "b.jsonl", planted_rows(80, seed=3)))
    older: Options = {"bundle": "older", "trained_on": (train, test)}
    for named, missing in ((test, "training"), (train, "held-out")):
        with pytest.raises(TrainingError, match=f"{missing} file.*--trained-on"):
            calibrated(store, engine=Never, **older | {"trained_on": (named,)})
    seen = r"line 1 and 399 more lines: its prompt is among .*a\.jsonl"
    with pytest.raises(DataError, match=seen):
        calibrated(store, planted_rows(400), Never, **older)
    _, promise, record = published(store, new_rows_of(), **older)
    assert (promise.all_groups, record["thresholds_from"]) == (150, "one group of 4")


def test_rows_that_ask_for_no_fact_are_no_calibration(tmp_path: Path, store: Store) -> None:
    rows = [*new_rows_of(), {"id": "poem", "prompt": "Write a poem.", "applies": False}]
    for work in (
        lambda: calibrated(store, rows, Never),
        lambda: run(tmp_path / "a", calibration=rows),
    ):
        with pytest.raises(DataError, match='line 401: "applies" is false'):
            work()
    assert not (tmp_path / "a" / "run").exists()  # said before a model is loaded


def test_a_bundle_of_a_read_only_store_needs_a_name(tmp_path: Path, store: Store) -> None:
    own = Store(tmp_path / "own", fallbacks=[store.root])
    with pytest.raises(TrainingError, match="--new-name"):
        calibrated(own, engine=Never)
    assert published(own, new_name="mine")[0].reference == "mine:1"


def test_training_ends_with_a_calibration(tmp_path: Path) -> None:
    quick: Options = ONE | {"calibration": new_rows_of(), "alpha": "0.25"}
    bundle, console = run(tmp_path, **quick)
    assert bundle.reference == "planted:2"
    assert bundle.manifest.guarantee is not None
    assert sum(line.startswith("published") for line in console.lines) == 2
    assert run(tmp_path, **quick)[0].reference == "planted:2"
    with pytest.raises(DataError, match="its prompt is also"):
        run(tmp_path, name="other", **quick | {"calibration": planted_rows(240)})


def test_a_plan_reads_no_label(store: Store) -> None:
    """What is decided before the test, the thresholds above all, is the same whatever the labels
    are."""
    first, other = (
        planned(store, [row | {"label": label} for row in new_rows_of()]) for label in (0, 1)
    )
    assert first.gates is not None
    assert (first.groups, first.gates) == (other.groups, other.gates)


# Paraphrases without a group: labels drawn by a coin stay without signal, and the guarantee counts
# each question once. Where copies of a question lie on both sides of a fold, probes recognise the
# question and know its label.

COPIES = ("{}", "{} (2)", "Tell me: {}", "{} Thanks!")


WIDE = Geometry(2, 2, 60, 60)  # room to know a hundred questions by heart


class Recognises(PlantedEngine):
    """Reads the same of each wording of a question."""

    def activations(self, prompt: Any, site: Any) -> Any:
        [question] = re.findall(r"city \d+", self.detokenize(prompt))
        return super().activations(self.tokenize(question), site)


def copied(rows: Rows, copies: int) -> Rows:
    """The rows without their groups, in as many wordings, in a random order."""
    bare, texts = without(rows, "id", "group"), COPIES[:copies]
    worded = [row | {"prompt": form.format(row["prompt"])} for row in bare for form in texts]
    random.Random(0).shuffle(worded)
    return worded


def test_coin_labels_of_paraphrases_have_no_signal(tmp_path: Path) -> None:
    rows = copied(planted_rows(100, shuffled=True, per_group=1), 4)
    with pytest.raises(TrainingError, match="no signal: the nested AUROC is 0"):
        run(tmp_path, Recognises(geometry=WIDE), rows, folds=4, seeds=(0,))
    assert not list((tmp_path / "store").rglob("bundle.json"))


def test_training_and_guarantee_count_paraphrases_once(tmp_path: Path) -> None:
    bundle, console = run(
        tmp_path,
        rows=copied(planted_rows(80), 3),
        calibration=copied(new_rows_of(200), 3),
        alpha="0.2",
        **ONE,
    )
    promise = present(bundle.manifest.guarantee)
    assert (bundle.manifest.training.groups, promise.rows, promise.all_groups) == (80, 600, 200)
    assert sum("ask the same as another one in other words" in line for line in console.lines) == 2


def test_paraphrases_of_training_rows_are_refused(tmp_path: Path) -> None:
    run(tmp_path, rows=copied(planted_rows(80), 1), **ONE)
    store, rows = Store(tmp_path / "store"), copied(new_rows_of(200), 1)
    rows[3]["prompt"] = COPIES[2].format(planted_rows(80)[7]["prompt"].upper())
    seen = "line 4: it asks in other words what is among the training rows of planted"
    with pytest.raises(DataError, match=seen):
        calibrated(store, rows, Never)
    rows[3]["group"] = "another"  # whoever names a group says that it is another one
    assert calibrated(store, rows, dry_run=True)[0] is None
