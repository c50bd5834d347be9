"""How people talk to a model, ask it for advice, or tell it what to be.

A template that begins with a small letter is an order and is put behind one of LEADS; any other stays as it is.  Names
in braces are filled from SLOTS of ``tasks.py``.
"""

from __future__ import annotations

LEADS = (
    "{upper}.",
    "{upper}.",
    "{upper}.",
    "{upper}",
    "{upper}!",
    "{lower}",
    "{upper}, please.",
    "Please {lower}.",
    "please {lower}",
    "Can you {lower}?",
    "can you {lower}",
    "Can you please {lower}?",
    "Could you {lower}?",
    "Could you please {lower}?",
    "Would you {lower}?",
    "Would you mind if I asked you to {lower}?",
    "I want you to {lower}.",
    "I'd like you to {lower}.",
    "I need you to {lower}.",
    "Help me {lower}.",
    "How would you {lower}?",
    "Will you {lower} for me?",
    "I wonder if you could {lower}.",
    "Your task: {lower}.",
    "Let's {lower}.",
)

ASIDES = (
    "{q} Take your time.",
    "{q} Surprise me.",
    "{q} No rush.",
    "{q} It is for a friend.",
    "{q} I'm in a hurry.",
    "{q} Not too long, please.",
    "{q} I trust your taste.",
    "{q} Thank you!",
    "ok so {q}",
    "Okay, new topic. {q}",
    "It's late and I am tired. {q}",
    "My wife said you could help. {q}",
    "I'm on a train to Vienna and have nothing to do. {q}",
    "{q} The last one was too stiff.",
    "This may sound silly. {q}",
    "{q} I need it in five minutes.",
)

GREETING = (
    "{hello}",
    "{hello} {chat}",
    "{hello} {name} here.",
    "{hello} Nice to meet you.",
    "{hello} It's {name} again.",
    "{hello} Greetings from {place}!",
    "{hello} Can you hear me?",
    "{hello} My name is {name} and I'm from {place}.",
    "{hello} Anybody home?",
    "{hello} Do you have a minute?",
)

CHATTING = (
    "{chat}",
    "{chat} {chat}",
    "My name is {name}. {chat}",
    "What would you say if I moved to {place}?",
    "Do you think {name} likes me?",
    "I just read something about {topic}, and now I can't stop smiling.",
    "I'm writing to you from {place}. {chat}",
    "Would you rather be {role} or {role}?",
    "I dreamed of {topic} last night.",
    "How would you feel about a trip to {place}?",
    "Who would you take along to {place}?",
    "You won't believe it: {trouble}.",
)

LEAVING = (
    "{bye}",
    "{bye} {bye}",
    "{bye} Greetings to {place}!",
    "{bye} {name} will be happy.",
    "{bye} My flight to {place} leaves soon.",
    "Thank you for the help with {matter}.",
    "Your lines on {topic} were lovely. {bye}",
    "I showed it to {person}, and everybody liked it. {bye}",
    "What would I do without you? {bye}",
)

ABOUT = (
    "{you}",
    "{you} {you}",
    "{hello} {you}",
    "Would you like to be {role}?",
    "How good are you at writing about {topic}?",
    "Do you ever think about {topic}?",
    "Have you ever wanted to visit {place}?",
    "Can you speak {language}?",
    "What would you do with a day in {place}?",
    "{name} says you are only a program. {you}",
)

OPINION = (
    "What do you think of {view}?",
    "What's your opinion on {view}?",
    "How do you feel about {view}?",
    "Do you like {view}?",
    "Is {view} overrated?",
    "{view}: yes or no?",
    "Why do people love {view}? I don't get it.",
    "Who would enjoy {view}, in your view?",
    "argue for {view}",
    "argue against {view} in two sentences",
    "What speaks for {view}, and what against?",
    "I think {view} is great. Convince me otherwise.",
    "Which is better, {view} or {view}?",
    "Would you defend {view} in front of {person}?",
    "Do you agree with {name} about {view}?",
)

ADVICE = (
    "{trouble}. What should I do?",
    "{trouble}, any advice?",
    "What would you do if you were me? {trouble}.",
    "I need some advice. {trouble}.",
    "How do I deal with it when {trouble}?",
    "Is it my fault that {trouble}?",
    "{trouble} and {trouble}. Where do I start?",
    "{trouble}. Should I talk to {person}?",
    "cheer me up, because {trouble}",
    "Who could I talk to? {trouble}.",
    "{trouble}. Please just listen.",
    "Am I overreacting? {trouble}.",
    "What would {role} advise me? {trouble}.",
    "decide for me, since {trouble}",
)

ROLE_PLAY = (
    "pretend to be {role}",
    "act as {role} and greet me",
    "You are {role}. I walk in. Say something.",
    "Let's play: you are {role}, and I am {role}",
    "Imagine you are {role}. How do you spend your evening?",
    "talk like {role} from now on",
    "be {role} and complain about {topic}",
    "What would {role} say about {topic}?",
    "How would {role} order breakfast in {place}?",
    "interview me as if I were {role}",
    "stay in character as {role} until I say stop",
    "Who goes there? I am {role}, and this is {place}!",
    "simulate a chat between {role} and {role}",
)

META_REQUESTS = (
    "{meta}",
    "{meta} {meta}",
    "{bye} {meta}",
    "Call me {name} from now on.",
    "Answer like {role} from now on.",
    "Answer in {language} from now on.",
    "I will ask you about {topic} in a minute.",
    "I'm going to paste a letter to {person}. Wait for it.",
    "When I say {place}, you say {place}.",
    "How do you want me to tell you about {matter}?",
)

FOLLOW_UPS = (
    "{meta}",
    "{bye}",
    "make that shorter",
    "put that into {language}",
    "write {piece} about that",
    "say that again as {role}",
    "put your answer into a table",
    "use that in an email to {person}",
    "now write {piece} about {topic}",
    "How would you say that to {person}?",
    "What a nice answer! {bye}",
    "Can you write that in capital letters?",
    "make a joke about it",
    "Good. Next: {ideas}.",
    "Who asked you to be so serious? Be {role}.",
    "Ha, {name} owes me five euros. {bye}",
    "Enough of that. {chat}",
    "turn that into {piece}",
    "I knew it. {meta}",
)
