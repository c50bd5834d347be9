"""In which scripts a text is written, and what a bundle records of it."""

from __future__ import annotations

import pytest

from service.judging.scripts import LONG, recorded_scripts, scripts_of, unlike_scripts, written_in
from tests.kit.tables import cells

WRITTEN = cells(
    """
    What is the capital of France? | Latin
    Où est né Gödel, à Brünn ou à Łódź? | Latin
    ＷＨＡＴ　ｉｓ　𝐭𝐡𝐞 capital? | Latin
    法国的首都是哪里? | Han
    フランスの首都はどこですか | Kana
    東京都港区はどこ | Han
    々〆 | Han
    ーーｱ | Kana
    𐌀𐌁 a | Old Italic
    프랑스의 수도는 어디입니까? | Hangul
    Какая столица Франции? | Cyrillic
    Ποια είναι η πρωτεύουσα της Γαλλίας; | Greek
    ما هي عاصمة فرنسا؟ | Arabic
    מהי בירת צרפת? | Hebrew
    फ्रांस की राजधानी क्या है? | Devanagari
    เมืองหลวงของฝรั่งเศสคืออะไร | Thai
    What does 東京 mean? | Latin
    """
)


@pytest.mark.parametrize(
    ("text", "scripts"),
    [
        *((text, (script,)) for text, script in WRITTEN),
        ("ما هي عاصمة فرنسا؟".replace("ا", "ﺎ"), ("Arabic",)),
        ("1 + 1 = ? 😀 ½ ʼ", ()),
        ("", ()),
    ],
)
def test_the_script_of_most_letters_is_what_a_text_is_written_in(
    text: str, scripts: tuple[str, ...]
) -> None:
    assert written_in(scripts_of(text)) == scripts


def test_scripts_that_hold_most_letters_together_are_named_together() -> None:
    assert written_in((("Kana", 0.4), ("Han", 0.35), ("Latin", 0.25))) == ("Kana", "Han")


def test_a_prompt_is_unlike_where_most_letters_are_of_scripts_that_training_had_not() -> None:
    for text, trained, script in (
        ("法国的首都是哪里?", ("Latin",), "Han"),
        ("法国的首都是哪里?", ("Han", "Latin"), None),
        ("フランスの首都はどこ", ("Han", "Latin"), "Kana"),
        ("What does 東京 mean?", ("Latin",), None),
        ("Ποια? ab Что", ("Latin",), "Greek"),
        ("абвг abcd", ("Latin",), None),
        ("42", ("Latin",), None),
    ):
        assert unlike_scripts(scripts_of(text), trained) == script, text


def test_a_long_text_is_looked_at_evenly() -> None:
    for text in ("Question: " * LONG + "法" * 12 * LONG, "法" * 12 * LONG + "Question: " * LONG):
        assert written_in(scripts_of(text)) == ("Han",)


def test_scripts_of_more_than_one_row_in_a_hundred_are_recorded() -> None:
    for foreign, expected in ((1, ("Latin",)), (2, ("Han", "Latin"))):
        texts = ["法国的首都?"] * foreign + ["What is it?"] * (100 - foreign)
        assert recorded_scripts(map(scripts_of, texts)) == expected
    assert recorded_scripts(map(scripts_of, ["1 + 1", "2"])) is None
    assert recorded_scripts([]) is None
