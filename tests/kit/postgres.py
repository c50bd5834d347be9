"""A real PostgreSQL on a free port: from PATH or .tools/bin, as any user; it can be killed and
started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tests.kit.local_server import free_port
from tests.kit.prometheus import binary

NOBODY = 65534  # PostgreSQL refuses to run as root
USER = "tester"


class Postgres:
    """One cluster in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None
        folder.chmod(0o755)
        self._as: dict[str, Any] = {"cwd": folder}
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
            self._as |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        options = ["-A", "trust", "-U", USER, "-E", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run(
            [binary("initdb"), "-D", str(folder / "data"), *options],
            stdout=subprocess.DEVNULL,
            check=True,
            **self._as,
        )

    def start(self) -> None:
        """Until it takes connections."""
        settings = (
            f"port={self.port}",
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "jit=off",
            "shared_buffers=32MB",
            "max_connections=20",
        )
        command = [
            binary("postgres"),
            "-D",
            str(self.folder / "data"),
            *(f"--{setting}" for setting in settings),
        ]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, **self._as)
        end = time.monotonic() + 60
        while True:
            try:
                self._run()
                return
            except psycopg.OperationalError:
                assert self.process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < end, (self.folder / "log").read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        """As by a crash: nothing is written any more."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(60)

    def _run(self, sql: str = "SELECT 1") -> str:
        """The server's URL, without the database's name."""
        url = f"postgresql://{USER}@127.0.0.1:{self.port}/"
        with psycopg.connect(f"{url}postgres", autocommit=True) as connection:
            connection.execute(sql.encode())
        return url

    def schema(self, name: str) -> str:
        """The URL of a new schema: as good as a database, and there at once."""
        return self._run(f'CREATE SCHEMA "{name}"') + f"postgres?options=-csearch_path%3D{name}"

    def new(self, name: str, options: str = "") -> str:
        """The URL of a new database."""
        return self._run(f'CREATE DATABASE "{name}" {options}') + name


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A running one.  Skips without PostgreSQL, fails where tools are required."""
    binary("initdb"), binary("postgres")
    memory = Path(
        "/dev/shm"
    )  # after a crash the server waits for each of its thousand files to be on disk
    folder = Path(tempfile.mkdtemp(prefix="pg", dir=memory if os.access(memory, os.W_OK) else None))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        server = Postgres(folder)
        stack.callback(server.stop)
        server.start()
        yield server
