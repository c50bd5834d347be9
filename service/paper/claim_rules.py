"""Claims that the depth mean beats other methods on the same rows.

A difference counts where its 95 % interval, by bootstrap over groups on the first seed's test sides, excludes zero.
Claims judged from table cells are in ``claim_table_rules``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from service.evaluation.main_table import RESAMPLES, Comparison, measured, pooled_ranks
from service.evaluation.options import OURS
from service.evaluation.page.report_data import Verdict
from service.evaluation.set_result import SetResult
from service.evaluation.significance import Bootstrap, paired_bootstrap
from service.evaluation.tables import Cell

Rows = Mapping[str, Mapping[str, Cell]]  # table name -> one set's row
BEST_HEAD: Final = ("iti",)
OTHERS: Final = ("fact-probe", "iris")
FREE: Final = ("first-token-max-prob", "first-token-entropy", "prompt-length")


class NotTestable(Exception):
    """This set, or this run, cannot test the claim; the message gives the reason."""


@dataclass(frozen=True)
class Finding:
    """One claim on one set."""

    verdict: Verdict
    text: str


Judge = Callable[[SetResult, Rows], Finding]
"""(set, its table rows) -> finding.  Raises NotTestable."""


@dataclass(frozen=True)
class Rule:
    """A claim, the rule in words, and the rule as code."""

    claim: str
    rule: str
    judge: Judge


def ahead_of(names: Sequence[str], result: SetResult, _: Rows) -> Finding:
    """Ours against the best of ``names`` by mean AUROC."""
    there = [name for name in names if name in result.scores]
    if not there:
        raise NotTestable(f"{' and '.join(names)} did not take part")
    aurocs = {name: measured(result.label, result.scores[name])["auroc"]["mean"] for name in (OURS, *there)}
    best = max(there, key=lambda name: aurocs[name])
    interval: Comparison | Bootstrap
    if result.comparison is not None and result.comparison.runner_up == best:
        interval = result.comparison
    else:
        ours, other = (pooled_ranks(len(result.label), result.scores[name]) for name in (OURS, best))
        interval = paired_bootstrap(result.label, ours, other, result.group, RESAMPLES, 0)
    difference, low, high = interval.difference, interval.low, interval.high
    text = (
        f"{points(aurocs[OURS])} against {points(aurocs[best])} ({best}), {signed(difference)} points on pooled ranks "
        f"[{signed(low)}, {signed(high)}]"
    )
    if low > 0:
        return Finding("supported", text)
    if difference > 0:
        return Finding("mixed", f"{text}, not distinguishable from none")
    return Finding("not supported", text)


def points(share: float) -> str:
    """A share of 1 in percent, one decimal."""
    return f"{100 * share:.1f}"


def signed(share: float) -> str:
    """A difference of shares in points."""
    return f"{100 * share:+.1f}".replace("-", "−")


_AHEAD = "supported where the 95 % interval of the AUROC difference is above zero, mixed where only the difference is"

RULES: Final = (
    Rule("The depth mean beats the best single head (ITI).", _AHEAD, partial(ahead_of, BEST_HEAD)),
    Rule(
        "The depth mean beats the other probes of internal states (Fact-Probe, IRIS).",
        f"{_AHEAD}; against the better of the two",
        partial(ahead_of, OTHERS),
    ),
    Rule(
        "Before the first token, the depth mean knows the risk better than what costs nothing: first-token "
        "probability, entropy, prompt length.",
        f"{_AHEAD}; against the best of the three",
        partial(ahead_of, FREE),
    ),
)
