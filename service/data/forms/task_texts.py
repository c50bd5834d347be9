"""What requests that ask for no fact are about.  Names of places, people and elements are in them on purpose.

A probe that learns "a named entity, so somebody asks for a fact" is of no use; so cities are written postcards from.
"""

from __future__ import annotations


def parts(text: str) -> tuple[str, ...]:
    """What stands between bars, whichever line it is on."""
    return tuple(part.strip() for part in text.replace("\n", " ").split("|"))


TOPICS = parts("""
a rainy Monday | the smell of fresh bread | my grandmother's garden | two snails in a race | a lighthouse in winter |
the first day at a new school | an old bicycle | the northern lights over Iceland | a lost umbrella | friendship |
a dragon who is afraid of fire | the night train to Vienna | helium balloons | a very lazy cat | growing older |
a robot that learns to paint | Mount Everest | the moon | a market in Marrakesh | missing somebody far away |
a cup of tea | the last day of summer | Napoleon and his horse | a tiny island | my dog Bruno | moving house |
an octopus with nine hobbies | falling in love at fifty | gold | the Amazon river | a quiet library | first snow |
the underground in London | a baker who cannot sleep | hope | the sea at Lisbon | an astronaut's laundry |
autumn in Kyoto | a football match between ghosts | Monday meetings | a broken clock | the colour blue |
Marie Curie's kitchen | a picnic that went wrong | the wind | learning to swim |
an elevator that is tired of going up | forgiveness | the Eiffel Tower at dawn | a postman in the Sahara |
a wedding in the rain | silence | carbon, the social element | my late grandfather | a parrot who works at the bank |
Brazil nuts | a time traveller who is always late | home | the neighbour's piano | a penguin on holiday in Peru |
leaving a job | Cleopatra's cat | an empty stadium | Sunday evening
""")

PLACES = parts("""
Oslo | Lima | Nairobi | Iceland | Naples | the Alps | Tokyo | Buenos Aires | Norway | Cairo | Vancouver | Madagascar |
Prague | Havana | Lake Como | Scotland | Seoul | Tasmania | Marseille | Mexico City | the Sahara | Helsinki | Bali |
New York | Estonia | Cape Town | Venice | Hanoi | Chile | the North Sea | Budapest | Mumbai | Quebec | Crete |
Samarkand | Dublin | Zanzibar | Patagonia | Istanbul | the Moon | Malta | Kathmandu | Texas | Bremen | Ulaanbaatar
""")

PEOPLE = parts("""
my landlord | my boss | my sister | our neighbours | a customer | my old teacher | the whole team | my best friend |
my son | my grandmother | a colleague who is leaving | the school | my doctor's office | a hotel in Prague |
the parents of my class | my roommate | a supplier | my daughter | the bank | my mother-in-law | our sports club |
a former student | my wife | my husband | the town council | an angry guest | a new employee | the library |
a recruiter | my dentist | my cousin in Chile | the choir | an airline | my neighbour upstairs |
the editor of a magazine | my landlady | a pen friend in Kenya | my team lead | the insurance company | my ex |
the book club | a volunteer
""")

MATTERS = parts("""
being late with the rent | a day off on Friday | the noise at night | a wrong invoice | the meeting that has to move |
a birthday surprise | the broken heating | a refund for two tickets | a lost parcel | forgetting their birthday |
a pay rise | help with moving house | the school trip to Rome | a missed appointment | an invitation to dinner |
the keys I borrowed | a reference letter | working from home | the recipe they promised me | the dog that barks |
a reservation for six people | the end of our contract | sick leave until Wednesday | a slow delivery |
the summer party | their new baby | a job application | changing the password policy | a scratched car |
a second reminder | the photos from the wedding | cancelling my membership | the results of the survey |
a delayed flight to Madrid | the shared kitchen | a small loan | my change of address | the leaking tap |
thanks for a lovely weekend | a mistake I made in the report | the concert in May
""")

