"""Requests that run with a LoRA adapter: only the bundle that names it judges them, and without one
nothing passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from probes_store.bundle import Bundle
from probes_store.store import SHIPPED, Store
from service.demo import MODEL_DIR
from service.demo.questions import questions
from service.policies.guard import GATE
from service.scoring import Scorer
from tests.engines import lora
from tests.engines.vllm.installed import vllm_or_skip
from tests.kit.forks import Program
from tests.kit.vllm_programs import run
from tests.vllm_plugin.conftest import MODEL, serving

vllm_or_skip()

pytestmark = pytest.mark.long

COUNT = 60
ASKED = [row["prompt"] for row in questions("test")[:COUNT]]


class Made(NamedTuple):
    """What both programs are given, and what they must say of ``ASKED``: whether it is withheld,
    and the risk."""

    terse: Path  # read by the bundle "adapted"
    other: Path  # read by none
    store: Path
    base: list[tuple[bool, float]]
    adapted: list[tuple[bool, float]]


def judged(engine: Any, bundle: Bundle) -> list[tuple[bool, float]]:
    scorer = Scorer(engine, bundle)
    reports = scorer.score([scorer.render(item) for item in ASKED], GATE)
    return [(item.decision.value != "continue", item.risk) for item in reports]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("lora")
    terse, other = (
        lora.save_adapter(MODEL_DIR, folder / name, seed)
        for seed, name in enumerate(("terse", "other"))
    )
    engine = lora.reference(MODEL_DIR, terse, folder / "merged")
    bundle = lora.save_bundle(engine, folder / "store")
    adapted = judged(engine, bundle)
    shipped = Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo")
    from service.engines.base import EngineOptions
    from service.engines.transformers.engine import TransformersEngine

    base = judged(TransformersEngine.load(EngineOptions(str(MODEL_DIR), dtype="float32")), shipped)
    assert 5 < sum(withheld for withheld, _ in base) < COUNT - 5
    apart = sum(
        of_base[0] != of_adapted[0] for of_base, of_adapted in zip(base, adapted, strict=True)
    )
    assert apart > 2, "the wrong bundle must be seen"
    return Made(terse, other, folder / "store", base, adapted)


OFFLINE = f"""\
import json
import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    asked, terse, other = json.load(open("questions.json")), sys.argv[1], sys.argv[2]
    llm = LLM(model={str(MODEL_DIR)!r}, dtype="float32", enforce_eager=True, max_model_len=128,
              enable_lora=True, gpu_memory_utilization=0.2, max_loras=2, max_cpu_loras=4)
    chats = [[{{"role": "user", "content": question}}] for question in asked]
    how = SamplingParams(max_tokens=6, temperature=0)
    llm.llm_engine.add_lora(LoRARequest("terse", 1, terse))
    for adapters in (
        [None],  # by itself: beside adapters vLLM's CPU build computes with the last of them
        [LoRARequest("terse", 1, terse), LoRARequest("another name", 2, terse),
         LoRARequest("other", 3, other)],
        [LoRARequest("fresh", 4, terse, load_inplace=True)],  # its files are read at any time
        [LoRARequest("another name", 2, terse), LoRARequest("fresh", 4, terse)],
    ):
        every = [one for one in adapters for _ in asked]
        found = llm.chat(chats * len(adapters), how, use_tqdm=False, lora_request=every)
        for place, adapter in enumerate(adapters):
            answers = found[place * len(asked):(place + 1) * len(asked)]
            texts = [[one.outputs[0].text, one.outputs[0].stop_reason] for one in answers]
            print("ANSWER", json.dumps([adapter and adapter.lora_name, texts]))
