"""The quick start, for real: the shipped model, both shipped bundles, the command line and a listening service."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hallutracer_research.demo.build import KNOWN, UNKNOWN
from service.demo import MODEL_DIR
from service.demo.questions import questions
from service.engines.base import EngineOptions, Sampling
from service.engines.transformers.engine import TransformersEngine
from tests import command_line
from tests.serve_process import MAY_CHOOSE, ServeProcess, serve


def hallutracer(store: Path, *arguments: str, fails: str = "", stdin: str = "") -> str:
    """What a command printed; ``fails``: a word of its error instead."""
    done = command_line.hallutracer(*arguments, stdin=stdin, HALLUTRACER_STORE=str(store), HALLUTRACER_THREADS="1")
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
def test_a_shipped_bundle_verifies_and_tells_a_known_fact_from_an_obscure_one(tmp_path: Path, bundle: str) -> None:
    assert "golden prompts gave the recorded risks" in hallutracer(tmp_path, "bundle", "verify", bundle)
    assert hallutracer(tmp_path, "bundle", "show", bundle).startswith("---\n")
    arguments = ("score", "--input", "-", "--bundle", bundle, "--trajectory")
    known, unknown = map(json.loads, hallutracer(tmp_path, *arguments, stdin=rows(KNOWN, UNKNOWN)).splitlines())
    assert (known["n"], unknown["n"]) == (0, 1)
    assert known["risk"] < known["threshold"] <= unknown["risk"]
    assert (known["decision"], unknown["decision"]) == ("continue", "abstain")
    assert len(known["trajectory"]) == 8


def test_half_precision_passes_the_golden_replay(tmp_path: Path) -> None:
    hallutracer(tmp_path, "bundle", "verify", "demo", "--dtype", "bfloat16")


def test_an_output_is_whole_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "risks.jsonl"
    arguments = ("score", "--input", "-", "--output")
    hallutracer(tmp_path, *arguments, str(target), stdin=rows(KNOWN))
    assert json.loads(target.read_text())["prompt"] == KNOWN
    hallutracer(tmp_path, *arguments, str(tmp_path / "no" / "risks.jsonl"), stdin=rows(KNOWN), fails="cannot write")
    too_long = rows(*[KNOWN] * 3, "why " * 900)
    assert hallutracer(tmp_path, "score", "--input", "-", stdin=too_long, fails="line 4") == ""


def test_demo_info_and_questions(tmp_path: Path) -> None:
    info = json.loads(hallutracer(tmp_path, "demo", "info", "--json"))
    assert Path(info["model"], "config.json").is_file()
    assert [bundle["name"] for bundle in info["bundles"]] == ["demo", "demo-fused"]
    groups = []
    for split in ("train", "test"):
        found = list(map(json.loads, hallutracer(tmp_path, "demo", "questions", "--split", split).splitlines()))
        assert {"id", "prompt", "answers", "group", "kind", "exposures"} <= set(found[0])
        groups.append({row["group"] for row in found})
    assert not groups[0] & groups[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with serve(HALLUTRACER_STORE=str(tmp_path_factory.mktemp("store")), **MAY_CHOOSE) as service:
        yield service


def post(served: ServeProcess, **body: Any) -> Any:
    return httpx.post(f"{served.url}/score", json=body, timeout=60).json()


def test_curl_answers(served: ServeProcess) -> None:
    assert httpx.get(f"{served.url}/health/ready").json()["bundles"] == ["demo:1", "demo-fused:1"]
    body = post(served, prompt=[KNOWN, UNKNOWN], generate={"max_tokens": 16})
    known, unknown = body["data"]
    assert known["risk"] < known["threshold"] <= unknown["risk"]
    assert known["completion"]["text"].strip() == "It is Rome."
    assert "completion" not in unknown
    assert body["model"] == "hallutracer-demo"
    assert post(served, prompt="why " * 2000)["error"]["code"] == "prompt_too_long"


def test_streams_and_answers_equal_the_engines_own_greedy_ones(served: ServeProcess) -> None:
    engine = TransformersEngine.load(EngineOptions(str(MODEL_DIR)))
    texts = [row["prompt"] for row in questions("dev")[::150]]
    ids = [engine.render_chat([{"role": "user", "content": text}]) for text in texts]
    expected = [completion.text for completion in engine.generate(ids, Sampling(max_tokens=24))]
    assert len(set(expected)) > 5
    gated = 0
    for text, answer in zip(texts, expected, strict=True):
        body = {"prompt": text, "generate": {"max_tokens": 24}}
        assert post(served, **body, policy="observe")["data"][0]["completion"]["text"] == answer
        streamed = httpx.post(f"{served.url}/score", json=body | {"stream": True}, timeout=60).text
        *lines, done = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
        assert done == "[DONE]"
        first, *rest = map(json.loads, lines)
        pieces = "".join(event["delta"]["text"] for event in rest)
        withheld = first["data"][0]["decision"] != "continue"
        assert pieces.encode() == (b"" if withheld else answer.encode())
        gated += withheld
    assert 0 < gated < len(texts)


def test_a_list_gives_the_risks_of_single_prompts(served: ServeProcess) -> None:
    prompts = [KNOWN, UNKNOWN, "What is the chemical symbol of gold?", "Which country is Aba in, I wonder?"]
    together = [row["risk"] for row in post(served, prompt=prompts)["data"]]
    alone = [post(served, prompt=prompt)["data"][0]["risk"] for prompt in prompts]
    assert together == pytest.approx(alone, abs=1e-5)


def test_ctrl_c_ends_it_cleanly(served: ServeProcess) -> None:
    # Last in the file: it ends the module's service.
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) in (0, 130, -signal.SIGINT)
    assert "Traceback" not in served.log()
