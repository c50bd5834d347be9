"""What a check found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from probes_store.errors import BundleError
from service.errors import HalluTracerError

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.  ``fail``: `serve` would not serve; ``warn``: it would, and something is not as it should be."""

    check: str
    status: Status
    found: str
    cure: str = ""

    def line(self) -> str:
        """For people."""
        text = f"{self.status:<5} {self.check:<9} {self.found}"
        return f"{text} -> {self.cure}" if self.cure else text

    def as_json(self) -> dict[str, str]:
        """For programs."""
        return asdict(self)


def ok(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check, "ok", found)


def warn(check: str, found: str, cure: str) -> Finding:
    """It serves, and something is not as it should be."""
    return Finding(check, "warn", found, cure)


def fail(check: str, found: str, cure: str = "") -> Finding:
    """It would not serve."""
    return Finding(check, "fail", found, cure)


def run(checks: Iterable[tuple[str, Callable[[], Iterable[Finding]]]]) -> Iterator[Finding]:
    """The findings of all checks; one that cannot be made is a finding, too, and the next are made all the same."""
    for name, check in checks:
        try:
            yield from check()
        except (HalluTracerError, BundleError) as error:  # whose messages name the cure
            yield fail(name, " ".join(str(error).split()))
        except Exception as error:
            yield fail(name, f"the check itself failed: {type(error).__name__}: {error}", "please report this")


def summary(findings: Sequence[Finding]) -> Finding:
    """The last line, for people: would it serve?"""
    failed, warned = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    if failed:
        return fail(
            "result", f"serve would not serve: {failed} failed, {warned} warned", "mend what failed, from the top"
        )
    if warned:
        return Finding("result", "warn", f"serve would serve; not all is as it should be: {warned} warned")
    return ok("result", "serve would serve")


def worst(findings: Iterable[Finding]) -> Status:
    """The gravest status; "ok" of none."""
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    return max((finding.status for finding in findings), key=order.index, default="ok")
