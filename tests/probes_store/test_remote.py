"""What stores by URL do besides: objects, copies, servers that do not answer, publishers that are
killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from probes_store import bucket, errors
from probes_store.bucket import Objects
from probes_store.bundle import SIGNATURE, read_signature
from probes_store.errors import (
    BundleDamaged,
    InvalidReference,
    MissingFile,
    StoreRefused,
    StoreUnreachable,
)
from probes_store.manifest import MANIFEST, Manifest, manifest_bytes, sealed
from probes_store.store import SHIPPED, Store
from probes_store.transfer import copy
from tests.kit.bundles import make_draft, write_bundle
from tests.kit.local_server import answer, free_port, listening
from tests.kit.s3_server import VARIABLES, use
from tests.kit.tables import lines
from tests.probes_store.conftest import Opens

FORK = multiprocessing.get_context("fork")
Patch = pytest.MonkeyPatch


def blob_of(manifest: Manifest, name: str) -> str:
    return f"{manifest.name}/blobs/{manifest.files[name].sha256}"


def test_each_change_of_an_alias_is_a_revision(url: str, opens: Opens) -> None:
    store = opens(url)
    for seed in range(2):
        store.publish(make_draft(seed))
    Objects(url).put(
        "tiny/aliases.json", b'{\n  "production": 1\n}\n'
    )  # a local store's, which was copied there
    assert store.load("tiny").reference == "tiny:1"
    for version in (1, 2, 2):  # as it is: no new revision
        store.set_alias("tiny", "canary", version)
    assert Objects(url).children("tiny", "aliases") == ["1.json", "2.json"]
    assert store.aliases("tiny") == {"canary": 2, "production": 1}
    assert Objects(url).children("tiny") == ["1", "2", "aliases", "aliases.json", "blobs"]


def test_names_in_a_listing_lead_nowhere(memory_url: str, opens: Opens, monkeypatch: Patch) -> None:
    """A server may list what it likes."""
    store = opens(memory_url)
    real = Objects.children
    store.publish(make_draft(0))
    evil = [
        "..",
        "../../etc",
        "/etc",
        "%2e%2e",
        "tiny/../..",
        "tiny\n",
        "",
        ".",
        "1/../../x",
        "-1",
        "01",
        "1e3",
        "٣",
    ]
    monkeypatch.setattr(Objects, "children", lambda self, *parts: [*evil, *real(self, *parts)])
    assert [summary.reference for summary in store.list()] == ["tiny:1"]
    assert store.aliases("tiny") == {}
    for name in evil[:10]:
        with pytest.raises(InvalidReference):
            store.load(name)
    assert sorted(path.name for path in store.root.iterdir()) == ["tiny"]


def test_a_huge_object_is_not_read_to_its_end(
    memory_url: str, opens: Opens, monkeypatch: Patch
) -> None:
    bundle = opens(memory_url).publish(make_draft(0))
    objects = Objects(memory_url)
    taken = []
    real = Objects.read

    def counted(self: Objects, path: str, limit: int) -> bytes | None:
        data = real(self, path, limit)
        taken.append(len(data or b""))
        return data

    monkeypatch.setattr(Objects, "read", counted)
    for path in (
        f"tiny/1/{MANIFEST}",
        blob_of(bundle.manifest, "README.md"),
        "tiny/aliases/1.json",
    ):
        before = objects.read(path, 1 << 20)
        objects.put(path, b" " * (40 << 20))
        with pytest.raises(BundleDamaged):
            opens(memory_url, "new").load("tiny")
        objects.put(path, b"{}\n" if before is None else before)
    objects.put("tiny/1/model.sig", b" " * (40 << 20))  # nobody asks for a signature here
    assert max(taken) < 10 << 20
    assert opens(memory_url, "new").load("tiny").reference == "tiny:1"


def test_what_is_no_url_and_what_is_missing(
    memory_url: str, s3_url: str, opens: Opens, tmp_path: Path, monkeypatch: Patch
) -> None:
    for text in (
        *lines(
            """
            s3://
            s3:///x
            s3://b/../x
            s3://b//x
            s3://b/.x
            ftp://b/x
            S3://b
            s3://b/x?y
            s3://a:b@c/x
            zip://x::s3://b/x
            file:///tmp/x
            s3://b/x y
            """
        ),
        "s3://b/x\n",
    ):
        with pytest.raises(InvalidReference, match="s3://BUCKET/PREFIX"):
            Store(text, cache=tmp_path)
    opens(f"{memory_url}/a").publish(make_draft(0))
    assert (
        opens(f"{memory_url}/a/").load("tiny").reference == "tiny:1"
    )  # a slash at the end makes no other store
    with pytest.raises(StoreRefused, match="bucked"):
        Store("s3://bucked/x", [SHIPPED], cache=tmp_path).load("nothing")
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(StoreRefused, match=r"pip install 'hallutracer\[az\]'"):
        Store("az://container", cache=tmp_path).load("tiny")


def test_what_changed_or_is_gone_at_the_url_is_refused(url: str, opens: Opens) -> None:
    store = opens(url)
    objects = Objects(url)
    bundle = store.publish(make_draft(0))
    for folder in (store.root, store.root.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("probes.safetensors", MANIFEST):  # a damaged copy is fetched again
        (bundle.path / name).write_bytes(b"x")
        assert store.verify("tiny").manifest == bundle.manifest
    (bundle.path / "README.md").unlink()
    assert store.verify("tiny").card() == "# tiny\n\nA bundle for tests.\n"
    blob = blob_of(bundle.manifest, "probes.safetensors")
    size = bundle.manifest.files["probes.safetensors"].bytes
    for data in (b"x" * size, b"x" * 10_000):
        objects.put(blob, data)
        with pytest.raises(errors.DigestMismatch, match=r"tiny/1/probes\.safetensors"):
            opens(url, "new").load("tiny")
    assert not (opens(url, "new").root / "tiny" / "1").exists()  # nothing of it is kept
    assert store.load("tiny").reference == "tiny:1"  # its copy is sound
    store.publish(make_draft(0))  # a publisher of the same content mends it
    assert opens(url, "new").load("tiny").manifest == bundle.manifest
    objects._fs.rm(objects._path(blob_of(bundle.manifest, "README.md")))
    with pytest.raises(MissingFile, match=r"tiny/1/README\.md"):
        opens(url, "third").load("tiny")
    objects.put("tiny/2/model.sig", b"x")  # nothing that publishes
    with pytest.raises(MissingFile, match=r"tiny/2/bundle\.json"):
        store.load("tiny:2")
    objects.put(f"tiny/1/{MANIFEST}", b"{}\n")
    with pytest.raises(BundleDamaged, match=r"tiny/1/bundle\.json"):
        opens(url, "third").load("tiny:1")


def test_another_bundle_under_a_known_version_is_refused(url: str, opens: Opens) -> None:
    store = opens(url)
    first = store.publish(make_draft(0))
    rogue = opens(f"{url}-rogue", "rogue").publish(make_draft(1))
    for name in rogue.manifest.files:
        Objects(url).put(blob_of(rogue.manifest, name), rogue.read(name))
    Objects(url).put(f"tiny/1/{MANIFEST}", manifest_bytes(rogue.manifest))
    assert (
        opens(url, "new").load("tiny").manifest.digest == rogue.manifest.digest
    )  # who never saw it cannot tell
    again = sealed(
        first.manifest, created="2030-01-01T00:00:00Z"
    )  # sealing anew makes another bundle, too
    for other in (rogue.manifest, again):
        Objects(url).put(f"tiny/1/{MANIFEST}", manifest_bytes(other))
        with pytest.raises(errors.BundleConflict, match="than before"):
            store.load("tiny")


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that gives no more than this status."""
    with listening(lambda request, _: answer(request, status, b"")) as address:
        yield f"http://{address}"


