"""Writes and loads a bundle's folder, and checks the replay of its golden prompts and answers.

Loading checks the manifest first, then names, sizes and hashes of all files, and only then parses
the tensors. Publishing renders everything to bytes and reads it back with the same reader, so every
published bundle loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store import errors
from probes_store import manifest as manifests
from probes_store.errors import (
    BadValue,
    BundleNotFound,
    DigestMismatch,
    GoldenMismatch,
    MissingFile,
    Truncated,
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
    read_manifest,
)
from probes_store.syntax import parse_json, plain, readable_json
from probes_store.tensors import (
    AnswerTensors,
    Golden,
    ProbeTensors,
    pack,
    read_answer,
    read_golden,
    read_probes,
)

MAX_MANIFEST = 1 << 20  # bytes
MAX_TOTAL = 256 * 1024 * 1024  # bytes of a bundle that comes over a network, all files together
SIGNATURE = (  # by OpenSSF model signing; it covers the manifest, so the manifest cannot list it
    "model.sig"
)
MAX_SIGNATURE = 1 << 20  # bytes


@dataclass
class BundleDraft:
    """The parts of a bundle before it is published."""

    manifest: Manifest  # ``render`` and publishing set version, created, digest, seal and files
    probes: ProbeTensors
    golden: Golden
    evaluation: dict[str, Any]
    card: str  # README.md; must not contain version, digest or time, which are set on publishing
    plots: dict[str, bytes] = field(
        default_factory=dict
    )  # "roc.png" -> bytes, becomes plots/roc.png
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

    def files(self) -> dict[str, bytes]:
        """Read and verify the manifest and the files that it lists.  Raises a subclass of
        BundleDamaged."""
        return {
            **read_files(self.path, self.manifest),
            MANIFEST: manifests.manifest_bytes(self.manifest),
        }

    def evaluation(self) -> dict[str, Any]:
        """Read and verify evaluation.json.  Raises a subclass of BundleDamaged."""
        shown = _shown(self.path, EVALUATION)
        value = parse_json(_read_listed(self.path, self.manifest, EVALUATION), shown)
        if not isinstance(value, dict):
            raise BadValue("bad value", file=shown, expected="an object", found=type(value))
        return value

    def card(self) -> str:
        """Read and verify README.md.  Raises a subclass of BundleDamaged."""
        try:
            return _read_listed(self.path, self.manifest, CARD).decode()
        except UnicodeDecodeError as error:
            raise BadValue(
                "not text", file=_shown(self.path, CARD), expected="UTF-8", found=error
            ) from error


def load_bundle(path: Path) -> Bundle:
    """Load and validate a bundle folder.

    Raises BundleNotFound if there is no such folder, or a subclass of BundleDamaged that names file
    and field."""
    path = Path(path)
    if not path.is_dir():
        raise BundleNotFound("no bundle folder there", file=str(path), cure="Check the path")
    manifest = read_manifest(_read(path, MANIFEST, MAX_MANIFEST), _shown(path, MANIFEST))
    for entry in path.rglob("*"):
        name = entry.relative_to(path).as_posix()
        if not (
            name in (*manifest.files, MANIFEST, SIGNATURE, "plots") or entry.name.startswith(".")
        ):
            raise errors.UnknownFile(
                "the manifest does not list this file", file=_shown(path, name)
            )
    probes, golden, answer = _read_tensors(
        read_files(path, manifest), manifest, partial(_shown, path)
    )
    return Bundle(manifest, probes, golden, path, answer)


def load_version(name: str, path: Path) -> Bundle:
    """Load the bundle in .../NAME/VERSION; its manifest must have that name and version.

    Raises what ``load_bundle`` raises."""
    bundle = load_bundle(path)
    for part, expected in (("name", name), ("version", int(path.name))):
        if (recorded := getattr(bundle.manifest, part)) != expected:
            raise BadValue(
                "the folder does not match the manifest",
                file=_shown(path, MANIFEST),
                field=part,
                expected=expected,
                found=recorded,
                cure="Move it back, or publish anew",
            )
    return bundle


def read_signature(path: Path) -> bytes | None:
    """Read model.sig of a bundle's folder; None if there is none.  Raises a subclass of
    BundleDamaged."""
    return _read(path, SIGNATURE, MAX_SIGNATURE) if (path / SIGNATURE).exists() else None


def check_total(manifest: Manifest) -> None:
    """Raise BadValue if the files together are larger than a bundle from a network may be."""
    total = sum(record.bytes for record in manifest.files.values())
    if total > MAX_TOTAL:
        raise BadValue(
            "the bundle is too large", expected=f"at most {MAX_TOTAL} bytes", found=total
        )


def read_files(path: Path, manifest: Manifest) -> dict[str, bytes]:
    """Read every file that the manifest lists, with its size and hash.  Raises a subclass of
    BundleDamaged."""
    return {name: _read_listed(path, manifest, name) for name in manifest.files}


def render(draft: BundleDraft) -> tuple[Manifest, dict[str, bytes]]:
    """Return a draft's manifest, as version 1 without a time, and the bytes of every other file.

    The same draft gives the same bytes and the same digest.  Raises a subclass of BundleDamaged if
    the result would not load."""
    if not draft.card.strip():
        raise BadValue(
            "bad value",
            file=CARD,
            expected="a model card",
            found="an empty text",
            cure="Write the card",
        )
    files = {
        PROBES: pack(draft.probes, PROBES),
        GOLDEN: pack(draft.golden, GOLDEN),
        **({} if draft.answer is None else {ANSWER: pack(draft.answer, ANSWER)}),
        EVALUATION: readable_json(plain(draft.evaluation, EVALUATION)),
        CARD: draft.card.encode(),
        **{f"plots/{name}": data for name, data in draft.plots.items()},
    }
    records = {name: vars(manifests.record_of(data)) for name, data in files.items()}
    set_here = {"version": 1, "created": manifests.UNSET_TIME, "files": records}
    fields = plain(manifests.as_document(draft.manifest) | set_here, MANIFEST)
    manifest = manifests.read_record(manifests.with_seal(fields), MANIFEST)
    _read_tensors(files, manifest)
    return manifest, files


def _read_tensors(
    files: Mapping[str, bytes], manifest: Manifest, shown: Callable[[str], str] = str
) -> tuple[ProbeTensors, Golden, AnswerTensors | None]:
    """Read every tensor file of a manifest; ``shown`` gives a file's name for messages."""
    probes = read_probes(files[PROBES], manifest, shown(PROBES))
    golden = read_golden(files[GOLDEN], manifest, shown(GOLDEN))
    answer = (
        None if manifest.answer is None else read_answer(files[ANSWER], manifest, shown(ANSWER))
    )
    return probes, golden, answer


