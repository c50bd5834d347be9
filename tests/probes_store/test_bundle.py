"""A bundle's folder: bytes and digest that are pinned, every kind of damage, and the replay of golden rows."""

from __future__ import annotations

import dataclasses
import os
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

import probes_store
from probes_store import errors, manifest, records
from probes_store.bundle import (
    TOLERANCES,
    Bundle,
    check_answers,
    check_golden,
    load_bundle,
    render,
    spreads,
    tolerance_for,
)
from probes_store.errors import BadValue, BundleDamaged, MissingField, NotFinite, Truncated, UnknownField, WrongShape
from probes_store.tensors import AnswerTensors, Golden, ProbeTensors, pack, read_answer, read_golden, read_probes
from tests.probes_store.factory import ANSWER, CONTEXT, answer_tensors, make_draft, write_bundle
from tests.probes_store.reseal import replace_file

CREATED = datetime(2026, 1, 31, 12, tzinfo=UTC)
PROBES, GOLDEN, ANSWERS = "probes.safetensors", "golden.safetensors", "answer.safetensors"
FILES = ("bundle.json", PROBES, GOLDEN, ANSWERS, "evaluation.json", "README.md", "plots/roc.png")
READERS = {PROBES: read_probes, GOLDEN: read_golden, ANSWERS: read_answer}
WITH_ANSWER = {"answer": ANSWER}
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
PADDING = b" " * (-len(PINNED_HEADER) % 8)
PINNED_NUMBERS = struct.pack("<2f 4f 2f 4f 2f", 0.5, -0.25, 1, 0, 0, -1, 0.25, -0.5, 2, 0, 0, 4, 1, 1)
PINNED_NUMBERS += struct.pack("<4f 4f 2i", -0.5, -0.5, 0.5, 0.5, 1, 1, 1, 1, 1, 0)
PINNED_PROBES = struct.pack("<Q", len(PINNED_HEADER + PADDING)) + PINNED_HEADER + PADDING + PINNED_NUMBERS


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(make_draft(**WITH_ANSWER), tmp_path / "tiny" / "1", created=CREATED)


def refuses(error: type[BundleDamaged], path: Path) -> None:
    with pytest.raises(BundleDamaged) as caught:
        load_bundle(path)
    assert type(caught.value) is error


def test_pinned_bytes_and_digest(tmp_path: Path) -> None:
    draft = make_draft(model={"num_layers": 2, "head_dim": 2, "hidden_size": 4})
    numbers = {"head": [1, 0], "direction": [[1, 0], [0, -1]], "bias": [0.5, -0.25], "reference_mean": [0.25, -0.5],
               "reference_whitening": [[2, 0], [0, 4]]}  # fmt: skip
    arrays = {name: np.array(value, "i4" if name == "head" else "f4") for name, value in numbers.items()}
    draft.probes = dataclasses.replace(draft.probes, **arrays)
    draft.golden = Golden.record([[1, 2, 3]], np.array([[1.0, -1.0]]), np.array([0.5]))
    bundle = write_bundle(draft, tmp_path / "1", created=CREATED)
    assert (tmp_path / "1" / PROBES).read_bytes() == PINNED_PROBES
    assert (bundle.manifest.digest, bundle.manifest.created) == (PINNED_DIGEST, "2026-01-31T12:00:00Z")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"site": "residual_stream"},
        {"logit_scale": "standardized", "chat_template": None, "prompt_format": "text", "plots": {}},
        {"signals": ("depth_mean", "entropy", "log_max_prob")},
        {"model": {"num_layers": 1, "num_heads": 1}, "card": "# Überschrift\n"},
        WITH_ANSWER,
        WITH_ANSWER | {"site": "residual_stream", "logit_scale": "standardized", "context": CONTEXT},
    ],
)
def test_what_is_written_is_loaded(tmp_path: Path, changes: dict[str, Any]) -> None:
    draft = make_draft(3, **changes)
    bundle = write_bundle(draft, tmp_path / "x" / "5", version=5)
    assert (bundle.answer is None) == (bundle.manifest.answer is None) == ("answer" not in changes)
    parts = ((draft.probes, bundle.probes), (draft.golden, bundle.golden), (draft.answer, bundle.answer))
    for tensors, loaded in parts:
        for name, value in vars(tensors).items() if tensors is not None else ():
            found = getattr(loaded, name)
            if value is None:
                assert found is None
                continue
            np.testing.assert_array_equal(found, value, strict=True)
            assert not found.flags.writeable
    assert (bundle.reference, bundle.manifest.signals) == ("tiny:5", draft.manifest.signals)
    assert (bundle.evaluation(), bundle.card()) == (draft.evaluation, draft.card)
    assert bundle.golden.prompts() == [[1, 5, 9], [1, 7, 2, 3]]
    assert bundle.answer is None or bundle.answer.rows() == [[1, 5, 9, 4], [1, 7, 2, 3, 8, 6]]


