"""A head or layer whose readouts are constant in some fold has no direction there: the run goes on without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from service.data.training_rows import read_dataset
from service.engines.base import TokenIds
from service.errors import NoDirection
from service.fitting import estimator
from service.fitting.folds import outer_folds
from service.fitting.probes import ProbeFit
from service.readout import Site
from tests.fitting.planted import PlantedEngine, planted_rows, write_rows
from tests.trainer.test_run import FAST, run

LAYER = 2


class ConstantEngine(PlantedEngine):
    """Readouts of one layer (of one of its heads, or None: all) are 3 but for the prompts ``varied``."""

    def __init__(self, varied: set[str], head: int | None) -> None:
        super().__init__()
        self.varied, self.head = varied, head

    def activations(self, prompt: TokenIds, site: Site) -> NDArray[np.float32]:
        rows = super().activations(prompt, site)
        text = self.detokenize(prompt)
        if not any(f"user: {varied}\n" in text for varied in self.varied):
            heads = rows[LAYER].reshape(self.identity.geometry.heads(site), -1)
            heads[slice(None) if self.head is None else self.head] = 3.0
        return rows


@pytest.mark.parametrize(
    ("site", "head"), [(Site.ATTENTION_HEAD, 1), (Site.ATTENTION_HEAD, None), (Site.RESIDUAL_STREAM, None)]
)
def test_readouts_that_are_constant_in_one_fold_do_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Site, head: int | None
) -> None:
    zeros, fit = [], estimator.fit_probes

    def watched(*given: Any, **options: Any) -> list[ProbeFit]:
        found = fit(*given, **options)
        if options.get("retry_larger_c"):  # not the choice of C
            zeros.extend(one for one in found if not one.direction.any(axis=1).all())
        return found

    monkeypatch.setattr(estimator, "fit_probes", watched)
    rows = planted_rows(240)
    dataset = read_dataset(write_rows(tmp_path / "rows.jsonl", rows), "given", folds=3)
    label = np.array([row["label"] for row in rows])
    fold = outer_folds(label, dataset.groups, folds=FAST["folds"], seeds=(0,))[0]
    engine = ConstantEngine({rows[int(row)]["prompt"] for row in fold.test}, head)
    bundle, _ = run(tmp_path, engine, readout=site, seeds=(0,))
    signals = bundle.evaluation()["cross_validation"]["signals"]
    assert signals["depth_mean_unit_norm"]["auroc"]["mean"] > 0.75
    assert np.linalg.norm(bundle.probes.direction, axis=1) == pytest.approx(1.0, abs=1e-5)
    # The cross-fit's fold, and in the nested evaluation its outer fold and that one's inner folds.
    assert len(zeros) == (0 if head is not None else 2 + FAST["inner_folds"])


def test_a_layer_that_is_constant_everywhere_is_an_error_and_is_not_published(tmp_path: Path) -> None:
    for c in (None, 0.3):
        with pytest.raises(NoDirection, match="layer 2"):
            run(tmp_path, ConstantEngine(set(), None), c=c, evaluate=False)
    assert not list((tmp_path / "store").rglob("bundle.json"))
