"""A model card in a terminal: nothing is lost, nothing is cut, and a pipe gets the file."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from probes_store.store import SHIPPED, Store
from service.cli.output import print_card
from tests.command_line import hallutracer


def shown(width: int) -> str:
    bundle = Store(SHIPPED).load("smollm2")
    out = io.StringIO()
    print_card(bundle.card(), bundle.path, Console(file=out, width=width, force_terminal=True, highlight=False))
    return re.sub(r"\x1b(\[[\d;]*m|]8;[^\\]*\x1b\\\\)", "", out.getvalue())


@pytest.mark.parametrize("width", [80, 120])
def test_every_figure_is_there_and_fits(width: int) -> None:
    bundle = Store(SHIPPED).load("smollm2")
    text = shown(width)
    tables = [line for line in bundle.card().splitlines() if line.startswith("|")]
    figures = set(re.findall(r"\d\.\d{3} (?:\+/- \d\.\d{3}|\[\d\.\d{3}, \d\.\d{3}\])", "\n".join(tables)))
    assert len(figures) > 30
    assert [figure for figure in figures if figure not in text] == []
    lines = [line for line in text.splitlines() if "/plots/" not in line]
    assert max(map(len, lines)) <= width
    assert "…" not in text
    assert "depth mean, unit norm" in text
    assert "library_name" not in text  # for the hub
    assert str(bundle.path / "plots" / "roc.png") in text


def test_a_pipe_gets_the_file() -> None:
    assert hallutracer("bundle", "show", "smollm2").stdout == Store(SHIPPED).load("smollm2").card() + "\n"


def test_a_terminal_gets_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = hallutracer("bundle", "show", "smollm2", FORCE_COLOR="1", COLUMNS="80").stdout
    assert "library_name" not in printed
    assert "| --- |" not in printed
    assert str(Path("plots", "roc.png")) in printed


def test_a_strangers_card_moves_no_cursor() -> None:
    out = io.StringIO()
    print_card("# A\x1b[2J\n\n| a |\n| --- |\n| b\x9b2J\x07 |\n", Path("x"), Console(file=out, width=80, no_color=True))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out.getvalue())
    assert "A[2J" in out.getvalue()
