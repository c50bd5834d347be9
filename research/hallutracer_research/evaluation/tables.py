"""The tables of an evaluation: the main one (tab:main-results), who leads whom, what a gate gains,
forms, transfer; and each row's scores as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
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
from hallutracer_research.evaluation.methods.base import MethodInputs
from hallutracer_research.evaluation.methods.references import text_ngrams
from hallutracer_research.evaluation.options import CLASSES, Cost, EvaluateOptions
from hallutracer_research.evaluation.page import METHOD, SET, Cell, Column, Table
from hallutracer_research.evaluation.results import Measures, SetResult, pooled_ranks, spread
from hallutracer_research.evaluation.splits import chosen_depth_mean, kept
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
    return [
        {
            "set": title,
            "method": METHODS[name].title,
            "class": costs[name].cls,
            "cost": costs[name].prefills,
        }
        | measures[name]
        for name in sorted(measures, key=lambda name: order.index(costs[name].cls))
    ]


def main_table(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Table:
    """Return tab:main-results of this run."""
    return Table(
        name="main",
        label="tab:main-results",
        title="Hallucination detection",
        columns=(
            SET,
            METHOD,
            Column("class", "Class", "text"),
            Column("cost", "Cost, prefills"),
            Column("within", "AUROC within kind", "percent", higher=True),
            Column("auroc", "AUROC", "percent", higher=True),
            Column("auprc_hallucinated", "AUPRC, hallucinated positive", "percent", higher=True),
            Column("auprc_factual", "AUPRC, factual positive", "percent", higher=True),
        ),
        rows=rows,
        caption=(
            "AUROC and AUPRC in percent, means over the test sides of all folds and seeds: AUROC"
            " with its 95 % interval over groups, for other training and test rows of this kind;"
            " AUPRC ± standard deviation over sides. Class: what a score takes"
            f" ({', '.join(f'{name}: {text}' for name, text in CLASSES.items())}); its cost is in"
            " prefills of the same prompt. Within kind: of pairs of rows of one kind, what is left"
            " once the kind is known."
        ),
        notes=notes,
        block="set",
    )


def decisions_table(sets: Sequence[SetResult]) -> Table:
    """Return, for each set and method, what a gate gains by its order of the rows."""
    rows: list[Mapping[str, Cell]] = []
    for result in sets:
        for method, of_method in result.scores.items():
            found = [decisions(result.label[side], score) for side, score in test_sides(of_method)]
            cells: dict[str, Cell] = {}
            for name in found[0]:
                cells[name] = spread([of_side[name] for of_side in found])
            rows.append({"set": result.title, "method": METHODS[method].title, **cells})
    return Table(
        name="decisions",
        title="What a gate gains",
        columns=(
            SET,
            METHOD,
            Column("e_aurc", "E-AURC", higher=False),
            *(
                Column(
                    f"caught_at_{100 * share:.0f}",
                    f"Wrong caught, {share:.0%} of right withheld",
                    "percent",
                    higher=True,
                )
                for share in WITHHELD
            ),
        ),
        rows=rows,
        block="set",
        caption=(
            "Means ± standard deviation over the test sides. E-AURC: area under the curve of wrong"
            " among answered over the share answered, less that of a perfect order, so 0 is"
            " perfect. Caught: the share of wrong answers that is withheld where so many of the"
            " right ones are."
        ),
    )


SHOWN = (0.1, 0.2, 0.3, 0.5)
# of the share shown: what a first look lets begin, where a second one chooses among the written
TWICE = 2


def second_look_table(sets: Sequence[SetResult]) -> Table | None:
    """Return what is shown wrong, and what is decoded for it, where the risk before the answer, its
    own tokens', or one after the other choose the share that is shown; None where no set has all of
    these."""
    rows: list[Mapping[str, Cell]] = []
    for result in sets:
        behind = result.prepared.inputs.behind
        if behind is None or not {ANSWER_MEAN, WITH_ANSWER} <= result.scores.keys():
            continue
        folds = [result.scores[name] for name in (OURS, ANSWER_MEAN, WITH_ANSWER)]
        of_folds = list(zip(*map(test_sides, folds), strict=True))
        for share in SHOWN:
            found: dict[str, list[float]] = {}
            for of_fold in of_folds:
                test = of_fold[0][0]
                before, after, both = (score for _, score in of_fold)
                wrong, said = 1 - result.label[test], behind.said[test]
                shown, begun = (
                    max(1, round(part * len(test))) for part in (share, min(1.0, TWICE * share))
                )
                first = np.argsort(before, kind="stable")
                then = first[:begun][np.argsort(both[first[:begun]], kind="stable")]
                ways = {
                    "before": (first[:shown], first[:shown]),
                    "staged": (then[:shown], first[:begun]),
                    "after": (np.argsort(after, kind="stable")[:shown], first),
                    "both": (np.argsort(both, kind="stable")[:shown], first),
                }
                for name, (chosen, decoded) in ways.items():
                    found.setdefault(name, []).append(float(wrong[chosen].mean()))
                    found.setdefault(f"{name}_tokens", []).append(
                        float(said[decoded].sum() / said.sum())
                    )
            row: dict[str, Cell] = {"set": result.title, "shown": share}
            rows.append(row | {name: spread(values) for name, values in found.items()})
    if not rows:
        return None
    titles = {
        "before": "by the risk before",
        "after": "by the answer's own tokens",
        "both": "by both",
        "staged": f"the risk before lets {TWICE} times as many begin, both choose",
    }
    return Table(
        name="second_look",
        title="What a second look shows, and what it costs",
        columns=(
            SET,
            Column("shown", "Shown", "percent", 2),
            *(Column(name, f"Wrong, {title}", "percent") for name, title in titles.items()),
            *(
                Column(f"{name}_tokens", f"Tokens, {titles[name]}", "percent")
                for name in ("before", "staged")
            ),
        ),
        rows=rows,
        block="set",
        caption=(
            "Of each test side a share of the answers is shown, those of lowest risk: the share of"
            " them that is wrong, and of all answers' tokens those that are decoded for it (all,"
            " where every answer is written before it is chosen). Means ± standard deviation over"
            " the test sides."
        ),
    )


def ahead_table(sets: Sequence[SetResult]) -> Table:
    """Return by how much our method leads each other one, on the same test sides; and the kind and
    our method together the kind alone, which is what a probe adds to knowing the sort of
    question."""
    rows: list[Mapping[str, Cell]] = []
    for result in sets:
        order = ("A", *(name for name in CLASSES if name != "A"))
        pairs = [(OURS, other) for other in result.scores if other != OURS]
        pairs.sort(key=lambda pair: order.index(METHODS[pair[1]].cost))
        if {WITH_KIND, "kind-prior"} <= result.scores.keys():
            pairs.insert(0, (WITH_KIND, "kind-prior"))
        for one, other in pairs:
            sides = test_sides(result.scores[one]), test_sides(result.scores[other])
            cells = {"gain": _interval(gain(result.label, result.group, *sides))}
            if result.kinds is not None:
                cells["within"] = _interval(gain(result.label, result.group, *sides, result.kinds))
            names = {
                "method": METHODS[one].title,
                "over": METHODS[other].title,
                "class": METHODS[other].cost,
            }
            rows.append({"set": result.title, **names, **cells})
    return Table(
        name="ahead",
        title="Ahead of each rival",
        columns=(
            SET,
            METHOD,
            Column("over", "Over", "text"),
            Column("class", "Its class", "text"),
            Column("within", "AUROC within kind, points", "percent"),
            Column("gain", "AUROC, points", "percent"),
        ),
        rows=rows,
        block="set",
        caption=(
            "Differences of AUROC in points, paired by test side, with 95 % intervals over groups:"
            " where an interval holds 0, the rows do not tell who leads."
        ),
    )


def _interval(found: Gain) -> dict[str, float]:
    return {"mean": found.difference, "low": found.low, "high": found.high}


def form_table(sets: Sequence[SetResult]) -> Table | None:
    """Return a row for each form of conversation of each set with two or more; None where there is
    no such set."""
    rows: list[Mapping[str, Cell]] = []
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
            cells: dict[str, Cell] = {}
            if 0 < label.sum() < len(label):
                cells = {method: risk_auroc(label, rank[inside]) for method, rank in ranks.items()}
            rows.append(
                {
                    "set": result.title,
                    FORM: name,
                    "rows": len(label),
                    "wrong": float(1 - label.mean()),
                    **cells,
                }
            )
    if not rows:
        return None
    return Table(
        name="forms",
        title="By form of conversation",
        columns=(
            SET,
            Column(FORM, "Form", "text"),
            Column("rows", "Rows", "integer"),
            Column("wrong", "Hallucinated", "percent"),
            *(
                Column(method, f"AUROC, {METHODS[method].title}", "percent", higher=True)
                for method in methods
            ),
        ),
        rows=rows,
        block="set",
        caption=(
            "AUROC in percent within the rows of one form, by out-of-fold ranks of the first seed."
            " What a form does to the level of the risk does not show here: `hallutracer train`"
            " puts that into the model card."
        ),
    )


def write_row_scores(result: SetResult, path: Path) -> None:
    """Write a line for each labelled row as CSV: id, group, label (1 factual), and each method's
    rank of risk.  A rank is relative, in (0, 1), among the rows of the first seed's fold that
    tested the row: no fit saw it."""
    ranks = [pooled_ranks(len(result.label), scores) for scores in result.scores.values()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", "group", "label", *result.scores])
    dataset = result.prepared.rows.dataset
    for place, row in enumerate(result.prepared.index.tolist()):
        values = [f"{rank[place]:.6f}" for rank in ranks]
        writer.writerow(
            [dataset.rows[row].id, int(result.group[place]), int(result.label[place]), *values]
        )
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
    rows: list[Mapping[str, Cell]] = []
    notes: list[str] = []
    names: list[str] = []
    for title, inputs in sets.items():
        source = sources_of(inputs.kind)
        found = sorted(set(source.tolist()))
        if len(found) < 2 or "" in found or not any("/" in name for name in inputs.kind.tolist()):
            continue
        names += [name for name in found if name not in names]
        plans = [(name, np.flatnonzero(source == name), found) for name in found]
        if len(found) > 2:
            plans += [(f"all but {name}", np.flatnonzero(source != name), [name]) for name in found]
        for trained_on, train, tested in tqdm(plans, f"{title}, transfer", unit="source"):
            path = folder / f"{title}-{trained_on}".replace("/", "-")
            try:
                scores = _scores(inputs, train, tested, options, path.with_suffix(".npz"))
            except (TrainingError, NoDirection) as error:
                notes.append(f"{title}, trained on {trained_on}: left out, {error}")
                continue
            for method, of_method in scores.items():
                sides = {
                    name: (inputs.label[source == name], of_method[source == name])
                    for name in tested
                }
                cells: dict[str, Cell] = {
                    name: risk_auroc(label, score)
                    for name, (label, score) in sides.items()
                    if len(set(label.tolist())) == 2 and np.isfinite(score).all()
                }
                rows.append(
                    {
                        "set": title,
                        "train": trained_on,
                        "method": METHODS[_TRANSFER[method]].title,
                        **cells,
                    }
                )
    if not rows:
        return None
    return Table(
        name="transfer",
        title="Trained on one source, tested on another",
        columns=(
            SET,
            Column("train", "Trained on", "text"),
            METHOD,
            *(Column(name, f"AUROC on {name}", "percent", higher=True) for name in names),
        ),
        rows=rows,
        caption=(
            "AUROC in percent. A source's own column is cross-validated; in the others no group is"
            " on both sides."
        ),
        notes=notes,
        block="set",
    )


def _scores(
    inputs: MethodInputs, train: Index, tested: Sequence[str], options: EvaluateOptions, path: Path
) -> dict[str, Floats]:
    """Return scores [n] by each method; NaN for rows that were not tested.  Training rows are
    tested out of fold."""

    def make() -> dict[str, NDArray[np.generic]]:
        found = {name: np.full(len(inputs.label), np.nan) for name in _TRANSFER}
        outside = np.setdiff1d(np.arange(len(inputs.label)), train)
        shared = np.isin(inputs.group[train], inputs.group[outside])
        own = len(tested) > 1  # its own source is among them
        splits = group_folds(inputs.label, inputs.group, train, options.folds, 0) if own else []
        if not (
            own and shared.all()
        ):  # sources that ask the same questions: there is nothing to learn from
            splits = [*splits, (train[~shared], outside)]
        for fitted, test in splits:
            found["depth mean"][test] = -chosen_depth_mean(
                inputs.heads, inputs.group, fitted, test, 0, options
            )
            found["text"][test] = text_ngrams(inputs, fitted, test, 0)
        return dict(found)

    return {name: np.asarray(values, np.float64) for name, values in kept(path, make).items()}
