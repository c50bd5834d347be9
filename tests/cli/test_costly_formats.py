"""A service beside requests whose JSON schema costs more than anybody has: it serves others, and it
stops, beside clients that hold it up by other means, too."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.test_formats import COSTLY
from tests.kit.key_files import add_key
from tests.serve_process import ServeProcess

OBJECT = {"type": "json_object"}
DRAIN_S = 5
PATIENCE_S = 600  # of requests that a busy machine gets to late
Client = Callable[[], None]
# In bodies of 3.8 MB.
NUMBERS = {
    "as a prompt": b'{"input_ids":[%s1]}' % (b"1," * 1_900_000),
    "in a field that takes none": b'{"prompt":"a","generate":{"stop":[%s1]}}' % (b"1," * 1_900_000),
}


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    return {
        name: add_key(tmp_path / "keys.toml", name, {"scopes": ["score"]})
        for name in ("one", "other")
    }


@pytest.fixture
def served(tmp_path: Path, keys: dict[str, str]) -> Iterator[ServeProcess]:
    options = {"keys": tmp_path / "keys.toml", "policy": "observe", "drain-s": DRAIN_S}
    options["deadline-s"] = PATIENCE_S
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    with ServeProcess(*arguments) as service:
        yield service


def ask(
    service: ServeProcess, key: str, answer_format: dict[str, Any], seconds: float = PATIENCE_S
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


def hostile_clients(service: ServeProcess, key: str, over: threading.Event) -> list[Client]:
    """Clients that hold a service up, each until it is cut off or ``over``: none expects an
    answer."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    lines = ["POST /score HTTP/1.1", "Host: x", *map(": ".join, headers.items())]
    head = b"".join(f"{line}\r\n".encode() for line in lines)

    def send(*pieces: bytes, last: bytes = b"") -> None:
        """Send the pieces, then the last one again and again; read nothing."""
        with socket.socket() as connection, suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((host, int(port)))
            for piece in pieces:
                connection.sendall(piece)
            while not over.wait(0.05):
                connection.sendall(last)

    def post(body: bytes) -> None:
        with suppress(httpx.HTTPError):
            httpx.post(f"{service.url}/score", content=body, headers=headers, timeout=PATIENCE_S)

    page = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: x\r\n\r\n"  # megabytes
    stops = [f"{'b' * 255}{n}" for n in range(8)]
    answer = {"prompt": "a", "generate": {"max_tokens": 400, "stop": stops}}
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    stated = head + b"Content-Length: 3000000\r\n\r\n"
    return [
        lambda: post(json.dumps(answer).encode()),
        lambda: post(NUMBERS["as a prompt"]),
        lambda: post(NUMBERS["in a field that takes none"]),
        lambda: send(page),
        lambda: send(page * 3),
        lambda: send(chunked, last=b"1\r\n \r\n"),
        lambda: send(stated, last=b" "),
        lambda: send(head),
    ]


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

    over = threading.Event()
    clients = [unanswered, *hostile_clients(served, keys["one"], over) * 2]
    last = [threading.Thread(target=client) for client in clients]
    try:
        for thread in last:
            thread.start()
        assert ask(served, keys["other"], OBJECT).status_code == 200
        served.process.terminate()
        assert served.process.wait(120) == 0
    finally:
        over.set()
    for thread in last:
        thread.join()
    assert '"stopped"' in served.log(), "it ended in order, and not by the clients' end"
