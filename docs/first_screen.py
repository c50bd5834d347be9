"""Draw docs/tenths.svg and print the README's list of the 1.5B's answers: python
docs/first_screen.py.

Both are of the shipped bundles' own records, so no model is loaded: each training question has a
risk by folds that saw neither the question nor its entity.  The list is every ``EVERY``-th, by
risk, of the questions about ``KINDS`` in plain words among the rows of the bundle's training."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from docs.answered import read_rows, texts_of
from probes_store.bundle import Bundle, load_bundle
from service.judging.evaluation import coverage
from service.trainer.publish import read_risks

DOCS = Path(__file__).parent
SHIPPED = DOCS.parent / "probes_store" / "shipped"
SMOLLM2, QWEN = SHIPPED / "smollm2" / "1", SHIPPED / "qwen2.5-coder-1.5b" / "2"
QWEN_ROWS = [DOCS / f"qwen2.5-coder-1.5b-{name}.jsonl.gz" for name in ("rows", "crossed-rows")]
KINDS = ("facts/capital", "facts/language", "facts/currency")  # as the other list's
EVERY = 8
SHOWN = 80  # characters of an answer


@dataclass(frozen=True)
class Answer:
    """A line of the list."""

    risk: float
    question: str
    answer: str
    right: bool
    withheld: bool

    def line(self) -> str:
        """A row of the README's table; what the gate did wrong is bold."""
        verdict = "right" if self.right else "wrong"
        if self.right is self.withheld:
            verdict = f"**{verdict}**: {'withheld' if self.withheld else 'let through'}"
        whole = len(self.answer) <= SHOWN
        answer = self.answer if whole else self.answer[:SHOWN].rsplit(" ", 1)[0] + " .."
        return f"| {self.risk:.2f} | {self.question} | {answer} | {verdict} |"


def answers(bundle: Bundle, rows: Sequence[Mapping[str, object]]) -> list[Answer]:
    """Return the list, lowest risk first; ``rows`` are those of the bundle's training.

    Raises ValueError where they are not."""
    labelled = [row for row in rows if row.get("label") is not None]
    recorded = read_risks(bundle.evaluation()["out_of_fold"]["risks"])
    if [row["label"] for row in labelled] != recorded.label.tolist():
        raise ValueError(f"the rows are not those that {bundle.manifest.reference} records")
    limit = bundle.manifest.threshold_for(False)
    asked = [
        Answer(float(risk), texts_of(row)[-1], str(row["answer"]), row["label"] == 1, risk >= limit)
        for row, risk in zip(labelled, recorded.risk.tolist(), strict=True)
        if row["form"] == "wording_plain" and row["kind"] in KINDS
    ]
    return sorted(asked, key=lambda answer: answer.risk)[::EVERY]


def panel(axes: Axes, title: str, bundle: Bundle) -> None:
    """Draw how often one model is right in each tenth of its training questions by risk."""
    tenths = coverage(bundle).tenths
    shares = [100 * tenth.right for tenth in tenths]
    names = [f"{tenth.low:.2f}\nto {tenth.high:.2f}" for tenth in tenths]
    bars = axes.bar(names, shares, color="#2b6cb0", width=0.8)
    axes.bar_label(bars, [f"{share:.0f}" for share in shares], padding=2)
    axes.set(ylim=(0, 105), yticks=[], xlabel="a tenth of the questions, by risk", title=title)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="x", length=0, labelsize=6)


def draw(models: Mapping[str, Bundle], target: Path) -> None:
    """Write the picture, a panel for each model."""
    with plt.rc_context({"svg.hashsalt": "tenths", "font.size": 8}):
        figure, panels = plt.subplots(
            1, len(models), figsize=(4 * len(models), 2), layout="constrained", squeeze=False
        )
        for axes, (title, bundle) in zip(panels[0], models.items(), strict=True):
            panel(axes, f"{title}: answered right, %", bundle)
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Draw the picture and print the list."""
    smollm2, qwen = load_bundle(SMOLLM2), load_bundle(QWEN)
    draw({"SmolLM2-135M": smollm2, "Qwen2.5-Coder-1.5B": qwen}, DOCS / "tenths.svg")
    rows = [row for path in QWEN_ROWS for row in read_rows(path)]
    sys.stdout.writelines(f"{answer.line()}\n" for answer in answers(qwen, rows))


if __name__ == "__main__":
    main()
