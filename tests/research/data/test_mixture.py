"""Files of rows as one: whose rows they are, how many, and which questions are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from hallutracer_research.data.mixture import MixtureSource, mix
from service.data.training_rows import read_dataset
from service.errors import DataError
from tests.command_line import ended, hallutracer
from tests.kit.tables import cells
from tests.research.data.samples import write_lines


@pytest.fixture
def trivia(tmp_path: Path) -> Path:
    rows = [
        {
            "id": str(n),
            "prompt": f"Who painted picture number{n}? Answer briefly.",
            "answers": ["Ann"],
            "group": f"question/{n // 2}",
            "kind": "art",
        }
        for n in range(40)
    ]
    return write_lines(tmp_path / "trivia.jsonl", rows)


def test_ids_and_kinds_say_where_a_row_is_from(trivia: Path, tmp_path: Path) -> None:
    mine = write_lines(
        tmp_path / "mine.jsonl", [{"id": "0", "prompt": "What is the capital of Peru?", "label": 1}]
    )
    found = mix([MixtureSource(trivia), MixtureSource(mine)])
    assert len({row["id"] for row in found.rows}) == 41
    assert found.rows[-1] == {
        "id": "mine/0",
        "prompt": "What is the capital of Peru?",
        "label": 1,
        "group": "mine/0",
        "kind": "mine",
    }
    assert {row["kind"] for row in found.rows} == {"trivia/art", "mine"}
    assert found.by_source == {"trivia": 40, "mine": 1}
    assert found.groups == found.groups_before == 21


def test_rows_are_drawn_by_groups_the_same_ones_each_time(trivia: Path) -> None:
    found = mix([MixtureSource(trivia, 10)])
    assert found == mix([MixtureSource(trivia, 10)])
    assert found.groups == 5
    assert {row["id"] for row in found.rows} < {
        row["id"] for row in mix([MixtureSource(trivia, 20)]).rows
    }
    assert {row["id"] for row in found.rows} != {
        row["id"] for row in mix([MixtureSource(trivia, 10)], seed=1).rows
    }


@pytest.mark.parametrize(
    ("groups", "other"),
    cells(
        r"""
        1 | What’s the capital of Peru?
        2 | Peru: which city is its capital?
        1 | peru's capital is what
        1 | The capital of Peru is:
        1 | Some text about Lima.\n\nWhat is the capital of Peru?
        2 | What is the capital of Chad?
        """
    ),
)
def test_one_question_has_one_group_in_all_files(tmp_path: Path, groups: str, other: str) -> None:
    peru = [
        {"id": "0", "prompt": "What is the capital of Peru?"},
        {"id": "1", "prompt": "Who rules Peru now?"},
    ]
    first = write_lines(tmp_path / "a.jsonl", [row | {"group": "country/Peru"} for row in peru])
    second = write_lines(
        tmp_path / "b.jsonl", [{"id": "0", "messages": [{"role": "user", "content": other}]}]
    )
    found = mix([MixtureSource(first), MixtureSource(second)])
    assert len({row["group"] for row in found.rows}) == int(groups)
    assert found.groups_before == 2


def test_questions_without_words_of_content_are_not_the_same_and_rows_get_their_line_as_id(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": text} for text in ("Who was that?", "What is this?", "Rome?", "Rome?")]
    found = mix([MixtureSource(write_lines(tmp_path / "plain.jsonl", rows))])
    assert found.groups == 4
    assert {row["id"] for row in found.rows} == {f"plain/{line}" for line in (1, 2, 3, 4)}


def test_held_out_rows_share_no_group_and_no_question_with_the_others(
    trivia: Path, tmp_path: Path
) -> None:
    rows = mix([MixtureSource(trivia, 10)]).rows
    again = [{"id": "0", "prompt": f"So who painted picture {rows[0]['prompt'].split()[3][:-1]}?"}]
    other = write_lines(
        tmp_path / "other.jsonl",
        [*again, {"id": "1", "prompt": "Who painted nothing at all ever?"}],
    )
    without = write_lines(tmp_path / "rows.jsonl", rows)
    held = mix([MixtureSource(trivia), MixtureSource(other)], without=without)
    assert held.by_source == {"trivia": 30, "other": 1}
    assert not {row["group"] for row in held.rows} & {row["group"] for row in rows}
    with pytest.raises(DataError, match="30 rows to draw from"):
        mix([MixtureSource(trivia, 31)], without=without)


def test_what_is_wrong_is_said(trivia: Path, tmp_path: Path) -> None:
    same = write_lines(tmp_path / "other" / "trivia.jsonl", [{"id": "0", "prompt": "a"}])
    bad = write_lines(
        tmp_path / "bad.jsonl",
        [{"id": "0", "prompt": "a"}, {"id": 0.5}, {"id": "0", "prompt": "b"}],
    )
    empty = write_lines(tmp_path / "empty.jsonl", [])
    for sources, said in (
        ([MixtureSource(trivia, 41)], "40 rows to draw from, and 41 are wanted"),
        ([MixtureSource(trivia), MixtureSource(same)], "'trivia'"),
        (
            [MixtureSource(bad)],
            "line 2: 'id' must be a string(.|\n)*line 3: id '0' is already that of line 1",
        ),
        ([MixtureSource(empty)], "no rows"),
    ):
        with pytest.raises(DataError, match=said):
            mix(sources)


def test_the_command_prints_rows_that_the_trainer_takes(trivia: Path, tmp_path: Path) -> None:
    done = hallutracer("data", "mix", f"{trivia}:12")
    out = tmp_path / "rows.jsonl"
    out.write_text(ended(done, 0, "12 rows (trivia 12) in 6 groups"))
    assert len(read_dataset(out, "generate", folds=2)) == 12
    ended(hallutracer("data", "mix"), 2)
    ended(hallutracer("data", "mix", "nowhere.jsonl:3"), 1, "cannot be read")
