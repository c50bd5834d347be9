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
from tests.kit.rows import Document
from tests.kit.tables import cells, lines

NORMAL = cells(
    """
    Ｐａｒｉｓ! | paris
    STRASSE | strasse
    Straße | strasse
    don't | dont
    An apple a day | apple day
    Papeetē, Brasília | papeete brasilia
    Nukuʻalofa; Nuku’alofa | nukualofa nukualofa
    Tromsø, Łódź, Smić | tromso lodz smic
    Việt Nam đồng | viet nam dong
    ガーナ | ガーナ
    हिन्दी | हिन्दी
    Й | й
    """
)  # a mark of Japanese makes another syllable


@pytest.mark.parametrize(("text", "normal"), [("  The  Eiffel-Tower. ", "eiffel tower"), *NORMAL])
def test_normalise(text: str, normal: str) -> None:
    assert judge.normalise(text) == normal


ABSTENTIONS = lines(
    """
    I am not sure.
    I'm not sure
    I don't know
    I do not know who
    I'm not certain
    I cannot answer that
    Sorry, I am unable to say
    I have no idea
    I don\u2019t know.
    I\u2019m not sure.
    I do not have that information.
    """
)
ANSWERS = lines(
    """
    It is Paris.
    Surely Rome
    The unknown soldier
    You don't say: Rome
    Idaho
    """
)


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
CALL = {"name": "area", "arguments": {"base": [3]}, "optional": []}
AREA = [judge.expectation("calls", calls=[CALL])]
# Answers of a row that have a name in the tables below; any other cell is the answer itself.
NAMED = {
    "BOTH": BOTH,
    "KITE": ["No, it needs wind", "I have no comment.", judge.incorrect("Yes, it always flies")],
    "AREA": AREA,
    "NOT ROME": [judge.incorrect("Rome")],
    "NO TEXT": [judge.expectation("text", texts=[])],
    "NO WORDS": [judge.parts(["Paris"], ["?!"])],
    "NO PATTERN": [judge.parts(["Paris"], ["("])],
}


def accepted(cell: str) -> list[str]:
    """The answers of a row, with commas between them."""
    return [answer for part in cell.split(", ") for answer in NAMED.get(part, [part])]


# A judge, what was said, and the accepted answers.
RIGHT = cells(
    r"""
    exact | The Paris. | paris
    regex | around 1 905 | 1\s905
    contains | It is vitamin A. | Vitamin A
    contains | about 1,000 people | 1000
    contains | 答案是东京。 | 东京
    contains | It is the United States | United States
    contains | It is in New  York, I think | new york
    contains | The capital is Papeete. | Papeetē
    contains | It is Reykjavík | Reykjavik
    contains | Harareは Zimbabweの首都です。 | Zimbabwe
    contains | 是South Africa的 | South Africa
    calls | [area(base=3)] | AREA
    similarity | No, a kite needs some wind. | KITE
    similarity | I have no comment. | KITE
    exact | No, it needs wind | KITE
    contains | No, it needs wind | KITE
    regex | No, it needs wind | KITE
    contains | Paris, and the euro. | BOTH
    contains | They pay in EUR; its capital is Paris. | BOTH
    regex | paris eur | BOTH
    """
)


WRONG = cells(
    r"""
    exact | It is Paris | paris
    regex | 1806 | 19\d\d
    contains | It is Vitamin C. | Vitamin A
    contains | The answer is -5. | 5
    contains | it is 3.14 | 314
    contains | 答案是大阪。 | 东京
    contains | unbelievable | able
    contains | Parisian | paris
    contains | 是Zimbabwean的 | Zimbabwe
    contains | か | が
    contains | anything | the
    calls | [area(base=4)] | AREA
    calls | It cannot be done. | AREA
    similarity | Yes, it always flies | KITE
    similarity | Bananas | KITE
    exact | Yes, it always flies | KITE
    contains | Yes, it always flies | KITE
    regex | Yes, it always flies | KITE
    contains | The capital is Paris. | BOTH
    contains | It is the euro. | BOTH
    contains | Parisian euros | BOTH
    regex | paris | BOTH
    """
)  # none has an empty answer; Bananas are nearer to neither; an answer must hold each part


@pytest.mark.parametrize("case", RIGHT + WRONG)
def test_what_a_judge_sees(case: list[Any]) -> None:
    name, text, answers = case
    verdict = judge.make_judge(JudgeOptions(name))("", text, accepted(answers))
    assert verdict is (case in RIGHT)


# A judge, and the answers of a row.
USABLE = cells(
    """
    exact | Paris
    calls | AREA
    similarity | KITE
    exact | KITE
    regex | KITE
    contains | KITE
    contains | BOTH
    regex | BOTH
    """
)
UNUSABLE = cells(
    """
    regex | ( | not a regular expression
    contains | ?! | empty once
    exact | AREA | for the judge 'calls'
    contains | AREA | for the judge 'calls'
    regex | AREA | for the judge 'calls'
    openai | AREA | for the judge 'calls'
    similarity | AREA | for the judge 'calls'
    calls | Paris | needs one answer
    calls | AREA, Paris | needs one answer
    calls | NO TEXT | damaged: 'texts'
    similarity | Paris | needs an incorrect answer
    exact | NOT ROME | an accepted one
    similarity | ..., NOT ROME | has no word
    exact | BOTH | has parts
    similarity | BOTH | has parts
    contains | BOTH, Paris | only entry
    contains | NO WORDS | empty once
    regex | NO PATTERN | not a regular expression
    """
)


