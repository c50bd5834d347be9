"""What requests hand over: sentences, texts, reviews, lists, code.  Some are true statements: none is asked about."""

from __future__ import annotations

from service.data.forms.task_texts import parts

SENTENCES = parts("""
The capital of Peru is Lima. | I would like a table by the window. | Your parcel has arrived. |
The Danube flows through Vienna. | Please close the door behind you. | My train leaves in ten minutes. |
We are sorry for the delay. | She has never been to Norway. | Copper conducts electricity well. |
The children were playing in the yard. | I forgot my umbrella at your place. | Dinner is ready! |
Could you speak a little slower? | The museum is closed on Mondays. | He wrote three letters and sent none. |
Everything will be fine. | Mozart was born in Salzburg. | I need two kilos of potatoes and some salt. |
The lift is out of order. | Where did you put my keys? | It was the best holiday of my life. |
Our flight to Madrid was cancelled. | You have to try this soup. | The Moon is smaller than the Earth. |
I am writing to ask about the vacant post. | Nobody knew what to say. | Long live the queen! |
The results will be sent by post. | My brother works as a nurse in Nairobi. | What time shall we meet? |
Do not feed the ducks. | I am not angry, only tired. | Water freezes at zero degrees. |
They moved to Canada when she was six. | The invoice is due at the end of the month. | Who is the new boss? |
The old man lit his pipe and began to talk. | Better late than never. |
I was wondering if you might have time on Thursday. | Ice is lighter than water. |
The meeting room on the third floor is taken. | We hope to see you again soon. | Shakespeare never saw Venice. |
Give me that report now. | This is not what I ordered. | The bread smells wonderful. | Honesty is the best policy. |
How far is the station?
""")

CLUMSY = parts("""
i has went to the store yesterday and buyed milk | Their going too be late for there own party |
She dont knows nothing about it | The list of items are on the desk | me and him was working on it since two years |
I am very exciting for the trip to Rome | Its a good ideas but we need more informations |
he said me that the meeting is moved | We was in Berlin, it was raining alot | I look forward to hear from you |
If I would have time, I would come | The peoples likes the new park | this is more better then before |
Did you saw the email what I sended? | Everybody have there own opinion | I could of called but i forgot |
between you and I, hes lazy | There is many reason for that | Yesterday I have eaten a Pizza |
the dog eated it's food quick | We discussed about the budget | Please revert back to me at the earliest |
Norway have many beautifull fjords | I am agree with you | She is working here since 2019 | Can you borrow me a pen |
the Childrens toy's was everywhere | He runned fast then his brother | My english is not good i wish improve |
your welcome to join us at we's house | The capital of france are Paris and it have a big tower |
I didnt went nowhere | we needs to speak at the costumer | The weather is to cold for swim |
Who's book is this one its not mine | A apple fell on Newtons head | Him and me goes to the gym every days |
It depends of the price | Thanks you for you're fast respond | Irregardless, we should of left |
the gold are expensive than silver | I have 25 years old and come from Chile
""")

