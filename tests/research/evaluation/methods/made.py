"""Inputs with a planted signal of known place and strength."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hallutracer_research.evaluation.methods.base import AnswerReadings, MethodInputs
from service.data.run_folder import RowsFile
from service.fitting.probes import Readouts
from service.readout import Geometry, Site

GEOMETRY = Geometry(num_layers=6, num_heads=3, head_dim=5, hidden_size=8)
BEST = (4, 1)  # layer and head with the strongest signal
WIDE = (1, 2, 3, 4, 5)  # layers of the residual stream that each know a little


def noise(rng: np.random.Generator, count: int, site: Site, geometry: Geometry = GEOMETRY) -> np.ndarray:
    """Rows [n, m, width] without any signal, on scales and offsets that standardisation must undo."""
    width = geometry.width(site)
    scale = 10.0 ** rng.uniform(-1, 1, (geometry.num_layers, width))
    return rng.standard_normal((count, geometry.num_layers, width)) * scale + rng.uniform(-5, 5, scale.shape) * scale


def plant(rows: np.ndarray, label: np.ndarray, layer: int, column: int, strength: float) -> None:
    """Move one column apart by ``strength`` of its deviations, in place."""
    rows[:, layer, column] += strength * rows[:, layer, column].std() * (2 * label - 1)


def readouts(folder: Path, rows: np.ndarray, label: np.ndarray, site: Site, geometry: Geometry = GEOMETRY) -> Readouts:
    """Rows [n, m, width] on disk, behind three rows that carry no label."""
    path = folder / f"{site}.f32"
    padded = np.concatenate([np.full((3, *rows.shape[1:]), 1e30), rows])
    np.ascontiguousarray(padded.transpose(1, 0, 2), "<f4").tofile(path)
    return Readouts(RowsFile(path, geometry, site, len(padded)), np.arange(3, len(padded)), label)


def made_inputs(folder: Path, count: int = 240, seed: int = 0, strength: float = 0.8) -> MethodInputs:
    """Groups of two rows; a strong head at ``BEST``, a weaker one elsewhere, a residual stream spread over ``WIDE``."""
    rng = np.random.default_rng(seed)
    group = np.arange(count) // 2
    label = (rng.random(count // 2) < 0.6).astype(np.int64)[group]
    heads = noise(rng, count, Site.ATTENTION_HEAD)
    residual = noise(rng, count, Site.RESIDUAL_STREAM)
    plant(heads, label, BEST[0], BEST[1] * GEOMETRY.head_dim + 2, strength)
    plant(heads, label, 2, 0, strength / 2)
    plant(heads, label, GEOMETRY.num_layers - 1, 7, strength / 2)
    for layer in WIDE:
        plant(residual, label, layer, layer, strength * 0.75)
    words = np.random.default_rng(seed + 1)
    return MethodInputs(
        label=label, group=group, heads=readouts(folder, heads, label, Site.ATTENTION_HEAD),
        residual=readouts(folder, residual, label, Site.RESIDUAL_STREAM),
        first_token=np.stack([-rng.exponential(size=count) - (1 - label), rng.exponential(size=count) - label], axis=1),
        prompt_tokens=rng.integers(5, 40, count) + 10 * label, text=tuple(_text(words, bool(one)) for one in label),
        kind=np.where(words.random(count) < 0.2, 1 - label, label).astype(np.str_),
        halluguard=rng.standard_normal(count) + label,
        answers=made_answers(np.random.default_rng(seed + 2), label, residual),
    )  # fmt: skip


def made_answers(rng: np.random.Generator, label: np.ndarray, residual: np.ndarray) -> AnswerReadings:
    """Each number knows a little of the label; the entropies follow one column of the residual stream, too."""
    signs = {"log_prob": 1, "true": 1, "entropy_weighted": -1, "eigenscore": -1}
    known = {name: rng.standard_normal(len(label)) + sign * 1.2 * label for name, sign in signs.items()}
    states = rng.standard_normal((len(label), 2 * GEOMETRY.hidden_size)).astype(np.float32) * 3 + 5
    states[:, 4] += 6 * label
    return AnswerReadings(
        states=states,
        asked=np.full(len(label), 30.0),
        entropy=np.round(-sum(residual[:, layer, layer] / residual[:, layer, layer].std() for layer in WIDE), 1),
        **known,
    )


def _text(rng: np.random.Generator, factual: bool) -> str:
    """A question with one word that its class uses more often."""
    hint = "moon" if (rng.random() < 0.85) == factual else "salt"
    return " ".join(rng.choice(["who", "what", "where", "king", "river", "song", "year", hint], 6).tolist() + [hint])


def split(data: MethodInputs) -> tuple[np.ndarray, np.ndarray]:
    """The last third is the test side; groups stay whole."""
    cut = len(data.label) * 2 // 3 // 2 * 2
    return np.arange(cut), np.arange(cut, len(data.label))
