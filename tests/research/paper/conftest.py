"""One fitted set for all tests of the tables: fitting it takes seconds."""

from __future__ import annotations

import pytest

from hallutracer_research.evaluation.results import SetResult
from tests.research.evaluation.made_result import made_result


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> SetResult:
    return made_result(tmp_path_factory.mktemp("made"))
