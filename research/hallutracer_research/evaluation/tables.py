"""The tables of an evaluation: the main one (tab:main-results), who leads whom, what a gate gains,
forms, transfer; and each row's scores as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hallutracer_research.evaluation.methods import (
    ANSWER_MEAN,
    METHODS,
    OURS,
    WITH_ANSWER,
    WITH_KIND,
)
from hallutracer_research.evaluation.methods.base import Fold, MethodInputs
from hallutracer_research.evaluation.methods.references import text_ngrams
from hallutracer_research.evaluation.options import CLASSES, Cost, EvaluateOptions
from hallutracer_research.evaluation.page import Cell, Column, Rows, Table, described
from hallutracer_research.evaluation.results import Measures, SetResult, pooled_ranks, spread
from hallutracer_research.evaluation.splits import Arrays, chosen_depth_mean, kept
from probes_store.local import atomic_write
from service.data.training_rows import FORM
from service.errors import NoDirection, TrainingError
from service.fitting.decisions import WITHHELD, decisions
from service.fitting.folds import group_folds
from service.fitting.nested_cv import test_sides
from service.fitting.probes import Floats, Index
from service.fitting.scores import Gain, gain, risk_auroc

FORM_RIVALS = ("iti", "text-ngrams")  # the best single head, and what the words alone tell


def rows_of(
    title: str, measures: Mapping[str, Measures], costs: Mapping[str, Cost]
) -> list[dict[str, Any]]:
    """Return the main table's rows of one set: our cost class first, within it in the order of
    ``measures``."""
    order = ("A", *(name for name in CLASSES if name not in ("A", "none")), "none")
    rows = []
    for name in sorted(measures, key=lambda name: order.index(costs[name].cls)):
        cost = dict(zip(("class", "cost"), costs[name], strict=True))
        rows.append({"set": title, "method": METHODS[name].title} | cost | measures[name])
    return rows


def main_table(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Table:
    """Return tab:main-results of this run."""
    classes = ", ".join(f"{name}: {text}" for name, text in CLASSES.items())
    return described("main", rows, notes=notes, classes=classes)


def decisions_table(sets: Sequence[SetResult]) -> Table:
    """Return, for each set and method, what a gate gains by its order of the rows."""
    rows: Rows = []
    for result in sets:
        for method, scores in result.scores.items():
            sides = [decisions(result.label[side], score) for side, score in test_sides(scores)]
            cells = {name: spread(list(map(itemgetter(name), sides))) for name in sides[0]}
            rows.append({"set": result.title, "method": METHODS[method].title, **cells})
    titles = {
        f"caught_at_{100 * share:.0f}": f"{share:.0%} of right withheld" for share in WITHHELD
    }
    return described("decisions", rows, columns=_shares(titles, "Wrong caught,"))


SHOWN = (0.1, 0.2, 0.3, 0.5)
# of the share shown: what a first look lets begin, where a second one chooses among the written
TWICE = 2


def second_look_table(sets: Sequence[SetResult]) -> Table | None:
    """Return what is shown wrong, and what is decoded for it, where the risk before the answer, its
    own tokens', or one after the other choose the share that is shown; None where no set has all of
    these."""
    rows: Rows = []
    for result in sets:
        behind = result.prepared.inputs.behind
        if behind is None or not {ANSWER_MEAN, WITH_ANSWER} <= result.scores.keys():
            continue
        looks = [test_sides(result.scores[name]) for name in (OURS, ANSWER_MEAN, WITH_ANSWER)]
        for share in SHOWN:
            shares: dict[str, list[float]] = {}
            for (test, before), (_, after), (_, both) in zip(*looks, strict=True):
                wrong, tokens = 1 - result.label[test], behind.answer_tokens[test]
                shown, begun = (
                    max(1, round(part * len(test))) for part in (share, min(1.0, TWICE * share))
                )
                first, by_answer, by_both = (
                    np.argsort(risk, kind="stable") for risk in (before, after, both)
                )
                started = first[:begun]
                staged = started[np.argsort(both[started], kind="stable")]
                ways = {  # the order in which answers are shown; those that are decoded
                    "before": (first, first[:shown]),
                    "staged": (staged, started),
                    "after": (by_answer, first),
                    "both": (by_both, first),
                }
                for name, (order, decoded) in ways.items():
                    share_of_tokens = float(tokens[decoded].sum() / tokens.sum())
                    shares.setdefault(name, []).append(float(wrong[order[:shown]].mean()))
                    shares.setdefault(f"{name}_tokens", []).append(share_of_tokens)
            row: dict[str, Cell] = {"set": result.title, "shown": share}
            rows.append(row | {name: spread(values) for name, values in shares.items()})
    return described("second_look", rows, twice=TWICE) if rows else None


def ahead_table(sets: Sequence[SetResult]) -> Table:
    """Return by how much our method leads each other one, on the same test sides; and the kind and
    our method together the kind alone, which is what a probe adds to knowing the sort of
    question."""
    rows: Rows = []
    order = ("A", *(name for name in CLASSES if name != "A"))
    for result in sets:
        pairs = [(OURS, rival) for rival in result.scores if rival != OURS]
        pairs.sort(key=lambda pair: order.index(METHODS[pair[1]].cost))
        if {WITH_KIND, "kind-prior"} <= result.scores.keys():
            pairs.insert(0, (WITH_KIND, "kind-prior"))
        for method, rival in pairs:
            sides = test_sides(result.scores[method]), test_sides(result.scores[rival])
            cells = {"gain": _interval(gain(result.label, result.group, *sides))}
            if result.kinds is not None:
                cells["within"] = _interval(gain(result.label, result.group, *sides, result.kinds))
            over, cost, *_ = METHODS[rival]
            names = {"method": METHODS[method].title, "over": over, "class": cost}
            rows.append({"set": result.title, **names, **cells})
    return described("ahead", rows)


def _interval(difference: Gain) -> dict[str, float]:
    return {"mean": difference.difference, "low": difference.low, "high": difference.high}


def form_table(sets: Sequence[SetResult]) -> Table | None:
    """Return a row for each form of conversation of each set with two or more; None where there is
    no such set."""
    rows: Rows = []
    methods: list[str] = []
    for result in sets:
        dataset = result.prepared.rows.dataset
        form = np.array(
            [dataset.rows[row].strata.get(FORM, "") for row in result.prepared.index.tolist()],
            np.str_,
        )
        names = sorted(set(form.tolist()) - {""})
        if len(names) < 2:
            continue
        shown = (OURS, *(method for method in FORM_RIVALS if method in result.scores))
        methods += [method for method in shown if method not in methods]
        ranks = {method: pooled_ranks(len(form), result.scores[method]) for method in shown}
        for name in names:
            inside = form == name
            label = result.label[inside]
            row: dict[str, Cell] = {
                "set": result.title,
                FORM: name,
                "rows": len(label),
                "wrong": float(1 - label.mean()),
            }
            if 0 < label.sum() < len(label):
                row |= {method: risk_auroc(label, rank[inside]) for method, rank in ranks.items()}
            rows.append(row)
    columns = _shares({method: METHODS[method].title for method in methods}, "AUROC,")
    return described("forms", rows, columns=columns) if rows else None


def _shares(titles: Mapping[str, str], prefix: str) -> list[Column]:
    """Return a column of shares, the more the better, for each key."""
    return [
        Column(key, f"{prefix} {title}", "percent", higher=True) for key, title in titles.items()
    ]


def write_row_scores(result: SetResult, path: Path) -> None:
    """Write a line for each labelled row as CSV: id, group, label (1 factual), and each method's
    rank of risk.  A rank is relative, in (0, 1), among the rows of the first seed's fold that
    tested the row: no fit saw it."""
    ranks = [pooled_ranks(len(result.label), scores) for scores in result.scores.values()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", "group", "label", *result.scores])
    dataset = result.prepared.rows.dataset
    for number, row in enumerate(result.prepared.index.tolist()):
        labels = [int(result.group[number]), int(result.label[number])]
        values = [f"{rank[number]:.6f}" for rank in ranks]
        writer.writerow([dataset.rows[row].id, *labels, *values])
    atomic_write(path, text.getvalue().encode("utf-8", "backslashreplace"))


def sources_of(kind: NDArray[np.str_]) -> NDArray[np.str_]:
    """Return each row's source [n]: its kind up to the first slash."""
    return np.array([name.partition("/")[0] for name in kind.tolist()], np.str_)


