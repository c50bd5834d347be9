"""What clients send beside a question: their protocol's defaults, kept history, long limits; how
faults are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.routing import Route

from service.access.routes import CHAT_ROUTE, MESSAGES_ROUTE, RESPONSES_ROUTE, TEXT_ROUTE
from service.annexes.guardrails import CONTENTS_DETECTOR, LITELLM_ROUTE, MESSAGES_DETECTOR
from service.errors import RequestError
from tests.api.protocols import ROUTES, body_of
from tests.running import App

JSON = {"content-type": "application/json"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    with App(tmp_path_factory.mktemp("app"), policy="observe").started() as app:
        app.engine.takes_tools = True
        yield app


def post(app: App, route: str, status: int = 200, **body: Any) -> Any:
    answer = app.client.post(route, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def risk(found: dict[str, Any]) -> float:
    return float(found["hallutracer"]["data"][0]["risk"])


# --- browsers ---

OPENAIS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count,"
    "openai-organization"
)
ANTHROPICS = (
    "anthropic-dangerous-direct-browser-access,anthropic-version,anthropic-beta,content-type,"
    "x-api-key"
)


@pytest.mark.parametrize("asked", [OPENAIS, ANTHROPICS, "x-session-id", "traceparent,x-request-id"])
def test_a_browser_s_client_is_allowed_its_headers_where_an_origin_is_named(
    tmp_path: Path, asked: str
) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": asked}
    with App(tmp_path, cors_origins=("https://a.example",), api_keys=("sesame",)).started() as app:
        allowed = app.client.options(
            CHAT_ROUTE, headers=preflight | {"origin": "https://a.example"}
        )
        assert allowed.status_code == 200, allowed.text
        taken = {
            name.strip() for name in allowed.headers["access-control-allow-headers"].split(",")
        }
        assert (set(asked.split(",")) <= taken, allowed.headers["access-control-allow-origin"]) == (
            True,
            "https://a.example",
        )
        other = app.client.options(CHAT_ROUTE, headers=preflight | {"origin": "https://b.example"})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)


def test_a_page_of_a_named_origin_may_ask_from_the_public_internet(tmp_path: Path) -> None:
    """Chrome asks before a public page's request to a private address; an origin that the operator
    named gets the answer, and no other."""
    preflight = {"access-control-request-private-network": "true"}
    with App(tmp_path, cors_origins=("https://a.example",)).started() as app:
        for route, method in ((CHAT_ROUTE, "POST"), ("/v1/models", "GET"), ("/v1/models", "HEAD")):
            asked = preflight | {"access-control-request-method": method}
            allowed = app.client.options(route, headers=asked | {"origin": "https://a.example"})
            assert allowed.status_code == 200, (method, allowed.text)
            assert allowed.headers["access-control-allow-private-network"] == "true"
            other = app.client.options(route, headers=asked | {"origin": "https://b.example"})
            assert (other.status_code, "access-control-allow-origin" in other.headers) == (
                400,
                False,
            )


# --- methods ---


def test_head_is_taken_wherever_get_is_with_the_headers_that_get_has(app: App) -> None:
    """As HTTP has it: probes of clients and of monitoring ask so."""
    paths = [
        route.path
        for route in app.app.routes
        if isinstance(route, Route) and "GET" in (route.methods or ()) and "{" not in route.path
    ]
    assert {"/v1/models", "/v1/bundles", "/metrics", "/health", "/docs"} <= set(paths)
    for path in [*paths, "/v1/models/scripted", "/v1/models/absent", "/v1/bundles/absent"]:
        full, head = app.client.get(path), app.client.head(path)
        assert (head.status_code, head.content) == (full.status_code, b""), path
        assert head.headers["content-type"] == full.headers["content-type"], path
    assert "head" not in app.client.get("/openapi.json").json()["paths"]["/v1/models"]


# --- fields ---

NEUTRAL: dict[str, Any] = {
    "chat_template_kwargs": {},
    "stop_token_ids": [],
    "skip_special_tokens": True,
    "documents": None,
    "ignore_eos": False,
    "priority": 0,
    "top_k": -1,
    "min_p": 0.0,
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "include_stop_str_in_output": False,
    "bad_words": [],
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "allowed_token_ids": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template": None,
    "mm_processor_kwargs": None,
    "structured_outputs": None,
    "request_id": "a",
    "return_token_ids": False,
    "return_tokens_as_token_ids": None,
    "cache_salt": None,
    "kv_transfer_params": None,
    "include_reasoning": True,
    "guided_json": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "stream_interval": None,
}
OPENAIS_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "logit_bias": None,
    "user": None,
    "stop": None,
    "seed": None,
    "stream": False,
    "top_p": None,
    "temperature": None,
    "vllm_xargs": None,
    "suffix": None,
    "stream_options": None,
}
CHANGES = {
    "chat_template_kwargs": {"chat_template": "{{ messages }}"},
    "stop_token_ids": [1],
    "skip_special_tokens": False,
    "documents": [{"text": "a"}],
    "ignore_eos": True,
    "top_k": 40,
    "min_tokens": 1,
    "use_beam_search": True,
    "continue_final_message": True,
    "structured_outputs": {"regex": "a"},
    "truncate_prompt_tokens": 4,
    "prompt_logprobs": 0,
    "min_p": True,
    "repetition_penalty": True,
    "chat_template": "{{ messages }}",
}


@pytest.mark.parametrize("route", [CHAT_ROUTE, TEXT_ROUTE, RESPONSES_ROUTE, MESSAGES_ROUTE])
def test_fields_of_vllm_s_clients_are_taken_with_the_values_that_change_nothing(
    app: App, route: str
) -> None:
    body = (
        {"model": "scripted", "prompt": "a", "max_tokens": 4}
        if route == TEXT_ROUTE
        else body_of(route)
    )
    plain = post(app, route, **body)
    more = (
        {}
        if route == MESSAGES_ROUTE
        else OPENAIS_NEUTRAL
        if route in (CHAT_ROUTE, TEXT_ROUTE)
        else {"stop": None}
    )
    for neutral in (NEUTRAL | more, dict.fromkeys(NEUTRAL | more)):
        for name, value in neutral.items():
            assert risk(post(app, route, **body | {name: value})) == risk(plain), name
        assert risk(
            post(
                app,
                route,
                **neutral | {name: body[name] for name in body if body[name] is not None},
            )
        )
    for name, value in CHANGES.items():
        error = post(
            app, route, 422 if route in (CHAT_ROUTE, TEXT_ROUTE) else 400, **body | {name: value}
        )["error"]
        assert repr(name) in error["message"], error
        assert route == MESSAGES_ROUTE or error["param"] == name, error


@pytest.mark.parametrize("route", [CHAT_ROUTE, TEXT_ROUTE, RESPONSES_ROUTE, MESSAGES_ROUTE])
def test_a_field_that_is_null_is_none_also_of_a_client_newer_than_this(
    app: App, route: str
) -> None:
    """Clients that write all fields of their newest protocol give those that nobody set as null."""
    body = (
        {"model": "scripted", "prompt": "a", "max_tokens": 4}
        if route == TEXT_ROUTE
        else body_of(route)
    )
    assert risk(post(app, route, **body | {"of_next_year": None})) == risk(post(app, route, **body))
    error = post(
        app,
        route,
        422 if route in (CHAT_ROUTE, TEXT_ROUTE) else 400,
        **body | {"of_next_year": False},
    )
    assert "of_next_year: no such field" in error["error"]["message"]


def test_newer_fields_of_openai_s_change_nothing(app: App) -> None:
    for route, neutral in (
        (
            CHAT_ROUTE,
            {"moderation": None, "prompt_cache_options": {"mode": "implicit", "ttl": "1h"}},
        ),
        (RESPONSES_ROUTE, {"background_options": None, "prompt_cache_options": {"prewarm": False}}),
        (RESPONSES_ROUTE, {"background_options": {}}),
    ):
        assert risk(post(app, route, **body_of(route) | neutral)) == risk(
            post(app, route, **body_of(route))
        ), neutral
    for route, field, value in (
        (CHAT_ROUTE, "moderation", {"model": "m"}),
        (CHAT_ROUTE, "prompt_cache_options", {"prewarm": True}),
        (RESPONSES_ROUTE, "background_options", {"x": 1}),
    ):
        error = post(
            app, route, 422 if route == CHAT_ROUTE else 400, **body_of(route) | {field: value}
        )["error"]
        assert (error["param"].split(".")[0], "not supported here" in error["message"]) == (
            field,
            True,
        )
    post(app, RESPONSES_ROUTE, **body_of(RESPONSES_ROUTE) | {"input": ""})  # a text, too


def test_special_tokens_are_neutral_as_each_route_has_them(app: App) -> None:
    text = {"model": "scripted", "prompt": "a"}
    for route, body, neutral in (
        (CHAT_ROUTE, body_of(CHAT_ROUTE), False),
        (TEXT_ROUTE, text, True),
    ):
        post(app, route, **body | {"add_special_tokens": neutral})
        assert (
            post(app, route, 422, **body | {"add_special_tokens": not neutral})["error"]["param"]
            == "add_special_tokens"
        )


def test_what_clients_keep_of_earlier_turns_changes_nothing(app: App) -> None:
    def chat(
        kept: dict[str, Any],
        of_part: dict[str, Any],
        of_call: dict[str, Any],
        of_tool: dict[str, Any],
    ) -> float:
        messages = [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."} | of_part]},
            {"role": "user", "content": "When?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL | of_call]} | kept,
            {"role": "tool", "tool_call_id": "call_1", "content": "Now."},
            {"role": "assistant", "content": "Now."} | kept,
            {"role": "user", "content": "Sure?"},
        ]
        return risk(post(app, CHAT_ROUTE, **body_of(CHAT_ROUTE, messages, tools=[TOOL | of_tool])))

    kept = {
        "id": "a",
        "index": 0,
        "annotations": [{"type": "url_citation"}],
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
        "cache_control": {"type": "ephemeral"},
        "audio": None,
        "function_call": None,
        "refusal": None,
        "thinking_blocks": [{"type": "thinking"}],
        "parsed": {"a": 1},
    }
    cached = {"cache_control": {"type": "ephemeral"}}
    assert chat(kept, cached, {"index": 0}, cached) == chat({}, {}, {}, {})
    function = {"name": "now", "arguments": "{}", "parsed_arguments": {}}
    assert chat({}, {}, {"index": 1, "function": function}, {}) == chat({}, {}, {}, {})
    items = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Now."}]},
        {"role": "user", "content": "Sure?"},
    ]
    more = [
        one | {"index": 0, "id": "a", "annotations": [], "reasoning_content": "x"} | cached
        for one in items
    ]
    assert (
        len(
            {
                risk(post(app, RESPONSES_ROUTE, **body_of(RESPONSES_ROUTE, one)))
                for one in (items, more)
            }
        )
        == 1
    )
    turns = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "Now."},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    answer = {
        "id": "msg_1",
        "type": "message",
        "model": "scripted",
        "stop_reason": "end_turn",
        "usage": {},
    } | cached
    more = [turns[0] | {"index": 0}, turns[1] | answer, turns[2]]
    assert (
        len(
            {
                risk(post(app, MESSAGES_ROUTE, **body_of(MESSAGES_ROUTE, one)))
                for one in (turns, more)
            }
        )
        == 1
    )


def test_a_withheld_answer_comes_back_as_a_part_of_a_chat_s_turn(app: App) -> None:
    """OpenAI's chats take an assistant's refusal as its content's only part, too."""

    def chat(role: str = "assistant", status: int = 200, **turn: Any) -> Any:
        messages = [
            {"role": "user", "content": "When?"},
            {"role": role} | turn,
            {"role": "user", "content": "Sure?"},
        ]
        return post(app, CHAT_ROUTE, status, **body_of(CHAT_ROUTE, messages))

    part = {"type": "refusal", "refusal": "I am not sure."}
    text = {"type": "text", "text": "Now."}
    assert risk(chat(content=[part])) == risk(chat(content=None, refusal="I am not sure."))
    assert risk(chat(content=[text, part])) == risk(chat(content="Now."))
    for wrong in (
        [{"type": "refusal", "text": "a"}],
        [{"type": "text", "refusal": "a"}],
        [{"type": "text", "text": "a", "refusal": "b"}],
        [{"type": "refusal", "refusal": None}],
    ):
        assert chat(status=422, content=wrong)["error"]["param"].startswith("messages.1.content.0")
    for role in ("user", "system", "developer"):
        assert "only an assistant" in chat(role, 422, content=[part])["error"]["message"]


