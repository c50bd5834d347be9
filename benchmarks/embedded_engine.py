"""The embedded engine on a real model: answers decoded together, and the fixed beginning of chats run once.

    python -m benchmarks.embedded_engine [--model smollm2 --bundle smollm2] [--rounds 7]

Paired rounds in random order, medians with a 95 % bootstrap interval of the median ratio.  Decoding: the same
answers, all in one step at a time against one after the other (which is what one token in turn costs); their token
ids are compared.  Risk: the same prompts one by one, with the chat template's beginning taken from the cache and with
it run anew; the risks are compared.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np

from probes_store.store import SHIPPED, Store
from service.cli.options import EngineChoice
from service.demo.questions import questions
from service.engines.base import Sampling
from service.engines.transformers.engine import TransformersEngine
from service.engines.transformers.hooks import Prefix
from service.readout import Probes, Site

RESAMPLES = 2_000
Measured = tuple[float, tuple[tuple[int, ...], ...]]


def decode(engine: TransformersEngine, probes: Probes, prompts: list[list[int]], width: int, tokens: int) -> Measured:
    """Seconds of decoding all prompts' answers ``width`` at a time, without their prefill, and the token ids."""
    continuations = engine.begin(prompts, [probes])
    pieces = [one.decode(Sampling(max_tokens=tokens)) for one in continuations]
    begun = time.perf_counter()
    for start in range(0, len(prompts), width):
        running = list(range(start, min(start + width, len(prompts))))
        while running:
            engine.step_together([continuations[place] for place in running])
            running = [place for place in running if next(pieces[place], None) is not None]
    seconds = time.perf_counter() - begun
    ids = tuple(one.completion.token_ids for one in continuations if one.completion)
    for one in continuations:
        one.close()
    return seconds, ids


def risks(engine: TransformersEngine, probes: Probes, prompts: list[list[int]]) -> tuple[float, list[float]]:
    """Seconds of scoring the prompts one by one, and their depth means."""
    begun = time.perf_counter()
    found = [float(engine.score([prompt], [probes])[0].trajectories[0].mean()) for prompt in prompts]
    return time.perf_counter() - begun, found


def paired(rounds: int, first: Callable[[], float], second: Callable[[], float]) -> str:
    rng = random.Random(0)
    ratios, seconds = [], []
    for _ in range(rounds):
        order = [0, 1]
        rng.shuffle(order)
        took = [0.0, 0.0]
        for which in order:
            took[which] = (first, second)[which]()
        ratios.append(took[0] / took[1])
        seconds.append(took)
    drawn = np.random.default_rng(0).choice(ratios, (RESAMPLES, rounds))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    one, other = np.median(seconds, axis=0)
    return f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}] ({one:.3f} s over {other:.3f} s)"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--bundle", default="smollm2")
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    bundle = Store(SHIPPED).load(options.bundle)
    asked = questions("test")
    with closing(TransformersEngine.load(EngineChoice(model=options.model).options_for())) as engine:
        probes = Probes.of(Site(bundle.manifest.readout.site), bundle.probes)
        stride = len(asked) // options.answers
        prompts = [engine.render_chat([{"role": "user", "content": row["prompt"]}]) for row in asked[::stride]]
        prompts = prompts[: options.answers]
        seen: dict[int, tuple[tuple[int, ...], ...]] = {}

        def at(width: int) -> float:
            seconds, seen[width] = decode(engine, probes, prompts, width, options.tokens)
            return seconds

        whole, nothing = engine._prefix, Prefix(())
        depth_means: dict[int, list[float]] = {}

        def with_prefix(prefix: Prefix) -> float:
            engine._prefix = prefix
            seconds, depth_means[len(prefix.tokens)] = risks(engine, probes, prompts)
            return seconds

        at(options.answers), with_prefix(whole)  # warm
        print(f"{options.answers} answers of up to {options.tokens} tokens")
        print("one after the other over together:", paired(options.rounds, lambda: at(1), lambda: at(options.answers)))
        same = sum(one == other for one, other in zip(seen[1], seen[options.answers], strict=True))
        count = sum(map(len, seen[1]))
        print(f"the same token ids: {same} of {options.answers}; {count} tokens in all")
        print(f"risk with the chats' beginning ({len(whole.tokens)} of {len(prompts[0])} tokens) kept over run anew:",
              paired(options.rounds, lambda: with_prefix(whole), lambda: with_prefix(nothing)))  # fmt: skip
        one, other = depth_means.values()
        print(f"largest difference of a depth mean: {np.abs(np.array(one) - np.array(other)).max():.1e}")


if __name__ == "__main__":
    main()
