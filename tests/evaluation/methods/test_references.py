"""The free references: raw numbers, turned by the training rows only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.evaluation.methods.base import Method
from service.evaluation.methods.references import FirstTokenEntropy, FirstTokenMaxProb, PromptLength
from tests.evaluation.methods.made import material, split


@pytest.mark.parametrize("method", [FirstTokenMaxProb(), FirstTokenEntropy(), PromptLength()])
def test_the_sign_is_learned_from_the_training_rows(tmp_path: Path, method: Method) -> None:
    base = material(tmp_path, 60)
    train, test = split(base)
    values = np.random.default_rng(0).permutation(60).astype(np.float64)
    for sign, word in ((1.0, "rises"), (-1.0, "falls")):
        turned = values.copy()
        turned[train] = np.sort(values[train])[np.argsort(np.argsort(sign * (1 - base.label[train]), kind="stable"))]
        data = replace(base, first_token=np.stack([turned, turned], axis=1), prompt_tokens=turned.astype(np.int64))
        found = method.fit(data, train, test, 0)
        np.testing.assert_array_equal(found.test, sign * turned[test])
        np.testing.assert_array_equal(found.train_oof, sign * turned[train])  # type: ignore[arg-type]
        assert found.note.endswith(word)


def test_each_reads_its_own_number(tmp_path: Path) -> None:
    data = material(tmp_path, 60)
    train, test = split(data)
    assert set(np.abs(FirstTokenMaxProb().fit(data, train, test, 0).test)) == set(np.abs(data.first_token[test, 0]))
    assert set(np.abs(FirstTokenEntropy().fit(data, train, test, 0).test)) == set(np.abs(data.first_token[test, 1]))
    assert set(np.abs(PromptLength().fit(data, train, test, 0).test)) == set(data.prompt_tokens[test])
