"""Paraphrases without a group: labels drawn by a coin stay without signal, and the guarantee counts each question once.

Where copies of a question lie on both sides of a fold, probes recognise the question and know its label.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from probes_store.store import Store
from service.demo import MODEL_DIR
from service.demo.questions import questions
from service.engines.base import EngineOptions
from service.engines.transformers.engine import TransformersEngine
from service.errors import DataError, TrainingError
from service.trainer.options import TrainOptions
from service.trainer.run import train
from tests.fitting.planted import Quiet, planted_rows, write_rows
from tests.trainer.test_run import run

COPIES = ("{}", "{} (2)", "Tell me: {}", "{} Thanks!")


@pytest.fixture
def demo() -> Iterator[TransformersEngine]:
    torch.set_num_threads(1)
    engine = TransformersEngine.load(EngineOptions(str(MODEL_DIR)))
    yield engine
    engine.close()


def copied(rows: list[dict[str, Any]], copies: int) -> list[dict[str, Any]]:
    """The rows without their groups, in as many wordings, in a random order."""
    found = [
        {key: value for key, value in row.items() if key not in ("id", "group")}
        | {"prompt": form.format(row["prompt"])}
        for row in rows
        for form in COPIES[:copies]
    ]
    random.Random(0).shuffle(found)
    return found


@pytest.mark.parametrize("copies", [2, 4])
def test_coin_labels_of_paraphrases_have_no_signal(tmp_path: Path, demo: TransformersEngine, copies: int) -> None:
    first = {row["group"]: row["prompt"] for row in reversed(questions("dev")) if row["kind"] == "city_country"}
    draw = random.Random(1)
    asked = draw.sample([text for text in first.values() if text.endswith("?")], 400 // copies)
    data = write_rows(
        tmp_path / "rows.jsonl", copied([{"prompt": text, "label": draw.getrandbits(1)} for text in asked], copies)
    )
    quick: dict[str, Any] = {"folds": 4, "inner_folds": 2, "seeds": (0,), "c": 0.3, "jobs": 1}
    options = TrainOptions(data=(str(data),), name="coin", run_dir=tmp_path / "run", **quick)
    console = Quiet()
    with pytest.raises(TrainingError, match="no signal: the nested AUROC is 0"):
        train(options, lambda: demo, Store(tmp_path / "store"), console=console)
    assert any("400 rows ask the same as another one in other words" in line for line in console.lines)


def test_training_and_guarantee_count_paraphrases_once(tmp_path: Path) -> None:
    new = write_rows(tmp_path / "new.jsonl", copied(planted_rows(200, seed=5), 3))
    bundle, console = run(tmp_path, rows=copied(planted_rows(80), 3), evaluate=False, calibration=new, alpha="0.2")
    assert bundle.manifest.training.groups == 80
    guarantee = bundle.manifest.guarantee
    assert guarantee is not None
    assert (guarantee.rows, guarantee.all_groups) == (600, 200)
    assert sum("ask the same as another one in other words" in line for line in console.lines) == 2


def test_paraphrases_of_training_rows_are_refused(tmp_path: Path) -> None:
    from tests.trainer.test_guarantee import Never, calibrated

    bundle, _ = run(tmp_path, rows=copied(planted_rows(80), 1), evaluate=False)
    store = Store(bundle.path.parents[1])
    rows = copied(planted_rows(200, seed=5), 1)
    rows[3]["prompt"] = COPIES[2].format(planted_rows(80)[7]["prompt"].upper())
    with pytest.raises(DataError, match="line 4: it asks in other words what is among the training rows of planted"):
        calibrated(tmp_path, store, rows, Never)
    rows[3]["group"] = "another"  # whoever names a group says that it is another one
    assert calibrated(tmp_path, store, rows, dry_run=True)[0] is None
