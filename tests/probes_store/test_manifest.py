"""The manifest and its records: strict, sealed, of one format; and the model that it names."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logit

from probes_store import errors
from probes_store.bundle import render
from probes_store.errors import BadValue, BundleDamaged, DigestMismatch, MissingField, UnknownField, WrongShape
from probes_store.manifest import MAX_FILE, check_identity, manifest_bytes, read_manifest, sealed
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
from service.engines.base import ModelIdentity
from service.readout import Geometry
from tests.probes_store.factory import (
    ANSWER,
    APPLICABILITY,
    ASKS,
    CONTEXT,
    GUARANTEE,
    INTERVAL,
    MODEL,
    PASSAGE,
    STATED,
    STRATA,
    TRAINING,
    UNCERTAINTY,
    guaranteed,
    make_draft,
)
from tests.probes_store.reseal import reseal, sha256

MANIFEST = render(make_draft())[0]
DATA = manifest_bytes(MANIFEST)
DOCUMENT: dict[str, Any] = json.loads(DATA)
PLATT = Recalibration("platt", 0.5, 0.5, -1.0)
STEPS = Recalibration("isotonic", knots=(0.0, 0.25, 0.5, 1.0), values=(0.1, 0.2, 0.6, 0.9))
READING = ("depth_mean", "passage", "stated")
FULL = make_draft(
    context=CONTEXT, signals=READING, guarantee=GUARANTEE, threshold=GUARANTEE.threshold, uncertainty=UNCERTAINTY,
    recalibration=PLATT, guarantee_shapes=("alone", "a chat"), answer=ANSWER,
    guarantee_strata=STRATA,
)  # fmt: skip
EVERYTHING: dict[str, Any] = json.loads(manifest_bytes(render(FULL)[0]))


def at(document: Any, path: Sequence[str]) -> Any:
    for key in path:
        document = document[int(key) if key.isdigit() else key]
    return document


def changed(document: dict[str, Any], path: Sequence[str], change: dict[str, Any]) -> dict[str, Any]:
    """A copy, where the record at this path has other values."""
    document = json.loads(json.dumps(document))
    at(document, path).update(change)
    return document


def refuses(error: type[BundleDamaged], field: str | None, data: bytes | dict[str, Any]) -> str:
    """Reading fails with exactly this error, whose field begins so; a document is sealed anew.  The message."""
    with pytest.raises(BundleDamaged) as caught:
        read_manifest(data if isinstance(data, bytes) else reseal(data))
    assert type(caught.value) is error, caught.value
    assert field is None or str(caught.value.field).startswith(field), caught.value
    return caught.value.message


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
    assert canonical_json(parse_json(readable_json(value), "x.json")) == canonical_json(value)
    assert plain(value, "x.json") == value


TEXTS: list[tuple[type[BundleDamaged], str | None, bytes]] = [
    *((BadValue, None, data) for data in (b"\xff\xfe}\n", b"[" * 100_000 + b"}\n", b"{,}\n", b"[]\n",
                                         b'{"version": ' + b"9" * 5000 + b"}\n")),
    *((errors.NotFinite, None, DATA.replace(b'"threshold": 0.5', b'"threshold": ' + text))
      for text in (b"NaN", b"Infinity", b"-Infinity", b"1e999")),
    *((BadValue, ".".join([*path, name]), json.dumps(changed(DOCUMENT, path, {name: "tiny\ud800llama"})).encode())
      for path, name in ((["model"], "name"), (["training"], "judge"))),
    (UnknownField, "version", DATA.replace(b'"threshold"', b'"version": 1,\n  "threshold"')),  # a key twice
    (DigestMismatch, "seal", DATA.replace(b'"version": 1', b'"version":  1')),  # other spellings of the same
    (DigestMismatch, "seal", DATA.replace(b"tiny-llama", rb"tiny\u002dllama")),
    *((BadValue, field, readable_json(DOCUMENT | {field: value})) for field in ("digest", "seal")
      for value in ("0" * 64, "md5:" + "0" * 64, "sha256:" + "0" * 63)),
    (DigestMismatch, "digest", readable_json(DOCUMENT | {"threshold": 0.25})),
    *((DigestMismatch, "seal", readable_json(DOCUMENT | change))
      for change in ({"created": "2031-01-01T00:00:00Z"}, {"version": 2})),
    *((errors.Truncated, None, DATA[:length]) for length in range(len(DATA))),
]  # fmt: skip


def test_damaged_text() -> None:
    for error, field, data in TEXTS:
        refuses(error, field, data)
    for found in (0, 2, 5, "1", True, 1.0):  # another format, before anything else
        document = {"format": "hallutracer-bundle", "format_version": found, "new": 1}
        assert "Train and publish" in refuses(BadValue, "format_version", readable_json(document))


def objects(value: Any, where: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all records in the document; ``files`` maps names, so it is none."""
    if not isinstance(value, dict):
        return []
    own = [] if where == ("files",) else [where]
    return own + [path for key, item in value.items() for path in objects(item, (*where, key))]


