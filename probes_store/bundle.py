"""A bundle: draft -> bytes on disk -> frozen Bundle.  Knows neither versions nor aliases of a store, nor any engine.

Reading goes from outside in: the manifest, then names, sizes and hashes of all files, and only then the tensors.
Writing renders everything to bytes and hands those to the very reader that will load them, before the first byte
reaches the disk: what cannot be loaded cannot be published.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from probes_store.durable import sync_folder, write_file, writing
from probes_store.errors import (
    AlreadyPublished,
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
    FORMAT,
    FORMAT_VERSION,
    GOLDEN,
    MANIFEST,
    PROBES,
    Classifier,
    FileRecord,
    Manifest,
    ModelRecord,
    TrainingRecord,
    check_fields,
    manifest_bytes,
    read_manifest,
    sealed,
)
from probes_store.strict import parse_json, plain, read_record, readable_json
from probes_store.tensors import Golden, ProbeTensors, pack, read_golden, read_probes

LARGEST_MANIFEST = 1 << 20  # bytes
SIGNATURE = "model.sig"  # reserved: a detached signature signs the manifest, so the manifest cannot list it


@dataclass
class BundleDraft:
    """What a training run hands over.  Field by field as in the manifest; arrays as in ``tensors``."""

    name: str
    model: ModelRecord
    tokenizer: str
    chat_template: str | None
    prompt_format: str
    dtype: str
    site: str
    logit_scale: str
    signals: tuple[str, ...]
    classifier: Classifier
    threshold: float
    training: TrainingRecord
    probes: ProbeTensors
    golden: Golden
    evaluation: dict[str, Any]
    card: str  # README.md; without version, digest and time, which publishing adds and content must not depend on
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
        """evaluation.json, read and hashed anew.  Raises a subclass of BundleDamaged."""
        data = _read_listed(self.path, EVALUATION, self.manifest.files[EVALUATION])
        value = parse_json(data, _shown(self.path, EVALUATION))
        if not isinstance(value, dict):
            raise BadValue("bad value", file=_shown(self.path, EVALUATION), expected="an object", found=type(value))
        return value

    def card(self) -> str:
        """README.md, read and hashed anew.  Raises a subclass of BundleDamaged."""
        data = _read_listed(self.path, CARD, self.manifest.files[CARD])
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise BadValue("not text", file=_shown(self.path, CARD), expected="UTF-8", found=error) from error


def load_bundle(path: Path) -> Bundle:
    """A bundle folder -> Bundle, all of it validated.

    Raises BundleNotFound where there is no such folder, and a subclass of BundleDamaged that names file and field.
    """
    path = Path(path)
    if not path.is_dir():
        raise BundleNotFound("no bundle folder there", file=str(path), cure="Check the path")
    manifest = read_manifest(_read(path, MANIFEST, LARGEST_MANIFEST), _shown(path, MANIFEST))
    for found in path.rglob("*"):
        name = found.relative_to(path).as_posix()
        known = name in (*manifest.files, MANIFEST, SIGNATURE, "plots") or name.rsplit("/", 1)[-1].startswith(".")
        if not known:
            raise UnknownFile("the manifest does not list this file", file=_shown(path, name))
    files = {name: _read_listed(path, name, record) for name, record in manifest.files.items()}
    probes = read_probes(files[PROBES], manifest, _shown(path, PROBES))
    golden = read_golden(files[GOLDEN], manifest, _shown(path, GOLDEN))
    return Bundle(manifest, probes, golden, path)


def render(draft: BundleDraft) -> tuple[Manifest, dict[str, bytes]]:
    """A draft -> its manifest (as version 1 of an unset time) and the bytes of every other file.

    The same draft gives the same bytes and the same digest.  Raises a subclass of BundleDamaged where it could not be
    loaded again.
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
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": draft.name,
        "version": 1,
        "created": "1970-01-01T00:00:00Z",
        "digest": "",
        "seal": "",
        "model": dataclasses.asdict(draft.model),
        "tokenizer": {"digest": draft.tokenizer},
        "chat_template": {"digest": draft.chat_template},
        "prompt_format": draft.prompt_format,
        "dtype": draft.dtype,
        "readout": {"site": draft.site, "position": "last"},
        "logit_scale": draft.logit_scale,
        "signals": draft.signals,
        "classifier": dataclasses.asdict(draft.classifier),
        "threshold": draft.threshold,
        "training": dataclasses.asdict(draft.training),
        "files": {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
        },
    }
    manifest = read_record(Manifest, plain(document, MANIFEST), MANIFEST)
    manifest = sealed(manifest, version=1, created=manifest.created)
    check_fields(manifest)
    read_probes(files[PROBES], manifest)
    read_golden(files[GOLDEN], manifest)
    return manifest, files


def write_bundle(draft: BundleDraft, into: Path, *, version: int = 1, created: datetime | None = None) -> Bundle:
    """Write a draft as one bundle folder and load it back.  ``Store.publish`` is the way into a store.

    Raises AlreadyPublished where ``into`` holds anything, StoreNotWritable, and what ``render`` raises.
    """
    manifest, files = render(draft)
    manifest = sealed(manifest, version=version, created=timestamp(created))
    check_fields(manifest)
    into = Path(into)
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise AlreadyPublished("something stands there already", file=str(into))
    with writing(into):
        into.mkdir(parents=True, exist_ok=True)
        write_files(into, files)
        write_manifest(into, manifest)
    return load_bundle(into)


def write_files(into: Path, files: Mapping[str, bytes]) -> None:
    """Every file but the manifest, flushed.  Raises OSError."""
    for name, data in files.items():
        write_file(into / name, data)
    for folder in {(into / name).parent for name in files}:
        sync_folder(folder)


def write_manifest(into: Path, manifest: Manifest) -> None:
    """bundle.json, flushed; written last, so that a half-written folder is no bundle.  Raises OSError."""
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
            # Not more than there is: the manifest's size may be anything, and reading allocates what it is asked for.
            data = file.read(min(limit, path.stat().st_size) + 1)
    except OSError as error:
        raise MissingFile(f"the file cannot be read: {error.strerror}", file=shown) from error
    if len(data) > limit:
        raise DigestMismatch("the file is too long", file=shown, expected=f"at most {limit} bytes", found="more")
    return data


def _read_listed(folder: Path, name: str, record: FileRecord) -> bytes:
    """A file of the manifest, once its size and hash are right; the bytes that were hashed are the ones returned."""
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
    """NAME/VERSION/file: enough to find it, and nothing of the machine's folders, as messages may reach a client."""
    folder = folder.absolute()
    return f"{folder.parent.name}/{folder.name}/{name}"
