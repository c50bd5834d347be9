"""HalluTracer from Python: the risk that an LLM's answer is a hallucination, before its first
answer token.

    import hallutracer as ht

    detector = ht.load("demo")
    detector.score(["What is the capital of Italy?", "What is the capital of Palau?"]).plot()

Importing it loads neither torch nor vLLM.  For a service that runs elsewhere there is a client of
its own (docs/python.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import hallutracer_start

hallutracer_start.check_import()

from service import __version__  # noqa: E402

if TYPE_CHECKING:
    from hallutracer_research.evaluating import Evaluated, MethodFigures, evaluate
    from probes_store.errors import BundleError
    from service.errors import HalluTracerError
    from service.fitting.estimator import DepthMeanProbe
    from service.library.detector import Detector, Risk, Risks, load
    from service.library.engine import Engine
    from service.library.training import SignalFigures, Trained, extract, publish, train

_HOMES = {
    "BundleError": "probes_store.errors",
    "DepthMeanProbe": "service.fitting.estimator",
    "Detector": "service.library.detector",
    "Engine": "service.library.engine",
    "Evaluated": "hallutracer_research.evaluating",
    "HalluTracerError": "service.errors",
    "MethodFigures": "hallutracer_research.evaluating",
    "Risk": "service.library.detector",
    "Risks": "service.library.detector",
    "SignalFigures": "service.library.training",
    "Trained": "service.library.training",
    "evaluate": "hallutracer_research.evaluating",
    "extract": "service.library.training",
    "load": "service.library.detector",
    "publish": "service.library.training",
    "train": "service.library.training",
}

__all__ = [
    "BundleError",
    "DepthMeanProbe",
    "Detector",
    "Engine",
    "Evaluated",
    "HalluTracerError",
    "MethodFigures",
    "Risk",
    "Risks",
    "SignalFigures",
    "Trained",
    "__version__",
    "evaluate",
    "extract",
    "load",
    "publish",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"hallutracer has no {name!r}; it has {', '.join(__all__)}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "hallutracer_research":
            raise
        raise ImportError(
            f"{name} comes with hallutracer-research: pip install ./research"
        ) from None


def __dir__() -> list[str]:
    return sorted(__all__)
