"""Run all requests on one backend in one process, and write an .npz.

    python -m tests.parity.measure transformers FOLDER OUT.npz
    python -m tests.parity.measure vllm FOLDER OUT.npz --argument enforce_eager=true --argument
    tensor_parallel_size=2

A separate process, because a failed vLLM leaves its process unusable, and so that backends cannot
affect each other.

    python -m tests.parity.measure serve

does the same for each line of its input, a JSON list of arguments and a file for the log, in a fork
of itself, and prints the exit status.  Importing vLLM takes 15 s in each of its three processes,
more than all that is compared."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from service.engines.base import Completion, Engine, EngineOptions, PrefillResult, Sampling, Update
from service.engines.bridge import run_on
from service.errors import EngineError
from service.readout import Geometry, Probes, Site
from tests.kit.forks import start_vllms_processes_by_fork
from tests.parity import models as q
from tests.parity import quantized

CHUNK = 48  # tokens per step: most prompts are chunked
EXTRACTED = 40  # prompts with activations and full answers
ANSWER = Sampling(max_tokens=12)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
LATER = 2  # bundles that replace others in their slots
Arrays = dict[str, Any]


def wanted(question: q.Question, bundles: Sequence[list[Probes]]) -> list[Probes]:
    return [probe for bundle in question.bundles for probe in bundles[bundle]]


def flat(asked: Sequence[q.Question], onsets: Sequence[PrefillResult]) -> Arrays:
    """Results as arrays, NaN where a bundle does not read a question."""
    layers = len(onsets[0].trajectories[0])
    trajectories = np.full((len(asked), q.BUNDLES, len(Site), layers), np.nan)
    for row, (question, onset) in enumerate(zip(asked, onsets, strict=True)):
        assert onset.prompt_tokens == len(question.prompt)
        for number, bundle in enumerate(question.bundles):
            trajectories[row, bundle] = onset.trajectories[
                len(Site) * number : len(Site) * (number + 1)
            ]
    first = [onset.first_token for onset in onsets]
    assert None not in first
    return {
        "trajectories": trajectories,
        "log_max_prob": np.array([token.log_max_prob for token in first if token]),
        "entropy": np.array([token.entropy for token in first if token]),
        "token": np.array([token.token for token in first if token]),
    }


def read_of_answers(readings: Sequence[Any], geometry: Geometry) -> Any:
    """Trajectories of answers' own tokens, NaN where none was read."""
    unread = np.full(geometry.num_layers, np.nan)
    return np.array([unread if reading is None else reading for reading in readings]).reshape(
        -1, geometry.num_layers
    )


def answers(completions: Sequence[Completion | None]) -> Any:
    return np.array(
        [
            json.dumps([completion.text, completion.token_ids, completion.finish_reason])
            for completion in completions
            if completion
        ]
    )


def trajectories_of(engine: Any, prompts: Sequence[Any], probes: Sequence[Probes]) -> list[Any]:
    return [onset.trajectories for onset in engine.score(prompts, probes)]


def text_of(updates: Sequence[Update]) -> str:
    return "".join(update.piece for update in updates)


def shared(engine: Any, asked: Sequence[q.Question], *, rows: bool) -> Arrays:
    prompts = [question.prompt for question in asked[:EXTRACTED]]
    geometry: Geometry = engine.identity.geometry
    arrays: Arrays = {"generated": answers(engine.generate(prompts, ANSWER))}
    later = [q.probes(geometry, bundle) for bundle in range(q.BUNDLES, q.BUNDLES + LATER)]
    arrays["later"] = np.array([trajectories_of(engine, prompts, probes) for probes in later])
    if rows:
        extraction = engine.extract(prompts, list(Site))
        arrays |= {f"rows_{site}": extraction.activations[site] for site in Site}
    return arrays


def transformers(folder: str, prompts: int) -> Arrays:
    from service.engines.transformers.engine import TransformersEngine

    torch.set_num_threads(1)
    # Plain attention: transformers' sdpa silently ignores Gemma 2's attn_logit_softcapping.
    plain = {"attn_implementation": "eager"}
    engine = TransformersEngine.load(EngineOptions(model=folder, dtype="float32", extra=plain))
    asked = q.questions(prompts)
    everything = [*asked, *q.repeated(asked)]
    bundles = [q.probes(engine.identity.geometry, bundle) for bundle in range(q.BUNDLES)]
    every = [probe for bundle in bundles for probe in bundle]
    scored = engine.score([item.prompt for item in everything], every, first_token=True)
    onsets = []
    for question, onset in zip(everything, scored, strict=True):
        starts = [len(Site) * bundle for bundle in question.bundles]
        own = [item for start in starts for item in onset.trajectories[start : start + len(Site)]]
        onsets.append(PrefillResult(tuple(own), onset.first_token, onset.prompt_tokens))
    answered = [item for item in asked if item.sampling is not None and not item.cancelled]
    completions = [
        engine.generate([item.prompt], item.sampling)[0] for item in answered if item.sampling
    ]
    geometry, read = engine.identity.geometry, list[Any]()
    for question, completion in zip(answered, completions, strict=True):
        probe, ids = q.answer_probe(geometry, asked.index(question)), completion.token_ids[:-1]
        rows = [[*question.prompt, *ids]]
        text = [] if probe is None or not ids else engine.score(rows, [probe], last=[len(ids)])
        read.append(text[0].trajectories[0] if text else None)
    by_bundle = np.array([onset.trajectories for onset in scored[: len(asked)]])
    more = {"bundles": by_bundle.reshape(len(asked), q.BUNDLES, len(Site), -1).swapaxes(0, 1)}
    more["read_of_answers"] = read_of_answers(read, geometry)
    return (
        flat(everything, onsets)
        | more
        | shared(engine, asked, rows=True)
        | {"answers": answers(completions)}
    )


