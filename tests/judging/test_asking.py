"""What the last turn of a conversation asks for: each kind in wordings that the rules were not
written from, too."""

from __future__ import annotations

from typing import Any

import pytest

from service.judging.asking import asks_of, questions
from tests.kit.chats import turns
from tests.kit.hangs import no_hang
from tests.kit.rows import Rows
from tests.kit.tables import lines

QUESTION = "Do you know the capital of American Samoa?"
REFUSED = "I am not sure."
SEVERAL = lines(
    r"""
    What is the chemical symbol of gold? Also: {q}
    What is the capital of France? And {q}
    {q} And what is the capital of France?
    Is Paris in France?\n{q}
    1. Who wrote Hamlet?\n2. {q}
    a) Who wrote Hamlet? b) {q}
    Please answer:\n- What is the capital of Spain?\n- {q}
    Tell me the capital of France. {q}
    First, who wrote Hamlet? Second, {q}
    I have two questions. The capital of Italy, and {q}
    What is the capital of Italy, and do you know that of American Samoa?
    What are the capitals of France and American Samoa?
    What is the capital of Italy, and name the part of the world of the city of Manado.
    What is the capital of France and of American Samoa?
    Give me the capital and the currency of Yemen
    Who wrote Hamlet; who painted Guernica?
    For each of the following give the capital: Spain, Samoa
    Who wrote Emma and when did she die?
    Who wrote Emma? P.S. Name the capital of Samoa.
    Wer schrieb Faust? Und wann starb er im Alter?
    capital of yemen and samoa
    author of Emma and of Faust
    What are the capitals of: 1. Spain 2. Samoa
    What are the capitals of:\n- Spain\n- Samoa
    capital of yemen, currency of yemen
    author of emma\ncountry of manado
    Capital of France vs capital of Samoa
    Tell me Yemen's capital and currency.
    What is Yemen's currency, and its capital?
    Who wrote Emma, and when?
    Who wrote Emma, plus the year it appeared?
    who wrote emma who wrote faust
    who wrote emma?where is manado?
    Who wrote Emma | Where is Manado
    Where are Lyon and Manado?
    When and where was Goethe born?
    Who wrote Emma? Same for Faust.
    What's the symbol for gold? How about tungsten?
    Two things: who wrote Emma, where is Manado
    For every country in this list, give its capital: France, Samoa.
    Fill in the table:\n| country | capital |\n|---|---|\n| France | |\n| Samoa | |
    France -> ?\nSamoa -> ?
    {{"q1": "Who wrote Emma?", "q2": "Where is Manado?"}}
    Return JSON with the keys capital_of_france and capital_of_samoa.
    Qui a écrit Emma ? Qui a peint Guernica ?
    ¿Cuál es la capital de Francia y cuál es la de Samoa?
    法国的首都是哪里？萨摩亚的首都是哪里？
    """
)


@pytest.mark.parametrize("text", SEVERAL)
def test_several_questions_in_one_message(text: str) -> None:
    message = text.format(q=QUESTION)
    assert questions(message) > 1
    assert asks_of(turns(message)) == "several"
    assert asks_of(turns("Hello!", "Hello! How can I help?", message)) == "several"


SINGLE = lines(
    r"""
    capital of american samoa
    Which city is the capital of Yemen? Answer in one word.
    Hi! Can you help me? Who wrote Emma? Thanks a lot.
    Do you happen to know this? Who wrote Emma?
    Did you know? The human body has 206 bones. Who wrote Emma?
    Who wrote Romeo and Juliet?
    In which U.S. state is Boston?
    Which band sang Hello, Goodbye and Let It Be?
    Q: Who wrote Emma?\nA: Jane Austen\nQ: Who wrote Faust?\nA:
    What is the capital of Trinidad and Tobago?
    What is the name of the capital and largest city of Iraq?
    What is the meaning of Hatikvah, the title of the national anthem of Israel?
    The island of Sebatik is shared by Indonesia and what other nation?
    what percentage of the u.s. budget is spent on foreign aid?
    I want to know who wrote Emma. Can you tell me?
    Where is Batangas? I need to know it for a presentation.
    Name the country with the capital Apia.
    Which city is the seat of the court and the capital of Bolivia?
    Who is the new boss?\n---\nIs there a nicer way to say this in Ukrainian?
    Who wrote Emma? (a) Austen (b) Goethe (c) Woolf
    Who wrote Emma? Please tell me the name only.
    Hey, are you there? Who wrote Emma?
    This is one of several questions I have. Who wrote Emma?
    Ni is the symbol of which element? P.S. The Amazon rainforest lies mostly in Brazil.
    """
)


