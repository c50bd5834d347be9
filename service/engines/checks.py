"""What all engines share: text to token ids by a tokenizer, checks of what is asked, and the first
token's numbers."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from probes_store.records import TemplateArgument
from service.engines.base import (
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    FirstToken,
    LoadedModel,
    Prompts,
    Sampling,
)
from service.engines.chat import (
    Message,
    ToolDefinition,
    check_messages,
    check_shown,
    check_turns,
    message_with,
    replaced,
    turns_left_out,
)
from service.errors import (
    EmptyPrompt,
    EngineError,
    ModelLoadError,
    NonFiniteReadout,
    PromptTooLong,
    RequestError,
)
from service.readout import Geometry, Pooling, Probes

if TYPE_CHECKING:
    from torch import Tensor

SEGMENT = 65_536  # characters encoded at a time to find out whether a text is far too long


def check_length(texts: Sequence[str], engine: LoadedModel) -> None:
    """Raise PromptTooLong for texts of over twice the context's tokens, encoded in pieces at the
    cost of so many."""
    most = engine.identity.max_tokens
    segment = max(SEGMENT, 4 * most)
    if sum(map(len, texts)) <= segment:
        return
    tokens = 0
    for text in texts:
        for start in range(0, len(text), segment):
            tokens += len(engine.tokenize(text[start : start + segment]))
            if tokens > 2 * most:
                raise _too_long("the prompt has more than", tokens, most)


def _too_long(what: str, tokens: int, most: int) -> PromptTooLong:
    # As Anthropic's clients and OpenAI's know it: many act on these words.
    return PromptTooLong(
        f"prompt is too long: {tokens} tokens > {most} maximum; this model's maximum context"
        f" length is {most} tokens and {what} {tokens}: shorten the prompt, which is never"
        " truncated",
        param="prompt",
    )


def check_special_tokens(texts: Mapping[str, Sequence[str]], engine: LoadedModel) -> None:
    """Raise RequestError for the first field that spells out a special token of the model;
    ``texts`` by field."""
    if not engine.special_tokens:
        return
    spelling = spelling_of(tuple(engine.special_tokens))
    for field, written in texts.items():
        spelt = next(filter(None, map(spelling.search, written)), None)
        if spelt is not None:
            raise RequestError(
                f"{field} spells out the special token {spelt[0]!r}, which is refused here; remove"
                " it",
                param=field,
            )


@cache
def spelling_of(words: tuple[str, ...], further: str = "") -> re.Pattern[str]:
    """Return the expression for any of ``words``, the longest that fits, or one of the class
    ``further``.

    Words with the same beginning share a branch, so that its time does not grow with their number:
    a tokenizer can have thousands of special tokens, and a text can be full of what they begin
    with."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}  # a word ends here
    return re.compile("|".join(filter(None, (_branches(tree), further))))


def _branches(node: Mapping[str, Any]) -> str:
    beginning = ""
    while len(node) == 1 and "" not in node:
        ((character, node),) = node.items()
        beginning += re.escape(character)
    branches = [
        re.escape(character) + _branches(below) for character, below in node.items() if character
    ]
    if not branches:
        return beginning
    return f"{beginning}(?:{'|'.join(branches)}){'?' if '' in node else ''}"


def check_prompts(prompts: Prompts, *, vocabulary: int, max_tokens: int) -> None:
    """Raise EmptyPrompt, PromptTooLong or RequestError for the first invalid prompt, naming its
    index."""
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise EmptyPrompt(
                f"prompt {number} has no tokens; send at least one token", param="input_ids"
            )
        if len(prompt) > max_tokens:
            raise _too_long(f"prompt {number} has", len(prompt), max_tokens)
        try:
            ids = np.asarray(prompt)
        except ValueError:  # nested lists of several lengths
            ids = np.asarray(None)
        # beyond 64 bits
        large = ids.dtype.kind == "O" and all(type(token) is int for token in prompt)
        if not large and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
            raise RequestError(
                f"prompt {number} is not a flat list of integer token ids", param="input_ids"
            )
        if large or ids.min() < 0 or ids.max() >= vocabulary:
            shown = "beyond 64 bits" if large else int(ids.min() if ids.min() < 0 else ids.max())
            raise RequestError(
                f"prompt {number} holds token id {shown}; this model's vocabulary is 0 to"
                f" {vocabulary - 1}",
                param="input_ids",
            )