@pytest.mark.parametrize("case", USABLE + UNUSABLE)
def test_what_a_judge_cannot_use(case: list[Any]) -> None:
    name, answers, *problem = case
    problems = judge.answer_problems(JudgeOptions(name), accepted(answers))
    assert bool(problems) == bool(problem)
    assert all(words in " ".join(problems) for words in problem)


def test_the_endpoint_is_asked_for_each_part(endpoint: Any) -> None:
    server = endpoint((200, "yes"), (200, "no"))
    assert (
        judge.make_judge(JudgeOptions("openai", server.url, "grader"))("q", "Paris", BOTH) is False
    )
    asked = [body["messages"][1]["content"] for _, _, body in server.seen]
    assert ["- Paris" in one for one in asked] == [True, False]
    assert ["- EUR" in one for one in asked] == [False, True]


def test_the_manifest_names_the_measure() -> None:
    names: tuple[JudgeName, ...] = ("similarity", "calls", "contains", "openai")
    judged_by = [JudgeOptions(name, "http://x", "grader").judged_by for name in names]
    assert judged_by == ["similarity:rouge-l", "calls:bfcl", "contains", "openai:grader"]


def test_references_there_and_back() -> None:
    answers = ["Paris", judge.incorrect('Rome "really"'), judge.expectation("text", texts=["é"])]
    assert judge.split_answers(answers) == (["Paris"], ['Rome "really"'])
    assert judge.expected(answers) == {"expect": "text", "texts": ["é"]}
    assert judge.expected(answers[:2]) is None


PLAIN = lines(
    r"""
    {
    {}
    {"a": 1}
    {"incorrect": 1}
    {"incorrect": "x", "y": 1}
    {"expect": "rain"}
    ["incorrect"]
    {2,3}\d
    {"expect": ["calls"]}
    {"parts": []}
    {"parts": [["a"]]}
    {"parts": [["a"], []]}
    {"parts": [["a"], ["b"]], "x": 1}
    {"parts": ["a", "b"]}
    {"parts": [["a"], [1]]}
    """
)


@pytest.mark.parametrize("plain", [*PLAIN, '{"a":' * 5_000])
def test_other_strings_stay_plain_answers(plain: str) -> None:
    assert judge.split_answers([plain]) == ([plain], [])
    assert judge.expected([plain]) is None
    assert judge.parts_of([plain]) is None


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
    words = " ".join(judge.words("The 3 D's_are: ＡＢＣ, straße!"))
    assert words == "the 3 d s are abc strasse"
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


# What a call is given, and its value as JSON.
VALUES = cells(
    r"""
    -2.5 | -2.5
    [1, (2, 3)] | [1, [2, 3]]
    {'a': [true, False]} | {"a": [true, false]}
    5 / 100 | 0.05
    1 / 0 | "1 / 0"
    speed | "speed"
    f(x=1) | "f(x=1)"
    2 ** 9 | "2 ** 9"
    '\d' | "\\d"
    """
)


@pytest.mark.parametrize(("source", "value"), VALUES)
def test_values_of_arguments(source: str, value: str) -> None:
    assert parse_calls(f"g(3, a={source})") == [Call("g", {"0": 3, "a": json.loads(value)})]


@given(st.text(alphabet="f(a=1,)[]{}\"':; \n<think>/`", max_size=60))
def test_no_text_breaks_the_parser(text: str) -> None:
    assert all(call.name for call in parse_calls(text))


def calls(*wanted: Document) -> Document:
    return {"expect": "calls", "calls": list(wanted)}


def wanted(name: str = "area", optional: tuple[str, ...] = (), **arguments: list[Any]) -> Document:
    return {"name": name, "arguments": arguments, "optional": list(optional)}


PICKED = cells(
    r"""
    exact | ^(?:It is|The answer is)?\s*(.*?)\.?$ | It is Guinea. | Guinea
    exact | ^(?:It is|The answer is)?\s*(.*?)\.?$ | Guinea | Guinea
    exact | ^(?:It is|The answer is)?\s*(.*?)\.?$ | The answer is Guinea | Guinea
    calls | Answer: (.*) | First I think. Answer: area(base=3) | AREA
    """
)
NOT_PICKED = cells(
    r"""
    exact | ^(?:It is|The answer is)?\s*(.*?)\.?$ | It is Equatorial Guinea. | Guinea
    """
)


@pytest.mark.parametrize("case", PICKED + NOT_PICKED)
def test_a_judge_sees_what_the_pattern_picks(case: list[Any]) -> None:
    name, pattern, text, answers = case
    picky = judge.make_judge(JudgeOptions(name, answer_pattern=pattern))
    assert picky("", text, accepted(answers)) is (case in PICKED)


