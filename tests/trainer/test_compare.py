"""Bundles side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from probes_store.bundle import Bundle
from probes_store.store import SHIPPED, Store
from service.trainer.comparison import compare
from tests.command_line import hallutracer


@pytest.fixture(scope="module")
def shipped() -> dict[str, Bundle]:
    store = Store(SHIPPED)
    return {name: store.load(name) for name in ("demo", "demo-fused", "smollm2", "smollm2-fused")}


def cells(markdown: str, name: str) -> list[str]:
    [line] = [line for line in markdown.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_two_bundles_of_one_model_and_its_rows(shipped: dict[str, Bundle]) -> None:
    found = compare([shipped["smollm2"], shipped["smollm2-fused"]])
    one = shipped["smollm2"].evaluation()
    auroc = one["cross_validation"]["signals"]["context_unit_norm"]["auroc"]  # what this bundle reads
    assert cells(found.markdown, "nested CV: AUROC")[0] == (
        f"{auroc['mean']:.3f} [{auroc['low']:.3f}, {auroc['high']:.3f}]"
    )
    assert cells(found.markdown, "signal")[0] != cells(found.markdown, "signal")[1]
    assert len(found.caveats) == 1


def test_what_was_measured_on_held_out_rows(shipped: dict[str, Bundle]) -> None:
    found = compare([shipped["demo"], shipped["demo-fused"]])
    expected = [shipped[name].evaluation()["held_out"]["signals"]["bundle"]["auroc"] for name in ("demo", "demo-fused")]
    assert cells(found.markdown, "held out: AUROC") == [f"{auroc:.3f}" for auroc in expected]


def test_what_keeps_figures_from_being_compared_is_said(shipped: dict[str, Bundle]) -> None:
    found = compare([shipped["demo"], shipped["smollm2"]])
    assert "the bundles read different models, which answer different questions right" in found.caveats
    assert any("trained on different rows" in caveat for caveat in found.caveats)


def test_a_bundle_without_an_evaluation_has_gaps(shipped: dict[str, Bundle]) -> None:
    bare = Bare(shipped["smollm2"])
    found = compare([bare, shipped["smollm2"]])  # type: ignore[list-item]
    assert cells(found.markdown, "nested CV: AUROC")[0] == "-"
    manifest = replace(shipped["smollm2"].manifest, threshold=0.25)
    assert cells(compare([Bare(shipped["smollm2"], manifest), bare]).markdown, "threshold")[0] == "0.2500"  # type: ignore[list-item]


class Bare:
    """A bundle that was trained without an evaluation."""

    def __init__(self, bundle: Bundle, manifest: object = None) -> None:
        self.manifest = manifest or bundle.manifest
        self.reference = bundle.reference

    def evaluation(self) -> dict[str, object]:
        return {"signal_of_the_bundle": "depth_mean_unit_norm"}


def test_the_command() -> None:
    done = hallutracer("bundle", "compare", "demo", "demo-fused")
    assert done.returncode == 0, done.stderr
    assert "| demo:1 | demo-fused:1 |" in done.stdout
    assert "not of the difference" in done.stderr
    assert hallutracer("bundle", "compare", "demo").returncode == 2
