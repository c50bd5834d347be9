"""A repository of the Hugging Face hub as a store to read: its tags v1, v2, ... are the versions of its one bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from probes_store.bundle import MAX_MANIFEST, MAX_SIGNATURE, SIGNATURE
from probes_store.errors import DigestMismatch, HubUnreachable, InvalidReference, StoreRefused, StoreUnreachable
from probes_store.hub import MAIN, TAG, Hub, parse_address, tag_of
from probes_store.manifest import MANIFEST, Manifest, read_manifest, record_of


class HubSource:
    """See ``Source`` for what the methods do.  What the hub refuses is a HubError."""

    def __init__(self, url: str) -> None:
        address = parse_address(url.rstrip("/"))
        if address.revision is not None:
            raise InvalidReference(
                "a store has all versions", file=url, expected="hf://OWNER/NAME", found=ascii(url),
                cure="Name the version with the bundle: --bundle NAME:VERSION",
            )  # fmt: skip
        self.where = str(address)
        self._hub = Hub(address.repository)

    def names(self) -> Sequence[str]:
        """One."""
        with _answering():
            self._hub.tags()  # huggingface_hub reads a file from its cache where there is no answer; this asks
            return [read_manifest(self._hub.read(MANIFEST, MAIN, MAX_MANIFEST)[0]).name]

    def versions(self, name: str) -> set[int]:
        """The tags."""
        if name not in self.names():
            return set()
        with _answering():
            return {int(tag[1:]) for tag in self._hub.tags() if TAG.fullmatch(tag)}

    def aliases(self, name: str) -> dict[str, int]:
        """None: a repository has no table."""
        return {}

    def manifest(self, name: str, version: int) -> bytes:
        """bundle.json at the tag."""
        with _answering():
            return self._hub.read(MANIFEST, f"v{version}", MAX_MANIFEST)[0]

    def signature(self, name: str, version: int) -> bytes | None:
        """model.sig at the tag."""
        with _answering():
            if SIGNATURE not in self._hub.snapshot(f"v{version}").files:
                return None
            return self._hub.read(SIGNATURE, f"v{version}", MAX_SIGNATURE)[0]

    def files(self, manifest: Manifest) -> dict[str, bytes]:
        """Those at the tag."""
        files = {}
        for name, record in manifest.files.items():
            for again in (False, True):  # what an earlier run left in huggingface_hub's cache may be damaged
                with _answering():
                    files[name], _ = self._hub.read(name, tag_of(manifest), record.bytes, again=again)
                if record_of(files[name]) == record:
                    break
            else:
                raise DigestMismatch(
                    "the repository has another file", file=name, expected=record.sha256,
                    found=record_of(files[name]).sha256,
                )  # fmt: skip
        return files

    def check_writable(self) -> None:
        """A repository is read only here."""
        self._refuse()

    def publish(self, manifest: Manifest, files: Mapping[str, bytes]) -> int:
        """A repository is read only here."""
        self._refuse()

    def add(self, manifest: Manifest, files: Mapping[str, bytes]) -> bool:
        """A repository is read only here."""
        self._refuse()

    def set_alias(self, name: str, alias: str, version: int, keep_as: str | None = None) -> None:
        """A repository is read only here."""
        self._refuse()

    def write_signature(self, name: str, version: int, data: bytes) -> None:
        """A repository is read only here."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StoreRefused(
            "a repository of the hub is only read as a store, and has no aliases", file=self.where,
            cure="Publish into a store of your own, sign there, and run 'hallutracer bundle push'",
        )  # fmt: skip


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except HubUnreachable as error:
        raise StoreUnreachable(str(error)) from error
