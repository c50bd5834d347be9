"""Push and pull through the real huggingface_hub client, against a server of this machine that speaks the hub's API."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from probes_store import errors
from probes_store.bundle import SIGNATURE, Bundle, read_files
from probes_store.errors import (
    BundleConflict,
    BundleNotFound,
    DigestMismatch,
    HubError,
    HubMissing,
    HubUnreachable,
    InvalidReference,
    SignatureMissing,
    StoreRefused,
    StoreUnreachable,
)
from probes_store.hub import Hub as Repository
from probes_store.manifest import MANIFEST, manifest_bytes, record_of, sealed
from probes_store.store import SHIPPED, Store, Trust
from probes_store.syntax import HubAddress, parse_address
from probes_store.transfer import Pulled, Pushed, files_of, pull, push
from probes_store.trust import Signing, required_signature
from tests.probes_store.conftest import Opens
from tests.probes_store.factory import make_draft, write_bundle
from tests.probes_store.hub_stand_in import TOKEN, Hub, Request, hub_stand_in
from tests.probes_store.keys import KeyPair, key_pair

ROOT = Path(__file__).parents[2]
HERE = HubAddress("me/tiny")
Pushes = Callable[..., Pushed]
Pulls = Callable[..., Pulled]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process may write to.  Xet, a protocol of its own, is off: large files go by git's LFS."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with hub_stand_in() as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def pulls(hub: Hub, store: Store, cache: Path) -> Pulls:
    """Pull hf://me/tiny, or another address, into the store."""

    def run(address: str = "hf://me/tiny", into: Store = store, **options: Any) -> Pulled:
        return pull(into, parse_address(address), endpoint=hub.url, cache=cache, **options)

    return run


@pytest.fixture
def pushes(hub: Hub, cache: Path) -> Pushes:
    def run(bundle: Bundle, **options: Any) -> Pushed:
        return push(bundle, HERE, endpoint=hub.url, cache=cache, **options)

    return run


def made(folder: Path, *, version: int = 1, **changes: Any) -> Bundle:
    return write_bundle(make_draft(**changes), folder / f"{changes.get('name', 'tiny')}-{version}", version=version)


def relisted(bundle: Bundle, files: dict[str, bytes], **changes: Any) -> dict[str, bytes]:
    """Other files under a manifest that was sealed anew, as anyone can do."""
    records = {name: record_of(data) for name, data in files.items()}
    manifest = dataclasses.replace(bundle.manifest, files=records, **changes)
    manifest = sealed(manifest, version=manifest.version, created=manifest.created)
    return {**files, MANIFEST: manifest_bytes(manifest)}


def untouched(store: Store) -> None:
    assert store.list() == []
    assert not [path for path in store.root.rglob("*") if path.is_file()] if store.root.exists() else True


# addresses


def test_an_address() -> None:
    assert parse_address("hf://a-b/c.d_e@v1") == HubAddress("a-b/c.d_e", "v1")
    assert str(parse_address("hf://a/b@refs/pr/1")) == "hf://a/b@refs/pr/1"


@pytest.mark.parametrize(
    "text",
    ["a/b", "hf://a", "hf://a/b/c", "hf://a/b@", "hf://../b", "hf://a/..", "hf://a/b@../../x", "hf://a/b@/etc",
     "hf://a--b/c", "hf://a/b@v1\n", "hf://a b/c", "https://huggingface.co/a/b", "hf://a/b@x/../y"],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidReference, match="hf://OWNER/NAME"):
        parse_address(text)


def test_a_store_says_to_pull_first(store: Store) -> None:
    with pytest.raises(InvalidReference, match=r"hallutracer bundle pull.*first"):
        store.load("hf://me/tiny@v1")


# there and back


