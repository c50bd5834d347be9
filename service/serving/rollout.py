"""A new version of the probes beside the one that serves: a canary judges a share of requests, a shadow watches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from service.scoring import RiskReport, Scorer, ShadowRisk
from service.settings import DEFAULT_SHARE

ShadowVerdict = Literal["agrees", "stricter", "looser", "failed"]
Role = Literal["default", "canary", "shadow", "none"]


@dataclass
class Comparison:
    """A shadow beside the bundles that judged the same prompts: prompts by verdict, and the risks' difference."""

    by_verdict: dict[ShadowVerdict, int] = field(default_factory=lambda: dict.fromkeys(get_args(ShadowVerdict), 0))
    difference: float = 0.0  # absolute, summed

    def add(self, shadow: ShadowRisk, report: RiskReport) -> ShadowVerdict:
        """One more prompt; what it was."""
        if shadow.risk is None:
            verdict: ShadowVerdict = "failed"
        else:
            self.difference += abs(shadow.risk - report.risk)
            agrees = shadow.flagged == report.verdict.flagged
            verdict = "agrees" if agrees else "stricter" if shadow.flagged else "looser"
        self.by_verdict[verdict] += 1
        return verdict


@dataclass(frozen=True)
class RolloutPlan:
    """What the operator asked for, by reference."""

    canary: str | None = None
    share: float = DEFAULT_SHARE  # of the requests that name no bundle
    shadows: tuple[str, ...] = ()

    @property
    def references(self) -> tuple[str, ...]:
        """Those that are loaded beside the bundles that requests may name; one that cannot be used is left out."""
        return tuple(dict.fromkeys((*((self.canary,) if self.canary is not None else ()), *self.shadows)))


@dataclass(frozen=True, eq=False)
class Rollout:
    """The plan's loaded scorers."""

    canary: Scorer | None = None
    share: float = 0.0
    shadows: tuple[Scorer, ...] = ()

    def chosen(self, default: Scorer, key: Callable[[], str]) -> Scorer:
        """The canary for its share of keys, else the default.

        The canary's digest is hashed too, so that it is not the same callers who meet each new version first.
        """
        if self.canary is None or not self.share:
            return default
        text = f"{self.canary.bundle.manifest.digest}\n{key()}"
        drawn = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
        return self.canary if drawn < self.share * 2**64 else default

    def role(self, scorer: Scorer, default: Scorer) -> Role:
        """What a loaded scorer does for requests that name no bundle."""
        if scorer is default:
            return "default"
        return "canary" if scorer is self.canary else "shadow" if scorer in self.shadows else "none"

    def watching(self, scorer: Scorer) -> tuple[Scorer, ...]:
        """The shadows of a request that ``scorer`` judges: other bundles, which read the same token ids."""
        own, prompt_format = scorer.bundle.manifest.digest, scorer.prompt_format  # two aliases may mean one bundle
        others = (one for one in self.shadows if one.bundle.manifest.digest != own)
        return tuple(one for one in others if one.prompt_format == prompt_format)

    def shadowed(self, digest: str) -> bool:
        """Whether the bundle is read as a shadow, beside what else it does: a canary may be one, too."""
        return any(one.bundle.manifest.digest == digest for one in self.shadows)


def rolled_out(plan: RolloutPlan, loaded: Mapping[str, Scorer]) -> tuple[Rollout, dict[str, str]]:
    """Return the rollout of what was loaded, by reference, default first; and why some of it is not used."""
    default = next(iter(loaded.values()))
    left_out: dict[str, str] = {}

    def usable(reference: str, *, judges: bool) -> Scorer | None:
        scorer = loaded.get(reference)
        if scorer is None:
            return None  # the loading has said why
        if not judges and scorer.prompt_format != default.prompt_format:
            left_out[reference] = (
                f"it was trained on {scorer.prompt_format} prompts and {default.bundle.reference} on "
                f"{default.prompt_format} ones: they do not read the same token ids"
            )
        elif scorer.bundle.manifest.digest == default.bundle.manifest.digest:
            left_out[reference] = f"it is {default.bundle.reference}, which judges already"
        else:
            return scorer
        return None

    canary = None if plan.canary is None else usable(plan.canary, judges=True)
    shadows = [scorer for name in plan.shadows if (scorer := usable(name, judges=False)) is not None]
    return Rollout(canary, plan.share, tuple(shadows)), left_out
