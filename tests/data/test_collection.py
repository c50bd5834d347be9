"""The run folder: resumable at any byte, refused to other runs, small in memory; with and without
other poolings."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.data import collection as collecting
from service.data.collection import Collection, Earlier, batches, collect
from service.data.run_folder import AppendLog, locked
from service.data.training_rows import Dataset
from service.engines.base import Extraction, TokenIds
from service.engines.checks import beyond_onset
from service.errors import DataError, EngineError, NonFiniteReadout, RunMismatch, TrainingError
from service.readout import Pooling, Site
from tests.fitting.planted import GEOMETRY, PlantedEngine, dataset_of, planted_rows
from tests.kit.chats import turns
from tests.kit.rows import Options, Rows, lines_named, read_lines
from tests.scripted_engine import ScriptedEngine
from tests.trainer.made import contents, killed

BOTH = (Site.ATTENTION_HEAD, Site.RESIDUAL_STREAM)
POOLINGS = (Pooling.MAX, Pooling.LAST_1, Pooling.CONTENT_MEAN)
KEYS = [(site, pooling) for site in BOTH for pooling in (Pooling.MAX, Pooling.CONTENT_MEAN)]


class PoolingEngine(PlantedEngine):
    """Invents pooled rows too: those of the prompt and a token that stands for the pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.nan_at: tuple[Site, Pooling] | None = None

    def pooled(self, prompt: TokenIds, site: Site, pooling: Pooling) -> Any:
        rows = self.activations([*prompt, list(Pooling).index(pooling)], site)
        return rows * np.nan if (site, pooling) == self.nan_at else rows

    def extract(
        self,
        prompts: Any,
        sites: Any,
        poolings: Sequence[Pooling] = (Pooling.LAST_1,),
        sampling: Any = None,
    ) -> Extraction:
        if not prompts:
            return Extraction({}, ())
        pooled = {
            (site, pooling): np.stack([self.pooled(prompt, site, pooling) for prompt in prompts])
            for site, pooling in product(sites, beyond_onset(poolings))
        }
        return replace(super().extract(prompts, sites, sampling=sampling), pooled=pooled)


def at_call(number: int) -> Callable[..., bool]:
    """Whether a collection has enough: at its call of this number."""
    calls = count(1)
    return lambda rows, lengths: next(calls) == number


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return dataset_of(tmp_path, planted_rows(50), "given")


def run(dataset: Dataset, folder: Path, engine: Any = None, **changes: Any) -> Collection:
    options: Options = {
        "sites": BOTH,
        "prompt_format": "chat",
        "batch_rows": 8,
        "max_new_tokens": 4,
    } | changes
    return collect(engine or PlantedEngine(), dataset, folder, **options)


def pooled(dataset: Dataset, folder: Path, engine: Any = None, **changes: Any) -> Collection:
    """A collection that also reads other positions than t*, and generates nothing."""
    options = {"poolings": POOLINGS, "max_new_tokens": None} | changes
    return run(dataset, folder, engine or PoolingEngine(), **options)


def stored(file: Any, row: int) -> Any:
    """What lies on disk of a row: [m, width]."""
    return np.stack([file.layer(layer)[row] for layer in range(file.shape[0])])


def test_the_plan_is_sorted_by_length_and_covers_every_row_once() -> None:
    plan = batches(np.array([3, 9, 3, 1, 9]), 2)
    assert [batch.tolist() for batch in plan] == [[1, 4], [0, 2], [3]]


def check_answers(collection: Collection, dataset: Dataset, count: int = 50) -> None:
    """Each of the first ``count`` rows has one answer, under its id."""
    answers = read_lines(collection.folder / "answers.jsonl")
    assert sorted(answer["row"] for answer in answers) == list(range(count))
    assert all(dataset.rows[answer["row"]].id == answer["id"] for answer in answers)


