"""Model folders and bundles for the load tests, and a process that calls the engine on them
directly.

    python -m benchmarks.bench_model prepare --shape qwen2.5-0.5b \\
        --cache DIR     prints what to serve, as JSON
    python -m benchmarks.bench_model direct --shape ... --cache ... \\
        [--threads N]   answers JSON lines on stdin

The callers (``Prepared``, ``Direct``) load no torch; only these two processes do."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import CACHE, Check, conclude, raise_file_limit, say, table, write_json
from benchmarks.vllm_contestant import Talker
from tests.serve_process import ROOT

SHIPPED_BUNDLES = {"demo": ("demo", "demo-fused"), "smollm2": ("smollm2", "smollm2-fused")}
SHAPES = ("qwen2.5-0.5b", *SHIPPED_BUNDLES)
RECIPE = 1  # increase to rebuild what the cache holds
QUESTIONS = [
    "What is the capital of Italy?",
    "What is the capital of the Solomon Islands?",
    "Who are you?",
    "Hello.",
]


@dataclass(frozen=True)
class Prepared:
    """What to serve: arguments of ``hallutracer serve``, two bundles of one model, its folder and
    its context."""

    shape: str
    folder: str
    arguments: list[str]
    bundles: tuple[str, str]
    max_tokens: int


def prepare(shape: str, cache: Path = CACHE) -> Prepared:
    """Make missing folders and bundles, in a separate process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.bench_model",
        "prepare",
        "--shape",
        shape,
        "--cache",
        str(cache),
    ]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    return Prepared(
        shape, answer["folder"], answer["arguments"], tuple(answer["bundles"]), answer["max_tokens"]
    )


class Bench:
    """One shape: its parts, their checks, and the record behind them."""

    def __init__(self, options: argparse.Namespace, prepared: Prepared) -> None:
        self.options, self.prepared = options, prepared
        self.checks: list[Check] = []
        self.record: dict[str, Any] = {}

    def run(self, parts: list[str]) -> None:
        """Measure the parts in order."""
        raise NotImplementedError

    def add(self, name: str, figure: str, target: str, passed: bool | None, note: str = "") -> None:
        self.checks.append(
            check := Check(f"{self.prepared.shape}: {name}", figure, target, passed, note)
        )
        say(table([check]))


def run_shapes(options: argparse.Namespace, bench_of: type[Bench]) -> int:
    """Run ``options.parts`` on all ``options.shapes``.  Return 1 where something falls short."""
    raise_file_limit()
    say(f"{os.cpu_count()} cores, load average before {os.getloadavg()[0]:.2f}")
    checks: list[Check] = []
    record: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg(), "shapes": {}}
    for shape in options.shapes.split(","):
        bench = bench_of(options, prepare(shape, options.cache))
        try:
            bench.run(options.parts.split(","))
        finally:  # keep the figures of the parts before one that fails
            checks += bench.checks
            record["shapes"][shape] = bench.record
            if options.json:
                write_json(options.json, checks, record)
    say()
    return conclude(checks, options.json, record)


class Direct(Talker):
    """The engine in a process of its own, called without a server, and stopped between the
    calls."""

    def __init__(self, shape: str, cache: Path = CACHE, threads: int | None = None) -> None:
        command = ["benchmarks.bench_model", "direct", "--shape", shape, "--cache", str(cache)]
        cache.mkdir(parents=True, exist_ok=True)
        super().__init__(
            [*command, *(["--threads", str(threads)] if threads else [])],
            cache / f"direct-{shape}.log",
        )
        self.threads = int(self.hello["threads"])
        self.max_batch_tokens = int(
            self.hello["max_batch_tokens"]
        )  # padded tokens in one forward pass

    def score(self, prompts: Sequence[list[int] | str], batch: int) -> list[float]:
        """Return the seconds of each ``engine.score`` call on ``batch`` prompts; strings are
        rendered in them."""
        with self.turn():
            return [float(value) for value in self.ask(prompts=prompts, batch=batch)["seconds"]]


def _paths(shape: str, cache: Path) -> tuple[Path, Path]:
    from service.demo import MODEL_DIR
    from service.engines.places import PACKAGED, folder_of

    store = cache / f"{shape}-probes"
    if shape in PACKAGED:
        return folder_of(PACKAGED[shape].path), store
    return MODEL_DIR if shape == "demo" else cache / shape, store


