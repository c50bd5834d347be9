"""A bundle folder: draft -> bytes on disk -> frozen Bundle.

Loading checks the manifest first, then names, sizes and hashes of all files, and only then parses the tensors.
Before writing, everything is rendered to bytes and read back by the same reader, so that only a bundle that loads can
be published.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from probes_store.durable import sync_folder, write_file
from probes_store.errors import (
    BadValue,
    BundleNotFound,
    DigestMismatch,
    MissingFile,
    Truncated,
    UnknownFile,
)
from probes_store.manifest import (
    CARD,
    EVALUATION,
    GOLDEN,
    MANIFEST,
    PROBES,
    UNSET_TIME,
    FileRecord,
    Manifest,
    check_fields,
    manifest_bytes,
    read_manifest,
    record_of,
    sealed,
)
from probes_store.strict import parse_json, plain, read_record, readable_json
from probes_store.tensors import Golden, ProbeTensors, pack, read_golden, read_probes

MAX_MANIFEST = 1 << 20  # bytes
MAX_TOTAL = 256 * 1024 * 1024  # bytes of a bundle that comes over a network, all files together
SIGNATURE = "model.sig"  # OpenSSF model signing's, detached: it covers the manifest, so the manifest cannot list it
MAX_SIGNATURE = 1 << 20  # bytes


@dataclass
class BundleDraft:
    """What a training run publishes."""

    manifest: Manifest  # ``render`` and publishing set version, created, digest, seal and files
    probes: ProbeTensors
    golden: Golden
    evaluation: dict[str, Any]
    card: str  # README.md; must not contain version, digest or time, which are set on publishing
    plots: dict[str, bytes] = field(default_factory=dict)  # "roc.png" -> bytes, becomes plots/roc.png


@dataclass(frozen=True, eq=False)
class Bundle:
    """A loaded, validated bundle.  Arrays are read-only."""

    manifest: Manifest
    probes: ProbeTensors
    golden: Golden
    path: Path

    @property
    def reference(self) -> str:
        """NAME:VERSION."""
        return self.manifest.reference

    def evaluation(self) -> dict[str, Any]:
        """evaluation.json, read and verified.  Raises a subclass of BundleDamaged."""
        data = _read_listed(self.path, EVALUATION, self.manifest.files[EVALUATION])
        value = parse_json(data, _shown(self.path, EVALUATION))
        if not isinstance(value, dict):
            raise BadValue("bad value", file=_shown(self.path, EVALUATION), expected="an object", found=type(value))
        return value

    def card(self) -> str:
        """README.md, read and verified.  Raises a subclass of BundleDamaged."""
        data = _read_listed(self.path, CARD, self.manifest.files[CARD])
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise BadValue("not text", file=_shown(self.path, CARD), expected="UTF-8", found=error) from error


def load_bundle(path: Path) -> Bundle:
    """Load and validate a bundle folder.

    Raises BundleNotFound if there is no such folder, or a subclass of BundleDamaged that names file and field.
    """
    path = Path(path)
    if not path.is_dir():
        raise BundleNotFound("no bundle folder there", file=str(path), cure="Check the path")
    manifest = read_manifest(_read(path, MANIFEST, MAX_MANIFEST), _shown(path, MANIFEST))
    for entry in path.rglob("*"):
        name = entry.relative_to(path).as_posix()
        known = name in (*manifest.files, MANIFEST, SIGNATURE, "plots") or name.rsplit("/", 1)[-1].startswith(".")
        if not known:
            raise UnknownFile("the manifest does not list this file", file=_shown(path, name))
    files = read_files(path, manifest)
    probes = read_probes(files[PROBES], manifest, _shown(path, PROBES))
    golden = read_golden(files[GOLDEN], manifest, _shown(path, GOLDEN))
    return Bundle(manifest, probes, golden, path)


def read_signature(path: Path) -> bytes | None:
    """model.sig of a bundle's folder; None where there is none.  Raises a subclass of BundleDamaged."""
    if not (path / SIGNATURE).exists():
        return None
    return _read(path, SIGNATURE, MAX_SIGNATURE)


