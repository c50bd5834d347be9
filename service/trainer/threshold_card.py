"""What a card and the console say of the threshold: its rule, what it does, and what other costs would do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.fitting.markdown import markdown_table
from service.fitting.thresholds import LEAST_ANSWERED

_OPTIMISTIC = (
    "The threshold was chosen on these rows, so the share is a little too good, and it is no promise: "
    "`hallutracer guarantee` makes one, on new rows."
)


def rule_in_words(found: Mapping[str, Any]) -> str:
    """``threshold`` of evaluation.json -> where the threshold is from; plain text."""
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


def threshold_section(evaluation: Mapping[str, Any]) -> str:
    """The card's section: the rule, what the threshold does to rows that no fit saw, and a table of costs."""
    found = evaluation["threshold"]
    rule = rule_in_words(found)
    text = f"{rule[0].upper()}{rule[1:]}."
    if found["rule"] == "target":
        text = f"{text if found['reached'] else f'**{text}**'} {_OPTIMISTIC}"
    sections = ["## Threshold\n", f"{text}\n", *_gates(evaluation)]
    crossed = evaluation.get("cross_validation")
    if crossed is not None:
        sections += [
            "The same for other costs of a wrong answer, K, by the risks of folds that never saw the row; the plot of "
            "coverage and error shows every threshold, and the bundle's as a point:\n",
            f"{_costs(crossed['by_wrong_costs'])}\n",
        ]
    return "\n".join(sections)


def _gates(evaluation: Mapping[str, Any]) -> list[str]:
    """What the threshold does, a paragraph for each set of rows that no fit saw."""
    lines = []
    for key, rows in (
        ("cross_validation", "by the risks of folds that never saw the row"),
        ("held_out", "held-out rows"),
    ):
        if (found := evaluation.get(key)) is None:
            continue
        gate, counts = found["at_threshold"], found if key == "held_out" else evaluation["data"]
        wrong = counts["hallucinated"] / (counts["factual"] + counts["hallucinated"])
        if not gate["answered"]:
            lines.append(f"A gate at this threshold, {rows}: **no prompt is answered** ({wrong:.0%} are wrong without "
                         "a gate).\n")  # fmt: skip
            continue
        lines.append(
            f"A gate at this threshold, {rows}: {gate['answered']:.0%} of the prompts are answered, "
            f"{gate['wrong_among_answered']:.0%} of these answers are wrong ({wrong:.0%} without a gate), and "
            f"{gate['right_withheld']:.0%} of the right answers are withheld.\n"
        )
    return lines


def _costs(rows: list[dict[str, float]]) -> str:
    shown = [
        [
            f"{row['wrong_costs']:g}",
            f"{row['threshold']:.3f}",
            f"{row['answered']:.1%}",
            f"{row['wrong_among_answered']:.1%}" if row["answered"] else "-",
            f"{row['right_withheld']:.1%}",
        ]
        for row in rows
    ]
    header = ["K", "threshold", "answered", "wrong among answered", "right withheld"]
    return markdown_table(header, shown, range(len(header)))
