"""What a caller may choose: nothing that lets an answer through which the operator's own policy
withholds.

That a request is refused so, and which right opens it: tests/api/test_auth.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from service.access.callers import Caller, Right
from service.engines.scheduler import Scheduled
from service.errors import NotAllowed
from service.policies.guard import Action, Policy
from service.scoring import Scorer
from service.serving.catalogue import check_choice
from tests.kit.api import two_parts
from tests.kit.bundles import ANSWER, GUARANTEE, STRATA
from tests.kit.tables import cells
from tests.matching import contextual_bundle, matching_bundle
from tests.scripted_engine import ScriptedEngine

OWN, ASKED = Policy("own", Action.ABSTAIN), Policy("asked", Action.ABSTAIN)
LESS = "policy 'asked' is less strict than this service's own, 'own'"
OUTSIDE = "lets prompts outside training through"
AGAIN = "does not read the answer again"
EARLY = "does not end an answer as early"


# By bundle two policies that differ in these fields, of which the second lets more through: what is
# said where the operator has the first, and a caller asks for the second; and the other way round,
# where neither is the stricter one.
PAIRS = cells(
    f"""
    plain | {{"action": "retrieve"}} | {{"action": "fallback"}} | {LESS}
    plain | {{}} | {{"action": "fallback"}} | {LESS}
    plain | {{"action": "fallback"}} | {{"action": "annotate"}} | {LESS}
    plain | {{"action": "annotate"}} | {{"action": "observe", "threshold": 0}} | {LESS}
    plain | {{}} | {{"threshold": 0.500001}} | at most 0.5 here, not 0.500001
    plain | {{"threshold": 0.3}} | {{}} | at most 0.3 here, not 0.5
    strata | {{"threshold": 0.25}} | {{"threshold": 0.26}} | at most 0.25 here, not 0.26
    strata | {{"threshold": 0.25}} | {{}} | at most 0.25 here, not 0.5
    strata | {{}} | {{"threshold": 0.4}} | at most 0.25 here, not 0.4 | 0.4 here, not 0.5
    plain | {{"withhold_outside": true}} | {{}} | {OUTSIDE}
    plain | {{}} | {{"withhold_outside": false}} | {OUTSIDE}
    context | {{}} | {{"withhold_outside": false}} | {OUTSIDE}
    context | {{"withhold_no_fact": true}} | {{}} | lets prompts that ask for no fact through
    plain | {{"passage_truth": 0.3}} | {{"passage_truth": 0.5}} | takes more passages for true
    plain | {{"tools": "gate"}} | {{}} | lets calls of tools through
    answers | {{"recheck": true}} | {{"recheck": true, "action": "annotate"}} | {LESS}
    answers | {{"recheck": true}} | {{}} | {AGAIN}
    answers | {{"recheck": true}} | {{"stop_at": 0.1}} | {AGAIN} | {EARLY}
    answers | {{"recheck": true}} | {{"stop_at": {ANSWER.threshold}}} | {AGAIN}
    answers | {{"stop_at": 0.6}} | {{"stop_at": 0.9}} | {EARLY}
    answers | {{"stop_at": 0.6}} | {{}} | {EARLY}
    """
)


@pytest.fixture(scope="module")
def scorers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Scorer]:
    """By the name of their bundle."""
    engine, folder = ScriptedEngine(), tmp_path_factory.mktemp("bundles")
    strata = {"guarantee": GUARANTEE, "guarantee_strata": STRATA}
    bundles = {
        "plain": matching_bundle(engine, folder, "plain"),  # cannot tell well what lies outside
        "other": matching_bundle(engine, folder, "other", 1),
        "context": contextual_bundle(engine, folder, reach=1e3),
        "answers": two_parts(engine, folder),
        # At 0.25, and 0.5 beside a passage; the others at 0.5.
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


def fields_of(text: str) -> dict[str, Any]:
    """Fields of a policy."""
    fields: dict[str, Any] = json.loads(text)
    return fields | ({"action": Action(fields["action"])} if "action" in fields else {})


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_a_policy_is_as_strict_as_the_operators_in_every_respect(
    scorers: Mapping[str, Scorer], pair: list[str]
) -> None:
    bundle, strict, loose, reason, *reverse = pair
    scorer, stricter, looser = scorers[bundle], fields_of(strict), fields_of(loose)
    check(scorer, stricter, looser, reason)
    check(scorer, looser, stricter, "".join(reverse))
    check(scorer, stricter, stricter, "")
    check(scorer, looser, looser, "")


def test_another_bundle_may_be_chosen_where_the_operator_observes(
    scorers: Mapping[str, Scorer],
) -> None:
    chosen, default = scorers["other"], scorers["plain"]
    with pytest.raises(NotAllowed, match="judged by plain:1, and another bundle") as refused:
        check_choice(chosen, ASKED.at(0.0), default, OWN, Caller())
    assert refused.value.param == "bundle"
    check_choice(chosen, ASKED, default, replace(OWN, action=Action.OBSERVE), Caller())
