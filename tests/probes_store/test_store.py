from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes_store import local
from probes_store.errors import (
    BadValue,
    BundleDamaged,
    BundleError,
    BundleNotFound,
    DigestMismatch,
    InvalidReference,
    StoreNotWritable,
    Truncated,
    UnknownField,
)
from probes_store.local import LocalBackend
from probes_store.store import SHIPPED, Store
from probes_store.syntax import parse_reference
from tests.probes_store.factory import make_draft, write_bundle

SPAWN = multiprocessing.get_context("spawn")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_versions_count_up_and_never_change(store: Store) -> None:
    first = store.publish(make_draft(0))
    before = files(store.root)
    second = store.publish(make_draft(1))
    assert (first.reference, second.reference) == ("tiny:1", "tiny:2")
    assert first.path == store.root / "tiny" / "1"
    assert before.items() <= files(store.root).items()
    assert store.publish(make_draft(2, name="other")).reference == "other:1"
    assert sorted(os.listdir(store.root / "tiny")) == ["1", "2"]


def test_equal_content_is_not_copied_and_a_damaged_twin_does_not_stand_in(store: Store) -> None:
    first = store.publish(make_draft(0))
    store.publish(make_draft(1))
    assert store.publish(make_draft(0)).reference == "tiny:1"
    assert store.publish(make_draft(0, name="other")).manifest.digest != first.manifest.digest
    (first.path / "README.md").write_bytes(b"x")
    again = store.publish(make_draft(0))
    assert (again.reference, again.manifest.digest) == ("tiny:3", first.manifest.digest)


def test_resolve(store: Store) -> None:
    for seed in range(11):
        store.publish(make_draft(seed))
    assert [summary.version for summary in store.list()] == list(range(1, 12))  # as numbers
    folder = store.root / "tiny"
    assert store.resolve("tiny") == folder / "11"
    assert store.resolve("tiny:2") == folder / "2"
    store.set_alias("tiny", "canary", 1)
    assert store.resolve("tiny") == folder / "11"
    assert store.resolve("tiny@canary") == folder / "1"
    store.set_alias("tiny", "production", 2)
    assert store.resolve("tiny") == store.resolve("tiny@production") == folder / "2"
    assert store.load("tiny").reference == store.verify("tiny").reference == "tiny:2"
    assert store.aliases("tiny") == {"canary": 1, "production": 2}
    assert (folder / "aliases.json").read_bytes() == b'{\n  "canary": 1,\n  "production": 2\n}\n'
    for missing in ("absent", "absent:1", "tiny:12", "tiny@beta"):
        with pytest.raises(BundleNotFound):
            store.resolve(missing)


ESCAPES = [
    "", ".", "..", "../tiny", "tiny/../..", "/etc", "tiny/1", "a..b", "tiny:0", "tiny:01", "tiny:-1", "tiny:1/..",
    "tiny:", "tiny:latest", "tiny:1\n", "tiny\n", "tiny\0", "tiny@", "tiny@..", "tiny@a/b", "tiny@a@b", "tiny@a:1",
    "tiny:1@a", "Tiny", ".tiny", "-tiny", "~root", "tiny:١", "tiny:9999999999", "ti ny", "C:\\x",
    "tiny\\..", "a" * 65, "%2e%2e",
]  # fmt: skip


@pytest.mark.parametrize("reference", ESCAPES)
def test_names_that_try_to_leave_the_store(store: Store, reference: str) -> None:
    store.publish(make_draft())
    for use in (store.resolve, store.load, store.verify):
        with pytest.raises(InvalidReference):
            use(reference)


@given(st.text(max_size=12) | st.text("./:@\\~ a1-", max_size=12))
def test_what_parses_stays_inside(text: str) -> None:
    try:
        reference = parse_reference(text)
    except InvalidReference:
        return
    for part in (reference.name, reference.alias or "a"):
        root = os.path.abspath("root")
        assert os.path.dirname(os.path.abspath(os.path.join(root, part))) == root
    assert reference.version is None or reference.version >= 1


@pytest.mark.parametrize("name", ["../up", "", "a..b", "A", "a/b"])
def test_names_are_checked_when_writing(store: Store, name: str) -> None:
    store.publish(make_draft())
    with pytest.raises(InvalidReference):
        store.publish(make_draft(name=name))
    with pytest.raises(InvalidReference):
        store.set_alias(name, "production", 1)
    with pytest.raises(InvalidReference):
        store.set_alias("tiny", name, 1)
    with pytest.raises(InvalidReference):
        store.aliases(name)