def test_rows_are_the_engines_own_in_the_order_of_the_data(
    dataset: Dataset, tmp_path: Path
) -> None:
    """Each site and pooling has a file of its own."""
    engine, rows = PoolingEngine(), (0, 17, 49)
    collection = pooled(dataset, tmp_path / "run", engine, max_new_tokens=4)
    for site, file in collection.rows.items():
        assert file.shape == (GEOMETRY.num_layers, 50, GEOMETRY.width(site))
        for row in rows:
            expected = engine.activations(collection.prompts.of(row), site)
            np.testing.assert_array_equal(stored(file, row), expected)
    assert (set(collection.rows), set(collection.pooled)) == (set(BOTH), set(KEYS))
    for (site, pooling), file in collection.pooled.items():
        assert file.path == tmp_path / "run" / f"rows-{site}-{pooling}.f32"
        assert file.path.stat().st_size == file.nbytes == collection.rows[site].nbytes
        for row in rows:
            expected = engine.pooled(collection.prompts.of(row), site, pooling)
            np.testing.assert_array_equal(stored(file, row), expected)
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())
    assert recorded["poolings"] == ["content_mean", "max"]
    first = engine.first_token(collection.prompts.of(17))
    assert collection.first_token[17].tolist() == [first.log_max_prob, first.entropy]
    check_answers(collection, dataset)


