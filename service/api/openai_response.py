"""The responses of OpenAI's /v1/chat/completions and /v1/completions, with the risk as ``hallutracer``.

A withheld answer has no text and the finish reason ``content_filter``, in a chat the policy's message as ``refusal``:
OpenAI's clients know both.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, Field

from service.api.reply import DONE, Reply, failure, retrieval_out, risk_note, risk_out, usage
from service.policies.guard import Decision
from service.scoring import RiskReport
from service.serving.judgement import Judgement

Kind = Literal["chat", "text"]
OBJECTS = {"chat": "chat.completion", "text": "text_completion"}
WITHHELD = "content_filter"


class TokenDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class OpenAIUsage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class AnswerMessage(BaseModel):
    """A chat's answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = Field(None, description="the policy's message, where the answer is withheld")


class Choice(BaseModel):
    """The answer to one prompt: ``message`` of a chat, ``text`` of a text completion."""

    index: int
    message: AnswerMessage | None = None
    text: str | None = None
    finish_reason: Literal["stop", "length", "content_filter"]
    logprobs: None = None


class OpenAIResponse(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: OpenAIUsage
    hallutracer: dict[str, Any] = Field(description="bundle, policy, guarantee and data as /v1/risk/score answers them")


def withheld(report: RiskReport) -> bool:
    """Whether the prompt gets no answer."""
    return report.decision is not Decision.CONTINUE


def annotation(report: RiskReport) -> str:
    """What stands before an answer that is given with a warning."""
    message = report.verdict.message
    return "" if message is None or withheld(report) else f"{message}\n\n"


def finish_reason(report: RiskReport) -> str:
    """Of a whole answer: why it ends where it does."""
    if report.completion is None:
        return WITHHELD
    return "stop" if report.completion.finish_reason == "stop" else "length"


def refusal(report: RiskReport, message_in_content: bool) -> dict[str, Any]:
    """What the message of a withheld answer holds; many clients show its ``content`` and drop its ``refusal``."""
    message = report.verdict.message
    return {"content": message if message_in_content else None, "refusal": message}


def response(kind: Kind, reply: Reply, message_in_content: bool) -> dict[str, Any]:
    """The whole document; keys without a value are those that OpenAI's have, too."""
    reports = reply.judgement.reports
    return head(kind, reply.judgement) | {
        "choices": [_choice(kind, index, report, message_in_content) for index, report in enumerate(reports)],
        "usage": counted(reports),
        "hallutracer": note(reply.judgement),
    }


def head(kind: Kind, judgement: Judgement, chunk: bool = False) -> dict[str, Any]:
    """What each event of a stream begins with, too."""
    return {
        "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{judgement.request_id}",
        "object": "chat.completion.chunk" if kind == "chat" and chunk else OBJECTS[kind],
        "created": judgement.created,
        "model": judgement.model,
    }


def note(judgement: Judgement) -> dict[str, Any]:
    """Return the risks, without the answers."""
    risks = [risk_out(one.index, replace(one.report, completion=None)) for one in judgement.prompts]
    found, retrieved = risk_note(judgement, risks), retrieval_out(judgement)
    return found if retrieved is None else found | {"retrieval": retrieved.model_dump(exclude_none=True)}


def counted(reports: list[RiskReport]) -> dict[str, Any]:
    """The usage."""
    counts = usage(reports)
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.total_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


def _choice(kind: Kind, index: int, report: RiskReport, message_in_content: bool) -> dict[str, Any]:
    completion = report.completion
    if completion is None:
        said = refusal(report, message_in_content)
    else:
        said = {"content": annotation(report) + completion.text, "refusal": None}
    end = {"finish_reason": finish_reason(report), "logprobs": None}
    if kind == "text":
        return {"index": index, "text": said["content"] or "", **end}
    return {"index": index, "message": {"role": "assistant", **said}, **end}


async def chunks(
    kind: Kind,
    reply: Reply,
    with_usage: bool,
    message_in_content: bool,
    foreign: AsyncGenerator[dict[str, Any], None] | None = None,
) -> AsyncIterator[bytes]:
    """The stream of one prompt; ``foreign`` are the chunks of the server that answers instead."""
    same = head(kind, reply.judgement, chunk=True) | ({"usage": None} if with_usage else {})
    reports = reply.judgement.reports
    report = reports[0]
    first: dict[str, Any] = {"role": "assistant", "content": annotation(report)}
    end = None
    if foreign is None and withheld(report):
        first, end = {"role": "assistant", **refusal(report, message_in_content)}, WITHHELD
    yield _event(same | {"choices": [_delta(kind, first, end)], "hallutracer": note(reply.judgement)})
    if foreign is not None:
        try:
            async with aclosing(foreign), aclosing(_in_time(reply, foreign)) as timely:
                async for chunk in timely:
                    yield _event(same | chunk)
        except Exception as error:
            yield failure(reply, error)
        yield DONE
        return
    if end is None:
        try:
            async for pieces in reply.handle.pieces():
                for piece in pieces:
                    yield _event(same | {"choices": [_delta(kind, {"content": piece})]})
                await asyncio.sleep(0)  # neither a full queue nor a free socket suspends: let other requests run
            reports = await reply.handle.answers()
        except Exception as error:
            yield failure(reply, error)
            yield DONE
            return
        yield _event(same | {"choices": [_delta(kind, {}, finish_reason(reports[0]))]})
    if with_usage:
        yield _event(same | {"choices": [], "usage": counted(reports)})
    yield DONE


async def _in_time(reply: Reply, foreign: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    """Each chunk before the request's deadline.  Raises DeadlineExceeded."""
    while True:
        try:
            async with reply.handle.deadline.enforced():
                chunk = await anext(foreign)
        except StopAsyncIteration:
            return
        yield chunk


def _delta(kind: Kind, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    end = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
    return end | ({"delta": delta} if kind == "chat" else {"text": delta.get("content") or ""})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
