"""The readers of statement sets, on small made samples in the published formats; HELM's two sources."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hallutracer_research.data.statement_sets import MODELS, subject
from tests.research.data.samples import (
    damage,
    helm_passages,
    read,
    write_halueval2,
    write_helm,
    write_iris_tables,
    write_truefalse,
)


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


def test_label_one_in_the_file_is_hallucinated(tmp_path: Path) -> None:
    rows, counts = read("helm", write_helm(tmp_path))
    falcon = [row for row in rows if row["kind"] == "falcon40b"]
    assert [row["label"] for row in falcon] == [0, 1]  # the file says 1, 0
    assert falcon[0]["prompt"].endswith("Statement: Kites: falcon40b wrote Sentence 0.\nFinal Answer: ")
    assert {row["group"] for row in rows} == {"passage/7"}  # one passage of six models stays together
    assert {row["kind"] for row in rows} == set(MODELS)
    assert counts == {"read": 12, "contradictory": 0, "repeated": 0}
    assert len({row["id"] for row in rows}) == 12


def test_a_title_ends_at_the_first_full_stop(tmp_path: Path) -> None:
    write_helm(tmp_path, opt7b={"1": helm_passages(0, title="U.S. Route 491")})
    rows, _ = read("helm", tmp_path)
    assert any("Statement: U: Sentence 0.\n" in row["prompt"] for row in rows)


def test_repeats_are_kept_once_in_a_model_and_contradictions_left_out_over_all(tmp_path: Path) -> None:
    twice = {"sentences": [{"sentence": "It flies.", "label": 1}] * 2, "prompt": helm_passages(0)["prompt"]}
    once = {"sentences": [{"sentence": "It flies.", "label": 1}, {"sentence": "It sinks.", "label": 1}],
            "prompt": twice["prompt"]}  # fmt: skip
    other = {"sentences": [{"sentence": "It sinks.", "label": 0}], "prompt": twice["prompt"]}
    rows, counts = read("helm", write_helm(tmp_path, opt7b={"7": twice}, gptj7b={"7": once}, falcon40b={"7": other}))
    assert [row["kind"] for row in rows if "It flies." in row["prompt"]] == ["gptj7b", "opt7b"]
    assert not any("It sinks." in row["prompt"] for row in rows)
    assert counts == {"read": 11, "contradictory": 2, "repeated": 1}


def test_the_same_words_in_two_passages_are_no_contradiction(tmp_path: Path) -> None:
    rows, counts = read("helm", write_helm(tmp_path, opt7b={"1": helm_passages(1), "2": helm_passages(0)}))
    assert [(row["group"], row["label"]) for row in rows if row["kind"] == "opt7b"] == [
        ("passage/1", 0), ("passage/2", 1),
    ]  # fmt: skip
    assert counts["contradictory"] == 0


def test_tables_that_agree_are_fine_and_others_are_refused(tmp_path: Path) -> None:
    write_helm(tmp_path)
    before = read("helm", tmp_path)
    write_iris_tables(tmp_path)
    assert read("helm", tmp_path) == before
    table = tmp_path / "statements" / "opt7b.csv"
    lines = table.read_text(encoding="utf-8-sig").splitlines()
    table.write_text("\n".join([lines[0], lines[2], lines[1]]))  # the same rows in another order
    shorter = tmp_path / "statements" / "gptj7b.csv"
    shorter.write_text("\n".join(shorter.read_text(encoding="utf-8-sig").splitlines()[:-1]))
    damaged = damage("helm", tmp_path)
    assert damaged == ["statements/gptj7b.csv", "statements/opt7b.csv line 2"]


def test_damage_is_named(tmp_path: Path) -> None:
    write_helm(tmp_path)
    (tmp_path / "data" / "opt7b" / "data.json").unlink()
    (tmp_path / "data" / "gptj7b" / "data.json").write_text("[]")
    bad = {"1": {"prompt": "Once upon a time", "sentences": []}, "2": helm_passages(1, 2), "3": None}
    (tmp_path / "data" / "falcon40b" / "data.json").write_text(json.dumps(bad))
    damaged = [place.removeprefix("data/") for place in damage("helm", tmp_path)]
    assert sorted(damaged) == [
        "falcon40b/data.json passage 1", "falcon40b/data.json passage 2 sentence 2", "falcon40b/data.json passage 3",
        "gptj7b/data.json", "opt7b/data.json is missing",
    ]  # fmt: skip
