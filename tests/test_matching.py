"""Whether a loaded model may serve a bundle: the model of its training, and the replay of golden
rows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store import errors
from probes_store.bundle import Bundle, render
from probes_store.tensors import Golden, GoldenRows
from service.engines.base import ModelIdentity
from service.matching import (
    TOLERANCES,
    Deviation,
    Tolerance,
    check_answers,
    check_golden,
    check_identity,
    spreads,
    tolerance_for,
)
from service.readout import Geometry
from tests.kit.bundles import CONTEXT, MODEL, make_draft
from tests.probes_store.test_bundle import LAYERS, WITH_ANSWER, WITH_CONTEXT, put

OTHER = "sha256:" + "9" * 64
MANIFEST = render(make_draft())[0]
LOADED = ModelIdentity(
    model="/another/folder",
    revision="local",
    fingerprint=MODEL.fingerprint,
    architecture=MODEL.architecture,
    model_type=MODEL.model_type,
    tokenizer=MANIFEST.tokenizer.digest,
    chat_template=MANIFEST.chat_template.digest,
    dtype="bfloat16",
    geometry=Geometry(3, 2, 4, 8),
    max_tokens=64,
)
# In the order in which they are checked.
WRONG: list[tuple[type[errors.BundleRefused], str, dict[str, Any]]] = [
    (errors.WrongModel, "model.architecture", {"architecture": "GPT2LMHeadModel"}),
    (errors.WrongModel, "model.fingerprint", {"fingerprint": OTHER}),
    (errors.WrongModel, "model.adapter", {"adapter": OTHER}),
    *(
        (errors.WrongGeometry, f"model.{size}", {"geometry": Geometry(*shape)})
        for size, shape in (
            ("num_layers", (4, 2, 4, 8)),
            ("num_heads", (3, 1, 4, 8)),
            ("head_dim", (3, 2, 8, 8)),
            ("hidden_size", (3, 2, 4, 16)),
        )
    ),
    (errors.WrongTokenizer, "tokenizer.digest", {"tokenizer": OTHER}),
    *(
        (errors.WrongChatTemplate, "chat_template.digest", {"chat_template": other})
        for other in (OTHER, None)
    ),
    (
        errors.WrongChatTemplate,
        "chat_template.arguments",
        {"template_arguments": {"enable_thinking": False}},
    ),
]


def test_each_difference_of_the_model_has_its_own_error_and_the_first_in_order_is_named() -> None:
    check_identity(MANIFEST, LOADED)  # under another name and dtype
    bare = render(make_draft(chat_template=None))[0]
    check_identity(bare, dataclasses.replace(LOADED, chat_template=None))
    with pytest.raises(errors.WrongChatTemplate, match="expected none"):
        check_identity(bare, LOADED)
    for first, (error, field, own) in enumerate(WRONG):
        later = {
            key: value for _, _, change in reversed(WRONG[first:]) for key, value in change.items()
        }
        for changes in (own, later):
            with pytest.raises(errors.BundleRefused) as caught:
                check_identity(MANIFEST, dataclasses.replace(LOADED, **changes))
            assert (type(caught.value), caught.value.field) == (error, field)
            for part in ("tiny:1", "tiny-llama at revision local", "expected", "found"):
                assert part in str(caught.value)


def test_other_weights_of_the_same_repository_are_another_revision() -> None:
    hub = "a" * 40
    other = "b" * 40
    own = render(make_draft(model={"name": "acme/tiny", "revision": hub}))[0]
    served = dataclasses.replace(LOADED, model="acme/tiny", revision=other)
    for same in ({}, {"revision": hub}, {"revision": "local"}, {"model": "elsewhere/tiny"}):
        check_identity(own, dataclasses.replace(served, **same))
    check_identity(MANIFEST, served)  # of a folder, or of a version that recorded no commit
    with pytest.raises(
        errors.WrongRevision, match=f"acme/tiny at revision {hub}.*--revision {hub}"
    ) as caught:
        check_identity(own, dataclasses.replace(served, fingerprint=OTHER))
    assert (caught.value.field, caught.value.expected, caught.value.found) == (
        "model.revision",
        hub,
        other,
    )
    for known in ({"revision": hub}, {"revision": "local"}, {"model": "elsewhere/tiny"}):
        with pytest.raises(errors.WrongModel):
            check_identity(own, dataclasses.replace(served, fingerprint=OTHER, **known))


def test_what_a_bundle_was_trained_with_must_be_loaded_too() -> None:
    arguments = {"enable_thinking": False}
    for changes, loaded, error in (
        (
            {"model": {"adapter": OTHER}},
            {"adapter": OTHER},
            "another adapter.*expected sha256:9.*found none.*Load the adapter of",
        ),
        (
            {"template_arguments": arguments},
            {"template_arguments": arguments},
            "other arguments of the chat template.*Serve it by a process",
        ),
    ):
        manifest = render(make_draft(**changes))[0]
        check_identity(manifest, dataclasses.replace(LOADED, **loaded))
        with pytest.raises(errors.BundleRefused, match=error):
            check_identity(manifest, LOADED)


CHECKS = {"prompt": check_golden, "answer": check_answers}


def golden_of(bundle: Bundle, row: str) -> GoldenRows:
    """Its golden prompts, or its golden answers."""
    rows = bundle.golden if row == "prompt" else bundle.answer
    assert rows is not None
    return rows


def with_golden(golden: Golden | None = None, **changes: Any) -> Bundle:
    """A bundle with these golden prompts, outside a store."""
    draft = make_draft(**changes)
    draft.golden = golden or draft.golden
    return Bundle(render(draft)[0], draft.probes, draft.golden, Path("nowhere"), draft.answer)


def compare(
    bundle: Bundle,
    row: str = "prompt",
    logits: Any = None,
    risks: Any = None,
    dtype: str = "float32",
) -> Deviation:
    """Compare a replay, which is the recorded one where it is not given."""
    golden = golden_of(bundle, row)
    logits = golden.trajectory if logits is None else logits
    return CHECKS[row](bundle, logits, golden.risk if risks is None else risks, dtype=dtype)


def mismatch(named: str, bundle: Bundle, row: str = "prompt", **replay: Any) -> None:
    """The replay is refused with a message like this behind the field."""
    with pytest.raises(errors.GoldenMismatch) as caught:
        compare(bundle, row, **replay)
    assert re.search(named, f"{caught.value.field}: {caught.value}"), caught.value


@pytest.mark.parametrize("row", CHECKS)
@pytest.mark.parametrize(
    ("trained", "served", "trajectory", "risk"),
    [
        ("float32", "float32", 1e-3, 1e-3),
        ("float32", "bfloat16", 0.5, 0.05),
        ("float16", "float32", 0.5, 0.05),
        ("bfloat16", "float16", 0.5, 0.05),
    ],
)
def test_the_looser_dtype_decides(
    row: str,
    trained: str,
    served: str,
    trajectory: float,
    risk: float,
) -> None:
    bundle = with_golden(dtype=trained, **WITH_ANSWER)
    golden = golden_of(bundle, row)
    exact = compare(bundle, row, dtype=served)
    assert exact == Deviation(Tolerance(0.0, 0.0), Tolerance(risk, trajectory))
    for number, layer, factor in product((0, 1), range(LAYERS), (-1.01, -0.99, 0.99, 1.01)):
        logits = golden.trajectory.astype(np.float64)
        risks = golden.risk.copy()
        logits[number, layer] += factor * trajectory * spreads(golden.trajectory, LAYERS)[layer]
        risks[number] += factor * risk
        for name, replay in {"logits": logits, "risks": risks}.items():
            if abs(factor) < 1:
                compare(bundle, row, dtype=served, **{name: replay})
            else:
                named = f"golden {row} {number}" + (f", layer {layer}" if name == "logits" else "")
                mismatch(named, bundle, row, dtype=served, **{name: replay})


@pytest.mark.parametrize("row", CHECKS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_replay_that_is_not_finite_of_another_shape_or_permuted(dtype: str, row: str) -> None:
    bundle = with_golden(dtype=dtype, **WITH_ANSWER)
    golden = golden_of(bundle, row)
    for number in (np.nan, np.inf, -np.inf):
        logits = put(LAYERS, number)(golden.trajectory)
        mismatch(f"^trajectory: .*golden {row} 1, layer 0", bundle, row, logits=logits, dtype=dtype)
        risks = put(0, number)(golden.risk)
        mismatch(f"^risk: .*golden {row} 0", bundle, row, risks=risks, dtype=dtype)
    logits = golden.trajectory
    shape = f"golden {row}s has another shape"
    for reshaped in (logits[:1], logits[:, :1], logits.T, np.empty((0, LAYERS))):
        mismatch(f"^trajectory: .*{shape}", bundle, row, logits=reshaped, dtype=dtype)
    mismatch(f"^risk: .*{shape}", bundle, row, risks=golden.risk[:1], dtype=dtype)
    for permuted in (logits[:, ::-1], logits[::-1]):
        mismatch(f"^trajectory: .*golden {row}", bundle, row, logits=permuted, dtype=dtype)


def test_a_constant_trajectory_does_not_ask_for_exact_equality() -> None:
    golden = Golden.record([[1]], np.array([[2.0]]), np.array([0.5]))
    bundle = with_golden(golden, model={"num_layers": 1})
    compare(bundle, logits=np.array([[2.0 + 1e-6]]))
    mismatch("", bundle, logits=np.array([[2.1]]))
    with pytest.raises(ValueError, match="int8"):
        tolerance_for("float32", "int8")
    with pytest.raises(ValueError, match="tiny:1 has no answer probe"):
        check_answers(bundle, golden.trajectory, golden.risk, dtype="float32")


def spread_out(factors: Sequence[float] = (1.0, 1.0, 1e4, 1.0)) -> Bundle:
    """A bundle whose golden logits are spread by these factors, the risk's own probe first."""
    golden = make_draft(**WITH_CONTEXT).golden
    trajectory = (golden.trajectory * np.repeat(factors, LAYERS)).astype(np.float32)
    return with_golden(dataclasses.replace(golden, trajectory=trajectory), **WITH_CONTEXT)


