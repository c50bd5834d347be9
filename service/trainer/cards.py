"""Model cards: templates filled from a manifest and evaluation.json, and the sentences that the console says, too.

The same arguments give the same bytes: no time, no path, no version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from probes_store.manifest import Manifest
from probes_store.records import Guarantee, Recalibration, Uncertainty
from service.fitting.presentation import markdown_table
from service.fitting.recalibration import ChosenMap
from service.fitting.thresholds import LEAST_ANSWERED, GuaranteeStep
from service.judging.evaluation import kept_forms
from service.risk import risk

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
MAPS = {
    "identity": "the risk as it is",
    "prior_shift": "prior shift, by traffic and labels",
    "intercept": "intercept, by labels",
    "platt": "Platt: slope and intercept",
    "beta": "beta calibration",
    "isotonic": "isotonic",
}
CHANCE = 0.5  # AUROC
FEW_IN_A_FOLD = 5  # rows of the rarer class: with fewer, the spread over folds says nothing
CHEAPER = ("first_token_entropy", "first_token_max_prob", "prompt_length")  # signals that need no probes
LARGE_GROUP = 0.2  # share of the rows
CAUTION = (
    "Nobody drew these rows at random: users label what they like. Where the choice depends on the risk alone, the map "
    "is right; where wrong answers are reported more readily than right ones (or the reverse), the recalibrated risk "
    "is too high (or too low), and nothing in these rows can tell."
)
_GUARANTEE = re.compile(r"## Guarantee\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["fmt"] = format


def _render(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(f"{template}.j2").render(values)


def write_card(
    manifest: Manifest,
    evaluation: Mapping[str, Any],
    *,
    signal_std: Sequence[float],
    left_out: Mapping[str, int],
    plots: Sequence[str],
) -> str:
    """Return the whole README.md: front matter as the Hugging Face hub reads it, then the card.

    signal_std [k]: out-of-fold standard deviation of each signal; left_out: rows by reason; plots: file names.
    """
    training, data = manifest.training, evaluation["data"]
    crossed, test = evaluation.get("cross_validation"), evaluation.get("held_out")
    own = evaluation["signal_of_the_bundle"]
    rarer = min(training.factual, training.hallucinated)
    few = crossed is not None and rarer < FEW_IN_A_FOLD * crossed["protocol"]["folds"]
    signals = [
        (name, weight, weight * std)
        for name, weight, std in zip(manifest.signals, manifest.classifier.weight, signal_std, strict=True)
    ]
    strength = {name: abs(scaled) for name, _, scaled in signals}
    carrier = max(strength, key=lambda name: strength[name])
    rule = rule_in_words(evaluation["threshold"])
    source, forms = kept_forms(evaluation) or (None, None)
    text = _render(
        "card.md",
        m=manifest,
        t=training,
        data=data,
        left_out=left_out,
        group_warning=group_warning(data),
        soft=data.get("soft_labels"),
        crossed=crossed,
        cheaper=crossed and cheaper_and_better(crossed["signals"], own),
        few=few,
        rarer=rarer,
        crossed_table=crossed and _table(crossed["signals"], _cell_of_few if few else cell, own),
        no_signal=crossed and crossed["signals"][own]["auroc"].get("low", 1.0) <= CHANCE,
        test=test,
        test_table=test and _table(test["signals"], "{:.3f}".format, "bundle"),
        calibrations=list(_calibrations(evaluation)),
        plots=[(title, file) for file, title in PLOTS.items() if file in plots],
        signals=signals,
        carrier=carrier,
        carried=strength[carrier] / (sum(strength.values()) or 1.0),
        cut=evaluation["threshold"],
        rule=rule[0].upper() + rule[1:],
        gates=list(_gates(evaluation)),
        forms=forms,
        forms_source=source,
        intervals=list(_intervals(manifest.uncertainty)),
    )
    return f"---\n{_hub_data(manifest, evaluation).to_yaml()}\n---\n{text}"


def _hub_data(manifest: Manifest, evaluation: Mapping[str, Any]) -> ModelCardData:
    """Return what the hub shows of the bundle: its own scores, of held-out rows where there are some."""
    test, crossed = evaluation.get("held_out"), evaluation.get("cross_validation")
    scores: Mapping[str, float] = {}
    file, protocol = evaluation["data"]["file"], "nested cross-validation"
    if test is not None:
        scores, protocol, file = test["signals"]["bundle"], "held-out rows", test["file"]
    elif crossed is not None:
        row = crossed["signals"][evaluation["signal_of_the_bundle"]]
        scores = {key: value["mean"] for key, value in row.items() if value is not None}
    results = [
        EvalResult(
            task_type="text-classification",
            task_name="Hallucination risk at the answer onset",
            dataset_type=file,
            dataset_name=file,
            metric_type=kind,
            metric_value=round(scores[key], 4),
            metric_name=f"{METRICS[key]}, {protocol}",
        )
        for key, kind in (("auroc", "roc_auc"), ("brier", "brier_score"))
        if scores
    ]
    return ModelCardData(
        library_name="hallutracer",
        pipeline_tag="text-classification",
        tags=["hallucination-detection", "linear-probe", "hallutracer"],
        base_model=manifest.model.name,
        metrics=["roc_auc", "brier_score"],
        model_name=manifest.name if results else None,
        eval_results=results or None,
    )


def _calibrations(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield which rows, and slope and intercept of the bundle's own risks on them."""
    crossed, test = evaluation.get("cross_validation"), evaluation.get("held_out")
    if crossed is not None:
        row = crossed["signals"][evaluation["signal_of_the_bundle"]]
        yield (
            "the training rows, by folds that never saw the row",
            row["calibration_slope"],
            row["calibration_intercept"],
        )
    if test is not None:
        row = test["calibration"]
        yield "the held-out rows", row["calibration_slope"], row["calibration_intercept"]


