"""What vLLM is doing while it starts, from its worker's process to ours: the worker writes a line, we read the last."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "_HALLUTRACER_STAGES"  # the file, inherited by vLLM's processes


class Stages:
    """The file of one start, as its reader sees it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def last(self) -> str:
        """What was said last; "" before anything was."""
        with suppress(OSError):
            return self._path.read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2]
        return ""


@contextmanager
def stages() -> Iterator[Stages]:
    """Have the processes that are started inside say what they do."""
    with tempfile.TemporaryDirectory(prefix="hallutracer-") as folder:
        path = Path(folder) / "stages"
        os.environ[VARIABLE] = str(path)
        try:
            yield Stages(path)
        finally:
            os.environ.pop(VARIABLE, None)


def say(stage: str) -> None:
    """Write what is being done; does nothing where nobody listens any more."""
    if name := os.environ.get(VARIABLE):
        with suppress(OSError), open(name, "a", encoding="utf-8") as file:
            file.write(stage + "\n")
