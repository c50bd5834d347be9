"""The report on passages: shares that add up, intervals, and the command on the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hallutracer_research.demo.retrieval import PASSAGES, Answered, markdown, measured, policies
from service.demo import Passage
from tests.command_line import hallutracer


def made(count: int = 200) -> Answered:
    """A model that reads: right with the right passage, and a risk that knows."""
    rng = np.random.default_rng(0)
    share: dict[Passage, float] = {"none": 0.3, "right": 0.9, "unrelated": 0.3, "contradicting": 0.1}
    right = {which: rng.random(count) < share[which] for which in PASSAGES}
    risk = {which: np.clip(0.7 - 0.4 * right[which] + rng.normal(0, 0.1, count), 0, 1) for which in PASSAGES}
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
    asked_again = rows["retrieve where flagged, gate"]
    assert asked_again["retrieved"] == pytest.approx((answered.risk["none"] >= 0.5).mean())
    assert asked_again["wrong"] < rows["never retrieve"]["wrong"]
    for name in ("never retrieve", "always retrieve"):
        assert rows[f"{name}, gate"]["wrong"] <= rows[name]["wrong"]
        assert rows[f"{name}, gate"]["right"] <= rows[name]["right"]


def test_the_command_writes_tables_and_every_answer(tmp_path: Path) -> None:
    done = hallutracer("demo", "retrieval", "--questions", "20", "--max-tokens", "8", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "retrieval.json").read_text())
    assert len(found["examples"]) == found["questions"] == 20
    assert set(found["examples"][0]) == {"question", "accepted", *PASSAGES}
    assert markdown(found) == (tmp_path / "retrieval.md").read_text()
    assert (tmp_path / "retrieval.md").read_text().strip() == done.stdout.strip()
