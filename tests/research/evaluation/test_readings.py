"""The model's own answers on disk: what is read of them, that a killed run goes on to the same, and
where none are."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hallutracer_research.evaluation import prepare, readings
from hallutracer_research.evaluation.methods import METHODS, OURS, own_answers
from hallutracer_research.evaluation.methods.base import MethodInputs
from hallutracer_research.evaluation.methods.networks import features
from hallutracer_research.evaluation.options import (
    OF_OWN_ANSWERS,
    EvaluateOptions,
    EvaluationSource,
)
from hallutracer_research.evaluation.pooling import PoolingEngine
from hallutracer_research.evaluation.prepare import PreparedSet, SetRows
from hallutracer_research.evaluation.run import evaluate
from service.data.collection import Collection, Prompts
from service.data.options import JudgeOptions
from service.engines.base import Sampling
from service.engines.transformers.engine import TransformersEngine
from service.errors import EngineError, PromptTooLong, RunMismatch
from tests.engines import tiny
from tests.research.made import NOTHING
from tests.scripted_engine import ScriptedEngine

LENGTHS = [5, 9, 3, 12, 7, 4, 8, 6]
LABELLED = np.array([0, 2, 3, 4, 6, 7])  # the judge left two rows out
LONGEST, SAMPLES = 5, 3


def killed_at(call: int, sample: Callable[..., Any]) -> Callable[..., Any]:
    """This function, killed at its nth call."""
    calls = itertools.count(1)

    def sample_or_die(*arguments: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return sample(*arguments)

    return sample_or_die


@pytest.fixture(scope="module")
def engine() -> Any:
    model = tiny.model("llama")
    model.config.max_position_embeddings = (
        1200  # a byte is a token here, and P(True) asks in a hundred, behind a thousand
    )
    return PoolingEngine(TransformersEngine(model, tiny.tokenizer()))


@pytest.fixture
def made(tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> PreparedSet:
    """A set as ``prepare_set`` leaves it, with the model's greedy answers."""
    monkeypatch.setattr(readings, "AT_ONCE", 4)
    prompts = tiny.prompts(LENGTHS)
    said = engine.generate(prompts, Sampling(max_tokens=LONGEST))
    first = np.array(
        [[one.log_max_prob, one.entropy] for one in engine.extract(prompts, ()).first_tokens]
    )
    lines = [json.dumps({"row": row, "answer": one.text}) + "\n" for row, one in enumerate(said)]
    (tmp_path / "answers.jsonl").write_text("".join(reversed(lines)))
    asking = [SimpleNamespace(question="", answers=("[a-mA-M0-9]",)) for _ in LENGTHS]
    dataset, judge = SimpleNamespace(digest="d", rows=asking), JudgeOptions("regex")
    rows = SetRows("made", "", dataset, "generate", judge, LONGEST, (), ("a note",))
    inputs = MethodInputs(
        label=np.zeros(len(LABELLED), np.int64),
        group=np.arange(len(LABELLED)),
        heads=NOTHING,
        residual=NOTHING,
        first_token=first[LABELLED],
        prompt_tokens=np.array(LENGTHS)[LABELLED],
        text=tuple(f"what is {row}?" for row in LABELLED),
    )
    kept = Prompts(np.concatenate(prompts).astype(np.int32), np.cumsum([0, *LENGTHS]))
    collection = Collection(tmp_path, kept, {}, np.zeros((len(LENGTHS), 2)))
    return PreparedSet(rows, inputs, {}, collection, LABELLED, {})


def options(out: Path, *methods: str, **more: Any) -> EvaluateOptions:
    source = more.pop("source", EvaluationSource("made", None))
    return EvaluateOptions(
        sources=(source,),
        out=out,
        methods=(OURS, *(methods or OF_OWN_ANSWERS)),
        samples=SAMPLES,
        **more,
    )


def read(engine: Any, out: Path, prepared: PreparedSet, *methods: str) -> PreparedSet:
    return readings.with_readings(engine, prepared, options(out, *methods), "text")


