"""One fitted set, and one set of method inputs, for all tests: fitting takes seconds."""

from __future__ import annotations

import pytest

from hallutracer_research.evaluation.methods.base import MethodInputs
from hallutracer_research.evaluation.results import SetResult
from tests.research.made import fitted_result, method_inputs


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> SetResult:
    return fitted_result(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> MethodInputs:
    return method_inputs(tmp_path_factory.mktemp("rows"), strength=1.2)
