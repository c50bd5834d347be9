"""Other positions than t* in a run folder: more files, the same journal, and nothing new where none are asked for."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.data.collection import Collection, collect
from service.data.training_rows import Dataset, read_dataset
from service.engines.base import Extraction, TokenIds
from service.engines.checks import beyond_onset
from service.errors import EngineError, NonFiniteReadout, RunMismatch
from service.readout import Pooling, Site
from tests.engines import tiny
from tests.fitting.planted import GEOMETRY, PlantedEngine, planted_rows, write_rows

BOTH = (Site.ATTENTION_HEAD, Site.RESIDUAL_STREAM)
ASKED = (Pooling.MAX, Pooling.LAST_1, Pooling.CONTENT_MEAN)
KEYS = [(site, pooling) for site in BOTH for pooling in (Pooling.MAX, Pooling.CONTENT_MEAN)]


class PoolingEngine(PlantedEngine):
    """Invents pooled rows too, from the prompt, the site and the pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.nan_at: tuple[Site, Pooling] | None = None

    def pooled(self, prompt: TokenIds, site: Site, pooling: Pooling) -> Any:
        seed = hashlib.sha256(repr((str(site), str(pooling), list(prompt))).encode()).digest()
        shape = (GEOMETRY.num_layers, GEOMETRY.width(site))
        rows = np.random.default_rng(int.from_bytes(seed[:8], "big")).standard_normal(shape, dtype=np.float32)
        return rows * np.nan if (site, pooling) == self.nan_at else rows

    def extract(self, prompts: Any, sites: Any, poolings: Sequence[Pooling] = (Pooling.LAST_1,)) -> Extraction:
        if not prompts:
            return Extraction({}, ())
        found = super().extract(prompts, sites)
        pooled = {
            (site, pooling): np.stack([self.pooled(prompt, site, pooling) for prompt in prompts])
            for site in sites
            for pooling in beyond_onset(poolings)
        }
        return Extraction(found.rows, found.first_tokens, pooled)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return read_dataset(write_rows(tmp_path / "rows.jsonl", planted_rows(50)), "given", folds=0)