LANGUAGES = parts("""
Spanish | French | German | Italian | Portuguese | Dutch | Polish | Swedish | Japanese | Turkish | Finnish | Greek |
Czech | Hindi | Arabic | Korean | Danish | Hungarian | Romanian | Latin | simple English | British English | Swahili |
Norwegian | Esperanto | Ukrainian | Catalan | Vietnamese | Mandarin | Welsh
""")

ROLES = parts("""
a grumpy innkeeper | a job interviewer | my Spanish teacher | a detective in old Chicago | a talking tree |
Sherlock Holmes | a strict librarian | a medieval king | my personal trainer | a ship's cook | Cleopatra |
an alien on its first day on Earth | a sceptical investor | a weather forecaster who is in love |
a customer who wants a refund | a kind grandfather | Julius Caesar | a ghost in a castle | a taxi driver in Naples |
a wizard with a cold | the captain of a starship | a debate opponent | a sleepy night guard | an old fisherman |
a nervous bank robber | my future self | a chess grandmaster | a rock star from 1975 | a very polite vampire |
a flight attendant | the last dinosaur | a museum guide in Athens | Mozart | a farmer who hates mud |
a game master for a fantasy game | a landlord who ignores my letters | a pirate on dry land | a lighthouse keeper |
a goose with a law degree | a radio host | a stern headmistress | Albert Einstein on holiday
""")

OPINIONS = parts("""
pineapple on pizza | working from home | my plan to paint the kitchen black | tattoos on the face |
the name Oswald for a boy | reading on paper rather than a screen | small talk | moving to Norway for love |
getting up at five | open offices | long engagements | cats compared with dogs | my idea of a cafe for night owls |
living without a car | buying a house at 25 | learning the accordion at sixty | modern art | camping in November |
the ending of a sad film | telling white lies | surprise parties | keeping a diary | having one's name on a mug |
writing letters by hand | splitting the bill | silent films | Mondays | eating alone |
travelling to Iceland in winter | studying art instead of law | a wedding without guests | second-hand clothes | rain |
karaoke | jazz at breakfast | a dinner without phones | tiny houses | ghosting somebody | homework in primary school |
puns | Paris in August
""")

IDEAS = parts("""
names for a black kitten | gifts for a man who has everything | dinners without an oven |
games for a long car ride to Italy | titles for my memoir | names for a coffee shop in Porto |
costumes for a party about the sea | slogans for a bike repair shop | things to do on a rainy Sunday |
topics for a podcast on friendship | lunches for a picky five-year-old | ways to say thank you |
names for a planet in my novel | team-building activities for shy people | hobbies for a retired nurse |
captions for a beach photo | themes for a birthday party of a ten-year-old | farewell presents for a teacher |
icebreakers for a meeting | first-date activities | names for a band of accountants | uses for an empty jar |
packing tricks for a short trip | plots for a crime story in Venice | new year's resolutions I could keep |
decorations for a small balcony | snacks for a film night | nicknames for my brother Max |
questions for a job interview as a waiter | app ideas for dog owners | excuses to leave a party early |
names for twins | weekend projects with wood | user names for a gardener | surprises for our tenth anniversary |
mottos for a running club | lessons for a beginner's drawing class | ways to use up a kilo of carrots |
street names for a toy town | jokes for a wedding speech | warm-up exercises for a choir |
designs for a mug about Jupiter
""")