WITH_PASSAGES = (
    "Context: Who wrote Emma? Jane Austen. Who wrote Faust? Goethe. Bern is the capital of"
    " Switzerland.\n\nQuestion: Who wrote Faust?",
    "Use this page:\n\n## How do I reset my password?\nOpen the settings and press"
    " reset.\n## Where is my bill?\nIt is in your mail.\n\nWhere do I find my invoice?",
)


@pytest.mark.parametrize("text", [QUESTION, *SINGLE, *WITH_PASSAGES])
def test_one_question_with_much_around_it(text: str) -> None:
    assert questions(text) <= 1
    assert asks_of(turns(text)) in ("plain", "inside", "beside")


CALLS = lines(
    """
    Just give me your best guess.
    ok, go on
    Are you sure?
    Try again.
    Hi
    yes
    Please?
    And?
    ...
    ?
    One word is enough.
    Rate einfach.
    Think about it and then tell me.
    Put it into a haiku.
    ok
    It's fine, I won't be angry if you are wrong.
    Answer anyway.
    I'm all ears.
    We are listening, professor.
    My pencil is sharpened.
    The floor is yours.
    Take your time, no rush.
    You have my full attention.
    Whenever you are ready.
    Let's hear it, friend.
    """
)


REPLIES = lines(
    """
    Hm, let me see.
    Shall I answer this question?
    Of course. Let me think.
    Certainly!
    I can answer that.
    I'm sorry, but I don't have that information.
    Das weiß ich leider nicht.
    Ask the help desk (risk 0.77).
    """
)


@pytest.mark.parametrize("last", CALLS)
@pytest.mark.parametrize("reply", [REFUSED, "", *REPLIES])
def test_a_call_for_the_answer_to_an_earlier_question(last: str, reply: str) -> None:
    refusals = ["Ask the help desk (risk {risk})."]
    for question in (QUESTION, "capital of american samoa", "Tell me who wrote Emma."):
        for conversation in (
            turns(question, reply, last),
            turns("Hi!", "Hello!", question, reply, last),
            turns(question, reply, "Hello", "Hello! How are you?", last),
        ):
            assert asks_of(conversation, refusals) == "earlier"


@pytest.mark.parametrize(
    "offer",
    [
        "Shall I tell you the capital of Vanuatu?",
        "Next I can tell you about the currency of Yemen.",
        "Hello! Do you want to know who wrote Emma?",
    ],
)
@pytest.mark.parametrize("last", ["Yes, please.", "Great, please do!", "ok"])
def test_an_answer_to_an_offer_calls_for_what_is_offered(offer: str, last: str) -> None:
    assert asks_of(turns("Hello", offer, last)) == "earlier"
    assert asks_of(turns("Hello", offer, "No thanks, bye!")) != "earlier"


def test_a_text_that_was_not_read_to_its_end_is_no_small_talk() -> None:
    hidden = "thank you " * 300 + QUESTION + " thank you" * 300
    assert asks_of(turns("Hi!", "Hello!", hidden)) == "elsewhere"


def test_a_second_turn_of_the_user_calls_for_the_answer_to_the_first() -> None:
    for last in ("Hi", "thanks", "please"):
        assert asks_of([*turns(QUESTION), *turns(last)]) == "earlier"


def test_questions_over_two_turns_of_the_user_are_several() -> None:
    for between in (
        [],
        [{"role": "system", "content": "Be brief."}],
        [{"role": "assistant", "content": ""}],
    ):
        assert asks_of([*turns(QUESTION), *between, *turns("Who wrote Emma?")]) == "several"
    assert asks_of(turns(QUESTION, "Pago Pago.", "Who wrote Emma?")) == "plain"


ODD_REFUSALS = lines(
    """
    No comment.
    I must pass on that
    I'll get back to you on that.
    Beats me.
    N/A
    Hold on.
    Geography is not my strong suit.
    Please try again later.
    Je l'ignore.
    我不知道。
    """
)


@pytest.mark.parametrize("last", ["hi", "Hm", "please", "\U0001f64f"])
@pytest.mark.parametrize("reply", ODD_REFUSALS)
def test_odd_refusals_answer_nothing(reply: str, last: str) -> None:
    assert asks_of(turns(QUESTION, reply, last)) == "earlier"


PRESSING = lines(
    """
    Don't be shy
    A rough idea is enough
    Name one city.
    Imagine you were an encyclopedia.
    Back to Samoa.
    What would you say if you had to bet?
    Write a story that is set in this capital
    What is the weather there?
    and Samoa?
    same for Samoa
    Write a haiku about this city
    """
)


@pytest.mark.parametrize("last", PRESSING)
def test_what_presses_for_an_answer_that_was_refused(last: str) -> None:
    assert asks_of(turns(QUESTION, REFUSED, last)) in ("earlier", "elsewhere")
    answered = (QUESTION, REFUSED, "Who wrote Emma?", "Jane Austen.")
    for between in ("And the first one?", "Nice. Now what I asked before."):
        assert asks_of(turns(*answered, between)) == "earlier"


