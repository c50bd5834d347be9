"""``hallutracer serve`` and ``train`` with ``--engine vllm``, as a user types them, on the demo
model.

A start of vLLM is most of a minute, so tests share services: ``vllm_service``,
which other files ask, too; one that reads answers, which at last is killed; and one
whose engine stands still, and then dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.fleet import draft
from probes_store.store import Store
from service.demo import MODEL_DIR
from service.engines.base import EngineOptions
from service.engines.transformers.engine import TransformersEngine
from service.turn import LEAST_READ
from tests.engines.vllm.installed import vllm_or_skip
from tests.kit import vllm_programs
from tests.kit.vllm_programs import VARIABLES
from tests.kit.vllm_service import EAGER, VllmService
from tests.matching import with_answer
from tests.running import until
from tests.serve_process import MAY_CHOOSE, ServeProcess, serve

vllm_or_skip()

KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
pytestmark = pytest.mark.long  # a minute to start

STARTING_S = 240.0


@pytest.fixture
def service(vllm_service: VllmService) -> str:
    return vllm_service.served.url


def post(url: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/score", json=body, timeout=60)


def test_the_readmes_request(service: str) -> None:
    answer = post(service, prompt=[KNOWN, UNKNOWN], generate={"max_tokens": 16}).json()
    known, unknown = answer["data"]
    assert known["risk"] == pytest.approx(0.0321, abs=1e-4)
    assert known["completion"] == {
        "text": " It is Rome.",
        "finish_reason": "stop",
        "completion_tokens": 5,
    }
    assert unknown["risk"] == pytest.approx(0.8138, abs=1e-4)
    assert unknown["decision"] == "abstain"
    assert "completion" not in unknown


def test_its_start_was_told_step_by_step(vllm_service: VllmService) -> None:
    until(lambda: "hallutracer ready: " in vllm_service.served.log())
    log = vllm_service.served.log()
    places = [
        log.find(f"with vllm: {step}")
        for step in ("starting its", "loading the weights", "compiling", "testing")
    ]
    steps = [
        position for position in places if position >= 0
    ]  # a step that is over within 0.3 s may go untold
    assert steps == sorted(steps)
    assert len(steps) >= 2


def test_the_other_bundle_reads_the_same_forward_pass(service: str) -> None:
    answer = post(
        service, prompt=UNKNOWN, bundle="demo-fused", include=["trajectory", "running_mean"]
    ).json()
    (row,) = answer["data"]
    assert row["risk"] == pytest.approx(0.8018, abs=1e-4)
    assert (
        np.mean(row["trajectory"])
        == pytest.approx(row["running_mean"][-1])
        == pytest.approx(row["depth_mean"])
    )


def test_a_shadow_reads_the_same_forward_pass(service: str) -> None:
    def differences() -> float:
        lines = httpx.get(f"{service}/metrics").text.splitlines()
        sums = [
            line for line in lines if line.startswith("hallutracer_shadow_risk_difference_sum{")
        ]
        (line,) = [line for line in sums if 'bundle="demo:1"' in line]
        assert 'shadow="demo-fused:1"' in line
        return float(line.split()[-1])

    before = differences()
    answer = post(service, prompt=UNKNOWN).json()
    assert answer["bundle"]["name"] == "demo"
    assert differences() - before == pytest.approx(0.8138 - 0.8018, abs=2e-4)


def test_streams(service: str) -> None:
    for prompt, text in ((KNOWN, " It is Rome."), (UNKNOWN, "")):
        body = {"prompt": prompt, "generate": {"max_tokens": 16}, "stream": True}
        lines = httpx.post(f"{service}/score", json=body, timeout=60).text.split("\n\n")
        events = [
            json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
        ]
        assert events[0]["object"] == "risk.list"
        assert "".join(event.get("delta", {}).get("text", "") for event in events[1:]) == text
        assert lines[-2] == "data: [DONE]"


def test_many_at_once_get_their_own(service: str) -> None:
    def ask(prompt: str) -> float:
        return float(post(service, prompt=prompt).json()["data"][0]["risk"])

    prompts = [
        f"What is the capital of {name}?"
        for name in ("Italy", "Chad", "Peru", "Nauru", "Japan", "Mali")
    ] * 8
    alone = {prompt: ask(prompt) for prompt in set(prompts)}
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, prompts)) == pytest.approx(
            [alone[prompt] for prompt in prompts], abs=1e-4
        )


def test_a_prefix_that_was_seen_is_counted_as_cached(service: str) -> None:
    prompt = " ".join(["What is the capital of Chad and of Mali and of Peru and of Japan?"] * 12)
    assert post(service, prompt=prompt).json()["usage"]["cached_tokens"] == 0
    again = post(service, prompt=prompt).json()["usage"]
    assert 0 < again["cached_tokens"] < again["prompt_tokens"]


def test_bad_requests_are_named(service: str) -> None:
    too_long = post(service, input_ids=[5] * 256)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (413, "prompt_too_long")
    assert post(service, input_ids=[5] * 255).status_code == 200
    assert post(service, input_ids=[99999]).status_code == 422
    assert post(service, prompt="x", generate={"max_tokens": 0}).status_code == 422
    assert post(service, prompt="x", bundle="another").status_code == 404


def test_an_answer_whose_reader_leaves_is_ended(service: str) -> None:
    body = {
        "prompt": KNOWN,
        "generate": {"max_tokens": 200, "temperature": 3.0},
        "stream": True,
        "policy": "observe",
    }
    with httpx.stream("POST", f"{service}/score", json=body, timeout=60) as response:
        next(response.iter_lines())

    def idle() -> bool:
        lines = httpx.get(f"{service}/metrics").text.splitlines()
        return all(
            line.endswith(" 0.0")
            for line in lines
            if line.startswith("hallutracer_running_decodes ")
        )

    until(idle, 30)


def test_a_bundle_is_swapped_while_it_serves(vllm_service: VllmService) -> None:
    def ask() -> tuple[int, float]:
        answer = post(vllm_service.served.url, prompt=UNKNOWN, bundle="mine").json()
        return answer["bundle"]["version"], answer["data"][0]["risk"]

    assert ask() == (1, pytest.approx(0.8138, abs=1e-4))
    vllm_service.store.set_alias("mine", "production", 2)
    vllm_service.served.process.send_signal(signal.SIGHUP)
    risks = {1: pytest.approx(0.8138, abs=1e-4), 2: pytest.approx(0.8018, abs=1e-4)}

    def swapped() -> bool:
        version, risk = ask()
        assert risk == risks[version]
        return version == 2

    until(swapped, 60)


def engine_of(served: ServeProcess) -> int:
    """The process id of its engine."""
    processes = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True
    ).stdout.splitlines()
    cores = [line.split() for line in processes if "EngineCore" in line]
    [core] = [int(pid) for pid, parent, *_ in cores if int(parent) == served.process.pid]
    return core


def test_a_service_whose_vllm_stands_still_waits_for_it_and_ends_with_one_that_dies() -> None:
    def becomes(status: int) -> None:
        until(lambda: httpx.get(f"{served.url}/health/ready", timeout=10).status_code == status, 30)

    with (
        serve(*EAGER, "--stall-s", "5", **vllm_programs.EAGER) as served,
        ThreadPoolExecutor(1) as pool,
    ):
        core = engine_of(served)
        os.kill(core, signal.SIGSTOP)
        try:
            waiting = pool.submit(post, served.url, prompt=KNOWN)
            becomes(503)
            assert httpx.get(f"{served.url}/health/live", timeout=10).status_code == 200
        finally:
            os.kill(core, signal.SIGCONT)
        becomes(200)
        assert waiting.result().status_code in (200, 503, 504)
        [row] = post(served.url, prompt=KNOWN).json()["data"]
        assert row["risk"] == pytest.approx(0.0321, abs=1e-4)
        os.kill(core, signal.SIGKILL)
        assert served.process.wait(60) == 1
        assert "engine" in served.log()


def test_train_on_vllm_gives_the_bundle_that_transformers_gives(tmp_path: Path) -> None:
    names = [f"{letter}{other}land" for letter in "ABCDEFGH" for other in "aeiou"]
    rows = [
        {
            "id": f"{number}",
            "prompt": f"What is the capital of {name}?",
            "label": number % 2,
            "group": name,
        }
        for number, name in enumerate(names)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    for name, engine in (("plain", ()), ("fast", EAGER)):
        command = [
            sys.executable,
            "-m",
            "service.cli",
            "train",
            "--data",
            str(data),
            "--name",
            name,
            "--folds",
            "2",
            "--seeds",
            "1",
            "--c",
            "10",
            "--no-evaluate",
            "--jobs",
            "1",
            "--store",
            str(tmp_path / "store"),
            "--run-dir",
            str(tmp_path / name),
            "--signals",
            "depth_mean,first_token",
            *engine,
        ]
        named = VARIABLES | {
            "HALLUTRACER_BUNDLE": "demo"
        }  # has no part in it, and does not stand in its way
        done = subprocess.run(
            command, env=named, capture_output=True, text=True, timeout=STARTING_S
        )
        assert done.returncode == 0, done.stderr[-3000:]
        for trace in ("Traceback", "Exception ignored", "Task was destroyed"):
            assert trace not in done.stderr, "``AsyncLLM`` must be freed before the program ends"
    store = Store(tmp_path / "store")
    plain, fast = store.load("plain"), store.load("fast")
    assert fast.probes.head.tolist() == plain.probes.head.tolist()
    np.testing.assert_allclose(fast.probes.direction, plain.probes.direction, atol=1e-3)
    np.testing.assert_allclose(
        fast.manifest.classifier.weight, plain.manifest.classifier.weight, rtol=1e-2
    )


AGAIN = """
[again]
action = "abstain"
message = "No: {risk}."
recheck = true