@pytest.fixture
def published(s3_url: str, opens: Opens) -> str:
    store = opens(s3_url)
    for seed in range(2):
        store.publish(make_draft(seed))
    store.set_alias("tiny", "production", 1)
    opens(s3_url, "reader").load("tiny")
    return s3_url


@pytest.fixture(autouse=True)
def impatient(monkeypatch: Patch) -> None:
    """botocore asks again at once, rather than after up to a second."""
    monkeypatch.setattr("botocore.retryhandler.random.random", lambda: 0.0)


def test_without_an_answer_nothing_is_read_or_written_though_a_copy_is_here(
    published: str, opens: Opens
) -> None:
    use(f"http://127.0.0.1:{free_port()}")
    store = opens(published, "reader")
    assert (store.root / "tiny" / "1" / MANIFEST).exists()
    for action in (
        lambda: store.load("tiny"),
        lambda: store.load("tiny:1"),
        store.list,
        lambda: store.publish(make_draft(9)),
        lambda: store.set_alias("tiny", "canary", 1),
        # not the package's own in its place
        lambda: Store(published, [SHIPPED], cache=store.root.parent).load("demo"),
    ):
        with pytest.raises(StoreUnreachable, match="no answer"):
            action()


def test_a_busy_a_silent_and_a_dying_server_give_no_answer(
    s3_url: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    with answering(503) as busy:
        use(busy)
        with pytest.raises(StoreUnreachable, match="no answer"):
            Objects(s3_url).read("tiny/1/bundle.json", 10)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        use(address)
        with monkeypatch.context() as patch:
            patch.setattr(bucket, "WRITE_S", 0.5)
            for write in (Objects(s3_url).put, Objects(s3_url).create):
                with pytest.raises(StoreUnreachable, match="none within"):
                    write("x", b"1")

        def hang_up() -> None:
            while True:
                try:
                    listener.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()  # as one that dies does
        use(address)
        with pytest.raises(StoreUnreachable, match="no answer"):
            Store("s3://bucket/x", cache=tmp_path).publish(make_draft(0))


def test_a_refusal_is_no_missing_answer(published: str, opens: Opens, monkeypatch: Patch) -> None:
    with answering(403) as closed:
        use(closed)
        with pytest.raises(StoreRefused, match="credentials"):
            opens(published, "reader").load("tiny")
    S3FileSystem.clear_instance_cache()
    for name in VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(StoreRefused, match="credentials"):
        opens(published, "reader").load("tiny")


def test_two_that_add_the_same_version(s3_url: str, opens: Opens, tmp_path: Path) -> None:
    """Both have tiny:1 of their own; one wins, the other is told."""
    rivals = [
        write_bundle(make_draft(seed), tmp_path / str(seed) / "tiny" / "1") for seed in range(2)
    ]
    barrier = threading.Barrier(2)
    told = []

    def add(number: int) -> None:
        store = opens(s3_url, str(number))
        barrier.wait()
        try:
            copy(rivals[number], store, source="here", take_over=True)
        except errors.BundleError as error:
            told.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in told] == [errors.BundleConflict]
    assert opens(s3_url, "reader").verify("tiny:1").manifest.digest in {
        rival.manifest.digest for rival in rivals
    }


