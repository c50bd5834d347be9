"""The command line as a user meets it: help, environment variables, and bad input before any model
is loaded."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from service import __version__, progress
from service.api.reply import BundleRef, RiskOut, ScoreResponse
from service.cli.main import RESEARCH_HELP, installed, make_app, own_commands
from service.options import Sources, commands_of
from tests.command_line import hallutracer, one_line_says

ROOT = Path(__file__).parent.parent.parent
COMMANDS = {" ".join(path) for path, _ in commands_of(make_app(Sources({})))}


def test_every_command_has_a_help() -> None:
    examples = ("score", "train", "guarantee", "recalibrate", "evaluate", "diagnose", "serve")
    assert hallutracer("--version").stdout == f"hallutracer {__version__}\n"
    flags = [(path, "--help-all") for path in ("", "bundle", *sorted(COMMANDS))]
    for path, flag in [
        *flags,
        *((path, flag) for path in ("score", "bundle list") for flag in ("-h", "--help")),
    ]:
        done = hallutracer(*path.split(), flag)
        assert (done.returncode, "Usage" in done.stdout) == (0, True), path
        if path in examples:
            assert f"  hallutracer {path} " in done.stdout
            assert "[default: " in done.stdout or path == "diagnose"
            assert ("HALLUTRACER_CONFIG" in done.stdout) == (flag == "--help-all")


def test_the_list_says_of_each_command_what_its_own_help_begins_with() -> None:
    known = {name: help for name, (_, help) in own_commands().items()} | RESEARCH_HELP
    assert known == {
        name: entry[0]
        if isinstance(entry, tuple)
        else " ".join((entry.__doc__ or "").split("\n\n")[0].split())
        for name, entry in installed().items()
    }


TRAINING = ["scipy", "sklearn", "torch"]
OTHERS = [*TRAINING, "hallutracer_research", "service.cli.train"]
# Words, what they must not have imported, and the exit status: the lightest first.
IMPORTS = [
    *((words, ["numpy", *OTHERS], 0) for words in ("-h", "--help-all", "--version", "")),
    ("--help", ["numpy", "service.cli.serve", *OTHERS], 0),
    *((f"{command} --help", OTHERS, 0) for command in ("bundle", "score", "serve")),
    ("serv", TRAINING, 2),
]


def test_a_command_imports_what_it_needs() -> None:
    """One after the other in one process: what none of them loads, each alone does not."""
    code = f"""