def test_unknown_and_missing_fields_and_files() -> None:
    for document in (DOCUMENT, EVERYTHING):
        assert manifest_bytes(read_manifest(readable_json(document))) == readable_json(document)
    for path in objects(EVERYTHING):
        refuses(UnknownField, ".".join((*path, "surprise")), changed(EVERYTHING, path, {"surprise": 1}))
        for field in at(EVERYTHING, path):
            edited = changed(EVERYTHING, path, {})
            del at(edited, path)[field]
            if (*path, field) == ("answer",):  # the one record that may be absent; then its file is unknown
                refuses(UnknownField, "files.answer.safetensors", edited)
            elif (*path, field) == ("guarantee_strata",):  # of bundles before there were any
                assert read_manifest(reseal(edited)).guarantee_strata is None
            else:
                refuses(MissingField, ".".join((*path, field)), edited)
    files, record = DOCUMENT["files"], {"bytes": 1, "sha256": "0" * 64}
    for name in ("weights.pkl", "../../escape.png", "plots/../../x.png", "/etc/passwd", "plots/a/b.png", "plots/.png"):
        refuses(UnknownField, f"files.{name}", DOCUMENT | {"files": files | {name: record}})
    for name in ("probes.safetensors", "golden.safetensors", "evaluation.json", "README.md"):
        without = {key: value for key, value in files.items() if key != name}
        refuses(MissingField, f"files.{name}", DOCUMENT | {"files": without})
    refuses(MissingField, "files.answer.safetensors", EVERYTHING | {"files": files})
    refuses(UnknownField, "files.answer.safetensors", DOCUMENT | {"files": files | {"answer.safetensors": record}})


# Of DOCUMENT: the record's path, a field and values that it does not take.
BAD: list[tuple[str, str, list[Any]]] = [
    ("", "format", ["pickle"]), ("", "format_version", [0, True, 1.0]), ("", "version", [0, 1.0, True, "1", 2**60]),
    ("", "name", ["Tiny", "../tiny", "a..b", "tiny\n", "", "a" * 65]),
    ("", "created", ["yesterday", "2026-02-30T00:00:00Z", "2026-01-01T00:00:00+01:00"]), ("", "model", [[]]),
    ("model", "num_layers", [0]), ("model", "fingerprint", [""]), ("model", "name", [None]),
    ("tokenizer", "digest", [""]), ("chat_template", "digest", ["", 3]), ("", "prompt_format", ["xml"]),
    ("", "dtype", ["float64"]), ("readout", "site", ["mlp"]), ("readout", "position", ["first"]),
    ("", "logit_scale", ["plain"]), ("classifier", "weight", [[1], ["1.0"]]), ("classifier", "intercept", [0]),
    ("", "signals", [[], ["entropy"], ["depth_mean", "depth_mean"], "depth_mean", ["depth_mean", "length"]]),
    ("", "threshold", [0.0, 1.0, "0.5", 1, None]), ("training", "labels", ["guessed"]),
    ("training", "seeds", [[], [0.5]]), ("training", "folds", [1]), ("training", "c", [0.0, -1.0]),
    ("training", "c_grid", [[0.1, -1.0]]), ("training", "rows", [3]), ("training", "factual", [0]),
    ("training", "left_out", [-1]), ("training", "data_digest", [""]), ("", "uncertainty", [None]),
    ("files/README.md", "bytes", [-1, MAX_FILE + 1]), ("files/README.md", "sha256", ["0" * 63, "G" * 64]),
]  # fmt: skip


