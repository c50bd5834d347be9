"""The command line as a user meets it: help, environment variables, and bad input before any model
is loaded."""

from __future__ import annotations

import io
import json
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
from tests.command_line import ended, hallutracer, one_line_says, run
from tests.fitting.planted import write_rows

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
def test_what_is_printed_is_utf_8_whatever_the_locale_writes(
    encoding: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    locale_stdout = io.TextIOWrapper(printed := io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", locale_stdout)
    assert run("demo", "questions", "--split", "test") == 0
    locale_stdout.flush()
    assert capsys.readouterr().err == ""
    assert not printed.getvalue().isascii()
    assert all(json.loads(line)["prompt"] for line in printed.getvalue().decode().splitlines())


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


# A command, its exit status, and words of the one line that it prints.
REFUSED = f"""
serv | 2 | serve
serve --prot 1 | 2 | --port
serve --port x | 2 | --port
serve --threshold 2 | 2 | 0 to 1
serve extra | 2 | extra
serve demo | 2 | follows its name, such as --model demo
serve --tensor-parallel-size 2 | 2 | --engine vllm
serve --protect-metrics | 2 | --api-key
serve --host 0.0.0.0 | 2 | --allow-anonymous
serve --host 256.0.0.1 --allow-anonymous | 1 | cannot listen on 256.0.0.1
serve --host http://localhost | 2 | --host: 'http://localhost' is no name or address alone
serve --host [::1] | 2 | --host: '[::1]' is no name or address alone
serve --host 127.0.0.1:80 | 2 | --host: '127.0.0.1:80' is no name or address alone
serve --host localhost:80 | 2 | --host: 'localhost:80' is no name or address alone
serve --audit-required | 2 | --audit-log
serve --api-key short | 2 | 16 characters
serve --api-key REPLACE-ME-app-one | 2 | placeholder
serve --allowed-host guard.example:8765 | 2 | --allowed-host
serve --callers-may anything | 2 | threshold
serve --otlp-traces-endpoint http://localhost:4318 | 2 | /v1/traces
serve --feedback-prompts | 2 | --feedback-db
serve --feedback-days 3 | 2 | --feedback-db
serve --feedback-share=0.5 | 2 | --feedback-db
serve --feedback-db f --feedback-share=1.5 | 2 | 0 to 1
serve --feedback-db f.db --feedback-prompts | 2 | --feedback-days
serve --feedback-db f.db --feedback-days 0 | 2 | > 0
serve --bundle smolm2 | 1 | Did you mean smollm2?
serve --policy gaet | 1 | Did you mean gate?
serve --policy obsreve | 1 | Did you mean observe?
keys list | 2 | --keys
audit verify | 2 | FILES
feedback | 2 | --feedback-db
recalibrate --bundle demo --feedback f.db --data x.jsonl | 2 | --data
recalibrate --bundle demo --feedback f.db --traffic x.jsonl | 2 | --traffic
recalibrate --feedback f.db | 2 | --bundle
recalibrate --bundle demo | 2 | --data
recalibrate --data x.jsonl | 2 | --bundle
train - | 2 | such as --input -
train --name | 2 | For example: hallutracer train --model ./my-model
train --name x --data a.jsonl b.jsonl | 2 | a value with spaces is put in quotes
train --data a.jsonl --data b.jsonl | 2 | name one file of rows, such as rows.jsonl
train --model demo --labels given | 2 | --data
train --data x.jsonl --questions 50 | 2 | --questions
train --model demo --questions 19 | 2 | 20
{TRAIN} --target wrong<=0.2 --wrong-costs 1 | 2 | --target
{TRAIN} --wrong-costs 0 | 2 | > 0
{TRAIN} --wrong-costs much | 2 | --wrong-costs
guarantee --bundle demo | 2 | --data
guarantee --data x.jsonl | 2 | --bundle
guarantee --data x.jsonl --bundle demo --alpha .1,2 | 2 | --alpha
score | 2 | --input
score - | 2 | such as --input -
score --model demo - | 2 | such as --input -
score a --model somewhere | 2 | hallutracer train
score a --engine-arg x | 2 | NAME=VALUE
score a --plot no/such/folder.png | 2 | no/such is not a folder
score a b c d e f g --plot x.png | 2 | 1 to 6
score --input - --plot x.png | 2 | 1 to 6
score hi --bundle dmo:1 | 1 | Did you mean demo?
bundle show demo-fusd | 1 | Did you mean demo-fused?
bundle show ../x | 1 | bundle
bundle show X | 1 | bundle
evaluate --data nowhere.jsonl | 2 | nowhere.jsonl
evaluate --model m | 2 | --data
diagnose no.npz | 2 | no.npz
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_wrong_command_line_is_one_line_and_its_exit_status(row: str) -> None:
    command, status, words = row.split(" | ")
    one_line_says(command, int(status), words)


def test_what_is_like_no_bundle_gets_no_guess() -> None:
    error = one_line_says("bundle show nothing-like-it", 1, "use one of: demo")
    assert "Did you mean" not in error


def test_a_placeholder_or_a_rule_for_no_key_keeps_the_service_from_starting_wherever_it_stands(
    tmp_path: Path,
) -> None:
    config, policies, keys = (tmp_path / name for name in ("h.toml", "policies.toml", "keys"))
    config.write_text('[serve]\napi_key = ["REPLACE-ME-app-one"]\n')
    one_line_says(f"serve --config {config}", 2, "placeholder")
    assert "placeholder" in hallutracer("serve", HALLUTRACER_API_KEY="REPLACE-ME-app-one").stderr
    policies.write_text('[[rule]]\nkey = "rga"\npolicy = "observe"')
    one_line_says(f"serve --policies {policies}", 1, "there are no keys")
    keys.write_text("0123456789abcdef name=rag\n")
    one_line_says(f"serve --policies {policies} --api-key-file {keys}", 1, "'rga'")


def test_an_interrupt_is_exit_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.cli.bundle.open_store", Mock(side_effect=KeyboardInterrupt))
    one_line_says("bundle show demo", 130, "interrupted")


def test_what_is_no_question_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    for questions in ([""], ["a", " "]):
        one_line_says(("score", *questions), 2, "the question is empty")
    for name in ("rows.csv", "rows.parquet", "rows.jsonl.gz"):
        (rows := tmp_path / name).touch()
        one_line_says(f"score {rows}", 2, f"is a file; to score its rows: --input {rows}")


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
    ended(done, 1, expected)
    assert len(done.stderr.splitlines()) <= 3


def test_an_address_that_cannot_be_listened_on_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        one_line_says(f"serve --port {taken.getsockname()[1]}", 1, "--port")
    for host in ("", " ::1"):
        one_line_says(("serve", "--host", host), 2, f"--host: {host!r} is no name or address alone")
    one_line_says(("bundle", "show", ""), 1, "")  # a name that would leave the store


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
    path = write_rows(tmp_path / "rows.jsonl", [{"id": "a", "prompt": "", "label": 1}])
    command = f"train --data {path} --name x --model owner/nowhere --run-dir {tmp_path / 'r'}"
    ended(hallutracer(*command.split(), *more), status, message)


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
    write_rows(rows, [{"prompt": text, "mine": n} for n, text in enumerate(questions)])
    command = f"score --input {rows} --output {output_file} --generate 8"
    ended(hallutracer(*command.split()), 0)
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
    alone = score(questions[0], "--plot", str(picture))
    assert alone.data[0].risk == pytest.approx(document.data[0].risk, abs=1e-5)
    assert picture.read_bytes() != drawn
    out = hallutracer("score", *questions).stdout
    assert [out.count(f"{question}\n") for question in questions] == [1, 1]
    assert out.count("decision") == 2


def test_a_store_that_is_not_there_is_told(tmp_path: Path) -> None:
    nowhere, empty = tmp_path / "nowhere", tmp_path / "empty"
    listed = hallutracer("bundle", "list", "--store", str(nowhere))
    assert f"there is no folder {nowhere}" in listed.stderr
    assert "demo:1" in ended(listed, 0)
    assert hallutracer("bundle", "list", HALLUTRACER_STORE=str(tmp_path)).stderr == ""
    ended(hallutracer("bundle", "show", "nothing", HALLUTRACER_STORE=str(empty)), 2, str(empty))


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
    error = "--device: device 'cuda' is not available: torch finds 0"
    one_line_says(f"{command} --device cuda", 2, error)


def test_train_without_a_model_shows_what_to_give() -> None:
    done = hallutracer("train", HALLUTRACER_MODEL="")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--model: name the model that the bundle is for, such as ./my-model" in done.stderr


def test_a_dozen_rows_are_refused_below_a_stated_least(tmp_path: Path) -> None:
    rows = [{"prompt": f"Who is {n}?", "label": n % 2} for n in range(12)]
    data = write_rows(tmp_path / "few.jsonl", rows)
    command = f"train --name x --data {data} --store {tmp_path} --run-dir {tmp_path / 'r'}"
    least = "12 rows that ask for a fact, and a probe needs at least 40"
    ended(hallutracer(*command.split(), "--folds", "2"), 1, least, "--allow-few")
    few = hallutracer(*command.split(), "--folds", "2", "--allow-few", "--no-evaluate")
    assert "at least 40" not in few.stderr
