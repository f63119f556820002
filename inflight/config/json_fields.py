"""`JsonFields`: reads the fields of a model's config.json and checks their types. Errors name the wrong field."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from inflight.errors import ImpossibleFieldError, UnsupportedModelError

# The engine makes objects for each layer before it looks at the weights. A damaged number must not fill the memory with them.
MOST_LAYERS = 10_000
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "depth")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class JsonFields:
    """The fields of one JSON object. Every error message begins with `where`.

    A field that is null counts as absent. For an absent field a method returns its default; without a default it raises.

    Raises (all methods):
        UnsupportedModelError: the field is missing or out of range.
        ImpossibleFieldError: its value has a type that it has in no family, or is a negative size.
    """

    values: Mapping[str, object]
    where: str = "config.json"

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def is_null(self, name: str) -> bool:
        return name in self.values and self.values[name] is None

    def with_values(self, values: Mapping[str, object]) -> Self:
        """The same object with these fields added or replaced."""
        return replace(self, values={**self.values, **values})

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`, which is 1 or 0."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            wanted = "a positive integer" if least else "an integer of at least 0"
            # transformers' code may know a list with a number for each layer, and 0 for none
            refuse = self.refusal if isinstance(value, (list, tuple)) or value == 0 else self.impossible
            raise refuse(f"{name}={value!r} is not {wanted}")
        if name in (*_LAYERS, *_EXPERTS) and value > MOST_LAYERS:
            raise self.refusal(f"{name}={value!r} is more than {MOST_LAYERS}, which no model has")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
            raise self.impossible(f"{name}={value!r} is not a positive number")
        if value <= 0:
            raise self.refusal(f"{name}={value!r} is not a positive number")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.impossible(f"{name}={value!r} is not true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.impossible(f"{name}={value!r} is not a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; () if absent."""
        value = self._value(name, [])
        if not isinstance(value, (list, tuple)) or not all(isinstance(entry, str) for entry in value):
            raise self.impossible(f"{name}={value!r} is not a list of strings")
        return tuple(value)

    def name_or_names(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings; () if absent."""
        value = self.values.get(name)
        return (value,) if isinstance(value, str) else self.texts(name)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        value = self._value(name, None)
        entries = value if isinstance(value, (list, tuple)) else ()
        if not entries or any(
            isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 < x < math.inf for x in entries
        ):
            raise self.refusal(f"{name}={value!r} is not a list of positive numbers")
        return tuple(float(x) for x in entries)

    def mapping(self, name: str) -> "JsonFields":
        """A nested object; empty if absent."""
        value = self._value(name, {})
        if not isinstance(value, Mapping):
            raise self.impossible(f"{name}={value!r} is not an object")
        return JsonFields(value, f"{self.where}: {name}")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """An id or a list of ids; () if absent, or -1, as some files write for no id."""
        value = self._value(name, [])
        ids = value if isinstance(value, (list, tuple)) else [] if value == -1 else [value]
        if not all(isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0 for entry in ids):
            raise self.refusal(f"{name}={value!r} is not a token id or a list of them")
        return tuple(ids)

    def refusal(self, problem: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.where}: {problem}")

    def impossible(self, problem: str) -> ImpossibleFieldError:
        return ImpossibleFieldError(f"{self.where}: {problem}")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.refusal(f"{name} is missing; it is needed to build the model")
        return value
