"""Retrieval-augmented generation guarded by HalluTracer: retrieve only if the model's own answer is
withheld.

    score the question ── below the threshold ──> the model's answer
            │ withheld
    retrieve, score with the passages ── below ──> the model's answer, with the passages
            │ withheld
    no answer: the passages themselves

Run:  python deploy/sidecar/rag_app.py "What is the capital of Italy?" \\
          "What is the capital of the Solomon Islands?"
      uvicorn --app-dir deploy/sidecar rag_app:app
Environment: HALLUTRACER_URL, HALLUTRACER_API_KEY_FILE, RAG_PASSAGES (a file, one passage a line;
without it the demo's facts), RAG_WHEN_GUARD_FAILS (refuse | passages), and as a service
RAG_TOKEN_FILE (a file of the tokens that callers send, since it asks the guard with its own key for
them), or RAG_ALLOW_ANONYMOUS (true), and RAG_ALLOWED_HOSTS (names that requests may be addressed to
beside IP addresses)."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table
from sklearn.feature_extraction.text import TfidfVectorizer

from hallutracer_client import AsyncClient, ClientError, Generate, RequestRefused, Risk
from service.demo.questions import Fact, build_world, sentence

TOP_K = 3
LEAST_CHARACTERS = 16  # of a token


def demo_passages() -> list[str]:
    """One sentence for each fact that SmolLM2's bundles ask about."""

    def answers(fact: Fact) -> str:
        *others, last = fact.answers
        return f"{', '.join(others)} and {last}" if others else last

    return list(dict.fromkeys(sentence(fact, answers(fact)) for fact in build_world().facts))


@dataclass(frozen=True)
class Passage:
    """A retrieved text and its cosine similarity to the question."""

    text: str
    score: float


def lines_of(path: str, needed: str) -> list[str]:
    """The stripped non-empty lines of a file.  Raises OSError, ValueError."""
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    if not any(lines):
        raise ValueError(f"{path} is empty; it needs {needed}")
    return [line for line in lines if line]


def passages_from_environment() -> list[str]:
    """The lines of RAG_PASSAGES, or the demo's facts.  Raises OSError, ValueError."""
    path = os.environ.get("RAG_PASSAGES")
    return demo_passages() if path is None else lines_of(path, "one passage a line")


class Retriever:
    """TF-IDF over words and pairs of words."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = list(texts)
        self._words = TfidfVectorizer(ngram_range=(1, 2), binary=True, token_pattern=r"(?u)\b\w+\b")
        self._matrix = self._words.fit_transform(self._texts)  # [texts, words]

    def find(self, question: str, k: int = TOP_K) -> list[Passage]:
        """The ``k`` most similar texts with at least one word in common, best first."""
        scores = (self._matrix @ self._words.transform([question]).T).toarray().ravel()
        return [
            Passage(self._texts[i], round(float(scores[i]), 4))
            for i in (-scores).argsort()[:k]
            if scores[i] > 0
        ]


@dataclass(frozen=True)
class Reply:
    """``source`` is ``model`` (``answer`` is its text) or ``passages`` (``answer`` is None).

    A risk that was not computed is None."""

    answer: str | None
    source: str
    risk_before: float | None
    risk_after: float | None
    passages: tuple[Passage, ...]


def with_passages(question: str, passages: Sequence[Passage]) -> list[dict[str, str]]:
    """The passages in front of the question, in one user turn: the form in which SmolLM2's bundles
    were trained.

    A risk is calibrated for prompts of the form that training saw.  Change this only with the
    training rows."""
    return [
        {
            "role": "user",
            "content": f"{' '.join(passage.text for passage in passages)}\n\n{question}",
        }
    ]


class GuardedRag:
    """The three steps above."""

    def __init__(self, client: AsyncClient, retriever: Retriever, *, max_tokens: int = 64) -> None:
        self._client = client
        self._retriever = retriever
        self._generate = Generate(max_tokens=max_tokens, temperature=0.0)

    async def ask(self, question: str) -> Reply:
        """The answer or the passages.  Raises ClientError: nothing is answered without a score."""
        before = await self._guarded([{"role": "user", "content": question}])
        if before.completion is not None:
            return Reply(before.completion.text.strip(), "model", before.risk, None, ())
        passages = tuple(self._retriever.find(question))
        after = await self._with_retrieval(question, passages)
        if after is not None and after.completion is not None:
            return Reply(after.completion.text.strip(), "model", before.risk, after.risk, passages)
        return Reply(None, "passages", before.risk, after.risk if after else None, passages)

    async def _with_retrieval(self, question: str, passages: Sequence[Passage]) -> Risk | None:
        """The risk with passages; None without passages, or if they exceed the model's context."""
        if not passages:
            return None
        try:
            return await self._guarded(with_passages(question, passages))
        except RequestRefused as error:
            if error.code == "prompt_too_long":
                return None
            raise

    def found(self, question: str) -> Reply:
        """The passages only, without scoring."""
        return Reply(None, "passages", None, None, tuple(self._retriever.find(question)))

    async def _guarded(self, messages: list[dict[str, str]]) -> Risk:
        """One request: the risk, and the answer unless it is withheld."""
        return (
            await self._client.score(messages=messages, policy="gate", generate=self._generate)
        ).only