import sys, hallutracer_start
for words, unwanted, _ in {IMPORTS}:
    sys.argv = ["hallutracer", *words.split()]
    try:
        hallutracer_start.main()
    except SystemExit as end:
        print("imported", [name for name in unwanted if name in sys.modules], end.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("imported ")]
    assert lines == [f"imported [] {status}" for _, _, status in IMPORTS]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_is_printed_is_utf_8_whatever_the_locale_writes(encoding: str) -> None:
    command = [sys.executable, "-m", "service.cli", "demo", "questions", "--split", "test"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert not done.stdout.isascii()
    assert all(json.loads(line)["prompt"] for line in done.stdout.decode("utf-8").splitlines())


def test_a_configuration_file_may_hold_tables_of_commands_that_are_not_run(tmp_path: Path) -> None:
    config = tmp_path / "h.toml"
    config.write_text("[serve]\nport = 9000\n[train]\nname = 'x'\n[evaluate]\nn = 1\n")
    one_line_says(("demo", "info", "--config", str(config)), 2, "unknown key evaluate.n")
    config.write_text("[serve]\nport = 9000\n[train]\nname = 'x'\n")
    assert hallutracer("demo", "info", "--config", str(config)).returncode == 0
    done = hallutracer("serve", "--print-config", HALLUTRACER_PROT="1", HALLUTRACER_NAME="x")
    assert done.returncode == 0


def test_the_help_of_serve_shows_the_dozen_that_people_use_and_help_all_the_rest() -> None:
    shown = {}
    for flag in ("--help", "--help-all"):
        text = hallutracer("serve", flag).stdout
        shown[flag] = set(re.findall(r"^│ (--[a-z-]+)", text, re.MULTILINE))
        assert ("HALLUTRACER_POLICY" in text) == (flag == "--help-all")
    assert {
        "--model",
        "--bundle",
        "--policy",
        "--threshold",
        "--host",
        "--port",
        "--keys",
    } <= shown["--help"]
    assert len(shown["--help"]) <= 14
    assert shown["--help-all"] > shown["--help"] | {"--max-queue", "--canary", "--feedback-db"}


TRAIN = "train --name x --model owner/nowhere --data /no/rows.jsonl"


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("serv", "serve"),
        ("serve --prot 1", "--port"),
        ("serve --port x", "--port"),
        ("serve --threshold 2", "0 to 1"),
        ("serve extra", "extra"),
        ("serve --tensor-parallel-size 2", "--engine vllm"),
        ("serve --protect-metrics", "--api-key"),
        ("serve --host 0.0.0.0", "--allow-anonymous"),
        ("serve --audit-required", "--audit-log"),
        ("keys list", "--keys"),
        ("audit verify", "FILES"),
        ("feedback", "--feedback-db"),
        ("serve --api-key short", "16 characters"),
        ("serve --api-key REPLACE-ME-app-one", "placeholder"),
        ("serve --allowed-host guard.example:8765", "--allowed-host"),
        ("serve --callers-may anything", "threshold"),
        ("serve --otlp-traces-endpoint http://localhost:4318", "/v1/traces"),
        ("serve --feedback-prompts", "--feedback-db"),
        ("serve --feedback-days 3", "--feedback-db"),
        ("serve --feedback-share=0.5", "--feedback-db"),
        ("serve --feedback-db f --feedback-share=1.5", "0 to 1"),
        ("serve --feedback-db f.db --feedback-prompts", "--feedback-days"),
        ("serve --feedback-db f.db --feedback-days 0", "> 0"),
        ("recalibrate --bundle demo --feedback f.db --data x.jsonl", "--data"),
        ("recalibrate --bundle demo --feedback f.db --traffic x.jsonl", "--traffic"),
        ("recalibrate --feedback f.db", "--bundle"),
        ("train --model demo --labels given", "--data"),
        ("train --data x.jsonl --questions 50", "--questions"),
        ("train --model demo --questions 19", "20"),
        (f"{TRAIN} --target wrong<=0.2 --wrong-costs 1", "--target"),
        (f"{TRAIN} --wrong-costs 0", "> 0"),
        (f"{TRAIN} --wrong-costs much", "--wrong-costs"),
        ("guarantee --bundle demo", "--data"),
        ("guarantee --data x.jsonl", "--bundle"),
        ("guarantee --data x.jsonl --bundle demo --alpha .1,2", "--alpha"),
        ("recalibrate --bundle demo", "--data"),
        ("recalibrate --data x.jsonl", "--bundle"),
        ("score", "--input"),
        ("score a --model somewhere", "hallutracer train"),
        ("score a --engine-arg x", "NAME=VALUE"),
        ("score a --plot no/such/folder.png", "no/such is not a folder"),
        ("score a b c d e f g --plot x.png", "1 to 6"),
        ("score --input - --plot x.png", "1 to 6"),
        ("evaluate --data nowhere.jsonl", "nowhere.jsonl"),
        ("evaluate --model m", "--data"),
        ("diagnose no.npz", "no.npz"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_status_2(command: str, word: str) -> None:
    one_line_says(tuple(command.split()), 2, word)


def test_a_placeholder_or_a_rule_for_no_key_keeps_the_service_from_starting_wherever_it_stands(
    tmp_path: Path,
) -> None:
    config, policies, keys = (tmp_path / name for name in ("h.toml", "policies.toml", "keys"))
    config.write_text('[serve]\napi_key = ["REPLACE-ME-app-one"]\n')
    one_line_says(("serve", "--config", str(config)), 2, "placeholder")
    assert "placeholder" in hallutracer("serve", HALLUTRACER_API_KEY="REPLACE-ME-app-one").stderr
    policies.write_text('[[rule]]\nkey = "rga"\npolicy = "observe"')
    one_line_says(("serve", "--policies", str(policies)), 1, "there are no keys")
    keys.write_text("0123456789abcdef name=rag\n")
    one_line_says(("serve", "--policies", str(policies), "--api-key-file", str(keys)), 1, "'rga'")


def test_an_interrupt_is_exit_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.cli.bundle.open_store", Mock(side_effect=KeyboardInterrupt))
    one_line_says(("bundle", "show", "demo"), 130, "interrupted")


def test_a_word_that_no_option_takes_gets_its_cure() -> None:
    one_line_says(("serve", "demo"), 2, "follows its name, such as --model demo")
    one_line_says(
        ("train", "--name", "x", "--data", "a.jsonl", "b.jsonl"),
        2,
        "a value with spaces is put in quotes",
    )
    for command in (("score", "-"), ("train", "-"), ("score", "--model", "demo", "-")):
        one_line_says(command, 2, "such as --input -")
    one_line_says(
        ("train", "--data", "a.jsonl", "--data", "b.jsonl"),
        2,
        "name one file of rows, such as rows.jsonl",
    )


def test_what_is_no_question_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    one_line_says(("score", ""), 2, "the question is empty")
    one_line_says(("score", "a", " "), 2, "the question is empty")
    for name in ("rows.csv", "rows.parquet", "rows.jsonl.gz"):
        (tmp_path / name).touch()
        one_line_says(
            ("score", str(tmp_path / name)),
            2,
            f"is a file; to score its rows: --input {tmp_path / name}",
        )


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['{"prompt": "a"}', "[]"], "line 2: a JSON object is expected, found a list"),
        (["", '{"prompt": " "}'], "line 2: 'prompt' is empty"),
        ([], "no rows"),
        (['{"messages": [{"role": "user"}]}'], "line 1: 'messages[0]' must be an object"),
        (["[" * 100_000], "line 1: invalid JSON"),
        (
            ['{"question": "a"}'],
            "line 1: 'prompt' (or 'messages') is missing: rename 'question' to 'prompt'",
        ),
        (
            ["question,source", "a,b"],
            "line 2: 'prompt' (or 'messages') is missing: rename 'question' to 'prompt'",
        ),
        (['{"prompt": "a", "note": "\\ud800"}'], "line 1: half of a surrogate pair"),
        (
            ["{}"] * 600 + ['{"prompt": 1}'],
            "line 1 and 599 more lines: ",
        ),  # a repeated problem is reported once
    ],
)
def test_score_reports_lines(tmp_path: Path, lines: list[str], expected: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    done = hallutracer("score", "--input", str(path))
    assert (done.returncode, expected in done.stderr, len(done.stderr.splitlines()) <= 3) == (
        1,
        True,
        True,
    )


def test_an_address_that_cannot_be_listened_on_is_said_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        one_line_says(("serve", "--port", str(taken.getsockname()[1])), 1, "--port")
    one_line_says(
        ("serve", "--host", "256.0.0.1", "--allow-anonymous"), 1, "cannot listen on 256.0.0.1"
    )
    for host in ("http://localhost", "[::1]", "127.0.0.1:80", "", " ::1", "localhost:80"):
        one_line_says(("serve", "--host", host), 2, f"--host: {host!r} is no name or address alone")
    for name in ("../x", "X", ""):  # names that would leave the store
        one_line_says(("bundle", "show", name), 1, "")


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (("--target", "wrong=0.2"), 2, 'such as "wrong<=0.2" with the quotes'),
        (("--forms", "mixture"), 2, "given labels belong to the prompts as they are"),
        (("--forms", "lone,chat", "--labels", "generate"), 2, "no form is called 'chat'"),
        (("--forms", "turns,lone", "--labels", "generate"), 1, "line 1"),
    ],
)
def test_train_reports_rows_forms_and_rules_before_a_model_is_loaded(
    tmp_path: Path, more: tuple[str, ...], status: int, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "", "label": 1}) + "\n")
    options = (
        "--data",
        str(path),
        "--name",
        "x",
        "--model",
        "owner/nowhere",
        "--run-dir",
        str(tmp_path / "r"),
    )
    done = hallutracer("train", *options, *more)
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr


