"""The chat template of a real engine: a bundle is served with the arguments of its training, no
request changes a prompt, and none leaves out a turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from probes_store.errors import WrongChatTemplate
from service.access.routes import COUNT_ROUTE
from service.engines.base import EngineOptions
from service.engines.scheduler import Scheduled
from service.engines.transformers.engine import TransformersEngine
from service.scoring import Scorer
from tests.engines import tiny
from tests.kit.api import CHAT, MESSAGES, RESPONSES, SCORE, Wire, check_error, request_of
from tests.kit.tables import cells
from tests.matching import matching_bundle
from tests.running import in_process

SWITCH = (
    "{% if reasoning_effort is defined %}{{ reasoning_effort }} {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}>"
    "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
)
FIXED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}>"
USERS_ALONE = "{% for m in messages if m.role == 'user' %}user: {{ m.content }}\n{% endfor %}>"
TRAINED = {"switch": None, "switched off": {"enable_thinking": False}, "no switch": None}
USER = [{"role": "user", "content": "Hi"}]
WIRES = (CHAT, RESPONSES, MESSAGES)


def serving(
    folder: Path, template: str | None, trained: Any = None
) -> AbstractContextManager[TestClient]:
    """A service whose bundle was trained with this template and these arguments of it."""
    tokenizer = tiny.tokenizer(template=template or FIXED)
    if template is None:
        tokenizer.chat_template = None
    options = EngineOptions(model="tiny", template_arguments=trained)
    engine = TransformersEngine(tiny.model("llama"), tokenizer, options=options)
    scorer = Scorer(Scheduled(engine), matching_bundle(engine, folder))
    return in_process(lambda: {"one": scorer})


@pytest.fixture(scope="module", params=TRAINED)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    template = FIXED if kind == "no switch" else SWITCH
    with serving(tmp_path_factory.mktemp("store"), template, TRAINED[kind]) as client:
        yield client


def ask(
    client: TestClient, wire: Wire, messages: list[dict[str, str]] = USER, **fields: Any
) -> httpx.Response:
    body = request_of(wire, messages, tokens=2, **{"model": "tiny"} | fields)
    return client.post(wire.route, json=body)


def test_a_prompt_is_rendered_and_counted_with_the_arguments_of_training(
    client: TestClient, kind: str
) -> None:
    tokens = [ask(client, wire).json()["usage"] for wire in (SCORE, *WIRES)]
    body = {"model": "tiny", "messages": USER}
    tokens.append(client.post(COUNT_ROUTE, json=body).json())
    counted = {usage.get("prompt_tokens", usage.get("input_tokens")) for usage in tokens}
    assert counted == {len("user: Hi\n>") + (kind == "switched off")}
    answer = client.post(COUNT_ROUTE, json=body | {"thinking": {"type": "disabled"}})
    assert answer.status_code == (400 if kind == "switch" else 200), answer.text


NAMES = {CHAT.route: "reasoning_effort", RESPONSES.route: "reasoning.effort"}
# The fields that each protocol takes arguments by, one for all or one for each; the field that a
# refusal names, if it is not the protocol's own; the templates that such a request is taken by.
ASKED = cells(
    """
    {"chat_template_kwargs": {"enable_thinking": false}} | chat_template_kwargs \
        | switched off, no switch
    {"chat_template_kwargs": {"enable_thinking": true}} | chat_template_kwargs | switch, no switch
    {"reasoning_effort": "none"} | {"reasoning": {"effort": "none"}} \
        | {"thinking": {"type": "disabled"}} | - | no switch
    {"reasoning_effort": "high"} | {"reasoning": {"effort": "high"}} | {} | - | no switch
    {"chat_template_kwargs": {"other": 1}} | - | switch, switched off, no switch
    {"chat_template_kwargs": null} | - | switch, switched off, no switch
    {"chat_template_kwargs": {"tools": "x"}} | chat_template_kwargs | -
    {"chat_template_kwargs": {"x": [1]}} | chat_template_kwargs | -
    """
)


@pytest.mark.parametrize("asked", ASKED, ids=lambda row: row[0])
def test_what_would_render_a_chat_otherwise_is_refused_by_name(
    client: TestClient, kind: str, asked: list[str]
) -> None:
    *bodies, field, taken_by = asked
    bodies = bodies * 3 if len(bodies) == 1 else bodies
    for wire, fields in zip(WIRES, map(json.loads, bodies), strict=True):
        answer = ask(client, wire, **fields)
        disabled = "thinking" in fields and kind == "switched off"
        if kind in taken_by.split(", ") or not fields or disabled:
            assert answer.status_code == 200, (wire, answer.text)
            continue
        name = NAMES.get(wire.route, "thinking") if field == "-" else field
        error = check_error(answer, wire.refuses)
        assert name in error["message"]
        assert wire is MESSAGES or error["param"].startswith(name)  # whose errors name no field


def test_a_bundle_of_other_arguments_is_refused(tmp_path: Path) -> None:
    engine = TransformersEngine(tiny.model("llama"), tiny.tokenizer(template=SWITCH))
    bundle = matching_bundle(engine, tmp_path)
    other = replace(engine.identity, template_arguments={"enable_thinking": False})
    engine.identity = other
    with pytest.raises(WrongChatTemplate, match="other arguments of the chat template"):
        Scorer(Scheduled(engine), bundle)


# --- turns that the template leaves out, and no template ---

SYSTEM = "Answer in French."


@pytest.mark.parametrize("template", [USERS_ALONE, None], ids=["users alone", "no template"])
def test_a_request_whose_turns_the_model_would_not_see_is_refused(
    tmp_path: Path, template: str | None
) -> None:
    reason, field = "/v1/completions takes the text", "messages"
    if template is not None:
        reason, field = "leaves out messages.0, of the role 'system'", "messages.0"
    with serving(tmp_path, template) as client:
        for wire in (SCORE, *WIRES):
            status = 200 if template else wire.refuses
            assert ask(client, wire).status_code == status
            answer = ask(client, wire, [{"role": "system", "content": SYSTEM}, *USER])
            if wire is MESSAGES:
                answer = ask(client, wire, system=SYSTEM)
            error = check_error(answer, wire.refuses)
            assert reason in error["message"]
            # Of Anthropic's errors none names a field.
            named = None if wire is MESSAGES else "input" if wire is RESPONSES else field
            assert error.get("param") == named
