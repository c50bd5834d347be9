"""The note of one request: what its body says that matters to its risk, and the judgements of its
prompts.

``generation`` fills it; a context variable connects the two across vLLM's own serving code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from pydantic import TypeAdapter, ValidationError

from service.access.routes import MESSAGES_ROUTE, RESPONSES_ROUTE
from service.api.reply import answer_note, risk_headers, risk_note
from service.audit.auditor import Who
from service.engines.chat import texts_in
from service.judging.guarantee import TOOLS, chat_violations
from service.policies.guard import Verdict
from service.scoring import RiskReport
from service.serving.judgement import Judgement
from service.tool_calls import Tools
from service.turn import Outcome
from service.vllm_plugin.calls import offered, used
from service.vllm_plugin.rendering import Chat, conversation

TEMPLATE_ARGUMENTS = "chat_template_kwargs"
TEXTS, CHATS, EITHER = "/v1/completions", "/v1/chat/completions", "/invocations"
PATHS = (TEXTS, CHATS, f"{CHATS}/batch", EITHER, RESPONSES_ROUTE, MESSAGES_ROUTE)
RENDERED = (
    "messages",
    "input",
    "instructions",
    "system",
    "tools",
    "documents",
    "functions",
    TEMPLATE_ARGUMENTS,
)  # what a chat template may write
AS_TRAINED: dict[str, Any] = {
    "continue_final_message": False,
    "add_generation_prompt": True,
    "chat_template": None,
    TEMPLATE_ARGUMENTS: {},
    "add_special_tokens": False,
    "truncate_prompt_tokens": None,
}
"""Fields of a chat's body that change how its messages are rendered -> the values that change
nothing, beside null."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "prompt_logprobs")
"""Fields of a body that, where they are missing, a model's ``generation_config`` fills in, or the
last of them a chat's ``echo``."""
# of a request to /v1/responses: turns that its body does not have
ELSEWHERE = ("previous_response_id", "prompt")
_FLAG = TypeAdapter(bool)
NO_PLACE = (
    "a policy that withholds answers applies to this request, and the response of this route cannot"
    " carry a verdict; use /v1/chat/completions, /v1/responses or /v1/messages, or have the"
    " operator choose a policy that observes"
)
IN_BACKGROUND = "an answer that is fetched later has no place for a verdict: leave 'background' out"
# how an argument of ours begins, well written or not
OURS = re.compile(r"hallu[_-]*tracer", re.IGNORECASE)


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
    # its fields that render its messages otherwise than training's were
    moves: tuple[str, ...] = ()
    # the arguments of the chat template that it asks for, as its body has them
    of_template: Any = None
    answered: tuple[str, ...] = ()  # ``chat_violations`` of its messages
    tools: Tools | None = None  # that an answer may call
    background: bool = False  # whether the answer is fetched later, by another request
    beams: bool = False  # whether it asks for a beam search
    written: tuple[Any, ...] = ()  # what of its body a chat template may write
    # of its chats, as the body has them; empty where they are made of more
    turns: tuple[list[Any], ...] = ()
    rendered: list[Chat] = field(default_factory=list)  # what vLLM's renderer made of its chats
    # of its prompts; None where none is known
    chats: list[Chat | None] = field(default_factory=list)
    # their token ids; empty where none are known
    prompts: list[Sequence[int]] = field(default_factory=list)
    # the prompts that are not what the template makes of their messages
    moved: set[int] = field(default_factory=set)
    sampling: frozenset[str] = frozenset()  # which of ``SAMPLING`` it names
    # temperature and top_p, where vLLM's own are others
    decoded: dict[str, float] = field(default_factory=dict)
    misplaced: tuple[str, ...] = ()  # arguments of ours outside vllm_xargs
    # vllm_xargs of a beam search, which vLLM drops
    xargs: dict[str, Any] = field(default_factory=dict)
    reads_answers: bool = False  # whether answers' own tokens are read
    # HTTP status and reason, where the request was refused or failed
    error: tuple[int, str] | None = None
    # the special token that one of its texts spells out; None: not looked for
    spelt: tuple[str | None] | None = None
    who: Who = Who()  # for the audit log; without a key's name, as vLLM's own keys have none

    def add(self, prompt: Any) -> int:
        """Add a prompt, as vLLM's ``generate`` takes it, and return its index."""
        index, chat = len(self.judgements), None
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        if ids and self.rendered:
            chat = next((chat for chat in self.rendered if chat.token_ids == ids), None)
        elif ids and index < len(self.turns):  # some models' chats have another renderer
            chat = Chat(self.turns[index], (), ids)
        self.judgements.append(None)
        self.chats.append(chat)
        self.prompts.append(ids or ())
        return index

    def trained_with(self, arguments: Mapping[str, Any]) -> None:
        """Take arguments of the chat template that training's prompts had, too, for what changes
        nothing."""
        wanted = self.of_template
        if isinstance(wanted, Mapping) and all(
            name in arguments and arguments[name] == wanted[name] for name in wanted
        ):
            self.moves = tuple(name for name in self.moves if name != TEMPLATE_ARGUMENTS)

    def conversation(self, index: int) -> list[dict[str, str]] | None:
        """Return role and text of the messages that this prompt was made of; None where it is not
        known, or known to be made of something else."""
        known = (
            self.templated
            and not self.moves
            and index not in self.moved
            and index < len(self.chats)
        )
        chat = self.chats[index] if known else None
        return None if chat is None else conversation(chat.messages)

    def texts(self) -> Iterator[str]:
        """Yield every text of its body that a chat template may write."""
        return chain.from_iterable(map(texts_in, self.written))

    def special_token(self, search: Callable[[Iterable[str]], str | None]) -> str | None:
        """Return the special token that one of ``texts`` spells out; they are searched once for all
        its prompts."""
        if self.spelt is None:
            self.spelt = (search(self.texts()),)
        return self.spelt[0]

    def withheld(self, index: int) -> Verdict | None:
        """Return the verdict that withheld this prompt's answer; None where none did, or not
        yet."""
        report = self._report(index)
        return report.verdict if report is not None and report.outcome is Outcome.WITHHELD else None

    def refusal(self) -> Verdict | None:
        """Return the verdict that withheld the answer to any prompt; None where none did, or not
        yet."""
        return next(filter(None, map(self.withheld, range(len(self.judgements)))), None)

    @property
    def stopped(self) -> bool:
        """Return whether a policy has ended an answer, whose text so far is shown."""
        reports = map(self._report, range(len(self.judgements)))
        return any(report is not None and report.outcome is Outcome.STOPPED for report in reports)

    def end_tokens(self, prompts: Iterable[int] | None = None) -> int:
        """Return how many answers, of these prompts or all, were ended with nothing shown.

        An end token stands for each, which is not counted."""
        reports = map(self._report, range(len(self.judgements)) if prompts is None else prompts)
        return sum(report is not None and _shows_nothing(report) for report in reports)

    def _report(self, index: int) -> RiskReport | None:
        judgement = self.judgements[index] if index < len(self.judgements) else None
        return None if judgement is None else judgement.reports[0]

    def body(self) -> dict[str, Any] | None:
        """Return what the response says, with the violations of all its prompts; None: nothing
        yet."""
        if self.unread is not None:
            return {"error": self.unread}
        judged = [judgement for judgement in self.judgements if judgement is not None]
        if not judged:
            return None
        prompts = tuple(chain.from_iterable(judgement.prompts for judgement in judged))
        return risk_note(replace(judged[-1], prompts=prompts, request_violations=self.violations))

    def answer_note(self, index: int) -> dict[str, Any]:
        """Return what is said of this prompt's answer where a stream of it ends; nothing where it
        was not read."""
        report = self._report(index)
        return {} if report is None else answer_note(report.answer, report.decoding)

    def headers(self) -> dict[str, str]:
        """Return those of ``/v1/risk/score``, where there is one prompt."""
        if len(self.judgements) != 1 or (judgement := self.judgements[0]) is None:
            return {}
        return risk_headers(judgement.scorer, judgement.reports)


