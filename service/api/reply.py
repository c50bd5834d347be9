"""From a judgement to the wire: the schema of a risk, what is noted of it in every protocol, and
how a response is sent.

A protocol is one renderer, a ``Wire``: it writes an answer as one document, or as the events of a
stream."""

from __future__ import annotations

import asyncio
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, create_model
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from service.api.error_bodies import error_body
from service.api.request_schema import Include, Risk, Strict
from service.engines.base import Completion
from service.engines.formats import Format
from service.errors import ClientGone, DeadlineExceeded, HalluTracerError
from service.judging.guarantee import GuaranteeStatus
from service.policies.guard import Decision
from service.risk import running_means
from service.scoring import RiskReport, Scorer
from service.serving import observers
from service.serving.dispatcher import Piece, RequestHandle
from service.serving.judgement import Judgement
from service.serving.request_log import RequestRecord, log_failure
from service.serving.service import Service
from service.tool_calls import CallReader, Part, ToolCall, Tools
from service.turn import AnswerRisk, Outcome


class BundleRef(Strict):
    """The bundle whose probes gave the risk."""

    name: str
    version: int
    digest: str


class CompletionOut(Strict):
    """The answer, decoded from the same KV cache as the risk."""

    text: str
    finish_reason: Literal["stop", "length", "content_filter"] = Field(
        description=(
            "content_filter: the policy ended it where the risk of its own tokens reached stop_at"
        )
    )
    completion_tokens: int


class GuaranteeOut(Strict):
    """The promise of the bundle's threshold, as it stands for this request."""

    alpha: float = Field(
        description=(
            "of the question groups that are answered, counted equally, at most this share is"
            " answered with a hallucination"
        )
    )
    delta: float = Field(description="the promise has confidence 1 - delta")
    holds: bool = Field(
        description="nothing is known here that voids it; GET /v1/bundles has its whole statement"
    )
    void: list[str] = Field(description="why it does not hold for this request")


class RiskOut(Strict):
    """One prompt's risk."""

    index: int
    risk: Risk
    depth_mean: float
    decision: Annotated[
        str, WithJsonSchema({"type": "string", "enum": [*map(str, Decision)], "title": "Decision"})
    ]
    flagged: bool = Field(
        description="the risk applies and reached the threshold, whatever the policy's action"
    )
    threshold: float

    interval: list[Risk] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description=(
            "where 95 % of refits on other "
            "training rows would put the risk; not where the truth lies"
        ),
    )
    outside_training: bool | None = Field(
        None, description="the prompt is unlike all that the bundle was trained on"
    )
    outside_because: str | None = Field(None, description="why it does; null where it does not")
    distance: float | None = Field(
        None, description="of the prompt's logits to training's; outside from 1 on"
    )
    applies: bool | None = Field(
        None,
        description=(
            "false: the prompt asks for no fact, so the risk says nothing of "
            "it; null: the bundle cannot tell"
        ),
    )
    tool_call: bool | None = Field(
        None,
        description=(
            "an answer would have been withheld; this is nothing but "
            "calls of the request's tools, and is given"
        ),
    )
    decoding: str | None = Field(
        None,
        description=(
            "how the answer is decoded otherwise than those were that `risk` "
            "and `answer_risk` were trained on; null: it is not, or none is wanted"
        ),
    )
    passage_truth: float | None = Field(
        None,
        description=(
            "where a passage stands beside the question and the policy "
            "takes only this share of passages for true; `risk` and `interval` are so already"
        ),
    )
    decided_by: str | None = Field(
        None,
        description=(
            "the default bundle, as name:version, where its verdict on the "
            "same prefill decides although `bundle`, a canary, lets the answer pass"
        ),
    )

    asks: Risk | None = Field(None, description="the probability that the prompt asks for a fact")
    message: str | None = Field(
        None, description="to show instead of an answer; before it, if that is given"
    )
    trajectory: list[float] | None = Field(None, description="truth logit of each layer")
    running_mean: list[float] | None = Field(
        None, description="mean of the truth logits up to each layer"
    )
    completion: CompletionOut | None = None
    answer_risk: Risk | None = Field(
        None,
        description=(
            "that the answer is wrong, by its own tokens; if the bundle and the engine read answers"
        ),
    )
    answer_flagged: bool | None = Field(
        None, description="that risk reached the bundle's threshold for answers"
    )
    answer_tokens: int | None = Field(None, description="of the answer that were read for it")


