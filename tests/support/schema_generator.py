"""JSON schemas drawn at random, of growing size and nesting, whose values all have a bounded length."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from inflight.structured_output.spec import SchemaPlace

Schema = dict[str, Any]  # Any: JSON

NAMES = "name age id tags address city created_at is_active price items kind größe x-y a/b c~d".split()
WORDS = ["red", "green", "blue", "", "a b", 'quo"te', "back\\slash", "tab\there", "naïve", "東京", "🙂"]
PATTERNS = ["^[a-z]{1,8}$", "^[A-Z]{2}-[0-9]{3}$", "^(foo|bar|b[aeiou]z)$", "^[0-9a-f]{4}(-[0-9a-f]{2}){0,2}$"]
FORMATS = ["date", "time", "ipv4", "uuid"]


def texts(places: Iterable[SchemaPlace]) -> list[str]:
    return [place.text for place in places]


class SchemaGenerator:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def schema(self, depth: int) -> Schema:
        """An object, with values nested at most `depth` deep."""
        return self._object(depth)

    def _value(self, depth: int) -> Schema:
        scalars = [self._integer, self._enum, self._const, self._boolean, self._null]
        scalars += [self._string, self._string, self._pattern, self._format, self._multiple]
        if depth <= 0 or self._rng.random() < 0.4:
            return self._rng.choice(scalars)()
        nested = [self._object, self._object, self._array, self._array, self._any_of, self._tuple, self._one_of]
        return self._rng.choice(nested)(depth - 1)

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(NAMES, self._rng.randint(1, 4))
        required = [name for name in names if self._rng.random() < 0.7]
        properties = {name: self._value(depth) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _array(self, depth: int) -> Schema:
        low = self._rng.randint(0, 2)
        return {
            "type": "array",
            "items": self._value(depth),
            "minItems": low,
            "maxItems": low + self._rng.randint(0, 2),
        }

    def _tuple(self, depth: int) -> Schema:
        items = [self._value(depth) for _ in range(self._rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._value(depth) for _ in range(self._rng.randint(2, 3))]}

    def _one_of(self, depth: int) -> Schema:
        """Branches that differ in a constant, as tagged unions do."""
        branches = []
        for tag in self._rng.sample(["cat", "dog", "fish"], 2):
            properties = {"type": {"const": tag}, "value": self._value(depth)}
            branches.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": ["type", "value"],
                    "additionalProperties": False,
                }
            )
        return {"oneOf": branches}

    def _string(self) -> Schema:
        low = self._rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self._rng.randint(0, 8)}

    def _integer(self) -> Schema:
        low = self._rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + self._rng.randint(0, 5000)}

    def _multiple(self) -> Schema:
        step = self._rng.choice([2, 3, 10])
        return {"type": "integer", "minimum": 0, "maximum": step * self._rng.randint(1, 50), "multipleOf": step}

    def _enum(self) -> Schema:
        values: list[object] = [*self._rng.sample(WORDS, 3), self._rng.randint(-50, 50), None, True]
        return {"enum": self._rng.sample(values, self._rng.randint(1, 4))}

    def _const(self) -> Schema:
        return {"const": self._rng.choice([*WORDS, 7, -1.5, False, None])}

    def _boolean(self) -> Schema:
        return {"type": "boolean"}

    def _null(self) -> Schema:
        return {"type": ["null", "boolean"]}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._rng.choice(PATTERNS)}

    def _format(self) -> Schema:
        return {"type": "string", "format": self._rng.choice(FORMATS)}


def generate_schemas(count: int, seed: int = 0, max_depth: int = 4) -> list[Schema]:
    """`count` schemas, the depth growing from 0 to `max_depth`. The same for the same arguments."""
    generator = SchemaGenerator(random.Random(seed))
    return [generator.schema(depth=i * (max_depth + 1) // count) for i in range(count)]
