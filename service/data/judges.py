"""Decides whether a generated answer is factual, by one of six judges.

``exact`` and ``contains`` compare normalised text with the accepted answers.  ``regex`` takes these
as patterns. ``openai`` asks any endpoint that speaks /v1/chat/completions.  ``similarity``
(TruthfulQA) and ``calls`` (BFCL) need more than accepted answers.  A judge sees only the
``answers`` of a row, so they encode this, too.  A plain string is an accepted answer.  A string
that is a JSON object with one of these keys is something else:

``{"incorrect": "You die"}``
    a false reference answer, used by the judge ``similarity`` alone;
``{"parts": [["Paris"], ["Euro", "EUR"]]}``
    a request for several facts: an accepted answer of each part must be there (``contains``,
    ``regex``, ``openai``);
``{"expect": "calls", "calls": [{"name": ..., "arguments": {name: [accepted values]}, "optional":
    [names]}]}`` the right function calls, in any order (judge ``calls``); or ``"expect":
    "no_call"``, ``"some_call"``, or ``{"expect": "text", "texts": [...]}``: one of the texts must
    occur in the answer."""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from service.data.calls import expectation_problem, meets
from service.data.options import JudgeOptions
from service.errors import TrainingError
from service.proxies import Proxies, ProxyTransport

Judge = Callable[[str, str, Sequence[str]], bool]  # question, answer, accepted answers -> factual

_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
)
_ARTICLES = frozenset(("a", "an", "the"))
_NEGATION = re.compile(
    r"no|not|never|none|nobody|nothing|cannot"
    r"|(is|are|was|were|do|does|did|ca|could|wo|would|has|have|had)nt"
)
_FUNCTION_WORD = re.compile(
    r"and|are|as|at|be|been|but|by|can|could|did|do|does|for|from|had|has|have|he|her|his|in|into"
    r"|is|it|its|of|on|or|she|so|than|that|their|there|these|they|this|those|to|was|we|were|which"
    r"|who|will|with|would|you|your|i|my|me|our|also"
)
_INSTRUCTION = (
    "You grade answers. Say whether the given answer states the same fact as one of the accepted"
    " answers. Reply with exactly one word: yes or no."
)
# What stands for an apostrophe within a name: "Nuku\u02bbalofa"
_APOSTROPHES = "'\u2018\u2019\u02bb\u02bc\u02b9\u0060\u00b4"
# Latin letters with a mark that Unicode does not take apart, as they are written without it
_PLAIN_LETTERS = str.maketrans(
    {"\u00f8": "o", "\u0142": "l", "\u0111": "d", "\u0131": "i", "\u00f0": "d", "\u0127": "h"}
    | {"\u00e6": "ae", "\u0153": "oe", "\u00fe": "th"}
)
TIMEOUT_S = 60.0  # of each request
RETRIES = 3  # after a failure that may be temporary: connection, 429, 5xx, neither yes nor no
_BACKOFF_S = 0.5


def normalise(text: str) -> str:
    """Return the text in NFKC and casefolded, Latin letters without their marks ("Papeet\u0113":
    "papeete"), without punctuation, symbols and English articles, in single spaces."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    folded = _without_latin_marks(folded)
    joined = re.sub(rf"(?<=\w)[{_APOSTROPHES}](?=\w)|(?<=\d),(?=\d{{3}})", "", folded)
    number_marks = {
        match.start() for match in re.finditer(r"(?<!\w)[-\u2212](?=\d)|(?<=\d)\.(?=\d)", joined)
    }
    characters = []
    for position, char in enumerate(joined):
        is_kept = position in number_marks or unicodedata.category(char)[0] not in "PSZC"
        characters.append(char.replace("\u2212", "-") if is_kept else " ")
    words = "".join(characters).split()
    return " ".join(
        word
        for position, word in enumerate(words)
        if word not in _ARTICLES or position == len(words) - 1
    )


def _without_latin_marks(text: str) -> str:
    """Marks of other scripts stay, since they make another letter: a voiced Japanese syllable."""
    if text.isascii():
        return text
    characters, is_latin = list[str](), False
    for char in unicodedata.normalize("NFD", text.translate(_PLAIN_LETTERS)):
        is_mark = unicodedata.category(char) == "Mn"
        if not is_mark:
            is_latin = unicodedata.name(char, "").startswith("LATIN")
        if not (is_mark and is_latin):
            characters.append(char)
    return unicodedata.normalize("NFKC", "".join(characters))


def contains(question: str, answer: str, accepted: Sequence[str]) -> bool:
    """Return whether a normalised accepted answer occurs in the normalised answer as whole words.

    In scripts that write no spaces between words (Chinese, Japanese, Thai, ...) as a substring;
    beside such a script another one's word is whole."""
    text = normalise(answer)
    spaced = f" {' '.join(_parts(text))} "
    wanted = [candidate for candidate in map(normalise, accepted) if candidate]
    return any(
        words in text if _UNSPACED.search(words) else f" {words} " in spaced for words in wanted
    )


def _parts(normalised: str) -> list[str]:
    """Return the words of a normalised text, and each character of a script without spaces."""
    return _UNSPACED.sub(r" \g<0> ", normalised).split()


