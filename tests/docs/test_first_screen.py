"""The README's list of the 1.5B's answers is what the shipped bundle recorded."""

from __future__ import annotations

import pytest

from docs.answered import read_rows
from docs.first_screen import QWEN, QWEN_ROWS, Answer, answers
from probes_store.bundle import load_bundle
from tests.kit.pages import ROOT


def test_the_readmes_list_is_every_eighth_answer_by_risk() -> None:
    bundle = load_bundle(QWEN)
    rows = [row for path in QWEN_ROWS for row in read_rows(path)]
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    head, _, below = page.partition("| | *[Qwen2.5-Coder-1.5B]")
    lines = [answer.line() for answer in answers(bundle, rows)]
    assert below.splitlines()[1 : len(lines) + 2] == [*lines, ""]
    assert head.rstrip().endswith("|")  # of one table with SmolLM2's list
    assert f"withholds {bundle.manifest.threshold_for(False):.2f} and more" in below.splitlines()[0]
    with pytest.raises(ValueError, match="not those"):
        answers(bundle, rows[1:])


@pytest.mark.parametrize(
    ("right", "withheld", "verdict"),
    [
        (True, False, "right"),
        (False, True, "wrong"),
        (True, True, "**right**: withheld"),
        (False, False, "**wrong**: let through"),
    ],
)
def test_what_the_gate_did_wrong_is_bold(right: bool, withheld: bool, verdict: str) -> None:
    answer = Answer(0.25, "Who?", "Somebody " * 20, right, withheld)
    assert answer.line() == f"| 0.25 | Who? | {'Somebody ' * 8}.. | {verdict} |"
