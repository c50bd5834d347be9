"""How much of the code a newcomer would open to follow one thing: our files and functions that it
enters.

    python -m benchmarks.walks

A prompt (POST /score on a loaded service), a bundle (``hallutracer bundle verify demo --model
demo``) and training rows (``hallutracer train`` on questions of the demo).  Modules that are only
imported are not counted."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
OURS = tuple(f"{ROOT / name}/" for name in ("service", "probes_store", "hallutracer"))
entered: set[CodeType] = set()


def _profile(frame: FrameType, event: str, _: Any) -> None:
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(OURS) and code.co_name != "<module>":
        entered.add(code)


def command(*arguments: str) -> None:
    """Run ``hallutracer ARGUMENTS`` without its output."""
    from service.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(arguments)
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(said.getvalue()) from None


def prompt() -> None:
    """Score one prompt on a service of the demo model that is ready, over HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    seen: set[CodeType] = set()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not _ready(client):
                time.sleep(0.2)
            body = {
                "prompt": "What is the capital of Italy?",
                "generate": {"max_tokens": 4},
                "policy": "observe",
            }
            client.post("/score", json=body)
            time.sleep(1)
            entered.clear()
            assert client.post("/score", json=body).status_code == 200
            time.sleep(0.2)
            seen.update(entered)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    command("serve", "--model", "demo", "--port", url.rpartition(":")[2])
    entered.clear()
    entered.update(seen)


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def bundle() -> None:
    """Load a bundle on its model and replay its golden prompts."""
    command("bundle", "verify", "demo", "--model", "demo")


def rows() -> None:
    """Train on rows with labels."""
    from service.demo.questions import questions

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        lines = (
            {
                "id": q["id"],
                "prompt": q["prompt"],
                "group": q["group"],
                "label": int(q["exposures"] < 5),
            }
            for q in questions("train")[::12]
        )
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command(
            "train",
            "--model",
            "demo",
            "--data",
            str(data),
            "--name",
            "walk",
            "--seeds",
            "1",
            "--folds",
            "3",
            "--jobs",
            "1",
            "--run-dir",
            f"{folder}/run",
            "--store",
            f"{folder}/store",
        )


def walk(step: Callable[[], None]) -> tuple[int, int]:
    """Return how many files and how many functions ``step`` enters."""
    threading.setprofile(_profile)
    sys.setprofile(_profile)
    entered.clear()
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return len({code.co_filename for code in entered}), len(entered)


def main() -> None:
    """Print a line for each walk."""
    for step in (prompt, bundle, rows):
        files, functions = walk(step)
        print(f"{step.__name__:<8} {files:>4} files {functions:>5} functions")


if __name__ == "__main__":
    main()
