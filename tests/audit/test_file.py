"""The audit log's file: one chain over restarts, rotation, crashes, a full disk and several
writers.

Lines that were changed show, whatever is written afterwards; what honest writers do at any moment
does not."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.audit.auditor import SERVICE, change
from service.audit.file import FIRST, AuditFile, Verified, digest_of, head_path, verify
from service.errors import AuditUnavailable, HalluTracerError

FORK = multiprocessing.get_context("fork")


def line(number: int, **more: Any) -> Any:
    return change(SERVICE, "test", "done", {"number": number, **more})


def log_of(path: Path, count: int, first: int = 0) -> AuditFile:
    file = AuditFile(path)
    assert file.append([line(number) for number in range(first, first + count)]) == count
    return file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def old(path: Path) -> Path:
    """What a rotation makes of it."""
    return path.with_name("audit.jsonl.1")


def numbers(path: Path) -> list[int]:
    return [json.loads(text)["what"]["number"] for text in path.read_text().splitlines()]


def whole(*paths: Path, **expected: Any) -> Verified | None:
    """What the logs hold, where nothing is wrong with them; it must be ``expected``."""
    result = verify(paths)
    assert {name: getattr(result, name) for name in expected} == expected
    return None if result.problems else result


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes: a write stops there, as on a full
    disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_each_line_has_the_digest_of_the_one_before_it_also_over_a_restart(path: Path) -> None:
    log_of(path, 3).close()
    file = log_of(path, 1, 3)
    file.append([line(4, text="x" * 3_000_000)])
    file = log_of(path, 1, 5)
    assert whole(path, lines=6, continues=False, head=file.head)
    assert numbers(path) == list(range(6))
    assert json.loads(path.read_text().splitlines()[0])["prev"] == FIRST
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # nobody else may read


ROTATIONS = ("rename", "copy and empty", "rename and make")


def rotate(path: Path, old: Path, how: str) -> None:
    if how == "copy and empty":
        shutil.copy(path, old)
        os.truncate(path, 0)
    else:
        path.rename(old)
    if how == "rename and make":
        path.touch(0o600)


@pytest.mark.parametrize("how", ROTATIONS)
@pytest.mark.parametrize("first", ["the writer", "another writer", "a new process"])
def test_the_chain_goes_on_over_a_rotation(path: Path, old: Path, how: str, first: str) -> None:
    file, other = log_of(path, 2), AuditFile(path)
    other.append([line(2)])
    rotate(path, old, how)
    assert whole(old)
    assert how == "rename" or whole(path, continues=True)  # whoever has no older file is told of it
    (
        AuditFile(path) if first == "a new process" else file if first == "the writer" else other
    ).append([line(3)])
    for one in (file, other):
        one.append([line(4)])
    assert (numbers(old), numbers(path)) == ([0, 1, 2], [3, 4, 4])
    assert whole(old, path)
    assert whole(path, continues=True)
    assert not whole(path, old)
    tamper(old, "changed in place")  # the last line of the older file
    assert not whole(old, path)


def test_a_full_disk_leaves_whole_lines_and_the_next_one_says_so(path: Path, old: Path) -> None:
    file = log_of(path, 1)
    size = path.stat().st_size
    with at_most(2 * size + size // 2):
        assert file.append([line(1), line(2), line(3)]) == 1
        with pytest.raises(AuditUnavailable, match="cannot write the audit log"):
            file.append([line(4)], sync=True)
    assert not whole(path)
    assert file.append([line(5)], missed=3) == 1
    assert whole(path, torn=1, missed=3, lines=3, head=file.head)
    for rotated in (False, True):  # all of a line but its end is not in the chain
        file = AuditFile(path)
        with at_most(path.stat().st_size + 2 * size - 1):
            assert file.append([line(6), line(7)]) == 1
        if rotated:
            path.rename(old)
        file.append([line(8)], missed=1)
        file.close()
    assert whole(old, path, torn=3, lines=7)


def test_a_crash_within_a_line_is_no_tampering_and_a_lost_head_file_is_told(path: Path) -> None:
    log_of(path, 1).close()
    noted = head_path(path).read_bytes()
    log_of(path, 1, 1).close()
    os.truncate(path, path.stat().st_size - 20)
    head_path(path).write_bytes(noted)  # which is written after the line
    assert "line 2 cannot be read: it has no end" in verify([path]).problems[0]
    log_of(path, 1, 2).close()
    assert whole(path, torn=1, lines=2)
    head_path(path).unlink()
    assert whole(path, end_known=False)
    log_of(path, 1, 3).close()
    assert whole(path, no_head=1, end_known=True)
    head_path(path).write_text("something else")
    assert not whole(path)
    log_of(path, 1, 4).close()
    assert whole(path, no_head=2)


def test_files_that_cannot_be_trusted_or_had_are_refused(path: Path, tmp_path: Path) -> None:
    log_of(path, 1).close()
    for file, modes in ((path, (0o622, 0o620, 0o602)), (head_path(path), (0o622,))):
        for mode in modes:
            file.chmod(mode)
            with pytest.raises(AuditUnavailable, match="others may write"):
                AuditFile(path)
        file.chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for other in (tmp_path / "link", tmp_path, tmp_path / "no" / "folder", Path("/dev/null")):
        with pytest.raises(AuditUnavailable):
            AuditFile(other)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(HalluTracerError, match="cannot read"):
        verify([tmp_path / "none"])


def renumbered(lines: list[str]) -> list[str]:
    return [*lines[:2], lines[2].replace('"number":2', '"number":7'), *lines[3:]]


CHANGES: dict[str, Callable[[list[str]], list[str]]] = {
    "changed in place": renumbered,
    "changed by an editor": renumbered,
    "cut off one": lambda text: text[:-1],
    "cut off most": lambda text: text[:1],
    "cut off within a line": lambda text: [*text[:-1], text[-1][:-20]],
    "cut off a line's end": lambda text: [*text[:-1], text[-1][:-1]],
    "replaced by noise": lambda text: [text[0], "x" * 30],
    "replaced by a line": lambda text: [*text[:2], text[2].replace("}}", '},"by":"me"}')],
    "put in": lambda text: [*text[:2], text[1], *text[2:]],
    "moved": lambda text: [text[0], text[2], text[1], *text[3:]],
    "garbage": lambda text: [*text[:2], "{}\n", *text[3:]],
    "cut": lambda text: [*text[:2], f"{text[2][:20]}\n", *text[3:]],
}


def tamper(path: Path, what: str) -> None:
    """In place, so that the writers' handles stay those of the log; or, as ``sed -i``, by another
    file of its name."""
    content = "".join(CHANGES[what](path.read_text().splitlines(keepends=True)))
    other = path.with_suffix(".new") if "editor" in what else path
    other.write_text(content)
    other.chmod(0o600)
    other.rename(path)


@pytest.mark.parametrize("what", list(CHANGES)[:8])
@pytest.mark.parametrize("who", range(3))
def test_a_changed_end_shows_at_once_and_is_not_healed_by_the_next_line(
    path: Path, what: str, who: int, caplog: pytest.LogCaptureFixture
) -> None:
    breaks = list[int]()
    writers = list[AuditFile]()  # the one of the last line, one that knows the log, a new one
    for number in range(3):
        if number == 2:
            tamper(path, what)
            assert not whole(path)
        writers.insert(0, AuditFile(path, on_break=lambda: breaks.append(1)))
        if number < 2:
            writers[0].append([line(number + more) for more in range(number + 1)])
    for writer in (writers[who], *writers):  # whoever writes then, and said once
        assert writer.append([line(4)]) == 1
        assert not whole(path)
    assert (
        json.loads(path.read_text().splitlines()[-1])["what"]["number"] == 4
    )  # nothing new is lost
    assert (breaks, caplog.text.count("were changed or removed")) == ([1], 1)


def test_what_was_changed_in_the_middle_shows(path: Path) -> None:
    for what in list(CHANGES)[8:]:
        log_of(path, 5).close()
        tamper(path, what)
        assert not whole(path), what
        path.unlink()
        head_path(path).unlink()


def chain_again(path: Path) -> None:
    """As somebody who may write to everything and knows how: each ``prev`` anew, and the head
    file."""
    digest, texts = FIRST, list[bytes]()
    for written in path.read_bytes().splitlines():
        texts.append(
            json.dumps(json.loads(written) | {"prev": digest}, separators=(",", ":")).encode()
            + b"\n"
        )
        digest = digest_of(texts[-1])
    path.write_bytes(b"".join(texts))
    size = path.stat().st_size
    head_path(path).write_text(f"{digest} {size - len(texts[-1]):020} {size:020}\n")
    head_path(path).chmod(0o600)


@pytest.mark.parametrize("what", list(CHANGES)[:4])
@pytest.mark.parametrize("head", ["is gone", "was fitted"])
def test_with_its_head_file_changed_too_the_process_that_wrote_the_line_tells(
    path: Path, what: str, head: str
) -> None:
    file = log_of(path, 3)
    tamper(path, what)
    head_path(path).unlink()
    if head == "was fitted":
        chain_again(path)
        assert whole(path)
    file.append([line(4)])
    assert any("whose line before it is gone" in problem for problem in verify([path]).problems)


def test_every_changed_byte_shows(path: Path) -> None:
    log_of(path, 2).close()
    content = path.read_bytes()
    for index in range(len(content)):
        path.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        assert not whole(path), index


def test_what_is_gone_from_the_end_shows_by_a_digest_that_was_noted(path: Path) -> None:
    file = log_of(path, 3)
    noted = file.head
    file.append([line(3)])
    assert verify([path], noted).problems == []
    tamper(path, "cut off most")
    assert "removed from the end" in verify([path]).problems[0]
    head_path(path).unlink()
    assert whole(path)
    assert "removed from the end" in verify([path], noted).problems[0]


# What may happen to a log that nobody tampers with, at any moment between two lines.
HONEST = ("a", "b", "new", *ROTATIONS, "crash within a line", "crash before the head")


def act(folder: Path, what: str, number: int, writers: dict[str, AuditFile]) -> None:
    path = folder / "audit.jsonl"
    if what in ("a", "b"):
        writers.setdefault(what, AuditFile(path)).append(
            [line(number), line(number)][: 1 + number % 2]
        )
    elif what == "new" or not path.exists():
        log_of(path, 1, number).close()
    elif not what.startswith("crash"):
        rotate(path, folder / f"{number:04}", what)
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
        assert verify(files_of(folder)).problems == []
        check_every_change(files_of(folder))


def check_every_change(files: list[Path]) -> None:
    """Each whole line edited, removed, and swapped with the next one: verify finds it."""
    for index, path in enumerate(files):
        kept = path.read_bytes()
        lines = kept.splitlines(keepends=True)
        for number, text in enumerate(lines):
            if not text.endswith(b"}\n"):
                continue  # torn: it has no part in the chain
            before, after = lines[:number], lines[number + 1 :]
            ways = {
                "edited": [*before, text.replace(b'"done"', b'"gone"'), *after],
                "removed": before + after,
            }
            if after and after[0].endswith(b"}\n"):
                ways["swapped"] = [*before, after[0], text, *after[1:]]
            for way, content in ways.items():
                path.write_bytes(b"".join(content))
                result = verify(files)
                first = (way, index, number) == (
                    "removed",
                    0,
                    0,
                )  # as if it were in an earlier file
                assert result.problems or (first and (result.continues or not result.lines)), (
                    way,
                    index,
                    number,
                )
        path.write_bytes(kept)


def write(path: Path, seed: int, count: int, all_there: Any) -> None:
    draw, file = random.Random(seed), AuditFile(path)
    all_there.wait()
    while count:
        some = min(count, draw.randint(1, 4))
        file.append([line(count) for _ in range(some)], sync=draw.random() < 0.1)
        count -= some
        if draw.random() < 0.05:
            file.close()
            file = AuditFile(path)


def writing(path: Path, seeds: range, count: int) -> list[Any]:
    """Processes that write so many lines each, all at once."""
    all_there = FORK.Barrier(len(seeds) + 1)
    writers = [FORK.Process(target=write, args=(path, seed, count, all_there)) for seed in seeds]
    for writer in writers:
        writer.start()
    all_there.wait()
    return writers


@pytest.mark.parametrize("seed", range(3))
def test_processes_and_a_rotation_at_any_moment_make_one_chain(
    tmp_path: Path, path: Path, seed: int
) -> None:
    draw, rotations = random.Random(seed), 0
    writers = writing(path, range(10 * seed, 10 * seed + 3), 300)
    while any(writer.is_alive() for writer in writers):
        time.sleep(draw.random() * 0.02)
        if path.exists():
            path.rename(tmp_path / f"{rotations:04}")
            rotations += 1
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert whole(*files_of(tmp_path), lines=900, no_head=0)


@pytest.mark.parametrize("seed", range(3))
def test_processes_that_are_killed_leave_a_chain(tmp_path: Path, path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(4):
        writers = writing(
            path, range(100 * seed + 10 * number, 100 * seed + 10 * number + 2), 100_000
        )
        time.sleep(draw.random() * 0.1)
        for writer in writers:
            writer.kill()
            writer.join()
        log_of(path, 1).close()  # as the service begins again
        if number % 2:
            path.rename(tmp_path / f"{number:04}")
    assert whole(*files_of(tmp_path))
