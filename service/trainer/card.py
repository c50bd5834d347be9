"""The model card, README.md of the bundle: YAML front matter as the Hugging Face hub reads it, then plain text.

The same arguments give the same bytes: no time, no path, no version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from probes_store.manifest import Manifest, TrainingRecord
from service.fitting.presentation import markdown_table
from service.trainer.by_form import form_section
from service.trainer.context_card import context_section
from service.trainer.threshold_card import threshold_section
from service.trainer.uncertainty import uncertainty_section

METRICS = {
    "auroc": "AUROC",
    "auprc_hallucinated": "AUPRC (hallucinated positive)",
    "auprc_factual": "AUPRC (factual positive)",
    "brier": "Brier",
    "ece": "ECE",
    "ece_pooled": "ECE, folds pooled",
    "calibration_debiased": "calibration error, debiased",
}
SIGNALS = {
    "bundle": "this bundle",
    "depth_mean_unit_norm": "depth mean, unit norm (the paper's rule)",
    "depth_mean_standardized": "depth mean, standardised logits",
    "depth_mean_weighted": "depth mean, weighted layers",
    "fused_unit_norm": "fused: depth mean (unit norm) and first token",
    "fused_standardized": "fused: depth mean (standardised) and first token",
    "fused_weighted": "fused: depth mean (weighted) and first token",
    "context_unit_norm": "depth mean (unit norm), passage and its answer",
    "context_standardized": "depth mean (standardised), passage and its answer",
    "context_weighted": "depth mean (weighted), passage and its answer",
    "fused_context_unit_norm": "fused: depth mean (unit norm), first token, passage and its answer",
    "fused_context_standardized": "fused: depth mean (standardised), first token, passage and its answer",
    "fused_context_weighted": "fused: depth mean (weighted), first token, passage and its answer",
    "best_head": "best single head",
    "best_layer": "best single layer",
    "first_token_max_prob": "first-token maximum probability",
    "first_token_entropy": "first-token entropy",
    "prompt_length": "prompt length",
}
WITHIN = {
    "auroc_within_kind": "within kind",
    "auroc_within_kind_x_template": "within kind x template",
    "auroc_within_form": "within form",
}
PLOTS = {
    "roc.png": "ROC",
    "precision_recall.png": "Precision and recall",
    "coverage.png": "Coverage and error",
    "reliability.png": "Reliability",
    "trajectories.png": "Class-mean trajectories",
    "layers.png": "AUROC by layer",
}


CHANCE = 0.5  # AUROC
FEW_IN_A_FOLD = 5  # rows of the rarer class: with fewer, the spread over folds says nothing
CHEAPER = ("first_token_entropy", "first_token_max_prob", "prompt_length")  # signals that need no probes
LARGE_GROUP = 0.2  # share of the rows
NO_SIGNAL = (
    "**The interval of the bundle's own AUROC reaches chance: on these rows it is not known to tell anything. It was "
    "published because someone insisted. Do not serve this bundle.**"
)


def write_card(
    manifest: Manifest,
    evaluation: Mapping[str, Any],
    *,
    signal_std: Sequence[float],
    left_out: Mapping[str, int],
    plots: Sequence[str],
) -> str:
    """The whole README.md.

    signal_std [k]: out-of-fold standard deviation of each signal; left_out: rows by reason; plots: file names.
    """
    sections = (
        _what(manifest),
        _data(manifest, evaluation["data"], left_out),
        _figures(evaluation, plots, manifest.training),
        _classifier(manifest, signal_std),
        threshold_section(evaluation),
        *filter(None, [form_section(evaluation)]),
        *filter(None, [context_section(manifest), uncertainty_section(manifest)]),
        _limits(manifest.training),
        _load(manifest),
    )
    return _front_matter(manifest, evaluation) + "\n" + "\n".join(sections)


def _front_matter(manifest: Manifest, evaluation: Mapping[str, Any]) -> str:
    lines = ["library_name: hallutracer", "pipeline_tag: text-classification"]
    lines += ["tags:", "- hallucination-detection", "- linear-probe", "- hallutracer"]
    lines += [f"base_model: {_yaml(manifest.model.name)}", "metrics:", "- roc_auc", "- brier_score"]
    scores = _own_scores(evaluation)
    if scores:
        lines += ["model-index:", f"- name: {_yaml(manifest.name)}", "  results:"]
        lines += ["  - task:", "      type: text-classification", "      name: Hallucination risk at the answer onset"]
        lines += ["    dataset:", f"      name: {_yaml(scores[2])}", f"      type: {_yaml(scores[2])}"]
        lines += ["    metrics:"]
        for key, kind in (("auroc", "roc_auc"), ("brier", "brier_score")):
            name = f"{METRICS[key]}, {scores[1]}"
            lines += [f"    - type: {kind}", f"      value: {scores[0][key]:.4f}", f"      name: {_yaml(name)}"]
    return "---\n" + "\n".join(lines) + "\n---\n"


def _own_scores(evaluation: Mapping[str, Any]) -> tuple[dict[str, float], str, str] | None:
    """The bundle's own scores, their protocol and their data file; held-out rows are preferred."""
    test, crossed = evaluation.get("held_out"), evaluation.get("cross_validation")
    if test is not None:
        return test["signals"]["bundle"], "held-out rows", test["file"]
    if crossed is not None:
        row = crossed["signals"][evaluation["signal_of_the_bundle"]]
        means = {key: cell["mean"] for key, cell in row.items() if cell is not None}
        return means, "nested cross-validation", evaluation["data"]["file"]
    return None


