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
    check_all_apply,
    check_disjoint,
    read_dataset,
    read_traffic,
)
from service.errors import DataError
from tests.command_line import hallutracer
from tests.fitting.planted import write_rows

Rows = list[dict[str, Any]]
GOOD: dict[str, Any] = {"id": "a", "prompt": "Where is Lyon?", "label": 1}
X: dict[str, Any] = {"id": "a", "prompt": "x"}
ONE: dict[str, Any] = {"id": "a", "label": 1}
OWN = "sha256:own"


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


def message(**fields: Any) -> dict[str, Any]:
    return ONE | {"messages": [{"role": "user", "content": "x"} | fields]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{not json", "invalid JSON"),
        (b'{"id": "a", "prompt": "x", "label": NaN}', "NaN is not JSON"),
        (b'{"id": "a", "id": "b", "prompt": "x", "label": 1}', "'id' appears twice"),
        (b'"a string"', "found a string"),
        (b"[1]", "found a list"),
        (b'{"id": "\xff"}', "not UTF-8 at byte 9"),
        (GOOD | {"id": None}, "'id' must be a string, found null"),
        (GOOD | {"id": 3.5}, "found a number"),
        (GOOD | {"id": True}, "found a boolean"),
        (GOOD | {"id": " "}, "'id' is empty"),
        (ONE, "'prompt' (or 'messages') is missing"),
        (GOOD | {"messages": []}, "both 'prompt' and 'messages'"),
        (GOOD | {"prompt": None}, "'prompt' must be a string, found null"),
        (GOOD | {"prompt": "\ud800"}, "surrogate"),
        (GOOD | {"prompt": " "}, "'prompt' is empty"),
        (ONE | {"messages": []}, "'messages' must be a non-empty list"),
        (ONE | {"messages": ["x"]}, "'messages[0]' must be an object"),
        (message(content=""), "'messages[0]': 'content' is empty"),
        (message(role=1), "'role' must be a string"),
        (message(role="bot"), "role 'bot' is none of"),
        (X, "'label' is missing"),
        (X | {"answers": ["y"]}, "generate the labels"),
        (X | {"label": 2}, "'label' must be \"factual\" or"),
        (X | {"label": True}, "found true"),
        (X | {"label": "1"}, 'found "1"'),
        (X | {"label": 1.5}, "found 1.5"),
        (GOOD | {"group": 7}, "'group' must be a string"),
        (GOOD | {"applies": 0}, "must be true or false, found 0"),
        (GOOD | {"applies": None}, "found null"),
        (GOOD | {"applies": False}, "has 'label' and \"applies\": false"),
        (X | {"answers": ["y"], "applies": False}, "has 'answers' and \"applies\": false"),
        (X | {"applies": True}, "'label' is missing"),
    ],
)
def test_one_bad_line(tmp_path: Path, line: Any, said: str) -> None:
    [found] = problems_of(tmp_path, [*enough(), line])
    assert found.startswith("line 7: ")
    assert said in found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"label": 1}, "(there is a 'label'"),
        ({"answers": []}, "a non-empty list"),
        ({"answers": " "}, "non-empty strings only"),
        ({"answers": ["y", " "]}, "non-empty strings only"),
        ({"answers": [3]}, "non-empty strings only"),
        ({"answers": ["\ud800"]}, "surrogate"),
    ],
)
def test_one_bad_line_of_generated_labels(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    [found] = problems_of(
        tmp_path, [{"id": "b", "prompt": "x", "answers": ["y"]}, X | change], labels="generate"
    )
    assert found.startswith("line 2: 'answers' ")
    assert said in found


@pytest.mark.parametrize("tokens", ["64", -1, 6.5, True])
def test_the_length_of_an_answer_is_a_whole_number(tmp_path: Path, tokens: Any) -> None:
    row = {"prompt": "x", "answers": ["y"]}
    [problem] = problems_of(tmp_path, [row | {"answer_tokens": tokens}, row], labels="generate")
    shown = json.dumps(tokens)
    assert problem.startswith("line 1: 'answer_tokens', the tokens that this row's answer may need")
    assert problem.endswith(f"must be a whole number, found {shown}")


def test_rows_that_do_not_apply_count_for_no_class(tmp_path: Path) -> None:
    subjects = ("a tired poem", "some winter story", "my silly song")
    rows: Rows = [{"id": one, "prompt": f"Write {one}.", "applies": False} for one in subjects]
    for labels in get_args(TrainingLabels):
        asking = [row | {"answers": ["x"]} for row in enough()]
        dataset = read_dataset(
            write_rows(tmp_path / "rows.jsonl", [rows[0], *asking, *rows[1:]]), labels, folds=3
        )
        assert (dataset.others.tolist(), dataset.asking.tolist()) == ([0, 7, 8], list(range(1, 7)))
        assert [row.applies for row in dataset.rows] == [False] + [True] * 6 + [False] * 2
        [found] = problems_of(tmp_path, rows, labels)
        assert found.startswith('every row has "applies": false')
    few = problems_of(tmp_path, [*rows, *enough(2)])
    assert [problem.partition(" rows")[0] for problem in few] == [
        f"only 1 group(s) have {name}" for name in ("factual (label 1)", "hallucinated (label 0)")
    ]
    both = [*rows, {"id": "same", "prompt": "Write some winter story.", "label": 1}, *enough()]
    assert problems_of(tmp_path, both) == [
        "line 4: same prompt and group as line 2, but only one of them applies"
    ]


def test_a_file_whose_every_row_is_scored_takes_none_that_does_not_apply(tmp_path: Path) -> None:
    rows = [
        *enough(),
        *({"id": f"p{n}", "prompt": f"Write poem {n}.", "applies": False} for n in range(2)),
    ]
    with pytest.raises(DataError, match='line 7 and 1 more line: "applies" is false'):
        check_all_apply(read(tmp_path / "rows.jsonl", rows))
    check_all_apply(read(tmp_path / "rows.jsonl", enough()))


def test_all_problems_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    lines = [
        b"{",
        {"id": "b", "label": 3},
        *enough(2),
        {"id": "ok0", "prompt": "again", "label": 1},
    ]
    found = problems_of(tmp_path, lines)
    assert [problem.split(":")[0] for problem in found] == ["line 1", "line 2", "line 2", "line 5"]
    rows = [{"prompt": f"q{n}", "label": "yes" if n % 2 else f"no {n}"} for n in range(412)]
    with pytest.raises(DataError) as caught:  # of one kind once, with a count
        read(tmp_path / "many.jsonl", [{"label": 1}, *rows])
    head, missing, labels = caught.value.message.splitlines()
    assert "413 problems" in head
    assert missing.startswith("  line 1: 'prompt'")
    assert labels.startswith("  line 2 and 411 more lines: 'label'")
    assert '"no 0" (the others' in labels


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["2", None], "line 2: id '2' of line 1 is also the number of line 2, which has no 'id'"),
        ([None, 1], "line 2: id '1' of line 2 is also the number of line 1, which has no 'id'"),
        ([5, "5"], "line 2: id '5' is already that of line 1"),
    ],
)
def test_an_id_of_two_rows_names_both_lines(tmp_path: Path, ids: list[Any], said: str) -> None:
    lines = [
        {"prompt": f"q{n}", "label": 1} | ({} if name is None else {"id": name})
        for n, name in enumerate(ids)
    ]
    [found] = problems_of(tmp_path, [*lines, {"id": "z", "prompt": "z", "label": 0}], folds=0)
    assert found.startswith(said)


