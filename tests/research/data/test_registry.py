"""Every set by name: found, counted, described, and accepted by the trainer's own check."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import get_args

import pytest

from hallutracer_research.cli.data import SetName
from hallutracer_research.data.registry import SETS, find_path, read_set
from service.cli.main import main
from service.data.judges import answer_problems
from service.data.options import JudgeName, JudgeOptions
from service.data.training_rows import check_disjoint, read_dataset
from service.errors import DataError
from service.trainer.options import TrainOptions
from tests.research.data.samples import WRITERS


def test_the_published_sizes() -> None:
    assert {name: info.rows for name, info in SETS.items()} == {
        "truthfulqa": 817, "truthfulqa-reference": 6_204, "truefalse": 6_330, "halueval2": 3_793, "helm": 3_197,
        "bfcl": 2_853, "bfcl-answerable": 1_998, "opentriviaqa": 20_550, "opentriviaqa-choice": 20_550,
        "nq-open": 5_410,
    }  # fmt: skip
    assert {info.kinds for info in SETS.values()} == {38, 7, 5, 6, 10, 11, 2}


@pytest.mark.parametrize("name", SETS)
def test_every_set_says_what_it_is(name: str) -> None:
    info = SETS[name]
    assert info.name == name
    assert all((info.title, info.group, info.hallucinated, info.onset, info.caveat, info.licence, info.source))
    assert (info.judge is not None) == (info.labels == "generate")
    assert info.judge is None or info.judge in get_args(JudgeName)
    if info.abstain_pattern is not None:
        TrainOptions(name="x", run_dir=Path("x"), abstain_pattern=info.abstain_pattern).check()


@pytest.mark.parametrize("name", SETS)
def test_the_trainer_takes_what_a_reader_gives(tmp_path: Path, name: str) -> None:
    info = SETS[name]
    (tmp_path / "set").mkdir()
    rows, _ = read_set(name, WRITERS[name](tmp_path / "set"), allow_other_counts=True)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    dataset = read_dataset(path, info.labels, folds=0)
    assert len(dataset) == len(rows) > 0
    assert all(row.strata["kind"] for row in dataset.rows)
    if info.judge is not None:
        options = JudgeOptions(info.judge)
        assert [answer_problems(options, row.answers) for row in dataset.rows] == [[]] * len(rows)


def test_a_question_of_truthfulqa_is_not_held_out_of_its_other_reading(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    WRITERS["truthfulqa"](tmp_path / "set")
    datasets = []
    for name in ("truthfulqa", "truthfulqa-reference"):
        rows, _ = read_set(name, tmp_path / "set", allow_other_counts=True)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        datasets.append(read_dataset(tmp_path / name, SETS[name].labels, folds=0))
    with pytest.raises(DataError, match="its group"):
        check_disjoint(*datasets)


@pytest.mark.parametrize("name", SETS)
def test_another_number_of_rows_is_another_benchmark(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path)
    with pytest.raises(DataError, match=f"{SETS[name].rows:,}"):
        read_set(name, tmp_path)


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_found_in_the_repository_that_was_downloaded(tmp_path: Path, name: str) -> None:
    assert find_path(name, tmp_path) == tmp_path  # nothing there: the reader names what is missing
    inside = tmp_path / SETS[name].folders[0]
    inside.mkdir(parents=True)
    WRITERS[name](inside)
    assert find_path(name, tmp_path) == inside
    assert read_set(name, tmp_path, allow_other_counts=True) == read_set(name, inside, allow_other_counts=True)
    shutil.rmtree(inside)
    with pytest.raises(DataError, match="is missing"):
        read_set(name, tmp_path, allow_other_counts=True)


def test_wrong_names_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown set.*truthfulqa"):
        read_set("nothing", tmp_path)
    with pytest.raises(DataError, match="not a folder.*github.com"):
        read_set("helm", tmp_path / "nowhere")


def test_the_command_knows_every_set() -> None:
    assert get_args(SetName) == (*SETS,)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["hallutracer", "data", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_convert_prints_rows_and_tells_the_rest_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    WRITERS["bfcl"](tmp_path)
    assert run(monkeypatch, "convert", "bfcl", str(tmp_path)) == 1
    assert "2,853" in capsys.readouterr().err
    assert run(monkeypatch, "convert", "bfcl", str(tmp_path), "--allow-other-counts") == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["kind"] for line in printed.out.splitlines()][:2] == ["simple_python"] * 2
    assert "20 rows of BFCL v4" in printed.err
    assert "read 21, multi_turn 1, repeated 0" in printed.err
    assert "the paper's Agentic set cannot be identified" in printed.err
    assert "--labels generate --judge calls --max-new-tokens 384 --abstain-pattern '(?!)'" in printed.err


def test_list_describes_every_set(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["rows"]) for row in rows] == [(info.name, info.rows) for info in SETS.values()]
    assert run(monkeypatch, "list") == 0
    table = capsys.readouterr().out
    assert all(f"\n{name} " in table for name in SETS)
    assert "6,330" in table
