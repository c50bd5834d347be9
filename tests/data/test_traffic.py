"""Unlabelled traffic: risks or prompts, every problem by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.data.training_rows import read_traffic
from service.errors import DataError

OWN = "sha256:own"


def read(folder: Path, *lines: Any) -> Any:
    file = folder / "traffic.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_traffic(file, OWN)


def test_risks_as_score_writes_them(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        {"id": "a", "prompt": "Why?", "risk": 0.25, "label": 1, "bundle": {"name": "b", "version": 1, "digest": OWN}},
        {"prompt": "Why?", "risk": 1},
        {"risk": 0.5, "group": "g"},
        {"risk": 0.5},
    )
    assert found.scored
    assert [row.risk for row in found.rows] == [0.25, 1.0, 0.5, 0.5]
    groups = [row.group for row in found.rows]
    assert groups[0] == groups[1]  # the same prompt
    assert len(set(groups)) == 3
    assert found.rows[0].prompt_digest == found.rows[1].prompt_digest is not None
    assert found.rows[3].prompt_digest is None


def test_prompts(tmp_path: Path) -> None:
    found = read(tmp_path, {"prompt": "Why?"}, {"messages": [{"role": "user", "content": "Why?"}]})
    assert not found.scored
    assert found.rows[0].prompt_digest == found.rows[1].prompt_digest
    assert found.rows[1].messages is not None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"id": "a"}, "line 2: 'prompt'"),
        ({"risk": 1.5}, "line 2: 'risk' must be a number from 0 to 1, found 1.5"),
        ({"risk": True}, "found true"),
        ({"risk": "0.5"}, "found \"0.5\""),
        ({"risk": None}, "found null"),
        ({"risk": 0.5, "prompt": ""}, "'prompt' is empty"),
        ({"risk": 0.5, "group": 3}, "'group' must be a string"),
        ({"risk": 0.5, "bundle": {"name": "b", "version": 2, "digest": "sha256:other"}}, "b:2"),
        ({"prompt": "Why?"}, "score all of them, or none"),
        ([], "a JSON object"),
    ],
)  # fmt: skip
def test_problems_are_named_by_line(tmp_path: Path, line: Any, said: str) -> None:
    with pytest.raises(DataError, match="line 2") as caught:
        read(tmp_path, {"risk": 0.5}, line)
    assert said in str(caught.value)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no rows"):
        read(tmp_path)
