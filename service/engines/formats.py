"""What an answer has to be: JSON of a schema, which decoding is held to token by token.

llguidance makes the grammar, for both engines; it builds automata as they are needed, and counts what it spends.
A schema comes from a request, so its size is bounded here, too, where the library's limits do not reach."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from service.errors import RequestError
from service.tool_calls import deeper_than

MOST_CHARACTERS = 32_768  # of a schema's JSON
MOST_LEVELS = 64  # of its lists and objects
MOST_REPEATS = 5_000  # of items, characters or properties: each costs the grammar a symbol
MOST_COMBINED = 4  # patterns, where schemas are combined: time is exponential in how many are intersected
_REPEATS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains")
_COMBINE = ("allOf", "anyOf", "oneOf", "$ref")
_BESIDE = frozenset(("$defs", "definitions", "title", "description", "default", "examples", "$schema", "$id"))
# A fifth and less of the library's own: tens of milliseconds for a grammar, a few for a step.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "step_max_items": 20_000, "max_lexer_states": 20_000,
    "max_grammar_size": 50_000, "precompute_large_lexemes": False, "verbose_errors": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Format:
    """The JSON schema of an answer; ``param``: the request's field that it came in."""

    schema: str
    param: str
    matcher: Any = field(default=None, compare=False, repr=False)  # ``Grammars.prepared``'s, of one engine


def check_schema(schema: Mapping[str, Any]) -> str:
    """Return a schema's JSON.  Raises ValueError for one that is larger than anybody needs."""
    if deeper_than(schema, MOST_LEVELS):
        raise ValueError(f"a schema has at most {MOST_LEVELS} levels of lists and objects here")
    written = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    if len(written) > MOST_CHARACTERS:
        raise ValueError(f"a schema has at most {MOST_CHARACTERS} characters here")
    objects = list(_objects(schema))
    for one in objects:
        for name in _REPEATS:
            if isinstance(many := one.get(name), int | float) and many > MOST_REPEATS:
                raise ValueError(f"'{name}' is at most {MOST_REPEATS} here")
        if "x-guidance" in one:
            raise ValueError("'x-guidance' is no keyword of JSON schema")
    if any(map(_combines, objects)):
        try:
            patterns = _Patterns(schema).of(schema)
        except RecursionError:
            raise ValueError("the chain of references is too long") from None
        if patterns > MOST_COMBINED:
            said = f"at most {MOST_COMBINED} patterns and formats are taken where schemas are combined"
            raise ValueError(f"{said} ({', '.join(_COMBINE)} with others): one text may have to match them all")
    return written


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, Mapping):
            yield one
            pending += one.values()
        elif isinstance(one, list):
            pending += one


def _combines(one: Mapping[str, Any]) -> bool:
    """Return whether an answer has to be of several schemas at once."""
    others = one.keys() - _BESIDE
    every = one.get("allOf")
    return (isinstance(every, list) and len(every) > 1) or (len(others) > 1 and any(name in one for name in _COMBINE))


class _Patterns:
    """Counts the expressions of a schema, those that are referred to each time."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[str, int] = {}  # by reference; 0 while it is being counted, so that a cycle ends

    def of(self, value: Any) -> int:
        """Return how many there are.  Raises ValueError for a reference to elsewhere, RecursionError for a long chain.

        ``properties`` may be called as the keywords are, so nothing but texts counts as one."""
        if isinstance(value, list):
            return sum(map(self.of, value))
        if not isinstance(value, Mapping):
            return 0
        own = sum(isinstance(value.get(name), str) for name in ("pattern", "format"))
        by_pattern = value.get("patternProperties")
        own += len(by_pattern) if isinstance(by_pattern, Mapping) else 0
        found = value.get("$ref")
        named = self._named(found) if isinstance(found, str) else 0
        return own + named + sum(self.of(one) for name, one in value.items() if name not in ("$defs", "definitions"))

    def _named(self, reference: str) -> int:
        if reference not in self._known:
            self._known[reference] = 0
            self._known[reference] = self.of(self._target(reference))
        return self._known[reference]

    def _target(self, reference: str) -> Any:
        """Return what a JSON pointer points to; nothing where nothing is there, which the grammar's maker refuses."""
        if not re.fullmatch(r"#(/[^%]*)?", reference):
            raise ValueError("a '$ref' where schemas are combined is '#' or '#/..', without %")
        target: Any = self._root
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                target = target.get(name) if isinstance(target, Mapping) else None
        return target


def grammar_of(found: Format) -> str:
    """Return the schema's grammar.  Raises RequestError, with the reason, for one that cannot be compiled."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = LLMatcher.grammar_from_json_schema(found.schema)
        failure = LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**LIMITS))
    except ValueError as error:
        failure = str(error)
    if failure:
        raise refused(found, failure)
    return grammar


def refused(found: Format, failure: str) -> RequestError:
    """Return the error for a schema that cannot be used."""
    reason = " ".join(failure.split())[:300]
    return RequestError(f"{found.param}: the schema cannot be compiled: {reason}", param=found.param)


class Grammars:
    """Formats for the answers of one tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        """``vocabulary``: of the logits; ``ends``: tokens that end an answer, none: the tokenizer's own."""
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._made: Any = None  # a second for a large vocabulary: made when the first format comes

    def prepared(self, found: Format) -> Format:
        """Return a format that ``Held`` takes.  Slow; on any thread but an event loop's.  Raises RequestError."""
        from llguidance import LLMatcher, LLParserLimits

        grammar = grammar_of(found)
        if self._made is None:
            self._made = self._make(found)
        matcher = LLMatcher(self._made, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if failure := matcher.get_error():
            raise refused(found, failure)
        matcher.compute_bitmask()  # the dearest step of most: not on the engine's thread
        if failure := matcher.get_error():
            raise refused(found, failure)
        return replace(found, matcher=matcher)

    def _make(self, found: Format) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            size = max(self._vocabulary, len(self._tokenizer))
            return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=sorted(self._ends) or None)
        except ValueError as error:
            said = f"{found.param}: this model's tokenizer cannot be held to a format: {error}"
            raise RequestError(said, param=found.param) from error


class Held:
    """One answer that is held to a format."""

    def __init__(self, found: Format) -> None:
        assert found.matcher is not None, "Grammars.prepared makes it"
        self._found, self._matcher = found, found.matcher.deep_copy()

    def allowed(self) -> bytes:
        """Return which tokens may come next, a bit for each.  Raises RequestError where it became too much to tell."""
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        return mask

    def take(self, token: int) -> bool:
        """Note a token; return whether the answer is complete, and nothing may follow."""
        self._matcher.consume_token(token)
        over = bool(self._matcher.is_stopped())
        if not over:
            self._check()
        return over

    def _check(self) -> None:
        if failure := self._matcher.get_error():
            raise refused(self._found, failure)
