"""Who on this machine can change what lies in a store."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from probes_store.errors import OpenStore


def check_closed(path: Path) -> None:
    """Raise OpenStore where any user of this machine could put another file or folder in ``path``'s place.

    ``path`` and every folder above it must not be writable for all.  In a folder such as /tmp, where all may write but
    only owners may rename, what comes next must be this user's or root's.  Where there is nothing, nothing is wrong.
    """
    path = Path(os.path.abspath(path))
    for part in (path, path.resolve()):  # a link's own place, and where it leads
        for below, folder in zip((part, *part.parents), part.parents, strict=False):
            try:
                mode, owner = folder.stat().st_mode, below.lstat().st_uid
            except OSError:  # nothing there, or nothing that this user may see
                continue
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise _open(folder)
            if mode & stat.S_IWOTH and owner not in (0, os.geteuid()):
                raise OpenStore(
                    "another user made this, in a folder where all may write",
                    file=str(below),
                    cure="Name a store in a folder of your own.  Where you know better: --allow-open-store",
                )
    check_not_writable(path)


def check_bundle_closed(folder: Path) -> None:
    """Raise OpenStore where a bundle's folder, that of its name, or a file in either is writable for all."""
    check_not_writable(folder.parent)
    for path in (*folder.parent.glob("*.json"), folder, *folder.rglob("*")):
        check_not_writable(path)


def check_not_writable(path: Path) -> None:
    """Raise OpenStore where any user of this machine may write to a file or a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # whoever reads it will say so
    if mode & stat.S_IWOTH:
        raise _open(path)


def _open(path: Path) -> OpenStore:
    return OpenStore(
        "anyone on this machine can write here, so whoever did may have made what lies in it",
        file=str(path),
        cure=f"Run: chmod o-w {path}  Where you know better: --allow-open-store",
    )