def check_sampling(sampling: Sampling) -> None:
    """Raise RequestError naming the invalid option."""
    for name, valid, expected in (
        ("max_tokens", sampling.max_tokens >= 1, "be at least 1"),
        (
            "temperature",
            0.0 <= sampling.temperature < float("inf"),
            "be 0 (greedy) or a positive number",
        ),
        ("top_p", 0.0 < sampling.top_p <= 1.0, "lie in (0, 1]"),
        ("seed", sampling.seed is None or -(2**63) <= sampling.seed < 2**63, "fit into 64 bits"),
    ):
        if not valid:
            raise RequestError(
                f"{name} is {getattr(sampling, name)}; it must {expected}", param=name
            )
    if len(sampling.stop) > MAX_STOPS:
        raise RequestError(
            f"stop holds {len(sampling.stop)} texts; it may hold {MAX_STOPS}", param="stop"
        )
    for stop in sampling.stop:
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise RequestError(
                f"a text of stop has {len(stop)} characters; each has to have 1 to"
                f" {MAX_STOP_CHARACTERS}",
                param="stop",
            )


def check_probe(probe: Probes, geometry: Geometry) -> None:
    """Raise EngineError, naming the array and both shapes, for probes of another geometry."""
    m = geometry.num_layers
    d = geometry.dim(probe.site)
    heads = geometry.heads(probe.site)
    for name, shape in {"head": (m,), "direction": (m, d), "bias": (m,), "scale": (m,)}.items():
        if (actual := np.shape(getattr(probe, name))) != shape:
            raise EngineError(
                f"the probes' {name} has shape {actual} where this model needs {shape} at site"
                f" {probe.site}; the bundle was fitted on another model or site: load one that"
                " matches"
            )
    if np.any((probe.head < 0) | (probe.head >= heads)):
        raise EngineError(
            f"the probes' head must lie in [0, {heads}) at site {probe.site}, not"
            f" {probe.head.tolist()}"
        )


def summarise(logits: Tensor) -> Tensor:
    """Reduce float32 logits [batch, vocab] to [batch, 3] float64: log max probability, entropy,
    greedy token."""
    import torch

    log_probabilities = torch.log_softmax(logits, dim=-1)
    largest, token = log_probabilities.max(dim=-1)
    # 0 for probabilities that underflow to 0
    entropy = torch.special.entr(log_probabilities.exp()).sum(dim=-1)
    return torch.stack([largest.double(), entropy.double(), token.double()], dim=-1)


def first_token_of(summary: Sequence[float] | np.ndarray) -> FirstToken:
    """Return a summary [3] of ``summarise``, clipped to its range after rounding.  Raises
    NonFiniteReadout."""
    if not np.isfinite(summary).all():
        raise NonFiniteReadout(
            "the first token's logits hold a NaN or infinity: load the model with dtype bfloat16"
        )
    log_max_prob, entropy, token = summary
    return FirstToken(min(0.0, float(log_max_prob)), max(0.0, float(entropy)), int(token))


def refuse_tracing(engine: str) -> NoReturn:
    """Raise EngineError: an engine that decodes, but keeps neither log-probabilities nor states of
    its answers."""
    raise EngineError(
        f"the {engine} engine keeps neither log-probabilities nor states of its answers; use the"
        " transformers engine",
        param="methods",
    )


def refuse_answer_reading(engine: str) -> NoReturn:
    """Raise EngineError: an engine that has no activations of an answer's own tokens to train
    on."""
    raise EngineError(
        f"the {engine} engine gives no answer's own tokens to train on; use the transformers one,"
        " or leave them out (--no-answer-probes)",
        param="answer_probes",
    )


def beyond_onset(poolings: Sequence[Pooling]) -> list[Pooling]:
    """Return the poolings other than last_1, each once, in a fixed order."""
    return [pooling for pooling in Pooling if pooling in poolings and pooling is not Pooling.LAST_1]


def check_onset_only(poolings: Sequence[Pooling]) -> None:
    """Raise EngineError if other poolings than last_1 are asked for: engines read t* alone."""
    if others := beyond_onset(poolings):
        raise EngineError(
            f"this engine reads only the answer onset (last_1), not {', '.join(others)};"
            " `hallutracer evaluate` on the transformers engine reads the others, too",
            param="poolings",
        )


MOST_SHAPES = 256  # sequences of roles that are remembered
# of a private plane: 1,024 different special tokens in one request
STAND_INS = ("\U000f0000", "\U000f03ff")


