"""Trained on one source, tested on another: who sees which rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hallutracer_research.evaluation import transfer
from hallutracer_research.evaluation.methods.base import MethodInputs
from hallutracer_research.evaluation.options import EvaluateOptions, EvaluationSource
from hallutracer_research.evaluation.transfer import sources_of, transfer_table
from tests.research.evaluation.methods.made import made_inputs

OPTIONS = EvaluateOptions((EvaluationSource("a", Path("a")),), Path("out"), folds=3, inner_folds=2, c=0.3, jobs=1)


def mixed(folder: Path, names: tuple[str, ...] = ("a/x", "b/y", "c/z")) -> MethodInputs:
    """Groups of two rows, each group in one source."""
    inputs = made_inputs(folder, count=360, strength=1.2)
    return replace(inputs, kind=np.array([names[group % len(names)] for group in inputs.group], np.str_))


def test_each_source_and_each_rest_is_trained_on(tmp_path: Path) -> None:
    table = transfer_table({"mix": mixed(tmp_path)}, OPTIONS, tmp_path / "kept")
    assert table is not None
    depth = {row["train"]: row for row in table.rows if str(row["method"]).startswith("HalluTracer")}
    assert list(depth) == ["a", "b", "c", "all but a", "all but b", "all but c"]
    for trained_on, row in depth.items():
        tested = {key for key in row if key in ("a", "b", "c")}
        assert tested == ({trained_on[-1]} if "all but" in trained_on else {"a", "b", "c"})
        assert all(float(row[name]) > 0.7 for name in tested)  # type: ignore[arg-type]
    assert len(table.rows) == 2 * len(depth)


def test_no_group_is_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = mixed(tmp_path)
    kind = inputs.kind.copy()
    kind[0] = "b/y" if kind[1].startswith("a") else "a/x"  # its other row stays where it was
    inputs = replace(inputs, kind=kind)
    seen = []

    def watched(inputs: MethodInputs, train: np.ndarray, test: np.ndarray, *rest: Any) -> np.ndarray:
        seen.append((set(inputs.group[train].tolist()), set(inputs.group[test].tolist())))
        return np.zeros(len(test))

    monkeypatch.setattr(transfer, "_depth_mean", watched)
    monkeypatch.setattr(transfer, "text_ngrams", watched)
    assert transfer_table({"mix": inputs}, OPTIONS, tmp_path / "kept") is not None
    assert len(seen) == 2 * (3 * (1 + 3) + 3)
    assert all(not train & test for train, test in seen)


def test_a_killed_run_computes_only_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = mixed(tmp_path)
    first = transfer_table({"mix": inputs}, OPTIONS, tmp_path / "kept")
    monkeypatch.setattr(transfer, "_depth_mean", None)
    assert transfer_table({"mix": inputs}, OPTIONS, tmp_path / "kept") == first


def test_a_set_of_one_source_has_no_such_table(tmp_path: Path) -> None:
    assert transfer_table({"mix": mixed(tmp_path, ("a/x", "a/y"))}, OPTIONS, tmp_path / "kept") is None
    assert transfer_table({"mix": mixed(tmp_path, ("a/x", ""))}, OPTIONS, tmp_path / "kept") is None
    assert transfer_table({"mix": mixed(tmp_path, ("a", "b"))}, OPTIONS, tmp_path / "kept") is None
    assert sources_of(np.array(["a/b/c", "d", ""])).tolist() == ["a", "d", ""]
