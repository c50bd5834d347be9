"""Writes model cards from a manifest and evaluation.json, and the last lines of a run's console."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from probes_store.bundle import Bundle
from probes_store.manifest import Manifest
from probes_store.records import CONTEXT_SIGNALS, Guarantee, RefitInterval
from service.fitting.nested_cv import CONTEXT_NAMES, NAMES, Evaluation, Inputs
from service.fitting.recalibration import ChosenMap
from service.fitting.scores import gain
from service.fitting.thresholds import LEAST_ANSWERED
from service.judging.evaluation import kept_strata
from service.risk import risk
from service.trainer.presentation import aligned_table, markdown_table
from service.trainer.strata import StratumResult

METRICS = {
    "auroc": "AUROC",
    "auprc_hallucinated": "AUPRC (hallucinated positive)",
    "auprc_factual": "AUPRC (factual positive)",
    "brier": "Brier",
    "ece": "ECE",
    "ece_pooled": "ECE, folds pooled",
    "calibration_debiased": "calibration error, debiased",
}
DECISIONS = {
    "e_aurc": "E-AURC",
    "caught_at_5": "caught at 5 %",
    "caught_at_10": "caught at 10 %",
    "caught_at_20": "caught at 20 %",
}
_SCALES = {"unit_norm": "unit norm", "standardized": "standardised", "joint": "fitted together"}
_READ = {
    "fused": "fused: depth mean ({}) and first token",
    "context": "depth mean ({}), passage and its answer",
    "fused_context": "fused: depth mean ({}), first token, passage and its answer",
}
SIGNALS = {
    "bundle": "this bundle",
    "depth_mean_unit_norm": "depth mean, unit norm (the paper's rule)",
    "depth_mean_standardized": "depth mean, standardised logits",
    "depth_mean_joint": "depth mean, directions fitted together",
    **{
        f"{kind}_{scale}": text.format(word)
        for kind, text in _READ.items()
        for scale, word in _SCALES.items()
    },
    "best_head": "best single head",
    "best_layer": "best single layer",
    "first_token_max_prob": "first-token maximum probability",
    "first_token_entropy": "first-token entropy",
    "prompt_length": "prompt length",
    "kind_and_form": "kind and form of the question, no model",
}
WITHIN = {
    "auroc_within_kind_x_form_closed_book": "within kind x form, closed book",
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
    "isotonic": "isotonic",
}
CHANCE = 0.5  # AUROC
SHOWN_RISKS = (0.1, 0.25, 0.5, 0.75, 0.9)  # the card gives their intervals
FEW_IN_A_FOLD = 5  # rows of the rarer class; with fewer, the card leaves out the spread over folds
CHEAPER = (
    "first_token_entropy",
    "first_token_max_prob",
    "prompt_length",
)  # signals that need no probes
MOST_KINDS = 20  # of the page that says whether a bundle pays
LARGE_GROUP = 0.2  # share of the rows
CAUTION = (
    "Nobody drew these rows at random: users label what they like. Where the choice depends on the"
    " risk alone, the map is right; where wrong answers are reported more readily than right ones"
    " (or the reverse), the recalibrated risk is too high (or too low), and nothing in these rows"
    " can tell."
)
_FIRST_TOKEN = "the first answer token's log maximum probability and entropy"
_GUARANTEE = re.compile(r"## Guarantee\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["fmt"] = format
_TEMPLATES.globals["least_answered"] = LEAST_ANSWERED


def _render(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(f"{template}.j2").render(values)


def say(macro: str, *values: Any) -> str:
    """Render a macro of ``words.txt`` with the values, in one line."""
    return " ".join(
        str(getattr(_TEMPLATES.get_template("words.txt.j2").module, macro)(*values)).split()
    )


def write_card(
    manifest: Manifest,
    evaluation: Mapping[str, Any],
    *,
    signal_std: Sequence[float],
    left_out: Mapping[str, int],
    plots: Sequence[str],
) -> str:
    """Return the whole README.md: front matter as the Hugging Face hub reads it, then the card."""
    crossed, test = evaluation.get("cross_validation"), evaluation.get("held_out")
    served = evaluation["signal_of_the_bundle"]
    rarer = min(manifest.training.factual, manifest.training.hallucinated)
    few = crossed is not None and rarer < FEW_IN_A_FOLD * crossed["protocol"]["folds"]
    signals = [
        (name, weight, weight * std)
        for name, weight, std in zip(
            manifest.signals, manifest.classifier.weight, signal_std, strict=True
        )
    ]
    tables = []
    for key in ("form", "kind"):
        if strata := kept_strata(evaluation, f"by_{key}"):
            tables.append((key, *strata))
    rule, record = rule_in_words(evaluation["threshold"]), manifest.uncertainty
    text = _render(
        "card.md",
        m=manifest,
        beside=_beside_the_depth_mean(manifest),
        t=manifest.training,
        data=evaluation["data"],
        left_out=left_out,
        crossed=crossed,
        group_warning=group_warning(evaluation["data"]),
        few=few,
        rarer=rarer,
        own=served,
        test=test,
        cheaper=crossed and cheaper_and_better(crossed["signals"], served),
        crossed_tables=crossed and _tables(crossed["signals"], partial(_unless_few, few), served),
        no_signal=crossed and crossed["signals"][served]["auroc"].get("low", 1.0) <= CHANCE,
        test_tables=test and _tables(test["signals"], "{:.3f}".format, "bundle"),
        plots=[(title, file) for file, title in PLOTS.items() if file in plots],
        signals=signals,
        cut=evaluation["threshold"],
        rule=rule[0].upper() + rule[1:],
        tables=tables,
        answer=evaluation.get("answer", {}),
        recommendation=recommendation_page(evaluation),
        intervals=(
            []
            if record.interval is None
            else [(at, *_ends(record.interval, at)) for at in SHOWN_RISKS]
        ),
    )
    return f"---\n{_hub_data(manifest, evaluation).to_yaml()}\n---\n{text}"


def recommendation_page(evaluation: Mapping[str, Any]) -> str:
    """Return the section that says whether the bundle pays, Markdown; "" where it was not
    evaluated."""
    if (record := evaluation.get("recommendation")) is None:
        return ""
    shown = dict(islice(record["by_kind"].items(), MOST_KINDS))
    return _render("recommendation.md", r=record, shown=shown)


def card_of(bundle: Bundle) -> str:
    """Return a bundle's card with a correct sentence about its signals.

    Cards of version 1.0 and before name the first answer token for every bundle that reads more
    than the depth mean. These files belong to the bundle's digest, so they stay.  Raises a subclass
    of BundleDamaged."""
    return bundle.card().replace(
        _together_with(_FIRST_TOKEN), _beside_the_depth_mean(bundle.manifest), 1
    )


def _beside_the_depth_mean(manifest: Manifest) -> str:
    """Return the clause that names the further signals of the classifier; nothing if there are
    none."""
    read = [_FIRST_TOKEN] if manifest.needs_first_token else []
    if any(name in CONTEXT_SIGNALS for name in manifest.signals):
        stated = (
            " and whether that states an answer"
            if {"stated", "stated_length"} & set(manifest.signals)
            else ""
        )
        length = (
            ", weighed by the prompt's length, too" if "stated_length" in manifest.signals else ""
        )
        read.append(
            "what its context probes say of the prompt (whether it holds a"
            f" passage{stated}{length})"
        )
    return _together_with(" and ".join(read)) if read else ""


def _together_with(signals: str) -> str:
    return f", together with {signals},"


def _hub_data(manifest: Manifest, evaluation: Mapping[str, Any]) -> ModelCardData:
    test, crossed = evaluation.get("held_out"), evaluation.get("cross_validation")
    scores: Mapping[str, float] = {}
    file, protocol = evaluation["data"]["file"], "nested cross-validation"
    if test is not None:
        scores = test["signals"]["bundle"]
        protocol = "held-out rows"
        file = test["file"]
    elif crossed is not None:
        row = crossed["signals"][evaluation["signal_of_the_bundle"]]
        scores = {key: value["mean"] for key, value in row.items() if value is not None}
    measured = evaluation["data"].get("self_labels", {}) if test is None else test
    if measured.get("figures_by") == "agreement":
        protocol += ", of the model's contradictions and not of wrong answers"
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


def _ends(interval: RefitInterval, shown: float) -> list[float]:
    z = math.log((1 - shown) / shown)
    half = interval.half_width(z, 0.5)
    return [float(risk(np.array([z + side]), np.ones(1), 0.0)) for side in (half, -half)]


cell = partial(
    say, "cell"
)  # a mean over folds and seeds, with its interval or else its standard deviation
rule_in_words = partial(
    say, "rule"
)  # the rule of the threshold, from ``threshold`` of evaluation.json


def _tables(
    signals: Mapping[str, Mapping[str, Any]], show: Callable[[Any], str], served: str
) -> str:
    """Return a table of ranking and calibration, and a table of decisions, with the columns that
    were measured."""
    measured = set[str]().union(*signals.values())
    tables = []
    for titles in (WITHIN | METRICS, DECISIONS):
        if columns := {key: text for key, text in titles.items() if key in measured}:
            rows = []
            for name, row in signals.items():
                cells = [show(row[key]) if row.get(key) is not None else "-" for key in columns]
                rows.append([f"**{SIGNALS[name]}**" if name == served else SIGNALS[name], *cells])
            tables.append(markdown_table(["signal", *columns.values()], rows))
    return "\n\n".join(tables)


def cheaper_and_better(signals: Mapping[str, Mapping[str, Any]], served: str) -> str | None:
    """Return a warning if a signal that needs no probes ranks better than the one that the bundle
    serves."""
    auroc = {name: signals[name]["auroc"]["mean"] for name in (*CHEAPER, served) if name in signals}
    best = max(auroc, key=lambda name: (auroc[name], name == served))
    return (
        None if best == served else say("cheaper", best, SIGNALS[best], auroc[best], auroc[served])
    )


def group_warning(data: Mapping[str, Any]) -> str | None:
    """Return a warning if one group is a large part of the rows; ``data`` is that of
    evaluation.json."""
    share = data.get("largest_group_share", 0.0)
    words = "how well the bundle does elsewhere is hardly known"
    return f"One group has {share:.0%} of the rows: {words}" if share > LARGE_GROUP else None


def statement(
    guarantee: Guarantee, manifest: Manifest, max_new_tokens: int, parts: Sequence[StratumResult]
) -> str:
    """Return the text that says for which requests the guarantee holds and what voids it."""
    text = _render(
        "statement.txt",
        g=guarantee,
        m=manifest,
        judged=guarantee.labels == "generate",
        parts=parts,
        closed=not any(part.step.groups for part in parts),
        scored=sum(part.record.rows for part in parts),
        labelled=sum(part.record.labelled for part in parts),
        max_new_tokens=max_new_tokens,
        by_row=_by_row(guarantee, parts),
    )
    return " ".join(text.split())


def _by_row(guarantee: Guarantee, parts: Sequence[StratumResult]) -> str | None:
    """Return the figures by row of the threshold that passed; None if none did, or there are
    several strata."""
    alone = len(parts) == 1 and parts[0].step.groups
    return say("by_row", parts[0].step, guarantee.alpha) if alone else None


def guaranteed_card(card: str, manifest: Manifest, parts: Sequence[StratumResult] = ()) -> str:
    """Return the card with the section of this guarantee, which replaces an earlier one; ``parts``
    are its strata."""
    guarantee = manifest.guarantee
    assert guarantee is not None
    section = _render("guarantee.md", g=guarantee, parts=parts, by_row=_by_row(guarantee, parts))
    earlier = _GUARANTEE.search(card)
    return (
        card[: earlier.start()] + section + card[earlier.end() :]
        if earlier
        else _before_limits(card, section)
    )


def recalibrated_card(
    card: str, manifest: Manifest, record: Mapping[str, Any], candidates: str
) -> str:
    """Return the card with the section of this recalibration, and without a guarantee's."""
    assert manifest.recalibration is not None
    feedback = record.get("feedback")
    section = _render(
        "recalibration.md",
        r=record,
        d=record["data"],
        names=MAPS,
        formula=say("formula", manifest.recalibration),
        before=record["candidates"]["identity"],
        after=record["candidates"][record["chosen"]],
        gate=record["at_threshold"]["after"],
        candidates=candidates,
        caution=CAUTION,
        feedback={} if feedback is None else feedback_lines(feedback),
        tenths=[
            (tenth, *row)
            for tenth, row in enumerate((feedback or {}).get("by_tenth", ()))
            if row[0]
        ],
    )
    return _before_limits(_GUARANTEE.sub("", card), section)


