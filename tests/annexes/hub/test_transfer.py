"""Push, pull and a repository as a store, with the real huggingface_hub client against a server of
this machine."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub import HfApi

from probes_store import errors, hub
from probes_store.bundle import SIGNATURE, Bundle
from probes_store.errors import (
    BundleConflict,
    BundleDamaged,
    HubError,
    HubMissing,
    HubUnreachable,
    InvalidReference,
)
from probes_store.index import INDEX, read_index
from probes_store.manifest import MANIFEST, record_of, with_seal
from probes_store.store import SHIPPED, Store, Trust
from probes_store.syntax import HubAddress, parse_address, readable_json
from probes_store.trust import Signing, required_signature
from service.annexes.hub.transfer import Pulled, Pushed, pull, push
from tests.kit.bundles import ANSWER, make_draft, write_bundle
from tests.kit.hub_stand_in import TOKEN, Hub, Repository, Request, hub_stand_in
from tests.kit.key_pairs import KeyPair
from tests.kit.tables import lines
from tests.probes_store.conftest import Opens

FORK = multiprocessing.get_context("fork")
URL = "hf://me/tiny"
NOWHERE = "http://127.0.0.1:9"
Files = dict[str, bytes]


class Place:
    """A hub that this process may write to, an empty store, and a folder."""

    def __init__(self, server: Hub, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.hub = server
        self.folder = folder
        self.cache = folder / "cache"
        self.store = Store(folder / "store")
        self.patch = patch
        self.ask(server.url, self.cache)

    def ask(self, endpoint: str, cache: Path) -> None:
        """As HF_ENDPOINT and HF_HOME would have it, which huggingface_hub reads when imported."""
        self.patch.setattr(hub, "HfApi", partial(HfApi, endpoint=endpoint))
        self.patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))

    @property
    def there(self) -> Repository:
        return self.hub.repositories["me/tiny"]

    def made(self, at: str = "made", *, version: int = 1, **changes: Any) -> Bundle:
        name = changes.get("name", "tiny")
        return write_bundle(
            make_draft(**changes), self.folder / at / f"{name}-{version}", version=version
        )

    def offered(
        self, files: dict[str, bytes] | None = None, tag: str | None = None
    ) -> dict[str, bytes]:
        """These files, or a bundle's, in the repository."""
        files = self.made().files() if files is None else files
        self.hub.repository("me/tiny", files, tag=tag)
        return files

    def pull(self, address: str = URL, into: Store | None = None, **options: Any) -> Pulled:
        return pull(into or self.store, parse_address(address), **options)

    def push(self, bundle: Bundle, **options: Any) -> Pushed:
        return push(bundle, HubAddress("me/tiny"), **options)

    def refuses(
        self, error: type[Exception], word: str = "", address: str = URL, **options: Any
    ) -> None:
        """The pull fails so, and the store is as it was: empty."""
        with pytest.raises(error, match=word or None):
            self.pull(address, **options)
        assert self.store.list() == []
        assert not [path for path in self.store.root.rglob("*") if path.is_file()]

    def refuses_push(
        self, error: type[Exception], word: str, bundle: Bundle, **options: Any
    ) -> None:
        """The push fails so, before anything is written."""
        before = self.written()
        with pytest.raises(error, match=word or None):
            self.push(bundle, **options)
        assert self.written() == before

    def written(self) -> int:
        return self.hub.count("^(POST|PUT)")

    def when(
        self,
        pattern: str,
        act: Callable[[Request], Any],
        *,
        once: bool = False,
        instead: bool = True,
    ) -> None:
        """From now on only this fault: at requests like this, ``instead`` of an answer."""
        done: list[Request] = []

        def fault(request: Request) -> bool:
            if (once and done) or not re.search(pattern, f"{request.command} {request.route}"):
                return False
            done.append(request)
            act(request)
            return instead

        self.hub.faults[:] = [fault]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    """Xet, a protocol of its own, is off: large files go by git's LFS."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    with hub_stand_in() as running:
        yield Place(running, tmp_path, monkeypatch)


def test_addresses() -> None:
    assert parse_address("hf://a-b/c.d_e@v1") == HubAddress("a-b/c.d_e", "v1")
    assert str(parse_address("hf://a/b@refs/pr/1")) == "hf://a/b@refs/pr/1"
    for text in (
        *lines(
            """
            a/b
            hf://a
            hf://a/b/c
            hf://a/b@
            hf://../b
            hf://a/..
            hf://a/b@../../x
            hf://a/b@/etc
            hf://a--b/c
            hf://a b/c
            https://huggingface.co/a/b
            hf://a/b@x/../y
            """
        ),
        "hf://a/b@v1\n",
    ):
        with pytest.raises(InvalidReference, match="hf://OWNER/NAME"):
            parse_address(text)


def test_a_bundle_goes_there_and_back(place: Place) -> None:
    bundle = place.made(version=3, answer=ANSWER)
    done = place.push(bundle)
    assert (done.create, done.commit, done.nothing) == (True, True, False)
    assert (done.address, done.private) == ("hf://me/tiny@v3", False)
    assert done.url == f"{place.hub.url}/me/tiny/tree/v3"
    assert list(place.there.tags) == ["v3"]
    pushed = {k: v for k, v in place.there.commits[place.there.tags["v3"]].items() if k[0] != "."}
    [offer] = read_index(pushed.pop(INDEX))
    assert (offer.name, offer.versions) == ("tiny", (3,))
    assert offer.fingerprint == bundle.manifest.model.fingerprint
    assert pushed == bundle.files()
    shown: list[int] = []

    def shows(total: int) -> Callable[[int], None]:
        shown.append(-total)
        return shown.append

    found = place.pull("hf://me/tiny@v3", bar=shows)
    assert (found.added, found.offline, found.left_out) == (True, None, [])
    assert found.commit == place.there.tags["v3"]
    assert sum(shown) == 0 > shown[0]  # every byte was shown once
    loaded = place.store.verify("tiny:3")
    assert loaded.manifest == bundle.manifest
    assert place.hub.leaked == []  # the storage, another host, never saw the token
    again = place.pull()
    assert (again.added, again.bundle.path) == (False, loaded.path)
    assert place.hub.count("GET /storage") == 4


def test_the_next_version_follows_and_the_old_stays(place: Place) -> None:
    first = place.made()
    second = place.made(version=2, seed=1, plots={})
    assert place.push(first, dry_run=True, private=True).create
    assert (place.hub.repositories, place.written()) == ({}, 0)
    place.push(first)
    written = place.written()
    assert place.push(first).nothing
    assert place.push(place.made("later")).nothing  # another time of publication, the same content
    assert place.written() == written
    place.there.commits[place.there.head]["LICENSE"] = b"of the data"
    assert place.push(second).deleted == ["plots/roc.png"]
    files = place.there.commits[place.there.head]
    assert ("plots/roc.png" in files, files["LICENSE"]) == (False, b"of the data")
    assert place.pull("hf://me/tiny@v1").bundle.reference == "tiny:1"
    found = place.pull()  # a later version from the same place needs no leave
    assert (found.bundle.reference, found.left_out) == ("tiny:2", ["LICENSE"])
    assert place.store.load("tiny").manifest == second.manifest
    del place.there.tags["v1"]
    place.refuses_push(BundleConflict, "version 2 already", first)


def test_a_push_never_writes_over_something_else(place: Place) -> None:
    bundle = place.made()
    strange = {"config.json": b"{}", "model.bin": b"x"}
    another, other = (
        place.made("there", **changes).files() for changes in ({"seed": 1}, {"name": "other"})
    )
    for files, tag, word in (
        (another, "v1", "v1 is another bundle"),
        (another, None, "main is another bundle"),
        (other, None, "expected other, found tiny"),
        (strange, None, r"'config\.json', 'model\.bin'"),
    ):
        place.hub.repositories.clear()
        place.offered(files, tag)
        place.refuses_push(BundleConflict, word, bundle)


def test_what_else_is_pushed_and_what_is_not(place: Place) -> None:
    bundle = place.made("changed")
    (bundle.path / "README.md").write_text("# tiny\n\nA better bundle for us\n")
    place.refuses_push(BundleDamaged, "", bundle)
    assert place.hub.requests == []
    with pytest.raises(HubError, match=r'"base_model" with value "/home/me/model" is not valid'):
        place.push(place.made("card", card="---\nbase_model: /home/me/model\n---\n# tiny\n"))
    assert place.there.tags == {}
    del place.hub.repositories["me/tiny"]
    place.offered(
        {"README.md": b"# mine\n", "LICENSE": b"x"}
    )  # a repository made by hand gets its first bundle
    assert place.push(place.made()).commit


def test_private_means_private_and_asks_for_a_token(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.offered({})
    place.refuses_push(BundleConflict, "public", place.made(), private=True)
    del place.hub.repositories["me/tiny"]
    assert place.push(place.made("b"), private=True).private
    assert place.there.private
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody")
    place.refuses(HubMissing, "HF_TOKEN")
    with pytest.raises(HubError, match=r"token.*HF_TOKEN"):  # somebody may not create it either
        place.push(place.made("other"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert place.pull().added


def test_what_goes_wrong_during_a_push(place: Place) -> None:
    bundle = place.made()
    place.when("/tag/", lambda request: request.refuse(503, "try later"))
    with pytest.raises(HubUnreachable, match="503"):
        place.push(bundle)
    place.hub.faults.clear()
    commits = len(place.there.commits)
    done = place.push(bundle)  # it goes on where it ended
    assert (done.create, done.commit, done.nothing) == (False, False, False)
    assert (len(place.there.commits), list(place.there.tags)) == (commits, ["v1"])
    place.when("/preupload/", lambda _: place.offered({"of-somebody": b"else"}), instead=False)
    with pytest.raises(HubError, match="commit has happened since"):
        place.push(place.made(version=2, seed=1))
    assert list(place.there.tags) == ["v1"]
    del place.hub.repositories["me/tiny"]

    def spoil(_: Request) -> None:
        files = place.there.commits[place.there.head]
        files["evaluation.json"] = files["evaluation.json"][::-1]

    place.when("/tag/", spoil, instead=False)
    with pytest.raises(HubError, match=r"evaluation\.json"):
        place.push(place.made("again"))


def test_a_pin_is_held_and_other_files_are_told_and_never_fetched(place: Place) -> None:
    own = place.made().files()
    names = ("../evil.txt", "/etc/evil", "model.pkl", "setup.py", "plots/x.svg")
    place.offered(dict.fromkeys(names, b"\x80\x04.") | own)
    place.refuses(errors.DigestMismatch, "--digest", digest="sha256:" + "0" * 64)
    place.refuses(InvalidReference, "64 hex", digest="sha256:0")
    assert place.hub.count(r"GET .*resolve.*\.md") == 0  # refused by the manifest alone
    assert place.pull(digest=place.made("b").manifest.digest).left_out == sorted(names)
    assert place.hub.count("evil|pkl|setup|svg") == 0
    root = place.store.root
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert found == {f"tiny/1/{name}" for name in (*own, ".origin.json")}


def listing(name: str) -> Callable[[Place, Files], Files]:
    """A manifest that lists this, too, sealed anew, as anyone can do."""

    def make(place: Place, own: Files) -> Files:
        files = {key: data for key, data in own.items() if key != MANIFEST} | {name: b"x"}
        records = {key: dataclasses.asdict(record_of(data)) for key, data in files.items()}
        return files | {
            MANIFEST: readable_json(with_seal(json.loads(own[MANIFEST]) | {"files": records}))
        }

    return make


def with_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Place, Files], Files]:
    return lambda place, own: own | {name: change(own[name])}


def other_manifest(place: Place, own: Files) -> Files:
    return own | {MANIFEST: place.made("o", name="other", seed=3).files()[MANIFEST]}


# What is offered, the error and a word of it, and what is not even asked for.
REFUSED: list[tuple[Callable[[Place, Files], Files], type[Exception], str, str]] = [
    *(
        (listing(name), errors.UnknownField, "", "evil|setup")
        for name in (
            "../evil.txt",
            "/tmp/evil",
            "plots/../../evil.png",
            "evil.pkl",
            "setup.py",
            ".evil",
        )
    ),
    (
        lambda place, own: {"config.json": b"{}", "pytorch_model.bin": b"x"},
        errors.MissingFile,
        "no bundle",
        "resolve",
    ),
    (
        lambda place, own: place.made(version=10**9).files(),
        errors.BadValue,
        "999999999",
        "storage",
    ),
    (with_file("README.md", lambda data: data[::-1]), BundleDamaged, "", "evil"),
    *(
        (make, BundleDamaged, "", "storage")
        for make in (
            other_manifest,
            lambda place, own: {key: own[key] for key in own if "golden" not in key},
            with_file("probes.safetensors", lambda data: data[::-1]),  # the hub's own digest
            with_file("evaluation.json", lambda data: data + b" "),
            with_file(MANIFEST, lambda data: b"{}"),
            with_file(MANIFEST, lambda data: data + b" " * (2 << 20)),
            with_file(MANIFEST, lambda data: data.replace(b'd": 0.5', b'd": 0.9')),
        )
    ),
]


def test_what_a_pull_refuses(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    own = place.made().files()
    for make, error, word, unasked in REFUSED:
        place.hub.repositories.clear()
        place.offered(make(place, own))
        place.hub.requests.clear()
        place.refuses(error, word)
        assert place.hub.count(unasked) == 0
    place.hub.repositories.clear()
    place.hub.requests.clear()
    place.offered(place.made(version=3).files(), tag="v2")
    place.refuses(BundleConflict, "v2 holds version 3", "hf://me/tiny@v2")
    place.refuses(HubError, "no such revision", "hf://me/tiny@v7")
    place.refuses(HubMissing, "no such repository", "hf://me/nothing")
    monkeypatch.setattr("probes_store.bundle.MAX_TOTAL", 900)
    place.refuses(errors.BadValue, "900 bytes")
    assert place.hub.count("GET .*(storage|README)") == 0


def test_a_stream_longer_than_stated_is_cut_off(place: Place) -> None:
    place.offered()
    sent = threading.Event()

    def endless(request: Request) -> None:
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

    place.when("GET .*README.md", endless)
    place.refuses(errors.DigestMismatch, "too long")
    assert not sent.is_set()
    assert sum(path.stat().st_size for path in place.cache.rglob("*") if path.is_file()) < 1 << 20


def half(request: Request) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "55")
    request.end_headers()
    request.wfile.write(b"{" * 20)
    request.close_connection = True


def test_a_download_that_fails_or_breaks_off(place: Place) -> None:
    place.offered()
    for act, error, word in (
        (lambda request: request.answer(200, b"{}"), HubError, "should be of size"),
        (lambda request: request.refuse(500, "out of order"), HubUnreachable, r"500.*out of order"),
    ):
        place.when("GET .*evaluation.json", act, once=True)
        place.refuses(error, word)
    before = place.hub.count("GET .*evaluation.json")
    place.when("GET .*evaluation.json", half, once=True)  # that is tried again
    assert place.pull().added
    assert place.hub.count("GET .*evaluation.json") == before + 2
    assert place.hub.count("GET .*README.md") == 1  # what was fetched stays
    place.store.verify("tiny:1")
    for blob in place.cache.rglob("blobs/*"):  # what is damaged in the cache is fetched anew
        blob.write_bytes(blob.read_bytes()[::-1])
    again = Store(place.folder / "again")
    assert place.pull(into=again).added
    again.verify("tiny:1")


def test_without_a_connection_the_cache_serves(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.offered(tag="v1")
    place.pull("hf://me/tiny@v1", into=Store(place.folder / "first"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    asked = len(place.hub.requests)
    found = place.pull("hf://me/tiny@v1")
    assert found.added
    assert "HF_HUB_OFFLINE" in str(found.offline)
    for address in ("hf://me/tiny@v2", "hf://me/other"):
        with pytest.raises(HubUnreachable, match="not in the cache"):
            place.pull(address)
    assert len(place.hub.requests) == asked
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    place.when("", lambda request: request.refuse(502, "down"))
    assert "502" in str(place.pull("hf://me/tiny@v1", into=Store(place.folder / "third")).offline)
    place.ask(NOWHERE, place.folder / "c")
    with pytest.raises(HubUnreachable, match="cache"):
        place.pull()
    with pytest.raises(HubUnreachable, match=f"no answer from {NOWHERE}"):
        place.push(place.made("again"))


def test_a_version_and_a_name_keep_their_meaning(place: Place) -> None:
    here = place.store.publish(make_draft(seed=1))
    place.offered()
    for options in ({}, {"take_over": True}):
        with pytest.raises(BundleConflict, match="has this version"):
            place.pull(**options)
    place.offered(place.made(version=2).files())
    with pytest.raises(BundleConflict, match=r"alias tiny production 1.*--take-over"):
        place.pull()
    assert [summary.version for summary in place.store.list()] == [1]
    place.store.set_alias("tiny", "production", 1)
    assert place.pull().added
    assert place.store.load("tiny").manifest == here.manifest
    other = Store(place.folder / "other")
    other.publish(make_draft(seed=1))
    assert place.pull(into=other, take_over=True).added
    assert other.load("tiny").manifest.version == 2


def test_a_name_of_the_package_or_of_another_repository_keeps_its_meaning(place: Place) -> None:
    package = place.folder / "package"
    Store(package).publish(make_draft(seed=1))
    store = Store(place.folder / "own", fallbacks=[package])
    place.offered()
    with pytest.raises(BundleConflict, match=r"--take-over"):
        place.pull(into=store)
    assert place.pull(into=store, take_over=True).added
    place.hub.repository("me/same", place.made("same", seed=1).files())
    assert not place.pull(
        "hf://me/same", into=Store(place.folder / "new", fallbacks=[package])
    ).added
    place.hub.repository("mallory/tiny", place.made(version=2, seed=1).files())
    place.pull()
    with pytest.raises(BundleConflict, match="from another source; this bundle would replace it"):
        place.pull("hf://mallory/tiny")


def test_a_pull_that_is_killed_leaves_the_store_as_it_was(place: Place) -> None:
    """While it downloads; test_store.py kills what publishes at each of its steps."""
    place.offered()
    reached, go_on = threading.Event(), threading.Event()

    def stall(request: Request) -> None:
        reached.set()
        go_on.wait(60)
        request.close_connection = True

    place.when("GET .*evaluation.json", stall, once=True)
    process = FORK.Process(target=place.pull)
    process.start()
    assert reached.wait(60)
    process.kill()
    process.join(60)
    go_on.set()
    assert place.store.list() == []
    assert place.pull().added
    place.store.verify("tiny:1")
    origin = place.store.root / "tiny/1/.origin.json"
    assert json.loads(origin.read_text())["repository"] == URL


@pytest.fixture
def pushed(place: Place, keys: KeyPair) -> Bundle:
    """Two versions on the hub, of which the second is signed."""
    place.push(place.store.publish(make_draft(0)))
    second = place.store.sign(place.store.publish(make_draft(1)).reference, Signing(keys.private))
    place.push(second)
    return second


def test_a_repository_is_read_as_a_store(
    pushed: Bundle, place: Place, opens: Opens, keys: KeyPair
) -> None:
    store = opens(URL)
    with pytest.raises(HubMissing):  # no repository is no empty store
        Store("hf://me/nothing", [SHIPPED], cache=store.root.parent).load("demo")
    assert store.load("tiny").manifest == pushed.manifest
    assert store.load("tiny:2").files() == pushed.files()
    assert [summary.reference for summary in store.list()] == ["tiny:1", "tiny:2"]
    assert {summary.error for summary in store.list()} == {None}
    strict = opens(URL, trust=Trust(required_signature(str(keys.public))))
    assert strict.load("tiny").reference == "tiny:2"
    with pytest.raises(errors.SignatureMissing):
        strict.load("tiny:1")
    for missing in ("tiny:3", "tiny@production", "other"):
        with pytest.raises(errors.BundleNotFound):
            store.load(missing)
    assert (
        Store(URL, [SHIPPED], cache=store.root.parent).load("demo").path == SHIPPED / "demo" / "1"
    )
    opens(URL, "other").load("tiny:1")
    place.ask(NOWHERE, place.cache)
    for cache in ("other", "new"):  # huggingface_hub's cache and ours have tiny:1
        with pytest.raises(errors.StoreUnreachable):
            opens(URL, cache).load("tiny:1")
    for action in (
        store.check_writable,
        lambda: store.publish(make_draft(2)),
        lambda: store.own.set_alias("tiny", "production", 1, "previous"),
        lambda: store.own.write_signature("tiny", 1, b""),
        lambda: store.own.add(make_draft(2).manifest, {}),
    ):
        with pytest.raises(errors.StoreRefused, match="bundle push"):
            action()
    with pytest.raises(InvalidReference, match="hf://OWNER/NAME"):
        opens("hf://me/tiny@v1")


def test_a_signature_goes_to_the_hub_and_back(pushed: Bundle, place: Place, keys: KeyPair) -> None:
    there = Store(place.folder / "there", trust=Trust(required_signature(str(keys.public))))
    done = place.pull(f"{URL}@v2", into=there)
    assert (done.added, list(done.left_out)) == (True, [])
    assert there.load("tiny").files() == pushed.files()
    with pytest.raises(errors.SignatureMissing):
        place.pull(f"{URL}@v1", into=Store(place.folder / "other", trust=there.trust))
    assert Store(place.folder / "other").list() == []
    (
        there.root / "tiny" / "2" / SIGNATURE
    ).unlink()  # a pull brings the signature that a bundle lacks
    assert place.pull(into=there).added is False
    assert there.load("tiny").files() == pushed.files()
    # a version on the hub is not signed later, and the next one has its own
    place.refuses_push(
        BundleConflict, "Sign before", place.store.sign("tiny:1", Signing(keys.private))
    )
    assert place.push(pushed).nothing
    assert SIGNATURE in place.push(place.store.publish(make_draft(2))).deleted
    assert SIGNATURE not in place.there.commits[place.there.head]
