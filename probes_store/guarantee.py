"""The guarantee of a bundle's threshold: what was tested, on which rows, and the words that say for whom it holds.

Bundles of format version 2 have one, those of version 1 have none, those of version 3 may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

CLOSED = 0.0  # a threshold that no risk is below: nothing is answered


@dataclass(frozen=True, slots=True)
class Guarantee:
    """Of the answered question groups, counted equally, at most a share alpha is hallucinated, at confidence 1 - delta.

    Each group counts by a random one of its answered questions.  The time is the manifest's ``created``.
    """

    alpha: float
    delta: float  # of this promise alone, where several were tested on one set
    threshold: float  # the manifest's: what has a risk below it is answered; 0: nothing is
    groups: int  # n: groups with an answered row
    hallucinated: int  # X: of their first answered rows in the seeded order
    p_value: float  # P(Bin(n, alpha) <= X); 1 where nothing is answered
    answered: float  # share of the rows
    risk_control_threshold: float | None  # loosest one with E[answered and hallucinated] <= alpha over groups
    rows: int  # that were tested, with a verdict
    all_groups: int  # of these rows
    data_digest: str  # of the calibration file
    labels: Literal["given", "generate"]
    judge: str | None  # who judged generated answers
    dtype: Literal["float32", "bfloat16", "float16"]  # that the calibration rows were read in
    seed: int  # of the order of the rows
    statement: str  # for whom it holds, and when it is void

    @property
    def closed(self) -> bool:
        """Whether no threshold qualified, so that nothing is answered."""
        return self.threshold == CLOSED


def check_guarantee(
    guarantee: Guarantee, threshold: float, require: Callable[[bool, str, object, object], None]
) -> None:
    """Check ranges and relations; ``threshold`` is the manifest's, ``require`` raises where a check fails."""
    for field in ("alpha", "delta"):
        value = getattr(guarantee, field)
        require(0.0 < value < 1.0, f"guarantee.{field}", "a number between 0 and 1", value)
    require(guarantee.threshold == threshold, "guarantee.threshold", f"the threshold, {threshold}", guarantee.threshold)
    for field in ("p_value", "answered"):
        value = getattr(guarantee, field)
        require(0.0 <= value <= 1.0, f"guarantee.{field}", "a number from 0 to 1", value)
    control = guarantee.risk_control_threshold
    require(
        control is None or 0.0 <= control <= 1.0, "guarantee.risk_control_threshold", "null or from 0 to 1", control
    )
    counts = (0, guarantee.hallucinated, guarantee.groups, guarantee.all_groups, guarantee.rows)
    require(
        list(counts) == sorted(counts),
        "guarantee.hallucinated",
        "0 <= hallucinated <= groups <= all_groups <= rows",
        counts[1:],
    )
    passed = guarantee.p_value <= guarantee.delta
    require(passed or guarantee.closed, "guarantee.p_value", f"at most delta, {guarantee.delta}", guarantee.p_value)
    require(not guarantee.closed or guarantee.groups == 0, "guarantee.groups", "0 at threshold 0", guarantee.groups)
    require(guarantee.seed >= 0, "guarantee.seed", "0 or more", guarantee.seed)
    for field in ("data_digest", "statement"):
        require(getattr(guarantee, field) != "", f"guarantee.{field}", "a non-empty string", "")
