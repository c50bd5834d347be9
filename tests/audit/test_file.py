"""The audit log's file: a chain over restarts, rotation, crashes, a full disk and several writers; what verify sees."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.audit.events import SERVICE, change
from service.audit.file import FIRST, AuditFile, head_path, verify
from service.errors import AuditUnavailable, HalluTracerError
from tests.serve_process import PATHS


def line(number: int) -> Any:
    return change(SERVICE, "test", "done", {"number": number})


def log_of(path: Path, count: int, first: int = 0) -> AuditFile:
    file = AuditFile(path)
    assert file.append([line(number) for number in range(first, first + count)]) == count
    return file


def numbers(path: Path) -> list[int]:
    return [json.loads(text)["what"]["number"] for text in path.read_text().splitlines()]


def whole(*paths: Path) -> bool:
    return verify(paths).problems == []


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes: a write stops there, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_each_line_has_the_digest_of_the_one_before_it_and_nobody_else_may_read(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = log_of(path, 3)
    file.append([line(3)], sync=True)
    found = verify([path])
    assert (found.problems, found.lines, found.continues, found.head) == ([], 4, False, file.head)
    assert [json.loads(text)["prev"] for text in path.read_text().splitlines()][0] == FIRST
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_restart_goes_on_with_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log_of(path, 2).close()
    file = log_of(path, 2, 2)
    assert numbers(path) == [0, 1, 2, 3]
    assert whole(path)
    assert verify([path]).head == file.head


def test_a_renamed_file_is_left_and_the_chain_goes_on_in_the_next(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    file = log_of(path, 2)
    path.rename(old)
    file.append([line(2)])
    assert (numbers(old), numbers(path)) == ([0, 1], [2])
    assert whole(old, path)
    assert verify([path]).continues
    assert not whole(path, old)


def test_a_file_that_was_copied_and_emptied_goes_on_too(tmp_path: Path) -> None:
    path, copy = tmp_path / "audit.jsonl", tmp_path / "copy"
    file = log_of(path, 2)
    copy.write_bytes(path.read_bytes())
    os.truncate(path, 0)
    file.append([line(2)])
    assert whole(copy, path)


def test_two_writers_of_one_file_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    code = (
        "import sys; from pathlib import Path; from service.audit.file import AuditFile\n"
        "from tests.audit.test_file import line\n"
        "file = AuditFile(Path(sys.argv[1])); print(flush=True); sys.stdin.readline()\n"
        "for number in range(200): file.append([line(number)])"
    )
    command = [sys.executable, "-c", code, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writers = [subprocess.Popen(command, env=os.environ | {"PYTHONPATH": PATHS}, **pipes) for _ in range(3)]
    for writer in writers:
        writer.stdout.readline()  # type: ignore[union-attr]
    for writer in writers:  # all at once
        writer.stdin.close()  # type: ignore[union-attr]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    found = verify([path])
    assert (found.problems, found.lines) == ([], 600)


@pytest.mark.parametrize("length", [16_300, 16_384, 40_000, 3_000_000])
def test_the_line_before_is_found_however_long_it_is(tmp_path: Path, length: int) -> None:
    path = tmp_path / "audit.jsonl"
    log_of(path, 2).append([change(SERVICE, "test", "done", {"number": 2, "text": "x" * length})])
    log_of(path, 1, first=3)
    found = verify([path])
    assert (found.problems, found.lines) == ([], 4)


def test_a_full_disk_leaves_whole_lines_and_the_next_one_says_so(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = log_of(path, 1)
    size = path.stat().st_size
    with at_most(2 * size + size // 2):
        assert file.append([line(1), line(2), line(3)]) == 1
        with pytest.raises(AuditUnavailable, match="cannot write the audit log"):
            file.append([line(4)], sync=True)
    assert verify([path]).problems
    assert file.append([line(5)], missed=3) == 1
    found = verify([path])
    assert (found.problems, found.torn, found.missed, found.lines) == ([], 1, 3, 3)
    assert file.head == found.head


def test_a_disk_that_was_full_for_one_write_alone(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = log_of(path, 1)
    with at_most(path.stat().st_size * 5 // 2):
        assert file.append([line(1), line(2)]) == 1
    file.append([line(3)])
    found = verify([path])
    assert (found.problems, found.torn, found.lines) == ([], 1, 3)


def test_a_crash_in_the_middle_of_a_line_is_no_tampering(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log_of(path, 1).close()
    noted = head_path(path).read_bytes()
    log_of(path, 1, 1).close()
    os.truncate(path, path.stat().st_size - 20)
    head_path(path).write_bytes(noted)  # which is written after the line
    assert "line 2 cannot be read: it has no end" in verify([path]).problems[0]
    log_of(path, 1, 2)
    found = verify([path])
    assert (found.problems, found.torn, found.lines) == ([], 1, 2)


def tampered(text: list[str], what: str) -> list[str]:
    if what == "edited":
        return [*text[:2], text[2].replace('"number":2', '"number":7'), *text[3:]]
    if what == "removed":
        return [*text[:2], *text[3:]]
    if what == "put in":
        return [*text[:3], text[2], *text[3:]]
    if what == "moved":
        return [text[0], text[2], text[1], *text[3:]]
    if what == "garbage":
        return [*text[:2], "{}", *text[3:]]
    if what == "cut":
        return [*text[:2], text[2][:20], *text[3:]]
    assert what == "last is garbage"
    return [*text[:-1], text[-1][:20]]


@pytest.mark.parametrize("what", ["edited", "removed", "put in", "moved", "garbage", "cut", "last is garbage"])
def test_what_was_changed_shows(tmp_path: Path, what: str) -> None:
    path = tmp_path / "audit.jsonl"
    log_of(path, 5).close()
    assert whole(path)
    text = path.read_text().splitlines()
    path.write_text("".join(f"{one}\n" for one in tampered(text, what)))
    assert not whole(path)


def test_every_changed_byte_shows(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log_of(path, 2).close()
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert not whole(path), place


def test_what_is_gone_from_the_end_shows_by_a_digest_that_was_noted(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = log_of(path, 3)
    noted = file.head
    file.append([line(3)])
    assert verify([path], noted).problems == []
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:2]))
    assert "removed from the end" in verify([path]).problems[0]
    head_path(path).unlink()
    assert whole(path)
    assert "lines were removed from the end" in verify([path], noted).problems[0]


def test_files_that_cannot_be_trusted_or_had_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text("")
    for mode in (0o622, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(AuditUnavailable, match="others may write"):
            AuditFile(path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for other in (tmp_path / "link", tmp_path, tmp_path / "no" / "folder", Path("/dev/null")):
        with pytest.raises(AuditUnavailable):
            AuditFile(other)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(HalluTracerError, match="cannot read"):
        verify([tmp_path / "none"])
