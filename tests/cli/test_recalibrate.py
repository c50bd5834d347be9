"""hallutracer recalibrate from the command line, on the demo model's own questions."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from probes_store.store import Store
from service.demo.questions import questions
from tests.cli.new_rows import arguments, dry_run, own, question_files
from tests.command_line import run
from tests.fitting.planted import write_rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return question_files(tmp_path_factory)


command = partial(arguments, "recalibrate", "mine")


def test_a_dry_run_loads_no_model_and_writes_nothing(
    tmp_path: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = dry_run(command(files, tmp_path, *own(files)), capsys, monkeypatch)
    assert "1713 labelled rows in 767 groups, new to demo:1" in said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--judge", "openai"], "--judge-url"),
        (["--prompt-format", "text"], "that of the bundle's training rows"),
        (["--threshold-rule", "loose"], "keep"),
        (["--threshold-rule", "youden"], "keep"),
        (["--traffic", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert run(*command(files, tmp_path, *more)) in (1, 2)
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def verdicts(folder: Path) -> dict[str, str]:
    [file] = folder.rglob("labels-*.jsonl")
    return {found["id"]: found["verdict"] for found in map(json.loads, file.read_text().splitlines())}


def test_the_demo_models_own_rows_at_another_share(
    tmp_path: Path, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its real answers: at training's share nothing is published; where most are wrong, the risk follows."""
    rows = [row for row in questions("dev") if row["kind"] == "city_country"][:180]
    asked = files | {"dev": str(write_rows(tmp_path / "asked.jsonl", rows))}
    assert run(*command(asked, tmp_path, *own(files))) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "nothing was published" in said.err
    found = verdicts(tmp_path / "run")
    wrong = [row | {"label": 0} for row in rows if found[str(row["id"])] == "hallucinated"]
    right = [row | {"label": 1} for row in rows if found[str(row["id"])] == "factual"]
    shifted = write_rows(tmp_path / "shifted.jsonl", wrong + right[: len(wrong) // 5])
    assert run(*command(files | {"dev": str(shifted)}, tmp_path, *own(files), "--labels", "given")) == 0
    assert "mine:1  sha256:" in capsys.readouterr().out
    bundle = Store(tmp_path / "store").load("mine")
    (record,) = bundle.evaluation()["recalibrations"]
    before, after = (record["candidates"][name] for name in ("identity", record["chosen"]))
    assert after["gain"]["low"] > 0
    assert after["calibration_debiased"]["mean"] < before["calibration_debiased"]["mean"]
    assert record["at_threshold"]["before"] == record["at_threshold"]["after"]
    assert run("bundle", "show", "mine", "--store", str(tmp_path / "store")) == 0
    assert "## Recalibration" in capsys.readouterr().out
    verified = ["bundle", "verify", "mine", "--model", "demo", "--store", str(tmp_path / "store")]
    assert run(*verified) == 0
    assert "golden prompts gave the recorded risks" in capsys.readouterr().out
