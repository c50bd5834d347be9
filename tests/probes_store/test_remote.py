"""Stores by URL: in memory, and on a real S3 server."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from probes_store import bucket
from probes_store.bucket import Objects
from probes_store.bundle import read_files
from probes_store.errors import (
    BadValue,
    BundleConflict,
    BundleDamaged,
    BundleError,
    BundleNotFound,
    DigestMismatch,
    InvalidReference,
    MissingFile,
    StoreRefused,
    StoreUnreachable,
)
from probes_store.manifest import MANIFEST, Manifest, manifest_bytes, sealed
from probes_store.store import SHIPPED, Store
from probes_store.syntax import check_url
from probes_store.transfer import copy
from tests.probes_store.conftest import BOTH, Opens
from tests.probes_store.factory import make_draft, write_bundle
from tests.probes_store.s3_server import VARIABLES, free_port, use

FORK = multiprocessing.get_context("fork")


def names_at(url: str, *parts: str) -> list[str]:
    return Objects(url).children(*parts)


def blob_of(manifest: Manifest, name: str) -> str:
    return f"{manifest.name}/blobs/{manifest.files[name].sha256}"


# as a folder


@pytest.mark.parametrize("url", BOTH, indirect=True)
def test_publish_and_read(url: str, opens: Opens) -> None:
    here = opens(url)
    assert here.list() == []
    first, second = here.publish(make_draft(0)), here.publish(make_draft(1))
    assert (first.reference, second.reference, here.where) == ("tiny:1", "tiny:2", url)
    assert here.publish(make_draft(0)).reference == "tiny:1"  # equal content is not copied
    assert here.publish(make_draft(2, name="other")).reference == "other:1"
    there = opens(url, "two")
    assert there.load("tiny").reference == "tiny:2"
    found = there.verify("tiny:1")
    assert found.manifest == first.manifest
    assert read_files(found.path, found.manifest) == read_files(first.path, first.manifest)
    assert [summary.reference for summary in there.list()] == ["other:1", "tiny:1", "tiny:2"]
    assert [summary.error for summary in there.list()] == [None] * 3
    for missing in ("absent", "tiny:3", "tiny@beta"):
        with pytest.raises(BundleNotFound):
            there.resolve(missing)


def test_aliases(url: str, opens: Opens) -> None:
    here, there = opens(url), opens(url, "two")
    for seed in range(2):
        here.publish(make_draft(seed))
    here.set_alias("tiny", "canary", 1)
    there.set_alias("tiny", "production", 1)
    assert here.aliases("tiny") == there.aliases("tiny") == {"canary": 1, "production": 1}
    assert here.resolve("tiny") == here.resolve("tiny@canary") == here.root / "tiny" / "1"
    here.set_alias("tiny", "canary", 2)
    assert there.load("tiny@canary").reference == "tiny:2"
    assert names_at(url, "tiny", "aliases") == ["1.json", "2.json", "3.json"]
    here.set_alias("tiny", "canary", 2)  # as it is: no new revision
    assert names_at(url, "tiny", "aliases") == ["1.json", "2.json", "3.json"]
    there.set_alias("tiny", "production", 2, "previous")  # one step
    there.set_alias("tiny", "beta", 1, "before")  # it meant nothing before
    assert here.aliases("tiny") == {"canary": 2, "production": 2, "previous": 1, "beta": 1}
    assert names_at(url, "tiny", "aliases")[-1] == "5.json"
    for number in range(7):
        here.set_alias("tiny", "beta", 2 - number % 2)
    assert there.aliases("tiny")["beta"] == 2  # of the twelfth table, not of the ninth
    with pytest.raises(BundleNotFound):
        here.set_alias("tiny", "canary", 3)
    with pytest.raises(BundleNotFound, match="fallbacks are only read"):
        Store(url, [SHIPPED], cache=here.root.parent).set_alias("demo", "production", 1)


def test_after_the_highest_number_nothing_is_acknowledged_that_nobody_would_see(opens: Opens, store: Store) -> None:
    there = opens("memory://highest")
    there.publish(make_draft(0))
    Objects("memory://highest").put("tiny/aliases/999999999.json", b"{}")
    with pytest.raises(BundleConflict, match="highest number"):
        there.set_alias("tiny", "production", 1)
    last = write_bundle(make_draft(1), store.root.parent / "last" / "tiny" / "999999999", version=999_999_999)
    for one in (there, store):
        copy(last, one, source="here", take_over=True)
        with pytest.raises(BundleConflict, match="highest number"):
            one.publish(make_draft(2))
        assert one.load("tiny").reference == "tiny:999999999"


def test_names_in_a_listing_lead_nowhere(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may list what it likes."""
    store = opens("memory://listing")
    store.publish(make_draft(0))
    real = Objects.children
    evil = ["..", "../../etc", "/etc", "%2e%2e", "tiny/../..", "tiny\n", "", ".", "1/../../x", "-1", "01", "1e3", "٣"]
    monkeypatch.setattr(Objects, "children", lambda self, *parts: [*evil, *real(self, *parts)])
    assert [summary.reference for summary in store.list()] == ["tiny:1"]
    assert store.aliases("tiny") == {}
    for name in evil[:10]:
        with pytest.raises(InvalidReference):
            store.load(name)
    assert sorted(path.name for path in store.root.iterdir()) == ["tiny"]


