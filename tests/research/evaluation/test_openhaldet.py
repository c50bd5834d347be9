"""The detector of OpenHalDet's kind, on the demo model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hallutracer_research.evaluation.openhaldet import PromptDetector
from service.demo.questions import questions

QUICK: dict[str, Any] = {
    "c": 0.1,
    "seeds": (0,),
    "folds": 3,
    "jobs": 1,
    "logit_scale": "standardized",
    "allow_no_signal": True,
    "report": str,
}


@dataclass
class Accessor:
    """A sample as the benchmark hands it over: a prompt, and the verdict on its answer."""

    sample_id: str
    prompt: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def get_prompt_text(self) -> str:
        return self.prompt


def samples() -> list[Accessor]:
    """Of every third question that the demo model has read often the answer is right; two samples
    have no verdict."""
    rows = questions("train")[::25]
    made = [
        Accessor(
            row["id"],
            row["prompt"],
            {"eval_category": "correct" if row["exposures"] > 4 else "hallucination"},
        )
        for row in rows
    ]
    return [
        *made,
        Accessor("refused", rows[0]["prompt"], {"eval_category": "refusal"}),
        Accessor("none", "Why?"),
    ]


def test_it_is_fitted_on_verdicts_and_scores_prompts_alone(tmp_path: Path) -> None:
    detector = PromptDetector(model="demo", folder=tmp_path, **QUICK)
    assert (
        detector.requires_stochastic,
        detector.requires_qa_features,
        detector.required_qa_method,
    ) == (
        False,
        False,
        None,
    )
    given = samples()
    with pytest.raises(RuntimeError, match="call fit before predict_score"):
        detector.predict_score(given[0])
    assert detector.fit(given) is detector
    risks = [detector.predict_score(sample) for sample in given[:40]]
    assert all(0.0 < risk < 1.0 for risk in risks)
    wrong = [sample.metadata["eval_category"] == "hallucination" for sample in given[:40]]
    right_mean = sum(risk for risk, bad in zip(risks, wrong, strict=True) if not bad) / wrong.count(
        False
    )
    wrong_mean = sum(risk for risk, bad in zip(risks, wrong, strict=True) if bad) / wrong.count(
        True
    )
    assert wrong_mean > right_mean
    manifest = detector._detector.bundle.manifest
    assert manifest.prompt_format == "text"
    assert manifest.training.rows == len(given) - 2, (
        "what is neither correct nor a hallucination is left out"
    )
    detector.close()
    with pytest.raises(RuntimeError, match="call fit"):
        detector.predict_score(given[0])
