"""vLLM on one GPU, in one command: that what is read is right, and what reading costs.

    python -m benchmarks.gpu [--parts parity,quantized,cost] [--arguments JSON] \\
        [--json OUT]     eight minutes
    python -m benchmarks.gpu --tiny   the same without a GPU, and without FP8 and INT4

parity     a model of random weights, read by transformers in float32 and in bfloat16, and by vLLM
           in bfloat16 while it decodes other answers (its self-test runs first): vLLM may be as far
           from float32 as transformers is, twice
quantized  FP8 weights made at load; INT4 weights (compressed-tensors, W4A16) against the weights
           that they stand for
cost       one worker with our readout against vLLM's own, side by side: a prefill's and a decoded
           token's time, as ratios of pairs, median [95 % interval of the median]

Each measurement is a process of its own; those that are not timed run at the same time."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Check, conclude, say
from benchmarks.vllm_contestant import Talker, interval
from tests.serve_process import ROOT, inherited

SHAPE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16_384,
}
TINY = SHAPE | {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
MOST_TOKENS = 1 << 16  # of one timed call
ROUNDS, DECODED = 15, 64
BUNDLES = 3  # probes at each site


def make(folder: Path, shape: dict[str, Any]) -> None:
    """Save a model of random weights in bfloat16, its INT4 twin, and the plain model that the twin
    stands for."""
    import transformers as hf

    from tests.engines.tiny import tokenizer
    from tests.parity.quantized import quantize

    torch.manual_seed(0)
    config = hf.LlamaConfig(**shape, initializer_range=0.04)
    model = hf.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    model.to(torch.bfloat16).save_pretrained(folder / "plain")
    tokenizer().save_pretrained(folder / "plain")
    for made, name in zip(
        quantize(folder / "plain", "int4", folder), ("packed", "unpacked"), strict=True
    ):
        made.rename(folder / name)


def read(backend: str, folder: str, dtype: str, arguments: dict[str, Any], out: Path) -> None:
    """Write what one engine reads of prompts of 1 to 400 tokens, [probes, prompts, layers], and its
    own description."""
    from service.engines.base import EngineOptions, Sampling
    from service.readout import Site
    from tests.engines.tiny import probes

    config = json.loads((Path(folder) / "config.json").read_text())
    longest = min(400, config["max_position_embeddings"] // 2)
    draw = np.random.default_rng(1)
    prompts = [
        draw.integers(0, 256, length).tolist()
        for length in (1, 2, 17, *draw.integers(1, longest, 93))
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = EngineOptions(model=folder, dtype=dtype, device=device, extra={})
    engine: Any
    described: dict[str, Any] = {}
    if backend == "vllm":
        from service.engines.bridge import run_on
        from service.engines.vllm.engine import VllmEngine

        given = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in arguments.items()
        }
        engine = VllmEngine.load(
            EngineOptions(model=folder, dtype=dtype, device=device, extra=given)
        )
        described = run_on(engine.loop, engine._describe())
        described["graphs"] = str(engine._async_llm.vllm_config.compilation_config.cudagraph_mode)
    else:
        from service.engines.transformers.engine import TransformersEngine

        engine = TransformersEngine.load(options)
    every = [
        probes(engine.identity.geometry, site, 10 * bundle + place, scaled=True)
        for bundle in range(BUNDLES)
        for place, site in enumerate(Site)
    ]
    with ThreadPoolExecutor(1) as beside:
        answers = (
            beside.submit(engine.generate, prompts[:24], Sampling(max_tokens=DECODED))
            if described
            else None
        )
        scored = engine.score(prompts, every, first_token=True)
        if answers is not None:
            answers.result()
    engine.close()
    read_ = np.stack([one.trajectories for one in scored], axis=1)
    entropy = np.array([one.first_token.entropy for one in scored])
    np.savez(out, trajectories=read_, entropy=entropy, described=np.array(json.dumps(described)))


class Bench:
    """The measurements of one run, their checks and the record behind them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.checks: list[Check] = []
        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
        self.record: dict[str, Any] = {
            "device": device,
            "torch": torch.__version__,
            "shape": options.shape,
        }

    def read(self, backend: str, model: str, dtype: str, **arguments: Any) -> dict[str, Any]:
        """Run ``read`` in a process.  Raises RuntimeError with its last words where it fails."""
        out = self.folder / f"{backend}-{model}-{dtype}{len(arguments)}.npz"
        shared = (
            {"gpu_memory_utilization": 0.2} if torch.cuda.is_available() else {}
        )  # several at a time
        given = json.dumps(shared | self.options.arguments | arguments)
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "read",
            backend,
            str(self.folder / model),
            dtype,
            given,
            str(out),
        ]
        ran = subprocess.run(command, cwd=ROOT, env=inherited(), capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError("\n".join((ran.stdout + ran.stderr).splitlines()[-25:]))
        with np.load(out) as arrays:
            return dict(arrays)

    def parity(self) -> None:
        """Compare what vLLM reads of plain and INT4 weights with float32, as transformers in
        bfloat16 compares."""
        # vLLM's CPU build has neither kernel.
        wanted = {
            "parity": ["plain"],
            "quantized": ["unpacked", "packed", "fp8"] * torch.cuda.is_available(),
        }
        names = [name for part in self.options.parts if part in wanted for name in wanted[part]]
        jobs: dict[str, tuple[Any, ...]] = {}
        for model in {"unpacked" if name == "packed" else "plain" for name in [*names, "plain"]}:
            jobs |= {
                f"{model} {dtype}": ("transformers", model, dtype)
                for dtype in ("float32", "bfloat16")
            }
        for name in [name for name in names if name != "unpacked"]:
            jobs[f"vLLM {name}"] = ("vllm", "plain" if name == "fp8" else name, "bfloat16")
        with ThreadPoolExecutor(len(jobs) if torch.cuda.is_available() else 1) as pool:
            runs = {
                name: pool.submit(
                    self.read, *job, **({"quantization": "fp8"} if "fp8" in name else {})
                )
                for name, job in jobs.items()
            }
        found = {name: run.result() for name, run in runs.items() if run.exception() is None}
        for name, run in runs.items():
            if (error := run.exception()) is not None:
                self.checks.append(Check(name, "failed", "runs", False, str(error)[-1500:]))
        for name in found:
            if not name.startswith("vLLM"):
                continue
            model = "unpacked" if name == "vLLM packed" else "plain"
            if not {f"{model} float32", f"{model} bfloat16"} <= found.keys():
                continue
            exact = found[f"{model} float32"]["trajectories"]
            size = float(np.abs(exact).max())
            ours, theirs = (
                float(np.abs(found[one]["trajectories"] - exact).max()) / size
                for one in (name, f"{model} bfloat16")
            )
            judged, said = name != "vLLM fp8", json.loads(str(found[name]["described"]))
            figure = f"{ours:.4f} of the largest truth logit; transformers' bfloat16 {theirs:.4f}"
            note = f"runner {said['runner']}, graphs {said['graphs']}; self-test passed"
            passed = ours <= 2 * theirs if judged else None
            self.checks.append(
                Check(name, figure, "<= twice theirs" if judged else "reported", passed, note)
            )
            self.record[name] = {"apart": ours, "transformers": theirs, **said}

    def cost(self) -> None:
        """Time prefills and decoded tokens with and without the readout, in turns."""
        tiny = self.options.tiny
        batches, lengths = ((1, 4), (16, 64)) if tiny else ((1, 32, 256), (64, 1024, 8192))
        context = max(lengths) + 2 * DECODED
        arguments = {
            "max_model_len": context,
            "max_num_batched_tokens": max(lengths),
            "max_num_seqs": max(batches),
        }
        if not tiny:
            arguments |= {
                "dtype": "bfloat16",
                "kv_cache_memory_bytes": 12 << 30,
                "gpu_memory_utilization": 0.2,
            }
        arguments |= self.options.arguments
        kinds = ("bare", "ours") if tiny else ("bare", "again", "ours", "both")
        command = ["benchmarks.vllm_contestant", "--model", str(self.folder / "plain")]
        command += ["--arguments", json.dumps(arguments)]
        with ExitStack() as stack:
            if (
                torch.cuda.is_available()
            ):  # they start beside each other; on a CPU each takes all of it
                with ThreadPoolExecutor(len(kinds)) as pool:
                    made = list(
                        pool.map(
                            lambda kind: Talker([*command, "--kind", kind], self.log(kind)), kinds
                        )
                    )
            else:
                made = [Talker([*command, "--kind", kind], self.log(kind)) for kind in kinds]
            talkers = {
                kind: stack.enter_context(talker) for kind, talker in zip(kinds, made, strict=True)
            }
            jobs = [
                (batch, length, 1)
                for batch in batches
                for length in lengths
                if batch * length <= MOST_TOKENS
            ]
            jobs += [(batch, min(lengths), DECODED) for batch in batches]
            for job in jobs:
                self.pairs(talkers, *job)

    def log(self, kind: str) -> Path:
        return self.folder / f"{kind}.log"

    def pairs(self, talkers: dict[str, Talker], batch: int, length: int, tokens: int) -> None:
        draw, order = np.random.default_rng(2), [*talkers]
        seconds: dict[str, list[float]] = {kind: [] for kind in talkers}
        for number in range((3 if self.options.tiny else ROUNDS) + 2):
            random.Random(number).shuffle(order)
            prompts = draw.integers(0, 256, (batch, length)).tolist()
            for kind in order:
                with talkers[kind].turn():
                    took = talkers[kind].ask(prompts=prompts, tokens=tokens)["seconds"]
                if number >= 2:  # the first ones warm up
                    seconds[kind].append(took)
        bare = np.array(seconds.pop("bare"))
        what = f"{batch} x {length} tokens" + (f", {tokens} decoded" if tokens > 1 else "")
        ratios = {kind: interval(np.array(took) / bare) for kind, took in seconds.items()}
        figure = ", ".join(f"{kind} {ratio}" for kind, ratio in ratios.items())
        # Within what a second process of the same kind shows, or one percent.
        passed = (
            None if self.options.tiny else ratios["ours"].low <= max(1.01, ratios["again"].high)
        )
        note = f"bare {1000 * float(np.median(bare)):.2f} ms"
        self.checks.append(Check(what, figure, "<= 1.01", passed, note))
        self.record[what] = {
            "bare_s": bare.tolist(),
            **{kind: [*ratio] for kind, ratio in ratios.items()},
        }
        say(f"{what}: {figure}; {note}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=["parity", "quantized", "cost"]
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a model of three layers, few requests, cost not judged"
    )
    parser.add_argument(
        "--arguments", type=json.loads, default={}, help="vLLM's engine arguments, as JSON"
    )
    parser.add_argument(
        "--json", type=Path, help="write the checks and everything behind them there"
    )
    options = parser.parse_args(argv)
    options.shape = TINY if options.tiny else SHAPE
    with tempfile.TemporaryDirectory(prefix="hallutracer-gpu-") as name:
        bench = Bench(options, Path(name))
        say(f"{bench.record['device']}, torch {torch.__version__}: making the models")
        make(Path(name), options.shape)
        if {"parity", "quantized"} & {*options.parts}:
            say("reading with transformers and vLLM")
            bench.parity()
        if "cost" in options.parts:
            bench.cost()
    return conclude(bench.checks, options.json, bench.record)


if __name__ == "__main__":
    if sys.argv[1:2] == ["read"]:
        read(sys.argv[2], sys.argv[3], sys.argv[4], json.loads(sys.argv[5]), Path(sys.argv[6]))
    else:
        sys.exit(main())
