"""Stores of every kind: in a folder, in memory, on a real S3 server, on a stand-in for the hub."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from probes_store.store import Store, Trust
from tests.kit.key_pairs import KeyPair, key_pair
from tests.kit.s3_server import BUCKET, VARIABLES, s3_server, use

Opens = Callable[..., Store]
NO_TRUST_ASKED = Trust()
S3_LONG = pytest.param("s3", marks=pytest.mark.long)  # where ``make test`` does not hurry


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def keys(tmp_path: Path) -> KeyPair:
    return key_pair(tmp_path, "ours")


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of a running S3 server."""
    with s3_server() as address:
        yield address


@pytest.fixture
def s3_url(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of its own on that server, for this process and those that it starts."""
    for name in (*VARIABLES, "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "")  # put back at the end
    use(s3)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def memory_url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture(params=["memory", S3_LONG])
def url(request: pytest.FixtureRequest) -> str:
    """An empty store by URL, of each kind."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(params=["folder", "memory", S3_LONG])
def where(request: pytest.FixtureRequest) -> str:
    """An empty store of any kind, as ``--store`` takes it."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def opens(tmp_path: Path) -> Opens:
    """Opens a store, one at a URL with the copies of the machine that is named."""

    def run(where: str, machine: str = "one", trust: Trust = NO_TRUST_ASKED) -> Store:
        return Store(where, cache=tmp_path / "machines" / machine, trust=trust)

    return run
