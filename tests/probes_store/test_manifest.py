"""The manifest and its records: strict, sealed, of one format."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logit

import probes_store
from probes_store import errors
from probes_store.bundle import render
from probes_store.errors import BadValue, BundleDamaged, DigestMismatch, MissingField, UnknownField
from probes_store.manifest import MAX_FILE, manifest_bytes, read_manifest, sealed
from probes_store.records import (
    GREEDY,
    Applicability,
    Context,
    ContextProbe,
    Decoding,
    Recalibration,
    least_reaching,
)
from probes_store.syntax import canonical_json, parse_json, plain, readable_json
from tests.kit import bundles as f
from tests.kit.bundles import ANSWER, ASKS, CONTEXT, GUARANTEE, PASSAGE, STATED, make_draft
from tests.kit.reseal import reseal, sha256
from tests.kit.tables import cells

FIELDS = (Path(probes_store.__file__).parent / "FIELDS.md").read_text(encoding="utf-8")
TRAINING, OTHER = f.TRAINING, "sha256:" + "9" * 64
MANIFEST = render(make_draft())[0]
DATA = manifest_bytes(MANIFEST)
DOCUMENT: dict[str, Any] = json.loads(DATA)
PLATT = Recalibration("platt", 0.5, 0.5, -1.0)
STEPS = Recalibration("isotonic", knots=(0.0, 0.25, 0.5, 1.0), values=(0.1, 0.2, 0.6, 0.9))
READING = ("depth_mean", "passage", "stated")
SAMPLED = Decoding(0.7, 0.9)
PROMISED: dict[str, Any] = {"guarantee": GUARANTEE, "threshold": GUARANTEE.threshold}
FULL = render(
    make_draft(
        **PROMISED,
        context=CONTEXT,
        signals=READING,
        uncertainty=f.UNCERTAINTY,
        recalibration=PLATT,
        guarantee_shapes=("alone", "a chat"),
        guarantee_strata=f.STRATA,
        answer=ANSWER,
        model={"adapter": OTHER},
        template_arguments={"enable_thinking": False, "style": "kurz", "most": 3, "share": 0.5},
        training=dataclasses.replace(
            TRAINING,
            labels="self",
            decoding=SAMPLED,
            shapes=("a", "b"),
            scripts=("Latin", "Han"),
            reworded=40,
            samples=5,
            sample_temperature=0.7,
        ),
    )
)[0]
# Every record and field but guarantee_reads_answers, which needs the record answer: a test below.
EVERYTHING: dict[str, Any] = json.loads(manifest_bytes(FULL))
GONE = object()


def at(document: Any, path: str) -> Any:
    """The record at a path such as ``context.probes[1]``; the whole document at the empty path."""
    for key in re.findall(r"\w+", path):
        document = document[int(key) if key.isdigit() else key]
    return document


def changed(document: dict[str, Any], path: str, change: dict[str, Any]) -> dict[str, Any]:
    """A copy, where the record at this path has other values, and not those that are ``GONE``."""
    document = json.loads(json.dumps(document))
    record = at(document, path)
    record.update(change)
    for key in [key for key, value in change.items() if value is GONE]:
        del record[key]
    return document


def refuses(error: type[BundleDamaged], field: str | None, data: bytes | dict[str, Any]) -> str:
    """Reading fails with exactly this error, whose field begins so; a document is sealed anew.  The
    message."""
    with pytest.raises(BundleDamaged) as caught:
        read_manifest(data if isinstance(data, bytes) else reseal(data))
    assert type(caught.value) is error, caught.value
    assert field is None or str(caught.value.field).startswith(field), caught.value
    return str(caught.value)


def test_canonical_json_bytes() -> None:
    value = {"b": [1, 2.5, 1e-07, 1e22, -0.0], "a": {"é": None, "Z": True}, "text": 'ö"\\\n'}
    pinned = '{"a":{"Z":true,"é":null},"b":[1,2.5,1e-07,1e+22,-0.0],"text":"ö\\"\\\\\\n"}'
    assert canonical_json(value) == pinned.encode()
    assert readable_json({"b": [1.0], "a": {}}) == b'{\n  "a": {},\n  "b": [\n    1.0\n  ]\n}\n'
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError):
            canonical_json({"x": bad})


TEXT = st.text(st.characters(codec="utf-8"))
NUMBER = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(TEXT, JSON, max_size=3))
def test_what_is_written_is_read_back(value: dict[str, Any]) -> None:
    assert canonical_json(parse_json(readable_json(value))) == canonical_json(value)
    assert plain(value) == value


TEXTS: list[tuple[type[BundleDamaged], str | None, bytes]] = [
    *(
        (BadValue, None, data)
        for data in (
            b"\xff\xfe}\n",
            b"[" * 100_000 + b"}\n",
            b"{,}\n",
            b"[]\n",
            b'{"version": ' + b"9" * 5000 + b"}\n",
        )
    ),
    *(
        (errors.NotFinite, None, DATA.replace(b'"threshold": 0.5', b'"threshold": ' + text))
        for text in (b"NaN", b"Infinity", b"-Infinity", b"1e999")
    ),
    *(
        (BadValue, f"{path}.{name}", json.dumps(changed(DOCUMENT, path, {name: "\ud800"})).encode())
        for path, name in (("model", "name"), ("training", "judge"))
    ),
    (
        UnknownField,
        "version",
        DATA.replace(b'"threshold"', b'"version": 1,\n  "threshold"'),
    ),  # a key twice
    (
        DigestMismatch,
        "seal",
        DATA.replace(b'"version": 1', b'"version":  1'),
    ),  # other spellings of the same
    (DigestMismatch, "seal", DATA.replace(b"tiny-llama", rb"tiny\u002dllama")),
    *(
        (BadValue, field, readable_json(DOCUMENT | {field: value}))
        for field in ("digest", "seal")
        for value in ("0" * 64, "md5:" + "0" * 64, "sha256:" + "0" * 63)
    ),
    (DigestMismatch, "digest", readable_json(DOCUMENT | {"threshold": 0.25})),
    *(
        (DigestMismatch, "seal", readable_json(DOCUMENT | change))
        for change in ({"created": "2031-01-01T00:00:00Z"}, {"version": 2})
    ),
    *((errors.Truncated, None, DATA[:length]) for length in range(len(DATA))),
]


def test_damaged_text() -> None:
    for error, field, data in TEXTS:
        refuses(error, field, data)
    for version in (0, 2, 5, "1", True, 1.0):  # another format, before anything else
        document = {"format": "hallutracer-bundle", "format_version": version, "new": 1}
        assert "Train and publish" in refuses(BadValue, "format_version", readable_json(document))


# --- every field, by its type in FIELDS.md ---


@dataclasses.dataclass
class Field:
    """A row of a table of FIELDS.md."""

    kind: str  # its type
    optional: bool  # it is there only where there is something to say


RECORD = Field("object", optional=False)


def documented() -> dict[str, Field]:
    """Each field of the manifest, such as ``context.probes[].weight``."""
    records = ("model", "tokenizer", "chat_template", "readout", "classifier", "training")
    fields = dict.fromkeys(records, RECORD)
    for section in re.split(r"\n###? ", FIELDS.partition("\n## The tensor files")[0])[1:]:
        title = section.partition("\n")[0]
        prefix = {"bundle.json": "", "guarantee_strata": f"{title}[]."}.get(title, f"{title}.")
        for names, kinds, meaning in re.findall(r"(?m)^\| (`.*?) \| (.*?) \| (.*) \|$", section):
            types = re.split(", (?=[a-z])", kinds)
            parent = ""
            for number, name in enumerate(re.findall("`(.*?)`", names)):
                whole = parent + name if name[0] == "." else name
                parent = whole.rpartition(".")[0]
                kind = types[min(number, len(types) - 1)]
                fields[prefix + whole] = Field(kind, meaning.startswith("only where"))
    return fields


def paths(value: Any, path: str = "") -> set[str]:
    """The fields of a manifest, as FIELDS.md names them."""
    if isinstance(value, list):
        return {inner for item in value for inner in paths(item, f"{path}[]")}
    if not isinstance(value, dict) or path in ("files", "chat_template.arguments"):
        return set()
    names = {f"{path}.{key}" if path else key: item for key, item in value.items()}
    return names.keys() | {inner for name, item in names.items() for inner in paths(item, name)}


VALUES: dict[str, Any] = {
    "null": None,
    "bool": True,
    "int": 3,
    "float": 0.5,
    "string": "a text",
    "empty": "",
    "list": [],
    "object": {},
}
# Which of these a type takes that is not called as one of them is.
TAKEN = {"any": {"string", "empty"}, "true": {"bool"}, "choice": set[str]()}
# By type, which FIELDS.md spells so, as JSON the values of its kind that it does not take.
OUTSIDE = {
    kind: json.loads(values)
    for kind, values in cells(
        """
        bool | []
        string | []
        any string | []
        choice | []
        object | []
        float | []
        true | [false]
        int | [1152921504606846976]
        int >= 0 | [-1, 1152921504606846976]
        int >= 1 | [0, 1152921504606846976]
        int >= 2 | [1, 1152921504606846976]
        float >= 0 | [-0.1]
        float > 0 | [0.0, -0.1]
        float in (0, 1) | [0.0, 1.0]
        float in (0, 1] | [0.0, 1.01]
        float in [0, 1] | [-0.01, 1.01]
        """
    )
}


def wrong(kind: str) -> list[Any]:
    """Values that a field of this type does not take; of a digest, which sealing sets, none."""
    if kind == "digest":
        return []
    kind, nullable = kind.removesuffix(" or null"), kind.endswith(" or null")
    item = kind.removeprefix("list of ")
    word = kind.split()[0]
    taken = TAKEN.get(word, {word}) | ({"null"} if nullable else set())
    outside = OUTSIDE[kind] if item == kind else [[value] for value in wrong(item)]
    return [value for name, value in VALUES.items() if name not in taken] + outside


def test_each_field_takes_its_documented_type_and_no_other() -> None:
    fields = documented()
    del fields["guarantee_reads_answers"]
    assert paths(EVERYTHING) == set(fields)
    assert paths(DOCUMENT) & {name for name, field in fields.items() if field.optional} == set()
    for document in (DOCUMENT, EVERYTHING):
        assert manifest_bytes(read_manifest(readable_json(document))) == readable_json(document)
    for path, field in fields.items():
        named = path.replace("[]", "[1]")
        record, _, name = named.rpartition(".")
        without = changed(EVERYTHING, record, {name: GONE})
        if path == "answer":  # which has a file beside it
            refuses(UnknownField, "files.answer.safetensors", without)
        elif field.optional:
            assert manifest_bytes(read_manifest(reseal(without))) == reseal(without)
        else:
            refuses(MissingField, named, readable_json(without))
        for value in wrong(field.kind):
            document = changed(EVERYTHING, record, {name: value})
            if (path, value) == ("answer", None):
                del document["files"]["answer.safetensors"]
            message = refuses(BadValue, named, document)
            for part in ("bundle.json field ", "expected", "found", BundleDamaged.cure):
                assert str(part) in message or path == "format_version"
    for record in {path.rpartition(".")[0].replace("[]", "[1]") for path in fields}:
        document = changed(EVERYTHING, record, {"surprise": 1})
        refuses(UnknownField, f"{record}.surprise".lstrip("."), document)


def test_files() -> None:
    files = DOCUMENT["files"]
    record = {"bytes": 1, "sha256": "0" * 64}
    for name in (
        "weights.pkl",
        "../../escape.png",
        "plots/../../x.png",
        "/etc/passwd",
        "plots/a/b.png",
        "plots/.png",
    ):
        refuses(UnknownField, f"files.{name}", DOCUMENT | {"files": files | {name: record}})
    for name in files.keys() - {"plots/roc.png"}:
        without = {key: value for key, value in files.items() if key != name}
        refuses(MissingField, f"files.{name}", DOCUMENT | {"files": without})
    refuses(MissingField, "files.answer.safetensors", EVERYTHING | {"files": files})
    refuses(
        UnknownField,
        "files.answer.safetensors",
        DOCUMENT | {"files": files | {"answer.safetensors": record}},
    )
    for field, values in (("bytes", (-1, MAX_FILE + 1)), ("sha256", ("0" * 63, "G" * 64))):
        for value in values:
            changes = {"README.md": record | {field: value}}
            refuses(BadValue, f"files.README.md.{field}", DOCUMENT | {"files": files | changes})


# The field that the error names, and as JSON its value, or values of its record that do not go
# together.
UNRELATED = cells(
    r"""
    name | "Tiny"
    name | "../tiny"
    name | "a..b"
    name | "tiny\u000a"
    created | "2026-01-01"
    created | "2026-02-30T00:00:00Z"
    created | "2026-01-01T00:00:00+01:00"
    signals | []
    signals | ["passage"]
    signals | ["depth_mean", "depth_mean"]
    guarantee_shapes | []
    guarantee_shapes | ["alone", "alone"]
    training.shapes | []
    training.shapes | ["a", "a"]
    training.scripts | []
    training.scripts | ["a", "a"]
    training.rows | 3
    training.seeds | []
    guarantee.p_value | 0.06
    guarantee.hallucinated | 101
    guarantee.hallucinated | {"groups": 201}
    guarantee.hallucinated | {"all_groups": 500}
    guarantee.groups | {"threshold": 0.0}
    guarantee.threshold | 0.3
    guarantee_strata[1].p_value | 0.03
    guarantee_strata[1].hallucinated | 61
    guarantee_strata[1].hallucinated | {"groups": 91}
    guarantee_strata[1].hallucinated | {"labelled": 101}
    guarantee_strata[1].groups | {"threshold": 0.0}
    recalibration.a | {"a": 0.0, "b": 0.0}
    recalibration.knots | {"method": "isotonic"}
    recalibration.knots | {"knots": [0.0, 1.0], "values": [0.1, 0.9]}
    recalibration.knots | {"method":"isotonic", "knots":[0.0, 0.5, 0.5], "values":[0.1, 0.2, 0.6]}
    recalibration.knots | {"method":"isotonic", "knots":[0.1, 0.2, 1.0], "values":[0.1, 0.2, 0.6]}
    recalibration.knots | {"method":"isotonic", "knots":[0.0, 0.2, 0.9], "values":[0.1, 0.2, 0.6]}
    recalibration.values | [0.5]
    recalibration.values | {"method":"isotonic", "knots":[0.0, 0.5, 1.0], "values":[0.1, 0.2]}
    recalibration.values | {"method":"isotonic", "knots":[0.0, 0.5, 1.0], "values":[0.1, 0.2, 0.2]}
    recalibration.values | {"method":"isotonic", "knots":[0.0, 0.5, 1.0], "values":[0.0, 0.2, 0.6]}
    recalibration.values | {"method":"isotonic", "knots":[0.0, 0.5, 1.0], "values":[0.1, 0.2, 1.0]}
    context.probes[2].positive | 100
    context.probes[2].positive | {"rows": 60}
    answer.hallucinated | 300
    answer.hallucinated | {"rows": 120}
    chat_template.arguments | {"arguments": {}}
    chat_template.arguments | {"arguments": {"": 1}}
    chat_template.arguments | {"arguments": {"a b": 1}}
    chat_template.arguments | {"arguments": {"messages": "x"}}
    chat_template.arguments | {"arguments": {"tools": false}}
    chat_template.arguments | {"arguments": {"tokenize": true}}
    chat_template.arguments | {"arguments": {"a": null}}
    chat_template.arguments | {"arguments": {"a": [1]}}
    chat_template.arguments | {"arguments": {"a": {"b": 1}}}
    chat_template.arguments | {"arguments": {"a": "\u000a"}}
    chat_template.arguments | {"arguments": {"a": 1152921504606846976}}
    """
)
TOO_LARGE: list[tuple[str, Any]] = [
    ("name", "a" * 65),
    ("chat_template.arguments", {"arguments": dict.fromkeys("abcdefghijklmnopq", 1)}),
    *(("chat_template.arguments", {"arguments": {"a": a}}) for a in ("x" * 257, 10**400)),
]


def test_values_that_do_not_go_together_are_refused_by_name() -> None:
    for field, value in (*((name, json.loads(text)) for name, text in UNRELATED), *TOO_LARGE):
        record, _, name = field.rpartition(".")
        change = value if isinstance(value, dict) else {name: value}
        refuses(BadValue, field, changed(EVERYTHING, record, change))
    weights = changed(EVERYTHING, "classifier", {"weight": [1.0, 2.0]})
    refuses(errors.WrongShape, "classifier.weight", weights)
    for threshold in (0.0, 1.0):  # which a guarantee alone may have
        refuses(BadValue, "threshold", DOCUMENT | {"threshold": threshold})


# Probes, applicability and signals that do not go together, and what is refused.
TOGETHER: list[tuple[tuple[ContextProbe, ...] | None, Applicability | None, Sequence[str], str]] = [
    ((), None, ("depth_mean",), "context.probes"),
    ((PASSAGE, STATED, PASSAGE), None, READING, "context.probes"),
    ((PASSAGE,), None, READING, "context.probes"),
    ((PASSAGE,), None, ("depth_mean", "passage", "stated_length"), "context.probes"),
    (
        (STATED,),
        None,
        ("depth_mean", "stated"),
        "context.probes",
    ),  # the signal is P(passage) P(stated)
    ((ASKS,), f.APPLICABILITY, ("depth_mean", "passage"), "context.probes"),
    ((PASSAGE, STATED), f.APPLICABILITY, READING, "context.applicability"),
    ((ASKS, PASSAGE, STATED), None, READING, "context.applicability"),
    (None, None, ("depth_mean", "stated_length"), "context"),
]


def test_probes_signals_and_applicability_go_together() -> None:
    for probes, applicability, wrong, field in TOGETHER:
        given = None if probes is None else dataclasses.asdict(Context(probes, applicability))
        document = changed(EVERYTHING, "", {"context": given, "signals": list(wrong)})
        document["classifier"]["weight"] = [1.5] * len(wrong)
        refuses(BadValue, field, document)
    for context, signals in (
        (Context((ASKS,), f.APPLICABILITY), ("depth_mean", "entropy")),
        (Context((STATED, PASSAGE), None), (*READING, "stated_length")),
        (Context((PASSAGE,), None), ("depth_mean", "passage")),
    ):
        assert render(make_draft(context=context, signals=signals))[0].context == context
    assert [CONTEXT.position(name) for name in ("asks", "passage", "stated")] == [0, 1, 2]
    assert Context((PASSAGE,), None).position("asks") is None


def test_a_closed_gate_has_threshold_0_and_shapes_belong_to_a_guarantee() -> None:
    closed = f.guaranteed(threshold=0.0, groups=0, hallucinated=0, p_value=1.0, answered=0.0)
    record = render(closed)[0].guarantee
    assert record is not None
    assert record.closed
    with pytest.raises(BadValue, match="guarantee_shapes"):
        render(make_draft(guarantee_shapes=("alone",)))


def test_a_guarantee_of_answers_that_were_read_needs_both() -> None:
    manifest, _ = render(make_draft(**PROMISED, answer=ANSWER, guarantee_reads_answers=True))
    assert manifest.guarantee_reads_answers
    for without in ({"answer": ANSWER}, PROMISED):
        with pytest.raises(BadValue, match="guarantee_reads_answers"):
            render(make_draft(**without, guarantee_reads_answers=True))
    for value in wrong(documented()["guarantee_reads_answers"].kind):
        refuses(
            BadValue, "guarantee_reads_answers", EVERYTHING | {"guarantee_reads_answers": value}
        )


def test_strata_are_those_of_a_guarantee_whose_threshold_is_the_strictest() -> None:
    alone, beside = f.STRATA
    made = render(make_draft(**PROMISED, guarantee_strata=f.STRATA))[0]
    assert [made.threshold_for(passage) for passage in (False, True, None)] == [0.25, 0.5, 0.25]
    assert (made.stratum(True), made.stratum(None), made.loosest_threshold) == (beside, None, 0.5)
    older = render(make_draft(**PROMISED))[0]
    assert [older.threshold_for(passage) for passage in (False, True, None)] == [0.25] * 3
    for field, wrong in (
        ("guarantee_strata", {"guarantee_strata": f.STRATA}),
        ("guarantee_strata", PROMISED | {"guarantee_strata": ()}),
        ("guarantee_strata", PROMISED | {"guarantee_strata": (alone, alone)}),
        ("threshold", PROMISED | {"guarantee_strata": (beside,)}),
    ):
        with pytest.raises(BadValue) as caught:
            render(make_draft(**wrong))
        assert caught.value.field == field


def test_digest_ignores_time_and_version_and_the_seal_does_not() -> None:
    later = sealed(MANIFEST, version=7, created="2030-01-01T00:00:00Z")
    assert (later.digest, later.version) == (MANIFEST.digest, 7)
    assert later.seal != MANIFEST.seal
    assert dataclasses.replace(sealed(FULL, version=2), version=1, seal=FULL.seal) == FULL
    assert sealed(dataclasses.replace(MANIFEST, threshold=0.25)).digest != MANIFEST.digest
    other = {key: value for key, value in DOCUMENT.items() if key != "seal"} | {
        "digest": "sha256:" + "0" * 64
    }
    right_seal = {"seal": "sha256:" + sha256(canonical_json(other))}
    refuses(DigestMismatch, "digest", readable_json(other | right_seal))


def test_the_half_width_and_what_a_recalibration_does() -> None:
    for log_odds, distance, square in ((0.5, 0.0, 0.04), (2.5, 0.0, 0.08), (0.5, 2.0, 1.04)):
        assert f.INTERVAL.half_width(log_odds, distance) == pytest.approx(math.sqrt(square))
    risk = np.array([[0.1, 0.5], [0.9, 0.99]])
    np.testing.assert_allclose(PLATT(risk), expit(0.5 * logit(risk) - 1.0), rtol=1e-12)
    beta = Recalibration("beta", 0.5, 2.0, 0.3)
    np.testing.assert_allclose(
        beta(risk), expit(0.5 * np.log(risk) - 2 * np.log1p(-risk) + 0.3), rtol=1e-12
    )
    assert STEPS(np.array([0.0, 0.125, 0.25, 0.75, 1.0])).tolist() == pytest.approx(
        [0.1, 0.15, 0.2, 0.75, 0.9]
    )
    for recalibration in (PLATT, STEPS, Recalibration("beta", 0.0, 1.0, 0.0)):
        assert math.isnan(float(recalibration(math.nan)))
        assert 0 <= float(recalibration(0.0)) < float(recalibration(1.0)) <= 1
    for recalibration, level in product((PLATT, STEPS), (0.15, 0.5, 0.61)):
        least = least_reaching(recalibration, level)
        assert recalibration(least) >= level > recalibration(math.nextafter(least, 0.0))
    assert least_reaching(STEPS, 0.95) == 1.0
    assert least_reaching(STEPS, 0.05) < 1e-300


def test_the_decoding_of_answers_is_greedy_where_training_generated_them() -> None:
    for labels, recorded, decoding in (
        ("given", None, None),
        ("generate", None, GREEDY),
        ("given", GREEDY, GREEDY),
        ("given", SAMPLED, SAMPLED),
    ):
        training = dataclasses.replace(TRAINING, labels=labels, decoding=recorded)
        manifest = render(make_draft(training=training))[0]
        assert (manifest.decoding, manifest.calibrated_decoding) == (decoding, decoding or GREEDY)
    warm = dataclasses.replace(TRAINING, decoding=SAMPLED)
    for labels, calibrated in (("given", SAMPLED), ("generate", GREEDY)):
        promise = PROMISED | {"guarantee": dataclasses.replace(GUARANTEE, labels=labels)}
        assert render(make_draft(training=warm, **promise))[0].calibrated_decoding == calibrated
    for decoding, words in (
        (GREEDY, "greedy"),
        (Decoding(0.0, 0.5), "greedy"),
        (Decoding(1.0, 1.0), "sampled at temperature 1"),
        (SAMPLED, "sampled at temperature 0.7, top_p 0.9"),
    ):
        assert str(decoding) == words
        assert decoding.same(decoding)
        assert decoding.same(GREEDY) == (decoding.temperature == 0)


# --- errors ---


def tree(kind: type[errors.BundleError]) -> list[type[errors.BundleError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


def test_each_error_has_a_code_and_a_docstring_of_its_own() -> None:
    kinds = tree(errors.BundleError)
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all("code" in vars(kind) and 400 <= kind.status < 600 and kind.__doc__ for kind in kinds)
    some = (errors.BundleNotFound, errors.DigestMismatch, errors.HubMissing, errors.OpenStore)
    assert [kind.status for kind in some] == [404, 503, 404, 503]


def test_a_message_names_file_field_expected_found_and_cure() -> None:
    error = errors.BadValue(
        "bad value", file="a/1/bundle.json", field="threshold", expected="a", found="b" * 1000
    )
    message = str(error)
    assert message.startswith("a/1/bundle.json field threshold: bad value; expected a, found bbb")
    assert "1000 characters" in message
    assert message.endswith(errors.BundleDamaged.cure or "never")
    assert len(message) < 400