# Changes of EVERYTHING that make no sense, and the field that the error names where it is another one.
SENSELESS: dict[str, list[dict[str, Any]]] = {
    "guarantee": [
        {"alpha": 0.0}, {"delta": 1.0}, {"p_value": 0.06}, {"answered": 1.5}, {"risk_control_threshold": -0.5},
        {"hallucinated": 101}, {"groups": 201, "named": "hallucinated"}, {"all_groups": 500, "named": "hallucinated"},
        {"data_digest": ""}, {"statement": ""}, {"seed": -1}, {"dtype": "float64"}, {"labels": "guessed"},
        {"threshold": 0.0, "named": "groups"}, {"threshold": 1.5}, {"threshold": 0.3},
    ],
    "guarantee_strata/1": [
        {"passage": 1}, {"passage": None}, {"delta": 0.0}, {"threshold": 1.5}, {"p_value": 0.03}, {"answered": -0.1},
        {"hallucinated": 61}, {"groups": 91, "named": "hallucinated"}, {"labelled": 101, "named": "hallucinated"},
    ],
    "uncertainty": [{"outside_share": 0.0}, {"outside_share": 1.0}, {"outside_rows": 0}, {"statement": ""}],
    "uncertainty/interval": [
        {"level": 1.0}, {"fits": 1}, {"base": -0.1}, {"by_log_odds": -0.1}, {"by_distance": -0.1}, {"centre": "0"},
    ],
    "recalibration": [
        {"method": "beta", "a": -0.1}, {"b": -0.1}, {"a": 0.0, "b": 0.0}, {"method": "isotonic", "named": "knots"},
        {"method": "identity"}, {"knots": [0.0, 1.0], "values": [0.1, 0.9]}, {"values": [0.5]},
        *({"method": "isotonic", "knots": list(STEPS.knots), "values": values, "named": "values"}
          for values in ([0.1, 0.2, 0.6], [0.1, 0.2, 0.2, 0.9], [0.0, 0.2, 0.6, 0.9], [0.1, 0.2, 0.6, 1.0])),
        *({"method": "isotonic", "knots": knots, "values": list(STEPS.values), "named": "knots"}
          for knots in ([0.0, 0.5, 0.5, 1.0], [0.1, 0.2, 0.5, 1.0], [0.0, 0.2, 0.5, 0.9])),
    ],
    "context/probes/2": [
        {"weight": 0.0}, {"weight": -1.0}, {"positive": 0}, {"positive": 100}, {"rows": 60, "named": "positive"},
        {"auroc": -0.01}, {"auroc": 1.01}, {"name": "other"},
    ],
    "context/applicability": [
        {"threshold": 0.0}, {"threshold": 1.0}, {"questions_below": -0.01}, {"questions_below": 1.01},
        {"others_above": -0.01}, {"others_above": 1.01}, {"statement": ""},
    ],
    "answer": [
        {"weight": 1}, {"intercept": "0"}, {"threshold": 0.0}, {"threshold": 1.0}, {"rows": 1}, {"hallucinated": 0},
        {"hallucinated": 300}, {"rows": 120, "named": "hallucinated"}, {"auroc": -0.01}, {"auroc": 1.01},
        {"before": -0.01}, {"before": 1.01}, {"c": 0.0}, {"statement": ""},
    ],
    "classifier": [{"weight": [1.0, 2.0]}],
    "": [{"guarantee_shapes": shapes} for shapes in ([], ["alone", "alone"], ["alone", ""])],
}  # fmt: skip


def test_bad_values_and_senseless_records_are_refused_by_name() -> None:
    cases = [(DOCUMENT, where, field, {field: value}) for where, field, values in BAD for value in values]
    for where, changes in SENSELESS.items():
        for change in changes:
            named = change.get("named", next(name for name in change if name != "method" or len(change) == 1))
            cases.append((EVERYTHING, where, named, {key: change[key] for key in change if key != "named"}))
    for document, where, named, change in cases:
        path = where.split("/") if where else []
        error = WrongShape if document is EVERYTHING and where == "classifier" else BadValue
        field = ".".join([*path, named]).replace(".2.", "[2].").replace(".1.", "[1].")
        said = refuses(error, field, changed(document, path, change))
        for part in ("bundle.json field ", "expected", "found", BundleDamaged.default_cure or "never"):
            assert part in said or named == "format_version"


