"""Crash-safe writing: after a crash a file is complete or absent."""

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
    """Turn an OSError in the block into a StoreNotWritable that names ``path``."""
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


def atomic_write(path: Path, data: bytes) -> None:
    """Write to a temporary file and rename it over ``path``: readers see the old bytes or the new ones."""
    aside = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        write_file(aside, data)
        os.replace(aside, path)
        sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's advisory lock; on file systems without locks (some network mounts) do nothing."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def folder_aside(parent: Path) -> Iterator[Path]:
    """A new temporary folder in ``parent``, locked while the block runs and then removed unless it was renamed.

    The lock ends with the process, so that ``clean_aside`` can tell a killed publisher's folder from one in use.
    """
    while True:
        path = parent / f"{ASIDE}{secrets.token_hex(8)}"
        path.mkdir()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # ``clean_aside`` removed it between the two lines above
        _lock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink and path.exists():
            break
        os.close(descriptor)  # removed before it was locked
    try:
        yield path
    finally:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)


def clean_aside(parent: Path) -> None:
    """Remove the temporary folders of killed publishers; without working locks they stay, unlisted."""
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