def test_a_kind_of_part_or_of_turn_that_is_not_read_is_named(app: App) -> None:
    """Which of its parts to leave out, a client's user cannot see from those that are read."""

    def message_of(route: str, turn: dict[str, Any]) -> str:
        status = 422 if route == CHAT_ROUTE else 400
        return str(post(app, route, status, **body_of(route, [turn]))["error"]["message"])

    def of_part(route: str, kind: str) -> str:
        return message_of(route, {"role": "user", "content": [{"type": kind}]})

    for route, kinds in (
        (CHAT_ROUTE, ("image_url", "input_audio", "file")),
        (RESPONSES_ROUTE, ("input_image", "input_file")),
        (MESSAGES_ROUTE, ("image", "document", "search_result")),
    ):
        for kind in kinds:
            told = of_part(route, kind)
            assert told.startswith("messages.0" if route != RESPONSES_ROUTE else "input.0"), told
            assert told.endswith(f", not {kind!r}"), told
        for prompt in ("Who is it?", "secret" * 20, "1", ""):
            assert ", not " not in of_part(route, prompt), "it may be a prompt"
        assert message_of(route, {"role": "human", "content": "a"}).endswith(", not 'human'")


def test_an_empty_list_of_system_texts_is_no_system_message(app: App) -> None:
    for route in (MESSAGES_ROUTE, f"{MESSAGES_ROUTE}/count_tokens"):
        body = body_of(MESSAGES_ROUTE)
        if route != MESSAGES_ROUTE:
            body = {name: body[name] for name in ("model", "messages")}
        plain, empty = post(app, route, **body), post(app, route, **body | {"system": []})
        if route == MESSAGES_ROUTE:
            assert risk(empty) == risk(plain)
        else:
            assert empty == plain


