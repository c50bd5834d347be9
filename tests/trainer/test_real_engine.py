"""The whole run through transformers on a tiny random Llama: what the trainer reads is what the service reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probes_store.store import Store
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.readout import Site
from service.scoring import Scorer
from service.trainer.options import TrainOptions
from service.trainer.run import train
from tests.engines import tiny
from tests.fitting.planted import Quiet, planted_rows, write_rows


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def options(folder: Path, **changes: Any) -> TrainOptions:
    given: dict[str, Any] = {
        "data": (str(write_rows(folder / "rows.jsonl", planted_rows(160))),),
        "test": write_rows(folder / "test.jsonl", planted_rows(80, seed=3)),
        "name": "tiny",
        "run_dir": folder / "run",
        "signals": "depth_mean,first_token",
        "folds": 3,
        "inner_folds": 2,
        "seeds": (0,),
        "batch_rows": 16,
        "jobs": 1,
        "sites": tuple(Site),
        "forms": "none",
    }
    return TrainOptions(**given | changes)


@pytest.mark.parametrize("site", list(Site))
def test_a_tiny_llama_from_rows_to_risks(tmp_path: Path, site: Site) -> None:
    engine = tiny.engine()
    bundle = train(options(tmp_path, readout=site), lambda: engine, Store(tmp_path / "store"), console=Quiet())
    assert bundle.manifest.readout.site == str(site)
    assert bundle.manifest.model.name == "tiny-llama"
    # The word that decides the label stands in the prompt, and attention carries it to the last position.
    assert bundle.evaluation()["held_out"]["signals"]["bundle"]["auroc"] > 0.75
    scorer = Scorer(Scheduled(tiny.engine()), bundle)
    rows = planted_rows(80, seed=3)
    risk = np.array([report.risk for report in scorer.score([scorer.render(prompt=row["prompt"]) for row in rows])])
    hallucinated = np.array([1 - row["label"] for row in rows])
    brier = float(np.mean((hallucinated - risk) ** 2))
    assert brier == pytest.approx(bundle.evaluation()["held_out"]["signals"]["bundle"]["brier"], abs=1e-4)


def test_generated_answers_resume_and_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = planted_rows(90)
    for row in rows:
        row["answers"] = ["[a-m]"]  # of a random model's babble about half holds such a letter
    changes: dict[str, Any] = {
        "data": (str(write_rows(tmp_path / "babble.jsonl", rows)),),
        "test": None,
        "labels": "generate",
        "judge": "regex",
        "evaluate": False,
        "max_new_tokens": 3,
    }
    digests = []
    for name in ("whole", "stopped"):
        folder = tmp_path / name
        folder.mkdir()
        chosen = options(folder, **changes)
        if name == "stopped":
            calls = 0
            extract = TransformersEngine.extract

            def stopping(self: TransformersEngine, *arguments: Any, extract: Any = extract) -> Any:
                nonlocal calls
                calls += 1
                if calls == 3:
                    raise KeyboardInterrupt
                return extract(self, *arguments)

            with monkeypatch.context() as patch:
                patch.setattr(TransformersEngine, "extract", stopping)
                with pytest.raises(KeyboardInterrupt):
                    train(chosen, tiny.engine, Store(folder / "store"), console=Quiet())
        digests.append(train(chosen, tiny.engine, Store(folder / "store"), console=Quiet()).manifest.digest)
    assert digests[0] == digests[1]
