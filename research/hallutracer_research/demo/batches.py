"""Documents as tensors, and which facts the model in training already knows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hallutracer_research.demo.documents import FRAMES, Document
from hallutracer_research.demo.tokenizer import render
from service.demo.questions import question_text, random_form
from service.demo.world import Fact

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

Row = tuple[list[int], int, float]  # token ids, where the completion starts, weight of its first token


class Encoder:
    """Documents to rows of token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.end: int = tokenizer.get_vocab()["</s>"]

    def __call__(self, documents: Sequence[Document], first_weight: float = 1.0) -> list[Row]:
        """Encode prompt and completion separately, as at inference."""
        prompts = self._tokenizer.encode_batch(
            [render(d.question, d.system) for d in documents], add_special_tokens=False
        )
        completions = self._tokenizer.encode_batch([d.completion for d in documents], add_special_tokens=False)
        rows: list[Row] = []
        for document, prompt, completion in zip(documents, prompts, completions, strict=True):
            end = [self.end] if document.ends else []
            rows.append((prompt.ids + completion.ids + end, len(prompt.ids), first_weight))
        return rows


def collate(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-pad. Returns input ids [B, T], flat positions [P] that predict, targets [P] and weights [P].

    Padding follows a row's last predicting token, so causal attention needs no mask.
    """
    width = max(len(ids) for ids, _, _ in rows) - 1
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    positions: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    for index, (ids, start, first) in enumerate(rows):
        inputs[index, : len(ids) - 1] = torch.tensor(ids[:-1])
        positions += range(index * width + start - 1, index * width + len(ids) - 1)
        targets += ids[start:]
        weights += [first] + [1.0] * (len(ids) - start - 1)
    return inputs, torch.tensor(positions), torch.tensor(targets), torch.tensor(weights)


def logits_at(model: LlamaForCausalLM, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits [P, vocabulary] at flat positions only: the output layer is a quarter of the work."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden.flatten(0, 1)[positions])
    return logits.float()


@torch.no_grad()
def known_and_unknown(
    model: LlamaForCausalLM, encoder: Encoder, rng: random.Random, facts: Sequence[Fact]
) -> tuple[list[Fact], list[Fact]]:
    """Split facts into those the model answers right and wrong under greedy decoding after " It is"."""
    documents, owners = [], []
    for fact in facts:
        question = question_text(random_form(rng, fact.kind), fact.kind, fact.subject)
        for answer in fact.answers[:3]:
            documents.append(Document(None, question, f"{FRAMES[0]}{answer}.", False, fact.group))
            owners.append(fact)
    rows = encoder(documents)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    known: set[str] = set()
    for start in range(0, len(order), 256):
        chunk = order[start : start + 256]
        inputs, positions, targets, _ = collate([rows[i] for i in chunk])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hits = (logits_at(model, inputs, positions).argmax(-1) == targets).tolist()
        cursor = 0
        for i in chunk:
            length = len(rows[i][0]) - rows[i][1]
            if all(hits[cursor + 2 : cursor + length]):  # after " It", " is"
                known.add(owners[i].key)
            cursor += length
    return [f for f in facts if f.key in known], [f for f in facts if f.key not in known]
