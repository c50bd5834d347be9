"""Recalibration by feedback: from the risks a service stored and the labels it took, without a
model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store.bundle import Bundle, BundleDraft
from probes_store.manifest import PROBES
from probes_store.store import Store
from service.data.rows import mark_of
from service.errors import DataError, FeedbackUnavailable, TrainingError
from service.feedback.databases import Location, location
from service.feedback.rows import write_answers, write_label
from service.trainer.feedback import recalibrate_by_feedback
from service.trainer.guarantee import plan
from service.trainer.options import GuaranteeOptions, RecalibrateOptions
from tests.fitting.planted import Quiet, planted_rows, write_rows
from tests.kit.feedback import answer, given
from tests.trainer.made import Rows, no_picture_of_the_change, served
from tests.trainer.test_recalibrate import check_served, rare, scored


def kept(
    folder: Path,
    bundle: Bundle,
    rows: Rows,
    labelled: int,
    *,
    decision: str = "continue",
    name: str = "feedback.db",
    said: Sequence[dict[str, Any]] = (),
) -> Location:
    """What a service with ``bundle`` would have stored: each row once, with a label for the first
    ``labelled``."""
    where = location(str(folder / name))
    database = where.open()
    with database.transaction():
        write_answers(
            database,
            [
                answer(
                    row["id"],
                    time=float(number),
                    risk=report.risk,
                    probes=bundle.manifest.files[PROBES].sha256,
                    bundle=bundle.reference,
                    digest=bundle.manifest.digest,
                    decision=decision,
                    signals=dict(zip(bundle.manifest.signals, report.signals, strict=True)),
                    mark=mark_of(row),
                )
                for number, (row, report) in enumerate(zip(rows, served(bundle, rows), strict=True))
            ],
        )
        for row in rows[:labelled]:
            write_label(database, given(row["id"], "factual" if row["label"] else "hallucinated"))
        for one in said:
            write_label(database, given(**{"any_caller": True, **one}))
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
    return made, "\n".join(console.lines)


def published(store: Store, where: Location, **changes: Any) -> tuple[Bundle, Any, str]:
    """The new version, its entry of the ledger, and what was printed."""
    bundle, printed = run(store, where, **changes)
    assert bundle is not None, printed
    (record,) = bundle.evaluation()["recalibrations"]
    return bundle, record, printed


def test_the_risk_follows_the_feedback(tmp_path: Path, store: Store, trained: Bundle) -> None:
    store.set_alias("planted", "production", 1)
    bundle, record, printed = published(store, kept(tmp_path, trained, mixed(900, 5), 300))
    assert "no alias was moved" in printed.splitlines()[-1]
    assert (bundle.reference, store.load("planted").reference) == (
        "planted:2",
        "planted:1",
    )  # for review
    assert store.aliases("planted") == {"production": 1}
    check_served(trained, bundle)
    text = json.dumps(bundle.evaluation()) + bundle.card()
    assert not [row["prompt"] for row in mixed(900, 5) if row["prompt"] in text]
    assert str(tmp_path) not in text
    assert (record["labels"], record["data"]["rows"], record["feedback"]["answers"]) == (
        "feedback",
        300,
        900,
    )
    assert record["feedback"]["traffic"]["share"]["value"] == pytest.approx(0.9, abs=0.06)


def test_the_card_says_who_was_labelled(tmp_path: Path, store: Store, trained: Bundle) -> None:
    """Only those of a low risk are: here nobody labels what was risky."""
    rows = mixed(900, 5)
    risk, _ = scored(trained, rows)
    low = np.argsort(risk)
    bundle, record, printed = published(
        store, kept(tmp_path, trained, [rows[place] for place in low.tolist()], 400)
    )
    assert (
        "bundle alias planted production" in printed.splitlines()[-1]
    )  # a bare name means this version from now on
    found, card = record["feedback"], bundle.card()
    table = [[0, 0, 0] for _ in range(10)]
    for place, number in enumerate(low.tolist()):
        row = table[min(9, int(risk[number] * 10))]
        row[0] += 1
        row[1] += place < 400
        row[2] += place < 400 and rows[number]["label"] == 0
    assert (found["by_tenth"], found["by_decision"]) == (table, {"continue": [900, 400]})
    share = sum(labelled for _, labelled, _ in table) / 900
    section = card[card.index("## Recalibration\n") : card.index("## Limits\n")]
    for text in (
        "### Who was labelled",
        f"({share:.1%})",
        "users label what they like",
        "is extrapolated",
        f"No label lies at a risk above {found['highest']:.2f}",
    ):
        assert text in section, text
    first, (answers, labelled, wrong) = next(
        (place, row) for place, row in enumerate(table) if row[0]
    )
    line = (
        f"| {first / 10:.1f} to {(first + 1) / 10:.1f} | {answers} | {labelled}"
        f" ({labelled / answers:.1%}) |"
    )
    assert f"{line} {wrong} ({wrong / labelled:.1%}) |" in section
    assert "users label what they like" in printed


def test_labels_that_decide_nothing_are_left_out(
    tmp_path: Path, store: Store, trained: Bundle
) -> None:
    rows = mixed(400, 5)
    training = [row | {"id": f"t{n}"} for n, row in enumerate(planted_rows(400)[:7])]
    said = [
        {
            "request_id": row["id"],
            "label": "factual" if row["label"] == 0 else "hallucinated",
            "caller": "bob",
        }
        for row in rows[:5]
    ]
    said += [{"request_id": row["id"], "label": "unclear"} for row in rows[300:303]]
    said += [{"request_id": row["id"], "label": "factual"} for row in training]
    where = kept(tmp_path, trained, rows + training, 300, said=said)
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
    data = write_rows(tmp_path / "labelled.jsonl", rows[:300])
    with pytest.raises(DataError, match="the recalibration of planted:2 has spent"):
        plan(
            second,
            GuaranteeOptions(data=(str(data),), run_dir=tmp_path / "run", alpha="0.3"),
            store,
        )
    where = kept(tmp_path, second, rows, 300, name="second.db")
    with pytest.raises(TrainingError, match="recalibrated already.*planted:1"):
        run(store, where, bundle="planted:2")
    again, *_ = published(store, where)
    assert again.manifest.recalibration == second.manifest.recalibration


def test_too_few_labels_are_refused_with_their_number(
    tmp_path: Path, store: Store, trained: Bundle
) -> None:
    rows = mixed(300, 5)
    right = [row for row in rows if row["label"]]
    where = kept(tmp_path, trained, right[:19] + [row for row in rows if not row["label"]], 200)
    with pytest.raises(
        TrainingError, match="19 prompts answered right and 181 hallucinated.*20 of each"
    ):
        run(store, where)
    kept(
        tmp_path, trained, [right[0] | {"id": "again"}], 1
    )  # the same question is no further evidence
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
    store.publish(
        BundleDraft(
            trained.manifest, trained.probes, trained.golden, evaluation, trained.card(), {}
        )
    )
    bundle, record, _ = published(store, where, bundle="planted:2")
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
