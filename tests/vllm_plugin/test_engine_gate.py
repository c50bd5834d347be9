"""Programs that put an engine of vLLM's behind a front end of their own: its core judges, whatever
they send."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import hallutracer as ht
from service.demo import MODEL_DIR
from service.demo.questions import questions
from tests.engines.vllm.installed import vllm_or_skip
from tests.kit import vllm_programs
from tests.kit.forks import Program
from tests.kit.vllm_programs import VARIABLES
from tests.vllm_plugin.conftest import KNOWN

vllm_or_skip()

pytestmark = pytest.mark.long

COUNT, FEW = 1000, 40
SAME: dict[str, Any] = {
    "model": str(MODEL_DIR),
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "gpu_memory_utilization": 0.2,
}
USER = {"role": "user", "content": KNOWN}
# Conversations that ask in ways that no bundle is trained on, around a question that passes alone;
# and what passes.
TURNS = [
    [{"role": "user", "content": f"{KNOWN} And what is the capital of Spain?"}],
    [
        USER,
        {"role": "assistant", "content": "I am not sure."},
        {"role": "user", "content": "go on"},
    ],
    [
        USER,
        {"role": "assistant", "content": "Shall I answer this?"},
        {"role": "user", "content": "Yes."},
    ],
    [USER, {"role": "user", "content": "Hi"}],
    [USER],
]
# Each program answers the questions of questions.json by the model's chat template, a quarter of
# them with what makes an end token mean nothing, and writes for each its tokens, text and stop
# reason. This one speculates, and then changes the weights, at last for worse, and back.
OFFLINE = f"""\
import json

from vllm import LLM, SamplingParams

DRAFTS = {{"method": "ngram", "num_speculative_tokens": 3,
           "prompt_lookup_min": 1, "prompt_lookup_max": 3}}

def worsen(model):
    for parameter in model.parameters():
        parameter.data.mul_(1.05)

if __name__ == "__main__":
    asked = json.load(open("questions.json"))
    plain, stubborn = SamplingParams(max_tokens=6, temperature=0), SamplingParams(
        max_tokens=6, temperature=0.1, ignore_eos=True, min_tokens=6, logprobs=3, n=2, seed=1)
    chats = [[{{"role": "user", "content": one}}] for one in asked]
    how = [stubborn if place % 4 == 0 else plain for place in range(len(asked))]

    def say(name, answers):
        for answer in answers:
            choices = [[list(one.token_ids), one.text, one.stop_reason, bool(one.logprobs)]
                       for one in answer.outputs]
            print(name, json.dumps(choices))

    def ask(name, count):
        say(name, llm.chat(chats[:count], how[:count], use_tqdm=False))

    llm = LLM(**{SAME}, speculative_config=DRAFTS, disable_log_stats=False)
    ask("ANSWER", len(asked))
    say("TURNS", llm.chat({TURNS!r}, plain, use_tqdm=False))
    [accepted] = [metric.value for metric in llm.get_metrics()
                  if metric.name == "vllm:spec_decode_num_accepted_tokens"]
    print("ACCEPTED", accepted)
    llm.sleep(1)
    llm.wake_up()
    ask("WOKEN", {FEW})
    engine, chat = llm.llm_engine, [{{"role": "user", "content": {KNOWN!r}}}]
    known = llm.get_tokenizer().apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False)
    sixty = SamplingParams(max_tokens=60, ignore_eos=True)
    engine.add_request("long", {{"prompt_token_ids": known}}, sixty)
    engine.step()
    llm.collective_rpc("reload_weights")
    engine.add_request("late", {{"prompt_token_ids": known}}, plain)
    while engine.has_unfinished_requests():
        for answer in engine.step():
            if answer.finished:
                say(answer.request_id.upper(), [answer])
    ask("LOADED", {FEW})
    llm.apply_model(worsen)
    ask("WORSE", {FEW})
    llm.collective_rpc("reload_weights")
    ask("MENDED", {FEW})
"""
ASYNC = f"""\
import asyncio
import json

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

async def ask(engine, place, question, gather):
    kind = RequestOutputKind.DELTA if place % 2 else RequestOutputKind.FINAL_ONLY
    directive = {{"hallutracer": {{"first_token": False, "rows": False, "slot": 0, "probes": []}}}}
    how = SamplingParams(max_tokens=6, temperature=0, output_kind=kind,
                         extra_args=directive if place % 4 == 0 else None)
    tokens, text = [], ""
    chat = engine.get_tokenizer().apply_chat_template([{{"role": "user", "content": question}}],
                                                      add_generation_prompt=True, return_dict=False)
    async with gather:
        async for output in engine.generate({{"prompt_token_ids": chat}}, how, str(place)):
            one = output.outputs[0]
            tokens, text = tokens + list(one.token_ids), text + one.text
    return [[tokens, text, one.stop_reason, False]]

async def main():
    engine, gather = AsyncLLM.from_engine_args(AsyncEngineArgs(**{SAME})), asyncio.Semaphore(64)
    work = [ask(engine, *one, gather) for one in enumerate(json.load(open("questions.json")))]
    for choices in await asyncio.gather(*work):
        print("ANSWER", json.dumps(choices))
    engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""
