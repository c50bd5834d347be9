"""hallutracer try: what the risk is worth, shown on held-out questions that the bundle carries."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from service.cli.loading import bundle_names, load_engine, load_scorers, open_store
from service.cli.options import BundleOptions, EngineChoice, Json, UsageError
from service.cli.output import print_json
from service.cli.sorted_table import Seen, Tried, draw_sorted
from service.errors import HalluTracerError
from service.options import Common
from service.settings import Range, option, section

if TYPE_CHECKING:
    import httpx

    from service.judging.coverage import Tenth

SHOWN = 24  # questions, where the bundle carries more


@section("Trying", 5)
@dataclass(frozen=True, kw_only=True)
class TryOptions:
    """What is asked, and whom."""

    show: Annotated[int, option("So many of the bundle's questions.", limits=Range(1))] = SHOWN
    url: Annotated[
        str | None, option("Ask this running service instead of loading the model here."), Parameter(metavar="URL")
    ] = None
    service_key: Annotated[str | None, option("Key for that service.", secret=True)] = None
    as_json: Json = False


def held_out(
    *,
    options: TryOptions = TryOptions(),
    bundles: BundleOptions = BundleOptions(),
    engine: EngineChoice = EngineChoice(),
    common: Common = Common(),
) -> None:
    """See what the risk is worth: held-out questions of the bundle, answered by the model and sorted by risk.

    The questions were drawn before any risk was known, and no fit saw them; misses are printed like hits.  Below them,
    how often the model is right in each tenth of the training questions by risk.

      hallutracer try

      hallutracer try --url http://127.0.0.1:8765
    """
    found = _asked_here(options, bundles, engine) if options.url is None else _asked_there(options, bundles)
    if options.as_json:
        print_json(found.document())
        return
    draw_sorted(found)


def _asked_here(options: TryOptions, bundles: BundleOptions, engine: EngineChoice) -> Tried:
    from service.engines.bridge import gather_all, wait_for
    from service.judging.coverage import coverage
    from service.judging.sample import sample_of
    from service.serving.sampled import TOGETHER, Answered, ask

    bundle = open_store(bundles).load(bundle_names(engine.model, bundles)[0])
    if (sample := sample_of(bundle)) is None:
        raise _nothing(bundle.reference)
    numbers = range(min(options.show, len(sample.questions)))
    with closing(load_engine(engine, bundles=[bundle])) as loaded, _bar(len(numbers)) as advance:
        (scorer,) = load_scorers(loaded, {bundle.reference: bundle}).values()
        turn = asyncio.Semaphore(TOGETHER)

        async def one(number: int) -> Answered:
            async with turn:
                answered = await ask(scorer, sample, number)
            advance()
            return answered

        async def every() -> list[Answered]:
            return await gather_all([one(number) for number in numbers])

        answers = wait_for(every())
        model = loaded.identity.model
    seen = [
        Seen(
            found.question.prompt,
            found.answer,
            found.question.answers,
            found.report.risk,
            found.report.verdict.flagged,
            found.verdict,
        )
        for found in answers
    ]
    return _tried(bundle.reference, model, bundle.manifest.threshold, seen, coverage(bundle).tenths)


def _asked_there(options: TryOptions, bundles: BundleOptions) -> Tried:
    from concurrent.futures import ThreadPoolExecutor

    import httpx

    from service.judging.coverage import Tenth
    from service.serving.sampled import TOGETHER

    if len(bundles.bundle) > 1:
        raise UsageError("--bundle", "name one")
    headers = {} if options.service_key is None else {"authorization": f"Bearer {options.service_key}"}
    try:
        with httpx.Client(base_url=options.url or "", headers=headers, timeout=60, trust_env=False) as client:
            cards = _get(client, "/v1/bundles")["data"]
            name = bundles.bundle[0] if bundles.bundle else next(card["id"] for card in cards if card["default"])
            card = _get(client, f"/v1/bundles/{name}")
            if card["sample"] is None:
                raise _nothing(card["id"])
            numbers = range(min(options.show, len(card["sample"]["questions"])))
            with _bar(len(numbers)) as advance, ThreadPoolExecutor(TOGETHER) as pool:
                found = []
                for one in pool.map(lambda number: _get(client, f"/v1/bundles/{name}/sample/{number}"), numbers):
                    found.append(one)
                    advance()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, StopIteration) as error:
        raise HalluTracerError(
            f"{options.url} did not answer as a HalluTracer service of this version: {error or type(error).__name__}"
        ) from error
    seen = [
        Seen(one["prompt"], one["answer"], tuple(one["accepted"]), one["risk"], one["flagged"], one["verdict"])
        for one in found
    ]
    tenths = tuple(Tenth(**one) for one in card["coverage"]["tenths"])
    return _tried(card["id"], card["model"], found[0]["threshold"], seen, tenths)


def _get(client: httpx.Client, path: str) -> dict[str, Any]:
    """Raises HalluTracerError with the service's own words where it refuses."""
    answer = client.get(path)
    if answer.status_code != 200:
        try:
            said = answer.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            said = answer.text[:200]
        raise HalluTracerError(f"GET {client.base_url}{path.lstrip('/')} answered {answer.status_code}: {said}")
    document: dict[str, Any] = answer.json()
    return document


def _tried(reference: str, model: str, threshold: float, seen: Sequence[Seen], tenths: Sequence[Tenth]) -> Tried:
    ordered = sorted(seen, key=lambda one: one.risk)
    return Tried(reference, model, threshold, tuple(ordered), tuple(tenths))


def _nothing(reference: str) -> HalluTracerError:
    return HalluTracerError(
        f"{reference} carries no questions to try: it was trained with --no-sample, without accepted answers, or by an "
        'older version. Train it again, or ask your own: hallutracer score "..." --generate 16'
    )


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(total=total, desc="asking", unit="question", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        yield bar.update
