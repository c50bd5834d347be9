"""``serve``: keys, traces and open files that are refused at the start, and what a ready service
says of itself."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from probes_store.store import SHIPPED, Store
from service.access.callers import is_placeholder
from service.api.connections import places
from service.cli.held_out import SHOWN
from service.cli.running import FALLBACK, example, first_line, greet
from service.cli.serve_options import load_keys
from service.engines.bridge import wait_for
from service.errors import HalluTracerError, NonFiniteReadout
from service.judging.evaluation import sample_of
from tests.command_line import hallutracer, one_line_says
from tests.running import App, until
from tests.serve_process import ROOT, ServeProcess, serve

# keys


ONE, TWO = "1" * 16, "2" * 40


def keys_file(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_line_is_a_key_its_name_and_its_rights(tmp_path: Path) -> None:
    text = f"# for the apps\n{ONE}\n\n {TWO}  name=search may=policy,threshold \n"
    result = load_keys(("3" * 16,), keys_file(tmp_path, text))
    assert [(key.secret, key.name, key.may) for key in result] == [
        ("3" * 16, "key-1", frozenset()),
        (ONE, "key-2", frozenset()),
        (TWO, "search", {"policy", "threshold"}),
    ]
    assert ONE not in repr(result)


[PUBLISHED] = re.findall(
    r"```text\n((?:\S+  name=.+\n)+)```", (ROOT / "docs/serving.md").read_text()
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", "holds no key"),
        ("short\n", "line 1 of"),
        (f"{ONE}\nREPLACE-ME-app-one name=app\n", "line 2 of"),
        ("REPLACE-ME-app-one\n", "secrets.token_urlsafe"),
        ("ключ" * 5 + "\n", "ASCII"),
        *(
            (line, "placeholder") for line in PUBLISHED.splitlines()
        ),  # a key that we publish is no key
        *(
            (f"{text}\n", "placeholder")
            for text in (
                "REPLACE-ME",
                "replace_me_with_a_long_key",
                "sk-ChangeMe-0123456789",
                "your-api-key-goes-here",
            )
        ),
        (f"{ONE}\nshort name=a\n", "line 2 of"),
        (f"{ONE} nam=a\n", "'nam=a'"),
        (f"{ONE} name=a name=b\n", "'name=b'"),
        (f"{ONE} {TWO}\n", "a word without '='"),
        (f"{ONE} may=everything\n", "'everything'"),
        (f"{ONE} name=\n", "1 to 64"),
        (f"{ONE}\n{ONE}\n", "given twice"),
        (f"{ONE} name=a\n{TWO} name=a\n", "two keys are named 'a'"),
        (f"{ONE} name=key-2\n{TWO}\n", "two keys are named 'key-2'"),
    ],
)
def test_what_is_wrong_with_a_key_is_said_and_opens_nothing(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(HalluTracerError) as refused:
        load_keys((), keys_file(tmp_path, text))
    assert message in str(refused.value)
    assert [secret for secret in (ONE, TWO, "app-one") if secret in str(refused.value)] == []


def test_the_files_mode_is_looked_at_and_no_drawn_key_is_a_placeholder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not any(is_placeholder(secrets.token_urlsafe(32)) for _ in range(1000))
    with pytest.raises(HalluTracerError, match="can write"):
        load_keys((), keys_file(tmp_path, ONE, 0o602))
    with caplog.at_level(logging.WARNING):
        assert load_keys((), keys_file(tmp_path, ONE, 0o640))
        assert not caplog.records
        assert load_keys((), keys_file(tmp_path, ONE, 0o644))
    assert "can read" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--audit-log", "no/folder/audit.jsonl"], "cannot write the audit log"),
        (["--keys", "none.toml"], "cannot read the keys file"),
        (["--feedback-db", "mysql://u:geheim@h/d"], "postgresql://USER@HOST"),
        (
            ["--feedback-db", "nowhere/feedback.db"],
            "cannot open the feedback file nowhere/feedback.db",
        ),
        (
            ["--feedback-db", "postgresql://u:geheim@127.0.0.1:1/d"],
            "cannot connect to postgresql://127.0.0.1:1/d",
        ),
    ],
)
def test_a_service_does_not_start_without_what_it_was_told_to_keep(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "service.cli.serve.load_engine", lambda *_, **__: pytest.fail("a model was loaded")
    )
    done = hallutracer("serve", "--port", "0", *arguments)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "geheim" not in done.stderr


# open files


@pytest.mark.parametrize(
    ("limits", "connections", "raised"),
    [
        ((64, 10_000), 300, 428),
        ((64, resource.RLIM_INFINITY), 300, 428),
        ((144, 144), 16, 144),
        ((64, 200), 72, 200),
        ((4000, 4000), 300, None),
    ],
)
def test_the_soft_limit_of_open_files_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], connections: int, raised: int | None
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: told.append(wanted))
    assert places(300) == connections
    assert told == ([] if raised is None else [(raised, limits[1])])


def test_a_service_with_next_to_no_connections_does_not_start_and_doctor_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (143, 143))
    options = ("--port", "0", "--max-connections", "1000", "--store", str(tmp_path))
    words = "may open 143 files", "at least 144", "ulimit -n 1128"
    one_line_says(("serve", *options), 1, *words)
    printed = hallutracer("doctor", *options, "--json")
    assert printed.returncode == 1
    [files] = [check for check in json.loads(printed.stdout)["checks"] if check["check"] == "files"]
    assert files["status"] == "fail"
    for word in ("143 open files", "at least 144", "ulimit -n 1128"):
        assert word in str(files)


# what it says once it is ready


@pytest.fixture(scope="module")
def observing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Started as a stranger starts it: no policy is named."""
    with serve(
        HALLUTRACER_STORE=str(tmp_path_factory.mktemp("store")), HALLUTRACER_POLICY=""
    ) as process:
        yield process