class Usage(Strict):
    """Token counts, as vLLM and OpenAI name them."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int


class RetrievalOut(Strict):
    """What fetching a passage changed."""

    of: str = Field(description="id of the earlier answer")
    known: bool = Field(
        description="this service remembers its risk, and the same bundle says both"
    )
    risk_before: Risk | None = None
    drop: float | None = Field(None, description="risk_before minus the risk now")


class ScoreResponse(Strict):
    """A list of risks, in the order of the prompts."""

    id: str
    object: Literal["risk.list"] = "risk.list"
    created: int
    model: str
    policy: str
    bundle: BundleRef
    guarantee: GuaranteeOut | None = Field(None, description="if the bundle has one")
    retrieval: RetrievalOut | None = Field(None, description="if the request names an earlier one")
    data: list[RiskOut]
    usage: Usage


_ERROR = create_model(
    "ErrorBody",
    __doc__="The cause and the remedy.",
    message=str,
    type=Literal["invalid_request_error", "server_error"],
    param=str | None,
    code=str,
)
_ERROR_RESPONSE = create_model("ErrorResponse", __doc__="The error envelope.", error=_ERROR)


def events_schema(data: str, end: str = "; at last [DONE]") -> dict[str, Any]:
    """Return the schema of server-sent events, as their readers see each; ``data``: what its JSON
    may be."""
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "description": f"JSON: {data}{end}"}},
    }


HEADERS: dict[str, Any] = {
    name: {"description": description, "schema": {"type": "string"}}
    for name, description in {
        "x-request-id": "the request's own, or a generated one",
        "x-queue-time": "milliseconds until the forward pass began",
        "x-total-time": "milliseconds until the answer began",
        "x-inference-time": "milliseconds of prefill, probe and decoding",
        "x-hallutracer-bundle": "name:version of the bundle",
        "x-hallutracer-risk": "if there is one prompt",
        "x-hallutracer-decision": "if there is one prompt",
    }.items()
}
_RETRY = {
    "headers": {"Retry-After": {"description": "seconds to wait", "schema": {"type": "integer"}}}
}


def errors(**descriptions: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of the error envelope: ``errors(_404="no such bundle")``."""
    return {
        int(status.removeprefix("_")): (
            {"model": _ERROR_RESPONSE, "description": description}
            | (_RETRY if status in ("_429", "_503") else {})
        )
        for status, description in descriptions.items()
    }


FAILURES = errors(
    _400=(
        "the body is not JSON, or not encoded as declared; on OpenAI's routes also a prompt that is"
        " too long"
    ),
    _401="no bearer key, or an unknown one",
    _403="the request lets more through than its caller may (--callers-may)",
    _404="no such model, bundle or policy is loaded",
    _408="the body did not arrive in time",
    _413="the body or a prompt is too large; prompts are never truncated",
    _415="the body's Content-Encoding is not taken; Accept-Encoding names those that are",
    _422="a field is wrong, or not supported",
    _429="the queue is full",
    _500="the engine failed",
    _502="the server that the policy falls back on failed",
    _503="not ready: loading, or shutting down; or no memory for the body: Retry-After",
    _504="the deadline passed",
)
"""Of every route that reads a prompt."""
_AS_400 = "the body is not JSON, the prompt is too long, or a field is wrong or not supported"
FAILURES_400 = {
    status: response for status, response in FAILURES.items() if status not in (422, 502)
} | errors(_400=_AS_400)
# else FastAPI adds a 422
FAILURES_400["default"] = {"model": _ERROR_RESPONSE, "description": "any other error"}
"""Of a route in whose protocol a wrong field is a 400, and where no other server answers."""


