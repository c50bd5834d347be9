"""SQLite and PostgreSQL behind the few calls that feedback needs.  A connection belongs to one thread at a time."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from service.errors import FeedbackUnavailable, HalluTracerError

if TYPE_CHECKING:
    import psycopg

Row = tuple[Any, ...]
BUSY_S = 5.0  # that another writer's lock is waited for
TIMEOUT_S = 10  # of one statement of PostgreSQL, and of a connection that has gone silent
_FORMAT = 1
_ANSWERS = "hallutracer_answers"
_DRAWN = "drawn INTEGER NOT NULL DEFAULT 0"  # newer than the other columns: databases without it get it
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS hallutracer_feedback (format INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS {_ANSWERS} (
    uid TEXT PRIMARY KEY, request_id TEXT NOT NULL, place INTEGER NOT NULL, caller TEXT NOT NULL,
    time DOUBLE PRECISION NOT NULL, route TEXT NOT NULL, model TEXT NOT NULL, bundle TEXT NOT NULL,
    digest TEXT NOT NULL, probes TEXT NOT NULL, policy TEXT NOT NULL, threshold DOUBLE PRECISION NOT NULL,
    risk DOUBLE PRECISION NOT NULL, flagged INTEGER NOT NULL, decision TEXT NOT NULL, signals TEXT NOT NULL,
    mark TEXT NOT NULL, prompt TEXT, {_DRAWN});
CREATE INDEX IF NOT EXISTS hallutracer_answers_request ON {_ANSWERS} (request_id, place);
CREATE INDEX IF NOT EXISTS hallutracer_answers_time ON {_ANSWERS} (time);
CREATE INDEX IF NOT EXISTS hallutracer_answers_probes ON {_ANSWERS} (probes);
CREATE TABLE IF NOT EXISTS hallutracer_labels (
    number %(number)s, answer TEXT NOT NULL REFERENCES {_ANSWERS} (uid) ON DELETE CASCADE, caller TEXT NOT NULL,
    label TEXT NOT NULL, comment TEXT, time DOUBLE PRECISION NOT NULL);
CREATE INDEX IF NOT EXISTS hallutracer_labels_answer ON hallutracer_labels (answer);
CREATE TABLE IF NOT EXISTS hallutracer_retention (number INTEGER PRIMARY KEY, believed DOUBLE PRECISION NOT NULL);
INSERT INTO hallutracer_feedback (format) SELECT {_FORMAT} WHERE NOT EXISTS (SELECT 1 FROM hallutracer_feedback)
"""
_INDEX = f"CREATE INDEX IF NOT EXISTS hallutracer_answers_drawn ON {_ANSWERS} (digest, time, mark) WHERE drawn = 1"


class Refused(FeedbackUnavailable):
    """The database will never take this: trying again does not help."""


class Database(Protocol):
    """A connection; ``?`` stands for a value in its SQL.  Every call raises FeedbackUnavailable where it fails."""

    def transaction(self) -> AbstractContextManager[None]:
        """What is done inside is on disk once the block has ended, or not done at all."""

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """The rows that a statement gives."""

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """One statement for each row of values."""

    def close(self) -> None:
        """The connection is not used again."""


@dataclass(frozen=True)
class Location:
    """Where feedback is kept: a file, or a PostgreSQL database."""

    text: str

    def __str__(self) -> str:
        """Without user and password, for messages."""
        if not self.is_postgres:
            return str(self.path)
        parts = urlsplit(self.text)
        return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def is_postgres(self) -> bool:
        """Whether it is a database of PostgreSQL."""
        return self.text.startswith(("postgresql://", "postgres://"))

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return Path(self.text.removeprefix("sqlite:///")).expanduser()

    def open(self, *, create: bool = True) -> Database:
        """A connection; ``create`` makes the file and the tables where there are none.

        Raises FeedbackUnavailable: the cause and the cure, never a password.
        """
        database = (_open_postgres if self.is_postgres else _open_sqlite)(self, create)
        try:
            _prepare(database, self, create)
        except BaseException:
            database.close()
            raise
        return database


def location(text: str) -> Location:
    """Read ``--feedback-db``.  Raises HalluTracerError."""
    scheme = text.partition("://")[0]
    if not text or ("://" in text and scheme not in ("sqlite", "postgresql", "postgres")):
        raise HalluTracerError(
            "give a file (feedback.db, sqlite:///feedback.db) or postgresql://USER@HOST/DATABASE"
            + (f"; found {scheme}://" if text else "")
        )
    if scheme == "sqlite" and not text.startswith("sqlite:///"):
        raise HalluTracerError("a SQLite file is sqlite:///PATH, with three slashes, or just PATH")
    return Location(text)


