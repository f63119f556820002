"""`StrictModel`: a JSON object of a request, whose fields have exactly the types that it names.

Fields that it does not name are kept aside, for `ignored_fields` to take out.

A field says in its description what it does. One that does nothing carries `no_effect`. One that is known, but of which only
the value that changes nothing is served, carries `neutral`. docs/server-api.md and the field test are made of these.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

EFFECT = "x-effect"  # in the OpenAPI document: "none" or "neutral"; absent: it changes the outcome


class StrictModel(BaseModel):
    """A bool is no integer, "5" is no number, and neither NaN nor infinity is one. None is a field that was left out."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


def no_effect(why: str, **bounds: Any) -> Any:  # Any: as pydantic's own `Field`
    """A field that is accepted and changes nothing; `why` says so."""
    return Field(description=why, json_schema_extra={EFFECT: "none"}, **bounds)


def neutral(why: str, **bounds: Any) -> Any:
    """A field of which only the neutral value is accepted: what else it could ask for is not served."""
    return Field(description=why, json_schema_extra={EFFECT: "neutral"}, **bounds)