@pytest.mark.parametrize(("probe", "layer"), [(0, 1), (1, 0), (2, 2), (3, 1)])
def test_the_worst_probe_and_layer_are_named(probe: int, layer: int) -> None:
    bundle = spread_out((1.0, 1.0, 1.0, 1.0))
    logits = bundle.golden.trajectory.astype(np.float64)
    logits[0, 4] += 0.25
    logits[1, probe * LAYERS + layer] += 3.0
    of = f" of context probe {CONTEXT.probes[probe - 1].name}" if probe else ""
    named = rf"^trajectory: .*golden prompt 1, layer {layer}{of},.*deviation is 3 "
    mismatch(named, bundle, logits=logits)
    mismatch("another shape", bundle, logits=logits[:, :LAYERS])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wide_probe_hides_no_error_of_another(dtype: str) -> None:
    bundle = spread_out()
    recorded = bundle.golden.trajectory.astype(np.float64)
    own = np.zeros_like(recorded)
    wide = np.zeros_like(recorded)
    own[0, 1] = 1.0  # about one spread of the risk's own logits, nothing beside those of probe 2
    named = "golden prompt 0, layer 1, recorded.*deviation is 1 "
    mismatch(named, bundle, logits=recorded + own, dtype=dtype)
    wide[0, 2 * LAYERS + 1] = 1.0
    compare(bundle, logits=recorded + wide, dtype=dtype)
    # The worst is so by its probe's own spread, not by its size.
    wide[0, 2 * LAYERS + 1] = 0.9 * 1e4 * (0.5 if dtype == "bfloat16" else 1e-3)
    mismatch("golden prompt 0, layer 1, ", bundle, logits=recorded + own + wide, dtype=dtype)