def timestamp(moment: datetime | None = None) -> str:
    """Return a moment (with a time zone; default now) in the manifest's format."""
    return (moment or datetime.now(UTC)).astimezone(UTC).strftime(manifests.TIME)


def _read(folder: Path, name: str, limit: int) -> bytes:
    """Read a regular file inside the folder, of at most ``limit`` bytes."""
    path, shown = folder / name, _shown(folder, name)
    try:
        if not path.is_file():
            raise MissingFile("the file is missing", file=shown)
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BadValue(
                "a link that leaves the bundle", file=shown, expected="a file", found=path.resolve()
            )
        with open(path, "rb") as file:
            # ``read`` allocates what it is asked for and the manifest may state any size: the
            # file's size bounds it.
            data = file.read(min(limit, path.stat().st_size) + 1)
    except OSError as error:
        raise MissingFile(f"the file cannot be read: {error.strerror}", file=shown) from error
    if len(data) > limit:
        raise too_long(shown, limit)
    return data


def too_long(file: str, limit: int) -> DigestMismatch:
    """Return the error for a file of more than ``limit`` bytes."""
    return DigestMismatch(
        "the file is too long", file=file, expected=f"at most {limit} bytes", found="more"
    )


def listed(data: bytes, record: FileRecord, file: str) -> bytes:
    """Check that the bytes are those that the manifest lists, and return them.  Raises Truncated
    and DigestMismatch."""
    if (size := len(data)) < record.bytes:
        raise Truncated(
            "the file is too short",
            file=file,
            expected=f"{record.bytes} bytes",
            found=f"{size} bytes",
        )
    if (digest := manifests.record_of(data).sha256) != record.sha256:
        raise DigestMismatch(
            "the file was changed", file=file, field="sha256", expected=record.sha256, found=digest
        )
    return data


