"""Rivals that never see the model: the prompt's text, and the share of right answers among prompts of its kind.

Where one of them comes near a probe, the probe may have learned which questions are hard, not what the model knows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.evaluation.methods.base import Floats, Index, MethodInputs
from service.fitting.folds import group_folds
from service.fitting.scores import risk_auroc

C_GRID = (0.3, 1.0, 3.0, 10.0)
INNER_FOLDS = 3
FEW_ROWS = 500  # up to so many, words of a single prompt are kept, too
PSEUDO_ROWS = 5.0  # with which a kind's share is drawn to the share of all


def text_ngrams(inputs: MethodInputs, train: Index, test: Index, seed: int, jobs: int | None = None) -> Floats:
    """Return scores [n_test] of an L2 logistic regression on TF-IDF of words, pairs, and 2 to 4 characters in words.

    Its C is chosen inside the training side, by AUROC over group-disjoint folds.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union

    least = 2 if len(train) > FEW_ROWS else 1
    vectorizer = make_union(
        TfidfVectorizer(ngram_range=(1, 2), min_df=least, sublinear_tf=True),
        TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), min_df=least, sublinear_tf=True),
    )
    text = np.array(inputs.text, dtype=object)
    found = dict.fromkeys(C_GRID, 0.0)
    for fit, kept in group_folds(inputs.label, inputs.group, train, INNER_FOLDS, seed, what="inner fold"):
        x, held = vectorizer.fit_transform(text[fit]), vectorizer.transform(text[kept])
        for c in C_GRID:
            found[c] += risk_auroc(inputs.label[kept], _risk(x, inputs.label[fit], held, c))
    c = max(C_GRID, key=lambda one: found[one])
    x = vectorizer.fit_transform(text[train])
    return _risk(x, inputs.label[train], vectorizer.transform(text[test]), c)


def kind_prior(inputs: MethodInputs, train: Index, test: Index, seed: int = 0, jobs: int | None = None) -> Floats:
    """Return the kind's share of hallucinations on the training side, drawn to the share of all, [n_test]."""
    wrong = 1.0 - inputs.label[train]
    share = float(wrong.mean())
    kinds, place = np.unique(inputs.kind[train], return_inverse=True)
    count, total = np.bincount(place), np.bincount(place, weights=wrong)
    of_kind = dict(zip(kinds.tolist(), (total + PSEUDO_ROWS * share) / (count + PSEUDO_ROWS), strict=True))
    return np.array([of_kind.get(kind, share) for kind in inputs.kind[test].tolist()])


def _risk(x: NDArray[np.float64], label: NDArray[np.int64], x_test: NDArray[np.float64], c: float) -> Floats:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=c, solver="liblinear", max_iter=1000).fit(x, 1 - label)
    return np.asarray(model.decision_function(x_test), np.float64)
