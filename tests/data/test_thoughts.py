"""Answers that begin with a thought: what is said behind it is judged, and one that never ends has
no label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from probes_store.bundle import Bundle
from service.data.judges import make_judge
from service.data.labels import verdict_on
from service.data.options import JudgeOptions
from service.engines.base import Completion, Sampling
from service.engines.bridge import wait_for
from service.engines.thoughts import opens_thought, spoken
from service.errors import TrainingError
from service.serving.sampled import ask
from tests.fitting.planted import PlantedEngine, planted_rows
from tests.judging.test_evaluation import SAMPLE
from tests.kit.hangs import no_hang
from tests.kit.rows import Options, read_lines
from tests.kit.tables import lines
from tests.matching import matching_bundle
from tests.running import App
from tests.scripted_engine import ScriptedEngine
from tests.trainer.made import ONE, run, trained_once

WRAPPED = lines(
    """
    <think>{}</think>
    <think>\\n{}\\n</think>\\n\\n
    <THINKING>{}</THINKING>
    [THINK]{}[/THINK]
    <seed:think>{}</seed:think>
    <|START_THINKING|>{}<|END_THINKING|>
    <reasoning>{}</reasoning>
    {}</think>
    <think>a <think>b</think> {}</think>
    <|channel>thought\\n{}<channel|>
    ◁think▷{}◁/think▷
    <|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>
    """
)
CUT = lines(
    """
    <think>\\n{}
    [THINK]{}
    <|channel|>analysis<|message|>{}
    Paris <think>{}
    a</think>b<think>{}
    """
)


def verdict(answer: str) -> str:
    options = JudgeOptions("contains")
    return verdict_on(
        spoken(answer), "Capital of France?", ["Paris"], make_judge(options), options.abstains
    )


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_what_stands_in_a_thought_does_not_count(wrapped: str) -> None:
    for thought in ("Lyon? Paris?", "I am not sure. Paris", "", "two\nlines"):
        before = wrapped.format(thought)
        found = [
            verdict(before + said) for said in ("Lyon.", "It is Paris.", "I am not sure.", " \n")
        ]
        assert found == ["hallucinated", "factual", "abstained", "empty"]
    assert spoken(wrapped.format("Lyon") + "\n\nParis.\n") == "Paris."


def test_thoughts_of_several_kinds_and_ends_of_none() -> None:
    kinds = "[think] a <think>b</think> c ◁think▷d◁/think▷ <reasoning>e</Thought>"
    assert spoken(kinds) is None  # the first never ends
    assert spoken(f"{kinds} f</think>Paris.") == "Paris."
    assert spoken("<think>[think]</think>Paris.[/think] Or not.") == "Or not."


def test_a_text_full_of_thoughts_that_never_end_is_read_once() -> None:
    """It may come back as an earlier answer, and a template that drops thoughts has it looked
    at."""
    for opening in ("[think]", "<think>", "<|channel|>analysis"):
        with no_hang(10):
            assert spoken(opening * 20_000) is None
            assert spoken("◁/think▷" + opening * 20_000 + "◁/think▷Paris.") == "Paris."


@pytest.mark.parametrize("cut", CUT)
def test_a_thought_that_never_ends_has_no_verdict(cut: str) -> None:
    assert verdict(cut.format("Candidates: Lyon, Paris, Nice")) == "unfinished thought"


@pytest.mark.parametrize(
    "plain", ["Paris.", " It is Paris \n", "I think Paris", "a < b > c", "[1] Paris", ""]
)
def test_an_answer_without_a_thought_is_left_as_it_is(plain: str) -> None:
    assert spoken(plain) == plain


OPENED = lines(
    """
    <think>\\n
    <|assistant|>[THINK]
    <|channel|>analysis<|message|>
    """
)
NOT_OPENED = lines(
    """
    <think>\\n\\n</think>\\n\\n
    <|assistant|>
    what does <think> mean?<|assistant|>
    """
)


@pytest.mark.parametrize("ending", OPENED + NOT_OPENED)
def test_a_template_may_open_the_thought(ending: str) -> None:
    assert opens_thought(f"a question {ending}") is (ending in OPENED)


class Thinking(PlantedEngine):
    """Thinks before each answer, in every ``cut``-th without coming to an end; ``special``: its
    marks are special tokens, which no text shows."""

    def __init__(self, cut: int, *, opened: bool = False, special: bool = False) -> None:
        super().__init__()
        self.cut, self.opened, self.special = cut, opened, special
        if special:
            self.special_tokens = ("[THINK]", "[/THINK]", "</s>")

    def generate(self, prompts: Any, sampling: Sampling) -> list[Completion]:
        answers = []
        opening, closing = ("[THINK]", "[/THINK]") if self.special else ("<think>", "</think>")
        for number, plain in enumerate(super().generate(prompts, sampling)):
            shown, whole = "Paris or Rome? I am not sure.", "" if self.opened else opening
            whole += shown
            if ends := self.cut == 0 or number % self.cut > 0:
                shown, whole = shown + plain.text, whole + closing + plain.text
            ids = tuple(f"{whole}</s>".encode()) if self.special else (1, 2)
            text = shown if self.special else whole
            answers.append(Completion(text, ids, "stop" if ends else "length"))
        return answers

    def spell(self, token_ids: Any) -> str:
        opened = self.opened and len(token_ids) > 2
        return super().spell(token_ids) + ("<think>\n" if opened else "")


GENERATED: Options = ONE | {"labels": "generate"}
EXACT = GENERATED | {"judge": "exact", "answer_pattern": r"It is (\w+)\.\Z"}
without_thoughts = trained_once(**EXACT)


@pytest.mark.parametrize("how", [{}, {"opened": True}, {"special": True}])
def test_the_labels_are_those_of_the_answers_alone_and_cut_thoughts_are_counted(
    tmp_path: Path, without_thoughts: Bundle, how: dict[str, bool]
) -> None:
    thoughtful, _ = run(tmp_path / "whole", Thinking(0, **how), **EXACT)
    for count in ("factual", "hallucinated", "left_out"):
        expected = getattr(without_thoughts.manifest.training, count)
        assert getattr(thoughtful.manifest.training, count) == expected
    options = GENERATED | {"judge": "contains", "answer_probes": True}
    bundle, console = run(tmp_path / "cut", Thinking(4, **how), **options)
    why = bundle.evaluation()["data"]["left_out_because"]
    assert why["unfinished thought"] == 60  # every fourth of 240, by batches of 128
    assert sum(why.values()) == bundle.manifest.training.left_out
    assert "60 unfinished thought" in bundle.card()
    assert bundle.answer is None
    for words in ("60 unfinished thought", "begin with a thought"):
        assert words in console.text
    stored = read_lines(tmp_path / "cut/run/train/answers.jsonl")
    answers = {"", "It is Paris.", "It is Rome.", "I am not sure."}
    assert {line["answer"] for line in stored} == answers
    assert all(line["answer"] == "" for line in stored if not line["thought_ends"])


def test_too_many_thoughts_without_an_end_are_refused_with_the_cure(tmp_path: Path) -> None:
    options = GENERATED | {"judge": "contains"}
    every = "240 of 240 answers are thoughts that do not end.*--max-new-tokens"
    with pytest.raises(TrainingError, match=every):
        run(tmp_path, Thinking(1), **options)
    rows = [row | {"answers": ["Berlin"]} for row in planted_rows(240)]
    half = "factual.*120 of 240 answers are thoughts that do not end"
    with pytest.raises(TrainingError, match=half):
        run(tmp_path / "half", Thinking(2), rows, **options)


# --- the questions that a bundle carries: `hallutracer try`, the playground's list ---

# What the model writes -> verdict and answer where the chat template opens nothing, and where it
# ends in <think>.
WRITTEN = [
    ("Paris or Rome? </think>It is Rome.", ("wrong", "It is Rome."), ("wrong", "It is Rome.")),
    ("Rome? I am not sure. </think>Paris.", ("right", "Paris."), ("right", "Paris.")),
    ("<think>Paris</think>Rome", ("wrong", "Rome"), ("wrong", "Rome")),
    ("Paris or", ("right", "Paris or"), ("abstained", "Paris or")),
]


LONG = replace(SAMPLE, max_tokens=64)


def carrying(engine: ScriptedEngine, folder: Path) -> Bundle:
    return matching_bundle(engine, folder, "carrying", evaluation={"sample": LONG.document()})


@pytest.mark.parametrize("opening", ["", "<think>\n", "<reasoning>"])
def test_a_bundles_own_question_is_judged_without_a_thought_that_the_prompt_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opening: str
) -> None:
    def render_chat(engine: ScriptedEngine, *given: Any) -> list[int]:
        return [*plain(engine, *given), *opening.encode()]

    plain = ScriptedEngine.render_chat
    monkeypatch.setattr(ScriptedEngine, "render_chat", render_chat)
    for number, (written, alone, opened) in enumerate(WRITTEN):
        service = App(tmp_path / str(number), names=(), add=[carrying], policy="observe")
        with service.started() as app:
            app.engine.answer = written
            served = app.client.get("/v1/bundles/carrying/sample/0").json()
            asked = wait_for(ask(app.state.catalogue.scorers[0], LONG, 0))
            assert (served["verdict"], served["answer"]) == (asked.verdict, asked.answer)
            assert (asked.verdict, asked.answer) == (opened if opening else alone)
