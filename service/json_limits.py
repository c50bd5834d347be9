"""How much JSON of a caller is taken, counted before anything walks it.

A request's bytes are not its cost: two million numbers, keys or empty lists fit into four
megabytes, and each is an object for Python's parser, for validation and for whatever reads them
afterwards.  ``excess`` counts in the bytes, ``size_within`` in a value, and both stop where a limit
is passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

MOST_CONTAINERS = (
    8192  # lists and objects of one body; more than the prompts and messages of any request
)
MOST_KEYS = (
    32_768  # of all its objects: the parser makes a pair of each, which garbage collection walks
)
MOST_ELEMENTS = 262_144  # of all its lists and objects; token ids of two contexts of 128k
MOST_VALUES = (
    32_768  # of what is no text to read, such as all tools of a request; keys count as values
)
MOST_CHARACTERS = 524_288  # of the same: half a megabyte, about 128k tokens
_CHUNK = 65_536  # bytes counted at once, which take about a millisecond


def excess(*documents: bytes, elements: int = MOST_ELEMENTS) -> str | None:
    """Return what JSON documents have too much of together, in words; None where they keep the
    limits.

    What stands within texts does not count.  Anything that is not JSON is counted as far as it
    looks like it."""
    limits = {"lists and objects": MOST_CONTAINERS, "keys": MOST_KEYS, "values": elements}
    if (
        not documents or _passed(limits, map(_counts, documents)) is None
    ):  # texts included: cheap, mostly enough
        return None
    counted = list[tuple[int, int, int]]()
    for document in documents:
        for part in _outside_texts(document):
            counted.append(_counts(part))
            if (what := _passed(limits, counted)) is not None:
                return what
    return None


def _counts(part: bytes) -> tuple[int, int, int]:
    containers = part.count(b"[") + part.count(b"{")
    return (
        containers,
        part.count(b":"),
        part.count(b",") + containers,
    )  # a list of n elements has n - 1 commas


def _passed(limits: Mapping[str, int], counted: Iterable[tuple[int, int, int]]) -> str | None:
    sums = map(sum, zip(*counted, strict=True))
    for (what, most), count in zip(limits.items(), sums, strict=True):
        if count > most:
            return f"more than {most} {what}"
    return None


def _outside_texts(document: bytes) -> Iterable[bytes]:
    """Yield what stands outside of texts, in pieces."""
    import numpy as np  # here: what imports this module need not have it

    inside, start = 0, 0
    while start < len(document):
        part = document[start : start + _CHUNK]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape is not split
            part = document[start : start + _CHUNK + 1]
        start += len(part)
        codes = np.frombuffer(part.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        quotes = (
            np.cumsum(codes == 0x22, dtype=np.uint8) + inside
        ) & 1  # only whether their number is odd
        yield codes[quotes == 0].tobytes()
        inside = int(quotes[-1]) if len(quotes) else inside


def size_within(
    value: Any, *, levels: int, values: int = MOST_VALUES, characters: int = MOST_CHARACTERS
) -> int:
    """Return about how many characters the JSON of a value has.

    Raises ValueError, which names the limit, where its lists and objects are nested more than
    ``levels`` deep, where there are more than ``values`` of them, texts, numbers and keys together,
    or ``characters`` of its texts and keys.
    """
    count = length = 0
    level: list[Any] = [value]
    for depth in range(levels + 1):
        objects = [item for item in level if type(item) is dict]
        lists = [item for item in level if type(item) in (list, tuple)]
        count += 2 * sum(map(len, objects)) + sum(map(len, lists))  # keys, too
        if count > values:
            raise ValueError(
                f"at most {values} values are taken, names, numbers, texts, lists and objects"
                " together"
            )
        length += sum(len(item) for item in chain(level, *objects) if type(item) is str)
        if length > characters:
            raise ValueError(f"at most {characters} characters are taken")
        if depth == levels and (objects or lists):
            raise ValueError(f"at most {levels} levels of lists and objects are taken")
        if not objects and not lists:
            break
        level = [
            *chain.from_iterable(item.values() for item in objects),
            *chain.from_iterable(lists),
        ]
    return length + 2 * count


def lone_surrogate(value: Any) -> tuple[tuple[str | int, ...], str] | None:
    """Return where a JSON value has half of a surrogate pair, which is no character, and which;
    None where nowhere.

    The place is the path to the text, or to the object of whose keys one has it."""
    if isinstance(value, str):
        return None if (fault := _half_of_a_pair(value)) is None else ((), fault)
    pending: list[tuple[Any, tuple[str | int, ...]]] = (
        [(value, ())] if isinstance(value, dict | list) else []
    )
    while pending:
        container, path = pending.pop()
        if isinstance(container, dict):
            for key in container:
                if (fault := _half_of_a_pair(key)) is not None:
                    return path, f"a key: {fault}"
        for name, inner in (
            container.items() if isinstance(container, dict) else enumerate(container)
        ):
            if isinstance(inner, dict | list):
                pending.append((inner, (*path, name)))
            elif isinstance(inner, str) and (fault := _half_of_a_pair(inner)) is not None:
                return (*path, name), fault
    return None


def _half_of_a_pair(text: str) -> str | None:
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return (
            f"character {error.start} is the lone surrogate U+{code:04X}; send well-formed Unicode"
        )
    return None
