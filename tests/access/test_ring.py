"""Which keys are in force, and what a file that changed would change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.access.callers import ApiKey, Scope, digest_of
from service.access.edit import add_key, revoke_key
from service.access.ring import Changes, KeyRing
from service.errors import HalluTracerError


def test_an_options_key_opens_what_it_always_did_and_changes_nothing() -> None:
    ring = KeyRing([ApiKey("s" * 20, "key-1", frozenset({"policy"})).hashed()])
    key = ring.find("s" * 20)
    assert key is not None
    assert (key.name, key.may, key.scopes) == ("key-1", {"policy"}, {Scope.SCORE, Scope.OBSERVE})
    assert ring.find("s" * 19) is None
    assert ring.closed
    assert not KeyRing().closed


def test_a_placeholders_digest_opens_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    one = add_key(path, "one", {"scopes": ["score"]})
    path.write_text(path.read_text().replace(digest_of(one), digest_of("REPLACE-ME-app-one")))
    assert KeyRing([], path).find("REPLACE-ME-app-one") is None


def test_a_change_of_the_file_is_seen_told_and_put_in_force(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    one = add_key(path, "one", {"scopes": ["score"]})
    ring = KeyRing([], path)
    assert not ring.changed_on_disk()
    two = add_key(path, "two", {"scopes": ["score"]})
    revoke_key(path, "one")
    assert ring.changed_on_disk()
    assert not ring.changed_on_disk()
    keys, changes = ring.read()
    assert changes == Changes(added=("two",), removed=(), changed=("one",))
    assert ring.find(two) is None
    assert (before := ring.find(one)) is not None
    assert before.revoked is None
    ring.use(keys)
    assert ring.find(two) is not None
    assert (after := ring.find(one)) is not None
    assert after.revoked is not None
    assert ring.allowance(before) is ring.allowance(after)
    path.unlink()
    assert ring.changed_on_disk()
    with pytest.raises(HalluTracerError, match="cannot read"):
        ring.read()


def test_a_file_with_its_old_time_and_size_or_another_mode_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_key(path, "one", {"scopes": ["score"]})
    ring, before = KeyRing([], path), path.stat()
    text = path.read_text()
    path.write_text(text.replace("score", "admin"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_ino) == (before.st_size, before.st_ino)
    assert ring.changed_on_disk()
    path.chmod(0o666)
    assert ring.changed_on_disk()
    with pytest.raises(HalluTracerError, match="chmod o-w"):
        ring.read()


def test_what_two_files_have_in_common(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    secrets = {name: add_key(path, name, {"scopes": ["score"]}) for name in ("stays", "goes", "changes")}
    fixed = ApiKey("f" * 20, "fixed").hashed()
    ring = KeyRing([fixed], path)
    text = path.read_text()
    path.write_text(
        text.replace("[goes]", "[new]").replace(digest_of(secrets["goes"]), digest_of("new")) + "may = ['policy']"
    )
    keys, changes = ring.read()
    assert changes == Changes(("new",), ("goes",), ("changes",))
    ring.keep_common(keys)
    assert ring.names == {"fixed", "stays"}


def test_a_file_without_keys_and_clashes_with_the_options_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with pytest.raises(HalluTracerError, match="cannot read"):
        KeyRing([], path)
    path.write_text("")
    with pytest.raises(HalluTracerError, match="holds no key"):
        KeyRing([], path)
    secret = add_key(tmp_path / "ok.toml", "one", {"scopes": ["score"]})
    with pytest.raises(HalluTracerError, match="two keys are named 'one'"):
        KeyRing([ApiKey("x" * 20, "one").hashed()], tmp_path / "ok.toml")
    with pytest.raises(HalluTracerError, match="given by --api-key"):
        KeyRing([ApiKey(secret, "key-1").hashed()], tmp_path / "ok.toml")
    (tmp_path / "ok.toml").write_text((tmp_path / "ok.toml").read_text() + 'policies = ["none"]\n')
    with pytest.raises(HalluTracerError, match="no policy"):
        KeyRing([], tmp_path / "ok.toml", {"gate"})


def test_a_file_of_equal_size_and_time_under_another_name_is_another(tmp_path: Path) -> None:
    """As Kubernetes replaces a mounted Secret: by a link to another folder."""
    path, other = tmp_path / "keys.toml", tmp_path / "other.toml"
    add_key(path, "one", {"scopes": ["score"]})
    other.write_bytes(path.read_bytes())
    link = tmp_path / "link"
    link.symlink_to(path)
    ring = KeyRing([], link)
    times = path.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    link.unlink()
    link.symlink_to(other)
    assert ring.changed_on_disk()


def test_a_ring_that_lost_its_last_key_opens_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    one = add_key(path, "one", {"scopes": ["score"]})
    ring = KeyRing([], path)
    path.unlink()
    add_key(path, "two", {"scopes": ["score"]})
    keys, _ = ring.read()
    ring.keep_common(keys)
    assert ring.find(one) is None
    assert ring.names == frozenset()
    assert ring.closed
