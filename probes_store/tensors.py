"""Reads and writes the tensor files of a bundle.

Symbols: m layers, d the length of a probe direction, A context probes, L = (1 + A) m logits, G
golden prompts or answers.  Arrays from a file are read-only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from probes_store.errors import (
    BadValue,
    MissingField,
    NotFinite,
    UnknownField,
    WrongShape,
    located,
)
from probes_store.manifest import ANSWER, FIRST_TOKEN_SIGNALS, GOLDEN, PROBES, Manifest
from probes_store.records import Floats
from probes_store.syntax import parse_json

UNIT_NORM_TOLERANCE = 1e-4
MAX_HEADER = 64 * 1024  # bytes; there are at most twelve tensors
_NUMPY: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
# With its axes behind it, such as Annotated[F32, "m d"], this declares a tensor of a file.  An axis
# that is none of the symbols may have any length.
I32 = Annotated[NDArray[np.int32], "I32"]
F32 = Annotated[NDArray[np.float32], "F32"]
F64 = Annotated[NDArray[np.float64], "F64"]
Layout = Mapping[str, tuple[str, str]]  # tensor -> element type, axes


@dataclass(frozen=True, eq=False)
class TensorFile(ABC):
    """The tensors of one file.  Those that may be None are there if no axis has the length 0."""

    file = ""  # its name

    @classmethod
    @cache
    def layout(cls) -> Layout:
        """Return all tensors that the file can have."""
        hints = get_type_hints(cls, include_extras=True)
        tensors = {
            name: hint if get_origin(hint) is Annotated else get_args(hint)[0]
            for name, hint in hints.items()
        }
        return {name: get_args(tensor)[1:] for name, tensor in tensors.items()}

    @classmethod
    def read(cls, data: bytes, manifest: Manifest) -> Self:
        """Read the tensors of the manifest's geometry and records.  Raises a subclass of
        BundleDamaged."""
        with located(cls.file):
            tensors = cls(**_unpack(data, cls.layout(), manifest))
            tensors.check(manifest)
        return tensors

    @abstractmethod
    def check(self, manifest: Manifest) -> None:
        """Raise BadValue or WrongShape for numbers that the tensors do not take."""

    def pack(self) -> bytes:
        """Return safetensors bytes.  Raises WrongShape if an element type would lose something
        (int64 ids, say)."""
        arrays = {}
        for name, value in vars(self).items():
            if value is None:
                continue
            array = np.asarray(value)
            wanted = _NUMPY[self.layout()[name][0]]
            fits = array.dtype != bool and np.can_cast(array.dtype, wanted, "same_kind")
            if fits and wanted.kind == "i":
                fits = np.array_equal(array, array.astype(wanted))
            if not fits:
                raise WrongShape(
                    "element type",
                    file=self.file,
                    field=name,
                    expected=f"numbers that fit {wanted}",
                    found=array.dtype,
                )
            with np.errstate(over="ignore"):  # an overflow becomes infinite, which ``read`` reports
                arrays[name] = array.astype(wanted, order="C")
        return save(arrays)


@dataclass(frozen=True, eq=False)
class LinearProbes(TensorFile):
    """One linear probe a layer (Eq. raw-space-normalized)."""

    head: Annotated[I32, "m"]  # selected head; 0 at the residual stream
    direction: Annotated[F32, "m d"]  # unit norm
    bias: Annotated[F32, "m"]
    scale: Annotated[F32, "m"]  # divides the logit; all ones under unit_norm

    def check_probes(self, manifest: Manifest, prefix: str = "") -> None:
        """Check the ranges of linear probes, those of context probes under their ``prefix``."""
        head, direction, scale = (
            vars(self)[f"{prefix}{name}"] for name in ("head", "direction", "scale")
        )
        norm = np.linalg.norm(direction.astype(np.float64), axis=-1)
        unit = np.all(np.abs(norm - 1.0) <= UNIT_NORM_TOLERANCE)
        _require(unit, f"{prefix}direction", "unit norm in every layer", norm)
        heads = manifest.probe_heads
        inside = np.all((head >= 0) & (head < heads))
        _require(inside, f"{prefix}head", f"heads from 0 to {heads - 1}", head)
        _require(np.all(scale > 0), f"{prefix}scale", "positive numbers", scale)
        if not prefix and manifest.logit_scale == "unit_norm":
            _require(np.all(scale == 1), "scale", "all ones under logit_scale unit_norm", scale)


@dataclass(frozen=True, eq=False)
class ProbeTensors(LinearProbes):
    """probes.safetensors: the risk's own probes, the reference, and the context probes."""

    file = PROBES
    trajectory_mean: Annotated[F32, "2 m"]  # out-of-fold; row 0 hallucinated, row 1 factual
    trajectory_std: Annotated[F32, "2 m"]
    # Mean logits of a prompt: its trajectory, then the context probes.
    reference_mean: Annotated[F32, "L"]
    # The distance is |whitening (logits - mean)|, its cutoff 1.
    reference_whitening: Annotated[F32, "L L"]
    context_head: Annotated[I32, "A m"] | None = None
    context_direction: Annotated[F32, "A m d"] | None = None
    context_bias: Annotated[F32, "A m"] | None = None
    context_scale: Annotated[F32, "A m"] | None = None  # of any ``logit_scale``

    def check(self, manifest: Manifest) -> None:
        """Check the ranges."""
        self.check_probes(manifest)
        if manifest.context is not None:
            self.check_probes(manifest, "context_")
        std = self.trajectory_std
        _require(np.all(std >= 0), "trajectory_std", "no negative number", std.min())


