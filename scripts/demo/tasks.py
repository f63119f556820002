"""Conversations with one right answer each, drawn at random: what the embedded model is trained and measured on.

A `Sample` carries the tuple of arguments from which its answer follows. A hash of that tuple alone decides whether the sample
is for training or held out, so no tuple is ever on both sides, whatever the wording around it. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from scripts.demo import corpus, fact_table

# A chat message or a tool in the JSON form of OpenAI's chat API, hence `Any`.
Message = dict[str, Any]
Tool = dict[str, Any]
Key = tuple[str | int, ...]

HELD_OUT_ONE_IN = 10
MAX_OPERAND = 99


@dataclass(frozen=True)
class Sample:
    """`messages` end with a user or tool turn; `answer` is the assistant turn that should follow."""

    kind: str
    key: Key
    messages: tuple[Message, ...]
    answer: Message
    tools: tuple[Tool, ...] = ()


def is_held_out(key: Key) -> bool:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def draw(kind: str, rng: Random, held_out: bool) -> Sample:
    """One sample of `kind`, of KINDS or MULTI_TURN, from the given side of the split."""
    if kind == MULTI_TURN:
        turns = [draw(rng.choice(TURN_KINDS), rng, held_out) for _ in range(rng.randint(2, 4))]
        history = [message for turn in turns[:-1] for message in (*turn.messages, turn.answer)]
        return replace(turns[-1], kind=kind, messages=(*history, *turns[-1].messages))
    while True:
        sample = KINDS[kind](rng)
        if is_held_out(sample.key) == held_out:
            return replace(sample, kind=kind)


def is_correct(sample: Sample, text: str) -> bool:
    """Exact match, but for JSON objects and tool calls, which are compared as parsed values."""
    if calls := sample.answer.get("tool_calls"):
        call = re.fullmatch(r"<tool_call>(.*)</tool_call>", text.strip(), re.DOTALL)
        return call is not None and _equals_json(call[1], calls[0]["function"])
    expected: str = sample.answer["content"]
    return _equals_json(text, json.loads(expected)) if expected.startswith("{") else text.strip() == expected


def _equals_json(text: str, expected: object) -> bool:
    try:
        return bool(json.loads(text) == expected)
    except ValueError:
        return False


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _casual(text: str, rng: Random) -> str:
    """Now and then, the way people type: no final mark, or no capital at the start."""
    if rng.random() < 0.15:
        text = text.rstrip("?.!")
    if rng.random() < 0.1 and not text[:2].isupper():
        text = text[0].lower() + text[1:]
    return text


def _sample(key: Key, prompt: str, answer: str) -> Sample:
    return Sample(str(key[0]), key, (_user(prompt),), _assistant(answer))


def _invented_word(rng: Random) -> str:
    return "".join(rng.choices(corpus.SYLLABLES, k=rng.randint(2, 3)))


def _name(rng: Random, known: Sequence[str] = corpus.NAMES) -> str:
    """A name of the list, or an invented one, so that copying is learned rather than the list."""
    return rng.choice(known) if rng.random() < 0.85 else _invented_word(rng).capitalize()


# ---- arithmetic -------------------------------------------------------------------------------------------------------


def arithmetic(rng: Random) -> Sample:
    """Sum, difference (may be negative) or comparison of two integers in [0, 99]; sums and comparisons are unordered keys."""
    operation = rng.choices(("add", "subtract", "compare"), (4, 5, 1))[0]
    limit = rng.choices((9, 20, MAX_OPERAND), (1, 1, 8))[0]
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    if operation == "add":
        prompt, answer = rng.choice(corpus.ADD_PROMPTS), _worked_sum(a, b)
    elif operation == "subtract":
        prompt, answer = rng.choice(corpus.SUBTRACT_PROMPTS), _worked_difference(a, b)
    else:
        prompt = rng.choice(corpus.COMPARE_PROMPTS)
        relation = "is larger than" if a > b else "is less than" if a < b else "is equal to"
        answer = f"{a} {relation} {b}."
    return _sample(_arithmetic_key(operation, a, b), _casual(prompt.format(a=a, b=b), rng), answer)


def _arithmetic_key(operation: str, a: int, b: int) -> Key:
    """Ordered for a difference only. Steps of worked answers are taught in full: they share one key, a training key."""
    small, large = sorted((a, b))
    if small < 10 and operation in ("add", "subtract") and large < (10 if operation == "add" else 20):
        return ("arithmetic", "step")
    return ("arithmetic", operation, *((a, b) if operation == "subtract" else (small, large)))


def _worked_sum(a: int, b: int) -> str:
    """Worked digit by digit, as on paper: the network needs no more than a table of one-digit sums."""
    result = f"{a} + {b} = {a + b}"
    if a < 10 and b < 10:
        return result
    ones, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
    return f"{a} + {b}: {a % 10} + {b % 10} = {ones}, {a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}, {result}"


def _worked_difference(a: int, b: int) -> str:
    """As `_worked_sum`; the smaller number is taken from the larger, and the sign follows at the end."""
    result, large, small = f"{a} - {b} = {a - b}", max(a, b), min(a, b)
    if large < 10:
        return result
    borrow = int(large % 10 < small % 10)
    ones = f"{large % 10 + 10 * borrow} - {small % 10} = {(large - small) % 10}"
    tens = f"{large // 10} - {small // 10} - {borrow} = {large // 10 - small // 10 - borrow}"
    return f"{large} - {small}: {ones}, {tens}, {result}"


# ---- extraction -------------------------------------------------------------------------------------------------------


def _field_value(field: str, rng: Random) -> str | int:
    if field in ("name", "customer"):
        return _name(rng)
    if field == "city":
        return _name(rng, corpus.CITIES)
    if field == "time":
        return f"{rng.randint(7, 22)}:{rng.choice(('00', '15', '30', '45'))}"
    if field in ("age", "quantity", "price"):
        return rng.randint(2, MAX_OPERAND)
    return rng.choice(
        {"job": corpus.JOBS, "product": corpus.PRODUCTS, "event": corpus.EVENTS, "day": corpus.DAYS}[field]
    )


def extraction(rng: Random) -> Sample:
    """A sentence to a JSON object, with all of its fields or those asked for, in the order asked for."""
    schema = rng.choice(tuple(corpus.SCHEMAS))
    template = rng.choice(corpus.SCHEMAS[schema])
    fields = [field for _, field, _, _ in string.Formatter().parse(template) if field]
    values = {field: _field_value(field, rng) for field in fields}
    sentence = template.format(**values)
    if rng.random() < 0.2:
        prompt, asked = rng.choice(corpus.EXTRACT_ALL_PROMPTS).format(sentence=sentence), fields
    else:
        asked = rng.sample(fields, rng.choice((len(fields), rng.randint(1, len(fields)))))
        keys = " and ".join(filter(None, (", ".join(asked[:-1]), asked[-1])))
        prompt = rng.choice(corpus.EXTRACT_PROMPTS).format(sentence=sentence, keys=keys)
    answer = json.dumps({field: values[field] for field in asked})
    return _sample(("extraction", schema, *(values[field] for field in sorted(fields))), prompt, answer)


# ---- lists ------------------------------------------------------------------------------------------------------------


def lists(rng: Random) -> Sample:
    """Sorting, extremes and counting of 3 to 6 numbers in [0, 99] or words; the key is the multiset."""
    operation = rng.choices(tuple(corpus.LIST_PROMPTS), (3, 2, 2, 1, 1, 1, 1))[0]
    length, item = rng.randint(3, 6), ""
    if operation == "occurrences":
        pool = rng.sample(corpus.ITEMS, rng.randint(2, 3))
        items = [rng.choice(pool) for _ in range(length)]
        item = rng.choice(pool)
        times = items.count(item)
        answer = f"{item} appears {times} time{'' if times == 1 else 's'}."
    elif operation == "count":
        items = rng.sample(corpus.ITEMS, length)
        answer = f"There are {length} items."
    elif operation == "alphabetical":
        items = rng.sample(corpus.ITEMS, length)
        answer = ", ".join(sorted(items))
    else:
        numbers = [rng.randint(0, MAX_OPERAND) for _ in range(length)]
        items = [str(number) for number in numbers]
        if operation in ("largest", "smallest"):
            extreme = max(numbers) if operation == "largest" else min(numbers)
            answer = f"The {operation} number is {extreme}."
        else:
            answer = ", ".join(map(str, sorted(numbers, reverse=operation == "descending")))
    prompt = rng.choice(corpus.LIST_PROMPTS[operation]).format(items=", ".join(items), item=item)
    return _sample(("lists", operation, item, *sorted(items)), _casual(prompt, rng), answer)


# ---- facts ------------------------------------------------------------------------------------------------------------


def facts(rng: Random) -> Sample:
    """A question about the fixed table. The key is (fact, wording): a held-out fact was seen, but in other words only."""
    column, entity, value = rng.choice(fact_table.FACTS)
    answer, prompts = fact_table.FACT_COLUMNS[column]
    wording = rng.randrange(len(prompts))
    prompt = prompts[wording].format(e=entity, v=value)
    text = answer.format(e=entity, v=value)
    return _sample(("facts", column, entity, wording), _casual(prompt, rng), text[0].upper() + text[1:])


# ---- stories ----------------------------------------------------------------------------------------------------------


def stories(rng: Random) -> Sample:
    """A story that follows from animal, name, place and length alone, so that all of its tokens can be checked."""
    animal, name, place = rng.choice(corpus.ANIMALS), _name(rng), rng.choice(tuple(corpus.STORY_PLACES))
    length = rng.choices(("", "short ", "long "), (5, 2, 3))[0]
    prompt = rng.choice(corpus.STORY_PROMPTS).format(animal=animal, name=name, place=place, long=length)
    happening, ending = corpus.STORY_PLACES[place]
    num_middle = {"": 1, "short ": 0, "long ": len(corpus.STORY_MIDDLE)}[length]
    paragraphs = (corpus.STORY_OPENING, happening, *corpus.STORY_MIDDLE[:num_middle], ending, corpus.STORY_CLOSING)
    answer = "\n\n".join(paragraphs).format(animal=animal, name=name, place=place)
    return _sample(("stories", animal, name, place, length), _casual(prompt, rng), answer)


# ---- tools ------------------------------------------------------------------------------------------------------------


def _arguments(intent: str, rng: Random) -> tuple[list[str | int], dict[str, str | int]]:
    """The arguments of a call and a result it could have."""
    if intent in ("weather", "time"):
        result: dict[str, str | int] = {"time": f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"}
        if intent == "weather":
            result = {"temperature": rng.randint(1, 35), "condition": rng.choice(corpus.CONDITIONS)}
        return [_name(rng, corpus.CITIES)], result
    if intent == "timer":
        return [rng.randint(2, MAX_OPERAND)], {"status": "ok"}
    if intent == "message":
        return [_name(rng), rng.choice(corpus.TEXTS)], {"status": "sent"}
    if intent == "convert":
        return [rng.randint(2, MAX_OPERAND), *rng.sample(corpus.CURRENCIES, 2)], {"result": rng.randint(1, 999)}
    if intent == "search":
        query = rng.choice(corpus.QUERIES) + (f" in {_name(rng, corpus.CITIES)}" if rng.random() < 0.6 else "")
        return [query], {"title": f"{_invented_word(rng).capitalize()} {rng.choice(corpus.PRODUCTS)}"}
    a, b = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
    return [a, b], {"result": a + b}


def _tool(intent: corpus.Intent, rng: Random) -> Tool:
    name = rng.choice(intent.names)
    if rng.random() < 0.15:  # a name never seen before has to be copied
        name = f"{name}_{_invented_word(rng)}"
    properties = {rng.choice(names): {"type": json_type} for json_type, *names in intent.parameters}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    function: dict[str, Any] = {"name": name, "parameters": schema}
    if rng.random() < 0.8:
        function = {"name": name, "description": intent.description, "parameters": schema}
    return {"type": "function", "function": function}


def tools(rng: Random) -> Sample:
    """One to three tools and: a question for one of them, its result, a question for none, or for one that is missing."""
    offered = rng.sample(tuple(corpus.INTENTS), rng.randint(1, 3))
    offered_tools = tuple(_tool(corpus.INTENTS[name], rng) for name in offered)
    case = rng.choices(("call", "result", "plain", "missing"), (10, 4, 5, 1))[0]
    if case == "plain":
        inner = KINDS[rng.choice(("facts", "chat", "lists") if "add" in offered else ("facts", "chat", "arithmetic"))](
            rng
        )
        return replace(inner, tools=offered_tools)
    if case == "missing":
        chosen = rng.choice([name for name in corpus.INTENTS if name not in (*offered, "add")])
        arguments, _ = _arguments(chosen, rng)
        question = rng.choice(corpus.INTENTS[chosen].prompts).format(*arguments)
        shown = offered_tools if rng.random() < 0.5 else ()
        return replace(_sample(_tool_key(chosen, arguments), question, corpus.NO_TOOL), tools=shown)
    intent, function = corpus.INTENTS[offered[0]], offered_tools[0]["function"]
    arguments, result = _arguments(offered[0], rng)
    prompt = _user(_casual(rng.choice(intent.prompts).format(*arguments), rng))
    named = dict(zip(function["parameters"]["properties"], arguments, strict=True))
    call = {"type": "function", "function": {"name": function["name"], "arguments": named}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    key, shuffled = _tool_key(offered[0], arguments), tuple(rng.sample(offered_tools, len(offered_tools)))
    if case == "call":
        return Sample("tools", key, (prompt,), turn, shuffled)
    messages = (prompt, turn, {"role": "tool", "content": json.dumps(result)})
    return Sample("tools", key, messages, _assistant(intent.answer.format(*arguments, r=result)), shuffled)


def _tool_key(intent: str, arguments: Sequence[str | int]) -> Key:
    """The key of a call and of the answer to its result. A sum shares the key of the sum without a tool."""
    if intent == "add":
        a, b = map(int, arguments)
        return _arithmetic_key("add", a, b)
    return ("tools", intent, *arguments)


# ---- chat -------------------------------------------------------------------------------------------------------------


def chat(rng: Random) -> Sample:
    """Greetings, questions about the model, a name to remember, and a polite refusal of everything else."""
    case = rng.choices(("talk", "remember", "off-topic", "unsupported", "too large", "unknown"), (4, 3, 3, 1, 1, 1))[0]
    if case == "talk":
        answer, prompts = rng.choice(corpus.SMALL_TALK)
        prompt = rng.choice(prompts)
        return _sample(("chat", "talk"), _casual(prompt, rng), answer)
    if case == "remember":
        name = _name(rng)
        told = _user(rng.choice(("My name is {0}.", "I am {0}.", "Hi, I'm {0}!", "Call me {0}.")).format(name))
        if rng.random() < 0.3:
            return Sample("chat", ("chat", name), (told,), _assistant(f"Nice to meet you, {name}!"))
        question = _user(_casual(rng.choice(("What is my name?", "Who am I?", "Do you remember my name?")), rng))
        history = (told, _assistant(f"Nice to meet you, {name}!"))
        return Sample("chat", ("chat", name), (*history, question), _assistant(f"Your name is {name}."))
    if case == "off-topic":
        prompt = rng.choice(corpus.OFF_TOPIC_PROMPTS).format(topic=rng.choice(corpus.TOPICS))
        return _sample(("chat", prompt), _casual(prompt, rng), corpus.REFUSAL)
    if case == "unsupported":
        a, b = rng.randint(0, MAX_OPERAND), rng.randint(0, MAX_OPERAND)
        prompt = rng.choice(corpus.UNSUPPORTED_PROMPTS).format(a=a, b=b)
        return _sample(("chat", case, a, b), _casual(prompt, rng), corpus.REFUSAL)
    if case == "too large":
        a, b = rng.sample((rng.randint(MAX_OPERAND + 1, 9999), rng.randint(0, 9999)), 2)
        prompt = rng.choice(rng.choice((corpus.ADD_PROMPTS, corpus.SUBTRACT_PROMPTS))).format(a=a, b=b)
        return _sample(("chat", case, a, b), _casual(prompt, rng), corpus.TOO_LARGE)
    column = rng.choice(tuple(fact_table.FACT_COLUMNS))
    name = _invented_word(rng).capitalize()
    prompt = rng.choice(fact_table.FACT_COLUMNS[column][1]).format(e=name, v=name)
    return _sample(("chat", "unknown", name), prompt, f"I do not have {name} in my table of facts.")


KINDS: dict[str, Callable[[Random], Sample]] = {
    "arithmetic": arithmetic,
    "extraction": extraction,
    "lists": lists,
    "facts": facts,
    "stories": stories,
    "tools": tools,
    "chat": chat,
}
# Two to four questions of TURN_KINDS in one conversation, all of the same side. The last one is asked.
MULTI_TURN = "multi-turn"
TURN_KINDS = ("arithmetic", "extraction", "lists", "facts", "chat")
