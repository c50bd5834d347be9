"""The keys file: names, rights, and what is refused rather than guessed."""

from __future__ import annotations

import logging
import re
import secrets
from pathlib import Path

import pytest

from service.access.callers import is_placeholder
from service.cli.access import load_keys
from service.errors import HalluTracerError
from tests.serve_process import ROOT

ONE, TWO = "1" * 16, "2" * 40


def keys_file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_line_is_a_key_its_name_and_its_rights(tmp_path: Path) -> None:
    text = f"# for the apps\n{ONE}\n\n {TWO}  name=search may=policy,threshold \n"
    given, first, second = load_keys(("3" * 16,), keys_file(tmp_path, text))
    assert (given.secret, given.name, given.may) == ("3" * 16, "key-1", frozenset())
    assert (first.secret, first.name, first.may) == (ONE, "key-2", frozenset())
    assert (second.secret, second.name, second.may) == (TWO, "search", {"policy", "threshold"})
    assert ONE not in repr((first, second))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# nothing\n", "holds no key"),
        ("short\n", "line 1 of"),
        (f"{ONE}\nREPLACE-ME-app-one name=app\n", "line 2 of"),
        ("REPLACE-ME-app-one\n", "secrets.token_urlsafe"),
        ("REPLACE-ME\n", "placeholder"),
        ("replace_me_with_a_long_key\n", "placeholder"),
        ("sk-ChangeMe-0123456789\n", "placeholder"),
        ("your-api-key-goes-here\n", "placeholder"),
        ("ключ" * 5 + "\n", "ASCII"),
        (f"{ONE}\nshort name=a\n", "line 2 of"),
        (f"{ONE} nam=a\n", "'nam=a'"),
        (f"{ONE} name=a name=b\n", "'name=b'"),
        (f"{ONE} {TWO}\n", "a word without '='"),
        (f"{ONE} may=everything\n", "'everything'"),
        (f"{TWO} {ONE}\n", "a word without '='"),
        (f"{ONE} name=\n", "1 to 64"),
        (f"{ONE}\n{ONE}\n", "given twice"),
        (f"{ONE} name=a\n{TWO} name=a\n", "two keys are named 'a'"),
        (f"{ONE} name=key-2\n{TWO}\n", "two keys are named 'key-2'"),
    ],
)
def test_what_is_wrong_is_said_and_opens_nothing(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(HalluTracerError) as refused:
        load_keys((), keys_file(tmp_path, text))
    assert said in str(refused.value)
    assert ONE not in str(refused.value)
    assert TWO not in str(refused.value)
    assert "app-one" not in str(refused.value)


@pytest.mark.parametrize(
    ("file", "pattern"),
    [("docs/serving.md", r"```text\n((?:\S+  name=.+\n)+)```")],
)
def test_a_key_that_we_publish_is_no_key(tmp_path: Path, file: str, pattern: str) -> None:
    [found] = re.findall(pattern, (ROOT / file).read_text())
    for line in found.splitlines():
        with pytest.raises(HalluTracerError, match="placeholder"):
            load_keys((), keys_file(tmp_path, line))


def test_no_drawn_key_looks_like_a_placeholder() -> None:
    assert not any(is_placeholder(secrets.token_urlsafe(32)) for _ in range(1000))


def test_the_files_mode_is_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(HalluTracerError, match="can write"):
        load_keys((), keys_file(tmp_path, ONE, 0o602))
    with caplog.at_level(logging.WARNING):
        assert load_keys((), keys_file(tmp_path, ONE, 0o640))
        assert not caplog.records
        assert load_keys((), keys_file(tmp_path, ONE, 0o644))
    assert "can read" in caplog.text
