"""What the commands that take new rows to a published bundle share: calibrate and recalibrate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from service.cli.loading import load_engine, open_store
from service.cli.options import (
    BatchRows,
    BundleOptions,
    Data,
    DryRun,
    EngineChoice,
    GeneratedLabels,
    JudgeChoices,
    LabelChoices,
    RunDir,
    Seed,
    UsageError,
)
from service.data.options import BATCH_ROWS
from service.settings import option, section

if TYPE_CHECKING:
    from probes_store.bundle import Bundle
    from probes_store.store import Store
    from service.trainer.options import NewRowsOptions

    Options = TypeVar("Options", bound=NewRowsOptions)


@section("New rows", 5)
@dataclass(frozen=True, kw_only=True)
class NewRowsChoices:
    """Rows that the bundle has never seen, and what is published from them."""

    data: Data = ()
    labels: GeneratedLabels = None
    new_name: Annotated[
        str | None, option("Name to publish under.  Default: the bundle's own, as its next version.")
    ] = None
    trained_on: Annotated[
        tuple[str, ...],
        option("The bundle's own training and held-out files, repeatable: for bundles that do not record which rows "
               "they have seen."),
        Parameter(metavar="FILE"),
    ] = ()  # fmt: skip
    seed: Seed = 0
    dry_run: DryRun = False
    batch_rows: BatchRows = BATCH_ROWS
    run_dir: RunDir = None

    def bundle_of(self, bundles: BundleOptions, doing: str) -> tuple[Store, Bundle]:
        """The one bundle that is named, for one data file.  Raises UsageError, and what the store raises."""
        if len(self.data) != 1:
            raise UsageError("--data", "name one JSONL file")
        return self.one_bundle(bundles, doing)

    def one_bundle(self, bundles: BundleOptions, doing: str) -> tuple[Store, Bundle]:
        """The one bundle that is named.  Raises UsageError, and what the store raises."""
        if len(bundles.bundle) != 1:
            raise UsageError("--bundle", f"name the bundle to {doing}")
        store = open_store(bundles)
        return store, store.load(bundles.bundle[0])

    def of(self, bundle: Bundle, labels: LabelChoices, judge: JudgeChoices) -> dict[str, Any]:
        """The fields of ``trainer.options.NewRowsOptions``, with data and seed.  Raises UsageError."""
        from service.data.options import JudgeOptions

        if len(self.data) != 1:
            raise UsageError("--data", "name one JSONL file")
        if self.labels == "sample":
            raise UsageError("--labels", "this is about greedy answers: given or generate")
        if labels.prompt_format != "auto":
            raise UsageError("--prompt-format", "prompts are rendered as the bundle's training rows were")
        if labels.judge == "openai" and not (judge.judge_url and judge.judge_model):
            raise UsageError("--judge", "openai needs --judge-url (up to /v1) and --judge-model")
        optional: dict[str, Any] = {
            "abstain_pattern": judge.abstain_pattern, "max_new_tokens": labels.max_new_tokens,
        }  # fmt: skip
        if labels.judge is not None:
            optional["judge"] = JudgeOptions(
                labels.judge, judge.judge_url, judge.judge_model, judge.judge_key, answer_pattern=judge.answer_pattern
            )
        return {
            "data": Path(self.data[0]),
            "seed": self.seed,
            "bundle": bundle.reference,
            "run_dir": self.run_dir or Path("runs") / (self.new_name or bundle.manifest.name),
            "name": self.new_name,
            "trained_on": tuple(map(Path, self.trained_on)),
            "labels": self.labels,
            "batch_rows": self.batch_rows,
            "dry_run": self.dry_run,
            **{field: value for field, value in optional.items() if value is not None},
        }


def run_on(
    engine: EngineChoice, store: Store, bundle: Bundle, run: Callable[..., Bundle | None], wanted: Options
) -> Bundle | None:
    """``run`` of the trainer, with an engine that is loaded when it is asked for; what was published, if anything."""
    from rich.console import Console

    from service.readout import Site

    engine.options_for([bundle.manifest.name])  # a wrong option is reported before rows are read
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    site = Site(bundle.manifest.readout.site)
    try:
        return run(wanted, lambda: load_engine(engine, bundles=[bundle], rows=[site]), store, console=console)
    except KeyboardInterrupt:
        console.print(f"the same command resumes from {wanted.run_dir}")
        raise