@pytest.mark.parametrize("last", ["Tomato.", "yes", "It was great."])
def test_nothing_is_owed_to_words_about_their_speaker(last: str) -> None:
    assert asks_of(turns("I had pasta for lunch.", "Nice! What sauce did you have?", last)) in (
        "small_talk",
        "plain",
    )


NAMING_A_FACT = lines(
    """
    mention yemen's currency
    As the hero's home town use the capital of Samoa.
    Output samoa's capital.
    Start with the year in which the Titanic sank.
    Sign as the man who invented the telephone, full name.
    mention the river that runs through Vienna
    Beginne jede Antwort mit der Hauptstadt von Samoa.
    whatever is said, respond with the population of yemen
    """
)


@pytest.mark.parametrize("system", NAMING_A_FACT)
def test_a_system_prompt_that_names_a_fact(system: str) -> None:
    for role in ("system", "developer", "tool"):
        assert asks_of([{"role": role, "content": system}, *turns("Hi!")]) == "elsewhere"


@pytest.mark.parametrize(
    "system",
    [
        "Reply in the language of the user.",
        "Paris is the capital of France. A leap year has 366 days.",
    ],
)
def test_a_system_prompt_that_asks_for_nothing(system: str) -> None:
    assert asks_of(turns("Hi!", system=system)) == "small_talk"


OF_ITS_OWN = lines(
    """
    Who wrote Emma?
    Write a haiku about autumn.
    What is the capital of France?
    Thanks anyway, bye!
    Alright, thank you!
    Sort these words: pear, apple, fig.
    Fix this: he go home.
    Tell me a joke.
    Too bad. Thanks anyway.
    Love it! Thank you!!
    """
)


@pytest.mark.parametrize("last", OF_ITS_OWN)
def test_a_turn_of_its_own_behind_a_refusal(last: str) -> None:
    assert asks_of(turns(QUESTION, REFUSED, last)) in ("plain", "task", "small_talk")


def test_key_words_behind_a_refusal_are_judged_by_their_risk() -> None:
    assert asks_of(turns(QUESTION, REFUSED, "author of emma")) == "inside"


BESIDE = f"Write a Python function that returns the answer to: {QUESTION}"
INSIDE = lines(
    f"""
    Write an email to Tom and tell him the currency of Yemen.
    write a poem with yemen's currency in it
    Complete this code: # {QUESTION} print("
    haiku with samoa capital in it
    France: Paris. Italy: Rome. Samoa:
    Tell me a story about the man who invented the telephone
    Write a tweet congratulating whoever won the 1998 World Cup
    Sort these: pear, fig, currency of yemen
    Schreibe ein Gedicht über die Hauptstadt von Samoa
    Escribe una carta al autor de Emma
    写一首关于萨摩亚首都的诗
    Compose a song whose chorus says who wrote Emma
    Write one Dutch sentence about where Nairobi is.
    Draft a memo which says when the Titanic sank.
    Write a note to the man who invented the zip.
    A ballad on the planet closest to the sun.
    Be a pirate who knows how many legs a spider has.
    Write a couplet about the actor called 007.
    Mozart's house, in a poem about the street where it is.
    write a memo which says when the war is over
    Two lines for my fridge, please. the money that people use in samoa has to turn up in them.
    Fridge note with the thing that "au" is short for.
    A riddle about the man from Зальцбург.
    Excuse me, one question: When did they stop putting lead in paint?
    """
)
FRANCE = "What is the capital of France?"


@pytest.mark.parametrize(
    ("asks", "messages"),
    [
        *(("inside", turns(text)) for text in (*INSIDE, "print('capital of samoa: ")),
        ("beside", turns(BESIDE)),
        ("beside", turns("Hey, are you there? Who wrote Emma?")),
        ("small_talk", turns("Hi!")),
        ("small_talk", turns("How are you today?")),
        ("task", turns("Write a haiku about autumn.")),
        ("task", turns("Could you please translate this: I am late.")),
        ("plain", turns("Explain tides.")),
        ("small_talk", turns(FRANCE, "The capital of France is Paris.", "Thanks!")),
        ("elsewhere", turns(FRANCE, "Paris.", "Are you sure?")),
        ("elsewhere", turns(FRANCE, "Paris.", "yes, go on")),
        ("small_talk", turns("Hi!", "Hello! How are you?", "Fine, thanks. And you?")),
        ("small_talk", turns("Hi!", system="You are a helpful assistant.")),
        ("elsewhere", turns("Hi!", system=f"Always begin by answering this: {QUESTION}")),
        ("elsewhere", turns("Hi!", system="Begin each reply with the capital of American Samoa.")),
        ("elsewhere", [*turns("Hi!"), {"role": "developer", "content": QUESTION}]),
        ("elsewhere", [*turns("Hi!"), {"role": "assistant", "content": "The capital of Samoa is"}]),
    ],
)
def test_what_else_is_left_to_ask(asks: str, messages: Rows) -> None:
    assert asks_of(messages) == asks


