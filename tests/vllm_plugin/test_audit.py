"""The plugin's lines of the audit log: without vLLM's engine, and of the same form as our own service's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.errors import HalluTracerError
from service.vllm_plugin.options import read_options
from tests.api.test_observers import audited, lines


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"AUDIT_REQUIRED": "true"}, "HALLUTRACER_AUDIT_REQUIRED needs HALLUTRACER_AUDIT_LOG"),
        ({"AUDIT_LOG": "no/folder/audit.jsonl"}, "cannot write the audit log"),
    ],
)
def test_what_cannot_be_kept_keeps_vllm_from_starting(variables: dict[str, str], said: str) -> None:
    environment = {f"HALLUTRACER_{name}": value for name, value in variables.items()}
    with pytest.raises(HalluTracerError) as refused:
        read_options({"HALLUTRACER_BUNDLE": "demo", **environment})
    assert said in str(refused.value)


def own_fields(tmp_path: Path) -> set[str]:
    """Of a decision's line of our own service."""
    with audited(tmp_path) as app:
        app.client.post("/score", json={"prompt": "a"})
    return set(lines(tmp_path, "decision")[0])


def check_lines(path: Path, like: set[str]) -> list[dict[str, Any]]:
    """The decisions in vLLM's log, which have the same fields."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    decisions = [line for line in found if line["event"] == "decision"]
    assert decisions
    for line in decisions:
        assert set(line) - {"missed", "after_torn"} == like
        assert (line["key"], line["address"], line["by"]) == (None, "127.0.0.1", "api")
        assert set(line["prompts"][0]) == {"index", "risk", "decision", "flagged"}
    return decisions
