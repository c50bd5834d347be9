"""When a decision is told, when a change may begin, and what is counted where the log cannot be
written."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from service.audit import auditor as module
from service.audit.auditor import Auditor, JudgedEvent, Who, decision, recorded
from service.audit.file import AuditFile, verify
from service.errors import AuditUnavailable
from tests.kit.audit import audit_lines, broken_log

WHO = Who("ann", "10.0.0.7")
pytestmark = pytest.mark.anyio


def made(number: int) -> Any:
    return decision(
        WHO,
        request_id=f"r{number}",
        route="/v1/risk/score",
        model="m",
        bundle="b:1",
        digest="sha256:0",
        policy="gate",
        threshold=0.5,
        prompts=[JudgedEvent(0, 0.75, "abstain", True)],
    )


class Watched:
    """A log, and what its auditor counts."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.path, self.counts = tmp_path / "audit.jsonl", Counter[str]()
        self.auditor = Auditor(
            self.path, count=lambda fate, number: self.counts.update({fate: number}), **options
        )

    async def decide(self, *numbers: int) -> None:
        for number in numbers:
            await self.auditor.decided(made(number))

    def lines(self) -> list[dict[str, Any]]:
        return audit_lines(self.path)


def check_events(log: Watched, **events: int) -> None:
    """A closed log holds these events beside its start and its end, and is whole."""
    result = verify([log.path])
    assert result.events == {"service.start": 1, "service.stop": 1} | events
    assert result.problems == []


async def test_a_decisions_line_is_there_when_it_is_told(tmp_path: Path) -> None:
    log = Watched(tmp_path)
    await log.decide(1)
    assert [line["event"] for line in log.lines()] == ["service.start", "decision"]
    assert set(log.lines()[1]) == {
        "prev",
        "time",
        "event",
        "key",
        "address",
        "by",
        "request_id",
        "route",
        "model",
        "bundle",
        "digest",
        "policy",
        "threshold",
        "prompts",
    }
    await asyncio.gather(*(log.auditor.decided(made(number)) for number in range(2, 600)))
    log.auditor.close()
    assert log.lines()[-1]["event"] == "service.stop"
    assert [line["request_id"] for line in log.lines()[1:-1]] == [
        f"r{number}" for number in range(1, 600)
    ]
    assert (log.counts, verify([log.path]).problems) == ({"written": 600}, [])


async def test_one_that_cannot_be_written_is_counted_and_the_next_line_says_so(
    tmp_path: Path,
) -> None:
    log = Watched(tmp_path)
    with broken_log(log.path):
        await log.decide(0, 1, 2)
    await log.decide(3)
    log.auditor.close()
    assert log.counts["missed"] == verify([log.path]).missed == 3
    assert [line.get("missed") for line in log.lines()] == [None, 3, None]


@pytest.mark.parametrize("required", [False, True])
async def test_lines_that_were_changed_are_counted_and_nothing_new_is_lost(
    tmp_path: Path, required: bool
) -> None:
    log = Watched(tmp_path, required=required)
    await log.decide(1)
    log.path.write_text(log.path.read_text().replace("abstain", "continue"))
    await log.decide(2, 3)
    assert log.counts == {"written": 3, "broken": 1}
    assert [line["request_id"] for line in log.lines()[1:]] == ["r1", "r2", "r3"]
    [problem] = verify([log.path]).problems
    assert "line 3 does not follow" in problem
    log.path.write_text("".join(log.path.read_text().splitlines(keepends=True)[:3]))
    log.auditor.close()
    again = Watched(tmp_path)  # while no service ran, too
    log.path.write_text(log.path.read_text().replace("service.stop", "service.halt"))
    again.auditor.close()
    assert log.counts["broken"] == 2


async def test_required_ones_are_refused_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("service.audit.file.os.fsync", synced.append)
    log = Watched(tmp_path, required=True)
    before = len(synced)
    await log.decide(1)
    assert len(synced) == before + 1
    with broken_log(log.path), pytest.raises(AuditUnavailable):
        await log.decide(2)
    assert log.counts == {"written": 1}  # a refused one is not missed: nobody was told
    task = asyncio.create_task(log.decide(3))
    await asyncio.sleep(0)
    task.cancel()  # whoever leaves is in the log all the same
    await asyncio.gather(task, return_exceptions=True)
    log.auditor.close()
    assert verify([log.path]).events["decision"] == 2


async def test_a_decision_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    monkeypatch.setattr(module, "MOST_WAITING", 4)
    log = Watched(tmp_path)
    hangs, real = asyncio.Event(), log.auditor._file.append
    loop, goes_on = asyncio.get_running_loop(), asyncio.run_coroutine_threadsafe

    def hanging(*args: Any, **options: Any) -> int:
        goes_on(hangs.wait(), loop).result()
        return real(*args, **options)

    monkeypatch.setattr(log.auditor._file, "append", hanging)
    await log.decide(0)
    monkeypatch.setattr(module, "WAIT_S", 3600)  # only the first one waits
    async with asyncio.timeout(60):
        await log.decide(*range(1, 8))  # one is being written, three wait, four are one too many
    assert log.counts == {"missed": 4}
    hangs.set()
    while log.auditor._queue:
        await asyncio.sleep(0.01)
    with pytest.raises(AssertionError, match="begun"):
        async with recorded(log.auditor, WHO, "test", {}):
            raise AssertionError("begun")
    await asyncio.to_thread(log.auditor.close)
    check_events(log, decision=4, test=2)
    assert verify([log.path]).missed == 4


