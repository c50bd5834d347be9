"""The note of one OpenAI request's risks, and the middleware that writes it into the response.  Plain ASGI.

``generation`` fills the note; a context variable connects the two across vLLM's own serving code.  It is written as
``hallutracer`` beside ``choices``.  A withheld answer's choice has no text, no counted token, the finish reason
``content_filter`` and, in chats, the policy's message as its ``refusal``: OpenAI's clients know both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.openai_routes import WITHHELD
from service.api.reply import answer_note, risk_headers, risk_note, risk_out
from service.audit.auditor import Who
from service.errors import NotReady
from service.judging.guarantee import Shape, chat_violations, shape_of
from service.policies.guard import Decision, Verdict
from service.scoring import AnswerRisk
from service.serving.judgement import Judgement

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations")
STREAMS_FIRST = ("/v1/responses",)  # begins its stream before it generates: a later refusal would cut it off
RENDERED = ("messages", "tools", "documents", "functions", "chat_template_kwargs")  # what a chat template may write
AS_TRAINED: dict[str, Any] = {
    "continue_final_message": False, "add_generation_prompt": True, "chat_template": None, "chat_template_kwargs": {},
    "add_special_tokens": False, "truncate_prompt_tokens": None,
}  # fmt: skip
"""Fields of a chat's body that change how its messages are rendered -> the values that change nothing, beside null."""
_FLAG = TypeAdapter(bool)
RETRY_S = 1
NO_PLACE = (
    "a policy that withholds answers applies to this request, and the response of this route cannot carry a verdict; "
    "use /v1/completions or /v1/chat/completions, or have the operator choose a policy that observes"
)
OURS = re.compile(r"hallu[_-]*tracer", re.IGNORECASE)  # how an argument of ours begins, well written or not


@dataclass
class Note:
    """One request's judgements, in the order of its prompts; None where there is none yet."""

    judgements: list[Judgement | None] = field(default_factory=list)
    unread: str | None = None  # why there is no risk
    choices: int = 1  # answers to each prompt (n)
    violations: tuple[str, ...] = ()  # of what a guarantee assumes, by the request
    route: str = ""  # that the request came by
    carries: bool = True  # whether the response has a place for it
    templated: bool = True  # whether its prompts go through the chat template
    moves: tuple[str, ...] = ()  # its fields that render its messages otherwise than training's were
    answered: tuple[str, ...] = ()  # ``chat_violations`` of its messages
    shapes: tuple[Shape, ...] = ()  # of its chats, in the order of its prompts; empty where they are not known
    beams: bool = False  # whether it asks for a beam search
    forges: str | None = None  # a special token that a message spells out: vLLM's renderer would take it for one
    misplaced: tuple[str, ...] = ()  # arguments of ours outside vllm_xargs
    xargs: dict[str, Any] = field(default_factory=dict)  # vllm_xargs of a beam search, which vLLM drops
    reads_answers: bool = False  # whether answers' own tokens are read
    answers: dict[int, AnswerRisk | None] = field(default_factory=dict)  # of what was read, where an answer has ended
    who: Who = Who()  # for the audit log; without a key's name, as vLLM's own keys have none

    def add(self) -> int:
        """Add a prompt and return its index."""
        self.judgements.append(None)
        return len(self.judgements) - 1

    def shape(self, place: int) -> Shape | None:
        """Return the shape of this prompt's chat; None where it is not known."""
        return self.shapes[place] if place < len(self.shapes) else None

    def withheld(self, place: int) -> Verdict | None:
        """Return the verdict that withheld this prompt's answer; None where none did, or not yet."""
        judgement = self.judgements[place] if place < len(self.judgements) else None
        verdict = None if judgement is None else judgement.reports[0].verdict
        return None if verdict is None or verdict.decision is Decision.CONTINUE else verdict

    def body(self) -> dict[str, Any] | None:
        """Return what the response says, with the violations of all its prompts; None: nothing yet."""
        if self.unread is not None:
            return {"error": self.unread}
        judged = [judgement for judgement in self.judgements if judgement is not None]
        if not judged:
            return None
        risks = [risk_out(one.index, one.report) for judgement in judged for one in judgement.prompts]
        return risk_note(replace(judged[-1], request_violations=self.violations), risks)

    def headers(self) -> dict[str, str]:
        """Return those of ``/v1/risk/score``, where there is one prompt."""
        if len(self.judgements) != 1 or (judgement := self.judgements[0]) is None:
            return {}
        return risk_headers(judgement.scorer, judgement.reports)


