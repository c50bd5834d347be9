"""The quick start, for real: the shipped model, both shipped bundles, the command line and a listening service."""

from __future__ import annotations

import json
import re
import signal
import subprocess
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


def hallutracer(store: Path, *arguments: str, check: bool = True, stdin: str = "") -> subprocess.CompletedProcess[str]:
    done = command_line.hallutracer(*arguments, stdin=stdin, HALLUTRACER_STORE=str(store), HALLUTRACER_THREADS="1")
    assert not check or done.returncode == 0, done.stderr
    return done


def test_score_prints_risk_decision_and_plot(tmp_path: Path) -> None:
    out = hallutracer(tmp_path, "score", KNOWN, "--generate", "16").stdout
    assert re.search(r"risk 0\.\d{3}  decision continue", out)
    assert "answer It is Rome." in out
    assert out.count("●") == 9  # eight layers and the legend


@pytest.mark.parametrize("bundle", ["demo", "demo-fused"])
def test_a_known_fact_is_low_and_an_obscure_one_high(tmp_path: Path, bundle: str) -> None:
    rows = "".join(json.dumps({"prompt": text, "n": n}) + "\n" for n, text in enumerate((KNOWN, UNKNOWN)))
    done = hallutracer(tmp_path, "score", "--input", "-", "--bundle", bundle, "--trajectory", stdin=rows)
    known, unknown = map(json.loads, done.stdout.splitlines())
    assert (known["n"], unknown["n"]) == (0, 1)
    assert known["risk"] < known["threshold"] <= unknown["risk"]
    assert (known["decision"], unknown["decision"]) == ("continue", "abstain")
    assert len(known["trajectory"]) == 8


def test_an_output_file_is_whole_or_absent(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": KNOWN}) + "\n")
    target = tmp_path / "risks.jsonl"
    hallutracer(tmp_path, "score", "--input", str(rows), "--output", str(target))
    assert json.loads(target.read_text())["prompt"] == KNOWN
    missing = hallutracer(
        tmp_path, "score", "--input", str(rows), "--output", str(tmp_path / "no" / "risks.jsonl"), check=False
    )
    assert missing.returncode == 1
    assert "cannot write" in missing.stderr


def test_a_prompt_that_does_not_fit_is_said_by_line_before_any_output(tmp_path: Path) -> None:
    rows = [{"prompt": KNOWN}] * 3 + [{"prompt": "why " * 900}]
    done = hallutracer(
        tmp_path, "score", "--input", "-", stdin="".join(json.dumps(row) + "\n" for row in rows), check=False
    )
    assert done.returncode == 1
    assert "line 4" in done.stderr
    assert done.stdout == ""


def test_demo_info_and_questions(tmp_path: Path) -> None:
    info = json.loads(hallutracer(tmp_path, "demo", "info", "--json").stdout)
    assert Path(info["model"], "config.json").is_file()
    assert [bundle["name"] for bundle in info["bundles"]] == ["demo", "demo-fused"]
    splits = {}
    for split in ("train", "test"):
        rows = [
            json.loads(line)
            for line in hallutracer(tmp_path, "demo", "questions", "--split", split).stdout.splitlines()
        ]
        assert {"id", "prompt", "answers", "group", "kind", "exposures"} <= set(rows[0])
        splits[split] = {row["group"] for row in rows}
    assert not splits["train"] & splits["test"]


@pytest.mark.parametrize("bundle", ["demo", "demo-fused"])
def test_the_shipped_bundles_verify(tmp_path: Path, bundle: str) -> None:
    out = hallutracer(tmp_path, "bundle", "verify", bundle).stdout
    assert "golden prompts gave the recorded risks" in out
    card = hallutracer(tmp_path, "bundle", "show", bundle).stdout
    assert card.startswith("---\n")


def test_half_precision_passes_the_golden_replay(tmp_path: Path) -> None:
    hallutracer(tmp_path, "bundle", "verify", "demo", "--dtype", "bfloat16")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with serve(HALLUTRACER_STORE=str(tmp_path_factory.mktemp("store")), **MAY_CHOOSE) as service:
        yield service


@pytest.fixture
def service(served: ServeProcess) -> str:
    return served.url


def post(service: str, **body: Any) -> Any:
    return httpx.post(f"{service}/score", json=body, timeout=60).json()


def events(service: str, **body: Any) -> list[Any]:
    text = httpx.post(f"{service}/score", json=body | {"stream": True}, timeout=60).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_curl_answers(service: str) -> None:
    assert httpx.get(f"{service}/health/ready").json()["bundles"] == ["demo:1", "demo-fused:1"]
    body = post(service, prompt=[KNOWN, UNKNOWN], generate={"max_tokens": 16})
    known, unknown = body["data"]
    assert known["risk"] < known["threshold"] <= unknown["risk"]
    assert known["completion"]["text"].strip() == "It is Rome."
    assert "completion" not in unknown
    assert body["model"] == "hallutracer-demo"


def test_streams_and_answers_equal_the_engines_own_greedy_ones(service: str) -> None:
    engine = TransformersEngine.load(EngineOptions(str(MODEL_DIR)))
    texts = [row["prompt"] for row in questions("dev")[::150]]
    ids = [engine.render_chat([{"role": "user", "content": text}]) for text in texts]
    expected = [completion.text for completion in engine.generate(ids, Sampling(max_tokens=24))]
    assert len(set(expected)) > 5
    gated = 0
    for text, answer in zip(texts, expected, strict=True):
        body = {"prompt": text, "generate": {"max_tokens": 24}}
        assert post(service, **body, policy="observe")["data"][0]["completion"]["text"] == answer
        first, *rest = events(service, **body)
        pieces = [event["delta"]["text"] for event in rest]
        if first["data"][0]["decision"] == "continue":
            assert "".join(pieces).encode() == answer.encode()
        else:
            assert pieces == []
            gated += 1
    assert 0 < gated < len(texts)


def test_a_list_gives_the_risks_of_single_prompts(service: str) -> None:
    prompts = [KNOWN, UNKNOWN, "What is the chemical symbol of gold?", "Which country is Aba in, I wonder?"]
    together = [row["risk"] for row in post(service, prompt=prompts)["data"]]
    alone = [post(service, prompt=prompt)["data"][0]["risk"] for prompt in prompts]
    assert together == pytest.approx(alone, abs=1e-5)


def test_a_prompt_beyond_the_context_is_refused(service: str) -> None:
    error = post(service, prompt="why " * 2000)["error"]
    assert error["code"] == "prompt_too_long"


def test_ctrl_c_ends_it_cleanly(served: ServeProcess) -> None:
    # Last in the file: it ends the module's service.
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) in (0, 130, -signal.SIGINT)
    assert "Traceback" not in served.log()
