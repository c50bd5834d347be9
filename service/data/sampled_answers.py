"""K sampled answers of every prompt, in a run folder that can resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.data.collection import Prompts, write_samples
from service.data.training_rows import Dataset
from service.engines.base import Engine, Sampling

SEED = 0  # of the first sample; the next ones follow


@dataclass(frozen=True)
class SampleOptions:
    """How many answers are drawn, and how."""

    samples: int  # K
    temperature: float = 1.0


@dataclass(frozen=True)
class SampledAnswer:
    """One answer.  ``tokens`` include the end token, if one was sampled."""

    row: int  # data row
    sample: int  # 0 .. K - 1
    text: str
    tokens: tuple[int, ...]
    finish: str  # "stop" | "length"


def sample_answers(
    engine: Engine, dataset: Dataset, prompts: Prompts, folder: Path, options: SampleOptions, max_new_tokens: int
) -> Path:
    """Draw K answers of each row into ``folder``, sample by sample, and return the file.

    Sample k of every row has seed ``SEED`` + k, so that answers depend on neither batch nor K: more samples later
    keep those that are there.  The samples of different rows share their random numbers; those of one row do not.
    """
    seeds = range(SEED, SEED + options.samples)
    samplings = [Sampling(max_tokens=max_new_tokens, temperature=options.temperature, seed=seed) for seed in seeds]
    path = samples_path(folder, options)
    write_samples(engine, dataset, prompts, path, samplings)
    return path


def samples_path(folder: Path, options: SampleOptions) -> Path:
    """Where a run keeps the samples of one temperature."""
    return folder / f"samples-t{options.temperature:g}.jsonl"


def read_samples(folder: Path, options: SampleOptions) -> Iterator[SampledAnswer]:
    """The first K samples of every row, sample by sample, in the order of the file."""
    with samples_path(folder, options).open(encoding="utf-8") as file:
        for record in map(json.loads, file):
            if record["sample"] < options.samples:
                yield _read(record)


def _read(record: dict[str, Any]) -> SampledAnswer:
    tokens = tuple(record["tokens"])
    return SampledAnswer(record["row"], record["sample"], record["answer"], tokens, record["finish"])