def both(folder: str, reference: str, dtype: str, method: str, arguments: dict[str, str]) -> Arrays:
    """Activations, truth logits and answers of few prompts: by the reference engine on
    ``reference``, and by vLLM.

    ``method``: how ``folder`` is quantized, "" for not at all."""
    from service.engines.families import family_of
    from service.engines.loading import find_model_files
    from service.engines.transformers.engine import TransformersEngine
    from service.engines.vllm.engine import VllmEngine

    torch.set_num_threads(1)
    prompts = [question.prompt for question in q.questions(q.FEW_PROMPTS)]
    plain = EngineOptions(model=reference, dtype="float32", extra={"attn_implementation": "eager"})
    options = EngineOptions(model=folder, dtype=dtype, max_batch_tokens=CHUNK, extra=arguments)
    sites = family_of(find_model_files(options).config).sites
    arrays: Arrays = {}
    for name, load in (
        ("expected", lambda: TransformersEngine.load(plain)),
        ("found", lambda: VllmEngine.load(options, rows=True)),
    ):
        engine: Any = load()
        if engine.torch_model is not None:
            quantized.round_inputs(engine.torch_model.model, method)
        probes = q.probes(engine.identity.geometry, 0, sites)
        scored = np.array(trajectories_of(engine, prompts, probes))
        arrays |= {f"{name}_logits_{site}": scored[:, number] for number, site in enumerate(sites)}
        rows = engine.extract(prompts, sites).activations
        arrays |= {f"{name}_rows_{site}": rows[site] for site in sites}
        arrays[f"{name}_answers"] = answers(engine.generate(prompts, ANSWER))
        arrays[f"{name}_fingerprint"] = np.array(engine.identity.fingerprint)
        engine.close()
    return arrays


def vllm(
    folder: str, prompts: int, arguments: dict[str, str], faulty: str | None, *, reads: bool
) -> Arrays:
    """Everything at once, in steps of ``CHUNK`` tokens, then what the reference does too."""
    from service.engines.vllm import engine as module
    from service.engines.vllm import launch
    from service.engines.vllm.engine import VllmEngine

    refusals: list[str] = []
    if faulty is not None:
        launch.WORKER = faulty
        refuse = module.self_test

        def record(*given: Any) -> None:
            try:
                refuse(*given)
            except EngineError as error:
                refusals.append(f"{type(error).__name__}: {error}")

        module.self_test = record
    rows = int(arguments.get("pipeline_parallel_size", 1)) == 1
    options = EngineOptions(model=folder, dtype="float32", max_batch_tokens=CHUNK, extra=arguments)
    engine = VllmEngine.load(options, rows=rows, slots=4 if faulty is None else 1, answers=reads)
    try:
        asked = q.questions(prompts)
        bundles = [q.probes(engine.identity.geometry, bundle) for bundle in range(q.BUNDLES)]
        if faulty is not None:
            return flawed(engine, asked, bundles) | {"self_test": np.array(refusals)}
        streams = asyncio.run_coroutine_threadsafe(
            everyone(engine, asked, bundles), engine.loop
        ).result(900)
        repeated = asyncio.run_coroutine_threadsafe(
            again(engine, asked, bundles), engine.loop
        ).result(300)
        firsts = [*(updates[0] for updates in streams), *repeated]
        onsets = [update.prefill for update in firsts if update.prefill is not None]
        assert len(onsets) == len(firsts)
        assert not any(update.prefill for updates in streams for update in updates[1:])
        answered = [
            number
            for number, question in enumerate(asked)
            if question.sampling is not None and not question.cancelled
        ]
        read = [streams[number][-1].answer for number in answered]
        texts = [text_of(streams[number]) for number in answered]
        completions = [streams[number][-1].completion for number in answered]
        assert texts == [completion.text for completion in completions if completion is not None]
        arrays = flat([*asked, *q.repeated(asked)], onsets) | {
            "answers": answers(completions),
            "cached_tokens": np.array([updates[0].cached_tokens for updates in streams]),
            "cancelled_after": np.array(
                [
                    len(own)
                    for own, question in zip(streams, asked, strict=True)
                    if question.cancelled
                ]
            ),
            "cached_again": np.array([update.cached_tokens for update in repeated]),
            "preemptions": np.array(counter("vllm:num_preemptions_total")),
            "accepted": np.array(counter(ACCEPTED) if "speculative_config" in arguments else 0),
            "version": np.array(launch.check_installed().split("+")[0]),
            "runner": np.array(run_on(engine.loop, engine._describe())["runner"]),
            "open": np.array(engine.counters.open_continuations),
        }
        if reads:
            means = [None if question is None else question.trajectory for question in read]
            arrays["read_of_answers"] = read_of_answers(means, engine.identity.geometry)
        return arrays | shared(engine, asked, rows=rows)
    finally:
        engine.close()


