"""Every set by name: found, counted, described, accepted by the trainer; what each reader makes of
its format."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from hallutracer_research.cli.data import SetName
from hallutracer_research.data import bfcl, statement_sets
from hallutracer_research.data.files import question_group
from hallutracer_research.data.question_sets import CATEGORIES, TABLE, TASK
from hallutracer_research.data.registry import SETS, find_path, read_set
from service.data import judges
from service.data.options import JudgeName, JudgeOptions
from service.data.training_rows import check_disjoint, read_dataset
from service.errors import DataError
from service.trainer.options import TrainOptions
from tests.command_line import ended, hallutracer
from tests.kit.tables import cells, lines
from tests.research.data import samples
from tests.research.data.samples import (
    TRIVIA,
    WRITERS,
    bfcl_row,
    damage,
    function,
    passage,
    read,
    read_made,
)

Rows = list[dict[str, Any]]


# A set, its rows and its kinds.
SIZES = cells(
    """
    truthfulqa | 817 | 38
    truthfulqa-reference | 6204 | 38
    truefalse | 6330 | 7
    halueval2 | 3793 | 5
    helm | 3197 | 6
    bfcl | 2853 | 10
    bfcl-answerable | 1998 | 6
    opentriviaqa | 20550 | 11
    opentriviaqa-choice | 20550 | 11
    nq-open | 5410 | 2
    knowledge | 40949 | 4
    """
)


def test_the_published_sizes() -> None:
    sizes = [[name, str(info.rows), str(info.kinds)] for name, info in SETS.items()]
    assert sizes == SIZES
    assert get_args(SetName) == (*SETS,)


@pytest.mark.parametrize("name", SETS)
def test_every_set_says_what_it_is_and_the_trainer_takes_what_its_reader_gives(
    tmp_path: Path, name: str
) -> None:
    info = SETS[name]
    assert info.name == name
    assert all(
        (
            info.title,
            info.group,
            info.hallucinated,
            info.onset,
            info.caveat,
            info.licence,
            info.source,
        )
    )
    assert (info.judge is not None) == (info.labels == "generate")
    assert info.judge is None or info.judge in get_args(JudgeName)
    if info.abstain_pattern is not None:
        TrainOptions(name="x", run_dir=Path("x"), abstain_pattern=info.abstain_pattern).check()
    (tmp_path / "set").mkdir()
    rows, _ = read(name, WRITERS[name](tmp_path / "set"))
    dataset = read_dataset(samples.write_lines(tmp_path / "rows.jsonl", rows), info.labels, folds=0)
    assert len(dataset) == len(rows) == len({row["id"] for row in rows}) > 0
    assert all(row.strata["kind"] for row in dataset.rows)
    if info.judge is not None:
        options = JudgeOptions(info.judge)
        assert [judges.answer_problems(options, row.answers) for row in dataset.rows] == [[]] * len(
            rows
        )


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_found_in_what_was_downloaded_and_another_number_of_rows_is_another_benchmark(
    tmp_path: Path, name: str
) -> None:
    assert find_path(name, tmp_path) == tmp_path  # nothing there: the reader names what is missing
    inside = tmp_path / SETS[name].folders[0]
    inside.mkdir(parents=True)
    WRITERS[name](inside)
    assert find_path(name, tmp_path) == inside
    assert read(name, tmp_path) == read(name, inside)
    with pytest.raises(DataError, match=f"{SETS[name].rows:,}"):
        read_set(name, tmp_path)
    shutil.rmtree(inside)
    with pytest.raises(DataError, match="is missing"):
        read(name, tmp_path)


def test_wrong_names_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown set.*truthfulqa"):
        read_set("nothing", tmp_path)
    with pytest.raises(DataError, match=r"not a folder.*github\.com"):
        read_set("helm", tmp_path / "nowhere")


def test_convert_prints_rows_and_tells_the_rest_on_stderr(tmp_path: Path) -> None:
    convert = ("data", "convert", "bfcl", str(samples.write_bfcl(tmp_path)))
    ended(hallutracer(*convert), 1, "2,853")
    printed = hallutracer(*convert, "--allow-other-counts")
    assert [json.loads(line)["kind"] for line in printed.stdout.splitlines()][:2] == [
        "simple_python"
    ] * 2
    for told in (
        "20 rows of BFCL v4",
        "read 21, multi_turn 1, repeated 0",
        "Agentic set cannot be identified",
        "--labels generate --judge calls --max-new-tokens 384 --abstain-pattern '(?!)'",
    ):
        assert told in printed.stderr
    rows = json.loads(hallutracer("data", "list", "--json").stdout)
    assert [(row["name"], row["rows"], row["licence"]) for row in rows] == [
        (info.name, info.rows, info.licence) for info in SETS.values()
    ]
    ended(hallutracer("data", "list"), 0, "6,330", *(f"\n{name} " for name in SETS))


def test_a_question_has_one_group_in_all_sets(tmp_path: Path) -> None:
    assert question_group("Who flew  the first KITE?") == question_group("who flew the first kite")
    samples.write_truthfulqa(tmp_path)
    datasets = []
    for name in ("truthfulqa", "truthfulqa-reference"):
        rows, _ = read(name, tmp_path)
        datasets.append(
            read_dataset(samples.write_lines(tmp_path / name, rows), SETS[name].labels, folds=0)
        )
    with pytest.raises(DataError, match="its group"):
        check_disjoint(*datasets)


# Statements


def labels(rows: Rows, key: str, value: str) -> list[tuple[int, str]]:
    return [(row["label"], row["group"]) for row in rows if row[key] == value]


def test_truefalse_rows_labels_and_groups(tmp_path: Path) -> None:
    cities = (
        "Paris is a city in France,1\nParis is a city in Chad,0\nLima is a name of a country.,0\n"
    )
    rows, counts = read_made("truefalse", tmp_path, cities=cities)
    assert labels(rows, "kind", "cities")[:2] == [(1, "cities/paris"), (0, "cities/paris")]
    assert any(
        row["prompt"].endswith("Statement: Paris is a city in France\nFinal Answer: ")
        for row in rows
    )
    assert counts == {"read": 15, "contradictory": 0, "repeated": 0}
    cities = (
        "Gibraltar is a name of a city.,1\nGibraltar is a name of a city.,0\nX is a name of a"
        " city.,1\n" * 2
    )
    rows, counts = read_made("truefalse", tmp_path, cities=cities)
    assert labels(rows, "kind", "cities") == [(1, "cities/x")]
    assert counts == {"read": 18, "contradictory": 4, "repeated": 1}


@pytest.mark.parametrize(
    ("category", "statement", "expected"),
    cells(
        """
        animals | The giant anteater uses walking for locomotion. | giant anteater
        animals | There are no specific human uses for gazelle. | gazelle
        animals | Human uses for bison include meat. | bison
        companies | Anheuser-Busch InBev engages in the production of oil.. | anheuser-busch inbev
        inventions | Alfred Nobel invented the dynamite. | alfred nobel
        facts | The planet Uranus is tilted. | the planet uranus is tilted.
        """
    ),
)
def test_truefalse_subjects(category: str, statement: str, expected: str) -> None:
    assert statement_sets.subject(category, statement) == expected


def test_halueval2_polarity_groups_and_unjudged(tmp_path: Path) -> None:
    finance = [
        {"id": 7, "chatgpt_fact": ["a", "b"], "human_judge": ["true", "false"]},
        {"id": 8, "chatgpt_fact": ["c"], "human_judge": []},
    ]
    rows, counts = read_made("halueval2", tmp_path, Finance=finance)
    assert labels(rows, "kind", "Finance") == [(1, "Finance/7"), (0, "Finance/7")]
    assert counts == {"read": 10, "unjudged": 1}


def test_helm_s_label_one_in_the_file_is_hallucinated_and_a_title_ends_at_the_first_full_stop(
    tmp_path: Path,
) -> None:
    rows, counts = read_made("helm", tmp_path, opt7b={"1": passage(0, title="U.S. Route 491")})
    falcon = [row for row in rows if row["kind"] == "falcon40b"]
    assert [row["label"] for row in falcon] == [0, 1]  # the file says 1, 0
    assert falcon[0]["prompt"].endswith(
        "Statement: Kites: falcon40b wrote Sentence 0.\nFinal Answer: "
    )
    assert {row["group"] for row in rows if row["kind"] != "opt7b"} == {
        "passage/7"
    }  # of all models together
    assert any("Statement: U: Sentence 0.\n" in row["prompt"] for row in rows)
    assert counts == {"read": 11, "contradictory": 0, "repeated": 0}


def test_helm_s_repeats_are_kept_once_in_a_model_and_contradictions_left_out_over_all(
    tmp_path: Path,
) -> None:
    twice = passage(1, 1, texts=["It flies."] * 2)
    both = passage(1, 1, texts=["It flies.", "It sinks."])
    other = passage(0, texts=["It sinks."])
    samples.write_helm(tmp_path, opt7b={"7": twice}, gptj7b={"7": both}, falcon40b={"7": other})
    rows, counts = read("helm", tmp_path)
    assert [row["kind"] for row in rows if "It flies." in row["prompt"]] == ["gptj7b", "opt7b"]
    assert not any("It sinks." in row["prompt"] for row in rows)
    assert counts == {"read": 11, "contradictory": 2, "repeated": 1}
    rows, counts = read_made("helm", tmp_path, opt7b={"1": passage(1), "2": passage(0)})
    assert labels(rows, "kind", "opt7b") == [
        (0, "passage/1"),
        (1, "passage/2"),
    ]  # two passages: no contradiction
    assert counts["contradictory"] == 0


def test_helm_s_tables_that_agree_are_fine_and_others_are_refused(tmp_path: Path) -> None:
    samples.write_helm(tmp_path)
    before = read("helm", tmp_path)
    samples.write_iris_tables(tmp_path)
    assert read("helm", tmp_path) == before
    table, shorter = (tmp_path / "statements" / f"{model}.csv" for model in ("opt7b", "gptj7b"))
    lines = table.read_text(encoding="utf-8-sig").splitlines()
    table.write_text("\n".join([lines[0], lines[2], lines[1]]))  # the same rows in another order
    shorter.write_text("\n".join(shorter.read_text(encoding="utf-8-sig").splitlines()[:-1]))
    assert damage("helm", tmp_path) == ["statements/gptj7b.csv", "statements/opt7b.csv line 2"]


# Questions


def test_a_question_is_asked_freely_without_its_options_and_once(tmp_path: Path) -> None:
    rows, counts = read_made("opentriviaqa", tmp_path)
    assert counts == {"read": 22, "left out: needs its options": 11, "left out: repeated": 0}
    assert rows[0] == {
        "id": "opentriviaqa-animals-2",
        "prompt": "What pulls a sledge on animals? Name one. Answer briefly.",
        "answers": ["A big dog"],
        "group": "question/what pulls a sledge on animals name one",
        "kind": "animals",
    }
    again = TRIVIA.replace("{category}", "animals").replace("sledge", "SLEDGE!")
    rows, counts = read_made("opentriviaqa", tmp_path, general=again)
    assert counts["left out: repeated"] == 1
    assert len({row["group"] for row in rows}) == len(rows)


@pytest.mark.parametrize(
    "words", ["Which of these flies?", "Which of the following is it?", "All of these fly except?"]
)
def test_a_question_that_needs_its_options_is_not_asked_without(tmp_path: Path, words: str) -> None:
    asked = TRIVIA.replace("What pulls a sledge on {category}?\r\n\r\nName one.", words)
    rows, counts = read_made("opentriviaqa", tmp_path, world=asked)
    assert counts["left out: needs its options"] == 12
    assert {row["kind"] for row in rows} == {*CATEGORIES} - {"world"}


def judged(judge: JudgeName, answers: list[str], accepted: Any) -> list[str]:
    """Those of the answers that a judge calls right."""
    is_right = judges.make_judge(JudgeOptions(judge))
    return [answer for answer in answers if is_right("", answer, accepted)]


def test_a_choice_is_judged_by_its_letter(tmp_path: Path) -> None:
    rows, _ = read_made("opentriviaqa-choice", tmp_path)
    assert rows[0]["prompt"].endswith(
        "A. A small cat\nB. A big dog\nC. A fish\nD. Two birds\nAnswer with one letter."
    )
    assert rows[1]["prompt"].endswith("A. True\nB. False\nAnswer with one letter.")
    right = ["B", "b.", "B. A big dog", "The answer is B", "The correct answer is: (B)"]
    wrong = ["A", "Because", "A big dog is B", ""]
    assert judged("regex", [*right, *wrong], rows[0]["answers"]) == right


@pytest.mark.parametrize(
    ("encoding", "word"),
    [("utf-8", "Schlittenhündin"), ("cp1252", "Hündin"), ("latin-1", "Hündin\x81")],
)
def test_each_file_has_an_encoding_of_its_own(tmp_path: Path, encoding: str, word: str) -> None:
    text = TRIVIA.replace("sledge", word).encode(encoding)
    rows, _ = read_made("opentriviaqa", tmp_path, animals=text)
    assert "ündin" in rows[0]["prompt"]


def test_search_queries_become_questions(tmp_path: Path) -> None:
    rows, counts = read_made("nq-open", tmp_path)
    assert counts == {"read": 2, "left out: repeated": 0, "left out: no answer with a word": 0}
    assert rows[0] == {
        "id": "nq-open-dev-1",
        "prompt": "Who flew the first kite? Answer briefly.",
        "answers": ["Ann Nobody", "Nobody"],
        "group": "question/who flew the first kite",
        "kind": "dev",
    }
    asked = {"question": "what is written on page one", "answer": ["*", "a star"]}
    none = {"question": "what is written on page two", "answer": ["*", ","]}
    rows, counts = read_made("nq-open", tmp_path, dev=[asked, none, asked])
    assert counts == {"read": 4, "left out: repeated": 1, "left out: no answer with a word": 1}
    assert rows[0]["answers"] == ["a star"]
    assert "page two" not in "".join(row["prompt"] for row in rows)


def test_knowledge_is_asked_once_in_four_kinds_and_countries_have_the_set_s_own_names(
    tmp_path: Path,
) -> None:
    rows, counts = read_made("knowledge", tmp_path)
    assert counts == {
        "read": 4,
        "left out: repeated": 0,
        "left out: the answer stands in the question": 0,
    }
    assert [row["kind"] for row in rows] == [
        "cities_10k",
        "math_operations_6k",
        "medals_9k",
        "notable_people",
    ]
    assert rows[0] == {
        "id": "knowledge-cities_10k-2",
        "prompt": "In which country is the city of Kiteville located? Answer briefly.",
        "answers": ["Kiteland", "Republic of Kites"],  # "as" would be found in many an answer
        "group": "question/in which country is the city of kiteville located",
        "kind": "cities_10k",
    }
    assert rows[3]["answers"] == ["1899"]


def test_a_shared_medal_accepts_each_winner_and_a_question_that_holds_its_answer_is_left_out(
    tmp_path: Path,
) -> None:
    medals = "Who won kites?,Kiteland\nWho won KITES?,United States\nWho won kites?,Kiteland\n"
    arithmetic = "What is 8 minus 4?,4\nWhat is 84 minus 80?,4\n"
    folder = samples.write_knowledge(
        tmp_path,
        {"United States": ["USA"]},
        medals_9k=medals,
        math_operations_6k=arithmetic,
    )
    rows, counts = read("knowledge", folder)
    assert counts == {
        "read": 7,
        "left out: repeated": 2,
        "left out: the answer stands in the question": 1,
    }
    assert [row["prompt"] for row in rows][1:3] == [
        "What is 84 minus 80? Answer briefly.",
        "Who won kites? Answer briefly.",
    ]
    assert rows[2]["answers"] == ["Kiteland", "United States", "USA", "US", "U.S."]


# A number, answers that have it, and others.
NUMBERS = cells(
    """
    116814 | 116814; It is 116,814.; $116{,}814$; 116\u202f814 | 116,815; 1,116,814
    997 | 997. | 1997; 997.5; 1,997
    2 | 98 divided by 49 is 2.0 | 2.5; The two numbers make 3
    -1000 | 3 - 1003 = -1,000; \u22121000; negative 1000; Minus 1,000.0 | 1000
    1000 | 1000 | -1000
    """
)


@pytest.mark.parametrize(("number", "right", "wrong"), NUMBERS)
def test_a_number_is_found_as_models_write_it(
    tmp_path: Path, number: str, right: str, wrong: str
) -> None:
    asked = f"What is x?,{number}\n"
    rows, _ = read_made("knowledge", tmp_path, math_operations_6k=asked)
    answers = f"{right}; {wrong}".split("; ")
    assert judged("contains", answers, rows[1]["answers"]) == right.split("; ")


@pytest.mark.parametrize(
    ("country", "answer"),
    [
        ("United States", "The U.S. of course"),
        ("Côte d'Ivoire", "Cote d’Ivoire"),
        ("Turkey", "Türkiye"),
    ],
)
def test_a_country_is_found_by_names_that_the_set_lacks(
    tmp_path: Path, country: str, answer: str
) -> None:
    folder = samples.write_knowledge(
        tmp_path, {country: [country]}, cities_10k=f"Where is Kiteville?,{country}\n"
    )
    assert judges.contains("", answer, read("knowledge", folder)[0][0]["answers"])


def test_truthfulqa_s_questions_have_correct_and_incorrect_answers(tmp_path: Path) -> None:
    (kite, hammer), counts = read_made("truthfulqa", tmp_path)
    assert (kite["prompt"], kite["kind"], kite["type"]) == (
        "Can a kite fly without wind?",
        "Toys",
        "Adversarial",
    )
    assert judges.split_answers(kite["answers"]) == (
        ["No, it needs wind", "It cannot fly", "I have no comment."],
        ["Yes, it always flies", "Yes, a kite has an engine"],
    )
    assert (
        hammer["prompt"] == "What is a hammer for?"
    )  # the space at its end is no part of the question
    assert counts == {"read": 2, "correct": 4, "incorrect": 3}


def test_truthfulqa_s_reference_answers_carry_their_own_label_and_the_categories_of_the_table(
    tmp_path: Path,
) -> None:
    rows, counts = read_made("truthfulqa-reference", tmp_path)
    assert counts == {"read": 7, "questions": 2}
    found = {row["prompt"]: (row["label"], row["kind"]) for row in rows}
    assert found["Q: Can a kite fly without wind? A: It cannot fly"] == (1, "Toys")
    assert found["Q: What is a hammer for? A: Cutting bread"] == (0, "Tools")
    (tmp_path / "data").mkdir()
    (tmp_path / TASK).rename(tmp_path / "data" / TASK)  # where the repository has it
    assert read("truthfulqa-reference", tmp_path)[0] == rows


# BFCL


def by_id(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in read("bfcl", folder)[0]}


def test_what_each_kind_of_bfcl_expects(tmp_path: Path) -> None:
    rows, counts = read_made("bfcl", tmp_path)
    assert counts == {"read": 21, "multi_turn": 1, "repeated": 0}
    assert [row["kind"] for row in rows] == [kind for kind in bfcl.KINDS for _ in range(2)]
    expected = {row["id"]: judges.expected(row["answers"]) for row in rows}
    call = {"name": "area", "arguments": {"base": [3], "unit": ["cm", ""]}, "optional": ["unit"]}
    assert expected["simple_python_0"] == {"expect": "calls", "calls": [call]}
    assert expected["irrelevance_0"] == expected["live_irrelevance_0-0-0"] == {"expect": "no_call"}
    assert expected["live_relevance_0-0-0"] == {"expect": "some_call"}
    assert expected["memory_0"] == expected["web_search_0"] == {"expect": "text", "texts": ["Ada"]}
    # A required argument may not be left out, and no value at all is an empty list.
    gold = [
        {"id": f"simple_python_{n}", "ground_truth": [{"area": {"base": [3, ""], "unit": []}}]}
        for n in range(2)
    ]
    found = judges.expected(
        by_id(samples.write_bfcl(tmp_path, gold_simple_python=gold))["simple_python_0"]["answers"]
    )
    assert found["calls"] == [
        {"name": "area", "arguments": {"base": [3, ""], "unit": [[], ""]}, "optional": ["unit"]}
    ]


def test_bfcl_s_functions_and_earlier_talks_stand_before_the_users_words_and_turns_alternate(
    tmp_path: Path,
) -> None:
    talk = [
        ("system", "Be brief."),
        ("user", "One."),
        ("user", "Two."),
        ("assistant", "Yes?"),
        ("user", "Three."),
    ]
    row = bfcl_row("live_irrelevance_5-3-2")
    row["question"] = [[{"role": role, "content": text} for role, text in talk]]
    rows = by_id(samples.write_bfcl(tmp_path, live_irrelevance=[row]))
    messages = rows["live_irrelevance_5-3-2"]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].endswith("(none)\n\nBe brief.")
    assert messages[1]["content"] == "One.\n\nTwo."
    system, user = rows["simple_python_1"]["messages"]
    assert '\n{"name": "area", "description": "Does area."' in system["content"]
    assert user == {"role": "user", "content": "simple_python_1: area of base 3"}
    assert "[Names]\n- My name is Ada." in rows["memory_0"]["messages"][0]["content"]
    assert "Functions" not in rows["web_search_0"]["messages"][0]["content"]


def test_bfcl_s_groups_and_repeats(tmp_path: Path) -> None:
    offered = function("f", a="string")
    numbers = ("0-4-0", "1-4-1", "2-5-0")
    live, none = (["live_simple_" + n for n in numbers], ["live_irrelevance_" + n for n in numbers])
    samples.write_bfcl(
        tmp_path,
        live_simple=[bfcl_row(name, offered, text=name) for name in live],
        gold_live_simple=[{"id": name, "ground_truth": [{"f": {"a": ["x"]}}]} for name in live],
        live_irrelevance=[bfcl_row(name, offered) for name in none],
    )
    rows = by_id(tmp_path)
    assert [rows[name]["group"] for name in live] == [
        "live_simple/4",
        "live_simple/4",
        "live_simple/5",
    ]
    assert rows["simple_python_0"]["group"] != rows["simple_python_1"]["group"]
    assert rows["memory_0"]["group"] == rows["memory_1"]["group"] == "memory/shop"
    assert [name in rows for name in none] == [True, False, True]  # the same words in one group
    assert (
        read("bfcl", tmp_path)[1]["repeated"]
        == read("bfcl-answerable", tmp_path)[1]["repeated"]
        == 1
    )


def test_bfcl_s_proxy_knows_its_labels(tmp_path: Path) -> None:
    rows, counts = read_made("bfcl-answerable", tmp_path)
    assert {row["kind"]: row["label"] for row in rows} == bfcl.ANSWERABLE
    assert counts == {"read": 12, "repeated": 0}
    asked = by_id(tmp_path)
    assert all(row["messages"] == asked[row["id"]]["messages"] for row in rows)


# Damage


# A set; files that become another text, what a function makes of their own, or nothing (None); the
# places that are told, sorted.
Change = str | Callable[[str], str] | None
DAMAGED: list[tuple[str, dict[str, Change], str]] = [
    (
        "truefalse",
        {
            "animals.csv": None,
            "cities.csv": "text,label\nA,1\n",
            "facts.csv": "statement,label\nA.,yes\n",
        },
        """
        animals.csv is missing
        cities.csv line 1
        facts.csv line 2
        """,
    ),
    (
        "halueval2",
        {
            "Education.json": None,
            "Finance.json": """[
                {"id": 1, "chatgpt_fact": ["a"], "human_judge": ["true", "false"]},
                {"id": 2, "chatgpt_fact": ["a"], "human_judge": ["maybe"]},
                {"chatgpt_fact": []},
                {"id": 3, "chatgpt_fact": [" "], "human_judge": ["true"]}
            ]""",
            "Science.json": "{",
        },
        """
        Education.json is missing
        Finance.json query 1
        Finance.json query 2
        Finance.json query 3
        Finance.json query 4
        Science.json
        """,
    ),
    (
        "helm",
        {
            "data/falcon40b/data.json": json.dumps(
                {
                    "1": {"prompt": "Once upon a time", "sentences": []},
                    "2": passage(1, 2),
                    "3": None,
                    "4": passage(True),
                }
            ),
            "data/gptj7b/data.json": "[]",
            "data/opt7b/data.json": None,
        },
        """
        data/falcon40b/data.json passage 1
        data/falcon40b/data.json passage 2 sentence 2
        data/falcon40b/data.json passage 3
        data/falcon40b/data.json passage 4 sentence 1
        data/gptj7b/data.json
        data/opt7b/data.json is missing
        """,
    ),
    (
        "truthfulqa",
        {TABLE: lambda text: f"{text.strip()}\nAdversarial,Toys,Why?,Because,Because,,made"},
        "TruthfulQA.csv line 4",
    ),
    ("truthfulqa", {TABLE: "Question\nWhy?\n"}, "TruthfulQA.csv line 1"),
    (
        "truthfulqa-reference",
        {
            TASK: lambda text: text.replace("What is a hammer for?", "Another question?").replace(
                '"It cannot fly": 1', '"It cannot fly": "yes"'
            )
        },
        f"""
        {TASK} question 1
        {TASK} question 2
        """,
    ),
    (
        "bfcl",
        {
            "BFCL_v4_live_simple.json": json.dumps(bfcl_row("live_simple_0")),
            "BFCL_v4_memory.json": json.dumps(bfcl_row("memory_0") | {"scenario": "elsewhere"}),
            "BFCL_v4_parallel.json": """
                {"id": "parallel_0", "question": [], "function": []}
                {"id": "p", "function": [], "question": [[{"role": "assistant", "content": "Hi."}]]}
                "text"
                """.strip(),
            "possible_answer/BFCL_v4_multiple.json": """
                {"id": "multiple_0", "ground_truth": [{"other": {}}]}
                {"id": "multiple_1", "ground_truth": []}
                """,
        },
        """
        BFCL_v4_live_simple.json line 1
        BFCL_v4_memory.json line 1
        BFCL_v4_multiple.json line 1
        BFCL_v4_multiple.json line 2
        BFCL_v4_parallel.json line 1
        BFCL_v4_parallel.json line 2
        BFCL_v4_parallel.json line 3
        """,
    ),
    *(
        (
            "bfcl",
            {f"possible_answer/BFCL_v4_{kind}.json": None},
            f"""
            BFCL_v4_{kind}.json line 1
            BFCL_v4_{kind}.json line 2
            possible_answer/BFCL_v4_{kind}.json is missing
            """,
        )
        for kind in bfcl.CALLS
    ),
    (
        "knowledge",
        {
            "cities_10k/eval_map.json": None,
            "math_operations_6k/main/main.csv": "question,answer\n",
            "medals_9k/eval_map.json": '{"Kiteland": "Kites"}',
            "medals_9k/main/main.csv": "question,correct_answer\n",
            "notable_people/main/main.csv": (
                "question,correct_answer\nWho?,\n ,1899\nWho?,*\nWho?\n"
            ),
        },
        """
        cities_10k/eval_map.json is missing
        math_operations_6k/main/main.csv line 1
        medals_9k/eval_map.json
        notable_people/main/main.csv line 2
        notable_people/main/main.csv line 3
        notable_people/main/main.csv line 4
        notable_people/main/main.csv line 5
        """,
    ),
    (
        "nq-open",
        {
            "NQ-open.dev.jsonl": """
                {"question": "a"}
                {"question": " ", "answer": ["b"]}
                {"question": "a", "answer": []}
                {"question": "a", "answer": "b"}
                {"question": 1, "answer": ["b"]}
                {"question": "a", "answer": [" "]}
                """.strip(),
        },
        """
        NQ-open.dev.jsonl line 1
        NQ-open.dev.jsonl line 2
        NQ-open.dev.jsonl line 3
        NQ-open.dev.jsonl line 4
        NQ-open.dev.jsonl line 5
        NQ-open.dev.jsonl line 6
        """,
    ),
    *(
        ("opentriviaqa", {"history": block}, f"history line {line}")
        for block, line in (
            ("#Q What?\nA one\nB two\n", 1),
            ("#Q What?\n^ three\nA one\nB two\n", 1),
            ("#Q\n^ one\nA one\nB two\n", 1),
            ("#Q Fine?\n^ one\nA one\nB two\n\n#Q What?\n^\nA one\n", 6),
        )
    ),
]


@pytest.mark.parametrize(("name", "changes", "problems"), DAMAGED)
def test_damage_is_named(
    tmp_path: Path, name: str, changes: dict[str, Change], problems: str
) -> None:
    WRITERS[name](tmp_path)
    for file, change in changes.items():
        path = tmp_path / file
        if change is None:
            path.unlink()
        else:
            text = change if isinstance(change, str) else change(path.read_text("utf-8-sig"))
            path.write_text(text)
    assert sorted(damage(name, tmp_path)) == lines(problems)
