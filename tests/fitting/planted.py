"""A scripted engine whose rows carry a planted signal, and the data that go with it.

A prompt's word, "known" or "hidden", gives the sign that is added to some heads of every layer."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.data.training_rows import Dataset, read_dataset
from service.engines.base import Completion, Extraction, Sampling, TokenIds
from service.readout import Geometry, Site
from tests.kit.rows import Rows
from tests.scripted_engine import ScriptedEngine

GEOMETRY = Geometry(num_layers=4, num_heads=3, head_dim=8, hidden_size=20)


@cache
def directions(geometry: Geometry, site: Site) -> NDArray[np.float64]:
    """A unit vector of each layer and head, [m, width]; zero of head 0."""
    rng, shape = np.random.default_rng(7), (geometry.heads(site), geometry.dim(site))
    direction = rng.standard_normal((geometry.num_layers, *shape))
    direction /= np.linalg.norm(direction, axis=2, keepdims=True)
    if site is Site.ATTENTION_HEAD:
        direction[:, 0] = 0.0
    return direction.reshape(geometry.num_layers, -1)


class PlantedEngine(ScriptedEngine):
    """Rows plus ``strength`` x (2 known - 1) along a fixed direction of heads 1 and 2; head 0 is
    noise.

    It is interrupted at its call number ``stop`` for readouts, counted from 0, and killed at its
    call number ``kill_at`` for readouts or answers, counted from 1."""

    def __init__(
        self,
        strength: float = 0.5,
        geometry: Geometry = GEOMETRY,
        stop: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(geometry, **kwargs)
        self.strength, self.stop = strength, stop
        self.kill_at: int | None = None
        self.extracts = 0
        self.generates = 0

    def activations(self, prompt: TokenIds, site: Site) -> NDArray[np.float32]:
        text, geometry = self.detokenize(prompt), self.identity.geometry
        sign = 1.0 if "known" in text else -1.0 if "hidden" in text else 0.0
        louder = np.arange(1, geometry.num_layers + 1, dtype=np.float32)[:, None]
        planted = sign * self.strength * louder * directions(geometry, site)
        return (super().activations(prompt, site) * louder + planted).astype(np.float32)

    def extract(self, prompts: Any, sites: Any, *others: Any, **read: Any) -> Extraction:
        if self.extracts == self.stop:
            raise KeyboardInterrupt
        self.extracts += 1
        self.killed()
        return super().extract(prompts, sites, *others, **read)

    def killed(self) -> None:
        """End this process at the call that ``kill_at`` says."""
        if self.kill_at == self.extracts + self.generates:
            os.kill(os.getpid(), signal.SIGKILL)

    def generate(self, prompts: Any, sampling: Sampling) -> list[Completion]:
        """Paris where it is known, every third time otherwise a refusal, else Rome."""
        self.generates += 1
        self.killed()
        answers = []
        for prompt in prompts:
            text = self.detokenize(prompt)
            draw = hashlib.sha256(text.encode()).digest()[0] % 4
            unknown = "It is Rome." if draw else "I am not sure."
            answer = "It is Paris." if "known" in text else unknown
            answers.append(Completion(answer, (1, 2), "stop"))
        return answers


class Quiet:
    """A console that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, *objects: Any) -> None:
        self.lines.append(" ".join(map(str, objects)))

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)

    def line(self, start: str) -> str:
        """The only line that begins so."""
        [line] = [line for line in self.lines if line.startswith(start)]
        return line


def planted_rows(count: int, *, seed: int = 0, shuffled: bool = False, per_group: int = 2) -> Rows:
    """Rows whose label is what the prompt says, or drawn without regard to it."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        known = bool(rng.random() < 0.6)
        label = int(rng.random() < 0.6) if shuffled else int(known)
        word = "known" if known else "hidden"
        rows.append(
            {
                "id": f"r{seed}-{number}",
                "prompt": f"{seed} {word} city {number} {'x' * int(rng.integers(0, 30))}",
                "label": label,
                "answers": ["Paris"],
                "group": f"g{seed}-{number // per_group}",
                "kind": ["capital", "river", "element"][int(rng.integers(3))],
                "template": "ab"[number % 2],
            }
        )
    return rows


def write_rows(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def dataset_of(
    folder: Path, rows: Rows, labels: Any = "generate", folds: int | None = None
) -> Dataset:
    """The rows, read from ``folder / "rows.jsonl"``."""
    return read_dataset(write_rows(folder / "rows.jsonl", rows), labels, folds=folds)
