"""How many layers does the mean need?  Fig. depth-subsampling and its numbers (App. depth-weighting).  Fits nothing."""

from __future__ import annotations

from collections.abc import Sequence

from service.evaluation.set_run import SetRun
from service.evaluation.tables import Column, Table
from service.fitting.scores import auroc
from service.paper.cells import OVER_SPLITS, SET, Row, by_set, spread
from service.paper.diagnostics.features import depth_layers, depth_sizes
from service.risk import depth_mean


def depth_curve(runs: Sequence[SetRun]) -> dict[str, tuple[list[int], list[float], list[float]]]:
    """Fig. depth-subsampling: set -> (layers included, mean AUROC, its standard deviation over splits)."""
    curves = {}
    for run in runs:
        sizes, by_size = _depth(run)
        cells = [spread(by_size[size]) for size in sizes]
        curves[run.title] = (list(sizes), [cell["mean"] for cell in cells], [cell["std"] for cell in cells])
    return curves


def depth_subsampling(runs: Sequence[SetRun]) -> list[Table]:
    """The numbers of Fig. depth-subsampling (App. depth-weighting), a column for every number of layers."""

    def row(run: SetRun, notes: list[str]) -> Row:
        sizes, by_size = _depth(run)
        m = max(sizes)
        if smaller := [size for size in depth_sizes(m)[1] if size < m]:
            notes.append(
                f"of {m} layers those from 3 to {m - 3} are spaced over: too few for {', '.join(map(str, smaller))}"
            )
        return {depth_key(size): spread(values) for size, values in by_size.items()}

    notes: list[str] = []
    rows = by_set(runs, row, notes)
    sizes = sorted({size for run in runs for size in depth_sizes(run.splits[0].test_trajectory.shape[1])[0]})
    return [
        Table(
            name="depth-subsampling",
            title="Depth subsampling",
            columns=[
                SET,
                *(Column(depth_key(size), f"{size} layer{'s' * (size > 1)}", "percent", 3) for size in sizes),
            ],
            rows=rows,
            caption=f"AUROC in percent of the mean of a few layers, evenly spaced over depth, {OVER_SPLITS}. One "
            "layer: the best by AUROC on the training side. The last column takes every layer.",
            notes=notes,
        )
    ]


def depth_key(size: int) -> str:
    """The column of ``depth_subsampling`` for a number of layers."""
    return f"layers_{size}"


def _depth(run: SetRun) -> tuple[tuple[int, ...], dict[int, list[float]]]:
    """Numbers of layers, and AUROC by split for each."""
    m = run.splits[0].test_trajectory.shape[1]
    sizes = depth_sizes(m)[0]
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for split in run.splits:
        best = int(split.every.auroc.max(axis=1).argmax())
        trajectory = split.test_trajectory
        for size in sizes:
            layers = depth_layers(m, size, best)
            assert layers is not None  # depth_sizes says so
            found[size].append(auroc(run.label[split.test], depth_mean(trajectory[:, layers])))
    return sizes, found