# Probes, applicability and signals that do not go together, and what is refused.
TOGETHER: list[tuple[tuple[ContextProbe, ...] | None, Applicability | None, Sequence[str], str]] = [
    ((), None, ("depth_mean",), "context.probes"),
    ((PASSAGE, STATED, PASSAGE), None, READING, "context.probes"),
    ((PASSAGE,), None, READING, "context.probes"),
    ((PASSAGE,), None, ("depth_mean", "passage", "stated_length"), "context.probes"),
    ((STATED,), None, ("depth_mean", "stated"), "context.probes"),  # the signal is P(passage) P(stated)
    ((ASKS,), APPLICABILITY, ("depth_mean", "passage"), "context.probes"),
    ((PASSAGE, STATED), APPLICABILITY, READING, "context.applicability"),
    ((ASKS, PASSAGE, STATED), None, READING, "context.applicability"),
    (None, None, ("depth_mean", "stated_length"), "context"),
]


def test_probes_signals_and_applicability_go_together() -> None:
    for probes, applicability, wrong, field in TOGETHER:
        given = None if probes is None else dataclasses.asdict(Context(probes, applicability))
        document = changed(EVERYTHING, [], {"context": given, "signals": list(wrong)})
        document["classifier"]["weight"] = [1.5] * len(wrong)
        refuses(BadValue, field, document)
    for context, signals in (
        (Context((ASKS,), APPLICABILITY), ("depth_mean", "entropy")),
        (Context((STATED, PASSAGE), None), (*READING, "stated_length")),
        (Context((PASSAGE,), None), ("depth_mean", "passage")),
    ):
        assert render(make_draft(context=context, signals=signals))[0].context == context
    assert [CONTEXT.position(name) for name in ("asks", "passage", "stated")] == [0, 1, 2]
    assert Context((PASSAGE,), None).position("asks") is None


def test_a_closed_gate_has_threshold_0_and_shapes_belong_to_a_guarantee() -> None:
    closed = guaranteed(threshold=0.0, groups=0, hallucinated=0, p_value=1.0, answered=0.0)
    record = render(closed)[0].guarantee
    assert record is not None
    assert record.closed
    with pytest.raises(BadValue, match="guarantee_shapes"):
        render(make_draft(guarantee_shapes=("alone",)))


def test_a_guarantee_of_answers_that_were_read_needs_both() -> None:
    promised: dict[str, Any] = {"guarantee": GUARANTEE, "threshold": GUARANTEE.threshold}
    assert render(make_draft(**promised, answer=ANSWER, guarantee_reads_answers=True))[0].guarantee_reads_answers
    for without in ({"answer": ANSWER}, promised):
        with pytest.raises(BadValue, match="guarantee_reads_answers"):
            render(make_draft(**without, guarantee_reads_answers=True))
    assert "guarantee_reads_answers" not in EVERYTHING
    for value in (None, False, 1, "true"):
        refuses(BadValue, "guarantee_reads_answers", EVERYTHING | {"guarantee_reads_answers": value})


def test_strata_are_those_of_a_guarantee_whose_threshold_is_the_strictest() -> None:
    alone, beside = STRATA
    made = render(make_draft(guarantee=GUARANTEE, threshold=0.25, guarantee_strata=STRATA))[0]
    assert [made.threshold_for(passage) for passage in (False, True, None)] == [0.25, 0.5, 0.25]
    assert (made.stratum(True), made.stratum(None), made.loosest_threshold) == (beside, None, 0.5)
    older = render(make_draft(guarantee=GUARANTEE, threshold=0.25))[0]
    assert [older.threshold_for(passage) for passage in (False, True, None)] == [0.25] * 3
    assert b"guarantee_strata" not in manifest_bytes(older)
    for field, wrong in (
        ("guarantee_strata", {"guarantee": None, "threshold": 0.25, "guarantee_strata": STRATA}),
        ("guarantee_strata", {"guarantee": GUARANTEE, "threshold": 0.25, "guarantee_strata": ()}),
        ("guarantee_strata", {"guarantee": GUARANTEE, "threshold": 0.25, "guarantee_strata": (alone, alone)}),
        ("threshold", {"guarantee": GUARANTEE, "threshold": 0.25, "guarantee_strata": (beside,)}),
    ):
        with pytest.raises(BadValue) as caught:
            render(make_draft(**wrong))
        assert caught.value.field == field
    refuses(BadValue, "guarantee_strata", EVERYTHING | {"guarantee_strata": None})


