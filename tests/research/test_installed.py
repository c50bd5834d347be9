"""Commands of this distribution: they appear by an entry point; without it they are absent, and the
error names it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points

import pytest

from service.annexes import imported
from tests.command_line import hallutracer

cli = import_module("service.cli.main")

COMMANDS = {"data", "demo", "diagnose", "evaluate"}
HELP = [
    ["evaluate"],
    ["diagnose"],
    ["demo", "build"],
    ["demo", "retrieval"],
    *(["data", name] for name in ("convert", "list", "mix", "forms", "tasks", "audit")),
]


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: ())


def told(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], status: int) -> str:
    """What the command line says before it ends with ``status``."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == status
    out, err = capsys.readouterr()
    return out + err


def test_entry_points_are_listed_and_joined_into_groups() -> None:
    assert {point.name for point in entry_points(group=cli.GROUP)} == COMMANDS
    found = cli.installed()
    assert set(found) == set(cli.own_commands()) | COMMANDS
    own, joined = imported(cli.COMMANDS["demo"][0])[1], found["demo"][1]
    assert set(joined) == {*own, "build", "retrieval"}
    assert found["demo"][0]
    assert "build" not in own, "the product's own group stays as it is"


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in HELP:
        assert f"hallutracer {' '.join(command)}" in told(capsys, [*command, "--help"], 0)


@pytest.mark.usefixtures("uninstalled")
def test_without_the_distribution_its_commands_are_said_to_be_elsewhere_and_all_else_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in HELP:
        assert "pip install ./research" in told(capsys, command, 2)
    assert set(cli.installed()) == set(cli.own_commands())
    text = told(capsys, ["--help"], 0)
    assert "evaluate" not in text
    assert "research" not in told(capsys, ["surf"], 2)
    assert "research" not in told(capsys, ["demo", "surf"], 2)


def test_the_installed_command_knows_them() -> None:
    done = hallutracer("--help")
    assert all(name in done.stdout for name in COMMANDS)
