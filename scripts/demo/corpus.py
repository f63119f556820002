"""The words, tables and sentence templates from which `tasks.py` makes conversations. Data only."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = tuple(
    "Adam Alice Amir Anna Ben Carla Carlos Chen Clara Daniel David Diana Elena Emma Eric Eva Felix Finn Fatima Grace Hana "
    "Hugo Ida Ivan Jack James Jane John Julia Kai Karim Kate Lars Laura Leo Lena Lily Lucas Luna Maria Mark Marta Max Mia "
    "Mona Nadia Nina Noah Nora Oliver Olga Omar Oscar Paul Peter Priya Ravi Rosa Ruth Sam Sara Sofia Theo Tom Vera Victor "
    "Yuki Zoe".split()
)
CITIES = tuple(
    "Paris London Berlin Madrid Rome Vienna Prague Warsaw Lisbon Oslo Stockholm Helsinki Copenhagen Dublin Athens Cairo "
    "Nairobi Tokyo Seoul Beijing Delhi Mumbai Bangkok Sydney Toronto Ottawa Chicago Boston Seattle Denver Dallas Miami "
    "Lima Zurich Geneva Munich Hamburg Milan Porto Lyon".split()
)
JOBS = tuple(
    "teacher nurse doctor engineer baker pilot lawyer farmer painter writer singer driver chemist dentist plumber designer "
    "carpenter gardener waiter journalist librarian mechanic musician photographer scientist tailor".split()
)
PRODUCTS = tuple(
    "apples books chairs lamps pens tables cups plates shirts shoes bottles candles clocks boxes pillows bikes "
    "keyboards phones tents towels".split()
)
EVENTS = tuple("meeting concert dinner workshop lecture party interview lunch exam match rehearsal conference".split())
DAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
ITEMS = tuple(
    "apple banana cherry date fig grape kiwi lemon mango orange peach pear plum bear cat dog eagle fox goat horse lion "
    "mouse owl rabbit snake tiger wolf zebra red blue green yellow black white".split()
)
SYLLABLES = tuple(
    "ba be bo da de do fa fi ga go ha ja jo ka ke ki la le li lo ma me mi mo na ne ni no pa pe ra re ri ro sa se si so ta te "
    "ti to va ve vi vo wa ya yo za zi zo al an ar el en er il in ol on or un".split()
)

# ---- arithmetic: {a} and {b} are integers in [0, 99] ------------------------------------------------------------------

ADD_PROMPTS = (
    "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "{a}+{b}=?", "Add {a} and {b}.", "What is {a} plus {b}?",
    "Calculate {a} + {b}.", "How much is {a} plus {b}?", "What is the sum of {a} and {b}?", "Compute {a}+{b}.",
    "I have {a} apples and get {b} more. How many do I have?",
    "There are {a} birds in a tree and {b} more arrive. How many birds are there now?",
)  # fmt: skip
SUBTRACT_PROMPTS = (
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} =", "{a}-{b}=?", "What is {a} minus {b}?",
    "Calculate {a} - {b}.", "How much is {a} minus {b}?", "Subtract {b} from {a}.", "Take {b} away from {a}.",
    "Compute {a}-{b}.", "What is the difference {a} - {b}?",
)  # fmt: skip
COMPARE_PROMPTS = (
    "Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "Is {a} larger than {b}?",
    "Compare {a} and {b}.", "What is the larger of {a} and {b}?", "Is {a} less than {b}?",
)  # fmt: skip

# ---- extraction: schema -> (fields in order, sentences that hold every field named in them) ---------------------------

SCHEMAS: dict[str, tuple[str, ...]] = {
    "person": (
        "{name} is {age} years old and lives in {city}.",
        "{name}, {age}, is a {job} from {city}.",
        "My name is {name}, I am {age} years old and I live in {city}.",
        "{name} works as a {job} in {city}.",
        "In {city} there is a {job} called {name}, who is {age} years old.",
        "Meet {name}, a {age}-year-old {job} living in {city}.",
        "{name} moved to {city} at the age of {age}.",
        "Hi, I'm {name}. I work as a {job} and I am {age}.",
    ),
    "order": (
        "{customer} ordered {quantity} {product} for {price} dollars.",
        "{customer} from {city} bought {quantity} {product}.",
        "We sold {quantity} {product} to {customer} for {price} dollars.",
        "Please send {quantity} {product} to {customer} in {city}.",
        "The bill of {customer} is {price} dollars for {quantity} {product}.",
    ),
    "event": (
        "The {event} is on {day} at {time} in {city}.",
        "{name} has a {event} on {day} at {time}.",
        "On {day} at {time} there is a {event} in {city}.",
        "Do not forget the {event} with {name} on {day} at {time}.",
        "{name} will come to the {event} in {city} on {day}.",
    ),
}
EXTRACT_PROMPTS = (
    "Extract the {keys} as JSON: {sentence}",
    "Extract {keys} from this sentence as JSON: {sentence}",
    'Extract {keys} as JSON from: "{sentence}"',
    "{sentence}\n\nReturn a JSON object with the keys {keys}.",
    "Give me {keys} as JSON.\n\n{sentence}",
    "Turn this sentence into JSON with {keys}: {sentence}",
)
EXTRACT_ALL_PROMPTS = (
    "Extract the fields as JSON: {sentence}",
    "Extract all fields of this sentence as JSON: {sentence}",
    "Turn this sentence into JSON: {sentence}",
)

# ---- lists ------------------------------------------------------------------------------------------------------------

LIST_PROMPTS: dict[str, tuple[str, ...]] = {
    "ascending": (
        "Sort these numbers: {items}", "Sort from smallest to largest: {items}", "Sort in ascending order: {items}",
        "Put these numbers in order: {items}", "Sort {items}",
    ),
    "descending": (
        "Sort from largest to smallest: {items}", "Sort in descending order: {items}",
        "Sort these numbers in descending order: {items}",
    ),
    "alphabetical": ("Sort alphabetically: {items}", "Sort these words: {items}", "Put these words in order: {items}"),
    "largest": ("What is the largest number in {items}?", "Find the maximum of {items}", "Which is the largest: {items}?"),
    "smallest": ("What is the smallest number in {items}?", "Find the minimum of {items}", "Which is the smallest: {items}?"),
    "count": ("How many items are in this list: {items}?", "Count the items: {items}", "How many words are here: {items}?"),
    "occurrences": ("How many times does {item} appear in {items}?", "Count {item} in this list: {items}"),
}  # fmt: skip

# ---- stories ----------------------------------------------------------------------------------------------------------

ANIMALS = tuple("fox bear rabbit owl cat dog mouse horse wolf tiger goat lion duck frog turtle hedgehog".split())
STORY_PROMPTS = (
    "Tell me a {long}story about a {animal} named {name} in the {place}.",
    "Write a {long}story about {name} the {animal} in the {place}.",
    "Please tell a {long}story: a {animal} called {name} goes to the {place}.",
    "Can you write a {long}story about a {animal} named {name}? It takes place in the {place}.",
)
STORY_OPENING = (
    "Once upon a time there was a {animal} named {name}. {name} lived in a small house near the {place}. "
    "Every morning {name} ate warm bread with honey and looked out of the window."
)
# place -> (what happens, how it ends)
STORY_PLACES: dict[str, tuple[str, str]] = {
    "forest": (
        "One day {name} walked into the forest to look for berries. The trees were tall and the light was green. Under an old "
        "oak the {animal} found a lost lantern that was still burning.",
        "{name} carried the lantern along the path until an old woodcutter came out of the fog. It was his lantern. He thanked "
        "the {animal} and gave {name} a basket full of berries.",
    ),
    "mountains": (
        "One day {name} climbed high into the mountains to see the snow. The wind was cold and the stones were slippery. Near "
        "the top the {animal} heard a small goat calling for help.",
        "{name} tied a rope around a rock and pulled the small goat up from the cliff. The goat showed the {animal} a hidden "
        "spring, and they both drank the clear water.",
    ),
    "city": (
        "One day {name} took the train to the city to visit the market. The streets were loud and full of people. Behind a fruit "
        "stand the {animal} found a purse with ten gold coins.",
        "{name} asked at every door until a baker said that the purse was hers. The baker hugged the {animal} and baked a huge "
        "cake with the name {name} on it.",
    ),
    "desert": (
        "One day {name} crossed the desert to find a blue flower. The sand was hot and the sky had no clouds. After many hours "
        "the {animal} met a camel that had lost its way.",
        "{name} remembered the stars and led the camel to a green oasis. Next to the water grew the blue flower, and the camel "
        "carried the {animal} all the way home.",
    ),
    "harbor": (
        "One day {name} went down to the harbor to watch the ships. The water was dark and the gulls were singing. On the last "
        "pier the {animal} found a bottle with a map inside.",
        "{name} rowed to the island on the map and dug under a palm tree. There was a box full of old songs, and the sailors "
        "sang them with the {animal} until midnight.",
    ),
    "castle": (
        "One day {name} walked up to the castle to see the king. The gate was open and the halls were empty. In the tower the "
        "{animal} met a ghost that could not sleep.",
        "{name} told the ghost a long and quiet story about the sea. The ghost fell asleep at last, and the king made the "
        "{animal} the keeper of the tower.",
    ),
}
STORY_MIDDLE = (
    "At first {name} was afraid and did not know what to do. The {animal} sat down, took a deep breath and counted to ten. "
    "Then {name} had a good idea.",
    "On the way {name} met an owl. The owl asked where the {animal} was going so late. {name} told the owl everything, and the "
    "owl said that a brave heart is better than a strong arm.",
    "Soon it began to rain. The {animal} hid under a big leaf and waited. The drops fell slowly, one after another, and {name} "
    "thought of the warm bread at home. When the sun came back, {name} went on.",
)
STORY_CLOSING = (
    "In the evening {name} came home, tired and happy. The {animal} lit a candle and wrote everything down in a little book. "
    "From that day on everyone near the {place} knew the name {name}. The end."
)

# ---- tools ------------------------------------------------------------------------------------------------------------

QUERIES = tuple(
    "train tickets|cheap hotels|good pasta recipes|used bikes|the best cameras|new books|running shoes|garden tools|"
    "jazz concerts|language courses|winter jackets|hiking trails|chess rules|city maps|solar panels".split("|")
)
TEXTS = tuple(
    "I am late|see you soon|happy birthday|please call me|dinner is ready|the meeting is moved|thank you for the help|"
    "I am at the station|good luck|the package is here|we need milk|come at eight".split("|")
)
CURRENCIES = ("euro", "yen", "dollar", "pound", "peso", "won", "krone", "lira")
CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")


@dataclass(frozen=True)
class Intent:
    """What a tool is for: its possible names, a JSON type and possible names for each parameter, and its questions."""

    description: str
    names: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]  # (JSON type, name, name, ...)
    prompts: tuple[str, ...]  # {0}, {1}, ... are the arguments
    answer: str  # after the result; {r[key]} are values of the result


INTENTS: dict[str, Intent] = {
    "weather": Intent(
        "Get the weather in a city",
        ("get_weather", "get_current_weather", "weather", "lookup_weather", "weather_report"),
        (("string", "city", "location", "place"),),
        (
            "What is the weather in {0}?", "How is the weather in {0} today?", "Is it raining in {0}?", "weather in {0}",
            "Do I need an umbrella in {0}?", "What's the weather like in {0}?", "How warm is it in {0}?",
        ),
        "It is {r[temperature]} degrees and {r[condition]} in {0}.",
    ),
    "time": Intent(
        "Get the current time in a city",
        ("get_time", "get_current_time", "clock", "local_time"),
        (("string", "city", "location", "timezone"),),
        ("What time is it in {0}?", "What is the time in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"),
        "It is {r[time]} in {0}.",
    ),
    "timer": Intent(
        "Set a timer",
        ("set_timer", "start_timer", "timer", "set_alarm"),
        (("integer", "minutes", "duration", "duration_minutes"),),
        ("Set a timer for {0} minutes.", "Wake me up in {0} minutes.", "Start a timer of {0} minutes.", "Remind me in {0} minutes."),
        "The timer is set for {0} minutes.",
    ),
    "message": Intent(
        "Send a message to a person",
        ("send_message", "send_email", "send_text", "message"),
        (("string", "to", "recipient", "name"), ("string", "text", "message", "body")),
        ("Send a message to {0}: {1}", "Tell {0} that {1}.", "Write to {0}: {1}", "Send {0} the message: {1}"),
        "The message to {0} is sent.",
    ),
    "convert": Intent(
        "Convert an amount of money",
        ("convert_currency", "convert", "exchange", "currency_converter"),
        (("number", "amount", "value"), ("string", "from", "from_currency", "source"), ("string", "to", "to_currency", "target")),
        ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "What is {0} {1} in {2}?", "Exchange {0} {1} for {2}."),
        "{0} {1} is {r[result]} {2}.",
    ),
    "search": Intent(
        "Search the web",
        ("search", "web_search", "search_web", "google"),
        (("string", "query", "q", "text"),),
        ("Search for {0}.", "Search the web for {0}.", "Look up {0}.", "Find {0} on the web."),
        "I found this: {r[title]}.",
    ),
    "add": Intent(
        "Add two numbers",
        ("add", "add_numbers", "sum", "calculator_add"),
        (("integer", "a", "x", "first"), ("integer", "b", "y", "second")),
        ("What is {0} + {1}?", "Add {0} and {1}.", "Calculate {0} + {1}.", "What is {0} plus {1}?"),
        "The result is {r[result]}.",
    ),
}  # fmt: skip
NO_TOOL = "I cannot do that without a suitable tool."

# ---- small talk -------------------------------------------------------------------------------------------------------

ABOUT = (
    "I am a small demo model. I can add, subtract and compare numbers, extract fields as JSON, sort and count short lists, "
    "answer questions about countries, elements and planets, tell short stories and call tools."
)
TOO_LARGE = "I can only calculate with numbers from 0 to 99."
REFUSAL = "I am only a small demo model and cannot help with that. Ask me what I can do."
SMALL_TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Hello! How can I help you?",
        (
            "Hello", "Hi", "Hey", "Hello!", "Hi there!", "Good morning", "Good evening!", "Hey there", "Hello there!",
            "Good afternoon", "Greetings", "Hi!", "Howdy", "Hello, model!", "Hi, how is it going?",
        ),
    ),
    (
        ABOUT,
        (
            "What can you do?", "Who are you?", "What are you?", "Help", "How can you help me?", "What are your skills?",
            "Introduce yourself.", "Tell me about yourself.", "What do you know?", "What can I ask you?", "Are you a robot?",
            "What model are you?", "What is your name?", "help me", "What kind of questions can you answer?",
        ),
    ),
    ("I am fine, thank you! How can I help you?", ("How are you?", "How are you doing?", "How do you do?", "Are you well?", "How are you today?")),
    (
        "You are welcome!",
        ("Thank you", "Thanks", "Thanks!", "Thank you very much!", "Thanks a lot", "Great, thank you!", "thx", "Cheers, thanks"),
    ),
    ("Goodbye!", ("Bye", "Goodbye", "See you", "Bye bye!", "Good night", "See you later!", "I have to go now.")),
)  # fmt: skip
OFF_TOPIC_PROMPTS = (
    "Explain {topic}.", "What is {topic}?", "Write a poem about {topic}.", "Tell me about {topic}.", "Write code for {topic}.",
    "How does {topic} work?", "Give me advice on {topic}.", "Why is {topic} important?", "What do you think about {topic}?",
    "Write an essay about {topic}.", "Who invented {topic}?", "Summarize {topic}.", "Tell me a joke about {topic}.",
    "Translate {topic} into Latin.", "What is the history of {topic}?",
)  # fmt: skip
UNSUPPORTED_PROMPTS = (
    "What is {a} * {b}?", "{a} x {b}", "What is {a} times {b}?", "Multiply {a} by {b}.", "{a} / {b}", "What is {a} / {b}?",
    "Divide {a} by {b}.", "What is {a} divided by {b}?", "What is {a} to the power of {b}?", "What is {a}% of {b}?",
)  # fmt: skip
TOPICS = tuple(
    "quantum physics|love|the stock market|machine learning|politics|football|cooking|the internet|democracy|music theory|"
    "black holes|taxes|a web server|poetry|gravity|evolution|philosophy|marketing|blockchain|health insurance|movies|chess|"
    "the Roman Empire|vaccines|neural networks|a linked list|the meaning of life|climate change|bread|electric cars|"
    "photosynthesis|the economy|tennis|modern art|a sorting algorithm|sleep|happiness|space travel|fashion|war".split(
        "|"
    )
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Be concise.",
    "You are a friendly chat model.",
    "Answer the user's questions.",
)
