"""What a caller may choose: nothing that lets an answer through which the operator's own policy
withholds.

That a request is refused so, and which right opens it: tests/api/test_auth.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from service.access.callers import Caller, Right
from service.engines.scheduler import Scheduled
from service.errors import NotAllowed
from service.policies.guard import Action, Policy
from service.scoring import Scorer
from service.serving.catalogue import check_choice
from tests.kit.api import two_parts
from tests.kit.bundles import ANSWER, GUARANTEE, STRATA
from tests.matching import contextual_bundle, matching_bundle
from tests.scripted_engine import ScriptedEngine

OWN, ASKED = Policy("own", Action.ABSTAIN), Policy("asked", Action.ABSTAIN)
LESS = "policy 'asked' is less strict than this service's own, 'own'"
OUTSIDE = "lets prompts outside training through"
AGAIN = "does not read the answer again"
EARLY = "does not end an answer as early"


class Pair(NamedTuple):
    """Two policies that differ in these fields, of which the second lets more through."""

    bundle: str
    strict: dict[str, Any]
    loose: dict[str, Any]
    reason: str  # that is said where the operator has the first, and a caller asks for the second
    reverse: str = ""  # and the other way round, where neither is the stricter one


PAIRS = [
    Pair("plain", {"action": Action.RETRIEVE}, {"action": Action.FALLBACK}, LESS),
    Pair("plain", {}, {"action": Action.FALLBACK}, LESS),
    Pair("plain", {"action": Action.FALLBACK}, {"action": Action.ANNOTATE}, LESS),
    Pair("plain", {"action": Action.ANNOTATE}, {"action": Action.OBSERVE, "threshold": 0}, LESS),
    # The first bundle's threshold is 0.5.  The other's is 0.25, and 0.5 beside a passage.
    Pair("plain", {}, {"threshold": 0.500001}, "at most 0.5 here, not 0.500001"),
    Pair("plain", {"threshold": 0.3}, {}, "at most 0.3 here, not 0.5"),
    Pair("strata", {"threshold": 0.25}, {"threshold": 0.26}, "at most 0.25 here, not 0.26"),
    Pair("strata", {"threshold": 0.25}, {}, "at most 0.25 here, not 0.5"),
    Pair("strata", {}, {"threshold": 0.4}, "at most 0.25 here, not 0.4", "0.4 here, not 0.5"),
    # The first bundle cannot tell well enough what lies outside training.
    Pair("plain", {"withhold_outside": True}, {}, OUTSIDE),
    Pair("plain", {}, {"withhold_outside": False}, OUTSIDE),
    Pair("context", {}, {"withhold_outside": False}, OUTSIDE),
    Pair("context", {"withhold_no_fact": True}, {}, "lets prompts that ask for no fact through"),
    Pair("plain", {"passage_truth": 0.3}, {"passage_truth": 0.5}, "takes more passages for true"),
    Pair("plain", {"tools": "gate"}, {}, "lets calls of tools through"),
    Pair("answers", {"recheck": True}, {"recheck": True, "action": Action.ANNOTATE}, LESS),
    Pair("answers", {"recheck": True}, {}, AGAIN),
    Pair("answers", {"recheck": True}, {"stop_at": 0.1}, AGAIN, EARLY),
    Pair("answers", {"recheck": True}, {"stop_at": ANSWER.threshold}, AGAIN),
    Pair("answers", {"stop_at": 0.6}, {"stop_at": 0.9}, EARLY),
    Pair("answers", {"stop_at": 0.6}, {}, EARLY),
]


@pytest.fixture(scope="module")
def scorers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Scorer]:
    """By the name of their bundle."""
    engine, folder = ScriptedEngine(), tmp_path_factory.mktemp("bundles")
    strata = {"guarantee": GUARANTEE, "guarantee_strata": STRATA}
    bundles = {
        "plain": matching_bundle(engine, folder, "plain"),
        "other": matching_bundle(engine, folder, "other", 1),
        "context": contextual_bundle(engine, folder, reach=1e3),
        "answers": two_parts(engine, folder),
        "strata": matching_bundle(
            engine, folder, "strata", threshold=GUARANTEE.threshold, **strata
        ),
    }
    served = Scheduled(engine)
    return {name: Scorer(served, bundle) for name, bundle in bundles.items()}


def check(scorer: Scorer, own: dict[str, Any], asked: dict[str, Any], reason: str) -> None:
    """A caller may ask for the policy if there is no reason, and with the right to it always."""
    choice = scorer, replace(ASKED, **asked), scorer, replace(OWN, **own)
    param: Right = "threshold" if "here, not" in reason else "policy"
    check_choice(*choice, Caller(may=frozenset({param})))
    if not reason:
        check_choice(*choice, Caller())
        return
    with pytest.raises(NotAllowed) as refused:
        check_choice(*choice, Caller())
    assert (refused.value.param, reason in str(refused.value)) == (param, True), refused.value


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_policy_is_as_strict_as_the_operators_in_every_respect(
    scorers: Mapping[str, Scorer], pair: Pair
) -> None:
    scorer, strict, loose = scorers[pair.bundle], pair.strict, pair.loose
    check(scorer, strict, loose, pair.reason)
    check(scorer, loose, strict, pair.reverse)
    check(scorer, strict, strict, "")
    check(scorer, loose, loose, "")


def test_another_bundle_may_be_chosen_where_the_operator_observes(
    scorers: Mapping[str, Scorer],
) -> None:
    chosen, default = scorers["other"], scorers["plain"]
    with pytest.raises(NotAllowed, match="judged by plain:1, and another bundle") as refused:
        check_choice(chosen, ASKED.at(0.0), default, OWN, Caller())
    assert refused.value.param == "bundle"
    check_choice(chosen, ASKED, default, replace(OWN, action=Action.OBSERVE), Caller())
