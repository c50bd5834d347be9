"""What is stored, by SQLite and by a real PostgreSQL: labels that repeat, conflict and come late."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from service.errors import FeedbackUnavailable, HalluTracerError, RequestError
from service.feedback import rows as statements
from service.feedback.databases import Database, Location, Refused, location
from service.feedback.rows import Stored, Tally, delete_before, read_answers, tally_of, to_label, write_answers
from tests.feedback.made import PROBES, answer, put, rows, say
from tests.feedback.postgres import Postgres

LABELS = "SELECT caller, label, comment FROM hallutracer_labels ORDER BY number"


@pytest.fixture
def database(where: Location) -> Iterator[Database]:
    opened = where.open()
    yield opened
    opened.close()


def told(database: Database, request_id: str = "r1", label: str = "factual", **changes: object) -> tuple[str, bool]:
    stored = say(database, request_id, label, **changes)
    assert stored is not None
    return stored.standing, stored.conflict


def verdicts(database: Database) -> list[tuple[int | None, bool, bool]]:
    return [(one.label, one.conflict, one.unclear) for one in read_answers(database, PROBES)]


def test_a_label_is_stored_beside_what_was_answered(database: Database, where: Location) -> None:
    put(database, answer(flagged=True, decision="abstain"), answer(index=1))
    assert say(database, comment="'; ? %s é 😀") == Stored("new", False, "abstain", True, "m", "one:1")
    assert say(database, index=1) == Stored("new", False, "continue", False, "m", "one:1")
    assert rows(where, LABELS) == [("ann", "factual", "'; ? %s é 😀"), ("ann", "factual", None)]
    [first, second] = read_answers(database, PROBES)
    assert (first.signals, first.risk, first.label, first.usable) == ({"depth_mean": 0.125}, 0.25, 1, False)
    assert second.usable
    assert read_answers(database, "others") == []


def test_the_last_label_of_a_caller_counts_and_history_is_kept(database: Database, where: Location) -> None:
    put(database, answer())
    said = ["factual", "factual", "hallucinated", "unclear", "hallucinated"]
    assert [told(database, label=label)[0] for label in said] == ["new", "repeated", "changed", "changed", "changed"]
    assert [label for _, label, _ in rows(where, LABELS)] == ["factual", "hallucinated", "unclear", "hallucinated"]
    assert verdicts(database) == [(0, False, False)]
    assert told(database, label="unclear") == ("changed", False)
    assert verdicts(database) == [(None, False, True)]  # taken back
    assert told(database, label="unclear", comment="why") == ("repeated", False)
    assert rows(where, LABELS)[-1] == ("ann", "unclear", "why")  # a comment is never lost


def test_callers_may_disagree_and_agree_again(database: Database) -> None:
    put(database, answer())
    assert told(database) == ("new", False)
    assert told(database, label="hallucinated", caller="bob", others=True) == ("new", True)
    assert verdicts(database) == [(None, True, False)]
    assert told(database, label="unclear", caller="eve", others=True) == ("new", False)
    assert verdicts(database) == [(None, True, False)]
    assert told(database, label="hallucinated") == ("changed", False)
    assert verdicts(database) == [(0, False, False)]


def test_drawn_answers_are_counted_once_for_each_prompt(database: Database) -> None:
    put(database, *(answer(f"r{number}", mark=f"m{number % 4}", time=float(number), drawn=True) for number in range(8)))
    put(database, answer("not", mark="m9", time=2.0), answer("other", mark="m8", digest="sha256:cd", drawn=True))
    assert tally_of(database, "sha256:ab") == Tally(0, 0, 0)
    assert say(database, "not", "hallucinated") == Stored("new", False, "continue", False, "m", "one:1")  # no tally
    first = say(database, "r1", "hallucinated")
    assert first is not None
    assert (first.drawn, first.tally) == (True, Tally(2, 1, 1))  # m0 came before it; m2 and m3 nobody has come to
    again = say(database, "r5", "hallucinated")
    assert again is not None
    assert again.tally == Tally(4, 1, 1)  # the same prompt
    agreed = say(database, "r5", "hallucinated")
    assert agreed is not None
    assert agreed.tally is None  # nothing new
    assert tally_of(database, "sha256:cd") == Tally(0, 0, 0)


def test_callers_who_disagree_and_who_cannot_tell_leave_an_answer_right(database: Database) -> None:
    put(database, *(answer(f"r{number}", mark=f"m{number}", time=float(number), drawn=True) for number in range(3)))
    for name, label, caller in (("r0", "hallucinated", "ann"), ("r0", "factual", "eve"), ("r1", "unclear", "ann"),
                                ("r2", "factual", "ann"), ("r2", "hallucinated", "ann")):  # fmt: skip
        say(database, name, label, caller=caller, others=True)
    assert tally_of(database, "sha256:ab") == Tally(3, 1, 1)


def test_what_waits_for_a_label_is_listed_oldest_first(database: Database) -> None:
    put(database, answer("new", mark="a", time=9.0, drawn=True, prompt='{"prompt": "why"}'),
        answer("old", mark="b", time=1.0, drawn=True, index=2), answer("again", mark="b", time=2.0, drawn=True),
        answer("said", mark="c", time=3.0, drawn=True), answer("twin", mark="c", time=0.0, drawn=True),
        answer("not", mark="d", time=4.0))  # fmt: skip
    say(database, "said")
    assert list(to_label(database)) == [
        {"id": "old", "index": 2, "time": 1.0, "bundle": "one:1"},
        {"id": "new", "index": 0, "time": 9.0, "bundle": "one:1", "given": {"prompt": "why"}},
    ]


def test_an_answer_to_somebody_else_is_not_there(database: Database, where: Location) -> None:
    put(database, answer())
    assert say(database, caller="bob") is None
    assert say(database, index=1) is None
    assert say(database, "r2") is None
    assert rows(where, LABELS) == []


def test_an_id_that_was_used_twice_is_the_callers_own_and_the_last(database: Database) -> None:
    """Clients may choose the ids of their requests."""
    now = time.time()
    put(database, answer(time=now, bundle="mine:1"), answer(time=now + 1, bundle="mine:2"),
        answer(time=now + 2, bundle="theirs:1", caller="bob"))  # fmt: skip
    for others in (False, True):
        stored = say(database, others=others)
        assert stored is not None
        assert stored.bundle == "mine:2"
    stored = say(database, caller="eve", others=True)
    assert stored is not None
    assert stored.bundle == "theirs:1"


def test_an_answer_that_is_written_twice_is_there_once(database: Database) -> None:
    one = answer()
    put(database, one)
    say(database)
    put(database, one, answer("r2"))
    assert sorted(verdict[0] is None for verdict in verdicts(database)) == [False, True]


def test_what_is_old_is_deleted_with_its_labels_and_prompts(
    database: Database, where: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "CHUNK", 2)
    now = time.time()
    put(database, *(answer(f"old{n}", time=now - 100 - n, prompt="secret words") for n in range(3)), answer("new"))
    say(database, "old0", comment="secret comment")
    say(database, "new")
    assert delete_before(database, now - 50)
    assert not delete_before(database, now - 50)
    assert say(database, "old0") is None  # late, and harmless
    assert rows(where, "SELECT request_id FROM hallutracer_answers") == [("new",)]
    assert rows(where, "SELECT COUNT(*) FROM hallutracer_labels") == [(1,)]
    if not where.is_postgres:  # nor is it left in the file's free space
        database.run("PRAGMA wal_checkpoint(TRUNCATE)")
        assert b"secret" not in where.path.read_bytes()


def test_one_caller_cannot_fill_the_disk_with_one_answer(
    database: Database, where: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "MOST_LABELS", 3)
    put(database, answer())
    for label in ("factual", "hallucinated", "factual"):
        say(database, label=label)
    with pytest.raises(RequestError, match="3 labels of yours"):
        say(database, label="hallucinated")
    assert told(database) == ("repeated", False)  # saying the same again costs nothing
    assert len(rows(where, LABELS)) == 3


def test_a_transaction_that_fails_leaves_nothing(database: Database, where: Location) -> None:
    def fail() -> None:
        with database.transaction():
            write_answers(database, [answer()])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert rows(where, "SELECT COUNT(*) FROM hallutracer_answers") == [(0,)]
    put(database, answer())
    assert rows(where, "SELECT COUNT(*) FROM hallutracer_answers") == [(1,)]


def test_a_label_of_no_answer_cannot_be_stored(database: Database) -> None:
    with pytest.raises(Refused):
        database.run("INSERT INTO hallutracer_labels (answer, caller, label, time) VALUES ('none', 'a', 'factual', 1)")


def test_opening_again_finds_what_is_there_and_refuses_another_format(database: Database, where: Location) -> None:
    put(database, answer())
    again = where.open()
    assert len(read_answers(again, PROBES)) == 1
    again.run("UPDATE hallutracer_feedback SET format = 2")
    again.close()
    with pytest.raises(FeedbackUnavailable, match="another version"):
        where.open()


def test_what_is_acknowledged_is_on_disk(database: Database, where: Location) -> None:
    if where.is_postgres:
        assert database.run("SHOW synchronous_commit") == [("on",)]
        assert database.run("SHOW fsync") == [("on",)]
    else:
        assert database.run("PRAGMA synchronous") == [(2,)]  # FULL
        assert database.run("PRAGMA journal_mode") == [("wal",)]


def test_a_server_that_acknowledges_early_is_told_not_to(server: Postgres) -> None:
    url = server.new("early")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ALTER DATABASE early SET synchronous_commit = off")
    opened = location(url).open()
    assert opened.run("SHOW synchronous_commit") == [("on",)]
    opened.close()


def test_replicas_may_start_at_once(server: Postgres) -> None:
    from concurrent.futures import ThreadPoolExecutor

    where = location(server.schema("replicas"))
    with ThreadPoolExecutor(6) as pool:
        for opened in pool.map(lambda _: where.open(), range(6)):
            opened.close()


def test_a_database_that_cannot_hold_every_text_is_refused(server: Postgres) -> None:
    url = server.new("latin", "ENCODING 'LATIN1' TEMPLATE template0")
    with pytest.raises(FeedbackUnavailable, match="LATIN1.*ENCODING 'UTF8'"):
        location(url).open()


def test_a_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    where = location(str(tmp_path / "feedback.db"))
    opened = where.open()
    put(opened, answer())
    for path in tmp_path.glob("feedback.db*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    opened.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "give a file"),
        ("mysql://u:geheim@h/d", "found mysql"),
        ("sqlite://x.db", "three slashes"),
    ],
)
def test_a_url_that_means_nothing(text: str, said: str) -> None:
    with pytest.raises(HalluTracerError, match=said) as caught:
        location(text)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("url", ["postgresql://u:geheim@127.0.0.1:1/d", "postgresql://u:geheim%@h/d",
                                 "postgresql://u:geheim@h/d?nonsense=1"])  # fmt: skip
def test_no_password_in_a_message(url: str) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(FeedbackUnavailable) as caught:
        location(url).open()
    assert "geheim" not in str(caught.value)
    assert "geheim" not in str(location(url))


def test_a_file_that_is_not_there_or_is_something_else(tmp_path: Path) -> None:
    with pytest.raises(FeedbackUnavailable, match="cannot open"):
        location(str(tmp_path / "none" / "feedback.db")).open()
    with pytest.raises(FeedbackUnavailable):
        location(str(tmp_path / "feedback.db")).open(create=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / "text.db").write_text("not a database, but long enough to be read as one " * 100)
    with pytest.raises(FeedbackUnavailable, match="not a database"):
        location(str(tmp_path / "text.db")).open()
    import sqlite3

    sqlite3.connect(tmp_path / "empty.db").close()
    with pytest.raises(FeedbackUnavailable, match="holds no feedback"):
        location(str(tmp_path / "empty.db")).open(create=False)
