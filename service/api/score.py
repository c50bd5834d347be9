"""POST /v1/risk/score and its alias /score: the risk of each prompt, and the answer where the
policy lets it go on."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from service.access.routes import SCORE_ROUTES
from service.api import reply as wire
from service.api.asking import answer, check_limit, requested
from service.api.auth import TheService
from service.api.json_body import JsonRoute
from service.api.request_schema import EXAMPLES, Include, ScoreRequest
from service.engines.base import Sampling
from service.errors import RequestError
from service.judging.decoding import decoding_for
from service.scoring import RiskReport
from service.serving.admission import Deadline
from service.serving.dispatcher import Piece

router = APIRouter(tags=["risk"], route_class=JsonRoute)

_EVENTS = wire.events_schema("first one risk.list, then completion.chunk objects or an error")
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": wire.ScoreResponse,
        "headers": wire.HEADERS,
        "description": "the risks, or with 'stream' the events: the risk first, then the answer",
        "content": {
            "application/json": {"example": EXAMPLES["risk"]},
            "text/event-stream": {"schema": _EVENTS, "example": EXAMPLES["stream"]},
        },
    },
    **wire.FAILURES,
}
SUMMARY = "Risk of each prompt before it is answered, and the answer if the policy lets it"


@router.post(SCORE_ROUTES[0], summary=SUMMARY, responses=RESPONSES)
@router.post(SCORE_ROUTES[1], summary=SUMMARY, responses=RESPONSES)
async def score(
    body: Annotated[ScoreRequest, Body(openapi_examples=EXAMPLES["score"])],
    request: Request,
    service: TheService,
) -> Response:
    """The risk of each prompt's answer, before its first token; with ``generate``, the answer where
    it may go on."""
    kind, prompts = body.given()
    names = {name: getattr(body, name) for name in ("bundle", "model", "policy", "threshold")}
    spec = requested(request, service, SCORE_ROUTES[0], kind, prompts, **names)
    sampling = None
    if (wanted := body.generate) is not None:
        check_limit(wanted.max_tokens, "generate.max_tokens", service.settings)
        manifest = spec.scorer.bundle.manifest
        decoding = decoding_for(manifest, "bundle", wanted.temperature, wanted.top_p)
        sampling = Sampling(
            wanted.max_tokens, decoding.temperature, decoding.top_p, wanted.seed, tuple(wanted.stop)
        )
    deadline, most = None, service.settings.deadline_s * 1e3
    if body.deadline_ms is not None:
        if body.deadline_ms > most:
            raise RequestError(f"deadline_ms is at most {most:g} here", param="deadline_ms")
        deadline = Deadline(body.deadline_ms / 1e3)
    spec = replace(
        spec,
        sampling=sampling,
        stream=body.stream,
        deadline=deadline,
        retrieval_of=body.retrieval_of,
        running="answer_risk" in body.include,
    )
    reply = await answer(request, service, spec)
    return wire.send(ScoreWire(reply, body.include), stream=body.stream)


class ScoreWire(wire.Wire):
    """Our own protocol: a list of risks, and of a stream's one prompt the answer in chunks."""

    done = wire.DONE

    def __init__(self, reply: wire.Reply, include: Collection[Include]) -> None:
        super().__init__(reply)
        self._include = include

    def head(self) -> bytes:
        """Return the list of risks, as one event."""
        return wire.event(self.whole())

    def text(self, piece: Piece) -> bytes:
        """Return a chunk."""
        return self._chunk(piece.text, **wire.running_note(piece.answer))

    def end(self, reports: list[RiskReport]) -> bytes:
        """Return the last chunk, with the usage; none of a withheld answer."""
        if self.withheld:
            return b""
        report = reports[0]
        risk = wire.answer_note(report.answer, report.decoding)
        usage = wire.usage(reports).model_dump()
        return self._chunk("", wire.finish_reason(report.shown), usage=usage, **risk)

    def whole(self) -> str:
        """Return the list of risks, with the answers that are there."""
        response = wire.score_response(self.judgement, self._include)
        return response.model_dump_json(exclude_none=True)

    def _chunk(self, text: str, finish_reason: str | None = None, **more: Any) -> bytes:
        same = {"id": self.judgement.answer_id, "object": "completion.chunk", "index": 0}
        content = same | {"delta": {"text": text}, "finish_reason": finish_reason} | more
        return wire.event(json.dumps(content, ensure_ascii=False, separators=(",", ":")))
