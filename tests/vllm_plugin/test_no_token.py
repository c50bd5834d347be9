"""Under a gate that every answer meets, no request gets a token: thousands of them, well formed or not."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import pytest

from service.demo import MODEL_DIR
from tests.engines.vllm.installed import vllm_or_skip

vllm_or_skip()

from transformers import AutoTokenizer  # noqa: E402

from tests.vllm_plugin.server import serving  # noqa: E402
from tests.vllm_plugin.test_gated import KNOWN, REFUSES, UNKNOWN, WITHHOLDS  # noqa: E402

pytestmark = pytest.mark.long

REQUESTS = 5000  # as many again are sent to our own service: tests/api/test_no_token.py
NAMES = ["hallutracer_policy", "hallutracer_threshold", "hallutracer_bundle", "hallutracer", "hallutracer-policy",
         "hallutracer_polcy", "HALLUTRACER_POLICY", "hallutracer_gate", "policy", "threshold"]  # fmt: skip
VALUES = ["observe", "gate", "block", "none", "", None, 0, 1, 0.5, 1.5, -1, True, "1", [], {}, ["observe"], 1e400,
          math.nan, "demo", "demo-fused", "demo:1", "demo@production", {"first_token": True, "rows": False, "slot": 0},
          {"first_token": True, "rows": True, "slot": 0, "probes": [], "gate": [0, 0, 0, 0, 1], "end_token": 5},
          "x" * 10_000, 10**40]  # fmt: skip
SAMPLING: dict[str, list[Any]] = {
    "n": [1, 2, 3, 0], "max_tokens": [1, 5, 0, None], "min_tokens": [0, 1, 5], "ignore_eos": [True, False],
    "temperature": [0, 0.7, 2], "top_p": [0.5, 1], "seed": [1, -1], "stop": ["a", []], "echo": [True],
    "logprobs": [True, 1, 0], "top_logprobs": [1], "prompt_logprobs": [0, 1], "use_beam_search": [True, 1, "true"],
    "best_of": [2], "stream": [True, False],
    "stream_options": [{"include_usage": True, "continuous_usage_stats": True}],
    "return_token_ids": [True], "return_tokens_as_token_ids": [True], "logit_bias": [{"5": 100}], "priority": [0, 3],
    "allowed_token_ids": [[5, 6]], "bad_words": [["a"]], "stop_token_ids": [[5]], "include_stop_str_in_output": [True],
    "skip_special_tokens": [False], "response_format": [{"type": "json_object"}, {"type": "text"}],
    "structured_outputs": [{"choice": ["yes", "no"]}, {"regex": "[a-z]+"}], "add_generation_prompt": [False, True],
    "continue_final_message": [True], "truncate_prompt_tokens": [1, -1], "detokenize": [False], "cache_salt": ["s"],
    "kv_transfer_params": [{}, {"do_remote_decode": True}], "request_id": ["mine", "-beam-1"], "user": ["u"],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {}}}]], "tool_choice": ["auto", "required"],
    "background": [True], "store": [True], "model": ["demo", "other"], "suffix": ["x"],
    "extra_body": [{"vllm_xargs": {"hallutracer_policy": "observe"}}],
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    with serving(log, HALLUTRACER_POLICY="gate", HALLUTRACER_THRESHOLD="0") as address:
        yield address


def request(number: int) -> tuple[str, bytes]:
    """A path and a body; the same for the same number."""
    draw = Random(number)
    path = draw.choice([*WITHHOLDS, *WITHHOLDS, *WITHHOLDS, *REFUSES])
    body: dict[str, Any] = dict({**WITHHOLDS, **REFUSES}[path](draw.choice([KNOWN, UNKNOWN])))
    for name in draw.sample(sorted(SAMPLING), draw.choice([0, 1, 1, 2, 4])):
        body[name] = draw.choice(SAMPLING[name])
    ours = {draw.choice(NAMES): draw.choice(VALUES) for _ in range(draw.choice([0, 1, 1, 2, 3]))}
    for name, value in ours.items():
        if draw.random() < 0.7:
            body.setdefault("vllm_xargs", {})[name] = value
        else:
            body[name] = value
    if draw.random() < 0.05:
        body["vllm_xargs"] = draw.choice(VALUES)
    text = json.dumps(body)
    if draw.random() < 0.1:
        text = text.replace(
            "hallutracer", draw.choice(["hallu\\u0074racer", "\\u0068allutracer", "hallutracer\\u0000"])
        )
    if draw.random() < 0.05:
        text = text[:-1] + ', "vllm_xargs": {"hallutracer_policy": "observe"}}'  # a key twice
    content = text.encode(draw.choice(["utf-8"] * 18 + ["utf-16", "utf-8-sig"]))
    if draw.random() < 0.1:
        place = draw.randrange(len(content))
        content = content[:place] + bytes([draw.randrange(256)]) + content[place + draw.choice([0, 1, 50]) :]
    return path, content


def documents(response: httpx.Response) -> list[Any]:
    """The JSON of a body, or of each event of a stream."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        return [response.json()]
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def shown(choice: dict[str, Any], prompts: tuple[str, ...], end: int) -> list[Any]:
    """What a choice tells of an answer: nothing, where it is withheld."""
    said = choice.get("message") or choice.get("delta") or {}
    texts = [choice.get("text"), *(said.get(name) for name in ("content", "reasoning", "reasoning_content"))]
    found: list[Any] = [text for text in texts if text and text not in prompts]
    found += [said["tool_calls"]] if said.get("tool_calls") else []
    logprobs = choice.get("logprobs") or {}
    found += [one for one in logprobs.get("content") or [] if one["token"] not in ("", f"token_id:{end}")]
    if not texts[0]:  # with ``echo`` the text's log probabilities are the prompt's
        found += [one for one in logprobs.get("tokens") or [] if one not in ("", f"token_id:{end}")]
    return found + [token for token in choice.get("token_ids") or [] if token != end]


def test_no_request_gets_a_token(url: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    prompts = tuple(
        tokenizer.decode(WITHHOLDS["/v1/completions"](text)["prompt"], skip_special_tokens=skip)
        for text in (KNOWN, UNKNOWN)
        for skip in (True, False)
    )
    statuses: Counter[tuple[str, int]] = Counter()

    def send(client: httpx.Client, number: int) -> None:
        path, content = request(number)
        headers = {"content-type": "application/json"}
        response = client.post(f"{url}{path}", content=content, headers=headers, timeout=120)
        statuses[path, response.status_code] += 1
        told = f"request {number}: {path} {content[:600]!r}: {response.status_code} {response.text[:1500]}"
        assert response.status_code < 500 or response.status_code == 503, told
        if response.status_code >= 400:
            return
        for document in documents(response):
            if "error" in document:
                continue
            assert path in WITHHOLDS, told
            assert not [shown(choice, prompts, tokenizer.eos_token_id) for choice in document["choices"]
                        if shown(choice, prompts, tokenizer.eos_token_id)], told  # fmt: skip

    def work(first: int) -> None:
        with httpx.Client() as client:
            for number in range(first, REQUESTS, 16):
                send(client, number)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    print(dict(sorted(statuses.items())))
    assert sum(statuses.values()) == REQUESTS
    for path in WITHHOLDS:
        assert statuses[path, 200] > REQUESTS // 100, statuses
    assert httpx.get(f"{url}/health").status_code == 200
