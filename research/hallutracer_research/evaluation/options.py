"""Every choice of an evaluation, documented where it is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hallutracer_research.evaluation.cost import CLASSES, cost_class
from hallutracer_research.evaluation.methods import METHODS
from service.data.options import BATCH_ROWS, JudgeName
from service.errors import TrainingError
from service.fitting import C_GRID

OURS, RESIDUAL, SHUFFLED = "hallutracer", "residual-depth-mean", "shuffled-labels"
TRAJECTORY = "trajectory-ridge"
NAMES = (OURS, RESIDUAL, TRAJECTORY, *METHODS, SHUFFLED)
SAMPLED = ("sep", *(name for name in NAMES if cost_class(name) == "D"))
OF_OWN_ANSWERS = (*SAMPLED, "perplexity", "p-true", "mind")
"""Methods that read the model's own answers, which a set with labels of its own is not about."""
# Answers take minutes where a prefill takes seconds.
DEFAULT_METHODS = tuple(name for name in NAMES if cost_class(name) not in ("C", "D") and name not in SAMPLED)
Suite = Literal["main", "paper"]


@dataclass(frozen=True)
class Source:
    """One set to evaluate on: a JSONL file of rows, a public set's folder by its name in the registry, or made rows."""

    name: str  # unique in a run; also the folder's name
    path: Path | None  # None: ``rows`` makes them
    known: str | None = None  # the registry's name; None: JSONL rows
    rows: Callable[[], list[dict[str, Any]]] | None = None
    title: str = ""  # of made rows
    limit: int | None = None  # about this many rows, in whole groups; None: all


@dataclass(frozen=True)
class EvaluateOptions:
    """One evaluation.  Raises TrainingError for an invalid value, before anything is loaded."""

    sources: tuple[Source, ...]
    out: Path
    suite: Suite = "main"  # main: the main table; paper: every table and figure
    methods: tuple[str, ...] = DEFAULT_METHODS
    seeds: int = 3
    folds: int = 5
    inner_folds: int = 3
    c: float | None = None  # None: chosen inside each training side
    c_grid: tuple[float, ...] = C_GRID
    judge: JudgeName | None = None  # None: the set's own, or "contains"
    max_new_tokens: int | None = None  # length of a judged answer; None: the set's own, or 48
    samples: int = 10  # answers to each prompt, for methods that sample
    prompt_format: Literal["auto", "chat", "text"] = "auto"
    per_subset: bool = True  # also the main table inside each sub-dataset, and its mean
    skip_long: bool = False  # leave out, and count, rows that the model's context cannot hold
    batch_rows: int = BATCH_ROWS
    jobs: int = 0  # processes for the fits; 0: all cores

    def __post_init__(self) -> None:
        """Check names and ranges; types are checked by the type checker."""
        for name in self.methods:
            if name not in NAMES:
                raise TrainingError(f"no method {name!r}; there are {', '.join(NAMES)}", param="methods")
        if OURS not in self.methods:
            raise TrainingError(f"{OURS} must be among the methods: the others are compared with it", param="methods")
        if len({source.name for source in self.sources}) != len(self.sources) or not self.sources:
            raise TrainingError("name each data set once, and at least one", param="data")
        for field, least in (
            ("seeds", 1),
            ("folds", 2),
            ("inner_folds", 2),
            ("batch_rows", 1),
            ("jobs", 0),
            ("samples", 2),
        ):
            if getattr(self, field) < least:
                raise TrainingError(f"{field} must be at least {least}, not {getattr(self, field)}", param=field)
        if self.judge == "openai":
            raise TrainingError(
                "the openai judge needs an endpoint, which cannot be set here: give labels or another judge",
                param="judge",
            )
        if self.c is not None and not self.c > 0:
            raise TrainingError(f"c must be positive, not {self.c}", param="c")


def method_names(text: str | None) -> tuple[str, ...]:
    """The methods that a comma-separated list names, each once: names, classes of cost, "default", "all".

    Unknown names are returned as they are; ``EvaluateOptions`` refuses them.
    """
    groups = {cls: tuple(name for name in NAMES if cost_class(name) == cls) for cls in CLASSES}
    known: dict[str, tuple[str, ...]] = {str(cls): names for cls, names in groups.items()}
    known |= {"default": DEFAULT_METHODS, "all": NAMES}
    words = [word.strip() for word in (text or "default").split(",")]
    chosen = dict.fromkeys(name for word in words if word for name in known.get(word, (word,)))
    return tuple(sorted(chosen, key=lambda name: NAMES.index(name) if name in NAMES else len(NAMES)))
