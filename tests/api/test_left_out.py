"""What each route says where the model's chat template leaves out a turn, or where there is no
template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

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

USERS_ALONE = "{% for m in messages if m.role == 'user' %}user: {{ m.content }}\n{% endfor %}>"
SYSTEM, USER = {"role": "system", "content": "Answer in French."}, {"role": "user", "content": "Hi"}


@pytest.fixture(params=[USERS_ALONE, None], ids=["users alone", "no template"])
def client(request: Any, tmp_path: Any) -> Iterator[TestClient]:
    tokenizer = tiny.tokenizer(template=request.param or USERS_ALONE)
    if request.param is None:
        tokenizer.chat_template = None
    engine = TransformersEngine(tiny.model("llama"), tokenizer, options=EngineOptions(model="tiny"))
    served = Scheduled(engine)
    state = Service(
        lambda: {"one": Scorer(served, matching_bundle(engine, tmp_path))},
        settings=ServiceSettings(),
    )
    with TestClient(create_app(state)) as client:
        until(lambda: state.lifecycle.is_ready)
        yield client
    served.close()


def bodies(*messages: dict[str, str]) -> dict[str, dict[str, Any]]:
    return {
        "/score": {"messages": [*messages]},
        "/v1/chat/completions": {"model": "tiny", "max_tokens": 2, "messages": [*messages]},
        "/v1/responses": {"model": "tiny", "max_output_tokens": 2, "input": [*messages]},
        "/v1/messages": {
            "model": "tiny",
            "max_tokens": 2,
            "messages": [message for message in messages if message != SYSTEM],
            "system": "Answer in French.",
        },
    }


def test_a_request_whose_turns_the_model_would_not_see_is_refused(
    client: TestClient, request: pytest.FixtureRequest
) -> None:
    templated = "users alone" in request.node.name
    for route, body in bodies(SYSTEM, USER).items():
        answer = client.post(route, json=body)
        assert answer.status_code in (400, 422), (route, answer.text)
        error = answer.json()["error"]
        if templated:
            assert (
                "this model's chat template leaves out messages.0, of the role 'system'"
                in error["message"]
            )
        else:
            assert "/v1/completions takes the text" in error["message"]
        if route != "/v1/messages":  # whose errors name no field
            assert error["param"] == (
                "input" if route == "/v1/responses" else f"messages{'.0' * templated}"
            )
    for route, body in bodies(USER).items():
        assert (client.post(route, json=body).status_code == 200) is (
            templated and route != "/v1/messages"
        ), route