def run(dataset: Dataset, folder: Path, engine: Any = None, **changes: Any) -> Collection:
    options: dict[str, Any] = {"sites": BOTH, "prompt_format": "chat", "batch_rows": 8, "poolings": ASKED} | changes
    return collect(engine or PoolingEngine(), dataset, folder, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_each_site_and_pooling_has_its_file_in_the_order_of_the_data(dataset: Dataset, tmp_path: Path) -> None:
    engine = PoolingEngine()
    collection = run(dataset, tmp_path / "run", engine)
    assert set(collection.pooled) == set(KEYS)
    for (site, pooling), file in collection.pooled.items():
        assert file.path == tmp_path / "run" / f"rows-{site}-{pooling}.f32"
        assert file.path.stat().st_size == file.nbytes == collection.rows[site].nbytes
        for row in (0, 17, 49):
            found = np.stack([file.layer(layer)[row] for layer in range(GEOMETRY.num_layers)])
            np.testing.assert_array_equal(found, engine.pooled(collection.prompts.of(row), site, pooling))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["poolings"] == ["content_mean", "max"]


@pytest.mark.parametrize("none", [{}, {"poolings": ()}, {"poolings": (Pooling.LAST_1,)}])
def test_without_other_poolings_a_folder_is_what_it_always_was(
    dataset: Dataset, tmp_path: Path, none: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"sites": BOTH, "prompt_format": "chat", "batch_rows": 8}
    collection = collect(PlantedEngine(), dataset, tmp_path / "run", **options | none)
    assert collection.pooled == {}
    found = contents(tmp_path / "run")
    rows = {f"rows-{site}.f32" for site in BOTH}
    assert set(found) == rows | {"run.json", "input_ids.i32", "offsets.i64", "first_token.f64", "journal.jsonl"}
    fields = {"data", "model", "sites", "prompt_format", "batch_rows", "max_new_tokens"}
    assert set(json.loads(found["run.json"])) == fields
    pooled = contents(run(dataset, tmp_path / "pooled").folder)
    for name in set(found) - {"run.json"}:
        assert pooled[name] == found[name], name


@pytest.mark.parametrize("finished", [0, 1, 4, 7])
def test_a_torn_folder_is_completed_to_the_same_bytes(dataset: Dataset, tmp_path: Path, finished: int) -> None:
    whole = contents(run(dataset, tmp_path / "whole").folder)
    torn = shutil.copytree(tmp_path / "whole", tmp_path / "torn")
    lines = (torn / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (torn / "journal.jsonl").write_bytes(b"".join(lines[:finished]) + lines[finished - 1][:9])
    order = np.argsort(-np.diff(np.fromfile(torn / "offsets.i64", "<i8")), kind="stable")
    for site, pooling in KEYS:  # scribble over everything that the journal does not vouch for
        shape = (GEOMETRY.num_layers, 50, GEOMETRY.width(site))
        rows = np.memmap(torn / f"rows-{site}-{pooling}.f32", "<f4", "r+", shape=shape)
        rows[:, order[8 * finished :]] = np.nan
        rows.flush()
    engine = PoolingEngine()
    run(dataset, torn, engine)
    assert contents(torn) == whole
    assert engine.extracts == len(lines) - finished


KILLED = """
import sys
from pathlib import Path
from service.data.training_rows import read_dataset
from tests.data.test_collection_poolings import PoolingEngine, run
engine = PoolingEngine()
engine.kill_at = 4
run(read_dataset(Path(sys.argv[1]), "given", folds=0), Path(sys.argv[2]), engine)
"""


def test_a_killed_run_goes_on_where_it_was(dataset: Dataset, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(dataset.path), str(tmp_path / "run")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "run" / "journal.jsonl").read_bytes().count(b"\n") == 3
    engine = PoolingEngine()
    found = contents(run(dataset, tmp_path / "run", engine).folder)
    assert engine.extracts == 4
    assert found == contents(run(dataset, tmp_path / "whole").folder)


@pytest.mark.parametrize("poolings", [(), (Pooling.MAX,), (Pooling.MAX, Pooling.CONTENT_MEAN, Pooling.MEAN)])
def test_a_folder_of_other_poolings_is_another_run(
    dataset: Dataset, tmp_path: Path, poolings: tuple[Pooling, ...]
) -> None:
    run(dataset, tmp_path / "run")
    with pytest.raises(RunMismatch, match="name another run folder") as caught:
        run(dataset, tmp_path / "run", poolings=poolings)
    assert caught.value.param == "poolings"


def test_the_order_in_which_poolings_are_named_does_not_matter(dataset: Dataset, tmp_path: Path) -> None:
    run(dataset, tmp_path / "run")
    engine = PoolingEngine()
    run(dataset, tmp_path / "run", engine, poolings=[Pooling.CONTENT_MEAN, Pooling.MAX, Pooling.MAX])
    assert engine.extracts == 0


def test_a_missing_pooled_file_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    run(dataset, tmp_path / "run")
    (tmp_path / "run" / "rows-residual_stream-max.f32").unlink()
    with pytest.raises(RunMismatch, match="rows-residual_stream-max"):
        run(dataset, tmp_path / "run")


def test_a_nan_in_pooled_rows_stops_the_run_by_name(dataset: Dataset, tmp_path: Path) -> None:
    engine = PoolingEngine()
    engine.nan_at = (Site.RESIDUAL_STREAM, Pooling.MAX)
    with pytest.raises(NonFiniteReadout, match="batch 0 of 7 .* at residual_stream, max: "):
        run(dataset, tmp_path / "run", engine)
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == b""


def test_an_engine_that_does_not_pool_says_so_before_the_folder_is_made(dataset: Dataset, tmp_path: Path) -> None:
    from service.engines.scripted import ScriptedEngine

    with pytest.raises(EngineError, match="cannot pool max, content_mean: load the model with the transformers"):
        run(dataset, tmp_path / "run", ScriptedEngine(GEOMETRY))
    assert not (tmp_path / "run").exists()


def test_what_a_real_model_pools_is_what_lies_on_disk(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", planted_rows(12))
    dataset = read_dataset(path, "given", folds=0)
    engine = tiny.shared_engine("llama")
    others = [pooling for pooling in Pooling if pooling is not Pooling.LAST_1]
    collection = run(dataset, tmp_path / "run", engine, poolings=others, batch_rows=5, prompt_format="text")
    plain = run(dataset, tmp_path / "plain", engine, poolings=(), batch_rows=5, prompt_format="text")
    for site in BOTH:
        assert collection.rows[site].path.read_bytes() == plain.rows[site].path.read_bytes()
    for row in range(12):
        alone = engine.extract([collection.prompts.of(row)], BOTH, others).pooled
        for key, file in collection.pooled.items():
            found = np.stack([file.layer(layer)[row] for layer in range(file.shape[0])])
            np.testing.assert_allclose(found, alone[key][0], rtol=0, atol=1e-5)
