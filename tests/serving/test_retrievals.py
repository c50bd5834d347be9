"""What is remembered of prompts that were sent to fetch a passage: for how long, how many, for whom."""

from __future__ import annotations

from service.serving.judgement import Retrievals


def test_each_caller_has_its_own_under_any_prefix() -> None:
    known = Retrievals()
    known.record("a", "1", 0.9, "d")
    for named in ("1", "risk-1", "chatcmpl-1", "cmpl-1"):
        found = known.recall("a", named)
        assert found.of == named
        assert found.first is not None
        assert (found.first.risk, found.first.digest) == (0.9, "d")
    assert known.recall("b", "risk-1").first is None
    assert known.recall("a", "risk-risk-1").first is None


def test_the_oldest_are_forgotten_and_all_after_a_while() -> None:
    few = Retrievals(most=2)
    for name in ("1", "2", "1", "3"):
        few.record("a", name, 0.5, "d")
    assert [few.recall("a", name).first is not None for name in ("1", "2", "3")] == [True, False, True]
    short = Retrievals(seconds=0.0)
    short.record("a", "1", 0.5, "d")
    assert short.recall("a", "1").first is None
