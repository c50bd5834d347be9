"""Manages a run folder: which run owns it, which batches are finished, and appending that survives
a crash.

run.json             data, model and options of this folder; another run is refused
input_ids.i32, offsets.i64     rendered prompts, one after the other
rows-<site>.f32      [m, N, width] little-endian float32, row i is data row i
rows-<site>-<pooling>.f32      the same pooled over other positions than t*
rows-<site>-answer.f32         mean over the tokens of a generated answer; zeros if there is none
first_token.f64      [N, 2] log maximum probability, entropy (nats)
journal.jsonl        one line per finished batch, written after its data reached the disk
answers.jsonl        generated answers, one line per row that applies, in the order of the plan
samples-<K>-<T>.jsonl  K answers of each row that applies, sampled at temperature T
labels-<key>.jsonl   verdicts of one judge with one set of options
finished.json        above these: what the whole run read, once its bundle was published"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.local import atomic_write
from service.errors import RunMismatch
from service.readout import Geometry, Site

IN_FORMS = (  # stands beside the run folder of that name: the user's questions in forms
    "{}-forms.jsonl"
)
FINISHED = "finished.json"


def unfinished_folder(folder: Path, reads: dict[str, Any]) -> Path:
    """Return the first of ``folder``, folder-2, folder-3, ... in which no other run has finished.

    ``reads`` has the rows, model and options that identify a run."""
    wanted = json.loads(json.dumps(reads))
    for number in count(1):
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            if json.loads((candidate / FINISHED).read_text(encoding="utf-8")) == wanted:
                return candidate
        except (OSError, ValueError):
            return candidate
    raise AssertionError


def finish(folder: Path, reads: dict[str, Any]) -> None:
    """Record that the run is finished, so that another run of the same name takes another
    folder."""
    atomic_write(folder / FINISHED, (json.dumps(reads, indent=2, sort_keys=True) + "\n").encode())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of ``folder``; the lock ends with this process.

    Two writers would mix their journals.  Raises RunMismatch if another process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunMismatch(
                f"{folder} is in use by another process: wait for it, or name another --run-dir",
                param="run_dir",
            ) from error
        yield
    finally:
        os.close(descriptor)


def claim(folder: Path, fingerprint: dict[str, Any]) -> None:
    """Assign ``folder`` to this run, or check that it already is.

    Raises RunMismatch: it belongs to another run; names the first field that differs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    wanted = json.loads(json.dumps(fingerprint))
    if not path.exists():
        leftover = sorted(
            entry.name for entry in folder.iterdir() if not entry.name.startswith(".")
        )
        if leftover:
            raise RunMismatch(
                f"{folder} has no run.json but holds {leftover[0]!r}: name a new or empty --run-dir"
            )
        atomic_write(path, (json.dumps(wanted, indent=2, sort_keys=True) + "\n").encode())
        return
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunMismatch(
            f"{path} is not JSON ({error}): delete {folder} and start again"
        ) from error
    _check_same(folder, recorded, wanted, "")


def _check_same(folder: Path, recorded: Any, wanted: Any, field: str) -> None:
    if isinstance(recorded, dict) and isinstance(wanted, dict):
        for key in sorted(recorded.keys() | wanted.keys()):
            _check_same(
                folder, recorded.get(key), wanted.get(key), f"{field}.{key}" if field else key
            )
    elif recorded != wanted:
        raise RunMismatch(
            f"{folder} was begun with {field} = {recorded!r}, this run has {wanted!r}: name another"
            " run folder with --run-dir, or delete this one",
            param=field,
        )


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset`` of an open file.  Raises OSError if the disk takes
    less."""
    written = os.pwrite(descriptor, data, offset)
    if written != len(data):
        raise OSError(f"only {written} of {len(data)} bytes could be written; is the disk full?")


def json_lines(path: Path) -> Iterator[Any]:
    """Yield the values of a file of JSON lines, one by one."""
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


class AppendLog:
    """Append-only JSON lines.  An incomplete last line is cut off on opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a+b")
        self._file.seek(0)
        self.count = 0
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            self.count, end = self.count + 1, end + len(line)
        self._file.truncate(end)

    def append(self, records: Sequence[Any]) -> None:
        """Add lines; they are on disk when this returns."""
        text = "".join(
            json.dumps(record, ensure_ascii=False, sort_keys=True) + "\n" for record in records
        )
        self._file.write(text.encode("utf-8", "backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.count += len(records)

    def keep(self, count: int) -> None:
        """Cut off everything after the first ``count`` lines."""
        self._file.seek(0)
        end = sum(len(line) for line, _ in zip(self._file, range(count), strict=False))
        self._file.truncate(end)
        self.count = min(self.count, count)

    def read(self) -> Iterator[Any]:
        """Return the records, one by one."""
        return json_lines(self.path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class RowsFile:
    """One site's activations on disk, [m, N, width] float32: a layer is one contiguous slice.
    Cheap to pickle."""

    path: Path
    geometry: Geometry
    site: Site
    count: int  # N

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (m, N, width)."""
        return (self.geometry.num_layers, self.count, self.geometry.width(self.site))

    @property
    def nbytes(self) -> int:
        """Return the file's size."""
        return int(np.prod(self.shape, dtype=np.int64)) * 4

    def layer(self, layer: int) -> NDArray[np.float32]:
        """Memory-map one layer, [N, width], read-only; the pages do not count as this process's
        memory."""
        _, count, width = self.shape
        return np.memmap(
            self.path, "<f4", "r", offset=layer * count * width * 4, shape=(count, width)
        )

    def head(self, layer: int, head: int) -> NDArray[np.float32]:
        """Return one head's columns of ``layer``, [N, d]."""
        dim = self.geometry.dim(self.site)
        return self.layer(layer)[:, head * dim : (head + 1) * dim]

    def write(
        self, descriptor: int, index: NDArray[np.integer], activations: NDArray[np.float32]
    ) -> None:
        """Write activations [n, m, width] of data rows ``index`` [n] to the open file."""
        layers, count, width = self.shape
        data = np.ascontiguousarray(activations, "<f4")
        for layer in range(layers):
            for position, row in enumerate(index):
                write_at(
                    descriptor,
                    data[position, layer].tobytes(),
                    (layer * count + int(row)) * width * 4,
                )
