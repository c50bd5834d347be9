"""The README's table and the report on passages: every row scored by a fold that never saw it,
shares that add up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hallutracer_research.demo import build, retrieval
from hallutracer_research.demo.build import METHODS, LabelledAnswers, measure, risks
from hallutracer_research.demo.retrieval import PASSAGES, Answered, measured, policies
from service.demo import Passage
from service.readout import Geometry, Site
from tests.command_line import ended, hallutracer
from tests.research.made import readouts

GEOMETRY = Geometry(num_layers=3, num_heads=2, head_dim=4, hidden_size=8)
N = 300


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> LabelledAnswers:
    """Labels depend on the kind and on one planted direction; names carry nothing."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 2, N)
    known = rng.normal(size=N)
    label = (known + 1.2 * (kind - 0.5) + 0.5 * rng.normal(size=N) > 0).astype(np.int64)
    sites = {}
    for site in Site:
        rows = rng.normal(size=(N, 3, 8))
        rows[:, :, 5] += known[:, None]
        folder = tmp_path_factory.mktemp("rows")
        sites[site] = readouts(folder, rows, label, site, GEOMETRY)
    questions = [
        {
            "id": f"k{kind[i]}:name {rng.integers(10**6)}:t{i % 2}",
            "kind": f"k{kind[i]}",
            "template": f"t{i % 2}",
            "exposures": int(4 + 3 * known[i]) if known[i] > -1 else 0,
            "in_refusals": bool(i % 4),
            "split": "test" if i % 3 == 0 else "train",
        }
        for i in range(N)
    ]
    first = np.stack([-rng.random(N), rng.random(N)], axis=1)
    return LabelledAnswers(questions, *sites.values(), np.arange(N) // 2, first)


def test_the_table(asked: LabelledAnswers) -> None:
    found, fold = risks(asked, fold_seed=0, jobs=1)
    assert all(len(set(fold[asked.group == group])) == 1 for group in np.unique(asked.group))
    assert set(found) == set(METHODS)
    for name, risk in found.items():
        assert np.all((risk >= 0) & (risk <= 1)), name
    table = measure(asked, found, fold)
    assert table["depth_mean"]["auroc_within_kind"] > 0.8
    assert table["residual_depth_mean"]["auroc_within_kind"] > 0.8
    assert table["exposures"]["auroc_within_kind"] > 0.8
    assert table["kind_prior"]["auroc"] > 0.6
    assert table["kind_prior"]["auroc_within_kind"] == 0.5
    assert abs(table["max_prob"]["auroc"] - 0.5) < 0.2
    assert 0.3 < table["name_ngrams"]["auroc_within_kind"] < 0.7
    cells = dict.fromkeys(METHODS, {"auroc": {"mean": 0.5, "std": 0.0}})
    assert build.markdown({"table": cells}).count("\n") == len(METHODS) + 2


def test_only_rows_of_the_test_split_are_reported_and_hallucinated_is_positive(
    asked: LabelledAnswers,
) -> None:
    shown = np.array([row["split"] == "test" for row in asked.rows])
    free = np.array([not row["in_refusals"] for row in asked.rows])
    truth = 1.0 - asked.label
    fold = np.arange(N) % 5

    def columns(risk: np.ndarray) -> dict[str, float]:
        return measure(asked, {"depth_mean": risk}, fold)["depth_mean"]

    perfect = columns(np.where(shown, truth, 1 - truth))
    assert perfect["auroc"] == perfect["auprc"] == perfect["auroc_within_kind"] == 1.0
    assert perfect["ece"] == 0.0
    backwards = columns(1 - truth)
    assert backwards["auroc"] == 0.0
    assert backwards["auprc"] < 0.7
    only_free = columns(np.where(free, truth, 1 - truth))
    assert only_free["no_refusal_auroc"] == only_free["no_refusal_auprc"] == 1.0
    assert only_free["auroc"] < 0.7


def made(count: int = 200) -> Answered:
    """A model that reads: right with the right passage, and a risk that knows."""
    rng = np.random.default_rng(0)
    share: dict[Passage, float] = {
        "none": 0.3,
        "right": 0.9,
        "unrelated": 0.3,
        "contradicting": 0.1,
    }
    right = {which: rng.random(count) < share[which] for which in PASSAGES}
    risk = {
        which: np.clip(0.7 - 0.4 * right[which] + rng.normal(0, 0.1, count), 0, 1)
        for which in PASSAGES
    }
    return Answered(np.arange(count) // 2, risk, right, 0.5, [])


def test_the_drop_is_the_difference_of_the_risks() -> None:
    rows = {row["passage"]: row for row in measured(made())}
    assert "drop" not in rows["none"]
    for which in PASSAGES[1:]:
        expected = rows["none"]["risk"]["value"] - rows[which]["risk"]["value"]
        assert rows[which]["drop"]["value"] == pytest.approx(expected)
        assert rows[which]["drop"]["low"] < expected < rows[which]["drop"]["high"]
    assert rows["right"]["drop"]["low"] > 0.1
    assert rows["unrelated"]["drop"]["low"] < 0 < rows["unrelated"]["drop"]["high"]
    assert rows["none"]["auroc"]["value"] > 0.9


def test_shares_add_up_and_a_gate_only_withholds() -> None:
    answered = made()
    rows = {row["policy"]: row for row in policies(answered, "right")}
    for row in rows.values():
        assert row["right"] + row["wrong"] + row["withheld"] == pytest.approx(1)
    assert rows["never retrieve"]["right"] == pytest.approx(answered.right["none"].mean())
    assert rows["always retrieve"]["right"] == pytest.approx(answered.right["right"].mean())
    assert rows["never retrieve"]["withheld"] == rows["always retrieve"]["withheld"] == 0
    for name in rows.keys() - {"retrieve where flagged, gate"}:
        assert rows[name]["retrieved"] == name.startswith("always")
    asked_again = rows["retrieve where flagged, gate"]
    assert asked_again["retrieved"] == pytest.approx((answered.risk["none"] >= 0.5).mean())
    assert asked_again["wrong"] < rows["never retrieve"]["wrong"]
    for name in ("never retrieve", "always retrieve"):
        assert rows[f"{name}, gate"]["wrong"] <= rows[name]["wrong"]
        assert rows[f"{name}, gate"]["right"] <= rows[name]["right"]


def test_the_command_writes_tables_and_every_answer(tmp_path: Path) -> None:
    command = ("demo", "retrieval", "--questions", "20", "--max-tokens", "8")
    printed = ended(hallutracer(*command, "--out", str(tmp_path)), 0)
    found = json.loads((tmp_path / "retrieval.json").read_text())
    assert len(found["examples"]) == found["questions"] == 20
    assert set(found["examples"][0]) == {"question", "accepted", *PASSAGES}
    assert retrieval.markdown(found) == (tmp_path / "retrieval.md").read_text()
    assert (tmp_path / "retrieval.md").read_text().strip() == printed.strip()
