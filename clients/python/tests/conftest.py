"""The adapters with the real libraries, beside a real service on the demo model: HALLUTRACER_URL.

tests/client/test_libraries.py runs these with the environment of clients/requirements.txt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hallutracer_client import Client

KNOWN, UNKNOWN = "What is the capital of Italy?", "What is the capital of the Solomon Islands?"
UNGATED = {"vllm_xargs": {"hallutracer_policy": "observe"}}  # the model behind the guard answers everything


@pytest.fixture(scope="session")
def url() -> str:
    return os.environ["HALLUTRACER_URL"]


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture
def nobody() -> Iterator[Client]:
    """A client of a service that is not there."""
    with Client("http://127.0.0.1:9", max_retries=0) as client:
        yield client
