"""Judges of answers: texts, references, function calls, and the endpoint against a real local
server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.data import judges as judge
from service.data.calls import Call, expectation_problem, meets, parse_calls
from service.data.options import ABSTAIN, JudgeName, JudgeOptions
from service.errors import TrainingError
from tests.kit.local_server import answer, listening


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  The  Eiffel-Tower. ", "eiffel tower"),
        ("Ｐａｒｉｓ!", "paris"),
        ("STRASSE", "strasse"),
        ("Straße", "strasse"),
        ("don't", "dont"),
        ("An apple a day", "apple day"),
        ("Papeet\u0113, Bras\u00edlia", "papeete brasilia"),
        ("Nuku\u02bbalofa; Nuku\u2019alofa", "nukualofa nukualofa"),
        ("Troms\u00f8, \u0141\u00f3d\u017a, Smi\u0107", "tromso lodz smic"),
        ("Vi\u1ec7t Nam \u0111\u1ed3ng", "viet nam dong"),
        ("\u30ac\u30fc\u30ca", "\u30ac\u30fc\u30ca"),  # a mark of Japanese makes another syllable
        ("\u0939\u093f\u0928\u094d\u0926\u0940", "\u0939\u093f\u0928\u094d\u0926\u0940"),
        ("\u0419", "\u0439"),
    ],
)
def test_normalise(text: str, normal: str) -> None:
    assert judge.normalise(text) == normal


TEXTS: list[tuple[JudgeName, str, str, bool]] = [
    ("exact", "The Paris.", "paris", True),
    ("exact", "It is Paris", "paris", False),
    ("regex", "around 1 905", r"1\s905", True),
    ("regex", "1806", r"19\d\d", False),
    ("contains", "It is Vitamin C.", "Vitamin A", False),
    ("contains", "It is vitamin A.", "Vitamin A", True),
    ("contains", "The answer is -5.", "5", False),
    ("contains", "about 1,000 people", "1000", True),
    ("contains", "it is 3.14", "314", False),
    ("contains", "答案是东京。", "东京", True),
    ("contains", "答案是大阪。", "东京", False),
    ("contains", "It is the United States", "United States", True),
    ("contains", "unbelievable", "able", False),
    ("contains", "It is in New  York, I think", "new york", True),
    ("contains", "Parisian", "paris", False),
    ("contains", "The capital is Papeete.", "Papeet\u0113", True),
    ("contains", "It is Reykjav\u00edk", "Reykjavik", True),
    ("contains", "Harare\u306f Zimbabwe\u306e\u9996\u90fd\u3067\u3059\u3002", "Zimbabwe", True),
    ("contains", "\u662fSouth Africa\u7684", "South Africa", True),
    ("contains", "\u662fZimbabwean\u7684", "Zimbabwe", False),
    ("contains", "\u304b", "\u304c", False),
    ("contains", "anything", "the", False),  # none has an empty answer
]


ABSTENTIONS = (
    "I am not sure.",
    " I'm not sure",
    "I don't know",
    "I do not know who",
    "I'm not certain",
    "I cannot answer that",
    "Sorry, I am unable to say",
    "I have no idea",
    "I don\u2019t know.",
    "I\u2019m not sure.",
    "I do not have that information.",
)
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
        return (
            judge.OpenAIJudge(
                JudgeOptions("openai", self.url, "grader", "key"), sleep=waited.append
            ),
            waited,
        )


@pytest.fixture
def endpoint() -> Iterator[Any]:
    with ExitStack() as stack:

        def make(*script: tuple[int, Any]) -> Endpoint:
            made = Endpoint(list(script))
            made.url = f"http://{stack.enter_context(listening(made))}/v1"
            return made

        yield make


@pytest.mark.parametrize(
    ("said", "verdict"), [("yes", True), ("No.", False), (" YES! ", True), ("**no**", False)]
)
def test_the_endpoint_says_yes_or_no(endpoint: Any, said: str, verdict: bool) -> None:
    server = endpoint((200, said))
    ask, waited = server.judge()
    assert ask("Where?", "In Paris", ["Paris", "Lutetia"]) is verdict
    path, key, body = server.seen[0]
    assert (path, key, body["model"], body["temperature"]) == (
        "/v1/chat/completions",
        "Bearer key",
        "grader",
        0,
    )
    assert all(
        part in body["messages"][1]["content"]
        for part in ("Where?", "In Paris", "- Paris", "- Lutetia")
    )
    assert waited == []


def test_it_tries_again_where_that_may_help(endpoint: Any) -> None:
    ask, waited = endpoint((503, "busy"), (429, "slow"), (200, "yes, but"), (200, "no")).judge()
    assert ask("q", "a", ["b"]) is False
    assert waited == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(
    ("script", "requests", "match"),
    [
        ((200, "maybe"), 4, r"'maybe' where yes or no was asked for \(after 4 tries"),
        ((401, "key"), 1, "answered 401"),
    ],
)
def test_it_gives_up_with_the_reason(endpoint: Any, script: Any, requests: int, match: str) -> None:
    server = endpoint(script)
    with pytest.raises(TrainingError, match=match):
        server.judge()[0]("q", "a", ["b"])
    assert len(server.seen) == requests


def test_an_unreachable_endpoint_is_named() -> None:
    server = Endpoint([])
    with listening(server) as address:
        server.url = f"http://{address}/v1"
    with pytest.raises(TrainingError, match=f"{server.url}/chat/completions cannot be reached"):
        server.judge()[0]("q", "a", ["b"])


BOTH = [judge.parts(["Paris"], ["Euro", "EUR"])]
KITE = ["No, it needs wind", "I have no comment.", judge.incorrect("Yes, it always flies")]
CALL = {"name": "area", "arguments": {"base": [3]}, "optional": []}
AREA = [judge.expectation("calls", calls=[CALL])]
GUINEA = r"^(?:It is|The answer is)?\s*(.*?)\.?$"


@pytest.mark.parametrize(
    ("name", "pattern", "said", "accepted", "expected"),
    [
        ("exact", GUINEA, "It is Guinea.", ["Guinea"], True),
        ("exact", GUINEA, "Guinea", ["Guinea"], True),
        ("exact", GUINEA, "It is Equatorial Guinea.", ["Guinea"], False),
        ("exact", GUINEA, "The answer is Guinea", ["Guinea"], True),
        ("calls", r"Answer: (.*)", "First I think. Answer: area(base=3)", AREA, True),
        ("calls", "", "[area(base=3)]", AREA, True),
        ("calls", "", "[area(base=4)]", AREA, False),
        ("calls", "", "It cannot be done.", AREA, False),
        ("similarity", "", "No, a kite needs some wind.", KITE, True),
        ("similarity", "", "I have no comment.", KITE, True),
        ("similarity", "", "Yes, it always flies", KITE, False),
        ("similarity", "", "Bananas", KITE, False),  # nearer to neither
        *(
            (name, "", said, KITE, expected)
            for name in ("exact", "contains", "regex")  # not shown incorrect answers
            for said, expected in (("No, it needs wind", True), ("Yes, it always flies", False))
        ),
        *((name, "", said, [accepted], expected) for name, said, accepted, expected in TEXTS),
        # An answer must hold each part.
        ("contains", "", "Paris, and the euro.", BOTH, True),
        ("contains", "", "They pay in EUR; its capital is Paris.", BOTH, True),
        ("contains", "", "The capital is Paris.", BOTH, False),
        ("contains", "", "It is the euro.", BOTH, False),
        ("contains", "", "Parisian euros", BOTH, False),
        ("regex", "", "paris eur", BOTH, True),
        ("regex", "", "paris", BOTH, False),
    ],
)
def test_what_a_judge_sees(
    name: JudgeName, pattern: str, said: str, accepted: list[str], expected: bool
) -> None:
    assert (
        judge.make_judge(JudgeOptions(name, answer_pattern=pattern))("", said, accepted) is expected
    )


@pytest.mark.parametrize(
    ("name", "answers", "said"),
    [
        ("exact", ["Paris"], ""),
        ("calls", AREA, ""),
        ("similarity", KITE, ""),
        ("exact", KITE, ""),
        ("regex", KITE, ""),
        ("contains", KITE, ""),
        ("regex", ["("], "not a regular expression"),
        ("contains", ["?!"], "empty once"),
        *(
            (name, AREA, "for the judge 'calls'")
            for name in ("exact", "contains", "regex", "openai", "similarity")
        ),
        ("calls", ["Paris"], "needs one answer"),
        ("calls", [*AREA, "Paris"], "needs one answer"),
        ("calls", [judge.expectation("text", texts=[])], "damaged: 'texts'"),
        ("similarity", ["Paris"], "needs an incorrect answer"),
        ("exact", [judge.incorrect("Rome")], "an accepted one"),
        ("similarity", ["...", judge.incorrect("Rome")], "has no word"),
        ("contains", BOTH, ""),
        ("regex", BOTH, ""),
        ("exact", BOTH, "has parts"),
        ("similarity", BOTH, "has parts"),
        ("contains", [*BOTH, "Paris"], "only entry"),
        ("contains", [judge.parts(["Paris"], ["?!"])], "empty once"),
        ("regex", [judge.parts(["Paris"], ["("])], "not a regular expression"),
    ],
)
def test_what_a_judge_cannot_use(name: JudgeName, answers: list[str], said: str) -> None:
    problems = judge.answer_problems(JudgeOptions(name), answers)
    assert bool(problems) == bool(said)
    assert said in " ".join(problems)


def test_the_endpoint_is_asked_for_each_part(endpoint: Any) -> None:
    server = endpoint((200, "yes"), (200, "no"))
    assert (
        judge.make_judge(JudgeOptions("openai", server.url, "grader"))("q", "Paris", BOTH) is False
    )
    asked = [body["messages"][1]["content"] for _, _, body in server.seen]
    assert ["- Paris" in one for one in asked] == [True, False]
    assert ["- EUR" in one for one in asked] == [False, True]


def test_parts_there_and_back() -> None:
    assert judge.parts_of(BOTH) == [["Paris"], ["Euro", "EUR"]]
    assert judge.split_answers(BOTH) == ([], [])
    assert judge.parts_of(["Paris"]) is None


def test_the_manifest_names_the_measure() -> None:
    given = (
        JudgeOptions("similarity"),
        JudgeOptions("calls"),
        JudgeOptions("contains"),
        JudgeOptions("openai", "http://x", "grader"),
    )
    assert [one.judged_by for one in given] == [
        "similarity:rouge-l",
        "calls:bfcl",
        "contains",
        "openai:grader",
    ]


def test_references_there_and_back() -> None:
    answers = ["Paris", judge.incorrect('Rome "really"'), judge.expectation("text", texts=["é"])]
    assert judge.split_answers(answers) == (["Paris"], ['Rome "really"'])
    assert judge.expected(answers) == {"expect": "text", "texts": ["é"]}
    assert judge.expected(answers[:2]) is None


@pytest.mark.parametrize(
    "plain",
    [
        "{",
        "{}",
        '{"a": 1}',
        '{"incorrect": 1}',
        '{"incorrect": "x", "y": 1}',
        '{"expect": "rain"}',
        '["incorrect"]',
        r"{2,3}\d",
        '{"expect": ["calls"]}',
        '{"a":' * 5_000,
        '{"parts": []}',
        '{"parts": [["a"]]}',
        '{"parts": [["a"], []]}',
        '{"parts": [["a"], ["b"]], "x": 1}',
        '{"parts": ["a", "b"]}',
        '{"parts": [["a"], [1]]}',
    ],
)
def test_other_strings_stay_plain_answers(plain: str) -> None:
    assert judge.split_answers([plain]) == ([plain], [])
    assert judge.expected([plain]) is judge.parts_of([plain]) is None


# ROUGE-L against its definition, and the rule over references.

SENTENCES = st.lists(st.sampled_from("abc"), max_size=6)


def subsequences(words: list[str]) -> set[tuple[str, ...]]:
    return {picked for size in range(len(words) + 1) for picked in combinations(words, size)}


@given(SENTENCES, SENTENCES)
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(
    one: list[str], other: list[str]
) -> None:
    common = max(map(len, subsequences(one) & subsequences(other)))
    expected = 2 * common / (len(one) + len(other)) if common else 0.0
    assert judge.rouge_l(one, other) == pytest.approx(expected)
    assert judge.rouge_l(other, one) == pytest.approx(expected)


def test_words_and_the_nearer_reference() -> None:
    assert judge.words("The 3 D's_are: ＡＢＣ, straße!") == [
        "the",
        "3",
        "d",
        "s",
        "are",
        "abc",
        "strasse",
    ]
    correct = ["You digest the seeds", "Nothing happens"]
    incorrect = ["You grow watermelons in your stomach"]
    assert judge.margin("nothing happens.", correct, incorrect) == 1.0
    assert judge.margin("You grow watermelons in the stomach", correct, incorrect) < 0
    assert (
        judge.margin("entirely unrelated", correct, incorrect) == 0.0
    )  # no nearer to one than to the other


# Function calls in what models write, and whether they are the right ones.

ONE, TWO = Call("area", {"base": 3, "unit": "cm"}), Call("g.h", {"x": None})
JSON = '{"name": "area", "arguments": {"base": 3, "unit": "cm"}}'
OTHER = '{"name": "g.h", "arguments": {"x": null}}'


IN_MANY_SHAPES = (
    "area(base=3, unit='cm')",
    '[area(base=3, unit="cm")]',
    "  area(base=1 + 2, unit='cm');",
    "```python\n[area(base=3, unit='cm')]\n```",
    "Sure.\n```\narea(base=3, unit='cm')\n```\nDone.",
    "I shall call it:\narea(base=3, unit='cm')",
    "<think>area(base=9)</think>\narea(base=3, unit='cm')",
    "thoughts without a first tag area(base=9)</think>[area(base=3, unit='cm')]",
    JSON,
    '[{"name": "area", "parameters": {"base": 3, "unit": "cm"}}]',
    (
        '{"type": "function", "function": {"name": "area", "arguments": "{\\"base\\": 3,'
        ' \\"unit\\": \\"cm\\"}"}}'
    ),
    '{"type": "function", "function": "area", "parameters": {"base": 3, "unit": "cm"}}',
    '[{"area": {"base": 3, "unit": "cm"}}]',
    f"<tool_call>\n{JSON}\n</tool_call>",
    f"Well: <tool_call>{JSON}",
    f"[TOOL_CALLS] [{JSON}]",
    "<|python_tag|>area(base=3, unit='cm')",
)
IN_ORDER = (
    "[area(base=3, unit='cm'), g.h(x=None)]",
    "area(base=3, unit='cm'); g.h(x=null)",
    "area(base=3, unit='cm')\ng.h(x=None)",
    f"{JSON}; {OTHER}",
    f"<tool_call>{JSON}</tool_call>\n<tool_call>{OTHER}</tool_call>",
)
NO_CALL_AT_ALL = (
    "",
    "None of the functions fits.",
    "I would need area(base=3, unit='cm') but the unit is missing.",
    "42",
    "[]",
    "{}",
    "[1, 2]",
    "x = area(base=3)",
    "import os\nos.system",
    '{"answer": "Paris"}',
    "<think>area(base=3)",
    # the offer again
    ('{"name": "area", "description": "Area.", "parameters": {"type": "dict", "properties": {}}}'),
    "f()()",
    "lambda: 1",
    "[" * 5_000,
    "(" * 5_000 + "f()" + ")" * 5_000,
    "f(" * 2_000 + ")" * 2_000,
    '{"a":' * 3_000,
    "\x00",
)


@pytest.mark.parametrize(
    ("texts", "expected"), [(IN_MANY_SHAPES, [ONE]), (IN_ORDER, [ONE, TWO]), (NO_CALL_AT_ALL, [])]
)
def test_calls_in_what_models_write(texts: tuple[str, ...], expected: list[Call]) -> None:
    for text in texts:
        assert parse_calls(text) == expected, text


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("-2.5", -2.5),
        ("[1, (2, 3)]", [1, [2, 3]]),
        ("{'a': [true, False]}", {"a": [True, False]}),
        ("5 / 100", 0.05),
        ("1 / 0", "1 / 0"),
        ("speed", "speed"),
        ("f(x=1)", "f(x=1)"),
        ("2 ** 9", "2 ** 9"),
        ("'\\d'", "\\d"),
    ],
)
def test_values_of_arguments(source: str, value: Any) -> None:
    assert parse_calls(f"g(3, a={source})") == [Call("g", {"0": 3, "a": value})]


@given(st.text(alphabet="f(a=1,)[]{}\"':; \n<think>/`", max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    assert all(call.name for call in parse_calls(text))


def calls(*wanted: dict[str, Any]) -> dict[str, Any]:
    return {"expect": "calls", "calls": list(wanted)}


def wanted(
    name: str = "area", optional: tuple[str, ...] = (), **arguments: list[Any]
) -> dict[str, Any]:
    return {"name": name, "arguments": arguments, "optional": list(optional)}


@pytest.mark.parametrize(
    ("given", "accepted", "right"),
    [
        (3, [3], True),
        (3.0, [3], True),
        (3, [3.0, 4], True),
        (4, [3], False),
        ("3", [3], False),
        (3, ["3"], False),
        (True, [True], True),
        (1, [True], False),
        (True, [1], False),
        (None, [None], True),
        (0, [None], False),
        ("New York, NY", ["new york ny"], True),
        ("New  York", ["York"], False),
        ("it's", ['it"s'], True),
        ("", ["", "x"], True),
        ([1, 2], [[1, 2]], True),
        ([2, 1], [[1, 2]], False),
        ([1], [[1, 2]], False),
        (["A.b"], [["a b"]], True),
        ([], [[]], True),
        ([[1], [2]], [[[1], [2]]], True),
        ({"a": 1}, [{"a": [1], "b": ["", 2]}], True),
        ({"a": 1, "b": 2}, [{"a": [1], "b": ["", 2]}], True),
        ({"a": 2}, [{"a": [1]}], False),
        ({"a": 1, "c": 1}, [{"a": [1]}], False),
        ({}, [{"a": [1]}], False),
        ({}, [{}], True),
        ([{"a": 1}], [[{"a": [1]}]], True),
        ([{"a": 1}], [[{"a": [2]}]], False),
    ],
)
def test_accepted_values(given: Any, accepted: list[Any], right: bool) -> None:
    assert (
        meets(json.dumps({"name": "area", "arguments": {"x": given}}), calls(wanted(x=accepted)))
        is right
    )


UNIT = calls(wanted(base=[3], unit=["cm", ""], optional=("unit",)))
PAIR = calls(wanted(base=[1]), wanted(base=[2]))
CROSSED = calls(
    wanted(base=[1, 2]), wanted(base=[1])
)  # the first call fits both, the second only the first of them
NO_CALL, SOME_CALL = {"expect": "no_call"}, {"expect": "some_call"}


@pytest.mark.parametrize(
    ("text", "expected", "met"),
    [
        ("area(base=3)", UNIT, True),
        ("area(base=3, unit='cm')", UNIT, True),
        ("area(unit='cm')", UNIT, False),
        ("area(base=3, unit='inch')", UNIT, False),
        ("area(base=3, height=2)", UNIT, False),
        ("area(3)", UNIT, False),
        ("volume(base=3)", UNIT, False),
        ("It is 3.", UNIT, False),
        ("math_area(base=3)", calls(wanted("math.area", base=[3])), True),
        ("[area(base=2), area(base=1)]", PAIR, True),
        ("[area(base=2), area(base=2)]", PAIR, False),
        ("[area(base=1)]", PAIR, False),
        ("[area(base=1), area(base=2), area(base=1)]", PAIR, False),
        ("[area(base=1), area(base=2)]", CROSSED, True),
        ("[area(base=2), area(base=2)]", CROSSED, False),
        ("None fits.", NO_CALL, True),
        ("area(base=3)", NO_CALL, False),
        ("area(base=3)", SOME_CALL, True),
        ("None fits.", SOME_CALL, False),
        ("It was ADA (Lovelace).", {"expect": "text", "texts": ["Bob", "Ada Lovelace"]}, True),
        ("It cost $5 then.", {"expect": "text", "texts": ["$5"]}, True),
        ("It was Adams.", {"expect": "text", "texts": ["Ada"]}, False),
    ],
)
def test_what_meets_an_expectation(text: str, expected: dict[str, Any], met: bool) -> None:
    assert meets(text, expected) is met


@pytest.mark.parametrize(
    ("damaged", "part"),
    [
        ({"expect": "calls"}, "'calls'"),
        (calls(), "'calls'"),
        (calls(CALL | {"arguments": {"a": 1}}), "'calls'"),
        (
            {"expect": "text", "texts": ["(.)"]},
            "'texts'",
        ),  # nothing is left of it, so it would be in every answer
    ],
)
def test_a_damaged_expectation_is_named(damaged: dict[str, Any], part: str) -> None:
    assert part in (expectation_problem(damaged) or "")
    assert expectation_problem(calls(wanted(base=[1]))) is expectation_problem(NO_CALL) is None


# --- answers that agree ---


@pytest.mark.parametrize(
    ("question", "answer_text", "other", "same"),
    [
        ("What is the capital of France?", "Paris", "It is Paris, in the north of France.", True),
        ("What is the capital of France?", "The capital of France is Paris.", "Paris!", True),
        ("What is the capital of France?", "Paris", "Lyon", False),
        ("Who wrote it?", "John Smith", "It was Peter Smith who wrote it.", False),
        ("Is it red, Paris or Lyon?", "Paris", "Lyon", False),
        ("Is it red?", "It is red.", "It is not red.", False),
        ("Is it red?", "It isn't.", "It is not red.", False),
        ("Which year?", "1,903", "In 1903.", True),
        ("Which year?", "-5", "5", False),
        ("法国的首都是哪里？", "巴黎", "法国的首都是巴黎。", True),
        ("法国的首都是哪里？", "巴黎", "里昂", False),
        ("Who?", "", "", False),
        ("Who?", "Paris", "", False),
        ("Who?", "the", "the", True),
    ],
)
def test_answers_agree_by_the_words_that_they_add(
    question: str, answer_text: str, other: str, same: bool
) -> None:
    assert judge.agree(question, answer_text, other) is same
    assert judge.agree(question, other, answer_text) is same


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_agreement_is_symmetric_and_an_answer_agrees_with_itself(
    question: str, answer_text: str, other: str
) -> None:
    assert judge.agree(question, answer_text, other) == judge.agree(question, other, answer_text)
    assert judge.agree(question, other, other) == bool(judge.normalise(other))
