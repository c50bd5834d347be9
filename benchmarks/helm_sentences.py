"""Long answers, sentence by sentence: is each sentence of a passage right, before it is written and
behind it?

The sentences of HELM (of MIND) were written by six other models and labelled by people; a model
reads the passage up to a sentence, and then the sentence as the answer to it.

    python -m benchmarks.helm_sentences rows HELM > sentences.jsonl
    hallutracer train --model smollm2 --data sentences.jsonl --prompt-format text \\
        --run-dir run --name sentences \\
        --store ./probes --allow-no-signal
    python -m benchmarks.helm_sentences report sentences.jsonl run/train"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold

from hallutracer_research.data.statement_sets import MODELS
from service.fitting.estimator import DepthMeanProbe

Scores = NDArray[np.float64]


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each sentence; those of one passage are one group, whoever wrote them."""
    found = []
    for model in MODELS:
        passages = json.loads((folder / "data" / model / "data.json").read_text())
        for number, passage in passages.items():
            text = passage["prompt"]
            for place, one in enumerate(passage["sentences"]):
                sentence = f" {one['sentence'].strip()}"
                found.append(
                    {
                        "id": f"{model}-{number}-{place}",
                        "prompt": text,
                        "answer": sentence,
                        "subset": model,
                        "label": 1 - one["label"],
                        "group": f"passage/{number}",
                    }
                )
                text += sentence
    said: dict[tuple[str, str], set[int]] = {}
    for row in found:
        said.setdefault((row["prompt"], row["answer"]), set()).add(row["label"])
    return [
        row for row in found if len(said[row["prompt"], row["answer"]]) == 1
    ]  # people disagree on one


def within(risk: Scores, wrong: Scores, source: NDArray[np.str_]) -> float:
    """Return the AUROC among sentences of one writer, by the pairs that each has."""
    values, weights = [], []
    for mask in (source == name for name in np.unique(source)):
        values.append(roc_auc_score(wrong[mask], risk[mask]))
        weights.append(wrong[mask].sum() * (1 - wrong[mask]).sum())
    return float(np.average(values, weights=weights))


def report(given: list[dict[str, Any]], run: Path) -> None:
    """Print the AUROC before a sentence, behind it and the difference, with 95 % intervals over
    passages."""
    factual = np.array([row["label"] for row in given])
    group = np.array([row["group"] for row in given])
    source = np.array([row["subset"] for row in given])
    geometry = json.loads((run / "run.json").read_text())["model"]["geometry"]
    shape = geometry["num_layers"], len(given), geometry["num_heads"], geometry["head_dim"]
    risks = []
    for file in ("rows-attention_head.f32", "answers/rows-attention_head.f32"):
        read = np.fromfile(run / file, np.float32).reshape(shape).swapaxes(0, 1)
        risk = np.zeros(len(given))
        for train, test in StratifiedGroupKFold(5, shuffle=True, random_state=0).split(
            read, factual, group
        ):
            probe = DepthMeanProbe(1.0, folds=3, seeds=(0,)).fit(
                read[train], factual[train], groups=group[train]
            )
            risk[test] = probe.predict_proba(read[test])[:, list(probe.classes_).index(0)]
        risks.append(risk)
    wrong = 1.0 - factual
    measures: dict[str, Callable[[Scores, NDArray[np.bool_]], float]] = {
        "all": lambda risk, kept: float(roc_auc_score(wrong[kept], risk[kept])),
        "within a writer": lambda risk, kept: within(risk[kept], wrong[kept], source[kept]),
    }
    names = np.unique(group)
    for name, measure in measures.items():
        both = []
        for kept in (group == group, *(group != left_out for left_out in names)):
            both.append([measure(risk, kept) for risk in risks])
        values = np.array([[before, after, after - before] for before, after in both]) * 100
        left = values[1:]
        error = np.sqrt(
            (len(names) - 1) / len(names) * ((left - left.mean(0)) ** 2).sum(0)
        )  # jackknife
        told = [
            f"{value:.1f} [{value - 1.96 * se:.1f}, {value + 1.96 * se:.1f}]"
            for value, se in zip(values[0], error, strict=True)
        ]
        print(f"| {name} | {' | '.join(told)} |")


if __name__ == "__main__":
    what, path = sys.argv[1], Path(sys.argv[2])
    if what == "rows":
        print("\n".join(json.dumps(row, ensure_ascii=False) for row in rows(path)))
    else:
        report([json.loads(line) for line in path.read_text().splitlines()], Path(sys.argv[3]))
