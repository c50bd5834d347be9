"""The thread that writes: nobody is told before a label is on disk, and nothing that fails stops it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.errors import FeedbackUnavailable, Overloaded
from service.feedback import databases, writer
from service.feedback.databases import Database, Location, location
from service.feedback.writer import Writer
from tests.feedback.made import answer, given, put, rows
from tests.feedback.postgres import Postgres
from tests.running import until

STORED = "SELECT request_id FROM hallutracer_answers ORDER BY request_id"
LABELS = "SELECT COUNT(*) FROM hallutracer_labels"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "AGAIN_S", 0.05)
    monkeypatch.setattr(databases, "BUSY_S", 0.05)


@contextmanager
def writing(where: Location, **options: Any) -> Iterator[tuple[Writer, Counter[str]]]:
    counted: Counter[str] = Counter()
    made = Writer(where, count=lambda fate, number: counted.update({fate: number}), **options)
    try:
        yield made, counted
    finally:
        made.close()


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


def refuses(made: Writer, request_id: str = "r1") -> None:
    with pytest.raises(FeedbackUnavailable):
        made.label(given(request_id)).result(20)


def test_a_label_is_on_disk_when_it_is_acknowledged(where: Location) -> None:
    with writing(where) as (made, counted):
        for number in range(30):
            made.record([answer(f"r{number:02}")])  # still waits when its label comes
            assert made.label(given(f"r{number:02}")).result(20) is not None
            assert rows(where, LABELS) == [(number + 1,)]
        assert made.label(given("none")).result(20) is None
        until(lambda: counted == {"stored": 30})
        made.record([answer(model="half \ud800")])  # no database takes it: dropped, and the thread goes on
        until(lambda: counted == {"stored": 30, "dropped": 1})
        made.record([answer("fine")])
        assert made.label(given("fine")).result(20) is not None


def test_what_could_not_be_committed_is_not_acknowledged(file: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, whole = [True], Database.transaction

    @contextmanager
    def transaction(self: Any) -> Iterator[None]:
        with whole(self):
            yield
            if broken[0]:
                raise FeedbackUnavailable("the disk is full")

    with writing(file) as (made, counted):
        monkeypatch.setattr(Database, "transaction", transaction)
        monkeypatch.setattr(databases, "_prepare", lambda *_: None)
        made.record([answer()])
        refuses(made)
        assert counted == {}
        broken[0] = False
        until(lambda: counted == {"stored": 1})  # the answer waited
        assert made.label(given()).result(20) is not None
    assert rows(file, STORED) == [("r1",)]


def test_answers_wait_while_the_database_is_busy_and_labels_fail(file: Location) -> None:
    with writing(file) as (made, counted):
        with locked(file):
            made.record([answer()])
            refuses(made)  # from here on the thread waits for its next attempt
            made.record([answer("r2")])
            left = [made.label(given(label="hallucinated")) for _ in range(20)]
            for waiting in left:  # whoever leaves before the label is written stops nothing
                waiting.cancel()
        until(lambda: counted == {"stored": 2})
        assert made.label(given()).result(20) is not None


def test_a_server_that_crashes_and_comes_back(server: Postgres) -> None:
    where = location(server.schema("crashes"))
    with writing(where) as (made, counted):
        made.record([answer()])
        assert made.label(given()).result(20) is not None
        server.stop()
        made.record([answer("r2")])
        refuses(made, "r2")
        server.start()
        until(lambda: counted == {"stored": 2})
        assert made.label(given("r2")).result(20) is not None
    assert (counted, rows(where, STORED), rows(where, LABELS)) == ({"stored": 2}, [("r1",), ("r2",)], [(2,)])


def test_a_full_queue_drops_answers_and_refuses_labels(file: Location) -> None:
    with writing(file, most_bytes=3_500) as (made, counted):
        with locked(file):
            began = time.monotonic()
            made.record([answer(f"r{number}") for number in range(5)])
            assert time.monotonic() - began < 10  # it waits for nobody
            assert counted == {"dropped": 2}
            with pytest.raises(Overloaded):
                made.label(given())
        until(lambda: counted == {"dropped": 2, "stored": 3})
        assert made.label(given()).result(20) is not None  # there is room again
        for number in range(20):
            made.record([answer(f"s{number:02}")])
            until(lambda expected=4 + number: counted["stored"] == expected)  # type: ignore[misc]


def test_a_prompt_counts_by_its_length(file: Location) -> None:
    with writing(file, most_bytes=100_000) as (made, counted):
        with locked(file):
            made.record([answer("long", prompt="x" * 90_000), answer("longer", prompt="x" * 90_000), answer("short")])
        until(lambda: counted == {"dropped": 1, "stored": 2})
    assert rows(file, STORED) == [("long",), ("short",)]


def test_closing_writes_what_waits_in_batches(where: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    began, whole = [], Database.transaction
    with writing(where) as (made, counted):
        monkeypatch.setattr(Database, "transaction", lambda self: (began.append(1), whole(self))[1])
        for number in range(1_200):  # several transactions
            made.record([answer(f"r{number}")])
        waiting = made.label(given("r7"))
    assert counted == {"stored": 1_200}
    assert len(began) < 100
    assert waiting.result(0) is not None
    assert rows(where, LABELS) == [(1,)]
    with pytest.raises(FeedbackUnavailable, match="shutting down"):
        made.label(given("r7"))
    made.record([answer("late")])
    assert counted == {"stored": 1_200, "dropped": 1}


def test_closing_with_a_database_that_is_gone_leaves_nobody_waiting(
    file: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CLOSING_S", 0.2)
    with writing(file) as (made, counted), locked(file):
        made.record([answer()])
        waiting = made.label(given())
        made.close()
        with pytest.raises(FeedbackUnavailable):
            waiting.result(20)
        until(lambda: counted == {"dropped": 1})


DAY, HOUR = 86_400.0, 3_600.0
ALL = [f"{day:02}" for day in range(30)]


def test_old_answers_are_deleted_without_being_asked(file: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "DELETE_EVERY_S", 0.05)
    now = time.time()
    with writing(file, days=2) as (made, _):
        made.record([answer("new"), answer("old", time=now - 2.1 * DAY), answer("kept", time=now - 1.9 * DAY)])
        until(lambda: rows(file, STORED) == [("kept",), ("new",)])
    with writing(file) as (made, _):  # without days nothing is
        made.record([answer("old", time=now - 1e9)])
    assert len(rows(file, STORED)) == 3


class Clock:
    """The machine's clock, which may be wrong, and the time that passes; a service over one database."""

    def __init__(self, where: Location) -> None:
        self.ahead, self.passed, self.where = 0.0, 0.0, where

    def time(self) -> float:
        return 1.9e9 + self.passed + self.ahead

    def monotonic(self) -> float:
        return 5.0 + self.passed

    def put(self, *ages: float) -> None:
        """Answers of so many seconds, named after their days."""
        opened = self.where.open()
        now = self.time() - min(self.ahead, 0.0)
        put(opened, *(answer(f"{int(age // DAY):02}", time=now - age) for age in ages))
        opened.close()

    def kept(self, hours: float = 0) -> list[str]:
        """What is left after a service ran for so long, and was asked all the time."""
        with writing(self.where, days=30) as (made, counted):
            for number in range(1 + round(2 * hours)):
                self.passed += HOUR / 2 * (number > 0)
                for again in range(2):  # when the second is stored, what was to be deleted after the first is
                    made.record([answer("asked", time=self.time())])
                    until(lambda stored=2 * number + again + 1: counted == {"stored": stored})  # type: ignore[misc]
        return [name for (name,) in rows(self.where, STORED) if name != "asked"]


