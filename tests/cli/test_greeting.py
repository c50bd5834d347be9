"""What ``serve`` says of itself: that it observes, how to gate, and a request made of its own held-out questions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from probes_store.store import SHIPPED, Store
from service.cli.greeting import FALLBACK, example
from service.cli.held_out import SHOWN
from service.engines.bridge import wait_for
from service.judging.sample import sample_of
from tests.serve_process import ServeProcess, serve


@pytest.fixture(scope="module")
def observing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Started as a stranger starts it: no policy is named."""
    with serve(HALLUTRACER_STORE=str(tmp_path_factory.mktemp("store")), HALLUTRACER_POLICY="") as process:
        yield process


def printed(process: ServeProcess) -> str:
    """The command line that was printed."""
    [line] = [line.strip() for line in process.said.splitlines() if line.strip().startswith("curl ")]
    return line


def test_it_observes_and_says_first_how_to_gate(observing: ServeProcess) -> None:
    first = observing.said.splitlines()[0]
    assert "observe" in first
    assert "--policy gate" in first
    risky = httpx.post(f"{observing.url}/score", json={"prompt": "Hm?", "threshold": 0.0}, timeout=60).json()
    assert risky["policy"] == "observe"
    assert (risky["data"][0]["flagged"], risky["data"][0]["decision"]) == (True, "continue")


def test_the_printed_request_runs_and_is_about_two_held_out_questions(observing: ServeProcess) -> None:
    done = subprocess.run(printed(observing), shell=True, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    low, high = answer["data"]
    assert answer["policy"] == "gate"
    assert low["risk"] < low["threshold"] <= high["risk"]
    assert low["completion"]["text"]
    assert "completion" not in high
    for question in json.loads(printed(observing).split(" -d ")[1].strip("'"))["prompt"]:
        found = [
            httpx.get(f"{observing.url}/v1/bundles/demo/sample/{number}", timeout=60).json()["prompt"]
            for number in range(SHOWN)
        ]
        assert question in found


def test_a_gate_that_its_own_machine_may_open_says_so(tmp_path: Path) -> None:
    with serve(HALLUTRACER_STORE=str(tmp_path)) as process:
        assert "--callers-may none" in process.said.splitlines()[0]
        body = {"prompt": "Hm?", "threshold": 1.0}
        assert httpx.post(f"{process.url}/score", json=body, timeout=60).status_code == 200
        passed_on = httpx.post(f"{process.url}/score", json=body, headers={"x-forwarded-for": "10.0.0.1"}, timeout=60)
        assert passed_on.status_code == 403


def test_a_service_that_gates_does_not_say_that_it_observes(tmp_path: Path) -> None:
    with serve(HALLUTRACER_STORE=str(tmp_path), HALLUTRACER_API_KEY="s" * 32) as process:
        assert process.said.startswith("listening on ")
        assert '"policy"' not in printed(process)
        assert ' -H "Authorization: Bearer $KEY"' in printed(process)


def test_a_bundle_without_a_sample_gives_a_question_that_any_model_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo")
    assert sample_of(bundle) is not None

    class Broken:
        async def last_report(self, *_: Any) -> Any:
            from service.errors import NonFiniteReadout

            raise NonFiniteReadout("broken")

        def render(self, prompt: str) -> list[int]:
            return [1]

    broken: Any = Broken()
    broken.bundle = bundle
    assert tuple(wait_for(example(broken))) == FALLBACK
    monkeypatch.setattr(type(bundle), "evaluation", lambda self: {})
    assert tuple(wait_for(example(SimpleNamespace(bundle=bundle)))) == FALLBACK  # type: ignore[arg-type]