def test_rows_without_an_id_are_called_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "a", "label": 1},
        {"id": 9, "prompt": "b", "label": 0},
        {"id": "x", "prompt": "c", "label": 1},
    ]
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    assert [row.id for row in read_dataset(path, "given", folds=0).rows] == ["2", "9", "x"]


def test_contradictions_classes_and_groups(tmp_path: Path) -> None:
    grouped = [GOOD | {"id": "p", "group": "g"}, GOOD | {"id": "q", "group": "g", "label": 0}]
    alone = [{"id": "x", "prompt": "Same?", "label": 0}, {"id": "y", "prompt": "Same?", "label": 1}]
    for twice in (grouped, alone):
        [found] = problems_of(tmp_path, [*enough(), *twice])
        assert found.startswith("line 8: same prompt and group as line 7")
        right, wrong = (row | {"answer": f" {place}."} for place, row in enumerate(twice))
        assert read_dataset(
            write_rows(tmp_path / "rows.jsonl", [*enough(), right, wrong]), "given", folds=0
        ).rows
        [found] = problems_of(
            tmp_path, [*enough(), right, wrong, wrong | {"id": "again", "label": right["label"]}]
        )
        assert found.startswith("line 9: same prompt and group as line 8")
    one_class = [{"id": str(i), "prompt": f"p{i}", "label": 1} for i in range(6)]
    assert "no row is hallucinated (label 0)" in problems_of(tmp_path, one_class)[0]
    found = problems_of(tmp_path, enough(6), folds=5)
    assert (len(found), "only 3 group(s) have factual" in found[0]) == (2, True)


