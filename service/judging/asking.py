"""What the last turn of a conversation asks for, by its words.

The probe ``asks`` reads the end of a prompt: behind a refused question, "go on" looks to it like small talk, and so
does a question inside a task; and the risk of a message with two questions is mostly that of the easier one.  Until
bundles are trained on such turns, these rules decide which of the readings count.  They know English and a few words
of other languages; what they do not know counts as a turn that may ask."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from service.judging.passages import has_passage, text_of

Asks = Literal["small_talk", "plain", "inside", "several", "earlier"]
"""``small_talk``: greetings, thanks, words about the two who talk.  ``plain``: one question or one request, which the
probe reads by itself.  ``inside``: words that may hold a question beside others.  ``several``: more than one question.
``earlier``: it calls for the answer to an earlier turn, which got none."""

LONGEST_READ, LONGEST_SENTENCE = 4000, 400  # characters of a text, and of a sentence, half of them from its end
LONG_TURN = 12  # words, above which a turn calls for an earlier answer only where it says so
SHORT_TURN = 6  # words, up to which "that", "please", "more" refer to an earlier turn
OWN_REQUEST = 4  # words of a request that is understood without an earlier turn, at least
CHAT = 8  # words of small talk, at most


def _words(*lines: str) -> str:
    return "|".join(word for line in lines for word in line.split())


_MARKS = "?\uff1f\u061f"  # of questions, as Chinese and Arabic write them, too
_WH = (
    r"(?:what|which|who|whom|whose|where|when|how\s+(?:many|much|old|long|far|tall|high|big|large|deep|fast|often)|"
    r"(?:what|who|where|when)['\u2019]?s|wer|wen|wem|wessen|welche[rsnm]?|wo|wann|wie\s+viele?|wie\s+hei(?:\u00df|ss)t|"
    r"quel(?:le)?s?|combien|cu[a\u00e1]l(?:es)?|qui[e\u00e9]n(?:es)?|d[o\u00f3]nde|cu[a\u00e1]ndo|"
    r"cu[a\u00e1]nt[oa]s?)"
)
_CALL = (
    r"(?:(?:please\s+)?(?:tell|give|send|show|remind)\s+(?:me|us)|"
    r"(?:please\s+)?(?:name|list|state|identify|specify)\s+(?:me\s+)?(?:the|a|all|one|two|three|its|their)|"
    r"do\s+you\s+(?:happen\s+to\s+)?know|"
    r"(?:can|could|would|will)\s+you\s+(?:please\s+)?(?:tell|say|give|name|state|list|find)|"
    r"i(?:\s+also|['\u2019]d)?\s+(?:wonder|want\s+to\s+know|need\s+(?:to\s+know|the)|"
    r"(?:would\s+)?(?:also\s+)?like\s+to\s+know)|nenne|sage?\s+mir|dis-moi|dime)"
)
_LEAD = (
    r"(?:and|also|then|now|next|plus|or|but|so|ok(?:ay)?|please|second(?:ly)?|first(?:ly)?|third(?:ly)?|finally|"
    r"additionally|p\.?\s*s|(?:one\s+more|another)(?:\s+(?:thing|question|one))?|[a-h]\)|\d[.)])"
)
_BEGINS = re.compile(rf"^\W*(?:{_LEAD}[\s\W]+)*(?:{_WH}|{_CALL})\b", re.IGNORECASE)
_ASKING = re.compile(
    rf"\b(?:{_WH}|is|are|was|were|do|does|did|can|could|has|have|had|will|would|why|how|of|in)\b", re.IGNORECASE
)
_FILLER = re.compile(
    r"^\W*(?:(?:hi|hello|hey|ok(?:ay)?|excuse\s+me|sorry)\W+)*(?:"
    r"(?:can|could|may|would)\s+(?:you|i|we)\s+(?:please\s+)?(?:help|ask|answer)\b[^?]{0,40}|"
    r"d(?:o|id)\s+you\s+(?:happen\s+to\s+)?(?:know|remember)(?:\s+(?:this|that|it|the\s+answer|by\s+any\s+chance))?|"
    r"(?:quick\s+)?(?:question|favou?r)|guess\s+what|you\s+know\s+what|how\s+are\s+you[^?]{0,20}|ready|right|yes|no|"
    r"really|what['\u2019]?s\s+up|anyone|any\s+ideas?)\W*$",
    re.IGNORECASE,
)
_EXAMPLE = re.compile(
    r"^[ \t]*(?:q|question|user|input)\s*\d*[:.)].*\n+[ \t]*(?:a|answer|assistant|output)\s*\d*[:.)][ \t]*\S.*$",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCES = re.compile(
    rf"(?<=[.!;{_MARKS}\u3002])(?<!\b[A-Z]\.)\s+|(?<=[!;{_MARKS}])(?=[A-Z])|\s(?=\(?[b-h]\)\s)|\s(?=\(?[2-9][.)]\s)"
)
_ITEM = re.compile(r"\s*(?:\(?\d{1,2}[.):]|\(?[a-h][.)]|[-*\u2022])\s+\S", re.IGNORECASE)
_FURTHER = re.compile(
    r"^\W*(?:(?:and\s+)?(?:also|additionally|second(?:ly)?|third(?:ly)?|then|next|p\.?\s*s\b)|(?:one\s+more|another|next)\s+"
    r"(?:thing|question|one)|\(?[b-h]\)|\(?[2-9][.)])(?=[\s\W])",
    re.IGNORECASE,
)
_SEVERAL = re.compile(
    r"\b(?:two|three|four|five|several|multiple|both|these|following|some)\s+questions\b", re.IGNORECASE
)
_BRIEFLY = re.compile(r"^\W*(?:answer|explain|reply|respond|please|give|keep|be|in\s+one)\b", re.IGNORECASE)

# Two questions in one sentence: joined questions, two things of a kind, two of one thing.
_JOINT = re.compile(
    rf"(?:[;&/]|\b(?:and|or|also|plus|then|und|et|y|sowie|as\s+well\s+as)\b)\W*(?:{_LEAD}\W+)*"
    rf"(?:(?:in|on|at|to|from|of|by|for|with)\s+)?(?:{_WH}\s|{_CALL}\b)",
    re.IGNORECASE,
)
_ATTRIBUTES = (
    r"(?:capital|currenc(?:y|ie)|language|symbol|number|continent|countr(?:y|ie)|cit(?:y|ie)|region|population|author|"
    r"president|leader|date|name|birthday|height|river|flag|anthem|director|inventor|founder|year|colou?r|size|age|king|"
    r"queen|winner)s"
)
_BOTH = re.compile(
    rf",\s*(?:and|or|plus|then)\s+(?:[^,?]{{0,80}}?\b(?:in|of|on|at|by|to|is|was)\s+{_WH}\b|"
    r"the\s+\w+\s+(?:with|of|in|for|from)\b[^,]{0,80}$)"
    r"|\bof\s+[^,;&?.]{1,60}?(?:,|;|&|\b(?:and|or|plus|as\s+well\s+as)\b)\s*(?:and\s+|also\s+)?"
    r"(?:of\s+\w|that\s+of\s|(?:the\s+)?\w+\s+(?:\w+\s+)?of\s)"
    rf"|\b{_ATTRIBUTES}\s+(?:of|for|in)\s+[^?.]{{1,80}}?(?:\band\b|&|,)\s*\w"
    r"|\bthe\s+\w+(?:\s+\w+)?(?:,\s*(?:the\s+)?\w+){0,4}\s+and\s+(?:the\s+|its\s+)?(?:\w+\s+)?\w+\s+of\s+(?:the\s+)?\w+\W*$"
    r"|\beach\s+of\s+(?:these|the\s+following)\b|\brespectively\b",
    re.IGNORECASE,
)

# Words of a task, or of a system prompt, that may hold a question or name a fact.
_INSIDE = re.compile(
    rf"\b{_WH}\b\s+(?!(?:you|i|we|to|it|they|he|she)\b)|\banswer(?:s|ed|ing)?\b"
    r"|\bthe\s+(?:[\w'-]+\s+){1,3}(?:of|for|in|from|at|on)\s+"
    r"(?!(?:this|that|these|those|my|our|your|a|an|it|the\s+following)\b)\w"
    r"|\b\w[\w-]{0,40}['\u2019]s\s+(?:[\w-]{1,40}\s+){0,2}\w{4}|\bthe\s+[A-Z][\w-]{1,40}\s+\w{4}",
    re.IGNORECASE,
)
_INSIDE_SYSTEM = re.compile(
    rf"(?i:\b{_WH}\s+(?:\w+\s+)?(?:is|was|are|were|has|does|did)\b)|(?i:\b(?:state|name|mention|say|tell|give|write|"
    r"include|answer|begin|start|reply|respond|end)\b[^.]{0,60}?)\b(?:the\s+(?:\w+\s+){1,3}of\s+(?:the\s+)?[A-Z]|"
    r"[A-Z][\w-]{0,40}['\u2019]s\s+\w)"
)
_TO_PEOPLE = re.compile(
    r"\b(?:you|your|i|we|my|us|our|me)\b(?!\s+(?:please\s+)?(?:know|tell|say|name|give|find))", re.IGNORECASE
)

# Words of a turn that refers to an earlier one, or calls for its answer.
_BACK_WORDS = _words(
    "it that this these those they them he she him her his its one ones again anyway above previous before",
    "earlier first same guess guesses try continue go on yes yeah yep sure please answer answers question",
    "questions know think say tell so then well instead also more less short shorter shortly confident certain",
    "correct right wrong come proceed ahead best attempt anything something any just only ja oui si s\u00ed",
    "weiter bitte",
)
_ANAPHORIC_WORDS = _words(
    "it they them he she him her his its one ones again anyway above previous earlier guess guesses try continue yes",
    "yeah yep sure answer answers question questions know think say confident certain correct proceed attempt instead",
)
_ANAPHORA = re.compile(rf"\b(?:{_ANAPHORIC_WORDS}|go\s+on|go\s+ahead|tell\s+me)\b", re.IGNORECASE)
_BACK = re.compile(rf"\b(?:{_BACK_WORDS})\b", re.IGNORECASE)
_REFERRING_WORDS = _words(
    "it that this those these them again anyway guess guesses try continue yes sure certain think above earlier",
    "either instead not",
)
_REFERS = re.compile(
    rf"\b(?:{_REFERRING_WORDS}|go\s+on|your?\s+(?:answer|guess)|the\s+answer|my\s+question)\b|n['\u2019]t\b",
    re.IGNORECASE,
)
_CALLS = re.compile(
    r"\b(?:guess|guesses|try|continue|go\s+on|go\s+ahead|again|anyway|yes|sure|(?:the|your|an)\s+(?:answer|guess)|"
    r"my\s+question|answer\s+(?:it|me|the|my)|tell\s+me)\b",
    re.IGNORECASE,
)
_CLOSING = frozenset(
    _words(
        "oh ah great good nice cool perfect fine got it i see no problem never mind nevermind thanks thank you",
        "thx ty cheers bye goodbye night day later tomorrow take care very so much a lot again anyway that helped",
        "helps was helpful is s all will be for your the help then ok okay danke merci gracias tschuss",
        "tsch\u00fcss have evening weekend me",
    ).split("|")
)
_THANKS = re.compile(
    r"\b(?:thanks?|thank\s+you|thx|ty|cheers|bye|goodbye|good\s+(?:night|bye)|see\s+you|never\s*mind|no\s+problem|danke|"
    r"merci|gracias|tsch[\u00fcu]ss)\b",
    re.IGNORECASE,
)
_SMALL_TALK = frozenset(
    _words(
        "hi hello hey yo hallo bonjour hola greetings good morning afternoon evening night day today tonight",
        "yesterday tomorrow week weekend how are is am was were do does did can could will would you your",
        "yourself i me my we us our doing going feel feeling feels sad happy tired bored angry lonely fine great",
        "nice bad better ok okay well thanks thank thx very much so a lot for the help helped helpful bye goodbye",
        "see later meet love like hate enjoy friend funny lol haha sorry mistake wrong right that this it what",
        "who s m re t not no yes name robot human bot ai real person there up to talk chat have had fun joke",
        "birthday wish luck cool wow please be busy old made here music feelings smart sleep dream eat alive",
        "welcome pleasure too also just again really about with and or but tell work works working pretty kind",
        "sweet amazing awesome best understand speak english hear listening ready",
    ).split("|")
)

_REFUSED = re.compile(
    r"\b(?:not\s+(?:quite\s+|entirely\s+|completely\s+|really\s+)?(?:sure|certain|able|aware|familiar|know|confident)|"
    r"(?:do|does|did|could|can|would|will|am|is|are|was|have)(?:n['\u2019]?t|\s+not)\b|cannot|unable|"
    r"no\s+(?:idea|information|answer|knowledge|data|record)|unsure|uncertain|unknown|sorry|apolog\w*|afraid|"
    r"unfortunately|decline|refuse|withheld|i\s+would\s+(?:have\s+to|need)|let\s+me\s+(?:check|think|see|look)|"
    r"one\s+moment|wei(?:\u00df|ss)\s+(?:ich\s+)?(?:es\s+|das\s+)?(?:leider\s+)?nicht|keine\s+ahnung|leider|"
    r"ne\s+sais\s+pas|d[e\u00e9]sol[e\u00e9]|no\s+(?:lo\s+)?s[e\u00e9]|lo\s+siento)\b",
    re.IGNORECASE,
)
_ACKNOWLEDGED = frozenset(
    _words(
        "yes yeah sure certainly of course ok okay absolutely alright all right gladly understood got it no",
        "problem happy to help good great interesting nice excellent question hello hi hey hm hmm well here is",
        "you go ready please on noted thanks thank the answer",
    ).split("|")
)
_ANNOUNCED = re.compile(r"^i(?:['\u2019]ll|\s+(?:can|will|could|may|shall|would))\b[^.!]*[.!]?$", re.IGNORECASE)
_RISK = re.compile(r"\{risk\}|\b[01]\.\d\d\b|\bunknown\b")  # in what stands in for a withheld answer


def asks_of(messages: Sequence[object], refusals: Collection[str] = ()) -> Asks:
    """Return what the last user turn asks for, read with the turns before it and the system's.

    ``refusals``: what stands in for withheld answers here, ``{risk}`` for any.  What is no message, or has no text, is
    nothing said."""
    known = [turn for turn in messages if isinstance(turn, Mapping)]
    turns = [(str(turn.get("role")), _ends(text_of(turn.get("content"))).strip()) for turn in known]
    last = next((index for index in range(len(turns) - 1, -1, -1) if turns[index][0] == "user"), None)
    if last is None:
        return "inside"
    asked, before = turns[last][1], turns[:last]
    if (count := questions(asked)) > 1:
        return "several"
    waiting = [index for index, (role, text) in enumerate(before) if role == "user" and not _is_small_talk(text)]
    own, closes = _stands_alone(asked, count), _closes(asked, before)
    if waiting and not own and not closes and not _answered(before[waiting[-1] + 1 :], refusals):
        return "earlier"
    held = any(role in ("system", "developer") and _may_ask(text) for role, text in turns)
    begun = any(role == "assistant" for role, _ in turns[last + 1 :])
    if held or begun or not re.search(r"\w", asked):
        return "inside"
    if closes or _is_small_talk(asked):
        return "small_talk"
    calls = bool(waiting) and (len(re.findall(r"\w+", asked)) < OWN_REQUEST - 1 or bool(_CALLS.search(asked)))
    return "inside" if calls or _may_hold(asked) else "plain"


def questions(text: str) -> int:
    """Return how many questions a message asks, 0 where none is told by its words."""
    text = _EXAMPLE.sub("", _ends(text))
    parts = [part for line in text.splitlines() for part in _sentences(line)]
    passage, further = has_passage(text), 0
    asking = set[str]()  # without what leads in, so that a question that a passage repeats counts once
    for part, behind in zip(parts, [*parts[1:], ""], strict=False):
        # In a passage, "Who wrote it? Austen." is no question that is asked, and nor is the heading of an answer.
        told = passage and behind and not _asks(behind) and not _BRIEFLY.match(behind)
        further += bool(asking and not passage and _FURTHER.match(part) and part[-1] != ".")
        if _asks(part) and not told:
            asking.add(re.sub(r"^[\W\d]*(?:question|q)?\W*|\W+$", "", part.lower()))
    count = len(asking) + any(map(_is_compound, asking))
    if not asking and len(parts) == 1:
        count = 2 * _is_compound(parts[0])
    items = 0 if passage else sum(bool(_ITEM.match(part)) for part in parts)
    listed = items > 1 and (count > 0 or items == len(parts))
    return max(count, 2 if listed or (count and further) or (not passage and _SEVERAL.search(text)) else 0)


def _asks(part: str) -> bool:
    if _FILLER.match(part):
        return False
    marked = part[-1:] in _MARKS and len(re.findall(r"\w+", part)) > 2 and _ASKING.search(part)
    return bool(part and (marked or _BEGINS.match(part)))


def _is_compound(part: str) -> bool:
    """Return whether one sentence asks for two things."""
    if _BOTH.search(part):
        return True
    heads = (part[: joint.start()] for joint in _JOINT.finditer(part))
    return any(len(head.split()) > 2 and (_BEGINS.match(head) or re.search(r"\bof\s+\w", head)) for head in heads)


def _may_ask(text: str) -> bool:
    """Return whether a system prompt holds a question, which its user's words may call up."""
    return any(mark in text for mark in _MARKS) or bool(_INSIDE_SYSTEM.search(text))


