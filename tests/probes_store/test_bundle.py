"""A bundle's folder: bytes and digest that are pinned, and every kind of damage."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

import probes_store
from probes_store import errors
from probes_store.bundle import (
    Bundle,
    load_bundle,
    render,
)
from probes_store.errors import (
    BadValue,
    BundleDamaged,
    MissingField,
    NotFinite,
    Truncated,
    UnknownField,
    WrongShape,
)
from probes_store.tensors import AnswerTensors, Golden, ProbeTensors
from service.matching import TOLERANCES
from tests.kit.bundles import ANSWER, CONTEXT, answer_tensors, make_draft, write_bundle
from tests.kit.reseal import replace_file
from tests.kit.tables import lines

CREATED = "2026-01-31T12:00:00Z"
PROBES, GOLDEN, ANSWERS = "probes.safetensors", "golden.safetensors", "answer.safetensors"
FILES = ("bundle.json", PROBES, GOLDEN, ANSWERS, "evaluation.json", "README.md", "plots/roc.png")
KINDS = (ProbeTensors, Golden, AnswerTensors)
WITH_ANSWER = {"answer": ANSWER}
# Of the fixed draft below. If one of these changes, published bundles change: that is a new format
# version.
PINNED_DIGEST = "sha256:d21bab480555a48800b4333f1c27df4d60eb8209e89945e22afdb1a8a7e4384d"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(make_draft(**WITH_ANSWER), tmp_path / "tiny" / "1", created=CREATED)


def refuses(error: type[BundleDamaged], path: Path) -> None:
    with pytest.raises(BundleDamaged) as caught:
        load_bundle(path)
    assert type(caught.value) is error


def test_a_fixed_drafts_bytes_have_the_pinned_digest(tmp_path: Path) -> None:
    draft = make_draft(model={"num_layers": 2, "head_dim": 2, "hidden_size": 4})
    numbers = {
        "head": [1, 0],
        "direction": [[1, 0], [0, -1]],
        "bias": [0.5, -0.25],
        "reference_mean": [0.25, -0.5],
        "reference_whitening": [[2, 0], [0, 4]],
    }
    arrays = {
        name: np.array(value, "i4" if name == "head" else "f4") for name, value in numbers.items()
    }
    draft.probes = dataclasses.replace(draft.probes, **arrays)
    draft.golden = Golden.record([[1, 2, 3]], np.array([[1.0, -1.0]]), np.array([0.5]))
    bundle = write_bundle(draft, tmp_path / "1", created=CREATED)
    assert (bundle.manifest.digest, bundle.manifest.created) == (PINNED_DIGEST, CREATED)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"site": "residual_stream"},
        {
            "logit_scale": "standardized",
            "chat_template": None,
            "prompt_format": "text",
            "plots": {},
        },
        {"signals": ("depth_mean", "entropy", "log_max_prob")},
        {"model": {"num_layers": 1, "num_heads": 1}, "card": "# Überschrift\n"},
        WITH_ANSWER,
        WITH_ANSWER
        | {
            "site": "residual_stream",
            "logit_scale": "standardized",
            "context": CONTEXT,
        },
    ],
)
def test_what_is_written_is_loaded(tmp_path: Path, changes: dict[str, Any]) -> None:
    draft = make_draft(3, **changes)
    bundle = write_bundle(draft, tmp_path / "x" / "5", version=5)
    assert (bundle.answer is None) == (bundle.manifest.answer is None) == ("answer" not in changes)
    parts = (
        (draft.probes, bundle.probes),
        (draft.golden, bundle.golden),
        (draft.answer, bundle.answer),
    )
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
    path = bundle.path / name
    named = re.escape(f"tiny/1/{name}")
    whole = path.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 2):  # test_fuzz flips the others
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(
            BundleDamaged if name == "bundle.json" else errors.DigestMismatch, match=named
        ):
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


NAN = float("nan")
FIRST = {"signals": ("depth_mean", "entropy")}
WITH_CONTEXT = {"context": CONTEXT, "signals": ("depth_mean", "passage", "stated")}
EVERY_TENSOR = WITH_ANSWER | {"context": CONTEXT, "logit_scale": "standardized"} | FIRST
LAYERS, CONTEXT_TENSORS = 3, ("context_head", "context_direction", "context_bias", "context_scale")
Damage = Callable[[np.ndarray], np.ndarray]
Damaged = tuple[type[BundleDamaged], np.ndarray | None]


def put(index: int, value: float) -> Damage:
    """Another number at an index of the flattened tensor."""

    def damage(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flat[index] = value
        return array

    return damage


# At an index of the flattened tensor, numbers that one of this name does not take, in whichever
# file, with or without ``context_``.
OUTSIDE = {
    name: [put(int(index), float(number)) for index, number in (pair.split("=") for pair in pairs)]
    for name, *pairs in map(
        str.split,
        lines(
            """
            head 0=2 -1=-1
            direction 0=3
            scale 0=0
            trajectory_std 0=-1
            risk -1=1.5 0=-0.5
            first_token 0=0.5 1=-0.5
            input_ids 0=-1
            offsets 0=1 1=0 1=99 -1=6
            answer_tokens 0=0 0=4 1=6 1=-1 0=2147483647
            """
        ),
    )
}
OUTSIDE["direction"] += [np.zeros_like, lambda array: array * np.float32(1.001)]
OUTSIDE["scale"] += [np.negative]
OUTSIDE["offsets"] += [lambda array: array[:0], lambda array: array[:1]]


def damages(name: str, array: np.ndarray) -> Iterator[Damaged]:
    """What may become of a tensor, None where it goes, and the error."""
    yield MissingField, None
    yield WrongShape, array[None]
    yield WrongShape, array.astype({"f4": "f8", "f8": "f4", "i4": "i8"}[array.dtype.str[1:]])
    if name not in ("input_ids", "offsets"):  # of any length, which the others follow
        yield from ((WrongShape, np.delete(array, -1, axis)) for axis in range(array.ndim))
    if array.dtype.kind == "f":
        for number in (NAN, np.inf, -np.inf):
            yield from ((NotFinite, put(index, number)(array)) for index in (0, -1))
    for damage in OUTSIDE.get(name.removeprefix("context_"), ()):
        yield BadValue, damage(array)


@pytest.mark.parametrize("changes", [{}, WITH_ANSWER, EVERY_TENSOR])
def test_damaged_tensors_behind_right_hashes(changes: dict[str, Any]) -> None:
    manifest, files = render(make_draft(**changes))
    for kind in (kind for kind in KINDS if kind.file in files):
        tensors = load(files[kind.file])
        cases: list[tuple[str, type[BundleDamaged], np.ndarray | None]]
        cases = [(name, *pair) for name in tensors for pair in damages(name, tensors[name])]
        for name in {"extra", "first_token", "context_bias"} - tensors.keys():
            cases.append((name, UnknownField, np.zeros((2, 2), np.float32)))
        if "scale" in tensors and manifest.logit_scale == "unit_norm":
            cases.append(("scale", BadValue, put(1, 2.0)(tensors["scale"])))
        for name, error, value in cases:
            damaged = {key: array for key, array in tensors.items() if key != name}
            if value is not None:
                damaged[name] = value
            with pytest.raises(BundleDamaged) as caught:
                kind.read(save(damaged), manifest)
            field = (caught.value.field or "").partition("[")[0]
            assert (type(caught.value), caught.value.file, field) == (error, kind.file, name)


@pytest.mark.parametrize("file", [PROBES, ANSWERS])
def test_hostile_headers_behind_right_hashes(bundle: Bundle, file: str) -> None:
    """Two readers of a tensor that is listed twice may see different probes; a header may hide
    anything in padding."""
    data = (bundle.path / file).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size]
    body = data[8 + size :]
    bias = re.search(rb'"bias":\{[^}]*\}', header)
    assert bias is not None
    twice = header.rstrip().replace(b"{", b"{" + bias[0] + b",", 1)
    odd = (header + b" " * 8, header + b" " * 100_000, twice + b" " * (-len(twice) % 8))
    for hostile in (
        b"",
        b"1234567",
        b"\xff" * 16,
        b"\x02" + b"\0" * 7 + b"{}x",
        b"\x80\x04K\x01.",
        *(len(text).to_bytes(8, "little") + text + body for text in odd),
    ):
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
    # record and tensors of the context probes go together
    (
        MissingField,
        "context_",
        WITH_CONTEXT
        | {
            "probes": dataclasses.replace(
                make_draft(**WITH_CONTEXT).probes, **dict.fromkeys(CONTEXT_TENSORS)
            )
        },
    ),
    (WrongShape, "trajectory", WITH_CONTEXT | {"golden": make_draft().golden}),
]


def test_what_cannot_be_loaded_is_not_written(tmp_path: Path) -> None:
    for error, named, changes in UNWRITTEN:
        with pytest.raises(error, match=named):
            write_bundle(make_draft(**changes), tmp_path / "1")
    assert not (tmp_path / "1").exists()


def test_record_and_file_of_the_answer_go_together(tmp_path: Path) -> None:
    without = make_draft(**WITH_ANSWER)
    alone = make_draft()
    without.answer = None
    alone.answer = answer_tensors(alone.manifest)
    for draft, error in ((without, MissingField), (alone, UnknownField)):
        with pytest.raises(error, match=f"bundle.json field files.{ANSWERS}"):
            render(draft)
    bundle = write_bundle(make_draft(), tmp_path / "tiny" / "1")
    (bundle.path / ANSWERS).write_bytes(b"x")
    refuses(errors.UnknownFile, bundle.path)


def test_numbers_are_never_narrowed_silently(tmp_path: Path) -> None:
    golden = make_draft().golden
    for bad in (np.array([2**31] * 7), np.ones(7), np.array([True] * 7)):
        with pytest.raises(WrongShape, match="input_ids"):
            dataclasses.replace(golden, input_ids=bad).pack()
    answers = answer_tensors(make_draft().manifest)
    with pytest.raises(WrongShape, match=f"{ANSWERS} field answer_tokens"):
        dataclasses.replace(answers, answer_tokens=np.ones(2)).pack()
    huge = Golden(**(vars(golden) | {"trajectory": golden.trajectory.astype(np.float64) * 1e300}))
    with pytest.raises(NotFinite, match="trajectory"):
        render(make_draft(golden=huge))
    draft = make_draft(
        evaluation={"n": np.int64(3), "auroc": np.float32(0.5), "list": (1, np.float64(2.0))}
    )
    assert write_bundle(draft, tmp_path / "1").evaluation() == {
        "n": 3,
        "auroc": 0.5,
        "list": [1, 2.0],
    }


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(errors.BundleNotFound):
        load_bundle(tmp_path / "nowhere")
    refuses(errors.MissingFile, tmp_path)


FORMAT, FIELDS = (
    (Path(probes_store.__file__).parent / name).read_text(encoding="utf-8")
    for name in ("FORMAT.md", "FIELDS.md")
)


def test_the_recipe_in_format_md_recomputes_the_digest(bundle: Bundle, tmp_path: Path) -> None:
    (recipe,) = re.findall(r"```python\n(.*?)```", FORMAT, re.S)
    script = tmp_path / "check.py"
    script.write_text(recipe)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONOPTIMIZE"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": environment}
    done = subprocess.run([sys.executable, str(script), str(bundle.path)], check=True, **options)
    assert done.stdout.strip() == bundle.manifest.digest
    (bundle.path / "plots" / "roc.png").write_bytes(
        b"x" * bundle.manifest.files["plots/roc.png"].bytes
    )
    done = subprocess.run([sys.executable, str(script), str(bundle.path)], check=False, **options)
    assert done.returncode != 0
    assert "plots/roc.png" in done.stderr


def test_the_pages_name_every_tensor_and_tolerance() -> None:
    _, files = render(make_draft(**EVERY_TENSOR))
    for kind in KINDS:
        table = FIELDS.partition(f"\n| {kind.file} | dtype, shape | |\n")[2].partition("\n\n")[0]
        names = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE)))
        assert sorted(names) == sorted(load(files[kind.file])) == sorted(kind.layout())
    for dtype, limit in TOLERANCES.items():
        row = rf"\| [a-z0-9, ]*{dtype}[a-z0-9, ]* \| {limit.risk:g} \| {limit.trajectory:g} spread"
        assert re.search(row, FORMAT)


def test_importing_the_format_needs_nothing_of_ours_and_no_torch() -> None:
    banned = "{'service', 'torch', 'transformers', 'huggingface_hub'}"
    code = (
        "import sys, probes_store.store; print(sorted({m.split('.')[0] for m in sys.modules} &"
        f" {banned}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
