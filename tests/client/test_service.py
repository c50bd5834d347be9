"""Both clients against the real app over a real socket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

import hallutracer_client as hc
from hallutracer_client.stream import BaseAnswer
from tests.client.conftest import BlockingClient, MakeClient
from tests.running import Running, running, service_of_module, until

KEY = "test-key"
ANSWER = "It is so."
OPEN = 1.0  # a threshold that lets everything through
SETTINGS: dict[str, Any] = {
    "api_keys": (KEY,),
    "max_prompts": 4,
    "max_queue": 4,
    "deadline_s": 20.0,
}
LONG = "Ωmega, then a rather long answer: " * 40  # two-byte characters, one byte a token


module_service = service_of_module(**SETTINGS)


@pytest.fixture
def service(module_service: Running) -> Iterator[Running]:
    engine = module_service.engine
    engine.answer = ANSWER
    engine.sleep_s = 0.0
    engine.fail = None
    engine.before = None
    yield module_service
    engine.before = None


@pytest.fixture
def client(make_client: MakeClient, service: Running) -> BlockingClient:
    return make_client(base_url=service.url, api_key=KEY)


def test_a_score(client: BlockingClient, service: Running) -> None:
    result = client.score(prompt="a", include=["trajectory", "running_mean"])
    scorer = service.state.catalogue.scorers[0]
    (report,) = scorer.score([scorer.render(prompt="a")])
    assert result.risk == pytest.approx(report.risk)
    assert result.only.trajectory == pytest.approx(report.trajectory.tolist())
    depths = [result.only.running_mean[-1], result.only.depth_mean]
    assert depths == pytest.approx([report.depth_mean] * 2)
    assert (result.bundle.name, result.bundle.digest) == ("one", scorer.bundle.manifest.digest)
    both = client.score(prompt=["a", "b"], bundle="two:1")
    message = client.score(messages=[{"role": "user", "content": "b"}], bundle="two")
    assert message.risk == pytest.approx(both.data[1].risk)
    assert client.score(input_ids=[[1, 2], [3]]).usage.prompt_tokens == 3


def test_a_stream_and_a_score_say_the_same(client: BlockingClient, service: Running) -> None:
    service.engine.answer = LONG
    at_first: list[BaseAnswer] = []
    answer, pieces = client.stream(
        prompt="a", threshold=OPEN, generate=hc.Generate(max_tokens=300), look=at_first.append
    )
    whole = client.score(prompt="a", threshold=OPEN, generate=hc.Generate(max_tokens=300))
    assert len(pieces) > 10
    assert answer.completion == whole.only.completion
    assert answer.usage == whole.usage
    assert dataclasses.replace(whole.only, completion=None) == answer.first == answer.only
    assert "".join(pieces) == LONG.encode()[:300].decode()


def test_leaving_a_stream_stops_the_decoding(client: BlockingClient, service: Running) -> None:
    service.engine.answer, service.engine.sleep_s = LONG, 0.02
    errors = service.metric("hallutracer_errors_total")
    _, pieces = client.stream(
        prompt="a", threshold=OPEN, generate=hc.Generate(max_tokens=400), take=2
    )
    assert len(pieces) == 2
    service.engine.sleep_s = 0.0
    # 400 tokens at 20 ms were under way: a next request is served because they were given up.
    short = client.score(prompt="b", threshold=OPEN, generate=hc.Generate(max_tokens=2))
    assert short.text == LONG[:1]
    until(lambda: service.metric("hallutracer_errors_total") == errors + 1)  # client_closed_request


def test_refusals_and_keys(
    client: BlockingClient, make_client: MakeClient, service: Running
) -> None:
    for options, kind, status, param in (
        ({"policy": "none such"}, hc.NotFound, 404, "policy"),
        ({"prompt": ["a"] * 5}, hc.RequestRefused, 422, "prompt"),
        ({"deadline_ms": 10**9}, hc.RequestRefused, 422, "deadline_ms"),
    ):
        with pytest.raises(kind) as caught:
            client.score(**{"prompt": "a"} | options)
        assert (caught.value.status, caught.value.param) == (status, param)
    with pytest.raises(hc.RequestRefused, match="one prompt"):
        client.stream(prompt=["a", "b"])
    unknown = make_client(base_url=service.url, api_key="wrong")
    for call in (
        lambda: unknown.score(prompt="a"),
        lambda: unknown.stream(prompt="a"),
        unknown.models,
    ):
        with pytest.raises(hc.Unauthorized):
            call()
    ready = unknown.ready()
    assert (ready.ready, ready.model, ready.bundles) == (True, None, ())


def test_catalogue(client: BlockingClient, service: Running) -> None:
    assert client.models().data[0].id == "scripted"
    listed = client.bundles()
    references = {bundle.reference: bundle.default for bundle in listed.data}
    assert references == {"one:1": True, "two:1": False}
    assert listed.policies[0] == "gate"
    ready = client.ready()
    assert (ready.ready, ready.model, ready.bundles) == (True, "scripted", ("one:1", "two:1"))


def test_a_service_that_is_gone(
    make_client: MakeClient, service: Running, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running(tmp_path_factory.mktemp("gone")) as other:
        client = make_client(base_url=other.url, max_retries=1, timeout=10.0)
        assert client.score(prompt="a").data
        address = other.url
    for call in (client.score, client.stream):
        with pytest.raises(hc.TransportError, match=f"cannot connect to {address}"):
            call(prompt="a")
