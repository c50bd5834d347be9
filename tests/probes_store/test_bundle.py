from __future__ import annotations

import dataclasses
import os
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import probes_store
from probes_store.bundle import (
    TOLERANCES,
    Bundle,
    BundleDraft,
    check_golden,
    load_bundle,
    render,
    spreads,
    tolerance_for,
)
from probes_store.errors import (
    BadValue,
    BundleDamaged,
    BundleNotFound,
    DigestMismatch,
    GoldenMismatch,
    MissingField,
    MissingFile,
    NotFinite,
    Truncated,
    UnknownField,
    UnknownFile,
    WrongShape,
)
from probes_store.manifest import MAX_FILE, Classifier, Manifest, ModelRecord, ReadoutRecord, TrainingRecord
from probes_store.records import (
    Applicability,
    Context,
    ContextProbe,
    Guarantee,
    Recalibration,
    RefitInterval,
    Uncertainty,
)
from probes_store.tensors import Golden, ProbeTensors, pack, read_golden, read_probes
from tests.probes_store.factory import CONTEXT, make_draft, write_bundle
from tests.probes_store.reseal import edit_manifest, edit_tensors, replace_file

CREATED = datetime(2026, 1, 31, 12, tzinfo=UTC)
FILES = ("bundle.json", "probes.safetensors", "golden.safetensors", "evaluation.json", "README.md", "plots/roc.png")
# Of the fixed draft below.  If one of these changes, published bundles change: that is a new format version.
PINNED_DIGEST = "sha256:d21bab480555a48800b4333f1c27df4d60eb8209e89945e22afdb1a8a7e4384d"
PINNED_HEADER = (
    b'{"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"direction":{"dtype":"F32","shape":[2,2],"data_offsets":[8,24]},'
    b'"reference_mean":{"dtype":"F32","shape":[2],"data_offsets":[24,32]},'
    b'"reference_whitening":{"dtype":"F32","shape":[2,2],"data_offsets":[32,48]},'
    b'"scale":{"dtype":"F32","shape":[2],"data_offsets":[48,56]},'
    b'"trajectory_mean":{"dtype":"F32","shape":[2,2],"data_offsets":[56,72]},'
    b'"trajectory_std":{"dtype":"F32","shape":[2,2],"data_offsets":[72,88]},'
    b'"head":{"dtype":"I32","shape":[2],"data_offsets":[88,96]}}'
)
PINNED_PROBES = (
    struct.pack("<Q", len(PINNED_HEADER) + -len(PINNED_HEADER) % 8)
    + PINNED_HEADER
    + b" " * (-len(PINNED_HEADER) % 8)
    + struct.pack("<2f 4f 2f 4f 2f", 0.5, -0.25, 1, 0, 0, -1, 0.25, -0.5, 2, 0, 0, 4, 1, 1)
    + struct.pack("<4f 4f 2i", -0.5, -0.5, 0.5, 0.5, 1, 1, 1, 1, 1, 0)
)


def fixed_draft() -> BundleDraft:
    """Numbers that do not depend on a random generator's version."""
    draft = make_draft(model={"num_layers": 2, "head_dim": 2, "hidden_size": 4})
    probes = {
        "head": np.array([1, 0], np.int32),
        "direction": np.array([[1, 0], [0, -1]], np.float32),
        "bias": np.array([0.5, -0.25], np.float32),
        "reference_mean": np.array([0.25, -0.5], np.float32),
        "reference_whitening": np.diag([2, 4]).astype(np.float32),
    }
    draft.probes = dataclasses.replace(draft.probes, **probes)
    draft.golden = Golden.record([[1, 2, 3]], np.array([[1.0, -1.0]]), np.array([0.5]))
    return draft


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(make_draft(), tmp_path / "tiny" / "1", created=CREATED)