async def test_a_change_is_on_disk_before_it_begins_and_told_how_it_ended(tmp_path: Path) -> None:
    log = Watched(tmp_path)
    async with recorded(log.auditor, WHO, "bundles.reload", {"before": "a:1"}) as change:
        assert log.lines()[-1]["outcome"] == "begun"
        change["after"] = "a:2"
    with pytest.raises(ValueError, match="broken"):
        async with recorded(log.auditor, WHO, "bundles.reload", {}):
            raise ValueError("broken bundle")
    begun, done, _, failed = log.lines()[1:]
    assert (begun["key"], begun["address"], begun["what"]) == ("ann", "10.0.0.7", {"before": "a:1"})
    assert (done["outcome"], done["what"]) == ("done", {"before": "a:1", "after": "a:2"})
    assert (failed["outcome"], failed["what"]) == ("failed", {"error": "ValueError: broken bundle"})
    with broken_log(log.path), pytest.raises(AuditUnavailable):
        async with recorded(log.auditor, WHO, "bundles.reload", {}):
            pytest.fail("it began")
    with ExitStack() as stack:  # what was done stays done
        async with recorded(log.auditor, WHO, "bundles.reload", {}):
            stack.enter_context(broken_log(log.path))
    log.auditor.close()
    async with recorded(None, WHO, "bundles.reload", {}):
        pass


async def test_refusals_in_a_row_are_told_of_until_a_line_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 3600)  # nothing tries by itself
    log = Watched(tmp_path, required=True)
    with broken_log(log.path):
        for number in range(module.MOST_REFUSED):
            assert log.auditor.refusing is None
            with pytest.raises(AuditUnavailable):
                await log.decide(number)
        assert f"cannot write the audit log {log.path}" in str(log.auditor.refusing)
    await log.decide(9)
    assert log.auditor.refusing is None
    log.auditor.close()
    check_events(log, decision=1)


async def test_a_disk_that_hangs_refuses_what_is_required_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Watched(tmp_path, required=True)
    goes_on = threading.Event()
    append = AuditFile.append
    monkeypatch.setattr(
        AuditFile,
        "append",
        lambda *given, **options: (goes_on.wait(60), append(*given, **options))[1],
    )
    monkeypatch.setattr(module, "REQUIRED_WAIT_S", 0.05)
    try:
        with pytest.raises(AuditUnavailable, match="hangs, or is too slow"):
            await log.decide(0)
        while log.auditor.refusing is None:
            await asyncio.sleep(0.01)
        assert "hangs, or is too slow" in log.auditor.refusing
        with pytest.raises(AuditUnavailable, match="hangs, or is too slow"):
            await log.decide(1)
        with pytest.raises(AuditUnavailable):
            async with recorded(log.auditor, WHO, "bundles.reload", {}):
                pytest.fail("it began")
        assert not log.auditor._queue, "nothing more is put before a disk that hangs"
        monkeypatch.setattr(module, "REQUIRED_WAIT_S", 3600)
    finally:
        goes_on.set()
    await log.decide(2)
    assert log.auditor.refusing is None
    log.auditor.close()
    check_events(log, decision=2)


async def test_a_log_that_was_mended_is_found_without_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    log = Watched(tmp_path, required=True)
    appended, append = 0, log.auditor._file.append

    def full(*_: Any, **__: Any) -> int:
        nonlocal appended
        appended += 1
        raise AuditUnavailable("cannot write the audit log: No space left on device")

    monkeypatch.setattr(log.auditor._file, "append", full)
    with pytest.raises(AuditUnavailable):
        await log.decide(1)
    async with asyncio.timeout(60):
        while appended < module.MOST_REFUSED + 1:  # it goes on trying
            await asyncio.sleep(0.01)
        assert "No space left" in (log.auditor.refusing or "")
        monkeypatch.setattr(log.auditor._file, "append", append)
        while log.auditor.refusing is not None:
            await asyncio.sleep(0.01)
    log.auditor.close()
    check_events(log, **{"audit.resume": 1})
    assert log.lines()[1]["what"] == {"refused": 1}


async def test_a_log_that_is_not_required_refuses_nothing_and_tries_nothing(tmp_path: Path) -> None:
    log = Watched(tmp_path)
    with broken_log(log.path):
        await log.decide(*range(module.MOST_REFUSED + 1))
        assert (log.auditor.refusing, log.auditor.wake_s()) == (None, None)
    log.auditor.close()
