"""The model card's section on the context probes."""

from __future__ import annotations

from probes_store.manifest import Manifest
from service.fitting.presentation import markdown_table

MEANING = {
    "asks": "the prompt asks the model for a fact",
    "passage": "text to answer from stands beside the question",
    "stated": "that text states the answer",
}


def context_section(manifest: Manifest) -> str | None:
    """What the bundle tells of a prompt besides its risk; None where it tells nothing."""
    context = manifest.context
    if context is None:
        return None
    header = ["probe", "tells whether", "rows", "of which true", "AUROC out of fold"]
    rows = [
        [f"`{probe.name}`", MEANING[probe.name], f"{probe.rows}", f"{probe.positive}", f"{probe.auroc:.3f}"]
        for probe in context.probes
    ]
    applies = context.applicability
    return (
        "## What a prompt is\n\n"
        f"{markdown_table(header, rows, range(2, len(header)))}\n"
        + (f"\n{applies.statement}\n" if applies is not None else "")
        + (
            "\nNo probe tells whether a passage is true: one that contradicts the fact is read as one that states it.\n"
            if "passage" in manifest.signals
            else ""
        )
    )
