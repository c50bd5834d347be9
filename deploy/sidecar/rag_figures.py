"""The README's figures: how risk and correctness change with retrieval, on the demo's questions.

Run against a service that lets every answer through, because those which a gate would withhold are judged too:

    hallutracer serve --policy observe
    python deploy/sidecar/rag_figures.py --split test --limit 600
"""

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

MAX_CONCURRENCY = 8


@dataclass(frozen=True)
class Outcome:
    """One question: both risks, both answers right or wrong, and whether the passages hold an accepted answer."""

    before: Risk
    after: Risk
    right_before: bool
    right_after: bool
    found: bool


async def _outcome(client: AsyncClient, retriever: Retriever, row: dict[str, Any], bundle: str) -> Outcome:
    question, accepted = row["prompt"], row["answers"]
    passages = retriever.find(question)

    async def ask(messages: list[dict[str, str]]) -> tuple[Risk, bool]:
        options = Generate(max_tokens=24, temperature=0.0)
        risk = (await client.score(messages=messages, policy="observe", bundle=bundle, generate=options)).only
        return risk, risk.completion is not None and contains(question, risk.completion.text, accepted)

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


def _share(of: Sequence[bool]) -> str:
    return f"{sum(of)} of {len(of)}" + (f" ({sum(of) / len(of):.1%})" if of else "")


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2f}" if values else "-"


def report(outcomes: Sequence[Outcome]) -> str:
    """The figures, one a line."""
    passed, flagged = ([o for o in outcomes if o.before.flagged is value] for value in (False, True))
    released = [o for o in flagged if not o.after.flagged]
    withheld = [o for o in flagged if o.after.flagged]
    shown = [o.right_before for o in passed] + [o.right_after for o in released]
    lines = {
        "answers right without a guard": _share([o.right_before for o in outcomes]),
        "answers right with passages always, no guard": _share([o.right_after for o in outcomes]),
        "passages always, no model: hold an accepted answer": _share([o.found for o in outcomes]),
        "flagged without passages": _share([o.before.flagged for o in outcomes]),
        "  right where not flagged": _share([o.right_before for o in passed]),
        "  right where flagged": _share([o.right_before for o in flagged]),
        "mean risk of the flagged, without -> with passages": (
            f"{_mean([o.before.risk for o in flagged])} -> {_mean([o.after.risk for o in flagged])}"
        ),
        "  right with passages": _share([o.right_after for o in flagged]),
        "  released after retrieval": _share([not o.after.flagged for o in flagged]),
        "    right of these": _share([o.right_after for o in released]),
        "  passages shown instead": _share([o.after.flagged for o in flagged]),
        "    passages hold an accepted answer": _share([o.found for o in withheld]),
        "answers shown by the whole app": _share([True] * len(shown) + [False] * len(withheld)),
        "  right of these": _share(shown),
        "users with a right answer or a passage that has it": _share(shown + [o.found for o in withheld]),
        "users shown a wrong answer": _share([not right for right in shown] + [False] * len(withheld)),
    }
    return "\n".join(f"{name:<52} {value}" for name, value in lines.items())


def main(
    *,
    split: Annotated[str, Parameter(help="train, dev or test.")] = "test",
    limit: Annotated[
        int, Parameter(help="At most this many questions, spread over the split.", validator=validators.Number(gte=1))
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