def _may_hold(asked: str) -> bool:
    """Return whether a turn may hold a question, or name a fact, beside its other words."""
    parts = [part for line in asked.splitlines() for part in _sentences(line)]
    if len(parts) == 1 and _BEGINS.match(parts[0]) and not re.search(r"[:\"`]", parts[0]):
        return False  # a question and nothing else, as the probe knows them
    asking = [part for part in parts if part[-1] in _MARKS and not _TO_PEOPLE.search(part)]
    if asking and (len(parts) > 1 or re.search(r"[:\"'`\u201c]", asking[0])):
        return True
    return any(_INSIDE.search(part) for part in parts)


def _is_small_talk(text: str) -> bool:
    return len(re.findall(r"\w+", text)) <= CHAT and _made_of(text, _SMALL_TALK)


def _stands_alone(asked: str, count: int) -> bool:
    """Return whether a turn with so many questions is understood without an earlier one."""
    words = len(re.findall(r"\w+", asked))
    if words > LONG_TURN:
        return not _CALLS.search(asked)
    if count:
        return not _REFERS.search(asked)
    return words >= OWN_REQUEST and not (_BACK if words <= SHORT_TURN else _ANAPHORA).search(asked)


def _closes(asked: str, before: Sequence[tuple[str, str]]) -> bool:
    """Return whether a turn thanks or takes leave, behind a turn of the assistant."""
    return bool(before) and before[-1][0] == "assistant" and _made_of(asked, _CLOSING) and bool(_THANKS.search(asked))


def _answered(turns: Sequence[tuple[str, str]], refusals: Collection[str]) -> bool:
    """Return whether a turn of the assistant among these answers what stood before them."""
    known = {_RISK.sub("", text).strip() for text in refusals}
    return any(role == "assistant" and _answers(text, known) for role, text in turns)


def _answers(text: str, refusals: Collection[str]) -> bool:
    if not text or text[-1] in f"{_MARKS}:" or text.endswith(("...", "\u2026")):
        return False
    refused = _RISK.sub("", text).strip() in refusals or _REFUSED.search(text)
    sentences = [part for part in re.split(r"(?<=[.!])\s+", text) if not _made_of(part, _ACKNOWLEDGED)]
    return not (refused or all(map(_ANNOUNCED.match, sentences)))


def _made_of(text: str, words: Collection[str]) -> bool:
    return all(word in words for word in re.findall(r"\w+", text.lower()))


def _sentences(line: str) -> list[str]:
    """Return the sentences of a line, of long ones the ends."""
    return [_ends(part.strip(), LONGEST_SENTENCE) for part in _SENTENCES.split(line) if part.strip()]


def _ends(text: str, most: int = LONGEST_READ) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}\n{text[-most // 2 :]}"
