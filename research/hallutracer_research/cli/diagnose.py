"""hallutracer diagnose: does the depth mean suffice on YOUR trajectories?  The paper's checks on a
file of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hallutracer_research.documents import table_beside, write_json
from service.cli.loading import load_engine
from service.cli.options import BundleOptions, EngineChoice, Output, UsageError, check
from service.cli.train import one_bundle
from service.data.options import (
    BATCH_ROWS,
    BatchRows,
    Data,
    JudgeOptions,
    LabelOptions,
    LabelSource,
    RunDir,
)
from service.options import Common
from service.progress import note
from service.settings import option, section
from service.trainer.options import NewRowsOptions, made_of

if TYPE_CHECKING:
    from rich.console import Console

    from hallutracer_research.paper.diagnose import LabelledSet
    from hallutracer_research.paper.diagnostics.shape import Shrinkage

# section of the document -> its title, and what each key is
SECTIONS = table_beside(__file__, "diagnose.toml")


@section("Diagnosis", 5)
@dataclass(frozen=True, kw_only=True)
class DiagnoseChoices(JudgeOptions, LabelOptions):
    """What is diagnosed: with a bundle, the trajectories of these rows."""

    data: Data = ()
    labels: LabelSource = None
    run_dir: RunDir = None
    batch_rows: BatchRows = BATCH_ROWS
    output: Annotated[Output, Parameter(name=("--output", "--json"))] = None
    shrinkage: Annotated[
        str | None,
        option(
            "For few rows or copied layers: ledoit_wolf, or a share between 0 and 1, of the layers'"
            " covariance."
        ),
    ] = None


def diagnose(
    file: Annotated[
        Path | None,
        Parameter(
            help=(
                "An .npz with trajectory [N, m] and label [N]; optional group [N], readout [N, m,"
                " d] and direction "
                "[m, d].  Leave it out with --bundle and --data."
            ),
            show_env_var=False,
        ),
    ] = None,
    /,
    *,
    options: DiagnoseChoices = DiagnoseChoices(),
    bundles: BundleOptions = BundleOptions(),
    engine: EngineChoice = EngineChoice(),
    common: Common = Common(),
) -> None:
    """Check the paper's claims on your own labelled trajectories: is the depth mean enough, and
    why.

    Fisher gap, slope against mean, variance components, the AUROC of each trajectory feature; with
    readouts and probe directions also the probe geometry and the Chen-Qin test.  label is 1 for
    factual and 0 for hallucinated.

    With a bundle and rows that it was not trained on, the trajectories are made here:

      hallutracer diagnose --bundle my-probe --data held-out.jsonl --model ./my-model

    Or from a file of arrays, with one trajectory per prompt:

      import numpy as np
      np.savez("mine.npz", trajectory=trajectory, label=label)
      np.savez("mine.npz", trajectory=trajectory, label=label, readout=readout, direction=direction)

      hallutracer diagnose mine.npz --output mine.json"""
    if (file is None) == (not options.data):
        raise UsageError("FILE", "give an .npz file, or --bundle NAME with --data ROWS.jsonl")
    if file is not None and not file.is_file():
        raise UsageError("FILE", f"{file} is not a file")
    rule = _rule(options.shrinkage)
    from rich.console import Console

    from hallutracer_research.paper.diagnose import diagnose_set, read_set

    data = _own(options, bundles, engine) if file is None else read_set(file)
    for remark in data.remarks:
        note(remark)
    document = diagnose_set(data, rule)
    console = Console(highlight=False)
    rows, layers = data.trajectory.shape
    factual = int(data.label.sum())
    console.print(
        f"{rows} trajectories of {layers} layers: {factual} factual, {rows - factual} hallucinated"
    )
    _print(document, console)
    if options.output is not None:
        write_json(options.output, document)
        note(f"written to {options.output}")


def _own(options: DiagnoseChoices, bundles: BundleOptions, engine: EngineChoice) -> LabelledSet:
    """Return the trajectories of the bundle's probes on the rows."""
    check(made_of(NewRowsOptions, options))
    _, bundle = one_bundle(bundles, "whose probes read the rows")
    from hallutracer_research.paper.diagnose import own_trajectories
    from service.readout import Site

    engine.options_for([bundle.manifest.name])  # a wrong option is reported before rows are read
    site = Site(bundle.manifest.readout.site)
    rows = made_of(NewRowsOptions, options, new_name=bundle.manifest.name)
    try:
        return own_trajectories(
            bundle, rows, lambda: load_engine(engine, bundles=[bundle], rows=[site])
        )
    except KeyboardInterrupt:
        note(f"the same command resumes from {rows.folder}")
        raise


def _rule(text: str | None) -> Shrinkage:
    if text is None or text == "ledoit_wolf":
        return text  # type: ignore[return-value]
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise UsageError("--shrinkage", f"{text}: ledoit_wolf or a number between 0 and 1")
    return share


def _print(document: dict[str, Any], console: Console) -> None:
    geometry = document.get("geometry", {})
    parts = {**document, **{key: geometry[key] for key in ("kappa", "isotropy") if key in geometry}}
    for key, part in SECTIONS.items():
        if key in parts:
            _section(part["title"], parts[key], part["rows"], console)
        if key == "variance":
            lags = "  ".join(
                f"{lag}: {_cell(value, '')}"
                for lag, value in enumerate(parts[key]["residual_acf"], 1)
            )
            console.print(f"residual correlation by lag (factual)  {lags}")
    if "chen_qin" in document:
        test = document["chen_qin"]
        console.print("\nChen-Qin test of equal class means", style="bold")
        console.print(
            f"{test['layers_significant']} of {test['layers']} layers reject at {test['alpha']:g} "
            f"({test['middle_significant']} of the {test['middle_layers']} middle ones)"
        )
    for key, part in parts.items():
        for remark in part.get("notes", ()):
            console.print(f"{key}: {remark}", style="dim", markup=False)


def _section(title: str, values: dict[str, Any], rows: dict[str, str], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for marked, meaning in rows.items():
        key, _, kind = marked.partition(" ")
        if key in values:
            table.add_row(key, _cell(values[key], kind), meaning)
    console.print(f"\n{title}", style="bold")
    console.print(table)


def _cell(value: float | None, kind: str) -> str:
    if value is None:
        return "-"
    if kind == "p":
        return f"{value:.2g}" if value >= 0.001 else "< 0.001"
    return f"{100 * value:.2f} %" if kind == "%" else f"{value:.3f}"
