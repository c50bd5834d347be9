"""A service beside requests whose JSON schema costs more than anybody has: it serves others, and it
stops."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.test_formats import COSTLY
from tests.kit.key_files import add_key
from tests.serve_process import ServeProcess

OBJECT = {"type": "json_object"}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    return {
        name: add_key(tmp_path / "keys.toml", name, {"scopes": ["score"]})
        for name in ("one", "other")
    }


@pytest.fixture
def served(tmp_path: Path, keys: dict[str, str]) -> Iterator[ServeProcess]:
    with ServeProcess(
        "--keys", str(tmp_path / "keys.toml"), "--policy", "observe", "--drain-s", "20"
    ) as service:
        yield service


def ask(
    service: ServeProcess, key: str, answer_format: dict[str, Any], seconds: float = 120
) -> httpx.Response:
    model = httpx.get(
        f"{service.url}/v1/models", headers={"Authorization": f"Bearer {key}"}
    ).json()["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Where is Bern?"}],
        "max_tokens": 4,
    }
    return httpx.post(
        f"{service.url}/v1/chat/completions",
        json=body | {"response_format": answer_format},
        headers={"Authorization": f"Bearer {key}"},
        timeout=seconds,
    )


def of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "costly", "schema": schema}}


def memory(process: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096


def test_others_are_served_beside_costly_formats_and_sigterm_ends_it(
    served: ServeProcess, keys: dict[str, str]
) -> None:
    assert ask(served, keys["other"], OBJECT).status_code == 200
    before, refused = memory(served.process.pid), []

    def costly(schema: dict[str, Any]) -> None:
        response = ask(served, keys["one"], of(schema))
        refused.append((response.status_code, response.json()["error"]))

    asked = [threading.Thread(target=costly, args=(schema,)) for schema in COSTLY.values()]
    for thread in asked:
        thread.start()
    while any(thread.is_alive() for thread in asked):
        response = ask(served, keys["other"], OBJECT)
        assert response.status_code == 200, response.text
        assert httpx.get(f"{served.url}/health/live", timeout=60).status_code == 200
    for thread in asked:
        thread.join()
    for status, error in refused:
        assert status == 422, error
        assert error["param"] == "response_format"
        assert re.search("cannot be compiled: it takes more than|written out", error["message"]), (
            error
        )
    assert len(refused) == len(COSTLY)
    assert memory(served.process.pid) - before < 200 << 20

    def unanswered() -> None:
        with suppress(httpx.HTTPError, ValueError):
            costly(COSTLY["many divisors"])

    last = threading.Thread(target=unanswered)
    last.start()
    served.process.terminate()
    assert served.process.wait(120) == 0
    last.join()
