"""Request steps in detail of a running job, by small files in ``RUN_DIR/triggers``.

A request names steps ahead of all ranks, which look for requests twice a second, so all record the same steps.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from commtrace.trace.inputs import decode_json, read_file
from commtrace.trace.selection.step_range import StepRange

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
