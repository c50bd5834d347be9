"""How far the text alone gets on SmolLM2's own training rows, in the folds that judge the probes (quarter of an hour).

    python -m benchmarks.text_alone [SEEDS]

AUROC over all rows, among rows of one kind of question, among rows of one form of conversation; mean and standard
deviation over folds and seeds.
"""

from __future__ import annotations

import gzip
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from hallutracer_research.evaluation.methods.text_alone import text_ngrams
from service.fitting.folds import group_folds
from service.fitting.scores import risk_auroc, within_stratum_auroc
from tests.serve_process import ROOT

ROWS = ROOT / "docs" / "smollm2-rows.jsonl.gz"
FOLDS = 5


def main(seeds: int) -> None:
    """Print a line for each way to read the text."""
    with gzip.open(ROWS, "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if row.get("label") in (0, 1)]
    label = np.array([row["label"] for row in rows])
    _, group = np.unique([row["group"] for row in rows], return_inverse=True)
    kind, form = (np.array([row[name] for row in rows]) for name in ("kind", "form"))
    texts = {
        "all messages": ["\n".join(message["content"] for message in row["messages"]) for row in rows],
        "the last message": [row["messages"][-1]["content"] for row in rows],
    }
    print(f"{len(rows)} rows, {label.mean():.3f} right")
    for name, text in texts.items():
        inputs: Any = SimpleNamespace(text=text, label=label, group=group, kind=kind)
        found = []
        for seed in range(seeds):
            for train, test in group_folds(label, group, np.arange(len(rows)), FOLDS, seed):
                risk = text_ngrams(inputs, train, test, seed)
                within = [within_stratum_auroc(label[test], risk, strata[test].tolist()) for strata in (kind, form)]
                found.append([risk_auroc(label[test], risk), *within])
        mean, deviation = np.mean(np.array(found, float), axis=0), np.std(np.array(found, float), axis=0)
        cells = [f"{m:.3f} +/- {s:.3f}" for m, s in zip(mean, deviation, strict=True)]
        print(f"{name}: all {cells[0]}, within a kind {cells[1]}, within a form {cells[2]}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
