"""Recalibration by feedback: from the risks a service stored and the labels it took, without a
model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle
from probes_store.manifest import PROBES
from probes_store.store import Store
from service.data.rows import mark_of
from service.errors import DataError, FeedbackUnavailable, TrainingError
from service.feedback.databases import Location, location
from service.feedback.rows import write_answers, write_label
from service.trainer.feedback import recalibrate_by_feedback
from service.trainer.guarantee import plan
from service.trainer.options import RecalibrateOptions
from tests.fitting.planted import Quiet, planted_rows
from tests.kit.feedback import answer, given
from tests.kit.rows import Row, Rows
from tests.trainer.made import (
    guarantee_options,
    no_picture_of_the_change,
    republished,
    section,
    served,
)
from tests.trainer.test_recalibrate import check_served, rare, scored


def kept(
    folder: Path,
    bundle: Bundle,
    rows: Rows,
    labelled: int,
    *,
    decision: str = "continue",
    name: str = "feedback.db",
    more: Sequence[Row] = (),
) -> Location:
    """What a service with ``bundle`` would have stored: each row once, with a label for the first
    ``labelled``; and more labels."""
    where, manifest = location(str(folder / name)), bundle.manifest
    database = where.open()
    answers = [
        answer(
            row["id"],
            time=float(number),
            risk=report.risk,
            probes=manifest.files[PROBES].sha256,
            bundle=bundle.reference,
            digest=manifest.digest,
            decision=decision,
            signals=dict(zip(manifest.signals, report.signals, strict=True)),
            mark=mark_of(row),
        )
        for number, (row, report) in enumerate(zip(rows, served(bundle, rows), strict=True))
    ]
    labels = [{"request_id": row["id"], "label": label_of(row)} for row in rows[:labelled]]
    with database.transaction():
        write_answers(database, answers)
        for label in (*labels, *more):
            write_label(database, given(**{"any_caller": True, **label}))
    database.close()
    return where


def mixed(count: int, seed: int) -> Rows:
    """As ``rare``, in no order."""
    rows = rare(count, seed)
    np.random.default_rng(seed).shuffle(rows)  # type: ignore[arg-type]
    return rows


def run(store: Store, where: Location, **changes: Any) -> tuple[Bundle | None, str]:
    """The new version, and what was printed."""
    console, bundle = Quiet(), store.load(changes.pop("bundle", "planted:1"))
    options = RecalibrateOptions(feedback=where.text, **changes)
    with no_picture_of_the_change():
        made = recalibrate_by_feedback(bundle, options, store, console=console)
    return made, console.text


def published(store: Store, where: Location, **changes: Any) -> tuple[Bundle, Any, str]:
    """The new version, its entry of the ledger, and what was printed."""
    bundle, printed = run(store, where, **changes)
    assert bundle is not None, printed
    (record,) = bundle.evaluation()["recalibrations"]
    return bundle, record, printed


def label_of(row: Row) -> str:
    return "factual" if row["label"] else "hallucinated"


def test_the_risk_follows_the_feedback(tmp_path: Path, store: Store, trained: Bundle) -> None:
    store.set_alias("planted", "production", 1)
    bundle, record, printed = published(store, kept(tmp_path, trained, mixed(900, 5), 300))
    assert "no alias was moved" in printed.splitlines()[-1]
    # For review.
    assert (bundle.reference, store.load("planted").reference) == ("planted:2", "planted:1")
    assert store.aliases("planted") == {"production": 1}
    check_served(trained, bundle)
    text = json.dumps(bundle.evaluation()) + bundle.card()
    assert not [row["prompt"] for row in mixed(900, 5) if row["prompt"] in text]
    assert str(tmp_path) not in text
    counts = (record["data"]["rows"], record["feedback"]["answers"])
    assert (record["labels"], counts) == ("feedback", (300, 900))
    assert record["feedback"]["traffic"]["share"]["value"] == pytest.approx(0.9, abs=0.06)


def test_the_card_says_who_was_labelled(tmp_path: Path, store: Store, trained: Bundle) -> None:
    """Only those of a low risk are: here nobody labels what was risky."""
    rows = mixed(900, 5)
    risk, _ = scored(trained, rows)
    order = np.argsort(risk).tolist()
    where = kept(tmp_path, trained, [rows[number] for number in order], 400)
    bundle, record, printed = published(store, where)
    # A bare name means this version from now on.
    assert "bundle alias planted production" in printed.splitlines()[-1]
    table = [[0, 0, 0] for _ in range(10)]  # answers, labels, wrong ones
    for place, number in enumerate(order):
        counts = (1, place < 400, place < 400 and rows[number]["label"] == 0)
        tenth = min(9, int(risk[number] * 10))
        table[tenth] = [sum(pair) for pair in zip(table[tenth], counts, strict=True)]
    feedback, text = record["feedback"], section(bundle, "Recalibration")
    assert (feedback["by_tenth"], feedback["by_decision"]) == (table, {"continue": [900, 400]})
    first = next(tenth for tenth, (answers, *_) in enumerate(table) if answers)
    answers, labelled, wrong = table[first]
    for words in (
        "### Who was labelled",
        f"({400 / 900:.1%})",
        "users label what they like",
        "is extrapolated",
        f"No label lies at a risk above {feedback['highest']:.2f}",
        f"| {first / 10:.1f} to {(first + 1) / 10:.1f} | {answers} | {labelled}"
        f" ({labelled / answers:.1%}) | {wrong} ({wrong / labelled:.1%}) |",
    ):
        assert words in text, words
    assert "users label what they like" in printed


def test_labels_that_decide_nothing_are_left_out(
    tmp_path: Path, store: Store, trained: Bundle
) -> None:
    rows = mixed(400, 5)
    training = [row | {"id": f"t{n}"} for n, row in enumerate(planted_rows(400)[:7])]
    other = [
        {"request_id": row["id"], "label": label_of({"label": not row["label"]}), "caller": "bob"}
        for row in rows[:5]
    ]
    unclear = [{"request_id": row["id"], "label": "unclear"} for row in rows[300:303]]
    seen = [{"request_id": row["id"], "label": "factual"} for row in training]
    where = kept(tmp_path, trained, rows + training, 300, more=other + unclear + seen)
    kept(tmp_path, trained, mixed(50, 7), 50, decision="abstain")
    _, record, _ = published(store, where)
    assert record["feedback"]["left_out"] == {
        "callers disagree": 5,
        "unclear": 3,
        "no answer of this model": 50,
        "among the rows of training": 7,
    }
    assert (record["data"]["rows"], record["data"]["left_out"]) == (295, 65)
    assert record["feedback"]["by_decision"] == {"abstain": [50, 0], "continue": [407, 295]}


def test_feedback_on_a_recalibrated_version(tmp_path: Path, store: Store, trained: Bundle) -> None:
    """The stored risk is on another scale; the stored signals are not."""
    rows = mixed(900, 5)
    second, *_ = published(store, kept(tmp_path, trained, rows, 300))
    with pytest.raises(DataError, match="the recalibration of planted:2 has spent"):
        plan(second, guarantee_options(tmp_path, rows[:300], alpha="0.3"), store)
    where = kept(tmp_path, second, rows, 300, name="second.db")
    with pytest.raises(TrainingError, match="recalibrated already.*planted:1"):
        run(store, where, bundle="planted:2")
    again, *_ = published(store, where)
    assert again.manifest.recalibration == second.manifest.recalibration


def test_too_few_labels_are_refused_with_their_number(
    tmp_path: Path, store: Store, trained: Bundle
) -> None:
    right, wrong = ([row for row in mixed(300, 5) if row["label"] == label] for label in (1, 0))
    where = kept(tmp_path, trained, right[:19] + wrong, 200)
    few = "19 prompts answered right and 181 hallucinated.*20 of each"
    with pytest.raises(TrainingError, match=few):
        run(store, where)
    # The same question is no further evidence.
    kept(tmp_path, trained, [right[0] | {"id": "again"}], 1)
    with pytest.raises(TrainingError, match="19 prompts"):
        run(store, where)
    kept(tmp_path, trained, right[19:20], 1)
    before = sorted((tmp_path / "store").rglob("*"))
    bundle, printed = run(store, where, dry_run=True)
    assert bundle is None
    assert "202 with a label that is used, of 201 prompts" in printed
    assert sorted((tmp_path / "store").rglob("*")) == before


def test_answers_that_prior_shift_does_not_explain_give_no_share(
    tmp_path: Path, store: Store, trained: Bundle
) -> None:
    plain = [
        {"id": f"p{n}", "prompt": f"unheard {n} {'y' * (n % 7)}", "label": n % 2}
        for n in range(400)
    ]
    where = kept(tmp_path, trained, plain, 300)
    printed = run(store, where, dry_run=True)[1]
    assert "no estimate from unlabelled answers: prior shift alone does not explain them" in printed
    assert "someone insisted" in run(store, where, dry_run=True, allow_other_shift=True)[1]


def test_a_bundle_without_recorded_risks_has_labels_alone(
    tmp_path: Path, store: Store, trained: Bundle
) -> None:
    where, evaluation = kept(tmp_path, trained, mixed(900, 5), 300), trained.evaluation()
    del evaluation["out_of_fold"]["risks"]
    bare = republished(store, trained, evaluation)
    bundle, record, _ = published(store, where, bundle=bare.reference)
    assert "prior_shift" not in record["candidates"]
    assert "the bundle records no risks" in bundle.card()


def test_what_is_refused(tmp_path: Path, store: Store, trained: Bundle) -> None:
    where = kept(tmp_path, trained, mixed(50, 5), 20)
    database = where.open()
    database.run("UPDATE hallutracer_answers SET probes = 'others'")
    database.close()
    with pytest.raises(TrainingError, match="no answer that the probes of planted:1"):
        run(store, where)
    with pytest.raises(FeedbackUnavailable, match="cannot open"):
        run(store, location(str(tmp_path / "none.db")))
