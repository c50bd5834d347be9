"""The keys in force: those of the options, and those of a file that may change while the service runs."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from service.access.allowance import Allowance
from service.access.callers import Key, digest_of, is_placeholder
from service.access.key_file import read_keys
from service.errors import HalluTracerError

Signature = tuple[int, int, int, int] | None


@dataclass(frozen=True, slots=True)
class Changes:
    """Names of keys that a new file adds, takes away, or treats otherwise."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def all(self) -> tuple[tuple[str, ...], ...]:
        """In the order of the fields."""
        return self.added, self.removed, self.changed

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return any(self.all)


class KeyRing:
    """Looked into for each request, on the event loop; ``reload`` may be called on any thread."""

    def __init__(
        self, fixed: Sequence[Key] = (), path: Path | None = None, policies: Collection[str] | None = None
    ) -> None:
        """``fixed`` are always in force; ``policies`` are those that keys of the file may name.

        Raises HalluTracerError: a file that cannot be read must not open the service.
        """
        self._fixed, self._path, self._policies = tuple(fixed), path, policies
        self._allowances: dict[str, Allowance] = {}
        self._read_at = self._signature()
        self._keys = self._by_digest(self._file_keys())
        self.problem: str | None = None  # why the file as it is now is not in force
        self.reading = asyncio.Lock()  # held from ``read`` to ``use``: an older file must not follow a newer one

    @property
    def closed(self) -> bool:
        """Whether a key is asked for; without any, the service is open to whoever reaches it."""
        return bool(self._fixed) or self._path is not None

    @property
    def names(self) -> frozenset[str]:
        """Of all keys."""
        return frozenset(key.name for key in self._keys.values())

    def find(self, secret: str) -> Key | None:
        """The key with this secret, which may be expired or revoked.

        Digests are looked up, not secrets: the time that a lookup takes tells nothing that helps to find a secret.
        An example's placeholder opens nothing, whoever put its digest into the file.
        """
        return None if is_placeholder(secret) else self._keys.get(digest_of(secret))

    def allowance(self, key: Key) -> Allowance:
        """What the key has used, reloads or not."""
        return self._allowances.setdefault(key.name, Allowance())

    def changed_on_disk(self) -> bool:
        """Whether the file is another one than at the last look; a look by itself."""
        before, self._read_at = self._read_at, self._signature()
        return before != self._read_at

    def read(self) -> tuple[dict[str, Key], Changes]:
        """What the file says now, by digest, and what that would change.  Raises HalluTracerError."""
        self._read_at = self._signature()
        new = self._by_digest(self._file_keys())
        old = {key.name: key for key in self._keys.values()}
        now = {key.name: key for key in new.values()}
        return new, Changes(
            added=tuple(sorted(now.keys() - old.keys())),
            removed=tuple(sorted(old.keys() - now.keys())),
            changed=tuple(sorted(name for name in old.keys() & now.keys() if old[name] != now[name])),
        )

    def use(self, keys: dict[str, Key]) -> None:
        """From the next request on."""
        self._keys = keys

    def keep_common(self, keys: dict[str, Key]) -> None:
        """Of the keys in force only those that ``keys`` have, too: what is taken away is gone in any case."""
        self._keys = {digest: key for digest, key in self._keys.items() if keys.get(digest) == key}

    def _file_keys(self) -> tuple[Key, ...]:
        return () if self._path is None else read_keys(self._path, self._policies)

    def _by_digest(self, named: Sequence[Key]) -> dict[str, Key]:
        every = [*self._fixed, *named]
        found = {key.digest: key for key in every}
        names = [key.name for key in every]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise HalluTracerError(f"two keys are named {twice!r}; in the log they could not be told apart")
        if len(found) < len(every):
            raise HalluTracerError(f"{self._path} holds a key that is given by --api-key or --api-key-file, too")
        return found

    def _signature(self) -> Signature:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino  # ctime: a mode that changed, too