def _prepare(shape: str, cache: Path) -> dict[str, Any]:
    folder, store = _paths(shape, cache)
    if shape in SHIPPED_BUNDLES:
        names = list(SHIPPED_BUNDLES[shape])
        store.mkdir(parents=True, exist_ok=True)  # empty: only the shipped bundles are found
        arguments = ["--model", shape, "--store", str(store)]
    else:
        names = ["bench", "bench-other"]
        done, recipe = folder / "recipe.json", {"recipe": RECIPE, "torch": version("torch")}
        recipe["transformers"] = version("transformers")
        if not done.is_file() or json.loads(done.read_text()) != recipe:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(store, ignore_errors=True)
            _save(folder)
            _publish(folder, store, names)
            done.write_text(json.dumps(recipe))
        arguments = [
            "--model",
            str(folder),
            "--store",
            str(store),
            *(f"--bundle={name}" for name in names),
        ]
    context = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    return {"folder": str(folder), "arguments": arguments, "bundles": names, "max_tokens": context}


def _save(folder: Path) -> None:
    """Random weights in the shape of Qwen2.5-0.5B, with the demo model's tokenizer."""
    import torch
    from transformers import AutoTokenizer

    from benchmarks.readout_cost import build
    from service.demo import MODEL_DIR

    model, _ = build("qwen2.5-0.5b")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    # Ids that the tokenizer does not have, and the end token, are given no weight: greedy answers
    # are then text, and as long as was asked. The work stays the same.
    with torch.no_grad():
        embedding: torch.Tensor = model.get_parameter("model.embed_tokens.weight")
        embedding[len(tokenizer) :] = 0
        embedding[tokenizer.all_special_ids] = 0
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.bos_token_id = model.generation_config.bos_token_id = tokenizer.bos_token_id
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _publish(folder: Path, store: Path, names: list[str]) -> None:
    """Bundles of random probes, whose golden prompts are recorded through the engine that
    serves."""
    from probes_store.store import Store
    from service.engines.base import EngineOptions
    from service.engines.transformers.engine import TransformersEngine
    from tests.matching import matching_draft

    engine = TransformersEngine.load(EngineOptions(str(folder)))
    golden = [engine.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    for seed, name in enumerate(names):
        card = f"# {name}\n\nRandom probes on random weights, for load tests.\n"
        Store(store).publish(
            matching_draft(engine, name, seed, golden, card=card, evaluation={}, plots={})
        )


def _direct(shape: str, cache: Path, threads: int | None) -> None:
    import torch

    from probes_store.store import SHIPPED, Store
    from service.engines.base import EngineOptions
    from service.engines.transformers.engine import TransformersEngine
    from service.prompts import as_prompt_format, render
    from service.readout import Probes, Site

    if threads is not None:
        torch.set_num_threads(threads)
    folder, store = _paths(shape, cache)
    engine = TransformersEngine.load(EngineOptions(str(folder)))
    bundle = Store(store, fallbacks=[SHIPPED]).load(_prepare(shape, cache)["bundles"][0])
    probes = [Probes.of(Site(bundle.manifest.readout.site), bundle.probes)]
    prompt_format = as_prompt_format(bundle.manifest.prompt_format)
    print(
        json.dumps(
            {"threads": torch.get_num_threads(), "max_batch_tokens": engine.max_batch_tokens}
        ),
        flush=True,
    )

    def ids_of(prompts: list[list[int] | str]) -> list[list[int]]:
        return [
            render(engine, one, None, prompt_format) if isinstance(one, str) else one
            for one in prompts
        ]

    for line in sys.stdin:
        job, seconds = json.loads(line), []
        prompts = job["prompts"]
        for start in range(0, len(prompts), job["batch"]):
            begun = time.perf_counter()
            engine.score(ids_of(prompts[start : start + job["batch"]]), probes)
            seconds.append(time.perf_counter() - begun)
        print(json.dumps({"seconds": seconds}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["prepare", "direct"])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.what == "prepare":
        print(json.dumps(_prepare(options.shape, options.cache)))
    else:
        _direct(options.shape, options.cache, options.threads)


if __name__ == "__main__":
    main()
