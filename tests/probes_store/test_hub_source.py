"""A repository of the hub as a store, and signatures on the hub: the real client, against a stand-in of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from probes_store.bundle import SIGNATURE, Bundle
from probes_store.errors import (
    BundleConflict,
    BundleNotFound,
    HubMissing,
    InvalidReference,
    SignatureMissing,
    StoreRefused,
    StoreUnreachable,
)
from probes_store.hub import Hub as Repository
from probes_store.hub import HubAddress, parse_address
from probes_store.pull import pull
from probes_store.push import push
from probes_store.signing import Signing, required_signature
from probes_store.store import SHIPPED, Store, Trust
from probes_store.transfer import files_of
from tests.probes_store.conftest import Opens
from tests.probes_store.factory import make_draft
from tests.probes_store.hub_stand_in import TOKEN, Hub, hub_stand_in
from tests.probes_store.keys import KeyPair, key_pair

real = Repository.__init__
HERE = HubAddress("me/tiny")
URL = "hf://me/tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with hub_stand_in() as running:
        ask(running.url, tmp_path, monkeypatch)
        yield running


def ask(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT and HF_HOME would have it, which huggingface_hub reads when it is imported."""

    def init(self: Repository, repository: str, **_: object) -> None:
        real(self, repository, endpoint=endpoint, cache=tmp_path / "hf")

    monkeypatch.setattr(Repository, "__init__", init)


@pytest.fixture
def keys(tmp_path: Path) -> KeyPair:
    return key_pair(tmp_path, "ours")


@pytest.fixture
def pushed(hub: Hub, store: Store, keys: KeyPair) -> Bundle:
    """Two versions on the hub, of which the second is signed."""
    push(store.publish(make_draft(0)), HERE)
    second = store.sign(store.publish(make_draft(1)).reference, Signing(keys.private))
    push(second, HERE)
    return second


def test_a_repository_is_read_as_a_store(pushed: Bundle, opens: Opens, keys: KeyPair) -> None:
    store = opens(URL)
    assert store.load("tiny").manifest == pushed.manifest
    assert files_of(store.load("tiny:2")) == files_of(pushed)
    assert [(summary.reference, summary.error) for summary in store.list()] == [("tiny:1", None), ("tiny:2", None)]
    strict = opens(URL, trust=Trust(required_signature(str(keys.public))))
    assert strict.load("tiny").reference == "tiny:2"
    with pytest.raises(SignatureMissing):
        strict.load("tiny:1")
    for missing in ("tiny:3", "tiny@production", "other"):
        with pytest.raises(BundleNotFound):
            store.load(missing)
    assert Store(URL, [SHIPPED], cache=store.root.parent).load("demo").path == SHIPPED / "demo" / "1"


def test_it_is_only_read(hub: Hub, opens: Opens) -> None:
    store = opens(URL)
    for action in (
        store.check_writable,
        lambda: store.publish(make_draft(2)),
        lambda: store.own.set_alias("tiny", "production", 1, "previous"),
        lambda: store.own.write_signature("tiny", 1, b""),
        lambda: store.own.add(make_draft(2).manifest, {}),
    ):
        with pytest.raises(StoreRefused, match="hallutracer bundle push"):
            action()


def test_without_an_answer_the_copies_serve(
    pushed: Bundle, opens: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opens(URL).load("tiny:1")
    ask("http://127.0.0.1:9", tmp_path, monkeypatch)
    assert opens(URL).load("tiny").reference == "tiny:1"
    assert "going on with the copies in" in caplog.text
    with pytest.raises(StoreUnreachable):
        opens(URL, "new").load("tiny")


def test_no_repository_is_no_empty_store(hub: Hub, opens: Opens, tmp_path: Path) -> None:
    with pytest.raises(HubMissing):
        Store(URL, [SHIPPED], cache=tmp_path).load("demo")
    with pytest.raises(InvalidReference, match="hf://OWNER/NAME"):
        opens("hf://me/tiny@v1")


def test_a_signature_goes_to_the_hub_and_back(pushed: Bundle, tmp_path: Path, keys: KeyPair) -> None:
    there = Store(tmp_path / "there", trust=Trust(required_signature(str(keys.public))))
    done = pull(there, parse_address(f"{URL}@v2"))
    assert (done.added, list(done.left_out)) == (True, [])
    assert files_of(there.load("tiny")) == files_of(pushed)
    with pytest.raises(SignatureMissing):
        pull(Store(tmp_path / "other", trust=there.trust), parse_address(f"{URL}@v1"))
    assert Store(tmp_path / "other").list() == []


@pytest.mark.long
def test_a_pull_brings_the_signature_that_a_bundle_lacks(pushed: Bundle, tmp_path: Path) -> None:
    there = Store(tmp_path / "there")
    pull(there, parse_address(URL))
    (there.root / "tiny" / "2" / SIGNATURE).unlink()
    assert pull(there, parse_address(URL)).added is False
    assert files_of(there.load("tiny")) == files_of(pushed)


@pytest.mark.long
def test_a_version_on_the_hub_is_not_signed_later(pushed: Bundle, store: Store, keys: KeyPair) -> None:
    first = store.sign("tiny:1", Signing(keys.private))
    with pytest.raises(BundleConflict, match="Sign before you push"):
        push(first, HERE)
    assert push(pushed, HERE).plan.nothing


@pytest.mark.long
def test_the_next_version_does_not_keep_the_signature_of_the_last(pushed: Bundle, hub: Hub, store: Store) -> None:
    done = push(store.publish(make_draft(2)), HERE)
    assert SIGNATURE in done.plan.deleted
    head = hub.repositories["me/tiny"]
    assert SIGNATURE not in head.commits[head.head]
