"""What is stored, by SQLite and by a real PostgreSQL: labels that repeat, conflict and come
late."""

from __future__ import annotations

import sqlite3
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from service.errors import FeedbackUnavailable, HalluTracerError, RequestError
from service.feedback import rows as module
from service.feedback.databases import Database, Location, Refused, location
from service.feedback.rows import (
    Stored,
    Tally,
    delete_before,
    read_answers,
    tally_of,
    to_label,
    write_answers,
)
from tests.kit.feedback import PROBES, answer, put, rows, say
from tests.kit.postgres import Postgres

Patch = pytest.MonkeyPatch
LABELS = "SELECT caller, label, comment FROM hallutracer_labels ORDER BY number"
ANSWERS = "SELECT request_id FROM hallutracer_answers"


@pytest.fixture
def database(where: Location) -> Iterator[Database]:
    opened = where.open()
    yield opened
    opened.close()


def said(
    database: Database, request_id: str = "r1", label: str = "factual", **changes: object
) -> Stored:
    stored = say(database, request_id, label, **changes)
    assert stored is not None
    return stored


def told(
    database: Database, label: str = "factual", caller: str = "ann", **changes: object
) -> tuple[str, bool]:
    stored = said(database, label=label, caller=caller, any_caller=True, **changes)
    return stored.standing, stored.conflict


def verdicts(database: Database) -> list[tuple[int | None, bool, bool]]:
    return [
        (read_answer.label, read_answer.conflict, read_answer.unclear)
        for read_answer in read_answers(database, PROBES)
    ]


def test_a_label_is_stored_beside_what_was_answered(database: Database, where: Location) -> None:
    put(database, answer(flagged=True, decision="abstain"), answer(index=1))
    assert said(database, comment="'; ? %s é 😀") == Stored(
        "new", False, "abstain", True, "m", "one:1"
    )
    assert said(database, index=1) == Stored("new", False, "continue", False, "m", "one:1")
    assert rows(where, LABELS) == [("ann", "factual", "'; ? %s é 😀"), ("ann", "factual", None)]
    [first, second] = read_answers(database, PROBES)
    assert (first.signals, first.risk, first.label, first.usable) == (
        {"depth_mean": 0.125},
        0.25,
        1,
        False,
    )
    assert second.usable
    assert read_answers(database, "others") == []
    for changes in (
        {"caller": "bob"},
        {"index": 2},
        {"request_id": "r2"},
    ):  # no answer, or one to somebody else
        assert say(database, **changes) is None
    assert len(rows(where, LABELS)) == 2
    with pytest.raises(Refused):
        database.run(
            "INSERT INTO hallutracer_labels (answer, caller, label, time) VALUES ('none', 'a',"
            " 'factual', 1)"
        )


def test_the_last_label_counts_and_history_is_kept(
    database: Database, where: Location, monkeypatch: Patch
) -> None:
    put(database, answer())
    for label, standing in (
        ("factual", "new"),
        ("factual", "repeated"),
        ("hallucinated", "changed"),
        ("unclear", "changed"),
        ("hallucinated", "changed"),
    ):
        assert told(database, label) == (standing, False)
    assert [label for _, label, _ in rows(where, LABELS)] == [
        "factual",
        "hallucinated",
        "unclear",
        "hallucinated",
    ]
    assert verdicts(database) == [(0, False, False)]
    assert told(database, "unclear") == ("changed", False)
    assert verdicts(database) == [(None, False, True)]  # taken back
    assert told(database, "unclear", comment="why") == ("repeated", False)
    assert rows(where, LABELS)[-1] == ("ann", "unclear", "why")  # a comment is never lost
    monkeypatch.setattr(module, "MOST_LABELS", 6)  # one caller cannot fill the disk with one answer
    with pytest.raises(RequestError, match="6 labels of yours"):
        say(database, label="hallucinated")
    assert told(database, "unclear") == ("repeated", False)  # saying the same again costs nothing
    assert len(rows(where, LABELS)) == 6


def test_callers_may_disagree_and_agree_again(database: Database) -> None:
    put(database, answer())
    for label, caller, standing, conflict, verdict in (
        ("factual", "ann", "new", False, (1, False, False)),
        ("hallucinated", "bob", "new", True, (None, True, False)),
        ("unclear", "eve", "new", False, (None, True, False)),
        ("hallucinated", "ann", "changed", False, (0, False, False)),
    ):
        assert told(database, label, caller) == (standing, conflict)
        assert verdicts(database) == [verdict]


def test_drawn_answers_are_counted_once_for_each_prompt(database: Database) -> None:
    put(
        database,
        *(
            answer(f"r{number}", mark=f"m{number % 4}", time=float(number), drawn=True)
            for number in range(8)
        ),
    )
    put(
        database,
        answer("not", mark="m9", time=2.0),
        answer("other", mark="m8", digest="sha256:cd", drawn=True),
    )
    assert tally_of(database, "sha256:ab") == Tally(0, 0, 0)
    assert said(database, "not", "hallucinated") == Stored(
        "new", False, "continue", False, "m", "one:1"
    )  # no tally
    first = said(database, "r1", "hallucinated")
    assert (first.drawn, first.tally) == (
        True,
        Tally(2, 1, 1),
    )  # m0 came before it; m2 and m3 nobody has come to
    assert said(database, "r5", "hallucinated").tally == Tally(4, 1, 1)  # the same prompt
    assert said(database, "r5", "hallucinated").tally is None  # nothing new
    assert tally_of(database, "sha256:cd") == Tally(0, 0, 0)
    put(
        database,
        *(
            answer(f"x{number}", mark=f"x{number}", time=number, drawn=True, digest="x")
            for number in range(3)
        ),
    )
    # Callers who disagree and who cannot tell leave an answer right.
    for name, label, caller in (
        ("x0", "hallucinated", "ann"),
        ("x0", "factual", "eve"),
        ("x1", "unclear", "ann"),
        ("x2", "factual", "ann"),
        ("x2", "hallucinated", "ann"),
    ):
        say(database, name, label, caller=caller, any_caller=True)
    assert tally_of(database, "x") == Tally(3, 1, 1)