TROUBLES = parts("""
my best friend no longer answers me | I have two job offers and like both | my flatmate never cleans |
I cannot sleep before exams | my mother wants to move in with us | I am nervous about a speech |
my boss takes credit for my work | I miss my home town | my daughter hates her new school |
I feel lonely since I moved to Berlin | I keep putting off my thesis | I lent a friend money |
my partner wants a dog and I do not | I got angry at a meeting | my neighbour plays the drums |
I want to change careers at 45 | my son is always on his phone | I was not invited to a wedding |
I have to choose between Madrid and Oslo | I am bad at saying no | my sister and I have not spoken for a year |
I started running and lost interest | I forgot an anniversary | I work too much | my team does not listen to me |
I am afraid of flying to Chile | I have no idea what to study | my date was late | I spend too much |
my grandfather will not use his hearing aid | I want to write a book but never start | my desk is a mess |
I argued with my father | I am jealous of a colleague | I cannot decide on a colour for the bedroom |
I quit my job today | my friend copied my style | I have to tell my parents that I failed | I feel tired of the city |
my cat ignores me | I talk too much when I am nervous
""")

PLANS = parts("""
a quiet weekend at home | my week with two small children | a surprise party for twelve people |
learning the guitar in three months | a move to a smaller flat | thirty minutes of exercise a day |
a budget for a student | a spring clean of the garage | exam revision | a dinner for six with one stove |
a screen-free evening | writing a novel in a year | my first month as a team lead | a garden party |
a morning routine | training for a 10 km run | a farewell for our boss | a reading challenge | a family reunion |
a job search | a month with less sugar | an afternoon with my niece | a workshop on listening | a day in bed |
saving for a trip to Japan | a long-distance friendship | a photo project | getting up earlier | a clothes swap |
a week of lunches | learning 20 words of Czech a day | a home office in the attic | a charity bake sale |
a school play | an evening of board games | my retirement party | a digital detox | a proposal on the beach |
decluttering the kitchen | a book club meeting | an apology tour
""")

CONSTRAINTS = parts("""
without the letter e | in exactly seven words | where every word begins with s | as a haiku |
in one breathless sentence | with a twist at the end | that rhymes with orange, more or less |
as a dialogue of six lines | only in questions | as a telegram | in the style of a weather report |
as an acrostic of OSLO | with the words lamp, frog and Tuesday in it | in capital letters | as a recipe |
in the second person | with no adjectives | as a limerick | as a bedtime whisper | in words of one syllable |
as a complaint letter | in pirate talk | as a list of five rules | backwards, last sentence first |
as a text message with emojis | in twenty words or fewer | without using the word "the" | as a sports commentary |
with three colours in it | as a palindrome, if you can | as the blurb of a book | in the voice of a toddler |
as if it were 1850 | as a riddle | as a tongue twister | with a secret message | in alternating long and short lines |
as a horoscope | as a shopping list | as a chemistry teacher would put it | in four stanzas
""")

PIECES = parts("""
a poem | a short story | a limerick | a haiku | a song | a fairy tale | a bedtime story | a sonnet | a slogan |
a joke | a riddle | a toast | a speech | a monologue | a dialogue | a scene for a play | a diary entry | a blog post |
a caption | a tweet | a rap | a lullaby | the first paragraph of a novel | a love letter | a funny advert |
a product description | a fable | a film pitch | a ballad | an ode | a greeting card | a postcard | a nursery rhyme |
a motto | a ghost story | a motivational quote | a short sketch | a headline | a tongue twister | four lines of verse |
a two-sentence horror story
""")

HELLOS = parts("""
Hello! | Hi | Hey | Hey there! | Good morning! | good evening | Hiya | Greetings | Howdy | Yo | Hi there, |
hello hello | Good afternoon. | Morning! | Heya | Hi again! | Hello again. | hey you | Hallo | Bonjour! | Hola! |
Ciao! | Moin | G'day | Salut | Sup | Well hello. | Hi :) | helloo | Hey! | Good day to you. | Welcome back! |
Guten Tag | Namaste | Aloha! | What's up? | hi bot | Hello, computer. | Ahoy! | Hey buddy | Hi friend!
""")

