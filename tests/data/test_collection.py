"""The run folder: resumable at any byte, refused to other runs, small in memory; with and without
other poolings."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hallutracer_research.evaluation.pooling import PoolingEngine as Pooled
from service.data import collection as collecting
from service.data.collection import Collection, Earlier, batches, collect
from service.data.run_folder import AppendLog, locked
from service.data.training_rows import Dataset, read_dataset
from service.engines.base import Extraction, TokenIds
from service.engines.checks import beyond_onset
from service.errors import DataError, EngineError, NonFiniteReadout, RunMismatch, TrainingError
from service.readout import Pooling, Site
from tests.engines import tiny
from tests.fitting.planted import GEOMETRY, PlantedEngine, planted_rows, write_rows
from tests.kit.rows import read_lines, without
from tests.scripted_engine import ScriptedEngine
from tests.trainer.made import killed

BOTH = (Site.ATTENTION_HEAD, Site.RESIDUAL_STREAM)
POOLINGS = (Pooling.MAX, Pooling.LAST_1, Pooling.CONTENT_MEAN)
KEYS = [(site, pooling) for site in BOTH for pooling in (Pooling.MAX, Pooling.CONTENT_MEAN)]


class PoolingEngine(PlantedEngine):
    """Invents pooled rows too, from the prompt, the site and the pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.nan_at: tuple[Site, Pooling] | None = None

    def pooled(self, prompt: TokenIds, site: Site, pooling: Pooling) -> Any:
        seed = hashlib.sha256(repr((str(site), str(pooling), list(prompt))).encode()).digest()
        shape = (GEOMETRY.num_layers, GEOMETRY.width(site))
        rows = np.random.default_rng(int.from_bytes(seed[:8], "big")).standard_normal(
            shape, dtype=np.float32
        )
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
        found = super().extract(prompts, sites, (Pooling.LAST_1,), sampling)
        pooled = {}
        for site, pooling in product(sites, beyond_onset(poolings)):
            rows = [self.pooled(prompt, site, pooling) for prompt in prompts]
            pooled[site, pooling] = np.stack(rows)
        return Extraction(found.activations, found.first_tokens, pooled, found.completions)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return read_dataset(write_rows(tmp_path / "rows.jsonl", planted_rows(50)), "given", folds=0)


def run(dataset: Dataset, folder: Path, engine: Any = None, **changes: Any) -> Collection:
    options: dict[str, Any] = {
        "sites": BOTH,
        "prompt_format": "chat",
        "batch_rows": 8,
        "max_new_tokens": 4,
    } | changes
    return collect(engine or PlantedEngine(), dataset, folder, **options)


def pooled(dataset: Dataset, folder: Path, engine: Any = None, **changes: Any) -> Collection:
    """A collection that also reads other positions than t*, and generates nothing."""
    return run(
        dataset,
        folder,
        engine or PoolingEngine(),
        **({"poolings": POOLINGS, "max_new_tokens": None} | changes),
    )


def stored(file: Any, row: int) -> Any:
    """What lies on disk of a row: [m, width]."""
    return np.stack([file.layer(layer)[row] for layer in range(file.shape[0])])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_plan_is_sorted_by_length_and_covers_every_row_once() -> None:
    plan = batches(np.array([3, 9, 3, 1, 9]), 2)
    assert [batch.tolist() for batch in plan] == [[1, 4], [0, 2], [3]]


def test_rows_are_the_engines_own_in_the_order_of_the_data(
    dataset: Dataset, tmp_path: Path
) -> None:
    engine = PlantedEngine()
    collection = run(dataset, tmp_path / "run", engine)
    for site in BOTH:
        file = collection.rows[site]
        assert file.shape == (GEOMETRY.num_layers, 50, GEOMETRY.width(site))
        for row in (0, 17, 49):
            np.testing.assert_array_equal(
                stored(file, row), engine.activations(collection.prompts.of(row), site)
            )
    first = engine.first_token(collection.prompts.of(17))
    assert collection.first_token[17].tolist() == [first.log_max_prob, first.entropy]
    answers = read_lines(tmp_path / "run" / "answers.jsonl")
    assert sorted(answer["row"] for answer in answers) == list(range(50))
    assert all(dataset.rows[answer["row"]].id == answer["id"] for answer in answers)


