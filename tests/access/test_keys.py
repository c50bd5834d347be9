"""The file of named keys: what it says, what is refused rather than guessed, and which keys are in
force."""

from __future__ import annotations

import codecs
import os
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from service.access.callers import ApiKey, Key, Scope, digest_of
from service.access.keys import PREFIX, Changes, KeyRing, new_key, parse_keys, read_keys
from service.errors import HalluTracerError
from tests.kit.key_files import add_key, revoke_key

D1 = digest_of("one")
ONE = f'[one]\nsha256 = "{D1}"\nscopes = ["score"]\n'
SCORE = {"scopes": ["score"]}


def test_every_field_is_read() -> None:
    text = f"""
[one]
sha256 = "{D1}"
scopes = ["score", "admin"]
created = 2026-11-23T08:30:00Z
expires = 2027-02-21T00:00:00Z
revoked = 2026-12-01T09:00:00+01:00
may = ["threshold"]
policies = ["gate"]
"""
    [key] = parse_keys(text, "f", {"gate"})
    assert key == Key(
        name="one",
        digest=D1,
        scopes=frozenset({Scope.SCORE, Scope.ADMIN}),
        may=frozenset({"threshold"}),
        policies=("gate",),
        expires=datetime(2027, 2, 21, tzinfo=UTC),
        revoked=datetime(2026, 12, 1, 8, tzinfo=UTC),
    )
    assert D1 not in repr(key)


def test_a_file_as_windows_editors_write_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_bytes(codecs.BOM_UTF8 + ONE.replace("\n", "\r\n").encode())
    assert read_keys(file) == parse_keys(ONE, "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("[one", "is not TOML"),
        (ONE + f"may = {'[' * 5000}\n", "is not TOML"),
        (ONE + ONE, "is not TOML"),
        (ONE + ONE.replace("[one]", "[two]"), "one and two are the same key"),
        ("one = 1\n", "outside a table"),
        (ONE.replace("[one]", "[One]"), "lower-case"),
        (ONE.replace("[one]", '["a.b"]'), "lower-case"),
        (ONE + 'scope = ["admin"]\n', "unknown field 'scope'"),
        (ONE + 'name = "two"\n', "unknown field 'name'"),
        (ONE + "requests_per_minute = 600\n", "unknown field 'requests_per_minute'"),
        *((ONE.replace(D1, other), "sha256") for other in ("secret", D1.upper(), D1 + "\\n")),
        ('[one]\nscopes = ["score"]\n', "sha256"),
        (f'[one]\nsha256 = "{D1}"\n', "scopes"),
        (ONE.replace('["score"]', "[]"), "scopes"),
        (ONE.replace('["score"]', '"score"'), "scopes"),
        (ONE.replace('"score"', '"scor"'), "scopes.0"),
        (ONE + "may = []\n", "may"),
        (ONE + 'may = ["all"]\n', "may.0"),
        (ONE + "policies = []\n", "policies"),
        (ONE + "policies = [1]\n", "policies.0"),
        (ONE + 'policies = ["gat"]\n', "no policy 'gat'"),
        *(
            (ONE + f"expires = {date}\n", "expires")
            for date in ("2027-02-21", "2027-02-21T00:00:00", '"2027-02-21T00:00:00Z"')
        ),
        (ONE + "revoked = 0\n", "revoked"),
        (ONE + "created = true\n", "created"),
    ],
)
def test_what_is_wrong_is_said_and_opens_nothing(text: str, message: str) -> None:
    with pytest.raises(HalluTracerError) as refused:
        parse_keys(text, "f", {"gate", "block"})
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)  # which stands where its digest belongs


def test_what_is_no_file_that_the_operator_alone_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(ONE)
    path.chmod(0o646)
    with pytest.raises(HalluTracerError, match="chmod o-w"):
        read_keys(path)
    path.chmod(0o644)  # digests of 256 random bits are no secrets
    assert [key.name for key in read_keys(path)] == ["one"]
    os.mkfifo(tmp_path / "pipe")
    for unread in (tmp_path / "none", tmp_path, tmp_path / "pipe"):
        with pytest.raises(HalluTracerError, match="cannot read"):
            read_keys(unread)


def test_a_clock_that_is_set_back_brings_no_key_back(monkeypatch: pytest.MonkeyPatch) -> None:
    began = datetime(2027, 1, 1, tzinfo=UTC)
    clock, ticks = [began], [100.0]
    monkeypatch.setattr("service.access.callers._START", (began, 100.0))
    monkeypatch.setattr("service.access.callers.time.monotonic", lambda: ticks[0])

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return clock[0].astimezone(tz)

    monkeypatch.setattr("service.access.callers.datetime", Clock)
    key = Key(name="one", digest=D1, expires=began + timedelta(hours=1))
    assert not key.expired()
    ticks[0] += 3599
    assert not key.expired()
    ticks[0] += 1
    assert key.expired()
    clock[0] = began - timedelta(days=400)
    assert key.expired()
    ticks[0] = 100.0
    clock[0] = began + timedelta(hours=1)  # a clock that runs while the machine sleeps
    assert key.expired()
    clock[0] = began + timedelta(
        minutes=1
    )  # it was wrong, and nobody asked meanwhile that it stay so
    assert not key.expired()


