"""The model's own answers on disk: what is read of them, that a killed run goes on to the same, and where none are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hallutracer_research.evaluation import prepare
from hallutracer_research.evaluation.methods import OURS, own_answers
from hallutracer_research.evaluation.methods.base import MethodInputs
from hallutracer_research.evaluation.methods.networks import features
from hallutracer_research.evaluation.options import OF_OWN_ANSWERS, EvaluateOptions, EvaluationSource
from hallutracer_research.evaluation.prepare import PreparedSet, SetRows
from hallutracer_research.evaluation.run import evaluate
from service.data.collection import Collection, Prompts
from service.data.options import JudgeOptions
from service.engines.base import Sampling, TokenIds, TracedAnswer
from service.engines.transformers.engine import TransformersEngine
from service.errors import EngineError, PromptTooLong, RunMismatch
from tests.engines import tiny
from tests.research.made import NOTHING
from tests.scripted_engine import ScriptedEngine

LENGTHS = [5, 9, 3, 12, 7, 4, 8, 6]
LABELLED = np.array([0, 2, 3, 4, 6, 7])  # the judge left two rows out
LONGEST, SAMPLES = 5, 3
METHODS = (OURS, *OF_OWN_ANSWERS)


class Killed:
    """An engine that is killed at its nth call for samples."""

    def __init__(self, engine: TransformersEngine, at: int) -> None:
        self._engine, self._left = engine, at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def sample(
        self, prompts: Sequence[TokenIds], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[TracedAnswer]]:
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
        return self._engine.sample(prompts, sampling, seeds)


@pytest.fixture(scope="module")
def engine() -> Any:
    model = tiny.model("llama")
    model.config.max_position_embeddings = 256  # a byte is a token here, and P(True) asks in a hundred
    return TransformersEngine(model, tiny.tokenizer())


def options(out: Path, **more: Any) -> EvaluateOptions:
    return EvaluateOptions(sources=(EvaluationSource("made", None),), out=out, methods=METHODS, samples=SAMPLES, **more)


def made(folder: Path, engine: Any, labels: Any = "generate") -> PreparedSet:
    """A set as ``prepare_set`` leaves it, with the model's greedy answers."""
    prompts = tiny.prompts(LENGTHS)
    kept = Prompts(np.concatenate(prompts).astype(np.int32), np.cumsum([0, *LENGTHS]))
    folder.mkdir(parents=True, exist_ok=True)
    said = engine.generate(prompts, Sampling(max_tokens=LONGEST))
    lines = [json.dumps({"row": row, "answer": one.text}) + "\n" for row, one in enumerate(said)]
    (folder / "answers.jsonl").write_text("".join(reversed(lines)))
    rows = SetRows("made", "", cast(Any, SimpleNamespace(digest="d")), labels, JudgeOptions("contains"), LONGEST,
                   (), ("a note",))  # fmt: skip
    inputs = MethodInputs(
        label=np.zeros(len(LABELLED), np.int64), group=np.arange(len(LABELLED)), heads=NOTHING, residual=NOTHING,
        first_token=np.zeros((len(LABELLED), 2)), prompt_tokens=np.array(LENGTHS)[LABELLED],
        text=tuple(f"what is {row}?" for row in LABELLED),
    )  # fmt: skip
    return PreparedSet(rows, inputs, {}, Collection(folder, kept, {}, np.zeros((len(LENGTHS), 2))), LABELLED, {})


def read(engine: Any, out: Path, prepared: PreparedSet) -> PreparedSet:
    return prepare.with_answers(engine, prepared, options(out), "text")


def test_each_reading_is_that_of_its_own_row(tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "AT_ONCE", 4)
    prepared = made(tmp_path / "readouts", engine)
    found = read(engine, tmp_path / "out", prepared)
    assert found.rows.notes == ("a note",)  # every answer is the judged one
    readings = found.inputs.answers
    sampling = replace(prepare.SAMPLING, max_tokens=LONGEST)
    for place, row in enumerate(LABELLED.tolist()):
        prompt, question = tiny.prompts(LENGTHS)[row], f"what is {row}?"
        (greedy,) = engine.sample([prompt], Sampling(max_tokens=LONGEST), [[0]])[0]
        assert readings.log_prob[place] == pytest.approx(greedy.log_prob.mean(), abs=1e-5)
        np.testing.assert_allclose(readings.states[place], features(greedy), rtol=1e-3, atol=1e-4)
        ask = engine.tokenize(own_answers.asked(question, greedy.completion.text))
        assert readings.asked[place] == len(ask)
        assert readings.true[place] == pytest.approx(own_answers.log_odds(engine, [ask])[0], abs=1e-4)
        drawn = engine.sample([prompt], sampling, [prepare.seeds_of(0, row, SAMPLES)])[0]
        assert len({one.completion.token_ids for one in drawn}) > 1
        groups = own_answers.clusters(question, [one.completion.text for one in drawn])
        log_prob = np.array([one.log_prob.mean() for one in drawn])
        assert readings.entropy[place] == pytest.approx(own_answers.semantic_entropy(groups))
        assert readings.entropy_weighted[place] == pytest.approx(
            own_answers.semantic_entropy(groups, log_prob), abs=1e-5
        )
        middle = np.stack([one.last[1] for one in drawn])  # of three layers
        assert readings.eigenscore[place] == pytest.approx(own_answers.eigen_score(middle), abs=1e-3)