@pytest.mark.parametrize("content", [b"", b"\n \n", None])
def test_a_file_that_is_empty_or_missing(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read" if content is None else "no rows"):
        read_dataset(path, "given", folds=2)


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
    train = read(
        tmp_path / "a.jsonl", [{**row, "group": f"g{i}"} for i, row in enumerate(enough())]
    )
    new = [{"id": "ok0", "prompt": "new", "label": 1}, {**GOOD, "label": 0}]
    check_disjoint(train, read(tmp_path / "b.jsonl", new))
    test = [{**GOOD, "group": "g4"}, {"id": "x", "prompt": "Question 2?", "label": 0}]
    with pytest.raises(DataError) as caught:
        check_disjoint(train, read(tmp_path / "c.jsonl", test))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["line 1", "line 2"]


def test_rows_of_one_prompt_share_a_group_whatever_they_name(tmp_path: Path) -> None:
    lyon = [{"role": "user", "content": "Where is Lyon?"}]
    rows: Rows = [
        {"prompt": "Where is Lyon?", "label": 1, "group": "g"},
        {"messages": lyon, "label": 1, "group": "h"},
        {"prompt": "Where is Oslo?", "label": 0, "group": "h"},
    ]
    rows += [
        {"prompt": f"Where is {name}?", "label": label}
        for name, label in (("Rome", 0), ("Rome", 0), ("Bonn", 1))
    ]
    assert read(tmp_path / "rows.jsonl", rows, folds=2).groups.tolist() == [0, 0, 0, 1, 1, 2]


# Unlabelled traffic: risks or prompts.


def traffic(folder: Path, *lines: Any) -> Any:
    file = folder / "traffic.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_traffic(file, OWN)


def test_risks_as_score_writes_them_and_prompts(tmp_path: Path) -> None:
    told = {
        "id": "a",
        "prompt": "Why?",
        "risk": 0.25,
        "label": 1,
        "bundle": {"name": "b", "version": 1, "digest": OWN},
    }
    found = traffic(
        tmp_path, told, {"prompt": "Why?", "risk": 1}, {"risk": 0.5, "group": "g"}, {"risk": 0.5}
    )
    assert found.scored
    assert [row.risk for row in found.rows] == [0.25, 1.0, 0.5, 0.5]
    groups = [row.group for row in found.rows]
    assert (groups[0] == groups[1], len(set(groups))) == (True, 3)  # the same prompt
    assert found.rows[0].prompt_digest == found.rows[1].prompt_digest is not None
    assert found.rows[3].prompt_digest is None
    found = traffic(
        tmp_path, {"prompt": "Why?"}, {"messages": [{"role": "user", "content": "Why?"}]}
    )
    assert not found.scored
    assert found.rows[0].prompt_digest == found.rows[1].prompt_digest
    assert found.rows[1].messages is not None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"id": "a"}, "line 2: 'prompt'"),
        ({"risk": 1.5}, "line 2: 'risk' must be a number from 0 to 1, found 1.5"),
        ({"risk": True}, "found true"),
        ({"risk": "0.5"}, 'found "0.5"'),
        ({"risk": None}, "found null"),
        ({"risk": 0.5, "prompt": ""}, "'prompt' is empty"),
        ({"risk": 0.5, "group": 3}, "'group' must be a string"),
        ({"risk": 0.5, "bundle": {"name": "b", "version": 2, "digest": "sha256:other"}}, "b:2"),
        ({"prompt": "Why?"}, "score all of them, or none"),
        ([], "a JSON object"),
    ],
)
def test_problems_of_traffic_are_named_by_line(tmp_path: Path, line: Any, said: str) -> None:
    with pytest.raises(DataError, match="line 2") as caught:
        traffic(tmp_path, {"risk": 0.5}, line)
    assert said in str(caught.value)
    with pytest.raises(DataError, match="no rows"):
        traffic(tmp_path)


# fine-tuning rows, which end with the answer

USER = {"role": "user", "content": "Capital of France?"}
ANSWER = {"role": "assistant", "content": "Paris"}
SYSTEM = {"role": "system", "content": "Be brief."}


def chat(*messages: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "label": 1} | more


