"""Fits the probes of an answer's own tokens, on the answers that training generates or that its
rows bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone

from probes_store.records import AnswerProbe
from probes_store.tensors import AnswerTensors, joined
from service.data.run_folder import json_lines
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

FEW = 40  # groups; with fewer in a class no answer probes are fitted


@dataclass(frozen=True, eq=False)
class AnswerFit:
    """The fitted answer probes of a bundle."""

    record: AnswerProbe
    tensors: AnswerTensors
    document: dict[str, Any]  # for evaluation.json


def fit_answer(
    data: PreparedData,
    probe: DepthMeanProbe,
    options: TrainOptions,
    engine: Engine,
    console: Console,
) -> AnswerFit | None:
    """Fit probes on the answers' tokens that the run read.  ``probe`` is fitted on the same rows
    before the answer.

    Return None if nothing was read, if a class has fewer than ``FEW`` groups, or if the fit has no
    signal; the console says why.  Raises EngineError if serving reads other logits."""
    if data.answers is None:
        return None
    if data.labelled.thoughts:
        console.print(
            f"no probes of the answers' tokens: {data.labelled.thoughts} answers begin with a"
            " thought, which would be read with them"
        )
        return None
    rows = np.flatnonzero(was_read(data.answers))
    read = data.answers.subset(rows)
    label, group = read.label, data.inputs.group[rows]
    if (least := min(len(np.unique(group[label == value])) for value in (0, 1))) < FEW:
        console.print(
            f"no probes of the answers' tokens: {least} groups of the rarer class, and {FEW} are"
            " needed"
        )
        return None
    console.print("fitting probes of the answers' tokens")
    try:
        answer_probe = clone(probe).fit_readouts(read, group)
        answer_probe.fit_risk(label, soft_label=read.soft_label)
    except (NoDirection, TrainingError) as error:
        console.print(f"no probes of the answers' tokens: {error}")
        return None
    every = np.arange(len(rows))
    after = [(every, risk) for risk in answer_probe.out_of_fold_risk_]
    before = [(every, risk) for risk in probe.out_of_fold_risk_[:, rows]]
    document = _document(data.inputs.label[rows], group, after, before, data, rows)
    if document["auroc"]["low"] <= CHANCE and not options.allow_no_signal:
        console.print(
            f"no probes of the answers' tokens: AUROC {document['auroc']['mean']:.3f}, and its"
            " interval reaches chance"
        )
        return None
    cut = choose_threshold(options.rule, label, answer_probe.out_of_fold_risk_)
    document["threshold"] = cut.document() | {"out_of_fold": rounded(cut.gate)}
    [weight] = answer_probe.classifier_.weight.tolist()
    intercept = answer_probe.classifier_.intercept
    record = AnswerProbe(
        weight=weight,
        intercept=intercept,
        threshold=cut.threshold,
        rows=len(label),
        hallucinated=int(len(label) - label.sum()),
        auroc=document["auroc"]["mean"],
        before=document["before"]["mean"],
        c=answer_probe.C_,
        statement=say("answer", document, len(label), data.labelled.agreement is not None),
    )
    return AnswerFit(record, _tensors(answer_probe, read, data, engine), document)


def _document(
    label: Index,
    group: Index,
    after: scores.Tests,
    before: scores.Tests,
    data: PreparedData,
    rows: Index,
) -> dict[str, Any]:
    document: dict[str, Any] = {"rows": len(label), "hallucinated": int(len(label) - label.sum())}
    kinds = [data.inputs.strata[row].get("kind") for row in rows.tolist()]
    strata = {"": None} | (
        {} if None in kinds else {"_within_kind": np.unique(kinds, return_inverse=True)[1]}
    )
    for name, within in strata.items():
        if name and scores.mean_auroc(label, after, within) != scores.mean_auroc(
            label, after, within
        ):
            continue  # no kind has both classes
        for key, tests in (("auroc", after), ("before", before)):
            ends = scores.auroc_interval(label, group, tests, within)
            document[f"{key}{name}"] = rounded(
                {"mean": scores.mean_auroc(label, tests, within), **ends._asdict()}
            )
        document[f"gain{name}"] = rounded(
            scores.gain(label, group, after, before, within)._asdict()
        )
    for key, tests in (("decisions", after), ("decisions_before", before)):
        of_tests = [decisions.decisions(label, risk) for _, risk in tests]
        means = np.mean([list(figures.values()) for figures in of_tests], axis=0)
        document[key] = rounded(dict(zip(of_tests[0], means.tolist(), strict=True)))
    return document


def _tensors(
    answer_probe: DepthMeanProbe, read: Readouts, data: PreparedData, engine: Engine
) -> AnswerTensors:
    """Return the stored arrays of the probes, with golden answers.  Raises EngineError if their
    replay differs."""
    fit = answer_probe.probes_
    arrays = (array.astype(np.float32) for array in (fit.direction, fit.bias, answer_probe.scale_))
    probes = Probes(read.file.site, fit.head, *arrays)
    chosen = golden_rows(
        answer_probe.classifier_.risk(
            signal_matrix(answer_probe.scaled_[answer_probe.logit_scale].trajectory)
        )
    )
    tokens_of = answer_tokens(data, engine)
    data_rows = read.index[chosen].tolist()
    prompts = [[*data.collection.prompts.of(row), *tokens_of(row)] for row in data_rows]
    counts = [len(tokens_of(row)) for row in data_rows]
    replayed = np.stack(
        [onset.trajectories[0] for onset in engine.score(prompts, [probes], last=counts)]
    )
    check_replay(engine, replayed, trajectories(read.subset(chosen), [probes]))
    ids, offsets = joined(prompts)
    return AnswerTensors(
        head=fit.head,
        direction=probes.direction,
        bias=probes.bias,
        scale=probes.scale,
        input_ids=ids,
        offsets=offsets,
        answer_tokens=np.array(counts, np.int32),
        trajectory=replayed.astype(np.float32),
        risk=answer_probe.classifier_.risk(signal_matrix(replayed)),
    )


def answer_tokens(data: PreparedData, engine: Engine) -> Callable[[int], list[int]]:
    """Return a function that gives the tokens of a data row's answer, as many as were read."""
    if data.collection.answers is None:
        return lambda row: continuation(engine, data.dataset.rows[row].answer)
    records = json_lines(data.collection.folder / "answers.jsonl")
    tokens = {record["row"]: record["tokens"] for record in records}
    return lambda row: tokens[row][:-1]  # the model never read its last token