def _gates(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, float], float]]:
    """Yield each set of rows that no fit saw, what the threshold does to it, and its share of wrong answers."""
    for key, rows in (
        ("cross_validation", "by the risks of folds that never saw the row"),
        ("held_out", "held-out rows"),
    ):
        if (found := evaluation.get(key)) is not None:
            counts = found if key == "held_out" else evaluation["data"]
            yield rows, found["at_threshold"], counts["hallucinated"] / (counts["factual"] + counts["hallucinated"])


def _intervals(record: Uncertainty) -> Iterator[tuple[float, float, float]]:
    """Yield some risks, each with the ends of its interval."""
    if record.interval is None:
        return
    for shown in (0.1, 0.25, 0.5, 0.75, 0.9):
        z = math.log((1 - shown) / shown)
        half = record.interval.half_width(z, 0.5)
        low, high = (float(risk(np.array([z + side]), np.ones(1), 0.0)) for side in (half, -half))
        yield shown, low, high


def cell(value: Mapping[str, float]) -> str:
    """Return a mean over folds and seeds with its interval, or else with its standard deviation."""
    if "low" in value:
        return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return f"{value['mean']:.3f} +/- {value['std']:.3f}"


def _cell_of_few(value: Mapping[str, float]) -> str:
    return cell(value) if "low" in value else "-"


def _table(signals: Mapping[str, Mapping[str, Any]], show: Callable[[Any], str], own: str) -> str:
    columns = {key: text for key, text in (METRICS | WITHIN).items() if any(key in row for row in signals.values())}
    rows = []
    for name, row in signals.items():
        cells = [show(row[key]) if row.get(key) is not None else "-" for key in columns]
        rows.append([f"**{SIGNALS[name]}**" if name == own else SIGNALS[name], *cells])
    return markdown_table(["signal", *columns.values()], rows)


def cheaper_and_better(signals: Mapping[str, Mapping[str, Any]], own: str) -> str | None:
    """Return a sentence where something that costs no probes ranks better than what the bundle serves."""
    auroc = {name: signals[name]["auroc"]["mean"] for name in (*CHEAPER, own) if name in signals}
    best = max(auroc, key=lambda name: (auroc[name], name == own))
    if best == own:
        return None
    cure = "; --signals depth_mean,first_token reads it, too" if best.startswith("first_token") else ""
    return (
        f"On these rows {SIGNALS[best]}, which needs no probes, ranks better than what is published: AUROC "
        f"{auroc[best]:.3f} against {auroc[own]:.3f}. More rows may change that{cure}."
    )


def group_warning(data: Mapping[str, Any]) -> str | None:
    """Return what it means where one group is a large part of the rows; ``data`` is that of evaluation.json."""
    share = data.get("largest_group_share", 0.0)
    if share <= LARGE_GROUP:
        return None
    return f"One group has {share:.0%} of the rows: how well the bundle does elsewhere is hardly known"


def rule_in_words(found: Mapping[str, Any]) -> str:
    """Return where the threshold is from; ``found`` is ``threshold`` of evaluation.json."""
    at, gate = found["threshold"], found["out_of_fold"]
    if found["rule"] == "wrong_costs":
        k = found["wrong_costs"]
        reason = ": answer what is more likely right than wrong" if k == 1 else ""
        return (
            f"threshold {at:.4f} = 1 / (1 + K) with K = {k:g}, the cost of a wrong answer in withheld right answers"
            f"{reason}"
        )
    does = (
        f"answers {gate['answered']:.1%} of the training rows by out-of-fold risks, and "
        f"{gate['wrong_among_answered']:.1%} of these answers are wrong"
    )
    if found["reached"]:
        return f"threshold {at:.4f}, for the target {found['target']}: it {does}"
    nearest = (
        f"the lowest share of wrong with at least {LEAST_ANSWERED} answered rows"
        if found["target"].startswith("wrong")
        else "the largest share answered"
    )
    return (
        f"the target {found['target']} is out of reach. What is reachable is {nearest}: threshold {at:.4f}, which was "
        f"published, {does}"
    )


