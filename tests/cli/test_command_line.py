"""The command line as a user meets it: help, environment variables, and bad input before any model is loaded."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from service.cli.main import app, main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["hallutracer", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def commands() -> Iterator[tuple[str, Any]]:
    def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
        children = getattr(command, "commands", {})
        if not children:
            yield path.strip(), command
        for name, child in children.items():
            yield from walk(f"{path} {name}", child)

    yield from walk("", typer.main.get_command(app))


COMMANDS = dict(commands())


def test_the_commands_are_those_of_the_readme() -> None:
    assert set(COMMANDS) == {
        "serve", "score", "train", "bundle list", "bundle show", "bundle verify", "bundle alias",
        "demo info", "demo questions", "demo build", "data convert", "data list",
        "evaluate", "diagnose",
    }  # fmt: skip


@pytest.mark.parametrize("path", COMMANDS)
def test_help_says_what_and_every_flag_has_a_variable(path: str) -> None:
    command = COMMANDS[path]
    assert command.help
    for parameter in command.params:
        if getattr(parameter, "param_type_name", "") == "option" and parameter.name not in ("help", "version"):
            flag = max(parameter.opts, key=len).removeprefix("--")
            expected = "HALLUTRACER_" + flag.replace("-", "_").upper()
            assert parameter.envvar == expected, f"{path} --{flag}"
            assert getattr(parameter, "help", None), f"{path} --{flag}"


@pytest.mark.parametrize("path", COMMANDS)
def test_help_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str) -> None:
    assert run(monkeypatch, *path.split(), "--help") == 0
    assert "Usage" in capsys.readouterr().out


def test_a_variable_stands_for_a_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HALLUTRACER_STORE", str(tmp_path / "empty"))
    assert run(monkeypatch, "bundle", "show", "nothing") == 1
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
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    lines: list[str],
    expected: str,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    assert run(monkeypatch, "score", "--input", str(path)) == 1
    assert expected in capsys.readouterr().err


def test_score_wants_one_source(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "score") == 2
    assert "a question, or --input" in capsys.readouterr().err


def test_a_model_without_a_bundle_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "score", "a", "--model", "somewhere") == 2
    assert "hallutracer train" in capsys.readouterr().err


def test_a_taken_port_is_said_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run(monkeypatch, "serve", "--port", str(taken.getsockname()[1])) == 1
    assert "is taken; choose another with --port" in capsys.readouterr().err


def test_a_bad_host_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "serve", "--host", "256.0.0.1") == 1
    assert capsys.readouterr().err.startswith("error: cannot listen on 256.0.0.1")


def test_train_reports_bad_data_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "", "label": 1}) + "\n")
    code = run(
        monkeypatch,
        "train",
        "--data",
        str(path),
        "--name",
        "x",
        "--model",
        "/nowhere",
        "--run-dir",
        str(tmp_path / "r"),
    )
    assert code == 1
    assert "line 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../x", "X", ""])
def test_bundle_names_that_leave_the_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(monkeypatch, "bundle", "show", name) == 1
    assert capsys.readouterr().err.startswith("error: ")