def test_equal_drafts_have_equal_bytes_and_every_part_is_in_the_digest() -> None:
    assert render(make_draft()) == render(make_draft())
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 5},
        {"card": "other"},
        {"evaluation": {}},
        {"plots": {}},
        {"threshold": 0.4},
        WITH_ANSWER,
        {"answer": dataclasses.replace(ANSWER, threshold=0.5)},
    ]
    assert len({render(make_draft(**change))[0].digest for change in changes}) == len(changes)


@pytest.mark.parametrize("name", FILES)
def test_changed_truncated_longer_missing_and_replaced_files(bundle: Bundle, name: str) -> None:
    path, named = bundle.path / name, re.escape(f"tiny/1/{name}")
    whole = path.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 2):  # test_fuzz flips the others
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BundleDamaged if name == "bundle.json" else errors.DigestMismatch, match=named):
            load_bundle(bundle.path)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(Truncated, match=named):
            load_bundle(bundle.path)
    path.write_bytes(whole + b"x" * (1 << 20))
    with pytest.raises(BundleDamaged, match=named):
        load_bundle(bundle.path)
    path.unlink()
    for make in (lambda: None, path.mkdir):
        make()
        with pytest.raises(errors.MissingFile, match=named):
            load_bundle(bundle.path)


def test_files_that_are_unknown_or_link_out_of_the_bundle(bundle: Bundle, tmp_path: Path) -> None:
    (bundle.path / ".DS_Store").write_bytes(b"x")
    (bundle.path / "model.sig").write_bytes(b"x")
    load_bundle(bundle.path)
    (bundle.path / "plots" / "probes.pkl").write_bytes(b"x")
    refuses(errors.UnknownFile, bundle.path)
    (bundle.path / "plots" / "probes.pkl").unlink()
    card = bundle.path / "README.md"
    card.rename(tmp_path / "elsewhere.md")
    card.symlink_to(tmp_path / "elsewhere.md")
    refuses(BadValue, bundle.path)


def put(index: Any, value: float) -> Any:
    def damage(array: np.ndarray) -> np.ndarray:
        array[index] = value
        return array

    return damage


def add(**arrays: Any) -> Any:
    return lambda tensors: tensors.update(arrays)


