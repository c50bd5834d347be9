"""Reads and writes the tensor files of a bundle.

Symbols: m layers, d the length of a probe direction, A context probes, L = (1 + A) m logits, G
golden prompts or answers.  Arrays from a file are read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from probes_store.errors import BadValue, MissingField, NotFinite, UnknownField, WrongShape
from probes_store.manifest import ANSWER, GOLDEN, PROBES, Manifest
from probes_store.syntax import parse_json

UNIT_NORM_TOLERANCE = 1e-4
MAX_HEADER = 64 * 1024  # bytes; there are at most twelve tensors
_NUMPY: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_Layout = Mapping[str, tuple[str, str]]
# Tensor -> element type, axes; an "any" axis may have any length.
_LINEAR: Final[_Layout] = {
    "head": ("I32", "m"),
    "direction": ("F32", "m d"),
    "bias": ("F32", "m"),
    "scale": ("F32", "m"),
}
_ROWS: Final[_Layout] = {
    "input_ids": ("I32", "any"),
    "offsets": ("I32", "any"),
    "risk": ("F64", "any"),
}
_PROBE_LAYOUT: Final[_Layout] = {
    **_LINEAR,
    "trajectory_mean": ("F32", "2 m"),
    "trajectory_std": ("F32", "2 m"),
    "reference_mean": ("F32", "L"),
    "reference_whitening": ("F32", "L L"),
    **{f"context_{name}": (code, f"A {axes}") for name, (code, axes) in _LINEAR.items()},
}
_GOLDEN_LAYOUT: Final[_Layout] = {
    **_ROWS,
    "trajectory": ("F32", "any L"),
    "first_token": ("F32", "any 2"),
}
_ANSWER_LAYOUT: Final[_Layout] = {
    **_LINEAR,
    **_ROWS,
    "trajectory": ("F32", "any m"),
    "answer_tokens": ("I32", "any"),
}


@dataclass(frozen=True, eq=False)
class ProbeTensors:
    """probes.safetensors: one linear probe a layer (Eq. raw-space-normalized)."""

    head: NDArray[np.int32]  # [m] selected head; 0 at the residual stream
    direction: NDArray[np.float32]  # [m, d] unit norm
    bias: NDArray[np.float32]  # [m]
    scale: NDArray[np.float32]  # [m] divides the logit; all ones under unit_norm
    trajectory_mean: NDArray[np.float32]  # [2, m] out-of-fold; row 0 hallucinated, row 1 factual
    trajectory_std: NDArray[np.float32]  # [2, m]
    reference_mean: NDArray[
        np.float32
    ]  # [L] mean logits of a prompt: its trajectory, then the context probes
    reference_whitening: NDArray[
        np.float32
    ]  # [L, L] distance = |whitening (logits - mean)|, cutoff 1
    context_head: NDArray[np.int32] | None = (
        None  # [A, m] this and the next three: the same for the context probes
    )
    context_direction: NDArray[np.float32] | None = None  # [A, m, d]
    context_bias: NDArray[np.float32] | None = None  # [A, m]
    context_scale: NDArray[np.float32] | None = None  # [A, m]


@dataclass(frozen=True, eq=False)
class Golden:
    """golden.safetensors: a few prompts with the training engine's results, replayed before
    serving."""

    input_ids: NDArray[np.int32]  # [total] all prompts, one after the other
    offsets: NDArray[np.int32]  # [G + 1] prompt g is input_ids[offsets[g] : offsets[g + 1]]
    trajectory: NDArray[np.float32]  # [G, L] scaled logits, those of the context probes last
    risk: NDArray[np.float64]  # [G]
    first_token: NDArray[np.float32] | None = None  # [G, 2] log_max_prob (nats), entropy (nats)

    @classmethod
    def record(
        cls,
        prompts: Sequence[Sequence[int]],
        trajectory: NDArray[np.floating],
        risk: NDArray[np.floating],
        first_token: NDArray[np.floating] | None = None,
    ) -> Golden:
        """Return G prompts of token ids with their results; shapes as in the fields."""
        return cls(
            *joined(prompts),
            np.asarray(trajectory, np.float32),
            np.asarray(risk, np.float64),
            None if first_token is None else np.asarray(first_token, np.float32),
        )

    def prompts(self) -> list[list[int]]:
        """Return the G prompts as lists of token ids."""
        return _parted(self)


@dataclass(frozen=True, eq=False)
class AnswerTensors:
    """answer.safetensors: one linear probe a layer of the answer's own tokens, and golden answers
    to replay."""

    head: NDArray[np.int32]  # [m] this and the next three as in ``ProbeTensors``
    direction: NDArray[np.float32]  # [m, d]
    bias: NDArray[np.float32]  # [m]
    scale: NDArray[np.float32]  # [m]
    input_ids: NDArray[
        np.int32
    ]  # [total] all prompts with their answers' tokens behind them, one after the other
    offsets: NDArray[np.int32]  # [G + 1] row g is input_ids[offsets[g] : offsets[g + 1]]
    answer_tokens: NDArray[
        np.int32
    ]  # [G] length of the answer at the end of each row, shorter than the row
    trajectory: NDArray[np.float32]  # [G, m] scaled logits, mean over the answer's tokens
    risk: NDArray[np.float64]  # [G]

    def rows(self) -> list[list[int]]:
        """Return the G prompts with their answers as lists of token ids."""
        return _parted(self)


def joined(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return G rows of token ids as ``input_ids`` [total] and ``offsets`` [G + 1]."""
    ids = np.array([token for row in rows for token in row], np.int32)
    return ids, np.cumsum([0, *map(len, rows)]).astype(np.int32)


