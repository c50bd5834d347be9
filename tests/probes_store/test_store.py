"""What every store does, in a folder, in memory and on a real S3 server; and what a folder does
alone."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from probes_store import errors, local
from probes_store.bucket import Objects
from probes_store.errors import (
    BadValue,
    BundleConflict,
    BundleNotFound,
    InvalidReference,
    StoreNotWritable,
    Truncated,
)
from probes_store.local import LocalBackend, write_files
from probes_store.manifest import MANIFEST, Manifest
from probes_store.store import SHIPPED, Store
from probes_store.syntax import is_url
from probes_store.tensors import ProbeTensors
from probes_store.transfer import copy
from tests.kit.bundles import ANSWER, make_draft, write_bundle
from tests.kit.tables import lines
from tests.probes_store.conftest import S3_LONG, Opens

FORK = multiprocessing.get_context("fork")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def put(where: str, path: str, data: bytes) -> None:
    """A file or an object that nobody published."""
    if is_url(where):
        Objects(where).put(path, data)
    else:
        write_files(Path(where), {path: data})


def together(target: Callable[..., None], arguments: Sequence[Sequence[Any]]) -> None:
    """Run each in a process of its own, until all have ended well."""
    processes = [FORK.Process(target=target, args=tuple(some)) for some in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def test_versions_count_up_never_change_and_equal_content_is_not_copied(
    where: str, opens: Opens
) -> None:
    here = opens(where)
    assert here.list() == []
    first = here.publish(make_draft(0))
    before = files(here.root)
    second = here.publish(make_draft(1, answer=ANSWER))
    assert (first.reference, second.reference, here.where) == ("tiny:1", "tiny:2", where)
    assert first.path == here.root / "tiny" / "1"
    assert before.items() <= files(here.root).items()
    assert here.publish(make_draft(0)).reference == "tiny:1"
    assert here.publish(make_draft(0, name="other")).manifest.digest != first.manifest.digest
    there = opens(where, "two")
    assert there.load("tiny").reference == "tiny:2"
    for made, parts in ((first, 5), (second, 6)):
        found = there.verify(made.reference)
        assert (found.manifest, len(found.manifest.files)) == (made.manifest, parts)
        assert (found.answer is None) == (made is first)
        assert found.files() == made.files()
    listed = there.list()
    assert [summary.reference for summary in listed] == ["other:1", "tiny:1", "tiny:2"]
    assert {summary.error for summary in listed} == {None}
    assert listed[2].manifest == second.manifest


def test_references_and_aliases(where: str, opens: Opens) -> None:
    here = opens(where)
    there = opens(where, "two")
    for seed in range(11):
        here.publish(make_draft(seed))
    assert [summary.version for summary in here.list()] == list(range(1, 12))  # as numbers
    folder = here.root / "tiny"
    assert (here.resolve("tiny"), here.resolve("tiny:2")) == (folder / "11", folder / "2")
    here.set_alias("tiny", "canary", 1)
    assert (here.resolve("tiny"), here.resolve("tiny@canary")) == (folder / "11", folder / "1")
    there.set_alias("tiny", "production", 2)
    assert here.resolve("tiny") == here.resolve("tiny@production") == folder / "2"
    assert here.load("tiny").reference == there.verify("tiny").reference == "tiny:2"
    assert here.aliases("tiny") == there.aliases("tiny") == {"canary": 1, "production": 2}
    there.set_alias("tiny", "production", 3, "previous")  # one step
    there.set_alias("tiny", "beta", 1, "before")  # it meant nothing before
    assert here.aliases("tiny") == {"canary": 1, "production": 3, "previous": 2, "beta": 1}
    for number in range(7):
        here.set_alias("tiny", "beta", 2 - number % 2)
    assert there.aliases("tiny")["beta"] == 2  # at a URL: of the twelfth table, not of the ninth
    assert [one.aliases for one in here.list()][:2] == [("canary",), ("beta", "previous")]
    for missing in ("absent", "absent:1", "tiny:12", "tiny@gamma"):
        with pytest.raises(BundleNotFound):
            there.resolve(missing)


def test_aliases_need_a_version_that_loads(where: str, opens: Opens) -> None:
    here = opens(where)
    bundle = here.publish(make_draft())
    for name, version, error in (
        ("tiny", 2, BundleNotFound),
        ("absent", 1, BundleNotFound),
        ("tiny", 0, InvalidReference),
    ):
        with pytest.raises(error):
            here.set_alias(name, "production", version)
    with pytest.raises(BundleNotFound, match="fallbacks are only read"):
        Store(where, [SHIPPED], cache=here.root.parent).set_alias("demo", "production", 1)
    here.set_alias("tiny", "production", 1)
    if not is_url(where):  # a damaged copy is fetched again
        (bundle.path / "README.md").write_bytes(b"x")
        with pytest.raises(Truncated):
            here.set_alias("tiny", "canary", 1)
    assert here.aliases("tiny") == {"production": 1}
    here.own.set_alias("tiny", "production", 2)  # a version that is gone
    with pytest.raises(BundleNotFound, match="version 2"):
        here.resolve("tiny")


ALIAS_DAMAGE = [
    (b"", Truncated),
    (b'{\n  "production": 1', Truncated),
    (b"{,}\n", BadValue),
    (b"[1]\n", BadValue),
    (b'{"production": "1"}\n', BadValue),
    (b'{"production": true}\n', BadValue),
    (b'{"production": 0}\n', BadValue),
    (b'{"../x": 1}\n', BadValue),
    (b'{"production": 1, "production": 2}\n', errors.UnknownField),
]


def test_damaged_aliases(where: str, opens: Opens) -> None:
    here = opens(where)
    table = "tiny/aliases/1.json" if is_url(where) else "tiny/aliases.json"
    here.publish(make_draft())
    for data, error in ALIAS_DAMAGE:
        put(where, table, data)
        for use in (
            lambda: here.resolve("tiny"),
            lambda: here.aliases("tiny"),
            lambda: here.set_alias("tiny", "a", 1),
        ):
            with pytest.raises(error, match=table):
                use()
        assert [type(summary.error) for summary in here.list()] == [error]
    assert here.load("tiny:1").reference == "tiny:1"


def test_a_bundle_in_another_place_is_refused(where: str, opens: Opens) -> None:
    bundle = opens(where).publish(make_draft())
    for reference, place in (("tiny:2", "tiny/2"), ("other:1", "other/1")):
        for name, data in bundle.files().items():
            if name == MANIFEST or not is_url(where):
                put(where, f"{place}/{name}", data)
        with pytest.raises(BadValue, match="does not match the manifest"):
            opens(where).load(reference)


def test_a_bundle_of_another_store_keeps_its_number_and_is_parsed_once(
    where: str, opens: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Store(tmp_path / "source")
    for seed in range(2):
        bundle = source.publish(make_draft(seed))
    there = opens(where)
    parsed: list[str] = []
    read = ProbeTensors.read

    def counted(data: bytes, manifest: Manifest) -> ProbeTensors:
        parsed.append(manifest.reference)
        return read(data, manifest)

    with monkeypatch.context() as patch:
        patch.setattr(ProbeTensors, "read", counted)
        done, added = copy(bundle, there, source=source.where)
    assert parsed == ["tiny:2"]
    assert (done.reference, added, done.manifest) == ("tiny:2", True, bundle.manifest)
    assert done.path == there.root / "tiny" / "2"
    assert copy(bundle, there, source=source.where)[1] is False
    other = write_bundle(make_draft(7), tmp_path / "elsewhere" / "tiny" / "2", version=2)
    with pytest.raises(BundleConflict, match="has this version already"):
        copy(other, there, source="elsewhere")
    assert there.publish(make_draft(9)).reference == "tiny:3"
    last = write_bundle(
        make_draft(1), tmp_path / "last" / "tiny" / "999999999", version=999_999_999
    )
    copy(last, there, source="here", take_over=True)
    with pytest.raises(BundleConflict, match="highest number"):
        there.publish(make_draft(2))
    if is_url(where):
        put(where, "tiny/aliases/999999999.json", b"{}")
        with pytest.raises(BundleConflict, match="highest number"):
            there.set_alias("tiny", "production", 2)


def test_fallbacks_are_searched_for_names_that_the_store_has_not(
    where: str, opens: Opens, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = Store(tmp_path / "shipped")
    for draft in (make_draft(0), make_draft(1), make_draft(0, name="demo")):
        shipped.publish(draft)
    own = opens(where).publish(make_draft(5))
    both = Store(where, [tmp_path / "absent", shipped.root], cache=tmp_path / "machines" / "one")
    before = files(shipped.root)
    assert both.resolve("demo") == shipped.root / "demo" / "1"
    assert not caplog.records
    assert both.resolve("tiny") == both.resolve("tiny:1") == own.path
    (record,) = caplog.records  # said once
    assert f"tiny is that of {where}, which hides" in record.getMessage()
    with pytest.raises(BundleNotFound):
        both.resolve("tiny:2")  # the store's name hides the fallback's
    assert [summary.path for summary in both.list()] == [shipped.root / "demo" / "1", own.path]
    if not is_url(where):
        (both.root / "demo" / ".publish-0").mkdir(
            parents=True
        )  # a killed first publish does not hide the fallback
        assert both.load("demo").reference == "demo:1"
    assert files(shipped.root) == before
    assert both.publish(make_draft(0, name="demo")).path == both.root / "demo" / "1"


def publish_some(where: str, cache: Path, seeds: list[int], barrier: Any, results: Any) -> None:
    store = Store(where, cache=cache / str(seeds))
    barrier.wait()
    results.put([(seed, store.publish(make_draft(seed)).manifest.version) for seed in seeds])


@pytest.mark.parametrize("where", ["folder", S3_LONG], indirect=True)
def test_concurrent_publishers(where: str, opens: Opens, tmp_path: Path) -> None:
    """Four processes publish contents of their own and shared ones: versions are dense, each
    content is there once."""
    barrier = FORK.Barrier(4)
    results = FORK.Queue()
    work = [[100, 10 + i] if is_url(where) else [100, 10 + i, 101, 20 + i, 102] for i in range(4)]
    count = len({seed for seeds in work for seed in seeds})
    together(publish_some, [(where, tmp_path, seeds, barrier, results) for seeds in work])
    published = [pair for _ in work for pair in results.get(timeout=120)]
    assert len(set(published)) == count  # a shared content got the same version everywhere
    summaries = opens(where).list()
    assert [(one.version, one.error) for one in summaries] == [
        (number, None) for number in range(1, count + 1)
    ]
    assert len({summary.manifest.digest for summary in summaries if summary.manifest}) == count


def set_aliases(where: str, cache: Path, alias: str) -> None:
    for version in (1, 2, 1, 2):
        Store(where, cache=cache / alias).set_alias("tiny", alias, version)


@pytest.mark.parametrize("where", ["folder", S3_LONG], indirect=True)
def test_concurrent_aliases_are_not_lost(where: str, opens: Opens, tmp_path: Path) -> None:
    store = opens(where)
    seen = []
    for seed in range(2):
        store.publish(make_draft(seed))
    processes = [FORK.Process(target=set_aliases, args=(where, tmp_path, alias)) for alias in "abc"]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        seen += store.aliases("tiny").values()  # a reader never meets half a table
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert set(seen) <= {1, 2}
    assert store.aliases("tiny") == {"a": 2, "b": 2, "c": 2}
    if is_url(where):
        assert len(Objects(where).children("tiny", "aliases")) == 12


ESCAPES = [
    *lines(
        r"""
        .
        ..
        ../tiny
        tiny/../..
        /etc
        tiny/1
        a..b
        tiny:0
        tiny:01
        tiny:-1
        tiny:1/..
        tiny:
        tiny:latest
        tiny@
        tiny@..
        tiny@a/b
        tiny@a@b
        tiny@a:1
        tiny:1@a
        Tiny
        .tiny
        -tiny
        ~root
        tiny:١
        tiny:9999999999
        ti ny
        C:\x
        tiny\..
        %2e%2e
        tiny@sha256:
        """
    ),
    *("", "tiny:1\n", "tiny\n", "tiny\0", "a" * 65),
    *(
        reference.format(digest="a" * 64)
        for reference in (
            "tiny@sha256:{digest:.63}",
            "tiny@sha256:A{digest:.63}",
            "tiny@sha256:{digest}\n",
            "@sha256:{digest}",
            "tiny:@sha256:{digest}",
            "tiny@sha512:{digest}",
            "tiny@sha256:{digest}@sha256:{digest}",
        )
    ),
]


def test_references_and_names_that_try_to_leave_the_store(store: Store) -> None:
    store.publish(make_draft())
    for reference in ESCAPES:
        for use in (store.resolve, store.load, store.verify):
            with pytest.raises(InvalidReference):
                use(reference)
    for name in ("../up", "", "a..b", "A", "a/b"):
        writes: list[Callable[[], object]] = [
            partial(store.publish, make_draft(name=name)),
            partial(store.set_alias, name, "production", 1),
            partial(store.set_alias, "tiny", name, 1),
            partial(store.aliases, name),
        ]
        for write in writes:
            with pytest.raises(InvalidReference):
                write()


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


def test_damaged_bundles_are_listed_with_their_error_and_no_substitute(store: Store) -> None:
    first = store.publish(make_draft(0))
    store.publish(make_draft(1))
    store.set_alias("tiny", "production", 2)
    path = first.path / "probes.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    (store.root / "stray.txt").write_text("x")
    (store.root / "tiny" / "3").write_text("not a folder")
    found = [
        (one.reference, one.manifest is None, one.aliases, type(one.error)) for one in store.list()
    ]
    assert found == [
        ("tiny:1", True, (), errors.DigestMismatch),
        ("tiny:2", False, ("production",), type(None)),
        ("tiny:3", True, (), BundleNotFound),
    ]
    with pytest.raises(errors.DigestMismatch):
        store.load("tiny:1")
    again = store.publish(make_draft(0))
    assert (again.reference, again.manifest.digest) == ("tiny:4", first.manifest.digest)


def test_what_is_shipped_is_sound() -> None:
    for summary in Store(SHIPPED).list():
        assert summary.error is None
        Store(SHIPPED).verify(summary.reference)


def test_a_version_taken_at_the_last_moment(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another publisher wins the race twice: once with other content, once with ours."""
    rename = os.rename
    rivals = [make_draft(7), make_draft(0)]

    def late(source: Path, target: Path) -> None:
        if rivals:
            write_bundle(rivals.pop(0), target, version=int(target.name))
        rename(source, target)

    monkeypatch.setattr("probes_store.local.os.rename", late)
    assert store.publish(make_draft(0)).reference == "tiny:2"
    assert (sorted(os.listdir(store.root / "tiny")), rivals) == (["1", "2"], [])


