"""A caller may always be stricter than the operator; what lets more through is the operator's to allow."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from service.access.callers import ApiKey, Right
from service.policies.guard import Action, Policy
from tests.running import App

OWN = 0.5  # the scripted bundles' threshold
LOOSE = Policy("loose", Action.ABSTAIN, threshold=0.9, message="Ask Ada.")
# What a request chooses, and the field that it may not: under a policy that withholds at 0.5 by bundle "one".
CHOICES: list[tuple[dict[str, Any], Right | None]] = [
    ({}, None),
    ({"policy": "gate"}, None),
    ({"policy": "block"}, None),
    ({"threshold": 0.0}, None),
    ({"threshold": OWN}, None),
    ({"threshold": 0.2, "policy": "block"}, None),
    ({"bundle": "one"}, None),
    ({"bundle": "one:1"}, None),
    ({"threshold": 0.2, "policy": "loose"}, None),
    ({"policy": "observe"}, "policy"),
    ({"policy": "observe", "threshold": 0.0}, "policy"),
    ({"policy": "observe", "threshold": 1}, "policy"),
    ({"threshold": 0.500001}, "threshold"),
    ({"threshold": 1}, "threshold"),
    ({"policy": "loose"}, "threshold"),
    ({"policy": "block", "threshold": 0.9}, "threshold"),
    ({"bundle": "two"}, "bundle"),
    ({"bundle": "two", "threshold": 0.0}, "bundle"),
]
LOOSENING: tuple[Right, ...] = ("policy", "threshold", "bundle")
RIGHTS = [frozenset(chosen) for n in range(4) for chosen in itertools.combinations(LOOSENING, n)]


@pytest.mark.parametrize("rights", RIGHTS, ids=lambda rights: "+".join(sorted(rights)) or "none")
def test_only_what_is_allowed_loosens(tmp_path: Path, rights: frozenset[Right]) -> None:
    with App(tmp_path, callers_may=rights, policies={"loose": LOOSE}).started() as app:
        for (choice, needed), generate in itertools.product(CHOICES, (None, {"max_tokens": 1})):
            answer = app.client.post("/score", json={"prompt": "a", "generate": generate, **choice})
            if needed is None or needed in rights:
                assert answer.status_code == 200, (choice, answer.text)
                continue
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (403, "not_allowed", needed), choice
            assert f"--callers-may {needed}" in error["message"]


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_under_a_policy_that_observes_every_choice_is_stricter(tmp_path: Path, threshold: float | None) -> None:
    policies = {"loose": LOOSE}
    with App(tmp_path, callers_may=(), policies=policies, policy="observe", threshold=threshold).started() as app:
        for choice, _ in CHOICES:
            assert app.client.post("/score", json={"prompt": "a", **choice}).status_code == 200, choice


def test_the_services_own_threshold_is_the_highest(tmp_path: Path) -> None:
    with App(tmp_path, callers_may=(), threshold=0.8).started() as app:
        for threshold, status in [(0.8, 200), (0.79, 200), (0.81, 403)]:
            assert app.client.post("/score", json={"prompt": "a", "threshold": threshold}).status_code == status


def test_a_key_may_be_allowed_more_than_others(tmp_path: Path) -> None:
    keys = [ApiKey("for the evaluation", "evaluation", frozenset({"policy"})), ApiKey("for the app", "app")]
    with App(tmp_path, callers_may=("threshold",), api_keys=keys).started() as app:

        def status(key: ApiKey, **choice: Any) -> int:
            headers = {"authorization": f"Bearer {key.secret}"}
            return app.client.post("/score", json={"prompt": "a", **choice}, headers=headers).status_code

        assert [status(key, policy="observe") for key in keys] == [200, 403]
        assert [status(key, threshold=1) for key in keys] == [200, 200]
        assert [status(key, bundle="two") for key in keys] == [403, 403]
