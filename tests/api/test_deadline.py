"""An answer that is not finished shortly before the deadline ends there, whatever length its
request named."""

from __future__ import annotations

import re

import pytest

from service.serving.admission import Deadline
from tests.engine_kinds import KINDS
from tests.kit.api import SCORE, WIRES, Wire, send_to
from tests.running import App, app_of_module

# How the protocols say that an answer was cut.
ENDS = {"responses": "max_output_tokens", "messages": "max_tokens"}


app = app_of_module(kinds=KINDS, answer="x" * 400)


def answer_of(app: App, wire: Wire, *, stream: bool = False, **chosen: float) -> str:
    """The text of a response to a request that names the length of its answer."""
    return send_to(app, wire, tokens=30, stream=stream, chosen={"threshold": 1.0} | chosen).text


def ends_of(text: str) -> list[str]:
    return re.findall(r'"(?:finish_reason|stop_reason|reason)": ?"(\w+)"', text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WIRES)
def test_an_answer_ends_shortly_before_the_deadline(
    app: App, name: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answer_of(app, WIRES[name], stream=stream)
    decoded = app.engine.counters.decode_steps
    # It has come when the first token is decoded.
    monkeypatch.setattr(Deadline, "nearly", property(lambda _: 0.0))
    cut = answer_of(app, WIRES[name], stream=stream)
    assert ends_of(cut) == ends_of(whole) == [ENDS.get(name, "length")]
    assert app.engine.counters.decode_steps - decoded < 3
    assert not re.search('"code": ?"', cut)


def test_a_deadline_of_the_request_s_own_counts(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    nearly = property(lambda self: given.append(self.seconds) or 0.0)
    monkeypatch.setattr(Deadline, "nearly", nearly)
    assert ends_of(answer_of(app, SCORE, deadline_ms=25_000)) == ["length"]
    assert set(given) == {25.0}