def test_progress_is_reported_by_the_clock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.progress("a short step"):
        pass
    for name in ("FIRST_S", "EVERY_S"):
        monkeypatch.setattr(progress, name, 0.01)
    with progress.progress("loading x"):
        time.sleep(0.1)
    first, _, *_, last = capsys.readouterr().err.splitlines()
    assert (first.startswith("loading x ("), last.startswith("loading x: done in ")) == (True, True)


def score(*arguments: str) -> ScoreResponse:
    done = hallutracer("score", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return ScoreResponse.model_validate_json(done.stdout)


def test_score_writes_what_the_api_answers(tmp_path: Path) -> None:
    questions = ["What is the capital of Italy?", "What is the capital of the Solomon Islands?"]
    documents = [score(question, "--generate", "8", "--trajectory") for question in questions]
    answered, abstained = (document.data[0] for document in documents)
    assert answered.completion is not None
    assert documents[0].usage.completion_tokens == answered.completion.completion_tokens > 0
    assert (abstained.flagged, abstained.decision, abstained.completion) == (True, "abstain", None)
    assert abstained.message
    assert len(answered.trajectory or ()) == 8

    rows, output_file = tmp_path / "rows.jsonl", tmp_path / "risks.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": text, "mine": n}) + "\n" for n, text in enumerate(questions))
    )
    done = hallutracer(
        "score", "--input", str(rows), "--output", str(output_file), "--generate", "8"
    )
    assert done.returncode == 0, done.stderr
    for index, (line, document) in enumerate(
        zip(output_file.read_text().splitlines(), documents, strict=True)
    ):
        row = json.loads(line)
        assert (row.pop("prompt"), row.pop("mine")) == (questions[index], index)
        assert BundleRef.model_validate(row.pop("bundle")) == document.bundle
        risk, alone = RiskOut.model_validate(row), document.data[0]
        assert risk.risk == pytest.approx(alone.risk, abs=1e-6)
        assert (risk.index, risk.decision, risk.message, risk.completion) == (
            index,
            alone.decision,
            alone.message,
            alone.completion,
        )


