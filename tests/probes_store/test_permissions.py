"""A store that anyone on the machine can write to is no store to read a gate from."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from probes_store.errors import OpenStore
from probes_store.permissions import check_closed
from probes_store.store import SHIPPED, Store, Trust
from tests.probes_store.factory import make_draft

FOLDERS = [lambda s: s.root, lambda s: s.root.parent, lambda s: s.root / "tiny", lambda s: s.root / "tiny" / "1"]
FILES = [
    lambda s: s.root / "tiny" / "aliases.json",
    lambda s: s.root / "tiny" / "1" / "bundle.json",
    lambda s: s.root / "tiny" / "1" / "plots" / "roc.png",
]


@pytest.fixture
def made(store: Store) -> Store:
    store.publish(make_draft())
    store.set_alias("tiny", "production", 1)
    return store


@pytest.mark.parametrize("place", [*FOLDERS, *FILES])
def test_what_all_may_write_is_refused(place: Callable[[Store], Path], made: Store) -> None:
    path = place(made)
    path.chmod(path.stat().st_mode | 0o002)
    for use in (made.load, made.verify):
        with pytest.raises(OpenStore, match=f"{path}: .*chmod o-w .*--allow-open-store"):
            use("tiny")
    assert Store(made.root, trust=Trust(open_store=True)).verify("tiny").reference == "tiny:1"
    path.chmod(path.stat().st_mode & ~0o002)
    assert made.verify("tiny").reference == "tiny:1"


def test_the_packages_bundles_are_not_read_beside_an_open_store(made: Store) -> None:
    """Whoever can write there could have put a bundle of that name in their place."""
    made.root.chmod(0o777)
    both = Store(made.root, [SHIPPED])
    for use in (lambda: both.load("demo"), both.list, both.check_writable, lambda: both.publish(make_draft(1))):
        with pytest.raises(OpenStore):
            use()
    assert not (made.root / "tiny" / "2").exists()


def test_one_open_bundle_does_not_hide_the_others(made: Store) -> None:
    other = made.publish(make_draft(1))
    other.path.chmod(0o777)
    assert [type(summary.error) for summary in made.list()] == [type(None), OpenStore]
    assert made.load("tiny:1").reference == "tiny:1"


def test_a_folder_for_all_in_which_only_owners_rename(made: Store) -> None:
    made.root.parent.chmod(0o1777)  # as /tmp
    assert made.load("tiny").reference == "tiny:1"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to another user")
def test_another_users_folder_among_those(made: Store) -> None:
    made.root.parent.chmod(0o1777)
    os.chown(made.root, 65534, 65534)
    with pytest.raises(OpenStore, match="another user made this"):
        made.load("tiny")
    made.root.parent.chmod(0o755)  # somebody's store, in a folder that is not for all
    assert made.load("tiny").reference == "tiny:1"


def test_a_link_into_an_open_folder(made: Store, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    made.root.rename(tmp_path / "open" / "store")
    (tmp_path / "link").symlink_to(tmp_path / "open" / "store")
    with pytest.raises(OpenStore, match="open"):
        Store(tmp_path / "link").load("tiny")


def test_a_link_in_an_open_folder(made: Store, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(made.root)
    assert Store(tmp_path / "open" / "link").load("tiny").reference == "tiny:1"
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(OpenStore, match="open"):
        Store(tmp_path / "open" / "link").load("tiny")


def test_nothing_there_is_not_wrong(tmp_path: Path) -> None:
    check_closed(tmp_path / "absent" / "below")


def test_copies_of_a_url_are_checked_too(tmp_path: Path) -> None:
    store = Store("memory://permissions", cache=tmp_path / "cache")
    store.publish(make_draft())
    assert store.load("tiny").reference == "tiny:1"
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(OpenStore, match="cache"):
        store.load("tiny")
