"""Training on questions in forms: made by the run itself, in the questions' groups, known to the
ledger."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.special import logit

from probes_store.bundle import Bundle
from service.data.forms import FORMS, is_one_message, several
from service.data.forms.crossed import held_out_families
from service.data.training_rows import read_dataset
from service.engines.chat import check_turns
from service.errors import DataError, TrainingError
from service.readout import Site
from service.trainer.new_rows import Marks, check_unspent
from service.trainer.options import TrainOptions
from service.trainer.prepare import prepare
from service.trainer.publish import rewording
from service.trainer.training_set import group_names, spread
from tests.fitting.planted import PlantedEngine, Quiet, dataset_of, planted_rows, write_rows
from tests.kit.chats import turns
from tests.kit.rows import Options, Row, Rows, read_lines, without
from tests.trainer.made import ONE, contents, options_on, run

MIXED: Options = ONE | {"labels": "generate", "forms": None}
EVALUATED = MIXED | {"evaluate": True}
# With room for every form: tokens of this engine are bytes.
roomy = partial(PlantedEngine, max_tokens=6000)


def questions(count: int = 240, seed: int = 0) -> Rows:
    """Planted rows whose first answers differ, so that one can be the company of another."""
    rows = planted_rows(count, seed=seed)
    return [
        row | {"answers": [f"Town{seed}{number:03}", "Paris"]} for number, row in enumerate(rows)
    ]


class Asked(NamedTuple):
    id: str
    strata: dict[str, str]


def labelled(rows: list[Asked], label: np.ndarray) -> Any:
    """As prepared data has them."""
    return SimpleNamespace(
        dataset=SimpleNamespace(rows=rows),
        inputs=SimpleNamespace(label=label),
        labelled=SimpleNamespace(index=np.arange(len(rows))),
    )


def in_forms(folder: Path, name: str = "train") -> Rows:
    return read_lines(folder / "run" / f"{name}-forms.jsonl")


def reworded(row: Row) -> bool:
    return str(row["form"]).startswith("wording_")


def among_others(row: Row) -> bool:
    return row["form"] in {form.name for form in several.FORMS}


def asked_once(rows: Rows) -> Rows:
    """The questions in a form of conversation each, without those that the mixture adds."""
    return [
        row for row in rows if row["form"] != "task" and not (reworded(row) or among_others(row))
    ]


def formed(folder: Path, rows: Rows, engine: Any = None, **changes: Any) -> Quiet:
    """Ask the rows in forms, as a run does before it reads them; what was printed."""
    options = options_on(TrainOptions, folder, rows, **MIXED | {"name": "planted"} | changes)
    dataset, console = read_dataset(options.file, "generate", folds=None), Quiet()
    options.folder.mkdir(exist_ok=True)
    spread(options, dataset, None, engine or roomy(), "chat", console)
    return console


def forms_met(rows: Rows) -> Counter[str]:
    return Counter(row["form"] for row in rows)


class Mixed(NamedTuple):
    """A run with everything by default."""

    folder: Path
    bundle: Bundle
    console: Quiet
    train: Rows  # in forms
    test: Rows


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    folder = tmp_path_factory.mktemp("mixed")
    held_out = questions(100, seed=3)
    bundle, console = run(folder, roomy(), questions(), test=held_out, **EVALUATED)
    return Mixed(folder, bundle, console, in_forms(folder), in_forms(folder, "test"))


def test_generated_labels_are_asked_in_a_mixture_by_default(mixed: Mixed) -> None:
    tasks = [row for row in mixed.train if "answers" not in row]
    asking = [row for row in mixed.train if "answers" in row]
    worded, among = (list(filter(kind, asking)) for kind in (reworded, among_others))
    once = asked_once(asking)
    # 12 of the 240 questions are set aside, 38 are asked again among others.
    assert (len(once), len(worded), len(among), len(tasks)) == (228, 174, 38, 240)
    assert len(mixed.train) == 680
    assert all(row["form"] == "task" and row["applies"] is False for row in tasks)
    assert len(forms_met(once)) > 20
    lone = read_lines(mixed.folder / "run" / "train-said" / "answers.jsonl")
    own = next(row for row in once if row["form"] == "turn_own")
    assert own["messages"][1]["content"] in {row["answer"] for row in lone}
    data, count, counts = mixed.bundle.evaluation()["data"], len(asking), forms_met(asking)
    assert data["forms"] == counts | Counter(task=240)
    assert (data["rows"], data["others"]) == (count, 240)
    assert data["factual"] + data["hallucinated"] + data["left_out"] == count
    mixed.console.line(
        f"{count} rows of rows.jsonl in {len(counts)} forms, and 240 requests that ask for no fact"
    )
    group = {row["id"]: row["group"] for row in questions()}
    for row in asking:
        assert row["group"] == group[row["id"].partition("+")[0]], "whatever the form"
    kinds = Counter(row["kind"] for row in tasks)
    assert kinds["task/key_words"] + kinds["task/after_request"] > 10, "like questions of fact"


def test_some_questions_are_asked_in_three_wordings_and_held_out_ones_in_others(
    mixed: Mixed,
) -> None:
    train, test = (list(filter(reworded, rows)) for rows in (mixed.train, mixed.test))
    asked = Counter(row["id"].partition("+")[0] for row in train)
    expected = (58, {3})  # a quarter of 240, less two that are set aside
    assert (len(asked), set(asked.values())) == expected
    assert len(forms_met(train)) > 10
    families = {f"wording_{family.name}" for family in held_out_families()}
    assert set(forms_met(test)) <= families
    assert len(test) > 25
    texts = [
        row["messages"][0]["content"]
        for row in mixed.train + mixed.test
        if len(row["messages"]) == 1 and "answers" in row
    ]
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize("name", ["train", "test"])
def test_the_other_questions_of_a_message_are_asked_in_no_other_row(
    mixed: Mixed, name: str
) -> None:
    """So no label depends on a fact of another fold."""
    rows: Rows = getattr(mixed, name)
    every = questions() if name == "train" else questions(100, seed=3)
    asked = {row["group"] for row in rows if row["form"] != "task"}
    aside = {row["answers"][0] for row in every if row["group"] not in asked}
    assert len(aside) == (12 if name == "train" else 4), "groups of two, at most 5 %"
    own = {row["id"]: row["answers"][0] for row in every}
    partners: list[str] = []
    for row in rows:
        if row["form"] in ("two_questions", "three_questions"):
            answers = [part[0] for part in json.loads(row["answers"][0])["parts"]]
            answers.remove(own[row["id"].partition("+")[0]])
            partners += answers
    assert partners
    assert aside.issuperset(partners)
    assert len(partners) == len(set(partners)), "each is used once"


def test_a_question_among_others_may_need_a_longer_answer(mixed: Mixed) -> None:
    long = {form.name for form in several.FORMS if form.long}
    rows = list(filter(among_others, mixed.train))
    assert {row["form"] in long for row in rows} == {False, True}
    for row in rows:
        assert row.get("answer_tokens", 0) == (several.LONG_ANSWER if row["form"] in long else 0)


def test_where_the_judge_takes_one_answer_no_message_asks_several_questions(tmp_path: Path) -> None:
    formed(tmp_path, questions(), judge="exact")
    rows = in_forms(tmp_path)
    assert not any(map(among_others, rows))
    assert len(asked_once(rows)) == 240


def test_the_card_says_how_decisions_hold_under_other_wordings(mixed: Mixed) -> None:
    for part, most in (("cross_validation", 60), ("held_out", 25)):
        record = mixed.bundle.evaluation()[part]["rewording"]
        assert 0 < record["questions"] <= most
        assert record["wordings"] == 3
        assert record["answered_alike"] <= record["questions"]
        assert record["log_odds_spread"] > 0
    text = mixed.bundle.card()
    assert text.count("## In other words") == 1
    assert text.count("questions were asked in 3.0 wordings each") == 2


def test_decisions_under_other_wordings_are_counted_by_question() -> None:
    asked = [
        Asked(f"{name}+wording_{family}", {"form": f"wording_{family}"})
        for name in "abc"
        for family in "xyz"
    ]
    asked += [Asked("d+wording_x", {"form": "wording_x"}), Asked("a+lone", {"form": "lone"})]
    label = np.array([0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1])
    risk = np.array([[0.6, 0.7, 0.9, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.9, 0.1]])
    data = labelled(asked, label)
    spread = np.var(logit(risk[0, :9].reshape(3, 3)), axis=1, ddof=1).mean() ** 0.5
    assert rewording(data, risk, 0.65)["rewording"] == {
        "questions": 3,
        "wordings": 3.0,
        "answered_alike": 2,
        "decided_differently": 0.5,
        "log_odds_spread": pytest.approx(spread, abs=1e-5),
    }
    two_seeds = rewording(data, np.vstack([risk, risk - 0.05]), 0.65)
    assert two_seeds["rewording"]["decided_differently"] == 0.5
    assert rewording(labelled(asked[-2:], label[-2:]), risk[:, -2:], 0.65) == {}


def test_held_out_rows_have_a_table_by_form_and_no_requests(mixed: Mixed) -> None:
    assert all("answers" in row for row in mixed.test)
    evaluation = mixed.bundle.evaluation()
    held, data = evaluation["held_out"], evaluation["data"]
    assert len(held["by_form"]) > 15
    assert sum(row["rows"] for row in held["by_form"].values()) == held["rows"]
    assert set(evaluation["cross_validation"]["by_form"]) <= set(data["forms"]) - {"task"}
    # The files that the user named are the ones that are recorded.
    for record, name in ((data, "rows.jsonl"), (held, "test.jsonl")):
        own = read_dataset(mixed.folder / name, "generate", folds=None)
        assert (record["file"], record["digest"]) == (name, own.digest)
    assert mixed.bundle.manifest.training.rows == sum("answers" in row for row in mixed.train)


def test_a_stopped_run_goes_on_to_the_same_bundle(tmp_path: Path) -> None:
    held_out = questions(60, seed=3)
    options = MIXED | {"rows": questions(120), "test": held_out, "batch_rows": 32}
    for stop in (2, 3, 4):  # each time after so many of 19 calls
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "stopped", roomy(stop=stop), **options)
    folders = tmp_path / "whole", tmp_path / "stopped"
    assert len({run(folder, roomy(), **options)[0].manifest.digest for folder in folders}) == 1
    for part in ("train", "test"):
        whole, resumed = (contents(folder / "run" / part) for folder in folders)
        assert whole == resumed
    engine = roomy()
    assert run(folders[0], engine, **options)[0].reference == "planted:1"
    assert engine.extracts == engine.generates == 0, "the same run again reads nothing"


def test_a_form_is_spent_and_an_id_that_became_a_group_is_not(mixed: Mixed, tmp_path: Path) -> None:
    def check(bundle: Bundle, row: Row) -> None:
        marks = Marks.read(bundle.evaluation()["rows_seen"]["training"])
        path = write_rows(tmp_path / "new.jsonl", [row | {"answers": ["x"]}])
        check_unspent(read_dataset(path, "generate", folds=None), [("the training rows", marks)])

    for row in ({"prompt": questions()[7]["prompt"]}, {"messages": mixed.train[7]["messages"]}):
        with pytest.raises(DataError, match="its prompt is among the training rows"):
            check(mixed.bundle, row)
    rows = without(questions(120), "group")
    bundle, _ = run(tmp_path / "lone", roomy(), rows, **MIXED | {"forms": "wording"})
    assert {row["group"] for row in in_forms(tmp_path / "lone")} >= {"r0-7"}
    check(bundle, {"prompt": "Which river?", "group": "r0-7"})


def test_near_duplicates_are_one_group_in_forms_too(tmp_path: Path) -> None:
    texts = (
        "What is the capital of France?",
        "Which river is in Rome?",
        "Tell me: what's the capital of france",
        "Who wrote Faust?",
    )
    rows: Rows = [{"prompt": text, "answers": ["x"]} for text in texts]
    rows[3]["group"] = "1"  # also the first row's number
    assert group_names(dataset_of(tmp_path, rows)) == ["1", "2", "1", "1+"]


def test_conversations_stay_as_they_are_and_rows_that_do_not_apply_bring_no_others(
    tmp_path: Path,
) -> None:
    chat = {"id": "c", "messages": turns("hi", "hi", "x"), "form": "mine", "answers": ["Paris"]}
    poem = {"id": "t", "prompt": "Write a poem.", "applies": False}
    formed(tmp_path, [*questions(), chat, poem])
    once = [row for row in in_forms(tmp_path) if not (reworded(row) or among_others(row))]
    assert len(once) == 230, "two more than 240 questions, less 12 that are set aside"
    rows = {row["id"]: row for row in once}
    assert (rows["c"]["messages"], rows["c"]["form"]) == (chat["messages"], "mine")
    assert (rows["t"]["form"], rows["t"]["prompt"]) == ("task", "Write a poem.")


def test_chosen_forms_alone_and_none(tmp_path: Path) -> None:
    formed(tmp_path / "some", questions(), forms="wording,greeting")
    counts = forms_met(in_forms(tmp_path / "some"))
    assert set(counts) == {"polite", "chatter", "lower", "ending", "greeting", "typos"}
    assert counts.total() == 240
    # Nothing of what the model said is needed.
    assert not (tmp_path / "some" / "run" / "train-said").exists()
    bundle, _ = run(tmp_path / "none", roomy(), questions(), **MIXED | {"forms": "none"})
    assert "forms" not in bundle.evaluation()["data"]
    folder = tmp_path / "none" / "run"
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["train"]
    assert not list(folder.glob("*-forms.jsonl"))


def test_what_is_too_long_for_the_model_takes_another_form(tmp_path: Path) -> None:
    console = formed(tmp_path, questions(), PlantedEngine(max_tokens=150))
    counts = forms_met(in_forms(tmp_path))
    assert not {"context_1k", "context_4k"} & set(counts)
    assert sum(count for name, count in counts.items() if name in FORMS) == 228
    assert 0 < counts["task"] < 240
    assert "context_1k" in console.line("beyond the model's 150 tokens")


def test_where_no_chosen_form_fits_questions_are_asked_alone_or_refused_by_the_users_line(
    tmp_path: Path,
) -> None:
    console = formed(tmp_path, questions(), PlantedEngine(max_tokens=420), forms="long")
    assert forms_met(in_forms(tmp_path)) == {"lone": 240}
    assert "240 rows of new.jsonl fit none of the forms and are asked alone" in console.lines
    rows = [*questions(), {"id": "long", "prompt": "x" * 600, "answers": ["x"]}]
    with pytest.raises(DataError, match=r"new\.jsonl.*(?s:.)*line 241: 6\d\d tokens"):
        formed(tmp_path, rows, PlantedEngine())


@pytest.mark.parametrize("how", ["no template", "text"])
def test_without_a_template_a_form_is_one_message(tmp_path: Path, how: str) -> None:
    engine = roomy(chat=how != "no template")
    options = MIXED | ({"prompt_format": "text"} if how == "text" else {})
    bundle, console = run(tmp_path, engine, questions(120), **options)
    rows = in_forms(tmp_path)
    assert all("prompt" in row and "messages" not in row for row in rows)
    forms = {row["form"] for row in rows if not reworded(row)}
    assert any(map(reworded, rows))
    assert forms <= {name for name, form in FORMS.items() if is_one_message(form)}
    assert len(forms) > 8
    assert bundle.manifest.prompt_format == "text"
    assert "forms of a single message only" in console.text
    with pytest.raises(TrainingError, match="turn_own") as caught:
        run(tmp_path, engine, **options | {"forms": "lone,turns"})
    assert caught.value.param == "forms"


def test_patterns_of_the_judge_are_nothing_to_state(tmp_path: Path) -> None:
    rows = [row | {"answers": [f"(Paris|Town{number})"]} for number, row in enumerate(questions())]
    formed(tmp_path, rows, judge="regex")
    asking = [row for row in in_forms(tmp_path) if row["form"] != "task"]
    assert len(forms_met(asking)) > 10
    assert not any("Town" in message["content"] for row in asking for message in row["messages"])
    assert {row["answers"][0] for row in asking} == {row["answers"][0] for row in rows}


def test_rows_that_do_not_apply_are_read_but_not_answered(tmp_path: Path) -> None:
    poems = [{"prompt": f"Write poem {n}.", "applies": False, "group": "p"} for n in range(30)]
    rows = [*reversed(poems), *questions(60)]
    options = options_on(
        TrainOptions, tmp_path, rows, labels="generate", forms="none", batch_rows=16
    )
    dataset, engine = read_dataset(options.file, "generate", folds=2), PlantedEngine()
    data = prepare(engine, dataset, options, "chat", "train", sites=[options.site], folds=2)
    assert data.dataset.others.tolist() == list(range(30))
    assert set(data.labelled.index.tolist()).isdisjoint(range(30))
    answers = read_lines(tmp_path / "run" / "train" / "answers.jsonl")
    assert sorted(row["row"] for row in answers) == list(range(30, 90))
    assert (data.counts["others"], data.counts["rows"]) == (30, 60)
    rendered = engine.render_chat(turns("Write poem 29."))
    expected = engine.activations(rendered, Site.ATTENTION_HEAD)[2].reshape(3, -1)[1]
    np.testing.assert_array_equal(data.inputs.readouts.file.head(2, 1)[0], expected)
    assert len(set(dataset.groups[:30].tolist())) == 1


@pytest.mark.parametrize(
    ("labels", "text", "forms"),
    [
        ("given", None, ()),
        ("generate", None, ("mixture",)),
        ("self", None, ("mixture",)),
        ("generate", "none", ()),
        ("generate", "mixture", ("mixture",)),
        ("generate", "turns, lone", ("turns", "lone")),
    ],
)
def test_forms_as_written_on_the_command_line(
    labels: Any, text: str | None, forms: tuple[str, ...]
) -> None:
    options = TrainOptions(name="x", labels=labels, forms=text)
    assert options.wanted_forms == forms
    assert options.scale == ("joint" if forms == ("mixture",) else "unit_norm")


class NoSystem(PlantedEngine):
    """With a chat template that leaves system prompts out."""

    def render_chat(self, messages: Any, tools: Any = ()) -> list[int]:
        shown = [message for message in messages if message["role"] != "system"]
        check_turns(self._template(shown, tools), messages, ())
        return super().render_chat(messages, tools)


def test_forms_that_the_template_leaves_out_are_not_asked_and_named(tmp_path: Path) -> None:
    bundle, console = run(tmp_path, NoSystem(max_tokens=6000), questions(), **MIXED)
    named = {name for name, form in FORMS.items() if form.family == "system"}
    data = bundle.evaluation()["data"]
    assert named <= set(data["left_out_forms"])
    assert not set(data["left_out_forms"]) & set(data["forms"])
    for row in in_forms(tmp_path):
        assert all(message["role"] != "system" for message in row.get("messages", ()))
    assert f"| forms left out | {', '.join(data['left_out_forms'])}: the model's" in bundle.card()
    line = console.line("beyond the model's")
    assert all(name in line for name in named)