def _prepare(database: Database, where: Location, create: bool) -> None:
    """Make the tables, or find them, in a format that is known."""
    number = "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY" if where.is_postgres else (
        "INTEGER PRIMARY KEY AUTOINCREMENT")  # fmt: skip
    if create:
        with database.transaction():
            if where.is_postgres:  # CREATE TABLE IF NOT EXISTS of two replicas at once fails in one of them
                database.run("SELECT pg_advisory_xact_lock(7236817465)")
            for statement in (SCHEMA % {"number": number}).split(";"):
                database.run(statement)
            has_drawn = (
                f"SELECT 1 FROM pg_attribute WHERE attrelid = '{_ANSWERS}'::regclass AND attname = 'drawn'"
                if where.is_postgres
                else f"SELECT 1 FROM pragma_table_info('{_ANSWERS}') WHERE name = 'drawn'"
            )
            if not database.run(has_drawn):  # asked first: ALTER TABLE would wait for every reader
                database.run(f"ALTER TABLE {_ANSWERS} ADD COLUMN {_DRAWN}")
            database.run(_INDEX)
    try:
        found = database.run("SELECT format FROM hallutracer_feedback")
    except FeedbackUnavailable as error:
        raise FeedbackUnavailable(f"{where} holds no feedback of this service ({error})") from None
    if found != [(_FORMAT,)]:
        raise FeedbackUnavailable(f"{where} is of another version of HalluTracer (format {found}); give another one")


class _Sqlite:
    def __init__(self, connection: sqlite3.Connection, where: Location) -> None:
        self._connection, self._where = connection, where

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.run("BEGIN IMMEDIATE")
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.rollback()
            raise

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        with self._named():
            return self._connection.execute(sql, values).fetchall()

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._named():
            self._connection.executemany(sql, rows)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            kind = FeedbackUnavailable if isinstance(error, sqlite3.OperationalError) else Refused
            raise kind(f"{self._where}: {error}") from None


def _open_sqlite(where: Location, create: bool) -> Database:
    path = where.path
    try:
        if create:  # what users said is nobody else's to read
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        uri = f"{path.resolve().as_uri()}?mode=rw"
        # None: transactions begin where this module says so.  Opened by one thread and used by another, never by both.
        connection = sqlite3.connect(uri, BUSY_S, isolation_level=None, check_same_thread=False, uri=True)
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FeedbackUnavailable(f"cannot open the feedback file {path}: {reason}") from None
    database = _Sqlite(connection, where)
    try:
        [(mode,)] = database.run("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise FeedbackUnavailable(f"{path} cannot be kept safely there (a network folder?): use a local disk")
        for setting in ("synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"):
            database.run(f"PRAGMA {setting}")
    except BaseException:
        database.close()
        raise
    return database


class _Postgres:
    def __init__(self, connection: psycopg.Connection[Row], where: Location) -> None:
        self._connection, self._where = connection, where

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._named(), self._connection.transaction():
            yield

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        with self._named():
            cursor = self._connection.execute(sql.replace("?", "%s"), values or None)
            return [] if cursor.description is None else cursor.fetchall()

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        with self._named(), self._connection.cursor() as cursor:
            cursor.executemany(sql.replace("?", "%s"), rows)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        import psycopg

        try:
            yield
        except psycopg.Error as error:
            lost = isinstance(error, psycopg.OperationalError) or self._connection.closed
            first = str(error).partition("\n")[0]
            raise (FeedbackUnavailable if lost else Refused)(f"{self._where}: {first}") from None


def _open_postgres(where: Location, create: bool) -> Database:
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as error:
        raise FeedbackUnavailable(
            f"PostgreSQL needs psycopg 3: pip install 'hallutracer[postgres]' ({error})", param="--feedback-db"
        ) from None
    try:
        given = conninfo_to_dict(where.text)
    except psycopg.Error:  # its message may hold a part of the password
        raise FeedbackUnavailable("not a URL of PostgreSQL: postgresql://USER@HOST:PORT/DATABASE") from None
    patience: dict[str, Any] = {
        "connect_timeout": 5, "tcp_user_timeout": TIMEOUT_S * 1000, "keepalives_idle": TIMEOUT_S,
        "application_name": "hallutracer",
    }  # fmt: skip
    try:
        connection = psycopg.connect(**(patience | given), autocommit=True)
    except psycopg.Error as error:
        first = str(error).partition("\n")[0]
        raise FeedbackUnavailable(f"cannot connect to {where}: {first}") from None
    database = _Postgres(connection, where)
    try:
        [(encoding,)] = database.run("SHOW server_encoding")
        if encoding != "UTF8":
            raise FeedbackUnavailable(f"{where} is encoded as {encoding}: create the database with ENCODING 'UTF8'")
        database.run("SET synchronous_commit = on")  # a server may be set to acknowledge before it has written
        if create:  # not to read it all, which may take its time
            database.run(f"SET statement_timeout = '{TIMEOUT_S}s'")
    except BaseException:
        database.close()
        raise
    return database