def test_what_waits_for_a_label_is_listed_oldest_first(database: Database) -> None:
    put(
        database,
        answer("new", mark="a", time=9.0, drawn=True, prompt='{"prompt": "why"}'),
        answer("old", mark="b", time=1.0, drawn=True, index=2),
        answer("again", mark="b", time=2.0, drawn=True),
        answer("said", mark="c", time=3.0, drawn=True),
        answer("twin", mark="c", time=0.0, drawn=True),
        answer("not", mark="d", time=4.0),
    )
    say(database, "said")
    assert list(to_label(database)) == [
        {"id": "old", "index": 2, "time": 1.0, "bundle": "one:1"},
        {"id": "new", "index": 0, "time": 9.0, "bundle": "one:1", "given": {"prompt": "why"}},
    ]


def test_an_id_that_was_used_twice_is_the_callers_own_and_the_last(database: Database) -> None:
    """Clients may choose the ids of their requests."""
    now = time.time()
    put(
        database,
        answer(time=now, bundle="mine:1"),
        answer(time=now + 1, bundle="mine:2"),
        answer(time=now + 2, bundle="theirs:1", caller="bob"),
    )
    for caller, others, bundle in (
        ("ann", False, "mine:2"),
        ("ann", True, "mine:2"),
        ("eve", True, "theirs:1"),
    ):
        assert said(database, caller=caller, any_caller=others).bundle == bundle


def test_what_is_old_is_deleted_with_all_of_it(
    database: Database, where: Location, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    now = time.time()
    put(
        database,
        *(answer(f"old{n}", time=now - 100 - n, prompt="secret words") for n in range(3)),
        answer("new"),
    )
    say(database, "old0", comment="secret comment")
    say(database, "new")
    assert delete_before(database, now - 50)
    assert not delete_before(database, now - 50)
    assert say(database, "old0") is None  # late, and harmless
    assert rows(where, ANSWERS) == [("new",)]
    assert [label for _, label, _ in rows(where, LABELS)] == ["factual"]
    if not where.is_postgres:  # nor is it left in the file's free space
        database.run("PRAGMA wal_checkpoint(TRUNCATE)")
        assert b"secret" not in where.path.read_bytes()


def test_transactions_are_whole_repeatable_and_on_disk(database: Database, where: Location) -> None:
    one = answer()

    def fail() -> None:
        with database.transaction():
            write_answers(database, [one])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert rows(where, ANSWERS) == []
    put(database, one)
    say(database)
    put(database, one, answer("r2"))  # what is written twice is there once
    assert sorted(verdict[0] is None for verdict in verdicts(database)) == [False, True]
    for setting, value in (
        (("SHOW synchronous_commit", "on"), ("SHOW fsync", "on"))
        if where.is_postgres
        else (("PRAGMA synchronous", 2), ("PRAGMA journal_mode", "wal"))
    ):
        assert database.run(setting) == [(value,)]
    again = where.open()
    assert len(read_answers(again, PROBES)) == 2
    again.run("UPDATE hallutracer_feedback SET format = 2")
    again.close()
    with pytest.raises(FeedbackUnavailable, match="another version"):
        where.open()


def test_servers_of_other_settings(server: Postgres) -> None:
    url = server.new("early")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ALTER DATABASE early SET synchronous_commit = off")
    opened = location(url).open()
    assert opened.run("SHOW synchronous_commit") == [
        ("on",)
    ]  # it does not acknowledge before it has written
    opened.close()
    with pytest.raises(FeedbackUnavailable, match="LATIN1.*ENCODING 'UTF8'"):
        location(server.new("latin", "ENCODING 'LATIN1' TEMPLATE template0")).open()
    replicas = location(server.schema("replicas"))  # may start at once
    with ThreadPoolExecutor(6) as pool:
        for opened in pool.map(lambda _: replicas.open(), range(6)):
            opened.close()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "give a file"),
        ("mysql://u:geheim@h/d", "found mysql"),
        ("sqlite://x.db", "three slashes"),
        ("postgresql://u:geheim@127.0.0.1:1/d", ""),
        ("postgresql://u:geheim%@h/d", ""),
        ("postgresql://u:geheim@h/d?nonsense=1", ""),
    ],
)
def test_a_url_that_means_nothing_or_nobody_answers_and_no_password(text: str, word: str) -> None:
    with pytest.raises(HalluTracerError, match=word or None) as caught:
        location(text).open()
    assert "geheim" not in str(caught.value)
    assert not text.startswith("postgresql") or "geheim" not in str(location(text))


def test_a_file_is_for_its_owner_alone_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("not a database, but long enough to be read as one " * 100)
    sqlite3.connect(tmp_path / "empty.db").close()
    for name, create, word in (
        ("none/feedback.db", True, "cannot open"),
        ("absent.db", False, "cannot open|unable"),
        ("text.db", True, "not a database"),
        ("empty.db", False, "no feedback"),
    ):
        with pytest.raises(FeedbackUnavailable, match=word):
            location(str(tmp_path / name)).open(create=create)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.db", "text.db"]
    opened = location(str(tmp_path / "feedback.db")).open()
    put(opened, answer())
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("feedback.db*")} == {0o600}
    opened.close()
