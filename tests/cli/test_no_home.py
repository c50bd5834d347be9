"""A process without a home folder, or with one that cannot be written, as containers run for an
arbitrary user."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from service.engines.places import PACKAGED, folder_of
from service.errors import ModelLoadError
from tests.command_line import hallutracer, one_line_says


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert os.path.expanduser("~") == "~"


# A command, and the variable that makes up for the missing folder.
HELPED_BY = """
score hi | HALLUTRACER_STORE
serve --port 0 | HALLUTRACER_STORE
bundle list | HALLUTRACER_STORE
bundle show demo | HALLUTRACER_STORE
try | HALLUTRACER_STORE
train --name x --data x.jsonl | HALLUTRACER_STORE
bundle list --store hf://owner/name | HALLUTRACER_STORE_CACHE
bundle show demo --store=/x --require-signature ~/key.pem | HALLUTRACER_REQUIRE_SIGNATURE
feedback --feedback-db ~/f.db | HALLUTRACER_FEEDBACK_DB
"""


@pytest.mark.parametrize("row", HELPED_BY.strip().splitlines())
def test_one_sentence_names_the_variable_that_helps(no_home: None, row: str) -> None:
    command, variable = row.split(" | ")
    cure = f"this process has no home folder. Set {variable}, or HOME\n"
    assert one_line_says(command, 1).endswith(cure)


def test_doctor_and_the_help_go_on(no_home: None) -> None:
    done = hallutracer("doctor")
    printed = done.stdout + done.stderr
    assert "Set HALLUTRACER_STORE, or HOME" in printed
    assert "Traceback" not in printed
    assert hallutracer("serve", "--help-all").returncode == 0


def test_a_home_of_an_unknown_user_is_no_traceback() -> None:
    for command in (
        "score hi --model ~nobody-here/m",
        "train --name x --data ~nobody-here/rows.jsonl",
    ):
        done = hallutracer(*command.split())
        assert done.returncode in (1, 2)
        assert done.stderr.startswith("error: ")
        assert "~nobody-here" in done.stderr


def test_with_a_store_it_scores(no_home: None, tmp_path: Path) -> None:
    done = hallutracer(
        "score", "hi", HALLUTRACER_STORE=str(tmp_path), HALLUTRACER_CACHE=str(tmp_path / "c")
    )
    assert (done.returncode, done.stdout.startswith("risk ")) == (0, True)


@pytest.mark.skipif(not PACKAGED["smollm2"].is_installed, reason="needs the package of SmolLM2")
@pytest.mark.parametrize("home", [None, "/proc"])
def test_a_gguf_file_asks_for_a_cache_that_can_be_written(
    no_home: None, home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("HALLUTRACER_CACHE", raising=False)
    with pytest.raises(ModelLoadError, match="HALLUTRACER_CACHE"):
        folder_of(PACKAGED["smollm2"].path)


def test_matplotlib_does_not_tell_of_its_folders() -> None:
    hallutracer("--version")
    assert not logging.getLogger("matplotlib").isEnabledFor(logging.WARNING)
    assert not logging.getLogger("matplotlib.font_manager").isEnabledFor(logging.WARNING)
