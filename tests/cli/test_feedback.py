"""From a served answer to the next version of its bundle, with the demo model and its own questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from probes_store.store import Store
from service.demo.questions import questions
from tests.cli.new_rows import own, question_files
from tests.command_line import run
from tests.running import until
from tests.serve_process import serve


def test_a_password_is_not_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, command in (("FEEDBACK_DB", "serve"), ("FEEDBACK", "recalibrate")):
        monkeypatch.setenv(f"HALLUTRACER_{variable}", "postgresql://u:geheim@h/d")
        assert run(command, "--print-config") == 0
        printed = capsys.readouterr().out
        assert f'{variable.lower()} = "***"' in printed
        assert "geheim" not in printed


def test_what_was_drawn_is_listed_until_it_has_a_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real service, which keeps the prompts; the labels of what the command lists are on its card."""
    place = f"--feedback-db={tmp_path / 'feedback.db'}"
    options = ("--feedback-prompts", "--feedback-days=1", "--feedback-share=1")
    with serve("--policy=observe", place, *options) as service:
        body = {"prompt": ["What is the capital of France?", "What is the capital of Italy?"], "threshold": None}
        answer = httpx.post(f"{service.url}/score", json=body, timeout=60).json()
        given = [one["index"] for one in answer["data"] if not one["flagged"]]
        assert given

        def listed() -> list[dict[str, Any]]:
            assert run("feedback", place) == 0
            return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

        until(lambda: len(listed()) == len(given))
        found = listed()
        assert [one["given"]["prompt"] for one in found] == [body["prompt"][index] for index in given]
        said = {"id": found[0]["id"], "index": found[0]["index"], "label": "factual"}
        assert httpx.post(f"{service.url}/v1/feedback", json=said, timeout=60).json()["drawn"] is True
        assert listed() == found[1:]
    assert run("feedback") == 2
    assert "--feedback-db" in capsys.readouterr().err
    assert run("serve", "--feedback-share=0.5") == 2
    assert "needs --feedback-db" in capsys.readouterr().err
    assert run("serve", place, "--feedback-share=1.5") == 2


@pytest.mark.long
def test_users_say_what_was_wrong_and_the_next_version_knows(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real answers, judged by their accepted answers; of the right ones every sixth is labelled."""
    database, store = tmp_path / "feedback.db", tmp_path / "store"
    rows = [row for row in questions("dev") if row["kind"] == "city_country"][:400]
    said = []
    with serve("--policy=observe", f"--feedback-db={database}", HALLUTRACER_STORE=str(store)) as service:
        for start in range(0, len(rows), 60):
            asked = rows[start : start + 60]
            body = {"prompt": [row["prompt"] for row in asked], "generate": {"max_tokens": 24}}
            answer = httpx.post(f"{service.url}/score", json=body, timeout=300).json()
            for row, found in zip(asked, answer["data"], strict=True):
                text = found["completion"]["text"].lower()
                right = any(one.lower() in text for one in row["answers"])
                said.append((right, {"id": answer["id"], "index": found["index"]}))
        kept = [one for one in said if not one[0]] + [one for one in said if one[0]][::6]
        for right, place in kept:
            label = {"label": "factual" if right else "hallucinated"}
            httpx.post(f"{service.url}/v1/feedback", json=place | label, timeout=60).raise_for_status()
    command = ["recalibrate", "--bundle", "demo", "--new-name", "mine", "--feedback", str(database)]
    command += ["--store", str(store), *own(question_files(tmp_path_factory))]
    assert run(*command, "--dry-run") == 0
    assert f"{len(kept)} of them labelled" in capsys.readouterr().err
    assert run(*command) == 0
    assert "mine:1  sha256:" in capsys.readouterr().out
    bundle = Store(store).load("mine")
    (record,) = bundle.evaluation()["recalibrations"]
    assert record["feedback"]["answers"] == len(rows)
    assert record["candidates"][record["chosen"]]["gain"]["low"] > 0
    assert "### Who was labelled" in bundle.card()
    assert json.dumps(record).find(rows[0]["prompt"]) < 0
    verified = ["bundle", "verify", "mine", "--model", "demo", "--store", str(store)]
    assert run(*verified) == 0
    assert "golden prompts gave the recorded risks" in capsys.readouterr().out
