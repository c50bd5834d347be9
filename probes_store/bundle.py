"""Writes and loads a bundle's folder, and checks the replay of its golden prompts and answers.

Loading checks the manifest first, then names, sizes and hashes of all files, and only then parses
the tensors. Publishing renders everything to bytes and reads it back with the same reader, so every
published bundle loads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.errors import (
    BadValue,
    BundleNotFound,
    DigestMismatch,
    GoldenMismatch,
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
from probes_store.records import Floats
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


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted deviation of a risk, and of a truth logit in units of the trajectories'
    spread."""

    risk: float
    trajectory: float


# Qwen2.5-Coder-1.5B in float32 deviates by up to 0.32 from what it read in bfloat16, at an early
# layer, and its risks by 0.01.  Where it reads one wrong head or layer, it deviates by 0.76.
_HALF = Tolerance(risk=0.05, trajectory=0.5)
TOLERANCES = {"float32": Tolerance(risk=1e-3, trajectory=1e-3), "float16": _HALF, "bfloat16": _HALF}


def tolerance_for(*dtypes: str) -> Tolerance:
    """Return the loosest tolerance among the dtypes.  Raises ValueError for a dtype that is not in
    TOLERANCES."""
    if unknown := [dtype for dtype in dtypes if dtype not in TOLERANCES]:
        raise ValueError(
            f"no golden tolerance for dtype {unknown[0]!r}; expected one of {', '.join(TOLERANCES)}"
        )
    return max((TOLERANCES[dtype] for dtype in dtypes), key=lambda tolerance: tolerance.risk)


def spreads(trajectory: Floats, layers: int) -> NDArray[np.float64]:
    """Return the spread of each logit's own probe, [(1 + A) m], of golden logits [G, (1 + A) m]
    with m ``layers``.

    It is the standard deviation over all golden logits of a probe, at least 1 % of their root mean
    square: the lower bound keeps a constant trajectory (one layer and one prompt) from requiring
        exact equality."""
    probes = np.asarray(trajectory, np.float64).reshape(len(trajectory), -1, layers)
    of_probe = [
        max(values.std(), 0.01 * np.sqrt(np.mean(values**2)))
        for values in np.moveaxis(probes, 1, 0)
    ]
    return np.repeat(np.array(of_probe), layers)


@dataclass(frozen=True, slots=True)
class Deviation:
    """The largest deviation of a replay that passed, and the limit; units as in ``Tolerance``."""

    found: Tolerance
    allowed: Tolerance


def check_golden(bundle: Bundle, trajectories: Floats, risks: Floats, *, dtype: str) -> Deviation:
    """Compare a replay's logits [G, (1 + A) m] and risks [G], computed in ``dtype``, with the
    recorded ones.

    Hashes show that a bundle's bytes are right.  Only the replay shows that the engine reads the
    right layer, position and heads: a wrong one deviates by more than one spread.  The logits of
    each probe are compared in units of their own spread, with the tolerance of the looser dtype,
    the bundle's or the engine's.  Two correct engines differ by about 1e-6 in float32; a bfloat16
    rounding is 0.4 %, which over a few dozen blocks grows to some percent of the spread.

    Raises GoldenMismatch with the worst deviation, for any NaN and for another shape; ValueError
    for an unknown dtype.
    """
    return _compare(bundle, bundle.golden, trajectories, risks, dtype, "prompt")


def check_answers(bundle: Bundle, trajectories: Floats, risks: Floats, *, dtype: str) -> Deviation:
    """Compare a replay of the golden answers, logits [G, m] averaged over each one's tokens and
    risks [G].

    Works like ``check_golden`` and raises the same; also ValueError for a bundle without an answer
    probe."""
    if bundle.answer is None:
        raise ValueError(f"bundle {bundle.reference} has no answer probe")
    return _compare(bundle, bundle.answer, trajectories, risks, dtype, "answer")


def _compare(
    bundle: Bundle,
    golden: Golden | AnswerTensors,
    trajectories: Floats,
    risks: Floats,
    dtype: str,
    row: str,
) -> Deviation:
    """Compare logits [G, k m] and risks [G] with those of ``golden``; ``row`` is the word for its
    rows in messages."""
    manifest = bundle.manifest
    layers = bundle.manifest.model.num_layers
    tolerance = tolerance_for(manifest.dtype, dtype)
    units = {"trajectory": spreads(golden.trajectory, layers), "risk": np.ones(1)}
    worst: dict[str, float] = {}
    for field_name, replay in {"trajectory": trajectories, "risk": risks}.items():
        recorded = np.asarray(getattr(golden, field_name), np.float64)
        replayed = np.asarray(replay, np.float64)
        limit = getattr(tolerance, field_name)
        if replayed.shape != recorded.shape:
            raise GoldenMismatch(
                f"bundle {bundle.reference}: the replay of its golden {row}s has another shape",
                field=field_name,
                expected=list(recorded.shape),
                found=list(replayed.shape),
            )
        unit = np.broadcast_to(units[field_name], recorded.shape)
        deviation = np.abs(replayed - recorded) / unit
        at = np.unravel_index(int(np.argmax(deviation)), deviation.shape)  # the first NaN, if any
        worst[field_name] = float(deviation[at])
        if not worst[field_name] <= limit:  # also for NaN
            entry = f"golden {row} {at[0]}"
            if field_name == "trajectory":
                probe, layer = divmod(int(at[1]), layers)
                entry += f", layer {layer}"
                if probe and manifest.context is not None:
                    entry += f" of context probe {manifest.context.probes[probe - 1].name}"
            raise GoldenMismatch(
                f"bundle {bundle.reference}: the engine ({dtype}) does not reproduce {entry},"
                f" recorded in {manifest.dtype}; the deviation is {deviation[at] * unit[at]:.3g}"
                f" and {limit * unit[at]:.3g} would pass",
                field=field_name,
                expected=f"{recorded[at]:.6g}",
                found=f"{replayed[at]:.6g}",
            )
    return Deviation(Tolerance(**worst), tolerance)
