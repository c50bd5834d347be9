"""moto's S3 server in a process of its own, which answers one request after the other.

Threaded, as ``moto_server`` runs it, two creates of one object could both find none; S3 promises
that one wins."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from subprocess import DEVNULL

from s3fs import S3FileSystem

from tests.kit.local_server import free_port

SERVER = """
import sys
import moto.server
run = moto.server.run_simple
def run_in_one_thread(*arguments, **options):
    return run(*arguments, **options | {"threaded": False})
moto.server.run_simple = run_in_one_thread
moto.server.main(["--host", "127.0.0.1", "--port", sys.argv[1]])
"""
BUCKET = "bucket"
VARIABLES = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def use(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make ``address`` the endpoint of this process, whose connections so far are forgotten, and of
    its children."""
    environment.update(VARIABLES, AWS_ENDPOINT_URL=address)
    S3FileSystem.clear_instance_cache()


@contextmanager
def s3_server() -> Iterator[str]:
    """A running server with an empty bucket; its address."""
    with s3_process() as (address, _):
        yield address


@contextmanager
def s3_process() -> Iterator[tuple[str, int]]:
    """As ``s3_server``, with the process's id."""
    port, until = free_port(), time.monotonic() + 60
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdout=DEVNULL, stderr=DEVNULL
    )
    try:
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request("PUT", f"/{BUCKET}")
                assert connection.getresponse().status == 200
                break
            except OSError:
                assert process.poll() is None, "moto's server ended"
                assert time.monotonic() < until
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()
