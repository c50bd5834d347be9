"""Bodies that a client has compressed: decoded within the body's limit, refused by name where they
are not taken."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.api import encodings
from service.api.encodings import PIECE, decoders
from tests.kit.api import CHAT, bodies_by_route, check_error, request_of
from tests.running import App, app_of_module

JSON = {"content-type": "application/json"}
ASKED = json.dumps({"prompt": "What is the capital of France?"}).encode()
ROUTES = bodies_by_route("a")


def raw(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


def members(body: bytes) -> bytes:
    return gzip.compress(body[:7]) + gzip.compress(b"", mtime=0) + gzip.compress(body[7:])


PACKED = {
    "gzip": ("gzip", gzip.compress),
    "capitals": ("GZIP", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "members": ("gzip", members),
    "deflate": ("deflate", zlib.compress),
    "raw deflate": ("deflate", raw),
    "identity": ("identity", bytes),
}


app = app_of_module(max_body_bytes=200_000)


def send(
    app: App, body: bytes, encoding: str, route: str = "/score", *, chunked: bool = False
) -> httpx.Response:
    def chunks() -> Iterator[bytes]:
        yield from (body[start : start + 5] for start in range(0, len(body), 5))

    return app.client.post(
        route, content=chunks() if chunked else body, headers=JSON | {"content-encoding": encoding}
    )


@pytest.mark.parametrize("kind", PACKED)
def test_a_compressed_body_is_read_as_a_plain_one(app: App, kind: str) -> None:
    encoding, pack = PACKED[kind]
    plain = app.client.post("/score", content=ASKED, headers=JSON).json()["data"]
    for chunked in (False, True):
        packed = send(app, pack(ASKED), encoding, chunked=chunked)
        assert (packed.status_code, packed.json().get("data")) == (200, plain), packed.text
    for route, body in ROUTES.items():
        assert send(app, pack(json.dumps(body).encode()), encoding, route).status_code == 200, route
    # Of a stream, what waits for the client to leave asks again for the same connection.
    stream = json.dumps(request_of(CHAT, stream=True)).encode()
    assert send(app, pack(stream), encoding, CHAT.route).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip", "gzip, br", "nonsense" * 40])
def test_another_encoding_is_refused_by_name_with_those_that_are_taken(
    app: App, encoding: str
) -> None:
    refused = send(app, ASKED, encoding)
    assert encoding[:80] in check_error(refused, 415, code="unknown_encoding")["message"]
    assert refused.headers["accept-encoding"].startswith("gzip, deflate")
    assert (
        send(app, ASKED, encoding, "/v1/messages").json()["error"]["type"]
        == "invalid_request_error"
    )


@pytest.mark.parametrize("kind", ["gzip", "members", "deflate", "raw deflate"])
def test_a_bomb_ends_at_the_limit_and_costs_no_more(
    app: App, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    encoding, pack = PACKED[kind]
    given, feed = list[int](), encodings._Zlib.feed

    def counting(decoder: encodings._Zlib, data: bytes) -> Iterator[bytes]:
        for piece in feed(decoder, data):
            given.append(len(piece))
            yield piece

    monkeypatch.setattr(encodings._Zlib, "feed", counting)
    bomb = pack(b'{"prompt": "' + b"a" * 30_000_000 + b'"}')
    assert len(bomb) < 100_000
    refused = send(app, bomb, encoding)
    check_error(refused, 413, code="body_too_large")
    assert (sum(given) <= 200_000 + 2 * PIECE, max(given) <= PIECE) == (True, True)


GZIP, DEFLATE = gzip.compress(ASKED, mtime=0), zlib.compress(ASKED)
# Not encoded at all, cut, damaged, with more behind, of the other encoding, of too many members.
GZIPS = [ASKED, GZIP[:-3], b"\x1f", GZIP[:-5] + b"12345", GZIP + b"more", DEFLATE]
GZIPS.append(GZIP + gzip.compress(b"", mtime=0) * 2000)
DEFLATES = [ASKED, DEFLATE[:-3], GZIP, DEFLATE * 2]


@pytest.mark.parametrize(
    ("encoding", "body"),
    [*(("gzip", body) for body in GZIPS), *(("deflate", body) for body in DEFLATES)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_as_declared_is_said_to_be_so(app: App, encoding: str, body: bytes) -> None:
    for chunked in (False, True):
        refused = send(app, body, encoding, chunked=chunked)
        error = check_error(refused, 400, code="invalid_encoding")
        assert f"Content-Encoding: {encoding}" in error["message"]


def test_a_compressed_body_takes_the_memory_of_what_it_decodes_to(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[int]()
    from service.api.middleware import FREE, BodyMemory

    monkeypatch.setattr(BodyMemory, "take", lambda self, caller, size: taken.append(size))
    monkeypatch.setattr(BodyMemory, "give_back", lambda self, caller, size: None)
    body = json.dumps({"prompt": "a", "stop": "b" * 150_000}).encode()
    assert send(app, gzip.compress(body, mtime=0), "gzip").status_code == 422
    assert sum(taken) == len(body) - FREE


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip", "identity, chunked", "x" * 500])
def test_a_transfer_coding_that_is_no_chunks_is_refused_by_name(app: App, coding: str) -> None:
    refused = app.client.post(
        "/score", content=iter([ASKED]), headers=JSON | {"transfer-encoding": coding}
    )
    error = check_error(refused, 415, code="unknown_encoding")
    assert f"Transfer-Encoding {coding[:80]!r} is not taken, only chunked" in error["message"]
    taken = app.client.post(
        "/score", content=iter([ASKED]), headers=JSON | {"transfer-encoding": "Chunked"}
    )
    assert taken.status_code == 200


class FakeZstd:
    """The interface of compression.zstd, on zlib's format."""

    ZstdError = zlib.error

    class ZstdDecompressor:
        def __init__(self) -> None:
            self._decoder = zlib.decompressobj()
            self._kept = b""
            self.eof = False
            self.unused_data = b""
            self.needs_input = True

        def decompress(self, data: bytes, most: int) -> bytes:
            piece = self._decoder.decompress(self._kept + data, most)
            self._kept, self.eof = self._decoder.unconsumed_tail, self._decoder.eof
            self.unused_data = self._decoder.unused_data
            self.needs_input = not self._kept and len(piece) < most
            return piece


@pytest.mark.parametrize("there", [(), ("compression.zstd",), ("backports.zstd",)])
def test_zstd_is_taken_where_a_module_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...]
) -> None:
    def imported(name: str) -> type[FakeZstd]:
        if name not in there:
            raise ImportError
        return FakeZstd

    monkeypatch.setattr(encodings, "import_module", imported)
    assert ("zstd" in decoders()) == bool(there)
    long = json.dumps(
        {"prompt": "a", "pad": "".join(random.Random(1).choices("abcdef", k=300_000))}
    ).encode()
    with App(tmp_path, max_body_bytes=200_000).started() as app:
        result = send(app, zlib.compress(ASKED), "zstd")
        assert result.status_code == (200 if there else 415), result.text
        if there:
            assert send(app, zlib.compress(long), "zstd").status_code == 413
            assert send(app, ASKED, "zstd").json()["error"]["code"] == "invalid_encoding"
        else:
            assert result.headers["accept-encoding"] == "gzip, deflate"
