"""hallutracer score: one prompt to the terminal, or JSONL in and JSONL out, without a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli import options as o
from service.cli.loading import bundle_names, engine_options, load_engine, load_scorers, open_store
from service.data.rows import check_prompt, objects
from service.errors import DataError, HalluTracerError, RequestError
from service.settings import env

if TYPE_CHECKING:
    from service.engines.base import Completion
    from service.scoring import RiskReport, Scorer

Rows = list[tuple[int, dict[str, Any]]]  # line number, object
BATCH = 256  # rows between two updates of output and progress bar; the engine cuts its own batches from them


def score(
    prompt: Annotated[str | None, typer.Argument(help="One question.  Leave it out with --input.")] = None,
    input: Annotated[
        Path | None,
        typer.Option(help="JSONL with 'prompt' or 'messages' in each row; - reads stdin.", envvar=env("input")),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the rows go, each with its risk.  Default: stdout.", envvar=env("output"))
    ] = None,
    model: o.Model = None,
    bundle: Annotated[str | None, typer.Option(help="name, name@alias or name:version", envvar=env("bundle"))] = None,
    store: o.StoreOption = o.STORE_DEFAULT,
    threshold: o.Threshold = None,
    generate: Annotated[
        int, typer.Option(min=0, help="Answer with up to N tokens where the decision allows.", envvar=env("generate"))
    ] = 0,
    trajectory: Annotated[
        bool, typer.Option("--trajectory", help="Add the truth logits to JSON output.", envvar=env("trajectory"))
    ] = False,
    as_json: o.Json = False,
    revision: o.Revision = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    max_batch_tokens: o.MaxBatchTokens = None,
    threads: o.Threads = None,
    engine: o.Engine = "transformers",
    tensor_parallel_size: o.TensorParallel = 1,
    pipeline_parallel_size: o.PipelineParallel = 1,
    engine_arg: o.EngineArg = None,
) -> None:
    """Score one question, or a JSONL file of them, before anything is decoded.

    \b
    hallutracer score "What is the capital of France?" --generate 16
    hallutracer score --input questions.jsonl --output risks.jsonl
    """
    if (prompt is None) == (input is None):
        raise typer.BadParameter("give a question, or --input FILE, and not both", param_hint="PROMPT")
    rows = None if input is None else _read_rows(input)
    if output is not None and output.is_dir():
        raise typer.BadParameter(f"{output} is a folder; name a file", param_hint="--output")
    opened = open_store(store).load(bundle_names(model, bundle.split() if bundle else [])[0])
    loading = engine_options(
        model,
        revision,
        dtype,
        device,
        max_batch_tokens,
        engine,
        tensor_parallel_size,
        pipeline_parallel_size,
        engine_arg,
    )
    loaded = load_engine(loading, threads, bundles=[opened])
    try:
        (scorer,) = load_scorers(loaded, [opened])
        if rows is not None:
            assert input is not None
            prompts = _render_rows(scorer, rows, input)
            _score_file(scorer, rows, prompts, output, threshold, generate, trajectory)
            return
        report = _reports(scorer, [scorer.render(prompt)], threshold, generate)[0]
    finally:
        loaded.close()
    if as_json:
        typer.echo(json.dumps(_as_dict(scorer, report, trajectory)))
        return
    from service.cli.terminal import draw_report

    draw_report(scorer.bundle, report)


def _reports(scorer: Scorer, prompts: list[list[int]], threshold: float | None, generate: int) -> list[RiskReport]:
    from service.engines.base import Sampling
    from service.guard import GATE

    policy = GATE.at(threshold)
    if generate:
        return scorer.score_or_continue(prompts, Sampling(max_tokens=generate), policy)
    return scorer.score(prompts, policy)


def _render_rows(scorer: Scorer, rows: Rows, source: Path) -> list[list[int]]:
    """All prompts to token ids, before the first is scored: what the model cannot take is said by line, at once."""
    prompts, problems, limit = [], [], scorer.engine.identity.max_tokens
    for line, row in rows:
        try:
            prompts.append(scorer.render(row.get("prompt"), row.get("messages")))
            if len(prompts[-1]) > limit:
                problems.append(f"line {line}: {len(prompts[-1])} tokens are more than the model's {limit}")
        except RequestError as error:
            problems.append(f"line {line}: {error}")
    if problems:
        raise DataError(str(source), problems)
    return prompts


def _as_dict(scorer: Scorer, report: RiskReport, trajectory: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "risk": report.risk,
        "depth_mean": report.depth_mean,
        "decision": report.decision.value,
        "threshold": report.verdict.threshold,
        "bundle": scorer.bundle.reference,
    }
    if trajectory:
        row["trajectory"] = report.trajectory.tolist()
    completion: Completion | None = report.completion
    if completion is not None:
        row["completion"] = completion.text
    return row


def _read_rows(path: Path) -> Rows:
    """Read and check every line before the model is loaded."""
    problems: list[str] = []
    rows = []
    for line, row in objects(path, problems):
        found = list(check_prompt(row)) or _unwritable(row)
        problems += [f"line {line}: {problem}" for problem in found]
        rows.append((line, row))
    if problems or not rows:
        raise DataError(str(path), problems or ["no rows: one JSON object per line is expected"])
    return rows


def _unwritable(row: dict[str, Any]) -> list[str]:
    """Every row is written out again, whatever else it holds."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return ["half of a surrogate pair (\\ud800 to \\udfff): it is not text"]
    return []


def _score_file(
    scorer: Scorer,
    rows: Rows,
    prompts: list[list[int]],
    output: Path | None,
    threshold: float | None,
    generate: int,
    trajectory: bool,
) -> None:
    from tqdm import tqdm

    def scored() -> Iterator[str]:
        with tqdm(total=len(rows), unit="prompt", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
            for start in range(0, len(rows), BATCH):
                batch = rows[start : start + BATCH]
                reports = _reports(scorer, prompts[start : start + BATCH], threshold, generate)
                for (_, row), report in zip(batch, reports, strict=True):
                    yield json.dumps(row | _as_dict(scorer, report, trajectory), ensure_ascii=False)
                bar.update(len(batch))

    if output is None:
        for line in scored():
            sys.stdout.write(line + "\n")
        return
    # Written aside, then renamed: an interrupted run leaves no half file under the final name.
    partial = output.with_name(output.name + ".part")
    try:
        with partial.open("w", encoding="utf-8") as sink:
            for line in scored():
                sink.write(line + "\n")
    except OSError as error:
        raise HalluTracerError(f"cannot write {output}: {error.strerror}") from None
    partial.replace(output)
    typer.echo(f"{len(rows)} risks written to {output}", err=True)