def test_an_alias_moved_at_the_last_moment_is_not_lost(
    memory_url: str, opens: Opens, monkeypatch: Patch
) -> None:
    """Two promotions at once: the one that comes second keeps what the first one set as what was
    before."""
    store = opens(memory_url)
    create = Objects.create
    rival = [("production", 2, None), ("canary", 1, None)]
    for seed in range(3):
        store.publish(make_draft(seed))
    store.set_alias("tiny", "production", 1)

    def late(self: Objects, path: str, data: bytes) -> bool:
        if "/aliases/" in path and rival:
            opens(memory_url, "rival").own.set_alias("tiny", *rival.pop())
        return create(self, path, data)

    monkeypatch.setattr(Objects, "create", late)
    store.set_alias("tiny", "production", 3, "previous")
    assert rival == []
    assert store.aliases("tiny") == {"production": 3, "previous": 2, "canary": 1}


def test_a_version_taken_at_the_last_moment(
    memory_url: str, opens: Opens, monkeypatch: Patch
) -> None:
    """Another publisher wins the race twice: once with other content, once with ours."""
    store = opens(memory_url)
    rivals = [make_draft(7), make_draft(0)]
    create = Objects.create

    def late(self: Objects, path: str, data: bytes) -> bool:
        if path.endswith(MANIFEST) and rivals and b'"tiny"' in data:
            opens(memory_url, "rival").publish(rivals.pop(0))
        return create(self, path, data)

    monkeypatch.setattr(Objects, "create", late)
    # The rival's own publish passes here as well, and takes the next rival with it: the last one is
    # published first.
    assert (
        store.publish(make_draft(0)).manifest.digest
        == opens(memory_url).load("tiny:1").manifest.digest
    )
    assert rivals == []
    digests = [summary.manifest.digest for summary in store.list() if summary.manifest]
    assert len(digests) == len(set(digests)) == 2


