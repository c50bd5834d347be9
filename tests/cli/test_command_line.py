"""The command line as a user meets it: help, environment variables, and bad input before any model is loaded."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import pytest

from service import __version__, progress
from service.api.response_schema import BundleRef, RiskOut, ScoreResponse
from service.cli.main import main, make_app
from service.options import Sources, commands_of


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


COMMANDS = {" ".join(path) for path, _ in commands_of(make_app(Sources({})))}


def test_the_commands_are_those_of_the_readme() -> None:
    assert {
        "serve", "doctor", "try", "score", "train", "bundle list", "bundle show", "bundle compare", "bundle verify",
        "bundle alias", "bundle sign", "bundle push", "bundle pull", "bundle promote", "bundle rollback", "bundle diff",
        "demo info", "demo questions", "demo retrieval", "demo build", "data convert", "data list", "data mix",
        "data forms", "data tasks", "data audit", "evaluate", "diagnose", "guarantee", "recalibrate", "feedback",
        "keys make", "keys list", "audit verify",
    } == COMMANDS  # fmt: skip


@pytest.mark.parametrize("path", ["", "bundle", *sorted(COMMANDS)])
@pytest.mark.parametrize("flag", ["-h", "--help", "--help-all"])
def test_help_prints(capsys: pytest.CaptureFixture[str], path: str, flag: str) -> None:
    assert run(*path.split(), flag) == 0
    printed = capsys.readouterr().out
    assert "Usage" in printed
    if path in ("score", "train", "guarantee", "recalibrate", "evaluate", "diagnose", "serve"):
        assert f"  hallutracer {path} " in printed  # an example
        assert "[default: " in printed or path == "diagnose"
        assert ("HALLUTRACER_CONFIG" in printed) == (flag == "--help-all")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"hallutracer {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["serv"], "serve"),
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--threshold", "2"], "0 to 1"),
        (["serve", "extra"], "extra"),
        (["serve", "--tensor-parallel-size", "2"], "--engine vllm"),
        (["serve", "--protect-metrics"], "--api-key"),
        (["serve", "--host", "0.0.0.0"], "--allow-anonymous"),
        (["serve", "--audit-required"], "--audit-log"),
        (["keys", "list"], "--keys"),
        (["audit", "verify"], "FILES"),
        (["serve", "--api-key", "short"], "16 characters"),
        (["serve", "--api-key", "REPLACE-ME-app-one"], "placeholder"),
        (["serve", "--allowed-host", "guard.example:8765"], "--allowed-host"),
        (["serve", "--callers-may", "anything"], "threshold"),
        (["serve", "--otlp-traces-endpoint", "http://localhost:4318"], "/v1/traces"),
        (["serve", "--feedback-prompts"], "--feedback-db"),
        (["serve", "--feedback-days", "3"], "--feedback-db"),
        (["serve", "--feedback-db", "f.db", "--feedback-prompts"], "--feedback-days"),
        (["serve", "--feedback-db", "f.db", "--feedback-days", "0"], "> 0"),
        (["recalibrate", "--bundle", "demo", "--feedback", "f.db", "--data", "x.jsonl"], "--data"),
        (["recalibrate", "--bundle", "demo", "--feedback", "f.db", "--traffic", "x.jsonl"], "--traffic"),
        (["recalibrate", "--feedback", "f.db"], "--bundle"),
        (["train", "--data", "x.jsonl"], "--name"),
        (["train", "--name", "x"], "--data"),
        (["guarantee", "--bundle", "demo"], "--data"),
        (["guarantee", "--data", "x.jsonl"], "--bundle"),
        (["guarantee", "--data", "x.jsonl", "--bundle", "demo", "--alpha", ".1,2"], "--alpha"),
        (["recalibrate", "--bundle", "demo"], "--data"),
        (["recalibrate", "--data", "x.jsonl"], "--bundle"),
        (["score"], "--input"),
        (["score", "a", "--model", "somewhere"], "hallutracer train"),
        (["score", "a", "--engine-arg", "x"], "NAME=VALUE"),
        (["evaluate", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["evaluate", "--model", "m"], "--data"),
        (["diagnose", "no.npz"], "no.npz"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert word in captured.err
    assert captured.out == ""


def test_a_placeholder_in_the_environment_or_the_configuration_is_refused_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "h.toml"
    config.write_text('[serve]\napi_key = ["REPLACE-ME-app-one"]\n')
    assert run("serve", "--config", str(config)) == 2
    assert "placeholder" in capsys.readouterr().err
    monkeypatch.setenv("HALLUTRACER_API_KEY", "REPLACE-ME-app-one")
    assert run("serve") == 2
    assert "placeholder" in capsys.readouterr().err


def test_an_interrupt_is_exit_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("service.cli.bundle.open_store", interrupted)
    assert run("bundle", "show", "demo") == 130


def test_a_variable_stands_for_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HALLUTRACER_STORE", str(tmp_path / "empty"))
    assert run("bundle", "show", "nothing") == 1
    assert str(tmp_path / "empty") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["{"], "line 1: invalid JSON"),
        (['{"prompt": "a"}', "[]"], "line 2: a JSON object is expected, found a list"),
        (['{"prompt": "a", "messages": []}'], "line 1: has both"),
        (["", '{"prompt": " "}'], "line 2: 'prompt' is empty"),
        ([], "no rows"),
        (['{"messages": ["x"]}'], "line 1: 'messages[0]' must be an object"),
        (['{"messages": [{"role": "user"}]}'], "line 1: 'messages[0]' must be an object"),
        (["[" * 100_000], "line 1: invalid JSON"),
        (['{"prompt": "a", "note": "\\ud800"}'], "line 1: half of a surrogate pair"),
        (['{"prompt": "a", "x": NaN}'], "line 1: invalid JSON: NaN is not JSON"),
    ],
)
def test_score_reports_lines(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    lines: list[str],
    expected: str,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    assert run("score", "--input", str(path)) == 1
    assert expected in capsys.readouterr().err


def test_a_taken_port_is_said_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run("serve", "--port", str(taken.getsockname()[1])) == 1
    assert "is taken; choose another with --port" in capsys.readouterr().err


def test_a_bad_host_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--host", "256.0.0.1", "--allow-anonymous") == 1
    assert capsys.readouterr().err.startswith("error: cannot listen on 256.0.0.1")


def test_train_reports_bad_data_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "", "label": 1}) + "\n")
    code = run(
        "train",
        "--data",
        str(path),
        "--name",
        "x",
        "--model",
        "owner/nowhere",
        "--run-dir",
        str(tmp_path / "r"),
    )
    assert code == 1
    assert "line 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--target", "wrong<=0.2", "--wrong-costs", "1"], 2, ["--target", "--wrong-costs", "one of them"]),
        (["--target", "wrong=0.2"], 1, ["target must be", "wrong<=SHARE", "'wrong=0.2'", '--target "wrong<=0.2"']),
        (["--wrong-costs", "0"], 2, ["--wrong-costs", "> 0"]),
        (["--wrong-costs", "much"], 2, ["--wrong-costs", "much"]),
    ],
)
def test_train_reports_a_threshold_s_rule_before_rows_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: list[str], code: int, said: list[str]
) -> None:
    assert (
        run("train", "--data", str(tmp_path / "none.jsonl"), "--name", "x", "--model", "owner/nowhere", *more) == code
    )
    error = capsys.readouterr().err
    assert [words for words in said if words not in error] == []
    assert "none.jsonl" not in error


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--forms", "mixture"), "given labels belong to the prompts as they are"),
        (("--forms", "lone,chat", "--labels", "generate"), "no form is called 'chat'"),
        (("--forms", ",", "--labels", "generate"), "forms is empty"),
        (("--forms", "none"), "line 1"),
        (("--forms", "turns,lone", "--labels", "sample"), "line 1"),
    ],
)
def test_forms_are_checked_before_rows_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "", "label": 1}) + "\n")
    assert run("train", "--data", str(path), "--name", "x", "--run-dir", str(tmp_path / "r"), *more) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../x", "X", ""])
def test_bundle_names_that_leave_the_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run("bundle", "show", name) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_repeated_problems_are_reported_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n" * 600 + '{"prompt": 1}\n')
    assert run("score", "--input", str(path)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "line 1 and 599 more lines: " in lines[1]
    assert "line 601: " in lines[2]


def test_progress_is_reported_by_the_clock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 0.01)
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    with progress.progress("loading x"):
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert lines[0].startswith("loading x (")
    assert lines[-1].startswith("loading x: done in ")
    monkeypatch.setattr(progress, "FIRST_S", 60.0)
    with progress.progress("a short step"):
        pass
    assert capsys.readouterr().err == ""


def test_score_writes_what_the_api_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    questions = ["What is the capital of Italy?", "What is the capital of the Solomon Islands?"]
    documents = []
    for question in questions:
        assert run("score", question, "--json", "--generate", "8", "--trajectory") == 0
        documents.append(ScoreResponse.model_validate_json(capsys.readouterr().out))
    answered, abstained = (document.data[0] for document in documents)
    assert answered.completion is not None
    assert documents[0].usage.completion_tokens == answered.completion.completion_tokens > 0
    assert (abstained.flagged, abstained.decision, abstained.completion) == (True, "abstain", None)
    assert abstained.message
    assert len(answered.trajectory or ()) == 8

    rows, output_file = tmp_path / "rows.jsonl", tmp_path / "risks.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text, "mine": n}) + "\n" for n, text in enumerate(questions)))
    arguments = ["--input", str(rows), "--output", str(output_file), "--generate", "8"]
    assert run("score", *arguments) == 0
    for index, (line, document) in enumerate(zip(output_file.read_text().splitlines(), documents, strict=True)):
        row = json.loads(line)
        assert (row.pop("prompt"), row.pop("mine")) == (questions[index], index)
        assert BundleRef.model_validate(row.pop("bundle")) == document.bundle
        risk = RiskOut.model_validate(row)
        assert (risk.index, risk.decision, risk.message) == (index, document.data[0].decision, document.data[0].message)
        assert risk.risk == pytest.approx(document.data[0].risk, abs=1e-6)
        assert risk.completion == document.data[0].completion


def test_several_questions_are_scored_together_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    questions, picture = ["What is the capital of Italy?", "What costs $5 in $us?"], tmp_path / "pair.png"
    assert run("score", *questions, "--json", "--plot", str(picture)) == 0
    document = ScoreResponse.model_validate_json(capsys.readouterr().out)
    assert [risk.index for risk in document.data] == [0, 1]
    alone, drawn = document.data[0].risk, picture.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert run("score", questions[0], "--json", "--plot", str(picture)) == 0
    one = ScoreResponse.model_validate_json(capsys.readouterr().out)
    assert one.data[0].risk == pytest.approx(alone, abs=1e-5)
    assert picture.read_bytes() != drawn
    assert run("score", *questions) == 0
    out = capsys.readouterr().out
    assert [out.count(f"{question}\n") for question in questions] == [1, 1]
    assert out.count("decision") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Hello.", "--plot", "no/such/folder.png"], "no/such is not a folder"),
        (["Hello."] * 7 + ["--plot", "x.png"], "room for 1 to 6 prompts"),
        (["--input", "-", "--plot", "x.png"], "room for 1 to 6 prompts"),
        ([], "give a question"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_said_before_the_model_is_loaded(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("score", *arguments) == 2
    assert said in capsys.readouterr().err


def test_a_rule_for_a_key_that_is_not_there_keeps_the_service_from_starting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policies, keys = tmp_path / "policies.toml", tmp_path / "keys"
    policies.write_text('[[rule]]\nkey = "rga"\npolicy = "observe"')
    assert run("serve", "--model", "demo", "--policies", str(policies)) != 0
    assert "there are no keys" in capsys.readouterr().err
    keys.write_text("0123456789abcdef name=rag\n")
    assert run("serve", "--model", "demo", "--policies", str(policies), "--api-key-file", str(keys)) != 0
    assert "names the key 'rga'; keys are named" in capsys.readouterr().err


def test_the_help_of_serve_shows_the_dozen_that_people_use_and_help_all_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = {}
    for flag in ("--help", "--help-all"):
        assert run("serve", flag) == 0
        text = capsys.readouterr().out
        shown[flag] = set(re.findall(r"^│ (--[a-z-]+)", text, re.MULTILINE))
        assert ("HALLUTRACER_POLICY" in text) == (flag == "--help-all")
    assert {"--model", "--bundle", "--policy", "--threshold", "--host", "--port", "--keys"} <= shown["--help"]
    assert len(shown["--help"]) <= 14
    assert shown["--help-all"] > shown["--help"] | {"--max-queue", "--canary", "--feedback-db"}


def test_a_store_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bundle", "list", "--store", str(tmp_path / "nowhere")) == 0
    told = capsys.readouterr()
    assert f"there is no folder {tmp_path / 'nowhere'}" in told.err
    assert "demo:1" in told.out
    assert run("bundle", "list", "--store", str(tmp_path)) == 0
    assert capsys.readouterr().err == ""
