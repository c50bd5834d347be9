"""A bundle of some of the rows, to look at while a long run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from probes_store.store import Store
from service.data.training_rows import read_dataset
from service.trainer import training_set
from service.trainer.options import TrainOptions
from service.trainer.training_set import first_rows, has_first_bundle
from tests.fitting.planted import PlantedEngine, planted_rows, write_rows
from tests.kit.rows import Options
from tests.trainer.made import ONE, run

LONG: Options = ONE | {"labels": "generate", "batch_rows": 32}


@pytest.fixture(autouse=True, scope="module")
def few_rows_are_many() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training_set, "FIRST_ROWS", 80)
        patched.setattr(training_set, "LEAST_FOR_FIRST", 240)
        yield


@pytest.fixture(scope="module")
def whole(
    few_rows_are_many: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """The folder of a run, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, **LONG)[1].lines


def digests(folder: Path) -> list[str]:
    """Of the first bundle and of the whole one, and there is no third."""
    store = Store(folder / "store")
    assert [summary.reference for summary in store.list()] == ["planted:1", "planted:2"]
    return [store.load(f"planted:{version}").manifest.digest for version in (1, 2)]


def first_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if "look at it while the run goes on" in line]


def test_whole_groups_are_drawn(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", planted_rows(300, per_group=3))
    dataset = read_dataset(path, "generate", folds=None)
    positions = first_rows(dataset, 0)
    assert 70 < len(positions) <= 80
    inside, outside = set(positions), set(range(300)) - set(positions)
    assert {dataset.groups[row] for row in inside}.isdisjoint(
        dataset.groups[row] for row in outside
    )
    assert positions == first_rows(dataset, 0) != first_rows(dataset, 1)


def test_only_long_runs_whose_answers_are_generated_have_one() -> None:
    generated = TrainOptions(labels="generate")
    assert [has_first_bundle(generated, rows) for rows in (239, 240)] == [False, True]
    assert not has_first_bundle(TrainOptions(labels="given"), 240)


def test_a_first_bundle_is_published_and_replaced(whole: tuple[Path, list[str]]) -> None:
    folder, lines = whole
    store = Store(folder / "store")
    counts = [store.load(f"planted:{version}").manifest.training.rows for version in (1, 2)]
    assert counts == [80, 240]
    [line] = first_lines(lines)
    assert line.startswith("published planted:1, of 80 of the 240 rows")
    assert lines.index(line) < lines.index("published planted:2")
    again, told = run(folder, **LONG)
    assert (again.reference, first_lines(told.lines)) == ("planted:2", [])


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
def test_a_run_that_is_resumed_publishes_it_once_and_gives_the_same_bundles(
    tmp_path: Path, whole: tuple[Path, list[str]], stop: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, PlantedEngine(stop=stop), **LONG)
    engine = PlantedEngine()
    _, console = run(tmp_path, engine, **LONG)
    assert stop + engine.extracts == 3 + 5, "each row was read once"
    assert len(first_lines(console.lines)) == (stop < 3)
    assert digests(tmp_path) == digests(whole[0])


def test_rows_without_a_signal_have_no_first_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_set, "FIRST_ROWS", 4)
    bundle, console = run(tmp_path, **LONG)
    assert bundle.reference == "planted:1"
    assert console.line("no first bundle of 4 rows: ")
    assert first_lines(console.lines) == []


def test_a_run_that_began_without_one_goes_on_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(training_set, "LEAST_FOR_FIRST", 1000)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, PlantedEngine(stop=2), **LONG)
    bundle, console = run(tmp_path, **LONG)
    assert (bundle.reference, first_lines(console.lines)) == ("planted:1", [])