@dataclass(frozen=True)
class Reply:
    """A judgement on its way to whoever asked, and the work that goes on behind it."""

    judgement: Judgement
    handle: RequestHandle
    service: Service
    record: RequestRecord

    def headers(self) -> dict[str, str]:
        """Return times in ms, of the prompt that took longest, and ``risk_headers``."""
        jobs = [(job.timings, job.decode_s or 0.0) for job in self.handle.jobs]
        return {
            "x-queue-time": f"{max(times.queue for times, _ in jobs) * 1e3:.3f}",
            "x-inference-time": (
                f"{max(times.prefill + times.probe + decode for times, decode in jobs) * 1e3:.3f}"
            ),
        } | risk_headers(self.judgement.scorer, self.judgement.reports)

    def end(self) -> None:
        """Tell the observers that nothing more will be sent.  Once."""
        answers = [self.handle.jobs[prompt.index].end() for prompt in self.judgement.prompts]
        observers.ended(self.service, self.judgement, answers, self.record)


def score_response(judgement: Judgement, include: Collection[Include] = ()) -> ScoreResponse:
    """Return the document that answers a scoring request, over HTTP and on the command line."""
    data = [risk_out(prompt.index, prompt.report, include) for prompt in judgement.prompts]
    return ScoreResponse(
        id=judgement.answer_id,
        created=judgement.created,
        model=judgement.model,
        policy=judgement.policy.name,
        bundle=bundle_ref(judgement.scorer),
        guarantee=guarantee_out(judgement.guarantee),
        retrieval=retrieval_out(judgement),
        data=data,
        usage=usage(judgement.reports),
    )


def retrieval_out(judgement: Judgement) -> RetrievalOut | None:
    """Return what the passage changed; None where the request names no earlier one."""
    if (named := judgement.retrieval) is None:
        return None
    if (first := named.first) is None or first.digest != judgement.digest:
        return RetrievalOut(of=named.of, known=False, drop=None)
    drop = first.risk - judgement.reports[0].risk
    return RetrievalOut(of=named.of, known=True, risk_before=first.risk, drop=drop)


def usage(reports: Sequence[RiskReport]) -> Usage:
    """Return the token counts of a request."""
    prompts = sum(report.prompt_tokens for report in reports)
    answers = sum(report.shown.tokens for report in reports if report.outcome.shows)
    cached = sum(report.cached_tokens for report in reports)
    return Usage(
        prompt_tokens=prompts,
        cached_tokens=cached,
        completion_tokens=answers,
        total_tokens=prompts + answers,
    )


def risk_out(index: int, report: RiskReport, include: Collection[Include] = ()) -> RiskOut:
    """Return one prompt's place in ``data``."""
    verdict, known = report.verdict, report.uncertain
    return RiskOut(
        index=index,
        risk=report.risk,
        depth_mean=report.depth_mean,
        decision=verdict.decision.value,
        flagged=verdict.flagged,
        threshold=verdict.threshold,
        message=verdict.message,
        interval=list(known.interval) if known.interval else None,
        outside_training=known.outside,
        outside_because=known.outside_because,
        distance=known.distance,
        applies=report.context.said,
        asks=report.context.asks,
        tool_call=report.tool_call or None,
        decoding=report.decoding,
        decided_by=report.decided_by,
        passage_truth=report.passage_truth,
        trajectory=report.trajectory.tolist() if "trajectory" in include else None,
        running_mean=(
            running_means(report.trajectory).tolist() if "running_mean" in include else None
        ),
        completion=None if report.completion is None else completion_out(report.completion),
        **answer_note(report.answer),
    )


def risk_note(judgement: Judgement, reports: Sequence[RiskReport] | None = None) -> dict[str, Any]:
    """Return ``hallutracer`` of other protocols' responses: the risks, without the answers.

    ``reports``: those at the end of a stream, with the answers' own risks."""
    guarantee, retrieval = guarantee_out(judgement.guarantee), retrieval_out(judgement)
    risks = list[dict[str, Any]]()
    for prompt, report in zip(judgement.prompts, reports or judgement.reports, strict=True):
        risk = risk_out(prompt.index, replace(report, completion=None))
        risks.append(risk.model_dump(exclude_none=True))
    content: dict[str, Any] = {
        "bundle": bundle_ref(judgement.scorer).model_dump(),
        "policy": judgement.policy.name,
    }
    if guarantee is not None:
        content["guarantee"] = guarantee.model_dump()
    content["data"] = risks
    if retrieval is not None:
        content["retrieval"] = retrieval.model_dump(exclude_none=True)
    return content


