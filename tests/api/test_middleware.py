"""Bodies: those that nobody means, and those that arrive and do not end; what they hold, and who is
still answered."""

from __future__ import annotations

import json
import re
import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from service.access.callers import ApiKey
from service.api.middleware import FREE, BodyMemory
from service.engines.checks import SEGMENT, check_length
from service.errors import BodiesFull, PromptTooLong
from tests.matching import Held
from tests.running import Served, listening, until
from tests.scripted_engine import ScriptedEngine
from tests.serve_process import serve


def test_a_text_far_beyond_the_context_is_not_encoded_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, encoded = ScriptedEngine(), list[int]()
    tokenize = engine.tokenize
    monkeypatch.setattr(
        engine, "tokenize", lambda text: encoded.append(len(text)) or tokenize(text)
    )
    for texts in (["x" * 4_000_000], ["x" * 2000] * 2000):
        encoded.clear()
        with pytest.raises(PromptTooLong, match="context length is 512 tokens"):
            check_length(texts, engine)
        assert sum(encoded) <= SEGMENT + 2000
    encoded.clear()
    check_length(["x" * SEGMENT], engine)
    assert encoded == []


# --- bodies that do not end, on real sockets ---

MIB = 2**20
KEYS = ("one-key-of-sixteen-characters", "another-key-of-16-characters")
A, B = ApiKey(KEYS[0], "a"), ApiKey(KEYS[1], "b")


def padded(size: int) -> bytes:
    """A request of ``size`` bytes."""
    return b'{"prompt": "a"}'.ljust(size)


class Client:
    """One connection that has sent the head of a request with a body of so many bytes, or in
    chunks.

    ``status`` is what came back: 100 where the body is awaited."""

    def __init__(
        self, port: int, length: int | None, key: str | None = A.secret, path: str = "/score"
    ) -> None:
        lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
        framing = (
            f"content-length: {length}" if length is not None else "transfer-encoding: chunked"
        )
        lines += ["expect: 100-continue", framing]
        lines += [f"authorization: Bearer {key}"] if key is not None else []
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.status = self.finish("\r\n".join(lines).encode() + b"\r\n\r\n")

    def finish(self, content: bytes = b"") -> int:
        """Send what is left; the status of what comes back."""
        self.socket.sendall(content)
        self.text = b""
        while b"\r\n\r\n" not in self.text:
            self._more()
        return int(self.text[9:12])

    def _more(self) -> None:
        part = self.socket.recv(65536)
        assert part, self.text
        self.text += part

    def error(self) -> tuple[str, str]:
        """Of the answer: its code, and Retry-After."""
        start, _, body = self.text.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", start)[1])  # type: ignore[index]
        while len(body) < length:
            self._more()
            body = self.text.partition(b"\r\n\r\n")[2]
        after = re.search(rb"retry-after: (\d+)", start)
        return json.loads(body)["error"]["code"], after[1].decode() if after else ""


def score(port: int, key: str, size: int = 20) -> int:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    return httpx.post(
        f"http://127.0.0.1:{port}/score", content=padded(size), headers=headers, timeout=60
    ).status_code


def test_four_hundred_unfinished_bodies_hold_the_memory_of_sixteen() -> None:
    with serve("--api-key", A.secret, "--api-key", B.secret, "--deadline-s", "300") as service:
        port = int(service.url.rpartition(":")[2])

        def highest() -> float:
            """MiB that the process has held at once."""
            (line,) = re.findall(
                r"VmHWM:\s+(\d+) kB", Path(f"/proc/{service.process.pid}/status").read_text()
            )
            return int(line) / 1024

        foreign = httpx.get(f"{service.url}/health", headers={"host": "evil.example"})
        assert foreign.status_code == 421  # the command knows the service's names
        assert [score(port, key, 2 * MIB) for key in KEYS] == [200, 200]
        before = highest()
        clients = [Client(port, 4 * MIB) for _ in range(400)]
        reading = [client for client in clients if client.status == 100]
        for client in reading:
            client.socket.sendall(b" " * int(3.9 * MIB))
        assert len(reading) == 16
        refused = [client for client in clients if client.status != 100]
        assert {(client.status, *client.error()) for client in refused} == {
            (503, "bodies_full", "1")
        }
        assert Client(port, 4 * MIB, None).status == 401
        assert [score(port, key) for key in KEYS] == [200, 200]
        assert [score(port, key.secret, 4 * MIB) for key in (B, A)] == [200, 503]
        assert highest() - before < 160
        for client in clients:
            client.socket.close()
        until(lambda: score(port, A.secret, 4 * MIB) == 200)


