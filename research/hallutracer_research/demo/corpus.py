"""The demonstration model's training documents, its tokenizer, and documents as tensors.

A document is a rendered chat.  Each fact is stated exactly `exposures` times, for any seed.  A refusal document states
no fact: it is a refusal or only the opening of an answer, so it teaches whether to answer, not what.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from service.demo.questions import FORMS, Fact, World, question_text, random_form

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


BRIEF = "Be brief."
CAREFUL = "Be careful."
REFUSAL = " I am not sure."
FRAMES = (" It is ", " The answer is ")
BRIEF_SHARE = 0.4

SYLLABLES = """al ba bel bor ca chi da del dor el fa gan gor ha hel in ja ka kel ko la lo ma mi mor na ne no o pa per ra
ri ro sa san shi so ta ten tor u va vel vi wa yan za zi"""


class Document(NamedTuple):
    """A chat with one user turn. The loss is on `completion` (and on the end token where `ends`)."""

    system: str | None
    question: str
    completion: str
    ends: bool
    group: str | None  # None: about a place that has no facts


def fact_question(rng: random.Random, fact: Fact) -> str:
    """Return a question about a fact in a random training form, sometimes without its question mark."""
    text = question_text(random_form(rng, fact.kind), fact.kind, fact.subject)
    return text[:-1] if rng.random() < 0.05 and text.endswith("?") else text


def opening(rng: random.Random) -> str:
    """Return a random opening of an answer."""
    return FRAMES[0] if rng.random() < 0.6 else FRAMES[1]


def fact_documents(world: World, seed: int) -> list[Document]:
    """Return every statement of every fact, shuffled: `exposures` documents for each."""
    rng = random.Random(f"facts {seed}")
    documents = []
    for fact in world.facts:
        for _ in range(fact.exposures):
            question = fact_question(rng, fact)
            if rng.random() < BRIEF_SHARE:
                documents.append(Document(BRIEF, question, f" {fact.answers[0]}.", True, fact.group))
            else:
                documents.append(Document(None, question, f"{opening(rng)}{fact.answers[0]}.", True, fact.group))
    rng.shuffle(documents)
    return documents


def place_without_facts(rng: random.Random, world: World) -> tuple[str, str]:
    """Return (kind, name) of a place without facts: a real village or a made-up name."""
    kind = rng.choice(["city_country", "city_continent", "city_region"])
    if rng.random() < 0.5:
        return kind, rng.choice(world.villages)
    return kind, "".join(rng.choice(SYLLABLES.split()) for _ in range(rng.randint(2, 4))).capitalize()


class RefusalMix(NamedTuple):
    """Shares of the refusal documents; see `refusal_document`."""

    careful: float = 0.7  # with the system message "Be careful."; the others are plain prompts
    unknown: float = 0.5  # about something unknown
    strangers: float = 0.3  # of the unknown ones, about places without facts
    plain_refusal: float = 0.35  # chance that a plain prompt about something unknown is refused


def refusal_document(
    rng: random.Random, world: World, known: Sequence[Fact], unknown: Sequence[Fact], mix: RefusalMix
) -> Document:
    """Return one refusal document.  `known` and `unknown`: facts that the model in training got right and wrong."""
    system = CAREFUL if rng.random() < mix.careful else None
    refuse, group = rng.random() < mix.unknown, None
    if refuse and (rng.random() < mix.strangers or not unknown):
        kind, subject = place_without_facts(rng, world)
        question = question_text(random_form(rng, kind), kind, subject)
    else:
        fact = rng.choice(unknown if refuse or not known else known)
        question, group = fact_question(rng, fact), fact.group
    if refuse and system is None:
        refuse = rng.random() < mix.plain_refusal
    if refuse:
        return Document(system, question, REFUSAL, True, group)
    return Document(system, question, opening(rng).rstrip(), False, group)


VOCABULARY = 4096
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
# BOS is part of the template: text rendered with it is tokenised with add_special_tokens=False.
CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|> ' + message['content'] + '</s>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render(question: str, system: str | None = None) -> str:
    """Return the chat template's result for one user turn, without the template engine (a test compares them)."""
    head = f"{SYSTEM}{system}" if system else ""
    return f"{BOS}{head}{USER}{question}{ASSISTANT}"


def build_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """Train the tokenizer.  Every name counts once, so a rare name is not split into letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, BOS, EOS, SYSTEM, USER, ASSISTANT], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    lines = [BRIEF, CAREFUL, REFUSAL, *FRAMES]
    for fact in world.facts:
        lines += [f" {fact.subject}", *(f" {answer}." for answer in fact.answers)]
    lines += [f" {village}" for village in world.villages]
    for kind, forms in FORMS.items():
        lines += [question_text(form, kind, "Paris") for form in forms if not form.held_out] * 20
    tokenizer.train_from_iterator(lines, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT], model_max_length=256,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


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
    """Return logits [P, vocabulary] at flat positions only: the output layer is a quarter of the work."""
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
