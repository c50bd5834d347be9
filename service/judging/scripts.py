"""Tells in which scripts a text is written, such as Latin or Han (Chinese characters).

Python knows no script of a character, but its name, which begins with the script's.  At most
``LONG`` characters of a text are looked at, evenly spaced, so that it is cheap enough for every
request."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

LONG = 4000  # characters
MOST = 0.5  # share of letters; what holds more of them is what a text is written in
RECORDED = 0.01  # share of rows; scripts of fewer are not taken for what a training had
_NAMES = {  # where the character's name begins otherwise than with its script's
    "Hiragana": "Kana",  # one text has both
    "Katakana": "Kana",
    "Katakana-Hiragana": "Kana",
    "Cjk": "Han",
    "Ideographic": "Han",
    "Modifier": "",  # of any script
}
_BEHIND = re.compile(
    r" (?:CAPITAL|SMALL|LETTER|LIGATURE|SYLLABLE|SYLLABICS|IDEOGRAPH|UNIFIED|COMPATIBILITY)\b"
)

Shares = tuple[tuple[str, float], ...]
"""Scripts and their shares of a text's letters, the largest first; () without letters."""


def scripts_of(text: str) -> Shares:
    """Return the scripts of a text's letters."""
    if text.isascii():
        return (("Latin", 1.0),) if any(map(str.isalpha, text)) else ()
    counts: Counter[str] = Counter()
    for char, count in Counter(text[:: len(text) // LONG + 1]).items():
        counts[_script(char)] += count
    del counts[""]
    letters = counts.total()
    return tuple((script, count / letters) for script, count in counts.most_common())


def written_in(shares: Shares) -> tuple[str, ...]:
    """Return the fewest scripts that together hold most letters."""
    held, names = 0.0, list[str]()
    for name, share in shares:
        if held > MOST:
            break
        names.append(name)
        held += share
    return tuple(names)


def recorded_scripts(of_texts: Iterable[Shares]) -> tuple[str, ...] | None:
    """Return the scripts that more than 1 % of some texts are written in, for a bundle's record;
    None if there is none."""
    written = [*map(written_in, of_texts)]
    counts = Counter(name for names in written for name in names)
    often = (name for name, count in counts.items() if count > RECORDED * len(written))
    return tuple(sorted(often)) or None


def unlike_scripts(shares: Shares, trained: Iterable[str]) -> str | None:
    """Return the most frequent script that is not among ``trained``, where such scripts hold most
    letters; else None."""
    known = set(trained)
    others = [(name, share) for name, share in shares if name not in known]
    return others[0][0] if sum(share for _, share in others) > MOST else None


@lru_cache(maxsize=8192)
def _script(char: str) -> str:
    """Return the script of a character; "" if it is no letter."""
    plain = unicodedata.normalize("NFKC", char)[:1]  # of full width, or of mathematics: the letter
    if not plain.isalpha():
        return ""
    name = unicodedata.name(plain, "")
    script = _BEHIND.split(name, maxsplit=1)[0]
    script = (script if len(script) < len(name) else script.partition(" ")[0]).title()
    return _NAMES.get(script, script)
