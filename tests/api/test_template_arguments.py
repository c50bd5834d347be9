"""Arguments of the chat template: a bundle is served with those of its training, and no request
changes a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from probes_store.errors import WrongChatTemplate
from service.api.app import create_app
from service.engines.base import EngineOptions
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.scoring import Scorer
from service.serving.service import Service
from service.settings import ServiceSettings
from tests.engines import tiny
from tests.matching import matching_bundle
from tests.running import until

SWITCH = (
    "{% if reasoning_effort is defined %}{{ reasoning_effort }} {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}>"
    "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
)
FIXED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}>"
TRAINED = {"switch": None, "switched off": {"enable_thinking": False}, "no switch": None}
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", params=TRAINED)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    tokenizer = tiny.tokenizer(template=FIXED if kind == "no switch" else SWITCH)
    options = EngineOptions(model="tiny", template_arguments=TRAINED[kind])
    engine = TransformersEngine(tiny.model("llama"), tokenizer, options=options)
    served, bundle = Scheduled(engine), matching_bundle(engine, tmp_path_factory.mktemp("store"))
    state = Service(lambda: {"one": Scorer(served, bundle)}, settings=ServiceSettings())
    with TestClient(create_app(state)) as client:
        until(lambda: state.lifecycle.is_ready)
        yield client
    served.close()


def bodies(
    chat: Mapping[str, Any], responses: Mapping[str, Any], messages: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "/v1/chat/completions": {"model": "tiny", "max_tokens": 2, "messages": USER, **chat},
        "/v1/responses": {"model": "tiny", "max_output_tokens": 2, "input": USER, **responses},
        "/v1/messages": {"model": "tiny", "max_tokens": 2, "messages": USER, **messages},
    }


OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ON = {"chat_template_kwargs": {"enable_thinking": True}}
NAMES = {
    "/v1/responses": "reasoning.effort",
    "/v1/messages": "thinking",
    "/v1/chat/completions": "reasoning_effort",
}


def test_a_prompt_is_rendered_with_the_arguments_of_training(client: TestClient, kind: str) -> None:
    tokens = [
        client.post(route, json=body).json()["usage"] for route, body in bodies({}, {}, {}).items()
    ]
    counted = {found.get("prompt_tokens", found.get("input_tokens")) for found in tokens}
    assert counted == {len("user: Hi\n>") + (kind == "switched off")}
    score = client.post("/score", json={"messages": USER}).json()
    assert score["usage"]["prompt_tokens"] in counted


@pytest.mark.parametrize(
    ("asked", "field", "taken_by"),
    [
        (bodies(OFF, OFF, OFF), "chat_template_kwargs", {"switched off", "no switch"}),
        (bodies(ON, ON, ON), "chat_template_kwargs", {"switch", "no switch"}),
        (
            bodies(
                {"reasoning_effort": "none"},
                {"reasoning": {"effort": "none"}},
                {"thinking": {"type": "disabled"}},
            ),
            "",
            {"no switch"},
        ),
        (
            bodies({"reasoning_effort": "high"}, {"reasoning": {"effort": "high"}}, {}),
            "",
            {"no switch"},
        ),
        (
            bodies(*[{"chat_template_kwargs": {"other": 1}}] * 3),
            "",
            {"switch", "switched off", "no switch"},
        ),
        (
            bodies(*[{"chat_template_kwargs": None}] * 3),
            "",
            {"switch", "switched off", "no switch"},
        ),
        (
            bodies(*[{"chat_template_kwargs": {"tools": "x"}}] * 3),
            "chat_template_kwargs",
            set[str](),
        ),
        (bodies(*[{"chat_template_kwargs": {"x": [1]}}] * 3), "chat_template_kwargs", set[str]()),
    ],
    ids=[
        "off",
        "on",
        "no effort",
        "high effort",
        "an unknown name",
        "null",
        "a name of the call",
        "a list",
    ],
)
def test_what_would_render_a_chat_otherwise_is_refused_by_name(
    client: TestClient, kind: str, asked: dict[str, Any], field: str, taken_by: set[str]
) -> None:
    for route, body in asked.items():
        answer = client.post(route, json=body)
        plain = body.keys() <= {"model", "max_tokens", "messages"}
        disabled = route == "/v1/messages" and "thinking" in body and kind == "switched off"
        if kind in taken_by or plain or disabled:
            assert answer.status_code == 200, (route, answer.text)
            continue
        assert answer.status_code in (400, 422), (route, answer.text)
        name = field or NAMES[route]
        assert name in answer.json()["error"]["message"]
        if route != "/v1/messages":  # whose errors name no field
            assert answer.json()["error"]["param"].startswith(name)


def test_a_thought_of_a_given_length_is_refused_by_name(client: TestClient) -> None:
    for route in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {
            "model": "tiny",
            "messages": USER,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        answer = client.post(
            route, json=body | ({"max_tokens": 2} if route == "/v1/messages" else {})
        )
        assert (answer.status_code, "'thinking'" in answer.text) == (400, True), answer.text


def test_tokens_are_counted_as_they_would_be_read(client: TestClient, kind: str) -> None:
    body = {"model": "tiny", "messages": USER}
    count = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    assert count == len("user: Hi\n>") + (kind == "switched off")
    answer = client.post(
        "/v1/messages/count_tokens", json=body | {"thinking": {"type": "disabled"}}
    )
    assert answer.status_code == (400 if kind == "switch" else 200), answer.text


def test_a_bundle_of_other_arguments_is_refused(tmp_path: Any) -> None:
    engine = TransformersEngine(tiny.model("llama"), tiny.tokenizer(template=SWITCH))
    bundle = matching_bundle(engine, tmp_path)
    other = replace(engine.identity, template_arguments={"enable_thinking": False})
    engine.identity = other
    with pytest.raises(WrongChatTemplate, match="other arguments of the chat template"):
        Scorer(Scheduled(engine), bundle)
