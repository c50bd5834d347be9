"""Policies, verdicts and the policies file."""

from __future__ import annotations

import codecs
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from service.errors import HalluTracerError, RequestError
from service.policies import guard
from service.policies.guard import BLOCK, GATE, OBSERVE, Action, Decision, Policy, Upstream, judge
from service.policies.policy import built_in, read_policies


@pytest.mark.parametrize("bad", [float("nan"), -0.1, 1.1, float("inf")])
def test_threshold_edges(bad: float) -> None:
    assert judge(0.0, GATE, 0.0).decision is Decision.ABSTAIN
    assert judge(0.999, GATE, 1.0).decision is Decision.CONTINUE
    assert judge(0.5, GATE.at(0.4), 1.0).flagged
    for refused in (lambda: judge(0.5, GATE, bad), lambda: GATE.at(bad)):
        with pytest.raises(RequestError):
            refused()


ACTIONS = {  # decision, what is said, strictness
    "observe": ("continue", None, 0),
    "annotate": ("continue", "At 0.46.", 1),
    "fallback": ("fallback", None, 2),
    "abstain": ("abstain", "At 0.46.", 3),
    "retrieve": ("retrieve", "At 0.46.", 3),
    "block": ("block", None, 3),
}


@pytest.mark.parametrize("action", Action)
def test_what_each_action_does_and_how_strict_it_is(action: Action) -> None:
    decision, says, strictness = ACTIONS[action.value]
    policy = Policy("p", action, 0.4, "At {risk}.")
    for risk, verdict, flagged in (
        (0.456, judge(0.456, policy, 0.5), True),
        (0.3, judge(0.3, policy, 0.5, outside=True), False),  # withheld for where it lies
        (0.456, judge(0.456, policy, 0.5, outside=True, applies=False), False),
        (0.456, judge(0.456, replace(policy, withhold_no_fact=True), 0.5, applies=False), True),
    ):
        message = None if says is None else f"At {risk:.2f}."
        assert (verdict.decision.value, verdict.flagged, verdict.message) == (
            decision,
            flagged,
            message,
        )
        assert verdict.threshold == 0.4
    for verdict in (judge(0.3, policy, 0.5), judge(0.456, policy, 0.5, applies=False)):
        assert (verdict.decision, verdict.flagged, verdict.message) == (
            Decision.CONTINUE,
            False,
            None,
        )
    assert (action.strictness, action.withholds) == (strictness, decision != "continue")
    assert judge(0.7, built_in("No idea.")["gate"], 0.5).message == "No idea."
    assert (OBSERVE.action, GATE.action, BLOCK.action) == (
        Action.OBSERVE,
        Action.ABSTAIN,
        Action.BLOCK,
    )


