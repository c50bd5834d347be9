"""hallutracer score: one prompt to the terminal, or JSONL in and JSONL out, without a server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from service.cli.loading import bundle_names, load_engine, load_first, load_scorers, open_store
from service.cli.options import BundleOptions, EngineChoice, Json, Output, UsageError
from service.cli.output import draw_report, print_line, progress_bar
from service.data.rows import check_prompt, likely_columns, objects, rendered, split_answer
from service.errors import DataError, HalluTracerError
from service.options import Common
from service.policies.guard import Policy
from service.policies.policy import built_in
from service.progress import note, progress
from service.settings import Range, Threshold, option, section

if TYPE_CHECKING:
    from service.api.request_schema import Include
    from service.judging.guarantee import Standing
    from service.scoring import RiskReport, Scorer

Rows = list[tuple[int, dict[str, Any]]]  # line number, object
ROWS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz")  # ends of names of files with rows
MAX_PLOTTED = 6
# rows between two updates of output and progress bar; the engine cuts its own batches from them
BATCH = 256


@section("Scoring", 5)
@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What is scored, and what is reported of it."""

    input: Annotated[
        Path | None,
        option(
            "Rows with 'prompt' or 'messages', in JSONL, .csv, .tsv or .parquet; - reads JSONL from"
            " standard input."
        ),
        Parameter(allow_leading_hyphen=True),
    ] = None
    output: Output = None
    threshold: Threshold = None
    generate: Annotated[
        int,
        option("Answer with up to N tokens where the decision allows.", limits=Range(0)),
        Parameter(metavar="N"),
    ] = 0
    trajectory: Annotated[
        bool, option("Add the truth logits to JSON output."), Parameter(negative="")
    ] = False
    plot: Annotated[
        Path | None,
        option("Draw the trajectories of up to six prompts into this PNG."),
        Parameter(metavar="FILE"),
    ] = None
    as_json: Json = False

    @property
    def policy(self) -> Policy:
        """Return the gate, at the given threshold."""
        return built_in()["gate"].at(self.threshold)


def score(
    *prompts: Annotated[
        str,
        Parameter(help="One question or more.  Leave them out with --input.", show_env_var=False),
    ],
    options: ScoreOptions = ScoreOptions(),
    bundles: BundleOptions = BundleOptions(),
    engine: EngineChoice = EngineChoice(),
    common: Common = Common(),
) -> None:
    """Score questions, or a JSONL file of them, before anything is decoded.

    JSON is that of POST /score: with --json the whole document, in JSONL each row with the fields
    of its risk.

      hallutracer score "What is the capital of France?" --generate 16

      hallutracer score "What is the capital of France?" "What is the capital of Palau?" \\
          --plot pair.png

      hallutracer score --input questions.jsonl --output risks.jsonl"""
    source = options.input
    output = options.output
    plot = options.plot
    if bool(prompts) == (source is not None):
        raise UsageError("PROMPT", "give a question, or --input FILE, and not both")
    if file := next(
        (prompt for prompt in prompts if prompt.endswith(ROWS) and Path(prompt).is_file()), None
    ):
        raise UsageError("PROMPT", f"{file} is a file; to score its rows: --input {file}")
    if not all(map(str.strip, prompts)):
        raise UsageError("PROMPT", "the question is empty; give its text in quotes")
    if plot is not None and len(prompts) not in range(1, MAX_PLOTTED + 1):
        raise UsageError(
            "--plot",
            f"a picture has room for 1 to {MAX_PLOTTED} prompts, given on the command line",
        )
    if plot is not None and not plot.parent.is_dir():
        raise UsageError("--plot", f"{plot.parent} is not a folder")
    rows = None if source is None else _read_rows(source)
    if output is not None and output.is_dir():
        raise UsageError("--output", f"{output} is a folder; name a file")
    bundle = load_first(open_store(bundles), bundle_names(engine.model, bundles))
    with closing(load_engine(engine, bundles=[bundle])) as loaded:
        (scorer,) = load_scorers(loaded, {bundle.reference: bundle}).values()
        if rows is not None:
            _write(_scored(scorer, rows, _render_rows(scorer, rows, str(source)), options), output)
            if output is not None:
                note(f"{len(rows)} risks written to {output}")
            return
        with progress("scoring"):
            standings = [scorer.standing(prompt) for prompt in prompts]
            reports = _reports(
                scorer, [scorer.render(prompt) for prompt in prompts], standings, options
            )
    if plot is not None:
        from service.library.detector import draw_trajectories

        try:
            draw_trajectories(bundle, prompts, reports, plot)
        except OSError as error:
            raise HalluTracerError(f"cannot write {plot}: {error.strerror}") from None
        note(f"picture written to {plot}")
    if options.as_json or output is not None:
        from service.api.reply import score_response
        from service.serving.judgement import Judgement

        document = score_response(
            Judgement.of(scorer, options.policy, reports, uuid.uuid4().hex), _added(options)
        )
        _write([document.model_dump_json(exclude_none=True)], output)
        return
    for prompt, report in zip(prompts, reports, strict=True):
        if len(prompts) > 1:
            print_line(prompt)
        draw_report(bundle, report)


