"""The words of a guarantee, and its section of the model card."""

from __future__ import annotations

import re

from probes_store.manifest import Manifest
from probes_store.records import Guarantee
from service.fitting.promise import Step

SECTION = re.compile(r"## Guarantee\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)


def statement(guarantee: Guarantee, manifest: Manifest, max_new_tokens: int, step: Step | None) -> str:
    """For whom the promise holds and when it is void.

    ``max_new_tokens`` is the length of the answers judged, ``step`` the test that passed, if any.
    """
    share, confidence = f"{guarantee.alpha:g}", f"{1 - guarantee.delta:g}"
    judged = guarantee.labels == "generate"
    wrong = f"what `{guarantee.judge}` judged so" if judged else "the rows that the calibration file labels 0"
    if guarantee.closed:
        first = (
            f"No threshold qualified for a share of {share} of hallucinations among the answers at confidence "
            f"{confidence}: every question is withheld, and nothing is answered."
        )
    else:
        first = (
            f"Answered here are questions with a risk below {guarantee.threshold:g}. Of the question groups that have "
            f"an answered question, counted equally whatever their size, at most a share of {share} is answered with a "
            f"hallucination. This holds with confidence {confidence} over the draw of the calibration rows, for a "
            f"random answered question of a random group that has one. "
            f"{guarantee.hallucinated} of the first answered rows of {guarantee.groups} groups were hallucinated: "
            f"P(Bin({guarantee.groups}, {share}) <= {guarantee.hallucinated}) = {guarantee.p_value:.2g}."
            + ("" if step is None else f" Not promised: by row, {by_row(step, guarantee.alpha)}.")
        )
    holds = (
        f"It holds for questions whose groups are drawn as those of the calibration rows were "
        f"({guarantee.data_digest}), asked of {manifest.model.name} at revision {manifest.model.revision}. "
        f"Hallucinated is {wrong}"
        + ("; answers that were empty or declined are not counted. " if judged else ". ")
        + "It says nothing about a single question, one kind of question or one group."
    )
    decoding = f"greedy with up to {max_new_tokens} tokens" if judged else "the one whose answers were labelled"
    void = (
        f"It is void with another model, revision or tokenizer; with another chat template or rendering than "
        f"`{manifest.prompt_format}`; in another dtype than {guarantee.dtype}; with another decoding than {decoding}; "
        f"under a policy that lets flagged prompts through, or at another threshold; and once a drift alarm says that "
        f"the questions are no longer those of the calibration."
    )
    if manifest.guarantee_shapes is not None:
        holds += f" The calibration's conversations: {'; '.join(manifest.guarantee_shapes)}."
        void += " It is void for conversations of another shape."
    control = guarantee.risk_control_threshold
    second = (
        f"Second promise, by conformal risk control: no threshold keeps the questions that are answered and "
        f"hallucinated at {share} of all."
        if control is None
        else f"Second promise, by conformal risk control: at any threshold up to {control:g} a random question of a "
        f"random new group is answered and hallucinated with a probability of at most {share}, on average over "
        f"calibration sets."
    )
    return " ".join((first, holds, void, second))


def by_row(step: Step, alpha: float) -> str:
    """The share of hallucinations among the answered rows, where a group counts as often as it has rows."""
    share = step.wrong_rows / step.rows
    text = f"{step.wrong_rows} of {step.rows} answered rows were hallucinated, {share:.1%}"
    return f"{text}, which is above {alpha:g}: a group with many rows counts more here" if share > alpha else text


def guaranteed_card(card: str, manifest: Manifest, step: Step | None = None) -> str:
    """The card with this guarantee's section, before the limits, in place of an earlier one.

    ``step`` is the test that passed, if any.
    """
    guarantee = manifest.guarantee
    assert guarantee is not None
    rows = {
        "promise": f"at most {guarantee.alpha:g} hallucinated among the answered question groups, counted equally, at "
        f"confidence {1 - guarantee.delta:g}",
        "threshold": f"{guarantee.threshold:g}, in place of training's (see the threshold)",
        "answering groups": f"{guarantee.groups} of {guarantee.all_groups}, {guarantee.hallucinated} of their first "
        f"answered rows hallucinated, p = {guarantee.p_value:.2g}",
        "answered": f"{guarantee.answered:.0%} of {guarantee.rows} rows",
        **({} if step is None else {"by row, not promised": by_row(step, guarantee.alpha)}),
        "calibration rows": f"`{guarantee.data_digest}`, seed {guarantee.seed}",
    }
    lines = ["## Guarantee\n", "| | |", "| --- | --- |", *(f"| {key} | {text} |" for key, text in rows.items())]
    section = "\n".join(lines) + f"\n\n{guarantee.statement}\n\n"
    if SECTION.search(card):
        return SECTION.sub(lambda _: section, card, count=1)
    before, limits, after = card.partition("## Limits\n")
    return before + section + limits + after if limits else f"{card.rstrip()}\n\n{section}"
