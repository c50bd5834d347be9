"""Requests: body, headers, argument checks."""

from __future__ import annotations

import builtins
import inspect
import json
from typing import Any, cast

import httpx
import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider

from hallutracer_client import AsyncClient, Client, Generate, ScoreOptions
from hallutracer_client.request import request_body
from service.api.request_schema import ScoreRequest
from tests.client.conftest import Handler, MakeClient
from tests.kit import bodies
from tests.kit.tables import cells, lines

GOOD: list[dict[str, Any]] = [
    *map(
        json.loads,
        lines(
            """
            {"prompt": "a"}
            {"messages": [{"role": "user", "content": "é 北京"}], "bundle": "demo@canary"}
            {"prompt": "a", "policy": "block", "deadline_ms": 9, "retrieval_of": "risk-1"}
            {"prompt": "a", "generate": {"max_tokens": 16, "temperature": 0.5, "stop": ["#"]}}
            {"prompt": "a", "generate": {}}
            """
        ),
    ),
    {"prompt": ("a", "b"), "include": ("trajectory", "running_mean"), "threshold": 0.0},
    {"input_ids": np.array([[1, 2], [3, 4]]), "model": "m"},
    {"input_ids": [np.int64(3), 4], "generate": Generate(16, 0.5, 0.9, 7, ("\n",))},
    {"input_ids": [], "generate": Generate()},
]


def test_the_service_takes_what_we_send() -> None:
    for options in GOOD:
        body = request_body(cast(ScoreOptions, options))
        taken = ScoreRequest.model_validate_json(body)
        assert set(json.loads(body)) == set(options)
        assert [name for name in options if getattr(taken, name) is None] == []


def test_a_stream_asks_for_an_answer_and_what_is_not_given_is_not_sent() -> None:
    body = request_body({"prompt": "a"}, stream=True)
    assert json.loads(body) == {"prompt": "a", "generate": {}, "stream": True}
    assert ScoreRequest.model_validate_json(body).stream
    options: ScoreOptions = {"prompt": "a", "threshold": None, "include": (), "generate": None}
    assert json.loads(request_body(options)) == {"prompt": "a"}
    assert Generate(max_tokens=3).body() == {"max_tokens": 3}
    assert set(ScoreOptions.__annotations__) | {"stream"} == set(ScoreRequest.model_fields)


# Options as JSON, the error, and words of it.
WRONG = [
    (json.loads(options), getattr(builtins, error), words)
    for options, error, words in cells(
        r"""
        {} | ValueError | exactly one
        {"prompt": "a", "input_ids": [1]} | ValueError | exactly one
        {"promt": "a"} | TypeError | 'promt'
        {"prompt": "a", "include": "trajectory"} | TypeError | include=
        {"prompt": "a", "generate": {"top": 3}} | TypeError | 'top'; expected one of max_tokens
        {"prompt": "a", "generate": 3} | TypeError | Generate
        {"prompt": "a", "generate": [1]} | TypeError | Generate
        {"prompt": "a", "generate": {"stop": "x"}} | TypeError | stop=
        {"prompt": "a", "threshold": NaN} | ValueError | NaN
        {"prompt": "\ud800"} | ValueError | surrogate
        {"input_ids": [1.5]} | TypeError | integer
        {"input_ids": "abc"} | TypeError | integer
        """
    )
]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [*WRONG, ({"prompt": "a", "generate": Generate(stop="x")}, TypeError, "stop=")],
)
def test_wrong_arguments_fail_before_anything_is_sent(
    make_client: MakeClient, options: Any, error: type[Exception], words: str
) -> None:
    sent: list[httpx.Request] = []
    client = make_client(recording(sent))
    for call in (client.score, client.stream):
        with pytest.raises(error, match=words) as caught:
            call(**options)
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None  # a codec's error carries the whole prompt
    assert sent == []


def test_a_prompt_may_be_given_by_its_place(make_client: MakeClient) -> None:
    sent: list[httpx.Request] = []
    score = make_client(recording(sent)).score
    score("Why?", threshold=0.5)
    score(["a", "b"], generate={"max_tokens": 16})
    assert [json.loads(request.content) for request in sent] == [
        {"prompt": "Why?", "threshold": 0.5},
        {"prompt": ["a", "b"], "generate": {"max_tokens": 16}},
    ]
    for more, error in (({"prompt": "b"}, TypeError), ({"input_ids": [1]}, ValueError)):
        with pytest.raises(error):
            score("a", **more)
    assert len(sent) == 2


def recording(requests: list[httpx.Request]) -> Handler:
    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json=bodies.result())

    return handler


def test_headers_and_paths(make_client: MakeClient) -> None:
    seen: list[httpx.Request] = []
    make_client(recording(seen), base_url="https://host.test/guard/", api_key="k1").score(
        prompt="é"
    )
    make_client(recording(seen)).score(prompt="a")
    assert [str(request.url) for request in seen] == [
        "https://host.test/guard/v1/risk/score",
        "http://guard.test/v1/risk/score",
    ]
    assert seen[0].headers["authorization"] == "Bearer k1"
    assert seen[0].headers["content-type"] == "application/json"
    assert json.loads(seen[0].content) == {"prompt": "é"}
    assert "authorization" not in seen[1].headers


def test_keys_and_addresses_that_are_none_are_refused_unseen(make_client: MakeClient) -> None:
    for key in ("", "a b", "key\n", "schlüssel", "a\rb"):
        with pytest.raises(ValueError, match="api_key") as caught:
            make_client(lambda _: httpx.Response(200), api_key=key)
        assert not key or key not in str(caught.value)
    for address in (
        "",
        *lines(
            """
            127.0.0.1:8765
            ftp://host
            http://
            http://host?x=1
            http://user:pass@host
            http://h:x
            """
        ),
    ):
        with pytest.raises(ValueError, match="base_url") as caught:
            make_client(lambda _: httpx.Response(200), base_url=address)
        assert "pass@" not in str(caught.value)


def test_nothing_is_read_from_the_environment(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://proxy.invalid:1")
    monkeypatch.setenv("HALLUTRACER_API_KEY", "from-the-environment")
    client = make_client().client
    assert client._http._mounts == {}
    assert "authorization" not in client._http.headers


def test_a_program_that_traces_has_its_trace_continued(make_client: MakeClient) -> None:
    seen: list[httpx.Request] = []
    client = make_client(recording(seen))
    with TracerProvider().get_tracer("test").start_as_current_span("mine") as span:
        client.score(prompt="a")
    client.score(prompt="a")
    context = span.get_span_context()
    expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-0"
    assert seen[0].headers["traceparent"].startswith(expected)
    assert "traceparent" not in seen[1].headers


def test_both_clients_have_the_same_methods() -> None:
    def public(kind: type) -> dict[str, list[str]]:
        named = {
            name: value
            for name, value in vars(kind).items()
            if name[0] != "_" or name == "__init__"
        }
        return {name: list(inspect.signature(value).parameters) for name, value in named.items()}

    renamed = {
        ("close" if name == "aclose" else name): value
        for name, value in public(AsyncClient).items()
    }
    assert public(Client) == renamed