def test_a_twin_published_right_after_the_search(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = LocalBackend._same_content
    calls = []

    def late(self: LocalBackend, manifest: Any, files: Any) -> Any:
        calls.append(search(self, manifest, files))
        if len(calls) == 1:
            write_bundle(make_draft(0), self.folders / "tiny" / "1")
        return calls[-1]

    monkeypatch.setattr(LocalBackend, "_same_content", late)
    assert store.publish(make_draft(0)).reference == "tiny:1"
    assert os.listdir(store.root / "tiny") == ["1"]
    assert calls == [None, 1]


def test_to_publish_no_manifest_of_other_content_is_parsed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(5):
        store.publish(make_draft(seed))
    read = local.read_manifest
    parsed = []

    def counted(data: bytes) -> Any:
        parsed.append(read(data))
        return parsed[-1]

    monkeypatch.setattr(local, "read_manifest", counted)
    assert (store.publish(make_draft(5)).reference, parsed) == ("tiny:6", [])
    assert store.publish(make_draft(2)).reference == "tiny:3"
    assert [manifest.version for manifest in parsed] == [3]


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

    os.fsync = lethal(os.fsync)
    os.rename = lethal(os.rename)
    Store(Path(root)).publish(make_draft(1))
    os._exit(count)


def test_a_kill_in_the_middle_of_publish_leaves_nothing_visible(store: Store) -> None:
    store.publish(make_draft(0))
    before = files(store.root)
    left = 0
    for call in range(1, 100):
        process = FORK.Process(target=die_in_publish, args=(str(store.root), call))
        process.start()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            break
        if (store.root / "tiny" / "2").exists():  # killed after the rename: it is whole
            assert store.verify("tiny:2").reference == "tiny:2"
            shutil.rmtree(store.root / "tiny" / "2")
            continue
        left += len(list((store.root / "tiny").glob(".publish-*")))
        assert [summary.reference for summary in store.list()] == ["tiny:1"]
        assert store.resolve("tiny").name == "1"
        assert before.items() <= files(store.root).items()
    # The last run was not killed, and the kills went through all its calls.
    assert process.exitcode == call - 1 > 8
    assert left >= 8
    assert store.load("tiny").reference == "tiny:2"
    # It cleaned up after the killed ones.
    assert sorted(os.listdir(store.root / "tiny")) == ["1", "2"]


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
    for write in (
        lambda: store.publish(make_draft(1)),
        lambda: store.set_alias("tiny", "production", 1),
    ):
        with pytest.raises(StoreNotWritable, match="No space left"):
            write()
    assert os.listdir(store.root / "tiny") == ["1"]


def write_as_nobody(root: str, results: Any) -> None:
    if os.geteuid() == 0:
        os.setuid(65534)  # root may write everywhere
    found = []
    store = Store(Path(root))
    for action in (
        lambda: store.publish(make_draft(1)),
        lambda: store.publish(make_draft(1, name="new")),
        lambda: store.set_alias("tiny", "production", 1),
        lambda: store.load("tiny"),
        lambda: store.publish(make_draft(0)),
    ):  # it is there: nothing to write
        try:
            action()
            found.append("done")
        except errors.BundleError as error:
            found.append(type(error).__name__)
    results.put(found)


def test_a_read_only_root() -> None:
    results = FORK.Queue()
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # which another user can reach, unlike pytest's own
        os.chmod(folder, 0o755)
        root = Path(folder, "store")
        Store(root).publish(make_draft(0))
        before = files(root)
        for closed in (root / "tiny", root):
            closed.chmod(0o555)
        together(write_as_nobody, [(str(root), results)])
        assert results.get(timeout=120) == ["StoreNotWritable"] * 3 + ["done"] * 2
        assert files(root) == before


def test_a_file_where_the_store_should_be(tmp_path: Path) -> None:
    fine = Store(tmp_path / "a" / "store")
    fine.check_writable()
    assert list(fine.root.iterdir()) == []
    (tmp_path / "file").write_text("x")
    store = Store(tmp_path / "file" / "store")
    assert store.list() == []
    for attempt in (store.check_writable, lambda: store.publish(make_draft())):
        with pytest.raises(StoreNotWritable):
            attempt()