def _what(manifest: Manifest) -> str:
    model = manifest.model
    where = (
        f"one attention head of each of the {model.num_layers} layers (the slice of the attention output projection's "
        f"input, {model.head_dim} numbers)"
        if manifest.readout.site == "attention_head"
        else f"the residual stream after each of the {model.num_layers} blocks ({model.hidden_size} numbers)"
    )
    scale = {
        "unit_norm": "the plain mean of unit-norm logits, the paper's rule",
        "standardized": "the mean of logits that were each divided by their within-class standard deviation",
        "weighted": "a mean of unit-norm logits in which each layer has a weight, fitted on out-of-fold logits",
    }[manifest.logit_scale]
    extra = (
        ", together with the first answer token's log maximum probability and entropy,"
        if len(manifest.signals) > 1
        else ""
    )
    return (
        f"# {manifest.name}\n\n"
        f"A HalluTracer bundle: the risk that {model.name} ({model.architecture}, revision {model.revision}) is about "
        f"to give a hallucinated answer, read at the last prompt token, before the first answer token is decoded.\n\n"
        f"It reads {where}. A linear probe per layer gives a truth logit; the depth mean is {scale}. A logistic "
        f"regression turns it{extra} into a risk between 0 and 1. The probes belong to this model, tokenizer and chat "
        f"template only; loading refuses any other.\n"
    )


def _data(manifest: Manifest, data: Mapping[str, Any], left_out: Mapping[str, int]) -> str:
    training, groups = manifest.training, ""
    if "effective_groups" in data:
        share = data["largest_group_share"]
        groups = f", as many as {data['effective_groups']:.0f} of one size; the largest has {share:.1%} of the rows"
        if warning := group_warning(data):
            groups += f". **{warning}**"
    used = training.factual + training.hallucinated
    left = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    labels = (
        "the data file's own"
        if training.labels == "given"
        else f"the model's own greedy answers, judged by `{(training.judge or '').replace('|', chr(92) + '|')}`"
    )
    c = f"C = {training.c:g}"
    if training.c_grid:
        c += f", chosen by grouped cross-validation from {', '.join(f'{value:g}' for value in training.c_grid)}"
    penalty = "L1" if manifest.readout.site == "attention_head" else "L2"
    return (
        "## Training data\n\n"
        "| | |\n| --- | --- |\n"
        f"| file | `{data['file']}`, `{training.data_digest}` |\n"
        f"| rows | {training.rows}, of which {used} took part: {training.factual} factual, "
        f"{training.hallucinated} hallucinated |\n"
        f"| left out | {training.left_out}{f' ({left})' if left else ''} |\n"
        f"| groups kept together in folds | {training.groups}{groups} |\n"
        f"| labels | {labels} |\n"
        f"{_soft(data)}"
        f"| prompts | rendered as `{manifest.prompt_format}`, activations in {manifest.dtype} |\n"
        f"| probes | {penalty} logistic regression, {c}; class balance: {training.class_balance} |\n"
        f"| classifier | fitted on out-of-fold signals, {training.folds} folds, seeds "
        f"{', '.join(map(str, training.seeds))} |\n"
    )


