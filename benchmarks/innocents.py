"""What the gate costs conversations that ask for no fact, or whose facts were answered, through the
running service.

    python -m benchmarks.innocents --record innocents.jsonl [--conversations 200] \\
        [--model smollm2] [--bundle NAME] \\
        [--store DIR] [--url http://127.0.0.1:8765]

Each conversation has three turns of its user, the last of which is judged: small talk throughout; a
question of fact that was answered, and thanks; a task at the end; a question back on what was
said.  The share of them whose last turn the gate withholds, by kind, and why.  A run that was ended
goes on where the record stops."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence

from benchmarks.running_service import Job, Line, Message, add_options, answers, together
from service.fitting.scores import jeffreys
from service.trainer.presentation import markdown_table

TALK = [
    ("Hi!", "Hello! How can I help you today?"),
    ("Good morning", "Good morning! How are you?"),
    ("How are you?", "I am fine, thank you. And you?"),
    ("I'm bored.", "How about a walk?"),
    ("My cat sleeps on my keyboard.", "Cats love warm places."),
    ("I had a long day.", "I hope you can rest now."),
    ("It's raining again.", "Then a cup of tea may help."),
    ("You are funny.", "Thank you!"),
    ("Do you like music?", "I enjoy talking about it."),
    ("I passed my exam!", "Congratulations!"),
    ("Tell me a joke.", "Why did the scarecrow win a prize? It was outstanding in its field."),
    ("My train is late.", "That is annoying. I hope it comes soon."),
]
ANSWERED = [
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Who wrote Hamlet?", "William Shakespeare."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("what is 3 times 4", "12"),
    ("Which planet is the largest?", "Jupiter is the largest planet of the solar system."),
    ("currency of japan", "The currency of Japan is the yen."),
    ("When did the war end?", "It ended in 1945."),
    ("Tell me the chemical symbol of gold.", "The chemical symbol of gold is Au."),
]
CLOSINGS = [
    "Thanks!",
    "Thank you so much.",
    "Great, that helped a lot.",
    "Bye!",
    "ok, thanks",
    "Perfect, thank you.",
    "Cheers",
    "See you tomorrow",
    "Got it, thanks.",
    "Good night!",
    "That's all, thanks.",
    "Nice, thank you very much",
]
TASKS = [
    "Write a haiku about autumn.",
    "Translate this into French: I will be late.",
    "Suggest three names for a cat.",
    "Write a thank-you note to my neighbour.",
    "Make this sound more polite: Send me the report.",
    "Write a Python function that reverses a list.",
    "Plan a weekend trip with two kids.",
    "Write a limerick.",
    "Summarise this in a sentence: The meeting moves to Friday because the room is taken.",
    "Draft a birthday card.",
    "Help me write a cover letter for a bakery job.",
    "Give me ideas for dinner tonight.",
    "Fix this: he go home.",
    "Sort these words: pear, apple, fig.",
    "Write a short story about a brave snail.",
    "Invent a slogan for a bakery.",
]
BACK = [
    "Are you sure?",
    "Can you say that in other words?",
    "Why is that?",
    "Interesting, go on.",
    "Tell me more.",
]


def _turns(pairs: Sequence[tuple[str, str]], last: str) -> list[Message]:
    told = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return [*told, {"role": "user", "content": last}]


KINDS: dict[str, Callable[[random.Random], list[Message]]] = {
    "small talk": lambda draw: _turns(
        draw.sample(TALK, 2), draw.choice([text for text, _ in TALK])
    ),
    "an answered question, then thanks": lambda draw: _turns(
        [draw.choice(TALK), draw.choice(ANSWERED)], draw.choice(CLOSINGS)
    ),
    "a task": lambda draw: _turns(
        [draw.choice(TALK), draw.choice([*TALK, *ANSWERED])], draw.choice(TASKS)
    ),
    "a question back on an answer": lambda draw: _turns(
        draw.sample(ANSWERED, 2), draw.choice(BACK)
    ),
}


def conversations(count: int, seed: int) -> list[Job]:
    draw, names = random.Random(seed), list(KINDS)
    made = [(names[number % len(names)], number) for number in range(count)]
    return [
        Job(
            f"{name}+{number}",
            {"messages": KINDS[name](draw), "policy": "gate"},
            (),
            {"kind": name},
        )
        for name, number in made
    ]


def table(lines: Sequence[Line]) -> str:
    """Return the share withheld by kind, and how many of these are outside training by their form
    or readings."""
    rows = []
    for name in (*KINDS, "all"):
        some = [line for line in lines if name in (line["kind"], "all")]
        withheld = [line for line in some if line.get("decision", "continue") != "continue"]
        if some:
            low, high = jeffreys(len(withheld) / len(some), len(some))
            share = f"{len(withheld) / len(some):.2f} [{low:.2f}, {high:.2f}]"
            rows.append(
                [name, str(len(some)), share, str(sum(bool(line["outside"]) for line in withheld))]
            )
    return markdown_table(
        ["conversations", "tried", "withheld", "of these outside"], rows, range(1, 4)
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=200)
    add_options(parser)
    options = parser.parse_args()
    with answers(options) as ask:
        lines = together(
            ask,
            conversations(options.conversations, options.seed),
            "conversations",
            options.workers,
        )
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