CURRENT: ContextVar[Note | None] = ContextVar("hallutracer_note", default=None)


class RiskNotes:
    """Gives each request a note and, on ``PATHS``, writes its content into the response."""

    def __init__(self, app: ASGIApp, refuses: Callable[[], bool], special_tokens: Callable[[], Sequence[str]] = tuple,
                 message_in_content: bool = False) -> None:  # fmt: skip
        """``refuses`` tells whether an answer without a verdict must not be sent; ``special_tokens`` are the model's.

        ``message_in_content`` also puts the policy's message where the answer's text would be."""
        self.app, self._refuses, self._message_in_content = app, refuses, message_in_content
        self._special_tokens = special_tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in STREAMS_FIRST and self._refuses():
            error = {"message": NO_PLACE, "type": "BadRequestError", "code": 400}
            return await JSONResponse({"error": error}, 400)(scope, receive, send)
        address = scope["client"][0] if scope.get("client") else None
        note = Note(carries=path in PATHS, who=Who(address=address), route=path)
        token, special = CURRENT.set(note), self._special_tokens()
        parts: list[bytes] = []  # the objects that the app keeps as well, until the body is complete

        async def reading() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    body = b"".join(parts)
                    parts.clear()
                    _read(note, body, special)
            return message

        try:
            writer = _ResponseWriter(note, send, self._message_in_content).send if note.carries else send
            await self.app(scope, reading, writer)
        finally:
            CURRENT.reset(token)


def _read(note: Note, body: bytes, special_tokens: Sequence[str]) -> None:
    """Note what vLLM loses, such as arguments of ours outside ``vllm_xargs`` and special tokens that a chat spells."""
    content = _parsed(body) or {}
    texts = [text for name in RENDERED for text in _strings(content.get(name))]
    note.forges = next((token for token in special_tokens if any(token in text for text in texts)), None)
    note.misplaced = tuple(name for name in content if OURS.match(name))
    chats = "messages" in content and note.route != PATHS[0]
    note.templated = chats and not ("prompt" in content and note.route == PATHS[3])  # which may read either
    messages = content["messages"] if chats and isinstance(content["messages"], list) else None
    batch = [] if messages is None else messages if messages and isinstance(messages[0], list) else [messages]
    turns = [chat if isinstance(chat, list) else [] for chat in batch]  # of each chat
    ends = [chat[-1] for chat in turns if chat and isinstance(chat[-1], dict)]
    note.moves = tuple(_moves(content)) if chats else ()
    note.answered = next(filter(None, (chat_violations([end]) for end in ends)), ())
    # Where its prompts are made of something else than its messages, their shape says nothing.
    note.shapes = tuple(map(shape_of, turns)) if note.templated and not note.moves else ()
    try:
        note.beams = _FLAG.validate_python(content.get("use_beam_search"))  # as vLLM reads a flag; it refuses others
    except ValidationError:
        note.beams = False
    xargs = content.get("vllm_xargs")
    if note.beams and isinstance(xargs, dict):
        note.xargs = xargs