def test_what_a_field_may_be_is_told_as_json_has_it(app: App) -> None:
    for name, value, allowed in (
        ("logprobs", True, "except as false or 0;"),
        ("modalities", ["audio"], 'except as ["text"];'),
        ("skip_special_tokens", False, "except as true;"),
    ):
        error = post(app, CHAT_ROUTE, 422, **body_of(CHAT_ROUTE) | {name: value})["error"]
        assert allowed in error["message"]


def test_thoughts_of_earlier_turns_are_not_read_on_any_route(app: App) -> None:
    """As coding agents send them back, encrypted or not; and no turn is left of them."""
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "When?"},
        {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Noon."},
        {"role": "assistant", "content": "Now."},
        {"role": "user", "content": "Sure?"},
    ]
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "status": "completed",
        "encrypted_content": "gA==",
    }
    thought |= {"summary": [{"type": "summary_text", "text": "Hm."}]}
    open_thought = thought | {
        "content": [{"type": "reasoning_text", "text": "Hm."}],
        "more": {"a": 1},
    }
    more = [items[0], thought, items[1], open_thought, *items[2:], thought]
    tools = [{"type": "function"} | TOOL["function"]]  # type: ignore[operator]
    read = [
        risk(post(app, RESPONSES_ROUTE, **body_of(RESPONSES_ROUTE, one, tools=tools)))
        for one in (items, more)
    ]
    assert read[0] == read[1]
    call = {"type": "tool_use", "id": "call_1", "name": "now", "input": {}}
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "Noon."}],
    }
    hidden = {"type": "redacted_thinking", "data": "gA=="}
    shown = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}

    def turns(*thoughts: dict[str, Any]) -> list[dict[str, Any]]:
        said = {
            "role": "assistant",
            "content": [*thoughts, {"type": "text", "text": "Let me see."}, *thoughts, call],
        }
        return [{"role": "user", "content": "When?"}, said, result]

    offered = [{"name": "now", "input_schema": {"type": "object"}}]
    read = [
        risk(post(app, MESSAGES_ROUTE, **body_of(MESSAGES_ROUTE, one, tools=offered)))
        for one in (turns(), turns(shown, hidden))
    ]
    assert read[0] == read[1]


