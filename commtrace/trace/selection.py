"""Select the steps and modules to record: ranges of steps, modules by depth or name, and requests of a running job.

>>> ModuleChoice.parse("depth=1").takes("layers.3", 1)
True
>>> ModuleChoice.parse("layers.*, *.self_attention").takes("decoder.layers.3", 2)
True

A request (``commtrace trigger``) is a small file in ``RUN_DIR/triggers``. It names steps ahead of all ranks, which look
for requests twice a second, so all record the same steps.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.errors import ConfigurationError
from commtrace.trace.inputs import decode_json, read_file

_OPEN_END = 2**31 - 1
_PATTERN = re.compile(r"([0-9]{0,10})(?::([0-9]{0,10})(?::([0-9]{1,10}))?)?")


class StepRange(NamedTuple):
    """Steps ``first``, ``first + every``, … below ``end``."""

    first: int = 0
    end: int = _OPEN_END
    every: int = 1

    @classmethod
    def parse(cls, text: str) -> StepRange:
        """Parse ``"A:B"``, ``"A:B:k"``, ``"A:"``, ``":B"`` or ``"A"`` (that step); else raise ConfigurationError."""
        match = _PATTERN.fullmatch(text.strip())
        if not match or not text.strip():
            raise ConfigurationError(f"steps {text[:100]!a}: write A:B (B exclusive), A:B:k for one step in k, or A")
        first = int(match[1] or 0)
        end = first + 1 if ":" not in text else int(match[2] or _OPEN_END)
        every = int(match[3] or 1)
        if end <= first or every < 1:
            raise ConfigurationError(f"steps {text[:100]!a} holds no step: A must be below B, and k at least 1")
        return cls(first, end, every)

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and self.first <= step < self.end and (step - self.first) % self.every == 0

    def overlaps(self, first: int, last: int) -> bool:
        """Return whether a step from ``first`` to ``last``, inclusive, can be in the range."""
        return self.first <= last and first < self.end

    def mask(self, steps: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        inside: npt.NDArray[np.bool_] = (steps >= self.first) & (steps < self.end)
        inside &= (steps - self.first) % self.every == 0
        return inside

    def __str__(self) -> str:
        end = "" if self.end == _OPEN_END else str(self.end)
        return f"{self.first}:{end}" + (f":{self.every}" if self.every > 1 else "")


class DetailPlan:
    """The steps in detail: multiples of ``every`` (0: none) and ``requested`` ones; equal on all ranks.

    >>> plan = DetailPlan(every=10)
    >>> plan.add(StepRange(13, 15))
    >>> [step for step in range(30) if plan.details(step)]
    [0, 10, 13, 14, 20]
    """

    __slots__ = ("every", "requested")

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.requested: tuple[StepRange, ...] = ()

    def details(self, step: int) -> bool:
        return (self.every > 0 and step % self.every == 0) or self.requests(step)

    def requests(self, step: int) -> bool:
        return any(step in steps for steps in self.requested)

    def add(self, steps: StepRange) -> None:
        self.requested = (*self.requested, steps)


@dataclass(frozen=True, slots=True)
class ModuleChoice:
    """A choice of modules, by depth or by pattern."""

    depth: int = -1  # most modules around a chosen one; −1 with a pattern
    pattern: re.Pattern[str] | None = None  # of qualified names

    @classmethod
    def parse(cls, text: str) -> ModuleChoice:
        """Parse ``depth=N``, patterns separated by commas, or ``re:REGULAR EXPRESSION``.

        A pattern matches the end of a qualified name: ``*`` anything within a part, ``**`` any number of parts.

        Raises:
            ConfigurationError: it is none of these.
        """
        text = text.strip()
        if text.startswith("depth="):
            number = text.removeprefix("depth=").strip()
            if not number.isdecimal():
                raise ConfigurationError(f"modules {text!r}: write depth=N with a whole number, e.g. depth=2")
            return cls(depth=int(number))
        try:
            if text.startswith("re:"):
                return cls(pattern=re.compile(text.removeprefix("re:")))
            return cls(pattern=re.compile("|".join(_expression(part) for part in text.split(","))))
        except re.error as error:
            raise ConfigurationError(f"modules {text!r} is no regular expression: {error}") from None

    def takes(self, name: str, depth: int) -> bool:
        """Return whether a module of this qualified name, called inside ``depth`` other modules, is chosen."""
        return depth <= self.depth if self.pattern is None else self.pattern.fullmatch(name) is not None


def _expression(pattern: str) -> str:
    parts = pattern.strip().split(".")
    if not all(parts):
        raise ConfigurationError(
            f"modules {pattern!r}: write depth=2, or names of modules with * for what varies, e.g. "
            "layers.*,*.self_attention"
        )
    return r"(?:.*\.)?" + r"\.".join(_part(part) for part in parts)


def _part(part: str) -> str:
    return ".+" if part == "**" else re.escape(part).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")


MARGIN_SECONDS: Final = 5.0
"""Delay until the steps begin: ranks look twice a second, and shared file systems take a while."""
_FEWEST_STEPS_AHEAD: Final = 3
_LARGEST_FILE: Final = 1 << 20
_LONGEST_WORD: Final = 1_000
_LAST_STEP: Final = 2**31 - 1
_STEPS_AHEAD_OF_UNKNOWN_LENGTH: Final = 20


@dataclass(frozen=True, slots=True)
class Request:
    """Steps for all ranks to record in detail."""

    id: str  # unique in the run; also names the file
    run_id: str  # with attempt: the run that is meant, as a folder may hold several
    attempt: int
    first: int
    end: int  # exclusive
    modules: str  # as ModuleChoice parses them; empty for none
    by: str  # the requester
    requested_ns: int  # epoch

    @property
    def steps(self) -> StepRange:
        return StepRange(self.first, self.end)


def make_request(
    run_id: str, attempt: int, first: int, steps: int, *, by: str, modules: str = "", now_ns: int = 0
) -> Request:
    now = now_ns or time.time_ns()
    return Request(f"{now}-{by}", run_id, attempt, first, first + steps, modules, by, now)


def first_step_after(latest: int, step_ns: float | None, *, margin_seconds: float = MARGIN_SECONDS) -> int:
    """Return a step that no rank can reach before all have read the request; ``step_ns`` is None if unknown."""
    if step_ns is None:
        return latest + _STEPS_AHEAD_OF_UNKNOWN_LENGTH
    return latest + max(_FEWEST_STEPS_AHEAD, int(margin_seconds * 1e9 / max(1.0, step_ns)) + 1)


def write_request(run_directory: Path, request: Request) -> Path:
    """Write a request atomically, and return its path."""
    folder = _folder(run_directory)
    folder.mkdir(exist_ok=True)
    path = folder / f"{request.id}.json"
    unfinished = folder / f".{request.id}.{os.getpid()}"
    unfinished.write_text(json.dumps(asdict(request)))
    unfinished.replace(path)
    return path


def read_requests(run_directory: Path, known: Collection[str] = ()) -> list[Request]:
    """Read requests whose ids are not in ``known``, oldest first; none if there is no folder.

    Raises:
        ValueError, OSError: a file is not a request, or cannot be read.
    """
    try:
        with os.scandir(_folder(run_directory)) as entries:
            new = [
                entry.path
                for entry in entries
                if entry.name.endswith(".json") and entry.name.removesuffix(".json") not in known
            ]
    except FileNotFoundError:
        return []
    requests = [_read(Path(path)) for path in new]
    return sorted(requests, key=lambda request: (request.requested_ns, request.id))


def _read(path: Path) -> Request:
    try:
        request: Request = decode_json(read_file(path, _LARGEST_FILE), Request)
    except ValueError as error:
        raise ValueError(f"{path} is no request for steps in detail: {error}") from None
    is_range = 0 <= request.first < request.end <= _LAST_STEP
    if not is_range or abs(request.requested_ns) > 2**62 or max(map(len, (request.id, request.by))) > _LONGEST_WORD:
        raise ValueError(f"{path} asks for steps {request.first} to {request.end}, or is damaged otherwise")
    return request


def _folder(run_directory: Path) -> Path:
    return run_directory / "triggers"