# The value of an argument and those that are accepted, as JSON.
ACCEPTED = lines(
    """
    3, [3]
    3.0, [3]
    3, [3.0, 4]
    true, [true]
    null, [null]
    "New York, NY", ["new york ny"]
    "it's", ["it\\"s"]
    "", ["", "x"]
    [1, 2], [[1, 2]]
    ["A.b"], [["a b"]]
    [], [[]]
    [[1], [2]], [[[1], [2]]]
    {"a": 1}, [{"a": [1], "b": ["", 2]}]
    {"a": 1, "b": 2}, [{"a": [1], "b": ["", 2]}]
    {}, [{}]
    [{"a": 1}], [[{"a": [1]}]]
    """
)


NOT_ACCEPTED = lines(
    """
    4, [3]
    "3", [3]
    3, ["3"]
    1, [true]
    true, [1]
    0, [null]
    "New  York", ["York"]
    [2, 1], [[1, 2]]
    [1], [[1, 2]]
    {"a": 2}, [{"a": [1]}]
    {"a": 1, "c": 1}, [{"a": [1]}]
    {}, [{"a": [1]}]
    [{"a": 1}], [[{"a": [2]}]]
    """
)


@pytest.mark.parametrize("case", ACCEPTED + NOT_ACCEPTED)
def test_accepted_values(case: str) -> None:
    value, accepted = json.loads(f"[{case}]")
    call = json.dumps({"name": "area", "arguments": {"x": value}})
    assert meets(call, calls(wanted(x=accepted))) is (case in ACCEPTED)


NO_CALL, SOME_CALL = {"expect": "no_call"}, {"expect": "some_call"}


EXPECTATIONS = {
    "unit": calls(wanted(base=[3], unit=["cm", ""], optional=("unit",))),
    "dotted": calls(wanted("math.area", base=[3])),
    "pair": calls(wanted(base=[1]), wanted(base=[2])),
    # The first call fits both, the second only the first of them.
    "crossed": calls(wanted(base=[1, 2]), wanted(base=[1])),
    "no call": NO_CALL,
    "some call": SOME_CALL,
    "name": {"expect": "text", "texts": ["Bob", "Ada Lovelace"]},
    "short name": {"expect": "text", "texts": ["Ada"]},
    "price": {"expect": "text", "texts": ["$5"]},
}


MET = cells(
    """
    unit | area(base=3)
    unit | area(base=3, unit='cm')
    dotted | math_area(base=3)
    pair | [area(base=2), area(base=1)]
    crossed | [area(base=1), area(base=2)]
    no call | None fits.
    some call | area(base=3)
    name | It was ADA (Lovelace).
    price | It cost $5 then.
    """
)


NOT_MET = cells(
    """
    unit | area(unit='cm')
    unit | area(base=3, unit='inch')
    unit | area(base=3, height=2)
    unit | area(3)
    unit | volume(base=3)
    unit | It is 3.
    pair | [area(base=2), area(base=2)]
    pair | [area(base=1)]
    pair | [area(base=1), area(base=2), area(base=1)]
    crossed | [area(base=2), area(base=2)]
    no call | area(base=3)
    some call | None fits.
    short name | It was Adams.
    """
)


@pytest.mark.parametrize("case", MET + NOT_MET)
def test_what_meets_an_expectation(case: list[str]) -> None:
    expected, text = case
    assert meets(text, EXPECTATIONS[expected]) is (case in MET)


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
def test_a_damaged_expectation_is_named(damaged: Document, part: str) -> None:
    assert part in (expectation_problem(damaged) or "")
    assert expectation_problem(calls(wanted(base=[1]))) is expectation_problem(NO_CALL) is None


# --- answers that agree ---


# A question, and two answers.
AGREEING = cells(
    """
    What is the capital of France? | Paris | It is Paris, in the north of France.
    What is the capital of France? | The capital of France is Paris. | Paris!
    Which year? | 1,903 | In 1903.
    法国的首都是哪里？ | 巴黎 | 法国的首都是巴黎。
    Who? | the | the
    """
)


DIFFERING = [
    *cells(
        """
        What is the capital of France? | Paris | Lyon
        Who wrote it? | John Smith | It was Peter Smith who wrote it.
        Is it red, Paris or Lyon? | Paris | Lyon
        Is it red? | It is red. | It is not red.
        Is it red? | It isn't. | It is not red.
        Which year? | -5 | 5
        法国的首都是哪里？ | 巴黎 | 里昂
        """
    ),
    ["Who?", "", ""],
    ["Who?", "Paris", ""],
]


@pytest.mark.parametrize("case", AGREEING + DIFFERING)
def test_answers_agree_by_the_words_that_they_add(case: list[str]) -> None:
    question, answer_text, other = case
    for pair in ((answer_text, other), (other, answer_text)):
        assert judge.agree(question, *pair) is (case in AGREEING)


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_agreement_is_symmetric_and_an_answer_agrees_with_itself(
    question: str, answer_text: str, other: str
) -> None:
    assert judge.agree(question, answer_text, other) == judge.agree(question, other, answer_text)
    assert judge.agree(question, other, other) == bool(judge.normalise(other))