def test_what_ends_in_the_answer_is_read_before_it_and_the_label_is_the_answers(
    tmp_path: Path,
) -> None:
    rows = [
        chat(USER, ANSWER),
        chat(USER, ANSWER, answer="Paris"),
        chat(USER, answer="Paris"),
        chat(SYSTEM, USER, ANSWER),
        chat(USER, ANSWER, USER, ANSWER | {"content": "<think>Lyon?</think>Paris"}),
        chat(USER, ANSWER | {"content": "Lyon"}, label=0),
        chat(USER, ANSWER, answer=""),
        {"messages": [USER, ANSWER], "applies": False, "group": "thanks"},
    ]
    found = read(tmp_path / "rows.jsonl", rows, folds=None).rows
    turns = [[USER]] * 3 + [[SYSTEM, USER], [USER, ANSWER, USER]] + [[USER]] * 3
    assert [row.messages for row in found] == turns
    said = ["Paris", "Paris", "Paris", "Paris", "<think>Lyon?</think>Paris", "Lyon", "Paris"]
    assert [row.answer for row in found][:-1] == said
    assert [row.label for row in found] == [1, 1, 1, 1, 1, 0, 1, None]
    assert len({row.prompt_digest for row in found if row.messages == [USER]}) == 1
    [generated] = read(
        tmp_path / "rows.jsonl", [chat(USER, ANSWER, answers=["Paris"])], labels="generate"
    ).rows
    assert (generated.messages, generated.answer, generated.question) == (
        [USER],
        "",
        "user: Capital of France?",
    )


@pytest.mark.parametrize(
    ("messages", "more", "said"),
    [
        (
            [USER, ANSWER],
            {"answer": "Lyon"},
            "ends with an answer, and 'answer' is another: keep one",
        ),
        ([SYSTEM], {}, "no turn of the user"),
        ([ANSWER], {}, "no turn of the user"),
        ([SYSTEM, ANSWER], {}, "no turn"),
        ([USER, ANSWER, ANSWER], {}, "ends with several turns of the assistant"),
    ],
)
def test_messages_that_ask_nothing_are_refused_by_line(
    tmp_path: Path, messages: list[Any], more: dict[str, Any], said: str
) -> None:
    [problem] = problems_of(tmp_path, [*enough(), chat(*messages, **more)])
    assert problem.startswith("line 7: ")
    assert said in problem
    if not more:  # what is to be scored or counted, too
        [problem] = problems_of_traffic(tmp_path, [{"messages": messages}])
        assert said in problem
        (tmp_path / "score.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
        done = hallutracer("score", "--input", str(tmp_path / "score.jsonl"))
        assert (done.returncode, "line 1: " in done.stderr, said in done.stderr) == (1, True, True)


def problems_of_traffic(folder: Path, rows: Rows) -> list[str]:
    with pytest.raises(DataError) as caught:
        read_traffic(write_rows(folder / "traffic.jsonl", rows), OWN)
    return caught.value.problems


def test_traffic_that_ends_in_the_answer_is_the_same_prompt(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", [{"messages": [USER, ANSWER]}, {"messages": [USER]}])
    rows = read_traffic(path, OWN).rows
    assert [row.messages for row in rows] == [[USER], [USER]]
    assert rows[0].prompt_digest == rows[1].prompt_digest


def test_a_conversation_with_its_answer_is_scored_before_the_answer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, ANSWER]}, {"messages": [USER]}])
    done = hallutracer("score", "--input", str(path))
    with_answer, without = map(json.loads, done.stdout.splitlines())
    assert with_answer["risk"] == pytest.approx(without["risk"], abs=1e-6)
    assert with_answer["messages"] == [USER, ANSWER]  # what was given is written out again


# how given answers were decoded


@pytest.mark.parametrize(
    ("said", "decoding"),
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
    tmp_path: Path, said: Any, decoding: Decoding | None
) -> None:
    rows = [row | {"decoding": said} for row in enough(2)] + [
        {"prompt": "Write.", "applies": False}
    ]
    dataset = read(tmp_path / "rows.jsonl", rows)
    assert dataset.decodings == {decoding}
    assert "decoding" not in str(dataset.remarks)
    mixed = read(tmp_path / "mixed.jsonl", [*rows, GOOD | {"decoding": "temperature=0.3"}])
    assert mixed.decodings == {decoding, Decoding(0.3, 1.0)}
    assert "'decoding' differs" in mixed.remarks[-1]
    generated = [{"prompt": one["prompt"], "answers": "y", "decoding": said} for one in enough(2)]
    assert read(tmp_path / "generated.jsonl", generated, "generate").decodings == {None}


@pytest.mark.parametrize(
    "said",
    [
        "",
        "warm",
        "temperature",
        "temperature=",
        "temperature=x",
        "temperature=-1",
        "temperature=nan",
        "temperature=inf",
        "top_p=0.5",
        "temperature=1,top_p=0",
        "temperature=1,top_p=1.1",
        "temperature=1,top_k=5",
        "greedy,top_p=1",
        "temperature=1,temperature=1",
        0,
        True,
        {"temperature": 0.7},
    ],
)
def test_a_decoding_that_cannot_be_read_is_named(tmp_path: Path, said: Any) -> None:
    [found] = problems_of(tmp_path, [*enough(), GOOD | {"decoding": said}], folds=0)
    assert found.startswith("line 7: 'decoding'")
    assert "temperature=T,top_p=P" in found
