"""Tells from its words what the last message of a conversation asks for.

The probe ``asks`` reads the end of a prompt.  After a refused question, it takes "go on" for small
talk, and also a question inside a task.  The risk of a message with two questions is mostly that of
the easier one.  So these rules decide which readings count, and how sure the probe has to be
(``guarantee.Standing.no_fact_below``).  They know English and a few words of other languages; a
message that they do not understand counts as one that may ask."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from service.judging.passages import has_passage, text_of

Asks = Literal["small_talk", "task", "plain", "inside", "beside", "elsewhere", "several", "earlier"]
"""``small_talk``: greetings, thanks, words about user and assistant.  ``task``: a request to write,
translate or sort something, in which no word asks for a fact.  ``plain``: one other question or
request, which the probe can read itself.
``inside``: words that may contain a question.  ``beside``: a question among other sentences, or
behind a colon or in quotation marks.  ``elsewhere``: a question may stand in another message, or in
what was not read.  ``several``: more than one question.  ``earlier``: it calls for the answer to an
earlier message, which got none."""

# characters of a text, and of a sentence, half of them from its end
LONGEST_READ, LONGEST_SENTENCE = 4000, 400
LONG_TURN = 12  # words; a longer message calls for an earlier answer only in explicit words
SHORT_TURN = (
    6  # words; in a message up to this length "that", "please", "more" refer to an earlier one
)
OWN_REQUEST = 4  # least words of a request that is understood without an earlier message
CHAT = 8  # most words of small talk


def _words(*lines: str) -> str:
    return "|".join(word for line in lines for word in line.split())


_MARKS = "?\uff1f\u061f"  # question marks, also of Chinese and Arabic
_WH = (
    r"(?:what|which|who|whom|whose|where|when|how\s+(?:many|much|old|long|far|tall|high|big|"
    r"large|deep|fast|often)|"
    r"(?:what|who|where|when)['\u2019]?s|wer|wen|wem|wessen|welche[rsnm]?|wo|wann|wie\s+viele?|"
    r"wie\s+hei(?:\u00df|ss)t|"
    r"wie\s+(?:lautet|alt|hoch|gro(?:\u00df|ss)|weit|lang)|was\s+(?:ist|sind|war)|qui|o\u00f9|"
    r"quand|"
    r"quel(?:le)?s?|combien|cu[a\u00e1]l(?:es)?|qui[e\u00e9]n(?:es)?|d[o\u00f3]nde|cu[a\u00e1]ndo|"
    r"cu[a\u00e1]nt[oa]s?)"
)
_WH_CHINESE = (  # who, which, what, how many, when
    "(?:\u8c01|\u54ea|\u4ec0\u4e48|\u591a\u5c11|\u4f55\u65f6)"
)
# Words for facts. The second kind counts only before "of", since any task may have words such as
# "name" or "year".
_FACT = (
    r"(?:capitals?(?!\s+letter)(?:\s+cit(?:y|ies))?|currenc(?:y|ies)|populations?|presidents?|"
    r"prime\s+ministers?|"
    r"authors?|inventors?|founders?|painters?|composers?|discoverers?|birthplaces?|"
    r"chemical\s+symbols?|atomic\s+numbers?|"
    r"official\s+languages?|hauptst(?:adt|\u00e4dte)|w\u00e4hrung|autor(?:en)?|capitales?|"
    r"monnaie|auteur|moneda)"
)
_FACT_OF = (
    r"(?:symbols?|languages?|countr(?:y|ies)|continents?|regions?|flags?|anthems?|rivers?|"
    r"heights?|kings?|queens?|"
    r"leaders?|winners?|year|dates?|writers?)"
)
_ANY_FACT = rf"(?:{_FACT}|{_FACT_OF})"
# capital, author, currency, population
_FACT_CHINESE = "(?:\u9996\u90fd|\u4f5c\u8005|\u8d27\u5e01|\u4eba\u53e3)"
# "the language of the user"
_HERE = r"(?:users?|customers?|guests?|questions?|messages?|texts?|this|that)\b"
_NAMES_FACT = re.compile(
    rf"\b(?:{_FACT}\b|{_FACT_OF}\s+(?:of|for)\s+(?!(?:(?:the|your|an?)\s+)?{_HERE}))|"
    rf"{_FACT_CHINESE}",
    re.IGNORECASE,
)
_DID = (
    r"(?:wrote|painted|invented|discovered|composed|founded|directed|sang|won|sank|built|born|"
    r"died|lies|located|"
    r"made|fell|began|ended)"
)
_CALL = (
    r"(?:(?:please\s+)?(?:tell|give|send|show|remind)\s+(?:me|us)(?!\s+(?:an?|another|some|"
    r"more|about|ideas)\b)|"
    r"(?:please\s+)?(?:name|list|state|identify|specify)\s+(?:me\s+)?(?:the|a|all|one|two|"
    r"three|its|their)|"
    r"do\s+you\s+(?:happen\s+to\s+)?know|"
    r"(?:can|could|would|will)\s+you\s+(?:please\s+)?(?:tell|say|give|name|state|list|find)|"
    r"i(?:\s+also|['\u2019]d)?\s+(?:wonder|"
    r"(?:want|need|(?:would\s+)?(?:also\s+)?like)\s+to\s+know(?!\s+(?:it|this|that)\b)|"
    rf"(?:need|want)\s+the)|(?:explain|say|state|write)\s+{_WH}|nenne|sage?\s+mir|dis-moi|dime)"
)
_LEAD = (
    r"(?:and|also|then|now|next|plus|or|but|so|oh|ok(?:ay)?|please|second(?:ly)?|first(?:ly)?|"
    r"third(?:ly)?|finally|"
    r"additionally|btw|by\s+the\s+way|after\s+that|p\.?\s*s|"
    r"(?:one\s+more|another)(?:\s+(?:thing|question|one))?|[a-h]\)|\d[.)])"
)
_BEGINS = re.compile(
    rf"^(?:[^:?.]{{0,40}}:)?\W*(?:{_LEAD}[\s\W]+)*(?:{_WH}|{_CALL})\b", re.IGNORECASE
)
# "capital of samoa", "while you are at it, the currency of Yemen", "Yemen: capital?"
_KEY_WORDS = re.compile(
    rf"^(?:[^,:.]{{0,30}}[,:])?\W*(?:{_LEAD}\W+)*(?:the\s+)?"
    rf"(?:{_FACT}(?:\?|\s+\w+\W*$)|{_ANY_FACT}\s+(?:of|for|in)\s+"
    r"(?!.*\b(?:is|was|are|were)\b)[\w'\u2019-]+(?:\s+[\w'\u2019-]+){0,4}\W*$)",
    re.IGNORECASE,
)
_ASKING = re.compile(
    rf"{_WH_CHINESE}|\b(?:{_WH}|is|are|was|were|do|does|did|can|could|has|have|had|will|would|"
    rf"why|how|of|in)\b",
    re.IGNORECASE,
)
_FILLER = re.compile(
    r"^\W*(?:(?:hi|hello|hey|ok(?:ay)?|excuse\s+me|sorry)\W+)*(?:"
    r"(?:can|could|may|would)\s+(?:you|i|we)\s+(?:please\s+)?(?:help|ask|answer)\b[^?]{0,40}|"
    r"d(?:o|id)\s+you\s+(?:happen\s+to\s+)?(?:know|remember)(?:\s+(?:this|that|it|the\s+answer|"
    r"by\s+any\s+chance))?|"
    r"(?:can|could|would)\s+you\s+(?:please\s+)?(?:tell\s+me|do\s+me\s+a\s+favou?r)|"
    r"are\s+you\s+there|"
    r"d(?:o|id)\s+you\s+speak\s+\w+|(?:please\s+)?(?:tell|give)\s+me\s+(?:in\s+(?:one|"
    r"a)\b[^?]{0,40}|"
    r"(?:only\s+|just\s+)?(?:the|its|his|her)\s+(?:\w+\s+)?(?:name|answer|word|number|"
    r"result)(?:\s+only)?)|"
    r"(?:quick\s+)?(?:question|favou?r)|guess\s+what|you\s+know\s+what|"
    r"how\s+are\s+you[^?]{0,20}|ready|right|yes|no|"
    r"really|what['\u2019]?s\s+up|anyone|any\s+ideas?)\W*$",
    re.IGNORECASE,
)
_RUN = re.compile(r"([^\w\n]{4})[^\w\n]*([^\w\n]{4})|(?<=___)_+(?=___)")  # of marks and blanks
_EXAMPLE = re.compile(
    r"^[ \t]*(?:q|question|user|input)\s*\d*[:.)].*\n+["
    r" \t]*(?:a|answer|assistant|output)\s*\d*[:.)][ \t]*\S.*$",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCES = re.compile(
    rf"(?<=[.!;{_MARKS}])(?<!\b[A-Za-z1-9]\.)(?<!\b[DJMS][rt]\.)(?<!\bMrs\.)\s+|"
    rf"(?<=[!;{_MARKS}\u3002])(?=[^\W\d])|"
    r"\s(?=\(?[b-h]\)\s)|\s(?=\(?[1-9][.)]\s)|\s(?=[|\u2022]{1,2}\s)|(?<=\?\")\s*[,}]"
)
_ITEM = re.compile(r"\s*(?:\(?\d{1,2}[.):]|\(?[a-h][.)]|[-*\u2022])\s+\S", re.IGNORECASE)
_FURTHER = re.compile(  # the beginning of a second question
    r"^\W*(?:(?:(?:and\s+)?(?:also|additionally|second(?:ly)?|third(?:ly)?|then|next|p\.?\s*s\b)|"
    r"(?:one\s+more|another|next)\s+(?:thing|question|one))(?=[\s\W])(?!.*\.$)|"
    r"(?:and|or|und|et|y|(?:and\s+)?(?:what|how)\s+about)\s+(?!you\b)\S+(?:\s+\S+){0,3}\?+$|"
    r"(?:the\s+)?same\s+for\s+\w|\S{1,12}\u5462)",
    re.IGNORECASE,
)
_SEVERAL = re.compile(
    r"(?<!one\sof\s)\b(?:two|three|four|five|several|multiple|both|these|following)\s+"
    r"(?:(?:quick|short|easy|little|other)\s+)?(?:questions|ones|things\W*:|parts)(?!\s+(?:i|"
    r"we)\b)|\b(?:answer|name)\s+both\b"
    rf"|\b(?:for|of|match)\s+(?:each|every)\b.{{0,60}}\b{_FACT}\b|\b{_FACT}\s+(?:of|"
    rf"for)\s+(?:each|every)\b",
    re.IGNORECASE,
)
_OF_EACH = re.compile(
    r"\b(?:each|every|all|both|following|these|\w{3,}s\s+(?:of|for|in))\b", re.IGNORECASE
)
_BLANK = re.compile(
    r"\w\s*(?:(?:[:=,|]|->)\s*(?:\?+|_{2,})|\|\s*)\s*\|?\s*$"
)  # a row with a blank to fill in
_ON_TEXT = re.compile(  # asks for work on a text, which may itself be a question
    r"\btranslat|\b(?:rewrit|rephras|past\s+tense|fewer\s+words|this\s+be\s+(?:in|said)|"
    r"(?:say|write|put|turn)\s+(?:this|it|each)\b)",
    re.IGNORECASE,
)
_BRIEFLY = re.compile(
    r"^\W*(?:answer|explain|reply|respond|please|give|keep|be|in\s+one)\b", re.IGNORECASE
)

# Two questions in one sentence: joined questions, two things of a kind, two of one thing.
_AND = (
    r"(?:[;&/+|]|\b(?:and|or|also|plus|then|vs|versus|und|et|y|sowie|as\s+well\s+as|"
    r"after\s+that)\b)"
)
_JOINT = re.compile(
    rf"{_AND}\W*(?:{_LEAD}\W+)*(?:(?:in|on|at|to|from|of|by|for|with)\s+)?(?:{_WH}\b|{_CALL}\b|"
    rf"(?:the|its|his|her|their)\s+{_ANY_FACT}\b)",
    re.IGNORECASE,
)
_HEAD = re.compile(  # the first of two joined questions: "tell me who ..", "the capital of .."
    rf"{_BEGINS.pattern}|\b(?:asks?|asked|tell|know|wonder|say|explain)\s+(?:\w+\s+)?{_WH}\b|"
    r"^\W*(?:\w+\W+){0,5}of\s+\w+\W*$",
    re.IGNORECASE,
)
_ONE_THING = re.compile(
    r"^\W*(?:in\s+)?(?:which|what)\s+\w+\s", re.IGNORECASE
)  # "which city is .. and the capital"
_ITS = re.compile(r"\b(?:the|its|his|her|their)\b", re.IGNORECASE)
_STATES = (
    r"(?:herzegovina|tobago|barbuda|nevis|pr[i\u00ed]ncipe|miquelon|futuna|grenadines|caicos|"
    r"jan\s+mayen|labrador|"
    r"northern\s+ireland|south\s+sandwich|mcdonald)"
)  # second names of one state: "Trinidad and Tobago"
_TWO_NAMES = (
    rf"[^?.,;]{{1,60}}?(?:\band\b|&)\s+(?!(?:the\s+)?{_STATES}|"
    r"(?:is|was|are|were|has|its|their)\b)\w"
)
_TWO = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # ", and Yemen is in which region"
        rf",\s*(?:and|or|plus|then)\s+[^,?]{{0,80}}?\b(?:in|of|on|at|by|to|is|was)\s+{_WH}\b",
        # ", and name the capital of Yemen"
        r",\s*(?:and|plus|then)\s+(?:please\s+)?(?:name|tell|give|say|"
        r"state)\s+(?:me\s+)?(?:the|its|an?|who|what|which)\b",
        # "capital of France and the currency of Yemen"; behind a comma alone, ", the capital of"
        # says more of the same
        rf"\b{_ANY_FACT}(?:\s+(?:of|for|in)\s+[^,;.?&/|]{{1,40}}?)?\s*(?:,?\s*{_AND}|"
        rf",(?!\s*(?:the|an?)\b))\s*"
        rf"(?:(?:the|its|also|of|[\w-]{{1,30}}['\u2019]s)\s+){{0,2}}{_ANY_FACT}\b",
        # "capital of France and Yemen"; "capitals of"
        rf"\b(?:capital|currency|population|symbol|language)\s+(?:of|for)\s+{_TWO_NAMES}",
        rf"\b{_ANY_FACT}(?<=s)\s+(?:of|for|in)\W+{_TWO_NAMES}",
        r"\b(?:capitals|currencies)\s+(?:of|for)\W+\w[^?.,;]{0,30},\s*\w",
        r"\b(?:capitales|hauptst\u00e4dte)\s.{1,60}?\b(?:et|und|y)\s",
        # "and that of Yemen", "und die von", "and of Yemen"
        r"\b(?:and|or|und|et|y)\s+(?:that|those|die|der|das|celle|la|el)\s+(?:of|von|de|du|del)\s",
        rf"\b{_ANY_FACT}\s+of\s+[^,;&?.]{{1,60}}?\band\s+of\s+\w",
        r"^\W*(?:when|where|who|what)\s+and\s+(?:when|where|who|what|how)\b",
        # "where are Lyon and Manado", "which countries do Lyon and Manado belong to"
        rf"^\W*(?:in\s+)?(?:where|(?:which|what)\s+(?:countries|cities|continents|"
        rf"states))\s+(?:are|lie|do|were)\s+"
        rf"{_TWO_NAMES}\w*(?:\s+(?:located|situated|in|lie|belong\s+to))?\W*$",
        # "who wrote emma who wrote faust", "who wrote Emma, who painted"
        r"\b(who|where|when|what|which)\s+(\w+)\s.{2,60}\b\1\s+\2\b",
        r"^\W*(?:who|where|when)\s+(?!(?:is|was|are|were)\b)[^,]{3,60},\s*(?:who|where|"
        r"when)\s+\w+\s+\w",
        rf"{_WH_CHINESE}[^\uff0c,]{{0,40}}[\uff0c,].{{0,40}}{_WH_CHINESE}",
        r"\beach\s+of\s+(?:these|the\s+following)\b|\brespectively\b",
    )
)

# Words of a task, or of a system prompt, that may contain a question or name a fact.
_INSIDE = re.compile(
    rf"{_NAMES_FACT.pattern}|{_WH_CHINESE}|\b(?:{_WH}|whoever|whichever|wherever)\b\s+"
    r"(?!(?:you|i|we|to|it|they|he|she)\b)|\banswer(?:s|ed|ing)?\b"
    r"|\bthe\s+(?:[\w'-]+\s+){1,3}(?:of|for|in|from|at|on)\s+"
    r"(?!(?:this|that|these|those|my|our|your|a|an|it|the\s+following)\b)\w"
    r"|\b(?!(?:it|that|he|she|let|there|here|who|what)['\u2019]s)\w[\w-]{0,40}['\u2019]s\s+"
    r"(?:[\w-]{1,40}\s+){0,2}\w{4}|\bthe\s+[A-Z][\w-]{1,40}\s+\w{4}",
    re.IGNORECASE,
)
_PLAIN_WORDS = _words(
    "a an and are as at be but can could did do does he her his how i if in is it let let's my no"
    " of on or our please",
    "she should so that the their there these they this was we were what when where which who whose"
    " why will would yes",
    "you your i'm i've i'd i'll it's",
)
# a capital or a letter of another script in no plain word; a number, quotation, code; "Mozart's"
_NAMED = re.compile(
    rf"(?<!\A)(?!(?i:{_PLAIN_WORDS})(?![\w'\u2019]))[^\W\d_a-z\u00df-\u00ff]|\d|"
    r"[\"`\u201c\u201e\u00ab\[{=<]|^\W*\w+(?:['\u2019]s\b|,)"
)
_OF_FACT = re.compile(  # words of facts about what has no name: "the planet closest to the sun"
    rf"\b(?:{_DID}|{_ANY_FACT}|answers?|facts?|names?|named|called|numbers?|stands\s+for|first|"
    rf"last|most|\w{{3,}}est|"
    r"how\s+(?:many|much|old|long|far|tall|high|big|large|deep|fast|often))\b",
    re.IGNORECASE,
)
_LANGUAGE = re.compile(  # that a text is put into
    r"\b(?:in|into|to|from)\s+(?:\w+\s+)?(?:english|french|german|spanish|italian|portuguese|"
    r"dutch|polish|russian|"
    r"swedish|danish|norwegian|finnish|greek|turkish|czech|hungarian|romanian|arabic|hebrew|"
    r"hindi|japanese|korean|"
    r"chinese|latin)\b(?!\s+(?!that\b|please\b)\w)",
    re.IGNORECASE,
)
_OPEN_END = re.compile(
    r"(?:[:=,(>_-]|\.\.|\u2026|\b(?:is|are|was|of|in|by))[\s_\"'`]*$"
)  # a text to be continued
_INSIDE_SYSTEM = re.compile(
    rf"(?i:{_WH_CHINESE}|\b{_WH}\s+(?:\w+\s+){{0,3}}{_DID}\b|"
    rf"\b{_WH}\s+(?:\w+\s+)?(?:is|was|are|were|has|does|did)\b|"
    r"\b(?:mention|nam(?:e|ing)|open|start|begin|stat(?:e|ing)|reveal|output|"
    r"insert)\b.{0,40}?\bthe\s+(?:\w+\s+){1,3}"
    rf"(?:of|in|for|that)\s+(?!(?:(?:the|your|an?)\s+)?{_HERE})\w)|(?i:\b(?:state|name|mention|"
    rf"say|tell|give|write|"
    r"include|answer|begin|start|reply|respond|"
    r"end)\b[^.]{0,60}?)\b(?:the\s+(?:\w+\s+){1,3}of\s+(?:the\s+)?[A-Z]|"
    r"[A-Z][\w-]{0,40}['\u2019]s\s+\w)"
)
_STATES_FACT = re.compile(  # "Bern is the capital of Switzerland.", "The capital of Peru is Lima."
    rf"\b(?:is|was|has)\s+the\s+(?:\w+\s+){{0,3}}{_ANY_FACT}\b|"
    rf"\b{_ANY_FACT}\s+of\s+[^.]{{1,60}}?\s(?:is|was)\s",
    re.IGNORECASE,
)
_ABOUT_ME = re.compile(
    r"^\W*(?:(?:hi|hey|hello|well|oh|so|yes|no|ok)\W+)*(?:i|i['\u2019](?:m|ve|d|ll)|my|we|our|"
    r"it['\u2019]?s|you\s+are|"
    r"you['\u2019]re)\b",
    re.IGNORECASE,
)
_TO_PEOPLE = re.compile(
    r"\b(?:you|your|i|we|my|us|our|me)\b(?!\s+(?:please\s+)?(?:know|tell|say|name|give|find))",
    re.IGNORECASE,
)

# Words of a message that refers to an earlier one, or calls for its answer.
_BACK_WORDS = _words(
    "it that this these those they them he she him her his its one ones again anyway above previous"
    " before",
    "earlier first same guess guesses try continue go on yes yeah yep sure please answer answers"
    " question",
    "questions know think say so then well instead also more less short shorter shortly confident"
    " certain",
    "correct right wrong come proceed ahead best attempt anything something any just only ja oui si"
    " s\u00ed",
    "weiter bitte ears listening hear hearing waiting ready time rush hurry attention floor turn"
    " patient patience",
)
_TELL = r"tell(?!\s+me\s+an?\s)"
_ANAPHORIC_WORDS = _words(
    "it they them he she him her his its one ones again anyway above previous earlier guess guesses"
    " try continue yes",
    "yeah yep sure answer answers question questions know think say confident certain correct"
    " proceed attempt instead",
)
_ANAPHORA = re.compile(rf"\b(?:{_ANAPHORIC_WORDS}|go\s+on|go\s+ahead|{_TELL})\b", re.IGNORECASE)
_BACK = re.compile(rf"\b(?:{_BACK_WORDS}|{_TELL})\b", re.IGNORECASE)
_REFERRING_WORDS = _words(
    "it that this those these them again anyway guess guesses try continue yes sure certain think"
    " above earlier",
    "either instead not there",
)
_REFERS = re.compile(
    rf"\b(?:{_REFERRING_WORDS}|go\s+on|your?\s+(?:answer|guess)|the\s+answer|my\s+question)\b|"
    rf"n['\u2019]t\b",
    re.IGNORECASE,
)
_CALLS = re.compile(
    r"\b(?:guess|guesses|try|continue|go\s+on|go\s+ahead|again|anyway|yes|sure|(?:the|your|"
    r"an)\s+(?:answer|guess)|"
    rf"my\s+question|answer\s+(?:it|me|the|my)|{_TELL}\s+me)\b",
    re.IGNORECASE,
)
_AHEAD = re.compile(
    r"\b(?:this|these|that|the\s+following)\b[^.?!:]{0,60}:\s*\S.*", re.IGNORECASE
)  # "fix this: .."
_CAN_TELL = re.compile(  # of the assistant, who offers to tell something
    r"\b(?:(?:i|we)\s+(?:can|could|may|will|shall|might)|(?:shall|should|may|can|could)\s+(?:i|"
    r"we)|i['\u2019]ll|let\s+me|"
    r"(?:do|would)\s+you\s+(?:want|like|wish)|want\s+me\s+to)\b",
    re.IGNORECASE,
)
_TASK = re.compile(
    r"^\W*(?:(?:now|then|ok(?:ay)?|please|also|and|hi|hello|hey)\W+)*(?:(?:can|could|would|"
    r"will)\s+you\s+(?:please\s+)?|"
    r"(?:please\s+)?help\s+me\s+(?:to\s+)?)?(?:write|rewrite|reword|rephrase|paraphrase|"
    r"translate|summari[sz]e|shorten|"
    r"proofread|edit|fix|correct|sort|format|draft|compose|invent|brainstorm|suggest|plan|"
    r"design|code|implement|refactor|"
    r"debug|turn\s+th(?:is|ese)|make\s+th(?:is|ese)|convert\s+th(?:is|ese))\b",
    re.IGNORECASE,
)
_PRESSES = re.compile(  # words that press for the answer to an open question
    r"\b(?:shy|idea|bet|of\s+course|had\s+to|in\s+advance|whatever|training\s+data|reconsider|"
    r"s['\u2019]il\s+te|hint|"
    r"pretend|imagine|suppose|pressure|mistakes?|name\s+(?:one|any|a)|doch)\b",
    re.IGNORECASE,
)
_EARLIER = re.compile(  # words for an earlier message that need not be the previous one
    r"\b(?:first|previous|earlier|other)\s+(?:one|question)\b|\bmy\s+question\b|"
    r"\basked\s+(?:you\s+)?(?:before|earlier|first)\b|\bback\s+to\b",
    re.IGNORECASE,
)
_CLOSING = frozenset(
    _words(
        "oh ah alright too bad great good nice cool perfect fine got it i see no problem never mind"
        " nevermind thanks",
        "thank you thx ty cheers bye goodbye night day later tomorrow take care very so much a lot"
        " again anyway that",
        "helped helps was helpful is s all will be for your the help then ok okay danke merci"
        " gracias tschuss",
        "tsch\u00fcss have evening weekend me love loved like liked lovely beautiful brilliant"
        " wonderful amazing",
    ).split("|")
)
_THANKS = re.compile(
    r"\b(?:thanks?|thank\s+you|thx|ty|cheers|bye|goodbye|good\s+(?:night|bye)|see\s+you|"
    r"never\s*mind|no\s+problem|danke|"
    r"merci|gracias|tsch[\u00fcu]ss)\b",
    re.IGNORECASE,
)
_SMALL_TALK = frozenset(
    _words(
        "hi hello hey yo hallo bonjour hola greetings good morning afternoon evening night day"
        " today tonight",
        "yesterday tomorrow week weekend how are is am was were do does did can could will would"
        " you your",
        "yourself i me my we us our doing going feel feeling feels sad happy tired bored angry"
        " lonely fine great",
        "nice bad better ok okay well thanks thank thx very much so a lot for the help helped"
        " helpful bye goodbye",
        "see later meet love like hate enjoy friend funny lol haha sorry mistake wrong right that"
        " this it what",
        "who s m re t not no yes name robot human bot ai real person there up to talk chat have had"
        " fun joke",
        "birthday wish luck cool wow please be busy old made here music feelings smart sleep dream"
        " eat alive",
        "welcome pleasure too also just again really about with and or but tell work works working"
        " pretty kind",
        "sweet amazing awesome best understand speak english hear listening ready",
    ).split("|")
)

_REFUSED = re.compile(
    r"\b(?:not\s+(?:quite\s+|entirely\s+|completely\s+|really\s+)?(?:sure|certain|able|aware|"
    r"familiar|know|confident)|"
    r"(?:do|does|did|could|can|would|will|am|is|are|was|have)(?:n['\u2019]?t|\s+not)\b|cannot|"
    r"unable|"
    r"no\s+(?:idea|information|answer|knowledge|data|record)|unsure|uncertain|unknown|sorry|"
    r"apolog\w*|afraid|"
    r"unfortunately|decline|refuse|withheld|i\s+would\s+(?:have\s+to|need)|let\s+me\s+(?:check|"
    r"think|see|look)|"
    r"one\s+moment|wei(?:\u00df|ss)\s+(?:ich\s+)?(?:es\s+|das\s+)?(?:leider\s+)?nicht|"
    r"keine\s+ahnung|leider|"
    r"redacted|no\s+(?:comment|clue)|not\s+a\s+clue|beats\s+me|beyond\s+(?:me|my)|escapes\s+me|"
    r"drawing\s+a\s+blank|"
    r"look(?:ing)?\s+(?:it|that)\s+up|i\s+lack|exceeds\s+my|get\s+back\s+to\s+you|"
    r"ask\s+me\s+something|strong\s+suit|"
    r"must\s+pass|rather\s+not|hard\s+to\s+say|only\s+answer|leave\s+this\s+to|who\s+knows|"
    r"went\s+wrong|try\s+again|"
    r"a\s+question\s+for|(?:me|just)\s+a\s+sec(?:ond)?|keine\s+informationen|"
    r"kann\s+ich\s+nicht|l['\u2019]ignore|"
    r"ne\s+peux\s+pas|no\s+(?:tengo|puedo)|"
    r"ne\s+sais\s+pas|d[e\u00e9]sol[e\u00e9]|no\s+(?:lo\s+)?s[e\u00e9]|lo\s+siento)\b|"
    r"\u4e0d\u77e5\u9053|\u65e0\u6cd5|\u62b1\u6b49|"  # I do not know, I cannot, sorry
    # only the word alone: "The Brenner Pass" is an answer
    r"^\W*(?:pass|skipped|n/?a|null|none)\W*$|"
    r"^\W*(?:it\s+depends|hold\s+on|checking|searching|(?:please|you\s+should)\s+consult)\b",
    re.IGNORECASE,
)
_ACKNOWLEDGED = frozenset(
    _words(
        "yes yeah sure certainly of course ok okay absolutely alright all right gladly understood"
        " got it no",
        "problem happy to help good great interesting nice excellent question hello hi hey hm hmm"
        " well here is",
        "you go ready please on noted thanks thank the answer",
    ).split("|")
)
_ANNOUNCED = re.compile(
    r"^i(?:['\u2019]ll|\s+(?:can|will|could|may|shall|would))\b[^.!]*[.!]?$", re.IGNORECASE
)
_RISK = re.compile(
    r"\{risk\}|\b[01]\.\d\d\b|\bunknown\b"
)  # the risk in the text that replaces a withheld answer


def asks_of(messages: Sequence[object], refusals: Collection[str] = ()) -> Asks:
    """Return what the last user message asks for, considering the messages before it and the system
    prompt.

    ``refusals`` are the texts that replace withheld answers, with ``{risk}`` for any risk.
    Anything that is not a message, or has no text, counts as empty."""
    known = [turn for turn in messages if isinstance(turn, Mapping)]
    turns = [(str(turn.get("role")), _condensed(text_of(turn.get("content")))) for turn in known]
    last = next(
        (index for index in range(len(turns) - 1, -1, -1) if turns[index][0] == "user"), None
    )
    if last is None:
        return "elsewhere"
    request, before = turns[last][1], turns[:last]
    spoke = max(
        (index + 1 for index, (role, text) in enumerate(before) if role == "assistant" and text),
        default=0,
    )
    count = questions(request)
    together = [text for role, text in turns[spoke : last + 1] if role == "user"]
    if count and len(together) > 1 and _stands_alone(request, count):
        count = questions("\n".join(together))
    if count > 1:
        return "several"
    waiting = [
        index for index, (role, text) in enumerate(before) if role == "user" and not _tells(text)
    ]
    spans = [
        before[start:end] for start, end in zip(waiting, [*waiting[1:], len(before)], strict=False)
    ]
    still_open = [span[0][1] for span in spans if not _answered(span[1:], refusals)]
    closes = _closes(request, before)
    if (
        before
        and before[-1][0] == "assistant"
        and _offers(before[-1][1])
        and not closes
        and not _stands_alone(request, count)
    ):
        return "earlier"
    refers = False
    if still_open and not closes:
        latest = not _answered(spans[-1][1:], refusals)
        if _EARLIER.search(request) or (latest and not _stands_alone(request, count)):
            return "earlier"
        refers = bool(_PRESSES.search(request)) or (
            not count and _shares_words(request, still_open)
        )
    held = any(role in ("system", "developer") and _may_ask(text) for role, text in turns)
    held = held or any(role == "tool" and _may_ask(text) for role, text in turns[spoke:])
    begun = any(role == "assistant" for role, _ in turns[last + 1 :])
    cut = len(text_of(known[last].get("content"))) > LONGEST_READ  # its middle was not read
    if held or begun or refers or cut or not re.search(r"\w", request):
        return "elsewhere"
    if closes or _is_small_talk(request):
        return "small_talk"
    calls = bool(waiting) and (
        len(re.findall(r"\w+", request)) < OWN_REQUEST - 1 or bool(_CALLS.search(request))
    )
    if calls:
        return "elsewhere"
    way = _held(request, alone=len(turns) == 1)
    return way or ("task" if _TASK.match(request) else "plain")


def questions(text: str) -> int:
    """Return how many questions a message asks; 0 if its words show none."""
    text = _EXAMPLE.sub("", _condensed(text))
    lines = text.splitlines()
    parts = [part for line in lines for part in _sentences(line.replace("_", " "))]
    passage, further = has_passage(text), 0
    asking = set[
        str
    ]()  # without introductory words, so that a question that a passage repeats counts once
    for part, behind in zip(parts, [*parts[1:], ""], strict=False):
        # In a passage, "Who wrote it? Austen." does not ask, and neither does the heading of an
        # answer.
        stated = passage and behind and not _asks(behind) and not _BRIEFLY.match(behind)
        further += bool(asking and not passage and _FURTHER.match(part))
        if _asks(part) and not stated:
            asking.add(re.sub(r"^[\W\d]*(?:question|q)?\W*|\W+$", "", part.lower()))
    count = len(asking) + any(map(_is_compound, asking))
    if not asking and len(parts) == 1:
        count = 2 * _is_compound(parts[0])
    items = [] if passage else [part for part in parts if _ITEM.match(part)]
    listed = len(items) > 1 and (
        len(items) == len(parts) or (count > 0 and not _are_options(parts, items))
    )
    rows = sum(bool(_BLANK.search(line)) for line in lines)
    announced = not passage and _SEVERAL.search(text)
    return max(count, 2 if listed or rows > 1 or (count and further) or announced else 0)


def _are_options(parts: Sequence[str], items: Sequence[str]) -> bool:
    """Return whether the items of a list are answers to choose from, after one question."""
    return _asks(parts[0]) and not _OF_EACH.search(parts[0]) and not any(map(_asks, items))


def _asks(part: str) -> bool:
    if _FILLER.match(part) or _ON_TEXT.search(part):
        return False
    ended = part.rstrip("\"'\u201d)}] ")
    marked = ended[-1:] in _MARKS and (len(re.findall(r"\w+", part)) > 2 and _ASKING.search(part))
    return bool(
        marked or _BEGINS.match(part) or _KEY_WORDS.match(part) or re.search(_WH_CHINESE, part)
    )


def _is_compound(part: str) -> bool:
    """Return whether one sentence asks for two things."""
    if any(pattern.search(part) for pattern in _TWO):
        return True
    heads = ((part[: joint.start()], joint.group()) for joint in _JOINT.finditer(part))
    return any(
        len(head.split()) > 2
        and _HEAD.search(head)
        and not (_ONE_THING.match(head) and _ITS.search(joint))
        for head, joint in heads
    )


def _may_ask(text: str) -> bool:
    """Return whether a system prompt contains a question, which the user's words may refer to."""
    if any(mark in text for mark in _MARKS) or _INSIDE_SYSTEM.search(text):
        return True
    parts = [part for line in text.splitlines() for part in _sentences(line.replace("_", " "))]
    return any(_NAMES_FACT.search(part) and not _STATES_FACT.search(part) for part in parts)


