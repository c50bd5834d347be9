from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from service.engines.base import Sampling
from service.engines.vllm.engine import VllmEngine
from service.errors import EngineError
from service.readout import Geometry, Probes, Site
from tests.scripted_engine import ScriptedEngine


def probes(geometry: Geometry, site: Site = Site.ATTENTION_HEAD) -> Probes:
    m, d = geometry.num_layers, geometry.dim(site)
    head = np.arange(m) % geometry.heads(site)
    return Probes(
        site,
        head,
        np.full((m, d), d**-0.5, np.float32),
        np.zeros(m, np.float32),
        np.ones(m, np.float32),
    )


@pytest.mark.parametrize("engine", [ScriptedEngine(), cast(Any, object.__new__(VllmEngine))])
def test_engines_that_cannot_trace_say_so_even_without_prompts(engine: Any) -> None:
    for call in (lambda: engine.sample([], Sampling(), []), lambda: engine.next_token([], [1])):
        with pytest.raises(EngineError, match="transformers engine") as caught:
            call()
        assert caught.value.param == "methods"
