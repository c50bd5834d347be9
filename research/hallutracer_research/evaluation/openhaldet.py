"""HalluTracer as a detector of OpenHalDet (arXiv 2606.06959), by that benchmark's ``fit`` and
``predict_score``.

It reads the prompt alone, before an answer token: the benchmark's hidden states of answers are not
used, and the model is loaded here.  Register it there as any detector:

    from detectors.registry import register_detector
    from hallutracer_research.evaluation.openhaldet import PromptDetector

    register_detector("hallutracer")(PromptDetector)

OpenHalDet renders prompts itself, so they are read as they are (``prompt_format="text"``)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from service.library.detector import Detector, load
from service.library.engine import Engine
from service.library.training import train

FACTUAL = {
    "correct": 1,
    "hallucination": 0,
}  # the benchmark's verdict -> label; any other sample is left out


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Sample(Protocol):
    """What is read of the benchmark's ``SampleAccessor``."""

    sample_id: str
    metadata: Mapping[str, Any]

    def get_prompt_text(self) -> str:
        """Return the prompt as the model was given it."""


class PromptDetector:
    """The risk of a prompt; one training, and so one bundle, for each ``fit``.

    Args:
        name: Of the detector in the benchmark's tables.
        model: The backbone, as of ``hallutracer.load``: a folder, a GGUF file or a hub name.
        folder: Where bundles and run folders are kept: the same training samples are read once.
        engine: How the model is loaded.
        options: Of ``hallutracer.train``, such as ``c``, ``seeds`` or ``prompt_format``."""

    requires_stochastic = False  # no answers are sampled
    requires_qa_features = False  # no answer is read
    required_qa_method = None

    def __init__(
        self,
        name: str = "hallutracer",
        *,
        model: str | Path,
        folder: str | Path = "hallutracer",
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        self.name, self.config = name, options
        self._model = model
        self._folder = Path(folder)
        self._engine = engine
        self._detector: Detector | None = None

    def fit(self, train_accessors: Sequence[Sample]) -> Self:
        """Train on the samples that were judged correct or a hallucination; equal prompts are one
        group.

        Raises what ``hallutracer.train`` raises, as where a class has too few prompts."""
        rows = []
        for sample in train_accessors:
            prompt, verdict = sample.get_prompt_text(), sample.metadata.get("eval_category")
            if verdict in FACTUAL:
                rows.append({"prompt": prompt, "label": FACTUAL[verdict], "group": _sha256(prompt)})
        run = self._folder / _sha256(repr((rows, sorted(self.config.items()))))[:16]
        chosen: dict[str, Any] = {"forms": "none", "prompt_format": "text", "evaluate": False}
        common: Any = {"store": self._folder / "store", "engine": self._engine}
        trained = train(
            rows, "openhaldet", self._model, run_dir=run, **common, **chosen | self.config
        )
        self.close()
        self._detector = load(self._model, trained.reference, **common)
        return self

    def predict_score(self, accessor: Sample) -> float:
        """Return the probability that the answer to the sample's prompt is a hallucination.

        Raises RuntimeError before ``fit``."""
        if self._detector is None:
            raise RuntimeError("call fit before predict_score")
        return float(self._detector.score(accessor.get_prompt_text())[0].risk)

    def close(self) -> None:
        """Free the model."""
        if self._detector is not None:
            self._detector.close()
            self._detector = None
