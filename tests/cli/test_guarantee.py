"""hallutracer guarantee from the command line: what it refuses, what it would test, and where the promise is shown."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from probes_store.store import Store
from service.trainer.cards import guaranteed_card
from tests.cli.new_rows import arguments, dry_run, own, question_files
from tests.command_line import run
from tests.probes_store.factory import guaranteed as draft


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return question_files(tmp_path_factory)


command = partial(arguments, "guarantee", "sure")


def test_a_dry_run_loads_no_model_and_writes_nothing(
    tmp_path: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = dry_run(command(files, tmp_path, *own(files), "--alpha", "0.1,0.2"), capsys, monkeypatch)
    assert "1713 rows in 767 groups for the test, new to demo:1" in said
    assert "alpha 0.2, delta 0.025: at least 17 answering groups" in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--judge", "openai"], "--judge-url"),
        (["--prompt-format", "text"], "that of the bundle's training rows"),
        (["--labels", "sample"], "of greedy answers"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert run(*command(files, tmp_path, *more)) in (1, 2)
    assert said in capsys.readouterr().err


def test_the_promise_is_shown_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = draft()
    store = Store(tmp_path)
    store.publish(dataclasses.replace(made, card=guaranteed_card(made.card, made.manifest)))
    assert run("bundle", "show", "tiny", "--store", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "## Guarantee" in shown
    assert "It holds." in shown
    assert run("bundle", "show", "tiny", "--json", "--store", str(tmp_path)) == 0
    manifest: Any = json.loads(capsys.readouterr().out)
    assert manifest["guarantee"]["statement"] == "It holds."
    assert run("bundle", "list", "--json", "--store", str(tmp_path)) == 0
    rows = {row["bundle"]: row["guarantee"] for row in json.loads(capsys.readouterr().out)}
    assert rows["tiny:1"] == "alpha 0.1, delta 0.05"
    assert rows["demo:1"] is None