def test_an_answer_that_was_lost_makes_no_second_version(
    memory_url: str, opens: Opens, monkeypatch: Patch
) -> None:
    """The manifest was created, the answer got lost, and the client's second attempt found it
    there."""
    create = Objects.create
    monkeypatch.setattr(
        Objects,
        "create",
        lambda self, path, data: create(self, path, data) and MANIFEST not in path,
    )
    here = opens(memory_url)
    there = opens(f"{memory_url}/copied")
    bundle = here.publish(make_draft(0))
    assert [summary.reference for summary in here.list()] == ["tiny:1"]
    (bundle.path / SIGNATURE).write_bytes(b"goes along")
    copy(bundle, there, source="here")
    assert read_signature(opens(f"{memory_url}/copied", "new").load("tiny").path) == b"goes along"


def test_a_server_that_ignores_the_condition(
    memory_url: str, opens: Opens, monkeypatch: Patch, store: Store
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    real = MemoryFileSystem.pipe_file
    monkeypatch.setattr(
        MemoryFileSystem, "pipe_file", lambda self, path, value, **_: real(self, path, value)
    )
    there = opens(memory_url)
    bundle = store.publish(make_draft(0))
    for action in (
        there.check_writable,
        lambda: there.publish(make_draft(0)),
        lambda: copy(bundle, there, source="here"),
    ):
        with pytest.raises(StoreRefused, match="ignores If-None-Match"):
            action()
    assert there.list() == []


def die_in_publish(url: str, cache: str, key: str, call: int, after: bool) -> None:
    """Publish, and kill the process before or after its ``call``-th request about an object of this
    name."""
    count = 0
    real = S3FileSystem._call_s3

    async def lethal(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        nonlocal count
        mine = key in options.get("Key", options.get("Prefix", "")) and (
            not key or method == "put_object"
        )
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


def is_killed_at(url: str, cache: Path, key: str, call: int, after: bool) -> bool:
    """Whether it was killed: past the last request it ends by itself."""
    process = FORK.Process(target=die_in_publish, args=(url, str(cache), key, call, after))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def check_whole(url: str, opens: Opens, machine: str) -> bool:
    """Whether a machine that never read the store sees the second version; what it sees is
    sound."""
    reader = opens(url, machine)
    references = [(summary.reference, summary.error) for summary in reader.list()]
    assert references in ([("tiny:1", None)], [("tiny:1", None), ("tiny:2", None)])
    assert reader.verify("tiny").reference == references[-1][0]
    return len(references) == 2


def test_a_kill_right_after_the_step_that_publishes(
    s3_url: str, opens: Opens, tmp_path: Path
) -> None:
    opens(s3_url).publish(make_draft(0))
    assert is_killed_at(s3_url, tmp_path / "killed", MANIFEST, 1, after=True)
    assert check_whole(s3_url, opens, "reader")
    assert opens(s3_url, "next").publish(make_draft(1)).reference == "tiny:2"
    assert opens(s3_url, "next").publish(make_draft(2)).reference == "tiny:3"


@pytest.mark.long
def test_a_kill_at_every_request_of_publish(s3_url: str, opens: Opens, tmp_path: Path) -> None:
    seen = []
    for call in range(1, 200):
        for after in (False, True):
            url = f"{s3_url}-{call}-{after}"
            opens(url).publish(make_draft(0))
            if not is_killed_at(url, tmp_path / f"killed-{call}-{after}", "", call, after):
                assert seen == sorted(seen)  # once it is there, it stays
                assert seen.count(False) > 20
                assert seen.count(True) > 5  # of the requests after the one that publishes
                return
            seen.append(check_whole(url, opens, f"reader-{call}-{after}"))
            assert opens(url, "next").publish(make_draft(1)).reference == "tiny:2"
    raise AssertionError("it was killed for ever")