def _soft(data: Mapping[str, Any]) -> str:
    """What probes and classifier were fitted on, where that is not the labels themselves."""
    if (soft := data.get("soft_labels")) is None:
        return ""
    return (
        f"| fitted on | the share of right ones among {soft['samples']} answers sampled at temperature "
        f"{soft['temperature']:g}: {soft['right']:.1%} of them, rows with right and wrong ones "
        f"{soft['rows_with_right_and_wrong_answers']:.1%}. So the risk is that of such an answer. All figures below, "
        f"and a target of the threshold, are by the greedy answers' labels |\n"
    )


def _figures(evaluation: Mapping[str, Any], plots: Sequence[str], training: TrainingRecord) -> str:
    parts = ["## Figures\n"]
    crossed, test = evaluation.get("cross_validation"), evaluation.get("held_out")
    if crossed is not None:
        protocol = crossed["protocol"]
        parts.append(
            f"Nested cross-validation: {protocol['folds']} stratified, group-disjoint folds, seeds "
            f"{', '.join(map(str, protocol['seeds']))}; scaling, head, C and classifier come from the "
            f"training side of each fold. Means over folds and seeds: with a 95 % interval from resampling groups, "
            f"the fits held fixed, or with +/- the standard deviation over folds and seeds. The bundle's own row is "
            f"bold.\n"
        )
        own = evaluation["signal_of_the_bundle"]
        if cheaper := cheaper_and_better(crossed["signals"], own):
            parts.append(f"**{cheaper}**\n")
        rarer = min(training.factual, training.hallucinated)
        few = rarer < FEW_IN_A_FOLD * protocol["folds"]
        if few:
            parts.append(f"Left out are figures without an interval: {rarer} rows of the rarer class are too few.\n")
        parts.append(_table(crossed["signals"], _cell_of_few if few else cell, own))
        if crossed["signals"][own]["auroc"].get("low", 1.0) <= CHANCE:
            parts.append(NO_SIGNAL + "\n")
    if test is not None:
        parts.append(
            f"Held-out file: {test['rows']} rows ({test['factual']} factual, {test['hallucinated']} hallucinated) that "
            f"took no part in training; the references were fitted on the training rows.\n"
        )
        parts.append(_table(test["signals"], "{:.3f}".format, "bundle"))
    if crossed is None and test is None:
        parts.append("This bundle was trained without an evaluation: how well it works is not known.\n")
    else:
        parts.append(
            "AUROC is of the risk, hallucinated positive. ECE: 15 equal-mass bins, larger on few rows by its nature. "
            "A `within` column counts only pairs of rows of one kind "
            "(and template), or of one form of conversation: what is left once that is known.\n"
        )
        parts += [_calibration(words, found) for words, found in _lines(evaluation)]
    parts += [f"![{PLOTS[name]}](plots/{name})\n" for name in PLOTS if name in plots]
    return "\n".join(parts)