def test_each_reading_is_that_of_its_own_row(
    tmp_path: Path, engine: Any, made: PreparedSet
) -> None:
    found = read(engine, tmp_path / "out", made)
    assert found.rows.notes == ("a note",)  # every answer is the judged one
    answers = found.inputs.answers
    sampling = replace(readings.SAMPLING, max_tokens=LONGEST)
    for place, row in enumerate(LABELLED.tolist()):
        prompt, question = tiny.prompts(LENGTHS)[row], f"what is {row}?"
        (greedy,) = engine.sample([prompt], Sampling(max_tokens=LONGEST), [[0]])[0]
        np.testing.assert_allclose(answers.states[place], features(greedy), rtol=1e-3, atol=1e-4)
        ask, behind = (
            engine.tokenize(own_answers.asked(question, greedy.completion.text, examples=examples))
            for examples in (False, True)
        )
        begun = own_answers.before_content(engine, question, greedy.completion.text)
        [first] = engine.extract([[*prompt, *begun]], ()).first_tokens
        np.testing.assert_allclose(
            answers.content[place], [first.log_max_prob, first.entropy], rtol=1e-4, atol=1e-4
        )
        drawn = engine.sample([prompt], sampling, [readings.seeds_of(0, row, SAMPLES)])[0]
        assert len({one.completion.token_ids for one in drawn}) > 1
        groups = own_answers.clusters(question, [one.completion.text for one in drawn])
        log_prob = np.array([one.log_prob.mean() for one in drawn])
        middle = np.stack([one.last[1] for one in drawn])  # of three layers
        for name, expected, allowed in (
            ("log_prob", greedy.log_prob.mean(), 1e-5),
            ("true_tokens", len(ask), 0),
            ("true", own_answers.log_odds(engine, [ask])[0], 1e-4),
            ("true_tokens_examples", len(behind), 0),
            ("true_examples", own_answers.log_odds(engine, [behind])[0], 1e-4),
            ("decoded", len(begun), 0),
            ("entropy", own_answers.semantic_entropy(groups), 1e-6),
            ("entropy_weighted", own_answers.semantic_entropy(groups, log_prob), 1e-5),
            ("eigenscore", own_answers.eigen_score(middle), 1e-3),
            (
                "right",
                np.mean([bool(re.search("[a-mA-M0-9]", one.completion.text)) for one in drawn]),
                1e-9,
            ),
        ):
            assert getattr(answers, name)[place] == pytest.approx(expected, abs=allowed), name
    assert len(set(answers.right.tolist())) > 1


