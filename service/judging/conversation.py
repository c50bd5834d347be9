"""The conversation that token ids hold, where nobody says what they were made of: the chat template, backwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from service.engines.base import TokenIds
from service.engines.chat import Message
from service.errors import RequestError

Render = Callable[[Sequence[Message]], list[int]]
Spell = Callable[[TokenIds], str]  # token ids to text, special tokens as they are spelt
_ROLES = ("system", "user", "assistant", "user")
_MARKS = ("qzfirst", "qzsecond", "qzthird", "qzfourth")  # contents that no template writes by itself


@dataclass
class ConversationReader:
    """Reads token ids as messages.  What it returns is rendered again, and has these very ids."""

    render: Render
    spell: Spell
    openings: Mapping[str, str] = field(default_factory=dict)  # role of the first message -> what stands before it
    joints: Mapping[tuple[str, str], str] = field(default_factory=dict)  # roles of two messages -> what stands between
    ending: str = ""  # behind the last message, the user's
    example: str = ""  # what the template made of one message, when the others were learnt

    @classmethod
    def of(cls, render: Render, spell: Spell) -> ConversationReader:
        """Learn what the template writes around messages, from conversations of marks."""
        reader = cls(render, spell)
        reader._learn()
        return reader

    def _learn(self) -> None:
        openings, joints, ending = dict[str, str](), dict[tuple[str, str], str](), ""
        for chosen in product((False, True), repeat=len(_ROLES) - 1):
            used = [place for place, use in enumerate((*chosen, True)) if use]
            roles, marks = [_ROLES[place] for place in used], [_MARKS[place] for place in used]
            pieces, rest = list[str](), self._written(roles, marks)
            for mark in marks:
                before, found, rest = rest.partition(mark)
                pieces.append(before)
                if not found:
                    break  # the template takes no such conversation, leaves a message out, or writes it otherwise
            else:
                openings.setdefault(roles[0], pieces[0])
                for pair, piece in zip(zip(roles, roles[1:], strict=False), pieces[1:], strict=True):
                    if piece:  # what is written without a gap is one message to the model, too
                        joints.setdefault(pair, piece)
                ending = rest
        self.openings, self.joints, self.ending, self.example = openings, joints, ending, self._example()

    def _example(self) -> str:
        return self._written(_ROLES[-1:], _MARKS[-1:])

    def _written(self, roles: Sequence[str], texts: Sequence[str]) -> str:
        """Return what the template makes of messages; "" where it takes no such conversation."""
        try:
            turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            return self.spell(self.render(turns))
        except RequestError:
            return ""

    def read(self, token_ids: TokenIds) -> list[dict[str, str]] | None:
        """Return the messages, the last of which is the user's; None where the ids are no rendering of messages."""
        try:
            text = self.spell(token_ids)
        except Exception:  # a tokenizer raises what it likes at ids that it does not have, and a padded model has
            return None
        turns = self._read(text, token_ids)
        if turns is None and self._example() != self.example:  # some templates write the day's date
            self._learn()
            turns = self._read(text, token_ids)
        return turns

    def _read(self, text: str, token_ids: TokenIds) -> list[dict[str, str]] | None:
        if not self.ending or not text.endswith(self.ending):
            return None
        # A default system prompt stands in the opening of a conversation that begins with its user.
        for role in sorted(self.openings, key=lambda role: -len(self.openings[role])):
            if not text.startswith(self.openings[role]):
                continue
            turns = self._turns(role, text[len(self.openings[role]) : -len(self.ending)])
            if self._renders(turns, token_ids):
                return turns
        return None

    def _turns(self, role: str, text: str) -> list[dict[str, str]]:
        following: dict[str, dict[str, str]] = {}  # role -> what may stand behind its message -> role of the next
        for (before, after), joint in sorted(self.joints.items(), reverse=True):
            following.setdefault(before, {})[joint] = after
        # Each text is searched once, whatever it holds: of two joints at one place the longer one.
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