def _read_listed(folder: Path, manifest: Manifest, name: str) -> bytes:
    record = manifest.files[name]
    return listed(_read(folder, name, record.bytes), record, _shown(folder, name))


def _shown(folder: Path, name: str) -> str:
    """Return NAME/VERSION/file for messages: they may reach a client, so they must not show the
    machine's folders."""
    folder = folder.absolute()
    return f"{folder.parent.name}/{folder.name}/{name}"


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


def spreads(trajectory: NDArray[np.floating], layers: int) -> NDArray[np.float64]:
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


def check_golden(
    bundle: Bundle, trajectories: NDArray[np.floating], risks: NDArray[np.floating], *, dtype: str
) -> Deviation:
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


def check_answers(
    bundle: Bundle, trajectories: NDArray[np.floating], risks: NDArray[np.floating], *, dtype: str
) -> Deviation:
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
    trajectories: NDArray[np.floating],
    risks: NDArray[np.floating],
    dtype: str,
    row: str,
) -> Deviation:
    """Compare logits [G, k m] and risks [G] with those of ``golden``; ``row`` is the word for its
    rows in messages."""
    context, layers = bundle.manifest.context, bundle.manifest.model.num_layers
    tolerance = tolerance_for(bundle.manifest.dtype, dtype)
    worst_of: dict[str, float] = {}
    for what, values, recorded, unit, limit in (
        (
            "trajectory",
            trajectories,
            golden.trajectory,
            spreads(golden.trajectory, layers),
            tolerance.trajectory,
        ),
        ("risk", risks, golden.risk, np.ones(()), tolerance.risk),
    ):
        replayed, expected = np.asarray(values, np.float64), np.asarray(recorded, np.float64)
        if replayed.shape != expected.shape:
            raise GoldenMismatch(
                f"bundle {bundle.reference}: the replay of its golden {row}s has another shape",
                field=what,
                expected=list(expected.shape),
                found=list(replayed.shape),
            )
        deviation = np.abs(replayed - expected) / unit
        worst_of[what] = float(deviation.max())
        worst = np.unravel_index(int(np.argmax(deviation)), deviation.shape)
        if not deviation[worst] <= limit:  # argmax finds NaN first, and this comparison rejects it
            row_name = f"golden {row} {worst[0]}"
            if len(worst) > 1:
                probe, layer = divmod(int(worst[1]), layers)
                row_name += f", layer {layer}"
                row_name += (
                    f" of context probe {context.probes[probe - 1].name}"
                    if probe and context is not None
                    else ""
                )
            size = float(np.broadcast_to(unit, deviation.shape)[worst])
            problem = (
                f"bundle {bundle.reference}: the engine ({dtype}) does not reproduce {row_name},"
                f" recorded in {bundle.manifest.dtype}; the deviation is"
                f" {deviation[worst] * size:.3g} and {limit * size:.3g} would pass"
            )
            raise GoldenMismatch(
                problem,
                field=what,
                expected=f"{expected[worst]:.6g}",
                found=f"{replayed[worst]:.6g}",
            )
    return Deviation(Tolerance(**worst_of), tolerance)