def _added(words: Sequence[str], question_parts: frozenset[str]) -> frozenset[str]:
    """Return the words of an answer that are neither the question's nor function words."""
    return frozenset(word for word in words if not _FUNCTION_WORD.fullmatch(word)) - question_parts


def agree(question: str, answer: str, sampled: str) -> bool:
    """Return whether two answers to a question say the same: ``contains`` in both directions, by
    words.

    Of the shorter one's normalised words, those of the question and English function words left
    out, more than half must be among the other's, and both must negate or neither; if an answer has
    no other words, its whole text counts.  So "Paris" and "It is Paris, in France." agree, and
    answers of one or two words must have all of them in common.  A paraphrase without a common word
    counts as another answer."""
    question_parts = frozenset(_parts(normalise(question)))
    texts = [_parts(normalise(text)) for text in (answer, sampled)]
    added = [_added(words, question_parts) for words in texts]
    short, long = sorted(added if all(added) else map(frozenset, texts), key=len)
    negated = [any(map(_NEGATION.fullmatch, words)) for words in texts]
    return negated[0] == negated[1] and 2 * len(short & long) > len(short)


def answer_problems(options: JudgeOptions, answers: Sequence[str]) -> list[str]:
    """Return why this judge cannot use a row's answers; empty if it can.  Needs no model."""
    call_expectation = expected(answers)
    if options.judge == "calls":
        if call_expectation is None or len(answers) != 1:
            return [
                "the judge 'calls' needs one answer that says what to expect: convert the set bfcl,"
                " or take another"
            ]
        problem = expectation_problem(call_expectation)
        return [f"the expectation in 'answers' is damaged: {problem}"] if problem else []
    if call_expectation is not None:
        return [
            f"'answers' holds an expectation for the judge 'calls', which {options.judge_name!r}"
            " cannot use"
        ]
    accepted, false = split_answers(answers)
    if (fact_parts := parts_of(answers)) is not None:
        if options.judge_name not in PART_JUDGES or len(answers) != 1:
            return [
                "'answers' has parts, which need to be its only entry and a judge of"
                f" {', '.join(PART_JUDGES)}"
            ]
        accepted = [answer for part in fact_parts for answer in part]
    if false and not accepted:
        return ["'answers' holds incorrect answers only: an accepted one is needed"]
    if options.judge == "similarity":
        missing = (
            []
            if false
            else ['the judge \'similarity\' needs an incorrect answer too: {"incorrect": "..."}']
        )
        return missing + [
            f"answer {text!r} has no word" for text in (*accepted, *false) if not words(text)
        ]
    problems = []
    for answer in accepted:
        if options.judge == "regex":
            try:
                re.compile(answer)
            except re.error as error:
                problems.append(f"answer {answer!r} is not a regular expression: {error}")
        elif options.judge_name in ("exact", "contains") and not normalise(answer):
            problems.append(
                f"answer {answer!r} is empty once punctuation and articles are left out"
            )
    return problems


def make_judge(options: JudgeOptions) -> Judge:
    """Return the judge that the options name.  It sees what ``answer_pattern`` extracts from the
    generated text."""
    accepted_alone: dict[str, Judge] = {
        "exact": lambda _, answer, accepted: normalise(answer) in map(normalise, accepted),
        "contains": contains,
        "regex": lambda _, answer, accepted: any(
            re.search(expression, answer, re.IGNORECASE) for expression in accepted
        ),
    }
    if options.judge == "openai":
        accepted_alone["openai"] = OpenAIJudge(options)
    pattern = re.compile(options.answer_pattern) if options.answer_pattern else None

    def judge(question: str, answer: str, answers: Sequence[str]) -> bool:
        if pattern is not None and (match := pattern.search(answer)):
            answer = match.group(1) or ""
        accepted, false = split_answers(answers)
        if options.judge == "calls":
            call_expectation = expected(answers)
            return call_expectation is not None and meets(answer, call_expectation)
        if (fact_parts := parts_of(answers)) is not None:
            return all(
                accepted_alone[options.judge_name](question, answer, part) for part in fact_parts
            )
        if (
            options.judge == "similarity"
        ):  # nearer to a correct reference answer than to any incorrect one
            return margin(answer, accepted, false) > 0
        return accepted_alone[options.judge_name](question, answer, accepted)

    return judge


