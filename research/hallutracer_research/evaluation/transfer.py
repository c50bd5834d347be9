"""Trained on one source, tested on another: does the probe read knowledge, or what a source's questions look like?

A mixture's rows name their source in front of their kind (``hallutracer data mix``).  Probes are fitted on one source,
or on all but one, and scored on the others; no group is on both sides.  The diagonal is cross-validated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs
from hallutracer_research.evaluation.methods.text_alone import text_ngrams
from hallutracer_research.evaluation.options import EvaluateOptions
from hallutracer_research.evaluation.splits import fit_options, kept
from hallutracer_research.evaluation.tables import Cell, Column, Table
from service.errors import NoDirection, TrainingError
from service.fitting.folds import group_folds
from service.fitting.scores import risk_auroc
from service.risk import depth_mean

TITLES = {"depth mean": "HalluTracer (depth mean)", "text": "Text alone (word and character n-grams)"}
SEED = 0


def sources_of(kind: NDArray[np.str_]) -> NDArray[np.str_]:
    """Each row's source [n]: its kind up to the first slash."""
    return np.array([name.partition("/")[0] for name in kind.tolist()], np.str_)


def transfer_table(sets: Mapping[str, MethodInputs], options: EvaluateOptions, folder: Path) -> Table | None:
    """A block of rows for each mixture of two sources or more; None where no set is one."""
    rows: list[Mapping[str, Cell]] = []
    notes: list[str] = []
    names: list[str] = []
    for title, inputs in sets.items():
        source = sources_of(inputs.kind)
        found = sorted(set(source.tolist()))
        if len(found) < 2 or "" in found or not any("/" in name for name in inputs.kind.tolist()):
            continue
        names += [name for name in found if name not in names]
        for trained_on, train, tested in tqdm(_plans(inputs, source, found), f"{title}, transfer", unit="source"):
            path = folder / f"{title}-{trained_on}".replace("/", "-")
            try:
                scores = _scores(inputs, train, tested, options, path.with_suffix(".npz"))
            except (TrainingError, NoDirection) as error:
                notes.append(f"{title}, trained on {trained_on}: left out, {error}")
                continue
            for method, of_method in scores.items():
                cells: dict[str, Cell] = {
                    name: risk_auroc(inputs.label[at], of_method[at])
                    for name in tested
                    if _both(inputs.label[at := np.flatnonzero(source == name)]) and np.isfinite(of_method[at]).all()
                }
                rows.append({"set": title, "train": trained_on, "method": TITLES[method], **cells})
    if not rows:
        return None
    return Table(
        name="transfer", title="Trained on one source, tested on another",
        columns=(
            Column("set", "Set", "text"), Column("train", "Trained on", "text"), Column("method", "Method", "text"),
            *(Column(name, f"AUROC on {name}", "percent", 3, higher=True) for name in names),
        ),
        rows=rows,
        caption="AUROC in percent. A source's own column is cross-validated; in the others no group is on both sides.",
        notes=notes, block="set",
    )  # fmt: skip


def _plans(
    inputs: MethodInputs, source: NDArray[np.str_], names: Sequence[str]
) -> list[tuple[str, Index, tuple[str, ...]]]:
    """Name of the training rows, the rows, and the sources to test on."""
    every = tuple(names)
    plans = [(name, np.flatnonzero(source == name), every) for name in names]
    if len(names) > 2:
        plans += [(f"all but {name}", np.flatnonzero(source != name), (name,)) for name in names]
    return plans


def _scores(
    inputs: MethodInputs, train: Index, tested: Sequence[str], options: EvaluateOptions, path: Path
) -> dict[str, Floats]:
    """Scores [n] by each method; NaN for rows that were not tested.  Training rows are tested out of fold."""

    def make() -> dict[str, NDArray[np.generic]]:
        found = {name: np.full(len(inputs.label), np.nan) for name in TITLES}
        outside = np.setdiff1d(np.arange(len(inputs.label)), train)
        shared = np.isin(inputs.group[train], inputs.group[outside])
        own = len(tested) > 1  # its own source is among them
        splits = group_folds(inputs.label, inputs.group, train, options.folds, SEED) if own else []
        if not (own and shared.all()):  # sources that ask the same questions: there is nothing to learn from
            splits = [*splits, (train[~shared], outside)]
        for fitted, test in splits:
            found["depth mean"][test] = _depth_mean(inputs, fitted, test, options)
            found["text"][test] = text_ngrams(inputs, fitted, test, SEED)
        return dict(found)

    return {name: np.asarray(values, np.float64) for name, values in kept(path, make).items()}


def _depth_mean(inputs: MethodInputs, train: Index, test: Index, options: EvaluateOptions) -> Floats:
    fits = fit_options(options)
    c = fits.choose_c(inputs.heads, inputs.group, train, SEED).c
    return -depth_mean(fits.refit(inputs.heads, train, test, c).trajectory)


def _both(label: NDArray[np.int64]) -> bool:
    return 0 < int(label.sum()) < len(label)
