"""Options of the commands that take new rows to a published bundle: calibrate and recalibrate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from service.cli.options import (
    BatchRows,
    Data,
    GeneratedLabels,
    JudgeChoices,
    LabelChoices,
    RunDir,
    Seed,
    UsageError,
)
from service.settings import option, section

if TYPE_CHECKING:
    from probes_store.bundle import Bundle


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
    dry_run: Annotated[bool, option("Print what would be done.  Loads no model and spends nothing.")] = False
    batch_rows: BatchRows = 32
    run_dir: RunDir = None

    def of(self, bundle: Bundle, labels: LabelChoices, judge: JudgeChoices) -> dict[str, Any]:
        """The fields of ``trainer.options.NewRowsOptions``, with data and seed.  Raises UsageError."""
        from service.data.options import JudgeOptions

        if self.labels == "sample":
            raise UsageError("--labels", "calibration is about greedy answers: given or generate")
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
