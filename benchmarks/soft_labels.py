"""Soft against greedy labels: fitted on the same rows of a training run, both measured by the greedy labels.

    hallutracer train --labels sample --samples 8 --forms none --data rows.jsonl --name soft ...
    python -m benchmarks.soft_labels runs/soft rows.jsonl 8 1.0      # samples, temperature

prints each nested AUROC, and the paired difference, with 95 % intervals over groups; Brier score and calibration slope
of the risks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from service.data.labels import sampled_labels
from service.data.options import JudgeOptions, SampleOptions
from service.data.run_folder import RowsFile
from service.data.training_rows import read_dataset
from service.fitting.calibration import FitOptions
from service.fitting.fit import Readouts
from service.fitting.jackknife import gain
from service.fitting.markdown import markdown_table
from service.fitting.nested_cv import Inputs, evaluate
from service.fitting.options import C_GRID
from service.readout import Geometry, Site

SHOWN = ("depth_mean_unit_norm", "depth_mean_weighted", "best_head", "fused_unit_norm")


def main(run: str, data: str, samples: str, temperature: str, seeds: str = "3") -> None:
    """Print the table."""
    folder, dataset = Path(run) / "train", read_dataset(Path(data), "generate", folds=0)
    sampled = SampleOptions(int(samples), float(temperature))
    labelled = sampled_labels(dataset, folder, JudgeOptions(), sampled)
    geometry = Geometry(**json.loads((folder / "run.json").read_text())["model"]["geometry"])
    file = RowsFile(folder / f"rows-{Site.ATTENTION_HEAD}.f32", geometry, Site.ATTENTION_HEAD, len(dataset))
    index, label, share = labelled.index, labelled.label, labelled.share
    assert share is not None
    soft = Inputs(
        Readouts(file, index, label, share),
        dataset.groups[index],
        np.fromfile(folder / "first_token.f64", "<f8").reshape(-1, 2)[index],
        np.ones(len(index), np.int64),
        tuple({} for _ in index),
    )
    greedy = replace(soft, readouts=replace(soft.readouts, share=None))
    mixed = np.mean((share > 0) & (share < 1))
    right, wrong = (share[label == value].mean() for value in (1, 0))
    print(
        f"{len(index)} rows, {len(np.unique(soft.group))} groups. Right: {label.mean():.1%} of the greedy answers, "
        f"{share.mean():.1%} of the sampled ones ({right:.1%} where the greedy one is right, {wrong:.1%} where not). "
        f"Rows with right and wrong samples: {mixed:.1%}.\n"
    )
    options = FitOptions("weights", 3, None, C_GRID, 1)
    found = [evaluate(rows, folds=5, seeds=range(int(seeds)), options=options) for rows in (soft, greedy)]
    lines = []
    for name in SHOWN:
        both = [one.document["signals"][name] for one in found]
        difference = gain(label, soft.group, found[0].tests[name], found[1].tests[name])
        cells = [f"{s['auroc']['mean']:.3f} [{s['auroc']['low']:.3f}, {s['auroc']['high']:.3f}]" for s in both]
        cells += [f"{difference.difference:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"]
        cells += [f"{s['brier']['mean']:.3f}, {s['calibration_slope']['mean']:.2f}" for s in both]
        lines.append([name, *cells])
    titles = ("AUROC, soft", "AUROC, greedy", "difference", "Brier, slope: soft", "Brier, slope: greedy")
    print(markdown_table(["", *titles], lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