def printed(process: ServeProcess) -> str:
    """The command line that was printed."""
    [line] = [
        line.strip() for line in process.said.splitlines() if line.strip().startswith("curl ")
    ]
    return line


def test_it_observes_and_says_first_how_to_gate(observing: ServeProcess) -> None:
    first = observing.said.splitlines()[0]
    assert "observe" in first
    assert "--policy gate" in first
    risky = httpx.post(
        f"{observing.url}/score", json={"prompt": "Hm?", "threshold": 0.0}, timeout=60
    ).json()
    assert risky["policy"] == "observe"
    assert (risky["data"][0]["flagged"], risky["data"][0]["decision"]) == (True, "continue")


def test_the_log_says_what_judges(observing: ServeProcess) -> None:
    until(lambda: "hallutracer ready: " in observing.log())  # a thread writes it
    (line,) = [
        json.loads(line) for line in observing.log().splitlines() if "hallutracer ready: " in line
    ]
    assert line["level"] == "info"
    for part in (
        "bundle demo:1 (sha256:",
        "judges by policy observe (observe) from threshold ",
        "attention_head",
    ):
        assert part in line["message"]


def test_the_printed_request_runs_and_is_about_two_held_out_questions(
    observing: ServeProcess,
) -> None:
    answer = json.loads(subprocess.check_output(printed(observing), shell=True))
    low, high = answer["data"]
    assert answer["policy"] == "gate"
    assert low["risk"] < low["threshold"] <= high["risk"]
    assert low["completion"]["text"]
    assert "completion" not in high
    with httpx.Client(base_url=f"{observing.url}/v1/bundles/demo/sample", timeout=60) as client:
        sample = [client.get(f"/{number}").json()["prompt"] for number in range(SHOWN)]
    assert set(json.loads(printed(observing).split(" -d ")[1].strip("'"))["prompt"]) <= set(sample)


@pytest.mark.parametrize("keys", [(), ("s" * 32,)])
def test_a_gate_says_what_its_own_machine_may_open_and_how_to_send_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: tuple[str, ...]
) -> None:
    with App(tmp_path, names=["tiny"], api_keys=keys, callers_may=()).started() as app:
        assert ("--callers-may none" in (first_line(app.state) or "")) is not bool(keys)
        asyncio.run(greet(app.state, "http://guard.test"))
    said = capsys.readouterr().out
    assert ("curl" in said, '"policy"' in said) == (True, False)
    assert (' -H "Authorization: Bearer $KEY"' in said) is bool(keys)


def test_a_bundle_without_a_sample_gives_a_question_that_any_model_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = Store(Path("/nonexistent"), fallbacks=[SHIPPED]).load("demo")
    assert sample_of(bundle) is not None

    async def broken(*_: Any) -> Any:
        raise NonFiniteReadout("broken")

    scorer: Any = SimpleNamespace(bundle=bundle, last_report=broken, render=lambda prompt: [1])
    assert tuple(wait_for(example(scorer))) == FALLBACK
    monkeypatch.setattr(type(bundle), "evaluation", lambda self: {})
    assert tuple(wait_for(example(scorer))) == FALLBACK
