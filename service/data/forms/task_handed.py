"""How people hand over a text, or code, and say what to do with it.  Written as in ``task_talk.py``.

HANDED are layouts; longer texts come in the layouts of passages, too.
"""

from __future__ import annotations

HANDED = (
    "{head}\n\n{given}",
    "{head}\n{given}",
    "{head} {given}",
    '{head} "{given}"',
    '{head}\n\n"{given}"',
    "{given}\n\n{head}",
    '"{given}" {head}',
    "{given}\n---\n{head}",
    "Here it is:\n{given}\n\n{head}",
    "{head}\n\n>>> {given}",
)

REWRITING = (
    "fix the grammar",
    "correct my English",
    "make this shorter",
    "make this more polite",
    "rewrite this in a formal tone",
    "make it sound casual",
    "rephrase this so that {person} would not be hurt",
    "proofread this",
    "turn this into the past tense",
    "put this into the passive voice",
    "say this as {role} would",
    "How would you phrase this politely?",
    "What is a friendlier way to put this?",
    "Is this sentence all right like that, or would you change it?",
    "Does this sound natural to you?",
    "Can this be said in fewer words?",
    "improve the style but keep my words where you can",
    "add some humour to this",
    "Spelling and commas, please.",
    "Which words would you cut here?",
)

TRANSLATING = (
    "translate this into {language}",
    "translate the following sentence into {language}",
    "put this into {language}",
    "How do I say this in {language}?",
    "What would this be in {language}?",
    "{language}, please:",
    "give me a {language} version, informal",
    "translate into {language} and then into {language}",
    "I am writing to a friend in {place}. Translate this into {language}:",
    "translate word for word into {language}",
    "Is there a nicer way to say this in {language}?",
    "subtitle this in {language}, short lines",
)

CODE_HELP = (
    "fix this code",
    "explain this code",
    "find the bug",
    "make this faster",
    "refactor this",
    "add comments to this code",
    "translate this code into Go",
    "write a unit test for this",
    "Why does this not work?",
    "What does this do?",
    "What is wrong here?",
    "Can this be done in one line?",
    "Is this good style?",
    "rename the variables so that one can read it",
    "Code review, please.",
    "turn this into a function with a docstring",
)

SUMMARY = (
    "summarise this",
    "summarize the text in one sentence",
    "summarise it in three bullet points",
    "give me the gist",
    "TL;DR",
    "shorten this text to twenty words",
    "write a headline for this text",
    "What is this text about, in a few words?",
    "What would be a good title for this?",
    "How would you sum this up for {person}?",
    "Can I have the main points?",
    "sum up the text in {language}",
    "condense this to half its length",
    "explain this text to a child",
    "turn this into a tweet",
    "retell this as {role}",
)

EXTRACTING = (
    "list all names in this text",
    "list the numbers that occur in the text",
    "extract the places",
    "pick out all verbs",
    "Which people are mentioned in this text?",
    "Does this text mention a city?",
    "Does the text say anything about money?",
    "Is anybody angry in this text? Answer yes or no.",
    "copy the last sentence of the text",
    "mark every adjective",
    "quote the sentence that {person} would find funniest",
    "underline what could be left out",
    "return the first word of each sentence as a list",
    "What keywords would you give this text?",
    "How many people speak in this text, if any?",
    "find the dates, and write none if there are none",
)

CLASSIFYING = (
    "decide whether this review is positive or negative",
    "rate the sentiment from 1 to 5",
    "Sentiment?",
    "Is this review positive, negative or neutral?",
    "label this as praise, complaint or question",
    "Is this sarcastic?",
    "What mood is the writer in?",
    "Does the writer sound angry?",
    "Who should handle this message, sales or support?",
    "choose a tag for this: product, delivery, service, other",
    "Would you call this spam?",
    "How polite is this on a scale from 1 to 10?",
    "guess whether {person} wrote this",
    "Positive or negative?",
    "reply to this review as the owner of a shop in {place}",
)

FORMATTING = (
    "sort these alphabetically",
    "turn this into a bullet list",
    "convert this to JSON",
    "make a table of this",
    "number these",
    "put these into a comma separated list",
    "reverse the order",
    "write each of these in capital letters",
    "group these as you see fit",
    "format this as YAML",
    "pair them up",
    "How would this look as a CSV with a header?",
    "Can I have these as a markdown table?",
    "remove every second one",
    "wrap each in quotation marks",
    "Which order would you put these in? Any will do.",
    "make one sentence out of these",
)
