"""hallutracer try and demo: what the risk is worth, on questions that a bundle carries, and the
demo model's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from service.cli.loading import (
    bundle_names,
    load_engine,
    load_first,
    load_scorers,
    open_store,
    running_service,
)
from service.cli.options import BundleOptions, EngineChoice, Json, StoreOptions, UsageError
from service.cli.output import (
    QuestionResult,
    TryReport,
    draw_sorted,
    print_json,
    print_line,
    progress_bar,
)
from service.demo import Passage
from service.errors import HalluTracerError
from service.library.engine import DEMO, SHIPPED
from service.options import Common
from service.settings import Range, option, section

if TYPE_CHECKING:
    from service.judging.evaluation import Sample

SHOWN = 24  # questions, where the bundle carries more
OWN_TOKENS = 48  # of an answer to a question of the user's


@section("Trying", 5)
@dataclass(frozen=True, kw_only=True)
class TryOptions:
    """Number of questions, and the address of the service that is asked."""

    show: Annotated[
        int | None,
        option(
            f"So many questions.  Default: {SHOWN} of the bundle's, or all of --ask.",
            limits=Range(1),
        ),
    ] = None
    ask: Annotated[
        Path | None,
        option(
            "Ask questions of yours instead of the bundle's: rows with 'prompt' and 'answers', in"
            " JSONL, .csv, .tsv or .parquet.  Then a line says how many answers are wrong without a"
            " gate and with one.  Not with --url."
        ),
        Parameter(metavar="FILE"),
    ] = None
    url: Annotated[
        str | None,
        option("Ask this running service instead of loading the model here."),
        Parameter(metavar="URL"),
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
    """See what the risk is worth: held-out questions of the bundle, answered by the model and
    sorted by risk.

    First comes a sentence of the bundle's own card: use it, use it for some kinds of question, or
    do not.  The questions were drawn before any risk was known, and no fit saw them; misses are
    printed like hits.  Below them, how often the model is right in each tenth of the training
    questions by risk.  With --ask the questions are yours, and the last line says whether the gate
    helps you.

      hallutracer try

      hallutracer try --ask mine.jsonl

      hallutracer try --url http://127.0.0.1:8765"""
    if options.ask is not None and options.url is not None:
        raise UsageError("--ask", "asks the model here; leave out --url")
    tried = (
        _asked_here(options, bundles, engine)
        if options.url is None
        else _asked_there(options, bundles)
    )
    if options.as_json:
        print_json(tried.document())
    else:
        draw_sorted(tried)


def _asked_here(options: TryOptions, bundles: BundleOptions, engine: EngineChoice) -> TryReport:
    from service.engines.bridge import gather_all, wait_for
    from service.judging.evaluation import coverage, recommendation_of, sample_of
    from service.serving.sampled import TOGETHER, ask

    sample = None if options.ask is None else _sample_in(options.ask)
    bundle = load_first(open_store(bundles), bundle_names(engine.model, bundles))
    if sample is None and (sample := sample_of(bundle)) is None:
        raise _nothing(bundle.reference)
    most = options.show or (len(sample.questions) if options.ask else SHOWN)
    numbers = range(min(most, len(sample.questions)))
    with (
        closing(load_engine(engine, bundles=[bundle])) as loaded,
        progress_bar(len(numbers), "asking", "question") as bar,
    ):
        (scorer,) = load_scorers(loaded, {bundle.reference: bundle}).values()

        async def one(number: int) -> QuestionResult:
            judged = await ask(scorer, sample, number)
            bar.update()
            question, report = judged.question, judged.report
            return QuestionResult(
                question.prompt,
                judged.answer,
                question.answers,
                report.risk,
                report.verdict.flagged,
                judged.verdict,
            )

        seen = wait_for(gather_all([one(number) for number in numbers], TOGETHER))
        model = loaded.identity.model
    tenths, recommendation = coverage(bundle).tenths, recommendation_of(bundle)
    tried = _tried(bundle.reference, model, bundle.manifest.threshold, seen, tenths, recommendation)
    return replace(tried, file=None if options.ask is None else str(options.ask))


def _sample_in(path: Path) -> Sample:
    """Return the user's questions as a bundle carries its own, judged in the same way.

    Raises DataError, by line."""
    from service.data.options import ABSTAIN
    from service.data.training_rows import read_dataset
    from service.errors import DataError
    from service.judging.evaluation import Sample, SampleQuestion

    rows = [row for row in read_dataset(path, "generate", folds=None).rows if row.applies]
    if problems := [f"line {row.line}: give a 'prompt'" for row in rows if row.prompt is None]:
        raise DataError(str(path), problems)
    questions = tuple(
        SampleQuestion(row.question, row.answers, row.strata.get("kind", "")) for row in rows
    )
    return Sample(str(path), "contains", ABSTAIN, OWN_TOKENS, questions)