def _before_limits(card: str, section: str) -> str:
    before, limits, after = card.partition("## Limits\n")
    return before + section + limits + after if limits else f"{card.rstrip()}\n\n{section}"


def candidates_table(choice: ChosenMap) -> str:
    """Return a Markdown table of the maps, measured on rows that they were not fitted on; the
    chosen one is bold."""
    rows = []
    for candidate in choice.candidates:
        name = f"**{MAPS[candidate.name]}**" if candidate is choice.chosen else MAPS[candidate.name]
        figures = (
            (candidate.log_loss, candidate.log_loss_interval, ""),
            (candidate.gain, candidate.gain_interval, "+"),
            (candidate.error, candidate.error_interval, ""),
        )
        cells = [
            f"{value:{sign}.4f} [{ends.low:{sign}.4f}, {ends.high:{sign}.4f}]"
            for value, ends, sign in figures
        ]
        rows.append([name, cells[0], "" if candidate is choice.before else cells[1], cells[2]])
    return markdown_table(["held-out", "log loss", "less by", "calibration error, debiased"], rows)


def feedback_lines(described: Mapping[str, Any]) -> dict[str, str]:
    """Return lines about which answers were labelled, and the share of hallucinations by each
    estimate."""
    left_out = ", ".join(f"{count} {why}" for why, count in described["left_out"].items() if count)
    return {
        "feedback": say("labelled", described, left_out),
        "hallucinated": say("hallucinated", described),
    }


