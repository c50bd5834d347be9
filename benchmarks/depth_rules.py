"""Weights over layers, from the fits that ``hallutracer evaluate`` keeps in its run folder.

    python -m benchmarks.depth_rules EVALUATION_FOLDER SET...

prints a Markdown table: AUROC of the paper's rule, and what weights gain over it, with 95 % intervals over groups.
The weights are fitted on the training side of each outer fold.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.evaluation.options import OURS
from service.data.labels import CLASSES
from service.data.options import Labels
from service.data.training_rows import read_dataset
from service.fitting.folds import outer_folds
from service.fitting.layer_weights import fit_layer_weights
from service.fitting.presentation import markdown_table
from service.fitting.scores import gain, risk_auroc

FOLDS, SEEDS, INNER_FOLDS = 5, 3, 3


def labelled(folder: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels and groups [n] of a set's labelled rows."""
    fitting = folder / "rows-that-fit.jsonl"
    path = fitting if fitting.exists() else folder / "rows.jsonl"
    with path.open(encoding="utf-8") as file:
        labels: Labels = "given" if "label" in json.loads(file.readline()) else "generate"
    dataset = read_dataset(path, labels, folds=0)
    if labels == "given":
        return np.array([row.label for row in dataset.rows]), dataset.groups
    [verdicts] = (folder / "readouts").glob("labels-*.jsonl")
    with verdicts.open(encoding="utf-8") as file:
        found = [CLASSES.get(json.loads(line)["verdict"]) for line in file]
    index = [row for row, label in enumerate(found) if label is not None]
    return np.array([found[row] for row in index]), dataset.groups[index]


def measured(folder: Path) -> list[str]:
    """One line of the table."""
    label, group = labelled(folder)
    paper: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
    weighted: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
    for fold in outer_folds(label, group, folds=FOLDS, seeds=range(SEEDS)):
        kept = np.load(folder / "fits" / "pooled" / OURS / f"seed{fold.seed}-fold{fold.fold}.npz")
        best = kept["auroc"].argmax(axis=1)[None, :, None]
        trajectory = np.take_along_axis(kept["logits"].astype(np.float64), best, axis=2)[..., 0]  # [n_test, m]
        weights = fit_layer_weights(
            kept["train_trajectory"], label[fold.train], group[fold.train], folds=INNER_FOLDS, seed=fold.seed
        )
        paper.append((fold.test, -trajectory.mean(axis=1)))
        weighted.append((fold.test, -(trajectory * weights.weight).mean(axis=1)))
    auroc = float(np.mean([risk_auroc(label[side], risk) for side, risk in paper]))
    one = gain(label, group, weighted, paper)
    cell = f"{100 * one.difference:+.1f} [{100 * one.low:+.1f}, {100 * one.high:+.1f}]"
    return [folder.name, f"{len(label):,}, {int(label.sum()):,}", f"{100 * auroc:.1f}", cell]


def main(run: str, *sets: str) -> None:
    """Print the table."""
    header = ["set", "rows, factual", "paper's rule", "weighted layers"]
    print(markdown_table(header, [measured(Path(run) / "sets" / name) for name in sets]))


if __name__ == "__main__":
    main(*sys.argv[1:])