def test_a_new_action_is_one_line(tmp_path: Path) -> None:
    """What docs/contributing.md says: a line in ``Action``, and the file, the judge and the rights
    know it."""
    source = Path(guard.__file__).read_text()
    line = '    BLOCK = "block", Decision.BLOCK, 3\n'
    assert line in source
    module = tmp_path / "guard_with_one_more.py"
    module.write_text(
        source.replace(line, line + '    ESCALATE = "escalate", Decision.BLOCK, 4, "Ask Ada."\n')
    )
    (tmp_path / "policies.toml").write_text('[ada]\naction = "escalate"\nthreshold = 0.5\n')
    code = f"""
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("service.policies.guard", {str(module)!r})
guard = sys.modules["service.policies.guard"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)
from service.policies.policy import read_policies
policy = read_policies(Path({str(tmp_path / "policies.toml")!r})).named["ada"]
verdict = guard.judge(0.7, policy, 0.9)
print(policy.action.strictness, policy.action.withholds, verdict.decision, verdict.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "4 True block Ask Ada.\n", done.stderr


def test_a_file_adds_to_the_built_in_policies(tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    path.write_text(
        '[gate]\naction = "abstain"\nthreshold = 0\n[strict]\naction = "block"\nthreshold = 0.2\n'
        '[careful]\naction = "block"\nwithhold_outside = true\n'
        '[all]\naction = "block"\nwithhold_outside = false\nwithhold_no_fact = true\n'
        '[again]\naction = "annotate"\nrecheck = true\n'
        '[seen]\naction = "observe"\nwithhold_no_fact = false\n'
        '[stops]\naction = "annotate"\nstop_at = 0.8\n'
        '[whole]\naction = "block"\npassage_truth = 1\n'
        '[share]\naction = "block"\npassage_truth = 0.01\n'
    )
    policies = read_policies(path, "No.").named
    added = {"strict", "careful", "all", "again", "seen", "stops", "whole", "share"}
    assert set(policies) == {"observe", "gate", "block"} | added
    assert policies["stops"].stop_at == 0.8
    assert [policies[name].passage_truth for name in ("whole", "share")] == [1.0, 0.01]
    assert policies["gate"] == Policy("gate", Action.ABSTAIN, 0, "No.")
    assert policies["strict"] == Policy("strict", Action.BLOCK, 0.2, None)
    assert policies["careful"] == Policy("careful", Action.BLOCK, None, None, withhold_outside=True)
    assert policies["all"] == Policy(
        "all", Action.BLOCK, withhold_outside=False, withhold_no_fact=True
    )
    assert policies["again"] == Policy(
        "again", Action.ANNOTATE, None, Action.ANNOTATE.message, recheck=True
    )
    assert policies["seen"] == Policy("seen", Action.OBSERVE)


def test_a_file_as_windows_editors_write_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    path.write_bytes(codecs.BOM_UTF8 + b'[strict]\r\naction = "block"\r\n')
    assert read_policies(path).named["strict"] == Policy("strict", Action.BLOCK)


FALLBACK = '[a]\naction = "fallback"\nupstream = "http://b/v1"\nupstream_model = "m"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "is not TOML"),
        ("x = 1", "'x' is outside a table"),
        ("[Strict]\n", "a name has lower-case"),
        ("[a]\n", "action: Field required"),
        ('[a]\naction = "stop"', "action: Input should be 'observe'"),
        ('[a]\naction = "block"\ntreshold = 1', "unknown field 'treshold'"),
        ('[a]\naction = "block"\nwithhold_outside = 1', "withhold_outside: "),
        ('[a]\naction = "observe"\nwithhold_outside = true', "false with action 'observe'"),
        ('[a]\naction = "block"\nwithhold_no_fact = 1', "withhold_no_fact: "),
        ('[a]\naction = "block"\nwithhold_no_fact = "true"', "withhold_no_fact: "),
        ('[a]\naction = "observe"\nwithhold_no_fact = true', "withhold_no_fact must be false with"),
        ('[a]\naction = "annotate"\nwithhold_no_fact = true', "false with action 'annotate'"),
        ('[a]\naction = "block"\nrecheck = 1', "recheck: "),
        ('[a]\naction = "observe"\nrecheck = true', "recheck needs another action than 'observe'"),
        ('[a]\naction = "abstain"\nstop_at = 0', "greater than 0"),
        ('[a]\naction = "abstain"\nstop_at = 1.1', "less than or equal"),
        ('[a]\naction = "abstain"\nstop_at = "high"', "number"),
        ('[a]\naction = "observe"\nstop_at = 0.5', "another action"),
        ('[a]\naction = "abstain"\nstop_at = 0.5\nrecheck = true', "remove one of them"),
        ('[a]\naction = "abstain"\nstopat = 0.5', "stopat"),
        *(
            (f'[a]\naction = "block"\npassage_truth = {share}', "passage_truth")
            for share in ("0", "0.0", "-0.1", "1.01", "nan", "inf", "true", '"0.5"')
        ),
        ('[a]\naction = "block"\nthreshold = 2', "threshold: "),
        ('[a]\naction = "block"\nthreshold = nan', "threshold: "),
        ('[a]\naction = "block"\nthreshold = true', "threshold: "),
        ('[a]\naction = "block"\nmessage = "x"', "only actions annotate, abstain, retrieve"),
        ('[a]\naction = "abstain"\nmessage = " "', "message: "),
        ('[a]\naction = ["abstain"]', "action: "),
        ('[a]\naction = "annotate"\nwithhold_outside = true', "false with action 'annotate'"),
        ('[a]\naction = "fallback"', "needs upstream"),
        ('[a]\naction = "fallback"\nupstream = "http://b/v1"', "needs upstream_model"),
        (
            '[a]\naction = "fallback"\nupstream = "b/v1"\nupstream_model = "m"',
            "an address up to /v1",
        ),
        (
            '[a]\naction = "fallback"\nupstream = "http://b:x/v1"\nupstream_model = "m"',
            "an address up to /v1",
        ),
        (
            '[a]\naction = "fallback"\nupstream = "file:///v1"\nupstream_model = "m"',
            "an address up to /v1",
        ),
        (f"{FALLBACK}upstream_timeout_s = 0", "upstream_timeout_s: "),
        (f'{FALLBACK}upstream_key_env = "NOT_SET_ANYWHERE"', "NOT_SET_ANYWHERE holds no key"),
        (f"{FALLBACK}upstream_key_env = 1", "upstream_key_env: "),
        ('[a]\naction = "block"\nupstream = "http://b/v1"', "only action fallback has upstream"),
        ('[[rule]]\npolicy = "nope"', "rule 1: policy must be one of block, gate, observe"),
        ('[[rule]]\nkey = "a"', "policy: Field required"),
        ('[[rule]]\npolicy = "gate"\nroute = "/chat"', "route must be one of"),
        ('[[rule]]\npolicy = "gate"\nroutes = "/score"', "unknown field 'routes'"),
        ('[[rule]]\npolicy = "gate"\nmodel = 1', "model: "),
        ('[rule]\naction = "gate"', "written [[rule]]"),
    ],
)
def test_faults_of_the_file_name_their_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policies.toml"
    path.write_text(text)
    with pytest.raises(HalluTracerError) as error:
        read_policies(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HalluTracerError, match="cannot read the policies file"):
        read_policies(tmp_path / "none.toml")


def test_upstreams_and_rules_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIG_KEY", "secret")
    path = tmp_path / "policies.toml"
    path.write_text(
        FALLBACK + 'upstream_key_env = "BIG_KEY"\n[ask]\naction = "retrieve"\n[warn]\naction ='
        ' "annotate"\n[[rule]]\npolicy = "a"\nroute = "/score"\nkey = "rag"\n[[rule]]\npolicy ='
        ' "warn"\nmodel = "m"\n'
    )
    result = read_policies(path)
    upstream = result.named["a"].upstream
    assert upstream == Upstream("http://b/v1", "m", "BIG_KEY", 60.0)
    assert upstream.headers() == {"authorization": "Bearer secret"}
    assert "Fetch a passage" in str(result.named["ask"].message)
    assert "{risk}" in str(result.named["warn"].message)
    first, second = result.rules
    assert first.fits("/v1/risk/score", "any", "rag")
    assert first.fits("/score", "any", "rag")
    assert not first.fits("/score", "any", "other")
    assert not first.fits("/v1/completions", "any", "rag")
    assert second.fits("/v1/completions", "m", "")
    assert not second.fits("/v1/completions", "n", "")
