"""What a request may choose.  A stricter gate always; one that lets more through only as the operator allows."""

from __future__ import annotations

from dataclasses import replace

from service.access.callers import Caller
from service.errors import NotAllowed, RequestError
from service.policies.guard import Action, Policy
from service.scoring import Scorer


def check_tells(scorer: Scorer, policy: Policy) -> None:
    """Raise RequestError where the policy asks what the bundle cannot tell."""
    if policy.withhold_outside and scorer.bundle.manifest.uncertainty is None:
        raise RequestError(
            f"policy {policy.name!r} withholds prompts outside training, and {scorer.bundle.reference} has no "
            "reference to tell them by: take another policy, or train the bundle again",
            param="policy",
        )


def untemplated(scorer: Scorer, policy: Policy) -> Policy:
    """The policy of a prompt that went through no chat template.

    Where training's prompts went through one, such a prompt is easily unlike all of them, and its risk says nothing: a
    policy that withholds then withholds what lies outside training, if the bundle can tell and the policy does not say
    ``withhold_outside = false``.
    """
    asks = policy.withhold_outside is None and policy.action.withholds
    tells = scorer.prompt_format == "chat" and scorer.bundle.manifest.uncertainty is not None
    return replace(policy, withhold_outside=True) if asks and tells else policy


def check_choice(scorer: Scorer, policy: Policy, own_scorer: Scorer, own: Policy, caller: Caller) -> None:
    """Raise NotAllowed where a choice could let an answer through that the operator's own rule withholds.

    ``scorer`` and ``policy`` apply to the request, ``own_scorer`` and ``own`` where it chooses nothing.
    Raises RequestError where the policy asks what the bundle cannot tell.
    """
    check_tells(scorer, policy)
    if caller.policies is not None and policy.name not in caller.policies:
        allowed = " or ".join(map(repr, caller.policies))
        message = f"requests of key {caller.name!r} are judged by {allowed} alone, not by {policy.name!r}"
        raise NotAllowed(message, param="policy", cure="name one of these, or have the operator change the keys file")
    if own.action is Action.OBSERVE:
        return
    looser = policy.action.strictness < own.action.strictness
    if looser and "policy" not in caller.may:
        raise NotAllowed(
            f"policy {policy.name!r} is less strict than this service's own, {own.name!r}",
            param="policy",
        )
    if scorer is not own_scorer and "bundle" not in caller.may:
        raise NotAllowed(
            f"requests here are judged by {own_scorer.bundle.reference}, and another bundle may let more through",
            param="bundle",
        )
    if looser:
        return
    if _outside(scorer, policy) < _outside(scorer, own) and "policy" not in caller.may:
        raise NotAllowed(f"policy {policy.name!r} lets prompts outside training through", param="policy")
    if policy.withhold_no_fact < own.withhold_no_fact and "policy" not in caller.may:
        raise NotAllowed(f"policy {policy.name!r} lets prompts that ask for no fact through", param="policy")
    highest, wanted = scorer.threshold(own), scorer.threshold(policy)
    if wanted > highest and "threshold" not in caller.may:
        raise NotAllowed(f"the threshold may be at most {highest:g} here, not {wanted:g}", param="threshold")


def _outside(scorer: Scorer, policy: Policy) -> int:
    """How much of what lies outside training it withholds: nothing, what went through no chat template, or all."""
    return scorer.withholds_outside(policy) + scorer.withholds_outside(untemplated(scorer, policy))