def test_digest_ignores_time_and_version_and_the_seal_does_not() -> None:
    later = sealed(MANIFEST, version=7, created="2030-01-01T00:00:00Z")
    assert (later.digest, later.version) == (MANIFEST.digest, 7)
    assert later.seal != MANIFEST.seal
    assert sealed(dataclasses.replace(MANIFEST, threshold=0.25)).digest != MANIFEST.digest
    other = {key: value for key, value in DOCUMENT.items() if key != "seal"} | {"digest": "sha256:" + "0" * 64}
    right_seal = {"seal": "sha256:" + sha256(canonical_json(other))}
    refuses(DigestMismatch, "digest", readable_json(other | right_seal))


def test_the_half_width_and_what_a_recalibration_does() -> None:
    for log_odds, distance, square in ((0.5, 0.0, 0.04), (2.5, 0.0, 0.08), (0.5, 2.0, 1.04)):
        assert INTERVAL.half_width(log_odds, distance) == pytest.approx(math.sqrt(square))
    risk = np.array([[0.1, 0.5], [0.9, 0.99]])
    np.testing.assert_allclose(PLATT(risk), expit(0.5 * logit(risk) - 1.0), rtol=1e-12)
    beta = Recalibration("beta", 0.5, 2.0, 0.3)
    np.testing.assert_allclose(beta(risk), expit(0.5 * np.log(risk) - 2 * np.log1p(-risk) + 0.3), rtol=1e-12)
    assert STEPS(np.array([0.0, 0.125, 0.25, 0.75, 1.0])).tolist() == pytest.approx([0.1, 0.15, 0.2, 0.75, 0.9])
    for recalibration in (PLATT, STEPS, Recalibration("beta", 0.0, 1.0, 0.0)):
        assert math.isnan(float(recalibration(math.nan)))
        assert 0 <= float(recalibration(0.0)) < float(recalibration(1.0)) <= 1
    for recalibration, level in product((PLATT, STEPS), (0.15, 0.5, 0.61)):
        least = least_reaching(recalibration, level)
        assert recalibration(least) >= level > recalibration(math.nextafter(least, 0.0))
    assert least_reaching(STEPS, 0.95) == 1.0
    assert least_reaching(STEPS, 0.05) < 1e-300


LOADED = ModelIdentity(
    model="/another/folder", revision="local", fingerprint=MODEL.fingerprint, architecture=MODEL.architecture,
    model_type=MODEL.model_type, tokenizer=MANIFEST.tokenizer.digest, chat_template=MANIFEST.chat_template.digest,
    dtype="bfloat16", geometry=Geometry(3, 2, 4, 8), max_tokens=64,
)  # fmt: skip
OTHER = "sha256:" + "9" * 64
# In the order in which they are checked.
WRONG: list[tuple[type[errors.BundleRefused], str, dict[str, Any]]] = [
    (errors.WrongModel, "model.architecture", {"architecture": "GPT2LMHeadModel"}),
    (errors.WrongModel, "model.fingerprint", {"fingerprint": OTHER}),
    (errors.WrongModel, "model.adapter", {"adapter": OTHER}),
    *((errors.WrongGeometry, f"model.{size}", {"geometry": Geometry(*shape)}) for size, shape in (
        ("num_layers", (4, 2, 4, 8)), ("num_heads", (3, 1, 4, 8)), ("head_dim", (3, 2, 8, 8)),
        ("hidden_size", (3, 2, 4, 16)))),
    (errors.WrongTokenizer, "tokenizer.digest", {"tokenizer": OTHER}),
    *((errors.WrongChatTemplate, "chat_template.digest", {"chat_template": other}) for other in (OTHER, None)),
    (errors.WrongChatTemplate, "chat_template.arguments", {"template_arguments": {"enable_thinking": False}}),
]  # fmt: skip