NAN, INF = float("nan"), float("inf")
FIRST = {"signals": ("depth_mean", "entropy")}
WITH_CONTEXT = {"context": CONTEXT, "signals": ("depth_mean", "passage", "stated")}
ANSWER_TENSORS = (
    "head", "direction", "bias", "scale", "trajectory", "risk", "input_ids", "offsets", "answer_tokens",
)  # fmt: skip
LAYERS, CONTEXT_TENSORS = 3, ("context_head", "context_direction", "context_bias", "context_scale")
# The draft's changes, file, error, tensor, what becomes of it: None where it goes, a function of all where it is new.
DAMAGE: list[tuple[dict[str, Any], str, type[BundleDamaged], str, Any]] = [
    *(({}, PROBES, error, tensor, change) for error, tensor, change in (
        (NotFinite, "direction", put((1, 2), NAN)), (NotFinite, "bias", put(0, INF)), (NotFinite, "scale", put(0, NAN)),
        (NotFinite, "trajectory_mean", put((0, 0), -INF)), (NotFinite, "trajectory_std", put((1, 2), NAN)),
        (BadValue, "direction", put((0, 0), 3.0)), (BadValue, "direction", np.zeros_like),
        (BadValue, "head", put(0, 2)), (BadValue, "head", put(2, -1)), (BadValue, "scale", put(1, 2.0)),
        (BadValue, "scale", put(1, 0.0)), (BadValue, "trajectory_std", put((0, 0), -1.0)),
        (WrongShape, "bias", lambda a: a[:2]), (WrongShape, "bias", lambda a: a[None]),
        (WrongShape, "direction", lambda a: np.ascontiguousarray(a.T)),
        (WrongShape, "direction", lambda a: a.astype("f8")), (WrongShape, "head", lambda a: a.astype("i8")),
        (UnknownField, "extra", add(extra=np.zeros(1, "f4"))), (MissingField, "scale", None))),
    *(({}, GOLDEN, error, tensor, change) for error, tensor, change in (
        (NotFinite, "trajectory", put((0, 0), NAN)), (NotFinite, "risk", put(1, NAN)), (BadValue, "risk", put(1, 1.5)),
        (BadValue, "input_ids", put(0, -1)), (BadValue, "offsets", put(0, 1)), (BadValue, "offsets", put(1, 0)),
        (BadValue, "offsets", put(1, 7)), (BadValue, "offsets", put(2, 6)), (BadValue, "offsets", lambda a: a[:0]),
        (BadValue, "offsets", lambda a: a[:1]), (WrongShape, "risk", lambda a: a[:1]),
        (WrongShape, "trajectory", lambda a: a[:, :2]), (WrongShape, "trajectory", lambda a: a[:1]),
        (UnknownField, "first_token", add(first_token=np.zeros((2, 2), "f4"))), (MissingField, "input_ids", None))),
    *((FIRST, GOLDEN, error, "first_token", change) for error, change in (
        (MissingField, None), (WrongShape, lambda a: a[:, :1]), (WrongShape, lambda a: a[:1]),
        (BadValue, put((0, 0), 0.5)), (BadValue, put((0, 1), -0.5)))),
    *((WITH_CONTEXT, PROBES, error, tensor, change) for tensor in CONTEXT_TENSORS for error, change in (
        (WrongShape, lambda a: a[:2]), (WrongShape, lambda a: np.ascontiguousarray(a[:, :2])),
        (WrongShape, lambda a: a[0]), (WrongShape, lambda a: a.astype("f8")), (MissingField, None))),
    *((WITH_CONTEXT, PROBES, NotFinite, tensor, lambda a: np.full_like(a, NAN)) for tensor in CONTEXT_TENSORS[1:]),
    *((WITH_CONTEXT, PROBES, BadValue, tensor, change) for tensor, change in (
        ("context_head", put((1, 1), 2)), ("context_head", put(0, -1)), ("context_direction", put((2, 1), 0.0)),
        ("context_direction", lambda a: (a * np.array([1, 1, 1.01]).reshape(3, 1, 1)).astype("f4")),
        ("context_scale", put((0, 2), 0.0)), ("context_scale", np.negative))),
    *((WITH_ANSWER, ANSWERS, error, tensor, change) for error, tensor, change in (
        *((MissingField, tensor, None) for tensor in ANSWER_TENSORS),
        *((WrongShape, tensor, lambda a: a[None]) for tensor in ANSWER_TENSORS),
        *((WrongShape, tensor, lambda a: a.astype("i8")) for tensor in ANSWER_TENSORS),
        *((WrongShape, tensor, lambda a: a[:1]) for tensor in ANSWER_TENSORS if tensor not in ("input_ids", "offsets")),
        *((NotFinite, tensor, lambda a: np.full_like(a, NAN)) for tensor in ANSWER_TENSORS[1:6]),
        (WrongShape, "trajectory", lambda a: a[:, :2]), (WrongShape, "direction", lambda a: np.ascontiguousarray(a.T)),
        (BadValue, "head", put(0, 2)), (BadValue, "head", put(2, -1)), (BadValue, "direction", put((0, 0), 3.0)),
        (BadValue, "direction", np.zeros_like), (BadValue, "scale", put(1, 2.0)), (BadValue, "scale", put(1, 0.0)),
        (BadValue, "risk", put(1, 1.5)), (BadValue, "risk", put(0, -0.5)), (BadValue, "input_ids", put(0, -1)),
        (BadValue, "offsets", put(0, 1)), (BadValue, "offsets", put(1, 0)), (BadValue, "offsets", put(2, 9)),
        (BadValue, "offsets", lambda a: a[:0]), (BadValue, "offsets", lambda a: a[:1]),
        *((BadValue, "answer_tokens", put(*wrong)) for wrong in ((0, 0), (0, 4), (1, 6), (1, -1), (0, 2**31 - 1))),
        *((UnknownField, name, add(**{name: np.zeros((2, 2), "f4")})) for name in ("first_token", "context_bias")))),
    (WITH_ANSWER | {"logit_scale": "standardized"}, ANSWERS, BadValue, "scale", np.negative),
]  # fmt: skip


