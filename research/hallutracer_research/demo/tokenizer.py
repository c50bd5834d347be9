"""The demonstration model's tokenizer: byte-level BPE over the world's names and the question forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hallutracer_research.demo.documents import BRIEF, CAREFUL, FRAMES, REFUSAL
from service.demo.questions import FORMS, question_text
from service.demo.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
    """The chat template's result for one user turn, without the template engine (a test compares them)."""
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
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
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
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
