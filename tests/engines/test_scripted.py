from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from service.engines.base import Sampling
from service.engines.vllm.engine import VllmEngine
from service.errors import EmptyPrompt, EngineError, PromptTooLong, RequestError
from service.readout import Geometry, Probes, Site
from service.risk import truth_logits
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


def test_score_is_the_formula_on_its_own_extraction_in_any_batch_and_engine() -> None:
    engine = ScriptedEngine()
    geometry = engine.identity.geometry
    prompts = [
        engine.render_chat([{"role": "user", "content": "hm?"}]),
        engine.tokenize("a"),
        engine.tokenize("b"),
    ]
    activations = engine.extract(prompts, list(Site)).activations
    for site in Site:
        probe = probes(geometry, site)
        for prompt, rows, result in zip(
            prompts, activations[site], engine.score(prompts, [probe]), strict=True
        ):
            expected = truth_logits(
                geometry.select(rows, probe.head, site), probe.direction, probe.bias
            )
            np.testing.assert_allclose(result.trajectories[0], expected, rtol=1e-12)
            alone = ScriptedEngine().score([prompt], [probe])[0]
            np.testing.assert_array_equal(result.trajectories[0], alone.trajectories[0])
        assert not np.array_equal(*activations[site][1:])


def test_bad_requests_are_refused_as_by_a_real_engine() -> None:
    engine = ScriptedEngine(max_tokens=5, chat=False)
    for prompt, error in (([], EmptyPrompt), ([1] * 6, PromptTooLong), ([999], RequestError)):
        with pytest.raises(error):
            engine.score([prompt], [])
    for refused in (
        lambda: engine.tokenize("\ud800"),
        lambda: engine.render_chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(RequestError):
            refused()


@pytest.mark.parametrize("engine", [ScriptedEngine(), cast(Any, object.__new__(VllmEngine))])
def test_engines_that_cannot_trace_say_so_even_without_prompts(engine: Any) -> None:
    for call in (lambda: engine.sample([], Sampling(), []), lambda: engine.next_token([], [1])):
        with pytest.raises(EngineError, match="transformers engine") as caught:
            call()
        assert caught.value.param == "methods"
