"""Forms of conversation: the same question alone, in a chat, under a system prompt, behind a passage, in other wording.

A form makes of a question the messages in which somebody asks it.  What stands around it comes from ``texts`` and from
the other questions of the file, never from the question's own group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from service.data.forms.base import Company, Form, Make, Message, Question, Unfit
from service.data.forms.texts import (
    BEFORE,
    BEHIND,
    CHATTER,
    ENDINGS,
    FACTS,
    FORMATS,
    GREETINGS,
    JUNK,
    LONG_SYSTEM,
    MARKS,
    NOTES,
    PASSAGES,
    PERSONAS,
    POLITE,
    REFUSALS,
    RULES,
    SHORT_SYSTEM,
    SMALL_TALK,
)
from service.errors import HalluTracerError

FORMS: dict[str, Form] = {}


def _form(family: str, weight: float = 1.0) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        name = make.__name__.removeprefix("_")
        FORMS[name] = Form(name, family, weight, make)
        return make

    return add


def families() -> list[str]:
    """What a mixture can be made of, in the order of the registry."""
    return list(dict.fromkeys(form.family for form in FORMS.values()))


def chosen(names: Iterable[str]) -> list[Form]:
    """The forms of these names and families, each once.  Raises HalluTracerError naming those that there are."""
    found: dict[str, Form] = {}
    for name in names:
        own = {form.name: form for form in FORMS.values() if name in (form.name, form.family, "all")}
        if not own:
            raise HalluTracerError(
                f"no form is called {name!r}: all, {', '.join(families())}, or one of {', '.join(FORMS)}"
            )
        found |= own
    return list(found.values())


def is_one_message(form: Form) -> bool:
    """Whether the form is a single message of the user, which a model without a chat template can be asked, too."""
    return form.family not in ("system", "turns")


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _turn(question: Question, answer: str) -> list[Message]:
    return [_user(question.text), _assistant(answer)]


def _filled(templates: Sequence[str], question: Question, company: Company, **texts: str) -> str:
    return company.random.choice(templates).format(q=question.text, **texts)


# Alone, in other words.


@_form("lone", 4.0)
def _lone(question: Question, company: Company) -> list[Message]:
    return [_user(question.text)]


@_form("wording")
def _polite(question: Question, company: Company) -> list[Message]:
    return [_user(_filled(POLITE, question, company))]


@_form("wording")
def _chatter(question: Question, company: Company) -> list[Message]:
    return [_user(_filled(CHATTER, question, company))]


@_form("wording")
def _lower(question: Question, company: Company) -> list[Message]:
    return [_user(question.text.lower().rstrip("?.! "))]


@_form("wording")
def _typos(question: Question, company: Company) -> list[Message]:
    """Two neighbouring letters swapped, or one left out, in one or two words; names are left as they are."""
    words = question.text.split(" ")
    places = [place for place, word in enumerate(words) if len(word) > 3 and word.islower()]
    if not places:
        raise Unfit
    for place in company.random.sample(places, min(len(places), company.random.choice((1, 2)))):
        word, at = words[place], company.random.randrange(1, len(words[place]) - 1)
        swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
        words[place] = company.random.choice((swapped, word[:at] + word[at + 1 :]))
    return [_user(" ".join(words))]


@_form("wording")
def _ending(question: Question, company: Company) -> list[Message]:
    """What asks for nothing more behind the question: "Answer:", three dots, a few letters."""
    junk = "".join(company.random.choices("abcdefghijklmnopqrstuvwxyz!.;[]=+/ ", k=company.random.randint(4, 24)))
    return [_user(_filled(ENDINGS, question, company, j=junk))]


@_form("junk")
def _junk(question: Question, company: Company) -> list[Message]:
    """Pieces that make no sense behind the question, seldom before it: markup, symbols, words cut and out of order."""
    words = [word for other in company.draw(4) for word in other.text.split()]
    count = company.random.randint(2, 24)
    pieces = [company.random.choice((company.random.choice(MARKS), _cut(words, company))) for _ in range(count)]
    junk = "".join(piece + company.random.choice(("", " ", " ")) for piece in pieces).strip()
    return [_user(_filled(JUNK, question, company, j=junk))]


def _cut(words: Sequence[str], company: Company) -> str:
    """A word of them, half of one, or two in one, in some case."""
    word, other = company.random.choice(words), company.random.choice(words)
    changed = (word, word.upper(), word.lower(), word[: len(word) // 2], word[len(word) // 2 :], word + other.title())
    return company.random.choice(changed)


@_form("formats")
def _format(question: Question, company: Company) -> list[Message]:
    return [_user(_filled(FORMATS, question, company))]


# Under a system prompt.


@_form("system")
def _system_short(question: Question, company: Company) -> list[Message]:
    return [_system(company.random.choice(SHORT_SYSTEM)), _user(question.text)]


@_form("system")
def _system_persona(question: Question, company: Company) -> list[Message]:
    return [_system(company.random.choice(PERSONAS)), _user(question.text)]


@_form("system")
def _system_rules(question: Question, company: Company) -> list[Message]:
    rules = company.random.sample(RULES, company.random.randint(2, 5))
    text = company.random.choice(SHORT_SYSTEM) + "\n" + "\n".join(f"- {rule}" for rule in rules)
    return [_system(text), _user(question.text)]


@_form("system")
def _system_long(question: Question, company: Company) -> list[Message]:
    return [_system(company.random.choice(LONG_SYSTEM)), _user(question.text)]


@_form("system")
def _system_facts(question: Question, company: Company) -> list[Message]:
    facts = " ".join(company.fact() for _ in range(company.random.randint(1, 3)))
    return [_system(f"{company.random.choice(SHORT_SYSTEM)} {facts}"), _user(question.text)]


# After earlier turns.


@_form("turns")
def _greeting(question: Question, company: Company) -> list[Message]:
    hello, answer = company.random.choice(GREETINGS)
    return [_user(hello), _assistant(answer), _user(question.text)]


@_form("turns")
def _small_talk(question: Question, company: Company) -> list[Message]:
    turns = [one for pair in company.random.sample(SMALL_TALK, company.random.randint(1, 2)) for one in pair]
    said = [_assistant(text) if place % 2 else _user(text) for place, text in enumerate(turns)]
    return [*said, _user(question.text)]


@_form("turns")
def _turn_right(question: Question, company: Company) -> list[Message]:
    [other] = company.draw(1, alike=company.random.random() < 0.5)
    return [*_turn(other, other.reply), _user(question.text)]


@_form("turns")
def _turn_wrong(question: Question, company: Company) -> list[Message]:
    [other] = company.draw(1, alike=True)
    return [*_turn(other, company.wrong(other)), _user(question.text)]


@_form("turns")
def _turn_refused(question: Question, company: Company) -> list[Message]:
    [other] = company.draw(1, alike=company.random.random() < 0.5)
    return [*_turn(other, company.random.choice(REFUSALS)), _user(question.text)]


@_form("turns", 2.0)
def _turn_own(question: Question, company: Company) -> list[Message]:
    other = _said(company, 1)
    return [*_turn(other[0], other[0].said), _user(question.text)]


@_form("turns", 1.5)
def _turns_own(question: Question, company: Company) -> list[Message]:
    before = [message for one in _said(company, company.random.choice((2, 3, 8))) for message in _turn(one, one.said)]
    return [*before, _user(question.text)]


@_form("turns", 1.5)
def _turns_mixed(question: Question, company: Company) -> list[Message]:
    """Right, wrong and refused ones, in any order."""
    before: list[Message] = []
    for other in company.draw(company.random.choice((2, 3, 3, 8))):
        answers = (other.reply, other.reply, company.wrong(other), company.random.choice(REFUSALS))
        before += _turn(other, company.random.choice(answers))
    return [*before, _user(question.text)]


@_form("turns")
def _turns_with_system(question: Question, company: Company) -> list[Message]:
    system = company.random.choice([*SHORT_SYSTEM, *PERSONAS])
    return [_system(system), *company.random.choice((_turn_right, _greeting, _small_talk))(question, company)]


def _said(company: Company, count: int) -> list[Question]:
    pool = [one for one in (*company.same, *company.other) if one.said]
    if len(pool) < count:
        raise Unfit
    return company.random.sample(pool, count)


@_form("few_shot")
def _few_shot(question: Question, company: Company) -> list[Message]:
    shots = company.draw(company.random.choice((2, 3, 5)), alike=company.random.random() < 0.7)
    lead, ask, reply = company.random.choice((("", "Q: ", "A: "), ("Some examples:\n", "Question: ", "Answer: ")))
    lines = [f"{ask}{one.text}\n{reply}{one.answer}" for one in shots]
    return [_user(lead + "\n\n".join([*lines, f"{ask}{question.text}\n{reply.strip()}"]))]


# Beside a fact or a passage.


@_form("facts", 1.5)
def _fact_before(question: Question, company: Company) -> list[Message]:
    return [_user(_filled(BEFORE, question, company, f=company.fact()))]


@_form("facts", 2.5)
def _fact_behind(question: Question, company: Company) -> list[Message]:
    facts = " ".join(company.fact() for _ in range(company.random.choice((1, 1, 1, 2, 3))))
    return [_user(_filled(BEHIND, question, company, f=facts))]


@_form("passages", 2.0)
def _passage_right(question: Question, company: Company) -> list[Message]:
    return _passage(question, company, [question.note, *company.notes(2)])


@_form("passages", 1.5)
def _passage_unrelated(question: Question, company: Company) -> list[Message]:
    return _passage(question, company, company.notes(3))


@_form("passages", 0.1)
def _passage_contradicting(question: Question, company: Company) -> list[Message]:
    if not question.answer:
        raise Unfit
    wrong = company.wrong(question)
    note = question.note.replace(question.answer, wrong) if question.answer in question.note else f"{wrong}."
    return _passage(question, company, [note, *company.notes(2)])


@_form("passages", 1.5)
def _passages_several(question: Question, company: Company) -> list[Message]:
    """Two to four, of which one may have the answer."""
    parts = [company.notes(company.random.randint(2, 4)) for _ in range(company.random.randint(2, 4))]
    if company.random.random() < 0.5:
        company.random.choice(parts).append(question.note)
    numbered = [f"[{number}] {_shuffled(part, company)}" for number, part in enumerate(parts, 1)]
    return [_user(_filled(PASSAGES, question, company, p="\n".join(numbered)))]


@_form("long", 0.6)
def _context_1k(question: Question, company: Company) -> list[Message]:
    return _passage(question, company, _long(question, company, 700))


@_form("long", 0.1)
def _context_4k(question: Question, company: Company) -> list[Message]:
    return _passage(question, company, _long(question, company, 2800))


def _passage(question: Question, company: Company, notes: list[str]) -> list[Message]:
    return [_user(_filled(PASSAGES, question, company, p=_shuffled(notes, company)))]


def _long(question: Question, company: Company, words: int) -> list[str]:
    """Notes of so many words; in half of the cases one has the answer.  A word is about 1.4 tokens."""
    notes = [question.note] if company.random.random() < 0.5 else []
    pool = [*NOTES, *FACTS, *(one.note for one in company.noted)]
    left = words - sum(len(note.split()) for note in notes)
    while left > 0:
        notes.append(company.random.choice(pool))
        left -= len(notes[-1].split())
    return notes


def _shuffled(notes: Sequence[str], company: Company) -> str:
    return " ".join(company.random.sample(notes, len(notes)))