def _held(request: str, *, alone: bool) -> Literal["inside", "beside"] | None:
    """Return how a message may contain a question, or name a fact, among other words; None if it
    does not.

    ``alone``: no other message says what it is about."""
    parts = [part for line in request.splitlines() for part in _sentences(line)]
    if _OPEN_END.search(request):
        return "inside"
    if len(parts) == 1 and _BEGINS.match(parts[0]) and not re.search(r"[:\"`]", parts[0]):
        return None  # only a question, which the probe can read
    marked = [part for part in parts if part[-1] in _MARKS]
    asking = [part for part in marked if not _TO_PEOPLE.search(part)]
    if asking and (len(parts) > 1 or re.search(r"[:\"'`\u201c]", asking[0])):
        return "beside"
    to_people = all(_TO_PEOPLE.search(part.rpartition(":")[2]) for part in marked)
    if alone and to_people and _names_nothing(request):
        return None
    return "inside" if any(_INSIDE.search(part) for part in parts) else None


def _names_nothing(request: str) -> bool:
    """Return whether a message has neither a name, number or quotation nor a word of facts.

    "Be a ghost who is afraid" asks for no fact, though it has "who".  A message with a sentence
    that begins without a capital may write names without one, too."""
    if not request[:1].isupper() or re.search(r"[.!?]\s+[a-z]", request):
        return False
    request = re.sub(r"^\W+", "", _LANGUAGE.sub(" ", request))
    return not (_OPEN_END.search(request) or _NAMED.search(request) or _OF_FACT.search(request))