def test_each_difference_of_the_model_has_its_own_error_and_the_first_in_order_is_named() -> None:
    check_identity(MANIFEST, LOADED)  # under another name and dtype
    bare = render(make_draft(chat_template=None))[0]
    check_identity(bare, dataclasses.replace(LOADED, chat_template=None))
    with pytest.raises(errors.WrongChatTemplate, match="expected none"):
        check_identity(bare, LOADED)
    for first, (error, field, own) in enumerate(WRONG):
        later = {key: value for _, _, change in reversed(WRONG[first:]) for key, value in change.items()}
        for changes in (own, later):
            with pytest.raises(errors.BundleRefused) as caught:
                check_identity(MANIFEST, dataclasses.replace(LOADED, **changes))
            assert (type(caught.value), caught.value.field) == (error, field)
            for part in ("tiny:1", "tiny-llama at revision local", "expected", "found"):
                assert part in caught.value.message


def test_other_weights_of_the_same_repository_are_another_revision_and_the_same_weights_are_none() -> None:
    hub, other = "a" * 40, "b" * 40
    own = render(make_draft(model={"name": "acme/tiny", "revision": hub}))[0]
    served = dataclasses.replace(LOADED, model="acme/tiny", revision=other)
    for same in ({}, {"revision": hub}, {"revision": "local"}, {"model": "elsewhere/tiny"}):
        check_identity(own, dataclasses.replace(served, **same))
    check_identity(MANIFEST, served)  # of a folder, or of a version that recorded no commit
    with pytest.raises(errors.WrongRevision, match=f"acme/tiny at revision {hub}.*--revision {hub}") as caught:
        check_identity(own, dataclasses.replace(served, fingerprint=OTHER))
    assert (caught.value.field, caught.value.expected, caught.value.found) == ("model.revision", hub, other)
    for known in ({"revision": hub}, {"revision": "local"}, {"model": "elsewhere/tiny"}):
        with pytest.raises(errors.WrongModel):
            check_identity(own, dataclasses.replace(served, fingerprint=OTHER, **known))


def test_an_adapter_is_named_where_there_is_one_and_no_field_where_there_is_none() -> None:
    assert "adapter" not in DOCUMENT["model"]
    tuned = render(make_draft(model={"adapter": OTHER}))[0]
    data = manifest_bytes(tuned)
    assert json.loads(data)["model"] == DOCUMENT["model"] | {"adapter": OTHER}
    assert read_manifest(data) == tuned
    assert sealed(tuned, version=2).model.adapter == OTHER
    for wrong in (None, "", 3):
        refuses(BadValue, "model.adapter", changed(DOCUMENT, ["model"], {"adapter": wrong}))
    check_identity(tuned, dataclasses.replace(LOADED, adapter=OTHER))
    with pytest.raises(errors.WrongModel, match="another adapter.*expected sha256:9.*found none.*Load the adapter of"):
        check_identity(tuned, LOADED)


def test_template_arguments_are_recorded_where_there_are_any_and_there_is_no_field_where_there_are_none() -> None:
    assert "arguments" not in DOCUMENT["chat_template"]
    arguments = {"enable_thinking": False, "style": "kurz, bitte", "most": 3, "share": 0.5}
    made = render(make_draft(template_arguments=arguments))[0]
    data = manifest_bytes(made)
    assert read_manifest(data) == made
    assert made.chat_template.arguments == arguments
    check_identity(made, dataclasses.replace(LOADED, template_arguments=arguments))
    with pytest.raises(errors.WrongChatTemplate, match="other arguments of the chat template.*Serve it by a process"):
        check_identity(made, LOADED)
    names = [{"": 1}, {"a b": 1}, {"messages": "x"}, {"tools": False}, {"tokenize": True}]
    values = [{"a": value} for value in (None, [1], {"b": 1}, "x" * 257, "\n", 2**60)]
    for wrong in (None, {}, [], "x", *names, *values, {f"a{number}": 1 for number in range(17)}):
        refuses(BadValue, "chat_template.arguments", changed(DOCUMENT, ["chat_template"], {"arguments": wrong}))