def risk_field(risk: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field that holds a note, where there is one."""
    return {"hallutracer": risk} if risk else {}


def bundle_ref(scorer: Scorer) -> BundleRef:
    """Return name, version and digest of the bundle that produced the risk."""
    manifest = scorer.bundle.manifest
    return BundleRef(name=manifest.name, version=manifest.version, digest=manifest.digest)


def guarantee_out(status: GuaranteeStatus | None) -> GuaranteeOut | None:
    """Return the bundle's guarantee as it stands for a request; None where it has none."""
    if status is None:
        return None
    return GuaranteeOut(
        alpha=status.alpha, delta=status.delta, holds=status.holds, void=list(status.violations)
    )


def risk_headers(scorer: Scorer, reports: Sequence[RiskReport]) -> dict[str, str]:
    """Return the bundle; risk and decision where there is one prompt."""
    headers = {"x-hallutracer-bundle": scorer.bundle.reference}
    if len(reports) == 1:
        headers["x-hallutracer-risk"] = f"{reports[0].risk:.6f}"
        headers["x-hallutracer-decision"] = reports[0].decision.value
    return headers


def answer_note(answer: AnswerRisk | None, decoding: str | None = None) -> dict[str, Any]:
    """Return what is said of a finished answer; nothing where it was not read.

    ``decoding``: how it departs from the answers that its own risk was trained on, too."""
    if answer is None:
        return {}
    departs = {} if decoding is None else {"decoding": decoding}
    return running_note(answer) | {"answer_flagged": answer.flagged} | departs


def running_note(answer: AnswerRisk | None) -> dict[str, Any]:
    """Return what is said of an answer under way; nothing where it is not wanted or was not
    read."""
    return {} if answer is None else {"answer_risk": answer.risk, "answer_tokens": answer.tokens}


RISKS = "bundle, policy, guarantee and data as /v1/risk/score answers them"  # of that field


def completion_out(completion: Completion) -> CompletionOut:
    """Return an answer."""
    assert completion.finish_reason != "cancelled", "a cancelled answer has no reader"
    return CompletionOut(
        text=completion.text,
        finish_reason=finish_reason(completion),
        completion_tokens=completion.tokens,
    )


def finish_reason(completion: Completion) -> Literal["stop", "length", "content_filter"]:
    """Return why an answer ended, in OpenAI's words."""
    return FINISHED.get(completion.finish_reason, "length")


FINISHED: dict[str, Literal["stop", "length", "content_filter"]] = {
    "stop": "stop",
    "content_filter": "content_filter",
}
DONE = b"data: [DONE]\n\n"
SLOW_READER_S = 5.0  # beyond the deadline, for a reader that is slow rather than gone


class Wire(ABC):
    """How one protocol writes an answer: whole, or as a stream of ``head``, ``text`` for each
    piece, and ``end`` or ``failed``; at last ``done``.

    Of an answer that is withheld no piece comes: what is said instead is in ``head`` and ``end``.
    """

    done = b""

    def __init__(
        self, reply: Reply, tools: Tools | None = None, format: Format | None = None
    ) -> None:
        """``tools``: those that the model is told of.  ``format``: of the answer."""
        self.reply, self.judgement = reply, reply.judgement
        self.report = self.judgement.reports[0]  # of a stream as it is before the answer
        self.tools, self._format = tools, format
        self._reader = None if tools is None else CallReader(tools)

    @abstractmethod
    def head(self) -> bytes:
        """Return what a stream begins with: the risk."""

    @abstractmethod
    def text(self, piece: Piece) -> bytes:
        """Return the events of one more piece of the answer."""

    @abstractmethod
    def end(self, reports: list[RiskReport]) -> bytes:
        """Return how the answer has ended."""

    @abstractmethod
    def whole(self) -> str:
        """Return the only document."""

    def failed(self, error: HalluTracerError) -> bytes:
        """Return the event of an error after the status line."""
        return event(json.dumps(error_body(error.status, error.message, error.code, error.param)))

    @property
    def withheld(self) -> bool:
        """Return whether no answer is shown."""
        return self.report.outcome is Outcome.WITHHELD

    @property
    def refusal_in_content(self) -> bool:
        """Return whether the policy's message also stands where a withheld answer's text would."""
        return self.reply.service.settings.message_in_content

    def warning(self, report: RiskReport) -> str:
        """Return what stands before an answer that is given with a warning; nothing before one of
        a format.

        Its reader would not find the JSON that was asked for; the note has the message all the
        same."""
        message = report.verdict.message
        shown = report.outcome is not Outcome.WITHHELD and self._format is None
        return f"{message}\n\n" if shown and message is not None else ""

    def parts(self, text: str) -> Sequence[Part]:
        """Return the texts and calls that are known with one more piece."""
        return [text] if self._reader is None else self._reader.feed(text)

    def last_parts(self) -> Sequence[Part]:
        """Return those that were held when the answer ended."""
        return [] if self._reader is None else self._reader.end()

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return a whole answer's text and its calls."""
        parts = [text] if self.tools is None else self.tools.parts(text)
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts), [part for part in parts if isinstance(part, ToolCall)]


