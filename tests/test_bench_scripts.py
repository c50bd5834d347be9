"""The scripts that run for minutes, run for seconds, so that they do not rot; and their judges,
which can fail."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import capacity, chaos, fleet, languages, service_fairness
from benchmarks.fleet import TOLERANCE, Range, Witness, questions, replay, two_versions
from benchmarks.harness import Outcome, Summary
from benchmarks.rollout_soak import Events, grown, judge
from tests.engines.vllm.installed import vllm_or_skip
from tests.kit.local_server import answer, listening
from tests.kit.prometheus import binary
from tests.serve_process import ROOT, inherited

CONTENTS = questions(4)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    store, digests = two_versions(tmp_path_factory.mktemp("store"))
    return store.root, digests


@pytest.fixture(scope="module")
def truth(published: tuple[Path, dict[str, str]]) -> dict[tuple[int, str], float]:
    import hallutracer as ht

    store, digests = published
    found = {}
    for digest, reference in digests.items():
        with ht.load("demo", bundle=reference, store=store) as detector:
            for number, content in enumerate(CONTENTS):
                found[number, digest] = detector.score(
                    content.get("prompt") or content["messages"]
                )[0].risk
    return found


@pytest.fixture
def witness(truth: dict[tuple[int, str], float]) -> Witness:
    made = Witness(("127.0.0.1", 1), CONTENTS, sent=8, answered=8)
    for key, risk in truth.items():
        made.seen.setdefault(key, Range()).add(risk)
    return made


def test_the_truth_passes_and_each_lie_is_found(
    witness: Witness, published: tuple[Path, dict[str, str]]
) -> None:
    store, digests = published
    assert replay(witness, digests, store).passed
    key = next(iter(witness.seen))
    for off in (-2 * TOLERANCE, 2 * TOLERANCE):
        lied = deepcopy(witness)
        lied.seen[key].add(lied.seen[key].high + off)
        result = replay(lied, digests, store)
        assert (result.passed, result.figure) == (False, "1 of 8")
    first, second = digests
    swapped = deepcopy(witness)  # a risk under another bundle's digest
    swapped.seen[0, first] = swapped.seen[0, second]
    swapped.seen[0, second] = swapped.seen[0, first]
    assert not replay(swapped, digests, store).passed
    witness.seen[0, "sha256:other"] = Range(0.5, 0.5, 1)  # which nobody published
    assert not replay(witness, digests, store).passed


def test_whatever_is_no_whole_answer_counts_as_failed() -> None:
    turn = iter(range(100))
    whole = json.dumps(
        {"id": "risk-1", "bundle": {"digest": "sha256:a"}, "data": [{"risk": 0.5}]}
    ).encode()

    def behave(request: BaseHTTPRequestHandler, _: bytes) -> None:
        number = next(turn)
        if number == 1:
            request.close_connection = True  # no answer
            return
        answer(request, 502 if number == 2 else 200, b"not JSON" if number == 3 else whole)

    async def ask(asked: Witness) -> None:
        for _ in range(6):
            await asked._ask(0.0)

    with listening(behave, "HTTP/1.1") as address:
        host, port = address.split(":")
        asked = Witness((host, int(port)), CONTENTS, seed=1)
        asyncio.run(ask(asked))
    streams = asked.streams_failed
    assert sum(asked.failures.values()) - streams == 3
    assert asked.answered == 3 - streams
    assert not asked.failed().passed
    assert asked.failed(allowed=6).passed


def test_so_many_requests_are_under_way_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """More would wait in the service than it may let wait, and it would be right to refuse them."""
    monkeypatch.setattr(fleet, "AT_ONCE", 5)
    asked, under_way = Witness(("127.0.0.1", 1), CONTENTS, seed=1), [0]

    async def ask(due: float) -> None:
        asked.sent += 1
        under_way.append(under_way[-1] + 1)
        await asyncio.sleep(0.01)
        under_way.append(under_way[-1] - 1)
        if asked.sent > 30:
            asked.stopped.set()

    monkeypatch.setattr(asked, "_ask", ask)
    asyncio.run(asked.open_loop(1e6))
    assert max(under_way) == 5
    assert asked.held_back > 0  # once for each five: they end together
    assert asked.held().endswith("waited to be sent, because 5 were under way")


def test_growth_is_judged_by_life() -> None:
    seconds = np.arange(300.0)
    flat = list(zip(seconds, 500 + 0.5 * np.sin(seconds), strict=True))
    growing = list(zip(seconds, 500 + 0.1 * seconds, strict=True))  # 6 % in 300 s
    warming = list(zip(seconds, 500 - 100 * np.exp(-seconds / 5), strict=True))
    lives = {(0, 1): flat, (0, 2): growing, (1, 1): warming}
    assert [check.passed for check in grown(lives, 240)] == [True, False, True]
    assert [check.passed for check in grown({(0, 1): growing[:100]}, 240)] == [None]


def test_the_soaks_judge_sees_each_fault(
    witness: Witness, published: tuple[Path, dict[str, str]]
) -> None:
    store, digests = published

    def failing(events: Events) -> list[str]:
        return [
            check.name for check in judge(witness, digests, store, events, 10) if not check.passed
        ]

    sound = Events(swaps=10, exits=[0, 0])
    assert failing(sound) == []
    assert failing(replace(sound, swaps=9)) == ["swaps"]
    assert failing(replace(sound, exits=[0, 1])) == ["exit statuses of the restarted"]
    assert failing(replace(sound, refused=["a: 409"])) == ["reloads refused"]
    witness.failures["status 502"] = 1
    assert failing(sound) == ["failed requests"]


def test_the_plans_on_the_page_are_the_arithmetics() -> None:
    page = (ROOT / "docs" / "replicas.md").read_text()
    assert "\n".join(capacity.rows(capacity.Load(500, 100, 0.7))) in page
    for gpu in capacity.GPUS:
        assert f"{gpu.tflops:g}" in page
        assert f"{gpu.gb_per_s:,.0f}" in page


def test_a_plan_by_hand() -> None:
    gpu, model = capacity.Gpu("g", 100, 1000, 100), capacity.Model("m", 10e9, 100_000)
    prefill, decode = capacity.seconds(gpu, model, capacity.Load(1000, 10, 1.0))
    assert prefill == pytest.approx(2 * 10e9 * 1000 / 40e12 * 1.03)
    assert decode == pytest.approx(10 * (20e9 + 64 * 100_000 * 1010) / 600e9 / 64 * 1.03)
    assert (
        capacity.replicas(10, prefill) == 9 + 1
    )  # 5.15 s of work a second, at most 0.6 of a replica's time
    assert capacity.replicas(4000, 1e-9) == 10 + 1  # the front ends decide


def record_of(
    folder: Path, command: str, environment: dict[str, str] | None = None, timeout_s: float = 600
) -> Any:
    """What a script that ends well has written down."""
    name, *options = command.split()
    record = folder / "record.json"
    run = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(record), *options]
    done = subprocess.run(
        run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(record.read_text())


@pytest.mark.long
def test_a_rollout_under_load_passes(tmp_path: Path) -> None:
    binary("nginx")
    checks = record_of(tmp_path, "rollout_soak --quick")["checks"]
    assert sum(check["passed"] is True for check in checks) >= 3


@pytest.mark.long
def test_each_scenario_of_chaos_passes(tmp_path: Path) -> None:
    """In one process, which imports once what they share.  A scenario that is asked for by name may
    not be left out."""
    binary("nginx")
    only = " ".join(f"--only {name}" for name in chaos.SCENARIOS)
    checks = record_of(tmp_path, f"chaos --quick {only}")["checks"]
    for name in ("killed", "stopped", "store", "store-url"):
        passed = [check["passed"] for check in checks if check["name"].startswith(f"{name}: ")]
        assert passed.count(True) >= 3, name


def test_a_question_in_another_language_accepts_the_country_in_it_and_in_english() -> None:
    germany = {"deu": "Deutschland", "fra": "Allemagne"}
    codes = {code for code, _ in languages.LANGUAGES.values()} - {"eng"}
    countries = [
        {
            "name": {"common": "Germany"},
            "translations": {code: {"common": germany.get(code, code)} for code in codes},
        }
    ]
    row = {"id": "facts/capital_of:Berlin:x", "group": "g", "kind": "facts/capital_of"}
    others = [{**row, "kind": "facts/capital"}, {**row, "answers": ["Utopia"]}]
    names = languages.names_by_language(countries)
    answered = {"answers": ["Germany"]}
    rows = [row | answered, *(answered | other for other in others)]
    asked = {line["form"]: line for line in languages.in_languages(rows, names)}
    assert asked.keys() == languages.LANGUAGES.keys()
    assert asked["french"]["prompt"] == "Quel pays a pour capitale Berlin ?"
    assert asked["french"]["answers"] == ["Germany", "Allemagne"]
    assert asked["english"]["answers"] == ["Germany"]
    assert len({line["id"] for line in asked.values()}) == len(asked)


@pytest.mark.long
def test_the_fairness_script_runs(tmp_path: Path) -> None:
    runs = record_of(tmp_path, "service_fairness --quick", inherited())["runs"]
    assert len(runs) == 7
    outcomes = [outcome for run in runs.values() for outcome in [*run["short"], *run["beside"]]]
    assert {outcome["status"] for outcome in outcomes} == {200}
    assert all(run["beside"] for name, run in runs.items() if name != "quiet")


def _fair_run(short: int, ready: int, work: int) -> service_fairness.Run:
    """A hundred short scores and ten looks, of which so many fail, and work with this status."""
    run = service_fairness.Run(
        [Outcome(n, n, n + 0.1, 200 if n >= short else 503) for n in range(100)]
    )
    run.beside = [Outcome(0, 0, 1, 503), Outcome(1, 1, 2, work)]
    for n in range(10):
        run.looks["ready"].add(200 if n >= ready else 503, 0.01)
    return run


@pytest.mark.parametrize(
    ("short", "ready", "work", "quiet_ms", "limit_ms", "judged", "passed"),
    [
        (0, 0, 200, 50, None, True, [None, True, True, True, True]),
        (0, 0, 200, 50, None, False, [None, None, True, True, True]),
        (1, 0, 200, 50, None, True, [None, True, False, True, True]),
        (0, 1, 200, 50, None, True, [None, True, True, False, True]),
        (0, 0, 200, 20, None, True, [None, False, True, True, True]),
        (0, 0, 504, 50, None, True, [None, True, True, True, False]),
        (100, 0, 200, 50, None, True, [None, False, False, True, True]),
        (0, 0, 200, 20, 150, True, [True, None, True, True, True]),
        (0, 0, 200, 20, 90, True, [False, None, True, True, True]),
        (0, 0, 200, 20, 90, False, [None, None, True, True, True]),
        (100, 0, 200, 50, 150, True, [False, None, False, True, True]),
    ],
)
def test_the_fairness_script_sees_each_fault(
    short: int,
    ready: int,
    work: int,
    quiet_ms: float,
    limit_ms: float | None,
    judged: bool,
    passed: list[bool | None],
) -> None:
    quiet = Summary(10, {"200": 10}, 1.0, 10.0, quiet_ms, quiet_ms, quiet_ms)
    checks = service_fairness.checks_of(
        "x", _fair_run(short, ready, work), quiet, limit_ms=limit_ms, judged=judged
    )
    assert [check.passed for check in checks] == passed


@pytest.mark.long
def test_the_gpus_script_runs_without_one(tmp_path: Path) -> None:
    """Nothing is compiled, a minute at each start: tests/parity reads compiled models."""
    vllm_or_skip()
    command = 'gpu --tiny --arguments {"enforce_eager":true}'
    written = record_of(tmp_path, command, inherited(), timeout_s=1200)["checks"]
    checks = {check["name"]: check for check in written}
    assert checks["vLLM plain"]["passed"], checks
    costs = [name for name in checks if " tokens" in name]
    assert len(costs) == 6
    assert all("ours" in checks[name]["figure"] for name in costs)
