"""Turn results, which are frozen dataclasses, named tuples and structs, into JSON.

>>> to_json(Aggregate("gc", "collection", -1, -1, 2, 50, 0, 30))["total_ns"]   # doctest: +SKIP
50
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Protocol, TypeAlias, TypeGuard

JsonValue: TypeAlias = "str | int | float | bool | Mapping[str, JsonValue] | Sequence[JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]


class HasJson(Protocol):
    """A result whose JSON is not simply its fields."""

    def to_json(self) -> JsonObject:
        """Return the output of ``--json``."""


def has_json(value: object) -> TypeGuard[HasJson]:
    """Return whether a result makes its own JSON."""
    return hasattr(value, "to_json")  # isinstance with a protocol takes more than ten times as long


def to_json(value: object) -> JsonValue:
    """Return a value that JSON can hold; raise TypeError if there is none."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if has_json(value):
        return value.to_json()
    if is_dataclass(value) or hasattr(value, "_fields") or hasattr(value, "__struct_fields__"):
        return fields_to_json(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} is no part of a result")


def fields_to_json(result: object) -> JsonObject:
    """Return the fields of a dataclass, a named tuple or a struct by name."""
    if is_dataclass(result):
        names = [field.name for field in fields(result)]
    else:
        names = list(getattr(result, "_fields" if hasattr(result, "_fields") else "__struct_fields__", ()))
    return {name: to_json(getattr(result, name)) for name in names}
