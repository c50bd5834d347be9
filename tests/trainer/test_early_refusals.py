"""What a run refuses before it loads a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

from probes_store.errors import StoreNotWritable
from probes_store.store import Store
from service.errors import TrainingError
from service.trainer.options import TrainOptions
from service.trainer.run import train


def no_engine() -> NoReturn:
    raise AssertionError("the model was loaded")


def options(tmp_path: Path, **changes: object) -> TrainOptions:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"id": str(n), "prompt": f"q{n}", "label": n % 2}) + "\n" for n in range(40)))
    fields = {"data": data, "name": "x", "run_dir": tmp_path / "run"} | changes
    return TrainOptions(**fields)  # type: ignore[arg-type]


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreNotWritable):
        train(options(tmp_path), no_engine, Store(tmp_path / "file" / "store"), console=Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_folds_without_a_class(tmp_path: Path) -> None:
    rare = [{"id": str(n), "prompt": f"q{n}", "label": int(n >= 6)} for n in range(200)]
    small = options(tmp_path, inner_folds=5)
    small.data.write_text("".join(json.dumps(row) + "\n" for row in rare))
    with pytest.raises(TrainingError, match="inner fold"):
        train(small, no_engine, Store(tmp_path / "store"), console=Console(quiet=True))


@pytest.mark.parametrize("name", ["../x", "X", "", "a" * 65])
def test_a_name_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(TrainingError, match="begin with a letter or digit"):
        train(options(tmp_path, name=name), no_engine, Store(tmp_path / "store"), console=Console(quiet=True))
