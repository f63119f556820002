"""`StrictModel`: a JSON object of a request. Each known field must have exactly its declared type.

Unknown fields are kept apart; `ignored_fields` removes them.

The description of a field says what the field does. A field that does nothing is made with `no_effect`. A field of which only
the value that changes nothing is accepted is made with `neutral`. docs/server-api.md and the field test use these marks.
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