def test_pinned_bytes_and_digest(tmp_path: Path) -> None:
    bundle = write_bundle(fixed_draft(), tmp_path / "1", created=CREATED)
    assert (tmp_path / "1" / "probes.safetensors").read_bytes() == PINNED_PROBES
    assert bundle.manifest.digest == PINNED_DIGEST
    assert bundle.manifest.created == "2026-01-31T12:00:00Z"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"site": "residual_stream"},
        {"logit_scale": "standardized", "chat_template": None, "prompt_format": "text", "plots": {}},
        {"signals": ("depth_mean", "entropy", "log_max_prob")},
        {"model": {"num_layers": 1, "num_heads": 1}, "card": "# Überschrift\n"},
    ],
)
def test_what_is_written_is_loaded(tmp_path: Path, changes: dict[str, Any]) -> None:
    draft = make_draft(3, **changes)
    bundle = write_bundle(draft, tmp_path / "x" / "5", version=5)
    for tensors, loaded in ((draft.probes, bundle.probes), (draft.golden, bundle.golden)):
        for name, value in vars(tensors).items():
            found = getattr(loaded, name)
            if value is None:
                assert found is None
                continue
            np.testing.assert_array_equal(found, value)
            assert found.dtype == value.dtype
            with pytest.raises(ValueError, match="read-only"):
                found[...] = 0
    assert bundle.reference == "tiny:5"
    assert bundle.evaluation() == draft.evaluation
    assert bundle.card() == draft.card
    assert bundle.golden.prompts() == [[1, 5, 9], [1, 7, 2, 3]]
    assert bundle.manifest.signals == draft.manifest.signals


def test_equal_drafts_render_to_equal_bytes() -> None:
    assert render(make_draft(4)) == render(make_draft(4))
    assert render(make_draft(4))[0].digest != render(make_draft(5))[0].digest


@pytest.mark.parametrize("change", [{"card": "other"}, {"evaluation": {}}, {"plots": {}}, {"threshold": 0.4}])
def test_every_part_is_in_the_digest(change: dict[str, Any]) -> None:
    assert render(make_draft(**change))[0].digest != render(make_draft())[0].digest


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_byte_in_any_file_is_damage(bundle: Bundle, data: st.DataObject) -> None:
    path = bundle.path / data.draw(st.sampled_from(FILES))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        path.write_bytes(flipped)
        with pytest.raises(BundleDamaged) as caught:
            load_bundle(bundle.path)
        if path.name != "bundle.json":
            assert type(caught.value) is DigestMismatch
            assert path.name in caught.value.message
    finally:
        path.write_bytes(whole)
    assert load_bundle(bundle.path).manifest == bundle.manifest


@pytest.mark.parametrize("name", FILES)
def test_truncated_longer_missing_and_replaced_files(bundle: Bundle, name: str) -> None:
    path = bundle.path / name
    whole = path.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(Truncated, match=re.escape(f"tiny/1/{name}")):
            load_bundle(bundle.path)
    path.write_bytes(whole + b"x" * (1 << 20))
    with pytest.raises(BundleDamaged, match=re.escape(f"tiny/1/{name}")):
        load_bundle(bundle.path)
    path.unlink()
    with pytest.raises(MissingFile, match=re.escape(f"tiny/1/{name}")):
        load_bundle(bundle.path)
    path.mkdir()
    with pytest.raises(MissingFile):
        load_bundle(bundle.path)


def test_unknown_files_are_refused(bundle: Bundle) -> None:
    (bundle.path / ".DS_Store").write_bytes(b"x")
    (bundle.path / "model.sig").write_bytes(b"x")
    load_bundle(bundle.path)
    (bundle.path / "plots" / "probes.pkl").write_bytes(b"x")
    with pytest.raises(UnknownFile, match="plots/probes.pkl"):
        load_bundle(bundle.path)


def test_a_file_that_links_out_of_the_bundle_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    card = bundle.path / "README.md"
    card.rename(tmp_path / "elsewhere.md")
    card.symlink_to(tmp_path / "elsewhere.md")
    with pytest.raises(BadValue, match="leaves the bundle"):
        load_bundle(bundle.path)


def put(name: str, index: Any, value: float) -> Any:
    return lambda tensors: tensors[name].__setitem__(index, value)


