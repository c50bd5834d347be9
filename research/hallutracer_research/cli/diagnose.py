"""hallutracer diagnose: does the depth mean suffice on YOUR trajectories?  The paper's checks on a file of arrays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from service.cli.loading import load_engine
from service.cli.options import BundleOptions, EngineChoice, Output, UsageError, check
from service.cli.train import one_bundle
from service.data.options import BATCH_ROWS, BatchRows, Data, GeneratedLabels, JudgeOptions, LabelOptions, RunDir
from service.options import Common
from service.progress import note
from service.settings import option, section
from service.trainer.options import NewRowsOptions, made_of

if TYPE_CHECKING:
    from rich.console import Console

    from hallutracer_research.paper.diagnose import LabelledSet
    from hallutracer_research.paper.diagnostics.shape import Shrinkage


# What is printed of each section: key, what it is, and how it is written ("share": as a percentage).
Row = tuple[str, str, str]
FISHER: Sequence[Row] = (
    ("r_fisher", "SNR of the best layer weights over that of the plain mean", "number"),
    ("r_fisher_unbiased", "the same without the gain from noise", "number"),
    ("theta", "level-shape coupling", "number"),
    ("chi", "shape energy", "number"),
    ("t", "cross term", "number"),
    ("cauchy_schwarz", "t over its bound; near 1 the two above cancel", "number"),
)
SNR: Sequence[Row] = (
    ("rho", "divergence ratio of the class gap", "number"),
    ("gamma", "origin penalty", "number"),
    ("r_plugin", "SNR of slope over mean, from the covariance", "number"),
    ("r_empirical", "the same, measured", "number"),
    ("eta", "measured over predicted", "number"),
)
VARIANCE: Sequence[Row] = (
    ("icc", "share of within-class variance common to all layers (the paper's plug-in)", "number"),
    ("icc_unbiased", "the same by the method of moments", "number"),
    ("icc_factual", "factual class", "number"),
    ("icc_hallucinated", "hallucinated class", "number"),
)
FEATURES: Sequence[Row] = (
    ("mean", "AUROC of the depth mean: the detector", "number"), ("median", "trajectory median", "number"),
    ("trimmed_mean", "mean without a tenth of the layers at each end", "number"),
    ("slope", "least-squares slope", "number"), ("zone_shift", "output zone less recognition zone", "number"),
    ("total_variation", "path length", "number"), ("range", "largest less smallest logit", "number"),
)  # fmt: skip
GEOMETRY: Sequence[Row] = (
    ("adjacent_cos", "|cos| of adjacent probes (middle layers)", "number"),
    ("expected_cos", "the same for random directions", "number"),
    ("cos_p_value", "p-value of their difference", "p"),
    ("energy_fraction", "variance along the probe, of all", "share"),
    ("v2_top90", "of the probe, in the directions with 90 % of the variance", "share"),
    ("alignment", "|cos| of probe and mean shift", "number"),
    ("stable_rank", "effective rank of the readouts", "number"),
    ("mean_shift_norm", "distance of the class means", "number"),
    ("cohen_d", "Cohen's d of W, the frozen probe on the next layer", "number"),
    ("r_w", "the same over Cohen's d of the whole increment", "number"),
    ("distance_correlation", "of W and K", "number"),
)
KAPPA: Sequence[Row] = (
    ("kappa_median", "larger over smaller class variance along the frozen probe, median", "number"),
    ("kappa_p95", "95th percentile", "number"),
    ("degradation", "of the effect size, where the wider class is counted", "share"),
    ("factual_wider", "transitions where the factual class is the wider", "share"),
)
ISOTROPY: Sequence[Row] = (
    ("shapiro_p", "inner products are normal", "p"),
    ("ks_ambient_p", "with variance 1 / d", "p"),
    ("trend_p", "|cos| has no trend over the gap between layers", "p"),
    ("anova_p", "|cos| has one mean at every gap", "p"),
    ("permutation_ambient_p", "inner products are those of random directions", "p"),
)


@section("Diagnosis", 5)
@dataclass(frozen=True, kw_only=True)
class DiagnoseChoices(JudgeOptions, LabelOptions):
    """What is diagnosed: with a bundle, the trajectories of these rows."""

    data: Data = ()
    labels: GeneratedLabels = None
    run_dir: RunDir = None
    batch_rows: BatchRows = BATCH_ROWS
    output: Annotated[Output, Parameter(name=("--output", "--json"))] = None
    shrinkage: Annotated[
        str | None,
        option("For few rows or copied layers: ledoit_wolf, or a share between 0 and 1, of the layers' covariance."),
    ] = None


def diagnose(
    file: Annotated[
        Path | None,
        Parameter(
            help="An .npz with trajectory [N, m] and label [N]; optional group [N], readout [N, m, d] and direction "
            "[m, d].  Leave it out with --bundle and --data.",
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
    """Check the paper's claims on your own labelled trajectories: is the depth mean enough, and why.

    Fisher gap, slope against mean, variance components, the AUROC of each trajectory feature; with readouts and probe
    directions also the probe geometry and the Chen-Qin test.  label is 1 for factual and 0 for hallucinated.

    With a bundle and rows that it was not trained on, the trajectories are made here:

      hallutracer diagnose --bundle my-probe --data held-out.jsonl --model ./my-model

    Or from a file of arrays, with one trajectory per prompt:

      import numpy as np
      np.savez("mine.npz", trajectory=trajectory, label=label)
      np.savez("mine.npz", trajectory=trajectory, label=label, readout=readout, direction=direction)

      hallutracer diagnose mine.npz --output mine.json
    """
    if (file is None) == (not options.data):
        raise UsageError("FILE", "give an .npz file, or --bundle NAME with --data ROWS.jsonl")
    if file is not None and not file.is_file():
        raise UsageError("FILE", f"{file} is not a file")
    rule = _rule(options.shrinkage)
    from rich.console import Console

    from hallutracer_research.paper.diagnose import diagnose_set, read_set

    if file is not None:
        data = read_set(file)
        if data.ignored:
            note(f"ignored arrays: {', '.join(data.ignored)}")
    else:
        data = _own(options, bundles, engine)
    document = diagnose_set(data, rule)
    console = Console(highlight=False)
    rows, layers = data.trajectory.shape
    factual = int(data.label.sum())
    console.print(f"{rows} trajectories of {layers} layers: {factual} factual, {rows - factual} hallucinated")
    _print(document, console)
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        note(f"written to {options.output}")


def _own(options: DiagnoseChoices, bundles: BundleOptions, engine: EngineChoice) -> LabelledSet:
    """Return the trajectories of the bundle's probes on the rows."""
    check(made_of(NewRowsOptions, options))
    _, bundle = one_bundle(bundles, "whose probes read the rows")
    from hallutracer_research.paper.diagnose import own_trajectories
    from service.readout import Site

    engine.options_for([bundle.manifest.name])  # a wrong option is reported before rows are read
    site, rows = Site(bundle.manifest.readout.site), made_of(NewRowsOptions, options, new_name=bundle.manifest.name)
    try:
        found = own_trajectories(bundle, rows, lambda: load_engine(engine, bundles=[bundle], rows=[site]))
    except KeyboardInterrupt:
        note(f"the same command resumes from {rows.folder}")
        raise
    for remark in found.remarks:
        note(remark)
    return found.labelled


