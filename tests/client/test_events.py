"""Server-sent events, by the specification, in any pieces."""

from __future__ import annotations

from itertools import combinations

import pytest

from hallutracer_client.events import EventReader

# Lines of one event are joined; comments are none; U+2028 ends no line.
STREAM = (
    b": a comment\n\ndata: YHOO\ndata: +2\ndata:10\n\nid: 1\nevent: other\ndata\ndata:\xe2\x80\xa8 x\n\n"
    b"data:\n\ndata: cut off"
)
EVENTS = [b"YHOO\n+2\n10", b"\n\xe2\x80\xa8 x"]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_any_cut_gives_the_same_events(newline: bytes, pieces: int) -> None:
    sent = STREAM.replace(b"\n", newline)
    for cuts in combinations(range(1, len(sent), 1 if pieces < 3 else 3), pieces - 1):
        reader, at = EventReader(), (0, *cuts, len(sent))
        got = [data for start, end in zip(at, at[1:], strict=False) for data in reader.feed(sent[start:end])]
        assert got == EVENTS, cuts


def test_byte_by_byte_with_empty_pieces_between() -> None:
    for newline in (b"\n", b"\r\n", b"\r"):
        reader, sent = EventReader(), STREAM.replace(b"\n", newline)
        got = [data for byte in sent for piece in (bytes([byte]), b"") for data in reader.feed(piece)]
        assert got == EVENTS


def test_a_line_feed_belongs_to_one_carriage_return_only() -> None:
    for pieces in ([b"data: a\r", b"\n", b"\n"], [b"data: a\r", b"", b"\n", b"\r\n"], [b"data: a\n", b"\n"]):
        reader = EventReader()
        assert [data for piece in pieces for data in reader.feed(piece)] == [b"a"]
