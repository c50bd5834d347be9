"""The file of named keys: what it says, and what is refused rather than guessed."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from service.access.callers import Key, Scope, digest_of
from service.access.edit import PREFIX, add_key, revoke_key
from service.access.key_file import parse_keys, read_keys
from service.errors import HalluTracerError

D1, D2 = digest_of("one"), digest_of("two")
ONE = f'[one]\nsha256 = "{D1}"\nscopes = ["score"]\n'


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
requests_per_minute = 600
prompt_tokens_per_day = 2_000_000
"""
    [key] = parse_keys(text, "f", {"gate"})
    assert key == Key(
        name="one", digest=D1, scopes=frozenset({Scope.SCORE, Scope.ADMIN}), may=frozenset({"threshold"}),
        policies=("gate",), expires=datetime(2027, 2, 21, tzinfo=UTC), revoked=datetime(2026, 12, 1, 8, tzinfo=UTC),
        requests_per_minute=600, prompt_tokens_per_day=2_000_000,
    )  # fmt: skip
    assert D1 not in repr(key)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no key"),
        ("# nothing\n", "holds no key"),
        ("[one", "is not TOML"),
        ("one = 1\n", "outside a table"),
        (ONE.replace("[one]", "[One]"), "lower-case"),
        (ONE.replace("[one]", '["a.b"]'), "lower-case"),
        (ONE + 'scope = ["admin"]\n', "unknown field 'scope'"),
        (ONE.replace(D1, "secret"), "64 hexadecimal"),
        (ONE.replace(D1, D1.upper()), "64 hexadecimal"),
        (f'[one]\nscopes = ["score"]\nkey = "{D1}"\n', "unknown field 'key'"),
        ('[one]\nscopes = ["score"]\n', "64 hexadecimal"),
        (f'[one]\nsha256 = "{D1}"\n', "scopes must name"),
        (ONE.replace('["score"]', "[]"), "list of one or more"),
        (ONE.replace('["score"]', '"score"'), "list of one or more"),
        (ONE.replace('"score"', '"scor"'), "found 'scor'"),
        (ONE + 'may = ["all"]\n', "found 'all'"),
        (ONE + "policies = []\n", "list of one or more"),
        (ONE + 'policies = ["gat"]\n', "no policy 'gat'"),
        (ONE + "expires = 2027-02-21\n", "time with its zone"),
        (ONE + "expires = 2027-02-21T00:00:00\n", "time with its zone"),
        (ONE + 'expires = "never"\n', "time with its zone"),
        (ONE + "requests_per_minute = 0\n", "whole number"),
        (ONE + "requests_per_minute = true\n", "whole number"),
        (ONE + "prompt_tokens_per_day = 1.5\n", "whole number"),
        (ONE + f"requests_per_minute = {10**400}\n", "whole number"),
        (ONE + f"prompt_tokens_per_day = {10**15 + 1}\n", "whole number"),
        (ONE + f"requests_per_minute = {'1' * 5000}\n", "is not TOML"),
        (ONE + f"may = {'[' * 5000}\n", "is not TOML"),
        (ONE + ONE.replace("[one]", "[two]"), "one and two are the same key"),
    ],
)
def test_what_is_wrong_is_said_and_opens_nothing(text: str, said: str) -> None:
    with pytest.raises(HalluTracerError) as refused:
        parse_keys(text, "f", {"gate", "block"})
    assert said in str(refused.value)


def test_a_file_that_all_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(ONE)
    path.chmod(0o646)
    with pytest.raises(HalluTracerError, match="chmod o-w"):
        read_keys(path)
    path.chmod(0o644)  # digests of 256 random bits are no secrets
    assert [key.name for key in read_keys(path)] == ["one"]
    with pytest.raises(HalluTracerError, match="cannot read"):
        read_keys(tmp_path / "none")


def test_what_could_be_read_once_or_without_an_end_is_no_file_of_keys(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(HalluTracerError, match="it is not a file"):
            read_keys(path)


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
    ticks[0], clock[0] = 100.0, began + timedelta(hours=1)  # a clock that runs while the machine sleeps
    assert key.expired()
    clock[0] = began + timedelta(minutes=1)  # it was wrong, and nobody asked meanwhile that it stay so
    assert not key.expired()


# --- editing it ---


def test_a_new_key_is_in_the_file_by_its_digest_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    end = datetime(2030, 1, 1, tzinfo=UTC)
    first = add_key(path, "one", {"scopes": ["score"], "expires": end, "may": None, "requests_per_minute": 5})
    second = add_key(path, "two", {"scopes": ["observe", "admin"], "policies": ["gate"]})
    assert first != second
    assert first.startswith(PREFIX)
    assert len(first) == len(PREFIX) + 43  # 256 bits
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert first not in text
    assert first[len(PREFIX) :] not in text
    one, two = read_keys(path)
    assert (one.digest, one.expires, one.requests_per_minute) == (digest_of(first), end, 5)
    assert (two.scopes, two.policies) == ({Scope.OBSERVE, Scope.ADMIN}, ("gate",))
    with pytest.raises(HalluTracerError, match="there is a key 'one', or was"):
        add_key(path, "one", {"scopes": ["score"]})


def test_revoking_keeps_comments_mode_and_the_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    text = (
        f'# ours\n[one]  # Ann\'s\nsha256 = "{D1}"  # x\nscopes = ["score"]\n\n["two"]\nsha256="{D2}"\nscopes=["admin"]'
    )
    path.write_text(text)
    path.chmod(0o640)
    assert revoke_key(path, "one").name == "one"
    assert revoke_key(path, "two").name == "two"
    assert all(key.revoked is not None for key in read_keys(path))
    left = [line for line in path.read_text().splitlines() if not line.startswith("revoked = ")]
    assert left == text.splitlines()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(HalluTracerError, match="was revoked on"):
        revoke_key(path, "one")
    with pytest.raises(HalluTracerError, match="no key 'three'; there are one, two"):
        revoke_key(path, "three")


def test_an_unusual_table_is_left_to_a_human(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(before := f'one = {{sha256 = "{D1}", scopes = ["score"]}}\n')
    with pytest.raises(HalluTracerError, match="by hand"):
        revoke_key(path, "one")
    assert path.read_text() == before


def test_what_may_not_be_audited_is_not_done(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_key(path, "one", {"scopes": ["score"]})
    before = path.read_bytes()

    def refuse() -> None:
        raise HalluTracerError("no room")

    for change in (
        lambda: add_key(path, "two", {"scopes": ["score"]}, refuse),
        lambda: revoke_key(path, "one", refuse),
    ):
        with pytest.raises(HalluTracerError, match="no room"):
            change()
        assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["keys.toml"]


def test_a_link_stays_one_and_a_broken_file_is_not_touched(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "keys.toml"
    link.symlink_to(real)
    add_key(link, "one", {"scopes": ["score"]})
    assert link.is_symlink()
    real.write_text("[broken")
    with pytest.raises(HalluTracerError, match="not TOML"):
        add_key(link, "two", {"scopes": ["score"]})
    assert real.read_text() == "[broken"
