"""The readout's cost: our score-only prefill compared with the bare forward of the same engine, in
one run.

    python -m benchmarks.readout_cost [--pairs 30] [--shapes qwen2.5-0.5b,demo] \\
        [--tokens 64,256] [--json OUT]
    python -m benchmarks.readout_cost --answers 1,32 [--pairs 200]

Ways to spend one prefill on the same ids, interleaved in random order, reported as paired ratios
(median, and the interval of the middle 90 %), so that a drift of the machine's speed cancels:

  bare      the blocks and the final norm, no lm_head: less than any serving engine does
  bare+head the same with the lm_head on the last position, as a serving engine's prefill does
  score     TransformersEngine.score: readout, depth mean, stop after the last readout
  score+1st the same with first-token signals: the whole forward with the lm_head on the last
  position
  hidden    output_hidden_states=True, its last position, then numpy
  residual  TransformersEngine.score at the residual stream, the site that ``hidden`` reads

With ``--answers``, ways to decode one more token of so many answers together: step, the same again,
and step+read, which reads each answer's token by probes."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config

from benchmarks.harness import spread
from service.demo import MODEL_DIR
from service.engines.base import Sampling
from service.engines.transformers.engine import TransformersEngine
from service.readout import Site
from tests.engines.tiny import probes

RATIOS = [
    ("score", "bare", "<= 1.02"),
    ("score", "bare+head", "<= 1.02"),
    ("score+1st", "bare+head", "<= 1.02"),
    ("score", "hidden", "< 1"),
    ("residual", "bare", "<= 1.02"),
    ("residual", "hidden", "< 1"),
]

OF_STEPS = [("step again", "step", "1"), ("step+read", "step", "<= 1.03")]


def build(shape: str) -> tuple[PreTrainedModel, TransformersEngine]:
    """Return a model of random weights in a known shape, or the demo model; and the engine on
    it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    if shape == "demo":
        model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
        return model, TransformersEngine(model, tokenizer)
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4_864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    ).eval()
    return model, TransformersEngine(model, tokenizer)


def ways(
    model: PreTrainedModel, engine: TransformersEngine, ids: list[int]
) -> dict[str, Callable[[], object]]:
    tensor = torch.tensor([ids])
    heads, stream = (probes(engine.identity.geometry, site) for site in Site)

    @torch.inference_mode()
    def bare() -> object:
        return model.base_model(tensor, use_cache=False)

    @torch.inference_mode()
    def bare_head() -> object:
        return (
            model(tensor, use_cache=False, logits_to_keep=1)
            .logits[:, -1]
            .float()
            .log_softmax(-1)
            .numpy()
        )

    @torch.inference_mode()
    def hidden() -> object:
        states = model.base_model(tensor, use_cache=False, output_hidden_states=True).hidden_states
        rows = np.stack([state[0, -1].float().numpy() for state in states[1:]])
        return np.mean(np.einsum("ld,ld->l", rows, stream.direction) + stream.bias)

    return {
        "bare": bare,
        "bare+head": bare_head,
        "hidden": hidden,
        "score": lambda: engine.score([ids], [heads]),
        "score+1st": lambda: engine.score([ids], [heads], first_token=True),
        "residual": lambda: engine.score([ids], [stream]),
    }


def steps(
    engine: TransformersEngine, ids: list[int], answers: int
) -> dict[str, Callable[[], object]]:
    one = probes(engine.identity.geometry, Site.ATTENTION_HEAD)

    def way(read: bool) -> Callable[[], object]:
        begun = engine.begin([ids] * answers, [])
        for continuation in begun:
            continuation.answer_probes = one if read else None
        running = [
            continuation.decode(Sampling(max_tokens=engine.identity.max_tokens))
            for continuation in begun
        ]

        def step() -> None:
            engine.step_together(begun)
            for pieces in running:
                next(pieces)

        step()  # of the prefill's own logits
        return step

    return {"step": way(False), "step again": way(False), "step+read": way(True)}


def measure(
    contestants: dict[str, Callable[[], object]], pairs: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return seconds per call, all contestants once in each round, in random order; the first two
    are warm-up."""
    repeats = max(1, round(0.02 / min(_once(call, clock) for call in contestants.values())))
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    shuffle = random.Random(0).shuffle
    for number in range(pairs + 2):
        shuffle(names)
        for name in names:
            started = clock()
            for _ in range(repeats):
                contestants[name]()
            if number >= 2:
                times[name].append((clock() - started) / repeats)
    return times


def _once(call: Callable[[], object], clock: Callable[[], float]) -> float:
    call()
    started = clock()
    call()
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--shapes", default="qwen2.5-0.5b,demo")
    parser.add_argument("--tokens", default="64,256")
    parser.add_argument("--answers", help="decode so many together, instead of prefills")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    clock_help = "cpu: with --threads 1, on a busy machine"
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help=clock_help)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.thread_time
    record = []
    setting = f"{options.threads} threads, {options.clock} time, float32, torch {torch.__version__}"
    print(f"{options.pairs} interleaved rounds, {setting}\n")
    for shape in options.shapes.split(","):
        model, engine = build(shape)
        for length in map(int, options.tokens.split(",")):
            limit = engine.identity.max_tokens
            if length > limit:
                print(
                    f"{shape}, {length} tokens: longer than the model's context of {limit}, left"
                    " out\n"
                )
                continue
            ids = np.random.default_rng(length).integers(10, 4_000, length).tolist()
            for answers in map(int, (options.answers or "0").split(",")):
                contestants = steps(engine, ids, answers) if answers else ways(model, engine, ids)
                times = measure(contestants, options.pairs, clock)
                medians = (
                    f"{name} {statistics.median(values) * 1e3:.2f} ms"
                    for name, values in times.items()
                )
                print(
                    f"{shape}, {length} tokens{f', {answers} answers' if answers else ''}:"
                    f" {', '.join(medians)}"
                )
                for ours, theirs, target in OF_STEPS if answers else RATIOS:
                    ratio = spread(np.array(times[ours]) / np.array(times[theirs]))
                    print(f"  {ours:>9} / {theirs:<9} {ratio}   target {target}")
                    which = {
                        "shape": shape,
                        "tokens": length,
                        "answers": answers,
                        "ours": ours,
                        "theirs": theirs,
                    }
                    record.append(which | {"median": ratio.median})
                print()
    if options.json:
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
