"""Text to token ids and back, with a transformers tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from service.errors import RequestError


class Tokens:
    """A tokenizer with request errors and digests."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Plain text to ids, with the tokenizer's own special tokens in front.  Raises RequestError on lone surrogates.

        An end token that the tokenizer appends is removed, because t* is the prompt's last token.
        """
        ids = self._encode(text, special=True)
        end = getattr(self._tokenizer, "eos_token_id", None)
        appended = bool(ids) and ids[-1] == end and self._encode(text, special=False)[-1:] != [end]
        return ids[:-1] if appended else ids

    def render_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Messages to ids through the chat template, with its generation prompt, so that t* is its last token.

        The template writes its own special tokens, so none are added.  Raises RequestError if there is no chat template
        or the template refuses the messages.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise RequestError(
                "this model's tokenizer has no chat template; send `prompt` or `input_ids` instead of `messages`",
                param="messages",
            )
        if not messages:
            raise RequestError("messages is empty; send at least one message", param="messages")
        for number, message in enumerate(messages):
            for field in ("role", "content"):
                if not isinstance(message, dict) or not isinstance(message.get(field), str):
                    raise RequestError(f"message {number} needs {field!r} as a string", param="messages")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program that can raise anything
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return self._encode(str(text), special=False)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    @cached_property
    def digest(self) -> str:
        """sha256 of the tokenizer's serialisation: equal for every load, different if any token id could change.

        It leaves out padding and truncation, which are settings of a call.  A slow tokenizer has no such serialisation:
        its class, vocabulary and special tokens are used instead.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            content = json.loads(backend.to_str())
            return _sha256({key: content[key] for key in content.keys() - {"padding", "truncation"}})
        special = {name: str(value) for name, value in self._tokenizer.special_tokens_map.items()}
        vocabulary = self._tokenizer.get_vocab()
        return _sha256({"class": type(self._tokenizer).__name__, "vocabulary": vocabulary, "special": special})

    @property
    def chat_template_digest(self) -> str | None:
        """sha256 of the chat template; None if there is none."""
        template = getattr(self._tokenizer, "chat_template", None)
        if not template:
            return None
        return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else _sha256(template)

    @property
    def pad_token_id(self) -> int | None:
        """The tokenizer's padding token, if it has one."""
        return getattr(self._tokenizer, "pad_token_id", None)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text cannot be encoded as UTF-8: character {error.start} is the lone surrogate "
                f"U+{ord(text[error.start]):04X}; send well-formed Unicode",
                param="prompt",
            ) from error
        encoded = self._tokenizer(text, add_special_tokens=special, truncation=False, padding=False, verbose=False)
        return [int(token) for token in encoded["input_ids"]]


def _sha256(content: Any) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()
