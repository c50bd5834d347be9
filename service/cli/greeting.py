"""What ``serve`` prints once it is ready: a request made of the bundle's own held-out questions, and where to go on."""

from __future__ import annotations

import json
import logging
import shlex

from service.cli.held_out import SHOWN
from service.cli.output import print_line
from service.engines.bridge import gather_all
from service.judging.evaluation import sample_of
from service.policies.guard import OBSERVE, Action
from service.scoring import Scorer
from service.serving.service import Service

log = logging.getLogger("hallutracer")
HOW_TO_GATE = (
    "policy {name}: every answer passes and its risk is told; --policy gate withholds answers from the threshold on"
)
OWNED = (
    "programs of this machine may ask for another policy, since no key is asked for; behind a proxy give --keys, or "
    "--callers-may none"
)
FALLBACK = ("What is the capital of France?",)  # of a bundle without a sample


def first_line(service: Service) -> str | None:
    """How to gate, where nothing is withheld; that callers of this machine may open the gate, where they may."""
    own = service.catalogue.policy(None, None)
    if own.action is Action.OBSERVE:
        return HOW_TO_GATE.format(name=own.name)
    return OWNED if service.access.owned else None


async def greet(service: Service, address: str) -> None:
    """Print the lines.  The request's questions are read by the model first, as ``example`` says."""
    scorer = service.catalogue.scorers[0]
    identity, own = scorer.engine.identity, service.catalogue.policy(None, None)
    references = ", ".join(one.bundle.reference for one in service.catalogue.scorers)
    print_line(f"ready: {identity.model} ({identity.dtype}) read by {references}")
    body = {"prompt": await example(scorer), "generate": {"max_tokens": 16}}
    if own.action is Action.OBSERVE:
        body["policy"] = "gate"
    key = ' -H "Authorization: Bearer $KEY"' if service.access.keys.closed else ""
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    print_line("\nTry it, on the held-out questions of the lowest and of the highest risk:\n")
    print_line(f"  curl -s {address}/score{key} -H 'Content-Type: application/json' -d {text}\n")
    print_line(f"  hallutracer try --url {address}     # all of them, sorted by risk\n")
    if service.settings.playground:
        print_line(f"Playground: {address}/")
    print_line(f"API reference: {address}/docs    Stop: Ctrl-C")


async def example(scorer: Scorer) -> list[str]:
    """Two held-out questions of the bundle, of the lowest and of the highest risk among those that ``try`` shows.

    Their prefills alone, about a second on SmolLM2.  ``FALLBACK`` where the bundle has no sample that can be read.
    """
    try:
        if (sample := sample_of(scorer.bundle)) is None:
            return list(FALLBACK)
        prompts = [question.prompt for question in sample.questions[:SHOWN]]
        reports = await gather_all([scorer.last_report(scorer.render(prompt), OBSERVE) for prompt in prompts])
    except Exception as error:  # whatever it is, the addresses below are printed
        log.warning("no request could be made of the held-out questions: %s", error)
        return list(FALLBACK)
    by_risk = sorted(zip((report.risk for report in reports), prompts, strict=True))
    return [by_risk[0][1], by_risk[-1][1]]
