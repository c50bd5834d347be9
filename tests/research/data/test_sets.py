"""Every set by name: found, counted, described, accepted by the trainer; what each reader makes of
its format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest

from hallutracer_research.cli.data import SetName
from hallutracer_research.data import bfcl, statement_sets
from hallutracer_research.data.files import question_group
from hallutracer_research.data.question_sets import CATEGORIES, TABLE, TASK
from hallutracer_research.data.registry import SETS, find_path, read_set
from service.cli.main import main
from service.data import judges
from service.data.options import JudgeName, JudgeOptions
from service.data.training_rows import check_disjoint, read_dataset
from service.errors import DataError
from service.trainer.options import TrainOptions
from tests.research.data import samples
from tests.research.data.samples import TRIVIA, WRITERS, bfcl_row, damage, function, passage, read

Rows = list[dict[str, Any]]


def test_the_published_sizes() -> None:
    assert {name: (info.rows, info.kinds) for name, info in SETS.items()} == {
        "truthfulqa": (817, 38),
        "truthfulqa-reference": (6_204, 38),
        "truefalse": (6_330, 7),
        "halueval2": (3_793, 5),
        "helm": (3_197, 6),
        "bfcl": (2_853, 10),
        "bfcl-answerable": (1_998, 6),
        "opentriviaqa": (20_550, 11),
        "opentriviaqa-choice": (20_550, 11),
        "nq-open": (5_410, 2),
        "knowledge": (40_949, 4),
    }
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


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    with pytest.raises(SystemExit) as caught:
        main(["data", *arguments])
    assert caught.value.code == code
    return capsys.readouterr()


def test_convert_prints_rows_and_tells_the_rest_on_stderr(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    samples.write_bfcl(tmp_path)
    assert "2,853" in run(capsys, "convert", "bfcl", str(tmp_path), code=1).err
    printed = run(capsys, "convert", "bfcl", str(tmp_path), "--allow-other-counts")
    assert [json.loads(line)["kind"] for line in printed.out.splitlines()][:2] == [
        "simple_python"
    ] * 2
    for told in (
        "20 rows of BFCL v4",
        "read 21, multi_turn 1, repeated 0",
        "Agentic set cannot be identified",
        "--labels generate --judge calls --max-new-tokens 384 --abstain-pattern '(?!)'",
    ):
        assert told in printed.err
    rows = json.loads(run(capsys, "list", "--json").out)
    assert [(row["name"], row["rows"], row["licence"]) for row in rows] == [
        (info.name, info.rows, info.licence) for info in SETS.values()
    ]
    table = run(capsys, "list").out
    assert all(f"\n{name} " in table for name in SETS)
    assert "6,330" in table


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
    rows, counts = read("truefalse", samples.write_truefalse(tmp_path, cities=cities))
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
    rows, counts = read("truefalse", samples.write_truefalse(tmp_path, cities=cities))
    assert labels(rows, "kind", "cities") == [(1, "cities/x")]
    assert counts == {"read": 18, "contradictory": 4, "repeated": 1}


@pytest.mark.parametrize(
    ("category", "statement", "expected"),
    [
        ("animals", "The giant anteater uses walking for locomotion.", "giant anteater"),
        ("animals", "There are no specific human uses for gazelle.", "gazelle"),
        ("animals", "Human uses for bison include meat.", "bison"),
        (
            "companies",
            "Anheuser-Busch InBev engages in the production of oil..",
            "anheuser-busch inbev",
        ),
        ("inventions", "Alfred Nobel invented the dynamite.", "alfred nobel"),
        ("facts", "The planet Uranus is tilted.", "the planet uranus is tilted."),
    ],
)
def test_truefalse_subjects(category: str, statement: str, expected: str) -> None:
    assert statement_sets.subject(category, statement) == expected


def test_halueval2_polarity_groups_and_unjudged(tmp_path: Path) -> None:
    finance = [
        {"id": 7, "chatgpt_fact": ["a", "b"], "human_judge": ["true", "false"]},
        {"id": 8, "chatgpt_fact": ["c"], "human_judge": []},
    ]
    rows, counts = read("halueval2", samples.write_halueval2(tmp_path, Finance=finance))
    assert labels(rows, "kind", "Finance") == [(1, "Finance/7"), (0, "Finance/7")]
    assert counts == {"read": 10, "unjudged": 1}


def test_helm_s_label_one_in_the_file_is_hallucinated_and_a_title_ends_at_the_first_full_stop(
    tmp_path: Path,
) -> None:
    rows, counts = read(
        "helm", samples.write_helm(tmp_path, opt7b={"1": passage(0, title="U.S. Route 491")})
    )
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
    rows, counts = read(
        "helm", samples.write_helm(tmp_path, opt7b={"1": passage(1), "2": passage(0)})
    )
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
    rows, counts = read("opentriviaqa", samples.write_opentriviaqa(tmp_path))
    assert counts == {"read": 22, "left out: needs its options": 11, "left out: repeated": 0}
    assert rows[0] == {
        "id": "opentriviaqa-animals-2",
        "prompt": "What pulls a sledge on animals? Name one. Answer briefly.",
        "answers": ["A big dog"],
        "group": "question/what pulls a sledge on animals name one",
        "kind": "animals",
    }
    again = TRIVIA.replace("{category}", "animals").replace("sledge", "SLEDGE!")
    rows, counts = read("opentriviaqa", samples.write_opentriviaqa(tmp_path, general=again))
    assert counts["left out: repeated"] == 1
    assert len({row["group"] for row in rows}) == len(rows)


@pytest.mark.parametrize(
    "words", ["Which of these flies?", "Which of the following is it?", "All of these fly except?"]
)
def test_a_question_that_needs_its_options_is_not_asked_without(tmp_path: Path, words: str) -> None:
    asked = TRIVIA.replace("What pulls a sledge on {category}?\r\n\r\nName one.", words)
    rows, counts = read("opentriviaqa", samples.write_opentriviaqa(tmp_path, world=asked))
    assert counts["left out: needs its options"] == 12
    assert {row["kind"] for row in rows} == {*CATEGORIES} - {"world"}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("B", True),
        ("b.", True),
        ("B. A big dog", True),
        ("The answer is B", True),
        ("The correct answer is: (B)", True),
        ("A", False),
        ("Because", False),
        ("A big dog is B", False),
        ("", False),
    ],
)
def test_a_choice_is_judged_by_its_letter(tmp_path: Path, answer: str, right: bool) -> None:
    rows, _ = read("opentriviaqa-choice", samples.write_opentriviaqa(tmp_path))
    assert rows[0]["prompt"].endswith(
        "A. A small cat\nB. A big dog\nC. A fish\nD. Two birds\nAnswer with one letter."
    )
    assert rows[1]["prompt"].endswith("A. True\nB. False\nAnswer with one letter.")
    assert judges.make_judge(JudgeOptions("regex"))("", answer, rows[0]["answers"]) is right


@pytest.mark.parametrize(
    ("encoding", "word"),
    [("utf-8", "Schlittenhündin"), ("cp1252", "Hündin"), ("latin-1", "Hündin\x81")],
)
def test_each_file_has_an_encoding_of_its_own(tmp_path: Path, encoding: str, word: str) -> None:
    text = TRIVIA.replace("sledge", word).encode(encoding)
    rows, _ = read("opentriviaqa", samples.write_opentriviaqa(tmp_path, animals=text))
    assert "ündin" in rows[0]["prompt"]


def test_search_queries_become_questions(tmp_path: Path) -> None:
    rows, counts = read("nq-open", samples.write_nq_open(tmp_path))
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
    rows, counts = read("nq-open", samples.write_nq_open(tmp_path, asked, none, asked))
    assert counts == {"read": 4, "left out: repeated": 1, "left out: no answer with a word": 1}
    assert rows[0]["answers"] == ["a star"]
    assert "page two" not in "".join(row["prompt"] for row in rows)


def test_knowledge_is_asked_once_in_four_kinds_and_countries_have_the_set_s_own_names(
    tmp_path: Path,
) -> None:
    rows, counts = read("knowledge", samples.write_knowledge(tmp_path))
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


@pytest.mark.parametrize(
    ("number", "answer", "right"),
    [
        ("116814", "116814", True),
        ("116814", "It is 116,814.", True),
        ("116814", "$116{,}814$", True),
        ("116814", "116\u202f814", True),
        ("116814", "116,815", False),
        ("116814", "1,116,814", False),
        ("997", "997.", True),
        ("997", "1997", False),
        ("997", "997.5", False),
        ("997", "1,997", False),
        ("2", "98 divided by 49 is 2.0", True),
        ("2", "2.5", False),
        ("2", "The two numbers make 3", False),
        ("-1000", "3 - 1003 = -1,000", True),
        ("-1000", "\u22121000", True),
        ("-1000", "negative 1000", True),
        ("-1000", "Minus 1,000.0", True),
        ("-1000", "1000", False),
        ("1000", "-1000", False),
    ],
)
def test_a_number_is_found_as_models_write_it(
    tmp_path: Path, number: str, answer: str, right: bool
) -> None:
    asked = f"What is x?,{number}\n"
    rows, _ = read("knowledge", samples.write_knowledge(tmp_path, math_operations_6k=asked))
    assert judges.make_judge(JudgeOptions("contains"))("", answer, rows[1]["answers"]) is right


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
    (kite, hammer), counts = read("truthfulqa", samples.write_truthfulqa(tmp_path))
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
    rows, counts = read("truthfulqa-reference", samples.write_truthfulqa(tmp_path))
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
    rows, counts = read("bfcl", samples.write_bfcl(tmp_path))
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
    rows, counts = read("bfcl-answerable", samples.write_bfcl(tmp_path))
    assert {row["kind"]: row["label"] for row in rows} == bfcl.ANSWERABLE
    assert counts == {"read": 12, "repeated": 0}
    asked = by_id(tmp_path)
    assert all(row["messages"] == asked[row["id"]]["messages"] for row in rows)


# Damage


def of_truefalse(folder: Path) -> None:
    samples.write_truefalse(folder, facts="A.,yes\n")
    (folder / "animals.csv").unlink()
    (folder / "cities.csv").write_text("text,label\nA,1\n")


def of_halueval2(folder: Path) -> None:
    short = {"id": 1, "chatgpt_fact": ["a"], "human_judge": ["true", "false"]}
    others = [
        {"id": 2, "chatgpt_fact": ["a"], "human_judge": ["maybe"]},
        {"chatgpt_fact": []},
        {"id": 3, "chatgpt_fact": [" "], "human_judge": ["true"]},
    ]
    samples.write_halueval2(folder, Finance=[short, *others])
    (folder / "Science.json").write_text("{")
    (folder / "Education.json").unlink()


def of_helm(folder: Path) -> None:
    bad = {"1": {"prompt": "Once upon a time", "sentences": []}, "2": passage(1, 2), "3": None}
    bad["4"] = passage(True)
    samples.write_helm(folder, falcon40b=bad)
    (folder / "data" / "opt7b" / "data.json").unlink()
    (folder / "data" / "gptj7b" / "data.json").write_text("[]")


def of_truthfulqa(folder: Path) -> None:
    samples.write_truthfulqa(folder)
    lines = (folder / TABLE).read_text(encoding="utf-8-sig").splitlines()
    (folder / TABLE).write_text("\n".join([*lines, "Adversarial,Toys,Why?,Because,Because,,made"]))


def of_reference(folder: Path) -> None:
    samples.write_truthfulqa(folder)
    tasks = json.loads((folder / TASK).read_text())
    tasks[0]["question"] = "Another question?"
    tasks[1]["mc2_targets"] = {"It cannot fly": "yes"}
    (folder / TASK).write_text(json.dumps(tasks))


def of_columns(folder: Path) -> None:
    samples.write_truthfulqa(folder)
    (folder / TABLE).write_text("Question\nWhy?\n")


def of_bfcl(folder: Path) -> None:
    no_turn, no_user = bfcl_row("parallel_0"), bfcl_row("parallel_1")
    no_turn["question"] = []
    no_user["question"] = [[{"role": "assistant", "content": "Hello."}]]
    samples.write_bfcl(
        folder,
        parallel=[no_turn, no_user, "text"],
        live_simple=[bfcl_row("live_simple_0")],
        gold_multiple=[
            {"id": "multiple_0", "ground_truth": [{"other": {}}]},
            {"id": "multiple_1", "ground_truth": []},
        ],
        memory=[bfcl_row("memory_0") | {"scenario": "elsewhere"}],
    )


def of_queries(folder: Path) -> None:
    samples.write_nq_open(
        folder,
        {"question": "a"},
        {"question": " ", "answer": ["b"]},
        {"question": "a", "answer": []},
        {"question": "a", "answer": "b"},
        {"question": 1, "answer": ["b"]},
        {"question": "a", "answer": [" "]},
    )


def of_knowledge(folder: Path) -> None:
    samples.write_knowledge(folder, notable_people="Who?,\n ,1899\nWho?,*\nWho?\n", medals_9k="")
    (folder / "cities_10k" / "eval_map.json").unlink()
    (folder / "medals_9k" / "eval_map.json").write_text('{"Kiteland": "Kites"}')
    (folder / "math_operations_6k" / "main" / "main.csv").write_text("question,answer\n")


@pytest.mark.parametrize(
    ("name", "write", "places"),
    [
        (
            "truefalse",
            of_truefalse,
            ["animals.csv is missing", "cities.csv line 1", "facts.csv line 2"],
        ),
        (
            "halueval2",
            of_halueval2,
            [
                "Education.json is missing",
                *(f"Finance.json query {n}" for n in (1, 2, 3, 4)),
                "Science.json",
            ],
        ),
        (
            "helm",
            of_helm,
            [
                "falcon40b/data.json passage 1",
                "falcon40b/data.json passage 2 sentence 2",
                "falcon40b/data.json passage 3",
                "falcon40b/data.json passage 4 sentence 1",
                "gptj7b/data.json",
                "opt7b/data.json is missing",
            ],
        ),
        ("truthfulqa", of_truthfulqa, ["TruthfulQA.csv line 4"]),
        ("truthfulqa-reference", of_reference, [f"{TASK} question 1", f"{TASK} question 2"]),
        ("truthfulqa", of_columns, ["TruthfulQA.csv line 1"]),
        (
            "bfcl",
            of_bfcl,
            [
                "live_simple.json line 1",
                "memory.json line 1",
                "multiple.json line 1",
                "multiple.json line 2",
                *(f"parallel.json line {n}" for n in (1, 2, 3)),
            ],
        ),
        (
            "knowledge",
            of_knowledge,
            [
                "cities_10k/eval_map.json is missing",
                "math_operations_6k/main/main.csv line 1",
                "medals_9k/eval_map.json",
                *(f"notable_people/main/main.csv line {n}" for n in (2, 3, 4, 5)),
            ],
        ),
        ("nq-open", of_queries, [f"NQ-open.dev.jsonl line {n}" for n in range(1, 7)]),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, write: Any, places: list[str]) -> None:
    write(tmp_path)
    found = [
        place.removeprefix("data/").removeprefix("BFCL_v4_") for place in damage(name, tmp_path)
    ]
    assert sorted(found) == places


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ("#Q What?\nA one\nB two\n", 1),
        ("#Q What?\n^ three\nA one\nB two\n", 1),
        ("#Q\n^ one\nA one\nB two\n", 1),
        ("#Q Fine?\n^ one\nA one\nB two\n\n#Q What?\n^\nA one\n", 6),
    ],
)
def test_a_damaged_block_is_named(tmp_path: Path, block: str, line: int) -> None:
    assert damage("opentriviaqa", samples.write_opentriviaqa(tmp_path, history=block)) == [
        f"history line {line}"
    ]


@pytest.mark.parametrize("kind", bfcl.CALLS)
def test_gold_answers_must_be_there(tmp_path: Path, kind: str) -> None:
    samples.write_bfcl(tmp_path)
    (tmp_path / "possible_answer" / f"BFCL_v4_{kind}.json").unlink()
    assert f"possible_answer/BFCL_v4_{kind}.json is missing" in damage("bfcl", tmp_path)
