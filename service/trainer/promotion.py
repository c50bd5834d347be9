"""May a bundle take over?  By what a running service has seen of it as a shadow, and by its golden prompts there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from probes_store.bundle import Bundle
from probes_store.manifest import Manifest
from service.errors import HalluTracerError
from service.fitting.jackknife import jeffreys

LEAST_PROMPTS, MOST_DISAGREEMENT, MOST_DRIFT = 500, 0.05, 0.5


@dataclass(frozen=True)
class PromotionBounds:
    """What a candidate must stay within."""

    least_prompts: int = LEAST_PROMPTS  # that it read as a shadow
    most_disagreement: float = MOST_DISAGREEMENT  # upper end of the share's 95 % interval
    most_drift: float = MOST_DRIFT  # of the golden prompts, as a share of what the replay tolerates


@dataclass(frozen=True)
class Finding:
    """One condition, in words."""

    fine: bool
    text: str


def findings(bundle: Bundle, served: Mapping[str, Any], bounds: PromotionBounds) -> list[Finding]:
    """``served`` is the answer of a service's GET /v1/bundles.  Raises HalluTracerError where it is none."""
    try:
        cards = [one for one in served["data"] if one["digest"] == bundle.manifest.digest]
        if not cards:
            return [Finding(False, f"the service has not loaded {bundle.reference} ({bundle.manifest.digest[:19]}..)")]
        card, found = cards[0], []
        compared, golden = card.get("compared"), card["golden"]
        if compared is None:
            found.append(Finding(False, f"{bundle.reference} is no shadow there: start it with --shadow"))
        else:
            found += _compared(compared, bounds)
        for what in ("risk", "trajectory"):
            share = golden[what] / golden[f"{what}_tolerance"]
            text = f"golden prompts: {what} off by {golden[what]:.2g}, {share:.0%} of what the replay tolerates"
            found.append(Finding(share <= bounds.most_drift, f"{text}; at most {bounds.most_drift:.0%}"))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise HalluTracerError(f"not the bundles of a HalluTracer service of this version: {error!r}") from None
    return found


def _compared(compared: Mapping[str, Any], bounds: PromotionBounds) -> list[Finding]:
    prompts, share = compared["prompts"], compared["disagreement"]
    text = f"{prompts:,} prompts read as a shadow; at least {bounds.least_prompts:,}"
    found = [Finding(prompts >= bounds.least_prompts, text)]
    if prompts:
        upper = jeffreys(share, prompts).high
        kinds = (("stricter", "alone flags"), ("looser", "alone lets pass"), ("failed", "no number for"))
        counts = ", ".join(f"{words} {compared[kind]:,}" for kind, words in kinds)
        text = f"disagrees on {share:.1%}, upper end of its 95 % interval {upper:.1%} ({counts})"
        found.append(Finding(upper <= bounds.most_disagreement, f"{text}; at most {bounds.most_disagreement:.1%}"))
    return found


def differences(before: Manifest, after: Manifest) -> list[tuple[str, str, str]]:
    """Field, value before, value after, of all fields of the manifest that differ, but for the files' digests."""
    flat = [_flat(asdict(manifest)) for manifest in (before, after)]
    names = [name for name in dict.fromkeys([*flat[0], *flat[1]]) if not name.startswith("files.")]
    rows = [(name, flat[0].get(name, "-"), flat[1].get(name, "-")) for name in names]
    return [row for row in rows if row[1] != row[2]]


def _flat(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, inner in value.items():
            found |= _flat(inner, f"{name}.{key}" if name else str(key))
        return found
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value)}


def probes_apart(before: Bundle, after: Bundle) -> str:
    """In words: heads that differ, and the angle between the directions of layers with the same head."""
    first, second = before.probes, after.probes
    if first.direction.shape != second.direction.shape:
        return "their probes have different shapes"
    same = first.head == second.head
    text = f"{int((~same).sum())} of {len(same)} layers read another head"
    if not same.any():
        return text
    cosine = np.sum(first.direction[same] * second.direction[same], axis=-1)
    middle, least = np.median(cosine), cosine.min()
    return f"{text}; where it is the same, the directions' cosine is {middle:.3f} in the median, {least:.3f} at least"
