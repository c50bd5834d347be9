"""The examples in the public docstrings run, on the demo model."""

from __future__ import annotations

import doctest
import inspect

import pytest

import hallutracer


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    found = []
    for name in hallutracer.__all__:
        thing = getattr(hallutracer, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            found += finder.find(thing, name, module=inspect.getmodule(thing), globs={})
    return found


def test_what_is_public_has_examples() -> None:
    assert {test.name for test in examples() if test.examples} >= {
        "load",
        "Detector.score",
        "train",
        "extract",
        "publish",
        "evaluate",
    }


@pytest.mark.parametrize("test", [test for test in examples() if test.examples], ids=lambda test: test.name)
def test_examples_run(test: doctest.DocTest) -> None:
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