def test_several_questions_are_scored_together_and_drawn(tmp_path: Path) -> None:
    questions = ["What is the capital of Italy?", "What costs $5 in $us?"]
    picture = tmp_path / "pair.png"
    document = score(*questions, "--plot", str(picture))
    assert [risk.index for risk in document.data] == [0, 1]
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    one = score(questions[0], "--plot", str(picture))
    assert one.data[0].risk == pytest.approx(document.data[0].risk, abs=1e-5)
    assert picture.read_bytes() != drawn
    out = hallutracer("score", *questions).stdout
    assert [out.count(f"{question}\n") for question in questions] == [1, 1]
    assert out.count("decision") == 2


def test_a_store_that_is_not_there_is_said(tmp_path: Path) -> None:
    told = hallutracer("bundle", "list", "--store", str(tmp_path / "nowhere"))
    assert (told.returncode, f"there is no folder {tmp_path / 'nowhere'}" in told.stderr) == (
        0,
        True,
    )
    assert "demo:1" in told.stdout
    assert hallutracer("bundle", "list", HALLUTRACER_STORE=str(tmp_path)).stderr == ""
    done = hallutracer("bundle", "show", "nothing", HALLUTRACER_STORE=str(tmp_path / "empty"))
    assert (done.returncode, str(tmp_path / "empty") in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "command",
    [
        "serve --port 0",
        "score hi",
        "try",
        "guarantee --bundle demo --data x.jsonl",
        TRAIN,
        "serve --model smollm2",
        "score hi --bundle demo",
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name in (
        "service.library.training.load_engine",  # imported before what it imports is replaced
        "service.cli.loading._import_engine",
        "service.library.engine.load_engine",
        "service.cli.running.listen",
    ):
        monkeypatch.setattr(name, Mock(side_effect=AssertionError("it began to load")))
    one_line_says(
        (*command.split(), "--device", "cuda"),
        2,
        "--device: device 'cuda' is not available: torch finds 0",
    )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("serve --bundle smolm2", "Did you mean smollm2?"),
        ("score hi --bundle dmo:1", "Did you mean demo?"),
        ("bundle show demo-fusd", "Did you mean demo-fused?"),
        ("serve --policy gaet", "Did you mean gate?"),
        ("serve --policy obsreve", "Did you mean observe?"),
        ("bundle show nothing-like-it", "use one of: demo"),
    ],
)
def test_a_misspelt_bundle_or_policy_asks_what_was_meant(command: str, message: str) -> None:
    one_line_says(tuple(command.split()), 1, message)
    assert ("Did you mean" in message) == ("Did you mean" in hallutracer(*command.split()).stderr)


def test_train_without_a_model_or_a_value_shows_what_to_give() -> None:
    one_line_says(("train", "--name"), 2, "For example: hallutracer train --model ./my-model")
    done = hallutracer("train", HALLUTRACER_MODEL="")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--model: name the model that the bundle is for, such as ./my-model" in done.stderr


def test_a_dozen_rows_are_refused_below_a_stated_least(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"Who is {n}?", "label": n % 2}) + "\n" for n in range(12))
    )
    command = (
        "train",
        "--name",
        "x",
        "--data",
        str(path),
        "--store",
        str(tmp_path),
        "--run-dir",
        str(tmp_path / "r"),
    )
    done = hallutracer(*command, "--folds", "2")
    assert (
        done.returncode,
        "12 rows that ask for a fact, and a probe needs at least 40" in done.stderr,
    ) == (1, True)
    assert "--allow-few" in done.stderr
    assert (
        "at least 40"
        not in hallutracer(*command, "--folds", "2", "--allow-few", "--no-evaluate").stderr
    )