def test_damaged_tensors_behind_right_hashes() -> None:
    for changes, file, error, tensor, damage in DAMAGE:
        manifest, files = render(make_draft(**changes))
        tensors = {key: np.array(value) for key, value in load(files[file]).items()}
        if tensor not in tensors:
            damage(tensors)
        elif damage is None:
            del tensors[tensor]
        else:
            tensors[tensor] = damage(tensors[tensor])
        with pytest.raises(BundleDamaged) as caught:
            READERS[file](save(tensors), manifest, "there")
        found = caught.value
        assert (type(found), found.file, (found.field or "").partition("[")[0]) == (error, "there", tensor), found


@pytest.mark.parametrize("file", [PROBES, ANSWERS])
def test_hostile_headers_behind_right_hashes(bundle: Bundle, file: str) -> None:
    """Two readers of a tensor that is listed twice may see different probes; a header may hide anything in padding."""
    data = (bundle.path / file).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    bias = re.search(rb'"bias":\{[^}]*\}', header)
    assert bias is not None
    twice = header.rstrip().replace(b"{", b"{" + bias[0] + b",", 1)
    odd = (header + b" " * 8, header + b" " * 100_000, twice + b" " * (-len(twice) % 8))
    for hostile in (b"", b"1234567", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"{}x", b"\x80\x04K\x01.",
                    *(len(text).to_bytes(8, "little") + text + body for text in odd)):  # fmt: skip
        replace_file(bundle.path, file, hostile)
        with pytest.raises((BadValue, UnknownField), match=f"tiny/1/{file}"):
            load_bundle(bundle.path)
    replace_file(bundle.path, file, data)
    load_bundle(bundle.path)


def test_evaluation_and_card_are_checked_when_read(bundle: Bundle) -> None:
    (bundle.path / "evaluation.json").write_bytes(b"{}\n")
    with pytest.raises(Truncated):
        bundle.evaluation()
    replace_file(bundle.path, "evaluation.json", b"[1]\n")
    replace_file(bundle.path, "README.md", b"\xff")
    for read in (load_bundle(bundle.path).evaluation, load_bundle(bundle.path).card):
        with pytest.raises(BadValue):
            read()


UNWRITTEN: list[tuple[type[BundleDamaged], str, dict[str, Any]]] = [
    (BadValue, "README.md", {"card": " \n"}),
    (NotFinite, "threshold", {"threshold": NAN}),
    (NotFinite, r"evaluation.json field a\[1\].b", {"evaluation": {"a": [1, {"b": NAN}]}}),
    (BadValue, "evaluation.json field x", {"evaluation": {"x": {1, 2}}}),
    (BadValue, "evaluation.json", {"evaluation": {1: 2}}),
    (BadValue, "evaluation.json field x", {"evaluation": {"x": "half \ud800"}}),
    (UnknownField, "plots/../x.png", {"plots": {"../x.png": b""}}),
    (UnknownField, "first_token", {"golden": make_draft(**FIRST).golden}),
    (BadValue, "signals", {"signals": ("entropy",)}),
    (WrongShape, "direction", {"probes": make_draft(site="residual_stream").probes}),
    # record and tensors of the context probes go together
    (MissingField, "context_", WITH_CONTEXT | {"probes": dataclasses.replace(
        make_draft(**WITH_CONTEXT).probes, **dict.fromkeys(CONTEXT_TENSORS))}),
    (WrongShape, "reference_mean", WITH_CONTEXT | {"probes": make_draft().probes}),
    (UnknownField, "context_", {"probes": make_draft(**WITH_CONTEXT).probes}),
    (WrongShape, "trajectory", WITH_CONTEXT | {"golden": make_draft().golden}),
]  # fmt: skip