NAN, INF = float("nan"), float("inf")
PROBE_DAMAGE = [
    (NotFinite, "direction", put("direction", (1, 2), NAN)),
    (NotFinite, "bias", put("bias", 0, INF)),
    (NotFinite, "scale", put("scale", 0, NAN)),
    (NotFinite, "trajectory_mean", put("trajectory_mean", (0, 0), -INF)),
    (NotFinite, "trajectory_std", put("trajectory_std", (1, 2), NAN)),
    (BadValue, "direction", put("direction", (0, 0), 3.0)),
    (BadValue, "direction", lambda t: t.update(direction=np.zeros_like(t["direction"]))),
    (BadValue, "head", put("head", 0, 2)),
    (BadValue, "head", put("head", 2, -1)),
    (BadValue, "scale", put("scale", 1, 2.0)),
    (BadValue, "scale", put("scale", 1, 0.0)),
    (BadValue, "trajectory_std", put("trajectory_std", (0, 0), -1.0)),
    (WrongShape, "bias", lambda t: t.update(bias=t["bias"][:2])),
    (WrongShape, "bias", lambda t: t.update(bias=t["bias"][None])),
    (WrongShape, "direction", lambda t: t.update(direction=np.ascontiguousarray(t["direction"].T))),
    (WrongShape, "direction", lambda t: t.update(direction=t["direction"].astype(np.float64))),
    (WrongShape, "head", lambda t: t.update(head=t["head"].astype(np.int64))),
    (UnknownField, "extra", lambda t: t.update(extra=np.zeros(1, np.float32))),
    (MissingField, "scale", lambda t: t.pop("scale")),
]
GOLDEN_DAMAGE = [
    (NotFinite, "trajectory", put("trajectory", (0, 0), NAN)),
    (NotFinite, "risk", put("risk", 1, NAN)),
    (BadValue, "risk", put("risk", 1, 1.5)),
    (BadValue, "input_ids", put("input_ids", 0, -1)),
    (BadValue, "offsets", put("offsets", 0, 1)),
    (BadValue, "offsets", put("offsets", 1, 0)),
    (BadValue, "offsets", put("offsets", 1, 7)),
    (BadValue, "offsets", put("offsets", 2, 6)),
    (BadValue, "offsets", lambda t: t.update(offsets=t["offsets"][:0])),
    (BadValue, "offsets", lambda t: t.update(offsets=t["offsets"][:1])),
    (WrongShape, "risk", lambda t: t.update(risk=t["risk"][:1])),
    (WrongShape, "trajectory", lambda t: t.update(trajectory=t["trajectory"][:, :2])),
    (WrongShape, "trajectory", lambda t: t.update(trajectory=t["trajectory"][:1])),
    (UnknownField, "first_token", lambda t: t.update(first_token=np.zeros((2, 2), np.float32))),
    (MissingField, "input_ids", lambda t: t.pop("input_ids")),
]


@pytest.mark.parametrize(
    ("file", "error", "field", "damage"),
    [("probes.safetensors", *case) for case in PROBE_DAMAGE]
    + [("golden.safetensors", *case) for case in GOLDEN_DAMAGE],
)
def test_damaged_tensors_behind_right_hashes(
    bundle: Bundle, file: str, error: type[BundleDamaged], field: str, damage: Any
) -> None:
    edit_tensors(bundle.path, file, damage)
    with pytest.raises(BundleDamaged) as caught:
        load_bundle(bundle.path)
    assert type(caught.value) is error
    assert caught.value.message.startswith(f"tiny/1/{file} field {field}")


@pytest.mark.parametrize(
    ("error", "damage"),
    [
        (MissingField, lambda t: t.pop("first_token")),
        (WrongShape, lambda t: t.update(first_token=t["first_token"][:, :1])),
        (WrongShape, lambda t: t.update(first_token=t["first_token"][:1])),
        (BadValue, put("first_token", (0, 0), 0.5)),
        (BadValue, put("first_token", (0, 1), -0.5)),
    ],
)
def test_damaged_first_token(tmp_path: Path, error: type[BundleDamaged], damage: Any) -> None:
    write_bundle(make_draft(signals=("depth_mean", "entropy")), tmp_path / "1")
    edit_tensors(tmp_path / "1", "golden.safetensors", damage)
    with pytest.raises(error, match="first_token"):
        load_bundle(tmp_path / "1")


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"{}x", b"\x80\x04K\x01."])
def test_hostile_headers_behind_right_hashes(bundle: Bundle, data: bytes) -> None:
    replace_file(bundle.path, "probes.safetensors", data)
    with pytest.raises(BadValue, match="probes.safetensors: not a safetensors file"):
        load_bundle(bundle.path)