def test_a_decoding_is_recorded_where_it_is_known_and_there_is_no_field_where_it_is_not() -> None:
    assert "decoding" not in DOCUMENT["training"]
    assert MANIFEST.decoding is None
    assert MANIFEST.calibrated_decoding == GREEDY
    for labels, recorded, decoding in (
        ("generate", None, GREEDY), ("given", GREEDY, GREEDY), ("given", Decoding(0.7, 0.9), Decoding(0.7, 0.9)),
    ):  # fmt: skip
        training = dataclasses.replace(TRAINING, labels=labels, decoding=recorded)
        made = render(make_draft(training=training))[0]
        data = manifest_bytes(made)
        assert read_manifest(data) == made
        assert ("decoding" in json.loads(data)["training"]) == (recorded is not None)
        assert made.decoding == made.calibrated_decoding == decoding
    warm = dataclasses.replace(TRAINING, decoding=Decoding(0.7, 0.9))
    for labels, calibrated in (("given", Decoding(0.7, 0.9)), ("generate", GREEDY)):
        guarantee = dataclasses.replace(GUARANTEE, labels=labels)
        made = render(make_draft(training=warm, guarantee=guarantee, threshold=GUARANTEE.threshold))[0]
        assert made.calibrated_decoding == calibrated
    for wrong in (None, {}, {"temperature": 1.0}, {"temperature": -0.1, "top_p": 1.0}, {"temperature": 0, "top_p": 1.0},
                  {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1.0, "top_p": 1.5}, "greedy",
                  {"temperature": 1.0, "top_p": 1.0, "top_k": 5}):  # fmt: skip
        with pytest.raises(BundleDamaged) as caught:
            read_manifest(reseal(changed(DOCUMENT, ["training"], {"decoding": wrong})))
        assert str(caught.value.field).startswith("training.decoding")


def test_the_shapes_of_trainings_conversations_are_recorded_where_they_are_known() -> None:
    assert "shapes" not in DOCUMENT["training"], "bundles of before keep their bytes"
    training = dataclasses.replace(TRAINING, shapes=("no passage", "a passage"))
    made = render(make_draft(training=training))[0]
    data = manifest_bytes(made)
    assert read_manifest(data) == made
    assert json.loads(data)["training"]["shapes"] == ["no passage", "a passage"]
    for wrong in (None, [], [""], ["a", "a"], "a", [3]):
        with pytest.raises(BundleDamaged) as caught:
            read_manifest(reseal(changed(DOCUMENT, ["training"], {"shapes": wrong})))
        assert str(caught.value.field).startswith("training.shapes")


@pytest.mark.parametrize(
    ("decoding", "words"),
    [(GREEDY, "greedy"), (Decoding(0.0, 0.5), "greedy"), (Decoding(1.0, 1.0), "sampled at temperature 1"),
     (Decoding(0.7, 0.9), "sampled at temperature 0.7, top_p 0.9")],
)  # fmt: skip
def test_a_decoding_in_words(decoding: Decoding, words: str) -> None:
    assert str(decoding) == words
    assert decoding.same(decoding)
    assert decoding.same(GREEDY) == (decoding.temperature == 0)


def test_an_answer_probe_has_a_record_and_there_is_no_field_where_there_is_none() -> None:
    assert "answer" not in DOCUMENT
    full = render(FULL)[0]
    assert (full.answer, read_manifest(manifest_bytes(full))) == (ANSWER, full)
    assert EVERYTHING["answer"] == dataclasses.asdict(ANSWER)
    assert sealed(full, version=2).answer == ANSWER
    for document in (DOCUMENT, EVERYTHING):
        files = {name: one for name, one in document["files"].items() if name != "answer.safetensors"}
        said = refuses(BadValue, "answer", document | {"answer": None, "files": files})
        assert "a record, or no such field" in said
    for wrong in ([], "", 3):
        refuses(BadValue, "answer", EVERYTHING | {"answer": wrong})


def tree(kind: type[errors.BundleError]) -> list[type[errors.BundleError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


def test_each_error_has_a_code_and_a_docstring_of_its_own() -> None:
    kinds = tree(errors.BundleError)
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all("code" in vars(kind) and 400 <= kind.status < 600 and kind.__doc__ for kind in kinds)
    some = (errors.BundleNotFound, errors.DigestMismatch, errors.HubMissing, errors.OpenStore)
    assert [kind.status for kind in some] == [404, 503, 404, 503]


def test_a_message_names_file_field_expected_found_and_cure() -> None:
    error = errors.BadValue("bad value", file="a/1/bundle.json", field="threshold", expected="a", found="b" * 1000)
    assert error.message.startswith("a/1/bundle.json field threshold: bad value; expected a, found bbb")
    assert "1000 characters" in error.message
    assert error.message.endswith(errors.BundleDamaged.default_cure or "never")
    assert len(error.message) < 400
