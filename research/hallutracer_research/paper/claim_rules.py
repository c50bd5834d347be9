"""What every rule that judges a claim shares: its form, its verdicts, how it reads tables and writes numbers.

Rules on differences of AUROC are in ``claim_differences``, those on table cells in ``claim_table_rules`` and
``claim_geometry_rules``.  A threshold is the paper's own where it prints one, and the rule states it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from hallutracer_research.evaluation.page.report_data import Verdict
from hallutracer_research.evaluation.set_result import SetResult
from hallutracer_research.evaluation.tables import Cell

Rows = Mapping[str, Mapping[str, Cell]]  # table name -> one set's row
HALF_A_POINT: Final = 0.005  # the paper's margin for "the same" (Sec. exp-ablation)
NEAR_CHANCE: Final = 0.55  # a depth mean below this AUROC has no signal to divide among layers, heads or statistics


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


def add_to(rules: list[Rule]) -> Callable[[str], Callable[[Judge], Judge]]:
    """A decorator: ``@rule("in words")`` appends a function to ``rules``; the function's docstring is the claim."""

    def rule(words: str) -> Callable[[Judge], Judge]:
        def add(judge: Judge) -> Judge:
            rules.append(Rule(judge.__doc__ or "", words, judge))
            return judge

        return add

    return rule


def number(rows: Rows, table: str, key: str) -> float:
    """One cell of the set's row, the mean where it has a spread.  Raises NotTestable where there is none."""
    cell = rows.get(table, {}).get(key)
    value = cell.get("mean") if isinstance(cell, Mapping) else cell
    if not isinstance(value, int | float):
        raise NotTestable(f"table {table} has no {key}")
    return float(value)


def signal(rows: Rows) -> float:
    """AUROC of the depth mean.  Raises NotTestable where it is near chance."""
    mean = number(rows, "mean-dominance", "mean")
    if mean < NEAR_CHANCE:
        raise NotTestable(near_chance(mean))
    return mean


def near_chance(mean: float) -> str:
    """The reason for leaving out a set whose depth mean has this AUROC."""
    return f"the depth mean is near chance ({points(mean)})"


def verdict_of(held: bool) -> Verdict:
    """A rule that either holds or does not."""
    return "supported" if held else "not supported"


def both(first: bool, second: bool) -> Verdict:
    """A rule of two parts: mixed where one holds."""
    return verdict_of(first) if first == second else "mixed"


def points(share: float) -> str:
    """A share of 1 in percent, one decimal."""
    return f"{100 * share:.1f}"


def signed(share: float) -> str:
    """A difference of shares in points."""
    return f"{100 * share:+.1f}".replace("-", "−")


WITH_SIGNAL: Final = f"(where the depth mean's AUROC is {points(NEAR_CHANCE)} or more)"