def test_links_out_of_the_store_are_refused(store: Store, tmp_path: Path) -> None:
    store.publish(make_draft(name="other"))
    (tmp_path / "aliases.json").write_bytes(b'{\n  "production": 1\n}\n')
    (store.root / "other" / "aliases.json").symlink_to(tmp_path / "aliases.json")
    with pytest.raises(InvalidReference, match="aliases.json"):
        store.resolve("other")
    shutil.rmtree(store.root / "other")
    outside = write_bundle(make_draft(), tmp_path / "outside" / "tiny" / "1").path
    (store.root / "tiny").mkdir()
    (store.root / "tiny" / "1").symlink_to(outside)
    (store.root / "whole").symlink_to(outside.parent)
    for reference in ("tiny", "tiny:1", "whole", "whole:1"):
        with pytest.raises(InvalidReference, match="leads out of the store"):
            store.load(reference)
    with pytest.raises(InvalidReference, match="leads out of the store"):
        store.publish(make_draft(1, name="whole"))
    assert sorted(os.listdir(outside.parent)) == ["1"]
    assert all(isinstance(summary.error, InvalidReference) for summary in store.list())
    (tmp_path / "link").symlink_to(tmp_path / "outside")  # the root itself may be a link
    assert Store(tmp_path / "link").load("tiny").reference == "tiny:1"


def test_a_bundle_in_another_place_is_refused(store: Store) -> None:
    bundle = store.publish(make_draft())
    shutil.copytree(bundle.path, store.root / "tiny" / "2")
    shutil.copytree(bundle.path, store.root / "other" / "1")
    for reference, field in (("tiny:2", "version"), ("other:1", "name")):
        with pytest.raises(BadValue, match=f"field {field}: the folder does not match"):
            store.load(reference)


def test_aliases_need_a_version_that_loads(store: Store) -> None:
    bundle = store.publish(make_draft())
    for name, version in (("tiny", 2), ("absent", 1)):
        with pytest.raises(BundleNotFound):
            store.set_alias(name, "production", version)
    with pytest.raises(InvalidReference):
        store.set_alias("tiny", "production", 0)
    store.set_alias("tiny", "production", 1)
    (bundle.path / "README.md").write_bytes(b"x")
    with pytest.raises(Truncated):
        store.set_alias("tiny", "canary", 1)
    assert store.aliases("tiny") == {"production": 1}
    shutil.rmtree(store.publish(make_draft(1)).path)
    store.own.set_alias("tiny", "production", 2)  # a version that is gone
    with pytest.raises(BundleNotFound, match="names version 2"):
        store.resolve("tiny")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", Truncated),
        (b'{\n  "production": 1', Truncated),
        (b"{,}\n", BadValue),
        (b"[1]\n", BadValue),
        (b'{"production": "1"}\n', BadValue),
        (b'{"production": true}\n', BadValue),
        (b'{"production": 0}\n', BadValue),
        (b'{"../x": 1}\n', BadValue),
        (b'{"production": 1, "production": 2}\n', UnknownField),
    ],
)
def test_damaged_aliases(store: Store, data: bytes, error: type[BundleDamaged]) -> None:
    store.publish(make_draft())
    (store.root / "tiny" / "aliases.json").write_bytes(data)
    for use in (lambda: store.resolve("tiny"), lambda: store.aliases("tiny"), lambda: store.set_alias("tiny", "a", 1)):
        with pytest.raises(error, match=r"tiny/aliases\.json"):
            use()
    assert store.load("tiny:1").reference == "tiny:1"
    (summary,) = store.list()
    assert type(summary.error) is error


def test_damaged_bundles_are_listed_with_their_error(store: Store) -> None:
    assert store.list() == []
    for seed in range(2):
        store.publish(make_draft(seed))
    store.set_alias("tiny", "production", 2)
    path = store.root / "tiny" / "1" / "probes.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    (store.root / "stray.txt").write_text("x")
    (store.root / "tiny" / "3").write_text("not a folder")
    damaged, sound, file = store.list()
    assert (damaged.reference, damaged.manifest, damaged.aliases) == ("tiny:1", None, ())
    assert isinstance(damaged.error, DigestMismatch)
    assert (sound.reference, sound.error, sound.aliases) == ("tiny:2", None, ("production",))
    assert sound.manifest == store.load("tiny").manifest
    assert isinstance(file.error, BundleNotFound)
    with pytest.raises(DigestMismatch):
        store.load("tiny:1")


