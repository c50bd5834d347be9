"""What a store at a URL says that it offers."""

from __future__ import annotations

import json

import pytest

from probes_store.bucket import Objects
from probes_store.errors import StoreRefused
from probes_store.index import INDEX, Offer, auroc_of, index_bytes, joined, read_index
from probes_store.manifest import MANIFEST
from probes_store.store import Store
from tests.kit.bundles import make_draft
from tests.kit.tables import lines

EVALUATION = {
    "signal_of_the_bundle": "depth_mean",
    "cross_validation": {"signals": {"depth_mean": {"auroc": {"mean": 0.75}}}},
}
OFFER = Offer("tiny", (1, 2), "owner/tiny", "f" * 64, 0.75)


def test_an_index_is_read_as_it_was_written() -> None:
    other = Offer("another", (3,), "owner/other", "e" * 64, None)
    assert read_index(index_bytes([OFFER, other])) == (other, OFFER)


@pytest.mark.parametrize(
    "change",
    lines(
        """
        {"name": "../tiny"}
        {"versions": [0]}
        {"versions": ["1"]}
        {"versions": []}
        {"model": ""}
        {"auroc": 2.0}
        {"more": 1}
        """
    ),
)
def test_a_damaged_index_offers_nothing(change: str) -> None:
    document = json.loads(index_bytes([OFFER]))
    document["bundles"][0].update(json.loads(change))
    for damaged in (json.dumps(document).encode(), b"[]", b"damaged"):
        assert read_index(damaged) == ()


def test_versions_of_one_model_are_one_offer_with_the_newest_figure() -> None:
    newest = Offer("tiny", (4,), "owner/tiny", "f" * 64, 0.5)
    other = Offer("tiny", (3,), "owner/tiny", "e" * 64, 0.9)
    assert joined([newest, OFFER, other]) == [
        Offer("tiny", (1, 2, 4), "owner/tiny", "f" * 64, 0.5),
        other,
    ]
    assert auroc_of(EVALUATION) == 0.75
    assert auroc_of({}) is None


@pytest.mark.parametrize(
    ("index", "versions", "read"),
    [
        (index_bytes([OFFER]), [(1, 2)], []),
        (index_bytes([Offer("tiny", (1, 9), "m", "f", None)]), [(1,), (2,)], [2]),
        (index_bytes([Offer("gone", (1,), "m", "f", None)]), [(2,)], [1, 2]),
        (b"damaged", [(2,)], [1, 2]),
        (None, [(2,)], [1, 2]),
    ],
)
def test_what_an_index_lacks_is_looked_up_and_what_is_not_there_is_passed_over(
    memory_url: str,
    monkeypatch: pytest.MonkeyPatch,
    index: bytes | None,
    versions: list[tuple[int, ...]],
    read: list[int],
) -> None:
    store, objects = Store(memory_url), Objects(memory_url)
    for seed in range(2):
        store.publish(make_draft(seed))
    objects.put(f"tiny/1/{MANIFEST}", b"damaged")
    real, paths = Objects.read, list[str]()

    def watched(self: Objects, path: str, limit: int) -> bytes | None:
        paths.append(path)
        return index if path == INDEX else real(self, path, limit)

    monkeypatch.setattr(Objects, "read", watched)
    assert [offer.versions for offer in store.offers()] == versions
    assert paths == [INDEX, *(f"tiny/{version}/{MANIFEST}" for version in read)]


def test_whoever_publishes_writes_the_index(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(memory_url)
    objects = Objects(memory_url)
    for size, expected in ((0.5, (1,)), (0.25, (1, 2))):
        draft = make_draft(threshold=size)
        draft.evaluation = {**draft.evaluation, **EVALUATION}
        store.publish(draft)
        [offer] = read_index(objects.read(INDEX, 10**6) or b"")
        assert (offer.name, offer.versions, offer.auroc) == ("tiny", expected, 0.75)
    assert store.own.names() == ["tiny"], "the index is no bundle"
    objects.put(INDEX, b"damaged")
    store.publish(make_draft(threshold=0.125))
    [offer] = read_index(objects.read(INDEX, 10**6) or b"")
    assert offer.versions == (3,)
    assert {version for offer in store.offers() for version in offer.versions} == {1, 2, 3}

    def refused(self: Objects, path: str, data: bytes) -> None:
        raise StoreRefused("no overwriting")

    monkeypatch.setattr(Objects, "put", refused)
    assert store.publish(make_draft(threshold=0.375)).reference == "tiny:4", "it is published"