def client_from_environment() -> AsyncClient:
    """The service's client, with the first key of the key file.  Raises OSError, ValueError."""
    path = os.environ.get("HALLUTRACER_API_KEY_FILE")
    key = None if path is None else lines_of(path, "a key")[0].split()[0]
    given = os.environ.get("RAG_TIMEOUT_S", "10")
    try:
        seconds = float(given)
    except ValueError:
        raise ValueError(f"RAG_TIMEOUT_S is a number of seconds, not {given!r}") from None
    return AsyncClient(
        os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765"), api_key=key, timeout=seconds
    )


def tokens_from_environment() -> tuple[str, ...]:
    """The tokens of RAG_TOKEN_FILE; none where RAG_ALLOW_ANONYMOUS says so.  Raises OSError,
    ValueError."""
    path = os.environ.get("RAG_TOKEN_FILE")
    anonymous = os.environ.get("RAG_ALLOW_ANONYMOUS", "false")
    if path is not None:
        tokens = tuple(line.split()[0] for line in lines_of(path, "a token"))
        if min(map(len, tokens)) < LEAST_CHARACTERS:
            raise ValueError(f"a token of {path} is shorter than {LEAST_CHARACTERS} characters")
        return tokens
    if anonymous != "true":
        said = (
            "whoever reaches this app could ask with its key: set RAG_TOKEN_FILE, or"
            " RAG_ALLOW_ANONYMOUS=true"
        )
        raise ValueError(said)
    return ()


def is_ours(host: str, names: Collection[str]) -> bool:
    """Whether ``Host``, its port left out, is one of ``names`` or an IP address, which no foreign
    page's name can be.

    A page can have its own name resolve to this machine (DNS rebinding); the browser still sends
    that name."""
    name, _, port = host.rpartition(":")
    name = (name if name and port.isdigit() else host).lower()
    if name in names:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Read the environment, index the passages."""
    app.state.when_guard_fails = os.environ.get("RAG_WHEN_GUARD_FAILS", "refuse")
    if app.state.when_guard_fails not in ("refuse", "passages"):
        raise ValueError(
            f"RAG_WHEN_GUARD_FAILS is refuse or passages, not {app.state.when_guard_fails!r}"
        )
    app.state.tokens = tokens_from_environment()
    app.state.hosts = frozenset(os.environ.get("RAG_ALLOWED_HOSTS", "localhost").lower().split())
    async with client_from_environment() as client:
        app.state.client = client
        app.state.rag = GuardedRag(client, Retriever(passages_from_environment()))
        yield


app = FastAPI(title="A guarded RAG example", lifespan=lifespan)


@app.middleware("http")
async def check_caller(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """421 for another service's name, 401 without a token; probes ask /health without one."""
    state = request.app.state
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    if not is_ours(request.headers.get("host", ""), state.hosts):
        return JSONResponse(
            {"detail": "the Host header names another service: RAG_ALLOWED_HOSTS"}, 421
        )
    given = sent.strip().encode()
    known = scheme.lower() == "bearer" and any(
        hmac.compare_digest(given, one.encode()) for one in state.tokens
    )
    if state.tokens and not known and request.url.path != "/health":
        said = "send a token of RAG_TOKEN_FILE as 'Authorization: Bearer TOKEN'"
        return JSONResponse({"detail": said}, 401, {"WWW-Authenticate": "Bearer"})
    return await call_next(request)


class Ask(BaseModel):
    """The body of /ask."""

    question: Annotated[str, Field(min_length=1, max_length=2000)]


@app.post("/ask")
async def ask(body: Ask, request: Request) -> dict[str, Any]:
    """Answer from the model or from the passages; 503 if scoring fails."""
    rag: GuardedRag = request.app.state.rag
    try:
        return asdict(await rag.ask(body.question))
    except ClientError as error:
        if isinstance(error, RequestRefused) and error.status in (413, 422):
            raise HTTPException(422, error.message) from None
        if request.app.state.when_guard_fails == "passages":
            return asdict(rag.found(body.question))
        raise HTTPException(
            503, f"not answered, because the risk could not be scored: {error}"
        ) from None


@app.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """200 while this app runs; ``guard``: whether the scoring service is ready."""
    ready = False
    with suppress(ClientError):
        ready = bool(await request.app.state.client.ready())
    return {"status": "ok", "guard": ready}


def _row(question: str, reply: Reply) -> list[str]:
    risks = [
        f"{risk:.2f}" if risk is not None else "-" for risk in (reply.risk_before, reply.risk_after)
    ]
    if reply.answer is None:
        found = "\n".join(passage.text for passage in reply.passages)
        return [question, *risks, "withheld: see the passages", found or "nothing was found"]
    return [
        question,
        *risks,
        "answered with passages" if reply.passages else "answered at once",
        reply.answer,
    ]


async def _ask_all(questions: list[str]) -> Table:
    table = Table(
        "question", "risk before", "risk after", "decision", "answer or passages", show_lines=True
    )
    async with client_from_environment() as client:
        rag = GuardedRag(client, Retriever(passages_from_environment()))
        for question in questions:
            table.add_row(*_row(question, await rag.ask(question)))
    return table


def main(*questions: str) -> None:
    """Ask each question and show what the guard decided."""
    try:
        Console(markup=False, emoji=False).print(asyncio.run(_ask_all(list(questions))))
    except (ClientError, OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    cyclopts.run(main)