def _asked_there(options: TryOptions, bundles: BundleOptions) -> TryReport:
    from concurrent.futures import ThreadPoolExecutor

    from service.judging.evaluation import Tenth
    from service.serving.sampled import TOGETHER

    if len(bundles.bundle) > 1:
        raise UsageError("--bundle", "name one")
    with running_service(options.url or "", options.service_key) as get:
        cards = get("/v1/bundles")["data"]
        name = (
            bundles.bundle[0]
            if bundles.bundle
            else next(card["id"] for card in cards if card["default"])
        )
        card = get(f"/v1/bundles/{name}")
        if card["sample"] is None:
            raise _nothing(card["id"])
        numbers = range(min(options.show or SHOWN, len(card["sample"]["questions"])))
        seen = []
        with (
            progress_bar(len(numbers), "asking", "question") as bar,
            ThreadPoolExecutor(TOGETHER) as pool,
        ):
            for answered in pool.map(
                lambda number: get(f"/v1/bundles/{name}/sample/{number}"), numbers
            ):
                threshold = answered["threshold"]
                fields = {
                    field: answered[field]
                    for field in ("prompt", "answer", "risk", "flagged", "verdict")
                }
                seen.append(QuestionResult(**fields, accepted=tuple(answered["accepted"])))
                bar.update()
        tenths = [Tenth(**tenth) for tenth in card["coverage"]["tenths"]]
        # A service of an older version sends none.
        recommendation = card.get("recommendation")
        return _tried(card["id"], card["model"], threshold, seen, tenths, recommendation)


def _tried(
    reference: str,
    model: str,
    threshold: float,
    seen: Sequence[QuestionResult],
    tenths: Sequence[Any],
    recommendation: str | None,
) -> TryReport:
    return TryReport(
        reference,
        model,
        threshold,
        tuple(sorted(seen, key=lambda question: question.risk)),
        tuple(tenths),
        recommendation,
    )


def _nothing(reference: str) -> HalluTracerError:
    return HalluTracerError(
        f"{reference} carries no questions to try: it was trained with --no-sample, without"
        " accepted answers, or by an older version. Train it again, or ask your own: hallutracer"
        ' score "..." --generate 16'
    )


def info(
    *, as_json: Json = False, store: StoreOptions = StoreOptions(), common: Common = Common()
) -> None:
    """Print where the model and its bundles are."""
    from service.demo import MODEL_DIR

    opened = open_store(store)
    bundles = [opened.load(name) for name in SHIPPED[DEMO]]
    if as_json:
        rows = []
        for bundle in bundles:
            manifest = bundle.manifest
            row = {"name": manifest.name, "version": manifest.version, "digest": manifest.digest}
            rows.append(row | {"path": str(bundle.path)})
        print_json({"model": str(MODEL_DIR), "bundles": rows})
        return
    print_line(f"model    {MODEL_DIR}")
    for bundle in bundles:
        print_line(
            f"bundle   {bundle.reference:<14} signals {', '.join(bundle.manifest.signals)} "
            f" {bundle.path}"
        )
    print_line("\nModel card: hallutracer bundle show demo")


def questions(
    *,
    split: Annotated[
        Literal["train", "dev", "test"],
        option(
            "No entity is in two of them.  train: the bundles' training rows.  dev: chose recipe"
            " and seed.  test: only "
            "ever reported."
        ),
    ],
    passages: Annotated[
        tuple[Passage, ...],
        option(
            "In front of each question, repeatable, a row for each: right states the fact among two"
            " others; unrelated "
            "and contradicting are the controls; none."
        ),
    ] = ("none",),
    common: Common = Common(),
) -> None:
    """Print questions as JSONL: id, prompt, answers, group, kind, passage, exposures, template,
    in_refusals.

    hallutracer demo questions --split test --passages none --passages right > questions.jsonl"""
    from service.demo.questions import questions as rows
    from service.demo.questions import with_passages

    for row in with_passages(rows(split), tuple(dict.fromkeys(passages))):
        print_line(json.dumps(row, ensure_ascii=False))


DEMO_COMMANDS = (
    "The demonstration model: what it is and its questions.",
    {"info": info, "questions": questions},
)