def test_fallbacks_are_searched_for_names_that_the_root_has_not(store: Store, tmp_path: Path) -> None:
    shipped = Store(tmp_path / "shipped")
    shipped.publish(make_draft(0))
    shipped.publish(make_draft(1))
    shipped.publish(make_draft(0, name="demo"))
    store.publish(make_draft(5))
    both = Store(store.root, [tmp_path / "absent", shipped.root])
    before = files(shipped.root)
    assert both.resolve("demo") == shipped.root / "demo" / "1"
    assert both.resolve("tiny") == store.root / "tiny" / "1"
    with pytest.raises(BundleNotFound):
        both.resolve("tiny:2")  # the root's name hides the fallback's
    assert [summary.path.parent.parent.name for summary in both.list()] == ["shipped", "store"]
    with pytest.raises(BundleNotFound, match="fallbacks are only read"):
        both.set_alias("demo", "production", 1)
    (store.root / "demo" / ".publish-0").mkdir(parents=True)  # a killed first publish does not hide the fallback
    assert both.load("demo").reference == "demo:1"
    assert files(shipped.root) == before
    assert both.publish(make_draft(0, name="demo")).path == store.root / "demo" / "1"


def test_what_is_shipped_is_sound() -> None:
    assert SHIPPED.name == "shipped"
    for summary in Store(SHIPPED).list():
        assert summary.error is None
        Store(SHIPPED).verify(summary.reference)


