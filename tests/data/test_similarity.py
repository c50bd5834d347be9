"""ROUGE-L against its definition, and the rule over references."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.data.judges import margin, rouge_l, words

SENTENCES = st.lists(st.sampled_from("abc"), max_size=6)


def longest_common(one: list[str], other: list[str]) -> int:
    """By trying every subsequence."""
    subsequences = {pick for size in range(len(other) + 1) for pick in combinations(other, size)}
    return max(size for size in range(len(one) + 1) if any(p in subsequences for p in combinations(one, size)))


@given(SENTENCES, SENTENCES)
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(one: list[str], other: list[str]) -> None:
    if not one or not other:
        assert rouge_l(one, other) == 0
        return
    common = longest_common(one, other)
    recall, precision = common / len(other), common / len(one)
    expected = 2 * recall * precision / (recall + precision) if common else 0.0
    assert rouge_l(one, other) == pytest.approx(expected)
    assert rouge_l(other, one) == pytest.approx(expected)


def test_a_known_value() -> None:
    # Lin (2004): "police kill the gunman" has "police the gunman" in common with the reference, the other two words.
    reference = words("police killed the gunman")
    assert rouge_l(reference, words("police kill the gunman")) == pytest.approx(0.75)
    assert rouge_l(reference, words("the gunman kill police")) == pytest.approx(0.5)


def test_words_are_letters_and_digits_case_folded() -> None:
    assert words("The 3 D's_are: ＡＢＣ, straße!") == ["the", "3", "d", "s", "are", "abc", "strasse"]


def test_the_nearer_reference_decides() -> None:
    correct, incorrect = ["You digest the seeds", "Nothing happens"], ["You grow watermelons in your stomach"]
    assert margin("nothing happens.", correct, incorrect) == 1.0
    assert margin("You grow watermelons in the stomach", correct, incorrect) < 0
    assert margin("entirely unrelated", correct, incorrect) == 0.0  # no nearer to one than to the other: not factual
