"""What the routes of other protocols share: from a request to its reply, and what is said of an
answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request, Response

from service.api import reply as wire
from service.api.request_schema import AnswerRequest, Arguments, Kind
from service.api.score import answer, beyond_limit, requested
from service.engines.base import Sampling
from service.engines.formats import Format
from service.errors import RequestError
from service.judging.decoding import decoding_for
from service.policies.guard import Action, Decision
from service.scoring import RiskReport
from service.serving.admission import Deadline
from service.serving.judgement import Judgement
from service.serving.service import Service
from service.tool_calls import Tools
from service.turn import Outcome

RISKS = "bundle, policy, guarantee and data as /v1/risk/score answers them"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be answered, and what a route makes of it."""

    route: str
    kind: Kind = "messages"
    prompts: Sequence[Any]
    field: str  # that they came in, for messages
    most: int  # tokens of an answer
    most_field: str = "max_tokens"  # that they came in
    forwards: bool = False  # whether another server may answer on this route
    tools: Tools | None = None  # that the model is told of
    format: Format | None = None  # of the answer


async def answered(
    request: Request, service: Service, body: AnswerRequest, wanted: Wanted
) -> wire.Reply:
    """Return the reply, as ``score.answer`` does, under the bundle, policy and threshold that the
    body chooses."""
    deadline, limit = Deadline(service.settings.deadline_s), service.settings.max_new_tokens
    chosen, kind, prompts = body.vllm_xargs or Arguments(), wanted.kind, wanted.prompts
    asked = requested(
        request,
        service,
        wanted.route,
        kind,
        prompts,
        wanted.field,
        model=body.model,
        bundle=chosen.hallutracer_bundle,
        policy=chosen.hallutracer_policy,
        threshold=chosen.hallutracer_threshold,
    )
    policy = asked.policy
    if body.stream and len(prompts) != 1:
        raise RequestError(
            "'stream' takes exactly one prompt; send one request per prompt", param="prompt"
        )
    if policy.action is Action.FALLBACK and not wanted.forwards:
        said = (
            f"policy {policy.name!r} may send a prompt on, in OpenAI's older protocol, which this"
            " route does not "
        )
        raise RequestError(
            said + "speak: ask /v1/chat/completions, or under another policy", param="policy"
        )
    if policy.action is Action.FALLBACK and (len(prompts) != 1 or kind == "input_ids"):
        raise RequestError(
            f"policy {policy.name!r} may send a prompt on: give exactly one, as text",
            param="prompt",
        )
    if wanted.most > limit:
        raise RequestError(beyond_limit(limit, wanted.most), param=wanted.most_field)
    decoding = decoding_for(
        asked.scorer.bundle.manifest, service.settings.decoding, body.temperature, body.top_p
    )
    sampling = Sampling(
        wanted.most,
        decoding.temperature,
        decoding.top_p,
        body.seed,
        body.stops(),
        format=wanted.format,
    )
    return await answer(
        request,
        service,
        replace(
            asked,
            sampling=sampling,
            deadline=deadline,
            stream=bool(body.stream),
            retrieval_of=chosen.hallutracer_retrieval_of,
            running=bool(chosen.hallutracer_include),
            tools=wanted.tools,
            of_template=body.of_template(),
        ),
    )


def withheld(report: RiskReport) -> bool:
    """Return whether an answer to a prompt that is only scored would not be given."""
    return report.decision is not Decision.CONTINUE


def annotation(report: RiskReport, found: Format | None = None) -> str:
    """Return what stands before an answer that is given with a warning; nothing before one of a
    format.

    Its reader would not find the JSON that was asked for; ``hallutracer`` has the message all the
    same."""
    message = report.verdict.message
    return (
        ""
        if message is None or report.outcome is Outcome.WITHHELD or found is not None
        else f"{message}\n\n"
    )


def note(judgement: Judgement, reports: Sequence[RiskReport] | None = None) -> dict[str, Any]:
    """Return the risks, without the answers; ``reports``: those at the end of a stream, with the
    answers' own risks."""
    found = judgement.reports if reports is None else reports
    risks = [
        wire.risk_out(one.index, replace(report, completion=None))
        for one, report in zip(judgement.prompts, found, strict=True)
    ]
    said, retrieved = wire.risk_note(judgement, risks), wire.retrieval_out(judgement)
    return (
        said if retrieved is None else said | {"retrieval": retrieved.model_dump(exclude_none=True)}
    )


def beside(noted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field that holds a note, where there is one."""
    return {"hallutracer": noted} if noted else {}


def whole(reply: wire.Reply, content: Mapping[str, Any]) -> Response:
    """Return an answer in one piece."""
    document = json.dumps(content, ensure_ascii=False)
    return Response(document, media_type="application/json", headers=reply.headers())