def _parted(tensors: Golden | AnswerTensors) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(tensors.input_ids, tensors.offsets[1:-1])]


_LAYOUTS: Final[Mapping[type, _Layout]] = {
    ProbeTensors: _PROBE_LAYOUT,
    Golden: _GOLDEN_LAYOUT,
    AnswerTensors: _ANSWER_LAYOUT,
}


def pack(tensors: ProbeTensors | Golden | AnswerTensors, file: str) -> bytes:
    """Return safetensors bytes.  Raises WrongShape if an element type would lose something (int64
    ids, say)."""
    layout, arrays = _LAYOUTS[type(tensors)], {}
    for name, value in vars(tensors).items():
        if value is None:
            continue
        given, wanted = np.asarray(value), _NUMPY[layout[name][0]]
        fine, expected = given.dtype.kind in "fiu", "numbers"
        if wanted.kind == "i":
            fine, expected = given.dtype.kind in "iu", "integers that fit int32"
            fine = fine and np.array_equal(given, given.astype(wanted))
        if not fine:
            raise WrongShape(
                "element type", file=file, field=name, expected=expected, found=given.dtype
            )
        with np.errstate(over="ignore"):  # an overflow becomes infinite, which the reader reports
            arrays[name] = np.ascontiguousarray(given, wanted).reshape(given.shape)
    return save(arrays)


def read_probes(data: bytes, manifest: Manifest, file: str = PROBES) -> ProbeTensors:
    """Read the tensors of the manifest's geometry and records.  Raises a subclass of
    BundleDamaged."""
    prefixes = ("", "context_") if manifest.context_probes else ("",)
    layout = {
        name: at
        for name, at in _PROBE_LAYOUT.items()
        if not name.startswith("context_") or len(prefixes) == 2
    }
    arrays = _unpack(data, layout, manifest, file)
    for prefix in prefixes:
        _check_probes(arrays, manifest, file, prefix)
    std = arrays["trajectory_std"]
    _require(np.all(std >= 0), file, "trajectory_std", "no negative number", std.min())
    return ProbeTensors(**arrays)


def read_golden(data: bytes, manifest: Manifest, file: str = GOLDEN) -> Golden:
    """Read the golden prompts, with ``first_token`` where the signals need it.  Raises a subclass
    of BundleDamaged."""
    layout = {
        name: at
        for name, at in _GOLDEN_LAYOUT.items()
        if name != "first_token" or manifest.needs_first_token
    }
    arrays = _unpack(data, layout, manifest, file)
    _check_rows(arrays, file, "prompt")
    if (first := arrays.get("first_token")) is not None:
        fine = np.all(first * [-1, 1] >= 0)
        _require(
            fine, file, "first_token", "log_max_prob of 0 or less and entropy of 0 or more", first
        )
    return Golden(**arrays)


def read_answer(data: bytes, manifest: Manifest, file: str = ANSWER) -> AnswerTensors:
    """Read the probes of the answer's tokens and the golden answers.  Raises a subclass of
    BundleDamaged."""
    arrays = _unpack(data, _ANSWER_LAYOUT, manifest, file)
    _check_probes(arrays, manifest, file)
    _check_rows(arrays, file, "answer")
    tokens, lengths = arrays["answer_tokens"], np.diff(arrays["offsets"])
    fine = np.all((tokens >= 1) & (tokens < lengths))
    _require(fine, file, "answer_tokens", f"1 or more, and fewer than each row's {lengths}", tokens)
    return AnswerTensors(**arrays)


