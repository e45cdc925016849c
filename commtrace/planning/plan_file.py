"""A plan's model and layout in a YAML or JSON file, with the names of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import msgspec

from commtrace.errors import ConfigurationError, MissingExtraError
from commtrace.planning.layout import Layout
from commtrace.planning.model import Model

_Sizes = TypeVar("_Sizes", Model, Layout)


def read_plan_file(path: Path) -> tuple[Model, Layout]:
    """Return the model and the layout that a file describes in its parts ``model`` and ``layout``.

    Raises:
        ConfigurationError: the file is no YAML or JSON, a field is unknown, missing or of the wrong type.
        MissingExtraError: PyYAML is missing.
        OSError: the file cannot be read.
    """
    text = path.read_bytes()
    try:
        content = msgspec.json.decode(text) if path.suffix == ".json" else msgspec.yaml.decode(text)
    except ImportError as error:
        raise MissingExtraError(
            "a plan in YAML needs PyYAML: pip install 'commtrace[plan]', or write the file as JSON"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if not isinstance(content, dict) or not {"model"} <= set(content) <= {"model", "layout"}:
        raise ConfigurationError(f"{path}: expected the parts model and layout, and no others")
    return _part(path, "model", content["model"], Model), _part(path, "layout", content.get("layout", {}), Layout)


def _part(path: Path, name: str, values: object, kind: type[_Sizes]) -> _Sizes:
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: {name} has no fields")
    known = [field.name for field in fields(kind)]
    unknown = ", ".join(_unknown(values, known))
    if unknown:
        raise ConfigurationError(f"{path}: {name} has no field {unknown}; its fields are {', '.join(known)}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:  # with the message of ours, if sizes contradict one another
        raise ConfigurationError(f"{path}: {name}: {error}") from error


def _unknown(values: dict[object, object], known: list[str]) -> Iterator[str]:
    return (str(name) for name in values if name not in known)