def flawed(engine: Any, asked: list[q.Question], bundles: Sequence[list[Probes]]) -> Arrays:
    """The numbers of a faulty worker for each bundle, or the error's name."""
    prompts = [question.prompt for question in asked]
    try:
        scored = [trajectories_of(engine, prompts, bundle) for bundle in bundles]
    except EngineError as error:
        return {"failed": np.array(type(error).__name__)}
    return {"bundles": np.array(scored)}


async def again(
    engine: Engine, asked: list[q.Question], bundles: Sequence[list[Probes]]
) -> list[Update]:
    received = []
    for question in q.repeated(asked):
        for attempt in range(2):
            stream = engine.answer(question.prompt, wanted(question, bundles), first_token=True)
            async with aclosing(stream):
                update = await anext(stream)
            if attempt:
                received.append(update)
    return received


async def everyone(
    engine: Engine, asked: Sequence[q.Question], bundles: Sequence[list[Probes]]
) -> list[list[Update]]:
    known = [
        q.answer_probe(engine.identity.geometry, number) for number in range(3)
    ]  # one object: a slot for each

    async def ask(question: q.Question) -> list[Update]:
        updates = []
        stream = engine.answer(
            question.prompt,
            wanted(question, bundles),
            first_token=True,
            sampling=question.sampling,
            answer_probes=known[asked.index(question) % 3] if engine.reads_answers else None,
        )
        async with aclosing(stream):
            async for update in stream:
                updates.append(update)
                if question.cancelled and len(updates) == 3:
                    break
        return updates

    # All wait before the first step: a quick machine would have room for each as it comes, and none
    # would give way.
    vllm = engine._async_llm
    await vllm.pause_generation(mode="keep", clear_cache=False)
    streams = asyncio.gather(*(ask(question) for question in asked))
    while len(vllm.output_processor.request_states) < len(asked):
        await asyncio.sleep(0.01)
    await vllm.resume_generation()
    return list(await streams)


def counter(name: str) -> float:
    from prometheus_client import REGISTRY

    samples = [
        sample for metric in REGISTRY.collect() for sample in metric.samples if sample.name == name
    ]
    assert samples, f"vLLM counts no {name}"
    return float(sum(sample.value for sample in samples))


def serve() -> None:
    # What the jobs import.
    from vllm.v1.engine import async_llm as _llm
    from vllm.v1.engine import core as _core

    from service.engines.transformers import engine as _reference
    from service.engines.vllm import worker as _worker

    assert all((_reference, _worker, _llm, _core))
    for line in sys.stdin:
        argv, log = json.loads(line)
        child = os.fork()
        if child == 0:
            _be_a_process_of_its_own(argv, log)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _be_a_process_of_its_own(argv: Sequence[str], log: str) -> None:
    status = 1
    try:
        written = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(written, stream)
        main(argv)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=["transformers", "vllm", "both"])
    parser.add_argument("folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=q.PROMPTS)
    parser.add_argument(
        "--argument", action="append", default=[], help="one of vLLM's, as NAME=VALUE"
    )
    parser.add_argument("--reference", help="the reference engine's folder, if it is another")
    parser.add_argument("--method", default="", help="of tests.parity.quantized")
    parser.add_argument("--dtype", default="float32", help="vLLM's")
    parser.add_argument(
        "--reads-answers", action="store_true", help="their own tokens, by probes of their own"
    )
    parser.add_argument("--faulty", help="a worker class of tests.parity.faulty")
    given = parser.parse_args(argv)
    # The user's environment must not affect the comparison.
    for name in ("HALLUTRACER_MODEL", "HALLUTRACER_ENGINE"):
        os.environ.pop(name, None)
    if given.backend == "transformers":
        arrays = transformers(given.folder, given.prompts)
    else:
        start_vllms_processes_by_fork()
        arguments = dict(pair.split("=", 1) for pair in given.argument)
        if arguments.get("enforce_eager") == "true":
            # vLLM compiles a few functions all the same, for many seconds; compiled runs have them.
            torch.compiler.set_stance("force_eager")
        if given.backend == "both":
            arrays = both(
                given.folder, given.reference or given.folder, given.dtype, given.method, arguments
            )
        else:
            arrays = vllm(
                given.folder, given.prompts, arguments, given.faulty, reads=given.reads_answers
            )
    with given.out.open("wb") as file:
        np.savez(file, **arrays)
    print(json.dumps({name: list(np.shape(array)) for name, array in arrays.items()}))


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main(sys.argv[1:])
