"""A bundle's uncertainty record with its words, and the section of the model card."""

from __future__ import annotations

import math

import numpy as np

from probes_store.manifest import Manifest
from probes_store.records import RefitInterval, Uncertainty
from service.fitting.uncertainty import Reference
from service.risk import risk


def uncertainty_record(reference: Reference, interval: RefitInterval | None) -> Uncertainty:
    """What a run found, with what it means."""
    outside = (
        f"A prompt lies outside training where the distance of its trajectory to those of training is 1 or more. Of "
        f"fresh prompts like the training rows about {reference.share:.2g} do, by {reference.rows} rows that neither "
        f"probes nor reference had seen. For a prompt outside, neither risk nor interval was checked on anything alike."
    )
    refits = (
        "It has no intervals: these need the nested evaluation with two seeds or more."
        if interval is None
        else f"An interval says where {interval.level:.0%} of trainings on other rows of the same kind and number "
        f"would put the risk of this prompt; {interval.fits} fits of the nested cross-validation gave its width. It is "
        f"not an interval for the truth of one answer, and knows nothing of another model, template or kind of prompt."
    )
    return Uncertainty(reference.share, reference.rows, interval, f"{refits} {outside}")


def uncertainty_section(manifest: Manifest) -> str:
    """Return the card's section."""
    record = manifest.uncertainty
    table = ""
    if record.interval is not None:
        lines = ["| risk | interval, at half the cutoff's distance |", "| --- | --- |"]
        for shown in (0.1, 0.25, 0.5, 0.75, 0.9):
            z = math.log((1 - shown) / shown)
            half = record.interval.half_width(z, 0.5)
            low, high = (float(risk(np.array([z + side]), np.ones(1), 0.0)) for side in (half, -half))
            lines.append(f"| {shown} | {low:.3f} to {high:.3f} |")
        table = "\n".join(lines) + "\n\n"
    return f"## Uncertainty\n\n{table}{record.statement}\n"
