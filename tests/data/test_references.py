"""The strings of ``answers`` that say more than an accepted answer."""

from __future__ import annotations

import pytest

from service.data import judges as references


def test_there_and_back() -> None:
    answers = ["Paris", references.incorrect('Rome "really"'), references.expectation("text", texts=["é"])]
    assert references.split_answers(answers) == (["Paris"], ['Rome "really"'])
    assert references.expected(answers) == {"expect": "text", "texts": ["é"]}
    assert references.expected(answers[:2]) is None


@pytest.mark.parametrize(
    "plain",
    ["{", "{}", '{"a": 1}', '{"incorrect": 1}', '{"incorrect": "x", "y": 1}', '{"expect": "rain"}', '["incorrect"]',
     r"{2,3}\d", '{"expect": ["calls"]}', '{"a":' * 5_000],
)  # fmt: skip
def test_other_strings_stay_plain_answers(plain: str) -> None:
    assert references.split_answers([plain]) == ([plain], [])
    assert references.expected([plain]) is None
