"""P(True): the model is asked whether its own answer is true (Kadavath et al. 2022, "Language Models (Mostly) Know What
They Know").

The question is theirs, without examples and without further answers to compare with, sent in the prompt format of the
set.  Chat models begin with the letter or with the word, so the probabilities of both are summed:

    score = log sum p(A, True) - log sum p(B, False)        of the first token

with and without a space before it; forms of more than one token are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hallutracer_research.evaluation.methods.base import Floats
from service.engines.base import Engine
from service.errors import EngineError

TRUE, FALSE = ("A", "True"), ("B", "False")


def asked(question: str, answer: str) -> str:
    """The text that asks whether ``answer`` is true."""
    return (
        f"Question: {question}\nProposed Answer: {answer}\nIs the proposed answer:\n (A) True\n (B) False\n"
        "The proposed answer is:"
    )


def candidates(engine: Engine) -> tuple[list[int], list[int]]:
    """First tokens that say true, and those that say false.  Raises EngineError where the tokenizer has none."""
    found = [_tokens(engine, words) for words in (TRUE, FALSE)]
    if not all(found) or set(found[0]) & set(found[1]):
        raise EngineError(
            f"p-true needs tokens for {', '.join(TRUE)} and {', '.join(FALSE)}, and this tokenizer has none: leave the "
            "method out",
            param="methods",
        )
    return found[0], found[1]


def log_odds(engine: Engine, prompts: Sequence[Sequence[int]]) -> Floats:
    """Log-odds of true, [n], of rendered prompts that ask for it."""
    yes, no = candidates(engine)
    log_prob = engine.next_token(prompts, [*yes, *no])
    sides = (log_prob[:, : len(yes)], log_prob[:, len(yes) :])
    return np.asarray(np.logaddexp.reduce(sides[0], axis=1) - np.logaddexp.reduce(sides[1], axis=1), np.float64)


def _tokens(engine: Engine, words: Sequence[str]) -> list[int]:
    begin = engine.tokenize("")  # the tokenizer's own first tokens, as of a sentence
    found = []
    for text in (form for word in words for form in (word, f" {word}")):
        ids = engine.tokenize(text)
        ids = ids[len(begin) :] if ids[: len(begin)] == begin else ids
        if len(ids) == 1:
            found.append(ids[0])
    return sorted(set(found))
