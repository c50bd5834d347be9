"""How people order something new: a text, code, ideas, a plan.  Written as in ``task_talk.py``."""

from __future__ import annotations

WRITING = (
    "write {piece} about {topic}",
    "write {piece} about {topic} and {topic}",
    "compose {piece} on {topic}",
    "make up {piece} in which {role} meets {role}",
    "write {piece} set in {place}",
    "write {piece} for {person}",
    "come up with {piece} about {topic} for a five-year-old",
    "begin {piece} with the words: it was late in {place}",
    "finish this: one morning, {role} woke up in {place}",
    "I need {piece} about {topic} by tonight.",
    "{piece} about {topic}",
    "How would {role} describe {topic}?",
    "What would {piece} about {topic} look like?",
    "describe {topic} as if I could smell it",
    "write a postcard from {place} to {person}",
    "give me three opening lines for {piece} about {topic}",
)

LETTERS = (
    "write an email to {person} about {matter}",
    "draft a short message to {person} concerning {matter}",
    "write a polite letter to {person} about {matter}",
    "write a text to {person} that mentions {matter}, friendly but firm",
    "I have to write to {person} about {matter}. How should I begin?",
    "How do I tell {person} about {matter} without sounding rude?",
    "What could I write to {person} about {matter}?",
    "Email to {person}, subject: {matter}. Make it warm.",
    "word a reply to {person}, who asked about {matter}",
    "write a cover letter for a job in {place}",
    "compose a speech for {person}, two minutes, mention {matter}",
    "write an apology to {person} for {matter}",
    "Who should I address in a letter about {matter}, and how would you open it?",
    "write a toast to {name} and {name}, who met in {place}",
    "prepare a voicemail to {person} about {matter}",
)

CREATIVE = (
    "describe {topic} {constraint}",
    "tell a story about {topic} {constraint}",
    "write about {place} {constraint}",
    "introduce {role} {constraint}",
    "say good morning {constraint}",
    "write a goodbye to {person} {constraint}",
    "Can one describe {topic} {constraint}?",
    "What would {topic} be like {constraint}?",
    "How would you praise {name} {constraint}?",
    "{topic}, {constraint}",
    "try this: {topic} {constraint}",
    "write the same thing twice about {topic}, first plainly and then {constraint}",
)

CODING = (
    "write a Python function that {job}",
    "write a program in C that {job}",
    "write a JavaScript function that {job}",
    "write a bash script that {job}",
    "implement something in Rust that {job}",
    "write {query}",
    "show me {query}",
    "I need {query}.",
    "How would you write a function that {job}?",
    "What would a small class look like that {job}?",
    "give me code that {job}, with tests",
    "Python, no libraries, something that {job}.",
    "add type hints to a function that {job}",
    "write pseudo code for something that {job}",
    "How do I write {query}?",
    "I'm a beginner. Write some code that {job} and comment every line.",
)

BRAINSTORM = (
    "give me ten {ideas}",
    "suggest some {ideas}",
    "list unusual {ideas}",
    "brainstorm {ideas}",
    "I'm looking for {ideas}.",
    "Any {ideas}?",
    "What are some {ideas}?",
    "What could be good {ideas}? I have no imagination.",
    "Can you think of {ideas}, preferably with a touch of {place}?",
    "Which {ideas} would you suggest to {person}?",
    "{ideas}, five of them, nothing boring",
    "think up {ideas} that {role} would like",
    "More {ideas}!",
    "Do you have {ideas} for {name}?",
)

PLANNING = (
    "plan {plan}",
    "make a plan for {plan}",
    "write a checklist for {plan}",
    "I have to organise {plan}. Where do I start?",
    "How should I go about {plan}?",
    "What could a schedule for {plan} look like?",
    "What do I need to think of for {plan}?",
    "break {plan} down into small steps",
    "Could we plan {plan} together?",
    "{plan}: give me a timetable",
    "set priorities for {plan}, since {trouble}",
    "Who should do what for {plan}? We are {name}, {name} and {name}.",
    "How much time should I set aside for {plan}?",
)
