"""Methods that probe no state of the model: one number for each row, the prompt's text, the share
of its kind.  Of maximum probability, entropy and prompt length the sign is fitted, by the AUROC on
the training rows, as the trainer's own evaluation does: on sets whose statement stands in the
prompt the sign is not known beforehand.  Scores of answers keep the sign of their papers.  Where
text or kind come near a probe, the probe may have learned which questions are hard, not what the
model knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.evaluation.methods.base import (
    INNER_FOLDS,
    Fold,
    MethodInputs,
    l2_at_best_c,
    required,
)
from service.fitting.probes import Floats
from service.fitting.scores import risk_auroc
from service.fitting.texts import text_logits

if TYPE_CHECKING:
    from hallutracer_research.evaluation.methods import Fit

    Read = Callable[[MethodInputs], NDArray[Any] | None]

C_GRID = (0.3, 1.0, 3.0, 10.0)
FEW_ROWS = 500  # up to so many, words of a single prompt are kept, too
PSEUDO_ROWS = 5.0  # with which a kind's share is drawn to the share of all


def _read_or_refused(name: str, what: str, read: Read, inputs: MethodInputs) -> NDArray[Any]:
    """Return what was read of the rows.  Raises TrainingError where it was not."""
    problem = f"{name} scores {what}, and none were read: the transformers engine reads them"
    return required(read(inputs), problem)


def _with_fitted_sign(read: Callable[[MethodInputs], Floats]) -> Fit:
    def fit(fold: Fold) -> Floats:
        values = read(fold.inputs)
        falls = risk_auroc(fold.label, values[fold.train]) < 0.5
        return -values[fold.test] if falls else values[fold.test]

    return fit


def _column(name: str, what: str, read: Read, column: int) -> Fit:
    """Return a method of one column of what was read, [n, 2], with a fitted sign."""
    return _with_fitted_sign(lambda inputs: _read_or_refused(name, what, read, inputs)[:, column])


def _behind(inputs: MethodInputs) -> Floats | None:
    return None if inputs.positions is None else inputs.positions.first_token


def _of_answer(name: str, sign: float, read: Read) -> Fit:
    """Return a method whose number rises (1) or falls (-1) with hallucination; it raises
    TrainingError without one."""

    def fit(fold: Fold) -> Floats:
        return sign * _read_or_refused(name, "answers", read, fold.inputs)[fold.test]

    return fit


# The logarithm of the probability ranks like it.
first_token_max_prob = _with_fitted_sign(lambda inputs: inputs.first_token[:, 0])
first_token_entropy = _with_fitted_sign(lambda inputs: inputs.first_token[:, 1])
prompt_length = _with_fitted_sign(lambda inputs: inputs.prompt_tokens.astype(np.float64))
content_max_prob = _column("content-max-prob", "answers", lambda inputs: inputs.answers.content, 0)
content_entropy = _column("content-entropy", "answers", lambda inputs: inputs.answers.content, 1)
scaffold_max_prob = _column("scaffold-max-prob", "positions", _behind, 0)
scaffold_entropy = _column("scaffold-entropy", "positions", _behind, 1)
halluguard = _of_answer("halluguard", -1.0, lambda inputs: inputs.halluguard)
# Ranks like exp(- log_prob).
perplexity = _of_answer("perplexity", -1.0, lambda inputs: inputs.answers.log_prob)
p_true = _of_answer("p-true", -1.0, lambda inputs: inputs.answers.true)
p_true_examples = _of_answer("p-true-examples", -1.0, lambda inputs: inputs.answers.true_examples)
semantic_entropy = _of_answer(
    "semantic-entropy", 1.0, lambda inputs: inputs.answers.entropy_weighted
)
semantic_entropy_discrete = _of_answer(
    "semantic-entropy-discrete", 1.0, lambda inputs: inputs.answers.entropy
)
eigenscore = _of_answer("eigenscore", 1.0, lambda inputs: inputs.answers.eigenscore)


def text_ngrams(fold: Fold) -> Floats:
    """Return scores [n_test] of an L2 logistic regression on TF-IDF of words, pairs, and 2 to 4
    characters in words. Its C is chosen inside the training side, by AUROC over group-disjoint
    folds."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.pipeline import make_union

    label = fold.inputs.label
    least = 2 if len(fold.train) > FEW_ROWS else 1
    vectorizer = make_union(
        TfidfVectorizer(ngram_range=(1, 2), min_df=least, sublinear_tf=True),
        TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), min_df=least, sublinear_tf=True),
    )
    risks = partial(text_logits, vectorizer, fold.inputs.text, 1 - label)
    quality = np.zeros(len(C_GRID))
    for fitted, held in fold.folds(INNER_FOLDS, "inner fold"):
        quality += [risk_auroc(label[held], risk) for risk in risks(fitted, held, c_grid=C_GRID)]
    return risks(fold.train, fold.test, c_grid=(C_GRID[int(quality.argmax())],))[0]


def kind_prior(fold: Fold) -> Floats:
    """Return the kind's share of hallucinations on the training side, drawn to the share of all,
    [n_test]."""
    wrong = 1.0 - fold.label
    share = float(wrong.mean())
    kinds, number = np.unique(fold.inputs.kind[fold.train], return_inverse=True)
    count, total = np.bincount(number), np.bincount(number, weights=wrong)
    shares = (total + PSEUDO_ROWS * share) / (count + PSEUDO_ROWS)
    of_kind = dict(zip(kinds.tolist(), shares, strict=True))
    return np.array([of_kind.get(kind, share) for kind in fold.inputs.kind[fold.test].tolist()])


def text_embedding(fold: Fold) -> Floats:
    """Return scores [n_test] of an L2 logistic regression on the text's embedding, C chosen on the
    training side."""
    embedding = _read_or_refused(
        "text-embedding", "embeddings", lambda inputs: inputs.embedding, fold.inputs
    )
    return l2_at_best_c(embedding, fold, "text-embedding inner fold")