_TRANSFER = {"depth mean": OURS, "text": "text-ngrams"}  # name in the kept file -> method


def transfer_table(
    sets: Mapping[str, MethodInputs], options: EvaluateOptions, folder: Path
) -> Table | None:
    """Return a block of rows for each mixture of two sources or more (named in front of the kind);
    None where no set is one. Probes are fitted on one source, or on all but one, and scored on the
    others; no group is on both sides.  A source's own column is cross-validated."""
    rows: Rows = []
    notes: list[str] = []
    names: list[str] = []
    for title, inputs in sets.items():
        source = sources_of(inputs.kind)
        sources = sorted(set(source.tolist()))
        mixed = len(sources) > 1 and "" not in sources
        if not mixed or not any("/" in name for name in inputs.kind.tolist()):
            continue
        names += [name for name in sources if name not in names]
        plans = [(name, np.flatnonzero(source == name), sources) for name in sources]
        if len(sources) > 2:
            plans += [
                (f"all but {name}", np.flatnonzero(source != name), [name]) for name in sources
            ]
        for trained_on, train, tested in tqdm(plans, f"{title}, transfer", unit="source"):
            path = folder / f"{title}-{trained_on}".replace("/", "-")
            try:
                scores = _scores(inputs, train, tested, options, path.with_suffix(".npz"))
            except (TrainingError, NoDirection) as error:
                notes.append(f"{title}, trained on {trained_on}: left out, {error}")
                continue
            for method, score in scores.items():
                row: dict[str, Cell] = {
                    "set": title,
                    "train": trained_on,
                    "method": METHODS[_TRANSFER[method]].title,
                }
                for name in tested:
                    label, risk = inputs.label[source == name], score[source == name]
                    if len(set(label.tolist())) == 2 and np.isfinite(risk).all():
                        row[name] = risk_auroc(label, risk)
                rows.append(row)
    columns = _shares({name: name for name in names}, "AUROC on")
    return described("transfer", rows, columns=columns, notes=notes) if rows else None


def _scores(
    inputs: MethodInputs, train: Index, tested: Sequence[str], options: EvaluateOptions, path: Path
) -> dict[str, Floats]:
    """Return scores [n] by each method; NaN for rows that were not tested.  Training rows are
    tested out of fold."""

    def make() -> Arrays:
        scores = {name: np.full(len(inputs.label), np.nan) for name in _TRANSFER}
        outside = np.setdiff1d(np.arange(len(inputs.label)), train)
        shared = np.isin(inputs.group[train], inputs.group[outside])
        with_itself = len(tested) > 1  # its own source is among them
        splits = []
        if with_itself:
            splits += group_folds(inputs.label, inputs.group, train, options.folds, 0)
        # Of sources that ask the same questions there is nothing to learn from.
        if not (with_itself and shared.all()):
            splits.append((train[~shared], outside))
        for fitted, test in splits:
            fold = Fold(inputs, fitted, test, 0)
            scores["depth mean"][test] = -chosen_depth_mean(inputs.heads, fold, options)
            scores["text"][test] = text_ngrams(fold)
        return scores

    return {name: np.asarray(values, np.float64) for name, values in kept(path, make).items()}
