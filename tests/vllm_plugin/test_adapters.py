"""Which bundle reads which adapter, on scripted engines: none ever judges what another one was
trained on."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI, HTTPException
from prometheus_client import REGISTRY

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

from vllm import SamplingParams  # noqa: E402
from vllm.entrypoints.openai.models.serving import OpenAIServingModels  # noqa: E402
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.utils.counter import AtomicCounter  # noqa: E402

from service.judging.conversation import ConversationReader  # noqa: E402
from service.serving.adapters import Adapters  # noqa: E402
from service.vllm_plugin import generation, plugin  # noqa: E402
from service.vllm_plugin.engine_gate import Gate  # noqa: E402
from service.vllm_plugin.note import CURRENT, Note  # noqa: E402
from service.vllm_plugin.options import PluginOptions  # noqa: E402
from service.vllm_plugin.plugin import HalluTracerPlugin  # noqa: E402

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
        self.engine.slots = (
            SimpleNamespace()
        )  # of ``VllmEngine``: it tells the plugin when the weights have changed
        self.bundles = {
            "b": matching_bundle(base, folder, "base"),
            "a": matching_bundle(tuned, folder, "adapted", 1),
        }
        self.adapters = Adapters(self.bundles, str)
        self.base = Scorer(self.engine, self.bundles["b"])

    def request(
        self, number: int = 1, name: str = "terse", folder: Path | None = None, **more: Any
    ) -> Any:
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
    loaded = made.adapters.load(made.engine, made.request())
    assert [*loaded] == ["a"]
    assert made.adapters.waiting == {}
    own = made.adapters.scorer(made.request())
    assert own is loaded["a"]
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
    with pytest.raises(
        EngineError, match="was replaced in place"
    ):  # requests that came before it, too
        made.adapters.scorer(made.request())
    assert made.adapters.scorer(made.request(2))
    write(made.terse, b"three")
    with pytest.raises(EngineError, match="files of the adapter 'terse' have changed"):
        made.adapters.scorer(made.request(3))  # vLLM's prefix cache knows the name and path alone


def test_the_engines_gate_takes_the_numbers_of_the_adapters_own_probes(made: Made) -> None:
    [own] = made.adapters.load(made.engine, made.request()).values()
    read = [
        made.engine.score([PROMPT], scorer.probes)[0].trajectories for scorer in (made.base, own)
    ]
    lease: Any = SimpleNamespace(
        result=lambda wire, tokens: PrefillResult((*read[0], *read[1]), None, tokens)
    )
    made.base.conversations = ConversationReader(made.base.engine.render_chat, str)
    places = {made.base: 0, own: len(made.base.probes)}
    gate = Gate(made.base, GATE.at(0.0), lease, places, made.adapters, frozenset())

    def reason(adapter: Any) -> str:
        parameters = SimpleNamespace(prompt_logprob_token_ids=None, prompt_logprobs=None)
        request = SimpleNamespace(
            request_id="1",
            prompt_token_ids=PROMPT,
            prompt_embeds=None,
            resumable=False,
            sampling_params=parameters,
            lora_request=adapter,
        )
        return str(gate.reason(request, SimpleNamespace(numpy=lambda: None)))

    risks = [
        scorer.judge(PrefillResult(tuple(trajectories), None, 3), GATE).risk
        for scorer, trajectories in zip((made.base, own), read, strict=True)
    ]
    assert abs(risks[0] - risks[1]) > 0.002
    assert reason(None) == f"hallutracer: withheld, risk {risks[0]:.3f}"
    assert reason(made.request()) == f"hallutracer: withheld, risk {risks[1]:.3f}"
    assert "no bundle here reads the adapter 'other'" in reason(
        made.request(2, "other", made.other)
    )


def test_the_catalogue_serves_each_model_its_own_bundles(made: Made) -> None:
    [own] = made.adapters.load(made.engine, made.request()).values()
    catalogue = Catalogue(
        settings=ServiceSettings(model_names=("alias",)),
        metrics=Metrics(),
        policies=Policies(built_in()),
    )
    catalogue.serve(catalogue.checked({"b": made.base, "a": own}, {}))
    for model, bundle, wanted in (
        (None, None, made.base),
        ("base", None, made.base),
        ("alias", None, made.base),
        ("terse", None, own),
        ("terse", "adapted", own),
        (None, "adapted", own),
        ("base", "base", made.base),
    ):
        assert catalogue.scorer(bundle, model) is wanted
    for model, bundle in (("base", "adapted"), ("terse", "base"), ("alias", "adapted")):
        with pytest.raises(NotFound, match="does not read the model"):
            catalogue.scorer(bundle, model)
    for unknown in ("other", "*"):
        with pytest.raises(NotFound, match="'base', 'alias'"):
            catalogue.scorer(None, unknown)
    catalogue.settings = ServiceSettings(
        model_names=("*",)
    )  # any name is the base model's, but an adapter's
    assert [catalogue.scorer(None, model) for model in ("other", "terse")] == [made.base, own]


class Client:
    """vLLM's engine, of which the plugin takes ``generate`` and ``add_lora``."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def generate(
        self, prompt: Any, parameters: Any, name: str, *, lora_request: Any = None
    ) -> Any:
        yield "an answer that nobody has judged"

    async def add_lora(self, request: Any) -> bool:
        self.loaded.append(request.lora_name)
        return True