def test_what_cannot_be_loaded_is_not_written(tmp_path: Path) -> None:
    for error, named, changes in UNWRITTEN:
        with pytest.raises(error, match=named):
            write_bundle(make_draft(**changes), tmp_path / "1")
    assert not (tmp_path / "1").exists()


def test_record_and_file_of_the_answer_go_together(tmp_path: Path) -> None:
    without, alone = make_draft(**WITH_ANSWER), make_draft()
    without.answer, alone.answer = None, answer_tensors(alone.manifest)
    for draft, error in ((without, MissingField), (alone, UnknownField)):
        with pytest.raises(error, match=f"bundle.json field files.{ANSWERS}"):
            render(draft)
    bundle = write_bundle(make_draft(), tmp_path / "tiny" / "1")
    (bundle.path / ANSWERS).write_bytes(render(make_draft(**WITH_ANSWER))[1][ANSWERS])
    refuses(errors.UnknownFile, bundle.path)
    replace_file(bundle.path, ANSWERS, (bundle.path / ANSWERS).read_bytes())
    refuses(UnknownField, bundle.path)


def test_numbers_are_never_narrowed_silently(tmp_path: Path) -> None:
    golden = make_draft().golden
    for bad in (np.array([2**31] * 7), np.ones(7), np.array([True] * 7)):
        with pytest.raises(WrongShape, match="input_ids"):
            pack(Golden(**(vars(golden) | {"input_ids": bad})), GOLDEN)
    with pytest.raises(WrongShape, match=f"{ANSWERS} field answer_tokens"):
        pack(dataclasses.replace(answer_tensors(make_draft().manifest), answer_tokens=np.ones(2)), ANSWERS)
    huge = Golden(**(vars(golden) | {"trajectory": golden.trajectory.astype(np.float64) * 1e300}))
    with pytest.raises(NotFinite, match="trajectory"):
        render(make_draft(golden=huge))
    draft = make_draft(evaluation={"n": np.int64(3), "auroc": np.float32(0.5), "list": (1, np.float64(2.0))})
    assert write_bundle(draft, tmp_path / "1").evaluation() == {"n": 3, "auroc": 0.5, "list": [1, 2.0]}


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(errors.BundleNotFound):
        load_bundle(tmp_path / "nowhere")
    refuses(errors.MissingFile, tmp_path)


FORMAT, FIELDS = (
    (Path(probes_store.__file__).parent / name).read_text(encoding="utf-8") for name in ("FORMAT.md", "FIELDS.md")
)


def test_the_recipe_in_format_md_recomputes_the_digest(bundle: Bundle, tmp_path: Path) -> None:
    (recipe,) = re.findall(r"```python\n(.*?)```", FORMAT, re.S)
    script = tmp_path / "check.py"
    script.write_text(recipe)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONOPTIMIZE"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": environment}
    done = subprocess.run([sys.executable, str(script), str(bundle.path)], check=True, **options)
    assert done.stdout.strip() == bundle.manifest.digest
    (bundle.path / "plots" / "roc.png").write_bytes(b"x" * bundle.manifest.files["plots/roc.png"].bytes)
    done = subprocess.run([sys.executable, str(script), str(bundle.path)], check=False, **options)
    assert done.returncode != 0
    assert "plots/roc.png" in done.stderr


def test_the_pages_name_every_field_tensor_and_tolerance() -> None:
    for record in (
        manifest.Manifest, manifest.ModelRecord, manifest.ReadoutRecord, manifest.Classifier, manifest.TrainingRecord,
        ProbeTensors, Golden, records.Guarantee, records.Uncertainty, records.RefitInterval, records.Recalibration,
        records.Context, records.ContextProbe, records.Applicability, records.AnswerProbe, AnswerTensors,
    ):  # fmt: skip
        for field in dataclasses.fields(record):
            if field.name not in ("model", "tokenizer", "chat_template", "readout", "classifier", "training"):
                assert re.search(rf"`([a-z_\[\]]*\.)?{field.name}`", FIELDS), f"{record.__name__}.{field.name}"
    for dtype, limit in TOLERANCES.items():
        row = rf"\| [a-z0-9, ]*{dtype}[a-z0-9, ]* \| {limit.risk:g} \| {limit.trajectory:g} spread"
        assert re.search(row, FORMAT)


