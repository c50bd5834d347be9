"""The next version of a bundle, with a recalibration: its threshold, its ledger, its card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes_store.bundle import Bundle, BundleDraft
from probes_store.records import Recalibration
from service.errors import TrainingError
from service.fitting.map_choice import Choice
from service.fitting.nested_cv import rounded
from service.fitting.scores import at_threshold
from service.trainer.ledger import Marks
from service.trainer.new_rows import draft_of
from service.trainer.options import ThresholdRule
from service.trainer.recalibration_card import draw_before_after, recalibrated_card, table

Floats = NDArray[np.floating]
_OPEN = 1e-9  # a threshold without a guarantee lies strictly between 0 and 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Learnt:
    """Labelled rows of a bundle, the map that was chosen on them, and what the ledger is to say."""

    bundle: Bundle
    evaluation: dict[str, Any]  # the bundle's own
    label: NDArray[np.integer]  # [n] 1 factual
    risk: Floats  # [n] as the bundle serves it
    group: NDArray[np.integer]  # [n]
    choice: Choice
    rule: ThresholdRule
    seed: int
    name: str | None  # of the new version; None: the bundle's own
    data: dict[str, Any]  # where the rows are from, and how many
    labels: str
    judge: str | None
    spent: Marks
    more: dict[str, Any] = field(default_factory=dict)  # of the ledger's entry

    @property
    def prior(self) -> float:
        """The share of hallucinated rows at which the bundle's risk holds."""
        return prior_of(self.bundle)


def prior_of(bundle: Bundle) -> float:
    """The share of hallucinated rows at which a bundle's risk holds: training's."""
    training = bundle.manifest.training
    return training.hallucinated / (training.factual + training.hallucinated)


def check_not_recalibrated(bundle: Bundle, evaluation: Mapping[str, Any]) -> None:
    """Raise TrainingError where a bundle has a recalibration already."""
    if bundle.manifest.recalibration is not None:
        raise TrainingError(
            f"{bundle.reference} is recalibrated already: recalibrate the version that it came from, "
            f"{evaluation['recalibrations'][-1]['from']}",
            param="bundle",
        )


def recalibrated(learnt: Learnt) -> BundleDraft:
    """The bundle with the chosen map, its threshold carried along, and a longer ledger."""
    bundle, choice, recalibration = learnt.bundle, learnt.choice, learnt.choice.chosen.map
    assert recalibration is not None
    label, risk, group = learnt.label, learnt.risk, learnt.group
    old, new = bundle.manifest.threshold, _threshold(learnt, recalibration)
    manifest = replace(
        bundle.manifest,
        name=learnt.name or bundle.manifest.name,
        threshold=new,
        guarantee=None,
        guarantee_shapes=None,
        recalibration=recalibration,
    )
    evaluation = learnt.evaluation
    record = _record(learnt) | {
        "thresholds": {"rule": learnt.rule, "before": old, "after": new},
        "at_threshold": rounded({"before": at_threshold(label, risk, old),
                                 "after": at_threshold(label, recalibration(risk), new)}),
    }  # fmt: skip
    evaluation["recalibrations"] = [*evaluation.get("recalibrations", []), record]
    if "gates" in evaluation.get("out_of_fold", {}):  # where a calibration of the new version begins
        gates = evaluation["out_of_fold"]["gates"]
        gates["thresholds"] = _mapped(recalibration, gates["thresholds"])
    golden = replace(bundle.golden, risk=recalibration(bundle.golden.risk))
    plot = draw_before_after(label, group, choice.before.held_out[0], choice.chosen.held_out[0])
    card = recalibrated_card(bundle.card(), manifest, record, table(choice))
    return draft_of(bundle, manifest, evaluation, card, golden=golden, plots={"recalibration.png": plot})


def _threshold(learnt: Learnt, recalibration: Recalibration) -> float:
    """Of the new version, by the rule that was asked for."""
    old = learnt.bundle.manifest.threshold
    return float(np.clip(recalibration(old) if learnt.rule == "map" else old, _OPEN, 1 - _OPEN))


def _mapped(recalibration: Recalibration, thresholds: Sequence[float]) -> list[float]:
    """Thresholds on the new scale; 1, which everything lies below, stays."""
    return [1.0 if level >= 1.0 else float(recalibration(level)) for level in thresholds]


def _record(learnt: Learnt) -> dict[str, Any]:
    """The ledger's entry in evaluation.json."""
    bundle, choice = learnt.bundle, learnt.choice
    return {
        "from": bundle.reference,
        "from_digest": bundle.manifest.digest,
        "had_guarantee": bundle.manifest.guarantee is not None,
        "data": learnt.data,
        "labels": learnt.labels,
        "judge": learnt.judge,
        "prior": learnt.prior,
        "seed": learnt.seed,
        "chosen": choice.chosen.name,
        "best": choice.best.name,
        "left_out": list(choice.left_out),
        "candidates": {
            one.name: rounded(
                {
                    "log_loss": {"mean": one.log_loss} | one.log_loss_interval._asdict(),
                    "gain": {"mean": one.gain} | one.gain_interval._asdict(),
                    "calibration_debiased": {"mean": one.error} | one.error_interval._asdict(),
                }
            )
            for one in choice.candidates
        },
        "spent": learnt.spent.document(),
    } | learnt.more
