from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engines.base import BatchEngine
from service.errors import EmptyPrompt, PromptTooLong, RequestError
from service.readout import Geometry, Probes, Site
from service.risk import truth_logits
from tests.scripted_engine import ScriptedEngine


def probes(geometry: Geometry, site: Site = Site.ATTENTION_HEAD) -> Probes:
    m, d = geometry.num_layers, geometry.dim(site)
    direction = np.full((m, d), d**-0.5, np.float32)
    head = np.arange(m) % geometry.heads(site)
    return Probes(site, head, direction, np.zeros(m, np.float32), np.ones(m, np.float32))


def test_it_imports_no_torch():
    code = "import sys, tests.scripted_engine; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4))
def test_equal_prompts_have_equal_activations_in_any_batch_and_engine(texts: list[str]):
    engine: BatchEngine = ScriptedEngine()
    probe = probes(engine.identity.geometry)
    prompts = [engine.tokenize(text) for text in texts]
    together = engine.score(prompts, [probe], first_token=True)
    for prompt, result in zip(prompts, together, strict=True):
        alone = ScriptedEngine().score([prompt], [probe], first_token=True)[0]
        np.testing.assert_array_equal(result.trajectories[0], alone.trajectories[0])
        assert result.first_token == alone.first_token
        assert result.first_token is not None
        assert result.first_token.log_max_prob <= 0 <= result.first_token.entropy


def test_score_is_the_formula_on_its_own_extraction():
    engine = ScriptedEngine()
    geometry = engine.identity.geometry
    prompt = engine.render_chat([{"role": "user", "content": "hm?"}])
    activations = engine.extract([prompt], list(Site)).activations
    for site in Site:
        probe = probes(geometry, site)
        expected = truth_logits(geometry.select(activations[site][0], probe.head, site), probe.direction, probe.bias)
        np.testing.assert_allclose(engine.score([prompt], [probe])[0].trajectories[0], expected, rtol=1e-12)
    assert engine.tokenize("a") != engine.tokenize("b")
    assert not np.array_equal(
        engine.activations([1], Site.ATTENTION_HEAD), engine.activations([2], Site.ATTENTION_HEAD)
    )


def test_settings():
    engine = ScriptedEngine()
    probe = probes(engine.identity.geometry)
    called: list[str] = []
    engine.before, engine.nan_layer = called.append, 2
    assert np.isnan(engine.score([[1]], [probe])[0].trajectories[0]).tolist() == [False, False, True, False]
    engine.fail = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        engine.begin([[1]], [probe])
    assert (called, engine.counters.prefills) == (["score", "begin"], 1)


def test_bad_requests_are_refused_as_by_a_real_engine():
    engine = ScriptedEngine(max_tokens=5, chat=False)
    for prompt, error in (([], EmptyPrompt), ([1] * 6, PromptTooLong), ([999], RequestError)):
        with pytest.raises(error):
            engine.score([prompt], [])
    for refused in (lambda: engine.tokenize("\ud800"), lambda: engine.render_chat([{"role": "user", "content": "x"}])):
        with pytest.raises(RequestError):
            refused()
    assert engine.identity.chat_template is None