def _check_probes(
    arrays: Mapping[str, NDArray[Any]], manifest: Manifest, file: str, prefix: str = ""
) -> None:
    """Check the ranges of linear probes; context probes may have a scale under any
    ``logit_scale``."""
    head, scale = arrays[f"{prefix}head"], arrays[f"{prefix}scale"]
    norm = np.linalg.norm(arrays[f"{prefix}direction"].astype(np.float64), axis=-1)
    heads = manifest.probe_heads
    unit = np.all(np.abs(norm - 1.0) <= UNIT_NORM_TOLERANCE)
    _require(unit, file, f"{prefix}direction", "unit norm in every layer", norm)
    _require(
        np.all((head >= 0) & (head < heads)),
        file,
        f"{prefix}head",
        f"heads from 0 to {heads - 1}",
        head,
    )
    _require(np.all(scale > 0), file, f"{prefix}scale", "positive numbers", scale)
    ones = bool(prefix) or manifest.logit_scale != "unit_norm" or np.all(scale == 1)
    _require(ones, file, f"{prefix}scale", "all ones under logit_scale unit_norm", scale)


def _check_rows(arrays: Mapping[str, NDArray[Any]], file: str, what: str) -> None:
    """Check G rows of token ids, each a golden ``what``: every result has G rows, and risks are
    from 0 to 1."""
    ids, offsets = arrays["input_ids"], arrays["offsets"]
    risk = arrays["risk"]
    count = len(offsets) - 1
    _require(count >= 1, file, "offsets", f"at least one {what}: two offsets", offsets)
    for name in ("trajectory", "risk", "first_token", "answer_tokens"):
        if name in arrays and (rows := len(arrays[name])) != count:
            raise WrongShape(
                f"one row for each {what}", file=file, field=name, expected=count, found=rows
            )
    increasing = (
        offsets[0] == 0
        and offsets[-1] == len(ids)
        and np.all(np.diff(offsets.astype(np.int64)) > 0)
    )
    _require(increasing, file, "offsets", f"0, increasing strictly, up to {len(ids)}", offsets)
    _require(np.all(ids >= 0), file, "input_ids", "token ids of 0 or more", ids.min())
    _require(np.all((risk >= 0) & (risk <= 1)), file, "risk", "numbers from 0 to 1", risk)


def _unpack(data: bytes, layout: _Layout, manifest: Manifest, file: str) -> dict[str, NDArray[Any]]:
    """Parse safetensors; also refuse extra padding, a huge header and a tensor that is listed
    twice."""
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(MAX_HEADER, len(data) - 8):
        raise BadValue(
            "not a safetensors file",
            file=file,
            expected=f"a header of 1 to {MAX_HEADER} bytes",
            found=size,
        )
    header = data[8 : 8 + size]
    if len(header) - len(header.rstrip(b" ")) >= 8:
        raise BadValue(
            "padding", file=file, expected="less than 8 spaces after the header", found="more"
        )
    parse_json(header, file)
    try:
        entries: Mapping[str, Any] = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise BadValue(
            "not a safetensors file", file=file, expected="a sound header", found=error
        ) from error
    for name in sorted(entries.keys() - layout.keys()):
        raise UnknownField("this format has no such tensor here", file=file, field=name)
    lengths = {
        "m": manifest.model.num_layers,
        "d": manifest.probe_dim,
        "L": manifest.logits,
        "2": 2,
        "any": None,
        "A": manifest.context_probes,
    }
    arrays: dict[str, NDArray[Any]] = {}
    for name, (code, axes) in layout.items():
        if name not in entries:
            raise MissingField("the tensor is missing", file=file, field=name)
        actual_code, shape = entries[name]["dtype"], list(entries[name]["shape"])
        wanted = [lengths[axis] for axis in axes.split()]
        fits = len(shape) == len(wanted) and all(
            want in (None, got) for want, got in zip(wanted, shape, strict=True)
        )
        if actual_code != code or not fits:
            expected, actual = f"{code} {wanted}".replace("None", "any"), f"{actual_code} {shape}"
            raise WrongShape(
                "element type or shape", file=file, field=name, expected=expected, found=actual
            )
        array = np.frombuffer(bytes(entries[name]["data"]), _NUMPY[code]).reshape(
            shape
        )  # bytes: hence read-only
        if not np.all(np.isfinite(array)):
            where = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
            raise NotFinite(
                "not finite",
                file=file,
                field=f"{name}{list(where)}",
                expected="numbers",
                found=array[where],
            )
        arrays[name] = array
    return arrays


def _require(fine: bool | np.bool, file: str, field: str, expected: str, value: object) -> None:
    if not fine:
        raise BadValue(
            "bad value",
            file=file,
            field=field,
            expected=expected,
            found=str(value).replace("\n", ""),
        )
