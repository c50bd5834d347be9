"""Lines that were changed show, whatever is written afterwards; what honest writers do at any moment does not."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.audit.file import FIRST, AuditFile, digest_of, head_path, verify
from service.errors import AuditUnavailable
from tests.audit.test_file import at_most, line, log_of, whole
from tests.serve_process import PATHS


def edit(path: Path, old: str, new: str) -> None:
    """In place, so that the writers' handles stay those of the log."""
    text = path.read_text()
    assert old in text
    with path.open("r+") as file:
        file.write(text.replace(old, new))
        file.truncate()


def changed_in_place(path: Path) -> None:
    edit(path, '"number":2', '"number":7')


def changed_by_an_editor(path: Path) -> None:
    """As ``sed -i`` does: another file under the same name."""
    other = path.with_suffix(".new")
    other.write_text(path.read_text().replace('"number":2', '"number":7'))
    other.chmod(0o600)
    other.rename(path)


def cut_off_one(path: Path) -> None:
    os.truncate(path, sum(map(len, path.read_bytes().splitlines(keepends=True)[:-1])))


def cut_off_most(path: Path) -> None:
    os.truncate(path, len(path.read_bytes().splitlines(keepends=True)[0]))


def cut_off_within_a_line(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 20)


def cut_off_a_lines_end(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replaced_by_noise(path: Path) -> None:
    cut_off_most(path)
    with path.open("a") as file:
        file.write("x" * 30)


def replaced_by_a_line(path: Path) -> None:
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*text[:2], text[2].replace("}}", '},"by":"me"}')]))


