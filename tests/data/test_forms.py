"""Questions in forms: every form asks the question, in company that is not its own; and requests
for no fact."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from service.data.forms import (
    FORMS,
    WORDINGS,
    Form,
    chosen,
    families,
    in_forms,
    is_one_message,
    read_model_answers,
)
from service.data.forms.tasks import TASKS, task_rows
from service.errors import DataError, HalluTracerError
from tests.command_line import run
from tests.kit.rows import without

KINDS = ("capital", "river")


def made(count: int = 60) -> list[dict[str, Any]]:
    """Questions with names of their own, two to a group."""
    return [
        {
            "id": f"q{number}",
            "prompt": f"What is known about the {KINDS[number % 2]} of Land{number:02}?",
            "answers": [f"Answer{number:02}"],
            "group": f"g{number // 2}",
            "kind": KINDS[number % 2],
        }
        for number in range(count)
    ]


SAID = {f"q{number}": f"Said{number:02}" for number in range(60)}


def texts(row: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in row["messages"])


@pytest.mark.parametrize("name", FORMS)
def test_a_form_asks_the_question_last_in_other_company_and_keeps_the_row(name: str) -> None:
    rows = made()
    found = in_forms(rows, chosen([name]), model_answers=SAID)
    assert len(found) == len(rows)
    assert {len(row["messages"]) == 1 for row in found} == {is_one_message(FORMS[name])}
    for number, (before, row) in enumerate(zip(rows, found, strict=True)):
        kept = {key: before[key] for key in ("answers", "group", "kind")}
        expected = kept | {
            "form": name,
            "id": f"{before['id']}+{name}",
            "messages": row["messages"],
        }
        assert row == expected
        roles = [message["role"] for message in row["messages"]]
        assert roles[-1] == "user"
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]
        asked = row["messages"][-1]["content"]
        assert before["prompt"].rpartition(" ")[2].strip("?").lower() in asked.lower()
        assert not re.search(r"\{[a-z]\}", texts(row))  # each place of a template is filled
        sibling = number + 1 if number % 2 == 0 else number - 1
        for word in (f"Land{sibling:02}", f"Answer{sibling:02}", f"Said{sibling:02}"):
            assert word not in texts(row), (
                name,
                number,
            )  # company is never of the question's own group
        if name != "lone" and not name.startswith(("passage", "context", "lower")):
            assert f"Answer{number:02}" not in texts(row)


def test_junk_stands_beside_the_question_and_differs() -> None:
    rows = made()
    asked = [texts(row) for row in in_forms(rows, chosen(["junk"]))]
    junk = [text.replace(row["prompt"], "").strip() for text, row in zip(asked, rows, strict=True)]
    assert all(
        len(text) > len(one) for text, one in zip(asked, junk, strict=True)
    )  # the question is whole
    assert min(map(len, junk)) > 0
    assert len(set(junk)) == len(rows)
    behind = [text.startswith(row["prompt"]) for text, row in zip(asked, rows, strict=True)]
    assert len(rows) / 2 < sum(behind) < len(rows)


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [
        ("passage_right", True, True),
        ("passage_unrelated", False, True),
        ("fact_behind", False, False),
        ("lone", False, False),
    ],
)
def test_what_a_passage_tells(name: str, own: bool, other: bool) -> None:
    for number, row in enumerate(in_forms(made(), chosen([name]))):
        answers = {
            word.strip(".")
            for word in texts(row).split()
            if word.startswith("Answer") and word[6:7].isdigit()
        }
        assert (f"Answer{number:02}" in answers) is own
        assert len(answers - {f"Answer{number:02}"}) >= 2 * other


def test_a_contradicting_passage_has_another_answer_and_not_the_right_one() -> None:
    rows = [
        row | {"statement": f"Land{number:02} is known for {row['answers'][0]}."}
        for number, row in enumerate(made())
    ]
    for number, row in enumerate(in_forms(rows, chosen(["passage_contradicting"]))):
        assert f"Land{number:02} is known for Answer" in texts(row)
        assert f"is known for Answer{number:02}." not in texts(row)


def test_a_mixture_has_all_forms_by_weight_and_the_seed_decides() -> None:
    rows = made(60)
    every = in_forms(rows, chosen(["all"]), model_answers=SAID, per_row=len(FORMS))
    assert Counter(row["form"] for row in every) == dict.fromkeys(FORMS, 60)
    assert len({row["id"] for row in every}) == len(every)
    two = in_forms(rows, chosen(["all"]), model_answers=SAID, per_row=2)
    assert len(two) == 120
    assert two == in_forms(rows, chosen(["all"]), model_answers=SAID, per_row=2)
    assert two != in_forms(rows, chosen(["all"]), model_answers=SAID, per_row=2, seed=1)
    many = Counter(
        row["form"]
        for seed in range(40)
        for row in in_forms(rows, chosen(["all"]), model_answers=SAID, seed=seed)
    )
    weight = sum(form.weight for form in FORMS.values())
    for name, form in FORMS.items():
        expected = 2400 * form.weight / weight
        assert abs(many[name] - expected) < 5 * expected**0.5, name


def test_long_contexts_are_as_long_as_they_say() -> None:
    for name, low, high in (("context_1k", 700, 760), ("context_4k", 2800, 2860)):
        lengths = [len(texts(row).split()) for row in in_forms(made(), chosen([name]))]
        assert low <= min(lengths) <= max(lengths) <= high


def test_what_a_form_lacks_is_left_to_the_others(tmp_path: Path) -> None:
    rows = made()
    assert in_forms(rows, chosen(["turn_own"])) == []  # nothing is known of what the model says
    assert {row["form"] for row in in_forms(rows, chosen(["turn_own", "greeting"]))} == {"greeting"}
    [alone] = in_forms(made(1), chosen(["turns", "greeting"]))
    assert alone["form"] in ("greeting", "small_talk", "turns_with_system")
    bare = without(rows, "answers")  # nothing to state
    assert {row["form"] for row in in_forms(bare, chosen(["passages", "lone"]))} == {"lone"}
    messages = [{"role": "user", "content": "And Land7?"}]
    [kept] = in_forms([{"id": "chat", "messages": messages, "answers": ["x"]}], chosen(["all"]))
    assert (kept["messages"], kept["form"], kept["id"]) == (messages, "messages", "chat")


def test_what_only_a_judge_reads_is_not_stated() -> None:
    false = '{"incorrect": "Wrong"}'
    rows = [row | {"answers": [false, *row["answers"]]} for row in made()]
    for before, row in zip(rows, in_forms(rows, chosen(["passage_right"])), strict=True):
        assert before["answers"][1] in texts(row)
        assert "incorrect" not in texts(row)
        assert row["answers"] == before["answers"]
    expected = [row | {"answers": ['{"expect": "no_call"}']} for row in made()]
    assert in_forms(expected, chosen(["few_shot", "passages"])) == []


def test_rows_that_do_not_apply_are_no_questions() -> None:
    poem = {"id": "poem", "prompt": "Write a poem about Land01.", "applies": False}
    named = {
        "id": "chat",
        "messages": [{"role": "user", "content": "And?"}],
        "form": "mine",
        "answers": ["x"],
    }
    found = in_forms([*made(), poem, named], chosen(["polite"]))
    assert found[-2:] == [poem | {"form": "task"}, named]


def test_a_form_that_does_not_fit_gives_way() -> None:
    tried: list[str] = []

    def fits(form: Form, messages: list[dict[str, str]]) -> bool:
        tried.append(form.name)
        return form.name == "lone"

    found = in_forms(made(), chosen(["lone", "context_1k", "greeting"]), fits=fits)
    assert {row["form"] for row in found} == {"lone"}
    assert {"context_1k", "greeting"} < set(tried)
    assert in_forms(made(), chosen(["greeting"]), fits=fits) == []


def test_forms_and_families_by_name() -> None:
    assert {form.name for form in chosen(["turns", "lone", "turn_own"])} >= {
        "turn_own",
        "greeting",
        "lone",
    }
    assert chosen(["all"]) == list(FORMS.values())
    assert {form.family for form in chosen(families())} == set(families())
    with pytest.raises(HalluTracerError, match="no form is called 'chat'.*passages"):
        chosen(["chat"])


def test_answers_of_a_run_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"id": "q1", "row": 0, "answer": "", "finish": "stop"}) + "\n")
    assert read_model_answers(path) == {"q1": ""}
    path.write_text('{"id": "q1", "answers": ["x"]}\n{"id": 3\n')
    with pytest.raises(DataError) as caught:
        read_model_answers(path)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["line 1", "line 2"]


# Requests that ask for no fact: nearly all different, alone and in the company of questions of
# fact.

ROWS = task_rows(1500)


def last(row: dict[str, Any]) -> str:
    return str(row["messages"][-1]["content"])


def roles(row: dict[str, Any]) -> list[str]:
    return [message["role"] for message in row["messages"]]


def test_rows_are_conversations_that_end_with_the_user() -> None:
    assert len({row["id"] for row in ROWS}) == len(ROWS) == 1500
    for row in ROWS:
        assert list(row) == ["id", "messages", "group", "kind", "form", "applies"]
        assert (row["form"], row["applies"]) == ("task", False)
        assert row["id"].startswith(f"{row['kind']}/")
        assert row["group"].startswith(f"{row['kind']}/")
        turns = roles(row)[1:] if roles(row)[0] == "system" else roles(row)
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]
        assert all(message["content"].strip() for message in row["messages"])


def test_hardly_a_request_is_made_twice_and_every_kind_has_its_weight() -> None:
    found = Counter(row["kind"] for row in ROWS)
    weight = sum(task.weight for task in TASKS.values())
    for name, task in TASKS.items():
        expected = len(ROWS) * task.weight / weight
        assert abs(found[f"task/{name}"] - expected) < 5 * expected**0.5, name
    assert len({last(row) for row in ROWS}) > 0.95 * len(ROWS)
    assert Counter(row["group"] for row in ROWS).most_common(1)[0][1] < 0.02 * len(ROWS)
    openings = Counter(
        " ".join(last(row).lower().split()[:2]) for row in ROWS if row["kind"] != "task/nonsense"
    )
    assert openings.most_common(1)[0][1] < 0.05 * len(ROWS)


def test_many_look_like_questions_of_fact() -> None:
    asking = [row for row in ROWS if last(row).rstrip().endswith("?")]
    assert 0.2 < len(asking) / len(ROWS) < 0.6
    openings = Counter(last(row).lower().split()[0] for row in ROWS)
    for word in ("what", "how", "who", "which", "can", "is", "do"):
        assert openings[word] >= 5, word
    for name in ("Oslo", "Peru", "Napoleon", "helium", "Lima"):
        assert any(name.lower() in last(row).lower() for row in ROWS), name


def test_company_has_its_share() -> None:
    alone = sum(len(row["messages"]) == 1 for row in ROWS) / len(ROWS)
    assert 0.5 < alone < 0.65  # beside a fact or a passage is one message, too
    assert 0.1 < sum(roles(row)[0] == "system" for row in ROWS) / len(ROWS) < 0.22
    questions = {question for question, *_ in WORDINGS["asked"]}
    asked = 0
    for row in ROWS:
        asked += any(message["content"] in questions for message in row["messages"][:-1])
    assert 0.2 < asked / len(ROWS) < 0.35
    assert all(len(row["messages"]) > 2 for row in ROWS if row["kind"] == "task/follow_up")
    assert max(len(row["messages"]) for row in ROWS) >= 17


@pytest.mark.parametrize("name", ["no_fact_prompts.txt", "fact_prompts.txt"])
def test_what_is_measured_on_is_not_generated(name: str) -> None:
    def plain(text: str) -> str:
        return text.lower().strip(" .?!") or text

    prompts = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    assert len(set(prompts)) == len(prompts) == 80
    made = {
        plain(one["content"])
        for seed in range(3)
        for row in task_rows(3000, seed)
        for one in row["messages"]
    }
    assert made.isdisjoint(map(plain, prompts))


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "tasks", "--count", "30", "--seed", "2") == 0
    printed = capsys.readouterr()
    assert task_rows(30, 2) != task_rows(30, 1)
    assert [json.loads(line) for line in printed.out.splitlines()] == task_rows(30, 2)
    assert printed.err.startswith("30 rows (")
