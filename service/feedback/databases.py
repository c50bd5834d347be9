"""Gives SQLite and PostgreSQL the same few calls, which feedback needs."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from probes_store.syntax import expanded
from service.errors import FeedbackUnavailable, HalluTracerError

Row = tuple[Any, ...]
BUSY_S = 5.0  # longest wait for another writer's lock
TIMEOUT_S = 10  # for one statement of PostgreSQL, and for a silent connection
_FORMAT = 1
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS hallutracer_feedback (format INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS hallutracer_answers (
    uid TEXT PRIMARY KEY, request_id TEXT NOT NULL, place INTEGER NOT NULL, caller TEXT NOT NULL,
    time DOUBLE PRECISION NOT NULL, route TEXT NOT NULL, model TEXT NOT NULL, bundle TEXT NOT NULL,
    digest TEXT NOT NULL, probes TEXT NOT NULL, policy TEXT NOT NULL,
    threshold DOUBLE PRECISION NOT NULL, risk DOUBLE PRECISION NOT NULL, flagged INTEGER NOT NULL,
    decision TEXT NOT NULL, signals TEXT NOT NULL, mark TEXT NOT NULL, prompt TEXT,
    drawn INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS hallutracer_answers_request ON hallutracer_answers (request_id, place);
CREATE INDEX IF NOT EXISTS hallutracer_answers_time ON hallutracer_answers (time);
CREATE INDEX IF NOT EXISTS hallutracer_answers_probes ON hallutracer_answers (probes);
CREATE INDEX IF NOT EXISTS hallutracer_answers_drawn
    ON hallutracer_answers (digest, time, mark) WHERE drawn = 1;
CREATE TABLE IF NOT EXISTS hallutracer_labels (
    number %(number)s, answer TEXT NOT NULL REFERENCES hallutracer_answers (uid) ON DELETE CASCADE,
    caller TEXT NOT NULL, label TEXT NOT NULL, comment TEXT, time DOUBLE PRECISION NOT NULL);
CREATE INDEX IF NOT EXISTS hallutracer_labels_answer ON hallutracer_labels (answer);
CREATE TABLE IF NOT EXISTS hallutracer_retention (
    number INTEGER PRIMARY KEY, believed DOUBLE PRECISION NOT NULL);
INSERT INTO hallutracer_feedback (format) SELECT {_FORMAT}
    WHERE NOT EXISTS (SELECT 1 FROM hallutracer_feedback)
"""


class Refused(FeedbackUnavailable):
    """The database refuses this data, and a retry does not help."""


class Database:
    """A connection, for one thread at a time; ``?`` stands for a value in its SQL.

    A call that fails raises FeedbackUnavailable with the cause, but never with a password."""

    def __init__(self, connection: Any, where: Location, driver: Any) -> None:
        self._connection, self._where = connection, where
        self.close = connection.close
        self._begin, self._mark = ("BEGIN", "%s") if where.is_postgres else ("BEGIN IMMEDIATE", "?")
        self._error, self._temporary = driver.Error, driver.OperationalError

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes of the block durable when it ends, or none of them."""
        self.run(self._begin)
        try:
            yield
            self.run("COMMIT")
        except BaseException:
            with suppress(self._error):
                self._connection.rollback()
            raise

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """Run a statement and return its rows."""
        with self._named():
            cursor = self._connection.execute(
                sql.replace("?", self._mark), *([values] if values else [])
            )
            return [] if cursor.description is None else cursor.fetchall()

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement for each row of values."""
        with self._named():
            self._connection.cursor().executemany(sql.replace("?", self._mark), rows)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            temporary = isinstance(error, self._temporary) or getattr(
                self._connection, "closed", False
            )
            first = str(error).partition("\n")[0]
            raise (FeedbackUnavailable if temporary else Refused)(
                f"{self._where}: {first}"
            ) from None


@dataclass(frozen=True)
class Location:
    """The location of feedback: a file, or a PostgreSQL database."""

    text: str

    def __str__(self) -> str:
        """Return the location without user and password, for messages."""
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
        return expanded(self.text.removeprefix("sqlite:///"), "HALLUTRACER_FEEDBACK_DB")

    def open(self, *, create: bool = True) -> Database:
        """Return a connection; ``create`` makes the file and the tables if they do not exist.

        Raises FeedbackUnavailable."""
        with ExitStack() as stack:
            database = _open_postgres(self) if self.is_postgres else _open_sqlite(self, create)
            stack.callback(database.close)
            _prepare(database, self, create)
            stack.pop_all()
        return database