def test_a_manifest_that_lists_a_file_elsewhere_is_refused(opens: Opens) -> None:
    bundle = opens("memory://elsewhere").publish(make_draft(0))
    for name in ("../../../escaped", "/tmp/escaped", "plots/../../escaped", ".hidden", "model.sig"):
        document = json.loads(manifest_bytes(bundle.manifest))
        document["files"][name] = document["files"]["README.md"]
        document["version"] = 2
        Objects("memory://elsewhere").put(f"tiny/2/{MANIFEST}", json.dumps(document).encode())
        with pytest.raises(BundleDamaged):
            opens("memory://elsewhere", "new").load("tiny:2")
        assert not [path for path in opens("memory://elsewhere", "new").root.rglob("*") if path.is_file()]


def test_a_huge_object_is_not_read_to_its_end(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opens("memory://huge")
    bundle = store.publish(make_draft(0))
    taken, real = [], Objects.read

    def counted(self: Objects, path: str, limit: int) -> bytes | None:
        data = real(self, path, limit)
        taken.append(len(data or b""))
        return data

    monkeypatch.setattr(Objects, "read", counted)
    objects = Objects("memory://huge")
    for path in (f"tiny/1/{MANIFEST}", blob_of(bundle.manifest, "README.md"), "tiny/aliases/1.json"):
        before = None if "aliases" in path else objects.read(path, 1 << 20)
        objects.put(path, b" " * (40 << 20))
        with pytest.raises(BundleDamaged):
            opens("memory://huge", "new").load("tiny")
        if before is not None:
            objects.put(path, before)
    objects._fs.rm("huge/tiny/aliases/1.json")
    objects.put("tiny/1/model.sig", b" " * (40 << 20))  # nobody asks for a signature here
    assert max(taken) < 10 << 20
    assert opens("memory://huge", "new").load("tiny").reference == "tiny:1"


def test_a_local_stores_aliases_that_were_copied_there_count_until_the_first_change(opens: Opens) -> None:
    store = opens("memory://copied")
    for seed in range(2):
        store.publish(make_draft(seed))
    Objects("memory://copied").put("tiny/aliases.json", b'{\n  "production": 1\n}\n')
    assert store.load("tiny").reference == "tiny:1"
    store.set_alias("tiny", "canary", 2)
    assert store.aliases("tiny") == {"canary": 2, "production": 1}
    Objects("memory://copied").put("tiny/aliases/2.json", b"{,}\n")
    with pytest.raises(BadValue, match=r"tiny/aliases/2\.json"):
        store.load("tiny")
    assert store.load("tiny:2").reference == "tiny:2"


def test_a_bundle_of_another_store_keeps_its_number(url: str, opens: Opens, store: Store) -> None:
    for seed in range(2):
        bundle = store.publish(make_draft(seed))
    there = opens(url)
    done, added = copy(bundle, there, source=store.where)
    assert (done.reference, added, names_at(url, "tiny")) == ("tiny:2", True, ["2", "blobs"])
    assert done.manifest == bundle.manifest
    assert copy(bundle, there, source=store.where)[1] is False
    other = write_bundle(make_draft(7), store.root.parent / "elsewhere" / "tiny" / "2", version=2)
    with pytest.raises(BundleConflict, match="has this version already"):
        copy(other, there, source="elsewhere")
    assert there.publish(make_draft(9)).reference == "tiny:3"


def test_names_of_the_package_are_behind_a_url_too(opens: Opens, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("demo", "mine"):
        opens("memory://names").publish(make_draft(0, name=name))
    cache = opens("memory://names").root.parent
    assert Store("memory://empty", [SHIPPED], cache=cache).resolve("demo") == SHIPPED / "demo" / "1"
    assert not caplog.records
    both = Store("memory://names", [SHIPPED], cache=cache)
    assert both.resolve("demo") == both.resolve("demo:1") == both.root / "demo" / "1"
    assert both.resolve("mine") == both.root / "mine" / "1"
    (record,) = caplog.records  # said once
    assert "demo is that of memory://names, which hides the one that comes with the package" in record.getMessage()


# copies


def test_copies_are_this_users_alone(opens: Opens) -> None:
    store = opens("memory://modes")
    store.publish(make_draft(0))
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (store.root, store.root.parent)] == [0o700, 0o700]


def test_a_damaged_copy_is_fetched_again(url: str, opens: Opens) -> None:
    store = opens(url)
    bundle = store.publish(make_draft(0))
    for name in ("probes.safetensors", MANIFEST):
        (bundle.path / name).write_bytes(b"x")
        assert store.load("tiny").manifest == bundle.manifest
    (bundle.path / "README.md").unlink()
    assert store.verify("tiny").card() == "# tiny\n\nA bundle for tests.\n"


def test_what_changed_at_the_url_is_refused(url: str, opens: Opens) -> None:
    store = opens(url)
    bundle = store.publish(make_draft(0))
    blob = blob_of(bundle.manifest, "probes.safetensors")
    Objects(url).put(blob, b"x" * bundle.manifest.files["probes.safetensors"].bytes)
    with pytest.raises(DigestMismatch, match=r"tiny/1/probes\.safetensors"):
        opens(url, "new").load("tiny")
    Objects(url).put(blob, b"x" * 10_000)
    with pytest.raises(DigestMismatch, match=r"tiny/1/probes\.safetensors"):
        opens(url, "new").load("tiny")
    assert not (opens(url, "new").root / "tiny" / "1").exists()  # nothing of it is kept
    assert store.load("tiny").reference == "tiny:1"  # its copy is sound
    store.publish(make_draft(0))  # a publisher of the same content mends it
    assert opens(url, "new").load("tiny").manifest == bundle.manifest
    Objects(url).put(f"tiny/1/{MANIFEST}", b"{}\n")
    with pytest.raises(BundleDamaged, match=r"tiny/1/bundle\.json"):
        opens(url, "third").load("tiny")


def test_another_bundle_under_a_known_version_is_refused(url: str, opens: Opens) -> None:
    store = opens(url)
    first = store.publish(make_draft(0))
    rogue = opens(url.replace("//", "//", 1) + "-rogue", "rogue").publish(make_draft(1))
    for name, data in read_files(rogue.path, rogue.manifest).items():
        Objects(url).put(blob_of(rogue.manifest, name), data)
    Objects(url).put(f"tiny/1/{MANIFEST}", manifest_bytes(rogue.manifest))
    assert opens(url, "new").load("tiny").manifest.digest == rogue.manifest.digest  # who never saw it cannot tell
    again = sealed(first.manifest, created="2030-01-01T00:00:00Z")  # sealing anew makes another bundle, too
    for other in (rogue.manifest, again):
        Objects(url).put(f"tiny/1/{MANIFEST}", manifest_bytes(other))
        with pytest.raises(BundleConflict, match="than before"):
            store.load("tiny")


def test_a_missing_blob_and_a_missing_manifest(opens: Opens) -> None:
    store = opens("memory://missing")
    bundle = store.publish(make_draft(0))
    objects = Objects("memory://missing")
    objects._fs.rm(f"missing/{blob_of(bundle.manifest, 'README.md')}")
    with pytest.raises(MissingFile, match=r"tiny/1/README\.md"):
        opens("memory://missing", "new").load("tiny")
    objects.put("tiny/2/model.sig", b"x")  # nothing that publishes
    with pytest.raises(MissingFile, match=r"tiny/2/bundle\.json"):
        store.load("tiny:2")
    assert store.load("tiny:1").reference == "tiny:1"


def test_a_bundle_in_another_place_is_refused(opens: Opens) -> None:
    bundle = opens("memory://place").publish(make_draft(0))
    Objects("memory://place").put(f"tiny/2/{MANIFEST}", manifest_bytes(bundle.manifest))
    with pytest.raises(BadValue, match="the place does not match the manifest"):
        opens("memory://place").load("tiny:2")


# without an answer


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that says no more than this status."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD = do_PUT = _answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def published(s3_url: str, opens: Opens) -> str:
    store = opens(s3_url)
    for seed in range(2):
        store.publish(make_draft(seed))
    store.set_alias("tiny", "production", 1)
    opens(s3_url, "reader").load("tiny")
    return s3_url


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore asks again at once, rather than after up to a second."""
    monkeypatch.setattr("botocore.retryhandler.random.random", lambda: 0.0)


@pytest.mark.usefixtures("impatient")
def test_without_an_answer_the_copies_serve(published: str, opens: Opens, caplog: pytest.LogCaptureFixture) -> None:
    use(f"http://127.0.0.1:{free_port()}")
    store = opens(published, "reader")
    assert store.load("tiny").reference == "tiny:1"
    said = [record.getMessage() for record in caplog.records]
    assert any("going on with the copies in" in line for line in said)
    assert f"aliases of tiny as they were when {published} last answered: production -> 1" in said
    assert [summary.reference for summary in store.list()] == ["tiny:1"]
    with pytest.raises(BundleNotFound):
        store.load("tiny:2")  # never fetched by this machine
    for action in (lambda: store.publish(make_draft(9)), lambda: store.set_alias("tiny", "canary", 1)):
        with pytest.raises(StoreUnreachable, match="no answer"):
            action()
    with pytest.raises(StoreUnreachable, match="no answer"):
        opens(published, "new").load("tiny")
    with pytest.raises(StoreUnreachable):  # not the package's own in its place
        Store(published, [SHIPPED], cache=store.root.parent / "new").load("demo")


def test_it_asks_again_after_a_while(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        opens("memory://again").publish(make_draft(seed))
    opens("memory://again").set_alias("tiny", "production", 1)
    store = opens("memory://again", "reader")
    store.load("tiny")
    real = Objects.children

    def down(*_: object) -> None:
        raise StoreUnreachable("no answer")

    monkeypatch.setattr(Objects, "children", down)
    assert store.resolve("tiny@production").name == "1"
    monkeypatch.setattr(Objects, "children", real)
    assert store.own.versions("tiny") == {1}
    monkeypatch.setattr("probes_store.store.STAYS_DOWN_S", 0.0)
    store.own._down_until = 0.0  # type: ignore[attr-defined]
    assert store.own.versions("tiny") == {1, 2}


@pytest.mark.usefixtures("impatient")
def test_a_server_error_is_no_answer(s3_url: str) -> None:
    with answering(503) as busy:
        use(busy)
        with pytest.raises(StoreUnreachable, match="no answer"):
            Objects(s3_url).read("tiny/1/bundle.json", 10)


def test_a_server_that_takes_connections_and_says_nothing(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "WRITE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use(f"http://127.0.0.1:{silent.getsockname()[1]}")
        for write in (Objects(s3_url).put, Objects(s3_url).create):
            with pytest.raises(StoreUnreachable, match="none within"):
                write("x", b"1")


def test_a_refusal_is_no_missing_answer(published: str, opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(403) as closed:
        use(closed)
        with pytest.raises(StoreRefused, match="Check the credentials"):
            opens(published, "reader").load("tiny")
    S3FileSystem.clear_instance_cache()
    for name in VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(StoreRefused, match="credentials"):
        opens(published, "reader").load("tiny")


def test_a_bucket_that_is_not_there(s3_url: str, tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="bucked"):
        Store("s3://bucked/x", [SHIPPED], cache=tmp_path).load("nothing")


@pytest.mark.parametrize(
    "text",
    ["s3://", "s3:///x", "s3://b/../x", "s3://b//x", "s3://b/.x", "ftp://b/x", "S3://b", "s3://b/x?y", "s3://a:b@c/x",
     "zip://x::s3://b/x", "file:///tmp/x", "s3://b/x y", "s3://b/x\n"],
)  # fmt: skip
def test_what_is_no_url_of_a_store(text: str, tmp_path: Path) -> None:
    for opening in (check_url, lambda url: Store(url, cache=tmp_path)):
        with pytest.raises(InvalidReference, match="s3://BUCKET/PREFIX"):
            opening(text)


def test_a_slash_at_the_end_makes_no_other_store(opens: Opens) -> None:
    opens("memory://slash/a").publish(make_draft(0))
    assert opens("memory://slash/a/").load("tiny").reference == "tiny:1"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(StoreRefused, match=r"pip install 'hallutracer\[az\]'"):
        Store("az://container", cache=tmp_path).load("tiny")


# several publishers


def publish_some(url: str, cache: str, seeds: list[int], barrier: Any, results: Any) -> None:
    store = Store(url, cache=Path(cache))
    barrier.wait()
    results.put([(seed, store.publish(make_draft(seed)).manifest.version) for seed in seeds])


@pytest.mark.long
def test_concurrent_publishers(s3_url: str, opens: Opens, tmp_path: Path) -> None:
    """Three processes publish a content of their own and a shared one: 4 versions, dense, each content once."""
    barrier, results = FORK.Barrier(3), FORK.Queue()
    work = [[10 + i, 100] for i in range(3)]
    processes = [
        FORK.Process(target=publish_some, args=(s3_url, str(tmp_path / str(i)), seeds, barrier, results))
        for i, seeds in enumerate(work)
    ]
    for process in processes:
        process.start()
    published = [pair for _ in processes for pair in results.get(timeout=120)]
    for process in processes:
        process.join()
    assert len(set(published)) == 4  # a shared content got the same version everywhere
    summaries = opens(s3_url).list()
    assert [(summary.version, summary.error) for summary in summaries] == [(n, None) for n in range(1, 5)]
    assert len({summary.manifest.digest for summary in summaries if summary.manifest}) == 4


def test_two_that_add_the_same_version(s3_url: str, opens: Opens, tmp_path: Path) -> None:
    """Both have tiny:1 of their own; one wins, the other is told."""
    rivals = [write_bundle(make_draft(seed), tmp_path / str(seed) / "tiny" / "1") for seed in range(2)]
    barrier, told = threading.Barrier(2), []

    def add(number: int) -> None:
        store = opens(s3_url, str(number))
        barrier.wait()
        try:
            copy(rivals[number], store, source="here", take_over=True)
        except BundleError as error:
            told.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (error,) = told
    assert isinstance(error, BundleConflict)
    assert "another bundle has this version already" in str(error)
    assert opens(s3_url, "reader").verify("tiny:1").manifest.digest in {rival.manifest.digest for rival in rivals}


def set_aliases(url: str, cache: str, alias: str) -> None:
    for version in (1, 2, 1, 2):
        Store(url, cache=Path(cache)).set_alias("tiny", alias, version)


@pytest.mark.long
def test_concurrent_aliases_are_not_lost(s3_url: str, opens: Opens, tmp_path: Path) -> None:
    for seed in range(2):
        opens(s3_url).publish(make_draft(seed))
    processes = [FORK.Process(target=set_aliases, args=(s3_url, str(tmp_path / name), name)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert opens(s3_url).aliases("tiny") == {"a": 2, "b": 2, "c": 2}
    assert len(names_at(s3_url, "tiny", "aliases")) == 12


def test_an_alias_moved_at_the_last_moment_is_not_lost(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two promotions at once: the one that comes second keeps what the first one set as what was before."""
    store, create, rival = opens("memory://table"), Objects.create, [("production", 2, None), ("canary", 1, None)]
    for seed in range(3):
        store.publish(make_draft(seed))
    store.set_alias("tiny", "production", 1)

    def late(self: Objects, path: str, data: bytes) -> bool:
        if "/aliases/" in path and rival:
            opens("memory://table", "rival").own.set_alias("tiny", *rival.pop())
        return create(self, path, data)

    monkeypatch.setattr(Objects, "create", late)
    store.set_alias("tiny", "production", 3, "previous")
    assert rival == []
    assert store.aliases("tiny") == {"production": 3, "previous": 2, "canary": 1}


def test_a_version_taken_at_the_last_moment(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another publisher wins the race twice: once with other content, once with ours."""
    store, rivals = opens("memory://late"), [make_draft(7), make_draft(0)]
    create = Objects.create

    def late(self: Objects, path: str, data: bytes) -> bool:
        if path.endswith(MANIFEST) and rivals and b'"tiny"' in data:
            rival = rivals.pop(0)
            opens("memory://late", "rival").publish(rival)
        return create(self, path, data)

    monkeypatch.setattr(Objects, "create", late)
    # The rival's own publish passes here as well, and takes the next rival with it: the last one is published first.
    assert store.publish(make_draft(0)).manifest.digest == opens("memory://late").load("tiny:1").manifest.digest
    assert rivals == []
    digests = [summary.manifest.digest for summary in store.list() if summary.manifest]
    assert len(digests) == len(set(digests)) == 2


def test_an_answer_that_was_lost_makes_no_second_version(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest was created, the answer got lost, and the client's second attempt found it there."""
    create = Objects.create

    def lost(self: Objects, path: str, data: bytes) -> bool:
        done = create(self, path, data)
        return done and not path.endswith(MANIFEST)

    monkeypatch.setattr(Objects, "create", lost)
    store = opens("memory://lost")
    assert store.publish(make_draft(0)).reference == "tiny:1"
    assert [summary.reference for summary in store.list()] == ["tiny:1"]


def test_a_server_that_ignores_the_condition_is_not_published_to(
    opens: Opens, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    real = MemoryFileSystem.pipe_file
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda self, path, value, **_: real(self, path, value))
    there, bundle = opens("memory://ignoring"), store.publish(make_draft(0))
    for action in (
        there.check_writable,
        lambda: there.publish(make_draft(0)),
        lambda: copy(bundle, there, source="here"),
    ):
        with pytest.raises(StoreRefused, match="ignores If-None-Match"):
            action()
    assert there.list() == []


# killed


def die_in_publish(url: str, cache: str, key: str, call: int, after: bool) -> None:
    """Publish, and kill the process before or after its ``call``-th request about an object of this name."""
    count, real = 0, S3FileSystem._call_s3

    async def lethal(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        mine = key in options.get("Key", options.get("Prefix", "")) and (not key or method == "put_object")
        count += mine
        if mine and count == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return await real(self, method, *arguments, **options)
        finally:  # a refusal is an answer, too
            if mine and count == call:
                os.kill(os.getpid(), signal.SIGKILL)

    S3FileSystem._call_s3 = lethal
    Store(url, cache=Path(cache)).publish(make_draft(1))
    os._exit(0)


def kill_at(url: str, cache: Path, key: str, call: int, after: bool) -> bool:
    """Whether it was killed: past the last request it ends by itself."""
    process = FORK.Process(target=die_in_publish, args=(url, str(cache), key, call, after))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def check_whole(url: str, opens: Opens, machine: str) -> bool:
    """Whether a machine that never read the store sees the second version; what it sees is sound."""
    reader = opens(url, machine)
    references = [(summary.reference, summary.error) for summary in reader.list()]
    assert references in ([("tiny:1", None)], [("tiny:1", None), ("tiny:2", None)])
    assert reader.verify("tiny").reference == references[-1][0]
    return len(references) == 2


@pytest.mark.parametrize("after", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_kill_around_the_step_that_publishes(after: bool, s3_url: str, opens: Opens, tmp_path: Path) -> None:
    opens(s3_url).publish(make_draft(0))
    assert kill_at(s3_url, tmp_path / "killed", MANIFEST, 1, after)
    assert check_whole(s3_url, opens, "reader") is after
    assert opens(s3_url, "next").publish(make_draft(1)).reference == "tiny:2"
    assert opens(s3_url, "next").publish(make_draft(2)).reference == "tiny:3"


@pytest.mark.long
def test_a_kill_at_every_request_of_publish(s3_url: str, opens: Opens, tmp_path: Path) -> None:
    seen = []
    for call in range(1, 200):
        for after in (False, True):
            url = f"{s3_url}-{call}-{after}"
            opens(url).publish(make_draft(0))
            if not kill_at(url, tmp_path / f"killed-{call}-{after}", "", call, after):
                assert seen == sorted(seen)  # once it is there, it stays
                assert seen.count(False) > 20
                assert seen.count(True) > 5  # of the requests after the one that publishes
                return
            seen.append(check_whole(url, opens, f"reader-{call}-{after}"))
            assert opens(url, "next").publish(make_draft(1)).reference == "tiny:2"
    raise AssertionError("it was killed for ever")


@pytest.mark.usefixtures("impatient")
def test_a_server_killed_in_the_middle_is_no_answer(s3_url: str, tmp_path: Path) -> None:
    """It takes the connection and closes it, as one that dies does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        use(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def hang_up() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(StoreUnreachable, match="no answer"):
            Store("s3://bucket/x", cache=tmp_path).publish(make_draft(0))
