"""Write the table of docs/models.md from the shipped bundles' own records.  Run it after a bundle
changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from probes_store.bundle import Bundle
from probes_store.store import SHIPPED, Store
from service.fitting.decisions import decisions
from service.judging.evaluation import coverage, gate_at, kept_risks
from service.library.engine import FILES
from service.library.engine import SHIPPED as MODELS
from service.trainer.presentation import markdown_table

TARGET = Path(__file__).parent / "models.md"
BEGIN = (
    "<!-- the table: written by docs/models.py from the bundles' records; a test compares it -->\n"
)
END = "<!-- the end of the table -->\n"


def row(bundle: Bundle) -> list[str]:
    """One bundle's line."""
    manifest, evaluation = bundle.manifest, bundle.evaluation()
    own = evaluation["cross_validation"]["signals"][evaluation["signal_of_the_bundle"]]
    training = manifest.training
    gate = coverage(bundle).own
    risks = kept_risks(bundle)
    rows = training.factual + training.hallucinated
    found: dict[str, float] = {}
    if risks is not None:
        risk, wrong = risks
        found = decisions(1 - wrong.astype(np.int64), risk)
        gate = gate or gate_at(
            manifest.threshold, risk < manifest.threshold, wrong
        )  # none: guaranteed since
    return [
        f"`{manifest.name}`",
        manifest.model.name,
        f"{rows:,}",
        f"{training.factual / rows:.1%}",
        interval(own["auroc_within_kind"]),
        interval(own["auroc"]),
        number(found.get("e_aurc")),
        "-" if not found else f"{found['caught_at_10']:.1%}",
        number(own["calibration_debiased"]["mean"]),
        f"{manifest.threshold:.3f}",
        "-" if gate is None else f"{gate.answered:.1%}",
        (
            "-"
            if gate is None or gate.wrong_among_answered is None
            else f"{gate.wrong_among_answered:.1%}"
        ),
    ]


def interval(value: dict[str, float]) -> str:
    """A mean and, where there is one, its 95 % interval."""
    ends = f" [{value['low']:.3f}, {value['high']:.3f}]" if "low" in value else ""
    return f"{value['mean']:.3f}{ends}"


def number(value: float | None) -> str:
    """Three digits, a dash for none."""
    return "-" if value is None else f"{value:.3f}"


def page() -> str:
    """The whole page, with the table as it is to be."""
    titles = [
        "bundle",
        "model",
        "rows",
        "right",
        "AUROC within kind",
        "AUROC [95 %]",
        "E-AURC",
        "caught at 10 %",
        "calibration error",
        "threshold",
        "answered",
        "wrong among answered",
    ]
    store: Any = Store(SHIPPED)
    bundles = [store.load(name) for names in (*FILES.values(), *MODELS.values()) for name in names]
    table = markdown_table(titles, [row(bundle) for bundle in bundles], range(2, len(titles)))
    before, _, rest = TARGET.read_text(encoding="utf-8").partition(BEGIN)
    promises = "".join(map(promise, bundles))
    return f"{before}{BEGIN}\n{table}\n\n{promises}\n{END}{rest.partition(END)[2]}"


def promise(bundle: Bundle) -> str:
    """What a guaranteed threshold promises; nothing of another."""
    given = bundle.manifest.guarantee
    if given is None:
        return ""
    name = bundle.manifest.name
    share = f"{given.alpha:.0%}"
    sure = f"{1 - given.delta:.0%}"
    return (
        f"The threshold of `{name}` is [guaranteed](guarantees.md): of the question groups that it"
        f" answers, at\nmost {share} are answered wrong, with confidence {sure}.\n"
    )


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
