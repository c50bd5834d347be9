"""What the tests of guarantee and recalibrate share: the demo model's own questions, and a command on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.demo.questions import questions
from tests.command_line import run
from tests.fitting.planted import write_rows


def question_files(factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = factory.mktemp("questions")
    return {split: str(write_rows(folder / f"{split}.jsonl", questions(split))) for split in ("train", "dev", "test")}


def arguments(verb: str, name: str, files: dict[str, str], folder: Path, *more: str) -> list[str]:
    return [verb, "--bundle", "demo", "--new-name", name, "--data", files["dev"], "--model", "demo",
            "--store", str(folder / "store"), "--run-dir", str(folder / "run"), *more]  # fmt: skip


def own(files: dict[str, str]) -> list[str]:
    return ["--trained-on", files["train"], "--trained-on", files["test"]]


def dry_run(command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What it says; it loads no model."""
    monkeypatch.setattr("service.cli.train.load_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    assert run(*command, "--dry-run") == 0
    said = capsys.readouterr()
    assert said.out == ""
    return said.err
