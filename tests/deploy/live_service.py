"""The real service with the demo model, and traffic of every kind that a panel shows."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from hallutracer_research.demo.build import KNOWN, UNKNOWN
from tests.serve_process import MAY_CHOOSE, serve

MAX_QUEUE = 8
BUNDLES = ("demo", "demo-fused")
CHAT = [
    {"role": "user", "content": KNOWN},
    {"role": "assistant", "content": "I am not sure."},
    {"role": "user", "content": UNKNOWN},
]


@contextmanager
def serving(store: Path) -> Iterator[str]:
    """The service's address, once it is ready."""
    kept = f"--feedback-db={store.parent / 'feedback.db'}"
    audited = f"--audit-log={store.parent / 'audit.jsonl'}"
    options = (f"--max-queue={MAX_QUEUE}", "--shadow=demo-fused", kept, audited)
    with serve(*options, HALLUTRACER_STORE=str(store), **MAY_CHOOSE) as service:
        yield service.url


@dataclass
class Traffic:
    """What was sent and what came back, as the client saw it."""

    url: str
    statuses: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    decisions: Counter[tuple[str, str]] = field(default_factory=Counter)  # (bundle, decision)
    flagged: Counter[str] = field(default_factory=Counter)  # bundle

    def post(self, **body: Any) -> None:
        self._count(httpx.post(f"{self.url}/v1/risk/score", json=body, timeout=60))

    def judge(self, bundle: str) -> None:
        """Labels on an answer whose prompt was flagged, and on one whose was not."""
        asked = {"prompt": [KNOWN, UNKNOWN], "bundle": bundle, "policy": "observe"}
        answer = httpx.post(f"{self.url}/v1/risk/score", json=asked, timeout=60)
        self._count(answer)
        if answer.is_error:
            return
        for index, label in enumerate(("factual", "hallucinated")):
            said = {"id": answer.json()["id"], "index": index, "label": label}
            httpx.post(f"{self.url}/v1/feedback", json=said, timeout=60).raise_for_status()

    def _count(self, answer: httpx.Response) -> None:
        self.statuses[answer.status_code] += 1
        if answer.is_error:
            self.codes[answer.json()["error"]["code"]] += 1
            return
        text = answer.text
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert text.endswith("data: [DONE]\n\n")
            text = text.partition("\n")[0].removeprefix("data: ")
        body = json.loads(text)
        name = f"{body['bundle']['name']}:{body['bundle']['version']}"
        for row in body["data"]:
            self.decisions[name, row["decision"]] += 1
            self.flagged[name] += row["flagged"]

    def round(self) -> None:
        """Scores, gated, blocked, generated and streamed answers, and a chat, of both bundles; requests that fail."""
        answer = {"max_tokens": 8}
        for bundle in BUNDLES:
            self.post(prompt=[KNOWN, UNKNOWN], bundle=bundle, generate=answer)
            self.post(prompt=[KNOWN, UNKNOWN], bundle=bundle, policy="block")
            self.post(prompt=UNKNOWN, bundle=bundle, policy="observe")
            self.post(prompt=KNOWN, bundle=bundle, generate=answer, stream=True)
            self.post(prompt=UNKNOWN, bundle=bundle, generate=answer, stream=True)
            self.post(messages=CHAT, bundle=bundle, policy="block")
            self.judge(bundle)
        self.post(prompt=KNOWN, bundle="absent")
        self.post(prompt=KNOWN, temperature=1)
        self.post(prompt="why " * 2000)
        self._count(httpx.post(f"{self.url}/score", content=b"{", headers={"content-type": "application/json"}))

    def overload(self) -> None:
        """More prompts at once than may wait, until some are refused."""
        for _ in range(20):
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda _: self.post(prompt=[KNOWN] * (MAX_QUEUE - 2)), range(8)))
            if self.statuses[429]:
                return

    def run(self, seconds: float) -> tuple[float, float]:
        """Rounds for ``seconds``, one overload among them; when it began and ended."""
        began = time.time()
        self.round()
        self.overload()
        while time.time() < began + seconds:
            self.round()
        return began, time.time()