def _lines(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Which rows, and the calibration of the bundle's own risks on them."""
    crossed, test = evaluation.get("cross_validation"), evaluation.get("held_out")
    if crossed is not None:
        yield (
            "the training rows, by folds that never saw the row",
            crossed["signals"][evaluation["signal_of_the_bundle"]],
        )
    if test is not None:
        yield "the held-out rows", test["calibration"]


def _calibration(rows: str, found: Mapping[str, Any]) -> str:
    """Slope and intercept of the bundle's own risks, and what they mean."""
    slope, intercept = found["calibration_slope"], found["calibration_intercept"]
    if slope is None:
        return (
            f"Calibration of the bundle's risk on {rows}: no slope can be given, since the risks separate the classes "
            "or are all alike.\n"
        )
    verdict = "slope 1 and intercept 0 lie within their intervals"
    if "low" not in slope:
        verdict = "there are too few groups for intervals"
    elif slope["high"] < 1:
        verdict = "the risks are too extreme, low ones too low and high ones too high"
    elif slope["low"] > 1:
        verdict = "the risks are too cautious, low ones too high and high ones too low"
    elif not intercept["low"] <= 0 <= intercept["high"]:
        verdict = f"the risks are too {'low' if intercept['mean'] > 0 else 'high'} where they are near one half"
    return (
        f"Calibration of the bundle's risk on {rows}: slope {cell(slope)}, intercept {cell(intercept)} of the log "
        f"odds, where 1 and 0 are perfect: {verdict}.\n"
    )


def cell(value: Mapping[str, float]) -> str:
    """A mean over folds and seeds with its interval, or else with its standard deviation."""
    if "low" in value:
        return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return f"{value['mean']:.3f} +/- {value['std']:.3f}"


def _cell_of_few(value: Mapping[str, float]) -> str:
    return cell(value) if "low" in value else "-"


def cheaper_and_better(signals: Mapping[str, Mapping[str, Any]], own: str) -> str | None:
    """A sentence where something that costs no probes ranks better than what the bundle serves."""
    served = signals[own]["auroc"]["mean"]
    found = [name for name in CHEAPER if name in signals and signals[name]["auroc"]["mean"] > served]
    if not found:
        return None
    best = max(found, key=lambda name: signals[name]["auroc"]["mean"])
    cure = "; --signals depth_mean,first_token reads it, too" if best.startswith("first_token") else ""
    return (
        f"On these rows {SIGNALS[best]}, which needs no probes, ranks better than what is published: AUROC "
        f"{signals[best]['auroc']['mean']:.3f} against {served:.3f}. More rows may change that{cure}."
    )


def _table(signals: Mapping[str, Mapping[str, Any]], show: Callable[[Any], str], own: str) -> str:
    columns = {key: text for key, text in (METRICS | WITHIN).items() if any(key in row for row in signals.values())}
    rows = []
    for name, row in signals.items():
        cells = [show(row[key]) if row.get(key) is not None else "-" for key in columns]
        title = f"**{SIGNALS[name]}**" if name == own else SIGNALS[name]
        rows.append([title, *cells])
    return markdown_table(["signal", *columns.values()], rows) + "\n"


def group_warning(data: Mapping[str, Any]) -> str | None:
    """``data`` of evaluation.json: where one group is a large part of the rows, what that means."""
    share = data.get("largest_group_share", 0.0)
    if share <= LARGE_GROUP:
        return None
    return f"One group has {share:.0%} of the rows: how well the bundle does elsewhere is hardly known"


def _classifier(manifest: Manifest, signal_std: Sequence[float]) -> str:
    classifier = manifest.classifier
    lines = ["## Classifier\n", "| signal | weight | weight x standard deviation |", "| --- | --- | --- |"]
    strength: dict[str, float] = {}
    for name, weight, std in zip(manifest.signals, classifier.weight, signal_std, strict=True):
        strength[name] = abs(weight * std)
        lines.append(f"| {name} | {weight:+.4f} | {weight * std:+.3f} |")
    text = (
        f"\nrisk = 1 - sigmoid(sum of weight x signal {classifier.intercept:+.4f}); flagged at a risk of "
        f"{manifest.threshold:.4f} or more.\n"
    )
    if len(strength) > 1:
        carrier = max(strength, key=lambda name: strength[name])
        share = strength[carrier] / (sum(strength.values()) or 1.0)
        text += (
            f"\nOver the training rows `{carrier}` carries this bundle: {share:.0%} of the sum of |weight x "
            f"standard deviation|. Signals that move together share their weight in no unique way, so read it "
            f"beside the table.\n"
        )
    if classifier.weight[0] <= 0:
        text += (
            "\n**The weight of the depth mean is not positive: the probes found no usable signal in these data. Do not "
            "serve this bundle.**\n"
        )
    return "\n".join(lines) + "\n" + text


def _limits(training: TrainingRecord) -> str:
    share = training.hallucinated / (training.factual + training.hallucinated)
    return (
        "## Limits\n\n"
        f"- The risk is calibrated for prompts like the training rows, of which {share:.1%} are hallucinated. Where "
        "the share or the kind of prompt differs, rank by it; `hallutracer recalibrate` makes it a probability again.\n"
        "- It speaks of the model's state before the answer, not of the answer: a model can state a falsehood that it "
        "represents as true.\n"
        "- A signal may follow the sort of question and not the model's knowledge: compare the `within` columns.\n"
        "- The same prompt in another language, template or precision is another distribution.\n"
    )


def _load(manifest: Manifest) -> str:
    return (
        "## How to load\n\n"
        "```python\n"
        "import hallutracer as ht\n\n"
        f'detector = ht.load("MODEL", "{manifest.name}", store="STORE")  # a folder, a GGUF file or a hub name\n'
        'print(detector.score("What is the capital of France?").risk)\n'
        "```\n\n"
        f"`hallutracer serve --model MODEL --bundle {manifest.name}` replays the golden prompts and serves only if the "
        f"model reads what the trainer read. Written by hallutracer {manifest.training.hallutracer_version}.\n"
    )


def _yaml(text: str) -> str:
    """Quoted text: every JSON string is a YAML string."""
    return json.dumps(text)