def _added(options: ScoreOptions) -> list[Include]:
    return ["trajectory"] if options.trajectory else []


def _reports(
    scorer: Scorer, prompts: list[list[int]], standings: list[Standing], options: ScoreOptions
) -> list[RiskReport]:
    from service.engines.base import Sampling

    if options.generate:
        return scorer.score_or_continue(
            prompts, Sampling(max_tokens=options.generate), options.policy, standings
        )
    return scorer.score(prompts, options.policy, standings)


def _read_rows(path: Path) -> Rows:
    problems: list[str] = []
    rows = []
    for line, row in objects(path, problems):
        likely = (
            {} if {"prompt", "messages"} & row.keys() else likely_columns(row, "prompt", "messages")
        )
        cure = "".join(f": rename {key!r} to {field!r}" for field, key in likely.items())
        faults = [fault + cure for fault in check_prompt(row)]
        try:
            json.dumps(
                row, ensure_ascii=False
            ).encode()  # every row is written out again, whatever else it holds
        except UnicodeEncodeError:
            faults = faults or ["half of a surrogate pair (\\ud800 to \\udfff): it is not text"]
        problems += [f"line {line}: {fault}" for fault in faults]
        rows.append((line, row))
    if problems or not rows:
        raise DataError(str(path), problems or ["no rows: one JSON object per line is expected"])
    return rows


def _render_rows(scorer: Scorer, rows: Rows, source: str) -> list[list[int]]:
    """Return the token ids of all prompts, before the first is scored.  Raises DataError, by
    line."""

    def ids_of(row: dict[str, Any]) -> list[int]:
        messages = split_answer(row["messages"])[0] if "messages" in row else None
        return scorer.render(row.get("prompt"), messages)

    return rendered(source, rows, ids_of, scorer.engine.identity.max_tokens)


def _scored(
    scorer: Scorer, rows: Rows, prompts: list[list[int]], options: ScoreOptions
) -> Iterator[str]:
    from service.api.reply import bundle_ref, guarantee_out, risk_out
    from service.serving.judgement import Judgement

    bundle: dict[str, Any] = {"bundle": bundle_ref(scorer).model_dump()}
    if (guarantee := guarantee_out(Judgement.of(scorer, options.policy, ()).guarantee)) is not None:
        bundle["guarantee"] = guarantee.model_dump()
    with progress_bar(len(rows), None, "prompt") as bar:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            with progress(f"scoring prompts {start + 1} to {start + len(batch)} of {len(rows)}"):
                standings = [
                    scorer.standing(row.get("prompt"), row.get("messages")) for _, row in batch
                ]
                reports = _reports(scorer, prompts[start : start + BATCH], standings, options)
            for index, ((_, row), report) in enumerate(zip(batch, reports, strict=True), start):
                risk = risk_out(index, report, _added(options)).model_dump(exclude_none=True)
                yield json.dumps(row | risk | bundle, ensure_ascii=False)
            bar.update(len(batch))


def _write(lines: Iterable[str], output: Path | None) -> None:
    """To standard output, or to a file that has its name only once it is complete."""
    if output is None:
        for line in lines:
            print_line(line)
        return
    partial = output.with_name(output.name + ".part")
    try:
        with partial.open("w", encoding="utf-8") as sink:
            sink.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise HalluTracerError(f"cannot write {output}: {error.strerror}") from None
    partial.replace(output)