@pytest.mark.parametrize("arguments", ["", "  ", "\n"])
def test_a_call_without_arguments_is_one_of_an_empty_object(app: App, arguments: str) -> None:
    def chat(text: str) -> float:
        call = CALL | {"function": {"name": "now", "arguments": text}}
        result = {"role": "tool", "tool_call_id": "call_1", "content": "Noon."}
        turns = [
            {"role": "user", "content": "When?"},
            {"role": "assistant", "tool_calls": [call]},
            result,
        ]
        return risk(post(app, CHAT_ROUTE, **body_of(CHAT_ROUTE, turns, tools=[TOOL])))

    def response(text: str) -> float:
        call = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": text}
        items = [
            {"role": "user", "content": "When?"},
            call,
            {"type": "function_call_output", "call_id": "call_1", "output": "Noon."},
        ]
        tools = [{"type": "function"} | TOOL["function"]]  # type: ignore[operator]
        return risk(post(app, RESPONSES_ROUTE, **body_of(RESPONSES_ROUTE, items, tools=tools)))

    assert (chat(arguments), response(arguments)) == (chat("{}"), response("{}"))


# --- lengths ---


def test_a_length_beyond_the_service_s_limit(tmp_path: Path) -> None:
    with App(tmp_path, policy="observe", max_new_tokens=3).started() as app:
        found = post(app, MESSAGES_ROUTE, **body_of(MESSAGES_ROUTE, tokens=4096))
        assert (found["usage"]["output_tokens"], found["stop_reason"]) == (3, "max_tokens")
        for route, body, param in (
            (CHAT_ROUTE, body_of(CHAT_ROUTE, tokens=4096), "max_tokens"),
            (
                CHAT_ROUTE,
                body_of(CHAT_ROUTE, tokens=3, max_completion_tokens=4096),
                "max_completion_tokens",
            ),
            (RESPONSES_ROUTE, body_of(RESPONSES_ROUTE, tokens=4096), "max_output_tokens"),
            (TEXT_ROUTE, {"model": "scripted", "prompt": "a", "max_tokens": 4096}, "max_tokens"),
            ("/score", {"prompt": "a", "generate": {"max_tokens": 4096}}, "generate.max_tokens"),
        ):
            error = post(app, route, 400 if route == RESPONSES_ROUTE else 422, **body)["error"]
            assert (
                error["param"],
                "at most 3 answer tokens here, not 4096" in error["message"],
            ) == (param, True)
            assert "--max-completion-tokens" in error["message"]


