"""Bundles side by side, from the evaluations they carry: no model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probes_store.bundle import Bundle
from service.fitting.presentation import markdown_table
from service.trainer.card import METRICS, SIGNALS, WITHIN

SHOWN = ("auroc", *WITHIN, "auprc_hallucinated", "brier", "calibration_debiased")


@dataclass(frozen=True)
class Comparison:
    """A table, and what keeps its columns from being compared."""

    markdown: str
    caveats: tuple[str, ...]


def compare(bundles: Sequence[Bundle]) -> Comparison:
    """A column for each bundle: what it reads, its own signal's figures, its threshold.  Figures it lacks are "-"."""
    documents = [bundle.evaluation() for bundle in bundles]
    lines: list[list[str]] = [
        ["model", *(bundle.manifest.model.name for bundle in bundles)],
        ["site", *(bundle.manifest.readout.site for bundle in bundles)],
        ["signal", *(SIGNALS[document["signal_of_the_bundle"]] for document in documents)],
        ["training rows", *(f"{bundle.manifest.training.rows:,}" for bundle in bundles)],
        ["threshold", *(f"{bundle.manifest.threshold:.4f}" for bundle in bundles)],
    ]
    for title, read in (("nested CV", _crossed), ("held out", _held_out)):
        rows = [read(document) for document in documents]
        for key in SHOWN:
            if any(row.get(key) is not None for row in rows):
                name = METRICS.get(key) or f"AUROC {WITHIN[key]}"
                lines.append([f"{title}: {name}", *(_cell(row.get(key)) for row in rows)])
    header = ["", *(bundle.reference for bundle in bundles)]
    return Comparison(markdown_table(header, lines), tuple(_caveats(bundles, documents)))


def _crossed(document: Mapping[str, Any]) -> Mapping[str, Any]:
    crossed = document.get("cross_validation")
    return crossed["signals"][document["signal_of_the_bundle"]] if crossed else {}


def _held_out(document: Mapping[str, Any]) -> Mapping[str, Any]:
    held = document.get("held_out")
    return held["signals"]["bundle"] if held else {}


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, Mapping):
        return f"{value:.3f}"
    interval = f" [{value['low']:.3f}, {value['high']:.3f}]" if "low" in value else ""
    return f"{value['mean']:.3f}{interval}"


def _caveats(bundles: Sequence[Bundle], documents: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    if len({bundle.manifest.model.fingerprint for bundle in bundles}) > 1:
        found.append("the bundles read different models, which answer different questions right")
    if len({bundle.manifest.training.data_digest for bundle in bundles}) > 1:
        found.append("trained on different rows: the nested figures are not of the same questions")
    held = {document["held_out"]["digest"] for document in documents if document.get("held_out")}
    if len(held) > 1:
        found.append("held-out figures are of different rows")
    found.append("intervals are of each figure, not of the difference: on the same rows a smaller gain can be sure")
    return found