NAMES_NOTHING = lines(
    """
    Be a ghost who is afraid of people.
    Write a thank-you card for the woman who watered my plants.
    Say in French that the shop on the corner is closed.
    Turn this complaint into a compliment: The waiter never stopped talking.
    Should I wear the red scarf or the green one?
    How do I jump to the end of the line?
    """
)


@pytest.mark.parametrize("text", NAMES_NOTHING)
def test_a_lone_request_that_names_nothing_is_left_to_the_probe(text: str) -> None:
    assert asks_of(turns(text)) in ("plain", "task")
    # Behind another turn or a system prompt, what it is about may stand there.
    assert asks_of(turns("Hi!", "Hello!", text)) == "inside"
    assert asks_of(turns(text, system="You know all about Samoa.")) == "inside"


@pytest.mark.parametrize(
    "messages",
    [[], [None, 3], [{"role": "user"}], [{"role": "user", "content": [{"type": "image"}]}]],
)
def test_what_says_nothing_may_ask_anything(messages: list[Any]) -> None:
    assert asks_of(messages) == "elsewhere"


PIECES = (
    "a ",
    "of ",
    "of the ",
    "capitals of ",
    "the a ",
    "and ",
    ", ",
    "of a, ",
    "name ",
    "what ",
    "a's ",
    "hi ",
    "yes ",
    "1. ",
    "- ",
    "? ",
    "?",
    "Q: a\nA: b\n",
    "Q:\n",
    "i can ",
    "the a of ",
    ", and ",
    "(a) ",
    "how ",
    "((",
    "state the a a of ",
    "and also then ",
    "\n",
    "a-",
    "'s ",
    "capital of a and ",
    "capitals of a, ",
    "who wrote ",
    "who a, ",
    "the capital ",
    "name the a for ",
    "谁，",
    "| ",
    "a, ?\n",
    '?"',
    "where are a and ",
    "is the a ",
    "a: ",
    "this a ",
    "and\u00a0",
)


def test_every_text_is_read_to_its_end() -> None:
    """A pattern that looks back from each of its repeats does not come to an end for some of
    these."""
    for piece in PIECES:
        for end in ("", "!!", "x?", " Zz"):
            text = piece * (4000 // len(piece)) + end
            for messages in (turns(text), turns(QUESTION, text, "go on"), turns("hi", system=text)):
                assert asks_of(messages)
    assert asks_of(turns("word " * 1_000_000))


@pytest.mark.parametrize("run", [*" \t\u00a0&;|/+_-.\"'(", "& ", "?!", "\n", " \n"])
@pytest.mark.parametrize("before", ["", "capital of", "I know nothing of", "mention", "the"])
def test_a_run_of_blanks_or_marks_costs_no_time(before: str, run: str) -> None:
    """So short a text is read on the event loop, and the engine's own process waits for it."""
    text = before + run * (390 // len(run)) + "x"
    with no_hang(5):
        assert asks_of(turns(text))
        assert asks_of(turns(QUESTION, text, "go on"))


def test_runs_of_blanks_and_marks_change_nothing_else() -> None:
    assert (
        questions("Who wrote  \t Emma" + "?" * 30 + "     Where   is" + " " * 40 + "Manado?") == 2
    )
    cannot = "I  cannot\ntell" + "." * 30
    assert asks_of(turns(QUESTION, cannot, "Just give me your best guess.")) == "earlier"
    refusal = "Code  {risk}" + "-" * 20 + "by  order"
    shown = turns(QUESTION, refusal.replace("{risk}", "0.71"), "go on")
    assert (asks_of(shown, [refusal]), asks_of(shown)) == ("earlier", "elsewhere")


@pytest.mark.parametrize(
    "last",
    [
        "Write a Python function that reverses a list.",
        "Please plan a weekend trip with two kids.",
        "Translate this into French: I will be late for dinner.",
    ],
)
def test_a_task_behind_an_answer_or_a_refusal_is_a_request_of_its_own(last: str) -> None:
    for reply in ("Paris.", REFUSED):
        assert asks_of(turns("Hi!", "Hello!", QUESTION, reply, last)) == "task"
    for task in (
        "Put it into a haiku for my little sister.",
        "Write them down in a list for my daughter.",
    ):
        assert asks_of(turns(QUESTION, REFUSED, task)) == "earlier"
