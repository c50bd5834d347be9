"""Options: what a score costs, on a model of known size, and a class for every method."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from hallutracer_research.evaluation.options import (
    CLASSES,
    DEFAULT_METHODS,
    NAMES,
    Weights,
    cost,
    cost_class,
    count_weights,
    method_names,
)

LENGTHS: Any = {"prompt": 20.0, "answer": 8, "samples": 3, "asked": 45.0}


def test_every_method_has_a_class() -> None:
    by_class = {cls: {name for name in NAMES if cost_class(name) == cls} for cls in CLASSES}
    assert by_class["none"] == {"prompt-length", "text-ngrams", "kind-prior"}
    assert by_class["B"] == {"first-token-max-prob", "first-token-entropy"}
    assert by_class["C"] == {"halluguard", "perplexity", "p-true", "mind"}
    assert by_class["D"] == {"semantic-entropy", "semantic-entropy-discrete", "eigenscore"}
    assert len(by_class["A"]) == len(NAMES) - 12


def test_methods_by_name_and_by_class() -> None:
    assert method_names(None) == method_names("default") == DEFAULT_METHODS
    assert not set(DEFAULT_METHODS) & {"halluguard", "sep", "perplexity", "p-true", "mind", "eigenscore"}
    assert method_names("all") == NAMES
    assert method_names(" eigenscore, hallutracer ,eigenscore") == ("hallutracer", "eigenscore")
    assert method_names("hallutracer,D,B") == (
        "hallutracer", "semantic-entropy", "semantic-entropy-discrete", "eigenscore", "first-token-max-prob",
        "first-token-entropy")  # fmt: skip
    assert set(method_names("A,B,C,D,none")) == set(NAMES)
    assert method_names("hallutracer,magic") == ("hallutracer", "magic")


def test_costs_are_multiply_adds_over_those_of_the_prefill() -> None:
    weights = Weights(blocks=1000, head=300)
    prefill, head, token = 20 * 1000, 300, 1300
    assert cost("p-ik", weights, **LENGTHS).prefills == 1.0
    assert cost("sep", weights, **LENGTHS).prefills == 1.0
    assert cost("text-ngrams", weights, **LENGTHS).prefills == 0.0
    assert cost("first-token-entropy", weights, **LENGTHS).prefills == pytest.approx((prefill + head) / prefill)
    for name in ("halluguard", "perplexity", "mind"):
        assert cost(name, weights, **LENGTHS).prefills == pytest.approx((prefill + 8 * token) / prefill)
    asked = prefill + 8 * token + 45 * 1000 + head
    assert cost("p-true", weights, **LENGTHS).prefills == pytest.approx(asked / prefill)
    for name in ("semantic-entropy", "eigenscore"):
        assert cost(name, weights, **LENGTHS).prefills == pytest.approx((prefill + 3 * 8 * token) / prefill)


def test_weights_are_those_of_the_blocks_and_of_the_head() -> None:
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]
    head = nn.Linear(4, 50, bias=False)
    engine = cast(Any, SimpleNamespace(torch_model=SimpleNamespace(blocks=blocks, head=head)))
    assert count_weights(engine) == Weights(blocks=36, head=200)
    assert count_weights(cast(Any, SimpleNamespace(torch_model=None))) is None


def test_without_weights_only_the_classes_that_need_them_are_unknown() -> None:
    found = {name: cost(name, None, **LENGTHS).prefills for name in ("iti", "kind-prior", "first-token-entropy")}
    assert found == {"iti": 1.0, "kind-prior": 0.0, "first-token-entropy": None}
