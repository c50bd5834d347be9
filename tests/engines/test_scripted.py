from __future__ import annotations

from typing import Any, cast

import pytest

from service.engines.base import Sampling
from service.engines.vllm.engine import VllmEngine
from service.errors import EngineError
from tests.scripted_engine import ScriptedEngine


@pytest.mark.parametrize("engine", [ScriptedEngine(), cast(Any, object.__new__(VllmEngine))])
def test_engines_that_cannot_trace_say_so_even_without_prompts(engine: Any) -> None:
    for call in (lambda: engine.sample([], Sampling(), []), lambda: engine.next_token([], [1])):
        with pytest.raises(EngineError, match="transformers engine") as caught:
            call()
        assert caught.value.param == "methods"
