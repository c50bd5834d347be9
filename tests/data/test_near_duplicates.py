"""Paraphrases are found, and the same question about another entity is not one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from service.data.near_duplicates import near_duplicates
from service.data.training_rows import Dataset, check_disjoint, read_dataset
from service.demo.questions import questions
from service.errors import DataError
from tests.fitting.planted import write_rows
from tests.kit.rows import Rows
from tests.kit.tables import cells, lines

COUNTRIES = lines(
    """
    France
    Spain
    Italy
    Peru
    Chad
    Nepal
    Kenya
    Japan
    Cuba
    Iran
    Austria
    Australia
    Niger
    Nigeria
    Guinea
    Mali
    Malta
    Fiji
    Laos
    Togo
    """
)
OTHERS = [f"What is the capital of {name}?" for name in COUNTRIES] + [
    f"{name} is the capital of which country?"
    for name in ["Berlin", "Avarua", "Rome", "Oslo", "Lima"]
]
PARAPHRASES = lines(
    """
    what is the capital of france
    WHAT IS THE CAPITAL OF FRANCE?!
    Tell me: what's the capital of France?
    Could you please tell me what the capital of France is?
    The capital of France is what?
    France: what is its capital?
    What is the capital of France? Answer briefly.
    What is the capital of France? Thanks!
    What is the capital of France? (2)
    What is the capital of France? #3
    7. What is the capital of France?
    Hello! What’s the capital of \uff26rance?
    """
)
PARAPHRASES.append("  What   is the capital of France ...")


def alike(*prompts: str) -> list[int]:
    """Numbers of ``prompts`` among OTHERS; the first of OTHERS is the question about France."""
    return list(near_duplicates([[text] for text in (*prompts, *OTHERS)]).tolist())


@pytest.mark.parametrize("text", PARAPHRASES)
def test_a_paraphrase_is_alike(text: str) -> None:
    found = alike(text)
    assert found[0] == found[1]
    assert len(set(found)) == len(OTHERS)


DIFFERENT = cells(
    """
    Berlin is the capital of which country? | Avarua is the capital of which country?
    What is the capital of Niger? | What is the capital of Nigeria?
    What is the capital of France in 1940? | What is the capital of France in 1871?
    Who won the men's relay of 4 x 100 metres? | Who won the men's relay of 4 x 400 metres?
    Who was the first president of Togo? | Who was the last president of Togo?
    What is 12 minus 7? | What is 7 minus 12?
    Name the element with the symbol In. | Name the element with the symbol Be.
    ... | ?!
    """
)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_another_question_is_not(first: str, second: str) -> None:
    numbers = alike(first, second)
    assert numbers[0] != numbers[1]


def test_a_question_behind_another_passage_is_the_same_question() -> None:
    def numbers(*conversations: list[str]) -> int:
        return len(set(near_duplicates(conversations).tolist()))

    passages = [f"{name} has a long history of {n} kings." for n, name in enumerate(COUNTRIES)]
    asked = [[f"{passage}\n\nWhat is the capital of France?"] for passage in passages[:3]]
    assert numbers(*asked) == 1
    # "Here" and "there" are little beside a country.
    statements = [
        [f"{word} {passage}\n\nIs the statement true or false?"]
        for word in ("Here", "There")
        for passage in passages
    ]
    assert numbers(*statements) == len(passages)
    assert numbers(*([text, "Fine.", "What is its highest mountain?"] for text in OTHERS)) == len(
        OTHERS
    )


def test_the_demo_questions_of_different_entities_stay_apart() -> None:
    for split, most in (("train", 0.007), ("dev", 0.0), ("test", 0.002)):
        rows = questions(split)
        found = near_duplicates([[row["prompt"]] for row in rows])
        groups: dict[int, set[str]] = {}
        for row, number in zip(rows, found.tolist(), strict=True):
            groups.setdefault(number, set()).add(row["group"])
        joined = sum(len(groups[number]) > 1 for number in found.tolist())
        assert joined <= most * len(rows)


def read(path: Path, rows: Rows, folds: int | None = None) -> Dataset:
    labelled = [{"label": number % 2} | row for number, row in enumerate(rows)]
    return read_dataset(write_rows(path, labelled), "given", folds=folds)


def in_groups(group: str | None, *texts: str) -> Rows:
    """Rows of a group, or of none."""
    return [{"prompt": text} | ({"group": group} if group else {}) for text in texts]


def prompts(*groups: str | None) -> Rows:
    """Paraphrases of the same question, with these groups; then questions about other countries."""
    rows = []
    for text, group in zip([OTHERS[0], *PARAPHRASES], groups, strict=False):
        rows += in_groups(group, text)
    return rows + in_groups(None, *OTHERS[1:])


@pytest.mark.parametrize(
    ("groups", "numbers"),
    [
        ((None, None, None), [0, 0, 0]),
        (("a", None, None), [0, 0, 0]),
        (("a", "b", "c"), [0, 1, 2]),  # named apart: whoever names groups knows
        (("a", "b", None), [0, 0, 0]),  # else the last one would stand on both sides of a fold
    ],
)
def test_rows_without_a_group_are_joined(
    tmp_path: Path, groups: tuple[str | None, ...], numbers: list[int]
) -> None:
    dataset = read(tmp_path / "rows.jsonl", prompts(*groups))
    assert dataset.groups[:3].tolist() == numbers
    assert len(np.unique(dataset.groups)) == len(set(numbers)) + len(OTHERS) - 1
    [remark] = dataset.remarks
    assert remark.startswith(
        "3 rows ask the same as another" if None in groups else "3 rows of different groups ask"
    )
    assert 'line 2, "what is the capital of france", as line 1' in remark


def test_named_groups_that_hardly_meet_and_copies_of_one_prompt_are_not_remarked_on(
    tmp_path: Path,
) -> None:
    rows = [
        {"prompt": f"What is the capital of the {number}th land?", "group": str(number)}
        for number in range(400)
    ]
    rows[7]["prompt"] = rows[8]["prompt"] + " Thanks!"
    same = {"prompt": OTHERS[0], "label": 1}
    for copies in (rows, [same, same, {"prompt": "Is it?", "label": 0}]):
        assert read(tmp_path / "rows.jsonl", copies).remarks == []


def test_chats_are_compared_by_what_is_said(tmp_path: Path) -> None:
    guide = {"role": "system", "content": "You are a guide."}
    texts = (OTHERS[0], PARAPHRASES[0], OTHERS[1])
    rows = [{"messages": [guide, {"role": "user", "content": text}]} for text in texts]
    assert read(tmp_path / "rows.jsonl", rows).groups.tolist() == [0, 0, 1]


def test_too_few_groups_are_explained_by_the_rows_that_were_joined(tmp_path: Path) -> None:
    rows = [{"prompt": text, "label": 1} for text in (OTHERS[0], *PARAPHRASES)]
    rows += [{"prompt": text, "label": 0} for text in OTHERS[1:]]
    with pytest.raises(DataError, match="only 1 group") as caught:
        read(tmp_path / "rows.jsonl", rows, folds=3)
    assert "14 rows ask the same as another one in other words" in caught.value.message


@pytest.mark.parametrize("here", [None, "h"])
@pytest.mark.parametrize("there", [None, "g"])
def test_a_held_out_paraphrase_is_refused(
    tmp_path: Path, here: str | None, there: str | None
) -> None:
    """Unless both files name their groups."""
    train = read(tmp_path / "train.jsonl", in_groups(here, *OTHERS))
    test = read(tmp_path / "test.jsonl", in_groups(there, "Who wrote Dune?", PARAPHRASES[2]))
    if here and there:
        check_disjoint(train, test)
        return
    with pytest.raises(
        DataError, match=r"line 2: it asks what .*train\.jsonl line 1 asks.*capital of France"
    ):
        check_disjoint(train, test)