class Lengths(PlantedEngine):
    """Notes which prompts may get answers of which length."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[tuple[int, ...], int] = {}

    def extract(
        self, prompts: Any, sites: Any, poolings: Any = (), sampling: Any = None, **read: Any
    ) -> Extraction:
        length = 0 if sampling is None else sampling.max_tokens
        self.lengths.update((tuple(prompt), length) for prompt in prompts)
        return super().extract(prompts, sites, poolings, sampling, **read)


@pytest.mark.parametrize("stop", [None, 1, 3, 5])
def test_a_row_may_need_a_longer_answer_than_the_others(tmp_path: Path, stop: int | None) -> None:
    rows: Rows = [
        {"prompt": row["prompt"], "answers": ["Paris"], "answer_tokens": (0, 9, 2)[number % 3]}
        for number, row in enumerate(planted_rows(50))
    ]
    rows += [{"prompt": f"Write poem {number}.", "applies": False} for number in range(9)]
    dataset = dataset_of(tmp_path, rows)
    engine = Lengths()
    if stop is not None:
        run(dataset, tmp_path / "run", engine, enough=at_call(stop))
    collection = run(dataset, tmp_path / "run", engine)
    for number, row in enumerate(rows):
        length = max(4, row["answer_tokens"]) if "answers" in row else 0
        assert engine.lengths[tuple(collection.prompts.of(number))] == length
    check_answers(collection, dataset)


@pytest.mark.parametrize("finished", [0, 1, 4, 7])
def test_a_torn_folder_is_completed_to_the_same_bytes(
    dataset: Dataset, tmp_path: Path, finished: int
) -> None:
    whole = contents(pooled(dataset, tmp_path / "whole", max_new_tokens=4).folder)
    torn = shutil.copytree(tmp_path / "whole", tmp_path / "torn")
    lines = whole["journal.jsonl"].splitlines(keepends=True)
    (torn / "journal.jsonl").write_bytes(b"".join(lines[:finished]) + lines[finished - 1][:9])
    answers = whole["answers.jsonl"].splitlines(keepends=True)
    (torn / "answers.jsonl").write_bytes(b"".join(answers[: 8 * finished + 5]) + b'{"torn')
    plan = batches(np.diff(np.fromfile(torn / "offsets.i64", "<i8")), 8)
    # Overwrite everything that the journal does not vouch for.
    for file in torn.glob("rows-*.f32"):
        on_disk = np.memmap(file, "<f4", "r+")
        rows = on_disk.reshape(GEOMETRY.num_layers, 50, -1)
        rows[:, np.concatenate([*plan[finished:], np.zeros(0, int)])] = np.nan
        on_disk.flush()
    engine = PoolingEngine()
    pooled(dataset, torn, engine, max_new_tokens=4)
    assert contents(torn) == whole
    assert engine.extracts == engine.generates == len(plan) - finished


POOLED: Options = {"engine": PoolingEngine(), "poolings": POOLINGS}


@pytest.mark.parametrize(
    ("before", "change", "field"),
    [
        ({}, {"batch_rows": 4}, "batch_rows"),
        ({}, {"prompt_format": "text"}, "prompt_format"),
        ({}, {"max_new_tokens": None}, "max_new_tokens"),
        ({}, {"sites": (Site.ATTENTION_HEAD,)}, "sites"),
        (
            {"prompt_format": "text"},
            {"prompt_format": "text", "engine": PlantedEngine(chat=False)},
            "model.chat_template",
        ),
        ({}, {"rows": planted_rows(50, seed=1)}, "data"),
        *(
            (POOLED, POOLED | {"poolings": poolings}, "poolings")
            for poolings in (
                (),
                (Pooling.MAX,),
                (Pooling.MAX, Pooling.CONTENT_MEAN, Pooling.MEAN),
            )
        ),
    ],
)
def test_another_run_is_refused_by_field(
    dataset: Dataset, tmp_path: Path, before: Options, change: Options, field: str
) -> None:
    run(dataset, tmp_path / "run", **before)
    if rows := change.pop("rows", None):
        dataset = dataset_of(tmp_path, rows, "given")
    with pytest.raises(RunMismatch) as caught:
        run(dataset, tmp_path / "run", **change)
    assert caught.value.param == field


def test_a_finished_run_asks_the_engine_for_nothing(dataset: Dataset, tmp_path: Path) -> None:
    run(dataset, tmp_path / "run")
    pooled(dataset, tmp_path / "pooled")
    engine, pooling = PlantedEngine(model="elsewhere/scripted"), PoolingEngine()
    run(dataset, tmp_path / "run", engine)
    again = [Pooling.CONTENT_MEAN, Pooling.MAX, Pooling.MAX]
    pooled(dataset, tmp_path / "pooled", pooling, poolings=again)
    assert engine.extracts == engine.generates == pooling.extracts == 0


def doubled(lines: list[bytes]) -> list[bytes]:
    return lines[:2] + lines[:2] + lines[2:3]


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("answers.jsonl", lambda lines: lines[:-1], r"answers\.jsonl lacks answers"),
        ("journal.jsonl", doubled, "not the journal of one run"),  # of two writers
        ("first_token.f64", None, "first_token"),
        ("rows-residual_stream-max.f32", None, "rows-residual_stream-max"),
    ],
)
def test_strange_files(
    dataset: Dataset, tmp_path: Path, name: str, change: Any, problem: str
) -> None:
    file = pooled(dataset, tmp_path / "run", max_new_tokens=4).folder / name
    lines = file.read_bytes().splitlines(keepends=True)
    file.unlink()
    if change is not None:
        file.write_bytes(b"".join(change(lines)))
    with pytest.raises(RunMismatch, match=problem):
        pooled(dataset, tmp_path / "run", max_new_tokens=4)


def test_a_folder_of_something_else_is_left_alone(dataset: Dataset, tmp_path: Path) -> None:
    (folder := tmp_path / "thesis").mkdir()
    (folder / "chapter.tex").write_text("x")
    with pytest.raises(RunMismatch, match="chapter"):
        run(dataset, folder)


def test_a_small_disk(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=900)
    monkeypatch.setattr(collecting.shutil, "disk_usage", lambda _: usage)
    engine, problem = PlantedEngine(), r"needs \d+\.\d KiB more and the disk has 0\.9 KiB free"
    with pytest.raises(TrainingError, match=problem):
        run(dataset, tmp_path / "run", engine)
    assert engine.extracts == 0


def test_prompts_the_model_cannot_take_are_named_together(tmp_path: Path) -> None:
    rows: Rows = [{"prompt": f"Question {number}?", "answers": ["I"]} for number in range(10)]
    rows[2]["prompt"] = rows[8]["prompt"] = "x" * 600
    rows[4] = {"messages": turns("y"), "answers": ["I"]}
    rows[6]["answer_tokens"] = 5000
    engine = PlantedEngine(chat=False)
    with pytest.raises(DataError) as caught:
        run(dataset_of(tmp_path, rows), tmp_path / "run", engine, prompt_format="text")
    problems = caught.value.problems
    assert lines_named(problems) == ["line 3", "line 5", "line 7", "line 9"]
    assert "601 tokens and 4 of the answer are more than the model's 512" in problems[0]
    assert engine.extracts == 0


@pytest.mark.parametrize(
    ("attribute", "value", "problem"),
    [
        ("nan_layer", 2, "batch 0 of 7"),
        ("nan_at", (Site.RESIDUAL_STREAM, Pooling.MAX), "at residual_stream, max: "),
    ],
)
def test_a_nan_stops_the_run_by_name(
    dataset: Dataset, tmp_path: Path, attribute: str, value: Any, problem: str
) -> None:
    engine = PoolingEngine()
    setattr(engine, attribute, value)
    with pytest.raises(NonFiniteReadout, match=problem):
        pooled(dataset, tmp_path / "run", engine)
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == b""


def test_append_log(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = AppendLog(path)
    log.append([{"a": 1}, {"a": "é\ud800"}])
    log.close()
    path.write_bytes(path.read_bytes() + b'{"a": 3')
    again = AppendLog(path)
    assert again.count == 2
    again.append([{"a": 4}])
    assert [record["a"] for record in again.read()][::2] == [1, 4]
    again.keep(1)
    again.append([{"a": 5}])
    assert [record["a"] for record in again.read()] == [1, 5]
    again.close()


MEMORY = """
import resource, sys
from pathlib import Path
from service.readout import Geometry, Site
from service.data.collection import collect
from service.data.training_rows import read_dataset
from tests.fitting.planted import PlantedEngine, planted_rows, write_rows
count, folder = int(sys.argv[1]), Path(sys.argv[2])
data = read_dataset(write_rows(folder / "rows.jsonl", planted_rows(count)), "given", folds=0)
engine = PlantedEngine(0.1, Geometry(8, 4, 128, 64))
options = {"sites": (Site.ATTENTION_HEAD,), "prompt_format": "text", "batch_rows": 16}
collect(engine, data, folder / "run", **options)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_rows_on_disk(tmp_path: Path) -> None:
    peak = []
    for rows in (800, 3200):
        (folder := tmp_path / str(rows)).mkdir()
        command = [sys.executable, "-c", MEMORY, str(rows), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak.append(int(done.stdout) * 1024)
    on_disk = 2400 * 8 * 512 * 4  # what the larger run writes more
    file = tmp_path / "3200" / "run" / "rows-attention_head.f32"
    assert file.stat().st_size == on_disk // 3 * 4
    assert peak[1] - peak[0] < on_disk / 3


@pytest.mark.parametrize("none", [{}, {"poolings": ()}, {"poolings": (Pooling.LAST_1,)}])
def test_without_other_poolings(dataset: Dataset, tmp_path: Path, none: Options) -> None:
    collection = run(dataset, tmp_path / "run", max_new_tokens=None, **none)
    assert collection.pooled == {}
    files = contents(collection.folder)
    assert "poolings" not in json.loads(files.pop("run.json"))
    with_others = contents(pooled(dataset, tmp_path / "pooled").folder)
    assert files.items() <= with_others.items()
    added = {f"rows-{site}-{pooling}.f32" for site, pooling in KEYS}
    assert with_others.keys() - files == {"run.json", *added}


def test_an_engine_that_does_not_pool_says_so_before_the_folder_is_made(
    dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="not max, content_mean"):
        pooled(dataset, tmp_path / "run", ScriptedEngine(GEOMETRY))
    assert not (tmp_path / "run").exists()


def test_a_second_process_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    def hold() -> None:
        with locked(tmp_path / "run"):
            with (
                pytest.raises(RunMismatch, match="in use by another process"),
                locked(tmp_path / "run"),
            ):
                pass
            os.kill(os.getpid(), signal.SIGKILL)

    killed(hold)
    with locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize("stop", [None, 1, 3])
def test_rows_that_were_read_earlier_are_copied_and_not_read_again(
    dataset: Dataset, tmp_path: Path, stop: int | None
) -> None:
    positions = [*range(3, 40, 3)]
    part = dataset.part(positions)
    read = run(part, tmp_path / "few", answer_site=None)
    earlier = Earlier(read, part, np.array(positions))
    engine = PlantedEngine()
    if stop is not None:
        run(dataset, tmp_path / "run", engine, earlier=earlier, enough=at_call(stop))
        assert engine.extracts == stop
    collection = run(dataset, tmp_path / "run", engine, earlier=earlier)
    assert engine.extracts == -(-(50 - len(positions)) // 8)
    whole = run(dataset, tmp_path / "whole")
    for site in BOTH:
        assert collection.rows[site].path.read_bytes() == whole.rows[site].path.read_bytes()
    np.testing.assert_array_equal(collection.first_token, whole.first_token)
    resumed, expected = (
        sorted(read_lines(collected.folder / "answers.jsonl"), key=itemgetter("row"))
        for collected in (collection, whole)
    )
    assert resumed == expected
    with pytest.raises(RunMismatch) as caught:
        run(dataset, tmp_path / "run")
    assert caught.value.param == "earlier"