def test_a_bundle_goes_there_and_back(hub: Hub, store: Store, tmp_path: Path, pushes: Pushes, pulls: Pulls) -> None:
    bundle = made(tmp_path, version=3)
    done = pushes(bundle)
    assert (done.plan.create, done.plan.commit, done.plan.tag) == (True, True, True)
    assert (done.url, done.address, done.private) == (f"{hub.url}/me/tiny/tree/v3", "hf://me/tiny@v3", False)
    there = hub.repositories["me/tiny"]
    assert list(there.tags) == ["v3"]
    assert {k: v for k, v in there.commits[there.tags["v3"]].items() if k[0] != "."} == files_of(bundle)
    shown: list[int] = []

    class Shown:
        def __init__(self, total: int) -> None:
            shown.append(-total)

        def update(self, n: int) -> None:
            shown.append(n)

    found = pulls("hf://me/tiny@v3", bar=Shown)
    assert (found.added, found.offline, found.left_out, found.commit) == (True, None, [], there.tags["v3"])
    assert sum(shown) == 0  # every byte was shown once
    assert shown[0] < 0
    loaded = store.verify("tiny:3")
    assert loaded.manifest == bundle.manifest
    assert hub.leaked == []  # the storage, another host, never saw the token
    again = pulls()
    assert (again.added, again.bundle.path) == (False, loaded.path)
    assert hub.count("GET /storage") == 3


def test_the_next_version_follows_and_the_old_stays(
    hub: Hub, store: Store, tmp_path: Path, pushes: Pushes, pulls: Pulls
) -> None:
    first, second = made(tmp_path), made(tmp_path, version=2, seed=1, plots={})
    pushes(first)
    hub.repositories["me/tiny"].commits[hub.repositories["me/tiny"].head]["LICENSE"] = b"of the data"
    assert pushes(second).plan.deleted == ("plots/roc.png",)
    head = hub.repositories["me/tiny"].commits[hub.repositories["me/tiny"].head]
    assert "plots/roc.png" not in head
    assert head["LICENSE"] == b"of the data"
    assert pulls("hf://me/tiny@v1").bundle.reference == "tiny:1"
    found = pulls()  # a later version from the same place needs no leave
    assert (found.bundle.reference, found.left_out) == ("tiny:2", ["LICENSE"])
    assert store.load("tiny").manifest == second.manifest
    del hub.repositories["me/tiny"].tags["v1"]
    with pytest.raises(BundleConflict, match="version 2 already"):
        pushes(first)


def test_a_second_push_does_nothing(hub: Hub, tmp_path: Path, pushes: Pushes) -> None:
    bundle = made(tmp_path)
    pushes(bundle)
    written = hub.count("^(POST|PUT)")
    assert pushes(bundle).plan.nothing
    assert pushes(made(tmp_path / "later")).plan.nothing  # another time of publication, the same content
    assert hub.count("^(POST|PUT)") == written


def test_a_dry_run_writes_nothing(hub: Hub, tmp_path: Path, pushes: Pushes) -> None:
    done = pushes(made(tmp_path), dry_run=True, private=True)
    assert done.plan.create
    assert done.private
    assert hub.repositories == {}
    assert hub.count("^(POST|PUT)") == 0


# what a push refuses


@pytest.mark.parametrize(
    ("there", "tag", "word"),
    [
        ({"seed": 1}, "v1", "tag v1 is another bundle"),
        ({"seed": 1}, None, "main is another bundle"),
        ({"name": "other"}, None, "another bundle's; expected other, found tiny"),
        (None, None, "holds something else: 'config.json', 'model.bin'"),
    ],
)
def test_a_push_never_writes_over_something_else(
    hub: Hub, tmp_path: Path, pushes: Pushes, there: dict[str, Any] | None, tag: str | None, word: str
) -> None:
    files = files_of(made(tmp_path / "there", **there)) if there else {"config.json": b"{}", "model.bin": b"x"}
    hub.repository("me/tiny", files, tag=tag)
    with pytest.raises(BundleConflict, match=word):
        pushes(made(tmp_path))
    assert hub.count("^(POST|PUT)") == 0


def test_a_repository_made_by_hand_gets_its_first_bundle(hub: Hub, tmp_path: Path, pushes: Pushes) -> None:
    hub.repository("me/tiny", {"README.md": b"# mine\n", "LICENSE": b"x"})
    assert pushes(made(tmp_path)).plan.commit


def test_a_changed_bundle_is_not_pushed(hub: Hub, tmp_path: Path, pushes: Pushes) -> None:
    bundle = made(tmp_path)
    (bundle.path / "README.md").write_text("# tiny\n\nA better bundle for us\n")
    with pytest.raises(errors.BundleDamaged):
        pushes(bundle)
    assert hub.requests == []


