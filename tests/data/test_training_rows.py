"""Rows of training and of traffic: every bad one is named by its line, all at once; who shares a
group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from probes_store.records import GREEDY, Decoding
from service.data.options import TrainingLabels
from service.data.training_rows import (
    Dataset,
    TrafficFile,
    check_disjoint,
    read_dataset,
    read_traffic,
)
from service.errors import DataError
from tests.command_line import hallutracer
from tests.fitting.planted import write_rows
from tests.kit.chats import turns
from tests.kit.rows import Row, Rows, lines_named
from tests.kit.tables import cells, lines

GOOD: Row = {"prompt": "Where is Lyon?", "label": 1}
OWN = "sha256:own"


# A fine-tuning row ends with the answer.
[SYSTEM, USER, ANSWER] = turns("Capital of France?", "Paris", system="Be brief.")


def chat(*messages: dict[str, str], **more: Any) -> Row:
    return {"messages": list(messages), "label": 1} | more


def enough(count: int = 6) -> Rows:
    return [{"id": f"ok{i}", "prompt": f"Question {i}?", "label": i % 2} for i in range(count)]


def read(
    path: Path, rows: Rows, labels: Any = "given", folds: int | None = 0, **style: Any
) -> Dataset:
    path.write_text("".join(json.dumps(row, **style) + "\n" for row in rows), encoding="utf-8")
    return read_dataset(path, labels, folds=folds)


def problems_of(folder: Path, lines: list[Any], labels: Any = "given", folds: int = 2) -> list[str]:
    path = folder / "rows.jsonl"
    path.write_bytes(
        b"".join(
            (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            for line in lines
        )
    )
    with pytest.raises(DataError) as caught:
        read_dataset(path, labels, folds=folds)
    assert str(path) in caught.value.message
    return caught.value.problems


# A line of the file, and what is said of it.
BAD_LINES = cells(
    r"""
    {not json | invalid JSON
    {"id": "a", "prompt": "x", "label": NaN} | NaN is not JSON
    {"id": "a", "id": "b", "prompt": "x", "label": 1} | 'id' appears twice
    "a string" | found a string
    [1] | found a list
    {"id": null, "prompt": "x", "label": 1} | 'id' must be a string, found null
    {"id": 3.5, "prompt": "x", "label": 1} | found a number
    {"id": true, "prompt": "x", "label": 1} | found a boolean
    {"id": " ", "prompt": "x", "label": 1} | 'id' is empty
    {"id": "a", "label": 1} | 'prompt' (or 'messages') is missing
    {"prompt": "x", "messages": [], "label": 1} | both 'prompt' and 'messages'
    {"prompt": null, "label": 1} | 'prompt' must be a string, found null
    {"prompt": "\ud800", "label": 1} | surrogate
    {"prompt": " ", "label": 1} | 'prompt' is empty
    {"messages": [], "label": 1} | 'messages' must be a non-empty list
    {"messages": ["x"], "label": 1} | 'messages[0]' must be an object
    {"messages": [{"role": "user", "content": ""}], "label": 1} | 'messages[0]': 'content' is empty
    {"messages": [{"role": 1, "content": "x"}], "label": 1} | 'role' must be a string
    {"messages": [{"role": "bot", "content": "x"}], "label": 1} | role 'bot' is none of
    {"prompt": "x"} | 'label' is missing
    {"prompt": "x", "applies": true} | 'label' is missing
    {"prompt": "x", "answers": ["y"]} | generate the labels
    {"prompt": "x", "label": 2} | 'label' must be "factual" or "hallucinated"
    {"prompt": "x", "label": -1} | 'label' must be "factual" or "hallucinated"
    {"prompt": "x", "label": [1]} | 'label' must be "factual" or "hallucinated"
    {"prompt": "x", "label": null} | 'label' must be "factual" or "hallucinated"
    {"prompt": "x", "label": "true"} | 'label' must be "factual" or "hallucinated"
    {"prompt": "x", "label": "right"} | 'label' must be "factual" or "hallucinated"
    {"prompt": "x", "label": "not hallucinated"} | 'label' must be "factual" or "hallucinated"
    {"prompt": "x", "label": true} | found true
    {"prompt": "x", "label": "1"} | found "1"
    {"prompt": "x", "label": 1.5} | found 1.5
    {"prompt": "x", "label": 1, "group": 7} | 'group' must be a string
    {"prompt": "x", "label": 1, "applies": 0} | must be true or false, found 0
    {"prompt": "x", "label": 1, "applies": null} | found null
    {"prompt": "x", "label": 1, "applies": false} | has 'label' and "applies": false
    {"prompt": "x", "answers": ["y"], "applies": false} | has 'answers' and "applies": false
    """
)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        *BAD_LINES,
        (b'{"id": "\xff"}', "not UTF-8 at byte 9"),
        (
            json.dumps(chat(USER, ANSWER, answer="Lyon")),
            "ends with an answer, and 'answer' is another: keep one",
        ),
    ],
)
def test_one_bad_line(tmp_path: Path, line: str | bytes, problem: str) -> None:
    bad = line if isinstance(line, bytes) else line.encode()
    [told] = problems_of(tmp_path, [*enough(), bad])
    assert told.startswith("line 7: ")
    assert problem in told


# A field, a line of the file, and what is said of the field.
BAD_ANSWERS = cells(
    r"""
    answers | {"prompt": "x", "label": 1} | (there is a 'label'
    answers | {"prompt": "x", "answers": []} | a non-empty list
    answers | {"prompt": "x", "answers": " "} | non-empty strings only
    answers | {"prompt": "x", "answers": ["y", " "]} | non-empty strings only
    answers | {"prompt": "x", "answers": [3]} | non-empty strings only
    answers | {"prompt": "x", "answers": ["\ud800"]} | surrogate
    answers | {"prompt": "x", "answers": "[\"a\", \"b\"]"} | is a text that looks like a list
    answers | {"prompt": "x", "answers": "['a', 'b']"} | write it as JSON has it, ["a", "b"]
    answers | {"prompt": "x", "answers": " [\"a\"] "} | is a text that looks like a list
    answers | {"prompt": "x", "answers": "[]"} | is a text that looks like a list
    answer_tokens | {"prompt": "x", "answers": ["y"], "answer_tokens": "64"} | number, found "64"
    answer_tokens | {"prompt": "x", "answers": ["y"], "answer_tokens": -1} | number, found -1
    answer_tokens | {"prompt": "x", "answers": ["y"], "answer_tokens": 6.5} | number, found 6.5
    answer_tokens | {"prompt": "x", "answers": ["y"], "answer_tokens": true} | number, found true
    """
)


@pytest.mark.parametrize(("field", "line", "problem"), BAD_ANSWERS)
def test_one_bad_line_of_generated_labels(
    tmp_path: Path, field: str, line: str, problem: str
) -> None:
    good = {"prompt": "z", "answers": ["y"]}
    [told] = problems_of(tmp_path, [good, line.encode()], labels="generate")
    assert told.startswith(f"line 2: '{field}'")
    assert problem in told


def test_rows_that_do_not_apply_count_for_no_class(tmp_path: Path) -> None:
    subjects = ("a tired poem", "some winter story", "my silly song")
    rows: Rows = [{"prompt": f"Write {subject}.", "applies": False} for subject in subjects]
    for labels in get_args(TrainingLabels):
        asking = [row | {"answers": ["x"]} for row in enough()]
        dataset = read(tmp_path / "rows.jsonl", [rows[0], *asking, *rows[1:]], labels, folds=3)
        assert (dataset.others.tolist(), dataset.asking.tolist()) == ([0, 7, 8], [*range(1, 7)])
        assert [row.applies for row in dataset.rows] == [False] + [True] * 6 + [False] * 2
        [problem] = problems_of(tmp_path, rows, labels)
        assert problem.startswith('every row has "applies": false')
    few = problems_of(tmp_path, [*rows, *enough(2)])
    assert [problem.partition(" rows")[0] for problem in few] == [
        f"only 1 group(s) have {name}" for name in ("factual (label 1)", "hallucinated (label 0)")
    ]
    both = [*rows, {"prompt": "Write some winter story.", "label": 1}, *enough()]
    assert problems_of(tmp_path, both) == [
        "line 4: same prompt and group as line 2, but only one of them applies"
    ]


def test_all_problems_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    repeated = {"id": "ok0", "prompt": "again", "label": 1}
    problems = problems_of(tmp_path, [b"{", {"label": 3}, *enough(2), repeated])
    assert lines_named(problems) == ["line 1", "line 2", "line 2", "line 5"]
    rows = [{"prompt": f"q{n}", "label": "yes" if n % 2 else f"no {n}"} for n in range(412)]
    with pytest.raises(DataError) as caught:  # of one kind once, with a count
        read(tmp_path / "many.jsonl", [{"label": 1}, *rows])
    head, missing, labels = caught.value.message.splitlines()
    assert "413 problems" in head
    assert missing.startswith("  line 1: 'prompt'")
    assert labels.startswith("  line 2 and 411 more lines: 'label'")
    assert '"no 0" (the others' in labels


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (["2", None], "line 2: id '2' of line 1 is also the number of line 2, which has no 'id'"),
        ([None, 1], "line 2: id '1' of line 2 is also the number of line 1, which has no 'id'"),
        ([5, "5"], "line 2: id '5' is already that of line 1"),
    ],
)
def test_an_id_of_two_rows_names_both_lines(tmp_path: Path, ids: list[Any], problem: str) -> None:
    rows = [
        {"prompt": f"q{number}", "label": 1} | ({} if name is None else {"id": name})
        for number, name in enumerate(ids)
    ]
    [told] = problems_of(tmp_path, [*rows, {"id": "z", "prompt": "z", "label": 0}], folds=0)
    assert told.startswith(problem)


def test_rows_without_an_id_are_called_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '\n{"prompt": "a", "label": 1}\n'
        '{"id": 9, "prompt": "b", "label": 0}\n{"id": "x", "prompt": "c", "label": 1}\n'
    )
    assert [row.id for row in read_dataset(path, "given", folds=0).rows] == ["2", "9", "x"]


def test_contradictions_classes_and_groups(tmp_path: Path) -> None:
    grouped = [GOOD | {"group": "g"}, GOOD | {"group": "g", "label": 0}]
    alone = [{"prompt": "Same?", "label": 0}, {"prompt": "Same?", "label": 1}]
    for twice in (grouped, alone):
        [problem] = problems_of(tmp_path, [*enough(), *twice])
        assert problem.startswith("line 8: same prompt and group as line 7")
        right, wrong = (row | {"answer": f" {number}."} for number, row in enumerate(twice))
        assert read(tmp_path / "rows.jsonl", [*enough(), right, wrong]).rows
        again = wrong | {"label": right["label"]}
        [problem] = problems_of(tmp_path, [*enough(), right, wrong, again])
        assert problem.startswith("line 9: same prompt and group as line 8")
    one_class = [{"prompt": f"p{number}", "label": 1} for number in range(6)]
    assert "no row is hallucinated (label 0)" in problems_of(tmp_path, one_class)[0]
    problems = problems_of(tmp_path, enough(6), folds=5)
    assert (len(problems), "only 3 group(s) have factual" in problems[0]) == (2, True)


def test_good_rows_keep_metadata_groups_and_prompts(tmp_path: Path) -> None:
    rows = enough()
    rows[0] |= {"group": "g", "kind": "city", "template": 3, "other": [1]}
    rows[1] |= {"group": "g"}
    rows[2] = {"id": "m", "messages": [{"role": "user", "content": "é"}], "label": 1}
    dataset = read(tmp_path / "a.jsonl", rows)
    first, _, third, *_ = dataset.rows
    assert dataset.groups.tolist() == [0, 0, 1, 2, 3, 4]
    assert first.strata == {"kind": "city", "template": "3"}
    assert [row.label for row in dataset.rows] == [0, 1, 1, 1, 0, 1]
    assert (first.prompt, first.messages, first.question) == ("Question 0?", None, "Question 0?")
    assert (third.prompt, third.messages, third.question) == (None, rows[2]["messages"], "user: é")
    path = tmp_path / "marked.jsonl"  # a byte order mark is no problem
    path.write_text("".join(json.dumps(row) + "\r\n" for row in enough()), encoding="utf-8-sig")
    assert len(read_dataset(path, "given", folds=2)) == 6


def test_the_digest_is_of_the_rows_and_not_of_their_spelling(tmp_path: Path) -> None:
    rows = enough()
    plain = read(tmp_path / "a.jsonl", rows)
    turned = [dict(reversed(row.items())) for row in rows]
    assert plain.digest == read(tmp_path / "b.jsonl", turned, separators=(" ,", ": ")).digest
    rows[3]["label"] = 1 - rows[3]["label"]
    assert read(tmp_path / "c.jsonl", rows).digest != plain.digest


def test_held_out_rows_may_not_be_training_rows(tmp_path: Path) -> None:
    rows = [{**row, "group": f"g{number}"} for number, row in enumerate(enough())]
    train = read(tmp_path / "a.jsonl", rows)
    new = [{"id": "ok0", "prompt": "new", "label": 1}, GOOD | {"label": 0}]
    check_disjoint(train, read(tmp_path / "b.jsonl", new))
    test = [GOOD | {"group": "g4"}, {"prompt": "Question 2?", "label": 0}]
    with pytest.raises(DataError) as caught:
        check_disjoint(train, read(tmp_path / "c.jsonl", test))
    assert lines_named(caught.value.problems) == ["line 1", "line 2"]


def test_rows_of_one_prompt_share_a_group_whatever_they_name(tmp_path: Path) -> None:
    rows: Rows = [
        {"prompt": "Where is Lyon?", "label": 1, "group": "g"},
        {"messages": turns("Where is Lyon?"), "label": 1, "group": "h"},
        {"prompt": "Where is Oslo?", "label": 0, "group": "h"},
        {"prompt": "Where is Rome?", "label": 0},
        {"prompt": "Where is Rome?", "label": 0},
        {"prompt": "Where is Bonn?", "label": 1},
    ]
    assert read(tmp_path / "rows.jsonl", rows, folds=2).groups.tolist() == [0, 0, 0, 1, 1, 2]


# Unlabelled traffic: risks or prompts.


def traffic(folder: Path, *rows: Any) -> TrafficFile:
    return read_traffic(write_rows(folder / "traffic.jsonl", [*rows]), OWN)


def test_risks_as_score_writes_them_and_prompts(tmp_path: Path) -> None:
    bundle = {"name": "b", "version": 1, "digest": OWN}
    scored = traffic(
        tmp_path,
        {"id": "a", "prompt": "Why?", "risk": 0.25, "label": 1, "bundle": bundle},
        {"prompt": "Why?", "risk": 1},
        {"risk": 0.5, "group": "g"},
        {"risk": 0.5},
    )
    assert scored.scored
    assert [row.risk for row in scored.rows] == [0.25, 1.0, 0.5, 0.5]
    groups = [row.group for row in scored.rows]
    assert (groups[0] == groups[1], len(set(groups))) == (True, 3)  # the same prompt
    assert scored.rows[0].prompt_digest == scored.rows[1].prompt_digest is not None
    assert scored.rows[3].prompt_digest is None
    chats = ({"messages": turns("Why?", *answer)} for answer in ((), ("So.",)))
    prompts = traffic(tmp_path, {"prompt": "Why?"}, *chats)
    assert not prompts.scored
    assert len({row.prompt_digest for row in prompts.rows}) == 1
    assert [row.messages for row in prompts.rows] == [None, turns("Why?"), turns("Why?")]


BAD_TRAFFIC = cells(
    """
    {"id": "a"} | line 2: 'prompt'
    {"risk": 1.5} | line 2: 'risk' must be a number from 0 to 1, found 1.5
    {"risk": true} | found true
    {"risk": "0.5"} | found "0.5"
    {"risk": null} | found null
    {"risk": 0.5, "prompt": ""} | 'prompt' is empty
    {"risk": 0.5, "group": 3} | 'group' must be a string
    {"risk": 0.5, "bundle": {"name": "b", "version": 2, "digest": "sha256:other"}} | b:2
    {"prompt": "Why?"} | score all of them, or none
    [] | a JSON object
    """
)


@pytest.mark.parametrize(("line", "problem"), BAD_TRAFFIC)
def test_problems_of_traffic_are_named_by_line(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(DataError, match="line 2") as caught:
        traffic(tmp_path, {"risk": 0.5}, json.loads(line))
    assert problem in str(caught.value)
    with pytest.raises(DataError, match="no rows"):
        traffic(tmp_path)


# fine-tuning rows, which end with the answer


def test_what_ends_in_the_answer_is_read_before_it_and_the_label_is_the_answers(
    tmp_path: Path,
) -> None:
    thought = "<think>Lyon?</think>Paris"
    thinking = chat(USER, ANSWER, USER, ANSWER | {"content": thought})
    cases: list[tuple[Row, list[Any], str]] = [
        (chat(USER, ANSWER), [USER], "Paris"),
        (chat(USER, ANSWER, answer="Paris"), [USER], "Paris"),
        (chat(USER, answer="Paris"), [USER], "Paris"),
        (chat(SYSTEM, USER, ANSWER), [SYSTEM, USER], "Paris"),
        (thinking, [USER, ANSWER, USER], thought),
        (chat(USER, ANSWER | {"content": "Lyon"}, label=0), [USER], "Lyon"),
        (chat(USER, ANSWER, answer=""), [USER], "Paris"),
    ]
    thanks = {"messages": [USER, ANSWER], "applies": False, "group": "thanks"}
    rows = read(tmp_path / "rows.jsonl", [*(row for row, *_ in cases), thanks], folds=None).rows
    for row, (given, messages, answer) in zip(rows, cases, strict=False):
        assert (row.messages, row.answer, row.label) == (messages, answer, given["label"])
    assert (rows[-1].messages, rows[-1].label) == ([USER], None)
    assert len({row.prompt_digest for row in rows if row.messages == [USER]}) == 1
    generated = chat(USER, ANSWER, answers=["Paris"])
    [row] = read(tmp_path / "rows.jsonl", [generated], labels="generate").rows
    assert (row.messages, row.answer, row.question) == ([USER], "", "user: Capital of France?")


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([SYSTEM], "no turn of the user"),
        ([ANSWER], "no turn of the user"),
        ([SYSTEM, ANSWER], "no turn"),
        ([USER, ANSWER, ANSWER], "ends with several turns of the assistant"),
    ],
)
def test_messages_that_ask_nothing_are_refused_by_line(
    tmp_path: Path, messages: list[Any], problem: str
) -> None:
    """Of training, of traffic, and of rows to score."""
    path = write_rows(tmp_path / "score.jsonl", [{"messages": messages}])
    with pytest.raises(DataError) as caught:
        read_traffic(path, OWN)
    [of_traffic], [of_training] = (
        caught.value.problems,
        problems_of(tmp_path, [*enough(), chat(*messages)]),
    )
    assert of_training.startswith("line 7: ")
    done = hallutracer("score", "--input", str(path))
    assert (done.returncode, "line 1: " in done.stderr) == (1, True)
    for told in (of_training, of_traffic, done.stderr):
        assert problem in told


def test_a_conversation_with_its_answer_is_scored_before_the_answer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, ANSWER]}, {"messages": [USER]}])
    done = hallutracer("score", "--input", str(path))
    with_answer, without = map(json.loads, done.stdout.splitlines())
    assert with_answer["risk"] == pytest.approx(without["risk"], abs=1e-6)
    assert with_answer["messages"] == [USER, ANSWER]  # what was given is written out again


# how given answers were decoded


@pytest.mark.parametrize(
    ("text", "decoding"),
    [
        ("greedy", GREEDY),
        ("temperature=0", GREEDY),
        ("temperature=0, top_p=0.5", GREEDY),
        ("temperature=0.7", Decoding(0.7, 1.0)),
        ("top_p=0.9,temperature=1", Decoding(1.0, 0.9)),
        (None, None),
    ],
)
def test_a_row_says_how_its_answer_was_decoded(
    tmp_path: Path, text: str | None, decoding: Decoding | None
) -> None:
    rows = [row | {"decoding": text} for row in enough(2)]
    rows.append({"prompt": "Write.", "applies": False})
    dataset = read(tmp_path / "rows.jsonl", rows)
    assert dataset.decodings == {decoding}
    assert "decoding" not in str(dataset.remarks)
    mixed = read(tmp_path / "mixed.jsonl", [*rows, GOOD | {"decoding": "temperature=0.3"}])
    assert mixed.decodings == {decoding, Decoding(0.3, 1.0)}
    assert "'decoding' differs" in mixed.remarks[-1]
    generated = [{"prompt": row["prompt"], "answers": "y", "decoding": text} for row in rows[:2]]
    assert read(tmp_path / "generated.jsonl", generated, "generate").decodings == {None}


BAD_DECODINGS = lines(
    """
    ""
    "warm"
    "temperature"
    "temperature="
    "temperature=x"
    "temperature=-1"
    "temperature=nan"
    "temperature=inf"
    "top_p=0.5"
    "temperature=1,top_p=0"
    "temperature=1,top_p=1.1"
    "temperature=1,top_k=5"
    "greedy,top_p=1"
    "temperature=1,temperature=1"
    0
    true
    {"temperature": 0.7}
    """
)


@pytest.mark.parametrize("decoding", BAD_DECODINGS)
def test_a_decoding_that_cannot_be_read_is_named(tmp_path: Path, decoding: str) -> None:
    bad = GOOD | {"decoding": json.loads(decoding)}
    [problem] = problems_of(tmp_path, [*enough(), bad], folds=0)
    assert problem.startswith("line 7: 'decoding'")
    assert "temperature=T,top_p=P" in problem
