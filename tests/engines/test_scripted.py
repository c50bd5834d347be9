from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engines.base import BatchEngine, Sampling
from service.errors import EmptyPrompt, EngineError, PromptTooLong, RequestError
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


def test_the_answer_is_yielded_counted_and_freed():
    engine = ScriptedEngine(answer="Zürich")
    continuation = engine.begin([[1, 2, 3]], [])[0]
    assert engine.counters.open_continuations == 1
    assert list(continuation.decode(Sampling())) == ["Z", "", "ü", *"rich"]  # one piece per token
    assert continuation.completion is not None
    assert continuation.completion.finish_reason == "stop"
    assert engine.detokenize(continuation.completion.token_ids) == "Zürich"
    assert engine.counters.open_continuations == 0
    assert engine.generate([[1]], Sampling(max_tokens=2))[0].finish_reason == "length"
    assert engine.generate([[1]], Sampling(stop=("ri",)))[0].text == "Zü"


def test_cancelling_and_closing():
    engine = ScriptedEngine()
    first, second = engine.begin([[1], [2]], [])
    pieces: list[str] = []
    pieces.extend(first.decode(Sampling(), lambda: len(pieces) >= 2))
    assert first.completion is not None
    assert first.completion.finish_reason == "cancelled"
    stream = second.decode(Sampling())
    next(stream)
    second.close()
    assert list(stream) == []
    assert engine.counters.open_continuations == 0
    with pytest.raises(EngineError):
        second.decode(Sampling())


def test_settings():
    engine = ScriptedEngine()
    probe = probes(engine.identity.geometry)
    called: list[str] = []
    engine.before = called.append
    engine.nan_layer = 2
    trajectory = engine.score([[1]], [probe])[0].trajectories[0]
    assert np.isnan(trajectory).tolist() == [False, False, True, False]
    engine.fail = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        engine.begin([[1]], [probe])
    assert called == ["score", "begin"]
    assert engine.counters.prefills == 1
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.score([[1]], [probe])


def test_bad_requests_are_refused_as_by_a_real_engine():
    engine = ScriptedEngine(max_tokens=5, chat=False)
    for prompt, error in (([], EmptyPrompt), ([1] * 6, PromptTooLong), ([999], RequestError)):
        with pytest.raises(error):
            engine.score([prompt], [])
    for refused in (lambda: engine.tokenize("\ud800"), lambda: engine.render_chat([{"role": "user", "content": "x"}])):
        with pytest.raises(RequestError):
            refused()
    assert engine.identity.chat_template is None
