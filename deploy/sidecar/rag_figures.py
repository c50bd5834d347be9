"""The README's figures: how risk and correctness change with retrieval, on the demo's questions.

Run against a service that lets every answer through, because those which a gate would withhold are
judged too:

    hallutracer serve
    python deploy/sidecar/rag_figures.py --split test --limit 600"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import cyclopts
from cyclopts import Parameter, validators
from rag_app import Retriever, client_from_environment, demo_passages, with_passages

from hallutracer_client import AsyncClient, Generate, Risk
from service.data.judges import contains
from service.demo.questions import questions
from service.trainer.presentation import markdown_table

MAX_CONCURRENCY = 4


@dataclass(frozen=True)
class Outcome:
    """One question: both risks, both answers right or wrong, and whether the passages hold an
    accepted answer."""

    before: Risk
    after: Risk
    right_before: bool
    right_after: bool
    found: bool


async def _outcome(
    client: AsyncClient, retriever: Retriever, row: dict[str, Any], bundle: str
) -> Outcome:
    question, accepted = row["prompt"], row["answers"]
    passages = retriever.find(question)

    async def ask(messages: list[dict[str, str]]) -> tuple[Risk, bool]:
        options = Generate(max_tokens=24, temperature=0.0)
        risk = (
            await client.score(messages=messages, policy="observe", bundle=bundle, generate=options)
        ).only
        return risk, risk.completion is not None and contains(
            question, risk.completion.text, accepted
        )

    before, right_before = await ask([{"role": "user", "content": question}])
    after, right_after = await ask(with_passages(question, passages))
    found = any(contains(question, passage.text, accepted) for passage in passages)
    return Outcome(before, after, right_before, right_after, found)


async def _outcomes(rows: Sequence[dict[str, Any]], bundle: str) -> list[Outcome]:
    retriever, slots = Retriever(demo_passages()), asyncio.Semaphore(MAX_CONCURRENCY)
    async with client_from_environment() as client:

        async def limited(row: dict[str, Any]) -> Outcome:
            async with slots:
                return await _outcome(client, retriever, row, bundle)

        return await asyncio.gather(*map(limited, rows))


def _withheld(risk: Risk) -> bool:
    """What the service's own gate would do: a prompt outside training is withheld, too."""
    return risk.flagged or bool(risk.outside_training)


@dataclass(frozen=True)
class Way:
    """What one way of using retrieval and guard comes to; sums over questions, which may be
    expectations."""

    name: str
    retrievals: float
    answered: float
    right: float
    risk: float  # summed over the answered

    def row(self, count: int) -> list[str]:
        """Cells of the table, shares of ``count`` questions."""
        wrong = f"{1 - self.right / self.answered:.3f}" if self.answered else "-"
        told = f"{self.risk / self.answered:.3f}" if self.answered else "-"
        return [
            self.name,
            f"{self.retrievals:.0f}",
            f"{self.answered / count:.3f}",
            wrong,
            told,
            f"{self.right / count:.3f}",
        ]


def ways(outcomes: Sequence[Outcome]) -> list[Way]:
    """Without and with a guard: retrieve never, where the first look flags, as often at random, and
    always."""

    def way(name: str, looks: Sequence[tuple[bool, Risk, bool]], guarded: bool) -> Way:
        kept = [(risk, right) for _, risk, right in looks if not (guarded and _withheld(risk))]
        retrievals = sum(retrieved for retrieved, _, _ in looks)
        return Way(
            name,
            retrievals,
            len(kept),
            sum(right for _, right in kept),
            sum(risk.risk for risk, _ in kept),
        )

    def between(name: str, never: Way, always: Way, share: float) -> Way:
        """Retrieving for this share of the questions, drawn at random: what is to be expected."""
        pairs = (
            (never.retrievals, always.retrievals),
            (never.answered, always.answered),
            (never.right, always.right),
            (never.risk, always.risk),
        )
        return Way(name, *((1 - share) * low + share * high for low, high in pairs))

    found = []
    before = [(False, one.before, one.right_before) for one in outcomes]
    after = [(True, one.after, one.right_after) for one in outcomes]
    chosen = [
        second if _withheld(first[1]) else first
        for first, second in zip(before, after, strict=True)
    ]
    for guard, guarded in (("no guard", False), ("guard", True)):
        never, app, always = (
            way(f"{name}, {guard}", looks, guarded)
            for name, looks in (
                ("never", before),
                ("where the first look withholds", chosen),
                ("always", after),
            )
        )
        at_random = between(
            f"as often, at random, {guard}", never, always, app.retrievals / len(outcomes)
        )
        found += [never, at_random, app, always]
    return found


def report(outcomes: Sequence[Outcome]) -> str:
    """The table, and what the passages and the risk are worth."""
    header = [
        "retrieval",
        "retrievals",
        "answered",
        "wrong among answered",
        "their mean risk",
        "right, of all",
    ]
    rows = [one.row(len(outcomes)) for one in ways(outcomes)]
    lines = [markdown_table(header, rows, range(1, len(header)))]
    found = sum(one.found for one in outcomes)
    lines += ["", f"passages that hold an accepted answer: {found} of {len(outcomes)}"]
    for name, risks, right in (
        ("without", [one.before.risk for one in outcomes], [one.right_before for one in outcomes]),
        ("with", [one.after.risk for one in outcomes], [one.right_after for one in outcomes]),
    ):
        wrong = 1 - sum(right) / len(right)
        lines.append(
            f"{name} passages: mean risk {sum(risks) / len(risks):.3f}, share wrong {wrong:.3f}"
        )
    return "\n".join(lines)


def main(
    *,
    split: Annotated[str, Parameter(help="train, dev or test.")] = "test",
    limit: Annotated[
        int,
        Parameter(
            help="At most this many questions, spread over the split.",
            validator=validators.Number(gte=1),
        ),
    ] = 10**6,
    bundle: Annotated[str, Parameter(help="Which bundle reads the risk.")] = "smollm2",
) -> None:
    """Print the figures."""
    rows = questions(split)
    rows = rows[:: max(1, -(-len(rows) // limit))]
    print(f"{len(rows)} questions of {split}, bundle {bundle}")
    print(report(asyncio.run(_outcomes(rows, bundle))))


if __name__ == "__main__":
    cyclopts.run(main)