def test_the_plugin_reads_the_adapters_that_vllm_starts_with_and_loads(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which scorer a request gets, and that it gets none where there is none."""
    policies = Policies(built_in())
    settings = ServiceSettings(policy="gate", callers_may=("policy", "bundle"))
    store: Any = SimpleNamespace(aliases=lambda name: {})
    options = PluginOptions(store, made.bundles, policies, settings)
    monkeypatch.setattr(plugin, "read_options", lambda: options)
    monkeypatch.setattr(plugin.VllmEngine, "around", lambda *_: made.engine)
    monkeypatch.setattr(generation, "_reported", lambda note, outputs: outputs)

    def named(service: Any, engine: Any, scorer: Any, *_: Any, **_options: Any) -> Any:
        return SimpleNamespace(outputs=lambda start: scorer.bundle.manifest.name)

    monkeypatch.setattr(generation, "TurnDriver", named)
    client = Client()
    served: Any = object.__new__(
        OpenAIServingModels
    )  # vLLM's own, whose route asks it for adapters
    served.engine_client = client
    served.lora_requests = {}
    served.registry = SimpleNamespace(is_base_model=lambda _: False)
    served.lora_resolver_lock, served.lora_id_counter = defaultdict(asyncio.Lock), AtomicCounter(10)

    def asked(name: str, folder: Path, **more: Any) -> LoadLoRAAdapterRequest:
        return LoadLoRAAdapterRequest(lora_name=name, lora_path=str(folder), **more)

    def ask(adapter: Any, **xargs: Any) -> tuple[Any, str | None]:
        note = Note()
        token = CURRENT.set(note)
        try:
            return client.generate(
                {}, SamplingParams(extra_args=xargs), "1", lora_request=adapter
            ), note.unread
        finally:
            CURRENT.reset(token)

    async def scenario() -> None:
        guard = HalluTracerPlugin()
        guard.attach_router(FastAPI())
        served.lora_requests["terse"] = made.request()
        await guard.init_state(client, SimpleNamespace(openai_serving_models=served), Namespace())
        with pytest.raises(HTTPException):  # it is loading
            ask(made.request())
        assert guard._loading is not None
        await guard._loading
        other, later = made.request(2, "other", made.other), made.request(3, "later")
        assert ask(None) == ("base", None)
        assert ask(made.request()) == ("adapted", None)
        with pytest.raises(VLLMValidationError, match="no bundle here reads the adapter 'other'"):
            ask(other)
        answers, unread = ask(other, hallutracer_policy="observe")
        assert [answer async for answer in answers] == ["an answer that nobody has judged"]
        assert "no bundle here reads the adapter 'other'" in str(unread)
        for adapter, bundle in ((None, "adapted"), (made.request(), "base")):
            with pytest.raises(VLLMValidationError, match="does not read the model"):
                ask(adapter, hallutracer_bundle=bundle)
        assert await client.add_lora(later)
        assert await client.add_lora(other)
        assert client.loaded == ["later", "other"]
        assert ask(later) == ("adapted", None)
        with pytest.raises(HTTPException, match="400: a bundle reads the adapter 'terse'"):
            await served.load_lora_adapter(asked("terse", made.other, load_inplace=True))
        again = await served.load_lora_adapter(asked("terse", made.other))
        assert (again.error.code, client.loaded) == (400, ["later", "other"])
        with pytest.raises(EngineError, match="a bundle reads the adapter 'later'"):
            await client.add_lora(made.request(3, "later", made.other, load_inplace=True))
        assert ask(later) == ("adapted", None)
        assert "Success" in await served.load_lora_adapter(
            asked("new", made.other, load_inplace=True)
        )
        client.loaded.remove("new")
        await client.add_lora(
            made.request(2, "other", made.terse, load_inplace=True)
        )  # which none has read
        assert client.loaded == ["later", "other", "other"]
        for replaced in (other, made.request(2, "other", made.terse, load_inplace=True)):
            with pytest.raises(VLLMValidationError, match="was replaced in place"):
                ask(replaced)
        REGISTRY.unregister(guard.service.metrics.collector)

    asyncio.run(scenario())


def test_an_adapter_that_vllm_loads_while_it_runs_is_read_from_then_on(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = PluginOptions(
        cast(Any, SimpleNamespace(aliases=lambda name: {})),
        made.bundles,
        Policies(built_in()),
        ServiceSettings(policy="gate"),
    )
    monkeypatch.setattr(plugin, "read_options", lambda: options)
    monkeypatch.setattr(plugin.VllmEngine, "around", lambda *_: made.engine)

    async def scenario() -> None:
        guard, client = HalluTracerPlugin(), Client()
        guard.attach_router(FastAPI())
        state = SimpleNamespace(
            openai_serving_models=SimpleNamespace(lora_requests={}, load_lora_adapter=None)
        )
        await guard.init_state(client, state, Namespace())
        assert await client.add_lora(made.request())  # waits until the model itself is read
        names = [scorer.bundle.manifest.name for scorer in guard.service.catalogue.scorers]
        assert names == ["base", "adapted"]
        assert guard.service.catalogue.loaded.aliases == {"b": "base:1", "a": "adapted:1"}
        assert set(guard.service.catalogue.monitors) == {"base:1", "adapted:1"}
        REGISTRY.unregister(guard.service.metrics.collector)

    asyncio.run(scenario())