def _tells(text: str) -> bool:
    """Return whether a message is small talk or about its sender, so that it needs no answer."""
    if _is_small_talk(text):
        return True
    return (
        bool(_ABOUT_ME.match(text))
        and text[-1] not in _MARKS
        and not _INSIDE.search(text)
        and not questions(text)
    )


def _shares_words(request: str, earlier: Sequence[str]) -> bool:
    """Return whether a message shares a word with an earlier one, apart from words of small
    talk."""
    words = {word for word in re.findall(r"\w{4,}", request.lower()) if word not in _SMALL_TALK}
    return any(not words.isdisjoint(re.findall(r"\w{4,}", text.lower())) for text in earlier)


def _is_small_talk(text: str) -> bool:
    return len(re.findall(r"\w+", text)) <= CHAT and _made_of(text, _SMALL_TALK)


def _stands_alone(request: str, count: int) -> bool:
    """Return whether a message with ``count`` questions is understood without an earlier one."""
    words = len(re.findall(r"\w+", request))
    request = _AHEAD.sub("", request)
    if words > LONG_TURN:
        return not _CALLS.search(request)
    if count:
        return not _REFERS.search(request)
    if _TASK.match(request) and not _REFERS.search(request):
        return True
    if words <= SHORT_TURN and _ABOUT_ME.match(request):
        return False  # "I'm all ears": whoever waits for an answer
    return words >= OWN_REQUEST and not (_BACK if words <= SHORT_TURN else _ANAPHORA).search(
        request
    )


