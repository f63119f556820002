"""What the tests ask: questions that the embedded model answers reliably when it is greedy, and the right answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

MODEL = "embedded"
MAX_MODEL_LEN = 2048

SUM = "What is 7 + 5?"
SUM_ANSWER = "7 + 5 = 12"
STORY = "Tell me a long story about a fox named Anna in the forest."
EXTRACT = "Extract name and age as JSON: Mia is 34 years old and lives in Oslo."
PERSON = {"name": "Mia", "age": 34}

WEATHER_QUESTION = "What is the weather in Oslo?"
WEATHER_CALL = {"city": "Oslo"}
WEATHER_RESULT = '{"temperature": 21, "condition": "sunny"}'
WEATHER_ANSWER = "It is 21 degrees and sunny in Oslo."
WEATHER_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather in a city", "parameters": WEATHER_PARAMETERS},
}
STRICT_WEATHER_TOOL: dict[str, Any] = {"type": "function", "function": {**WEATHER_TOOL["function"], "strict": True}}

PERSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Person(BaseModel):
    name: str
    age: int


TOO_LONG = "What is 7 + 5? " * 600  # more than MAX_MODEL_LEN tokens


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def long_history(num_turns: int = 45) -> list[Any]:
    """A conversation of about two thirds of MAX_MODEL_LEN, whose last question is SUM."""
    turns: list[Any] = []
    for _ in range(num_turns):
        turns += [user(SUM), {"role": "assistant", "content": SUM_ANSWER}]
    return [*turns, user(SUM)]