[cut]
action = "abstain"
stop_at = 0.5
"""


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServeProcess]]:
    """Services on both engines of a bundle with probes of answers, and policies that act on
    them."""
    folder = tmp_path_factory.mktemp("reading")
    reference = TransformersEngine.load(EngineOptions(model=str(MODEL_DIR), dtype="float32"))
    Store(folder / "store").publish(with_answer(draft("demo"), reference))
    (folder / "policies.toml").write_text(AGAIN)
    policies = ("--policies", str(folder / "policies.toml"))
    variables = {"HALLUTRACER_BUNDLE": "mine", "HALLUTRACER_STORE": str(folder / "store")}
    variables |= MAY_CHOOSE | {"HALLUTRACER_THREADS": "1"}
    with (
        ServeProcess(*policies, **variables) as embedded,
        ServeProcess(*EAGER, *policies, **vllm_programs.EAGER, **variables) as vllm,
    ):
        yield {"embedded": embedded, "vllm": vllm}


def test_an_answer_is_read_again_as_the_embedded_engine_reads_it(
    reading: dict[str, ServeProcess],
) -> None:
    names = "Italy", "Peru", "Japan", "Chad", "Mali", "France", "Egypt", "Brazil"
    body = {"prompt": [f"What is the capital of {name}?" for name in names], "threshold": 1}
    bodies = [
        body | {"policy": policy, "generate": {"max_tokens": 16}}
        for policy in ("observe", "again", "cut")
    ]

    def answers(engine: str) -> list[Any]:
        return [post(reading[engine].url, **body).json()["data"] for body in bodies]

    embedded, read = answers("embedded"), answers("vllm")
    given, held, cut = read
    assert [row["completion"] for row in given] == [row["completion"] for row in embedded[0]]
    for ours, theirs in zip(read[:2], embedded[:2], strict=True):
        risks = [row["answer_risk"] for row in theirs]
        assert [row["answer_risk"] for row in ours] == pytest.approx(risks, abs=1e-4)
        assert [row["decision"] for row in ours] == [row["decision"] for row in theirs]
    assert {row["decision"] for row in held} == {"abstain", "continue"}, "else this tells nothing"
    assert not any("completion" in row for row in held if row["answer_flagged"])
    ended = [
        row["completion"] for row in cut if row["completion"]["finish_reason"] == "content_filter"
    ]
    assert len(ended) == sum(row["answer_risk"] >= 0.5 for row in cut) > 0, (
        "and all of them were read"
    )
    for row, whole in zip(cut, given, strict=True):
        text, tokens = row["completion"]["text"], row["completion"]["completion_tokens"]
        assert whole["completion"]["text"].startswith(text)
        if row["completion"] in ended:
            # Where vLLM merges outputs that wait, fewer tokens were shown than were read.
            assert tokens <= row["answer_tokens"], "nothing behind what was read"
            assert row["answer_tokens"] >= LEAST_READ


def test_an_engine_ends_with_the_service_that_was_killed(reading: dict[str, ServeProcess]) -> None:
    """The service's last test."""
    core = engine_of(reading["vllm"])
    reading["vllm"].process.kill()
    stat = Path(f"/proc/{core}/stat")
    until(lambda: not stat.exists() or "Z" in stat.read_text().split()[2], 15)  # it is no orphan
