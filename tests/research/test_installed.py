"""Commands of this distribution: they appear by an entry point; without it they are absent, and the
error names it."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

import pytest

from service.annexes import imported
from tests.command_line import ended, hallutracer

cli = import_module("service.cli.main")

COMMANDS = {"data", "demo", "diagnose", "evaluate"}
HELP = [
    "evaluate",
    "diagnose",
    "demo build",
    "demo retrieval",
    *(f"data {name}" for name in ("convert", "list", "mix", "forms", "tasks", "audit")),
]


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: ())


def test_entry_points_are_listed_and_joined_into_groups() -> None:
    assert {point.name for point in entry_points(group=cli.GROUP)} == COMMANDS
    found = cli.installed()
    assert set(found) == set(cli.own_commands()) | COMMANDS
    own, joined = imported(cli.COMMANDS["demo"][0])[1], found["demo"][1]
    assert set(joined) == {*own, "build", "retrieval"}
    assert found["demo"][0]
    assert "build" not in own, "the product's own group stays as it is"


def test_every_command_has_help() -> None:
    for command in HELP:
        ended(hallutracer(*command.split(), "--help"), 0, f"hallutracer {command}")


@pytest.mark.usefixtures("uninstalled")
def test_without_the_distribution_its_commands_are_said_to_be_elsewhere_and_all_else_is_there() -> (
    None
):
    for command in HELP:
        ended(hallutracer(*command.split()), 2, "pip install ./research")
    assert set(cli.installed()) == set(cli.own_commands())
    assert "evaluate" not in ended(hallutracer("--help"), 0)
    for unknown in ("surf", "demo surf"):
        done = hallutracer(*unknown.split())
        assert (done.returncode, "research" in done.stdout + done.stderr) == (2, False)


def test_the_installed_command_knows_them() -> None:
    ended(hallutracer("--help"), 0, *COMMANDS)