def files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_killed_run_goes_on_to_the_same_files(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(prepare, "AT_ONCE", 4)
    prepared = made(tmp_path / "readouts", engine)
    whole = read(engine, tmp_path / "whole", prepared).inputs.answers
    with pytest.raises(KeyboardInterrupt):
        read(Killed(engine, at), tmp_path / "killed", prepared)
    before = {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in files(tmp_path / "killed")}
    again = read(engine, tmp_path / "killed", prepared).inputs.answers
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    assert all((tmp_path / "killed" / name).stat().st_mtime_ns == time for name, time in before.items())
    for name in ("log_prob", "states", "true", "entropy", "entropy_weighted", "eigenscore"):
        assert getattr(again, name).tobytes() == getattr(whole, name).tobytes()


def test_seeds_differ_by_row_and_number_and_more_samples_keep_the_first() -> None:
    assert len({seed for row in range(50) for seed in prepare.seeds_of(0, row, 10)}) == 500
    assert prepare.seeds_of(0, 7, 10)[:4] == prepare.seeds_of(0, 7, 4)
    assert prepare.seeds_of(1, 7, 4) != prepare.seeds_of(0, 7, 4)


def test_answers_that_are_not_the_judged_ones_are_counted(tmp_path: Path, engine: Any) -> None:
    prepared = made(tmp_path / "readouts", engine)
    path = tmp_path / "readouts" / "answers.jsonl"
    path.write_text(path.read_text().replace('"row": 3, "answer": "', '"row": 3, "answer": "No'))
    notes = read(engine, tmp_path / "out", prepared).rows.notes
    assert notes[1:] == ("1 of 6 answers, decoded again for their scores, differ from the judged ones",)


def test_labels_of_the_set_s_own_leave_nothing_to_read(tmp_path: Path, engine: Any) -> None:
    prepared = made(tmp_path / "readouts", engine, labels="given")
    chosen = options(tmp_path / "out")
    assert prepare.methods_of(prepared.rows, chosen) == (OURS,)
    note = prepare.left_out(prepared.rows, chosen)
    assert note.startswith("left out: sep, ")
    assert note.endswith("the labels are the set's own, not of the model's answers")
    assert prepare.left_out(replace(prepared.rows, labels="generate"), chosen) == ""
    assert read(ScriptedEngine(), tmp_path / "out", prepared).inputs.answers.log_prob is None
    assert not list((tmp_path / "out").rglob("*.npz"))


def test_other_rows_or_answers_in_the_same_folder_are_refused(tmp_path: Path, engine: Any) -> None:
    prepared = made(tmp_path / "readouts", engine)
    read(engine, tmp_path / "out", prepared)
    with pytest.raises(RunMismatch, match="max_new_tokens"):
        read(engine, tmp_path / "out", replace(prepared, rows=replace(prepared.rows, max_new_tokens=6)))
    fewer = replace(prepared, index=LABELLED[:4], inputs=prepared.inputs)
    with pytest.raises(RunMismatch, match="rows"):
        prepare.with_answers(engine, fewer, replace(options(tmp_path / "out"), methods=(OURS, "eigenscore")), "text")


def test_a_question_of_p_true_that_does_not_fit_is_said_before_any_answer(tmp_path: Path, engine: Any) -> None:
    prepared = made(tmp_path / "readouts", engine)
    long = replace(prepared.inputs, text=(*("why?",) * 4, "why " * 60, "why?"))
    with pytest.raises(PromptTooLong):
        read(engine, tmp_path / "out", replace(prepared, inputs=long))
    assert not list((tmp_path / "out").rglob("*.npz"))


@pytest.mark.parametrize("method", OF_OWN_ANSWERS)
def test_an_engine_that_traces_nothing_is_refused_before_the_first_forward_pass(tmp_path: Path, method: str) -> None:
    rows = [{"id": str(n), "prompt": f"Is {n} odd?", "answers": ["so"]} for n in range(60)]
    chosen = replace(
        options(tmp_path / "out"), methods=(OURS, method), sources=(EvaluationSource("made", None, rows=lambda: rows),)
    )
    engine = ScriptedEngine()
    with pytest.raises(EngineError):
        evaluate(chosen, lambda: cast(Any, engine), console=cast(Any, SimpleNamespace(print=lambda *_: None)))
    assert engine.counters.prefills == 0
