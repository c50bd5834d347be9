"""The quick start, for real: shipped models and bundles, the command line, a listening service, and
its SIGHUP."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.fleet import NAME, two_versions
from hallutracer_research.demo.build import KNOWN, UNKNOWN
from probes_store.store import Store
from service.demo import MODEL_DIR
from service.demo.questions import questions
from service.engines import checkpoint
from service.engines.base import EngineOptions, Sampling
from service.engines.places import PACKAGED
from service.engines.transformers.engine import TransformersEngine
from service.library.engine import SHIPPED, SMOLLM2
from tests import command_line
from tests.otlp import Collector, collector
from tests.running import until
from tests.serve_process import MAY_CHOOSE, ServeProcess


def hallutracer(
    store: Path, *arguments: str, fails: str = "", stdin: str = "", **variables: str
) -> str:
    """What a command printed; ``fails``: a word of its error instead."""
    variables = {"HALLUTRACER_STORE": str(store), "HALLUTRACER_THREADS": "1"} | variables
    done = command_line.hallutracer(*arguments, stdin=stdin, **variables)
    assert done.returncode == (1 if fails else 0), done.stderr
    assert fails in done.stderr
    return done.stdout


def rows(*prompts: str) -> str:
    return "".join(json.dumps({"prompt": text, "n": n}) + "\n" for n, text in enumerate(prompts))


def test_score_prints_risk_decision_and_plot(tmp_path: Path) -> None:
    out = hallutracer(tmp_path, "score", KNOWN, "--generate", "16")
    assert re.search(r"risk 0\.\d{3}  decision continue", out)
    assert "answer It is Rome." in out
    assert out.count("●") == 9  # eight layers and the legend


@pytest.mark.parametrize("bundle", ["demo", "demo-fused"])
def test_a_shipped_bundle_verifies_and_tells_a_known_fact_from_an_obscure_one(
    tmp_path: Path, bundle: str
) -> None:
    for dtype in (
        ("auto", "bfloat16") if bundle == "demo" else ("auto",)
    ):  # half precision passes the golden replay
        verified = hallutracer(tmp_path, "bundle", "verify", bundle, "--dtype", dtype)
        assert "golden prompts gave the recorded risks" in verified
    assert hallutracer(tmp_path, "bundle", "show", bundle).startswith("---\n")
    arguments = ("score", "--input", "-", "--bundle", bundle, "--trajectory")
    known, unknown = map(
        json.loads, hallutracer(tmp_path, *arguments, stdin=rows(KNOWN, UNKNOWN)).splitlines()
    )
    assert (known["n"], unknown["n"], len(known["trajectory"])) == (0, 1, 8)
    assert known["risk"] < known["threshold"] <= unknown["risk"]
    assert (known["decision"], unknown["decision"]) == ("continue", "abstain")


def test_an_output_that_cannot_be_whole_is_absent(tmp_path: Path) -> None:
    arguments, target = ("score", "--input", "-"), str(tmp_path / "no" / "risks.jsonl")
    hallutracer(tmp_path, *arguments, "--output", target, stdin=rows(KNOWN), fails="cannot write")
    assert (
        hallutracer(tmp_path, *arguments, stdin=rows(*[KNOWN] * 3, "why " * 900), fails="line 4")
        == ""
    )


def test_demo_info_and_questions(tmp_path: Path) -> None:
    info = json.loads(hallutracer(tmp_path, "demo", "info", "--json"))
    assert Path(info["model"], "config.json").is_file()
    assert [bundle["name"] for bundle in info["bundles"]] == ["demo", "demo-fused"]
    groups = []
    for split in ("train", "test"):
        result = list(
            map(
                json.loads,
                hallutracer(tmp_path, "demo", "questions", "--split", split).splitlines(),
            )
        )
        assert {"id", "prompt", "answers", "group", "kind", "exposures"} <= set(result[0])
        groups.append({row["group"] for row in result})
    assert not groups[0] & groups[1]


PRODUCTION = f"{NAME}@production"


@dataclass
class Shop:
    """A running service, and the store with two versions of a bundle that it follows."""

    store: Store
    first: str  # digest
    second: str
    process: ServeProcess = field(init=False)
    collector: Collector = field(init=False)

    def post(self, **body: Any) -> Any:
        return httpx.post(f"{self.process.url}/score", json=body, timeout=60).json()

    def digest(self, **body: str) -> str:
        return str(self.post(**{"prompt": UNKNOWN} | body)["bundle"]["digest"])


@contextmanager
def opened(
    folder: Path, move: Callable[[Store, int], None], *arguments: str, **more: str
) -> Iterator[Shop]:
    """``move`` is called while the model loads, after the bundles were read."""
    store, digests = two_versions(folder)
    shop, more = Shop(store, *digests), more | {"HALLUTRACER_STORE": str(folder)} | MAY_CHOOSE
    with ServeProcess(
        *arguments, "--threads=1", on_listening=lambda pid: move(store, pid), **more
    ) as shop.process:
        yield shop


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    def move(store: Store, process: int) -> None:
        store.set_alias(NAME, "production", 2)
        os.kill(process, signal.SIGHUP)

    options = [f"--bundle={name}" for name in ("demo", "demo-fused", PRODUCTION)]
    with collector() as sink:
        options.append(f"--otlp-traces-endpoint={sink.endpoint}")
        with opened(
            tmp_path_factory.mktemp("store"), move, *options, OTEL_BSP_SCHEDULE_DELAY="600000"
        ) as shop:
            shop.collector = sink
            yield shop


def test_a_moved_alias_takes_effect_at_a_hangup_even_one_while_loading(served: Shop) -> None:
    """And neither before nor halfway."""
    process, folder = served.process, Path(str(served.store.root))

    def judging() -> str:
        return served.digest(bundle=PRODUCTION)

    until(lambda: judging() == served.second)  # the one that came while the model was loading
    served.store.set_alias(NAME, "production", 1)
    assert judging() == served.second  # an alias means what it meant when it was loaded
    os.kill(process.process.pid, signal.SIGHUP)
    until(lambda: judging() == served.first)
    (folder / NAME / "aliases.json").write_text("{")
    assert judging() == served.first
    os.kill(process.process.pid, signal.SIGHUP)
    until(lambda: "not swapped" in process.log())
    assert judging() == served.first


def test_curl_answers(served: Shop) -> None:
    assert httpx.get(f"{served.process.url}/health/ready").json()["bundles"][:2] == [
        "demo:1",
        "demo-fused:1",
    ]
    body = served.post(prompt=[KNOWN, UNKNOWN], generate={"max_tokens": 16})
    known, unknown = body["data"]
    assert known["risk"] < known["threshold"] <= unknown["risk"]
    assert known["completion"]["text"].strip() == "It is Rome."
    assert "completion" not in unknown
    assert body["model"] == "hallutracer-demo"
    assert served.post(prompt="why " * 2000)["error"]["code"] == "prompt_too_long"
    prompts = [
        KNOWN,
        UNKNOWN,
        "What is the chemical symbol of gold?",
        "Which country is Aba in, I wonder?",
    ]
    together = [row["risk"] for row in served.post(prompt=prompts)["data"]]
    alone = [served.post(prompt=prompt)["data"][0]["risk"] for prompt in prompts]
    assert together == pytest.approx(alone, abs=1e-5)


def test_streams_and_answers_equal_the_engines_own_greedy_ones(served: Shop) -> None:
    engine = TransformersEngine.load(EngineOptions(str(MODEL_DIR)))
    texts = [row["prompt"] for row in questions("dev")[::150]]
    ids = [engine.render_chat([{"role": "user", "content": text}]) for text in texts]
    expected = [completion.text for completion in engine.generate(ids, Sampling(max_tokens=24))]
    assert len(set(expected)) > 5
    gated = 0
    for text, answer in zip(texts, expected, strict=True):
        body = {"prompt": text, "generate": {"max_tokens": 24}}
        assert served.post(**body, policy="observe")["data"][0]["completion"]["text"] == answer
        streamed = httpx.post(
            f"{served.process.url}/score", json=body | {"stream": True}, timeout=60
        ).text
        *lines, done = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
        assert done == "[DONE]"
        first, *rest = map(json.loads, lines)
        withheld = first["data"][0]["decision"] != "continue"
        assert "".join(event["delta"]["text"] for event in rest) == ("" if withheld else answer)
        gated += withheld
    assert 0 < gated < len(texts)


def test_ctrl_c_ends_it_cleanly(served: Shop) -> None:
    """The last test with this service: it ends it, and sends the spans that are left."""
    served.process.process.send_signal(signal.SIGINT)
    assert served.process.process.wait(60) in (0, 130, -signal.SIGINT)
    assert "Traceback" not in served.process.log()
    assert "POST /score" in {span.name for span in served.collector.spans}


def test_a_watched_alias_brings_a_canary_and_takes_it_back(tmp_path: Path) -> None:
    arguments = (
        f"--bundle={PRODUCTION}",
        f"--canary={NAME}@canary",
        "--canary-share=1",
        "--watch-s=0.2",
    )
    with opened(
        tmp_path, lambda store, _: store.set_alias(NAME, "canary", 2), *arguments
    ) as served:

        def bundles() -> Any:
            return httpx.get(f"{served.process.url}/v1/bundles").json()

        until(lambda: served.digest() == served.second)
        assert bundles()["status"]["left_out"] == []
        served.store.set_alias(NAME, "canary", 1)  # what judges already
        until(lambda: served.digest() == served.first)
        assert "judges already" in bundles()["status"]["left_out"][0]["reason"]
        served.store.set_alias(NAME, "production", 2)  # promoted, with the old one as canary
        until(lambda: [one["role"] for one in bundles()["data"]] == ["default", "canary"])
        assert served.digest() == served.first
    assert served.process.process.returncode == 0


NO_FACT = (
    "guess who just got a puppy!! me!!",
    "Haircut: bold or boring, what do you say?",
    "Could you smooth out this sentence? Me and him was there already since two hours.",
    "Turn into passive voice: The gardener trimmed the hedge.",
    "what's cosier, rain or snow",
)
FACT_IN_DRESS = (
    "Hey, are you there? Who wrote Emma?",
    "Hi! Can you help me? Who wrote Emma? Thanks a lot.",
    "Pretend to be a teacher who says what the currency of Yemen is.",
    "Write an email to Tom and tell him the currency of Yemen.",
    "currency @ yemen",
)


@pytest.mark.skipif(not PACKAGED[SMOLLM2].is_installed, reason=f"needs {PACKAGED[SMOLLM2].install}")
def test_smollm2s_bundles_pass_a_known_fact_and_withhold_a_confabulated_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded once, for all commands; it is the default model, as in ``make run``."""
    load, loaded = TransformersEngine.load, list[TransformersEngine]()

    def once(options: EngineOptions, rows: bool = False) -> TransformersEngine:
        assert options.model == SMOLLM2
        assert not rows
        if not loaded:
            loaded.append(load(options))
        return loaded[0]

    monkeypatch.setattr(TransformersEngine, "load", once)
    monkeypatch.setattr(TransformersEngine, "close", lambda _: None)
    monkeypatch.setattr(
        checkpoint, "folder_fingerprint", functools.cache(checkpoint.folder_fingerprint)
    )
    known_fact = "Which city is the capital of Yemen?"
    confabulated = "Which city is the capital of Dominica?"

    def score(*arguments: str) -> Any:
        options = ("--json", "--generate", "16", *arguments)
        return json.loads(hallutracer(tmp_path, "score", *options, HALLUTRACER_MODEL=""))

    for bundle in SHIPPED[SMOLLM2]:  # each replays its golden prompts, as ``bundle verify`` does
        known, withheld = score(known_fact, confabulated, "--bundle", bundle)["data"]
        assert known["risk"] < known["threshold"] <= withheld["risk"]
        assert "Sana'a" in known["completion"]["text"]
        assert "completion" not in withheld
        judged = score(*NO_FACT, *FACT_IN_DRESS, "--bundle", bundle)["data"]
        applies = [each["applies"] for each in judged]
        assert applies == [False] * len(NO_FACT) + [True] * len(FACT_IN_DRESS)
    answer = score(confabulated, "--threshold", "1")
    assert answer["bundle"]["name"] == SHIPPED[SMOLLM2][0]
    text = answer["data"][0]["completion"]["text"]
    assert text.strip()
    assert "Roseau" not in text  # the model would have confabulated
