"""Schemas from requests: bounded, compiled with limits, and refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.engines.formats import Format, Grammars, Held, check_schema, grammar_of
from service.errors import RequestError
from tests.engines import tiny

PATTERN = ".*a.{20}b.*"


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def definitions(last: dict[str, Any], twice: str, levels: int = 25) -> dict[str, Any]:
    """Each level has the next one twice: as a tree they are 2 ** levels."""
    parts = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(levels)}
    two = {name: {twice: [one, one]} if twice == "allOf" else {"type": "object", "properties": {"a": one, "b": one}}
           for name, one in parts.items()}  # fmt: skip
    return {"$defs": two | {f"d{levels}": last}, "$ref": "#/$defs/d0"}


BEYOND = {
    "levels": (nested(40), "levels"), "characters": ({"enum": ["x" * 40_000]}, "characters"),
    "items": ({"type": "array", "items": {}, "maxItems": 10**6}, "'maxItems'"),
    "length": ({"type": "string", "minLength": 10**9}, "'minLength'"),
    "patterns of all": ({"allOf": [{"pattern": PATTERN} for _ in range(20)]}, "patterns"),
    "patterns in a chain": (
        {"$defs": {f"d{n}": {"pattern": PATTERN, "$ref": f"#/$defs/d{n + 1}"} for n in range(19)} | {"d19": {}},
         "$ref": "#/$defs/d0"}, "patterns"),
    "a tree of patterns": (definitions({"type": "string", "pattern": PATTERN}, "allOf"), "patterns"),
    "patterns of one property": (
        {"allOf": [{"properties": {"a": {"pattern": PATTERN}}} for _ in range(9)]}, "patterns"),
    "a long chain": (
        {"$defs": {f"{n}": {"$ref": f"#/$defs/{n + 1}"} for n in range(600)}, "allOf": [{"$ref": "#/$defs/0"}, {}]},
        "chain"),
    "patterns of any": ({"pattern": PATTERN, "anyOf": [{"pattern": PATTERN} for _ in range(9)]}, "patterns"),
    "x-guidance": ({"x-guidance": {"lenient": True}}, "x-guidance"), "no JSON": ({"minimum": float("nan")}, "JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_a_schema_is_bounded_before_it_is_compiled(name: str) -> None:
    schema, said = BEYOND[name]
    with pytest.raises(ValueError, match=said):
        check_schema(schema)


REFUSED = {
    "a type": ({"type": "text"}, "text"), "a keyword": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "elsewhere": ({"$ref": "http://other.example/schema"}, "not present|retriev"), "not": ({"not": {}}, "not"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "regex"), "nothing": ({"enum": []}, "."),
    "an unclosed pattern": ({"type": "string", "pattern": "(a"}, "regex"), "nowhere": ({"$ref": "#/$defs/x"}, "."),
    "a range": ({"type": "integer", "minimum": 5, "maximum": 2}, "."),
    "patterns that nothing is of": ({"allOf": [{"type": "string", "pattern": f"^{one}"} for one in "ab"]}, "."),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_with_its_field_and_the_reason(name: str) -> None:
    schema, said = REFUSED[name]
    with pytest.raises(RequestError, match=said) as refused:
        Grammars(tiny.tokenizer(), tiny.VOCABULARY, frozenset({tiny.EOS})).prepared(
            Format(check_schema(schema), "text.format")
        )
    assert refused.value.param == "text.format"
    assert refused.value.message.startswith("text.format: the schema cannot be compiled: ")
    assert len(refused.value.message) < 400


HOSTILE: dict[str, dict[str, Any]] = {
    "an exponential pattern": {"type": "string", "pattern": "^(a|b)*a(a|b){200}$"},
    "nested repeats": {"type": "string", "pattern": "^((a{1,500}){1,500}){1,500}$"},
    "a search": {"type": "string", "pattern": "(.*a){1000}"},
    "a long tail": {"type": "string", "pattern": ".*a.{5000}"},
    "alternatives": {"type": "string", "pattern": "|".join(f".*a.{{{n}}}b.*" for n in range(60))},
    "combined": {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(4)]},
    "itself": {"$ref": "#"}, "each other": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                                            "$ref": "#/$defs/a"},
    "a tree of references": definitions({"type": "string"}, "properties"),
    "a tree of conjunctions": definitions({"type": "string"}, "allOf"),
    "a conjunction with itself": {"$defs": {"a": {"allOf": [{"pattern": PATTERN}, {"$ref": "#/$defs/a"}]}},
                                  "$ref": "#/$defs/a"},
    "all of alternatives": {"allOf": [{"anyOf": [{"type": "string", "pattern": f"{n}a"}, {"type": "string"}]}
                                      for n in range(4)]},
    "alternatives of all": {"allOf": [{"anyOf": [{"properties": {f"{at}{n}": {}}} for at in "pq"]} for n in range(40)]},
    "many properties": {"type": "object", "properties": {f"k{n}": {"type": "integer", "maximum": 10**15 + n}
                                                         for n in range(400)}},
    "long": {"type": "string", "minLength": 5_000, "maxLength": 5_000},
    "nested arrays": {"type": "array", "maxItems": 5_000, "items": {"type": "array", "maxItems": 5_000,
                      "items": {"type": "array", "minItems": 5_000, "items": {"type": "number"}}}},
    "deep": nested(20), "a large list": {"enum": [f"value {n}" for n in range(2_000)]},
    "properties by patterns": {"type": "object", "patternProperties": {f"^{n}.*a.{{20}}b$": {} for n in range(40)}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_ends_soon_whatever_becomes_of_it(name: str) -> None:
    """Compiled, or refused; and as many steps as it lets an answer take.  Without the limits some take minutes."""
    grammars = Grammars(tiny.tokenizer(), tiny.VOCABULARY, frozenset({tiny.EOS}))
    try:
        held = Held(grammars.prepared(Format(check_schema(HOSTILE[name]), "response_format")))
        for _ in range(40):
            allowed = int.from_bytes(held.allowed(), "little")
            token = (allowed & -allowed).bit_length() - 1
            if token == tiny.EOS or held.take(token):
                break
    except (RequestError, ValueError):
        pass


def test_an_answer_of_the_format_is_complete_when_nothing_may_follow() -> None:
    tokenizer = tiny.tokenizer()
    grammars = Grammars(tokenizer, tiny.VOCABULARY, frozenset({tiny.EOS}))
    schema = {"type": "object", "properties": {"a": {"enum": [1, "é"]}}, "required": ["a"]}
    found = grammars.prepared(Format(json.dumps(schema | {"additionalProperties": False}), "response_format"))
    for text in ('{"a":1}', '{ "a": "é"\n}'):
        held = Held(found)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        for place, token in enumerate(tokens):
            assert int.from_bytes(held.allowed(), "little") >> token & 1, text
            assert held.take(token) == (place == len(tokens) - 1)
    [opens] = tokenizer("{", add_special_tokens=False)["input_ids"]
    allowed = int.from_bytes(Held(found).allowed(), "little")
    assert allowed == 1 << opens, "no answer ends before it begins, or begins with something else"
    assert grammar_of(Format('{"type": "object"}', "response_format"))