def closing_lines(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """Yield the last lines of a run: how well the published bundle works, its threshold, and
    warnings."""
    crossed, held = evaluation.get("cross_validation"), evaluation.get("held_out")
    if crossed is not None:
        if cheaper := cheaper_and_better(crossed["signals"], evaluation["signal_of_the_bundle"]):
            yield cheaper
        yield "Nested cross-validation, on rows that no fit saw:"
        yield summary_table(crossed["signals"], evaluation["signal_of_the_bundle"])
    if held is not None:
        row = held["signals"]["bundle"]
        yield f"Held-out rows: AUROC {row['auroc']:.3f}, ECE {row['ece']:.3f}, {held['rows']} rows"
    if (answer := evaluation.get("answer")) is not None:
        before, after = cell(answer["before"]), cell(answer["auroc"])
        yield (
            f"Out of fold, on {answer['rows']} answers: AUROC {before} before the answer, {after}"
            " of its own tokens"
        )
    if crossed is None and held is None:
        yield "Not evaluated: how well this bundle works is not known"
    yield rule_in_words(evaluation["threshold"])
    if "self_labels" in evaluation["data"]:
        yield say("contradicts")
    if warning := group_warning(evaluation["data"]):
        yield warning


def summary_table(signals: Mapping[str, Any], served: str) -> str:
    """Return a table of AUROC, within strata and in all, and calibration of each signal; the served
    one is marked."""
    measured = {key for row in signals.values() for key, value in row.items() if value}
    keys = [*(key for key in WITHIN if key in measured), "auroc", "ece", "calibration_debiased"]
    lines = []
    for name in NAMES:
        if name in signals:
            cells = [_brief(signals[name].get(key), key) for key in keys]
            lines.append([("> " if name == served else "") + SIGNALS[name], *cells])
    titles = WITHIN | {"auroc": "AUROC [95 %]", "ece": "ECE", "calibration_debiased": "debiased"}
    return aligned_table(["", *(titles[key] for key in keys)], lines)


def _unless_few(few: bool, value: Mapping[str, float]) -> str:
    return "-" if few and "low" not in value else cell(value)


def _brief(value: Mapping[str, float] | None, key: str) -> str:
    if not value:
        return "-"
    return cell(value) if "low" in value or key == "auroc" else f"{value['mean']:.3f}"


def better_options(inputs: Inputs, nested: Evaluation, served: str) -> Iterator[str]:
    """Yield a line for each option whose gain over the served signal has a 95 % interval above
    zero."""
    kinds = ("context", "fused_context") if served in CONTEXT_NAMES else ("depth_mean", "fused")
    for kind, signals in zip(kinds, ("depth_mean", "depth_mean,first_token"), strict=True):
        for scale in _SCALES:
            if (name := f"{kind}_{scale}") == served or name not in nested.tests:
                continue
            gained = gain(inputs.label, inputs.group, nested.tests[name], nested.tests[served])
            if gained.low > 0:
                yield (
                    f"--logit-scale {scale} --signals {signals} gains {gained.difference:.3f} "
                    f"[{gained.low:.3f}, {gained.high:.3f}] of AUROC"
                )