def test_importing_the_format_needs_nothing_of_ours_and_no_torch() -> None:
    banned = "{'service', 'torch', 'transformers', 'huggingface_hub'}"
    code = f"import sys, probes_store.store; print(sorted({{m.split('.')[0] for m in sys.modules}} & {banned}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def bundle_of(dtype: str = "float32", golden: Golden | None = None, layers: int = 3) -> Bundle:
    draft = make_draft(dtype=dtype, model={"num_layers": layers})
    draft.golden = golden or draft.golden
    return Bundle(render(draft)[0], draft.probes, draft.golden, Path("nowhere"))


def exact(bundle: Bundle) -> tuple[np.ndarray, np.ndarray]:
    """A replay to change: logits and risks."""
    return bundle.golden.trajectory.astype(np.float64), bundle.golden.risk.copy()


def mismatch(bundle: Bundle, logits: np.ndarray, risks: np.ndarray, dtype: str = "float32", named: str = "") -> str:
    """The replay is refused; the message."""
    with pytest.raises(errors.GoldenMismatch, match=named) as caught:
        check_golden(bundle, logits, risks, dtype=dtype)
    return f"{caught.value.field}: {caught.value}"


@pytest.mark.parametrize(
    ("trained", "served", "trajectory", "risk"),
    [
        ("float32", "float32", 1e-3, 1e-3), ("float32", "bfloat16", 0.25, 0.05), ("float16", "float32", 0.25, 0.05),
        ("bfloat16", "float16", 0.25, 0.05),
    ],
)  # fmt: skip
def test_the_looser_dtype_decides(trained: str, served: str, trajectory: float, risk: float) -> None:
    bundle = bundle_of(trained)
    check_golden(bundle, *exact(bundle), dtype=served)
    for prompt, layer, factor in product((0, 1), (0, 1, 2), (-1.01, -0.99, 0.99, 1.01)):
        logits, risks = exact(bundle)
        logits[prompt, layer] += factor * trajectory * spreads(bundle.golden.trajectory, 3)[layer]
        risks[prompt] += factor * risk
        for replay in ((logits, bundle.golden.risk), (bundle.golden.trajectory, risks)):
            if abs(factor) < 1:
                check_golden(bundle, *replay, dtype=served)
            else:
                mismatch(bundle, *replay, served, f"golden prompt {prompt}")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_nan_another_shape_and_permuted_layers_and_prompts_are_a_mismatch(dtype: str) -> None:
    bundle = bundle_of(dtype)
    for bad in (np.nan, np.inf, -np.inf):
        logits, risks = exact(bundle)
        logits[1, 0], risks[0] = bad, bad
        mismatch(bundle, logits, bundle.golden.risk, dtype, "golden prompt 1, layer 0")
        mismatch(bundle, bundle.golden.trajectory, risks, dtype, "golden prompt 0")
    logits, risks = exact(bundle)
    for replay in ((logits[:1], risks), (logits[:, :1], risks), (logits, risks[:1]), (logits.T, risks),
                   (np.empty((0, 3)), np.empty(0))):  # fmt: skip
        mismatch(bundle, *replay, dtype, "another shape")
    trajectory = np.random.default_rng(0).standard_normal((4, 6))
    wider = bundle_of(dtype, Golden.record([[1, 2]] * 4, trajectory, np.full(4, 0.5)), layers=6)
    for wrong in (trajectory[:, ::-1], trajectory[::-1]):
        mismatch(wider, wrong, wider.golden.risk, dtype)


def test_a_constant_trajectory_does_not_ask_for_exact_equality() -> None:
    bundle = bundle_of(golden=Golden.record([[1]], np.array([[2.0]]), np.array([0.5])), layers=1)
    check_golden(bundle, np.array([[2.0 + 1e-6]]), bundle.golden.risk, dtype="float32")
    mismatch(bundle, np.array([[2.1]]), bundle.golden.risk)
    with pytest.raises(ValueError, match="int8"):
        tolerance_for("float32", "int8")


