"""The README's table on made readouts: every method scores every row, and shortcuts find what is there to find."""

from __future__ import annotations

import numpy as np
import pytest

from hallutracer_research.demo.report import METHODS, LabelledAnswers, markdown, measure, risks
from service.data.run_folder import RowsFile
from service.fitting.probes import Readouts
from service.readout import Geometry, Site

GEOMETRY = Geometry(num_layers=3, num_heads=2, head_dim=4, hidden_size=8)
N = 300


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> LabelledAnswers:
    """Labels depend on the kind and on one planted direction; names carry nothing."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 2, N)
    known = rng.normal(size=N)
    label = (known + 1.2 * (kind - 0.5) + 0.5 * rng.normal(size=N) > 0).astype(np.int64)
    files = []
    for site in Site:
        path = tmp_path_factory.mktemp("rows") / site
        rows = rng.normal(size=(3, N, 8)).astype("<f4")
        rows[:, :, 5] += known
        rows.tofile(path)
        files.append(Readouts(RowsFile(path, GEOMETRY, site, N), np.arange(N), label))
    questions = [
        {
            "id": f"k{kind[i]}:name {rng.integers(10**6)}:t{i % 2}", "kind": f"k{kind[i]}", "template": f"t{i % 2}",
            "exposures": int(4 + 3 * known[i]) if known[i] > -1 else 0, "in_refusals": bool(i % 4),
            "split": "test" if i % 3 == 0 else "train",
        }
        for i in range(N)
    ]  # fmt: skip
    first = np.stack([-rng.random(N), rng.random(N)], axis=1)
    return LabelledAnswers(questions, files[0], files[1], np.arange(N) // 2, first)


def test_the_table(asked: LabelledAnswers) -> None:
    found, fold = risks(asked, fold_seed=0, jobs=1)
    assert all(len(set(fold[asked.group == group])) == 1 for group in np.unique(asked.group))
    assert set(found) == set(METHODS)
    for name, risk in found.items():
        assert np.all((risk >= 0) & (risk <= 1)), name
    table = measure(asked, found, fold)
    assert table["depth_mean"]["auroc_within_kind"] > 0.8
    assert table["residual_depth_mean"]["auroc_within_kind"] > 0.8
    assert table["exposures"]["auroc_within_kind"] > 0.8
    assert table["kind_prior"]["auroc"] > 0.6
    assert table["kind_prior"]["auroc_within_kind"] == 0.5
    assert abs(table["max_prob"]["auroc"] - 0.5) < 0.2
    assert 0.3 < table["name_ngrams"]["auroc_within_kind"] < 0.7
    cells = {name: {k: {"mean": v, "std": 0.0} for k, v in row.items()} for name, row in table.items()}
    assert markdown({"table": cells}).count("\n") == len(METHODS) + 2


def test_only_rows_of_the_test_split_are_reported_and_hallucinated_is_positive(asked: LabelledAnswers) -> None:
    shown = np.array([row["split"] == "test" for row in asked.rows])
    free = np.array([not row["in_refusals"] for row in asked.rows])
    truth = 1.0 - asked.label
    fold = np.arange(N) % 5

    def columns(risk: np.ndarray) -> dict[str, float]:
        return measure(asked, {"depth_mean": risk}, fold)["depth_mean"]

    perfect = columns(np.where(shown, truth, 1 - truth))
    assert perfect["auroc"] == perfect["auprc"] == perfect["auroc_within_kind"] == 1.0
    assert perfect["ece"] == 0.0
    backwards = columns(1 - truth)
    assert backwards["auroc"] == 0.0
    assert backwards["auprc"] < 0.7
    only_free = columns(np.where(free, truth, 1 - truth))
    assert only_free["no_refusal_auroc"] == only_free["no_refusal_auprc"] == 1.0
    assert only_free["auroc"] < 0.7
