"""A plan's model and layout in a YAML or JSON file, with the names of their fields."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from commtrace.errors import ConfigurationError, MissingExtraError
from commtrace.planning.deepspeed_config import deepspeed_layout, not_planned
from commtrace.planning.deepspeed_options import unknown_options
from commtrace.planning.layout import Layout, PlannedJob
from commtrace.planning.model import Model
from commtrace.trace.inputs import read_file

_MOST_BYTES: Final = 16 << 20
_PARTS: Final = ("model", "layout", "deepspeed")

_Sizes = TypeVar("_Sizes", Model, Layout)


def read_plan_file(path: Path) -> PlannedJob:
    """Return the model and the layout that a file describes in its parts ``model``, ``layout`` and ``deepspeed``.

    Raises:
        ConfigurationError: the file is no YAML or JSON, a field is unknown, missing or of the wrong type.
        MissingExtraError: PyYAML is missing.
        OSError: the file cannot be read.
    """
    content = _decoded(path)
    if isinstance(content, dict) and "zero_optimization" in content and "model" not in content:
        raise ConfigurationError(
            f"{path}: this is a configuration of DeepSpeed: name it in a file with the sizes of the model, "
            f"{{model: {{layers: …}}, layout: {{dp: 8}}, deepspeed: {path.name}}}"
        )
    if not isinstance(content, dict) or "model" not in content:
        raise ConfigurationError(f"{path}: expected the parts model, layout and deepspeed; model is missing")
    unknown = ", ".join(_unknown(content, _PARTS))
    if unknown:
        raise ConfigurationError(f"{path}: {unknown} is no part of a plan; its parts are {', '.join(_PARTS)}")
    layout: object = content.get("layout", {})
    notes: tuple[str, ...] = ()
    if "deepspeed" in content and isinstance(layout, dict):
        layout, notes = _with_deepspeed(path, content["deepspeed"], layout)
    model = _with_dropout(path, content["model"])
    return PlannedJob(_part(path, "model", model, Model), _part(path, "layout", layout, Layout), notes)


def _with_dropout(path: Path, model: object) -> object:
    """Return the fields of a model with probabilities of dropout as whether there is any."""
    if not isinstance(model, dict):
        return model
    given = {name: model[name] for name in ("hidden_dropout", "attention_dropout") if name in model}
    numbers = {name: value for name, value in given.items() if type(value) in (int, float)}
    for name, value in numbers.items():
        if not 0 <= value <= 1:
            raise ConfigurationError(f"{path}: model: {name} is {value}: give a probability from 0 to 1")
    return {**model, **{name: value > 0 for name, value in numbers.items()}}


def _with_deepspeed(path: Path, given: object, layout: dict[str, object]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return a layout with what a configuration of DeepSpeed says, which is given as a file or in place, and notes."""
    config = _decoded(path.parent / given) if isinstance(given, str) else given
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path}: deepspeed is neither a file nor its content")
    try:
        return deepspeed_layout(config, layout), (*unknown_options(config), *not_planned(config))
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: deepspeed: {error}") from error


def _decoded(path: Path) -> object:
    text = read_file(path, _MOST_BYTES)
    try:
        return msgspec.json.decode(text) if path.suffix == ".json" else msgspec.yaml.decode(text)
    except ImportError as error:
        raise MissingExtraError(
            "a plan in YAML needs PyYAML: pip install 'commtrace[plan]', or write the file as JSON"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{path}: {_place_and_problem(error)}") from error
    except (ValueError, OverflowError, RecursionError) as error:  # a number of thousands of digits, lists in lists
        raise ConfigurationError(f"{path}: {error}") from error


def _place_and_problem(error: msgspec.DecodeError) -> str:
    """Return the message of a decoder in one line; PyYAML's has four."""
    cause = error.__context__  # msgspec hides it with "from None"
    mark, problem = getattr(cause, "problem_mark", None), getattr(cause, "problem", None)
    return str(error) if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _part(path: Path, name: str, values: object, kind: type[_Sizes]) -> _Sizes:
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: {name} has no fields")
    known = [field.name for field in fields(kind)]
    unknown = ", ".join(_unknown(values, known))
    if unknown:
        raise ConfigurationError(f"{path}: {name} has no field {unknown}; its fields are {', '.join(known)}")
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, OverflowError, UnicodeError) as error:
        # With the message of ours, if sizes contradict one another.
        raise ConfigurationError(f"{path}: {name}: {error}") from error


def _unknown(values: dict[object, object], known: Collection[str]) -> Iterator[str]:
    return (str(name) for name in values if name not in known)