def publish_some(root: str, seeds: list[int], barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put([(seed, Store(Path(root)).publish(make_draft(seed)).manifest.version) for seed in seeds])


def test_concurrent_publishers(store: Store) -> None:
    """Four processes publish 2 contents of their own and 3 shared ones: 11 versions, dense, each content once."""
    barrier, results = SPAWN.Barrier(4), SPAWN.Queue()
    work = [[100, 10 + i, 101, 20 + i, 102] for i in range(4)]
    processes = [SPAWN.Process(target=publish_some, args=(str(store.root), seeds, barrier, results)) for seeds in work]
    for process in processes:
        process.start()
    published = [pair for _ in processes for pair in results.get(timeout=120)]
    for process in processes:
        process.join()
    assert len(set(published)) == 11  # a shared content got the same version everywhere
    assert sorted(os.listdir(store.root / "tiny"), key=int) == [str(version) for version in range(1, 12)]
    summaries = store.list()
    assert [summary.error for summary in summaries] == [None] * 11
    assert len({summary.manifest.digest for summary in summaries if summary.manifest}) == 11


def test_a_version_taken_at_the_last_moment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another publisher wins the race twice: once with other content, once with ours."""
    rename, rivals = os.rename, [make_draft(7), make_draft(0)]

    def late(source: Path, target: Path) -> None:
        if rivals:
            write_bundle(rivals.pop(0), target, version=int(target.name))
        rename(source, target)

    monkeypatch.setattr("probes_store.local.os.rename", late)
    assert store.publish(make_draft(0)).reference == "tiny:2"
    assert sorted(os.listdir(store.root / "tiny")) == ["1", "2"]
    assert rivals == []


def test_a_twin_published_right_after_the_search(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    search, calls = LocalBackend._same_content, []

    def late(self: LocalBackend, manifest: Any) -> Any:
        found = search(self, manifest)
        calls.append(found)
        if len(calls) == 2:
            write_bundle(make_draft(0), self.folders / "tiny" / "1")
        return found

    monkeypatch.setattr(LocalBackend, "_same_content", late)
    assert store.publish(make_draft(0)).reference == "tiny:1"
    assert os.listdir(store.root / "tiny") == ["1"]
    assert calls[:2] == [None, None]


def die_in_publish(root: str, call: int) -> None:
    """Publish, and kill the process at its ``call``-th write or rename."""
    count = 0

    def lethal(real: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return wrapped

    os.fsync, os.rename = lethal(os.fsync), lethal(os.rename)
    Store(Path(root)).publish(make_draft(1))
    os._exit(count)


def test_a_kill_in_the_middle_of_publish_leaves_nothing_visible(store: Store) -> None:
    store.publish(make_draft(0))
    before = files(store.root)
    fork = multiprocessing.get_context("fork")
    left = 0
    for call in range(1, 100):
        process = fork.Process(target=die_in_publish, args=(str(store.root), call))
        process.start()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            break
        if (store.root / "tiny" / "2").exists():  # killed after the rename: then it is there, and whole
            assert store.verify("tiny:2").reference == "tiny:2"
            shutil.rmtree(store.root / "tiny" / "2")
            continue
        left += len(list((store.root / "tiny").glob(".publish-*")))
        assert [summary.reference for summary in store.list()] == ["tiny:1"]
        assert store.resolve("tiny").name == "1"
        assert before.items() <= files(store.root).items()
    assert process.exitcode == call - 1 > 8  # the last run was not killed, and the kills went through all its calls
    assert left >= 8
    assert store.load("tiny").reference == "tiny:2"
    assert sorted(os.listdir(store.root / "tiny")) == ["1", "2"]  # and it cleaned up after the killed ones


def test_a_busy_publishers_folder_is_left_alone(store: Store) -> None:
    store.publish(make_draft(0))
    with local.folder_aside(store.root / "tiny") as busy:
        (busy / "half").write_text("x")
        store.publish(make_draft(1))
        assert (busy / "half").read_text() == "x"
    assert not busy.exists()


def test_a_failed_publish_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store.publish(make_draft(0))
    monkeypatch.setattr("probes_store.local.os.fsync", full)
    with pytest.raises(StoreNotWritable, match="No space left"):
        store.publish(make_draft(1))
    with pytest.raises(StoreNotWritable, match="No space left"):
        store.set_alias("tiny", "production", 1)
    assert os.listdir(store.root / "tiny") == ["1"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


def write_as_nobody(root: str, results: Any) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)  # root may write everywhere
    found: list[str] = []
    store = Store(Path(root))
    for action in (
        lambda: store.publish(make_draft(1)),
        lambda: store.publish(make_draft(1, name="new")),
        lambda: store.set_alias("tiny", "production", 1),
        lambda: store.load("tiny"),
        lambda: store.publish(make_draft(0)),  # it is there: nothing to write
    ):
        try:
            action()
            found.append("done")
        except BundleError as error:
            found.append(type(error).__name__)
    results.put(found)


def test_a_read_only_root(open_folder: Path) -> None:
    root = open_folder / "store"
    Store(root).publish(make_draft(0))
    for folder in (root / "tiny", root):
        folder.chmod(0o555)
    before = files(root)
    fork = multiprocessing.get_context("fork")
    results = fork.Queue()
    process = fork.Process(target=write_as_nobody, args=(str(root), results))
    process.start()
    found = results.get(timeout=120)
    process.join()
    assert found == ["StoreNotWritable"] * 3 + ["done"] * 2
    assert files(root) == before


def test_a_file_where_the_store_should_be(tmp_path: Path) -> None:
    fine = Store(tmp_path / "a" / "store")
    fine.check_writable()
    assert list(fine.root.iterdir()) == []
    (tmp_path / "file").write_text("x")
    store = Store(tmp_path / "file" / "store")
    assert store.list() == []
    for attempt in (store.check_writable, lambda: store.publish(make_draft())):
        with pytest.raises(StoreNotWritable, match="Make the store writable"):
            attempt()


def set_aliases(root: str, alias: str) -> None:
    for version in (1, 2) * 5:
        Store(Path(root)).set_alias("tiny", alias, version)


def test_concurrent_aliases_are_not_lost(store: Store) -> None:
    for seed in range(2):
        store.publish(make_draft(seed))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=set_aliases, args=(str(store.root), alias)) for alias in ("a", "b", "c")]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        assert set(store.aliases("tiny").values()) <= {1, 2}  # a reader never meets half a file
    assert json.loads((store.root / "tiny" / "aliases.json").read_bytes()) == {"a": 2, "b": 2, "c": 2}
    assert sorted(os.listdir(store.root / "tiny")) == ["1", "2", "aliases.json"]