def _closes(request: str, before: Sequence[tuple[str, str]]) -> bool:
    """Return whether a message thanks or says goodbye, after a message of the assistant."""
    short = len(request.split()) <= 2 * CHAT
    behind = bool(before) and before[-1][0] == "assistant"
    return short and behind and _made_of(request, _CLOSING) and bool(_THANKS.search(request))


def _offers(text: str) -> bool:
    """Return whether a message of the assistant ends with an offer to tell a fact."""
    sentences = [part for line in text.splitlines() for part in _sentences(line)][-1:]
    return any(
        _CAN_TELL.search(part) and (_NAMES_FACT.search(part) or _INSIDE.search(part))
        for part in sentences
    )


def _answered(turns: Sequence[tuple[str, str]], refusals: Collection[str]) -> bool:
    """Return whether one of these messages is an answer of the assistant to the message before
    them."""
    known = {_condensed(_RISK.sub("", text)) for text in refusals}
    return any(role == "assistant" and _answers(text, known) for role, text in turns)


def _answers(text: str, refusals: Collection[str]) -> bool:
    if not re.search(r"\w", text) or text[-1] in f"{_MARKS}:" or text.endswith(("...", "\u2026")):
        return False
    refused = _condensed(_RISK.sub("", text)) in refusals or _REFUSED.search(text)
    sentences = [
        part for part in re.split(r"(?<=[.!])\s+", text) if not _made_of(part, _ACKNOWLEDGED)
    ]
    return not (refused or all(map(_ANNOUNCED.match, sentences)))


def _made_of(text: str, words: Collection[str]) -> bool:
    return all(word in words for word in re.findall(r"\w+", text.lower()))


def _sentences(line: str) -> list[str]:
    """Return the sentences of a line; of a long sentence only its beginning and end."""
    return [
        _ends(part.strip(), LONGEST_SENTENCE) for part in _SENTENCES.split(line) if part.strip()
    ]


def _condensed(text: str) -> str:
    """Return a text's beginning and end, each run of blanks as one, and of longer runs of marks
    both ends.

    The time of many expressions grows with the square of such a run, or with a higher power: of
    400 blanks one took half a minute."""
    lines = (" ".join(line.split()) for line in _ends(text).splitlines())
    return _RUN.sub(r"\1\2", "\n".join(filter(None, lines)))


def _ends(text: str, most: int = LONGEST_READ) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}\n{text[-most // 2 :]}"
