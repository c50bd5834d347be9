"""Server-sent events from bytes that come in any pieces.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation; of an event's fields only
``data`` is read, the others have no use here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_END = re.compile(rb"\r\n|\n|\r")  # bytes.splitlines knows more; a separator inside a text, U+2028 say, ends no line


class EventReader:
    """Feed it what arrives; it gives the data of each event that is complete, but for empty ones."""

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._after_return = False  # a line feed that comes next belongs to the carriage return before it
        self._data: list[bytes] = []  # lines of the event that has not ended

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The events that ``piece`` completes."""
        if self._after_return and piece:
            piece = piece.removeprefix(b"\n")
            self._after_return = False
        if not piece:
            return
        self._after_return = piece.endswith(b"\r")
        *lines, self._rest = _END.split(self._rest + piece)
        for line in lines:
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not line:
                data, self._data = b"\n".join(self._data), []
                if data:
                    yield data