@pytest.fixture
def clock(where: Location, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(where)
    monkeypatch.setattr(writer, "time", made)
    return made


def test_a_clock_that_is_ahead_at_the_start_deletes_nothing(clock: Clock) -> None:
    clock.kept()  # as a service that was asked yesterday
    clock.put(*range(800))
    clock.ahead = 40 * DAY
    for hours in (0, 0, 0, 5):  # started again and again, and answers get wrong dates
        assert len(clock.kept(hours)) == 800
    clock.ahead = 0
    assert len(clock.kept(1)) == 800


def test_a_database_that_never_deleted_is_not_believed_to_be_older_than_its_newest_answer(clock: Clock) -> None:
    clock.put(31 * DAY, 0)
    clock.ahead = 40 * DAY
    assert clock.kept() == ["00"]


def test_an_hour_under_a_wrong_clock_deletes_a_day_early_and_not_more(clock: Clock) -> None:
    clock.kept()
    clock.put(*(day * DAY + HOUR for day in range(30)))
    for ahead in (4_000 * DAY, 0, 4_000 * DAY):  # the hour in between makes up for it
        clock.ahead = ahead
        assert clock.kept(1) == ALL[:29]


def test_after_a_stop_what_is_old_goes_an_hour_for_each_day_of_it(clock: Clock) -> None:
    clock.kept()
    clock.put(*(day * DAY + HOUR for day in range(30)))
    clock.passed += 10 * DAY  # no service ran
    assert clock.kept(2) != ALL[:20]
    assert clock.kept(9) == ALL[:20]


def test_a_clock_that_was_behind_at_the_start_stops_no_deleting(clock: Clock) -> None:
    clock.ahead = -1.9e9  # as of a machine without a battery
    assert clock.kept() == []
    opened = clock.where.open()
    opened.run("DELETE FROM hallutracer_answers")
    opened.close()
    clock.put(*(day * DAY + HOUR for day in range(40)))
    clock.ahead = 0
    assert clock.kept(41) == ALL[:29]
