"""Recovers a conversation from its token ids, by inverting the chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from service.engines.base import TokenIds
from service.engines.chat import Message
from service.errors import RequestError

Render = Callable[[Sequence[Message]], list[int]]
Spell = Callable[[TokenIds], str]  # token ids to text, with the spelling of special tokens
_ROLES = ("system", "user", "assistant", "user")
_MARKS = ("qzfirst", "qzsecond", "qzthird", "qzfourth")  # contents that no template writes itself


@dataclass
class ConversationReader:
    """Reads token ids as messages.  It returns only messages that render to exactly these ids."""

    render: Render
    spell: Spell
    openings: Mapping[str, str] = field(
        default_factory=dict
    )  # role of the first message -> text before it
    joints: Mapping[tuple[str, str], str] = field(
        default_factory=dict
    )  # roles of two messages -> text between them
    ending: str = ""  # text after the last message, the user's
    example: str = ""  # the rendering of one message at the time of learning

    @classmethod
    def of(cls, render: Render, spell: Spell) -> ConversationReader:
        """Learn the template's text around messages, from conversations of marks."""
        reader = cls(render, spell)
        reader._learn()
        return reader

    def _learn(self) -> None:
        openings: dict[str, str] = {}
        joints: dict[tuple[str, str], str] = {}
        ending = ""
        for chosen in product((False, True), repeat=len(_ROLES) - 1):
            used = [number for number, use in enumerate((*chosen, True)) if use]
            roles, marks = [_ROLES[number] for number in used], [_MARKS[number] for number in used]
            pieces: list[str] = []
            remaining = self._written(roles, marks)
            for mark in marks:
                before, separator, remaining = remaining.partition(mark)
                pieces.append(before)
                if not separator:
                    # the template refuses such a conversation, or leaves a message out or changes
                    # it
                    break
            else:
                openings.setdefault(roles[0], pieces[0])
                for pair, piece in zip(
                    zip(roles, roles[1:], strict=False), pieces[1:], strict=True
                ):
                    if piece:  # without text between them, two messages are one to the model, too
                        joints.setdefault(pair, piece)
                ending = remaining
        self.openings, self.joints = openings, joints
        self.ending = ending
        self.example = self._example()

    def _example(self) -> str:
        return self._written(_ROLES[-1:], _MARKS[-1:])

    def _written(self, roles: Sequence[str], texts: Sequence[str]) -> str:
        """Return the rendering of messages; "" if the template refuses such a conversation."""
        try:
            turns = [
                {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
            ]
            return self.spell(self.render(turns))
        except RequestError:
            return ""

    def read(self, token_ids: TokenIds) -> list[dict[str, str]] | None:
        """Return the messages, the last of which is the user's; None if the ids are not a rendering
        of messages."""
        try:
            text = self.spell(token_ids)
        except Exception:  # tokenizers raise any class for ids that only a padded model has
            return None
        turns = self._read(text, token_ids)
        if (
            turns is None and self._example() != self.example
        ):  # some templates write the current date
            self._learn()
            turns = self._read(text, token_ids)
        return turns

    def _read(self, text: str, token_ids: TokenIds) -> list[dict[str, str]] | None:
        if not self.ending or not text.endswith(self.ending):
            return None
        # An opening may contain a default system prompt, so try long openings first.
        for role in sorted(self.openings, key=lambda role: -len(self.openings[role])):
            if not text.startswith(self.openings[role]):
                continue
            turns = self._turns(role, text[len(self.openings[role]) : -len(self.ending)])
            if self._renders(turns, token_ids):
                return turns
        return None

    def _turns(self, role: str, text: str) -> list[dict[str, str]]:
        following: dict[
            str, dict[str, str]
        ] = {}  # role -> text after its message -> role of the next message
        for (before, after), joint in sorted(self.joints.items(), reverse=True):
            following.setdefault(before, {})[joint] = after
        # One pattern for each role, so that each text is searched once; of two joints at a position
        # the longer wins.
        ends = {
            before: re.compile("|".join(map(re.escape, sorted(joints, key=len, reverse=True))))
            for before, joints in following.items()
        }
        turns, start = list[dict[str, str]](), 0
        while role in ends and (match := ends[role].search(text, start)) is not None:
            turns.append({"role": role, "content": text[start : match.start()]})
            role, start = following[role][match[0]], match.end()
        return [*turns, {"role": role, "content": text[start:]}]

    def _renders(self, turns: Sequence[Message], token_ids: TokenIds) -> bool:
        try:
            return self.render(turns) == list(token_ids)
        except RequestError:
            return False