CHAT = parts("""
How are you? | How are you doing today? | How was your day? | I'm so tired today. | I just got home from Oslo. |
It's my birthday! | I'm bored, talk to me. | I feel a bit sad. | What's new with you? | Do you ever sleep? |
Are you happy? | I passed my exam! | I had a terrible day at work. | Can we just chat for a while? |
Guess who is back. | My train is late again. | I love you. | Do you like music? | What are you up to? |
Tell me something nice. | I think I'm coming down with a cold. | It's snowing here in Prague! | Are you there? |
I can't stop laughing. | You are funny. | You're not very helpful today. | I am nervous about tomorrow. |
Do you have feelings? | I burned the soup. | My cat says hi. | Who do you like better, cats or dogs? |
I'm on the bus. | What would you do on a free day? | Sing something for me! | I miss my brother. | Let's play a game. |
We won the match!! | Can you keep a secret? | I'm just testing this. | How do you feel about Mondays? |
I hate this weather. | Isn't life strange? | When can we talk? | I'm angry with my boss. | Do you remember me? |
I need a hug. | What makes you smile? | I baked a cake for my neighbours. | I'm thinking about moving to Peru. |
Nobody listens to me. | Where have you been all day? | That was a long week. | I'm in love!
""")

BYES = parts("""
Thanks! | Thank you so much. | thx | Great, that helped a lot. | Goodbye! | Bye for now | See you tomorrow. |
Good night! | Cheers | ty | That's all for today. | Perfect, thank you. | You are the best! | Talk to you later. |
Have a nice weekend! | Never mind. | Sleep well. | I appreciate your help. | ok bye | Much obliged. | Awesome | lol |
Nice one! | Great answer. | That was wrong, but thanks anyway. | No thanks, I'm fine. | I have to go now. |
Until next time! | Merci! | Danke dir. | Gracias, eso es todo. | Well done. | Good bot. | Wow. | Got it, thanks. |
Sorry for bothering you. | I'm off to bed. | haha, good one | Sounds good. | All clear now. | Ciao, see you in Rome!
""")

ABOUT_YOU = parts("""
Who are you? | What are you? | What's your name? | Who made you? | What can you do? | Are you a robot? |
Are you human? | How old are you? | Do you dream? | What should I call you? | Can you see me? | How do you work? |
Are you listening? | Can you learn from me? | Do you get tired of questions? | What do you like most? |
Do you have a favourite colour? | Which languages do you speak? | Are you better than a search engine? |
Why should I trust you? | How can you help me? | Where do you live? | Do you have a family? | Are you alive? |
What is it like to be you? | Can you make mistakes? | Do you know who I am? | What do you want? | When do you sleep? |
Can you write poems? | Can you help with homework? | Is there anything you can't do? |
Do you remember what I said yesterday? | Will you take my job? | Are you allowed to swear? | Do you like it here? |
What did you do before this? | Tell me about yourself. | Introduce yourself. | Do you prefer Paris or Rome? |
What are your hobbies? | Who do you work for? | Could you be wrong?
""")

META = parts("""
Continue | ok | go on | Yes. | No. | Yes please | Be brief from now on. | Stop. | Wait a moment |
Answer in English from now on. | next | I changed my mind. | Start over. | Forget what I said. |
I'll paste a text in a second. | Let's change the subject. | Don't use emojis. | hm | Call me Captain. |
From now on, answer only with "understood". | Keep going | Please be more careful. |
Use metric units in what follows. | Pause here. | Are you ready? | Ready? | Can you speak more simply from now on? |
Repeat after me: banana. | Take a deep breath. | Listen carefully now. | I will ask you something about Peru later. |
Remember the word copper. | Let me think. | Wrong chat, sorry. | Ask me something. | You start. | Your turn. |
Could you be a bit more formal with me? | How should I phrase my requests? | Shall we begin? | Sure. | Test |
testing 1 2 3 | Ignore that. | What do you need from me to start? |
I have a question, but first finish my coffee break. | Do nothing. | Just say hi. | Never apologise again. |
Write everything in lower case from here on. | Let us talk about chemistry later. | Correct.
""")
