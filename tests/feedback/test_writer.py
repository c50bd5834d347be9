"""The thread that writes: nobody is told before a label is on disk, and nothing that fails stops it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
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


def test_a_label_is_on_disk_when_it_is_acknowledged(where: Location) -> None:
    with writing(where) as (made, counted):
        for number in range(30):
            made.record([answer(f"r{number:02}")])  # still waits when its label comes
            stored = made.label(given(f"r{number:02}")).result(20)
            assert stored is not None
            assert rows(where, LABELS) == [(number + 1,)]
        assert made.label(given("none")).result(20) is None
        until(lambda: counted == {"stored": 30})


def test_what_could_not_be_committed_is_not_acknowledged(file: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, whole = [True], databases.Database.transaction

    @contextmanager
    def transaction(self: Any) -> Iterator[None]:
        with whole(self):
            yield
            if broken[0]:
                raise FeedbackUnavailable("the disk is full")

    with writing(file) as (made, counted):
        monkeypatch.setattr(databases.Database, "transaction", transaction)
        monkeypatch.setattr(databases, "_prepare", lambda *_: None)
        made.record([answer()])
        with pytest.raises(FeedbackUnavailable, match="cannot be written just now"):
            made.label(given()).result(20)
        assert counted == {}
        broken[0] = False
        until(lambda: counted == {"stored": 1})  # the answer waited
        assert made.label(given()).result(20) is not None
    assert rows(file, STORED) == [("r1",)]


def test_answers_wait_while_the_database_is_busy_and_labels_fail(file: Location) -> None:
    with writing(file) as (made, counted):
        with locked(file):
            made.record([answer()])
            with pytest.raises(FeedbackUnavailable):
                made.label(given()).result(20)
            made.record([answer("r2")])
        until(lambda: counted == {"stored": 2})
        assert made.label(given()).result(20) is not None


def test_a_server_that_crashes_and_comes_back(server: Postgres) -> None:
    where = location(server.schema("crashes"))
    with writing(where) as (made, counted):
        made.record([answer()])
        assert made.label(given()).result(20) is not None
        server.stop()
        made.record([answer("r2")])
        with pytest.raises(FeedbackUnavailable):
            made.label(given("r2")).result(20)
        server.start()
        until(lambda: counted == {"stored": 2})
        assert made.label(given("r2")).result(20) is not None
        assert counted == {"stored": 2}
    assert rows(where, STORED) == [("r1",), ("r2",)]
    assert rows(where, LABELS) == [(2,)]


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


def test_a_row_that_no_database_takes_is_dropped_and_the_thread_goes_on(where: Location) -> None:
    with writing(where) as (made, counted):
        made.record([answer(model="half \ud800")])
        until(lambda: counted == {"dropped": 1})
        made.record([answer("fine")])
        assert made.label(given("fine")).result(20) is not None


def test_closing_writes_what_waits(where: Location) -> None:
    with writing(where) as (made, counted):
        made.record([answer(f"r{number}") for number in range(1_200)])  # several transactions
        waiting = made.label(given("r7"))
    assert counted == {"stored": 1_200}
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


def test_whoever_leaves_before_the_label_is_written_stops_nothing(file: Location) -> None:
    with writing(file) as (made, _):
        with locked(file):
            made.record([answer()])
            with pytest.raises(FeedbackUnavailable):  # from here on the thread waits for its next attempt
                made.label(given()).result(20)
            left = [made.label(given(label="hallucinated")) for _ in range(20)]
            for waiting in left:
                waiting.cancel()
        assert made.label(given()).result(20) is not None


def test_old_answers_are_deleted_without_being_asked(file: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "DELETE_EVERY_S", 0.05)
    now = time.time()
    with writing(file, days=2) as (made, _):
        made.record([answer("new"), answer("old", time=now - 2.1 * 86_400), answer("kept", time=now - 1.9 * 86_400)])
        until(lambda: rows(file, STORED) == [("kept",), ("new",)])
    with writing(file) as (made, _):  # without days nothing is
        made.record([answer("old", time=now - 1e9)])
    assert len(rows(file, STORED)) == 3


DAY, HOUR = 86_400.0, 3_600.0


class Clock:
    """The machine's clock, which may be wrong, and the time that passes."""

    def __init__(self) -> None:
        self.ahead, self.passed = 0.0, 0.0

    def time(self) -> float:
        return 1.9e9 + self.passed + self.ahead

    def monotonic(self) -> float:
        return 5.0 + self.passed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(writer, "time", made)
    return made


