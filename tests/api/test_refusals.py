"""What is refused, in every protocol: the status and the whole error are those of
``refusals.json``, where each request, or the raw text of one, stands beside what its error has to
name and must not tell (``hides``).

After an intended change of an error, ``python -m tests.api.test_refusals`` records them again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from service.api.json_body import INLINE
from tests.kit.api import POLICIES, Plain, whole
from tests.running import App

JSON = {"content-type": "application/json"}
LONG = b" " * INLINE
FILE = Path(__file__).with_name("refusals.json")
# The services that the requests are sent to; a template has a place for tools in those of the
# second kind.
SERVICES: dict[str, tuple[dict[str, Any], bool]] = {
    "no tools": ({"policies": POLICIES}, False),
    "tools": ({"policies": POLICIES}, True),
    "few prompts": ({"max_body_bytes": 20_000, "max_prompts": 8}, False),
    "short answers": ({"max_new_tokens": 3}, False),
    "no special tokens": ({"refuse_special_tokens": True}, False),
}
CASES: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text()) if FILE.exists() else {}


def answer_to(app: App, case: dict[str, Any], more: bytes | None = None) -> dict[str, Any]:
    """Status and body, without what differs from run to run; of a request that comes in chunks,
    with ``more`` behind it, where that is given."""
    text: str = whole(case["raw"]) if "raw" in case else json.dumps(whole(case["body"]))
    content: Any = text.encode("latin-1")
    if more is not None:
        content = iter([content[:10], content[10:] + more])
    response = app.client.post(case["route"], content=content, headers=JSON)
    return {"status": response.status_code, "answer": Plain()(response.json())}


def start(stack: ExitStack, folder: Path) -> dict[str, App]:
    apps = {}
    for name, (options, takes_tools) in SERVICES.items():
        apps[name] = stack.enter_context(App(folder / name, **options).started())
        apps[name].engine.takes_tools = takes_tools
    return apps


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, App]]:
    with ExitStack() as stack:
        yield start(stack, tmp_path_factory.mktemp("apps"))


@pytest.mark.parametrize(
    ("service", "number"),
    [(service, number) for service, cases in CASES.items() for number in range(len(cases))],
)
def test_a_refusal_is_the_recorded_one_and_names_what_is_wrong(
    apps: dict[str, App], service: str, number: int
) -> None:
    case, counters = CASES[service][number], apps[service].engine.counters
    before = counters.prefills
    answered = answer_to(apps[service], case)
    assert answered == {name: case[name] for name in answered}
    more = b"" if case.get("raw") == "" else LONG  # of spaces alone it is told that they are all
    assert answered == answer_to(apps[service], case, more), "a long body is read in a thread"
    assert answered["status"] in (400, 404, 413, 422)
    text = str(answered["answer"])
    assert case["names"] in text
    assert "hides" not in case or case["hides"] not in text
    assert len(text) < 700, "the request is not repeated"
    assert (counters.decode_steps, counters.prefills) == (0, before)


def write_file() -> None:
    """Record the answers: a request a line."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        apps = start(stack, Path(folder))
        parts = []
        for service, cases in CASES.items():
            recorded = [case | answer_to(apps[service], case) for case in cases]
            lines = ",\n".join(map(json.dumps, recorded))
            parts.append(f"{json.dumps(service)}: [\n{lines}\n]")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    write_file()
