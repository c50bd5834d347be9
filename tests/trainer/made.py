"""Quick runs on the planted engine, and what is made of their bundles."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import pytest

from probes_store.bundle import Bundle
from probes_store.store import Store
from service.scoring import RiskReport, Scorer
from service.trainer.new_rows import draft_of
from service.trainer.options import GuaranteeOptions, TrainOptions
from service.trainer.plots import PlotData
from service.trainer.run import train
from tests import matching
from tests.fitting.planted import PlantedEngine, Quiet, planted_rows, write_rows
from tests.kit.rows import Document, Options, Rows

T = TypeVar("T")
FAST: Options = {
    "folds": 3,
    "inner_folds": 2,
    "seeds": (0, 1),
    "c": 0.3,
    "c_grid": (0.1, 0.3),
    "jobs": 1,
    "forms": "none",
    "keep_sample": False,
}
ONE: Options = {"folds": 2, "seeds": (0,), "evaluate": False}  # the quickest
FUSED = ("depth_mean", "log_max_prob", "entropy")


def blank(data: PlotData) -> dict[str, bytes]:
    """The files of ``plots.draw`` without pictures, whose drawing takes half of a quick run."""
    evaluated = ("coverage", "precision_recall", "reliability", "roc") if data.risk else ()
    return {f"{name}.png": b"a picture" for name in ("layers", "trajectories", *evaluated)}


def no_picture_of_the_change() -> AbstractContextManager[object]:
    """Recalibrations draw none."""
    return patch("service.trainer.recalibrate.draw_before_after", lambda *_: b"a picture")


def run(
    folder: Path,
    engine: Any = None,
    rows: Rows | None = None,
    *,
    pictures: bool = False,
    measure: bool = False,
    **changes: Any,
) -> tuple[Bundle, Quiet]:
    """Train in ``folder``; rows that are given as a list for ``test`` or ``calibration`` are
    written there.  ``engine``: one, or a class of which the run makes one."""
    folder.mkdir(exist_ok=True)
    if not (data := folder / "rows.jsonl").exists():
        write_rows(data, planted_rows(240) if rows is None else rows)
    for name in ("test", "calibration"):
        if isinstance(changes.get(name), list):
            changes[name] = write_rows(folder / f"{name}.jsonl", changes[name])
    options: Options = (
        FAST | {"data": (str(data),), "name": "planted", "run_dir": folder / "run"} | changes
    )
    console, store = Quiet(), Store(folder / "store")
    with nullcontext() if pictures else patch("service.trainer.run.draw", blank):
        bundle = train(
            TrainOptions(**options),
            engine if isinstance(engine, type) else lambda: engine or PlantedEngine(),
            store,
            console=console,
            measure=measure,
        )
    return bundle, console


def trained_once(
    engine: Any = None,
    rows: Rows | None = None,
    *,
    scope: Literal["module", "session"] = "module",
    console: bool = False,
    **options: Any,
) -> Any:
    """A fixture: the bundle of one run, which all tests of the scope look at; with ``console`` also
    what the run printed."""

    @pytest.fixture(scope=scope)
    def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
        made = run(tmp_path_factory.mktemp("trained"), engine, rows, **options)
        return made if console else made[0]

    return trained


def killed(work: Callable[[], object]) -> None:
    """Do the work in a fork of this process, which ends without a word at its engine's
    ``kill_at``."""
    if (child := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


class Never(PlantedEngine):
    def __init__(self) -> None:
        raise AssertionError("a model was loaded")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def store_of(bundle: Bundle, folder: Path) -> Store:
    """A store with this bundle alone, as planted:1."""
    shutil.copytree(bundle.path, folder / "store" / "planted" / "1")
    return Store(folder / "store")


def options_on(kind: type[T], folder: Path, rows: Rows, **changes: Any) -> T:
    """Options of a command on these rows, with the run folder ``run``."""
    folder.mkdir(exist_ok=True)
    data = write_rows(folder / "new.jsonl", rows)
    return kind(**{"data": (str(data),), "run_dir": folder / "run"} | changes)


def guarantee_options(folder: Path, rows: Rows, **changes: Any) -> GuaranteeOptions:
    return options_on(GuaranteeOptions, folder, rows, **{"alpha": "0.2"} | changes)


def republished(store: Store, bundle: Bundle, evaluation: Document, **changes: Any) -> Bundle:
    """The next version, with another evaluation.json; ``changes`` are fields of the manifest."""
    manifest = replace(bundle.manifest, **changes)
    return store.publish(draft_of(bundle, manifest, evaluation, bundle.card()))


def with_answer(bundle: Bundle, store: Store) -> Bundle:
    """The next version of a bundle, which has an answer probe, as the planted engine reads it."""
    plain = draft_of(bundle, bundle.manifest, bundle.evaluation(), bundle.card())
    return store.publish(matching.with_answer(plain, PlantedEngine()))


def check_answer_kept(before: Bundle, after: Bundle) -> None:
    """Another version, with the answer probe as it was."""
    assert before.manifest.answer is not None
    assert after.manifest.digest != before.manifest.digest
    assert after.manifest.answer == before.manifest.answer
    assert after.files()["answer.safetensors"] == before.files()["answer.safetensors"]


def served(bundle: Bundle, rows: Rows, engine: Any = None) -> list[RiskReport]:
    """As a service answers; it replays the golden prompts first."""
    scorer = Scorer(engine or PlantedEngine(), bundle)
    standings = [scorer.standing(row["prompt"]) for row in rows]
    return scorer.score([scorer.render(row["prompt"]) for row in rows], standings=standings)


def section(bundle: Bundle, title: str) -> str:
    """A part of the card, in one line."""
    return " ".join(bundle.card().partition(f"## {title}\n")[2].partition("\n## ")[0].split())
