"""The published schemas of docs/json/, to check JSON against."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "json"


def schemas() -> dict[str, Any]:
    """Return the schemas by file name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.schema.json"))}


def _closed(schema: Any) -> Any:
    """Return a schema that allows no field that it does not name: the published ones leave room for new ones."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(one) for name, one in schema.items()}
    return {**closed, "additionalProperties": False} if "properties" in schema else closed


def errors(name: str, printed: Any) -> Iterator[str]:
    """Yield in what JSON differs from a published schema; fields that the schema does not name are errors."""
    closed = {file: _closed(schema) for file, schema in schemas().items()}
    registry: Any = Registry().with_resources(
        [(file, Resource.from_contents(schema)) for file, schema in closed.items()]
    )
    for error in Draft202012Validator(closed[f"{name}.schema.json"], registry=registry).iter_errors(printed):
        yield f"{error.json_path}: {error.message}"