def send(wire: Wire, *, stream: bool | None) -> Response:
    """Return an answer as a stream, or as one document, with which the reply ends."""
    if stream:
        return EventStream(wire)
    wire.reply.end()
    return json_response(wire.whole(), wire.reply.headers())


def json_response(document: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a document that is JSON already."""
    return Response(document, media_type="application/json", headers=headers)


class EventStream(StreamingResponse):
    """Starts once the risks are known; whatever ends it also ends the work behind it."""

    def __init__(self, wire: Wire, answer: AsyncGenerator[bytes, None] | None = None) -> None:
        """``answer``: the events between head and end mark, where another server gives them."""
        self._reply = wire.reply
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **self._reply.headers()}
        content = _events(wire, decoded(wire) if answer is None else answer)
        super().__init__(content, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a client that goes away stops the decoding."""
        handle, record = self._reply.handle, self._reply.record
        try:
            # A reader that takes nothing blocks a send for ever, which no deadline of ours would
            # see.
            async with asyncio.timeout(max(0.0, handle.deadline.left) + SLOW_READER_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            # The server closes the connection of an unfinished response.
            record.code = DeadlineExceeded.code
        finally:
            if record.code is None and not handle.done.is_set():
                record.code = ClientGone.code
            handle.cancel()
            self._reply.end()


def call_id() -> str:
    """Return a fresh random id of a call, in OpenAI's form."""
    return f"call_{uuid.uuid4().hex}"


def event(document: str, name: str | None = None) -> bytes:
    """Return one server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {document}\n\n".encode()


async def _events(wire: Wire, answer: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    yield wire.head()
    try:
        async with aclosing(answer):
            async for events in answer:
                yield events
    except Exception as error:
        record = wire.reply.record
        log_failure(record.request_id, record.path, error)
        if not isinstance(error, HalluTracerError):  # of which no details are told
            error = HalluTracerError("an internal error under way")
        record.code = error.code
        yield wire.failed(error)
    yield wire.done


async def decoded(wire: Wire) -> AsyncGenerator[bytes, None]:
    """Yield the answer to a stream's one prompt as it is decoded, and its end.  Raises what the
    engine and the deadline raise."""
    handle = wire.reply.handle
    if wire.withheld:
        yield wire.end([wire.report])
        return
    async for pieces in handle.pieces():
        yield b"".join(map(wire.text, pieces))
        # Neither a full queue nor a free socket suspends: let other requests run.
        await asyncio.sleep(0)
    yield wire.end(await handle.answers())
