"""guarantee, recalibrate and feedback from the command line, with the demo model and its own
questions."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from probes_store.store import Store
from service.annexes.feedback.store import Feedback
from service.cli.train import _console
from service.demo.questions import questions
from service.feedback.databases import location
from service.trainer.cards import guaranteed_card
from tests.command_line import run
from tests.fitting.planted import write_rows
from tests.kit.bundles import guaranteed as draft
from tests.running import running, until

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("questions")
    return {
        split: str(write_rows(folder / f"{split}.jsonl", questions(split)))
        for split in ("train", "dev", "test")
    }


def command(verb: str, files: dict[str, str], folder: Path, *more: str) -> list[str]:
    options = f"--bundle demo --new-name mine --data {files['dev']} --model demo"
    folders = f"--store {folder / 'store'} --run-dir {folder / 'run'}"
    return [verb, *options.split(), *folders.split(), *more]


def own(files: dict[str, str]) -> list[str]:
    return ["--trained-on", files["train"], "--trained-on", files["test"]]


def test_a_dry_run_loads_no_model_and_writes_nothing(
    tmp_path: Path, files: dict[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "service.cli.train.load_engine", lambda *_, **__: pytest.fail("a model was loaded")
    )
    assert run(*command("recalibrate", files, tmp_path, *own(files)), "--dry-run") == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "1713 labelled rows in 767 groups, new to demo:1" in said.err
    assert not any(tmp_path.iterdir())


def test_a_dry_run_of_a_guarantee_prints_the_rows_that_want_a_label(
    tmp_path: Path, files: dict[str, str], capsys: Capture
) -> None:
    assert (
        run(*command("guarantee", files, tmp_path, *own(files), "--alpha", "0.1,0.2"), "--dry-run")
        == 0
    )
    said = capsys.readouterr()
    for words in (
        "1713 rows in 767 groups for the test, new to demo:1",
        "alpha 0.2, delta 0.025: at least 17 answering groups",
    ):
        assert words in said.err
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert f"{len(rows)} of 1713 rows want a label" in said.err
    assert 0 < len(rows) < 1713
    asked = Path(files["dev"]).read_text(encoding="utf-8").splitlines()
    assert all(json.loads(asked[row["line"] - 1])["prompt"] == row["prompt"] for row in rows)
    assert not (tmp_path / "store").exists()
    assert not list(tmp_path.rglob("question.json")), "nothing was spent"


@pytest.mark.parametrize(
    ("verb", "more", "message"),
    [
        ("guarantee", ["--judge", "openai"], "--judge-url"),
        ("recalibrate", ["--threshold-rule", "youden"], "keep"),
        ("recalibrate", ["--prompt-format", "text"], "that of the bundle's training rows"),
        ("guarantee", ["--labels", "sample"], "generate"),
        ("recalibrate", ["--traffic", "no.jsonl"], "no.jsonl"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, files: dict[str, str], capsys: Capture, verb: str, more: list[str], message: str
) -> None:
    assert run(*command(verb, files, tmp_path, *more)) in (1, 2)
    assert message in capsys.readouterr().err
    assert verb == "guarantee" or not any(tmp_path.iterdir())


def test_names_of_kinds_are_no_markup(capsys: Capture) -> None:
    with _console() as console:
        console.print("| [/b] [bold]x :smile: | 120 |")
    assert capsys.readouterr().err == "| [/b] [bold]x :smile: | 120 |\n"


def test_a_guarantee_is_shown_and_listed(tmp_path: Path, capsys: Capture) -> None:
    made = draft()
    Store(tmp_path).publish(
        dataclasses.replace(made, card=guaranteed_card(made.card, made.manifest))
    )

    def printed(*arguments: str) -> str:
        assert run("bundle", *arguments, "--store", str(tmp_path)) == 0
        return capsys.readouterr().out

    shown = printed("show", "tiny")
    assert "## Guarantee" in shown
    assert "It holds." in shown
    assert json.loads(printed("show", "tiny", "--json"))["guarantee"]["statement"] == "It holds."
    rows = {row["bundle"]: row["guarantee"] for row in json.loads(printed("list", "--json"))}
    assert (rows["tiny:1"], rows["demo:1"]) == ("alpha 0.1, delta 0.05", None)


def verified(store: Path, capsys: Capture) -> None:
    assert run("bundle", "verify", "mine", "--model", "demo", "--store", str(store)) == 0
    assert "golden prompts gave the recorded risks" in capsys.readouterr().out


def test_the_demo_models_own_rows_at_another_share(
    tmp_path: Path, files: dict[str, str], capsys: Capture
) -> None:
    """Its real answers: at training's share nothing is published; where most are wrong, the risk
    follows."""
    rows = [row for row in questions("dev") if row["kind"] == "city_country"][:180]
    asked = files | {"dev": str(write_rows(tmp_path / "asked.jsonl", rows))}
    assert run(*command("recalibrate", asked, tmp_path, *own(files))) == 0
    said = capsys.readouterr()
    assert (said.out, "nothing was published" in said.err) == ("", True)
    [labels] = (tmp_path / "run").rglob("labels-*.jsonl")
    results = {
        one["id"]: one["verdict"] for one in map(json.loads, labels.read_text().splitlines())
    }
    wrong = [row | {"label": 0} for row in rows if results[str(row["id"])] == "hallucinated"]
    right = [row | {"label": 1} for row in rows if results[str(row["id"])] == "factual"]
    shifted = files | {
        "dev": str(write_rows(tmp_path / "shifted.jsonl", wrong + right[: len(wrong) // 5]))
    }
    assert run(*command("recalibrate", shifted, tmp_path, *own(files), "--labels", "given")) == 0
    assert "mine:1  sha256:" in capsys.readouterr().out
    bundle = Store(tmp_path / "store").load("mine")
    (record,) = bundle.evaluation()["recalibrations"]
    before, after = (record["candidates"][name] for name in ("identity", record["chosen"]))
    assert after["gain"]["low"] > 0
    assert after["calibration_debiased"]["mean"] < before["calibration_debiased"]["mean"]
    assert record["at_threshold"]["before"] == record["at_threshold"]["after"]
    assert "## Recalibration" in bundle.card()
    verified(tmp_path / "store", capsys)


def test_a_bundle_is_recalibrated_by_what_users_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """How: tests/trainer/test_feedback.py."""
    monkeypatch.setattr(
        "service.trainer.feedback.recalibrate_by_feedback", by_feedback := Mock(return_value=None)
    )
    assert run("recalibrate", "--bundle", "demo", "--feedback", "f.db") == 0
    [(bundle, options, _)] = [call.args for call in by_feedback.call_args_list]
    assert (bundle.reference, options.feedback) == ("demo:1", "f.db")


def test_a_password_is_not_printed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, verb in (("FEEDBACK_DB", "serve"), ("FEEDBACK", "recalibrate")):
        monkeypatch.setenv(f"HALLUTRACER_{variable}", "postgresql://u:geheim@h/d")
        assert run(verb, "--print-config") == 0
        printed = capsys.readouterr().out
        assert (f'{variable.lower()} = "***"' in printed, "geheim" in printed) == (True, False)


def test_what_was_drawn_is_listed_until_it_has_a_label(tmp_path: Path, capsys: Capture) -> None:
    """A service that keeps the prompts; the labels of what the command lists are on its card."""
    path = tmp_path / "feedback.db"
    place, where = f"--feedback-db={path}", location(str(path))
    kept = partial(Feedback, where, prompts=True, days=1.0, share=1.0)
    with running(tmp_path, policy="observe", feedback=kept) as service:
        body = {
            "prompt": [
                f"What is the capital of {name}?"
                for name in ("France", "Italy", "Spain", "Peru", "Chad")
            ]
        }
        answer = httpx.post(f"{service.url}/score", json=body, timeout=60).json()
        given = [one["index"] for one in answer["data"] if not one["flagged"]]
        assert given

        def listed() -> list[dict[str, Any]]:
            assert run("feedback", place) == 0
            return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

        until(lambda: len(listed()) == len(given))
        result = listed()
        assert [one["given"]["prompt"] for one in result] == [
            body["prompt"][index] for index in given
        ]
        said = {"id": result[0]["id"], "index": result[0]["index"], "label": "factual"}
        assert (
            httpx.post(f"{service.url}/v1/feedback", json=said, timeout=60).json()["drawn"] is True
        )
        assert listed() == result[1:]
