"""The free references: raw numbers, with a sign from the training rows only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hallutracer_research.evaluation.methods.references import COLUMNS, reference
from tests.research.evaluation.methods.made import made_inputs, split


@pytest.mark.parametrize("name", COLUMNS)
def test_the_sign_is_learned_from_the_training_rows(tmp_path: Path, name: str) -> None:
    base = made_inputs(tmp_path, 60)
    train, test = split(base)
    values = np.random.default_rng(0).permutation(60).astype(np.float64)
    for sign in (1.0, -1.0):
        turned = values.copy()
        turned[train] = np.sort(values[train])[np.argsort(np.argsort(sign * (1 - base.label[train]), kind="stable"))]
        data = replace(base, first_token=np.stack([turned, turned], axis=1), prompt_tokens=turned.astype(np.int64))
        np.testing.assert_array_equal(reference(name, data, train, test), sign * turned[test])


def test_each_reads_its_own_number(tmp_path: Path) -> None:
    data = made_inputs(tmp_path, 60)
    train, test = split(data)
    own = (data.first_token[:, 0], data.first_token[:, 1], data.prompt_tokens)
    for name, values in zip(COLUMNS, own, strict=True):
        assert set(np.abs(reference(name, data, train, test))) == set(np.abs(values[test]))
