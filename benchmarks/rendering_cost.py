"""What it costs in ``vllm serve`` to compare a chat's prompt with our own rendering, beside vLLM's
own.

    python -m benchmarks.rendering_cost [--model DIR] [--tokens 500,4000] [--rounds 200]

Ways to treat one chat, interleaved, as medians in ms [5th, 95th percentile] of wall-clock time on
the front end's loop:

  front end  vLLM's renderer: the request's messages parsed, the template rendered, the text encoded
  compare    ``is_rendering`` in a thread, as a request waits for it
  stall      the longest that the loop stands still meanwhile
  spelt      the search for special tokens in the request's texts, on the loop"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers.hf import HfRenderer
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tokenizers.hf import get_cached_tokenizer

from service.demo import MODEL_DIR
from service.engines.checks import Tokens
from service.vllm_plugin.note import CHATS, CURRENT, Note, read, rendered
from service.vllm_plugin.rendering import is_rendering

QUESTION = "What is the capital of the Solomon Islands, and how many people lived there in 1999?"


async def stalled(done: asyncio.Event) -> float:
    """Return the longest time in s between two turns of the loop until ``done``."""
    longest, before = 0.0, time.perf_counter()
    while not done.is_set():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    return longest


async def measure(folder: Path, lengths: list[int], rounds: int) -> None:
    """Print a row for each length of a chat, in tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens, model = Tokens(tokenizer), ModelConfig(model=str(MODEL_DIR), dtype="float32")
    model.max_model_len = 2 * max(lengths)
    renderer = HfRenderer(
        VllmConfig(model_config=model), get_cached_tokenizer(AutoTokenizer.from_pretrained(folder))
    )
    vllm = OnlineRenderer(
        model,
        renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )
    for length in lengths:
        messages = [{"role": "user", "content": QUESTION}]
        while len(tokens.encode_chat(messages)) < length:
            turns = [
                {"role": "assistant", "content": "I am not sure."},
                {"role": "user", "content": QUESTION},
            ]
            messages += turns
        body = {"messages": messages}
        taken: dict[str, list[float]] = {
            name: [] for name in ("front end", "compare", "stall", "spelt")
        }
        for _ in range(rounds):
            note = Note(route=CHATS)
            read(note, json.dumps(body).encode())
            CURRENT.set(note)
            started = time.perf_counter()
            chats, prompts = await vllm.render_chat(ChatCompletionRequest.model_validate(body))
            taken["front end"].append(time.perf_counter() - started)
            rendered([chats], prompts, ())
            chat = note.chats[note.add(prompts[0])]
            started = time.perf_counter()
            assert tokens.special_token_in(note.texts()) is None
            taken["spelt"].append(time.perf_counter() - started)
            started = time.perf_counter()
            assert await asyncio.to_thread(is_rendering, tokens, chat)
            taken["compare"].append(time.perf_counter() - started)
            watch = asyncio.create_task(stalled(done := asyncio.Event()))
            await asyncio.to_thread(is_rendering, tokens, chat)
            done.set()
            taken["stall"].append(await watch)
        cells = [
            f"{name} {np.median(of) * 1e3:.3f}"
            f" {np.round(np.percentile(of, [5, 95]) * 1e3, 3).tolist()}"
            for name, of in taken.items()
        ]
        print(
            f"{len(prompts[0]['prompt_token_ids'])} tokens, {len(messages)} messages:",
            "; ".join(cells),
        )
    renderer.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the tokenizer")
    parser.add_argument("--tokens", default="500,4000", help="lengths of chats")
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    asyncio.run(measure(given.model, [int(one) for one in given.tokens.split(",")], given.rounds))