"""


def test_the_gate_in_the_engine_judges_each_adapter_by_its_own_bundle(
    made: Made, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(OFFLINE)
    (tmp_path / "questions.json").write_text(json.dumps(ASKED))
    variables = {
        "HALLUTRACER_BUNDLE": "demo adapted",
        "HALLUTRACER_STORE": str(made.store),
        "HALLUTRACER_POLICY": "gate",
        "HALLUTRACER_ADAPTERS": str(made.terse),
    }
    program = Program(str(tmp_path / "program.py"))
    ran = run(program, [str(made.terse), str(made.other)], tmp_path, 450, **variables)
    lines = [
        json.loads(line.removeprefix("ANSWER "))
        for line in ran.stdout.splitlines()
        if line.startswith("ANSWER")
    ]
    output = ran.stdout[-2000:] + ran.stderr[-4000:]
    names = ["terse", "another name", "other", "fresh", "another name", "fresh"]
    assert [name for name, _ in lines] == [None, *names], output
    for number, wanted in ((0, made.base), (1, made.adapted), (2, made.adapted), (5, made.adapted)):
        for (text, reason), (withheld, risk) in zip(lines[number][1], wanted, strict=True):
            assert (reason is not None) == withheld, (number, reason, withheld, risk)
            assert text == "" if withheld else text
            assert not withheld or float(reason.rpartition(" ")[2]) == pytest.approx(risk, abs=2e-3)
    for number, words in (
        (3, "no bundle here reads the adapter 'other'"),
        (4, "was replaced in place"),
        (6, "was replaced in place"),
    ):
        assert all(text == "" and words in reason for text, reason in lines[number][1]), lines[
            number
        ][1][:3]


def test_vllms_server_judges_each_adapter_by_its_own_bundle(made: Made, tmp_path: Path) -> None:
    arguments = (
        "--enable-lora",
        "--max-loras",
        "2",
        "--lora-modules",
        f"terse={made.terse}",
        f"other={made.other}",
    )
    variables = {
        "HALLUTRACER_BUNDLE": "demo adapted",
        "HALLUTRACER_STORE": str(made.store),
        "HALLUTRACER_POLICY": "gate",
        "HALLUTRACER_CALLERS_MAY": "bundle",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    with (
        serving(tmp_path / "log", *arguments, **variables) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):

        def ask(model: str, text: str, **more: Any) -> httpx.Response:
            body = {
                "model": model,
                "max_tokens": 6,
                "temperature": 0.0,
                "messages": [{"role": "user", "content": text}],
            }
            return client.post("/v1/chat/completions", json=body | more)

        def check(model: str, bundle: str, wanted: list[tuple[bool, float]]) -> None:
            for text, (withheld, risk) in zip(ASKED[:20], wanted, strict=False):
                answer = ask(model, text).json()
                words, choice = answer["hallutracer"], answer["choices"][0]
                assert words["bundle"]["name"] == bundle
                assert words["data"][0]["risk"] == pytest.approx(risk, abs=2e-4)
                assert (choice["finish_reason"] == "content_filter") == withheld
                assert bool(choice["message"]["content"]) != withheld

        def refused(model: str, words: str, **more: Any) -> None:
            answer = ask(model, ASKED[0], **more)
            assert answer.status_code == 400
            assert words in answer.text

        check(MODEL, "demo", made.base)
        check("terse", "adapted", made.adapted)
        for more in ({}, {"stream": True}):
            refused("other", "no bundle here reads the adapter 'other'", **more)
        refused(MODEL, "does not read the model", vllm_xargs={"hallutracer_bundle": "adapted"})
        refused("terse", "does not read the model", vllm_xargs={"hallutracer_bundle": "demo"})
        # While it runs: under another name, and in the place of one that it has judged.
        load = {"lora_name": "later", "lora_path": str(made.terse)}
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
        check("later", "adapted", made.adapted)
        load = {"lora_name": "later", "lora_path": str(made.other), "load_inplace": True}
        answer = client.post("/v1/load_lora_adapter", json=load)
        assert answer.status_code == 400
        assert "a bundle reads the adapter 'later'" in answer.text
        check("later", "adapted", made.adapted)
        load = {"lora_name": "other", "lora_path": str(made.terse), "load_inplace": True}
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
        refused("other", "was replaced in place")
        check("terse", "adapted", made.adapted)
        scored = client.post("/v1/risk/score", json={"model": "terse", "prompt": ASKED[0]}).json()
        assert scored["data"][0]["risk"] == pytest.approx(made.adapted[0][1], abs=2e-4)
        assert scored["bundle"]["name"] == "adapted"
