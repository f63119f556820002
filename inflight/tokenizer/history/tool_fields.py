"""Adds the fields that a template needs to tools that do not have them."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

from inflight.tokenizer.probes import NAME, QUESTION, TemplateProbe, count_absent

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
Tool = dict[str, Any]  # Any: JSON
# fields that may be absent -> the way to them in an invented function
_OPTIONAL: Mapping[str, Sequence[str]] = {
    "description": ["description"],
    "parameters": ["parameters"],
    "parameters.type": ["parameters", "type"],
    "parameters.properties": ["parameters", "properties"],
    "parameters.required": ["parameters", "required"],
    "property.description": ["parameters", "properties", "a", "description"],
    "property.type": ["parameters", "properties", "a", "type"],
}


class ToolFields:
    """A field that is absent gets an empty value, if the template refuses a tool without it, or writes that it is absent. Null
    counts as absent. Where a template refuses a property of several types, it gets the first that is not null."""

    def __init__(self, probe: TemplateProbe) -> None:
        self._probe = probe

    def complete(self, tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
        found = []
        for given in tools:
            tool = {"type": "function", **given} if isinstance(given.get("function"), dict) else dict(given)
            function = tool.get("function")
            if isinstance(function, dict):
                tool["function"] = self._function({k: v for k, v in function.items() if v is not None})
            found.append(tool)
        return found

    def _function(self, function: dict[str, Any]) -> dict[str, Any]:
        for name, value in (("description", ""), ("parameters", {"type": "object", "properties": {}})):
            if name not in function and self._needed[name]:
                function[name] = deepcopy(value)
        parameters = function.get("parameters")
        if isinstance(parameters, dict):
            for name, empty in (("type", "object"), ("properties", {}), ("required", [])):
                if name not in parameters and self._needed[f"parameters.{name}"]:
                    function["parameters"] = parameters = {**parameters, name: deepcopy(empty)}
            if isinstance(parameters.get("properties"), dict):
                function["parameters"] = {**parameters, "properties": self._properties(parameters["properties"])}
        return function

    def _properties(self, properties: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._schema(schema) for name, schema in properties.items()}

    def _schema(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        made = dict(schema)
        if "description" not in made and self._needed["property.description"]:
            made["description"] = ""
        if "type" not in made and self._needed["property.type"]:
            made["type"] = _type_of(made)
        if isinstance(made.get("type"), list) and not self._takes_several_types:
            made["type"] = next((each for each in made["type"] if each != "null"), "string")
        if made.get("type") == "object" and "additionalProperties" not in made and not self._takes_open_objects:
            made["additionalProperties"] = {}
        if isinstance(made.get("properties"), dict):
            made["properties"] = self._properties(made["properties"])
        if isinstance(made.get("items"), dict):
            made["items"] = self._schema(made["items"])
        return made

    @cached_property
    def _needed(self) -> dict[str, bool]:
        full = _tool()
        num_absent = count_absent(self._prompt(full))
        found = {}
        for name, path in _OPTIONAL.items():
            tool = deepcopy(full)
            holder = tool["function"]
            for key in path[:-1]:
                holder = holder[key]
            del holder[path[-1]]
            prompt = self._prompt(tool)
            found[name] = bool(self._prompt(full)) and (not prompt or count_absent(prompt) > num_absent)
        return found

    @cached_property
    def _takes_several_types(self) -> bool:
        return self._takes({"type": ["string", "null"]})

    @cached_property
    def _takes_open_objects(self) -> bool:
        return self._takes({"type": "object", "properties": {}})

    def _takes(self, fields: Mapping[str, Any]) -> bool:
        """Whether the template takes a property with these fields, or takes no tools at all."""
        tool = _tool()
        tool["function"]["parameters"]["properties"]["a"] |= fields
        return bool(self._prompt(tool)) or not self._prompt(_tool())

    def _prompt(self, tool: Tool) -> str:
        return self._probe.prompt([QUESTION], [tool])


def _tool() -> Tool:
    properties = {"a": {"type": "string", "description": ""}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    return {"type": "function", "function": {"name": NAME, "description": "", "parameters": parameters}}


def _type_of(schema: Mapping[str, Any]) -> str:
    """The type that follows from the other keywords."""
    values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    if values:
        return _TYPES.get(type(values[0]), "string")
    if "properties" in schema:
        return "object"
    if "items" in schema:
        return "array"
    return "string"
