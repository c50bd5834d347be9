"""The readers of statement sets, on small made samples in the published formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from hallutracer_research.data.truefalse import subject
from tests.research.data.samples import damage, read, write_halueval2, write_truefalse


def test_truefalse_rows_labels_and_groups(tmp_path: Path) -> None:
    cities = "Paris is a city in France,1\nParis is a city in Chad,0\nLima is a name of a country.,0\n"
    rows, counts = read("truefalse", write_truefalse(tmp_path, cities=cities))
    paris = [row for row in rows if row["group"] == "cities/paris"]
    assert [row["label"] for row in paris] == [1, 0]
    assert paris[0]["prompt"].endswith("Statement: Paris is a city in France\nFinal Answer: ")
    assert counts == {"read": 15, "contradictory": 0, "repeated": 0}
    assert len({row["id"] for row in rows}) == len(rows) == 15


def test_truefalse_contradictions_are_left_out_and_repeats_kept_once(tmp_path: Path) -> None:
    cities = "Gibraltar is a name of a city.,1\nGibraltar is a name of a city.,0\nX is a name of a city.,1\n" * 2
    rows, counts = read("truefalse", write_truefalse(tmp_path, cities=cities))
    assert [row["group"] for row in rows if row["kind"] == "cities"] == ["cities/x"]
    assert counts == {"read": 18, "contradictory": 4, "repeated": 1}


@pytest.mark.parametrize(
    ("category", "statement", "expected"),
    [
        ("animals", "The giant anteater uses walking for locomotion.", "giant anteater"),
        ("animals", "There are no specific human uses for gazelle.", "gazelle"),
        ("animals", "Human uses for bison include meat.", "bison"),
        ("companies", "Anheuser-Busch InBev engages in the production of oil..", "anheuser-busch inbev"),
        ("inventions", "Alfred Nobel invented the dynamite.", "alfred nobel"),
        ("facts", "The planet Uranus is tilted.", "the planet uranus is tilted."),
    ],
)
def test_truefalse_subjects(category: str, statement: str, expected: str) -> None:
    assert subject(category, statement) == expected


def test_truefalse_damage_is_named(tmp_path: Path) -> None:
    folder = write_truefalse(tmp_path, facts="A.,yes\n")
    (folder / "animals.csv").unlink()
    (folder / "cities.csv").write_text("text,label\nA,1\n")
    damaged = damage("truefalse", folder)
    assert damaged == ["animals.csv is missing", "cities.csv line 1", "facts.csv line 2"]


def test_halueval2_polarity_groups_and_unjudged(tmp_path: Path) -> None:
    finance = [
        {"id": 7, "chatgpt_fact": ["a", "b"], "human_judge": ["true", "false"]},
        {"id": 8, "chatgpt_fact": ["c"], "human_judge": []},
    ]
    rows, counts = read("halueval2", write_halueval2(tmp_path, Finance=finance))
    mine = [row for row in rows if row["kind"] == "Finance"]
    assert [(row["label"], row["group"]) for row in mine] == [(1, "Finance/7"), (0, "Finance/7")]
    assert counts == {"read": 10, "unjudged": 1}


def test_halueval2_damage_is_named(tmp_path: Path) -> None:
    folder = write_halueval2(tmp_path, Finance=[{"id": 1, "chatgpt_fact": ["a"], "human_judge": ["true", "false"]}])
    (folder / "Science.json").write_text("{")
    (folder / "Education.json").unlink()
    assert len(damage("halueval2", folder)) == 3