SCENES = parts("""
The ferry to the island ran only twice a day, and that morning it was full. |
Anna had packed four sandwiches and forgotten the map. |
Sales of the new lamp fell by six percent in March, while returns doubled. |
The mayor opened the bridge in the presence of 300 guests. |
Our team met on Monday, and Tom asked for two more weeks. |
Nobody had watered the plants, so most of them were brown. |
Lima lies on the Pacific coast, and fog hangs over the city for months. |
The hotel was clean, but the walls were thin as paper. |
In the second half Karim scored twice, and the visitors went home without a point. |
The old clock struck thirteen, and Mrs Hill smiled. | Volunteers planted 1,200 trees along the river last weekend. |
The company will close its office in Prague at the end of the year. |
Copper prices rose again, which worries makers of cables. |
A fox has been seen near the school, and parents were told not to feed it. |
Marta learned to drive at 61 and bought a red car on the same day. |
The concert began an hour late because a trumpet was missing. |
Most guests praised the soup; the dessert, however, stayed on the plates. |
The update fixes three bugs and makes the app start faster. |
Two hikers were found safe in the Alps after a cold night. |
The bakery gives yesterday's bread away for free from seven o'clock. |
Under the new rules, bicycles may not be left in the hall. |
The professor lost his notes and spoke about his childhood instead. |
In Kyoto the maple trees turned red earlier than usual. |
Pupils who miss the deadline may hand in the essay by Friday with a note. |
The survey had 412 replies, and two thirds were in favour of a later start. |
Our flight was diverted to Oslo, where we slept on benches. |
The customer wrote that the chair wobbles and asked for a refund. | Heavy rain flooded the cellar of the town hall. |
The chef comes from Naples and hates pineapples. |
It took the twins an afternoon to build the raft, and it sank within a minute. |
The committee could not agree on a colour, so the fence remains grey. |
Ms Okoro will replace Mr Lindt as treasurer in June. | The film has no music at all, and yet half the audience cried. |
Napoleon, the shop's cat, sleeps in the window every noon. |
The lake froze over in January for the first time in years. | Staff may work from home on two days a week. |
The jury took ten minutes. | The tenants complain about noise, and the landlord complains about the tenants. |
Grandfather kept every letter in a tin box. | A helium balloon of the fair was found in a field 90 kilometres away. |
The second chapter is slow, but the ending makes up for it.
""")

REVIEWS = parts("""
Arrived broken and nobody answers my mails. | Best pillow I have ever owned! | It's okay, nothing special. |
The waiter was rude to my son. | I would buy it again in a heartbeat. | Too small, too loud, too expensive. |
A charming hotel in the heart of Lisbon. | Meh. | The battery lasts two days, which surprised me. | Never again. |
My kids love it, I do not. | Great camera, awful manual. | The soup was cold but the staff were lovely. |
Five stars for the view over Athens. | I fell asleep after ten minutes. | What a waste of money! |
Solid work at a fair price. | It does what it says. | The colour is not the one in the picture. |
I laughed until I cried. | Simply perfect. | The app crashes whenever I open a photo. |
Delivery took three weeks from Peru, but it was worth it. | Not bad for a beginner. |
The author clearly never visited Norway. | I expected more. | Comfortable seats and friendly crew. |
It smells like old fish. | Pure joy. | My third one, since they break every year. |
The gold paint came off on the first day. | You get what you pay for. | A bit sweet for me. |
Their support solved it within an hour. | Honestly the worst film of the year. | I was sceptical, and I was wrong. |
Fine for one night. | The sound is thin, the case is nice. | Please bring back the old recipe! | Worked once. |
I can't say I hated it. | Thank you, whoever made this.
""")

THINGS = parts("""
apples | Oslo | hammer | violin | Tuesday | copper | milk | Brazil | lamp | Anna | zebra | 17 | socks | Rome |
cinnamon | Pedro | bread | Neptune | rope | blue | March | helium | tent | Kenya | candle | Mia | eggs | tiger | 4 |
paper | Lima | drum | honey | Yusuf | soap | Friday | silver | chair | Peru | onion | bicycle | Lena | rice | Danube |
88 | mirror | pepper | kite | Cairo | Omar
""")

FIRST_NAMES = parts("""
Ana | Ben | Chloe | Dmitri | Esra | Finn | Grace | Hugo | Ines | Jonas | Kofi | Lucia | Marek | Nadia | Oskar | Priya |
Quentin | Rosa | Sven | Tara | Umar | Vera | Wanda | Xavier | Yara | Zoltan | Amir | Bella | Carlos | Dora | Emil |
Fatima | George | Hana | Igor | Julia | Karl | Leila | Miguel | Nina
""")

