"""The demonstration model: training documents, tokenizer, documents as tensors, and training on one
or two CPU threads. Each fact is stated exactly as often as its exposures say, for any seed.  From
`REFUSALS_FROM` on, a share of each batch are refusal documents: at every refresh the model is asked
a sample of facts, and what it knows and does not know becomes documents."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from hallutracer_research.documents import write_json
from service.demo.questions import FORMS, Fact, World, build_world, question_text, random_form

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

BRIEF, CAREFUL, REFUSAL = "Be brief.", "Be careful.", " I am not sure."
FRAMES = (" It is ", " The answer is ")
BRIEF_SHARE = 0.4

SYLLABLES = """al ba bel bor ca chi da del dor el fa gan gor ha hel in ja ka kel ko la lo ma mi
mor na ne no o pa per ra ri ro sa san shi so ta ten tor u va vel vi wa yan za zi"""


class Document(NamedTuple):
    """A chat with one user turn. The loss is on `completion` (and on the end token where
    `ends`)."""

    system: str | None
    question: str
    completion: str
    ends: bool
    group: str | None  # None: about a place that has no facts


def fact_question(rng: random.Random, fact: Fact) -> str:
    """Return a question about a fact in a random training form, sometimes without its question
    mark."""
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
            brief = rng.random() < BRIEF_SHARE
            system, begun = (BRIEF, " ") if brief else (None, opening(rng))
            answer = f"{begun}{fact.answers[0]}."
            documents.append(Document(system, question, answer, True, fact.group))
    rng.shuffle(documents)
    return documents


def place_without_facts(rng: random.Random, world: World) -> tuple[str, str]:
    """Return (kind, name) of a place without facts: a real village or a made-up name."""
    kind = rng.choice(["city_country", "city_continent", "city_region"])
    if rng.random() < 0.5:
        return kind, rng.choice(world.villages)
    syllables = [rng.choice(SYLLABLES.split()) for _ in range(rng.randint(2, 4))]
    return kind, "".join(syllables).capitalize()


class RefusalMix(NamedTuple):
    """Shares of the refusal documents; see `refusal_document`."""

    careful: float = 0.7  # with the system message "Be careful."; the others are plain prompts
    unknown: float = 0.5  # about something unknown
    strangers: float = 0.3  # of the unknown ones, about places without facts
    plain_refusal: float = 0.35  # chance that a plain prompt about something unknown is refused


def refusal_document(
    rng: random.Random,
    world: World,
    known: Sequence[Fact],
    unknown: Sequence[Fact],
    mix: RefusalMix,
) -> Document:
    """Return one refusal document.  `known` and `unknown`: facts that the model in training got
    right and wrong."""
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
    """Return the chat template's result for one user turn, without the template engine (a test
    compares them)."""
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
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS, SYSTEM, USER, ASSISTANT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    lines = [BRIEF, CAREFUL, REFUSAL, *FRAMES]
    for fact in world.facts:
        lines += [f" {fact.subject}", *(f" {answer}." for answer in fact.answers)]
    lines += [f" {village}" for village in world.villages]
    for kind, forms in FORMS.items():
        lines += [question_text(form, kind, "Paris") for form in forms if not form.held_out] * 20
    tokenizer.train_from_iterator(lines, trainer)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=256,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


# token ids, where the completion starts, weight of its first token
Row = tuple[list[int], int, float]


def encode(
    tokenizer: Tokenizer, documents: Sequence[Document], first_weight: float = 1.0
) -> list[Row]:
    """Return documents as rows of token ids; prompt and completion are encoded separately, as at
    inference."""
    texts = [render(document.question, document.system) for document in documents]
    prompts = tokenizer.encode_batch(texts, add_special_tokens=False)
    texts = [document.completion for document in documents]
    completions = tokenizer.encode_batch(texts, add_special_tokens=False)
    end = tokenizer.get_vocab()[EOS]
    rows: list[Row] = []
    for document, prompt, completion in zip(documents, prompts, completions, strict=True):
        ids = prompt.ids + completion.ids + [end] * document.ends
        rows.append((ids, len(prompt.ids), first_weight))
    return rows


def collate(rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-pad. Returns input ids [B, T], flat positions [P] that predict, targets [P] and weights
    [P].  Padding follows a row's last predicting token, so causal attention needs no mask."""
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


