"""Every bad row is named by its line, all at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from service.data.options import Labels
from service.data.training_rows import Dataset, check_all_apply, check_disjoint, read_dataset
from service.errors import DataError
from tests.fitting.planted import write_rows

GOOD: dict[str, Any] = {"id": "a", "prompt": "Where is Lyon?", "label": 1}


def enough(count: int = 6) -> list[dict[str, Any]]:
    return [{"id": f"ok{i}", "prompt": f"Question {i}?", "label": i % 2} for i in range(count)]


def problems_of(tmp_path: Path, lines: list[Any], labels: Any = "given", folds: int = 2) -> list[str]:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    with pytest.raises(DataError) as caught:
        read_dataset(path, labels, folds=folds)
    assert str(path) in caught.value.message
    return caught.value.problems


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{not json", "invalid JSON"),
        (b'{"id": "a", "prompt": "x", "label": NaN}', "NaN is not JSON"),
        (b'{"id": "a", "id": "b", "prompt": "x", "label": 1}', "'id' appears twice"),
        (b'"a string"', "a JSON object is expected, found a string"),
        (b"[1]", "a JSON object is expected, found a list"),
        (b'{"id": "\xff"}', "not UTF-8 at byte 9"),
        ({"id": None, "prompt": "x", "label": 1}, "'id' must be a string, found null"),
        ({"id": 3.5, "prompt": "x", "label": 1}, "'id' must be a string, found a number"),
        ({"id": True, "prompt": "x", "label": 1}, "'id' must be a string, found a boolean"),
        ({"id": " ", "prompt": "x", "label": 1}, "'id' is empty"),
        ({"id": "a", "label": 1}, "'prompt' (or 'messages') is missing"),
        ({"id": "a", "prompt": "x", "messages": [], "label": 1}, "both 'prompt' and 'messages'"),
        ({"id": "a", "prompt": None, "label": 1}, "'prompt' must be a string, found null"),
        ({"id": "a", "prompt": "  ", "label": 1}, "'prompt' is empty"),
        ({"id": "a", "prompt": "\ud800", "label": 1}, "surrogate"),
        ({"id": "a", "messages": [], "label": 1}, "'messages' must be a non-empty list"),
        ({"id": "a", "messages": ["x"], "label": 1}, "'messages[0]' must be an object"),
        ({"id": "a", "messages": [{"role": "user", "content": ""}], "label": 1}, "'messages[0]': 'content' is empty"),
        ({"id": "a", "messages": [{"role": 1, "content": "x"}], "label": 1}, "'messages[0]': 'role' must be a string"),
        (
            {"id": "a", "messages": [{"role": "bot", "content": "x"}], "label": 1},
            "'messages[0]': role 'bot' is none of",
        ),
        ({"id": "a", "prompt": "x"}, "'label' is missing"),
        ({"id": "a", "prompt": "x", "answers": ["y"]}, "generate the labels"),
        ({"id": "a", "prompt": "x", "label": 2}, "'label' must be the number 1"),
        ({"id": "a", "prompt": "x", "label": True}, "found true"),
        ({"id": "a", "prompt": "x", "label": "1"}, 'found "1"'),
        ({"id": "a", "prompt": "x", "label": 1.0}, "found 1.0"),
        ({"id": "a", "prompt": "x", "label": 1, "group": 7}, "'group' must be a string"),
        ({"id": "a", "prompt": "x", "label": 1, "applies": 0}, "'applies' must be true or false, found 0"),
        ({"id": "a", "prompt": "x", "label": 1, "applies": None}, "'applies' must be true or false, found null"),
        ({"id": "a", "prompt": "x", "label": 1, "applies": False}, "has 'label' and \"applies\": false"),
        ({"id": "a", "prompt": "x", "answers": ["y"], "applies": False}, "has 'answers' and \"applies\": false"),
        ({"id": "a", "prompt": "x", "applies": True}, "'label' is missing"),
    ],
)
def test_one_bad_line(tmp_path: Path, line: Any, said: str) -> None:
    found = problems_of(tmp_path, [*enough(), line])
    assert len(found) == 1
    assert found[0].startswith("line 7: ")
    assert said in found[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"id": "a", "prompt": "x", "label": 1}, "'answers' is missing (there is a 'label'"),
        ({"id": "a", "prompt": "x", "answers": []}, "'answers' must be a non-empty list"),
        ({"id": "a", "prompt": "x", "answers": "y"}, "'answers' must be a non-empty list"),
        ({"id": "a", "prompt": "x", "answers": ["y", " "]}, "non-empty strings only"),
        ({"id": "a", "prompt": "x", "answers": [3]}, "non-empty strings only"),
    ],
)
def test_one_bad_line_of_generated_labels(tmp_path: Path, line: Any, said: str) -> None:
    found = problems_of(tmp_path, [{"id": "b", "prompt": "x", "answers": ["y"]}, line], labels="generate")
    assert len(found) == 1
    assert found[0].startswith("line 2: ")
    assert said in found[0]


def test_rows_that_do_not_apply_count_for_no_class(tmp_path: Path) -> None:
    subjects = ("a tired poem", "some winter story", "my silly song")
    rows: list[Any] = [{"id": one, "prompt": f"Write {one}.", "applies": False} for one in subjects]
    for labels in get_args(Labels):
        asking = [row | {"answers": ["x"]} for row in enough()]
        dataset = read_dataset(write_rows(tmp_path / "rows.jsonl", [rows[0], *asking, *rows[1:]]), labels, folds=3)
        assert dataset.others.tolist() == [0, 7, 8]
        assert dataset.asking.tolist() == list(range(1, 7))
        assert [row.applies for row in dataset.rows] == [False] + [True] * 6 + [False] * 2
    assert problems_of(tmp_path, [*rows, *enough(2)]) == [
        "only 1 group(s) have factual (label 1) rows, fewer than the 2 folds: add rows",
        "only 1 group(s) have hallucinated (label 0) rows, fewer than the 2 folds: add rows",
    ]
    for labels in get_args(Labels):
        [found] = problems_of(tmp_path, rows, labels)
        assert found.startswith('every row has "applies": false: add rows that ask for a fact')
    both = [*rows, {"id": "same", "prompt": "Write some winter story.", "label": 1}, *enough()]
    assert problems_of(tmp_path, both) == ["line 4: same prompt and group as line 2, but only one of them applies"]


def test_a_file_whose_every_row_is_scored_takes_none_that_does_not_apply(tmp_path: Path) -> None:
    rows = [*enough(), *({"id": f"p{n}", "prompt": f"Write poem {n}.", "applies": False} for n in range(2))]
    dataset = read_dataset(write_rows(tmp_path / "rows.jsonl", rows), "given", folds=2)
    with pytest.raises(DataError, match='line 7 and 1 more line: "applies" is false.*leave it out here'):
        check_all_apply(dataset)
    check_all_apply(read_dataset(write_rows(tmp_path / "rows.jsonl", enough()), "given", folds=2))


def test_all_problems_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    lines = [b"{", {"id": "b", "label": 3}, *enough(2), {"id": "ok0", "prompt": "again", "label": 1}]
    found = problems_of(tmp_path, lines)
    assert [problem.split(":")[0] for problem in found] == ["line 1", "line 2", "line 2", "line 5"]


def test_an_id_twice_names_both_lines(tmp_path: Path) -> None:
    found = problems_of(tmp_path, [*enough(), {**GOOD, "id": "ok2"}])
    assert found == ["line 7: id 'ok2' is already that of line 3"]


def test_rows_without_an_id_are_called_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "label": 1}, {"id": 9, "prompt": "b", "label": 0}, {"id": "x", "prompt": "c", "label": 1}]
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    assert [row.id for row in read_dataset(path, "given", folds=0).rows] == ["2", "9", "x"]


@pytest.mark.parametrize(
    ("ids", "line", "said"),
    [
        (["2", None], 2, "id '2' of line 1 is also the number of line 2, which has no 'id'"),
        ([None, 1], 2, "id '1' of line 2 is also the number of line 1, which has no 'id'"),
        ([5, "5"], 2, "id '5' is already that of line 1"),
    ],
)
def test_an_id_that_is_another_rows_number_is_told(tmp_path: Path, ids: list[Any], line: int, said: str) -> None:
    lines = [{"prompt": f"q{n}", "label": 1} | ({} if name is None else {"id": name}) for n, name in enumerate(ids)]
    [found] = problems_of(tmp_path, [*lines, {"id": "z", "prompt": "z", "label": 0}], folds=0)
    assert found.startswith(f"line {line}: {said}")


def test_problems_of_one_kind_are_told_once_with_a_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"q{n}", "label": "yes" if n % 2 else f"no {n}"} for n in range(412)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"label": 1}, *rows]))
    with pytest.raises(DataError) as caught:
        read_dataset(path, "given", folds=None)
    head, missing, labels = caught.value.message.splitlines()
    assert head.endswith("413 problems; nothing was done")
    assert missing == "  line 1: 'prompt' (or 'messages') is missing"
    assert labels == (
        "  line 2 and 411 more lines: 'label' must be the number 1 (factual) or 0 (hallucinated), found \"no 0\" (the "
        "others are like it)"
    )


def test_contradictory_duplicates_name_both_lines(tmp_path: Path) -> None:
    lines = [*enough(), {**GOOD, "id": "p", "group": "g"}, {**GOOD, "id": "q", "group": "g", "label": 0}]
    found = problems_of(tmp_path, lines)
    assert len(found) == 1
    assert "line 8: same prompt and group as line 7" in found[0]


def test_a_single_class_and_too_few_groups(tmp_path: Path) -> None:
    one_class = [{"id": str(i), "prompt": f"p{i}", "label": 1} for i in range(6)]
    assert "no row is hallucinated (label 0)" in problems_of(tmp_path, one_class)[0]
    found = problems_of(tmp_path, enough(6), folds=5)
    assert len(found) == 2
    assert "only 3 group(s) have factual" in found[0]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match="no rows"):
        read_dataset(path, "given", folds=2)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_dataset(tmp_path / "none.jsonl", "given", folds=2)


def write(path: Path, rows: list[dict[str, Any]], **style: Any) -> Dataset:
    path.write_text("".join(json.dumps(row, **style) + "\n" for row in rows), encoding="utf-8")
    return read_dataset(path, "given", folds=0)


def test_good_rows_keep_metadata_groups_and_prompts(tmp_path: Path) -> None:
    rows = enough()
    rows[0] |= {"group": "g", "kind": "city", "template": 3, "other": [1]}
    rows[1] |= {"group": "g"}
    rows[2] = {"id": "m", "messages": [{"role": "user", "content": "é"}], "label": 1}
    dataset = write(tmp_path / "a.jsonl", rows)
    assert dataset.groups.tolist() == [0, 0, 1, 2, 3, 4]
    assert dataset.rows[0].strata == {"kind": "city", "template": "3"}
    assert [row.label for row in dataset.rows] == [0, 1, 1, 1, 0, 1]
    assert (dataset.rows[0].prompt, dataset.rows[0].messages) == ("Question 0?", None)
    assert (dataset.rows[2].prompt, dataset.rows[2].messages) == (None, [{"role": "user", "content": "é"}])
    assert (dataset.rows[0].question, dataset.rows[2].question) == ("Question 0?", "user: é")


def test_the_digest_is_of_the_rows_and_not_of_their_spelling(tmp_path: Path) -> None:
    rows = enough()
    plain = write(tmp_path / "a.jsonl", rows)
    spelled = write(tmp_path / "b.jsonl", [dict(reversed(row.items())) for row in rows], indent=None, separators=(" ,", ": "))  # fmt: skip  # noqa: E501
    assert plain.digest == spelled.digest
    rows[3]["label"] = 1 - rows[3]["label"]
    assert write(tmp_path / "c.jsonl", rows).digest != plain.digest


def test_held_out_rows_may_not_be_training_rows(tmp_path: Path) -> None:
    rows = [{**row, "group": f"g{i}"} for i, row in enumerate(enough())]
    train = write(tmp_path / "a.jsonl", rows)
    check_disjoint(
        train, write(tmp_path / "b.jsonl", [{"id": "ok0", "prompt": "new", "label": 1}, {**GOOD, "label": 0}])
    )
    test = write(tmp_path / "c.jsonl", [{**GOOD, "group": "g4"}, {"id": "x", "prompt": "Question 2?", "label": 0}])
    with pytest.raises(DataError) as caught:
        check_disjoint(train, test)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["line 1", "line 2"]


def test_rows_of_one_prompt_share_a_group_whatever_they_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"id": "a", "prompt": "Where is Lyon?", "label": 1, "group": "g"},
        {"id": "b", "messages": [{"role": "user", "content": "Where is Lyon?"}], "label": 1, "group": "h"},
        {"id": "c", "prompt": "Where is Oslo?", "label": 0, "group": "h"},
        {"id": "d", "prompt": "Where is Rome?", "label": 0},
        {"id": "e", "prompt": "Where is Rome?", "label": 0},
        {"id": "f", "prompt": "Where is Bonn?", "label": 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_dataset(path, "given", folds=2).groups.tolist() == [0, 0, 0, 1, 1, 2]


def test_one_prompt_with_both_labels_needs_no_group_to_be_reported(tmp_path: Path) -> None:
    twice = [{"id": "x", "prompt": "Same?", "label": 0}, {"id": "y", "prompt": "Same?", "label": 1}]
    (problem,) = problems_of(tmp_path, [*enough(), *twice])
    assert problem.startswith("line 8: same prompt")


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\r\n" for row in enough()), encoding="utf-8-sig")
    assert len(read_dataset(path, "given", folds=2)) == 6