def location(text: str) -> Location:
    """Parse ``--feedback-db``.  Raises HalluTracerError."""
    scheme, mark, path = text.partition("://")
    if not text or (mark and scheme not in ("sqlite", "postgresql", "postgres")):
        expected = (
            "give a file (feedback.db, sqlite:///feedback.db) or postgresql://USER@HOST/DATABASE"
        )
        raise HalluTracerError(f"{expected}; found {scheme}{mark}" if text else expected)
    if mark and scheme == "sqlite" and not path.startswith("/"):
        raise HalluTracerError("a SQLite file is sqlite:///PATH, with three slashes, or just PATH")
    return Location(text)


def _prepare(database: Database, where: Location, create: bool) -> None:
    """Set up a connection whose commits are on disk, and create or check the tables."""
    if where.is_postgres:
        number = "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
        settings = ["SET synchronous_commit = on"]
        [(encoding,)] = database.run("SHOW server_encoding")
        if encoding != "UTF8":
            raise FeedbackUnavailable(
                f"{where} is encoded as {encoding}: create the database with ENCODING 'UTF8'"
            )
        if create:  # a reader of all rows may take longer
            settings.append(f"SET statement_timeout = '{TIMEOUT_S}s'")
    else:
        number = "INTEGER PRIMARY KEY AUTOINCREMENT"
        settings = [
            "PRAGMA synchronous = FULL",
            "PRAGMA foreign_keys = ON",
            "PRAGMA secure_delete = ON",
        ]
        if database.run("PRAGMA journal_mode = WAL") != [("wal",)]:
            raise FeedbackUnavailable(
                f"{where} cannot be kept safely there (a network folder?): use a local disk"
            )
    for setting in settings:
        database.run(setting)
    if create:
        with database.transaction():
            if (
                where.is_postgres
            ):  # without a lock, CREATE TABLE IF NOT EXISTS can fail in one of two replicas
                database.run("SELECT pg_advisory_xact_lock(7236817465)")
            for statement in (SCHEMA % {"number": number}).split(";"):
                database.run(statement)
    try:
        formats = database.run("SELECT format FROM hallutracer_feedback")
    except FeedbackUnavailable as error:
        raise FeedbackUnavailable(f"{where} holds no feedback of this service ({error})") from None
    if formats != [(_FORMAT,)]:
        raise FeedbackUnavailable(
            f"{where} is of another version of HalluTracer (format {formats}); give another one"
        )


def _open_sqlite(where: Location, create: bool) -> Database:
    path = where.path
    try:
        if create:  # nobody else may read users' feedback
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        uri = f"{path.resolve().as_uri()}?mode=rw"
        # isolation_level=None: this module begins transactions itself. One thread opens the
        # connection, and then only another uses it.
        connection = sqlite3.connect(
            uri, BUSY_S, isolation_level=None, check_same_thread=False, uri=True
        )
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FeedbackUnavailable(f"cannot open the feedback file {path}: {reason}") from None
    return Database(connection, where, sqlite3)


def _open_postgres(where: Location) -> Database:
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as error:
        cure = "pip install 'hallutracer[postgres]'"
        raise FeedbackUnavailable(
            f"PostgreSQL needs psycopg 3: {cure} ({error})", param="--feedback-db"
        ) from None
    try:
        from_url = conninfo_to_dict(where.text)
    except psycopg.Error:  # its message may contain a part of the password
        raise FeedbackUnavailable(
            "not a URL of PostgreSQL: postgresql://USER@HOST:PORT/DATABASE"
        ) from None
    patience: dict[str, Any] = {
        "connect_timeout": 5,
        "tcp_user_timeout": TIMEOUT_S * 1000,
        "keepalives_idle": TIMEOUT_S,
        "application_name": "hallutracer",
    }
    try:
        connection = psycopg.connect(**(patience | from_url), autocommit=True)
    except psycopg.Error as error:
        first = str(error).partition("\n")[0]
        raise FeedbackUnavailable(f"cannot connect to {where}: {first}") from None
    return Database(connection, where, psycopg)
