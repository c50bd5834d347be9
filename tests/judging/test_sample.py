"""The questions that a bundle carries, as they are read and answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.judging.evaluation import MOST_TOKENS, Sample, SampleQuestion, sample_of
from tests.judging.test_coverage import bundle_with

SAMPLE = Sample(
    "rows.jsonl",
    "contains",
    r"(?i)not sure",
    16,
    (SampleQuestion("Capital of France?", ("Paris",), "capital"), SampleQuestion("2 + 2?", ("4", "four"), "")),
)


def test_what_the_trainer_writes_is_read(tmp_path: Path) -> None:
    assert sample_of(bundle_with(tmp_path, {"sample": SAMPLE.document()})) == SAMPLE
    assert sample_of(bundle_with(tmp_path / "none", {})) is None


def test_an_answer_is_never_longer_than_our_limit(tmp_path: Path) -> None:
    found = sample_of(bundle_with(tmp_path, {"sample": SAMPLE.document() | {"max_tokens": 10**9}}))
    assert found is not None
    assert found.max_tokens == MOST_TOKENS


@pytest.mark.parametrize(
    "change",
    [
        {"questions": []},
        {"questions": None},
        {"questions": [1]},
        {"questions": [{"prompt": "a", "answers": [], "kind": ""}]},
        {"questions": [{"prompt": "a", "answers": [1], "kind": ""}]},
        {"questions": [{"prompt": 1, "answers": ["a"], "kind": ""}]},
        {"judge": "openai"},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"abstain_pattern": None},
        {"abstain_pattern": "("},
    ],
)
def test_what_reads_otherwise_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    assert sample_of(bundle_with(tmp_path, {"sample": SAMPLE.document() | change})) is None
