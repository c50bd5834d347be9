"""The manifest and its records: strict, sealed, of one format; and the model that it names."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logit

from probes_store import errors
from probes_store.bundle import render
from probes_store.errors import BadValue, DigestMismatch, MissingField, NotFinite, Truncated, UnknownField, WrongShape
from probes_store.manifest import check_identity, manifest_bytes, read_manifest, sealed
from probes_store.records import Applicability, Context, ContextProbe, Recalibration, least_reaching
from probes_store.syntax import canonical_json, parse_json, plain, readable_json
from service.engines.base import ModelIdentity
from service.readout import Geometry
from tests.probes_store.factory import (
    APPLICABILITY,
    ASKS,
    CONTEXT,
    GUARANTEE,
    INTERVAL,
    MODEL,
    PASSAGE,
    STATED,
    UNCERTAINTY,
    guaranteed,
    make_draft,
    write_bundle,
)
from tests.probes_store.reseal import reseal, sha256

MANIFEST = render(make_draft())[0]
DOCUMENT: dict[str, Any] = json.loads(manifest_bytes(MANIFEST))
PLATT = Recalibration("platt", 0.5, 0.5, -1.0)
STEPS = Recalibration("isotonic", knots=(0.0, 0.25, 0.5, 1.0), values=(0.1, 0.2, 0.6, 0.9))
READING = ("depth_mean", "passage", "stated")
FULL = make_draft(
    context=CONTEXT, signals=READING, guarantee=GUARANTEE, threshold=GUARANTEE.threshold, uncertainty=UNCERTAINTY,
    recalibration=PLATT, guarantee_shapes=("alone", "a chat"),
)  # fmt: skip
EVERYTHING: dict[str, Any] = json.loads(manifest_bytes(render(FULL)[0]))


def changed(where: str, value: Any, document: dict[str, Any] = DOCUMENT) -> bytes:
    """The manifest with one field changed, digest and seal right again."""
    document = json.loads(json.dumps(document))
    *path, last = where.split("/")
    at(document, path)[last] = value
    return reseal(document)


def objects(value: Any, where: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all records in the document; ``files`` maps names, so it is none."""
    if not isinstance(value, dict):
        return []
    own = [] if where == ("files",) else [where]
    return own + [path for key, item in value.items() for path in objects(item, (*where, key))]