class Lengths(PlantedEngine):
    """Notes which prompts may get answers of which length."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: dict[tuple[int, ...], int] = {}

    def extract(self, prompts: Any, sites: Any, *others: Any, **read: Any) -> Extraction:
        sampling = read.get("sampling") or (others[1] if len(others) > 1 else None)
        length = 0 if sampling is None else sampling.max_tokens
        self.lengths.update((tuple(prompt), length) for prompt in prompts)
        return super().extract(prompts, sites, *others, **read)


@pytest.mark.parametrize("stop", [None, 1, 3, 5])
def test_a_row_may_need_a_longer_answer_than_the_others(tmp_path: Path, stop: int | None) -> None:
    rows = [
        row | {"answers": ["Paris"], "answer_tokens": (0, 9, 2)[number % 3]}
        for number, row in enumerate(without(planted_rows(50), "label"))
    ]
    rows += [{"prompt": f"Write poem {number}.", "applies": False} for number in range(9)]
    dataset = read_dataset(write_rows(tmp_path / "rows.jsonl", rows), "generate", folds=0)
    engine, calls = Lengths(), list[int]()
    if stop is not None:
        run(
            dataset,
            tmp_path / "run",
            engine,
            enough=lambda rows, lengths: bool(calls.append(len(rows)) or len(calls) == stop),
        )
    collection = run(dataset, tmp_path / "run", engine)
    for row, asked in enumerate(rows):
        length = max(4, asked.get("answer_tokens", 0)) if "answers" in asked else 0
        assert engine.lengths[tuple(collection.prompts.of(row))] == length
    answers = read_lines(tmp_path / "run" / "answers.jsonl")
    assert sorted(answer["row"] for answer in answers) == list(range(50))
    assert all(dataset.rows[answer["row"]].id == answer["id"] for answer in answers)


def test_a_longer_answer_needs_room(tmp_path: Path) -> None:
    rows = [{"prompt": "Who?", "answers": ["I"]}, {"prompt": "And?", "answers": ["I"]}]
    rows[1]["answer_tokens"] = 5000  # type: ignore[assignment]
    dataset = read_dataset(write_rows(tmp_path / "rows.jsonl", rows), "generate", folds=None)
    with pytest.raises(DataError, match=r"line 2: (?!.*line 1)"):
        run(dataset, tmp_path / "run")


@pytest.mark.parametrize("finished", [0, 1, 4, 7])
def test_a_torn_folder_is_completed_to_the_same_bytes(
    dataset: Dataset, tmp_path: Path, finished: int
) -> None:
    whole = contents(pooled(dataset, tmp_path / "whole", max_new_tokens=4).folder)
    torn = shutil.copytree(tmp_path / "whole", tmp_path / "torn")
    lines = (torn / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (torn / "journal.jsonl").write_bytes(b"".join(lines[:finished]) + lines[finished - 1][:9])
    answers = (torn / "answers.jsonl").read_bytes().splitlines(keepends=True)
    (torn / "answers.jsonl").write_bytes(b"".join(answers[: 8 * finished + 5]) + b'{"torn')
    plan = batches(np.diff(np.fromfile(torn / "offsets.i64", "<i8")), 8)
    for name in [
        *BOTH,
        *("-".join(key) for key in KEYS),
    ]:  # overwrite everything that the journal does not vouch for
        shape = (GEOMETRY.num_layers, 50, GEOMETRY.width(Site(name.split("-")[0])))
        rows = np.memmap(torn / f"rows-{name}.f32", "<f4", "r+", shape=shape)
        for batch in plan[finished:]:
            rows[:, batch] = np.nan
        rows.flush()
    engine = PoolingEngine()
    pooled(dataset, torn, engine, max_new_tokens=4)
    assert contents(torn) == whole
    assert engine.extracts == engine.generates == len(plan) - finished


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"batch_rows": 4}, "batch_rows"),
        ({"prompt_format": "text"}, "prompt_format"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"sites": (Site.ATTENTION_HEAD,)}, "sites"),
        ({"engine": PlantedEngine(chat=False), "prompt_format": "text"}, "model.chat_template"),
        ({"rows": planted_rows(50, seed=1)}, "data"),
        ({"poolings": ()}, "poolings"),
        ({"poolings": (Pooling.MAX,)}, "poolings"),
        ({"poolings": (Pooling.MAX, Pooling.CONTENT_MEAN, Pooling.MEAN)}, "poolings"),
    ],
)
def test_another_run_is_refused_by_field(
    dataset: Dataset, tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    pooling = {"engine": PoolingEngine(), "poolings": POOLINGS} if field == "poolings" else {}
    options = {"prompt_format": change["prompt_format"]} if "engine" in change else pooling
    run(dataset, tmp_path / "run", **options)
    if "rows" in change:
        dataset = read_dataset(
            write_rows(tmp_path / "other.jsonl", change.pop("rows")), "given", folds=0
        )
    with pytest.raises(RunMismatch) as caught:
        run(dataset, tmp_path / "run", **pooling | change)
    assert caught.value.param == field


def test_a_finished_run_asks_the_engine_for_nothing(dataset: Dataset, tmp_path: Path) -> None:
    run(dataset, tmp_path / "run")
    pooled(dataset, tmp_path / "pooled")
    engine, pooling = PlantedEngine(model="elsewhere/scripted"), PoolingEngine()
    run(dataset, tmp_path / "run", engine)
    pooled(
        dataset,
        tmp_path / "pooled",
        pooling,
        poolings=[Pooling.CONTENT_MEAN, Pooling.MAX, Pooling.MAX],
    )
    assert engine.extracts == engine.generates == pooling.extracts == 0


def doubled(lines: list[bytes]) -> list[bytes]:
    return lines[:2] + lines[:2] + lines[2:3]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("answers.jsonl", lambda lines: lines[:-1], r"answers\.jsonl lacks answers"),
        ("journal.jsonl", doubled, "not the journal of one run"),  # of two writers
        ("run.json", None, "chapter"),
        ("first_token.f64", None, "first_token"),
        ("rows-residual_stream-max.f32", None, "rows-residual_stream-max"),
    ],
)
def test_strange_files(dataset: Dataset, tmp_path: Path, name: str, change: Any, said: str) -> None:
    file = pooled(dataset, tmp_path / "run", max_new_tokens=4).folder / name
    if change is not None:
        file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True))))
    elif name == "run.json":
        shutil.rmtree(file.parent)
        file.parent.mkdir()
        file.with_name("chapter.tex").write_text("x")
    else:
        file.unlink()
    with pytest.raises(RunMismatch, match=said):
        pooled(dataset, tmp_path / "run", max_new_tokens=4)


def test_a_small_disk(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=900)
    monkeypatch.setattr(collecting.shutil, "disk_usage", lambda _: usage)
    engine = PlantedEngine()
    with pytest.raises(
        TrainingError, match=r"needs \d+\.\d KiB more and the disk has 0\.9 KiB free"
    ):
        run(dataset, tmp_path / "run", engine)
    assert engine.extracts == 0


def test_prompts_the_model_cannot_take_are_named_together(tmp_path: Path) -> None:
    rows = planted_rows(10)
    rows[2]["prompt"] = rows[7]["prompt"] = "x" * 600
    del rows[4]["prompt"]
    rows[4]["messages"] = [{"role": "user", "content": "y"}]
    dataset = read_dataset(write_rows(tmp_path / "rows.jsonl", rows), "given", folds=0)
    engine = PlantedEngine(chat=False)
    with pytest.raises(DataError) as caught:
        run(dataset, tmp_path / "run", engine, prompt_format="text")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "line 3",
        "line 5",
        "line 8",
    ]
    assert (
        "601 tokens and 4 of the answer are more than the model's 512" in caught.value.problems[0]
    )
    assert engine.extracts == 0


@pytest.mark.parametrize(
    ("pooling", "said"), [(None, "batch 0 of 7"), (Pooling.MAX, "at residual_stream, max: ")]
)
def test_a_nan_stops_the_run_by_name(
    dataset: Dataset, tmp_path: Path, pooling: Pooling | None, said: str
) -> None:
    engine = PoolingEngine()
    if pooling is None:
        engine.nan_layer = 2
    else:
        engine.nan_at = (Site.RESIDUAL_STREAM, pooling)
    with pytest.raises(NonFiniteReadout, match=said):
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
    peak = {}
    for count in (800, 3200):
        folder = tmp_path / str(count)
        folder.mkdir()
        command = [sys.executable, "-c", MEMORY, str(count), str(folder)]
        peak[count] = (
            int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024
        )
    on_disk = 2400 * 8 * 512 * 4  # what the larger run writes more
    assert (
        tmp_path / "3200" / "run" / "rows-attention_head.f32"
    ).stat().st_size == on_disk // 3 * 4
    assert peak[3200] - peak[800] < on_disk / 3


def test_each_site_and_pooling_has_its_file_in_the_order_of_the_data(
    dataset: Dataset, tmp_path: Path
) -> None:
    engine = PoolingEngine()
    collection = pooled(dataset, tmp_path / "run", engine)
    assert set(collection.pooled) == set(KEYS)
    for (site, pooling), file in collection.pooled.items():
        assert file.path == tmp_path / "run" / f"rows-{site}-{pooling}.f32"
        assert file.path.stat().st_size == file.nbytes == collection.rows[site].nbytes
        for row in (0, 17, 49):
            expected = engine.pooled(collection.prompts.of(row), site, pooling)
            np.testing.assert_array_equal(stored(file, row), expected)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["poolings"] == [
        "content_mean",
        "max",
    ]


@pytest.mark.parametrize("none", [{}, {"poolings": ()}, {"poolings": (Pooling.LAST_1,)}])
def test_without_other_poolings(dataset: Dataset, tmp_path: Path, none: dict[str, Any]) -> None:
    collection = run(dataset, tmp_path / "run", PlantedEngine(), max_new_tokens=None, **none)
    assert collection.pooled == {}
    found = contents(tmp_path / "run")
    rows = {f"rows-{site}.f32" for site in BOTH}
    assert set(found) == rows | {
        "run.json",
        "input_ids.i32",
        "offsets.i64",
        "first_token.f64",
        "journal.jsonl",
    }
    fields = {"data", "model", "sites", "prompt_format", "batch_rows", "max_new_tokens"}
    assert set(json.loads(found["run.json"])) == fields
    with_others = contents(pooled(dataset, tmp_path / "pooled").folder)
    for name in set(found) - {"run.json"}:
        assert with_others[name] == found[name], name


def test_a_killed_run_goes_on_where_it_was(dataset: Dataset, tmp_path: Path) -> None:
    engine = PoolingEngine()
    engine.kill_at = 4
    killed(lambda: pooled(dataset, tmp_path / "run", engine))
    assert (tmp_path / "run" / "journal.jsonl").read_bytes().count(b"\n") == 3
    engine = PoolingEngine()
    found = contents(pooled(dataset, tmp_path / "run", engine).folder)
    assert engine.extracts == 4
    assert found == contents(pooled(dataset, tmp_path / "whole").folder)


def test_an_engine_that_does_not_pool_says_so_before_the_folder_is_made(
    dataset: Dataset, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="not max, content_mean"):
        pooled(dataset, tmp_path / "run", ScriptedEngine(GEOMETRY))
    assert not (tmp_path / "run").exists()


def test_what_a_real_model_pools_is_what_lies_on_disk(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", planted_rows(12))
    dataset = read_dataset(path, "given", folds=0)
    engine = Pooled(tiny.shared_engine("llama"))
    others = [pooling for pooling in Pooling if pooling is not Pooling.LAST_1]
    collection = pooled(
        dataset, tmp_path / "run", engine, poolings=others, batch_rows=5, prompt_format="text"
    )
    plain = pooled(
        dataset, tmp_path / "plain", engine, poolings=(), batch_rows=5, prompt_format="text"
    )
    for site in BOTH:
        assert collection.rows[site].path.read_bytes() == plain.rows[site].path.read_bytes()
    for row in range(12):
        alone = engine.extract([collection.prompts.of(row)], BOTH, others).pooled
        for key, file in collection.pooled.items():
            np.testing.assert_allclose(stored(file, row), alone[key][0], rtol=0, atol=1e-5)


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
        calls: list[int] = []
        run(
            dataset,
            tmp_path / "run",
            engine,
            earlier=earlier,
            enough=lambda rows, lengths: bool(calls.append(len(rows)) or len(calls) == stop),
        )
        assert engine.extracts == stop
    collection = run(dataset, tmp_path / "run", engine, earlier=earlier)
    assert engine.extracts == -(-(50 - len(positions)) // 8)
    whole = run(dataset, tmp_path / "whole")
    for site in BOTH:
        for row in range(50):
            np.testing.assert_array_equal(
                stored(collection.rows[site], row), stored(whole.rows[site], row)
            )
    np.testing.assert_array_equal(collection.first_token, whole.first_token)
    resumed, expected = (read_lines(one.folder / "answers.jsonl") for one in (collection, whole))
    assert sorted(resumed, key=itemgetter("row")) == sorted(expected, key=itemgetter("row"))
    assert len((collection.folder / "answers.jsonl").read_text().splitlines()) == 50
    with pytest.raises(RunMismatch) as caught:
        run(dataset, tmp_path / "run")
    assert caught.value.param == "earlier"
