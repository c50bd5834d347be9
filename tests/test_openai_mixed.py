"""Thousands of mixed requests through OpenAI's routes, on both engines and the demo model.

Chats and texts, whole and streamed, under policies that gate and that observe, some given up
midway.  No token of a withheld answer is sent; a greedy answer is the same byte for byte whatever
the policy, and the same as the model's own without us."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from service.demo import MODEL_DIR
from service.demo.questions import questions
from tests.engines.vllm.installed import vllm_or_skip
from tests.kit.vllm_service import PATIENT
from tests.serve_process import MAY_CHOOSE, serve

REQUESTS = int(
    os.environ.get("HALLUTRACER_TEST_REQUESTS", "1500")
)  # to each engine; 5,000 take two minutes
CLIENTS = 16
MOST = 12  # answer tokens
ASKED = [row["prompt"] for row in questions("dev")[:400]]
pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Mixed:
    """One request."""

    chat: bool
    question: str
    tokens: int
    greedy: bool
    policy: str
    stream: bool
    leaves: bool  # after the first event

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        asked = (
            {"messages": [{"role": "user", "content": self.question}]}
            if self.chat
            else {"prompt": self.question}
        )
        sampling = {"temperature": 0} if self.greedy else {"temperature": 0.8, "seed": 1}
        xargs = {"vllm_xargs": {"hallutracer_policy": self.policy}}
        return (
            {"model": model, "max_tokens": self.tokens, "stream": self.stream}
            | asked
            | sampling
            | xargs
        )


def mixed(number: int) -> Mixed:
    draw = Random(number)
    stream = draw.random() < 0.5
    return Mixed(
        chat=draw.random() < 0.6,
        question=draw.choice(ASKED),
        tokens=draw.randint(1, MOST),
        greedy=draw.random() < 0.8,
        policy=draw.choice(["gate", "gate", "block", "observe"]),
        stream=stream,
        leaves=stream and draw.random() < 0.2,
    )


@pytest.fixture(scope="module")
def alone() -> dict[tuple[bool, str], list[str]]:
    """The model's own greedy answers, by transformers: each question's text after 1, 2 .. ``MOST``
    tokens."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    by_length: dict[int, list[tuple[bool, str, list[int]]]] = defaultdict(list)
    for chat, question in itertools.product((True, False), ASKED):
        turn = [{"role": "user", "content": question}]
        ids = (
            tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
            if chat
            else tokenizer(question)["input_ids"]
        )
        by_length[len(ids)].append((chat, question, ids))
    answers = {}
    for alike in by_length.values():  # prompts of one length go together without padding
        prompts = torch.tensor([ids for _, _, ids in alike])
        with torch.inference_mode():
            mask = torch.ones_like(prompts)
            made = model.generate(
                prompts, attention_mask=mask, max_new_tokens=MOST, do_sample=False
            )
        for (chat, question, ids), row in zip(alike, made, strict=True):
            answers[chat, question] = [
                tokenizer.decode(row[len(ids) :][:count], skip_special_tokens=True)
                for count in range(1, MOST + 1)
            ]
    return answers


@pytest.fixture(params=["transformers", "vllm"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "vllm":
        vllm_or_skip()
        yield request.getfixturevalue("vllm_service").served.url
    else:
        with serve(*PATIENT, **MAY_CHOOSE) as served:
            yield served.url


def test_no_token_of_a_withheld_answer_and_every_byte_of_the_others(
    url: str, alone: dict[tuple[bool, str], list[str]]
) -> None:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]

    def send(number: int) -> str:
        request = mixed(number)
        text, reason, note, message = ask(client, url + request.path, request, model)
        (row,) = note["data"]
        withheld = row["decision"] != "continue"
        # A prompt that went through no template is withheld outside training, too
        # (docs/serving.md).
        closed = row["flagged"] or (not request.chat and row["outside_training"])
        assert withheld == (request.policy != "observe" and closed), (request, row)
        if withheld:
            assert (text, reason) == ("", "content_filter"), (request, text, reason)
            assert not request.chat or message == (
                "I am not sure." if request.policy == "gate" else None
            ), (request, message)
            return "withheld"
        own = alone[request.chat, request.question]
        if request.leaves:
            assert own[-1].startswith(text) or not request.greedy, (request, text)
            return "left"
        if request.greedy:
            assert text == own[request.tokens - 1], (request, text)
            return f"equal, {request.policy}"
        return "sampled"

    # The server closes what was idle for 5 s, and httpx would use it as long: on a busy machine the
    # two would meet.
    limits = httpx.Limits(max_connections=CLIENTS, keepalive_expiry=2)
    with httpx.Client(timeout=120, limits=limits) as client, ThreadPoolExecutor(CLIENTS) as pool:
        outcomes = Counter(pool.map(send, range(REQUESTS)))
    print(dict(outcomes))
    kinds = ("withheld", "left", "sampled", "equal, gate", "equal, observe")
    assert min(outcomes[name] for name in kinds) > REQUESTS // 50
    decoding = [
        line for line in httpx.get(f"{url}/metrics").text.splitlines() if "running_decodes " in line
    ]
    assert [float(line.split()[-1]) for line in decoding if not line.startswith("#")] == [0.0]


def ask(
    client: httpx.Client, address: str, request: Mixed, model: str
) -> tuple[str, str | None, dict[str, Any], str | None]:
    """Text, finish reason, note and refusal."""
    text = ""
    reason = None
    note = {}
    message = None
    with client.stream("POST", address, json=request.body(model)) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines() if request.stream else [answer.read().decode()]:
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            content = json.loads(data)
            note = note or content["hallutracer"]
            for choice in content["choices"]:
                part = (
                    choice["delta" if request.stream else "message"]
                    if request.chat
                    else {"content": choice["text"]}
                )
                text += part.get("content") or ""
                message = part.get("refusal", message)
                reason = choice["finish_reason"] or reason
            if request.leaves and note["data"][0]["decision"] == "continue":
                break
    return text, reason, note, message