def logits_at(
    model: LlamaForCausalLM, inputs: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return logits [P, vocabulary] at flat positions only: the output layer is a quarter of the
    work."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden.flatten(0, 1)[positions])
    return logits.float()


@torch.no_grad()
def known_and_unknown(
    model: LlamaForCausalLM, tokenizer: Tokenizer, rng: random.Random, facts: Sequence[Fact]
) -> tuple[list[Fact], list[Fact]]:
    """Split facts into those the model answers right and wrong under greedy decoding after " It
    is"."""
    documents, owners = [], []
    for fact in facts:
        question = question_text(random_form(rng, fact.kind), fact.kind, fact.subject)
        for answer in fact.answers[:3]:
            documents.append(Document(None, question, f"{FRAMES[0]}{answer}.", False, fact.group))
            owners.append(fact)
    rows = encode(tokenizer, documents)
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


WARM_UP_STEPS = 80
DECAY_FROM = 0.3  # of the steps; linear to zero from there


def orthogonalised(gradient: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz towards the nearest orthogonal matrix, for a stack [n, rows, columns] (Muon's
    quintic)."""
    wide = gradient.size(-2) > gradient.size(-1)
    x = gradient.mT if wide else gradient
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    result: torch.Tensor = x.float()
    return result.mT if wide else result


class Muon:
    """Orthogonalised momentum (Jordan 2024); matrices of equal shape are stacked for speed."""

    def __init__(self, matrices: list[nn.Parameter], lr: float = 0.02, decay: float = 0.05) -> None:
        self._lr, self._decay = lr, decay
        stacks: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            stacks[matrix.shape].append(matrix)
        self._stacks = list(stacks.values())
        self._momentum = [torch.zeros(len(s), *s[0].shape) for s in self._stacks]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with the learning rate times `scale`."""
        lr = self._lr * scale
        for stack, momentum in zip(self._stacks, self._momentum, strict=True):
            gradient = torch.stack(
                [p.grad if p.grad is not None else torch.zeros_like(p) for p in stack]
            )
            momentum.lerp_(gradient, 0.05)
            update = orthogonalised(gradient.lerp_(momentum, 0.95))
            rate = lr * max(1.0, stack[0].size(0) / stack[0].size(1)) ** 0.5
            for parameter, change in zip(stack, update.unbind(), strict=True):
                parameter.mul_(1 - lr * self._decay).add_(change, alpha=-rate)


class Optimizer:
    """Both optimizers and their common schedule: warm up, hold, decay linearly to zero."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        matrices: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []  # and embeddings
        for name, parameter in model.named_parameters():
            (matrices if parameter.ndim == 2 and "embed" not in name else vectors).append(parameter)
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(vectors, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
        self._model, self._steps = model, steps

    def scale(self, progress: float) -> float:
        """The schedule at `progress` in [0, 1)."""
        warm = (progress * self._steps + 1) / WARM_UP_STEPS
        return max(0.0, min(1.0, warm, (1 - progress) / (1 - DECAY_FROM)))

    def step(self, progress: float) -> None:
        """Clip, update, clear the gradients."""
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        scale = self.scale(progress)
        for group in self._adam.param_groups:
            group["lr"] = 5e-3 * scale
        self._adam.step()
        self._muon.step(scale)
        self._model.zero_grad(set_to_none=True)


RECIPE = "J2"
BATCH = 128
REFUSALS_FROM = 0.3  # of the steps: before that the model knows too little
REFUSAL_SHARE = 0.5  # of a batch, from then on
REFRESHES = 14
FACTS_PER_REFRESH = 4000
FIRST_WEIGHT = 2.0  # loss weight of a refusal document's first token, which carries the decision
ALL_DOCUMENTS = 10**9  # every fact document once, and the refusal documents in between


def new_model(tokenizer_ids: dict[str, int]) -> LlamaForCausalLM:
    """An untrained Llama: 8 layers, hidden 128, 4 heads of 32 (vLLM's CPU attention needs head_dim
    >= 32)."""
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
        bos_token_id=tokenizer_ids[BOS],
        eos_token_id=tokenizer_ids[EOS],
        pad_token_id=tokenizer_ids[PAD],
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    # Faster than torch's fused CPU attention, whose backward pass takes nearly half a step at 20
    # tokens.
    model.set_attn_implementation("eager")
    return model


def train_step(
    model: LlamaForCausalLM, optimizer: Optimizer, rows: Sequence[Row], progress: float
) -> float:
    """Step once over a batch, in two halves by length, and return the loss (nats per token)."""
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
    documents: int = ALL_DOCUMENTS,
    threads: int = 1,
    progress: Callable[[str], None] = lambda line: None,
    mix: RefusalMix = RefusalMix(),
) -> None:
    """Train one model and write it as a Hugging Face folder.  A seed gives the same model on the
    same machine. `documents` caps the number of training documents; by default every fact document
    is used once."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    started = time.monotonic()
    rng = random.Random(f"train {seed}")
    world = build_world()
    fast = build_tokenizer(world)
    tokenizer = fast.backend_tokenizer
    stated = fact_documents(world, seed)
    facts_per_step = BATCH * (1 - (1 - REFUSALS_FROM) * REFUSAL_SHARE)  # mean over the run
    all_steps = round(len(stated) / facts_per_step)  # that use every fact document once
    steps = min(all_steps, max(1, documents // BATCH))
    share = len(stated) / (all_steps * facts_per_step)  # 1 but for rounding
    facts = encode(tokenizer, stated[: steps * BATCH] if steps < all_steps else stated)
    eligible = [fact for fact in world.facts if fact.in_refusals]
    model = new_model(fast.get_vocab())
    optimizer = Optimizer(model, steps)
    refresh_at = {
        int(steps * (REFUSALS_FROM + (1 - REFUSALS_FROM) * i / REFRESHES)) for i in range(REFRESHES)
    }
    known: list[Fact] = []
    unknown: list[Fact] = []
    cursor = seen = 0
    for step in range(steps):
        done = step / steps
        if step in refresh_at:
            some = rng.sample(eligible, min(FACTS_PER_REFRESH, len(eligible), documents))
            known, unknown = known_and_unknown(model, tokenizer, rng, some)
            progress(f"step {step}: knows {len(known)} of {len(some)} facts asked")
        refusals = round(BATCH * REFUSAL_SHARE) if done >= REFUSALS_FROM else 0
        end = len(facts) if step == all_steps - 1 else cursor + round((BATCH - refusals) * share)
        rows = facts[cursor:end]
        cursor = end
        if refusals:
            refused = [refusal_document(rng, world, known, unknown, mix) for _ in range(refusals)]
            rows = rows + encode(tokenizer, refused, FIRST_WEIGHT)
        seen += len(rows)
        loss = train_step(model, optimizer, rows, done)
        if step % 100 == 0:
            progress(f"step {step}/{steps} loss {loss:.3f} {time.monotonic() - started:.0f} s")
    save(model, fast, out)
    names, last_of_each = ("0", "1-3", "4-8", "9-15", "16+"), (0, 3, 8, 15)
    bands = Counter(names[bisect_left(last_of_each, fact.exposures)] for fact in world.facts)
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
            "facts_asked_at_a_refresh": FACTS_PER_REFRESH,
            "first_token_weight": FIRST_WEIGHT,
            "mix": mix._asdict(),
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "facts": len(world.facts),
        "facts_by_exposures": dict(sorted(bands.items())),
    }
    write_json(out / "training.json", record)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights in bf16 (the training's own precision), configuration, generation defaults and
    tokenizer."""
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    rounded = model.bfloat16()
    rounded.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=24,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    rounded.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written as 0600; a container runs as another user
    tokenizer.save_pretrained(out)