def _rule(text: str | None) -> Shrinkage:
    if text is None:
        return None
    if text == "ledoit_wolf":
        return "ledoit_wolf"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise UsageError("--shrinkage", f"{text}: ledoit_wolf or a number between 0 and 1")
    return share


def _print(document: dict[str, Any], console: Console) -> None:
    variance = document["variance"]
    sections: list[tuple[str, str, Sequence[Row]]] = [
        ("Fisher gap", "fisher", FISHER),
        ("Slope against mean", "snr", SNR),
        ("Variance components", "variance", VARIANCE),
        ("AUROC of each feature", "features", FEATURES),
        ("Geometry", "geometry", GEOMETRY),
    ]
    for title, key, rows in sections:
        if key in document:
            _section(title, document[key], rows, console)
        if key == "variance":
            lags = "  ".join(
                f"{lag}: {_cell(value, 'number')}" for lag, value in enumerate(variance["residual_acf"], 1)
            )
            console.print(f"residual correlation by lag (factual)  {lags}")
    geometry = document.get("geometry", {})
    if "kappa" in geometry:
        _section("Class spread along the frozen probe", geometry["kappa"], KAPPA, console)
        _section("Probe isotropy: p-values, small ones speak against it", geometry["isotropy"], ISOTROPY, console)
    if "chen_qin" in document:
        test = document["chen_qin"]
        console.print("\nChen-Qin test of equal class means", style="bold")
        console.print(
            f"{test['layers_significant']} of {test['layers']} layers reject at {test['alpha']:g} "
            f"({test['middle_significant']} of the {test['middle_layers']} middle ones)"
        )
    inner = {key: geometry[key] for key in ("kappa", "isotropy") if key in geometry}
    for key, part in {**document, **inner}.items():
        for remark in part.get("notes", ()):
            console.print(f"{key}: {remark}", style="dim", markup=False)


def _section(title: str, values: dict[str, Any], rows: Sequence[Row], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for key, meaning, kind in rows:
        if key in values:
            table.add_row(key, _cell(values[key], kind), meaning)
    console.print(f"\n{title}", style="bold")
    console.print(table)


def _cell(value: float | None, kind: str) -> str:
    if value is None:
        return "-"
    if kind == "share":
        return f"{100 * value:.2f} %"
    if kind == "p":
        return f"{value:.2g}" if value >= 0.001 else "< 0.001"
    return f"{value:.3f}"
