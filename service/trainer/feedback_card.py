"""What a card says of a recalibration by feedback: who was labelled, and what that may have done to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.fitting.presentation import markdown_table

CAUTION = (
    "Nobody drew these rows at random: users label what they like. Where the choice depends on the risk alone, the map "
    "is right; where wrong answers are reported more readily than right ones (or the reverse), the recalibrated risk "
    "is too high (or too low), and nothing in these rows can tell."
)


def feedback_lines(found: Mapping[str, Any]) -> dict[str, str]:
    """Rows of the card's table."""
    left_out = ", ".join(f"{count} {why}" for why, count in found["left_out"].items() if count) or "none"
    return {
        "feedback": f"{found['answers']} answers stored, {found['labelled']} of them labelled and used "
        f"({found['labelled'] / found['answers']:.1%}); labels left out: {left_out}",
        "hallucinated": f"{found['share']:.1%} of the labelled; {_weighted(found)}{_by_traffic(found)}",
    }


def _weighted(found: Mapping[str, Any]) -> str:
    text = f"{found['weighted']:.1%} with each tenth of risk weighted as all answers have it"
    return text if found["covered"] > 0.9995 else f"{text} (of {found['covered']:.0%}: the other tenths have no label)"


def _by_traffic(found: Mapping[str, Any]) -> str:
    if "traffic" not in found:
        return f"; no estimate from unlabelled answers: {found['no_traffic']}"
    traffic = found["traffic"]
    share = traffic["share"]
    ends = f"[{share['low']:.1%}, {share['high']:.1%}]"
    text = f"; {share['value']:.1%} {ends} of all answers by prior shift, without labels"
    if traffic["test"] is None:
        return text + " (**whether prior shift alone explains them was not tested: someone insisted**)"
    return text if traffic["explained"] else text + " (**which does not explain them: someone insisted**)"


def selection(found: Mapping[str, Any]) -> str:
    """The card's paragraph and tables about who was labelled."""
    tenths = [
        [
            f"{place / 10:.1f} to {(place + 1) / 10:.1f}",
            str(answers),
            _share(labelled, answers),
            _share(wrong, labelled),
        ]
        for place, (answers, labelled, wrong) in enumerate(found["by_tenth"])
        if answers
    ]
    decisions = [
        [decision, str(answers), _share(labelled, answers)]
        for decision, (answers, labelled) in found["by_decision"].items()
    ]
    beyond = (
        f" No label lies at a risk above {found['highest']:.2f}: what the map does there is extrapolated."
        if found["highest"] < found["highest_answer"] - 0.1
        else ""
    )
    return (
        f"### Who was labelled\n\n{CAUTION}{beyond}\n\n"
        + markdown_table(["risk before", "answers", "labelled", "of these hallucinated"], tenths)
        + "\n\n"
        + markdown_table(["decision", "answers", "labelled"], decisions)
        + "\n\nA label of an answer that was withheld, or given by another server, is not about this model and was not "
        "used.\n\n"
    )


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.1%})" if whole else "0"