BATCH = f"""\
import asyncio
import json

from vllm.entrypoints.launchers import run_batch

if __name__ == "__main__":
    asked = json.load(open("questions.json"))
    with open("in.jsonl", "w") as file:
        for place, one in enumerate(asked):
            body = {{"messages": [{{"role": "user", "content": one}}], "model": "demo",
                     "max_tokens": 6, "temperature": 0}}
            body |= {{"ignore_eos": True, "logprobs": True}} if place % 4 == 0 else {{}}
            row = {{"custom_id": str(place), "method": "POST", "url": "/v1/chat/completions",
                    "body": body}}
            file.write(json.dumps(row) + "\\n")
    parser = run_batch.make_arg_parser(run_batch.FlexibleArgumentParser())
    line = ["-i", "in.jsonl", "-o", "out.jsonl", "--model", {str(MODEL_DIR)!r},
            "--served-model-name", "demo", "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "128", "--gpu-memory-utilization", "0.2"]
    asyncio.run(run_batch.main(parser.parse_args(line)))
    for line in open("out.jsonl"):
        (one,) = json.loads(line)["response"]["body"]["choices"]
        said = (one.get("logprobs") or {{}}).get("content") or []
        text = one["message"]["content"] or ""
        print("ANSWER", json.dumps([[said, text, one["stop_reason"], bool(said)]]))
"""


GATED = {
    "HALLUTRACER_BUNDLE": "demo",
    "HALLUTRACER_POLICY": "gate",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def run(
    folder: Path,
    program: str,
    asked: list[str],
    python: str,
    limit_s: int = 500,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program by another environment's interpreter."""
    write(folder, program, asked)
    return subprocess.run(
        [python, "program.py"],
        cwd=folder,
        env=VARIABLES | GATED | environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def run_here(
    folder: Path, program: str, asked: list[str], *, forks: bool, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program that has imported vLLM; ``forks``: as ``Program``'s."""
    write(folder, program, asked)
    started = Program(str(folder / "program.py"), forks)
    return vllm_programs.run(started, [], folder, 500, **GATED | environment)


def write(folder: Path, program: str, asked: list[str]) -> None:
    (folder / "program.py").write_text(program)
    (folder / "questions.json").write_text(json.dumps(asked))


@pytest.fixture(scope="module")
def asked() -> list[str]:
    return [row["prompt"] for row in questions("test")[:COUNT]]


@pytest.fixture(scope="module")
def withheld(asked: list[str]) -> list[bool]:
    with ht.load("demo") as detector:
        return [risk.decision != "continue" for risk in detector.score(asked)]


def said_by(ran: subprocess.CompletedProcess[str]) -> dict[str, list[Any]]:
    """What a program printed, by the first word of its lines."""
    printed: dict[str, list[Any]] = defaultdict(list)
    for name, _, what in (line.partition(" ") for line in ran.stdout.splitlines()):
        with suppress(ValueError):
            printed[name].append(json.loads(what))
    return printed


def check(
    answers: list[Any],
    closed: Sequence[bool],
    why: str = "hallutracer: withheld, risk 0.",
    tells: Collection[int] = (0, 1),
) -> None:
    """``tells``: at even (0) and odd (1) places the program has a place for the stop reason."""
    for number, (choices, ends) in enumerate(zip(answers, closed, strict=True)):
        for tokens, text, stop_reason, logprobs in choices:
            if ends:
                assert (tokens, text, logprobs) == ([], "", False)
                assert number % 2 not in tells or stop_reason.startswith(why)
            else:
                assert text
                assert stop_reason is None


def check_answers(
    ran: subprocess.CompletedProcess[str],
    asked: list[str],
    withheld: list[bool],
    tells: Collection[int] = (0, 1),
) -> dict[str, list[Any]]:
    printed = said_by(ran)
    assert len(printed["ANSWER"]) == len(asked), ran.stdout[-2000:] + ran.stderr[-4000:]
    assert 50 < sum(withheld) < len(asked) - 50
    check(printed["ANSWER"], withheld, tells=tells)
    return printed


@pytest.mark.parametrize("program", [OFFLINE, ASYNC, BATCH], ids=["offline", "async", "run-batch"])
def test_no_token_of_a_withheld_answer(
    tmp_path: Path, asked: list[str], withheld: list[bool], program: str
) -> None:
    """Nor a draft token; nor any whose risk was not read, since the weights have changed.

    The core of ``ASYNC`` is a process that loads the guard, the one of ``BATCH`` a fork."""
    offline = program is OFFLINE
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if offline else {}
    ran = run_here(tmp_path, program, asked, forks=program is BATCH, **alone)
    printed = check_answers(ran, asked, withheld)
    ready = "hallutracer ready, for every request of this engine: bundle demo:1 (sha256:"
    (line,) = [line for line in (ran.stdout + ran.stderr).splitlines() if ready in line]
    assert " INFO " in line
    assert ") judges by policy gate (abstain) from threshold " in line
    if offline:
        check(printed["TURNS"], [True, True, True, True, False])
        assert printed["ACCEPTED"][0] > 0, "no draft token was part of an answer"
        changed = "hallutracer: withheld, since the model's weights have changed"
        for name in ("WOKEN", "LOADED", "MENDED"):
            check(printed[name], withheld[:FEW])
        check([*printed["LONG"], *printed["LATE"]], [False, True], changed)
        check(printed["WORSE"], [True] * FEW, changed)
        assert "golden prompt" in ran.stdout + ran.stderr  # wherever vLLM logs to