def files(out: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def test_a_killed_run_goes_on_to_the_same_files(
    tmp_path: Path, engine: Any, made: PreparedSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read(engine, tmp_path / "whole", made).inputs.answers
    for call in (1, 2, 3, 5):
        killed = tmp_path / f"killed at {call}"
        with monkeypatch.context() as patch:
            patch.setattr(engine, "sample", killed_at(call, engine.sample), raising=False)
            with pytest.raises(KeyboardInterrupt):
                read(engine, killed, made)
        before = {name: (killed / name).stat().st_mtime_ns for name in files(killed)}
        again = read(engine, killed, made).inputs.answers
        assert files(killed) == files(tmp_path / "whole")
        assert all((killed / name).stat().st_mtime_ns == time for name, time in before.items())
        for name in ("log_prob", "states", "true", "entropy", "entropy_weighted", "eigenscore"):
            assert getattr(again, name).tobytes() == getattr(whole, name).tobytes()


def test_seeds_differ_by_row_and_number_and_more_samples_keep_the_first() -> None:
    assert len({seed for row in range(50) for seed in readings.seeds_of(0, row, 10)}) == 500
    assert (
        readings.seeds_of(0, 7, 10)[:4] == readings.seeds_of(0, 7, 4) != readings.seeds_of(1, 7, 4)
    )


def test_the_first_word_of_content_is_neither_a_stop_word_nor_the_question_s(engine: Any) -> None:
    asked = "What is the capital of France?"
    for answer, before in (
        ("The capital of France is Paris, of course.", "The capital of France is "),
        ("Paris", ""),
        ("It is the", ""),
        ('"The capital"', ""),
        ("", ""),
        ("I think that it's Lyon.", "I "),
        ("the city-state", "the "),
    ):
        ids = own_answers.before_content(engine, asked, answer)
        assert engine.detokenize(ids) == before, answer


def test_answers_that_are_not_the_judged_ones_are_counted(
    tmp_path: Path, engine: Any, made: PreparedSet
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(path.read_text().replace('"row": 3, "answer": "', '"row": 3, "answer": "No'))
    (note,) = read(engine, tmp_path / "out", made).rows.notes[1:]
    assert note.startswith("1 of 6 answers")


def test_labels_of_the_set_s_own_leave_nothing_to_read(tmp_path: Path, made: PreparedSet) -> None:
    given, chosen = replace(made.rows, labels="given"), options(tmp_path / "out")
    assert prepare.methods_of(given, chosen) == (OURS,)
    assert prepare.left_out(given, chosen).startswith("left out: attention-pooled-soft, sep, ")
    assert prepare.left_out(made.rows, chosen) == ""
    assert (
        read(ScriptedEngine(), tmp_path / "out", replace(made, rows=given)).inputs.answers.log_prob
        is None
    )
    assert not list((tmp_path / "out").rglob("*.npz"))


def test_other_rows_or_answers_in_the_same_folder_are_refused(
    tmp_path: Path, engine: Any, made: PreparedSet
) -> None:
    read(engine, tmp_path / "out", made, "eigenscore")
    for other, said in (
        (
            replace(made, rows=replace(made.rows, max_new_tokens=6)),
            "max_new_tokens = 5, this run has 6",
        ),
        (replace(made, index=LABELLED[:4]), "begun with rows = "),
    ):
        with pytest.raises(RunMismatch, match=said):
            read(engine, tmp_path / "out", other, "eigenscore")


def test_a_question_of_p_true_that_does_not_fit_is_said_before_any_answer(
    tmp_path: Path, engine: Any, made: PreparedSet
) -> None:
    long = replace(made.inputs, text=(*("why?",) * 4, "why " * 300, "why?"))
    with pytest.raises(PromptTooLong):
        read(engine, tmp_path / "out", replace(made, inputs=long), "p-true", "perplexity")
    assert not list((tmp_path / "out").rglob("*.npz"))


@pytest.mark.parametrize(
    "method",
    ["attention-pooled", *(name for name in OF_OWN_ANSWERS if METHODS[name].reads != "content")],
)
def test_an_engine_that_traces_nothing_is_refused_before_the_first_forward_pass(
    tmp_path: Path, method: str
) -> None:
    rows = [{"id": str(n), "prompt": f"Is {n} odd?", "answers": ["so"]} for n in range(60)]
    chosen = options(
        tmp_path / "out", method, source=EvaluationSource("made", None, rows=lambda: rows)
    )
    engine = ScriptedEngine()
    with pytest.raises(EngineError):
        evaluate(
            chosen,
            lambda: engine,
            console=SimpleNamespace(print=lambda *_: None),
        )
    assert engine.counters.prefills == 0


@pytest.mark.parametrize(
    ("prompt", "right"),
    [("<|user|>Where?<|assistant|><think>\n", 0.5), ("<|user|>Where?<|assistant|>", 2 / 3)],
)
def test_a_sample_is_judged_without_the_thought_that_its_prompt_opened(
    prompt: str, right: float
) -> None:
    engine = SimpleNamespace(spell=lambda ids: prompt)
    row = SimpleNamespace(question="Where?", answers=("Paris",))
    rows = SimpleNamespace(judge=JudgeOptions("contains"), dataset=SimpleNamespace(rows=[row]))
    prompts = SimpleNamespace(prompts=SimpleNamespace(of=lambda number: [1, 2]))
    prepared = SimpleNamespace(rows=rows, index=np.array([0]), prompts=prompts)
    reader = readings._Reader(engine, prepared, None, "chat")
    said = np.array([["Paris, or Lyon", "Lyon?</think>Paris", "Paris?</think>Lyon"]])
    assert reader._share_right(said) == pytest.approx([right])
