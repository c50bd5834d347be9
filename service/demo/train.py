"""Train the demonstration model on one or two CPU threads.

Facts are stated by their doses. From `REFUSALS_FROM` on, a share of each batch teaches to tell known from unknown: the
model is asked a sample of facts every so often, and its own rights and wrongs become refusal documents.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from service.demo.batches import Encoder, Row, ask_model, collate, logits_at
from service.demo.documents import RefusalMix, fact_documents, refusal_document
from service.demo.optimizer import Optimizer
from service.demo.tokenizer import VOCABULARY, build_tokenizer
from service.demo.world import Fact, build_world

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

RECIPE = "J2"
BATCH = 128
REFUSALS_FROM = 0.3  # of the steps: before that the model knows too little to be asked
REFUSAL_SHARE = 0.5  # of a batch, from then on
REFRESHES = 14
ASKED = 4000  # facts asked at a refresh
FIRST_WEIGHT = 2.0  # weight of the first token's loss in a refusal document: it carries the decision


def all_steps(fact_documents_: int) -> int:
    """Steps that use every fact document once."""
    per_step = BATCH * (1 - (1 - REFUSALS_FROM) * REFUSAL_SHARE)
    return round(fact_documents_ / per_step)


DOCUMENTS = 10**9  # the default: all fact documents, and the refusals that go with them


def new_model(tokenizer_ids: dict[str, int]) -> LlamaForCausalLM:
    """A fresh Llama: 8 layers, hidden 128, 4 heads of 32 (vLLM's CPU attention wants head_dim >= 32)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer_ids["<s>"],
        eos_token_id=tokenizer_ids["</s>"],
        pad_token_id=tokenizer_ids["<pad>"],
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    # torch's fused CPU attention spends nearly half of a step in its backward pass at 20 tokens.
    model.set_attn_implementation("eager")
    return model


def train_step(model: LlamaForCausalLM, optimizer: Optimizer, rows: Sequence[Row], progress: float) -> float:
    """One step over a batch, in two halves of similar length. Returns the loss (nats per token)."""
    rows = sorted(rows, key=lambda row: len(row[0]))
    total = sum(len(ids) - start - 1 + first for ids, start, first in rows)
    loss_sum = 0.0
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        inputs, positions, targets, weights = collate(half)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = logits_at(model, inputs, positions)
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        loss = (losses * weights).sum() / total
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += float(loss.detach())
    optimizer.step(progress)
    return loss_sum


def train_model(
    seed: int,
    out: Path,
    *,
    documents: int = DOCUMENTS,
    threads: int = 1,
    progress: Callable[[str], None] | None = None,
    mix: RefusalMix = RefusalMix(),  # noqa: B008 - immutable
) -> None:
    """Train one model and write it as a Hugging Face folder. The same seed gives the same model on one machine.

    `documents` caps the number of training documents (for tests); by default every fact document is used once.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    started = time.monotonic()
    rng = random.Random(f"train {seed}")
    world = build_world()
    fast = build_tokenizer(world)
    encoder = Encoder(fast.backend_tokenizer)
    stated = fact_documents(world, seed)
    whole = all_steps(len(stated))
    steps = min(whole, max(1, documents // BATCH))
    share = len(stated) / (whole * BATCH * (1 - (1 - REFUSALS_FROM) * REFUSAL_SHARE))  # 1 but for rounding
    facts = encoder(stated[: steps * BATCH] if steps < whole else stated)
    eligible = [fact for fact in world.facts if fact.in_refusals]
    model = new_model(fast.get_vocab())
    optimizer = Optimizer(model, steps)
    refresh_at = {int(steps * (REFUSALS_FROM + (1 - REFUSALS_FROM) * i / REFRESHES)) for i in range(REFRESHES)}
    known: list[Fact] = []
    unknown: list[Fact] = []
    cursor = seen = 0
    for step in range(steps):
        done = step / steps
        if step in refresh_at:
            known, unknown = ask_model(model, encoder, rng, rng.sample(eligible, min(ASKED, len(eligible), documents)))
            if progress:
                progress(f"step {step}: knows {len(known)} of {len(known) + len(unknown)} facts asked")
        refusals = round(BATCH * REFUSAL_SHARE) if done >= REFUSALS_FROM else 0
        upto = len(facts) if step == whole - 1 else cursor + round((BATCH - refusals) * share)
        rows = facts[cursor:upto]
        cursor = upto
        if refusals:
            made = [refusal_document(rng, world, known, unknown, mix) for _ in range(refusals)]
            rows = rows + encoder(made, FIRST_WEIGHT)
        seen += len(rows)
        loss = train_step(model, optimizer, rows, done)
        if progress and step % 100 == 0:
            progress(f"step {step}/{steps} loss {loss:.3f} {time.monotonic() - started:.0f} s")
    save(model, fast, out)
    bands = Counter(_band(fact.exposures) for fact in world.facts)
    record = {
        "recipe": RECIPE,
        "seed": seed,
        "documents": seen,
        "fact_documents": cursor,
        "refusal_documents": seen - cursor,
        "steps": steps,
        "seconds": round(time.monotonic() - started, 1),
        "threads": threads,
        "settings": {
            "batch": BATCH,
            "refusals_from": REFUSALS_FROM,
            "refusal_share": REFUSAL_SHARE,
            "refreshes": REFRESHES,
            "facts_asked_at_a_refresh": ASKED,
            "first_token_weight": FIRST_WEIGHT,
            "mix": mix._asdict(),
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "facts": len(world.facts),
        "facts_by_exposures": dict(sorted(bands.items())),
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _band(exposures: int) -> str:
    for low, high in ((0, 0), (1, 3), (4, 8), (9, 15)):
        if exposures <= high:
            return f"{low}-{high}" if high else "0"
    return "16+"


def save(model: LlamaForCausalLM, tokenizer: object, out: Path) -> None:
    """Write weights in bf16 (the training's own precision), configuration, generation defaults and tokenizer."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    out.mkdir(parents=True, exist_ok=True)
    half = model.bfloat16()
    half.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=24,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    half.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written for its owner only; a container runs as somebody else
    tokenizer.save_pretrained(out)
