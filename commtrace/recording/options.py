"""Declarations of the recorder's options: default, allowed values, meaning and example.

>>> @dataclass(frozen=True)                                     # doctest: +SKIP
... class Config:
...     sample: int = option(1, whole_number(0), "Record one step in so many in detail.", example="50")
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

from commtrace.errors import ConfigurationError
from commtrace.trace.byte_sizes import parse_bytes

T = TypeVar("T")

EXPORTERS: Final = ("mlflow", "monitor", "otlp", "prometheus", "tensorboard", "wandb")
"""Names for ``export``; the table in exporters/live.py has the functions that open them."""

SLACK: Final = "slack"
PAGERDUTY: Final = "pagerduty"
WEBHOOK_FORMATS: Final = ("", "json", SLACK, PAGERDUTY)

AUTO: Final = "auto"
NATIVE: Final = "native"
PYTHON: Final = "python"
ENGINES: Final = (AUTO, NATIVE, PYTHON)

REPLAYS: Final = "replays"
STAMPS: Final = "stamps"
OFF: Final = "off"
GRAPHS: Final = (REPLAYS, STAMPS, OFF)

OTLP_LEVELS: Final = ("none", "steps", "phases", "communication", "modules")
"""Each holds what those before it hold."""

_METADATA_KEY: Final = "commtrace"
_LONGEST_SHOWN: Final = 100
_LONGEST_NAME: Final = 200
_SHORTEST_SECONDS: Final = 0.5
_LONGEST_SECONDS: Final = 3600
_LEAST_BYTES: Final = 10**6
_FLAGS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_TRIGGER_SIGNALS: Final = ("SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGPWR", "SIGRTMIN", "SIGRTMAX")
"""Signals that mean nothing else to Python, to launchers or to the system: others would end or stop the job."""


@dataclass(frozen=True, slots=True)
class OptionKind:
    """The values that an option can have; ``expected`` is what to write instead, for an error."""

    types: tuple[type, ...]
    read: Callable[[str], Any]  # raises ValueError or KeyError for text without a value
    accepts: Callable[[Any], bool]  # may raise a ConfigurationError with the reason
    expected: str

    def holds(self, value: object) -> bool:
        is_of_type = isinstance(value, self.types) and (bool in self.types or not isinstance(value, bool))
        return is_of_type and self.accepts(value)


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of an option, without its name and default; a secret is neither shown in errors nor forwarded."""

    kind: OptionKind
    meaning: str  # Markdown of docs/environment-variables.md
    example: str
    is_secret: bool = False

    def read(self, name: str, text: str) -> object:
        """Return the value of a variable's text.

        Raises:
            ConfigurationError: it cannot be used; the message has ``name`` and what to write.
        """
        try:
            value = self.kind.read(text)
            is_usable = self.kind.holds(value)
        except ConfigurationError:
            raise
        except (KeyError, ValueError):
            is_usable = False
        if not is_usable:
            raise self._error(name, text)
        return value

    def check(self, name: str, value: object) -> None:
        """Raise ConfigurationError if a script gave a value that cannot be used."""
        if not self.kind.holds(value):
            raise self._error(name, value)

    def _error(self, name: str, value: object) -> ConfigurationError:
        shown = "" if self.is_secret else f"={shorten(value)}"
        return ConfigurationError(f"{name}{shown}: write {self.kind.expected}")


def option(default: T, kind: OptionKind, meaning: str, *, example: str, is_secret: bool = False) -> T:
    """Return the dataclass field of an option; arguments are those of :class:`Option`."""
    declared = Option(kind, meaning, example, is_secret)
    return field(default=default, repr=not is_secret, metadata={_METADATA_KEY: declared})


def options_of(section: type) -> dict[str, Option]:
    """Return the options that are fields of a dataclass, by name; other fields are left out."""
    return {each.name: each.metadata[_METADATA_KEY] for each in fields(section) if _METADATA_KEY in each.metadata}


def check_options(section: object, prefix: str = "") -> None:
    """Raise ConfigurationError if an option of a dataclass cannot be used; names begin with ``prefix``."""
    for name, declared in options_of(type(section)).items():
        declared.check(prefix + name, getattr(section, name))


def shorten(value: object) -> str:
    """Return a value as an error shows it: short, and without control characters."""
    if isinstance(value, str) and len(value) > _LONGEST_SHOWN:
        return ascii(value[:_LONGEST_SHOWN]) + "…"
    return ascii(value)


def is_run_id(text: str) -> bool:
    """Return whether this can be the name of a run: it becomes folders, labels and keys."""
    folders = text.split("/")
    return text.isprintable() and len(text) <= _LONGEST_NAME and all(folder.strip(" .") for folder in folders)


def is_token(text: str) -> bool:
    """Return whether this can be the secret of a monitor and its ranks: long enough, printable ASCII."""
    return re.fullmatch(r"[!-~]{16,256}", text) is not None


def whole_number(least: int, most: int = 2**31 - 1) -> OptionKind:
    expected = f"a whole number of at least {least}, at most {most}"
    return OptionKind((int,), _read_whole_number, lambda number: least <= number <= most, expected)


def _read_whole_number(text: str) -> int:
    # By its form first: int() takes digits of other scripts, and raises where there are more than 4,300.
    if not re.fullmatch(r"\s*[0-9]{1,18}\s*", text):
        raise ValueError(text)
    return int(text)


def _read_words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (word.strip() for word in text.split(","))))


