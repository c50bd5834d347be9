"""What a report tells someone who sees one for the first time."""

from __future__ import annotations

from collections.abc import Sequence

from hallutracer_research.evaluation.options import SHUFFLED, EvaluateOptions


def introduction(model: str, sets: Sequence[tuple[str, int]], options: EvaluateOptions) -> str:
    """Paragraphs: what is measured, how to read it, what to compare with; ``sets`` are names and numbers of rows."""
    listed = ", ".join(f"{name} ({rows:,} rows)" for name, rows in sets)
    paragraphs = [
        f"Before `{model}` writes the first token of an answer, can one tell that the answer will be wrong? This "
        "report compares HalluTracer, which averages a truth logit over the layers, with other methods on the same "
        f"rows: {listed}.",
        "AUROC, in percent, is the chance that a hallucinated row gets a higher risk than a factual one: 50 is a coin, "
        f"100 is perfect. It is measured on rows that no fit has seen, {options.seeds} seeds x {options.folds} folds; "
        "± is the standard deviation over these, square brackets are 95 % intervals. A set of a few hundred rows has "
        "wide ones: differences inside them are no differences. Bold is the best of its block.",
    ]
    known = []
    if "text-ngrams" in options.methods:
        known.append("What the question's text alone reaches says how much a set gives away without any model.")
    if SHUFFLED in options.methods:
        known.append("The control on shuffled labels has to be near 50.")
    if known:
        paragraphs.append(" ".join(known))
    if options.suite == "paper":
        paragraphs.append(
            "Verdicts come first. Each weighs one claim of the paper by a rule that was fixed beforehand and stands "
            "beside it: supported, not supported, mixed (the sets disagree, or the interval leaves it open), or not "
            "testable here."
        )
    paragraphs.append("Wide tables and drawings scroll sideways on a small screen.")
    return "\n\n".join(paragraphs)
