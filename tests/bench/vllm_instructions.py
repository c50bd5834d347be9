"""How many instructions the in-graph readout adds per token and layer, counted by valgrind's callgrind.

    python -m tests.bench.vllm_instructions [--layers 2] [--json OUT]

Counted on a stand-in, not on vLLM's worker: hardware counters are missing on many virtual machines, and callgrind knows
no AVX-512, which vLLM's kernels are built for.  The stand-in is a stack of decoder layers in the shape of Qwen2.5-0.5B
that hands on (hidden, residual) and has its attention behind an opaque operator, as vLLM's models do, compiled by
torch.compile for AVX2 with dynamic shapes, one thread; ``service.engines.vllm.graph.install`` puts the readout into it,
the same function that puts it into vLLM.  The share is of the fewest instructions that a layer's matrix products could
take with AVX-512, so it is an upper bound.

Two numbers of tokens, few because valgrind emulates each fused multiply-add, give what every further token costs and
what a layer costs once a step.  ``onset`` is what a step with one onset costs besides: NaN fill, gather, payload.
Needs valgrind and g++; about 5 minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from service.engines import families
from service.engines.vllm import graph
from service.engines.vllm.reader import OnsetRow, Reader, StageLink
from service.engines.vllm.wire import Directive, Plan
from service.readout import Geometry, Probes, Site
from tests.bench.load_stats import say
from tests.serve_process import ROOT

HEADS, KEYS, DIM, HIDDEN, INNER = 14, 2, 64, 896, 4_864
TOKENS = (4, 16)
# The multiply-adds of a layer's matrix products for one token, 16 in an AVX-512 instruction: no layer takes fewer.
LEAST = (HIDDEN * (HEADS + 2 * KEYS) * DIM + HEADS * DIM * HIDDEN + 3 * HIDDEN * INNER) / 16
VARIANTS = {"bare": None, "one site, one slot": ((Site.ATTENTION_HEAD,), 1), "both sites, four slots": (tuple(Site), 4)}
CLIENT = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void stop(void) { CALLGRIND_DUMP_STATS; CALLGRIND_STOP_INSTRUMENTATION; }
"""
# Of the child; AVX2, which valgrind can run, for inductor and for torch's own kernels.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
               "ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONHASHSEED": "0"}  # fmt: skip


@torch.library.custom_op("hallutracer_bench::attention", mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[tokens, heads * dim] of each; one prompt."""
    one, two, three = (each.view(each.shape[0], -1, DIM).transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    found = nn.functional.scaled_dot_product_attention(one, two, three, is_causal=True, enable_gqa=True)
    return found[0].transpose(0, 1).reshape(q.shape)


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


class Projection(nn.Linear):
    """o_proj, with the attribute that vLLM's has."""

    @property
    def input_size(self) -> int:
        """Inputs."""
        return self.in_features


class Attention(nn.Module):
    """Queries, keys and values of one matrix, no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, (HEADS + 2 * KEYS) * DIM)
        self.o_proj = Projection(HEADS * DIM, HIDDEN, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]."""
        q, k, v = self.qkv_proj(states).split([HEADS * DIM, KEYS * DIM, KEYS * DIM], dim=-1)
        out: torch.Tensor = self.o_proj(attention(q.contiguous(), k.contiguous(), v.contiguous()))
        return out


class Layer(nn.Module):
    """A block as vLLM writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN, eps=1e-6), nn.RMSNorm(HIDDEN, eps=1e-6)])
        self.gate_up, self.down = nn.Linear(HIDDEN, 2 * INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [tokens, hidden]."""
        residual = hidden + residual
        hidden = self.self_attn(self.norms[0](residual))
        residual = hidden + residual
        gate, up = self.gate_up(self.norms[1](residual)).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up), residual


class Stack(nn.Module):
    """Layers where ``families`` looks for them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Layer() for _ in range(layers)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden]."""
        residual = torch.zeros_like(hidden)
        for layer in self.model.layers:  # type: ignore[union-attr]
            hidden, residual = layer(hidden, residual)
        return hidden + residual


def stack(layers: int, variant: str) -> tuple[Callable[[torch.Tensor], Any], Reader | None]:
    """A compiled stack, with the readout in it or not."""
    torch.manual_seed(0)
    model, reader = Stack(layers).eval(), None
    wanted = VARIANTS[variant]
    if wanted is not None:
        plan = Plan(Geometry(layers, HEADS, DIM, HIDDEN), *wanted, activations=False)
        family = families.family_of(SimpleNamespace(model_type="qwen2"))
        sizes = graph.Sizes(tokens=max(TOKENS), prompts=8)
        tensors, onsets = graph.install(model, family, plan, graph.TensorParallelRank(0, 1), sizes, torch.device("cpu"))
        for site in plan.sites:
            for slot in range(plan.slots):
                one = torch.randn(layers, plan.geometry.dim(site)).numpy()
                flat = torch.zeros(layers).numpy()
                tensors[site].write(slot, Probes(site, flat.astype(int), one, flat, flat + 1))
        reader = Reader(plan, tensors, onsets, StageLink())
    return torch.compile(model, dynamic=True, fullgraph=True), reader


