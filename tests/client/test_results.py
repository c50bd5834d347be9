"""Answers: what is read, what is refused, and that every error names its cause and nothing
private."""

from __future__ import annotations

import json
import traceback
from dataclasses import FrozenInstanceError
from typing import Any

import httpx
import pytest

import hallutracer_client as hc
from hallutracer_client.results import InvalidBody, parse
from tests.client.conftest import BlockingClient, MakeClient
from tests.kit import bodies
from tests.kit.tables import cells

SECRET, PROMPT = "sk-very-secret", "why is my private question here"


def answered(body: Any, **options: Any) -> Any:
    """What a client reads of a body; both read it alike."""
    return BlockingClient("sync", lambda _: httpx.Response(200, json=body)).score(
        **{"prompt": "a"} | options
    )


def test_one_prompt_and_several() -> None:
    completion = {"text": " It is Rome.", "finish_reason": "stop", "completion_tokens": 5}
    row = bodies.row(
        0.03, trajectory=[1, 2.5], running_mean=[1, 1.75], completion=completion, ood=0.3
    )
    result = answered(
        bodies.result(row, certainty={"alpha": 0.1})
    )  # fields that are not known are read over
    assert (result.risk, result.decision) == (0.03, "continue")
    assert (result.gated, result.text) == (False, " It is Rome.")
    assert (result.only.trajectory, result.bundle.reference) == ((1.0, 2.5), "demo:3")
    assert (result.request_id, result.usage.prompt_tokens, result.guarantee) == ("abc", 7, None)
    with pytest.raises(FrozenInstanceError):
        result.model = "other"
    several = answered(
        bodies.result(bodies.row(), bodies.row(0.9, "abstain", index=1)), prompt=["a", "b"]
    )
    assert [risk.gated for risk in several.data] == [False, True]
    with pytest.raises(ValueError, match="2 prompts"):
        _ = several.risk

    causes = ("policy: 'observe' withholds nothing",)
    void = {"alpha": 0.1, "delta": 0.05, "holds": False, "void": causes}
    guarantee = answered(bodies.result(guarantee=void)).guarantee
    assert guarantee == hc.Guarantee(0.1, 0.05, False, causes)


def test_whatever_is_not_continue_is_gated() -> None:
    for decision in ("abstain", "block", "something of a later version"):
        result = answered(
            bodies.result(bodies.row(0.9, decision, message="I am not sure.")),
            generate=hc.Generate(),
        )
        assert result.gated
        with pytest.raises(hc.Withheld, match=r"risk 0\.900") as caught:
            _ = result.text
        assert caught.value.risk.message == "I am not sure."


# Fields, and as JSON what stands there, unless they are missing.
FAULTS = cells(
    """
    id | missing
    object | missing
    created | missing
    model | missing
    policy | missing
    bundle | missing
    data | missing
    usage | missing
    bundle.digest | missing
    data.0.risk | missing
    data.0.depth_mean | missing
    data.0.decision | missing
    data.0.flagged | missing
    data.0.threshold | missing
    data.0.index | missing
    usage.prompt_tokens | missing
    usage.total_tokens | missing
    data.0.risk | NaN
    data.0.risk | Infinity
    data.0.depth_mean | NaN
    data.0.depth_mean | Infinity
    data.0.threshold | NaN
    data.0.threshold | Infinity
    object | "list"
    data | []
    data | {}
    data.0.risk | "0.1"
    data.0.risk | 1.5
    data.0.flagged | 1
    data.0.decision | null
    bundle.version | "3"
    usage.prompt_tokens | -1
    data.0.trajectory | ["x"]
    guarantee.holds | 1
    """
)


@pytest.mark.parametrize(("path", "text"), FAULTS)
def test_a_missing_field_and_a_wrong_value_are_named(path: str, text: str) -> None:
    body = bodies.result(guarantee={"alpha": 0.1, "delta": 0.05, "holds": False})
    *parents, last = path.split(".")
    holder: Any = body
    for part in parents:
        holder = holder[int(part) if part.isdigit() else part]
    if text == "missing":
        del holder[last]
    else:
        holder[last] = json.loads(text)
    with pytest.raises(InvalidBody, match=f"field '{path}"):
        parse(hc.ScoreResult, json.dumps(body))


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (502, {"html": "<h1>Bad Gateway</h1>"}),
        (200, {"html": "<p>hello</p>"}),
        (200, {"json": []}),
        (200, {}),
        (200, {"json": {"object": "chat.completion", "choices": []}}),
        (404, {"json": {"detail": "Not Found"}}),
        (418, {"content": b"\xff\xfe"}),
        (301, {"headers": {"location": "http://elsewhere.test/"}}),
    ],
)
def test_answers_of_others_are_said_to_be_so(
    make_client: MakeClient, status: int, content: dict[str, Any]
) -> None:
    client = make_client(lambda _: httpx.Response(status, **content), max_retries=0)
    for call in (client.score, client.stream):
        with pytest.raises(hc.UnexpectedAnswer, match="a proxy in between") as caught:
            call(prompt="a")
        assert f"http://guard.test/v1/risk/score answered {status}" in str(caught.value)
        assert caught.value.status == status


@pytest.mark.parametrize(
    ("status", "code", "name"),
    cells(
        """
        400 | invalid_json | RequestRefused
        401 | unauthorized | Unauthorized
        404 | not_found | NotFound
        405 | method_not_allowed | RequestRefused
        413 | prompt_too_long | RequestRefused
        422 | empty_prompt | RequestRefused
        429 | overloaded | Overloaded
        500 | engine_error | ServerError
        503 | not_ready | NotReady
        504 | deadline_exceeded | DeadlineExceeded
        """
    ),
)
def test_every_status_has_its_class(
    make_client: MakeClient, status: str, code: str, name: str
) -> None:
    client = make_client(
        lambda _: bodies.error(int(status), code, "the cause", **{"retry-after": "7"}),
        max_retries=0,
    )
    with pytest.raises(hc.APIError) as caught:
        client.score(prompt="a")
    error = caught.value
    assert type(error) is getattr(hc, name)
    assert (error.status, error.code, error.message) == (int(status), code, "the cause")
    assert (error.request_id, error.retry_after) == ("rid-1", 7.0)
    assert str(error) == f"{status} {code}: the cause [request rid-1]"


def _hung_up(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("reset")


@pytest.mark.parametrize(
    "handler",
    [
        _hung_up,
        lambda _: bodies.error(422, "invalid_request"),
        lambda r: httpx.Response(502, content=r.content),
        lambda r: httpx.Response(
            200, json={"error": [r.headers["authorization"], r.content.decode()]}
        ),
    ],
)
def test_neither_key_nor_prompt_is_ever_shown(make_client: MakeClient, handler: Any) -> None:
    client = make_client(handler, api_key=SECRET, max_retries=0)
    with pytest.raises(hc.ClientError) as caught:
        client.score(prompt=PROMPT)
    shown = "".join(traceback.format_exception(caught.value))
    shown += repr(caught.value) + repr(client.client)
    source = "client.score(prompt=PROMPT)"
    assert source in shown  # the traceback is there, with names instead of values
    assert SECRET not in shown
    assert PROMPT not in shown