SMALL_MEMORY, LARGEST = MIB, MIB // 32
COUNTED = LARGEST - FREE
HALF = SMALL_MEMORY // 2 // COUNTED  # so many of the largest bodies are what one caller may hold
CHUNK = b"%x\r\n%b\r\n"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[BodyMemory]:
    """That of the app which is made next."""
    made: list[BodyMemory] = []

    class Seen(BodyMemory):
        def __init__(self, most: int) -> None:
            super().__init__(most)
            made.append(self)

    monkeypatch.setattr("service.api.middleware.LEAST", SMALL_MEMORY)
    monkeypatch.setattr("service.api.middleware.BodyMemory", Seen)
    return made


@pytest.fixture
def service(tmp_path: Path, memory: list[BodyMemory]) -> Iterator[Served]:
    """In the end all memory is given back."""
    with listening(Served(tmp_path, api_keys=[A, B], max_body_bytes=LARGEST)) as served:
        yield served
        until(lambda: memory[0].free == SMALL_MEMORY)


def accepted(port: int, key: str) -> list[Client]:
    """Bodies of the largest size that wait to be sent, until one is refused."""
    results: list[Client] = []
    while (client := Client(port, LARGEST, key)).status == 100:
        results.append(client)
    assert (client.status, *client.error()) == (503, "bodies_full", "1")
    return results


def test_callers_share_the_memory_and_get_it_back(
    service: Served, memory: list[BodyMemory]
) -> None:
    first, second = accepted(service.port, A.secret), accepted(service.port, B.secret)
    assert (len(first), len(second)) == (HALF, HALF // 2)
    assert [client.finish(padded(LARGEST)) for client in first] == [200] * HALF
    until(lambda: memory[0].free == SMALL_MEMORY - len(second) * COUNTED)
    third = accepted(service.port, A.secret)
    assert len(third) == HALF * 3 // 4  # as much as it leaves free beside the second's
    assert [score(service.port, key, FREE) for key in KEYS] == [
        200,
        200,
    ]  # small ones are answered whatever is held
    for client in second + third:
        client.socket.close()


@pytest.mark.parametrize("path", ["/score", "/v1/chat/completions", "/v1/feedback", "/classify"])
def test_a_body_in_chunks_counts_as_it_comes(service: Served, path: str) -> None:
    clients = [Client(service.port, None, A.secret, path) for _ in range(HALF + 20)]
    assert {client.status for client in clients} == {100}
    for client in clients:
        client.socket.sendall(CHUNK % (LARGEST, padded(LARGEST)))
    refused: list[socket.socket] = []
    waiting = [client.socket for client in clients]

    def too_few() -> bool:
        answered, _, _ = select.select(waiting, [], [], 0)
        refused.extend(answered)
        waiting[:] = [one for one in waiting if one not in answered]
        return len(refused) >= 20

    until(too_few)
    assert waiting
    for client in clients:
        if client.socket in refused:
            assert (client.finish(), *client.error()) == (503, "bodies_full", "1")
        else:
            assert client.finish(b"0\r\n\r\n") != 503


def test_a_body_counts_until_it_is_answered(service: Served) -> None:
    service.engine.before = held = Held()
    clients = accepted(service.port, A.secret)
    for client in clients:
        client.socket.sendall(padded(LARGEST))
    assert held.entered.wait(20)
    until(lambda: service.metric("hallutracer_queue_depth") == HALF)
    assert score(service.port, A.secret, LARGEST) == 503
    held.release.set()
    assert [client.finish() for client in clients] == [200] * HALF


def test_a_body_gives_its_memory_back_however_it_ends(
    service: Served, memory: list[BodyMemory]
) -> None:
    gone = Client(service.port, LARGEST)
    gone.socket.sendall(b" " * FREE)
    assert memory[0].free == SMALL_MEMORY - COUNTED
    gone.socket.close()
    assert Client(service.port, None).finish(CHUNK % (2 * LARGEST, b" " * 2 * LARGEST)) == 413
    assert Client(service.port, LARGEST).finish(b"{".ljust(LARGEST)) == 400
    Client(service.port, None).finish(CHUNK % (LARGEST, b" " * LARGEST) + b"no chunk\r\n")
    for length in (LARGEST, None):  # who has no key is refused before the body
        client = Client(service.port, length, None)
        assert (client.status, client.error()[0]) == (401, "unauthorized")


def test_a_body_that_never_comes_gives_its_memory_back(
    tmp_path: Path, memory: list[BodyMemory]
) -> None:
    with listening(Served(tmp_path, max_body_bytes=LARGEST, deadline_s=0.3)) as service:
        assert Client(service.port, LARGEST).finish() == 408
        until(lambda: memory[0].free == SMALL_MEMORY)


def test_many_callers_together_hold_no_more_than_there_is() -> None:
    memory, held = BodyMemory(1 << 20), 0
    for number in range(1000):
        with suppress(BodiesFull):
            while True:
                memory.take(f"address {number}", 1000)
                held += 1000
    assert memory.free == (1 << 20) - held >= 0
    assert held > 0.99 * (1 << 20)
