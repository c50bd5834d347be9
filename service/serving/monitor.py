"""Whether a loaded bundle is still worth what it promised: its traffic, its labels and its golden prompts."""

from __future__ import annotations

import hashlib
import logging
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from probes_store.errors import BundleError
from service.engines.base import TokenIds
from service.feedback.rows import Tally
from service.judging.drift import Drift, DriftLimits, LabelTest, Reference, compare, reference_of
from service.scoring import RiskReport, Scorer

log = logging.getLogger("hallutracer")
_KEY = secrets.token_bytes(16)  # this process's own: a digest tells nobody else anything
Cause = Literal["drift", "outside", "labels", "golden"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


def digest_of(token_ids: TokenIds) -> bytes:
    """Return what tells within this process whether the same prompt came before, as ``Monitor.observe`` wants it."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8, key=_KEY).digest()


@dataclass(eq=False)
class Monitor:
    """One bundle's.  ``report`` is called when a window was compared or a cause came or went.  Event loop only."""

    scorer: Scorer
    limits: DriftLimits
    report: Callable[[Monitor], None]
    violations: dict[Cause, str] = field(default_factory=dict)
    drift: Drift | None = None  # of the newest window
    labels: Tally | None = None  # None: the bundle has no guarantee, or no label was looked at yet
    reference: Reference | None = None  # None: it is not watched for drift

    def __post_init__(self) -> None:
        bundle = self.scorer.bundle
        try:
            self.reference = reference_of(bundle)
        except BundleError as error:
            log.error("bundle %s is not watched for drift: %s", bundle.reference, error)
        guarantee = bundle.manifest.guarantee
        self._label_test = None if guarantee is None else LabelTest(guarantee.alpha)
        self._window: OrderedDict[bytes, tuple[float, bool]] = OrderedDict()  # by digest: its newest risk, outside
        self._seen = self._new = 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why a guarantee of this bundle does not hold just now."""
        return tuple(f"{cause}: {text}" for cause, text in self.violations.items())

    def observe(self, reports: Sequence[RiskReport], prompts: Sequence[bytes]) -> None:
        """Watch prompts that this bundle judged, with the ``digest_of`` each: one that comes again is counted once.

        Those that ask for no fact are none that the bundle's risks were fitted on.
        """
        if self.reference is None:
            return
        for report, prompt in zip(reports, prompts, strict=True):
            if not report.context.applies:
                continue
            self._window[prompt] = (report.risk, report.uncertain.outside)
            self._window.move_to_end(prompt)
            if len(self._window) > self.limits.window:
                self._window.popitem(last=False)
            self._seen, self._new, every = self._seen + 1, self._new + 1, self.limits.every
            # Where few different prompts are asked they never fill a window, and are compared as the few they are.
            if self._seen >= self.limits.window and self._new >= every and len(self._window) >= every:
                self._new = 0
                self._compare(self.reference)

    def count(self, labels: Tally) -> None:
        """Take what labels say of the answers that were drawn, all of them."""
        if self._label_test is None:
            return
        self.labels, alpha = labels, self._label_test.alpha
        # What has been shown once is not taken back by more labels.
        if self._label_test.broken(labels.wrong, labels.drawn) or "labels" in self.violations:
            text = f"{labels.wrong} of {labels.drawn} answers that were drawn at random are wrong "
            text += f"({labels.labelled} have a label, the others are taken for right), alpha {alpha:g}"
            self._set("labels", text)

    def golden(self, failure: str | None) -> None:
        """Take what replaying the golden prompts gave; None: the recorded risks."""
        self._set("golden", failure)

    def _compare(self, reference: Reference) -> None:
        limits, rows = self.limits, len(reference.risks)
        risks, away = zip(*self._window.values(), strict=True)
        outside = None if reference.outside is None else np.array(away, np.bool_)
        self.drift = found = compare(np.array(risks, np.float64), outside, reference)

        def beyond(cause: Cause, value: float, limit: Callable[[float], float]) -> bool:
            # The way back is not widened: prompts that are alike are no sign that a drift has ended.
            back = cause in self.violations
            return value > (limits.back * limit(found.prompts) if back else limit(found.independent))

        apart = beyond("drift", found.ks, lambda prompts: limits.of_ks(prompts, rows))
        apart |= beyond("drift", found.psi, lambda prompts: limits.of_psi(prompts, rows))
        text = (
            f"the last {found.prompts:,} risks are unlike those of training: KS {found.ks:.2f}, PSI {found.psi:.2f}, "
        )
        text += f"mean {abs(found.shift):.2f} {'higher' if found.shift > 0 else 'lower'}"
        self._set("drift", text if apart else None)
        if (share := found.outside) is not None and reference.outside is not None:
            more = beyond("outside", share - reference.outside, lambda prompts: limits.of_outside(prompts, share))
            text = f"{share:.1%} of the last {found.prompts:,} prompts lie outside training, "
            text += f"as {reference.outside:.1%} of its rows do"
            self._set("outside", text if more else None)
        self.report(self)

    def _set(self, cause: Cause, text: str | None) -> None:
        before = cause in self.violations
        if text is None:
            self.violations.pop(cause, None)
        else:
            self.violations[cause] = text
        if before is not (text is not None):
            log.warning("bundle %s: %s: %s", self.scorer.bundle.reference, cause, text or "no longer")
            self.report(self)
