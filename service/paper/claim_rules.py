"""Claims on what beats what: the depth mean against other methods on the same rows.

A difference counts where its 95 % interval, by bootstrap over groups on the first seed's test sides, leaves zero out.
Table claims are in ``claim_table_rules``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from service.evaluation.main_table import RESAMPLES, measured, pooled_ranks
from service.evaluation.options import OURS
from service.evaluation.page.report_data import Verdict
from service.evaluation.set_run import SetRun
from service.evaluation.significance import paired_bootstrap
from service.evaluation.tables import Cell

Rows = Mapping[str, Mapping[str, Cell]]  # table name -> one set's row
BEST_HEAD: Final = ("iti",)
OTHERS: Final = ("fact-probe", "iris")
FREE: Final = ("first-token-max-prob", "first-token-entropy", "prompt-length")


class NotTestable(Exception):
    """This set, or this run, cannot say; the message says why."""


@dataclass(frozen=True)
class Finding:
    """One claim on one set."""

    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Rule:
    """A claim, the rule in words, and the rule as code: (run, the set's table rows) -> finding, or NotTestable."""

    claim: str
    rule: str
    judge: Callable[[SetRun, Rows], Finding]


def ahead_of(names: Sequence[str], run: SetRun, _: Rows) -> Finding:
    """Ours against the best of ``names`` by mean AUROC."""
    there = [name for name in names if name in run.runs]
    if not there:
        raise NotTestable(f"{' and '.join(names)} did not take part")
    aurocs = {name: measured(run.label, run.runs[name])["auroc"]["mean"] for name in (OURS, *there)}
    best = max(there, key=lambda name: aurocs[name])
    if run.comparison is not None and run.comparison.runner_up == best:
        difference, low, high = run.comparison.difference, run.comparison.low, run.comparison.high
    else:
        ours, other = (
            pooled_ranks(len(run.label), [one for one in run.runs[name] if one.seed == 0]) for name in (OURS, best)
        )
        drawn = paired_bootstrap(run.label, ours, other, run.group, RESAMPLES, 0)
        difference, low, high = drawn.difference, drawn.low, drawn.high
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
