"""Compares bundles by their recorded figures, and decides whether one may replace another.  Loads
no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from probes_store.bundle import Bundle
from probes_store.manifest import Manifest
from service.errors import HalluTracerError
from service.fitting.scores import jeffreys
from service.trainer.cards import METRICS, SIGNALS, WITHIN, cell
from service.trainer.presentation import markdown_table

SHOWN = ("auroc", *WITHIN, "auprc_hallucinated", "brier", "calibration_debiased")


class BundleComparison(NamedTuple):
    """A table, and reasons why its columns may not be comparable."""

    markdown: str
    caveats: tuple[str, ...]


def compare(bundles: Sequence[Bundle]) -> BundleComparison:
    """Return a table with a column for each bundle: model, signal, figures, threshold; "-" if it
    has none."""
    documents = [bundle.evaluation() for bundle in bundles]
    manifests = [bundle.manifest for bundle in bundles]
    lines: list[list[str]] = [
        ["model", *(manifest.model.name for manifest in manifests)],
        ["site", *(manifest.readout.site for manifest in manifests)],
        ["signal", *(SIGNALS[document["signal_of_the_bundle"]] for document in documents)],
        ["training rows", *(f"{manifest.training.rows:,}" for manifest in manifests)],
        ["threshold", *(f"{manifest.threshold:.4f}" for manifest in manifests)],
    ]
    for title, part in (("nested CV", "cross_validation"), ("held out", "held_out")):
        signals = [
            "bundle" if part == "held_out" else document["signal_of_the_bundle"]
            for document in documents
        ]
        rows = [
            (document.get(part) or {"signals": {name: {}}})["signals"][name]
            for name, document in zip(signals, documents, strict=True)
        ]
        for key in SHOWN:
            if any(row.get(key) is not None for row in rows):
                name = METRICS.get(key) or f"AUROC {WITHIN[key]}"
                lines.append([f"{title}: {name}", *(_cell(row.get(key)) for row in rows)])
    header = ["", *(bundle.reference for bundle in bundles)]
    return BundleComparison(markdown_table(header, lines), tuple(_caveats(bundles, documents)))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, Mapping):
        return f"{value:.3f}"
    return cell(value) if "low" in value else f"{value['mean']:.3f}"


def _caveats(bundles: Sequence[Bundle], documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if (
        len(
            {
                (bundle.manifest.model.fingerprint, bundle.manifest.model.adapter)
                for bundle in bundles
            }
        )
        > 1
    ):
        yield "the bundles read different models, which answer different questions right"
    if len({bundle.manifest.training.data_digest for bundle in bundles}) > 1:
        yield "trained on different rows: the nested figures are not of the same questions"
    if (
        len({document["held_out"]["digest"] for document in documents if document.get("held_out")})
        > 1
    ):
        yield "held-out figures are of different rows"
    yield (
        "intervals are of each figure, not of the difference: on the same rows a smaller gain can"
        " be sure"
    )


@dataclass(frozen=True)
class PromotionBounds:
    """The limits that a candidate must meet."""

    least_prompts: int = 500  # prompts that it read as a shadow
    most_disagreement: float = 0.05  # upper end of the share's 95 % interval
    most_drift: float = 0.5  # deviation of the golden prompts, as a share of the replay's tolerance


class PromotionFinding(NamedTuple):
    """One condition, whether it is met, and its text."""

    fine: bool
    text: str


def promotion_findings(
    bundle: Bundle, served: Mapping[str, Any], bounds: PromotionBounds
) -> list[PromotionFinding]:
    """Check a bundle that a service runs as a shadow; ``served`` is the service's answer to GET
    /v1/bundles.

    Raises HalluTracerError if ``served`` is not such an answer."""
    try:
        return list(_findings(bundle, served, bounds))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise HalluTracerError(
            f"not the bundles of a HalluTracer service of this version: {error!r}"
        ) from None


def _findings(
    bundle: Bundle, served: Mapping[str, Any], bounds: PromotionBounds
) -> Iterator[PromotionFinding]:
    card = next(
        (entry for entry in served["data"] if entry["digest"] == bundle.manifest.digest), None
    )
    if card is None:
        yield PromotionFinding(
            False,
            f"the service has not loaded {bundle.reference} ({bundle.manifest.digest[:19]}..)",
        )
        return
    compared, golden = card.get("compared"), card["golden"]
    if compared is None:
        yield PromotionFinding(
            False, f"{bundle.reference} is no shadow there: start it with --shadow"
        )
    else:
        prompts, share = compared["prompts"], compared["disagreement"]
        text = f"{prompts:,} prompts read as a shadow; at least {bounds.least_prompts:,}"
        yield PromotionFinding(prompts >= bounds.least_prompts, text)
        if prompts:
            upper = jeffreys(share, prompts).high
            kinds = (
                ("stricter", "alone flags"),
                ("looser", "alone lets pass"),
                ("failed", "no number for"),
            )
            counts = ", ".join(f"{words} {compared[kind]:,}" for kind, words in kinds)
            text = (
                f"disagrees on {share:.1%}, upper end of its 95 % interval {upper:.1%} ({counts})"
            )
            fine = upper <= bounds.most_disagreement
            yield PromotionFinding(fine, f"{text}; at most {bounds.most_disagreement:.1%}")
    for what in ("risk", "trajectory"):
        share = golden[what] / golden[f"{what}_tolerance"]
        text = (
            f"golden prompts: {what} off by {golden[what]:.2g}, {share:.0%} of what the replay"
            " tolerates"
        )
        yield PromotionFinding(
            share <= bounds.most_drift, f"{text}; at most {bounds.most_drift:.0%}"
        )


def differences(before: Manifest, after: Manifest) -> list[tuple[str, str, str]]:
    """Return name, old value and new value of each field of the manifest that differs, without the
    files' digests."""
    old, new = (_flat(asdict(manifest)) for manifest in (before, after))
    rows = [
        (name, old.get(name, "-"), new.get(name, "-"))
        for name in {**old, **new}
        if not name.startswith("files.")
    ]
    return [row for row in rows if row[1] != row[2]]


def _flat(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        fields: dict[str, str] = {}
        for key, inner in value.items():
            fields |= _flat(inner, f"{name}.{key}" if name else str(key))
        return fields
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value)}


def probes_apart(before: Bundle, after: Bundle) -> str:
    """Return text: how many heads differ, and the cosine of the directions where the head is the
    same."""
    first, second = before.probes, after.probes
    if first.direction.shape != second.direction.shape:
        return "their probes have different shapes"
    same = first.head == second.head
    text = f"{int((~same).sum())} of {len(same)} layers read another head"
    if not same.any():
        return text
    cosine = np.sum(first.direction[same] * second.direction[same], axis=-1)
    return (
        f"{text}; where it is the same, the directions' cosine is {np.median(cosine):.3f} in the"
        f" median, {cosine.min():.3f} at least"
    )
