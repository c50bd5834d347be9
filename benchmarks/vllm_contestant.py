"""One vLLM in a process of its own, answering JSON lines: bare, with our readout, or with hooks.

    python -m benchmarks.vllm_contestant --model FOLDER --kind ours [--stats] [--arguments JSON]

A job is {"prompts": [[ids]], "tokens": n}: ``LLM.generate`` on all of them at once.  The answer has the wall seconds of
the call and, with --stats, what vLLM's core measured: seconds of each prefill and seconds per decoded token.
All kinds get the same engine arguments; only the worker class, its plan and eager mode differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.readout import Site

WORKER = "service.engines.vllm.worker.Worker"
HOOKS = "benchmarks.vllm_hooks.Worker"
MAX_LENGTH = 2048
# Prefix caching off, so that a prefill is one; the same small cache for all, so that six fit on one machine.
SAME: dict[str, Any] = {
    "dtype": "float32", "kv_cache_memory_bytes": 256 << 20, "enable_prefix_caching": False,
    "max_num_batched_tokens": MAX_LENGTH, "max_num_seqs": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    words: str
    worker: str | None = None
    eager: bool = False
    sites: tuple[Site, ...] = ()
    slots: int = 1


KINDS = {
    "bare": Kind("vLLM, compiled"),
    "again": Kind("the same in a second process: the noise"),
    "ours": Kind("readout, one site, one bundle", WORKER, sites=(Site.ATTENTION_HEAD,)),
    "both": Kind("readout, both sites, four slots each", WORKER, sites=tuple(Site), slots=4),
    "eager": Kind("vLLM, enforce_eager", eager=True),
    "hooks": Kind("the peers' way: hooks that keep the last row, enforce_eager", HOOKS, eager=True),
}


def start(model: str, kind: Kind, stats: bool, more: dict[str, Any]) -> Any:
    from service.engines.vllm.launch import ENVIRONMENT
    from service.engines.vllm.wire import KEY

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    context = json.loads((Path(model) / "config.json").read_text())["max_position_embeddings"]
    arguments = SAME | {"max_model_len": min(MAX_LENGTH, context)} | more | {"disable_log_stats": not stats}
    arguments["enforce_eager"] = kind.eager or bool(more.get("enforce_eager"))
    if kind.worker is not None:
        arguments["worker_cls"] = kind.worker
    if kind.sites:
        arguments["additional_config"] = {KEY: {"sites": list(map(str, kind.sites)), "slots": kind.slots}}
    return LLM(model=model, **arguments)


def put_probes(llm: Any, kind: Kind) -> Any:
    """Random unit probes into every slot; what is read, as a ``wire.Plan``."""
    import numpy as np

    from service.engines.vllm.wire import Plan
    from service.readout import Geometry

    described = llm.collective_rpc("hallutracer_describe")[0]
    plan = Plan(Geometry(*described["geometry"]), kind.sites, kind.slots, False)
    draw = np.random.default_rng(0)
    layers = plan.geometry.num_layers
    for site in plan.sites:
        for slot in range(plan.slots):
            direction = draw.normal(size=(layers, plan.geometry.dim(site)))
            direction /= np.linalg.norm(direction, axis=1, keepdims=True)
            table = np.concatenate([direction, np.zeros((layers, 1)), np.ones((layers, 1))], axis=1)
            head = draw.integers(0, plan.geometry.heads(site), layers).tolist()
            numbers = np.ascontiguousarray(table, np.float32).tobytes()
            llm.collective_rpc("hallutracer_write", args=(slot, str(site), head, numbers))
    return plan


def serve(llm: Any, kind: Kind) -> None:
    """Answer jobs until stdin ends.  ``stdout`` is what vLLM's own printing has been kept away from."""
    from vllm import SamplingParams

    from service.engines.vllm.wire import Directive, Payload

    plan = put_probes(llm, kind) if kind.sites else None
    directive = Directive()
    extra = None if plan is None else directive.encode()
    checked = False
    for line in sys.stdin:
        job = json.loads(line)
        parameters = SamplingParams(
            max_tokens=job["tokens"], temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra
        )
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        begun = time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        answer: dict[str, Any] = {"seconds": time.perf_counter() - begun}
        if any(len(output.outputs[0].token_ids) != job["tokens"] for output in outputs):
            raise RuntimeError("vLLM gave fewer tokens than were asked for")
        if plan is not None and job["tokens"] == 1:  # with more, only the last output is handed out
            found = [Payload.decode(output.prompt_token_id_logprobs, plan, directive) for output in outputs]
            if not all(abs(payload.trajectories).min() > 0 for payload in found):
                raise RuntimeError("a reading is zero: no probe was written")
        if kind.worker == HOOKS and not checked:
            layers, requests, width = llm.collective_rpc("bench_shape")[0]
            if layers < 2 or requests != len(prompts) or not width:
                raise RuntimeError("the hooks kept nothing")
            checked = True
        if outputs[0].metrics is not None:
            times = [output.metrics for output in outputs]
            answer["prefill"] = [one.first_token_ts - one.scheduled_ts for one in times]
            if job["tokens"] > 1:
                answer["decode"] = [(one.last_token_ts - one.first_token_ts) / (job["tokens"] - 1) for one in times]
        _answer(answer)


def _answer(content: dict[str, Any]) -> None:
    os.write(_ANSWERS, (json.dumps(content) + "\n").encode())


_ANSWERS = 1


def main() -> None:
    global _ANSWERS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--kind", choices=list(KINDS), required=True)
    parser.add_argument("--stats", action="store_true", help="vLLM's own times of each request")
    parser.add_argument("--arguments", type=json.loads, default={}, help="more engine arguments, as JSON")
    options = parser.parse_args()
    _ANSWERS = os.dup(1)
    os.dup2(2, 1)
    kind = KINDS[options.kind]
    begun = time.perf_counter()
    llm = start(options.model, kind, options.stats, options.arguments)
    _answer({"kind": options.kind, "start_s": time.perf_counter() - begun})
    serve(llm, kind)


if __name__ == "__main__":
    main()