@dataclass(frozen=True, eq=False)
class GoldenRows(TensorFile):
    """G rows of token ids, with the training engine's results to replay before serving."""

    input_ids: Annotated[I32, "total"]  # all rows, one after the other
    offsets: Annotated[I32, "G+1"]  # row g is input_ids[offsets[g] : offsets[g + 1]]
    risk: Annotated[F64, "G"]

    def rows(self) -> list[list[int]]:
        """Return the G rows as lists of token ids."""
        return [ids.tolist() for ids in np.split(self.input_ids, self.offsets[1:-1])]

    def check(self, manifest: Manifest) -> None:
        """Check that rows and results are within their ranges."""
        ids = self.input_ids
        offsets = self.offsets
        risk = self.risk
        increasing = np.all(np.diff(offsets.astype(np.int64)) > 0)
        whole = (offsets[0], offsets[-1]) == (0, len(ids)) and increasing
        _require(whole, "offsets", f"0, increasing strictly, up to {len(ids)}", offsets)
        _require(np.all(ids >= 0), "input_ids", "token ids of 0 or more", ids.min())
        _require(np.all((risk >= 0) & (risk <= 1)), "risk", "numbers from 0 to 1", risk)


@dataclass(frozen=True, eq=False)
class Golden(GoldenRows):
    """golden.safetensors: a few prompts."""

    file = GOLDEN
    trajectory: Annotated[F32, "G L"]  # scaled logits, those of the context probes last
    first_token: Annotated[F32, "G S"] | None = None  # log_max_prob, entropy (nats)

    prompts = GoldenRows.rows

    @classmethod
    def record(
        cls,
        prompts: Sequence[Sequence[int]],
        trajectory: Floats,
        risk: Floats,
        first_token: Floats | None = None,
    ) -> Golden:
        """Return G prompts of token ids with their results; shapes as in the fields."""
        return cls(
            *joined(prompts),
            np.asarray(risk, np.float64),
            np.asarray(trajectory, np.float32),
            None if first_token is None else np.asarray(first_token, np.float32),
        )

    def check(self, manifest: Manifest) -> None:
        """Check the rows, and the signs of the first token's signals."""
        super().check(manifest)
        if (first := self.first_token) is not None:
            expected = "log_max_prob of 0 or less and entropy of 0 or more"
            _require(np.all(first * [-1, 1] >= 0), "first_token", expected, first)


@dataclass(frozen=True, eq=False)
class AnswerTensors(GoldenRows, LinearProbes):
    """answer.safetensors: the probes of the answer's own tokens, and golden prompts with the
    answer's tokens behind them."""

    file = ANSWER
    answer_tokens: Annotated[I32, "G"]  # length of the answer at the end of each row
    trajectory: Annotated[F32, "G m"]  # scaled logits, mean over the answer's tokens

    def check(self, manifest: Manifest) -> None:
        """Check probes and rows, and that each answer is shorter than its row."""
        self.check_probes(manifest)
        super().check(manifest)
        tokens = self.answer_tokens
        lengths = np.diff(self.offsets)
        expected = f"1 or more, and fewer than each row's {lengths}"
        fine = np.all((tokens >= 1) & (tokens < lengths))
        _require(fine, "answer_tokens", expected, tokens)


def joined(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return G rows of token ids as ``input_ids`` [total] and ``offsets`` [G + 1]."""
    ids = np.array([token for row in rows for token in row], np.int32)
    return ids, np.cumsum([0, *map(len, rows)]).astype(np.int32)


def _unpack(data: bytes, layout: Layout, manifest: Manifest) -> dict[str, NDArray[Any]]:
    """Parse safetensors; also refuse extra padding, a huge header and a tensor that is listed
    twice."""
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(MAX_HEADER, len(data) - 8):
        raise BadValue(
            "not a safetensors file", expected=f"a header of 1 to {MAX_HEADER} bytes", found=size
        )
    header = data[8 : 8 + size]
    if header.endswith(b" " * 8):
        raise BadValue("padding", expected="less than 8 spaces after the header", found="more")
    parse_json(header)
    try:
        entries: Mapping[str, Any] = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise BadValue("not a safetensors file", expected="a sound header", found=error) from error
    lengths = {
        "m": manifest.model.num_layers,
        "d": manifest.probe_dim,
        "L": manifest.logits,
        "A": manifest.context_probes,
        "S": len(FIRST_TOKEN_SIGNALS) if manifest.needs_first_token else 0,
        "2": 2,
    }
    arrays = {}
    for name, (code, axes) in layout.items():
        wanted = [lengths.get(axis, axis) for axis in axes.split()]
        if 0 in wanted:  # the manifest does not call for it
            continue
        if name not in entries:
            raise MissingField(field=name)
        actual = entries[name]["dtype"]
        shape = list(entries[name]["shape"])
        fits = len(shape) == len(wanted) and all(
            isinstance(want, str) or want == length
            for want, length in zip(wanted, shape, strict=True)
        )
        if actual != code or not fits:
            raise WrongShape(
                "element type or shape",
                field=name,
                expected=f"{code} {wanted}",
                found=f"{actual} {shape}",
            )
        # bytes: hence read-only
        array = np.frombuffer(bytes(entries[name]["data"]), _NUMPY[code]).reshape(shape)
        if not np.all(np.isfinite(array)):
            where = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
            raise NotFinite(field=f"{name}{list(where)}", expected="numbers", found=array[where])
        arrays[name] = array
        if name == "offsets":  # declared before the tensors with G rows
            _require(len(array) > 1, name, "at least one row: two offsets", array)
            lengths["G"] = len(array) - 1
    for name in sorted(entries.keys() - arrays.keys()):
        raise UnknownField(field=name)
    return arrays


def _require(fine: bool | np.bool, field: str, expected: str, value: object) -> None:
    if not fine:
        raise BadValue(field=field, expected=expected, found=str(value).replace("\n", ""))