LONG = "a" * 600


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (CHAT_ROUTE, body_of(CHAT_ROUTE, LONG), "messages"),
        (CHAT_ROUTE, body_of(CHAT_ROUTE, LONG * 200), "messages"),
        (TEXT_ROUTE, {"model": "scripted", "prompt": LONG}, "prompt"),
        (TEXT_ROUTE, {"model": "scripted", "prompt": [[65] * 600]}, "prompt"),
        (RESPONSES_ROUTE, body_of(RESPONSES_ROUTE, LONG), "input"),
        (RESPONSES_ROUTE, {"model": "scripted", "input": LONG * 200}, "input"),
    ],
)
def test_a_context_that_is_too_long_is_said_as_openai_s_clients_know_it(
    app: App, route: str, body: dict[str, Any], param: str
) -> None:
    for more in ({}, {"stream": True}):
        error = post(app, route, 400, **body | more)["error"]
        assert (error["code"], error["param"], error["type"]) == (
            "context_length_exceeded",
            param,
            "invalid_request_error",
        )
        assert "this model's maximum context length is 512 tokens" in error["message"]


def test_elsewhere_a_context_that_is_too_long_is_what_it_was(app: App) -> None:
    error = post(app, "/score", 413, prompt=LONG)["error"]
    assert (error["code"], error["param"]) == ("prompt_too_long", "prompt")
    assert (
        post(app, "/score", 413, messages=[{"role": "user", "content": LONG}])["error"]["param"]
        == "messages"
    )
    assert post(app, "/classify", 413, inputs=LONG)["error"]["param"] == "inputs"
    said = post(app, MESSAGES_ROUTE, 400, **body_of(MESSAGES_ROUTE, LONG))["error"]
    assert (said["type"], said["message"][:23]) == (
        "invalid_request_error",
        "prompt is too long: 609",
    )