def child(layers: int, client: str) -> None:
    """Under valgrind: one dump for each variant, each number of tokens, and each reader's step; names on stdout."""
    import torch._inductor.config as inductor

    inductor.cpp.simdlen = 256
    torch.set_num_threads(1)
    counter = ctypes.CDLL(client)

    def count(name: str, call: Callable[[], object]) -> None:
        call()
        counter.start()
        call()
        counter.stop()
        print(name, flush=True)

    with torch.inference_mode():
        for variant in VARIANTS:
            model, reader = stack(layers, variant)
            for tokens in sorted(TOKENS, reverse=True):
                states = torch.randn(tokens, HIDDEN)
                count(f"{variant}|{tokens}", lambda model=model, states=states: model(states))  # type: ignore[misc]
                if reader is None:
                    continue

                def step(reader: Reader = reader, tokens: int = tokens) -> None:
                    reader.before([OnsetRow("one", Directive(), tokens - 1, 0)], tokens)
                    reader.after()
                    reader.payloads()

                logits = next(iter(reader.sites.values())).logits[:, :tokens]
                if not bool(torch.isfinite(logits).all() and logits.abs().min() > 0):
                    raise RuntimeError("the compiled stack does not write the readout")
                count(f"{variant}|onset, {tokens}", step)


def run(layers: int) -> dict[str, float]:
    """Instructions of one call, by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "client.c").write_text(CLIENT)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "client.so", folder / "client.c"], check=True)
        command = [sys.executable, "-m", "tests.bench.vllm_instructions", "--child", str(folder / "client.so"),
                   "--layers", str(layers)]  # fmt: skip
        environment = os.environ | ENVIRONMENT | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        say("compiled; now under valgrind")
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet"]
        valgrind.append(f"--callgrind-out-file={folder}/dump")
        with subprocess.Popen([*valgrind, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                              text=True) as counted:  # fmt: skip
            assert counted.stdout is not None
            names = []
            for line in counted.stdout:
                names.append(line.strip())
                say(f"counted {names[-1]}")
        if counted.returncode:
            raise RuntimeError(f"valgrind ended with {counted.returncode}; its words are above")
        found = {}
        for number, name in enumerate(names, start=1):
            found[name] = float(
                (all_costs if "onset" in name else compiled_costs)((folder / f"dump.{number}").read_text())
            )
        return found


def compiled_costs(dump: str) -> int:
    """Instructions that a callgrind dump books under what inductor has compiled.

    Matrix products are torch's own and the same in every variant, but what they take varies with where their operands
    happen to lie, by more than the readout adds; what only an ``onset`` runs is torch's too, see ``all_costs``.
    """
    total, inside, follows_call = 0, False, False
    names: dict[str, str] = {}
    for line in dump.splitlines():
        if found := re.match(r"c?ob=\((\d+)\)(?: (.+))?", line):
            names.setdefault(found[1], found[2] or "")
            if line.startswith("ob="):
                inside = "inductor" in names[found[1]]
        elif line.startswith("calls="):
            follows_call = True
        elif re.match(r"[0-9+*-]", line):
            if inside and not follows_call:
                total += int(line.split()[-1])
            follows_call = False
    return total


def all_costs(dump: str) -> int:
    """Every instruction of a dump."""
    summary = re.search(r"^totals: (\d+)", dump, re.MULTILINE)
    assert summary is not None
    return int(summary[1])


def main() -> None:
    """Count, and print the table for LOG.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.child:
        child(options.layers, options.child)
        return
    if shutil.which("valgrind") is None:
        sys.exit("valgrind is not on PATH (Debian: apt-get install valgrind)")
    begun = time.monotonic()
    found = run(options.layers)
    few, many = TOKENS
    print("| readout | added per further token and layer | share | added per layer, once a step | onset, once a step |")
    print("|" + " --- |" * 5)
    for variant in [name for name in VARIANTS if name != "bare"]:
        added = {tokens: (found[f"{variant}|{tokens}"] - found[f"bare|{tokens}"]) / options.layers for tokens in TOKENS}
        each = (added[many] - added[few]) / (many - few)
        onset = found[f"{variant}|onset, {many}"]
        print(f"| {variant} | {each:,.0f} | {each / LEAST:.3%} | {added[few] - few * each:,.0f} | {onset:,.0f} |")
    say(f"{(time.monotonic() - begun) / 60:.1f} minutes")
    if options.json:
        options.json.write_text(json.dumps({"layers": options.layers, "instructions": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
