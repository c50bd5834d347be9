"""Every choice of an evaluation, documented where it is declared; and what a method's score costs.

Costs are multiply-adds with weights, in prefills of the same n prompt tokens (without the
language-model head).  With N the blocks' weights, H the head's, T the answer's tokens:

    none 0;  A 1;  B 1 + H / (n N);  C 1 + T (N + H) / (n N);  D 1 + K T (N + H) / (n N), from one
    prefill

A scaffold of s tokens is s / n more.  P(True) is C and a second prompt of q tokens: (q N + H) / (n
N) more.  Of the first token of content T is the tokens decoded up to it.  Another model's states
cost its prefill and none of ours, by the models' weights; an encoder of sentences is not counted.
Left out are what a method needs to learn, attention between tokens, embeddings, the probes, and
HalluGuard's gradients.  n, q and decoded tokens are means over the set's rows, T the longest answer
allowed, so that C and D are costs that answers stay below.  All experts of a mixture count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hallutracer_research.evaluation.methods import ASKED, BOTH, METHODS, OTHER, OURS, CostClass
from service.data.options import BATCH_ROWS, JudgeName, Labels
from service.engines.base import LoadedModel
from service.errors import TrainingError
from service.fitting import C_GRID

CLASSES: Mapping[CostClass, str] = {
    "none": "no model",
    "other": "another model",
    "A": "prefill only",
    "B": "one lm_head",
    "C": "one answer, or its beginning",
    "D": "sampled answers",
}
"""Class -> what it takes, cheapest first."""
OF_ANSWERS = ("samples", "answer", "content", "behind-answer")
OF_OWN_ANSWERS = tuple(name for name, method in METHODS.items() if method.reads in OF_ANSWERS)
"""Methods that read the model's own answers, which a set with labels of its own is not about."""
# Answers take minutes where a prefill takes seconds, and behind a scaffold every prompt is read
# again.
DEFAULT_METHODS = tuple(
    name for name, method in METHODS.items() if method.cost != "C" and method.reads == "prompt"
)
MODELS_OF = {"other-model": "other_model", "embedder": "embedder"}
"""What methods read with another model -> the option that names it."""


@dataclass(frozen=True)
class EvaluationSource:
    """One set to evaluate on: a JSONL file of rows, a public set's folder by its name in the
    registry, or made rows."""

    name: str  # unique in a run; also the folder's name
    path: Path | None  # None: ``rows`` makes them
    known: str | None = None  # the registry's name; None: JSONL rows
    rows: Callable[[], list[dict[str, Any]]] | None = None
    title: str = ""  # of made rows
    limit: int | None = None  # about this many rows, in whole groups; None: all


