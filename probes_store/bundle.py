"""Writes and loads a bundle's folder.

Loading checks the manifest first, then names, sizes and hashes of all files, and only then parses
the tensors. Publishing renders everything to bytes and reads it back with the same reader, so every
published bundle loads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from probes_store.errors import (
    BadValue,
    BundleNotFound,
    DigestMismatch,
    MissingFile,
    Truncated,
    UnknownFile,
    located,
)
from probes_store.manifest import (
    ANSWER,
    CARD,
    EVALUATION,
    GOLDEN,
    MANIFEST,
    PROBES,
    FileRecord,
    Manifest,
    manifest_bytes,
    read_manifest,
    record_of,
    sealed,
)
from probes_store.syntax import parse_json, plain, readable_json
from probes_store.tensors import AnswerTensors, Golden, ProbeTensors

MAX_SMALL = 1 << 20  # bytes of a manifest, a signature, an index or an alias table
MAX_TOTAL = 256 * 1024 * 1024  # bytes of a bundle that comes over a network, all files together
SIGNATURE = "model.sig"  # by OpenSSF model signing; as it covers the manifest, that cannot list it
Files = dict[str, bytes]  # name -> content


@dataclass
class BundleDraft:
    """The parts of a bundle before it is published."""

    manifest: Manifest  # ``render`` and publishing set version, created, digest, seal and files
    probes: ProbeTensors
    golden: Golden
    evaluation: dict[str, Any]
    card: str  # README.md; must not contain version, digest or time, which are set on publishing
    # "roc.png" -> bytes, becomes plots/roc.png
    plots: Files = field(default_factory=dict)
    answer: AnswerTensors | None = None  # set exactly if the manifest has the record


@dataclass(frozen=True, eq=False)
class Bundle:
    """A loaded, validated bundle.  Arrays are read-only."""

    manifest: Manifest
    probes: ProbeTensors
    golden: Golden
    path: Path
    answer: AnswerTensors | None = None  # set exactly if the manifest has the record

    @property
    def reference(self) -> str:
        """NAME:VERSION."""
        return self.manifest.reference

    def signed_files(self) -> Files:
        """Read and verify the manifest and the files that it lists, which a signature covers.
        Raises a subclass of BundleDamaged."""
        listed_files = {name: self.read(name) for name in self.manifest.files}
        return listed_files | {MANIFEST: manifest_bytes(self.manifest)}

    def files(self) -> Files:
        """Read and verify all files: the signed ones, and the signature if there is one.  Raises a
        subclass of BundleDamaged."""
        signature = read_signature(self.path)
        return self.signed_files() | ({} if signature is None else {SIGNATURE: signature})

    def read(self, name: str) -> bytes:
        """Read and verify a file that the manifest lists.  Raises a subclass of BundleDamaged."""
        with located(_shown(self.path)):
            return _read_listed(self.path, self.manifest, name)

    def evaluation(self) -> dict[str, Any]:
        """Read and verify evaluation.json.  Raises a subclass of BundleDamaged."""
        data = self.read(EVALUATION)
        with located(f"{_shown(self.path)}/{EVALUATION}"):
            value = parse_json(data)
            if not isinstance(value, dict):
                raise BadValue(expected="an object", found=type(value))
        return value

    def card(self) -> str:
        """Read and verify README.md.  Raises a subclass of BundleDamaged."""
        try:
            return self.read(CARD).decode()
        except UnicodeDecodeError as error:
            raise BadValue(
                "not text", file=f"{_shown(self.path)}/{CARD}", expected="UTF-8", found=error
            ) from error


def load_bundle(path: Path) -> Bundle:
    """Load and validate a bundle folder.

    Raises BundleNotFound if there is no such folder, or a subclass of BundleDamaged that names file
    and field."""
    path = Path(path)
    if not path.is_dir():
        raise BundleNotFound("no bundle folder there", file=str(path), cure="Check the path")
    with located(_shown(path)):
        manifest = read_manifest(_read(path, MANIFEST, MAX_SMALL))
        known = {*manifest.files, MANIFEST, SIGNATURE, "plots"}
        for entry in path.rglob("*"):
            name = entry.relative_to(path).as_posix()
            if name not in known and not entry.name.startswith("."):
                raise UnknownFile(file=name)
        files = {name: _read_listed(path, manifest, name) for name in manifest.files}
        probes, golden, answer = _read_tensors(files, manifest)
    return Bundle(manifest, probes, golden, path, answer)


def load_version(name: str, path: Path) -> Bundle:
    """Load the bundle in .../NAME/VERSION; its manifest must have that name and version.

    Raises what ``load_bundle`` raises."""
    bundle = load_bundle(path)
    check_place(bundle.manifest, f"{name}:{path.name}")
    return bundle


def check_place(manifest: Manifest, reference: str) -> None:
    """Raise BadValue if a manifest that was read in the place of a reference has another one."""
    if manifest.reference != reference:
        raise BadValue(
            "the place does not match the manifest",
            file=f"{reference.replace(':', '/')}/{MANIFEST}",
            field="name and version",
            expected=reference,
            found=manifest.reference,
            cure="Move it back, or publish anew",
        )


def read_signature(path: Path) -> bytes | None:
    """Read model.sig of a bundle's folder; None if there is none.  Raises a subclass of
    BundleDamaged."""
    if not (path / SIGNATURE).exists():
        return None
    with located(_shown(path)):
        return _read(path, SIGNATURE, MAX_SMALL)


def check_total(manifest: Manifest) -> None:
    """Raise BadValue if the files together are larger than a bundle from a network may be."""
    if manifest.total > MAX_TOTAL:
        raise BadValue(
            "the bundle is too large", expected=f"at most {MAX_TOTAL} bytes", found=manifest.total
        )


def render(draft: BundleDraft) -> tuple[Manifest, Files]:
    """Return a draft's manifest, as version 1 without a time, and the bytes of every other file.

    The same draft gives the same bytes and the same digest.  Raises a subclass of BundleDamaged if
    the result would not load."""
    if not draft.card.strip():
        raise BadValue(file=CARD, expected="a model card", found="an empty text", cure="Write it")
    with located(EVALUATION):
        evaluation = readable_json(plain(draft.evaluation))
    tensors = (draft.probes, draft.golden, draft.answer)
    files = {
        **{part.file: part.pack() for part in tensors if part is not None},
        EVALUATION: evaluation,
        CARD: draft.card.encode(),
        **{f"plots/{name}": data for name, data in draft.plots.items()},
    }
    records = {name: record_of(data) for name, data in files.items()}
    with located(MANIFEST):
        manifest = sealed(replace(draft.manifest, files=records))
    _read_tensors(files, manifest)
    return manifest, files


def _read_tensors(
    files: Files, manifest: Manifest
) -> tuple[ProbeTensors, Golden, AnswerTensors | None]:
    """Read every tensor file of a manifest."""
    return (
        ProbeTensors.read(files[PROBES], manifest),
        Golden.read(files[GOLDEN], manifest),
        None if manifest.answer is None else AnswerTensors.read(files[ANSWER], manifest),
    )


def _read(folder: Path, name: str, limit: int) -> bytes:
    """Read a regular file inside the folder, of at most ``limit`` bytes."""
    path = folder / name
    try:
        if not path.is_file():
            raise MissingFile(file=name)
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BadValue(
                "a link that leaves the bundle", file=name, expected="a file", found=path.resolve()
            )
        with open(path, "rb") as file:
            # ``read`` allocates what it is asked for and the manifest may state any size: the
            # file's size bounds it.
            data = file.read(min(limit, path.stat().st_size) + 1)
    except OSError as error:
        raise MissingFile(f"the file cannot be read: {error.strerror}", file=name) from error
    if len(data) > limit:
        raise too_long(name, limit)
    return data


def too_long(file: str, limit: int) -> DigestMismatch:
    """Return the error for a file of more than ``limit`` bytes."""
    return DigestMismatch(
        "the file is too long", file=file, expected=f"at most {limit} bytes", found="more"
    )


def listed(data: bytes, record: FileRecord, file: str) -> bytes:
    """Check that the bytes are those that the manifest lists, and return them.  Raises Truncated
    and DigestMismatch."""
    actual = record_of(data)
    if actual.bytes < record.bytes:
        raise Truncated(
            "the file is too short", file=file, expected=f"{record.bytes} bytes", found=actual.bytes
        )
    if actual.sha256 != record.sha256:
        raise DigestMismatch(
            "the file was changed",
            file=file,
            field="sha256",
            expected=record.sha256,
            found=actual.sha256,
        )
    return data


def _read_listed(folder: Path, manifest: Manifest, name: str) -> bytes:
    record = manifest.files[name]
    return listed(_read(folder, name, record.bytes), record, name)


def _shown(folder: Path) -> str:
    """Return NAME/VERSION for messages: they may reach a client, so they must not show the
    machine's folders."""
    return "/".join(folder.absolute().parts[-2:])