class OpenAIJudge:
    """Asks a chat model for yes or no, at temperature 0."""

    def __init__(self, options: JudgeOptions, sleep: Callable[[float], None] = time.sleep) -> None:
        self._options = options
        self._url = options.judge_url.rstrip("/") + "/chat/completions"
        headers = {"Authorization": f"Bearer {options.judge_key}"} if options.judge_key else {}
        proxies = Proxies.of_environment()
        self._client = httpx.Client(
            timeout=TIMEOUT_S, headers=headers, transport=ProxyTransport(proxies)
        )
        self._shown_url = self._url + proxies.described(httpx.URL(self._url))  # for errors
        self._sleep = sleep

    def __call__(self, question: str, answer: str, accepted: Sequence[str]) -> bool:
        """Raises TrainingError if the endpoint cannot be reached, refuses, or says neither yes nor
        no."""
        listed = "\n".join(f"- {candidate}" for candidate in accepted)
        text = (
            f"Question:\n{question}\n\nAccepted answers:\n{listed}\n\nGiven"
            f" answer:\n{answer}\n\nyes or no?"
        )
        body = {
            "model": self._options.judge_model,
            "temperature": 0,
            "max_tokens": 8,
            "messages": [
                {"role": "system", "content": _INSTRUCTION},
                {"role": "user", "content": text},
            ],
        }
        cause = ""
        for attempt in range(RETRIES + 1):
            if attempt:
                self._sleep(_BACKOFF_S * 2 ** (attempt - 1))
            try:
                response = self._client.post(self._url, json=body)
            except httpx.HTTPError as error:
                cause = (
                    f"cannot be reached ({type(error).__name__}: {error}); is the server up and the"
                    " base url right?"
                )
                continue
            if response.status_code != 200:
                cause = f"answered {response.status_code}: {response.text[:200]}"
                if response.status_code != 429 and response.status_code < 500:
                    raise TrainingError(
                        f"the judge at {self._shown_url} {cause}; check model and key",
                        param="judge",
                    )
                continue
            try:
                reply = response.json()["choices"][0]["message"]["content"]
            except (ValueError, LookupError, TypeError):
                cause = f"did not answer like /v1/chat/completions: {response.text[:200]!r}"
                continue
            word = reply.strip().strip(".!\"'*").casefold() if isinstance(reply, str) else ""
            if word in ("yes", "no"):  # "Yes, but" is neither
                return word == "yes"
            cause = f"said {reply!r} where yes or no was asked for"
        tries = f"(after {RETRIES + 1} tries; judged answers are kept, run again)"
        raise TrainingError(f"the judge at {self._shown_url} {cause} {tries}", param="judge")


PART_JUDGES = ("contains", "regex", "openai")
EXPECTATIONS = ("calls", "no_call", "some_call", "text")


def incorrect(text: str) -> str:
    """Return a false reference answer, as a string for ``answers``."""
    return json.dumps({"incorrect": text}, ensure_ascii=False)


def expectation(expect: str, **what: Any) -> str:
    """Return an expectation on the answer, as a string for ``answers``; ``expect`` is one of
    EXPECTATIONS."""
    return json.dumps({"expect": expect, **what}, ensure_ascii=False)


def parts(*answers: Sequence[str]) -> str:
    """Return the accepted answers of a request for several facts, as the string for ``answers``."""
    return json.dumps({"parts": [list(part) for part in answers]}, ensure_ascii=False)


def parts_of(answers: Sequence[str]) -> list[list[str]] | None:
    """Return the accepted answers of each part, or None if a row asks for one fact."""
    return next(
        (
            value["parts"]
            for value in map(_object, answers)
            if value is not None and "parts" in value
        ),
        None,
    )


def split_answers(answers: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return accepted answers and false answers, without expectations and parts."""
    accepted, false = [], []
    for answer in answers:
        value = _object(answer)
        if value is None:
            accepted.append(answer)
        elif "incorrect" in value:
            false.append(value["incorrect"])
    return accepted, false


def expected(answers: Sequence[str]) -> dict[str, Any] | None:
    """Return the first expectation among the answers, or None."""
    return next(
        (value for value in map(_object, answers) if value is not None and "expect" in value), None
    )


def _object(answer: str) -> dict[str, Any] | None:
    if not answer.startswith("{"):
        return None
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    false = isinstance(value.get("incorrect"), str) and len(value) == 1
    return value if false or _has_parts(value) or value.get("expect") in EXPECTATIONS else None


def _has_parts(value: dict[str, Any]) -> bool:
    """Return whether ``parts`` is all of an object, with two parts or more that each have an
    accepted answer."""
    fact_parts = value.get("parts")
    return (
        len(value) == 1
        and isinstance(fact_parts, list)
        and len(fact_parts) >= 2
        and all(map(_are_texts, fact_parts))
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def words(text: str) -> list[str]:
    """Return runs of letters and digits, case folded, in order."""
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold())


def rouge_l(first: Sequence[str], second: Sequence[str]) -> float:
    """Return ROUGE-L (Lin 2004), the F1 in [0, 1] of the longest common subsequence; 0 if either is
    empty."""
    if not first or not second:
        return 0.0
    lengths = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for position, candidate in enumerate(second, 1):
            longest = (
                diagonal + 1 if word == candidate else max(lengths[position], lengths[position - 1])
            )
            diagonal, lengths[position] = lengths[position], longest
    return 2 * lengths[-1] / (len(first) + len(second))


def margin(answer: str, correct: Sequence[str], incorrect: Sequence[str]) -> float:
    """Return the largest ROUGE-L to a correct reference minus the largest to an incorrect one;
    above 0 is factual."""
    answer_words = words(answer)

    def largest(references: Sequence[str]) -> float:
        return max((rouge_l(answer_words, words(text)) for text in references), default=0.0)

    return largest(correct) - largest(incorrect)
