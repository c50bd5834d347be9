"""Canary, shadows and what voids a promise: what `serve` would make of the bundles, before it loads a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from probes_store.errors import BundleError
from service.doctor.findings import Finding, fail, ok, warn
from service.errors import RequestError
from service.judging.drift import reference_of
from service.policies.guard import Policy
from service.prompts import as_prompt_format
from service.serving.catalogue import check_tells
from service.serving.rollout import RolloutPlan, rolled_out
from service.settings import DEFAULT_SHARE

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from service.scoring import Scorer


@dataclass(frozen=True, eq=False)
class _Unloaded:
    """What a rollout looks at in a scorer, without the model."""

    bundle: Bundle
    prompt_format: str


def check_rollout(
    plan: RolloutPlan, loaded: Mapping[str, Bundle], policies: Sequence[Policy], watch_s: float
) -> Iterator[Finding]:
    """The default bundle, ``loaded`` first, against the service's own ``policies``; then canary and shadows."""
    scorers = {
        name: cast("Scorer", _Unloaded(bundle, as_prompt_format(bundle.manifest.prompt_format)))
        for name, bundle in loaded.items()
    }
    if not scorers:
        return  # the check of the bundles has said why

    def tells(scorer: Scorer) -> None:
        for policy in policies:
            check_tells(scorer, policy)

    default = next(iter(scorers.values()))
    try:
        tells(default)
    except RequestError as error:
        yield fail("rollout", error.message)
    if plan.canary is None and plan.share != DEFAULT_SHARE:
        yield warn("rollout", f"a share of {plan.share:g}, and no canary that would get it", "give --canary")
    if plan.canary is not None and not plan.share:
        yield warn(
            "rollout", f"the canary {plan.canary} gets no request", "raise --canary-share, or make it a --shadow"
        )
    rollout, left_out = rolled_out(plan, scorers, tells)
    for name, reason in left_out.items():
        yield warn("rollout", f"{name} is left out: {reason}", "move the alias to another version, or do not name it")
    canary, shadows = rollout.canary, [shadow.bundle.reference for shadow in rollout.shadows]
    parts = [f"{default.bundle.reference} judges"]
    if canary is not None and plan.share:
        parts.append(f"the canary {canary.bundle.reference} gets {plan.share:.3g} of the requests")
    parts += [f"{', '.join(shadows)} watches"] if shadows else []
    how = f"every {watch_s:g} s" if watch_s else "at a SIGHUP and POST /v1/admin/reload"
    yield ok("rollout", f"{'; '.join(parts)}; aliases are followed {how}")


def check_drift(judging: Iterable[Bundle], replay_s: float) -> Iterator[Finding]:
    """Whether the service could say of each bundle that its promise is void, and by what."""
    for bundle in judging:
        try:
            reference = reference_of(bundle)
        except BundleError as error:
            yield warn("drift", f"{bundle.reference} is not watched: {error}", "copy it again")
            continue
        if reference is None:
            found = f"{bundle.reference} keeps none of its training's risks: no change of the questions is seen"
            yield warn("drift", found, "train it again with this release")
            continue
        yield ok("drift", f"{bundle.reference} is compared with its training's risks")
    if not replay_s:
        yield warn("drift", "golden prompts are not replayed while serving: a readout that changes is not seen",
                   "--replay-s 600")  # fmt: skip
