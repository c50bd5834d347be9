"""Which bundle reads which adapter, on scripted engines: none ever judges what another one was trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.engines.adapters import CONFIG, WEIGHTS, digest_of
from service.engines.base import PrefillResult
from service.engines.scheduler import Scheduled
from service.errors import EngineError, NotFound
from service.policies.guard import GATE
from service.policies.policy import Policies, built_in
from service.scoring import Scorer
from service.serving.catalogue import Catalogue
from service.serving.metrics import Metrics
from service.settings import ServiceSettings
from tests.engines.vllm.installed import vllm_or_skip
from tests.matching import matching_bundle
from tests.scripted_engine import ScriptedEngine

vllm_or_skip()

from vllm.lora.request import LoRARequest  # noqa: E402

from service.vllm_plugin.adapters import Adapters  # noqa: E402
from service.vllm_plugin.engine_gate import Gate  # noqa: E402

PROMPT = [256, 65, 66]


def write(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    (folder / WEIGHTS[0]).write_bytes(weights)
    return folder


class Made:
    """An engine with the bundle "base", and the bundle "adapted" of the adapter "terse"."""

    def __init__(self, folder: Path) -> None:
        self.terse, self.other = write(folder / "terse", b"one"), write(folder / "other", b"two")
        base, tuned = ScriptedEngine(model="base"), ScriptedEngine(model="terse")
        tuned.identity = replace(tuned.identity, adapter=digest_of(self.terse))
        self.engine: Any = Scheduled(base)
        adapted = Scheduled(tuned)
        self.engine.adapted = lambda request, digest: adapted
        self.bundles = {"b": matching_bundle(base, folder, "base"), "a": matching_bundle(tuned, folder, "adapted", 1)}
        self.adapters, self.base = Adapters(self.bundles), Scorer(self.engine, self.bundles["b"])

    def request(self, number: int = 1, name: str = "terse", folder: Path | None = None, **more: Any) -> Any:
        return LoRARequest(name, number, str(folder or self.terse), **more)

    def close(self) -> None:
        self.engine.close()
        self.engine.adapted(None, "").close()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    made = Made(tmp_path)
    yield made
    made.close()


def test_an_adapter_is_judged_by_the_bundle_that_names_its_digest(made: Made) -> None:
    with pytest.raises(EngineError, match="no bundle here reads the adapter 'terse'"):
        made.adapters.scorer(made.request())
    assert [*made.adapters.waiting] == ["a"]
    found = made.adapters.load(made.engine, made.request())
    assert [*found] == ["a"]
    assert made.adapters.waiting == {}
    own = made.adapters.scorer(made.request())
    assert own is found["a"]
    assert own is made.adapters.scorer(made.request(7, "another name"))
    made.adapters.check(made.request(), own)
    made.adapters.check(None, made.base)
    for request, scorer in ((None, own), (made.request(), made.base)):
        with pytest.raises(EngineError, match="reads another adapter, or the model without one"):
            made.adapters.check(request, scorer)
    assert made.adapters.load(made.engine, made.request(2, "other", made.other)) == {}
    with pytest.raises(EngineError, match="no bundle here reads the adapter 'other'"):
        made.adapters.scorer(made.request(2, "other", made.other))


def test_weights_that_change_under_a_name_are_not_read(made: Made) -> None:
    made.adapters.load(made.engine, made.request())
    with pytest.raises(EngineError, match="was replaced in place"):
        made.adapters.scorer(made.request(load_inplace=True))
    with pytest.raises(EngineError, match="was replaced in place"):  # requests that came before it, too
        made.adapters.scorer(made.request())
    assert made.adapters.scorer(made.request(2))
    write(made.terse, b"three")
    with pytest.raises(EngineError, match="files of the adapter 'terse' have changed"):
        made.adapters.scorer(made.request(3))  # vLLM's prefix cache knows the name and path alone


def test_the_engines_gate_takes_the_numbers_of_the_adapters_own_probes(made: Made) -> None:
    [own] = made.adapters.load(made.engine, made.request()).values()
    read = [made.engine.score([PROMPT], scorer.probes)[0].trajectories for scorer in (made.base, own)]
    lease: Any = SimpleNamespace(result=lambda wire, tokens: PrefillResult((*read[0], *read[1]), None, tokens))
    gate = Gate(made.base, GATE.at(0.0), lease, {made.base: 0, own: len(made.base.probes)}, made.adapters)

    def reason(adapter: Any) -> str:
        parameters = SimpleNamespace(prompt_logprob_token_ids=None)
        request = SimpleNamespace(request_id="1", prompt_token_ids=PROMPT, prompt_embeds=None, resumable=False,
                                  sampling_params=parameters, lora_request=adapter)  # fmt: skip
        return str(gate.reason(request, SimpleNamespace(numpy=lambda: None)))

    risks = [scorer.judge(PrefillResult(tuple(one), None, 3), GATE).risk
             for scorer, one in zip((made.base, own), read, strict=True)]  # fmt: skip
    assert abs(risks[0] - risks[1]) > 0.002
    assert reason(None) == f"hallutracer: withheld, risk {risks[0]:.3f}"
    assert reason(made.request()) == f"hallutracer: withheld, risk {risks[1]:.3f}"
    assert "no bundle here reads the adapter 'other'" in reason(made.request(2, "other", made.other))


def test_the_catalogue_serves_each_model_its_own_bundles(made: Made) -> None:
    [own] = made.adapters.load(made.engine, made.request()).values()
    catalogue = Catalogue(settings=ServiceSettings(model_names=("alias",)), metrics=Metrics(),
                          policies=Policies(built_in()))  # fmt: skip
    catalogue.serve(catalogue.checked({"b": made.base, "a": own}, {}))
    for model, bundle, wanted in (
        (None, None, made.base), ("base", None, made.base), ("alias", None, made.base), ("*", None, made.base),
        ("terse", None, own), ("terse", "adapted", own), (None, "adapted", own), ("base", "base", made.base),
    ):  # fmt: skip
        assert catalogue.scorer(bundle, model) is wanted
    for model, bundle in (("base", "adapted"), ("terse", "base"), ("alias", "adapted")):
        with pytest.raises(NotFound, match="does not read the model"):
            catalogue.scorer(bundle, model)
    with pytest.raises(NotFound, match="'base', 'alias'"):
        catalogue.scorer(None, "other")
