from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from probes_store.store import Store, Trust
from tests.probes_store.s3_server import BUCKET, VARIABLES, s3_server, use


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


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


BOTH = ("memory", "s3")
ON_S3_LONG = ("memory", pytest.param("s3", marks=pytest.mark.long))


@pytest.fixture(params=ON_S3_LONG)
def url(request: pytest.FixtureRequest) -> str:
    """An empty store by URL, of each kind; of the real server where ``make test`` does not hurry."""
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else request.getfixturevalue("s3_url")


Opens = Callable[..., Store]
NO_TRUST_ASKED = Trust()


@pytest.fixture
def opens(tmp_path: Path) -> Opens:
    """Opens a URL with the copies of the machine that is named."""

    def run(url: str, machine: str = "one", trust: Trust = NO_TRUST_ASKED) -> Store:
        return Store(url, cache=tmp_path / "machines" / machine, trust=trust)

    return run