CODE_JOBS = parts("""
reverses a string | checks whether a word is a palindrome | merges two sorted lists |
removes duplicates but keeps the order | reads a CSV file and prints the mean of a column |
counts the words of a text | renames all files in a folder | finds the longest word | rolls two dice |
converts Celsius to Fahrenheit | flattens a nested list | downloads a page and saves it | checks brackets for balance |
sorts a dictionary by its values | computes a running average | shuffles a deck of cards | validates an email address |
retries a request three times | logs how long a call takes | groups a list of cities by country |
splits a list into chunks of n | draws a triangle of stars | removes HTML tags | caches the results of a function |
parses a date such as 3 May 2021 | rotates a matrix | counts vowels | prints a calendar of a month |
returns the n-th Fibonacci number | swaps the keys and values of a map | draws random names for Secret Santa |
turns a title into a slug | watches a folder for changes | compares two JSON files |
picks a random capital from a list | pads numbers with zeros | converts Roman numerals |
finds the two numbers that add up to a target | reads the temperature from a sensor every minute | zips a folder |
resizes all images to 800 pixels
""")

QUERIES = parts("""
a SQL query that lists customers without orders | a regex for a time such as 14:05 |
a SQL query for the ten best-paid employees per city | a regex that matches hex colours |
a SQL statement that adds a column country to a table of users | a regex for a German postcode |
a bash one-liner that counts the lines of all Python files | a SQL query that joins orders and products |
a cron line for every Monday at six | a Dockerfile for a small Flask app | a CSS rule that centres a box |
a Makefile with the targets test and clean | a git alias for a short log |
a unit test for a function that adds two numbers | an HTML form with name and email |
a regex that finds repeated words | a YAML file with two services |
an Excel formula that sums a column when the next one says Peru | a shell script that backs up a folder |
a SQL query that deletes duplicates | a JavaScript snippet that hides a button after a click |
a Python class for a bank account | a type for a point in TypeScript | a pandas line that drops empty rows |
a Rust enum for traffic lights | a Go handler that returns JSON | a loop in C that prints a table |
a regex that strips trailing spaces | a SQL view of active users | a React component for a star rating |
a README for a chess program | a JSON schema for a book | a pytest fixture for a database |
a Java interface for a queue | an awk command that prints the second column | a GraphQL query for a user's friends |
a LaTeX table with three columns | a nginx block for redirects | a commit message for a fixed typo |
a function signature for a search over cities
""")

SNIPPETS = tuple(
    """
for i in range(10) print(i)
---
def mean(xs):
    return sum(xs) / len(x)
---
if x = 3:
    print("three")
---
const total = items.reduce((a, b) => a + b.price);
---
SELECT name, COUNT(*) FROM orders;
---
while True:
    n =+ 1
---
def f(n): return 1 if n < 2 else n * f(n - 1)
---
print("Hello" + 3)
---
int a[3]; a[3] = 7;
---
let xs = vec![1, 2]; let ys = xs; println!("{:?}", xs);
---
<div class="box"><p>Hi</div>
---
names = [n.strip() for n in open("names.txt")]
---
capitals = {"Peru": "Lima", "Norway": "Oslo"}
print(capitals["Chile"])
---
import os
os.remove(path) if os.path.exists(path) else None
---
function greet(name) { console.log("Hi " + nme) }
---
x = [1, 2, 3]
print(x[3])
---
git push origin mian
---
UPDATE users SET active = 0
---
def add(a, b=[]):
    b.append(a)
    return b
---
lambda s: s == s[::-1]
---
try:
    run()
except:
    pass
---
grep -rn "TODO" | wc -l
---
public int size() { return size(); }
---
^\\d{4}-\\d{2}-\\d{2}$
---
df.groupby("city").mean().plot()
---
return a > b ? a : b
---
.box { margin: 0 auto; widht: 50% }
---
SELECT * FROM cities WHERE country = 'Brazil' ORDER BY population
---
def is_even(n): return n % 2
---
await fetch(url).json()
---
echo $PATH | tr ':' '\\n'
---
class Dog
  def bark; puts "woof"; end
---
Traceback (most recent call last): TypeError: 'NoneType' object is not iterable
---
i = 0
while i < 5:
    print(i)
---
sorted(words, key=len, reverse=True)[:5]
---
fn main() { let x: i32 = "5"; }
---
SyntaxError: unexpected token } in line 12
---
from math import sqroot
---
if (user.age > 18) allow(); else; deny();
---
xs.sort().map(x => x * 2)
---
ls -la | awk '{print $5}' | sort -n
""".strip("\n").split("\n---\n")
)
