"""The parts of calibration rows that a guarantee tests apart, and what a test of one showed."""

from __future__ import annotations

from dataclasses import dataclass

from probes_store.records import CLOSED, GuaranteeStratum
from service.fitting.thresholds import GuaranteeStep, GuaranteeTest


@dataclass(frozen=True)
class Stratum:
    """Calibration rows that have a test of their own: questions with a passage, or without."""

    passage: bool | None  # None: all rows, since the bundle's prompts use no chat template
    groups: int  # groups for the test
    delta: float  # for one alpha
    # false: no threshold can pass with so few groups, so none of these questions is answered
    tested: bool

    @property
    def name(self) -> str:
        """Return the name of its rows in messages."""
        beside = {
            True: "questions with a passage",
            False: "questions without a passage",
            None: "questions",
        }
        return beside[self.passage]


@dataclass(frozen=True, eq=False)
class StratumResult:
    """The result of a test of one stratum at one alpha."""

    stratum: Stratum
    test: GuaranteeTest | None  # None: the stratum has too few groups for any threshold
    rows: int  # calibration rows of the stratum
    labelled: int  # these of them have a label
    answered: float  # share of the rows that the threshold that passed answers

    @property
    def step(self) -> GuaranteeStep:
        """Return the threshold that passed, or one that no group is answered at."""
        passed = None if self.test is None else self.test.passed
        return passed or GuaranteeStep(CLOSED, 0, 0, 0, 0, 1.0)

    @property
    def record(self) -> GuaranteeStratum:
        """Return the manifest's record."""
        step = self.step
        return GuaranteeStratum(
            passage=bool(self.stratum.passage),
            delta=self.stratum.delta,
            threshold=step.threshold,
            groups=step.groups,
            hallucinated=step.wrong,
            p_value=step.p_value,
            answered=self.answered,
            rows=self.rows,
            labelled=self.labelled,
        )