def at(document: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    for key in path:
        document = document[key]
    return document


# JSON


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
    again = parse_json(readable_json(value), "x.json")
    assert canonical_json(again) == canonical_json(value)
    assert plain(value, "x.json") == value


def test_not_json() -> None:
    for data in (b"\xff\xfe}\n", b"[" * 100_000 + b"}\n", b'{"version": ' + b"9" * 5000 + b"}\n", b"{,}\n", b"[]\n"):
        with pytest.raises(BadValue):
            read_manifest(data)
    for field in ("model.name", "training.judge"):
        section, _, name = field.partition(".")
        document = json.loads(manifest_bytes(MANIFEST))
        document[section][name] = "tiny\ud800llama"
        with pytest.raises(BadValue, match=field):
            read_manifest(json.dumps(document).encode())


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_not_finite(text: str) -> None:
    with pytest.raises(NotFinite):
        read_manifest(manifest_bytes(MANIFEST).replace(b'"threshold": 0.5', f'"threshold": {text}'.encode()))


# fields


@pytest.mark.parametrize("document", [DOCUMENT, EVERYTHING], ids=["plain", "everything"])
def test_unknown_and_missing_fields_everywhere(document: dict[str, Any]) -> None:
    assert manifest_bytes(read_manifest(readable_json(document))) == readable_json(document)
    for path in objects(document):
        edited = json.loads(json.dumps(document))
        at(edited, path)["surprise"] = 1
        with pytest.raises(UnknownField) as unknown:
            read_manifest(reseal(edited))
        assert unknown.value.field == ".".join((*path, "surprise"))
        for field in at(document, path):
            edited = json.loads(json.dumps(document))
            del at(edited, path)[field]
            with pytest.raises(MissingField) as missing:
                read_manifest(reseal(edited) if field not in ("digest", "seal") else readable_json(edited))
            assert str(missing.value.field).startswith(".".join((*path, field)))


def test_unknown_and_missing_files() -> None:
    record = {"bytes": 1, "sha256": "0" * 64}
    for name in ("weights.pkl", "../../escape.png", "plots/../../x.png", "/etc/passwd", "plots/a/b.png", "plots/.png"):
        with pytest.raises(UnknownField, match="no such field or file"):
            read_manifest(changed("files", DOCUMENT["files"] | {name: record}))
    for name in ("probes.safetensors", "golden.safetensors", "evaluation.json", "README.md"):
        with pytest.raises(MissingField, match=name):
            read_manifest(changed("files", {k: v for k, v in DOCUMENT["files"].items() if k != name}))


BAD: list[tuple[str, Any]] = [
    ("format", "pickle"), ("format_version", 0), ("format_version", True), ("format_version", 1.0),
    ("name", "Tiny"), ("name", "../tiny"), ("name", "a..b"), ("name", "tiny\n"), ("name", ""), ("name", "a" * 65),
    ("version", 0), ("version", 1.0), ("version", True), ("version", "1"), ("version", 2**60),
    ("created", "yesterday"), ("created", "2026-02-30T00:00:00Z"), ("created", "2026-01-01T00:00:00+01:00"),
    ("model", []), ("model/num_layers", 0), ("model/fingerprint", ""), ("model/name", None),
    ("tokenizer/digest", ""), ("chat_template/digest", ""), ("chat_template/digest", 3),
    ("prompt_format", "xml"), ("dtype", "float64"), ("readout/site", "mlp"), ("readout/position", "first"),
    ("logit_scale", "plain"), ("signals", []), ("signals", ["entropy"]), ("signals", ["depth_mean", "depth_mean"]),
    ("signals", "depth_mean"), ("signals", ["depth_mean", "length"]),
    ("classifier/weight", [1]), ("classifier/weight", ["1.0"]), ("classifier/intercept", 0),
    ("threshold", 0.0), ("threshold", 1.0), ("threshold", "0.5"), ("threshold", 1), ("threshold", None),
    ("training/labels", "guessed"), ("training/seeds", []), ("training/seeds", [0.5]), ("training/folds", 1),
    ("training/c", 0.0), ("training/c", -1.0), ("training/c_grid", [0.1, -1.0]), ("training/rows", 3),
    ("training/factual", 0), ("training/left_out", -1), ("training/data_digest", ""), ("uncertainty", None),
    ("files/README.md/bytes", -1), ("files/README.md/sha256", "0" * 63), ("files/README.md/sha256", "G" * 64),
]  # fmt: skip


@pytest.mark.parametrize(("where", "value"), BAD, ids=lambda part: repr(part)[:30])
def test_bad_values(where: str, value: Any) -> None:
    with pytest.raises(BadValue) as caught:
        read_manifest(changed(where, value))
    assert where.split("/")[-1].split("[")[0] in str(caught.value.field)
    for part in ("bundle.json field ", "expected", "found", errors.BundleDamaged.default_cure or "never"):
        assert part in caught.value.message or where == "format_version"


@pytest.mark.parametrize("found", [0, 2, 3, 4, 5, "1", True, 1.0])
def test_another_format_is_refused_before_anything_else(found: Any) -> None:
    with pytest.raises(BadValue) as caught:
        read_manifest(readable_json({"format": "hallutracer-bundle", "format_version": found, "new": 1}))
    assert (caught.value.field, caught.value.expected) == ("format_version", 1)
    assert "train and publish" in str(caught.value.cure)


def test_another_number_of_weights() -> None:
    with pytest.raises(WrongShape, match=r"classifier\.weight"):
        read_manifest(changed("classifier/weight", [1.0, 2.0]))


# Changes of EVERYTHING that make no sense, and the field that the error names where it is another one.
SENSELESS: dict[str, list[dict[str, Any]]] = {
    "guarantee": [
        {"alpha": 0.0}, {"delta": 1.0}, {"p_value": 0.06}, {"answered": 1.5}, {"risk_control_threshold": -0.5},
        {"hallucinated": 101}, {"groups": 201, "named": "hallucinated"}, {"all_groups": 500, "named": "hallucinated"},
        {"data_digest": ""}, {"statement": ""}, {"seed": -1}, {"dtype": "float64"}, {"labels": "guessed"},
        {"threshold": 0.0, "named": "groups"}, {"threshold": 1.5}, {"threshold": 0.3},
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
    "": [{"guarantee_shapes": shapes} for shapes in ([], ["alone", "alone"], ["alone", ""])],
}  # fmt: skip


@pytest.mark.parametrize(
    ("where", "change"), [(where, change) for where, changes in SENSELESS.items() for change in changes], ids=str
)
def test_a_senseless_record_is_refused_by_name(where: str, change: dict[str, Any]) -> None:
    document, path = json.loads(json.dumps(EVERYTHING)), where.split("/") if where else []
    record: Any = document
    for key in path:
        record = record[int(key) if key.isdigit() else key]
    named = change.get("named", next(name for name in change if name != "method" or len(change) == 1))
    record |= {name: value for name, value in change.items() if name != "named"}
    with pytest.raises(errors.BundleDamaged) as caught:
        read_manifest(reseal(document))
    assert str(caught.value.field).startswith(".".join([*path, named]).replace(".2.", "[2]."))


@pytest.mark.parametrize(
    ("probes", "applicability", "signals", "field"),
    [
        ((), None, ("depth_mean",), "context.probes"),
        ((PASSAGE, STATED, PASSAGE), None, READING, "context.probes"),
        ((PASSAGE,), None, READING, "context.probes"),
        ((PASSAGE,), None, ("depth_mean", "passage", "stated_length"), "context.probes"),
        ((STATED,), None, ("depth_mean", "stated"), "context.probes"),  # the signal is P(passage) P(stated)
        ((ASKS,), APPLICABILITY, ("depth_mean", "passage"), "context.probes"),
        ((PASSAGE, STATED), APPLICABILITY, READING, "context.applicability"),
        ((ASKS, PASSAGE, STATED), None, READING, "context.applicability"),
        (None, None, ("depth_mean", "stated_length"), "context"),
    ],
)
def test_probes_signals_and_applicability_go_together(
    probes: tuple[ContextProbe, ...] | None, applicability: Applicability | None, signals: Sequence[str], field: str
) -> None:
    document = json.loads(json.dumps(EVERYTHING))
    document["context"] = None if probes is None else dataclasses.asdict(Context(probes, applicability))
    document["signals"], document["classifier"]["weight"] = list(signals), [1.5] * len(signals)
    with pytest.raises(BadValue) as caught:
        read_manifest(reseal(document))
    assert caught.value.field == field


def test_some_of_the_probes_are_enough() -> None:
    for context, signals in (
        (Context((ASKS,), APPLICABILITY), ("depth_mean", "entropy")),
        (Context((STATED, PASSAGE), None), (*READING, "stated_length")),
        (Context((PASSAGE,), None), ("depth_mean", "passage")),
    ):
        assert render(make_draft(context=context, signals=signals))[0].context == context
    assert [CONTEXT.place(name) for name in ("asks", "passage", "stated")] == [0, 1, 2]
    assert Context((PASSAGE,), None).place("asks") is None


def test_a_closed_gate_has_threshold_0(tmp_path: Path) -> None:
    closed = guaranteed(threshold=0.0, groups=0, hallucinated=0, p_value=1.0, answered=0.0)
    record = write_bundle(closed, tmp_path / "tiny" / "1").manifest.guarantee
    assert record is not None
    assert record.closed
    with pytest.raises(BadValue, match="guarantee_shapes"):
        render(make_draft(guarantee_shapes=("alone",)))


# digest and seal


def test_digest_ignores_time_and_version_and_the_seal_does_not() -> None:
    later = sealed(MANIFEST, version=7, created="2030-01-01T00:00:00Z")
    assert (later.digest, later.version) == (MANIFEST.digest, 7)
    assert later.seal != MANIFEST.seal
    assert sealed(dataclasses.replace(MANIFEST, threshold=0.25)).digest != MANIFEST.digest


@pytest.mark.parametrize("field", ["digest", "seal"])
@pytest.mark.parametrize("value", ["0" * 64, "md5:" + "0" * 64, "sha256:" + "0" * 63])
def test_malformed_digest(field: str, value: str) -> None:
    with pytest.raises(BadValue, match=field):
        read_manifest(readable_json(DOCUMENT | {field: value}))


@pytest.mark.parametrize(("field", "value"), [("threshold", 0.25), ("created", "2031-01-01T00:00:00Z"), ("version", 2)])
def test_an_edit_by_hand_is_noticed(field: str, value: object) -> None:
    with pytest.raises(DigestMismatch):
        read_manifest(readable_json(DOCUMENT | {field: value}))


def test_a_digest_of_other_content_under_a_right_seal() -> None:
    document = DOCUMENT | {"digest": "sha256:" + "0" * 64}
    content = {k: v for k, v in document.items() if k != "seal"}
    with pytest.raises(DigestMismatch, match="field digest"):
        read_manifest(readable_json(document | {"seal": "sha256:" + sha256(canonical_json(content))}))


def test_a_key_twice_and_other_spellings() -> None:
    data = manifest_bytes(MANIFEST)
    with pytest.raises(UnknownField, match="twice"):
        read_manifest(data.replace(b'"threshold"', b'"version": 1,\n  "threshold"'))
    for other in (data.replace(b'"version": 1', b'"version":  1'), data.replace(b"tiny-llama", rb"tiny\u002dllama")):
        with pytest.raises(DigestMismatch, match="reformatted"):
            read_manifest(other)


def test_truncated_anywhere() -> None:
    data = manifest_bytes(MANIFEST)
    for length in range(len(data)):
        with pytest.raises(Truncated):
            read_manifest(data[:length])


@given(st.integers(0, len(manifest_bytes(MANIFEST)) - 1), st.integers(1, 255))
def test_any_flipped_byte_is_damage(position: int, mask: int) -> None:
    data = bytearray(manifest_bytes(MANIFEST))
    data[position] ^= mask
    with pytest.raises(errors.BundleDamaged):
        read_manifest(bytes(data))


# what the records compute


def test_the_half_width() -> None:
    assert INTERVAL.half_width(0.5, 0.0) == pytest.approx(0.2)
    assert INTERVAL.half_width(2.5, 0.0) == pytest.approx(math.sqrt(0.04 + 0.04))
    assert INTERVAL.half_width(0.5, 2.0) == pytest.approx(math.sqrt(1.04))


def test_what_a_recalibration_does() -> None:
    risk = np.array([[0.1, 0.5], [0.9, 0.99]])
    np.testing.assert_allclose(PLATT(risk), expit(0.5 * logit(risk) - 1.0), rtol=1e-12)
    beta = Recalibration("beta", 0.5, 2.0, 0.3)
    np.testing.assert_allclose(beta(risk), expit(0.5 * np.log(risk) - 2 * np.log1p(-risk) + 0.3), rtol=1e-12)
    assert STEPS(np.array([0.0, 0.125, 0.25, 0.75, 1.0])).tolist() == pytest.approx([0.1, 0.15, 0.2, 0.75, 0.9])
    for recalibration in (PLATT, STEPS, Recalibration("beta", 0.0, 1.0, 0.0)):
        assert math.isnan(float(recalibration(math.nan)))
        assert 0 <= float(recalibration(0.0)) < float(recalibration(1.0)) <= 1


@pytest.mark.parametrize("recalibration", [PLATT, STEPS])
@pytest.mark.parametrize("level", [0.15, 0.5, 0.61])
def test_the_least_risk_that_reaches_a_level(recalibration: Recalibration, level: float) -> None:
    least = least_reaching(recalibration, level)
    assert recalibration(least) >= level > recalibration(math.nextafter(least, 0.0))
    assert least_reaching(STEPS, 0.95) == 1.0
    assert least_reaching(STEPS, 0.05) < 1e-300


# identity

LOADED = ModelIdentity(
    model="/another/folder", revision="local", fingerprint=MODEL.fingerprint, architecture=MODEL.architecture,
    model_type=MODEL.model_type, tokenizer=MANIFEST.tokenizer.digest, chat_template=MANIFEST.chat_template.digest,
    dtype="bfloat16", geometry=Geometry(3, 2, 4, 8), max_tokens=64,
)  # fmt: skip
# In the order in which they are checked.
WRONG: list[tuple[type[errors.BundleRefused], str, dict[str, Any]]] = [
    (errors.WrongModel, "model.architecture", {"architecture": "GPT2LMHeadModel"}),
    (errors.WrongModel, "model.fingerprint", {"fingerprint": "sha256:" + "9" * 64}),
    (errors.WrongRevision, "model.revision", {"revision": "0123abcd"}),
    (errors.WrongGeometry, "model.num_layers", {"geometry": Geometry(4, 2, 4, 8)}),
    (errors.WrongGeometry, "model.num_heads", {"geometry": Geometry(3, 1, 4, 8)}),
    (errors.WrongGeometry, "model.head_dim", {"geometry": Geometry(3, 2, 8, 8)}),
    (errors.WrongGeometry, "model.hidden_size", {"geometry": Geometry(3, 2, 4, 16)}),
    (errors.WrongTokenizer, "tokenizer.digest", {"tokenizer": "sha256:" + "9" * 64}),
    (errors.WrongChatTemplate, "chat_template.digest", {"chat_template": "sha256:" + "9" * 64}),
    (errors.WrongChatTemplate, "chat_template.digest", {"chat_template": None}),
]


def test_the_same_model_under_another_name_and_dtype_is_accepted() -> None:
    check_identity(MANIFEST, LOADED)
    bare = render(make_draft(chat_template=None))[0]
    check_identity(bare, dataclasses.replace(LOADED, chat_template=None))
    with pytest.raises(errors.WrongChatTemplate, match="expected none"):
        check_identity(bare, LOADED)


@pytest.mark.parametrize("first", range(len(WRONG)))
def test_each_difference_has_its_own_error_and_the_first_in_order_is_named(first: int) -> None:
    error, field, own = WRONG[first]
    later: dict[str, Any] = {}
    for _, _, change in reversed(WRONG[first:]):
        later |= change
    for changes in (own, later):
        with pytest.raises(errors.BundleRefused) as caught:
            check_identity(MANIFEST, dataclasses.replace(LOADED, **changes))
        assert (type(caught.value), caught.value.field) == (error, field)
        for part in ("tiny:1", "tiny-llama at revision local", "expected", "found"):
            assert part in caught.value.message


# errors


def tree(kind: type[errors.BundleError]) -> list[type[errors.BundleError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


def test_each_error_has_a_code_and_a_docstring_of_its_own() -> None:
    kinds = tree(errors.BundleError)
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all("code" in vars(kind) and 400 <= kind.status < 600 and kind.__doc__ for kind in kinds)
    status: Callable[[str], int] = lambda name: getattr(errors, name).status  # noqa: E731
    assert [status(name) for name in ("BundleNotFound", "DigestMismatch", "HubMissing", "OpenStore")] == [
        404,
        503,
        404,
        503,
    ]


def test_a_message_names_file_field_expected_found_and_cure() -> None:
    error = errors.BadValue("bad value", file="a/1/bundle.json", field="threshold", expected="a", found="b" * 1000)
    assert error.message.startswith("a/1/bundle.json field threshold: bad value; expected a, found bbb")
    assert "1000 characters" in error.message
    assert error.message.endswith(errors.BundleDamaged.default_cure or "never")
    assert len(error.message) < 400
