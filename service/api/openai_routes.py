"""POST /v1/chat/completions and /v1/completions, for clients of OpenAI's API: the answer, where its risk allows one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from service.access.routes import CHAT_ROUTE, TEXT_ROUTE
from service.api.answering import ScoringRequest, answer, encoded, rendered_chat, session_of, while_connected
from service.api.auth import TheService, caller_of
from service.api.body import JsonRoute
from service.api.forwarding import Forwarder
from service.api.openai_request import (
    OPENAI_TEMPERATURE,
    Arguments,
    ChatRequest,
    OpenAIRequest,
    TextRequest,
    size,
)
from service.api.openai_response import Kind, OpenAIResponse, chunks, response
from service.api.reply import EventStream
from service.api.response_schema import FAILURES, HEADERS, events
from service.engines.base import Sampling
from service.errors import RequestError
from service.judging.guarantee import NO_TEMPLATE, TOKEN_IDS, chat_violations
from service.policies.guard import Action, Decision
from service.scoring import Scorer
from service.serving.admission import Deadline
from service.serving.feedback import Content
from service.serving.service import Service

router = APIRouter(tags=["openai"], route_class=JsonRoute)
_ANSWERED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": OpenAIResponse,
        "description": "the answer, or with 'stream' its chunks; of a withheld answer its refusal",
        "headers": HEADERS,
        "content": {
            "text/event-stream": {
                "schema": events(
                    "chat.completion.chunk or text_completion objects, the first with the risk, or an error"
                )
            }
        },
    }
}
RESPONSES = _ANSWERED | FAILURES


@router.post(CHAT_ROUTE, summary="Chat, as OpenAI's, with the risk beside the answer", responses=RESPONSES)
async def chat(body: Annotated[ChatRequest, Body()], request: Request, service: TheService) -> Response:
    """An answer to a conversation; its risk is known before its first token."""
    conversation = body.conversation()
    return await _served(
        "chat",
        body,
        request,
        service,
        limit=body.limit(service.settings.max_new_tokens),
        count=1,
        length=size([message["content"] for message in conversation]),
        token_ids=lambda scorer: rendered_chat(scorer, conversation, service.settings),
        contents=[{"messages": conversation}],
        violations=chat_violations(conversation),
    )


@router.post(TEXT_ROUTE, summary="Text completion, as OpenAI's, with the risk", responses=RESPONSES)
async def text(body: Annotated[TextRequest, Body()], request: Request, service: TheService) -> Response:
    """A continuation of each prompt, which goes through no chat template."""
    prompts = body.prompts()
    as_ids = bool(prompts) and not isinstance(prompts[0], str)

    def token_ids(scorer: Scorer) -> list[list[int]]:
        if not as_ids:
            return encoded(scorer, prompts, scorer.engine.tokenize)  # type: ignore[arg-type]
        scorer.engine.check(prompts)  # type: ignore[arg-type]
        return prompts  # type: ignore[return-value]

    return await _served(
        "text",
        body,
        request,
        service,
        limit=body.limit(service.settings.max_new_tokens),
        count=len(prompts),
        length=size(prompts),
        token_ids=token_ids,
        contents=[{"input_ids" if as_ids else "text": prompt} for prompt in prompts],
        violations=(TOKEN_IDS,) if as_ids else (NO_TEMPLATE,),
    )


async def _served(
    kind: Kind,
    body: OpenAIRequest,
    request: Request,
    service: Service,
    *,
    limit: int,
    count: int,
    length: int,
    token_ids: Callable[[Scorer], list[list[int]]],
    contents: list[Content],
    violations: tuple[str, ...],
) -> Response:
    caller, chosen = caller_of(request, service), body.vllm_xargs or Arguments()
    deadline = Deadline(service.settings.deadline_s)
    scorer, policy = service.ready.choose(
        caller,
        route := CHAT_ROUTE if kind == "chat" else TEXT_ROUTE,
        bundle=chosen.hallutracer_bundle,
        model=body.model,
        policy=chosen.hallutracer_policy,
        threshold=chosen.hallutracer_threshold,
        session=session_of(request, lambda: contents),
    )
    if body.stream and count != 1:
        raise RequestError("'stream' takes exactly one prompt; send one request per prompt", param="prompt")
    if policy.action is Action.FALLBACK and (count != 1 or TOKEN_IDS in violations):
        raise RequestError(f"policy {policy.name!r} may send a prompt on: give exactly one, as text", param="prompt")
    if scorer.prompt_format != "chat":
        violations = tuple(one for one in violations if one != NO_TEMPLATE)
    asked = ScoringRequest(
        scorer,
        policy,
        caller,
        count=count,
        field="messages" if kind == "chat" else "prompt",
        size=length,
        token_ids=lambda: token_ids(scorer),
        sampling=_sampling(body, limit, service.settings.max_new_tokens, deadline),
        deadline=deadline,
        stream=bool(body.stream),
        violations=violations,
        retrieval_of=chosen.hallutracer_retrieval_of,
        contents=lambda: [_as_trained(one, scorer) for one in contents],
    )
    reply = await answer(request, service, asked)
    forwarder: Forwarder = request.app.state.forwarder
    upstream = policy.upstream if reply.judgement.reports[0].decision is Decision.FALLBACK else None
    sent_on = body.model_dump(mode="json", exclude_none=True, exclude={"vllm_xargs"})
    in_content, trace = service.settings.message_in_content, reply.record.trace
    if body.stream:
        foreign = None if upstream is None else forwarder.stream(upstream, route, sent_on, trace)
        return EventStream(reply, chunks(kind, reply, body.with_usage, in_content, foreign))
    try:
        content = response(kind, reply, in_content)
        if upstream is not None:
            async with while_connected(request), reply.handle.deadline.enforced():
                content |= await forwarder.whole(upstream, route, sent_on, trace)
    finally:
        reply.end()
    text = json.dumps(content, ensure_ascii=False)
    return Response(text, media_type="application/json", headers=reply.headers())


def _as_trained(content: Content, scorer: Scorer) -> Content:
    """A text that goes through no template is a prompt where the bundle's own rows went through none."""
    return {"prompt": content["text"]} if "text" in content and scorer.prompt_format == "text" else content


def _sampling(body: OpenAIRequest, limit: int, most: int, deadline: Deadline) -> Sampling:
    if limit > most:
        raise RequestError(f"at most {most} answer tokens here, not {limit}", param="max_tokens")
    temperature = OPENAI_TEMPERATURE if body.temperature is None else body.temperature
    until = math.inf if body.names_length else deadline.nearly
    return Sampling(limit, temperature, 1.0 if body.top_p is None else body.top_p, body.seed, body.stops(), until)