def _shows_nothing(report: RiskReport) -> bool:
    shown = report.completion
    stopped = report.outcome is Outcome.STOPPED and shown is not None and not shown.tokens
    return stopped or report.outcome is Outcome.WITHHELD


CURRENT: ContextVar[Note | None] = ContextVar("hallutracer_note", default=None)


def rendered(chats: Sequence[Any], prompts: Sequence[Any], tools: Sequence[Any]) -> None:
    """Note what vLLM's renderer made of a request's chats; of what is no request of a server's,
    nothing."""
    if (note := CURRENT.get()) is not None:
        ids = [prompt.get("prompt_token_ids") or () for prompt in prompts]
        note.rendered += [
            Chat(messages, tools, of) for messages, of in zip(chats, ids, strict=True)
        ]


def read(note: Note, body: bytes) -> None:
    """Note what vLLM loses, such as arguments of ours outside ``vllm_xargs``, and what a chat
    template may write."""
    content = parsed(body) or {}
    note.misplaced = tuple(name for name in content if OURS.match(name))
    note.sampling = frozenset(name for name in SAMPLING if content.get(name) is not None)
    chats = _chats(note.route, content)
    # which may read either
    note.templated = chats is not None and not ("prompt" in content and note.route == EITHER)
    note.written = (
        () if chats is None else tuple(content[name] for name in RENDERED if name in content)
    )
    turns = tuple(chat if isinstance(chat, list) else [] for chat in chats or ())
    ends = [chat[-1] for chat in turns if chat and isinstance(chat[-1], dict)]
    note.moves = () if chats is None else tuple(_moves(content))
    note.of_template = content.get(TEMPLATE_ARGUMENTS)
    note.answered = next(filter(None, (chat_violations([end]) for end in ends)), ())
    note.turns = () if any(content.get(name) for name in ELSEWHERE) else turns
    note.tools = None if chats is None else offered(content)
    note.violations = (
        (TOOLS,) if chats is not None and used(content, chain.from_iterable(turns)) else ()
    )
    note.background = note.route == RESPONSES_ROUTE and bool(content.get("background"))
    try:
        # as vLLM reads a flag; it refuses others
        note.beams = _FLAG.validate_python(content.get("use_beam_search"))
    except ValidationError:
        note.beams = False
    xargs = content.get("vllm_xargs")
    if note.beams and isinstance(xargs, dict):
        note.xargs = xargs


def _chats(route: str, content: dict[str, Any]) -> list[Any] | None:
    """Return the chats of a request; None where none of its prompts goes through the template."""
    if route == RESPONSES_ROUTE:
        turns, instructions = content.get("input"), content.get("instructions")
        if not isinstance(turns, list):
            turns = [{"role": "user", "content": turns}]
        if instructions is not None:
            turns = [{"role": "system", "content": instructions}, *turns]
        return [turns]
    if route == TEXTS or "messages" not in content:
        return None
    messages = content["messages"]
    if not isinstance(messages, list):
        return []
    if route == MESSAGES_ROUTE and content.get("system"):
        return [[{"role": "system", "content": content["system"]}, *messages]]
    return messages if messages and isinstance(messages[0], list) else [messages]


def _moves(content: dict[str, Any]) -> Iterator[str]:
    """Yield the fields of a chat's body that change how its messages are rendered."""
    yield from (name for name, same in AS_TRAINED.items() if content.get(name) not in (None, same))
    transfer = content.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        yield "kv_transfer_params.prompt_token_ids"  # taken instead of the messages


def parsed(body: bytes) -> dict[str, Any] | None:
    """Return a JSON object; None of anything else."""
    try:
        content = json.loads(body)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
