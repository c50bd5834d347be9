"""Writing that survives a crash: whole and flushed, or not there.  Knows no bundle.

Every operating system error that says "you cannot write here" becomes StoreNotWritable.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from probes_store.errors import StoreNotWritable

ASIDE = ".publish-"  # prefix of a folder that is not published yet


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into StoreNotWritable that names ``path``."""
    try:
        yield
    except OSError as error:
        raise StoreNotWritable(f"cannot write: {error.strerror or error}", file=str(path)) from error


def write_file(path: Path, data: bytes) -> None:
    """Write and flush to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write aside, then rename over ``path``: readers see the old bytes or the new ones."""
    aside = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        write_file(aside, data)
        os.replace(aside, path)
        sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's advisory lock; without one on file systems that have none (some network mounts)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def folder_aside(parent: Path) -> Iterator[Path]:
    """A new folder in ``parent``, locked while the block runs and removed after it unless it was renamed away.

    The lock is on the folder itself and dies with the process, so that ``clean_aside`` can tell a killed publisher's
    folder from a busy one.
    """
    while True:
        path = parent / f"{ASIDE}{secrets.token_hex(8)}"
        path.mkdir()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # a cleaner took it between the two lines above
        _lock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink and path.exists():
            break
        os.close(descriptor)  # the same, a moment later
    try:
        yield path
    finally:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)


def clean_aside(parent: Path) -> None:
    """Remove the folders that killed publishers left.  Where locks do not work, they stay (and stay invisible)."""
    for path in parent.glob(f"{ASIDE}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    """Whether the lock is held now."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True