# --- which field, and one sentence ---


@pytest.mark.parametrize("route", ["/score", *ROUTES, LITELLM_ROUTE, "/classify"])
@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 422, "the body is empty: send a JSON object"),
        (b"  \n", 400, "it is empty: send an object"),
        (b"null", 422, "the body is empty: send a JSON object"),
        (b"[]", 422, "no object: send one"),
        (b"[{}]", 422, "no object: send one"),
        (b'"a"', 422, "no object: send one"),
        (b"7", 422, "no object: send one"),
        (b'\xef\xbb\xbf{"prompt": "a"}', 400, "byte order mark"),
    ],
)
def test_a_body_that_is_no_object_gets_one_clear_sentence(
    app: App, route: str, body: bytes, status: int, said: str
) -> None:
    answer = app.client.post(route, content=body, headers=JSON)
    status = 400 if status == 422 and route in (RESPONSES_ROUTE, MESSAGES_ROUTE) else status
    message = answer.json()["error"]["message"]
    assert (answer.status_code, said in message, len(message) < 120) == (
        status,
        True,
        True,
    ), answer.text


# --- names of the model ---


def test_the_bundle_s_names_of_its_model_are_taken(app: App) -> None:
    manifest = app.bundles[0].manifest
    assert manifest.model.name != manifest.name
    for name in ("scripted", manifest.name, manifest.model.name):
        found = post(app, CHAT_ROUTE, **body_of(CHAT_ROUTE, model=name))
        assert (found["model"], found["hallutracer"]["bundle"]["name"]) == ("scripted", "one")
        assert app.client.get(f"/v1/models/{name}").json()["root"] == "scripted"
    for name in (
        "two",
        "other",
    ):  # another bundle's name is none of the model that the default bundle judges
        assert (
            post(app, CHAT_ROUTE, 404, **body_of(CHAT_ROUTE, model=name))["error"]["param"]
            == "model"
        )
    for path in ("/v1/models", "/v1/models/"):
        assert [card["id"] for card in app.client.get(path).json()["data"]] == ["scripted"]


# --- when to come back ---


def test_retry_after_only_where_trying_again_can_help(tmp_path: Path) -> None:
    waiting = App(tmp_path / "loading").client.post(
        "/score", json={"prompt": "a"}
    )  # which nobody has started
    assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "1")
    with App(tmp_path / "broken").started() as app:
        app.state.lifecycle.error = RuntimeError("out of memory")
        for route in ("/score", "/health/ready"):
            broken = (
                app.client.post(route, json={"prompt": "a"})
                if route == "/score"
                else app.client.get(route)
            )
            assert (broken.status_code, "retry-after" in broken.headers) == (
                503,
                False,
            ), broken.text
            assert (
                "restart the service: RuntimeError: out of memory"
                in broken.json()["error"]["message"]
            )


def test_what_fails_again_unchanged_has_no_retry_after(app: App) -> None:
    for body in ({"prompt": LONG}, {"prompt": 3}, {"prompt": "a", "model": "other"}):
        assert "retry-after" not in app.client.post("/score", json=body).headers


