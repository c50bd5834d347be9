"""``hallutracer serve`` whose log nobody reads, or that cannot write it: it serves all the same,
and ends."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.serve_process import ServeProcess

SMALL = 4096  # bytes, the least that a pipe can hold: a few lines


@contextmanager
def serving(stderr: int) -> Iterator[tuple[ServeProcess, httpx.Client]]:
    with (
        ServeProcess(stderr=stderr, HALLUTRACER_THREADS="1") as service,
        httpx.Client(base_url=service.url, timeout=60) as client,
    ):
        yield service, client


def ask(client: httpx.Client, times: int) -> None:
    for n in range(times):
        assert client.post("/score", json={"prompt": f"What is {n}?"}).status_code == 200


def fates(client: httpx.Client) -> dict[str, float]:
    lines = [
        line
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("hallutracer_log_lines_to")
    ]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


@pytest.mark.parametrize("reads_at_last", [False, True])
def test_a_log_that_nobody_reads_stops_nothing(reads_at_last: bool) -> None:
    """What is read at last is whole, and ends with what became of the requests."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, SMALL)
    with serving(writer) as (service, client):
        os.close(writer)
        ask(client, 40)
        assert (
            client.get("/health/live").status_code == client.get("/health/ready").status_code == 200
        )
        assert fates(client)["written"] < 40  # the rest waits
        if reads_at_last:
            with open(reader, "rb", closefd=False) as file:
                served = 0
                while served < 40:
                    served += b'"path": "/score"' in file.readline()
    assert service.process.returncode == 0
    if not reads_at_last:
        os.close(reader)
        return
    with open(reader, "rb") as file:
        *_, last = [json.loads(line) for line in file.read().splitlines()]
    assert (last["message"], last["level"]) == ("stopped", "info")
    assert (last["finished"], last["unfinished"], last["refused"]) == (0, 0, 0)
    assert last["seconds"] >= 0


def test_a_log_that_cannot_be_written_is_counted() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with serving(full) as (service, client):
        os.close(full)
        ask(client, 5)
        result = fates(client)
        assert result["written"] == 0
        assert result["dropped"] > 0
        service.process.send_signal(signal.SIGHUP)  # what it says of it on standard output goes on
        ask(client, 5)
    assert service.process.returncode == 0
