"""Is a loaded bundle still worth what it promised?  Its traffic, its labels and its golden prompts, while it serves."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from probes_store.errors import BundleError
from service.drift import Drift, DriftLimits, LabelTest, Reference, compare, reference_of
from service.scoring import RiskReport, Scorer

log = logging.getLogger("hallutracer")
Cause = Literal["drift", "outside", "labels", "golden"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True)
class MonitorState:
    """What is told of a bundle: ``void`` has a sentence for each cause."""

    drift: Drift | None  # of the newest full window
    void: dict[Cause, str]
    labels: int  # answers that were given and labelled, of a bundle with a guarantee
    wrong: int  # of these
    reference: Reference | None  # None: the bundle keeps nothing to compare with


@dataclass(eq=False)
class Monitor:
    """One bundle's.  ``tell`` is called when a window was compared or a cause came or went.  Event loop only."""

    scorer: Scorer
    limits: DriftLimits
    tell: Callable[[Monitor], None]
    void: dict[Cause, str] = field(default_factory=dict)
    drift: Drift | None = None

    def __post_init__(self) -> None:
        bundle = self.scorer.bundle
        try:
            self._reference = reference_of(bundle)
        except BundleError as error:
            log.error("bundle %s is not watched for drift: %s", bundle.reference, error)
            self._reference = None
        guarantee = bundle.manifest.guarantee
        self._labels = None if guarantee is None else LabelTest(guarantee.alpha)
        self._risks: deque[float] = deque(maxlen=self.limits.window)
        self._outside: deque[bool] = deque(maxlen=self.limits.window)
        self._new = 0

    @property
    def state(self) -> MonitorState:
        """What is known now."""
        labels, wrong = (0, 0) if self._labels is None else (self._labels.labels, self._labels.wrong)
        return MonitorState(self.drift, dict(self.void), labels, wrong, self._reference)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a guarantee of this bundle does not hold just now."""
        return tuple(f"{cause}: {text}" for cause, text in self.void.items())

    def observe(self, reports: Sequence[RiskReport]) -> None:
        """Prompts that this bundle judged."""
        if self._reference is None:
            return
        for report in reports:
            self._risks.append(report.risk)
            self._outside.append(report.uncertain is not None and report.uncertain.outside)
            self._new += 1
            if len(self._risks) == self.limits.window and self._new >= self.limits.every:
                self._new = 0
                self._compare(self._reference)

    def label(self, hallucinated: bool) -> None:
        """An answer that was given under the guaranteed threshold was labelled, for the first time."""
        if self._labels is None:
            return
        self._labels.add(hallucinated)
        text = f"{self._labels.wrong} of {self._labels.labels} labelled answers are wrong, alpha {self._labels.alpha:g}"
        if self._labels.broken or "labels" in self.void:  # what has been shown once is not taken back by more labels
            self._set("labels", text)

    def golden(self, failure: str | None) -> None:
        """The golden prompts were replayed."""
        self._set("golden", failure)

    def _compare(self, reference: Reference) -> None:
        limits, able = self.limits, reference.outside is not None
        outside = np.array(self._outside, np.bool_) if able else None
        self.drift = found = compare(np.array(self._risks, np.float64), outside, reference)

        def beyond(cause: Cause, value: float, limit: float) -> bool:
            return value > limit * (limits.back if cause in self.void else 1.0)

        apart = beyond("drift", found.ks, limits.ks) or beyond("drift", found.psi, limits.psi)
        direction = "higher" if found.shift > 0 else "lower"
        text = (
            f"the last {found.prompts:,} risks are unlike those of training: KS {found.ks:.2f}, PSI {found.psi:.2f}, "
            f"mean {abs(found.shift):.2f} {direction}"
        )
        self._set("drift", text if apart else None)
        if found.outside is not None and reference.outside is not None:
            away = beyond("outside", found.outside - reference.outside, limits.outside)
            text = f"{found.outside:.1%} of the last {found.prompts:,} prompts lie outside training, "
            text += f"as {reference.outside:.1%} of its rows do"
            self._set("outside", text if away else None)
        self.tell(self)

    def _set(self, cause: Cause, text: str | None) -> None:
        before = cause in self.void
        if text is None:
            self.void.pop(cause, None)
        else:
            self.void[cause] = text
        if before is not (text is not None):
            reference = self.scorer.bundle.reference
            log.warning("bundle %s: %s: %s", reference, cause, text or "no longer")
            self.tell(self)