def spread_out(factors: Sequence[float] = (1.0, 1.0, 1e4, 1.0)) -> Bundle:
    """A bundle whose golden logits are spread by these factors, the risk's own probe first."""
    made = make_draft(**WITH_CONTEXT)
    trajectory = (made.golden.trajectory * np.repeat(factors, LAYERS)).astype(np.float32)
    made.golden = dataclasses.replace(made.golden, trajectory=trajectory)
    return Bundle(render(made)[0], made.probes, made.golden, Path("nowhere"))


@pytest.mark.parametrize(("probe", "layer"), [(0, 1), (1, 0), (2, 2), (3, 1)])
def test_the_worst_probe_and_layer_are_named(probe: int, layer: int) -> None:
    bundle = spread_out((1.0, 1.0, 1.0, 1.0))
    logits, risks = exact(bundle)
    logits[0, 4] += 0.25
    logits[1, probe * LAYERS + layer] += 3.0
    of = f" of context probe {CONTEXT.probes[probe - 1].name}" if probe else ""
    said = mismatch(bundle, logits, risks, named=rf"golden prompt 1, layer {layer}{of},.*deviation is 3 ")
    assert said.startswith("trajectory:")
    mismatch(bundle, bundle.golden.trajectory[:, :LAYERS], risks, named="another shape")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wide_probe_hides_no_error_of_another(dtype: str) -> None:
    bundle = spread_out()
    recorded, risks = exact(bundle)
    own, wide = np.zeros_like(recorded), np.zeros_like(recorded)
    own[0, 1] = 1.0  # about one spread of the risk's own logits, nothing beside those of probe 2
    mismatch(bundle, recorded + own, risks, dtype, r"golden prompt 0, layer 1, recorded.*deviation is 1 ")
    wide[0, 2 * LAYERS + 1] = 1.0
    check_golden(bundle, recorded + wide, risks, dtype=dtype)
    # The worst is so by its probe's own spread, not by its size.
    wide[0, 2 * LAYERS + 1] = 0.9 * 1e4 * (0.25 if dtype == "bfloat16" else 1e-3)
    mismatch(bundle, recorded + own + wide, risks, dtype, "golden prompt 0, layer 1, recorded")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_golden_answers_are_compared_as_golden_prompts_are(dtype: str) -> None:
    made = make_draft(**WITH_ANSWER | {"context": CONTEXT, "dtype": dtype})
    answer, limit = answer_tensors(made.manifest), TOLERANCES[dtype]
    bundle = Bundle(render(made)[0], made.probes, made.golden, Path("nowhere"), answer)
    recorded, risks = answer.trajectory.astype(np.float64), answer.risk
    found = check_answers(bundle, recorded, risks, dtype=dtype)
    assert (found.found.risk, found.found.trajectory, found.allowed) == (0.0, 0.0, limit)
    one, risk = np.zeros_like(recorded), np.zeros_like(risks)
    one[1, 2], risk[0] = limit.trajectory * spreads(recorded, LAYERS)[2], limit.risk
    check_answers(bundle, recorded + 0.99 * one, risks + 0.99 * risk, dtype=dtype)
    for logits, other, named in (
        (recorded + 1.01 * one, risks, "trajectory: .*golden answer 1, layer 2, recorded"),
        (recorded + NAN * one, risks, "trajectory: .*golden answer 0, layer 0, recorded"),  # the first NaN
        (recorded, risks + 1.01 * risk, "risk: .*golden answer 0, recorded"),
        (recorded, risks * np.array([1, NAN]), "risk: .*golden answer 1, recorded"),
        (recorded[:, ::-1], risks, "trajectory: .*golden answer"),
        (bundle.golden.trajectory, risks, "trajectory: .*replay of its golden answers has another shape"),
        (recorded, risks[:1], "risk: .*replay of its golden answers has another shape"),
    ):
        with pytest.raises(errors.GoldenMismatch) as caught:
            check_answers(bundle, logits, other, dtype=dtype)
        assert re.search(named, f"{caught.value.field}: {caught.value}")
    with pytest.raises(ValueError, match="tiny:1 has no answer probe"):
        check_answers(bundle_of(dtype), recorded, risks, dtype=dtype)