def test_private_means_private(hub: Hub, tmp_path: Path, pushes: Pushes) -> None:
    bundle = made(tmp_path)
    hub.repository("me/tiny")
    with pytest.raises(BundleConflict, match="is public"):
        pushes(bundle, private=True)
    assert hub.count("^(POST|PUT)") == 0
    del hub.repositories["me/tiny"]
    assert pushes(bundle, private=True).private
    assert hub.repositories["me/tiny"].private


def test_a_private_repository_asks_for_a_token(
    hub: Hub,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pushes: Pushes,
    pulls: Pulls,
) -> None:
    pushes(made(tmp_path), private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")
    with pytest.raises(HubMissing, match="HF_TOKEN"):
        pulls()
    with pytest.raises(HubError, match=r"token.*HF_TOKEN"):  # somebody may not create it either
        pushes(made(tmp_path / "other"))
    untouched(store)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pulls().added


def test_a_push_that_ended_before_its_tag_goes_on(hub: Hub, tmp_path: Path, pushes: Pushes) -> None:
    bundle = made(tmp_path)

    def no_tag(request: Request) -> bool:
        if "/tag/" in request.route:
            request.refuse(503, "try later")
        return "/tag/" in request.route

    hub.faults.append(no_tag)
    with pytest.raises(HubUnreachable, match="503"):
        pushes(bundle)
    hub.faults.clear()
    assert hub.repositories["me/tiny"].tags == {}
    commits = len(hub.repositories["me/tiny"].commits)
    plan = pushes(bundle).plan
    assert (plan.create, plan.commit, plan.tag) == (False, False, True)
    assert len(hub.repositories["me/tiny"].commits) == commits
    assert list(hub.repositories["me/tiny"].tags) == ["v1"]


def test_somebody_who_was_faster_is_not_written_over(hub: Hub, tmp_path: Path, pushes: Pushes) -> None:
    pushes(made(tmp_path))

    def faster(request: Request) -> bool:
        if "/preupload/" in request.route:
            hub.repository("me/tiny", {"of-somebody": b"else"})
        return False

    hub.faults.append(faster)
    with pytest.raises(HubError, match="A commit has happened since"):
        pushes(made(tmp_path, version=2, seed=1))
    assert list(hub.repositories["me/tiny"].tags) == ["v1"]


def test_a_card_that_the_hub_refuses(hub: Hub, tmp_path: Path, pushes: Pushes) -> None:
    bundle = made(tmp_path, card="---\nbase_model: /home/me/model\n---\n# tiny\n")
    with pytest.raises(HubError, match=r'"base_model" with value "/home/me/model" is not valid'):
        pushes(bundle)
    assert hub.repositories["me/tiny"].tags == {}


def test_a_hub_that_keeps_other_bytes_is_noticed(hub: Hub, tmp_path: Path, pushes: Pushes) -> None:
    def spoil(request: Request) -> bool:
        if "/tag/" in request.route:
            there = hub.repositories["me/tiny"]
            there.commits[there.head]["evaluation.json"] = there.commits[there.head]["evaluation.json"][::-1]
        return False

    hub.faults.append(spoil)
    with pytest.raises(HubError, match=r"evaluation.json: the hub has another file"):
        pushes(made(tmp_path))


# what a pull refuses


def test_a_pin_is_held(hub: Hub, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    bundle = made(tmp_path)
    hub.repository("me/tiny", files_of(bundle), tag="v1")
    with pytest.raises(DigestMismatch, match="--digest"):
        pulls(digest="sha256:" + "0" * 64)
    with pytest.raises(InvalidReference, match="64 hex"):
        pulls(digest="sha256:0")
    untouched(store)
    assert hub.count(r"GET .*resolve.*\.md") == 0  # refused by the manifest alone
    assert pulls(digest=bundle.manifest.digest).added


def test_other_files_are_told_and_never_fetched(hub: Hub, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    strangers = {
        "../evil.txt": b"x",
        "/etc/evil": b"x",
        "model.pkl": b"\x80\x04.",
        "setup.py": b"1/0",
        "plots/x.svg": b"x",
    }
    hub.repository("me/tiny", {**strangers, **files_of(made(tmp_path))})
    assert pulls().left_out == sorted(strangers)
    assert hub.count("evil|pkl|setup|svg") == 0
    names = {path.relative_to(store.root).as_posix() for path in store.root.rglob("*") if path.is_file()}
    assert names == {f"tiny/1/{name}" for name in (*files_of(made(tmp_path / "b")), ".origin.json")}


@pytest.mark.parametrize("name", ["../evil.txt", "/tmp/evil", "plots/../../evil.png", "evil.pkl", "setup.py", ".evil"])
def test_a_manifest_that_lists_anything_else_is_refused(
    hub: Hub, store: Store, tmp_path: Path, pulls: Pulls, name: str
) -> None:
    bundle = made(tmp_path)
    files = read_files(bundle.path, bundle.manifest) | {name: b"x"}
    hub.repository("me/tiny", relisted(bundle, files))
    with pytest.raises(errors.BundleDamaged, match="this format has no such file"):
        pulls()
    assert hub.count("evil|setup") == 0
    untouched(store)


def test_no_bundle(hub: Hub, store: Store, pulls: Pulls) -> None:
    hub.repository("me/tiny", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(errors.MissingFile, match="no bundle"):
        pulls()
    with pytest.raises(HubError, match="no such revision"):
        pulls("hf://me/tiny@v7")
    with pytest.raises(HubMissing, match="no such repository"):
        pulls("hf://me/nothing")
    untouched(store)


SPOILED = {
    "another text": lambda files: files | {"README.md": files["README.md"][::-1]},
    "another tensor": lambda files: files | {"probes.safetensors": files["probes.safetensors"][::-1]},
    "a longer file": lambda files: files | {"evaluation.json": files["evaluation.json"] + b" "},
    "a file less": lambda files: {name: data for name, data in files.items() if name != "golden.safetensors"},
    "no manifest's bytes": lambda files: files | {MANIFEST: b"{}"},
    "a manifest of 2 MiB": lambda files: files | {MANIFEST: files[MANIFEST] + b" " * (2 << 20)},
    "another threshold": lambda files: files | {MANIFEST: files[MANIFEST].replace(b"d\": 0.5", b"d\": 0.9")},
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_what_does_not_match_its_digests_is_refused(
    hub: Hub, store: Store, tmp_path: Path, pulls: Pulls, what: str
) -> None:
    hub.repository("me/tiny", SPOILED[what](files_of(made(tmp_path))))
    with pytest.raises(errors.BundleDamaged):
        pulls()
    untouched(store)
    if what == "another tensor":  # the hub's own digest tells before a download
        assert hub.count("storage") == 0


def test_another_bundles_manifest(hub: Hub, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    files, other = files_of(made(tmp_path)), files_of(made(tmp_path, name="other", seed=3))
    hub.repository("me/tiny", files | {MANIFEST: other[MANIFEST]})
    with pytest.raises(errors.BundleDamaged):
        pulls()
    untouched(store)


def test_a_tag_that_holds_another_version(hub: Hub, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    hub.repository("me/tiny", files_of(made(tmp_path, version=3)), tag="v2")
    with pytest.raises(BundleConflict, match="v2 holds version 3"):
        pulls("hf://me/tiny@v2")
    untouched(store)


def test_a_version_that_no_store_can_hold(hub: Hub, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    hub.repository("me/tiny", files_of(made(tmp_path, version=10**9)))
    with pytest.raises(errors.BadValue, match="1 to 999999999"):
        pulls()
    untouched(store)


def test_a_bundle_that_is_too_large(
    hub: Hub, store: Store, tmp_path: Path, pulls: Pulls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes_store.remote.MAX_TOTAL", 900)
    hub.repository("me/tiny", files_of(made(tmp_path)))
    with pytest.raises(errors.BadValue, match="at most 900 bytes"):
        pulls()
    assert hub.count("GET .*(storage|README)") == 0


def test_a_stream_longer_than_stated_is_cut_off(
    hub: Hub, store: Store, cache: Path, tmp_path: Path, pulls: Pulls
) -> None:
    hub.repository("me/tiny", files_of(made(tmp_path)))
    sent = threading.Event()

    def endless(request: Request) -> bool:
        if request.command != "GET" or not request.route.endswith("README.md"):
            return False
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        try:
            for _ in range(200):  # 200 MiB
                request.wfile.write(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
            request.wfile.write(b"0\r\n\r\n")
            sent.set()
        except OSError:
            pass
        request.close_connection = True
        return True

    hub.faults.append(endless)
    with pytest.raises(DigestMismatch, match="too long"):
        pulls()
    assert not sent.is_set()
    assert sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) < 1 << 20
    untouched(store)


# what goes wrong on the way


def once(pattern: str, act: Callable[[Request], None]) -> Callable[[Request], bool]:
    left = [1]

    def fault(request: Request) -> bool:
        if left and request.command == "GET" and request.route.endswith(pattern):
            left.pop()
            act(request)
            return True
        return False

    return fault


def test_a_download_that_breaks_off_is_tried_again(hub: Hub, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    bundle = made(tmp_path)
    files = files_of(bundle)
    hub.repository("me/tiny", files)

    def half(request: Request) -> None:
        data = files["evaluation.json"]
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data[:20])
        request.close_connection = True

    hub.faults.append(once("evaluation.json", half))
    assert pulls().added
    assert hub.count("GET .*evaluation.json") == 2
    assert store.verify("tiny:1").manifest == bundle.manifest


def test_a_file_that_is_shorter_than_stated(hub: Hub, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    hub.repository("me/tiny", files_of(made(tmp_path)))
    hub.faults.append(once("evaluation.json", lambda request: request.answer(200, b"{}")))
    with pytest.raises(HubError, match="should be of size 55"):
        pulls()
    untouched(store)
    assert pulls().added


def test_an_error_in_the_middle_leaves_the_store_and_what_was_fetched(
    hub: Hub, store: Store, tmp_path: Path, pulls: Pulls
) -> None:
    hub.repository("me/tiny", files_of(made(tmp_path)))
    hub.faults.append(once("evaluation.json", lambda request: request.refuse(500, "out of order")))
    with pytest.raises(HubUnreachable, match=r"500.*out of order.*again later"):
        pulls()
    untouched(store)
    assert pulls().added
    assert hub.count("GET .*README.md") == 1


def test_a_damaged_cache_is_fetched_anew(hub: Hub, cache: Path, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    hub.repository("me/tiny", files_of(made(tmp_path)))
    pulls(into=Store(tmp_path / "first"))
    for blob in cache.rglob("blobs/*"):
        blob.write_bytes(blob.read_bytes()[::-1])
    assert pulls().added
    store.verify("tiny:1")


def test_without_a_connection_the_cache_serves(
    hub: Hub,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pulls: Pulls,
) -> None:
    hub.repository("me/tiny", files_of(made(tmp_path)), tag="v1")
    pulls("hf://me/tiny@v1", into=Store(tmp_path / "first"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    found = pulls("hf://me/tiny@v1")
    assert found.added
    assert found.offline is not None
    assert "HF_HUB_OFFLINE" in found.offline
    with pytest.raises(HubUnreachable, match="not in the cache"):
        pulls("hf://me/tiny@v2")
    with pytest.raises(HubUnreachable, match="not in the cache"):
        pulls("hf://me/other")
    assert len(hub.requests) == asked
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    hub.faults.append(lambda request: request.refuse(502, "down") is None)
    found = pulls("hf://me/tiny@v1", into=Store(tmp_path / "third"))
    assert found.offline is not None
    assert "502" in found.offline


def test_nobody_listens(hub: Hub, store: Store, tmp_path: Path) -> None:
    with pytest.raises(HubUnreachable, match="cache"):
        pull(store, HERE, endpoint="http://127.0.0.1:9", cache=tmp_path / "c")
    with pytest.raises(HubUnreachable, match=r"no answer from http://127.0.0.1:9"):
        push(made(tmp_path), HERE, endpoint="http://127.0.0.1:9", cache=tmp_path / "c")


# the place in the store


def test_a_version_with_other_content_stays(hub: Hub, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    here = store.publish(make_draft(seed=1))
    hub.repository("me/tiny", files_of(made(tmp_path)))
    for options in ({}, {"take_over": True}):
        with pytest.raises(BundleConflict, match="another bundle has this version"):
            pulls(**options)
    assert store.load("tiny").manifest == here.manifest


def test_a_name_keeps_its_meaning(hub: Hub, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    here = store.publish(make_draft(seed=1))
    hub.repository("me/tiny", files_of(made(tmp_path, version=2)))
    with pytest.raises(BundleConflict, match=r"alias tiny production 1.*--take-over"):
        pulls()
    assert [summary.version for summary in store.list()] == [1]
    store.set_alias("tiny", "production", 1)
    assert pulls().added
    assert store.load("tiny").manifest == here.manifest
    other = Store(tmp_path / "other")
    other.publish(make_draft(seed=1))
    assert pulls(into=other, take_over=True).added
    assert other.load("tiny").manifest.version == 2


def test_a_name_of_the_package_keeps_its_meaning(hub: Hub, tmp_path: Path, pulls: Pulls) -> None:
    Store(tmp_path / "package").publish(make_draft(seed=1))
    store = Store(tmp_path / "own", fallbacks=[tmp_path / "package"])
    hub.repository("me/tiny", files_of(made(tmp_path)))
    with pytest.raises(BundleConflict, match=r"Take the new one.*--take-over"):
        pulls(into=store)
    assert pulls(into=store, take_over=True).added
    hub.repository("me/same", files_of(made(tmp_path / "same", seed=1)))
    assert not pulls("hf://me/same", into=Store(tmp_path / "new", fallbacks=[tmp_path / "package"])).added


def test_another_repository_is_another_origin(hub: Hub, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    hub.repository("me/tiny", files_of(made(tmp_path)))
    hub.repository("mallory/tiny", files_of(made(tmp_path, version=2, seed=1)))
    pulls()
    with pytest.raises(BundleConflict, match="not from there"):
        pulls("hf://mallory/tiny")


def test_a_link_out_of_the_store_is_not_followed(hub: Hub, store: Store, tmp_path: Path, pulls: Pulls) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    store.root.mkdir()
    (store.root / "tiny").symlink_to(outside)
    hub.repository("me/tiny", files_of(made(tmp_path)))
    with pytest.raises(InvalidReference, match="leads out of the store"):
        pulls()
    assert list(outside.iterdir()) == []


# killed


PULL = """
import os, signal, sys
from pathlib import Path
from probes_store.store import Store
from probes_store.syntax import parse_address
from probes_store.transfer import pull
if sys.argv[2] == "rename":
    rename = os.rename
    os.rename = lambda a, b: os.kill(os.getpid(), signal.SIGKILL) if ".publish-" in str(a) else rename(a, b)
pull(Store(Path(sys.argv[1])), parse_address("hf://me/tiny"))
"""


@pytest.mark.parametrize("moment", ["download", "rename"])
def test_a_killed_pull_leaves_the_store_as_it_was(
    hub: Hub, store: Store, cache: Path, tmp_path: Path, pulls: Pulls, moment: str
) -> None:
    hub.repository("me/tiny", files_of(made(tmp_path)))
    reached, go_on = threading.Event(), threading.Event()

    def stall(request: Request) -> None:
        reached.set()
        go_on.wait(60)
        request.close_connection = True

    if moment == "download":
        hub.faults.append(once("evaluation.json", stall))
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(cache)}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    with subprocess.Popen([sys.executable, "-c", PULL, str(store.root), moment], env=environment) as process:
        if moment == "download":
            assert reached.wait(60)
            process.kill()
        assert process.wait(60) == -signal.SIGKILL
    go_on.set()
    assert store.list() == []
    assert bool(list(store.root.glob("tiny/.publish-*"))) == (moment == "rename")
    assert pulls().added
    store.verify("tiny:1")
    assert not list(store.root.glob("tiny/.publish-*"))
    assert json.loads((store.root / "tiny/1/.origin.json").read_text())["repository"] == "hf://me/tiny"


# a repository as a store, and signatures on the hub

URL = "hf://me/tiny"
REAL = Repository.__init__


def ask(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT and HF_HOME would have it, which huggingface_hub reads when it is imported."""

    def init(self: Repository, repository: str, **_: object) -> None:
        REAL(self, repository, endpoint=endpoint, cache=tmp_path / "hf")

    monkeypatch.setattr(Repository, "__init__", init)


@pytest.fixture
def as_source(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    ask(hub.url, tmp_path, monkeypatch)
    return hub


@pytest.fixture
def keys(tmp_path: Path) -> KeyPair:
    return key_pair(tmp_path, "ours")


@pytest.fixture
def pushed(as_source: Hub, store: Store, keys: KeyPair) -> Bundle:
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


def test_it_is_only_read(as_source: Hub, opens: Opens) -> None:
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


def test_no_repository_is_no_empty_store(as_source: Hub, opens: Opens, tmp_path: Path) -> None:
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
