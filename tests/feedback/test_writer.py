"""The thread that writes: nobody is told before a label is on disk, and nothing that fails stops
it."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from service.errors import FeedbackUnavailable, Overloaded
from service.feedback import databases, writer
from service.feedback.databases import Database, Location, location
from service.feedback.writer import Writer
from tests.kit.feedback import answer, given, put, rows
from tests.kit.postgres import Postgres
from tests.running import until

FORK = multiprocessing.get_context("fork")
STORED = "SELECT request_id FROM hallutracer_answers ORDER BY request_id"
LABELS = "SELECT COUNT(*) FROM hallutracer_labels"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "AGAIN_S", 0.05)
    monkeypatch.setattr(databases, "BUSY_S", 0.05)


@contextmanager
def writing(where: Location, **options: Any) -> Iterator[tuple[Writer, Counter[str]]]:
    counted: Counter[str] = Counter()
    thread = Writer(where, count=lambda fate, number: counted.update({fate: number}), **options)
    try:
        yield thread, counted
    finally:
        thread.close()


@pytest.fixture
def file(tmp_path: Path) -> Location:
    return location(str(tmp_path / "feedback.db"))


@contextmanager
def locked(where: Location) -> Iterator[None]:
    """Another process writes, and takes its time."""
    other = where.open()
    with other.transaction():
        yield
    other.close()


def labels(thread: Writer, request_id: str = "r1") -> None:
    assert thread.label(given(request_id)).result(20) is not None


def refuses(thread: Writer, request_id: str = "r1") -> None:
    with pytest.raises(FeedbackUnavailable):
        thread.label(given(request_id)).result(20)


def test_a_label_is_on_disk_when_it_is_acknowledged(where: Location) -> None:
    with writing(where) as (thread, counted):
        for number in range(30):
            thread.record([answer(f"r{number:02}")])  # still waits when its label comes
            labels(thread, f"r{number:02}")
            assert rows(where, LABELS) == [(number + 1,)]
        assert thread.label(given("none")).result(20) is None
        until(lambda: counted == {"stored": 30})
        thread.record(
            [answer(model="half \ud800")]
        )  # no database takes it: dropped, and the thread goes on
        until(lambda: counted == {"stored": 30, "dropped": 1})
        thread.record([answer("fine")])
        labels(thread, "fine")


def label_until_killed(where: Location, told: Any) -> None:
    with writing(where) as (thread, _):
        for number in count():
            thread.record([answer(f"r{number}")])
            labels(thread, f"r{number}")
            told.send(f"r{number}")


def test_a_kill_loses_nothing_that_was_acknowledged(file: Location) -> None:
    heard, told = FORK.Pipe(duplex=False)
    process = FORK.Process(target=label_until_killed, args=(file, told))
    process.start()
    told.close()
    said = [heard.recv() for _ in range(50)]
    process.kill()
    process.join()
    with suppress(EOFError, OSError):
        while True:
            said.append(heard.recv())
    results = [
        name
        for (name,) in rows(
            file,
            "SELECT request_id FROM hallutracer_answers JOIN hallutracer_labels ON answer = uid",
        )
    ]
    assert set(said) <= set(results)
    assert len(set(results)) == len(results) <= len(said) + 1
    with writing(file) as (thread, _):  # it goes on where it was
        again = thread.label(given("r0")).result(20)
        assert again is not None
        assert again.standing == "repeated"


def test_what_could_not_be_committed_is_not_acknowledged(
    file: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, whole = [True], Database.transaction

    @contextmanager
    def transaction(self: Any) -> Iterator[None]:
        with whole(self):
            yield
            if broken[0]:
                raise FeedbackUnavailable("the disk is full")

    with writing(file) as (thread, counted):
        monkeypatch.setattr(Database, "transaction", transaction)
        monkeypatch.setattr(databases, "_prepare", lambda *_: None)
        thread.record([answer()])
        refuses(thread)
        assert counted == {}
        broken[0] = False
        until(lambda: counted == {"stored": 1})  # the answer waited
        labels(thread)
    assert rows(file, STORED) == [("r1",)]


def test_answers_wait_while_the_database_is_busy_and_labels_fail(file: Location) -> None:
    with writing(file) as (thread, counted):
        with locked(file):
            thread.record([answer()])
            refuses(thread)  # from here on the thread waits for its next attempt
            thread.record([answer("r2")])
            left = [thread.label(given(label="hallucinated")) for _ in range(20)]
            for waiting in left:  # whoever leaves before the label is written stops nothing
                waiting.cancel()
        until(lambda: counted == {"stored": 2})
        labels(thread)


def test_a_server_that_crashes_and_comes_back(server: Postgres) -> None:
    where = location(server.schema("crashes"))
    with writing(where) as (thread, counted):
        thread.record([answer()])
        labels(thread)
        server.stop()
        thread.record([answer("r2")])
        refuses(thread, "r2")
        server.start()
        until(lambda: counted == {"stored": 2})
        labels(thread, "r2")
    assert (counted, rows(where, STORED), rows(where, LABELS)) == (
        {"stored": 2},
        [("r1",), ("r2",)],
        [(2,)],
    )


def test_a_full_queue_drops_answers_and_refuses_labels(file: Location) -> None:
    with writing(file, most_bytes=100_000) as (thread, counted):
        with locked(file):
            thread.record(
                [answer(name, prompt="x" * 90_000) for name in ("long", "longer")]
            )  # it waits for nobody
            assert counted == {"dropped": 1}
            thread.record([answer(f"s{number}") for number in range(10)])
            assert counted == {"dropped": 2}
            with pytest.raises(Overloaded):
                thread.label(given())
        until(lambda: counted == {"dropped": 2, "stored": 10})
        labels(thread, "long")  # there is room again
        for number in range(20):
            thread.record([answer(f"t{number:02}")])
            until(lambda expected=11 + number: counted["stored"] == expected)  # type: ignore[misc]


def test_closing_writes_what_waits_in_batches(
    where: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, whole = [], Database.transaction
    with writing(where) as (thread, counted):
        monkeypatch.setattr(Database, "transaction", lambda self: (began.append(1), whole(self))[1])
        for number in range(1_200):  # several transactions
            thread.record([answer(f"r{number}")])
        waiting = thread.label(given("r7"))
    assert counted == {"stored": 1_200}
    assert len(began) < 100
    assert waiting.result(0) is not None
    assert rows(where, LABELS) == [(1,)]
    with pytest.raises(FeedbackUnavailable, match="shutting down"):
        thread.label(given("r7"))
    thread.record([answer("late")])
    assert counted == {"stored": 1_200, "dropped": 1}


def test_closing_with_a_database_that_is_gone_leaves_nobody_waiting(
    file: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CLOSING_S", 0.2)
    with writing(file) as (thread, counted), locked(file):
        thread.record([answer()])
        waiting = thread.label(given())
        thread.close()
        with pytest.raises(FeedbackUnavailable):
            waiting.result(20)
        until(lambda: counted == {"dropped": 1})


def test_old_answers_are_deleted_without_being_asked(
    file: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "DELETE_EVERY_S", 0.05)
    now = time.time()
    with writing(file, days=2) as (thread, _):
        thread.record(
            [
                answer("new"),
                answer("old", time=now - 2.1 * 86_400),
                answer("kept", time=now - 1.9 * 86_400),
            ]
        )
        until(lambda: rows(file, STORED) == [("kept",), ("new",)])
    with writing(file) as (thread, _):  # without days nothing is
        thread.record([answer("old", time=now - 1e9)])
    assert len(rows(file, STORED)) == 3


class Clock:
    """The machine's clock, which may be wrong, and the time that passes; a service over one
    database."""

    def __init__(self, where: Location) -> None:
        self.ahead = 0.0
        self.passed = 0.0
        self.where = where

    def time(self) -> float:
        return 1.9e9 + self.passed + self.ahead

    def monotonic(self) -> float:
        return 5.0 + self.passed

    def kept(self, hours: float = 0) -> list[str]:
        """What is left after a service ran for so long, and was asked all the time."""
        with writing(self.where, days=30) as (thread, counted):
            for number in range(1 + round(2 * hours)):
                self.passed += HOUR / 2 * (number > 0)
                # When the second is stored, what was to be deleted after the first is.
                for stored in (2 * number + 1, 2 * number + 2):
                    thread.record([answer("asked", time=self.time())])
                    until(lambda stored=stored: counted == {"stored": stored})  # type: ignore[misc]
        return [name for (name,) in rows(self.where, STORED) if name != "asked"]


DAY, HOUR = 86_400.0, 3_600.0
ALL = [
    f"{day:02}" for day in range(30)
]  # answers are named after their age in days, and are an hour older
# How far the clock is ahead while a service runs before there are answers (None: none runs); their
# ages in days; and step by step the clock, days without a service, hours with one, and what is
# kept.
CLOCKS: dict[
    str, tuple[float | None, Sequence[float], list[tuple[float, float, float, list[str]]]]
] = {
    "ahead at each start: deletes nothing": (
        0,
        [-1 / 24] * 30,
        [
            (40, 0, 0, ["00"] * 30),
            (40, 0, 0, ["00"] * 30),
            (40, 0, 5, ["00"] * 30),
            (0, 0, 1, ["00"] * 30),
        ],
    ),
    "never deleted: no older than its newest answer": (None, [31, -1 / 24], [(40, 0, 0, ["00"])]),
    "an hour ahead: a day early, and the hour in between makes up for it": (
        0,
        range(30),
        [(4_000, 0, 1, ALL[:29]), (0, 0, 1, ALL[:29]), (4_000, 0, 1, ALL[:29])],
    ),
    "a stop: an hour for each day of it": (
        0,
        range(30),
        [(0, 10, 2, ALL[:28]), (0, 0, 9, ALL[:20])],
    ),
    "behind at the start, as without a battery: stops no deleting": (
        -1.9e9 / DAY,
        range(32),
        [(0, 0, 33, ALL[:29])],
    ),
}


@pytest.mark.parametrize(
    ("where", "case"),
    [*(("sqlite", case) for case in CLOCKS), ("postgresql", list(CLOCKS)[2])],
    indirect=["where"],
)
def test_answers_age_by_any_clock(
    where: Location, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, ages, steps = CLOCKS[case]
    clock = Clock(where)
    monkeypatch.setattr(writer, "time", clock)
    if before is not None:
        clock.ahead = before * DAY
        assert clock.kept() == []
    opened = where.open()
    opened.run("DELETE FROM hallutracer_answers")
    now = clock.time() - min(clock.ahead, 0.0)
    put(opened, *(answer(f"{int(age + 1 / 24):02}", time=now - age * DAY - HOUR) for age in ages))
    opened.close()
    for ahead, stopped, hours, kept in steps:
        clock.ahead = ahead * DAY
        clock.passed += stopped * DAY
        assert clock.kept(hours) == kept