def read_files(path: Path, manifest: Manifest) -> dict[str, bytes]:
    """Every file that the manifest lists, after checking its size and hash.  Raises a subclass of BundleDamaged."""
    return {name: _read_listed(path, name, record) for name, record in manifest.files.items()}


def render(draft: BundleDraft) -> tuple[Manifest, dict[str, bytes]]:
    """A draft -> its manifest (version 1, ``UNSET_TIME``) and the bytes of every other file.

    The same draft gives the same bytes and the same digest.  Raises a subclass of BundleDamaged where the result would
    not load.
    """
    if not draft.card.strip():
        raise BadValue("bad value", file=CARD, expected="a model card", found="an empty text", cure="Write the card")
    files = {
        PROBES: pack(draft.probes, PROBES),
        GOLDEN: pack(draft.golden, GOLDEN),
        EVALUATION: readable_json(plain(draft.evaluation, EVALUATION)),
        CARD: draft.card.encode(),
        **{f"plots/{name}": data for name, data in draft.plots.items()},
    }
    records = {name: record_of(data) for name, data in files.items()}
    document = dataclasses.asdict(dataclasses.replace(draft.manifest, files=records))
    manifest = read_record(Manifest, plain(document, MANIFEST), MANIFEST)
    manifest = sealed(manifest, version=1, created=UNSET_TIME)
    check_fields(manifest)
    read_probes(files[PROBES], manifest)
    read_golden(files[GOLDEN], manifest)
    return manifest, files


def write_files(into: Path, files: Mapping[str, bytes]) -> None:
    """Every file but the manifest, flushed.  Raises OSError."""
    for name, data in files.items():
        write_file(into / name, data)
    for folder in {(into / name).parent for name in files}:
        sync_folder(folder)


def write_manifest(into: Path, manifest: Manifest) -> None:
    """bundle.json, flushed; written last, so that a folder is invalid until fully written.  Raises OSError."""
    write_file(into / MANIFEST, manifest_bytes(manifest))
    sync_folder(into)


def timestamp(moment: datetime | None = None) -> str:
    """A moment (with a time zone; default now) as the manifest writes it."""
    return (moment or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _read(folder: Path, name: str, limit: int) -> bytes:
    """A regular file inside the folder, of at most ``limit`` bytes."""
    path, shown = folder / name, _shown(folder, name)
    try:
        if not path.is_file():
            raise MissingFile("the file is missing", file=shown)
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BadValue("a link that leaves the bundle", file=shown, expected="a file", found=path.resolve())
        with open(path, "rb") as file:
            # ``read`` allocates what it is asked for and the manifest may state any size: the file's size bounds it.
            data = file.read(min(limit, path.stat().st_size) + 1)
    except OSError as error:
        raise MissingFile(f"the file cannot be read: {error.strerror}", file=shown) from error
    if len(data) > limit:
        raise DigestMismatch("the file is too long", file=shown, expected=f"at most {limit} bytes", found="more")
    return data


def _read_listed(folder: Path, name: str, record: FileRecord) -> bytes:
    """A file that the manifest lists, after checking its size and hash; returns the bytes that were hashed."""
    data = _read(folder, name, record.bytes)
    if len(data) < record.bytes:
        raise Truncated(
            "the file is too short",
            file=_shown(folder, name),
            expected=f"{record.bytes} bytes",
            found=f"{len(data)} bytes",
        )
    found = hashlib.sha256(data).hexdigest()
    if found != record.sha256:
        raise DigestMismatch(
            "the file was changed", file=_shown(folder, name), field="sha256", expected=record.sha256, found=found
        )
    return data


def _shown(folder: Path, name: str) -> str:
    """NAME/VERSION/file: a message may reach a client, so it must not show the machine's folders."""
    folder = folder.absolute()
    return f"{folder.parent.name}/{folder.name}/{name}"