def test_headers_that_safetensors_takes(bundle: Bundle) -> None:
    """Two readers of a tensor that is listed twice may see different probes; a header may hide anything in padding."""
    data = (bundle.path / "probes.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    bias = re.search(rb'"bias":\{[^}]*\}', header)
    assert bias is not None
    twice = header.rstrip().replace(b"{", b"{" + bias[0] + b",", 1)
    for odd in (header + b" " * 8, header + b" " * 100_000, twice + b" " * (-len(twice) % 8)):
        replace_file(bundle.path, "probes.safetensors", len(odd).to_bytes(8, "little") + odd + body)
        with pytest.raises((BadValue, UnknownField)):
            load_bundle(bundle.path)
    replace_file(bundle.path, "probes.safetensors", data)
    load_bundle(bundle.path)


def test_no_file_may_be_huge(bundle: Bundle) -> None:
    edit_manifest(bundle.path, lambda document: document["files"]["README.md"].update(bytes=MAX_FILE + 1))
    with pytest.raises(BadValue, match=r"README\.md"):
        load_bundle(bundle.path)


def test_evaluation_and_card_are_checked_when_read(bundle: Bundle) -> None:
    (bundle.path / "evaluation.json").write_bytes(b"{}\n")
    with pytest.raises(Truncated, match="evaluation.json"):
        bundle.evaluation()
    replace_file(bundle.path, "evaluation.json", b"[1]\n")
    with pytest.raises(BadValue, match="object"):
        load_bundle(bundle.path).evaluation()
    replace_file(bundle.path, "README.md", b"\xff")
    with pytest.raises(BadValue, match="UTF-8"):
        load_bundle(bundle.path).card()


BAD_DRAFTS: list[tuple[type[BundleDamaged], str, dict[str, Any]]] = [
    (BadValue, "name", {"name": "../up"}),
    (BadValue, "README.md", {"card": " \n"}),
    (NotFinite, "threshold", {"threshold": NAN}),
    (NotFinite, r"evaluation.json field a\[1\].b", {"evaluation": {"a": [1, {"b": NAN}]}}),
    (BadValue, "evaluation.json field x", {"evaluation": {"x": {1, 2}}}),
    (BadValue, "evaluation.json", {"evaluation": {1: 2}}),
    (UnknownField, "plots/../x.png", {"plots": {"../x.png": b""}}),
    (UnknownField, "first_token", {"golden": make_draft(signals=("depth_mean", "entropy")).golden}),
    (BadValue, "signals", {"signals": ("entropy",)}),
    (BadValue, "dtype", {"dtype": "int8"}),
    (WrongShape, "direction", {"probes": make_draft(site="residual_stream").probes}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "match", "changes"), BAD_DRAFTS)
def test_what_cannot_be_loaded_is_not_written(
    tmp_path: Path, error: type[BundleDamaged], match: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        write_bundle(make_draft(**changes), tmp_path / "1")
    assert not (tmp_path / "1").exists()


def test_numbers_are_never_narrowed_silently() -> None:
    golden = make_draft().golden
    for bad in (np.array([2**31] * 7), np.ones(7), np.array([True] * 7)):
        with pytest.raises(WrongShape, match="input_ids"):
            pack(Golden(**(vars(golden) | {"input_ids": bad})), "golden.safetensors")
    draft = make_draft()
    draft.golden = Golden(**(vars(golden) | {"trajectory": golden.trajectory.astype(np.float64) * 1e300}))
    with pytest.raises(NotFinite, match="trajectory"):
        render(draft)


def test_numpy_numbers_in_the_evaluation(tmp_path: Path) -> None:
    draft = make_draft(evaluation={"n": np.int64(3), "auroc": np.float32(0.5), "list": (1, np.float64(2.0))})
    assert write_bundle(draft, tmp_path / "1").evaluation() == {"n": 3, "auroc": 0.5, "list": [1, 2.0]}


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BundleNotFound):
        load_bundle(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingFile, match="bundle.json"):
        load_bundle(tmp_path / "empty")


def test_the_recipe_in_format_md_recomputes_the_digest(bundle: Bundle, tmp_path: Path) -> None:
    text = (Path(probes_store.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```python\n(.*?)```", text, re.S)
    script = tmp_path / "check.py"
    script.write_text(recipe)
    run = [sys.executable, str(script), str(bundle.path)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONOPTIMIZE"}
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == bundle.manifest.digest
    (bundle.path / "plots" / "roc.png").write_bytes(b"x" * bundle.manifest.files["plots/roc.png"].bytes)
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode != 0
    assert "plots/roc.png" in done.stderr


def test_format_md_names_every_field_tensor_and_tolerance() -> None:
    text = (Path(probes_store.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
    records = (
        Manifest, ModelRecord, ReadoutRecord, Classifier, TrainingRecord, ProbeTensors, Golden, Guarantee, Uncertainty,
        RefitInterval, Recalibration, Context, ContextProbe, Applicability,
    )  # fmt: skip
    for record in records:
        for field in dataclasses.fields(record):
            if field.name not in ("model", "tokenizer", "chat_template", "readout", "classifier", "training"):
                assert re.search(rf"`([a-z_\[\]]*\.)?{field.name}`", text), f"{record.__name__}.{field.name}"
    for dtype, tolerance in TOLERANCES.items():
        assert re.search(
            rf"\| [a-z0-9, ]*{dtype}[a-z0-9, ]* \| {tolerance.risk:g} \| {tolerance.trajectory:g} spread", text
        )


def test_importing_the_format_needs_nothing_of_ours_and_no_torch() -> None:
    banned = "{'service', 'torch', 'transformers', 'huggingface_hub'}"
    code = f"import sys, probes_store.store; print(sorted({{m.split('.')[0] for m in sys.modules}} & {banned}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# the replay of the golden prompts


def bundle_of(dtype: str = "float32", golden: Golden | None = None, layers: int = 3) -> Bundle:
    draft = make_draft(dtype=dtype, model={"num_layers": layers})
    draft.golden = golden or draft.golden
    manifest, files = render(draft)
    probes, tensors = files["probes.safetensors"], files["golden.safetensors"]
    return Bundle(manifest, read_probes(probes, manifest), read_golden(tensors, manifest), Path("nowhere"))


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_an_exact_replay_passes(dtype: str) -> None:
    bundle = bundle_of(dtype)
    check_golden(bundle, bundle.golden.trajectory.astype(np.float64), bundle.golden.risk, dtype=dtype)


@pytest.mark.parametrize(
    ("trained", "served", "trajectory", "risk"),
    [
        ("float32", "float32", 1e-3, 1e-3),
        ("float32", "bfloat16", 0.25, 0.05),
        ("float16", "float32", 0.25, 0.05),
        ("bfloat16", "float16", 0.25, 0.05),
    ],
)
@given(prompt=st.integers(0, 1), layer=st.integers(0, 2), sign=st.sampled_from([-1, 1]))
def test_the_looser_dtype_decides(
    trained: str, served: str, trajectory: float, risk: float, prompt: int, layer: int, sign: int
) -> None:
    bundle = bundle_of(trained)
    unit = sign * trajectory * spreads(bundle.golden.trajectory, 3)[layer]
    for factor, passes in ((0.99, True), (1.01, False)):
        logits = bundle.golden.trajectory.astype(np.float64)
        logits[prompt, layer] += factor * unit
        risks = bundle.golden.risk.copy()
        risks[prompt] += factor * sign * risk
        for replay in ((logits, bundle.golden.risk), (bundle.golden.trajectory, risks)):
            if passes:
                check_golden(bundle, *replay, dtype=served)
            else:
                with pytest.raises(GoldenMismatch, match=f"golden prompt {prompt}"):
                    check_golden(bundle, *replay, dtype=served)


def test_the_worst_deviation_is_named() -> None:
    bundle = bundle_of()
    logits = bundle.golden.trajectory.astype(np.float64)
    logits[0, 1] += 1.0
    logits[1, 2] -= 3.0
    with pytest.raises(GoldenMismatch, match=r"golden prompt 1, layer 2.*deviation is 3 ") as caught:
        check_golden(bundle, logits, bundle.golden.risk, dtype="float32")
    assert caught.value.field == "trajectory"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_nan_anywhere_is_a_mismatch(bad: float, dtype: str) -> None:
    bundle = bundle_of(dtype)
    logits = bundle.golden.trajectory.astype(np.float64)
    logits[1, 0] = bad
    with pytest.raises(GoldenMismatch, match="golden prompt 1, layer 0"):
        check_golden(bundle, logits, bundle.golden.risk, dtype=dtype)
    with pytest.raises(GoldenMismatch, match="golden prompt 0"):
        check_golden(bundle, bundle.golden.trajectory, np.array([bad, bundle.golden.risk[1]]), dtype=dtype)


def test_another_shape_is_a_mismatch() -> None:
    bundle = bundle_of()
    trajectory, risk = bundle.golden.trajectory, bundle.golden.risk
    for logits, risks in (
        (trajectory[:1], risk),
        (trajectory[:, :1], risk),
        (trajectory, risk[:1]),
        (trajectory.T, risk),
    ):
        with pytest.raises(GoldenMismatch, match="another shape"):
            check_golden(bundle, logits, risks, dtype="float32")
    with pytest.raises(GoldenMismatch):
        check_golden(bundle, np.empty((0, 3)), np.empty(0), dtype="float32")


def test_permuted_layers_and_swapped_prompts_fail_even_in_half_precision() -> None:
    generator = np.random.default_rng(0)
    trajectory = generator.standard_normal((4, 6))
    golden = Golden.record([[1, 2]] * 4, trajectory, np.full(4, 0.5))
    bundle = bundle_of("bfloat16", golden, layers=6)
    for wrong in (trajectory[:, ::-1], trajectory[::-1]):
        with pytest.raises(GoldenMismatch):
            check_golden(bundle, wrong, golden.risk, dtype="bfloat16")


def test_a_constant_trajectory_does_not_ask_for_exact_equality() -> None:
    golden = Golden.record([[1]], np.array([[2.0]]), np.array([0.5]))
    bundle = bundle_of(golden=golden, layers=1)
    check_golden(bundle, np.array([[2.0 + 1e-6]]), golden.risk, dtype="float32")
    with pytest.raises(GoldenMismatch):
        check_golden(bundle, np.array([[2.1]]), golden.risk, dtype="float32")


def test_an_unknown_dtype_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="int8"):
        tolerance_for("float32", "int8")


# context probes

LAYERS = 3
TENSORS = ("context_head", "context_direction", "context_bias", "context_scale")


def context_draft(**changes: Any) -> BundleDraft:
    return make_draft(context=CONTEXT, signals=("depth_mean", "passage", "stated"), **changes)


DAMAGES = {
    "context_head": [
        ("head too high", BadValue, lambda a: np.where(np.arange(LAYERS) == 1, 2, a).astype("i4")),
        ("negative head", BadValue, lambda a: np.full_like(a, -1)),
    ],
    "context_direction": [
        ("longer than one", BadValue, lambda a: (a * np.array([1, 1, 1.01]).reshape(3, 1, 1)).astype("f4")),
        ("zero", BadValue, lambda a: np.concatenate([a[:2], np.zeros_like(a[:1])])),
    ],
    "context_scale": [
        ("zero", BadValue, lambda a: a * np.array([1, 1, 0], "f4")),
        ("negative", BadValue, lambda a: -a),
    ],
    "context_bias": [],
}


@pytest.mark.parametrize("name", TENSORS)
def test_each_tensor_is_checked(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "tiny" / "1"
    write_bundle(context_draft(), folder)
    whole = (folder / "probes.safetensors").read_bytes()
    cases: list[tuple[str, type[BundleDamaged], Any]] = [
        ("a probe too few", WrongShape, lambda a: a[:2]),
        ("a layer too few", WrongShape, lambda a: np.ascontiguousarray(a[:, :2])),
        ("as that of the risk", WrongShape, lambda a: a[0]),
        ("double precision", WrongShape, lambda a: a.astype("f8")),
        *DAMAGES[name],
    ]
    if name != "context_head":
        cases.append(("nan", BundleDamaged, lambda a: np.full_like(a, np.nan)))
    for what, error, damage in cases:

        def edit(tensors: dict[str, Any], damage: Any = damage) -> None:
            tensors[name] = damage(tensors[name])

        edit_tensors(folder, "probes.safetensors", edit)
        with pytest.raises(error) as caught:
            load_bundle(folder)
        assert (caught.value.field or "").partition("[")[0] == name, what
        replace_file(folder, "probes.safetensors", whole)
    edit_tensors(folder, "probes.safetensors", lambda tensors: tensors.pop(name))
    with pytest.raises(MissingField, match=name):
        load_bundle(folder)


def test_record_and_tensors_go_together() -> None:
    made = context_draft()
    plain = dataclasses.replace(made.probes, **dict.fromkeys(TENSORS))
    with pytest.raises(MissingField, match="context_"):
        render(dataclasses.replace(made, probes=plain))
    with pytest.raises(WrongShape, match="reference_mean"):  # one of the risk's own logits alone is none
        render(dataclasses.replace(made, probes=make_draft().probes))
    with pytest.raises(UnknownField, match="context_"):
        render(dataclasses.replace(make_draft(), probes=made.probes))
    with pytest.raises(WrongShape, match="trajectory"):
        render(dataclasses.replace(made, golden=make_draft().golden))


def spread_out(factors: Sequence[float] = (1.0, 1.0, 1e4, 1.0)) -> Bundle:
    """A bundle whose golden logits are spread by these factors, the risk's own probe first."""
    made = context_draft()
    trajectory = (made.golden.trajectory * np.repeat(factors, LAYERS)).astype(np.float32)
    golden = dataclasses.replace(made.golden, trajectory=trajectory)
    manifest, _ = render(dataclasses.replace(made, golden=golden))
    return Bundle(manifest, made.probes, golden, Path("nowhere"))


@pytest.mark.parametrize(("probe", "layer"), [(0, 1), (1, 0), (2, 2), (3, 1)])
def test_the_replay_names_the_probe_and_the_layer_at_fault(probe: int, layer: int) -> None:
    bundle = spread_out((1.0, 1.0, 1.0, 1.0))
    logits = bundle.golden.trajectory.astype(np.float64)
    logits[1, probe * LAYERS + layer] += 0.5
    with pytest.raises(GoldenMismatch) as caught:
        check_golden(bundle, logits, bundle.golden.risk, dtype="float32")
    text = str(caught.value)
    assert f"golden prompt 1, layer {layer}" in text
    assert ("context probe" in text) == (probe > 0)
    assert probe == 0 or f"layer {layer} of context probe {CONTEXT.probes[probe - 1].name}," in text
    assert caught.value.field == "trajectory"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wide_probe_hides_no_error_of_another(dtype: str) -> None:
    bundle = spread_out()
    recorded = bundle.golden.trajectory.astype(np.float64)
    check_golden(bundle, recorded, bundle.golden.risk, dtype=dtype)
    own = np.zeros_like(recorded)
    own[0, 1] = 1.0  # about one spread of the risk's own logits, nothing beside those of probe 2
    with pytest.raises(GoldenMismatch, match=r"golden prompt 0, layer 1, recorded.*deviation is 1 "):
        check_golden(bundle, recorded + own, bundle.golden.risk, dtype=dtype)
    wide = np.zeros_like(recorded)
    wide[0, 2 * LAYERS + 1] = 1.0
    check_golden(bundle, recorded + wide, bundle.golden.risk, dtype=dtype)
    # The worst is so by its probe's own spread, not by its size.
    wide[0, 2 * LAYERS + 1] = 0.9 * 1e4 * (0.25 if dtype == "bfloat16" else 1e-3)
    with pytest.raises(GoldenMismatch, match=r"golden prompt 0, layer 1, recorded"):
        check_golden(bundle, recorded + own + wide, bundle.golden.risk, dtype=dtype)


def test_a_replay_without_the_context_probes_is_of_another_shape() -> None:
    bundle = spread_out()
    with pytest.raises(GoldenMismatch, match="another shape"):
        check_golden(bundle, bundle.golden.trajectory[:, :LAYERS], bundle.golden.risk, dtype="float32")