def read_layout(text: str) -> dict[str, int]:
    """Return the sizes of the parallel dimensions in ``pp=4,dp=2``; raise ValueError for another text."""
    sizes: dict[str, int] = {}
    for word in _read_words(text):
        match = re.fullmatch(r"([a-z][a-z0-9_-]{0,31})\s*=\s*([0-9]{1,7})", word)
        if match is None or match[1] in sizes or int(match[2]) < 1:
            raise ValueError(text)
        sizes[match[1]] = int(match[2])
    return sizes


def _is_layout(text: str) -> bool:
    try:
        read_layout(text)
    except ValueError:
        return False
    return True


def _is_time(seconds: float) -> bool:
    return _SHORTEST_SECONDS <= seconds <= _LONGEST_SECONDS


def _is_steps(text: str) -> bool:
    # Imported here: the package must import without numpy's start-up time in processes that never record.
    from commtrace.trace.selection import StepRange

    if text:
        StepRange.parse(text)
    return True


def _is_module_choice(text: str) -> bool:
    from commtrace.trace.selection import ModuleChoice

    if text:
        ModuleChoice.parse(text)
    return True


def _is_ranks(text: str) -> bool:
    from commtrace.trace.selection import StepRange

    try:
        for part in _read_words(text):
            StepRange.parse(part)
    except ConfigurationError:
        return False
    return True


def _is_url(text: str) -> bool:
    return not text or re.fullmatch(r"https?://[!-~]+", text, re.IGNORECASE) is not None


FLAG: Final = OptionKind(
    (bool,), lambda text: _FLAGS[text.strip().lower()], lambda _: True, "1 or 0 (True or False in a script)"
)
TEXT: Final = OptionKind((str,), str.strip, lambda _: True, "text")
PATH: Final = OptionKind((str, os.PathLike), str.strip, lambda _: True, "a path")
BYTES: Final = OptionKind(
    (int,),
    lambda text: parse_bytes(text, 1000),
    lambda number: number == 0 or _LEAST_BYTES <= number < 10**18,
    "bytes, at least 1M, such as 500M or 2G; 0 for no limit",
)
SECONDS: Final = OptionKind(
    (int, float), float, _is_time, f"a number of seconds from {_SHORTEST_SECONDS} to {_LONGEST_SECONDS}"
)
SECONDS_OR_NEVER: Final = OptionKind(
    (int, float),
    float,
    lambda seconds: seconds == 0 or _is_time(seconds),
    f"a number of seconds from {_SHORTEST_SECONDS} to {_LONGEST_SECONDS}, or 0 for never",
)
PORT: Final = OptionKind(
    (int,), _read_whole_number, lambda port: 0 <= port <= 65535, "a port number, or 0 for a free one"
)
RUN_ID: Final = OptionKind(
    (str,),
    str.strip,
    lambda text: not text or is_run_id(text),
    f"at most {_LONGEST_NAME} printable characters; between slashes, not only dots",
)
NODE: Final = OptionKind(
    (str,),
    str.strip,
    lambda text: text.isprintable() and len(text) <= _LONGEST_NAME,
    f"at most {_LONGEST_NAME} printable characters",
)
STEPS: Final = OptionKind((str,), str.strip, _is_steps, "steps, such as 100:110 (A:B or A:B:k, B exclusive)")
MODULES: Final = OptionKind((str,), str.strip, _is_module_choice, "depth=2, or names such as layers.*")
RANKS: Final = OptionKind((str,), str.strip, _is_ranks, "ranks, such as 0,8 or 0:64:8 (A:B:k, B exclusive)")
WORDS: Final = OptionKind(
    (tuple,),
    _read_words,
    lambda words: all(isinstance(word, str) for word in words),
    "names with commas between (a tuple of them in a script)",
)
LAYOUT: Final = OptionKind(
    (str,), str.strip, _is_layout, "sizes of the parallel dimensions, neighbouring ranks first, such as tp=2,pp=4,dp=2"
)
EXPORT: Final = OptionKind(
    (str,),
    str.strip,
    lambda text: {word.lower() for word in _read_words(text)} <= set(EXPORTERS),
    f"any of {', '.join(EXPORTERS)}, with commas between",
)
SIGNAL: Final = OptionKind(
    (str,),
    lambda text: text.strip().upper(),
    lambda text: not text or (text in _TRIGGER_SIGNALS and hasattr(signal, text)),
    f"one of {', '.join(_TRIGGER_SIGNALS)}",
)
TOKEN: Final = OptionKind(
    (str,),
    str.strip,
    lambda text: not text or is_token(text),
    "16 to 256 printable ASCII characters without spaces",
)
URL: Final = OptionKind((str,), str.strip, _is_url, "a URL that begins with http:// or https://")
WEBHOOK_FORMAT: Final = OptionKind(
    (str,),
    lambda text: text.strip().lower(),
    lambda text: text in WEBHOOK_FORMATS,
    f"one of {', '.join(filter(None, WEBHOOK_FORMATS))}",
)
ENGINE: Final = OptionKind(
    (str,), lambda text: text.strip().lower(), lambda text: text in ENGINES, f"one of {', '.join(ENGINES)}"
)
GRAPHS_RECORDED: Final = OptionKind(
    (str,), lambda text: text.strip().lower(), lambda text: text in GRAPHS, f"one of {', '.join(GRAPHS)}"
)
OTLP_LEVEL: Final = OptionKind(
    (str,), lambda text: text.strip().lower(), lambda text: text in OTLP_LEVELS, f"one of {', '.join(OTLP_LEVELS)}"
)
