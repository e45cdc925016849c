"""Select the steps and modules to record: ranges of steps, modules by depth or name, and requests of a running job.

>>> ModuleChoice.parse("depth=1").taken([("layers.3", 1), ("layers.3.mlp", 2)])
[True, False]
>>> ModuleChoice.parse("layers.*, *.self_attention").taken([("decoder.layers.3", 2)])
[True]

A request (``commtrace trigger``) is a small file in ``RUN_DIR/triggers``. It names steps ahead of all ranks, which look
for requests twice a second, so all record the same steps.
"""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commtrace.errors import ConfigurationError
from commtrace.trace.files.file_calls import HERE, FileCalls
from commtrace.trace.files.rank_files import json_files_below
from commtrace.trace.files.safe_files import replace_file
from commtrace.trace.inputs import decode_json

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


QUIET_STEPS: Final = 3
"""Steps in a row that are not recorded, to measure what recording costs."""


class QuietPlan:
    """Stretches of :data:`QUIET_STEPS` steps that are not recorded, equal on all ranks: ``percent`` of all steps.

    Each block of steps has one stretch, whose place is drawn, so that it does not fall in with what a job does every so
    many steps. The first block is recorded whole: jobs of a few steps have no such stretch.

    >>> plan = QuietPlan(percent=3)
    >>> [step for step in range(300) if plan.is_quiet(step)]
    [132, 133, 134, 264, 265, 266]
    """

    __slots__ = ("_block",)

    def __init__(self, percent: int = 0) -> None:
        self._block = 100 * QUIET_STEPS // percent if percent else 0

    def is_quiet(self, step: int) -> bool:
        if step < self._block or not self._block:
            return False
        block, place = divmod(step, self._block)
        # Recorded steps to compare with are on either side.
        drawn = QUIET_STEPS + zlib.crc32(str(block).encode()) % (self._block - 3 * QUIET_STEPS + 1)
        return drawn <= place < drawn + QUIET_STEPS


LONGEST_CHOICE: Final = 1_000
"""Characters of a choice of modules."""

MATCH_SECONDS: Final = 5.0
"""The longest wait for all modules of a job to be matched: the training thread waits for it between two steps."""

_NAMES_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class ModuleChoice:
    """A choice of modules, by depth or by pattern."""

    depth: int = -1  # most modules around a chosen one; −1 with a pattern
    text: str = ""  # as it was parsed
    pattern: str = ""  # of qualified names, in the syntax of RE2; empty with a depth

    @classmethod
    def parse(cls, text: str) -> ModuleChoice:
        """Parse ``depth=N``, patterns separated by commas, or ``re:REGULAR EXPRESSION``.

        A pattern matches the end of a qualified name: ``*`` anything within a part, ``**`` any number of parts.

        A regular expression is one of RE2, which has no backreferences and looks neither ahead nor behind.

        Raises:
            ConfigurationError: it is none of these, or too long.
        """
        text = text.strip()
        if len(text) > LONGEST_CHOICE:
            raise ConfigurationError(f"modules {text[:50]!a}…: longer than {LONGEST_CHOICE:,} characters")
        if text.startswith("depth="):
            number = text.removeprefix("depth=").strip()
            if not number.isdecimal():
                raise ConfigurationError(f"modules {text!r}: write depth=N with a whole number, e.g. depth=2")
            return cls(depth=int(number))
        if text.startswith("re:"):
            expression = text.removeprefix("re:")
        else:
            expression = "|".join(_expression(part) for part in text.split(","))
        _matched(text, expression, [""])  # alone: within the parentheses below, `a)|(b` would be one
        return cls(text=text, pattern=rf"\A(?:{expression})\z")

    def taken(self, modules: Sequence[tuple[str, int]]) -> list[bool]:
        """Return which modules are chosen, each given by its qualified name and the number of modules around it.

        Raises:
            ConfigurationError: the pattern takes longer than :data:`MATCH_SECONDS`.
        """
        if not self.pattern:
            return [depth <= self.depth for _, depth in modules]
        return _matched(self.text, self.pattern, [name for name, _ in modules])


def _matched(text: str, pattern: str, names: Sequence[str]) -> list[bool]:
    """Return which names the pattern of a choice ``text`` matches; raise ConfigurationError if it is none, or slow.

    By RE2, whose time is linear in the name, where Python's ``re`` may try for ever; and on a thread that does not hold
    Python's lock meanwhile, so that a large pattern costs the caller a bounded wait, and other threads nothing.
    """
    import pyarrow as pa  # here: a job that records no modules matches nothing
    import pyarrow.compute as pc

    verdicts: list[bool] = []
    errors: list[Exception] = []
    gives_up = threading.Event()

    def match() -> None:
        try:
            for begin in range(0, len(names), _NAMES_AT_ONCE):
                if gives_up.is_set():
                    return
                part = [name.encode("utf-8", "replace") for name in names[begin : begin + _NAMES_AT_ONCE]]
                verdicts.extend(pc.match_substring_regex(pa.array(part, pa.binary()), pattern).to_pylist())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=match, name="commtrace-match", daemon=True)
    thread.start()
    thread.join(MATCH_SECONDS)
    if thread.is_alive():
        gives_up.set()
        raise ConfigurationError(
            f"modules {text[:200]!a}: cannot be matched with {len(names)} names within {MATCH_SECONDS:g} s; write a "
            "simpler pattern"
        )
    if errors:
        raise ConfigurationError(f"modules {text[:200]!a} is no regular expression of RE2: {errors[0]}")
    return verdicts


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
    replace_file(path, json.dumps(asdict(request)))
    return path


def read_requests(
    run_directory: Path,
    known: Collection[str] = (),
    refuse: Callable[[str, Exception], None] | None = None,
    files: FileCalls = HERE,
) -> list[Request]:
    """Read requests whose files are not in ``known``, oldest first; none if there is no folder.

    Args:
        known: ids, which are the names of the files without their ending.
        refuse: called with the id of a file that is not a request, or cannot be read, and the reason.
        files: where the file system is called.

    Raises:
        OSError: the folder cannot be read.
        ValueError, OSError: a file cannot, and ``refuse`` is None.
    """
    unknown = files.call(json_files_below, _folder(run_directory), list(known), _LARGEST_FILE)
    requests = _readable(_folder(run_directory), unknown, refuse)
    return sorted(requests, key=lambda request: (request.requested_ns, request.id))


def _readable(
    folder: Path, contents: Iterable[tuple[str, bytes | OSError]], refuse: Callable[[str, Exception], None] | None
) -> Iterator[Request]:
    for name, content in contents:
        try:
            if isinstance(content, OSError):
                raise content
            request = _decoded(folder / f"{name}.json", content)
            if request.id != name:
                raise ValueError(f"{folder / name}.json holds the request {request.id[:100]!a}")
        except (ValueError, OSError) as error:
            if refuse is None:
                raise
            refuse(name, error)
        else:
            yield request


def _decoded(path: Path, content: bytes) -> Request:
    try:
        request: Request = decode_json(content, Request)
    except ValueError as error:
        raise ValueError(f"{path} is no request for steps in detail: {error}") from None
    is_range = 0 <= request.first < request.end <= _LAST_STEP
    if not is_range or abs(request.requested_ns) > 2**62 or max(map(len, (request.id, request.by))) > _LONGEST_WORD:
        raise ValueError(f"{path} asks for steps {request.first} to {request.end}, or is damaged otherwise")
    return request


def _folder(run_directory: Path) -> Path:
    return run_directory / "triggers"
