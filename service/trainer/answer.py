"""The second look: the same probes on the answer's own tokens, of the answers that training generates or is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone

from probes_store.records import AnswerProbe
from probes_store.tensors import AnswerTensors, joined
from service.engines.base import Engine
from service.errors import NoDirection, TrainingError
from service.fitting import decisions, scores
from service.fitting.estimator import DepthMeanProbe, signal_matrix
from service.fitting.nested_cv import rounded
from service.fitting.probes import Index, Readouts
from service.fitting.thresholds import choose_threshold
from service.prompts import continuation
from service.readout import Probes
from service.trainer.cards import CHANCE, say
from service.trainer.options import Console, TrainOptions
from service.trainer.prepare import PreparedData, trajectories, was_read
from service.trainer.publish import check_replay, golden_rows

FEW = 40  # groups of each class, below which no second look is fitted


@dataclass(frozen=True, eq=False)
class AnswerFit:
    """The fitted second part of a bundle."""

    record: AnswerProbe
    tensors: AnswerTensors
    document: dict[str, Any]  # of evaluation.json


def fit_answer(
    data: PreparedData, probe: DepthMeanProbe, options: TrainOptions, engine: Engine, console: Console
) -> AnswerFit | None:
    """Fit what the run read of its answers; ``probe`` is fitted on the same rows before the answer.

    None where nothing was read, where a class has fewer than ``FEW`` groups, and, with a line of why, where the answers
    tell nothing.  Raises EngineError where serving reads something else."""
    if data.answers is None:
        return None
    if data.labelled.thoughts:
        console.print(
            f"no probes of the answers' tokens: {data.labelled.thoughts} answers begin with a thought, which "
            "would be read with them"
        )
        return None
    there = np.flatnonzero(was_read(data.answers))
    read = data.answers.subset(there)
    label, group = read.label, data.inputs.group[there]
    if (least := min(len(np.unique(group[label == value])) for value in (0, 1))) < FEW:
        console.print(f"no probes of the answers' tokens: {least} groups of the rarer class, and {FEW} are needed")
        return None
    console.print("fitting probes of the answers' tokens")
    try:
        own = clone(probe).fit_readouts(read, group).fit_risk(label)
    except (NoDirection, TrainingError) as error:
        console.print(f"no probes of the answers' tokens: {error}")
        return None
    after, before = (
        [(np.arange(len(there)), risk) for risk in risks]
        for risks in (own.out_of_fold_risk_, probe.out_of_fold_risk_[:, there])
    )
    document = _document(label, group, after, before, data, there)
    if document["auroc"]["low"] <= CHANCE and not options.allow_no_signal:
        console.print(
            f"no probes of the answers' tokens: AUROC {document['auroc']['mean']:.3f}, and its interval reaches chance"
        )
        return None
    cut = choose_threshold(options.rule, label, own.out_of_fold_risk_)
    document["threshold"] = cut.document() | {"out_of_fold": rounded(cut.gate)}
    [weight], intercept = own.classifier_.weight.tolist(), own.classifier_.intercept
    record = AnswerProbe(
        weight=weight,
        intercept=intercept,
        threshold=cut.threshold,
        rows=len(label),
        hallucinated=int(len(label) - label.sum()),
        auroc=document["auroc"]["mean"],
        before=document["before"]["mean"],
        c=own.C_,
        statement=say("answer", document, len(label)),
    )
    return AnswerFit(record, _tensors(own, read, data, engine), document)


def _document(
    label: Index, group: Index, after: scores.Tests, before: scores.Tests, data: PreparedData, there: Index
) -> dict[str, Any]:
    document: dict[str, Any] = {"rows": len(label), "hallucinated": int(len(label) - label.sum())}
    kinds = [data.inputs.strata[row].get("kind") for row in there.tolist()]
    strata = {"": None} | ({} if None in kinds else {"_within_kind": np.unique(kinds, return_inverse=True)[1]})
    for name, within in strata.items():
        if name and scores.mean_auroc(label, after, within) != scores.mean_auroc(label, after, within):
            continue  # no kind has both classes
        for key, tests in (("auroc", after), ("before", before)):
            ends = scores.auroc_interval(label, group, tests, within)
            document[f"{key}{name}"] = rounded({"mean": scores.mean_auroc(label, tests, within), **ends._asdict()})
        document[f"gain{name}"] = rounded(scores.gain(label, group, after, before, within)._asdict())
    for key, tests in (("decisions", after), ("decisions_before", before)):
        found = [decisions.decisions(label, risk) for _, risk in tests]
        document[key] = rounded({name: float(np.mean([one[name] for one in found])) for name in found[0]})
    return document


def _tensors(own: DepthMeanProbe, read: Readouts, data: PreparedData, engine: Engine) -> AnswerTensors:
    """Return the probes as they are stored, and golden answers whose replay reads what training read."""
    fit = own.probes_
    arrays = (array.astype(np.float32) for array in (fit.direction, fit.bias, own.scale_))
    probes = Probes(read.file.site, fit.head, *arrays)
    chosen = golden_rows(own.classifier_.risk(signal_matrix(own.scaled_[own.logit_scale].trajectory)))
    said = answer_tokens(data, engine)
    places = read.index[chosen].tolist()
    rows, counts = (
        [[*data.collection.prompts.of(row), *said(row)] for row in places],
        [len(said(row)) for row in places],
    )
    replayed = np.stack([one.trajectories[0] for one in engine.score(rows, [probes], last=counts)])
    check_replay(engine, replayed, trajectories(read.subset(chosen), [probes]))
    ids, offsets = joined(rows)
    return AnswerTensors(
        head=fit.head,
        direction=probes.direction,
        bias=probes.bias,
        scale=probes.scale,
        input_ids=ids,
        offsets=offsets,
        answer_tokens=np.array(counts, np.int32),
        trajectory=replayed.astype(np.float32),
        risk=own.classifier_.risk(signal_matrix(replayed)),
    )


def answer_tokens(data: PreparedData, engine: Engine) -> Callable[[int], list[int]]:
    """Return what gives a data row's answer, as many tokens of it as were read."""
    if data.collection.answers is None:
        return lambda row: continuation(engine, data.dataset.rows[row].answer)
    with (data.collection.folder / "answers.jsonl").open(encoding="utf-8") as lines:
        said = {record["row"]: record["tokens"] for record in map(json.loads, lines)}
    return lambda row: said[row][:-1]  # the model did not go on from the last one
