"""Retrieval-augmented generation guarded by HalluTracer: retrieve only if the model's own answer is flagged.

    score the question ── below the threshold ──> the model's answer
            │ flagged
    retrieve, score with the passages ── below the threshold ──> the model's answer, with the passages
            │ flagged
    no answer: the passages themselves

Run:  python deploy/sidecar/rag_app.py "What is the capital of Italy?" "What is the capital of the Solomon Islands?"
      uvicorn --app-dir deploy/sidecar rag_app:app
Environment: HALLUTRACER_URL, HALLUTRACER_API_KEY_FILE, RAG_PASSAGES (a file, one passage a line; without it the
demo's facts), RAG_WHEN_GUARD_FAILS (refuse | passages)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table
from sklearn.feature_extraction.text import TfidfVectorizer

from hallutracer_client import AsyncClient, ClientError, Generate, RequestRefused, Risk
from service.demo.questions import Fact, build_world, sentence

TOP_K = 3


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
        return [Passage(self._texts[i], round(float(scores[i]), 4)) for i in (-scores).argsort()[:k] if scores[i] > 0]


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
    """The passages in front of the question, in one user turn: the form in which SmolLM2's bundles were trained.

    A risk is calibrated for prompts of the form that training saw.  Change this only with the training rows."""
    return [{"role": "user", "content": f"{' '.join(passage.text for passage in passages)}\n\n{question}"}]


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
        """One request: the risk, and the answer unless gated."""
        return (await self._client.score(messages=messages, policy="gate", generate=self._generate)).only


def client_from_environment() -> AsyncClient:
    """The service's client, with the first key of the key file.  Raises OSError, ValueError."""
    path = os.environ.get("HALLUTRACER_API_KEY_FILE")
    key = None if path is None else lines_of(path, "a key")[0].split()[0]
    given = os.environ.get("RAG_TIMEOUT_S", "10")
    try:
        seconds = float(given)
    except ValueError:
        raise ValueError(f"RAG_TIMEOUT_S is a number of seconds, not {given!r}") from None
    return AsyncClient(os.environ.get("HALLUTRACER_URL", "http://127.0.0.1:8765"), api_key=key, timeout=seconds)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Read the environment, index the passages."""
    app.state.when_guard_fails = os.environ.get("RAG_WHEN_GUARD_FAILS", "refuse")
    if app.state.when_guard_fails not in ("refuse", "passages"):
        raise ValueError(f"RAG_WHEN_GUARD_FAILS is refuse or passages, not {app.state.when_guard_fails!r}")
    async with client_from_environment() as client:
        app.state.client = client
        app.state.rag = GuardedRag(client, Retriever(passages_from_environment()))
        yield


app = FastAPI(title="A guarded RAG example", lifespan=lifespan)


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
        raise HTTPException(503, f"not answered, because the risk could not be scored: {error}") from None


@app.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """200 while this app runs; ``guard``: whether the scoring service is ready."""
    ready = False
    with suppress(ClientError):
        ready = bool(await request.app.state.client.ready())
    return {"status": "ok", "guard": ready}


def _row(question: str, reply: Reply) -> list[str]:
    risks = [f"{risk:.2f}" if risk is not None else "-" for risk in (reply.risk_before, reply.risk_after)]
    if reply.answer is None:
        found = "\n".join(passage.text for passage in reply.passages)
        return [question, *risks, "withheld: see the passages", found or "nothing was found"]
    return [question, *risks, "answered with passages" if reply.passages else "answered at once", reply.answer]


async def _ask_all(questions: list[str]) -> Table:
    table = Table("question", "risk before", "risk after", "decision", "answer or passages", show_lines=True)
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
