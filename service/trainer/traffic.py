"""What unlabelled traffic says of a bundle's base rate, and whether it may be believed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.records import Recalibration
from service.data.traffic import TrafficFile
from service.data.training_rows import Row
from service.errors import DataError, RequestError, TrainingError
from service.fitting.nested_cv import rounded
from service.fitting.prior_shift import (
    LabelledRisks,
    PriorShiftTest,
    ShareEstimate,
    Traffic,
    estimate_share,
    most_likely_share,
    number_together,
    prior_shift_test,
    shift_to,
)
from service.scoring import Scorer
from service.trainer.options import Console, RecalibrateOptions
from service.trainer.prepare import PreparedData

Floats = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Unlabelled:
    """A traffic file and the risk of each line."""

    file: TrafficFile
    risk: Floats  # [n]


@dataclass(frozen=True, eq=False)
class PriorShift:
    """The share of hallucinations on the traffic, if nothing but this share has shifted."""

    file: TrafficFile
    traffic: Traffic  # without the lines that are among the labelled rows
    prior: float  # the share at which the risks hold
    test: PriorShiftTest | None  # None: the bundle has nothing to compare with
    alone: ShareEstimate
    with_labels: ShareEstimate

    def fit(self, label: NDArray[np.integer], risk: Floats) -> Recalibration:
        """The map of the share that the traffic and these labels make most likely; the rows' risks do not matter."""
        share = most_likely_share(self.traffic, self.prior, label)
        return shift_to(share, self.prior, len(self.traffic.risk) + len(label))

    def described(self) -> list[str]:
        """The shares, in lines."""
        left_out = len(self.file.rows) - len(self.traffic.risk)
        lines = [f"{left_out} rows of the traffic are among the labelled rows and count once"] if left_out else []
        for what, share in (("traffic alone", self.alone), ("traffic and labels", self.with_labels)):
            moved = shift_to(share.value, self.prior, len(self.traffic.risk)).c
            lines.append(
                f"{what}: {share.value:.1%} [{share.low:.1%}, {share.high:.1%}] hallucinated by prior shift, log odds "
                f"{moved:+.3f}"
            )
        return lines

    def document(self) -> dict[str, Any]:
        """For evaluation.json."""
        return {
            "file": self.file.path.name,
            "digest": self.file.digest,
            "rows": len(self.traffic.risk),
            "left_out": len(self.file.rows) - len(self.traffic.risk),
            "groups": len(np.unique(self.traffic.group)),
            "share": rounded(asdict(self.alone)),
            "share_with_labels": rounded(asdict(self.with_labels)),
            "test": None if self.test is None else rounded(asdict(self.test)),
            "explained": None if self.test is None else self.test.explained,
        }


def score_traffic(file: TrafficFile, scorer: Scorer, batch_rows: int) -> Unlabelled:
    """The risk of each line, as the bundle serves it.  Raises DataError: what the model cannot take, by line."""
    if file.scored:
        return Unlabelled(file, np.array([row.risk for row in file.rows], np.float64))
    prompts, problems, limit = [], [], scorer.engine.identity.max_tokens
    for row in file.rows:
        try:
            prompts.append(scorer.render(row.prompt, row.messages))
        except RequestError as error:
            problems.append(f"line {row.line}: {error}")
        else:
            if len(prompts[-1]) > limit:
                problems.append(f"line {row.line}: {len(prompts[-1])} tokens are more than the model's {limit}")
    if problems:
        raise DataError(str(file.path), problems)
    batches = (prompts[start : start + batch_rows] for start in range(0, len(prompts), batch_rows))
    return Unlabelled(file, np.array([report.risk for batch in batches for report in scorer.score(batch)]))


def tested(
    source: LabelledRisks, unlabelled: Unlabelled, options: RecalibrateOptions, console: Console
) -> PriorShiftTest:
    """Whether prior shift alone explains the traffic.  Raises TrainingError where not, unless someone insists."""
    (groups,) = number_together([row.group for row in unlabelled.file.rows])
    test = prior_shift_test(source, Traffic(unlabelled.risk, groups), options.seed)
    console.print(
        f"the traffic against the best mixture of training's classes ({test.share:.1%} hallucinated): distance "
        f"{test.distance:.3f}, up to {test.limit:.3f} is chance or negligible (p = {test.p_value:.2g})"
    )
    if test.explained:
        return test
    found = (
        f"prior shift alone does not explain the traffic: its risks differ from every mixture of training's classes by "
        f"{test.distance:.3f}, where at most {test.limit:.3f} would pass. Its share of hallucinations cannot be told "
        "from unlabelled rows"
    )
    if not options.allow_other_shift:
        raise TrainingError(
            f"{found}. Nothing was spent: leave --traffic out and recalibrate by the labelled rows, or insist with "
            "--allow-other-shift",
            param="traffic",
        )
    console.print(f"{found}; you insisted")
    return test


def prior_shift(
    unlabelled: Unlabelled, test: PriorShiftTest | None, prior: float, data: PreparedData, seed: int
) -> PriorShift:
    """The share, from traffic alone and with the labels; a prompt that is in both files counts as a labelled row."""
    used = [data.dataset.rows[place] for place in data.labelled.index.tolist()]
    labelled = {row.prompt_digest for row in used}
    lines = unlabelled.file.rows
    kept = [place for place, row in enumerate(lines) if row.prompt_digest not in labelled]
    if not kept:
        raise TrainingError("every row of the traffic is among the labelled rows: leave --traffic out", param="traffic")
    groups, of_labelled = number_together([lines[place].group for place in kept], [_group_name(row) for row in used])
    traffic = Traffic(unlabelled.risk[kept], groups)
    return PriorShift(
        unlabelled.file,
        traffic,
        prior,
        test,
        estimate_share(traffic, prior, seed=seed),
        estimate_share(traffic, prior, data.inputs.label, of_labelled, seed),
    )


def _group_name(row: Row) -> str:
    """As ``read_traffic`` names groups."""
    return f"group {row.group}" if row.group else f"prompt {row.prompt_digest.hex()}"