@dataclass(frozen=True)
class EvaluateOptions:
    """One evaluation.  Raises TrainingError for an invalid value, before anything is loaded."""

    sources: tuple[EvaluationSource, ...]
    out: Path
    suite: Literal["main", "paper"] = "main"  # main: the main table; paper: every table and figure
    methods: tuple[str, ...] = DEFAULT_METHODS
    seeds: int = 3
    folds: int = 5
    inner_folds: int = 3
    c: float | None = None  # None: chosen inside each training side
    c_grid: tuple[float, ...] = C_GRID
    labels: Labels | None = None  # None: the set's own; of rows: given where one has a label
    judge: JudgeName | None = None  # None: the set's own, or "contains"
    max_new_tokens: int | None = None  # length of a judged answer; None: the set's own, or 48
    other_model: str | None = None  # a folder, a GGUF file or a hub name
    embedder: Path | None = None  # folder of a sentence encoder
    beside: tuple[Path, ...] = ()  # folders of finished evaluations, to be shown side by side
    samples: int = 10  # answers to each prompt, for methods that sample
    prompt_format: Literal["auto", "chat", "text"] = "auto"
    per_subset: bool = True  # also the main table inside each sub-dataset, and its mean
    skip_long: bool = False  # leave out, and count, rows that the model's context cannot hold
    batch_rows: int = BATCH_ROWS
    jobs: int = 0  # processes for the fits; 0: all cores

    def __post_init__(self) -> None:
        """Check names and ranges; types are checked by the type checker."""
        for param, problem in self._problems():
            raise TrainingError(problem, param=param)

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Yield the options that are at fault, each with what is wrong."""
        for name in self.methods:
            if name not in METHODS:
                yield "methods", f"no method {name!r}; there are {', '.join(METHODS)}"
            elif (needed := MODELS_OF.get(METHODS[name].reads)) and getattr(self, needed) is None:
                yield needed, f"{name} needs another model: name it as {needed}, or leave it out"
        if OURS not in self.methods:
            yield "methods", f"{OURS} must be among the methods: the others are compared with it"
        if len({source.name for source in self.sources}) != len(self.sources) or not self.sources:
            yield "data", "name each data set once, and at least one"
        least = {"seeds": 1, "folds": 2, "inner_folds": 2, "batch_rows": 1, "jobs": 0, "samples": 2}
        for field, number in least.items():
            if (value := getattr(self, field)) < number:
                yield field, f"{field} must be at least {number}, not {value}"
        if self.judge == "openai":
            yield "judge", "the openai judge needs an endpoint: give labels or another judge"
        if self.c is not None and not self.c > 0:
            yield "c", f"c must be positive, not {self.c}"


def method_names(
    text: str | None, *, other_model: object = None, embedder: object = None
) -> tuple[str, ...]:
    """Return the methods that a comma-separated list names, each once: names, classes of cost,
    "default", "all"; and those of a model that is given besides.  Unknown names are returned as
    they are; ``EvaluateOptions`` refuses them."""
    models = {"other-model": other_model, "embedder": embedder}
    available = [
        name for name, method in METHODS.items() if models.get(method.reads, True) is not None
    ]
    groups: dict[str, Sequence[str]] = {"default": DEFAULT_METHODS, "all": available}
    for cls in CLASSES:
        groups[cls] = [name for name in available if METHODS[name].cost == cls]
    words = [word.strip() for word in (text or "default").split(",")] + ["other"]
    chosen = dict.fromkeys(name for word in words if word for name in groups.get(word, (word,)))
    unknown = [name for name in chosen if name not in METHODS]
    return (*(name for name in METHODS if name in chosen), *unknown)


class Cost(NamedTuple):
    """One method on one set."""

    cls: CostClass
    prefills: float | None  # None where the model's weights cannot be counted


class Weights(NamedTuple):
    """How many weights a token passes through."""

    blocks: int
    head: int


class Tokens(NamedTuple):
    """Means over one set's rows, but for ``answer``, the longest one that is allowed."""

    prompt: float
    answer: float
    samples: int = 0  # answers of class D
    p_true: float = 0.0  # of the prompt that asks for P(True)
    scaffold: float = 0.0  # or question, behind the prompt or the answer
    other_model: float = 0.0  # of the prompt as another model reads it


def count_weights(engine: LoadedModel) -> Weights | None:
    """Return the model's weights; None where its modules are in another process."""
    modules = engine.torch_model
    if modules is None:
        return None
    blocks = sum(weight.numel() for block in modules.blocks for weight in block.parameters())
    return Weights(blocks, sum(weight.numel() for weight in modules.head.parameters()))


def cost(
    method: str, weights: Weights | None, tokens: Tokens, other_model: Weights | None = None
) -> Cost:
    """Return the method's cost; ``other_model``: weights of the other model."""
    cls = METHODS[method].cost
    behind = method.startswith("scaffold") or method in (ASKED, BOTH)
    if cls == "none" or (cls == "A" and not behind):
        return Cost(cls, 0.0 if cls == "none" else 1.0)
    if weights is None:
        return Cost(cls, None)
    prompt = tokens.prompt * weights.blocks
    if cls == "other":
        if method != OTHER or other_model is None:
            return Cost(cls, None)
        return Cost(cls, tokens.other_model * other_model.blocks / prompt)
    whole = tokens.answer * (weights.blocks + weights.head)
    more: float = {"A": 0.0, "B": weights.head, "C": whole, "D": tokens.samples * whole}[cls]
    if behind:
        more += tokens.scaffold * weights.blocks
    if method.startswith("p-true"):
        more += tokens.p_true * weights.blocks + weights.head
    return Cost(cls, 1.0 + more / prompt)
