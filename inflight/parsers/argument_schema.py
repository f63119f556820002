"""`ArgumentSchema`: what a tool's own JSON schema says about one argument of a call.

Some families write an argument as plain text, so the text alone does not say whether `10001` is a number or a string. The
schema of the tool decides, with all that it says about types: `$ref`, `anyOf`, `oneOf`, `allOf`, `const`, `enum`, lists of
types and `nullable`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple

from inflight.parsers.buffered_value import BufferedValue, as_json
from inflight.parsers.repair_budget import RepairBudget, TooMuchWorkError
from inflight.structured_output.patterns import pattern_search
from inflight.structured_output.references import referred, with_local_references

_ALL = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
# class of a value -> its types in JSON Schema; the first that fits counts, because each bool is an int, too
_TYPE_NAMES = {NoneType: "null", bool: "boolean", int: "integer number", float: "number", str: "string", list: "array"}
NULLS = ("null", "None")
_COLON = re.compile(":")
_MAX_DEPTH = 16  # of references and branches inside each other; deeper ones are ignored


class _Declared(NamedTuple):
    """What a schema says about the names of an object. Each number is the place of the part of the schema that says it.

    Attributes:
        named: by name, the schemas of this name.
        patterns: (place, whether a name fits, the schema of these names).
        others: the first schema for names that the parts before it do not know.
    """

    named: dict[str, list[tuple[int, Any]]]  # Any: JSON
    patterns: list[tuple[int, Callable[[str], bool], Any]]
    others: tuple[int, Any] | None


@dataclass(slots=True)
class _Known:
    """What has been found in the schema of one tool, which may be reached in very many ways. Schemas are named by their id.

    Attributes:
        types: by schema.
        parts: by the schemas that hold together for an argument.
    """

    types: dict[int, frozenset[str]] = field(default_factory=dict)
    parts: dict[tuple[int, ...], ArgumentSchema] = field(default_factory=dict)


@dataclass(slots=True)
class ArgumentSchema:
    """A schema may have thousands of parts, and a text thousands of values. So what is found in a schema is kept.

    Attributes:
        node: the schema of the argument; None if the tool has no such argument.
        root: the schema of all arguments of the tool. A "$ref" is a path in it.
        budget: for the repair of damaged values, and for the comparison of values with schemas.
    """

    node: Any = None  # Any: JSON
    root: Any = None
    budget: RepairBudget = field(default_factory=RepairBudget, repr=False, compare=False)
    _names_by_size: dict[int, set[str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: _Known = field(default_factory=_Known, repr=False, compare=False)
    _known_arguments: dict[str, ArgumentSchema] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_item: ArgumentSchema | None = field(default=None, init=False, repr=False, compare=False)
    _known_declared: _Declared | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of_tool(
        cls,
        name: str,
        tools: Sequence[Mapping[str, Any]],  # Any: JSON
        budget: RepairBudget,
    ) -> ArgumentSchema:
        """The schema of all arguments of the tool `name`."""
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and function.get("name") == name:
                parameters = with_local_references(function.get("parameters"))
                return cls(parameters, parameters, budget)
        return cls(budget=budget)

    def names(self) -> set[str]:
        """The names of the arguments that the schema declares."""
        return set(self.ordered_names())

    def ordered_names(self) -> list[str]:
        """The names of the arguments that the schema declares, in its order."""
        return list(self._declared().named)

    def has_key_in(self, text: str) -> bool:
        """Whether the name of an argument and a colon stand in a text, as in `Oslo days:3`."""
        if not self._names_by_size:
            for name in self.ordered_names():
                self._names_by_size.setdefault(len(name), set()).add(name)
        colons = [found.start() for found in _COLON.finditer(text)]
        return any(
            text[max(at - size, 0) : at] in names for size, names in self._names_by_size.items() for at in colons
        )

    def argument(self, name: str) -> ArgumentSchema:
        if name not in self._known_arguments:
            self._known_arguments[name] = self._find_argument(name)
        return self._known_arguments[name]

    def _find_argument(self, name: str) -> ArgumentSchema:
        declared = self._declared()
        of_patterns = [(at, node) for at, fits, node in declared.patterns if fits(name)]
        places = declared.named.get(name, []) + of_patterns
        places.sort(key=lambda place: place[0])
        if declared.others is not None and (not places or declared.others[0] < places[0][0]):
            places.insert(0, declared.others)
        if not places:
            return ArgumentSchema(budget=self.budget)
        return self._part([node for _, node in places])

    def _declared(self) -> _Declared:
        if self._known_declared is None:
            named: dict[str, list[tuple[int, Any]]] = {}
            patterns: list[tuple[int, Callable[[str], bool], Any]] = []
            others: tuple[int, Any] | None = None
            for at, part in enumerate(self._parts(self.node)):
                for name, node in _mapping(part.get("properties")).items():
                    named.setdefault(name, []).append((at, node))
                for pattern, node in _mapping(part.get("patternProperties")).items():
                    patterns.append((at, pattern_search(pattern), node))
                if others is None and isinstance(part.get("additionalProperties"), Mapping):
                    others = at, part["additionalProperties"]
            self._known_declared = _Declared(named, patterns, others)
        return self._known_declared

    def _part(self, nodes: list[Any]) -> ArgumentSchema:
        """The schema of values that one of `nodes` admits."""
        key = tuple(map(id, nodes))
        if key not in self._known.parts:
            node = nodes[0] if len(nodes) == 1 else {"anyOf": nodes}
            self._known.parts[key] = ArgumentSchema(node, self.root, self.budget, self._known)
        return self._known.parts[key]

    def item(self) -> ArgumentSchema:
        """The schema of the items, if the argument is a list."""
        if self._known_item is None:
            found = (part["items"] for part in self._parts(self.node) if isinstance(part.get("items"), Mapping))
            self._known_item = self._part([next(found, None)])
        return self._known_item

    @property
    def types(self) -> frozenset[str]:
        """The types that are allowed: only "string" if the tool has no such argument, all types if the schema names none."""
        if isinstance(self.node, Mapping):
            return self._types(self.node, 0)
        return frozenset({"string"})

    def buffered_value(self, pass_on: Callable[[str], None]) -> BufferedValue:
        """Returns an object that gets the text of the argument, and writes its JSON to `pass_on`."""
        types = self.types
        is_string = "string" in types and types <= {"string", "null"}
        return BufferedValue(pass_on, self.read_text, is_string=is_string, unless=NULLS if "null" in types else ())

    def read_text(self, text: str) -> str:
        """The JSON of a value that the family writes as plain text, also if it is a string. It is a string if the schema allows
        strings, except for null and for values that only another type of the schema admits. If the schema names no types, the
        value is read as by `read_word`."""
        types = self.types
        if "string" not in types or types == _ALL:
            return self.read_word(text)
        if "null" in types and text in NULLS:
            return "null"
        if not self._admits_value(text) and self._admits(other := as_json(text, self.budget)):
            return other
        return json.dumps(text, ensure_ascii=False)

    def read_word(self, text: str) -> str:
        """The JSON of a value without quotes, in a family that puts quotes around strings. It is a string only if the schema
        admits no other reading of it."""
        if not isinstance(self.node, Mapping):
            return as_json(text, self.budget)
        if self.types == {"boolean"} and text.strip().lower() in ("true", "false"):
            return text.strip().lower()
        word = as_json(text, self.budget)
        if self._admits(word):
            return word
        if "string" not in self.types:
            return word
        return json.dumps(text, ensure_ascii=False)

    def _admits(self, value: str) -> bool:
        return self._admits_value(json.loads(value))

    def _admits_value(self, value: Any) -> bool:
        """Whether the schema admits the value, as far as types, `const` and `enum` say; also True if the work is too much."""
        try:
            return self._fits(self.node, value, 0, {})
        except TooMuchWorkError:
            return True

    def _parts(self, node: Any) -> Iterator[Mapping[str, Any]]:
        """The schema, and the schemas that its "$ref", "allOf", "anyOf" and "oneOf" add, each once."""
        seen: set[int] = set()
        stack = [node]
        while stack:
            node = stack.pop()
            if isinstance(node, Mapping) and id(node) not in seen:
                seen.add(id(node))
                yield node
                others = (each for key in ("allOf", "anyOf", "oneOf") for each in _list(node, key))
                stack += reversed([self._target(node), *others])

    def _target(self, node: Mapping[str, Any]) -> Any:
        """The schema that "$ref" refers to; None if there is no reference, or if it leads nowhere."""
        reference = node.get("$ref")
        try:
            if not isinstance(reference, str):
                return None
            return referred(self.root, reference)
        except KeyError:
            return None

    def _types(self, node: Any, depth: int) -> frozenset[str]:
        if not isinstance(node, Mapping) or depth > _MAX_DEPTH:
            return _ALL
        if id(node) not in self._known.types:
            self._known.types[id(node)] = _ALL  # where it refers to itself
            self._known.types[id(node)] = self._find_types(node, depth)
        return self._known.types[id(node)]

    def _find_types(self, node: Mapping[str, Any], depth: int) -> frozenset[str]:
        declared = node.get("type")
        names = {declared} if isinstance(declared, str) else set(_ALL)
        if isinstance(declared, list):
            names = {name for name in declared if isinstance(name, str)}
        found = frozenset(names | {"integer"} if "number" in names else names) & _ALL
        for values in ([node["const"]] if "const" in node else [], _list(node, "enum")):
            if values:
                found &= {name for value in values for name in _type_names(value)}
        for part in (self._target(node), *_list(node, "allOf")):
            found &= self._types(part, depth + 1)
        for key in ("anyOf", "oneOf"):
            if branches := _list(node, key):
                found &= frozenset().union(*(self._types(branch, depth + 1) for branch in branches))
        return (found | {"null"} if node.get("nullable") is True else found) or _ALL

    def _fits(self, node: Any, value: Any, depth: int, known: dict[int, bool]) -> bool:
        """As `_admits_value`.

        Args:
            known: what was found before for this value, by the id of the schema.

        Raises:
            TooMuchWorkError: the budget is spent.
        """
        if not isinstance(node, Mapping) or depth > _MAX_DEPTH:
            return True
        if id(node) not in known:
            known[id(node)] = True  # where it refers to itself
            known[id(node)] = self._find_fit(node, value, depth, known)
        return known[id(node)]

    def _find_fit(self, node: Mapping[str, Any], value: Any, depth: int, known: dict[int, bool]) -> bool:
        # a comparison and a part of a path take less than a step
        num_values = len(_list(node, "enum"))
        num_characters = len(str(node.get("$ref", "")))
        self.budget.spend(1 + num_values // 32 + num_characters // 32)
        if value is None and node.get("nullable") is True:
            return True
        if not _type_names(value) & self._types(node, depth):
            return False
        allowed = _list(node, "enum")
        if ("const" in node and node["const"] != value) or (allowed and value not in allowed):
            return False
        parts = self._target(node), *_list(node, "allOf")
        if not all(self._fits(part, value, depth + 1, known) for part in parts):
            return False
        branches = [_list(node, key) for key in ("anyOf", "oneOf")]
        return all(any(self._fits(each, value, depth + 1, known) for each in some) for some in branches if some)


def _type_names(value: Any) -> frozenset[str]:
    """The types of JSON Schema that a value has."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    found = (names for kind, names in _TYPE_NAMES.items() if isinstance(value, kind))
    return frozenset(next(found, "object").split())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(node: Mapping[str, Any], key: str) -> list[Any]:
    value = node.get(key)
    return value if isinstance(value, list) else []
