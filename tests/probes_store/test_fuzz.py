"""Nothing that is written over a bundle's files passes as that bundle, and nothing ends the process."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

import pytest

from probes_store.bundle import Bundle, load_bundle
from probes_store.errors import BundleError
from tests.probes_store import fuzz
from tests.probes_store.factory import make_draft, write_bundle

SHORT, LONG = 1_500, 120_000
MOST_MIB = 200  # that the peak may grow by; the largest file of the largest bundle has 60 KB


def check(folder: Path, count: int, seed: int) -> fuzz.Tally:
    tally = fuzz.Tally()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bundles = fuzz.origins(folder)
    for number, bundle in enumerate(bundles):
        fuzz.fuzz(bundle, count // len(bundles), seed + number, tally)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MOST_MIB
    return tally


def test_mutations_are_refused_or_sound(tmp_path: Path) -> None:
    tally = check(tmp_path, SHORT, seed=1)
    for kind in ("bits", "pieces", "manifest's text"):  # without new hashes nothing passes but what is as it was
        assert tally.accepted[kind] <= tally.unchanged[kind]
    for kind in fuzz.MUTATORS:
        assert sum(n for (other, _), n in tally.refused.items() if other == kind) > SHORT // 20, kind
    assert len({error for _, error in tally.refused}) >= 7  # it comes past the hashes, to the checks behind them
    assert tally.accepted["numbers, resealed"] > tally.unchanged["numbers, resealed"]


@pytest.mark.long
def test_a_hundred_thousand_mutations(tmp_path: Path) -> None:
    tally = check(tmp_path, LONG, seed=1000)
    assert tally.refused.total() + tally.accepted.total() == LONG


@pytest.mark.parametrize(
    "found",
    [
        lambda folder: 1 / 0,  # another exception than the store's own
        lambda folder: load_bundle(Path(folder.parents[1], "origin", "1")),  # other bytes, and still the same bundle
    ],
    ids=["crash", "ignored"],
)
def test_the_fuzzer_would_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    origin = write_bundle(make_draft(), tmp_path / "origin" / "1")

    def loads(folder: Path) -> Bundle:
        return found(tmp_path / "x" / "1") if "origin" not in str(folder) else load_bundle(folder)

    monkeypatch.setattr(fuzz, "load_bundle", loads)
    with pytest.raises(AssertionError, match=r"mutation \d+ of seed 3"):
        fuzz.fuzz(origin, 50, 3, fuzz.Tally())


def test_a_hang_would_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "HANG_S", 0.05)

    def loads_for_ever() -> None:
        with fuzz.no_hang():
            while True:
                pass

    with pytest.raises(fuzz.Hang):
        loads_for_ever()


def test_every_mutator_changes_something_and_the_same_seed_the_same(tmp_path: Path) -> None:
    origin = write_bundle(make_draft(), tmp_path / "origin" / "1")
    original = {name: (origin.path / name).read_bytes() for name in fuzz.FILES}
    for kind, mutate in fuzz.MUTATORS.items():
        results = []
        for _ in range(2):
            draw, made = random.Random(5), []
            for _ in range(30):
                files = dict(original)
                mutate(draw, files)
                made.append(files)
            results.append(made)
        assert results[0] == results[1], kind
        assert sum(files != original for files in results[0]) > 20, kind


def test_an_error_of_the_store_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = write_bundle(make_draft(), tmp_path / "origin" / "1")

    def refuse(_: Path) -> Bundle:
        raise BundleError("no")

    monkeypatch.setattr(fuzz, "load_bundle", refuse)
    tally = fuzz.Tally()
    fuzz.fuzz(origin, 20, 0, tally)
    assert tally.refused.total() == 20