def kept(where: Location, clock: Clock, hours: float = 0) -> list[str]:
    """What is left after a service ran for so long, and was asked all the time."""
    with writing(where, days=30) as (made, counted):
        for number in range(1 + round(2 * hours)):
            clock.passed += HOUR / 2 * (number > 0)
            for again in range(2):  # when the second is stored, what was to be deleted after the first is
                made.record([answer("asked", time=clock.time())])
                until(lambda stored=2 * number + again + 1: counted == {"stored": stored})  # type: ignore[misc]
    return [name for (name,) in rows(where, STORED) if name != "asked"]


def put_in(where: Location, *answers: Any) -> None:
    opened = where.open()
    put(opened, *answers)
    opened.close()


def test_a_clock_that_is_ahead_at_the_start_deletes_nothing(where: Location, clock: Clock) -> None:
    kept(where, clock)  # as a service that was asked yesterday
    young = [answer(f"a{number}", time=clock.time() - number) for number in range(800)]
    put_in(where, *young)
    clock.ahead = 40 * DAY
    for _ in range(3):  # started again and again, and answers get wrong dates
        assert len(kept(where, clock)) == 800
    assert len(kept(where, clock, hours=5)) == 800
    clock.ahead = 0
    assert len(kept(where, clock, hours=1)) == 800


def test_a_database_that_never_deleted_is_not_believed_to_be_older_than_its_newest_answer(
    where: Location, clock: Clock
) -> None:
    put_in(where, answer("old", time=clock.time() - 31 * DAY), answer("new", time=clock.time()))
    clock.ahead = 40 * DAY
    assert kept(where, clock) == ["new"]


def test_an_hour_under_a_wrong_clock_deletes_a_day_early_and_not_more(where: Location, clock: Clock) -> None:
    kept(where, clock)
    days = [answer(f"{day:02}", time=clock.time() - day * DAY - HOUR) for day in range(30)]
    put_in(where, *days)
    clock.ahead = 4_000 * DAY
    assert kept(where, clock, hours=1) == [f"{day:02}" for day in range(29)]
    clock.ahead = 0
    assert kept(where, clock, hours=1) == [f"{day:02}" for day in range(29)]
    clock.ahead = 4_000 * DAY  # the hour in between has made up for it
    assert kept(where, clock, hours=1) == [f"{day:02}" for day in range(29)]


def test_after_a_stop_what_is_old_goes_an_hour_for_each_day_of_it(where: Location, clock: Clock) -> None:
    kept(where, clock)
    put_in(where, *(answer(f"{day:02}", time=clock.time() - day * DAY - HOUR) for day in range(30)))
    clock.passed += 10 * DAY  # no service ran
    assert kept(where, clock, hours=2) != [f"{day:02}" for day in range(20)]
    assert kept(where, clock, hours=9) == [f"{day:02}" for day in range(20)]


def test_a_clock_that_was_behind_at_the_start_stops_no_deleting(where: Location, clock: Clock) -> None:
    clock.ahead = -1.9e9  # as of a machine without a battery
    assert kept(where, clock) == []
    opened = where.open()
    opened.run("DELETE FROM hallutracer_answers")
    put(opened, *(answer(f"{day:02}", time=clock.time() - clock.ahead - day * DAY - HOUR) for day in range(40)))
    opened.close()
    clock.ahead = 0
    assert kept(where, clock, hours=41) == [f"{day:02}" for day in range(29)]


def test_answers_are_written_in_batches(file: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []
    whole: Callable[[Database], Any] = databases.Database.transaction

    def transaction(self: Any) -> Any:
        began.append(1)
        return whole(self)

    with writing(file) as (made, counted):
        monkeypatch.setattr(databases.Database, "transaction", transaction)
        for number in range(400):
            made.record([answer(f"r{number}")])
        until(lambda: counted == {"stored": 400})
    assert len(began) < 100
