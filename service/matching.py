"""Checks that a loaded model may serve a bundle: that it is the model of the bundle's training, and
that the engine reproduces the golden prompts and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from probes_store import errors
from probes_store.bundle import Bundle
from probes_store.errors import GoldenMismatch
from probes_store.manifest import LOCAL, Manifest
from probes_store.records import Floats
from probes_store.tensors import AnswerTensors, Golden
from service.engines.base import ModelIdentity

# Field of the manifest -> attribute of an engine, the error, the difference.
_IDENTITY: Final[Mapping[str, tuple[str, type[errors.BundleRefused], str]]] = {
    "model.architecture": ("architecture", errors.WrongModel, "another architecture"),
    "model.fingerprint": (
        "fingerprint",
        errors.WrongModel,
        "other weights, or weights and caches of other types",
    ),
    "model.adapter": ("adapter", errors.WrongModel, "another adapter"),
    "model.num_layers": ("geometry.num_layers", errors.WrongGeometry, "another shape"),
    "model.num_heads": ("geometry.num_heads", errors.WrongGeometry, "another shape"),
    "model.head_dim": ("geometry.head_dim", errors.WrongGeometry, "another shape"),
    "model.hidden_size": ("geometry.hidden_size", errors.WrongGeometry, "another shape"),
    "tokenizer.digest": ("tokenizer", errors.WrongTokenizer, "another tokenizer"),
    "chat_template.digest": ("chat_template", errors.WrongChatTemplate, "another chat template"),
    "chat_template.arguments": (
        "template_arguments",
        errors.WrongChatTemplate,
        "other arguments of the chat template",
    ),
}


def another_commit(manifest: Manifest, model: str, revision: str) -> errors.WrongRevision | None:
    """Return the error for other weights if the loaded model is another commit of the same hub
    model; else None.

    A folder has no commit, and the commits of a model with another name cannot be compared."""
    trained = manifest.model
    if (
        model != trained.name
        or LOCAL in (revision, trained.revision)
        or revision == trained.revision
    ):
        return None
    return errors.WrongRevision(
        f"bundle {manifest.reference} was trained on {trained.name} at revision {trained.revision},"
        " with other weights",
        field="model.revision",
        expected=trained.revision,
        found=revision,
        cure=f"Load that commit (--revision {trained.revision}), or train a bundle for this one",
    )


def check_identity(manifest: Manifest, loaded: ModelIdentity) -> None:
    """Refuse a model that the bundle was not trained on.

    Raises the error of the first difference, in the order of ``_IDENTITY``.  The name may differ,
    and also the revision if the weights are the same."""
    at = f"{manifest.model.name} at revision {manifest.model.revision}"
    for field, (attribute, error, difference) in _IDENTITY.items():
        expected = attrgetter(field)(manifest)
        actual = attrgetter(attribute)(loaded)
        if expected == actual:
            continue
        needed = at
        if attribute == "adapter" or not field.startswith("model."):
            needed = f"the {attribute.replace('_', ' ')} of {at}"
        cure = f"Load {needed}, or train a bundle for what is loaded"
        if attribute == "template_arguments":  # a loaded model renders all chats with the same ones
            cure = (
                f"Serve it by a process of its own, which loads {at} with them, or train a bundle"
                " with the arguments of the first one"
            )
        weights = attribute == "fingerprint"
        commit = another_commit(manifest, loaded.model, loaded.revision) if weights else None
        raise commit or error(
            f"bundle {manifest.reference} was trained on {difference}",
            field=field,
            expected="none" if expected is None else expected,
            found="none" if actual is None else actual,
            cure=cure,
        )


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
