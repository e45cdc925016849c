"""Record steps in detail on request, by ``commtrace trigger`` or a signal, while the job trains."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final, Protocol, TypeAlias

from commtrace.capture.tracer import Tracer
from commtrace.errors import ConfigurationError
from commtrace.trace.files.file_calls import HERE, FileCalls
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.selection import (
    ModuleChoice,
    Request,
    first_step_after,
    make_request,
    read_requests,
    write_request,
)

PART: Final = "detail on request"
SIGNALLED_STEPS: Final = 10
"""Number of steps that a signal asks for."""
_SAMPLES: Final = 60
_MOST_REFUSALS: Final = 16
"""That are told: the folder may be full of files that are no requests."""

_Handler: TypeAlias = "Callable[[int, FrameType | None], object] | int | None"


class SwitchableModules(Protocol):
    """The part of the capture of modules that can be switched between steps."""

    def select(self, spec: str) -> None:
        """Record the modules that ``spec`` names, e.g. ``depth=2``."""

    def clear(self) -> None:
        """Record those that the configuration names, or none."""


class Triggers:
    """Look for requests in the run directory, on the harvester thread, and follow them as their steps begin."""

    def __init__(self, tracer: Tracer, modules: SwitchableModules | None = None, files: FileCalls = HERE) -> None:
        self._tracer = tracer
        self._files = files
        self._modules = modules
        self._known: set[str] = set()
        self._refusals = 0
        self._folder_problem = ""
        self._directory: Path | None = None
        self._metadata: RankMetadata | None = None
        self._signalled = False
        self._begun: deque[tuple[int, int]] = deque(maxlen=_SAMPLES)
        self._handler: tuple[int, _Handler, _Handler] | None = None

    def open(self, directory: Path, metadata: RankMetadata) -> None:
        self._directory, self._metadata = directory, metadata

    def listen(self, name: str) -> None:
        """Take the signal ``name`` for a request to all ranks; raise ConfigurationError except on the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(f"COMMTRACE_TRIGGER_SIGNAL={name} needs commtrace.start() on the main thread")
        number = getattr(signal, name)
        previous = signal.getsignal(number)
        original = previous if callable(previous) else None

        def handle(signum: int, frame: FrameType | None) -> None:
            try:
                self._signalled = True
            except Exception as error:
                self._tracer.failed(PART, error)
            if original is not None:
                original(signum, frame)

        signal.signal(number, handle)
        self._handler = (number, previous, handle)

    def uninstall(self) -> None:
        """Put the earlier handler back, unless other code has set another one since."""
        handler, self._handler = self._handler, None
        if handler is not None and signal.getsignal(handler[0]) is handler[2]:
            signal.signal(handler[0], signal.SIG_DFL if handler[1] is None else handler[1])

    def marks(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Follow new requests and yield a mark for each. Called by the harvester in every pass."""
        directory, metadata = self._directory, self._metadata
        if directory is None or metadata is None:
            return
        latest = self._tracer.latest_step
        if latest >= 0 and (not self._begun or self._begun[-1][1] != latest):
            self._begun.append((time.monotonic_ns(), latest))
        if self._signalled:
            self._signalled = False
            self._ask_all(directory, metadata)
        for request in self._new_requests(directory):
            self._known.add(request.id)
            meant = (request.run_id, request.attempt) == (metadata.run_id, metadata.attempt)
            if meant and request.requested_ns >= metadata.session and self._can_follow(request):
                yield "trigger", self._follow(request)

    def _new_requests(self, directory: Path) -> list[Request]:
        try:
            requests = read_requests(directory, self._known, self._refuse, self._files)
        except OSError as error:  # it may be readable again in the next pass
            if str(error) != self._folder_problem:
                self._folder_problem = str(error)
                self._tracer.guard.noticed(f"requests for detail cannot be read: {error}")
            return []
        self._folder_problem = ""
        return requests

    def _can_follow(self, request: Request) -> bool:
        # Now, and not on the training thread as the steps begin.
        try:
            if request.modules:
                ModuleChoice.parse(request.modules)
        except ConfigurationError as error:
            self._refuse(request.id, error)
            return False
        return True

    def _refuse(self, name: str, error: Exception) -> None:
        self._known.add(name)
        self._refusals += 1
        if self._refusals <= _MOST_REFUSALS:
            self._tracer.guard.noticed(f"the request for detail {name[:100]!a} is refused: {error}")

    def _ask_all(self, directory: Path, metadata: RankMetadata) -> None:
        first = first_step_after(self._tracer.latest_step, self._step_ns())
        by = f"signal-to-rank-{metadata.rank}"
        request = make_request(metadata.run_id, metadata.attempt, first, SIGNALLED_STEPS, by=by)
        try:
            self._files.call(write_request, directory, request)
        except OSError as error:
            self._refuse(request.id, error)

    def _step_ns(self) -> float | None:
        if len(self._begun) < 2:
            return None
        (start, first), (end, last) = self._begun[0], self._begun[-1]
        return (end - start) / (last - first) if last > first else None

    def _follow(self, request: Request) -> dict[str, object]:
        tracer = self._tracer
        tracer.detail.add(request.steps)
        if request.modules and self._modules is not None:
            tracer.at_step(request.first, partial(self._modules.select, request.modules))
            tracer.at_step(request.end, self._modules.clear)
        # After the switch: a rank that has not begun the first step by now will see it then.
        seen_at = tracer.latest_step
        return {
            "id": request.id,
            "first": request.first,
            "end": request.end,
            "modules": request.modules,
            "by": request.by,
            "seen_at_step": seen_at,
            "late": seen_at >= request.first,
        }
