"""Says whether a bundle pays for its model: whether its risk beats what costs less, on the same
rows, and whether a gate saves more than it withholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.feature_extraction.text import TfidfVectorizer

from service.fitting.decisions import at_threshold, net_benefit
from service.fitting.folds import outer_folds
from service.fitting.nested_cv import KIND_AND_FORM, Evaluation, Inputs, rounded
from service.fitting.probes import Floats, Index
from service.fitting.scores import Tests, gain, mean_auroc
from service.fitting.texts import NoWords, text_logits
from service.trainer.cards import SIGNALS, say

TEXT = "text"  # the rival that reads the prompt's words and no model
CHEAPER = (TEXT, "first_token_entropy", "first_token_max_prob", "prompt_length", KIND_AND_FORM)
TITLES = SIGNALS | {TEXT: "the prompt's words alone, no model"}
SHOWN_COSTS = (0.25, 1.0, 4.0)  # a wrong answer in withheld right ones
LEAST_ROWS, LEAST_OF_A_CLASS = 100, 20  # of a kind that is judged by itself
LEVEL = 0.05  # probability that chance alone names a kind, over all kinds together


def text_risks(
    texts: Sequence[str],
    label: NDArray[np.int64],
    group: Index,
    *,
    folds: int,
    seed: int,
    learnt: NDArray[np.int64] | None = None,
) -> Tests:
    """Return the risk by the words of each prompt alone, for the test rows of each outer fold.

    ``learnt`` [n]: the label that the fits learn, if it is not the one that figures are by."""
    learnt = label if learnt is None else learnt
    columns = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\w+")
    tests = []
    for fold in outer_folds(label, group, folds=folds, seeds=(seed,)):
        try:
            [factual] = text_logits(columns, texts, learnt, fold.train, fold.test)
        except NoWords:
            tests.append((fold.test, np.zeros(len(fold.test))))
        else:
            tests.append((fold.test, expit(-factual)))
    return tests


def recommend(
    inputs: Inputs,
    texts: Sequence[str],
    nested: Evaluation,
    served: str,
    *,
    folds: int,
    seed: int,
) -> dict[str, Any]:
    """Return the recommendation for evaluation.json: ``use`` is "yes", "kinds" or "no".

    "yes": the AUROC of the served signal less that of the strongest cheaper rival has a 95 %
    interval above zero, and at one of ``SHOWN_COSTS`` the gate saves more than answering everything
    and more than withholding everything.  "kinds": both hold inside some kinds; the level is shared
    by all kinds that are judged.  All of it on the folds of the first seed, which no fit saw."""
    label, group = inputs.label, inputs.group
    served_tests = nested.tests[served][:folds]
    rivals = {name: nested.tests[name][:folds] for name in CHEAPER if name in nested.tests}
    learnt = inputs.readouts.label
    rivals[TEXT] = text_risks(texts, label, group, folds=folds, seed=seed, learnt=learnt)
    every = np.ones(len(label), np.bool_)
    risk = nested.risk[served][0]
    overall = _against(label, group, served_tests, rivals, every)
    assert overall is not None, "each test side of the outer folds has both classes"
    gates = [_gate(label, risk, cost) for cost in SHOWN_COSTS]
    kinds = _by_kind(inputs, served_tests, rivals, risk)
    judged = [row for row in kinds.values() if "gain" in row]
    for row in judged:
        ahead = row["gain"]
        beyond_chance = ahead["difference"] > 0 and ahead["p_value"] <= LEVEL / len(judged)
        row["use"] = bool(beyond_chance and row.pop("pays"))
    if overall["gain"]["low"] > 0 and any(gate["pays"] for gate in gates):
        use = "yes"
    else:
        use = "kinds" if any(row["use"] for row in judged) else "no"
    record: dict[str, Any] = {
        "use": use,
        "kinds": [name for name, row in kinds.items() if row.get("use")],
        **overall,
        "rows": len(label),
        "right": float(label.mean()),
        "gates": gates,
        "by_kind": kinds,
    }
    record = rounded(record)
    return record | {"sentence": say("recommendation", record)}


def _against(
    label: NDArray[np.int64],
    group: Index,
    served_tests: Tests,
    rivals: Mapping[str, Tests],
    inside: NDArray[np.bool_],
) -> dict[str, Any] | None:
    """Return the strongest rival on the rows ``inside`` [n], both AUROCs and the gain over it; None
    if no test side has both classes there."""
    served_tests = _restricted(served_tests, inside)
    aurocs = {}
    for name, tests in rivals.items():
        value = mean_auroc(label, _restricted(tests, inside))
        if np.isfinite(value):
            aurocs[name] = float(value)
    if not aurocs:
        return None
    strongest = max(aurocs, key=lambda name: aurocs[name])
    ahead = gain(label, group, served_tests, _restricted(rivals[strongest], inside))
    return {
        "auroc": float(mean_auroc(label, served_tests)),
        "rival": strongest,
        "rival_title": TITLES[strongest],
        "rival_auroc": aurocs[strongest],
        "gain": ahead._asdict(),
    }


def _restricted(tests: Tests, inside: NDArray[np.bool_]) -> Tests:
    sides = [(rows[inside[rows]], np.asarray(score)[inside[rows]]) for rows, score in tests]
    return [(rows, score) for rows, score in sides if len(rows)]


def _gate(label: NDArray[np.int64], risk: Floats, cost: float) -> dict[str, Any]:
    """Return what the gate for this cost of a wrong answer does: label [n], risk [n]."""
    threshold = 1 / (1 + cost)
    gate: dict[str, Any] = {"wrong_costs": cost, "threshold": threshold}
    gate |= at_threshold(label, risk, threshold)
    if not gate["answered"]:
        gate["wrong_among_answered"] = None
    saved = net_benefit(label, risk, cost)
    return gate | {
        "pays": saved["net_benefit"] > max(0.0, saved["withholding_all"]),
    }


def _by_kind(
    inputs: Inputs, served_tests: Tests, rivals: Mapping[str, Tests], risk: Floats
) -> dict[str, dict[str, Any]]:
    """Return rows and share right of each kind, most rows first; of large ones also the gain."""
    names = np.array([row.get("kind") or "" for row in inputs.strata], dtype=object)
    label, table = inputs.label, dict[str, dict[str, Any]]()
    counts = {name: int((names == name).sum()) for name in sorted(set(names.tolist()) - {""})}
    for name, rows in sorted(counts.items(), key=lambda pair: -pair[1]):
        inside = names == name
        right = int(label[inside].sum())
        row: dict[str, Any] = {"rows": rows, "right": right / rows}
        enough = rows >= LEAST_ROWS and min(right, rows - right) >= LEAST_OF_A_CLASS
        compared = _against(label, inputs.group, served_tests, rivals, inside) if enough else None
        if compared is not None:
            row |= compared
            gates = [_gate(label[inside], risk[inside], cost) for cost in SHOWN_COSTS]
            row["pays"] = any(gate["pays"] for gate in gates)
        table[name] = row
    return table
