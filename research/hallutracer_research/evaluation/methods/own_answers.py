"""What is read of the model's own answers: the first word of content, P(True), semantic entropy,
EigenScore.

**P(True)** (Kadavath et al. 2022): the model is asked whether its own answer is true, in their
words, without examples or behind six, in the set's format: log sum p(A, True) - log sum p(B, False)
of the first token, with and without a space before.

**Semantic entropy** (Farquhar et al. 2024): SE = - sum_c p(c) log p(c) over groups of sampled
answers of one meaning, p(c) the group's share, or, weighted, proportional to the sum of exp(mean
log-probability of an answer's tokens).  Their entailment model is replaced by words, as the judges
normalise them and without the question's: two answers mean the same where all words of the one are
among the other's and both negate or neither; where none remain, whole texts must be equal.  As in
the paper each is compared with the first of each group, in the order of sampling.

**EigenScore** (Chen et al. 2024): Z [d, K], the middle layer's states of the last token of K
answers; the score is log det(Z^T J_d Z + alpha I) / K, J_d = I - 1 1^T / d, alpha = 0.001.  Unlike
theirs: semantic entropy's samples, and no extreme features are clipped while the model decodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import commonprefix
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hallutracer_research.documents import table_beside
from hallutracer_research.evaluation.pooling import is_content
from service.data.judges import normalise
from service.engines.base import Engine
from service.errors import EngineError
from service.fitting.probes import Floats, Index
from service.prompts import PromptFormat, continuation

TRUE, FALSE = ("A", "True"), ("B", "False")
_NEGATION = re.compile(
    r"no|not|never|none|nobody|nothing|cannot|(is|are|was|were|do|does|did|ca|could|wo|would|"
    r"has|have|had)nt"
)


EXAMPLES = table_beside(__file__, "examples.toml")["examples"]
"""Question, proposed answer and whether it is true, in no set: alike for all rows, so that no
fold's labels leak."""


def asked(question: str, answer: str, *, examples: bool = False) -> str:
    """Return the text that asks whether ``answer`` is true, behind the ``EXAMPLES`` where
    wanted."""
    before = ""
    for known, proposed, true in EXAMPLES if examples else ():
        before += f"{asked(known, proposed)} ({'A' if true else 'B'}) {true}\n\n"
    return (
        f"{before}Question: {question}\nProposed Answer: {answer}\n"
        "Is the proposed answer:\n (A) True\n (B) False\nThe proposed answer is:"
    )


def follow_up(engine: Engine, question: str, prompt_format: PromptFormat) -> list[int]:
    """Return the tokens that stand behind an answer's when the user then asks ``question``: the
    answer's end and the beginning of the next one, as the template has them.  They are what chats
    with different answers have in common."""
    if prompt_format == "text":
        return continuation(engine, f"\n{question}")

    def chat(answer: str) -> list[int]:
        turns = ("user", "a"), ("assistant", answer), ("user", question)
        return engine.render_chat([{"role": role, "content": content} for role, content in turns])

    return list(commonprefix([chat("X")[::-1], chat("0")[::-1]]))[::-1]


def before_content(engine: Engine, question: str, answer: str) -> list[int]:
    """Return the tokens of ``answer`` before its first word of content: one that is no English stop
    word and not among the question's.  [] where it has none: then the first token is as good as
    any."""
    known = set(normalise(question).split())
    starts = (
        word.start()
        for word in re.finditer(r"\w[\w'’-]*", answer)
        if is_content(word[0]) and not set(normalise(word[0]).split()) <= known
    )
    ids = continuation(engine, answer)
    if not (start := next(starts, 0)):
        return []
    ends = [len(engine.detokenize(ids[: count + 1])) for count in range(len(ids))]
    return ids[: sum(end <= start for end in ends)]


def candidates(engine: Engine) -> tuple[list[int], list[int]]:
    """Return first tokens that say true, and those that say false.  Raises EngineError where there
    are none."""

    def tokens(words: Sequence[str]) -> list[int]:
        cut = [continuation(engine, form) for word in words for form in (word, f" {word}")]
        return sorted({ids[0] for ids in cut if len(ids) == 1})

    yes, no = tokens(TRUE), tokens(FALSE)
    if not yes or not no or set(yes) & set(no):
        raise EngineError(
            f"p-true needs tokens for {', '.join(TRUE)} and {', '.join(FALSE)}, and this tokenizer"
            " has none: leave the method out",
            param="methods",
        )
    return yes, no


def log_odds(engine: Engine, prompts: Sequence[Sequence[int]]) -> Floats:
    """Return log-odds of true, [n], of rendered prompts that ask for it."""
    yes, no = candidates(engine)
    log_prob = engine.next_token(prompts, [*yes, *no])
    true, false = (
        np.logaddexp.reduce(side, axis=1) for side in np.split(log_prob, [len(yes)], axis=1)
    )
    return np.asarray(true - false, np.float64)


def semantic_entropy(clusters: Index, log_prob: Floats | None = None) -> float:
    """Return SE in nats of answers in ``clusters`` [K]; weighted where ``log_prob`` [K], of a mean
    token, is given."""
    weight = np.ones(len(clusters)) if log_prob is None else np.exp(log_prob - log_prob.max())
    share = np.bincount(clusters, weights=weight) / weight.sum()
    share = share[share > 0]
    return float(-(share * np.log(share)).sum()) + 0.0  # no minus zero


class _Meaning(NamedTuple):
    words: list[str]
    negated: bool
    added: set[str]  # the words that the question has not

    def same(self, answer: _Meaning) -> bool:
        """Return whether two answers mean the same."""
        if not self.added or not answer.added:
            return self.words == answer.words
        nested = self.added <= answer.added or answer.added <= self.added
        return self.negated == answer.negated and nested


def clusters(question: str, answers: Sequence[str]) -> Index:
    """Return the group of each answer, [K], numbered from 0 in the order in which they appear."""
    of_question = set(normalise(question).split())
    firsts: list[_Meaning] = []
    groups = []
    for answer in answers:
        words = normalise(answer).split()
        meaning = _Meaning(words, any(map(_NEGATION.fullmatch, words)), set(words) - of_question)
        group = next(
            (number for number, first in enumerate(firsts) if meaning.same(first)), len(firsts)
        )
        if group == len(firsts):
            firsts.append(meaning)
        groups.append(group)
    return np.array(groups, np.int64)


def eigen_score(states: NDArray[np.floating]) -> float:
    """Return the score of states [K, d]; finite for every finite input, since Sigma has no negative
    eigenvalue."""
    z = np.asarray(states, np.float64)
    z = z - z.mean(axis=1, keepdims=True)
    eigenvalues = np.maximum(np.linalg.eigvalsh(z @ z.T), 0.0)
    return float(np.log(eigenvalues + 1e-3).mean())
