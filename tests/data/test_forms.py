"""Questions in forms: every form asks the question, in company that is not its own; and requests
for no fact."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from service.data.forms import (
    FORMS,
    WORDINGS,
    chosen,
    families,
    in_forms,
    is_one_message,
    read_model_answers,
)
from service.data.forms.tasks import TASKS, task_rows, written_rows
from service.errors import DataError, HalluTracerError
from tests.command_line import run
from tests.kit.chats import turns
from tests.kit.rows import Row, Rows, lines_named, without

KINDS = ("capital", "river")


def made(count: int = 60) -> Rows:
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


def texts(row: Row) -> str:
    return "\n".join(message["content"] for message in row["messages"])


@pytest.mark.parametrize("name", FORMS)
def test_a_form_asks_the_question_last_in_other_company_and_keeps_the_row(name: str) -> None:
    rows = made()
    asked = in_forms(rows, chosen([name]), model_answers=SAID)
    assert len(asked) == len(rows)
    assert {len(row["messages"]) == 1 for row in asked} == {is_one_message(FORMS[name])}
    for number, (before, row) in enumerate(zip(rows, asked, strict=True)):
        same = {key: before[key] for key in ("answers", "group", "kind")}
        new = {"form": name, "id": f"{before['id']}+{name}", "messages": row["messages"]}
        assert row == same | new
        assert are_turns(roles(row))
        subject = before["prompt"].rpartition(" ")[2].strip("?").lower()
        assert subject in last(row).lower()
        text = texts(row)
        assert not re.search(r"\{[a-z]\}", text)  # each place of a template is filled
        # Company is never of the question's own group.
        sibling = number + 1 if number % 2 == 0 else number - 1
        for word in ("Land", "Answer", "Said"):
            assert f"{word}{sibling:02}" not in text, (name, number)
        if name != "lone" and not name.startswith(("passage", "context", "lower")):
            assert f"Answer{number:02}" not in text


def are_turns(roles: list[str]) -> bool:
    """Whether user and assistant take turns, behind a system prompt or none, up to the user."""
    turns = roles[1:] if roles[0] == "system" else roles
    return turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]


def test_junk_stands_beside_the_question_and_differs() -> None:
    rows = made()
    asked = [texts(row) for row in in_forms(rows, chosen(["junk"]))]
    prompts = [row["prompt"] for row in rows]
    junk = [text.replace(prompt, "") for text, prompt in zip(asked, prompts, strict=True)]
    for text, rest, prompt in zip(asked, junk, prompts, strict=True):
        assert prompt in text, "the question is whole"
        assert rest.strip()
    assert len(set(junk)) == len(rows)
    behind = sum(map(str.startswith, asked, prompts))
    assert len(rows) / 2 < behind < len(rows)


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
        answers = set(re.findall(r"\bAnswer\d\d", texts(row)))
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
    def mixture(**options: Any) -> Rows:
        return in_forms(made(), chosen(["all"]), model_answers=SAID, **options)

    every = mixture(per_row=len(FORMS))
    assert Counter(row["form"] for row in every) == dict.fromkeys(FORMS, 60)
    assert len({row["id"] for row in every}) == len(every)
    two = mixture(per_row=2)
    assert len(two) == 120
    assert mixture(per_row=2) == two != mixture(per_row=2, seed=1)
    many = Counter(row["form"] for seed in range(40) for row in mixture(seed=seed))
    weight = sum(form.weight for form in FORMS.values())
    for name, form in FORMS.items():
        expected = 2400 * form.weight / weight
        assert abs(many[name] - expected) < 5 * expected**0.5, name


def test_long_contexts_are_as_long_as_they_say() -> None:
    for name, low, high in (("context_1k", 700, 760), ("context_4k", 2800, 2860)):
        lengths = [len(texts(row).split()) for row in in_forms(made(), chosen([name]))]
        assert low <= min(lengths) <= max(lengths) <= high


def test_what_a_form_lacks_is_left_to_the_others() -> None:
    def forms(rows: Rows, *names: str) -> set[str]:
        return {row["form"] for row in in_forms(rows, chosen(names))}

    assert forms(made(), "turn_own") == set()  # nothing is known of what the model says
    assert forms(made(), "turn_own", "greeting") == {"greeting"}
    assert forms(made(1), "turns", "greeting") <= {"greeting", "small_talk", "turns_with_system"}
    bare = without(made(), "answers")  # nothing to state
    assert forms(bare, "passages", "lone") == {"lone"}
    chat = {"id": "chat", "messages": turns("And Land7?"), "answers": ["x"]}
    assert in_forms([chat], chosen(["all"])) == [chat | {"form": "messages"}]


def test_what_only_a_judge_reads_is_not_stated() -> None:
    rows = [row | {"answers": ['{"incorrect": "Wrong"}', *row["answers"]]} for row in made()]
    for before, row in zip(rows, in_forms(rows, chosen(["passage_right"])), strict=True):
        assert before["answers"][1] in texts(row)
        assert "incorrect" not in texts(row)
        assert row["answers"] == before["answers"]
    expected = [row | {"answers": ['{"expect": "no_call"}']} for row in made()]
    assert in_forms(expected, chosen(["few_shot", "passages"])) == []


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
    assert lines_named(caught.value.problems) == ["line 1", "line 2"]


# Requests that ask for no fact: nearly all different, alone and in the company of questions of
# fact.

ROWS, WRITTEN = task_rows(1500), written_rows(10_000)


def last(row: Row) -> str:
    return str(row["messages"][-1]["content"])


def roles(row: Row) -> list[str]:
    return [message["role"] for message in row["messages"]]


def test_rows_are_conversations_that_end_with_the_user() -> None:
    assert len({row["id"] for row in ROWS}) == len(ROWS) == 1500
    for row in ROWS:
        assert list(row) == ["id", "messages", "group", "kind", "form", "applies"]
        assert (row["form"], row["applies"]) == ("task", False)
        assert row["id"].startswith(f"{row['kind']}/")
        assert row["group"].startswith(f"{row['kind']}/")
        assert are_turns(roles(row))
        assert all(message["content"].strip() for message in row["messages"])


def most_common(names: Iterable[str]) -> float:
    """How often the most common name comes, as a share of ``ROWS``."""
    return Counter(names).most_common(1)[0][1] / len(ROWS)


def test_hardly_a_request_is_made_twice_and_every_kind_has_its_weight() -> None:
    kinds = Counter(row["kind"] for row in ROWS)
    weight = sum(task.weight for task in TASKS.values())
    for name, task in TASKS.items():
        expected = len(ROWS) * task.weight / weight
        assert abs(kinds[f"task/{name}"] - expected) < 5 * expected**0.5, name
    assert len(set(map(last, ROWS))) > 0.95 * len(ROWS)
    assert most_common(row["group"] for row in ROWS) < 0.02
    sensible = [last(row).lower() for row in ROWS if row["kind"] != "task/nonsense"]
    assert most_common(" ".join(text.split()[:2]) for text in sensible) < 0.05


def test_many_look_like_questions_of_fact() -> None:
    asked = [last(row).lower() for row in ROWS]
    assert 0.2 < sum(text.rstrip().endswith("?") for text in asked) / len(ROWS) < 0.6
    openings = Counter(text.split()[0] for text in asked)
    for word in ("what", "how", "who", "which", "can", "is", "do"):
        assert openings[word] >= 5, word
    for name in ("oslo", "peru", "napoleon", "helium", "lima"):
        assert any(name in text for text in asked), name


def test_company_has_its_share() -> None:
    def share(holds: Callable[[Row], bool]) -> float:
        return sum(map(holds, ROWS)) / len(ROWS)

    questions = {question for question, *_ in WORDINGS["asked"]}
    alone = share(lambda row: len(row["messages"]) == 1)
    assert 0.5 < alone < 0.65  # beside a fact or a passage is one message, too
    assert 0.1 < share(lambda row: roles(row)[0] == "system") < 0.22
    asked = share(
        lambda row: any(message["content"] in questions for message in row["messages"][:-1])
    )
    assert 0.2 < asked < 0.35
    assert all(len(row["messages"]) > 2 for row in ROWS if row["kind"] == "task/follow_up")
    assert max(len(row["messages"]) for row in ROWS) >= 17


def test_written_requests_are_each_its_own() -> None:
    rows = WRITTEN
    texts = [row["group"].removeprefix("task/written/") for row in rows]
    assert all(text in last(row) for text, row in zip(texts, rows, strict=True))
    assert sum(last(row) == text for text, row in zip(texts, rows, strict=True)) / len(rows) > 0.4
    assert 0.5 < sum(len(row["messages"]) == 1 for row in rows) / len(rows) < 0.7
    assert len(rows) == len(set(map(str.lower, texts))) > 900
    assert all(text == text.strip() and 0 < len(text) < 400 for text in texts)
    openings = Counter(" ".join(text.lower().split()[:3]) for text in texts)
    assert openings.most_common(1)[0][1] <= 4, "a template shows its own words"
    few = written_rows(50, 3)
    assert few == written_rows(50, 3) != written_rows(50, 4)
    assert len({row["group"] for row in few}) == len({row["id"] for row in few}) == 50
    assert {(row["kind"], row["form"], row["applies"]) for row in few} == {
        ("task/written", "task", False)
    }


def test_what_is_measured_on_is_not_generated() -> None:
    def plain(text: str) -> str:
        return text.lower().strip(" .?!") or text

    rows = WRITTEN + [row for seed in range(3) for row in task_rows(3000, seed)]
    made = {plain(one["content"]) for row in rows for one in row["messages"]}
    for name in ("no_fact_prompts.txt", "fact_prompts.txt"):
        prompts = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
        assert len(set(prompts)) == len(prompts) == 80
        assert made.isdisjoint(map(plain, prompts))


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "tasks", "--count", "30", "--seed", "2") == 0
    printed = capsys.readouterr()
    assert task_rows(30, 2) != task_rows(30, 1)
    assert [json.loads(line) for line in printed.out.splitlines()] == task_rows(30, 2)
    assert printed.err.startswith("30 rows (")
