"""Format version 4: the context record, its tensors, the signals that need it, and their golden replay."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import probes_store
from probes_store.bundle import Bundle, BundleDraft, load_bundle, render
from probes_store.context import Applicability, Context, ContextProbe
from probes_store.errors import BadValue, BundleDamaged, GoldenMismatch, MissingField, UnknownField, WrongShape
from probes_store.golden import check_golden
from probes_store.manifest import OPTIONAL, manifest_bytes, read_manifest
from tests.probes_store.factory import VERSION_1, make_draft, write_bundle
from tests.probes_store.reseal import edit_tensors, replace_file, reseal
from tests.probes_store.test_guarantee import GUARANTEE
from tests.probes_store.test_uncertainty import UNCERTAINTY
from tests.probes_store.test_uncertainty import draft as uncertain_draft

ASKS = ContextProbe("asks", weight=1.5, intercept=0.25, rows=400, positive=300, auroc=0.99)
PASSAGE = ContextProbe("passage", weight=0.75, intercept=-0.5, rows=300, positive=100, auroc=0.95)
STATED = ContextProbe("stated", weight=0.5, intercept=0.0, rows=100, positive=60, auroc=0.8)
APPLICABILITY = Applicability(threshold=0.2, questions_below=0.01, others_above=0.05, statement="What it means.")
CONTEXT = Context((ASKS, PASSAGE, STATED), APPLICABILITY)
READING = ("depth_mean", "passage", "stated")
LAYERS = 3
TENSORS = ("context_head", "context_direction", "context_bias", "context_scale")


def draft(context: Context | None = CONTEXT, **changes: Any) -> BundleDraft:
    return make_draft(context=context, **{"signals": READING} | changes)


def document(made: BundleDraft) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(manifest_bytes(render(made)[0]))
    return parsed


def with_probe(place: int, **changes: Any) -> Context:
    probes = list(CONTEXT.probes)
    probes[place] = dataclasses.replace(probes[place], **changes)
    return dataclasses.replace(CONTEXT, probes=tuple(probes))


def test_it_is_written_as_version_4_and_read_back(tmp_path: Path) -> None:
    made = draft()
    bundle = write_bundle(made, tmp_path / "tiny" / "1")
    manifest = bundle.manifest
    assert (manifest.format_version, manifest.context, manifest.signals) == (4, CONTEXT, READING)
    assert (manifest.context_probes, manifest.logits) == (3, 4 * LAYERS)
    shapes = [(3, LAYERS), (3, LAYERS, 4), (3, LAYERS), (3, LAYERS)]
    for name, shape in zip(TENSORS, shapes, strict=True):
        found = getattr(bundle.probes, name)
        assert found.shape == shape
        assert np.array_equal(found, getattr(made.probes, name))
    assert bundle.golden.trajectory.shape == (2, 4 * LAYERS)
    assert [CONTEXT.place(name) for name in ("asks", "passage", "stated")] == [0, 1, 2]
    assert Context((PASSAGE,), None).place("asks") is None


def test_reference_and_other_records_stand_beside_it(tmp_path: Path) -> None:
    made = draft(threshold=GUARANTEE.threshold)
    manifest = dataclasses.replace(made.manifest, uncertainty=UNCERTAINTY, guarantee=GUARANTEE)
    wide = {"reference_mean": np.full(4 * LAYERS, 0.5), "reference_whitening": np.eye(4 * LAYERS)}
    made = dataclasses.replace(made, manifest=manifest, probes=dataclasses.replace(made.probes, **wide))
    read = write_bundle(made, tmp_path / "tiny" / "1")
    assert read.probes.reference_whitening is not None
    assert read.probes.reference_whitening.shape == (4 * LAYERS, 4 * LAYERS)
    found = document(made)
    assert {field for field in OPTIONAL if found[field] is None} == {"recalibration", "guarantee_shapes"}
    # A reference of the risk's own logits alone is none.
    narrow = {"reference_mean": np.full(LAYERS, 0.5), "reference_whitening": np.eye(LAYERS)}
    with pytest.raises(WrongShape, match="reference_mean"):
        render(dataclasses.replace(made, probes=dataclasses.replace(made.probes, **narrow)))


def test_versions_1_to_3_still_load_and_have_no_context(tmp_path: Path) -> None:
    guaranteed = make_draft(threshold=GUARANTEE.threshold)
    guaranteed = dataclasses.replace(guaranteed, manifest=dataclasses.replace(guaranteed.manifest, guarantee=GUARANTEE))
    bundles = [load_bundle(VERSION_1 / "demo" / "1")]
    bundles += [
        write_bundle(made, tmp_path / f"v{place}" / "1") for place, made in enumerate((guaranteed, uncertain_draft()))
    ]
    assert [bundle.manifest.format_version for bundle in bundles] == [1, 2, 3]
    for bundle in bundles:
        assert "context" not in json.loads((bundle.path / "bundle.json").read_bytes())
        assert (bundle.manifest.context, bundle.manifest.context_probes) == (None, 0)
        assert bundle.manifest.logits == bundle.manifest.model.num_layers
        assert all(getattr(bundle.probes, name) is None for name in TENSORS)


def test_a_new_field_in_an_older_version_is_unknown() -> None:
    full = document(draft())
    with pytest.raises(UnknownField, match="context"):
        read_manifest(reseal(full | {"format_version": 3}))
    with pytest.raises(MissingField, match="context"):
        read_manifest(reseal({key: value for key, value in full.items() if key != "context"}))
    with pytest.raises(BadValue, match="context"):  # version 4 without what it brought
        read_manifest(reseal(full | {"context": None, "signals": ["depth_mean"], "classifier": full["classifier"]
                                     | {"weight": [1.5]}}))  # fmt: skip
    with pytest.raises(BadValue, match="format_version"):
        read_manifest(reseal(full | {"format_version": 5}))


def records(parsed: dict[str, Any]) -> list[tuple[type, str, dict[str, Any]]]:
    """Each record inside the context, where messages say it is, and its JSON."""
    found = parsed["context"]
    return [
        (Context, "context", found),
        (Applicability, "context.applicability", found["applicability"]),
        *((ContextProbe, f"context.probes[{place}]", probe) for place, probe in enumerate(found["probes"])),
    ]


def test_every_field_is_required_and_no_other_is_known() -> None:
    parsed = document(draft())
    for record, where, inside in records(parsed):
        for field in dataclasses.fields(record):
            value = inside.pop(field.name)
            with pytest.raises(MissingField) as caught:
                read_manifest(reseal(dict(parsed)))
            assert caught.value.field == f"{where}.{field.name}"
            inside[field.name] = value
        inside["more"] = 1
        with pytest.raises(UnknownField) as unknown:
            read_manifest(reseal(dict(parsed)))
        assert unknown.value.field == f"{where}.more"
        del inside["more"]
    assert read_manifest(reseal(dict(parsed))) == render(draft())[0]


PROBE_CHANGES: list[dict[str, Any]] = [
    {"weight": 0.0}, {"weight": -1.0}, {"weight": math.inf}, {"intercept": math.nan}, {"positive": 0},
    {"positive": 100}, {"rows": 60}, {"auroc": -0.01}, {"auroc": 1.01}, {"auroc": math.nan}, {"name": "other"},
]  # fmt: skip


@pytest.mark.parametrize("change", PROBE_CHANGES, ids=str)
def test_a_senseless_probe_is_refused_by_name(change: dict[str, Any]) -> None:
    field = "positive" if "rows" in change else next(iter(change))
    with pytest.raises(BundleDamaged) as caught:
        render(draft(with_probe(2, **change)))
    assert caught.value.field == f"context.probes[2].{field}"


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 0.0}, {"threshold": 1.0}, {"threshold": math.nan}, {"questions_below": -0.01},
        {"questions_below": 1.01}, {"others_above": -0.01}, {"others_above": 1.01}, {"statement": ""},
    ],
    ids=str,
)  # fmt: skip
def test_a_senseless_applicability_is_refused_by_name(change: dict[str, Any]) -> None:
    context = dataclasses.replace(CONTEXT, applicability=dataclasses.replace(APPLICABILITY, **change))
    with pytest.raises(BundleDamaged) as caught:
        render(draft(context))
    assert caught.value.field == f"context.applicability.{next(iter(change))}"


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
    ],
    ids=[
        "none",
        "twice",
        "no stated",
        "no stated, length",
        "no passage",
        "asks alone",
        "applicability without asks",
        "asks without it",
    ],
)
def test_probes_signals_and_applicability_go_together(
    probes: tuple[ContextProbe, ...], applicability: Applicability | None, signals: Sequence[str], field: str
) -> None:
    parsed = document(draft())
    context = dataclasses.asdict(Context(probes, applicability))
    parsed |= {"context": context, "signals": list(signals)}
    parsed["classifier"]["weight"] = [1.5] * len(signals)
    with pytest.raises(BadValue) as caught:
        read_manifest(reseal(parsed))
    assert caught.value.field == field


@pytest.mark.parametrize("signal", ["passage", "stated", "stated_length"])
def test_a_signal_without_any_context_is_refused(signal: str) -> None:
    with pytest.raises(BadValue) as caught:
        render(draft(None, signals=("depth_mean", signal)))
    assert caught.value.field == "context"
    assert signal in str(caught.value)


def test_some_of_the_probes_are_enough() -> None:
    for context, signals in (
        (Context((ASKS,), APPLICABILITY), ("depth_mean", "entropy")),
        (Context((STATED, PASSAGE), None), READING),
        (Context((STATED, PASSAGE), None), (*READING, "stated_length")),
        (Context((PASSAGE,), None), ("depth_mean", "passage")),
    ):
        manifest, _ = render(draft(context, signals=signals))
        assert (manifest.context, manifest.format_version) == (context, 4)


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
    write_bundle(draft(), folder)
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
    made = draft()
    with pytest.raises(MissingField, match="context_"):
        render(dataclasses.replace(made, probes=make_draft().probes))
    with pytest.raises(UnknownField, match="context_"):
        render(dataclasses.replace(make_draft(), probes=made.probes))
    with pytest.raises(WrongShape, match="trajectory"):
        render(dataclasses.replace(made, golden=make_draft().golden))


def spread_out(factors: Sequence[float] = (1.0, 1.0, 1e4, 1.0)) -> Bundle:
    """A bundle whose golden logits are spread by these factors, the risk's own probe first."""
    made = draft()
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


def test_format_md_describes_the_context() -> None:
    text = (Path(probes_store.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
    newest = max(OPTIONAL.values())
    assert f"# The bundle format, versions 1 to {newest}\n" in text
    assert f"This one reads versions 1 to {newest}," in text
    section = text.partition("### context\n")[2].partition("\n## ")[0]
    for record, prefix in ((Context, ""), (ContextProbe, "probes[]"), (Applicability, "applicability")):
        for field in dataclasses.fields(record):
            row = [line for line in section.splitlines() if line.startswith(f"| `{prefix}")]
            names = (f"`{prefix}.{field.name}`", f"`.{field.name}`") if prefix else (f"`{field.name}`",)
            assert any(name in line for line in row for name in names), f"{record.__name__}.{field.name}"
    assert all(f"`{probe.name}`" in section for probe in CONTEXT.probes)
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "(1 + A) m" in rows["`trajectory`"]