CHANGES: Sequence[Callable[[Path], None]] = [
    changed_in_place, changed_by_an_editor, cut_off_one, cut_off_most, cut_off_within_a_line, cut_off_a_lines_end,
    replaced_by_noise, replaced_by_a_line,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("who", ["the writer itself", "another one that knows the log", "a new one"])
def test_a_changed_end_shows_at_once_and_is_not_healed_by_the_next_line(
    tmp_path: Path, change: Callable[[Path], None], who: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, breaks = tmp_path / "audit.jsonl", list[int]()
    other = AuditFile(path, on_break=lambda: breaks.append(1))
    other.append([line(0)])
    file = AuditFile(path, on_break=lambda: breaks.append(1))
    file.append([line(1), line(2)])
    assert whole(path)
    change(path)
    assert not whole(path)
    newer = AuditFile(path, on_break=lambda: breaks.append(1))
    writer = {"the writer itself": file, "another one that knows the log": other, "a new one": newer}[who]
    assert writer.append([line(3)]) == 1
    assert not whole(path)
    for one in (file, other, newer):  # whoever writes then, and said once
        one.append([line(4)])
    assert not whole(path)
    assert json.loads(path.read_text().splitlines()[-1])["what"]["number"] == 4  # nothing new is lost
    assert breaks == [1]
    assert caplog.text.count("were changed or removed") == 1


def chain_again(path: Path) -> None:
    """As somebody who may write to everything and knows how: each ``prev`` anew, and the head file."""
    digest, text = FIRST, b""
    for one in path.read_bytes().splitlines():
        text = json.dumps(json.loads(one) | {"prev": digest}, separators=(",", ":")).encode() + b"\n"
        path.write_bytes((b"" if digest == FIRST else path.read_bytes()) + text)
        digest = digest_of(text)
    size = path.stat().st_size
    head_path(path).write_text(f"{digest} {size - len(text):020} {size:020}\n")
    head_path(path).chmod(0o600)


@pytest.mark.parametrize("change", [changed_in_place, changed_by_an_editor, cut_off_one, cut_off_most])
@pytest.mark.parametrize("head", ["is gone", "was fitted"])
def test_with_its_head_file_changed_too_the_process_that_wrote_the_line_tells(
    tmp_path: Path, change: Callable[[Path], None], head: str
) -> None:
    path = tmp_path / "audit.jsonl"
    file = log_of(path, 3)
    change(path)
    head_path(path).unlink()
    if head == "was fitted":
        chain_again(path)
        assert whole(path)
    file.append([line(4)])
    assert any("whose line before it is gone" in problem for problem in verify([path]).problems)


def test_two_writers_go_on_over_a_rotation(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    a, b = AuditFile(path), AuditFile(path)
    for number, writer in enumerate([a, b, a]):
        writer.append([line(number)])
    path.rename(old)
    b.append([line(3)])
    a.append([line(4)])
    assert whole(old, path)
    assert verify([path]).problems == []
    assert verify([path]).continues


@pytest.mark.parametrize("rotated", ["renamed", "copied and emptied", "renamed, and a new one made"])
def test_a_new_process_that_comes_first_after_a_rotation_goes_on(tmp_path: Path, rotated: str) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    file = log_of(path, 2)
    if rotated == "copied and emptied":
        shutil.copy(path, old)
        os.truncate(path, 0)
    else:
        path.rename(old)
    if rotated == "renamed, and a new one made":
        path.touch(0o600)
    assert whole(old)
    log_of(path, 1, 2).close()
    file.append([line(3)])
    assert whole(old, path)
    edit(old, '"number":1', '"number":7')  # the last line of the older file
    assert not whole(old, path)


def test_a_log_that_was_emptied_shows_as_one_that_began_in_an_earlier_file(tmp_path: Path) -> None:
    """As by a rotation that copies; whoever has no such file knows."""
    path = tmp_path / "audit.jsonl"
    file = log_of(path, 3)
    assert not verify([path]).continues
    os.truncate(path, 0)
    assert verify([path]).continues
    file.append([line(3)])
    assert verify([path]).continues


def test_a_log_from_before_there_was_a_head_file_is_gone_on_with_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log_of(path, 3).close()
    head_path(path).unlink()
    found = verify([path])
    assert (found.problems, found.end_known) == ([], False)
    log_of(path, 1, 3).close()
    found = verify([path])
    assert (found.problems, found.no_head, found.end_known) == ([], 1, True)
    head_path(path).write_text("something else")
    assert not whole(path)
    log_of(path, 1, 4).close()
    found = verify([path])
    assert (found.problems, found.no_head) == ([], 2)


def test_a_head_file_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log_of(path, 1).close()
    head_path(path).chmod(0o622)
    with pytest.raises(AuditUnavailable, match="others may write"):
        AuditFile(path)


def test_what_a_full_disk_cut_at_the_end_of_a_line_is_not_in_the_chain(tmp_path: Path) -> None:
    path, old = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    log_of(path, 1).close()
    begun = path.stat().st_size
    log_of(path, 1, 1).close()
    size = path.stat().st_size - begun
    for rotate in (False, True):
        file = AuditFile(path)
        with at_most(path.stat().st_size + 2 * size - 1):  # all of the second line but its end
            assert file.append([line(2), line(3)]) == 1
        if rotate:
            path.rename(old)
        file.append([line(4)], missed=1)
        file.close()
    found = verify([old, path])
    assert (found.problems, found.torn, found.lines) == ([], 2, 6)


# What may happen to a log that nobody tampers with, at any moment between two lines.
ROTATIONS = ("rename", "rename and make", "copy and empty")
HONEST = ("a", "b", "new", *ROTATIONS, "crash within a line", "crash before the head")


def act(folder: Path, what: str, number: int, writers: dict[str, AuditFile]) -> None:
    path = folder / "audit.jsonl"
    rotated = folder / f"{number:04}"
    if what in ("a", "b"):
        writers.setdefault(what, AuditFile(path)).append([line(number), line(number)][: 1 + number % 2])
    elif what == "new" or not path.exists():
        log_of(path, 1, number).close()
    elif what.startswith("rename"):
        path.rename(rotated)
        if what == "rename and make":
            path.touch(0o600)
    elif what == "copy and empty":
        shutil.copy(path, rotated)
        os.truncate(path, 0)
    else:
        head = head_path(path).read_bytes() if head_path(path).exists() else b""
        log_of(path, 1, number).close()
        if what == "crash within a line":
            os.truncate(path, path.stat().st_size - 1 - number % 50)
        head_path(path).write_bytes(head)  # it is noted after the line
        if what == "crash before the head":
            log_of(path, 1, number).close()  # the service is started again


def files_of(folder: Path) -> list[Path]:
    """Oldest first."""
    return [*sorted(folder.glob("0*")), *folder.glob("audit.jsonl")]


@settings(max_examples=40)
@given(st.lists(st.sampled_from(HONEST), min_size=1, max_size=14))
def test_no_honest_order_of_events_alarms_and_each_change_afterwards_does(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, writers = Path(name), dict[str, AuditFile]()
        for number, step in enumerate(steps):
            act(folder, step, number, writers)
        for writer in [*writers.values(), AuditFile(folder / "audit.jsonl")]:
            writer.append([line(99)])
            writer.close()
        files = files_of(folder)
        found = verify(files)
        assert found.problems == []
        check_every_change(files)


def check_every_change(files: list[Path]) -> None:
    """Each whole line edited, removed, and swapped with the next one: verify finds it."""
    for place, path in enumerate(files):
        kept = path.read_bytes()
        lines = kept.splitlines(keepends=True)
        for number, text in enumerate(lines):
            if not text.endswith(b"}\n"):
                continue  # torn: it has no part in the chain
            others = [lines[:number], lines[number + 1 :]]
            edited = [*others[0], text.replace(b'"done"', b'"gone"'), *others[1]]
            ways = {"edited": edited, "removed": others[0] + others[1]}
            if number + 1 < len(lines) and lines[number + 1].endswith(b"}\n"):
                ways["swapped"] = [*others[0], others[1][0], text, *others[1][1:]]
            for way, content in ways.items():
                path.write_bytes(b"".join(content))
                found = verify(files)
                first = (way, place, number) == ("removed", 0, 0)  # as if it were in an earlier file
                assert found.problems or (first and (found.continues or not found.lines)), (way, place, number)
        path.write_bytes(kept)


WRITER = """
import random, sys
from pathlib import Path
from service.audit.file import AuditFile
from tests.audit.test_file import line
draw, path, count = random.Random(int(sys.argv[2])), Path(sys.argv[1]), int(sys.argv[3])
file = AuditFile(path)
print(flush=True)
sys.stdin.readline()
while count:
    some = min(count, draw.randint(1, 4))
    file.append([line(count) for _ in range(some)], sync=draw.random() < 0.1)
    count -= some
    if draw.random() < 0.05:
        file.close()
        file = AuditFile(path)
"""


def writing(path: Path, seed: int, count: int) -> subprocess.Popen[bytes]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", WRITER, str(path), str(seed), str(count)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": PATHS}, **pipes)


@pytest.mark.parametrize("seed", range(3))
def test_two_processes_and_a_rotation_at_any_moment_make_one_chain(tmp_path: Path, seed: int) -> None:
    path, draw = tmp_path / "audit.jsonl", random.Random(seed)
    writers = [writing(path, 10 * seed + number, 400) for number in range(2)]
    for writer in writers:
        writer.stdout.readline()  # type: ignore[union-attr]
    for writer in writers:  # both at once
        writer.stdin.close()  # type: ignore[union-attr]
    rotations = 0
    while any(writer.poll() is None for writer in writers):
        time.sleep(draw.random() * 0.02)
        if path.exists():
            path.rename(tmp_path / f"{rotations:04}")
            rotations += 1
    assert [writer.wait() for writer in writers] == [0, 0]
    found = verify(files_of(tmp_path))
    assert (found.problems, found.lines) == ([], 800)
    assert found.no_head == 0


@pytest.mark.parametrize("seed", range(3))
def test_processes_that_are_killed_leave_a_chain(tmp_path: Path, seed: int) -> None:
    path, draw = tmp_path / "audit.jsonl", random.Random(seed)
    for number in range(4):
        writers = [writing(path, 100 * seed + 10 * number + one, 100_000) for one in range(2)]
        for writer in writers:
            writer.stdout.readline()  # type: ignore[union-attr]
        for writer in writers:
            writer.stdin.close()  # type: ignore[union-attr]
        time.sleep(draw.random() * 0.1)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        log_of(path, 1).close()  # as the service begins again
        if number % 2:
            path.rename(tmp_path / f"{number:04}")
    assert verify(files_of(tmp_path)).problems == []
