from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes_store.bundle import render
from probes_store.errors import (
    BadValue,
    BundleDamaged,
    DigestMismatch,
    MissingField,
    NotFinite,
    Truncated,
    UnknownField,
    WrongShape,
)
from probes_store.manifest import content_digest, manifest_bytes, manifest_seal, read_manifest, sealed
from probes_store.strict import canonical_json, parse_json, plain, read_record, readable_json
from tests.probes_store.factory import make_draft
from tests.probes_store.reseal import reseal, sha256

MANIFEST = render(make_draft())[0]
DOCUMENT: dict[str, Any] = json.loads(manifest_bytes(MANIFEST))


def changed(where: str, value: Any) -> bytes:
    """The manifest with one field changed, digest and seal right again."""
    document = json.loads(json.dumps(DOCUMENT))
    *path, last = where.split("/")
    target = document
    for key in path:
        target = target[key]
    target[last] = value
    return reseal(document)


def objects(value: Any, where: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all records in the document; ``files`` maps names, so it is none."""
    if not isinstance(value, dict):
        return []
    own = [] if where == ("files",) else [where]
    return own + [path for key, item in value.items() for path in objects(item, (*where, key))]


def at(document: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path:
        document = document[key]
    return document


def test_canonical_json_bytes() -> None:
    value = {"b": [1, 2.5, 1e-07, 1e22, -0.0], "a": {"é": None, "Z": True}, "text": 'ö"\\\n'}
    pinned = '{"a":{"Z":true,"é":null},"b":[1,2.5,1e-07,1e+22,-0.0],"text":"ö\\"\\\\\\n"}'
    assert canonical_json(value) == pinned.encode()
    assert readable_json({"b": [1.0], "a": {}}) == b'{\n  "a": {},\n  "b": [\n    1.0\n  ]\n}\n'
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            canonical_json({"x": bad})


def test_round_trip() -> None:
    assert read_manifest(manifest_bytes(MANIFEST)) == MANIFEST


def test_digest_ignores_time_and_version_and_the_seal_does_not() -> None:
    later = sealed(MANIFEST, version=7, created="2030-01-01T00:00:00Z")
    assert content_digest(later) == content_digest(MANIFEST) == later.digest
    assert manifest_seal(later) != manifest_seal(MANIFEST)
    other = dataclasses.replace(MANIFEST, threshold=0.25)
    assert content_digest(other) != content_digest(MANIFEST)


@pytest.mark.parametrize("path", objects(DOCUMENT), ids="/".join)
def test_unknown_and_missing_fields_everywhere(path: tuple[str, ...]) -> None:
    document = json.loads(json.dumps(DOCUMENT))
    at(document, path)["surprise"] = 1
    with pytest.raises(UnknownField, match="surprise"):
        read_manifest(reseal(document))
    for field in at(DOCUMENT, path):
        document = json.loads(json.dumps(DOCUMENT))
        del at(document, path)[field]
        with pytest.raises(MissingField, match=field):
            read_manifest(readable_json(document))


def test_unknown_and_missing_files() -> None:
    record = {"bytes": 1, "sha256": "0" * 64}
    for name in ("weights.pkl", "../../escape.png", "plots/../../x.png", "/etc/passwd", "plots/a/b.png", "plots/.png"):
        with pytest.raises(UnknownField, match="no such file"):
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
    ("training/factual", 0), ("training/left_out", -1), ("training/data_digest", ""),
    ("files/README.md/bytes", -1), ("files/README.md/sha256", "0" * 63), ("files/README.md/sha256", "G" * 64),
]  # fmt: skip


@pytest.mark.parametrize(("where", "value"), BAD, ids=lambda part: repr(part)[:30])
def test_bad_values(where: str, value: Any) -> None:
    with pytest.raises(BadValue) as caught:
        read_manifest(changed(where, value))
    assert where.split("/")[-1].split("[")[0] in str(caught.value.field)
    assert caught.value.message.startswith("bundle.json field ")
    assert "expected" in caught.value.message
    assert "found" in caught.value.message


@pytest.mark.parametrize("field", ["digest", "seal"])
@pytest.mark.parametrize("value", ["0" * 64, "md5:" + "0" * 64, "sha256:" + "0" * 63])
def test_malformed_digest(field: str, value: str) -> None:
    with pytest.raises(BadValue, match=field):
        read_manifest(readable_json(DOCUMENT | {field: value}))


def test_another_number_of_weights() -> None:
    with pytest.raises(WrongShape, match="classifier.weight"):
        read_manifest(changed("classifier/weight", [1.0, 2.0]))


def test_a_newer_format_is_named_as_such() -> None:
    with pytest.raises(BadValue, match="newer version.*Upgrade"):
        read_manifest(readable_json({"format": "hallutracer-bundle", "format_version": 5, "new": 1}))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_not_finite(text: str) -> None:
    data = manifest_bytes(MANIFEST).replace(b'"threshold": 0.5', f'"threshold": {text}'.encode())
    with pytest.raises(NotFinite):
        read_manifest(data)


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
    with pytest.raises(DigestMismatch, match="reformatted"):
        read_manifest(data.replace(b'"version": 1', b'"version":  1'))
    with pytest.raises(DigestMismatch, match="reformatted"):
        read_manifest(data.replace(b"tiny-llama", rb"tiny\u002dllama"))


def test_not_json() -> None:
    for data in (b"\xff\xfe}\n", b"[" * 100_000 + b"}\n", b'{"version": ' + b"9" * 5000 + b"}\n", b"{,}\n"):
        with pytest.raises(BadValue, match="not JSON"):
            read_manifest(data)
    with pytest.raises(BadValue, match="UTF-8 can encode"):
        read_manifest(manifest_bytes(MANIFEST).replace(b"tiny-llama", rb"tiny\ud800llama"))
    with pytest.raises(BadValue, match="object"):
        read_manifest(b"[]\n")


def test_truncated_anywhere() -> None:
    data = manifest_bytes(MANIFEST)
    for length in range(len(data)):
        with pytest.raises(Truncated):
            read_manifest(data[:length])


@given(st.integers(0, len(manifest_bytes(MANIFEST)) - 1), st.integers(1, 255))
def test_any_flipped_byte_is_damage(position: int, mask: int) -> None:
    data = bytearray(manifest_bytes(MANIFEST))
    data[position] ^= mask
    with pytest.raises(BundleDamaged):
        read_manifest(bytes(data))


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


@dataclasses.dataclass(frozen=True)
class Everything:
    text: str
    flag: bool
    maybe: int | None
    numbers: tuple[float, ...]
    table: dict[str, int]


def test_strict_reader_converts_nothing() -> None:
    good: dict[str, Any] = {"text": "a", "flag": True, "maybe": None, "numbers": [1.0], "table": {"x": 1}}
    assert read_record(Everything, good, "f") == Everything("a", True, None, (1.0,), {"x": 1})
    for change in (
        {"flag": 1},
        {"flag": None},
        {"maybe": True},
        {"numbers": [1]},
        {"table": {"x": 1.0}},
        {"text": b"a"},
    ):
        with pytest.raises(BadValue, match=next(iter(change))):
            read_record(Everything, good | change, "f")