def test_a_new_key_is_in_its_table_by_its_digest_alone() -> None:
    end = datetime(2030, 1, 1, tzinfo=UTC)
    first, text = new_key("one", SCORE | {"expires": end, "may": None})
    second, other = new_key("two", {"scopes": ["observe", "admin"], "policies": ["gate"]})
    assert first != second
    assert first.startswith(PREFIX)
    assert len(first) == len(PREFIX) + 43  # 256 bits
    assert first[len(PREFIX) :] not in text
    one, two = parse_keys(text + other, "f")
    assert (one.digest, one.expires) == (digest_of(first), end)
    assert (two.scopes, two.policies) == ({Scope.OBSERVE, Scope.ADMIN}, ("gate",))
    with pytest.raises(HalluTracerError, match="lower-case"):
        new_key("One", SCORE)


def test_an_options_key_opens_what_it_always_did_and_changes_nothing() -> None:
    ring = KeyRing([ApiKey("s" * 20, "key-1", frozenset({"policy"})).hashed()])
    key = ring.find("s" * 20)
    assert key is not None
    assert (key.name, key.may, key.scopes) == ("key-1", {"policy"}, {Scope.SCORE, Scope.OBSERVE})
    assert ring.find("s" * 19) is None
    assert ring.closed
    assert not KeyRing().closed


def test_a_placeholders_digest_opens_nothing(tmp_path: Path) -> None:
    (path := tmp_path / "keys.toml").write_text(ONE.replace(D1, digest_of("REPLACE-ME-app-one")))
    assert KeyRing([], path).find("REPLACE-ME-app-one") is None


def test_a_change_of_the_file_is_seen_told_and_put_in_force(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    one = add_key(path, "one", SCORE)
    ring = KeyRing([], path)
    assert not ring.changed_on_disk()
    two = add_key(path, "two", SCORE)
    revoke_key(path, "one")
    assert [ring.changed_on_disk(), ring.changed_on_disk()] == [True, False]
    keys, changes = ring.read()
    assert changes == Changes(added=("two",), removed=(), changed=("one",))
    before = ring.find(one)
    assert (ring.find(two), before and before.revoked) == (None, None)
    ring.use(keys)
    after = ring.find(one)
    assert ring.find(two) is not None
    assert after is not None
    assert after.revoked is not None
    path.unlink()
    assert ring.changed_on_disk()
    with pytest.raises(HalluTracerError, match="cannot read"):
        ring.read()


def test_what_else_is_a_change_of_the_file(tmp_path: Path) -> None:
    path, other, link = tmp_path / "keys.toml", tmp_path / "other.toml", tmp_path / "link"
    for file in (path, other):
        file.write_text(ONE)
    os.utime(other, ns=((times := path.stat()).st_atime_ns, times.st_mtime_ns))
    link.symlink_to(path)
    ring, linked = KeyRing([], path), KeyRing([], link)
    link.unlink()
    link.symlink_to(
        other
    )  # as Kubernetes replaces a mounted Secret: its size and its time are the same
    assert linked.changed_on_disk()
    path.write_text(ONE.replace("score", "admin"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_ino) == (times.st_size, times.st_ino)
    assert ring.changed_on_disk()
    path.chmod(0o666)
    assert ring.changed_on_disk()


def test_what_two_files_have_in_common(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    secrets = {name: add_key(path, name, SCORE) for name in ("stays", "goes", "changes")}
    ring, alone = KeyRing([ApiKey("f" * 20, "fixed").hashed()], path), KeyRing([], path)
    text = (
        path.read_text()
        .replace("[goes]", "[new]")
        .replace(digest_of(secrets["goes"]), digest_of("new"))
    )
    path.write_text(text + "may = ['policy']")
    keys, changes = ring.read()
    assert changes == Changes(("new",), ("goes",), ("changes",))
    ring.keep_common(keys)
    assert ring.names == {"fixed", "stays"}
    path.unlink()
    add_key(path, "two", SCORE)
    alone.keep_common(alone.read()[0])  # it has lost its last key, and opens nothing
    assert (alone.find(secrets["stays"]), alone.names, alone.closed) == (None, frozenset(), True)


def test_a_file_without_keys_and_clashes_with_the_options_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with pytest.raises(HalluTracerError, match="cannot read"):
        KeyRing([], path)
    secret = add_key(path, "one", SCORE)
    for key, said in (
        (ApiKey("x" * 20, "one"), "two keys are named 'one'"),
        (ApiKey(secret, "k"), "by --api-key"),
    ):
        with pytest.raises(HalluTracerError, match=said):
            KeyRing([key.hashed()], path)