class Tokens:
    """A tokenizer with request errors and digests."""

    def __init__(
        self, tokenizer: Any, arguments: Mapping[str, TemplateArgument] | None = None
    ) -> None:
        """``arguments``: what the chat template is given for every chat, besides messages and
        tools.

        Raises ModelLoadError for one that the template does not read."""
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})
        if unread := [name for name in self._arguments if not self._reads(name)]:
            raise ModelLoadError(
                f"this model's chat template has no argument {unread[0]!r}: leave it out, or"
                " correct its name",
                param="chat_template_kwargs",
            )
        # the tokenizer keeps how special tokens are read, for all threads
        self._encoding = threading.Lock()
        # Roles of a conversation -> the turns that the template leaves out, whatever they say.
        self._left_out = lru_cache(MOST_SHAPES)(
            lambda roles: turns_left_out(self._templated, roles)
        )

    def tokenize(self, text: str) -> list[int]:
        """Encode plain text, without an appended end token: t* is the prompt's last.  Raises
        RequestError."""
        ids = self._encode(text, special=True)
        end = getattr(self._tokenizer, "eos_token_id", None)
        appended = bool(ids) and ids[-1] == end and self._encode(text, special=False)[-1:] != [end]
        return ids[:-1] if appended else ids

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition] = ()
    ) -> list[int]:
        """Encode messages by the chat template, generation prompt included.  Raises RequestError if
        it cannot, or if it leaves out a turn or a part of one, tools, calls of tools or their
        results.

        Special tokens that a message spells out are encoded as text: no message can end its turn
        and begin another."""
        text, turns, hidden = self._written(messages, tools)
        check_turns(text, turns, self._left_out(tuple(turn["role"] for turn in turns)))
        check_shown(self._templated, messages, tools)
        return self._reveal(text, hidden) if hidden else self._encode(text, special=False)

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[ToolDefinition] = ()
    ) -> list[int]:
        """Encode messages as ``render_chat`` does, whether or not the template shows all of
        them."""
        text, _, hidden = self._written(messages, tools)
        return self._reveal(text, hidden) if hidden else self._encode(text, special=False)

    def renders_alike(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        arguments: Mapping[str, TemplateArgument],
    ) -> bool:
        """Return whether the chat template makes the same of messages where it is given these
        arguments, too.

        Raises RequestError where it refuses the messages without them."""
        if not any(map(self._reads, arguments)):
            return True
        own = self._written(messages, tools)[0]
        try:
            return self._written(messages, tools, {**self._arguments, **arguments})[0] == own
        except RequestError:  # it refuses such a value
            return False

    def _reads(self, argument: str) -> bool:
        """Return whether the chat template names an argument."""
        template = getattr(self._tokenizer, "chat_template", None) or ""
        return re.search(rf"\b{re.escape(argument)}\b", str(template)) is not None

    def _written(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolDefinition],
        arguments: Mapping[str, TemplateArgument] | None = None,
    ) -> tuple[str, list[dict[str, Any]], dict[str, str]]:
        """Return what the template makes of messages, these, and what stands in both for special
        tokens spelt out."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise _refused(
                "this model's tokenizer has no chat template: /v1/completions takes the text, as"
                " `prompt`, and so does /score"
            )
        if not messages:
            raise _refused("messages is empty; send at least one message")
        check_messages(messages)
        hidden: dict[str, str] = {}  # special token -> the character that stands in for it

        def stand_in(match: re.Match[str]) -> str:
            mark = hidden.setdefault(match[0], chr(ord(STAND_INS[0]) + len(hidden)))
            if mark > STAND_INS[1]:
                raise _refused("the messages spell out too many special tokens")
            return mark

        def hide(text: str) -> str:
            return self._special.sub(stand_in, text)

        turns = [message_with(message, hide) for message in messages]
        return self._templated(turns, replaced(tools, hide), arguments), turns, hidden

    def special_token_in(self, texts: Iterable[str]) -> str | None:
        """Return a special token that one of the texts spells out; None where none does."""
        matches = map(self._spelling.search, texts) if self.special_tokens else ()
        return next((match[0] for match in matches if match is not None), None)

    def _templated(
        self,
        turns: Sequence[Message],
        tools: Sequence[ToolDefinition],
        arguments: Mapping[str, TemplateArgument] | None = None,
    ) -> str:
        options: dict[str, Any] = dict(self._arguments if arguments is None else arguments)
        if tools:
            options["tools"] = list(tools)
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(turns), add_generation_prompt=True, tokenize=False, **options
            )
        except Exception as error:  # a template is a program that can raise anything
            from jinja2 import TemplateSyntaxError

            if isinstance(error, TemplateSyntaxError):
                raise _refused(
                    f"this model's chat template is no valid Jinja template: {error.message}, at"
                    f" its line {error.lineno}: mend chat_template.jinja, or chat_template in"
                    " tokenizer_config.json, in the model's folder"
                ) from error
            raise _refused(f"the chat template refuses these messages: {error}") from error
        return str(rendered)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Decode ids, special tokens left out."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(token_ids), **options))

    def spell(self, token_ids: Sequence[int]) -> str:
        """Decode ids, special tokens as they are spelt."""
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    @cached_property
    def digest(self) -> str:
        """The sha256 of the serialisation without padding and truncation; of a slow one, of class
        and vocabulary."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            content = json.loads(backend.to_str())
            return _sha256(
                {key: content[key] for key in content.keys() - {"padding", "truncation"}}
            )
        special = {name: str(value) for name, value in self._tokenizer.special_tokens_map.items()}
        vocabulary = self._tokenizer.get_vocab()
        return _sha256(
            {"class": type(self._tokenizer).__name__, "vocabulary": vocabulary, "special": special}
        )

    @property
    def chat_template_digest(self) -> str | None:
        """The sha256 of the chat template; None if there is none."""
        template = getattr(self._tokenizer, "chat_template", None)
        if not template:
            return None
        return (
            hashlib.sha256(template.encode()).hexdigest()
            if isinstance(template, str)
            else _sha256(template)
        )

    @property
    def pad_token_id(self) -> int | None:
        """The tokenizer's padding token, if it has one."""
        return getattr(self._tokenizer, "pad_token_id", None)

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Every special token as it is spelt, longest first."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        spelt = {str(token.content) for token in added if token.special} | set(
            self._tokenizer.all_special_tokens
        )
        return tuple(sorted(filter(str.strip, spelt), key=len, reverse=True))

    @cached_property
    def _spelling(self) -> re.Pattern[str]:
        return spelling_of(self.special_tokens)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return spelling_of(self.special_tokens, f"[{STAND_INS[0]}-{STAND_INS[1]}]")

    def _reveal(self, text: str, hidden: Mapping[str, str]) -> list[int]:
        """Encode ``text``, each stand-in as the tokens of what it stands for.  Raises RequestError
        if it cannot."""
        _check_unicode(text)
        if not self._tokenizer.is_fast:
            raise _spelt_out(next(iter(hidden)))
        split: dict[str, list[int]] = {}
        with self._encoding:
            for special, mark in hidden.items():
                ids = self._tokenizer(special, add_special_tokens=False, split_special_tokens=True)[
                    "input_ids"
                ]
                if set(ids) & set(self._tokenizer.all_special_ids):
                    raise _spelt_out(special)
                split[mark] = [int(token) for token in ids]
            encoded = self._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        tokens: list[int] = []
        revealed = -1  # the place of the stand-in before: one takes several tokens
        for token, (start, end) in zip(
            encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            hidden_at = next((index for index in range(start, end) if text[index] in split), None)
            if hidden_at is None:
                tokens.append(int(token))
            elif end - start > 1:
                raise _spelt_out(next(iter(hidden)))
            elif hidden_at != revealed:
                revealed = hidden_at
                tokens += split[text[hidden_at]]
        return tokens

    def _encode(self, text: str, *, special: bool) -> list[int]:
        _check_unicode(text)
        with self._encoding:
            encoded = self._tokenizer(
                text, add_special_tokens=special, truncation=False, padding=False, verbose=False
            )
        return [int(token) for token in encoded["input_ids"]]


class WithTokens:
    """The methods of an engine that its tokenizer has; a scheduler's are its engine's."""

    def __init__(self, tokens: Tokens | LoadedModel) -> None:
        self.tokenize, self.render_chat = tokens.tokenize, tokens.render_chat
        self.detokenize, self.spell = tokens.detokenize, tokens.spell
        self.special_tokens, self.renders_alike = tokens.special_tokens, tokens.renders_alike


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text cannot be encoded as UTF-8: character {error.start} is the lone surrogate"
            f" U+{ord(text[error.start]):04X}; send well-formed Unicode",
            param="prompt",
        ) from error


def _refused(message: str) -> RequestError:
    return RequestError(message, param="messages")


def _spelt_out(special: str) -> RequestError:
    return _refused(
        f"a message spells out the special token {special!r}, and this model's tokenizer cannot"
        " encode it as text; remove it"
    )


def _sha256(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()