class _ResponseWriter:
    """Sends the response's start with its first body, because only then are the headers known."""

    def __init__(self, note: Note, send: Send, message_in_content: bool) -> None:
        self._note, self._send, self._message_in_content = note, send, message_in_content
        self._start: Message | None = None
        self._streams, self._held = False, b""
        self._annotated: set[int] = set()
        self._complete = False  # whether nothing is left to write into the chunks to come

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            kind = MutableHeaders(scope=message).get("content-type", "")
            self._streams = kind.startswith("text/event-stream")
        elif message["type"] != "http.response.body":
            await self._send(message)
        else:
            self._held += message.get("body", b"")
            more = bool(message.get("more_body"))
            body: bytes | None = None
            if self._complete:
                body, self._held = self._held, b""
            elif self._streams:
                *events, self._held = self._held.split(b"\n\n")
                told = [b"data: " + self._annotated_body(event[6:]) if event.startswith(b"data: ") else event
                        for event in events]  # fmt: skip
                body = b"".join(event + b"\n\n" for event in told) + (b"" if more else self._held)
            elif not more:
                body = self._annotated_body(self._held)
            if body or not more:
                await self._begin(None if self._streams else len(body or b""))
                await self._send({**message, "body": body, "more_body": more})

    def _annotated_body(self, body: bytes) -> bytes:
        """Return the body with each prompt's item, once: in the only body, or in the first chunk after its prefill."""
        note, content = self._note, _parsed(body)
        if content is None or not isinstance(content.get("choices"), list):
            return body
        for choice in content["choices"]:
            verdict = note.withheld(int(choice.get("index", 0)) // note.choices)
            if verdict is not None and choice.get("finish_reason") is not None:
                choice["finish_reason"] = WITHHELD
                if verdict.message is None:
                    continue
                chat = choice.get("message") or choice.get("delta")
                if chat is not None:
                    chat["refusal"] = verdict.message  # a text completion has none
                if self._message_in_content:
                    (choice if chat is None else chat)["text" if chat is None else "content"] = verdict.message
        self._uncount(content)
        found = note.body()
        if found is not None and content["choices"]:
            if "data" in found:
                found["data"] = [item for item in found["data"] if item["index"] not in self._annotated]
                self._annotated |= {item["index"] for item in found["data"]}
                prompts = range(len(note.judgements))
                told = self._annotated.issuperset(prompts) and not any(map(note.withheld, prompts))
                self._complete = told and not note.reads_answers
            if self._streams:
                ended = [one["index"] // note.choices for one in content["choices"] if one.get("finish_reason")]
                said = [answer_note(note.answers.get(place)) for place in ended]
                found = (found if found.get("data", True) else {}) | (said[0] if said else {})
            if found:
                content["hallutracer"] = found
        return json.dumps(content, ensure_ascii=False).encode()

    def _uncount(self, content: dict[str, Any]) -> None:
        """Take the end token that stands for a withheld answer out of the usage."""
        note, usage = self._note, content.get("usage")
        if not usage or not usage.get("completion_tokens"):
            return
        whole = not content["choices"] or not self._streams  # else a chunk's own, of its choices alone
        places = range(len(note.judgements)) if whole else {one["index"] // note.choices for one in content["choices"]}
        counted = sum(note.withheld(place) is not None for place in places) * (note.choices if whole else 1)
        usage["completion_tokens"] -= counted
        usage["total_tokens"] -= counted

    async def _begin(self, length: int | None) -> None:
        if self._start is None:
            return
        start, self._start = self._start, None
        headers = MutableHeaders(scope=start)
        headers.update(self._note.headers())
        if length is not None:
            headers["content-length"] = str(length)
        if start["status"] == NotReady.status:
            headers.setdefault("retry-after", str(RETRY_S))  # vLLM's error handlers drop headers
        await self._send(start)


def _moves(content: dict[str, Any]) -> Iterator[str]:
    """Yield the fields of a chat's body that change how its messages are rendered."""
    yield from (name for name, same in AS_TRAINED.items() if content.get(name) not in (None, same))
    transfer = content.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        yield "kv_transfer_params.prompt_token_ids"  # taken instead of the messages


def _strings(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, however deep."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            pending += [*one, *one.values()]
        elif isinstance(one, list):
            pending += one


def _parsed(body: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(body)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