# --- guards that observe ---

REFUSED_TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
UNREADABLE: dict[str, tuple[list[dict[str, Any]] | None, list[str]]] = {
    "too long": (None, [LONG]),
    "one of two": (None, ["a", LONG]),
    "far too long": (None, [LONG * 200]),
    "empty": (None, [""]),
    "blank": (None, ["  "]),
    "no Unicode": (None, ["hi \ud83d"]),
    "too many": (None, ["a"] * 1000),
    "a long chat": ([{"role": "user", "content": LONG}], []),
    "a chat that the template refuses": (REFUSED_TURNS, []),
    "a chat that is no Unicode": ([{"role": "user", "content": "hi \ud83d"}], []),
    "an empty chat": ([], []),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_passes_an_observing_guard_and_no_other(
    app: App, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    template = app.engine._template

    def refusing(messages: Any, tools: Any) -> str:
        if messages[0]["role"] == "system":
            raise RequestError(
                "the chat template refuses these messages: no system turn", param="messages"
            )
        return template(messages, tools)

    monkeypatch.setattr(app.engine, "_template", refusing)
    messages, texts = UNREADABLE[case]

    def send(route: str, body: dict[str, Any]) -> httpx.Response:
        return app.client.post(route, content=json.dumps(body), headers=JSON)

    def litellm(policy: str) -> httpx.Response:
        body: dict[str, Any] = {"input_type": "request", "texts": texts}
        body |= {} if messages is None else {"structured_messages": messages}
        return send(
            LITELLM_ROUTE, body | {"additional_provider_specific_params": {"policy": policy}}
        )

    passed = litellm("observe")
    assert (passed.status_code, passed.json()["action"]) == (200, "NONE"), passed.text
    assert "cannot be read" in passed.json()["hallutracer"]["error"]
    withheld = litellm("gate")
    assert withheld.status_code in (413, 422) or withheld.json()["action"] == "BLOCKED", (
        withheld.text
    )

    route = CONTENTS_DETECTOR if messages is None else MESSAGES_DETECTOR
    given: dict[str, Any] = {"contents": texts} if messages is None else {"messages": messages}
    passed = send(route, given | {"detector_params": {"policy": "observe"}})
    assert (passed.status_code, passed.json()) == (
        200,
        [[] for _ in texts] if messages is None else [],
    ), passed.text
    withheld = send(route, given | {"detector_params": {"policy": "gate"}})
    detected = withheld.json()
    assert withheld.status_code in (413, 422) or detected[0]["detection"] == "unreadable", (
        withheld.text
    )


def test_what_is_wrong_with_a_guard_s_call_is_told_whatever_the_policy(app: App) -> None:
    observe = {"policy": "observe"}
    for params, status in (
        (observe | {"polcy": "x"}, 422),
        ({"policy": "none"}, 404),
        ({"policy": "ob\ud83d"}, 404),
    ):
        body = {
            "input_type": "request",
            "texts": ["a"],
            "additional_provider_specific_params": params,
        }
        assert (
            app.client.post(LITELLM_ROUTE, content=json.dumps(body), headers=JSON).status_code
            == status
        )
    body = {"contents": [LONG], "detector_params": observe}
    assert app.client.post(CONTENTS_DETECTOR, json=body | {"more": 1}).status_code == 422


def test_openai_s_client_raises_what_it_knows(app: App) -> None:
    client = openai.OpenAI(
        base_url="http://testserver/v1", api_key="none", max_retries=0, http_client=app.client
    )
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": LONG}]
        )
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_faults_of_json_say_where(app: App) -> None:
    for body, said in (
        ('{"prompt": "a",}', "double quotes, at character 16"),
        ("{'prompt': 'a'}", "double quotes, at character 2"),
        ('{"prompt": "a"} {}', "Extra data, at character 17"),
        ('{"prompt": True}', "Expecting value, at character 12"),
    ):
        error = app.client.post("/score", content=body, headers=JSON).json()["error"]
        assert (error["code"], said in error["message"]) == ("invalid_json", True), error
