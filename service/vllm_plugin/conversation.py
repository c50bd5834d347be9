"""The conversation that token ids hold, where a front end sends nothing else: the chat template, backwards."""

from __future__ import annotations

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


@dataclass(frozen=True)
class ConversationReader:
    """Reads token ids as messages.  What it returns is rendered again, and has these very ids."""

    render: Render
    spell: Spell
    openings: Mapping[str, str] = field(default_factory=dict)  # role of the first message -> what stands before it
    joints: Mapping[tuple[str, str], str] = field(default_factory=dict)  # roles of two messages -> what stands between
    ending: str = ""  # behind the last message, the user's

    @classmethod
    def of(cls, render: Render, spell: Spell) -> ConversationReader:
        """Learn what the template writes around messages, from conversations of marks."""
        openings, joints, ending = dict[str, str](), dict[tuple[str, str], str](), ""
        for chosen in product((False, True), repeat=len(_ROLES) - 1):
            used = [place for place, use in enumerate((*chosen, True)) if use]
            roles, marks = [_ROLES[place] for place in used], [_MARKS[place] for place in used]
            turns = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
            try:
                text = spell(render(turns))
            except RequestError:
                continue  # the template takes no such conversation
            pieces, rest = list[str](), text
            for mark in marks:
                before, found, rest = rest.partition(mark)
                pieces.append(before)
                if not found:
                    break  # it leaves a message out, or writes it otherwise
            else:
                openings.setdefault(roles[0], pieces[0])
                for pair, piece in zip(zip(roles, roles[1:], strict=False), pieces[1:], strict=True):
                    joints.setdefault(pair, piece)
                ending = rest
        return cls(render, spell, openings, joints, ending)

    def read(self, token_ids: TokenIds) -> list[dict[str, str]] | None:
        """Return the messages, the last of which is the user's; None where the ids are no rendering of messages."""
        text = self.spell(token_ids)
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
        turns = list[dict[str, str]]()
        while True:
            behind = [
                (text.find(joint), -len(joint), pair[1]) for pair, joint in self.joints.items() if pair[0] == role
            ]
            places = sorted(place for place in behind if place[0] >= 0)
            if not places:
                return [*turns, {"role": role, "content": text}]
            start, length, following = places[0]
            turns.append({"role": role, "content": text[:start]})
            role, text = following, text[start - length :]

    def _renders(self, turns: Sequence[Message], token_ids: TokenIds) -> bool:
        try:
            return self.render(turns) == list(token_ids)
        except RequestError:
            return False