def statement(guarantee: Guarantee, manifest: Manifest, max_new_tokens: int, step: GuaranteeStep | None) -> str:
    """Return for whom the guarantee holds and what voids it.

    ``max_new_tokens`` is the length of the answers judged, ``step`` the test that passed, if any.
    """
    judged = guarantee.labels == "generate"
    rows = None if step is None else by_row(step, guarantee.alpha)
    text = _render("statement.txt", g=guarantee, m=manifest, judged=judged, max_new_tokens=max_new_tokens, by_row=rows)
    return " ".join(text.split())


def by_row(step: GuaranteeStep, alpha: float) -> str:
    """Return the share of hallucinations among the answered rows, where a group counts as often as it has rows."""
    share = step.wrong_rows / step.rows
    text = f"{step.wrong_rows} of {step.rows} answered rows were hallucinated, {share:.1%}"
    return f"{text}, which is above {alpha:g}: a group with many rows counts more here" if share > alpha else text


def guaranteed_card(card: str, manifest: Manifest, step: GuaranteeStep | None = None) -> str:
    """Return the card with this guarantee's section, in place of an earlier one; ``step`` is the test that passed."""
    guarantee = manifest.guarantee
    assert guarantee is not None
    rows = None if step is None else by_row(step, guarantee.alpha)
    section = _render("guarantee.md", g=guarantee, by_row=rows)
    if _GUARANTEE.search(card):
        return _GUARANTEE.sub(lambda _: section, card, count=1)
    return _before_limits(card, section)


def recalibrated_card(card: str, manifest: Manifest, record: Mapping[str, Any], candidates: str) -> str:
    """Return the card with this recalibration's section, and without a guarantee."""
    assert manifest.recalibration is not None
    feedback = record.get("feedback")
    section = _render(
        "recalibration.md",
        r=record,
        d=record["data"],
        names=MAPS,
        formula=formula(manifest.recalibration),
        before=record["candidates"]["identity"],
        after=record["candidates"][record["chosen"]],
        gate=record["at_threshold"]["after"],
        candidates=candidates,
        caution=CAUTION,
        feedback={} if feedback is None else feedback_lines(feedback),
        tenths=[(place, *row) for place, row in enumerate((feedback or {}).get("by_tenth", ())) if row[0]],
    )
    return _before_limits(_GUARANTEE.sub("", card), section)


def _before_limits(card: str, section: str) -> str:
    before, limits, after = card.partition("## Limits\n")
    return before + section + limits + after if limits else f"{card.rstrip()}\n\n{section}"


def candidates_table(choice: ChosenMap) -> str:
    """Return every map on the labelled rows that it was not fitted on, in Markdown; the chosen one is bold."""
    rows = []
    for one in choice.candidates:
        name = f"**{MAPS[one.name]}**" if one is choice.chosen else MAPS[one.name]
        figures = [
            (one.log_loss, one.log_loss_interval, ".4f"),
            (one.gain, one.gain_interval, "+.4f"),
            (one.error, one.error_interval, ".4f"),
        ]
        cells = [f"{value:{form}} [{ends.low:{form}}, {ends.high:{form}}]" for value, ends, form in figures]
        rows.append([name, cells[0], "" if one is choice.before else cells[1], cells[2]])
    return markdown_table(["held-out", "log loss", "less by", "calibration error, debiased"], rows)


def formula(recalibration: Recalibration) -> str:
    """Return the map, for people."""
    if recalibration.knots:
        return f"linear between {len(recalibration.knots)} points"
    a, b, c = recalibration.a, recalibration.b, recalibration.c
    if a == b == 1:
        return f"log odds {c:+.4f}"
    if a == b:
        return f"{a:.4f} x log odds {c:+.4f}"
    return f"log odds of it = {a:.4f} log(risk) - {b:.4f} log(1 - risk) {c:+.4f}"


def feedback_lines(found: Mapping[str, Any]) -> dict[str, str]:
    """Return rows of the card's table: who was labelled, and the share of hallucinations by each estimate."""
    left_out = ", ".join(f"{count} {why}" for why, count in found["left_out"].items() if count) or "none"
    weighted = f"{found['weighted']:.1%} with each tenth of risk weighted as all answers have it"
    if found["covered"] <= 0.9995:
        weighted += f" (of {found['covered']:.0%}: the other tenths have no label)"
    if "traffic" in found:
        share, test = found["traffic"]["share"], found["traffic"]["test"]
        ends = f"[{share['low']:.1%}, {share['high']:.1%}]"
        shift = f"{share['value']:.1%} {ends} of all answers by prior shift, without labels"
        if test is None:
            shift += " (**whether prior shift alone explains them was not tested: someone insisted**)"
        elif not found["traffic"]["explained"]:
            shift += " (**which does not explain them: someone insisted**)"
    else:
        shift = f"no estimate from unlabelled answers: {found['no_traffic']}"
    return {
        "feedback": f"{found['answers']} answers stored, {found['labelled']} of them labelled and used "
        f"({found['labelled'] / found['answers']:.1%}); labels left out: {left_out}",
        "hallucinated": f"{found['share']:.1%} of the labelled; {weighted}; {shift}",
    }
