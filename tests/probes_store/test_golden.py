from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes_store.bundle import Bundle, render
from probes_store.errors import GoldenMismatch
from probes_store.golden import TOLERANCES, check_golden, spread, tolerance_for
from probes_store.tensors import Golden, read_golden, read_probes
from tests.probes_store.factory import make_draft


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
    unit = sign * trajectory * spread(bundle.golden.trajectory)
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
