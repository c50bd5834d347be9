"""BFCL v4: conversations, groups, what each kind of row expects, and the proxy whose labels are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hallutracer_research.data.bfcl import CALLS, KINDS
from service.data import judges as references
from service.errors import DataError
from tests.research.data.samples import bfcl_row, damage, function, read, write_bfcl


def by_id(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in read("bfcl", folder)[0]}


def test_counts_and_kinds(tmp_path: Path) -> None:
    rows, counts = read("bfcl", write_bfcl(tmp_path))
    assert counts == {"read": 21, "multi_turn": 1, "repeated": 0}
    assert [row["kind"] for row in rows] == [kind for kind in KINDS for _ in range(2)]


def test_what_each_kind_expects(tmp_path: Path) -> None:
    rows = by_id(write_bfcl(tmp_path))
    expected = {name: references.expected(row["answers"]) for name, row in rows.items()}
    call = {"name": "area", "arguments": {"base": [3], "unit": ["cm", ""]}, "optional": ["unit"]}
    assert expected["simple_python_0"] == {"expect": "calls", "calls": [call]}
    assert expected["irrelevance_0"] == expected["live_irrelevance_0-0-0"] == {"expect": "no_call"}
    assert expected["live_relevance_0-0-0"] == {"expect": "some_call"}
    assert expected["memory_0"] == expected["web_search_0"] == {"expect": "text", "texts": ["Ada"]}


def test_a_required_argument_may_not_be_left_out_and_no_value_at_all_is_an_empty_list(tmp_path: Path) -> None:
    gold = [{"id": f"simple_python_{n}", "ground_truth": [{"area": {"base": [3, ""], "unit": []}}]} for n in range(2)]
    rows = by_id(write_bfcl(tmp_path, gold_simple_python=gold))
    expected = references.expected(rows["simple_python_0"]["answers"])
    assert expected is not None
    assert expected["calls"] == [
        {"name": "area", "arguments": {"base": [3, ""], "unit": [[], ""]}, "optional": ["unit"]}
    ]


def test_the_functions_are_offered_before_the_users_words(tmp_path: Path) -> None:
    system, user = by_id(write_bfcl(tmp_path))["simple_python_1"]["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert '\n{"name": "area", "description": "Does area."' in system["content"]
    assert user["content"] == "simple_python_1: area of base 3"


def test_the_rows_own_system_text_follows_and_turns_alternate(tmp_path: Path) -> None:
    talk = [("system", "Be brief."), ("user", "One."), ("user", "Two."), ("assistant", "Yes?"), ("user", "Three.")]
    row = bfcl_row("live_irrelevance_5-3-2")
    row["question"] = [[{"role": role, "content": text} for role, text in talk]]
    messages = by_id(write_bfcl(tmp_path, live_irrelevance=[row]))["live_irrelevance_5-3-2"]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].endswith("(none)\n\nBe brief.")
    assert messages[1]["content"] == "One.\n\nTwo."


def test_memory_questions_come_with_the_earlier_talks_and_web_questions_without_tools(tmp_path: Path) -> None:
    rows = by_id(write_bfcl(tmp_path))
    assert "[Names]\n- My name is Ada." in rows["memory_0"]["messages"][0]["content"]
    assert "Functions" not in rows["web_search_0"]["messages"][0]["content"]
    assert rows["memory_0"]["group"] == rows["memory_1"]["group"] == "memory/shop"


def test_live_rows_group_by_the_middle_number_within_their_file(tmp_path: Path) -> None:
    offered = function("f", a="string")
    names = ["live_simple_0-4-0", "live_simple_1-4-1", "live_simple_2-5-0"]
    gold = [{"id": name, "ground_truth": [{"f": {"a": ["x"]}}]} for name in names]
    write_bfcl(tmp_path, live_simple=[bfcl_row(name, offered, text=name) for name in names], gold_live_simple=gold)
    rows = by_id(tmp_path)
    assert [rows[name]["group"] for name in names] == ["live_simple/4", "live_simple/4", "live_simple/5"]
    assert rows["simple_python_0"]["group"] != rows["simple_python_1"]["group"]


def test_repeats_in_a_group_are_kept_once(tmp_path: Path) -> None:
    offered = function("f", a="string")
    names = ["live_irrelevance_0-4-0", "live_irrelevance_1-4-1", "live_irrelevance_2-5-0"]
    write_bfcl(tmp_path, live_irrelevance=[bfcl_row(name, offered) for name in names])
    rows, counts = read("bfcl", tmp_path)
    kept = [row["id"] for row in rows if row["kind"] == "live_irrelevance"]
    assert kept == ["live_irrelevance_0-4-0", "live_irrelevance_2-5-0"]
    assert counts["repeated"] == 1
    assert read("bfcl-answerable", tmp_path)[1]["repeated"] == 1


def test_the_proxy_knows_its_labels(tmp_path: Path) -> None:
    rows, counts = read("bfcl-answerable", write_bfcl(tmp_path))
    labels = {row["kind"]: row["label"] for row in rows}
    assert labels == {
        "simple_python": 1, "multiple": 1, "live_simple": 1, "live_relevance": 1,
        "irrelevance": 0, "live_irrelevance": 0,
    }  # fmt: skip
    assert counts == {"read": 12, "repeated": 0}
    asked = by_id(tmp_path)
    assert all(row["messages"] == asked[row["id"]]["messages"] for row in rows)


@pytest.mark.parametrize("kind", CALLS)
def test_gold_answers_must_be_there(tmp_path: Path, kind: str) -> None:
    write_bfcl(tmp_path)
    (tmp_path / "possible_answer" / f"BFCL_v4_{kind}.json").unlink()
    with pytest.raises(DataError, match=f"possible_answer/BFCL_v4_{kind}.json is missing"):
        read("bfcl", tmp_path)


def test_damage_is_named(tmp_path: Path) -> None:
    no_turn, no_user = bfcl_row("parallel_0"), bfcl_row("parallel_1")
    no_turn["question"] = []
    no_user["question"] = [[{"role": "assistant", "content": "Hello."}]]
    write_bfcl(
        tmp_path,
        parallel=[no_turn, no_user, "text"],
        gold_multiple=[{"id": "multiple_0", "ground_truth": [{"other": {}}]}, {"id": "multiple_1", "ground_truth": []}],
        live_simple=[bfcl_row("live_simple_0")],
        memory=[bfcl_row("memory_0") | {"scenario": "elsewhere"}],
    )
    damaged = damage("bfcl", tmp_path)
    assert sorted(damaged) == [
        "BFCL_v4_live_simple.json line 1", "BFCL_v4_memory.json line 1", "BFCL_v4_multiple.json line 1",
        "BFCL_v4_multiple.json line 2", "BFCL_v4_parallel.json line 1", "BFCL_v4_parallel.json line 2",
        "BFCL_v4_parallel.json line 3",
    ]  # fmt: skip
