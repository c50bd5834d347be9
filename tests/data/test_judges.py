"""Judges, and the endpoint judge against a real local server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from service.data import judges as judge
from service.data import judges as references
from service.data.options import ABSTAIN, JudgeName, JudgeOptions
from service.errors import TrainingError
from service.trainer.options import TrainOptions
from tests.local_server import answer, listening


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  The  Eiffel-Tower. ", "eiffel tower"),
        ("Ｐａｒｉｓ!", "paris"),
        ("STRASSE", "strasse"),
        ("Straße", "strasse"),
        ("don't", "dont"),
        ("An apple a day", "apple day"),
    ],
)
def test_normalise(text: str, normal: str) -> None:
    assert judge.normalise(text) == normal


def test_exact() -> None:
    assert judge.exact("", "The Paris.", ["paris"])
    assert not judge.exact("", "It is Paris", ["paris"])


def test_regex_takes_answers_as_patterns() -> None:
    assert judge.regex("", "around 1 905", [r"19\s?05", r"1\s905"])
    assert not judge.regex("", "1806", [r"19\d\d"])
    assert "not a regular expression" in judge.answer_problems(JudgeOptions("regex"), ["("])[0]
    assert "empty once" in judge.answer_problems(JudgeOptions("contains"), ["?!"])[0]
    assert judge.answer_problems(JudgeOptions("exact"), ["Paris"]) == []


ABSTENTIONS = (
    "I am not sure.", " I'm not sure", "I don't know", "I do not know who", "I'm not certain", "I cannot answer that",
    "Sorry, I am unable to say", "I have no idea", "I don\u2019t know.", "I\u2019m not sure.",
    "I do not have that information.",
)  # fmt: skip
ANSWERS = ("It is Paris.", "Surely Rome", "The unknown soldier", "You don't say: Rome", "Idaho")


@pytest.mark.parametrize("text", ABSTENTIONS + ANSWERS)
def test_abstaining_answers(text: str) -> None:
    assert bool(re.search(ABSTAIN, text.replace("\u2019", "'"))) is (text in ABSTENTIONS)


class Endpoint:
    """A local server that plays a script of (status, content)."""

    def __init__(self, script: list[tuple[int, Any]]) -> None:
        self.script, self.url = script, ""
        self.seen: list[Any] = []

    def __call__(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        self.seen.append((request.path, request.headers.get("Authorization"), json.loads(body)))
        status, content = self.script[min(len(self.seen), len(self.script)) - 1]
        said = {"choices": [{"message": {"content": content}}]} if status == 200 else content
        answer(request, status, json.dumps(said).encode())

    def judge(self) -> tuple[judge.OpenAIJudge, list[float]]:
        waited: list[float] = []
        given = JudgeOptions("openai", self.url or "http://x", "grader", "key")
        return judge.OpenAIJudge(given, sleep=waited.append), waited


@pytest.fixture
def endpoint() -> Iterator[Any]:
    with ExitStack() as stack:

        def make(*script: tuple[int, Any]) -> Endpoint:
            made = Endpoint(list(script))
            made.url = f"http://{stack.enter_context(listening(made))}/v1"
            return made

        yield make


@pytest.mark.parametrize(("said", "verdict"), [("yes", True), ("No.", False), (" YES! ", True), ("**no**", False)])
def test_the_endpoint_says_yes_or_no(endpoint: Any, said: str, verdict: bool) -> None:
    server = endpoint((200, said))
    ask, waited = server.judge()
    assert ask("Where?", "In Paris", ["Paris", "Lutetia"]) is verdict
    path, key, body = server.seen[0]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer key", "grader", 0)
    assert all(part in body["messages"][1]["content"] for part in ("Where?", "In Paris", "- Paris", "- Lutetia"))
    assert waited == []


def test_it_tries_again_where_that_may_help(endpoint: Any) -> None:
    server = endpoint((503, "busy"), (429, "slow"), (200, "yes, but"), (200, "no"))
    ask, waited = server.judge()
    assert ask("q", "a", ["b"]) is False
    assert waited == [0.5, 1.0, 2.0]


def test_it_gives_up_with_the_reason(endpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "RETRIES", 1)
    ask, _ = endpoint((200, "maybe")).judge()
    with pytest.raises(TrainingError, match=r"'maybe' where yes or no was asked for \(after 2 tries"):
        ask("q", "a", ["b"])


def test_it_does_not_repeat_a_refusal(endpoint: Any) -> None:
    server = endpoint((401, "bad key"))
    ask, _ = server.judge()
    with pytest.raises(TrainingError, match="answered 401"):
        ask("q", "a", ["b"])
    assert len(server.seen) == 1


def test_an_unreachable_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "RETRIES", 0)
    server = Endpoint([])
    with listening(server) as address:
        server.url = f"http://{address}/v1"
    ask, _ = server.judge()
    with pytest.raises(TrainingError, match=f"{server.url}/chat/completions cannot be reached"):
        ask("q", "a", ["b"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("It is Guinea.", True), ("It is Equatorial Guinea.", False), ("The answer is Guinea", True), ("Guinea", True)],
)
def test_the_answer_pattern_cuts_out_what_is_judged(text: str, expected: bool) -> None:
    cut = judge.make_judge(JudgeOptions("exact", answer_pattern=r"^(?:It is|The answer is)?\s*(.*?)\.?$"))
    assert cut("Which country?", text, ["Guinea"]) is expected


def test_an_answer_pattern_without_a_group_is_refused(tmp_path: Path) -> None:
    for pattern in ("It is", "("):
        with pytest.raises(TrainingError, match="answer_pattern"):
            TrainOptions(name="x", run_dir=tmp_path, judge="exact", answer_pattern=pattern).check()


@pytest.mark.parametrize(
    ("answer", "accepted", "expected"),
    [
        ("It is Vitamin C.", "Vitamin A", False),
        ("It is vitamin A.", "Vitamin A", True),
        ("The answer is -5.", "5", False),
        ("about 1,000 people", "1000", True),
        ("it is 3.14", "314", False),
        ("答案是东京。", "东京", True),
        ("答案是大阪。", "东京", False),
        ("It is the United States", "United States", True),
        ("unbelievable", "able", False),
        ("It is in New  York, I think", "new york", True),
        ("Parisian", "paris", False),
        ("anything", "the", False),  # nothing contains an empty answer
    ],
)
def test_contains_keeps_what_tells_answers_apart(answer: str, accepted: str, expected: bool) -> None:
    assert judge.contains("", answer, [accepted]) is expected


KITE = ["No, it needs wind", "I have no comment.", references.incorrect("Yes, it always flies")]
CALL = {"name": "area", "arguments": {"base": [3]}, "optional": []}
AREA = [references.expectation("calls", calls=[CALL])]


@pytest.mark.parametrize(
    ("answer", "factual"),
    [
        ("No, a kite needs some wind.", True),
        ("I have no comment.", True),
        ("Yes, it always flies", False),
        ("Bananas", False),  # nearer to neither
    ],
)
def test_similarity(answer: str, factual: bool) -> None:
    assert judge.make_judge(JudgeOptions("similarity"))("", answer, KITE) is factual


def test_calls() -> None:
    asked = judge.make_judge(JudgeOptions("calls"))
    assert asked("", "[area(base=3)]", AREA)
    assert not asked("", "[area(base=4)]", AREA)
    assert not asked("", "It cannot be done.", AREA)


def test_an_answer_pattern_applies_to_them_too() -> None:
    asked = judge.make_judge(JudgeOptions("calls", answer_pattern=r"Answer: (.*)"))
    assert asked("", "First I think. Answer: area(base=3)", AREA)


@pytest.mark.parametrize("name", ["exact", "contains", "regex"])
def test_other_judges_are_not_shown_incorrect_answers(name: JudgeName) -> None:
    asked = judge.make_judge(JudgeOptions(name))
    assert asked("", "No, it needs wind", KITE)
    assert not asked("", "Yes, it always flies", KITE)
    assert judge.answer_problems(JudgeOptions(name), KITE) == []


@pytest.mark.parametrize("name", ["exact", "contains", "regex", "openai", "similarity"])
def test_other_judges_refuse_expectations(name: JudgeName) -> None:
    assert "for the judge 'calls'" in judge.answer_problems(JudgeOptions(name), AREA)[0]


def test_what_the_new_judges_cannot_use_is_said_before_a_model_is_loaded() -> None:
    calls, similarity = JudgeOptions("calls"), JudgeOptions("similarity")
    assert judge.answer_problems(calls, AREA) == judge.answer_problems(similarity, KITE) == []
    assert "needs one answer that says what to expect" in judge.answer_problems(calls, ["Paris"])[0]
    assert "needs one answer" in judge.answer_problems(calls, [*AREA, "Paris"])[0]
    assert "damaged: 'texts'" in judge.answer_problems(calls, [references.expectation("text", texts=[])])[0]
    assert "needs an incorrect answer too" in judge.answer_problems(similarity, ["Paris"])[0]
    assert "has no word" in judge.answer_problems(similarity, ["...", references.incorrect("Rome")])[0]
    assert (
        "an accepted one is needed" in judge.answer_problems(JudgeOptions("exact"), [references.incorrect("Rome")])[0]
    )


def test_the_manifest_names_the_measure() -> None:
    assert JudgeOptions("similarity").judged_by == "similarity:rouge-l"
    assert JudgeOptions("calls").judged_by == "calls:bfcl"
    assert JudgeOptions("contains").judged_by == "contains"
    assert JudgeOptions("openai", "http://x", "grader").judged_by == "openai:grader"
