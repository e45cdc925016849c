"""Everything that commtrace installs in one training process, and how it is taken out again."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from commtrace import identity
from commtrace.capture import module_selection, triggers
from commtrace.capture.activity import PART as ACTIVITY
from commtrace.capture.activity import Activity
from commtrace.capture.cuda_clock import CudaClock
from commtrace.capture.functional import FunctionalCapture
from commtrace.capture.garbage import GarbageCollections
from commtrace.capture.groups import GroupRegistry
from commtrace.capture.hang_watch import HangWatch
from commtrace.capture.invisible import ACTIVE, CAPTURED_COMMUNICATION, find_invisible
from commtrace.capture.invisible import PART as INVISIBLE
from commtrace.capture.issued import IssuedCalls
from commtrace.capture.module_selection import ModuleSelection
from commtrace.capture.optimizers import OptimizerPhase
from commtrace.capture.phases import PhaseCapture
from commtrace.capture.process_groups import ProcessGroupCapture
from commtrace.capture.records import Launch
from commtrace.capture.reducer import ReducerCapture
from commtrace.capture.tracer import Tracer
from commtrace.capture.triggers import Triggers
from commtrace.config import Config
from commtrace.recorder import Recorder, Sink
from commtrace.trace.aggregates import AggregatingSink
from commtrace.trace.budget import Budget
from commtrace.trace.detail import DetailPlan
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.step_range import StepRange
from commtrace.trace.writer import SegmentWriter, rank_directory, segment_paths

_logger = logging.getLogger("commtrace")

ANCHOR_SECONDS: Final = 10.0
"""How often the monotonic clock is compared with the wall clock."""

MOST_IN_FLIGHT: Final = 32
"""The oldest so many unfinished communications are told: the first one is what a hung rank hangs in."""

SETTLE_SECONDS: Final = 1.0
"""A thread of the backend drops its references as soon as it gets a core."""
QUIET_SECONDS: Final = 5.0
EXIT_SECONDS: Final = 1800.0
"""At exit torch waits for unfinished communications until its own timeout, by default 30 minutes. So do we, unless the
process groups have been destroyed: then nothing more will come."""


class Observer(Sink, Protocol):
    """A sink beside the trace that knows about forks: see commtrace.live."""

    def abandon_after_fork(self) -> None:
        """In a forked child: everything belongs to the parent."""


Hang = Callable[[], "Mapping[str, Any] | None"]
"""What this process is in since training stopped; None while it goes on."""

OpenObservers = Callable[[RankMetadata, Path, Recorder, Hang, Callable[[], str]], Sequence[Observer]]
"""Opens what looks on beside the trace, when the rank is known; called on the harvester thread."""

Install = Callable[[Tracer], Callable[[], None]]
"""An integration: installs itself and returns what takes it out again."""


class Instrumentation:
    """Recorder, tracer and patches of one process.

    Args:
        config: options.
        integrations: what to install beside the capture of torch.distributed.
        open_observers: what gets the rows beside the trace.
    """

    def __init__(
        self,
        config: Config,
        integrations: Sequence[tuple[str, Install]] = (),
        open_observers: OpenObservers | None = None,
    ) -> None:
        config.check()
        self._config = config
        self._integrations = integrations
        self._open_observers = open_observers
        self._observers: Sequence[Observer] = ()
        self._run_id = identity.run_id(config)
        self.recorder = Recorder(
            self._open_sinks, ready=self._is_rank_known, capacity=config.buffer_spans, before_pass=self._marks
        )
        self._device_clock = _device_clock()
        window = StepRange.parse(config.steps) if config.steps else None
        self.tracer = Tracer(
            self.recorder,
            clock=self._device_clock,
            window=window,
            groups=GroupRegistry(config.skip_roles),
            detail=DetailPlan(config.sample),
        )
        self._modules = ModuleSelection(self.tracer, config.modules)
        self._triggers: Triggers | None = Triggers(self.tracer, self._modules)
        self._process_groups = ProcessGroupCapture(self.tracer, self._device_clock)
        self._functional = FunctionalCapture(self.tracer, self._process_groups.devices)
        self._issued = IssuedCalls(self.tracer, self._process_groups.devices)
        self._reducer = ReducerCapture(self.tracer, self._issued)
        self._optimizers = OptimizerPhase(self.tracer)
        self._garbage = GarbageCollections(self.tracer)
        self._phases = PhaseCapture(self.tracer)
        self._hang_watch = HangWatch(self.tracer, self._unfinished, config.hang_seconds)
        self._uninstallers: list[tuple[str, Callable[[], None]]] = []
        self._told_groups: dict[int, Any] = {}
        self._told_groups_version = -1
        self._told_topology_version = 0
        self._told_device: int | None = None
        self._next_anchor_ns = 0
        self._ended = False
        self._told_in_flight: list[Any] = []
        self._activity: Activity | None = Activity(self.tracer)
        self._told_invisible: dict[str, str] | None = {}

    def start(self) -> None:
        """Install everything and start the harvester. A part that cannot be installed is left out, with a warning."""
        from commtrace.capture import (
            compiler,
            creation,
            destruction,
            device_calls,
            functional,
            futures,
            garbage,
            meshes,
            optimizers,
            phases,
            process_groups,
            reducer,
        )

        for part, switch_off in (
            # Together: if one of them stopped alone, this rank would number its communications otherwise than others.
            (process_groups.PART, self._stop_capture),
            (device_calls.PART, self._stop_capture),
            (functional.PART, self._stop_capture),
            (reducer.PART, self._stop_capture),
            (optimizers.PART, self._optimizers.uninstall),
            (garbage.PART, self._garbage.uninstall),
            (phases.PART, self._phases.uninstall),
            (module_selection.PART, self._modules.uninstall),
        ):
            self.tracer.guard.on_failure(part, switch_off)
        self._install(process_groups.PART, self._process_groups.install, self._process_groups.uninstall)
        self._install(functional.PART, self._functional.install, self._functional.uninstall)
        self._install(reducer.PART, self._reducer.install, self._reducer.uninstall)
        self._install(optimizers.PART, self._optimizers.install, self._optimizers.uninstall)
        self._install(garbage.PART, self._garbage.install, self._garbage.uninstall)
        self._install(phases.PART, self._phases.install, self._phases.uninstall)
        self._install(module_selection.PART, self._modules.install, self._modules.uninstall)
        for name, install in (
            (compiler.PART, compiler.install), (creation.PART, creation.install), (meshes.PART, meshes.install),
            (destruction.PART, destruction.install), (futures.PART, self._install_futures), *self._integrations,
        ):  # fmt: skip
            try:
                self._uninstallers.append((name, install(self.tracer)))
            except Exception as error:
                self.tracer.failed(name, error)
        self._listen()
        options = recording_options(self._config)
        if options:
            self.tracer.set_topology({"recording": options})
        self.recorder.start()

    def _listen(self) -> None:
        if self._triggers is not None and self._config.trigger_signal:
            listening = partial(self._triggers.listen, self._config.trigger_signal)
            self._install(triggers.PART, listening, self._triggers.uninstall)

    def stop(self) -> None:
        """Close the last step, take every patch out, and write what is left."""
        try:
            self.tracer.finish()
            self.tracer.recording = False
        except Exception as error:
            self.tracer.failed("the end of the last step", error)
        while self._uninstallers:
            name, uninstall = self._uninstallers[-1]
            try:
                uninstall()
            except Exception as error:
                self.tracer.failed(name, error)
                uninstall()  # They begin where they were interrupted.
            self._uninstallers.pop()
        self._hang_watch.stop()
        self._ended = True
        self.recorder.stop()

    @property
    def awaits_callbacks(self) -> bool:
        """Whether communications under way will still call back."""
        return self.tracer.completions.unsettled

    def await_callbacks(self) -> None:
        """Before Python ends: wait for communications that nobody waited for, as torch will do in any case."""
        if not self.tracer.completions.wait(QUIET_SECONDS) and _is_initialized():
            _logger.warning("commtrace: waiting, as torch does, for communications that nobody has waited for")
            self.tracer.completions.wait(EXIT_SECONDS)
        self.tracer.completions.settle(SETTLE_SECONDS)

    def abandon_after_fork(self) -> None:
        """In a forked child: stay silent. The patches stay and pass everything through."""
        self.tracer.recording = False
        self.tracer.renew_locks()
        self.recorder.abandon_after_fork()
        self._hang_watch.abandon_after_fork()
        for observer in self._observers:
            observer.abandon_after_fork()

    def _stop_capture(self) -> None:
        for capture in (self._process_groups, self._functional, self._reducer):
            capture.uninstall()

    def _install(self, name: str, install: Callable[[], None], uninstall: Callable[[], None]) -> None:
        self._uninstallers.append((name, uninstall))
        try:
            install()
        except Exception as error:
            self.tracer.failed(name, error)
            uninstall()

    def _install_futures(self, tracer: Tracer) -> Callable[[], None]:
        from commtrace.capture import futures

        if self._device_clock is not None:
            return lambda: None
        return futures.install(tracer, self._process_groups)

    def _open_sinks(self) -> list[Sink]:
        run_id = self._run_id or identity.agreed_run_id() or f"{socket.gethostname()}-{os.getppid()}"
        directory = Path(self._config.dir or f"commtrace-runs/{run_id}").absolute()
        metadata = identity.collect(self._config, run_id)
        if not metadata.backend and self.tracer.groups.position is not None:
            # A short job: its process groups are gone already.
            rank, world_size, backend = self.tracer.groups.position
            metadata = replace(metadata, rank=rank, world_size=world_size, backend=backend)
        if metadata.rank == 0 and metadata.attempt == 0 and _holds_a_recording(directory):
            _logger.warning(
                "commtrace: %s holds a recording already. Both are kept, and the newest one is shown: give each job, "
                "and each start() of a script, a --run-id or COMMTRACE_DIR of its own to see them all.",
                directory,
            )
        writer = SegmentWriter(
            directory,
            metadata,
            steps_per_segment=self._config.steps_per_segment,
            budget=Budget(self._config.keep_steps, self._config.keep_bytes),
        )
        if metadata.rank == 0:
            _announce(directory)
        if self._config.hang_seconds:
            self._hang_watch.start(directory, metadata)
        # Before the writer, which may thin out what it is given.
        self._observers = self._opened_observers(metadata, directory)
        if self._triggers is not None:
            self._triggers.open(directory, metadata)
        detail = self.tracer.detail
        thinned = writer if detail.every == 1 else AggregatingSink(writer, detail.details)
        return [*self._observers, thinned]

    def _opened_observers(self, metadata: RankMetadata, directory: Path) -> Sequence[Observer]:
        if self._open_observers is None:
            return ()
        try:
            watch = self._hang_watch
            return self._open_observers(metadata, directory, self.recorder, lambda: watch.report, watch.slow_phase)
        except Exception as error:
            self.tracer.failed("live metrics", error)
            return ()

    def _is_rank_known(self) -> bool:
        if self.tracer.groups.position is not None or _is_initialized():
            return True
        # A job of one process never initialises torch.distributed. A child of a training process (a data loading
        # worker) is no rank.
        return self.tracer.has_begun_a_step and multiprocessing.parent_process() is None

    def _marks(self) -> Iterator[tuple[str, Any]]:
        """What has changed since the last pass and is not a span. Runs on the harvester thread."""
        self._refresh_device_clock()
        self._tell_device()
        yield from self._group_marks()
        self._look_for_invisible_paths()
        topology_version, topology = self.tracer.topology()
        if topology_version != self._told_topology_version:
            self._told_topology_version = topology_version
            yield "topology", topology
        for message in self.tracer.guard.take_untold():
            yield "problem", {"message": message}
        anchor = identity.clock_anchor()
        if anchor.monotonic_ns >= self._next_anchor_ns:
            self._next_anchor_ns = anchor.monotonic_ns + int(ANCHOR_SECONDS * 1e9)
            yield "clock_anchor", asdict(anchor)
            if not self.tracer.recording:
                yield from self._progress()
        elif self._ended and self._config.steps:
            yield from self._progress()
        yield from self._requests()
        yield from self._what_is_going_on()

    def _progress(self) -> Iterator[tuple[str, Any]]:
        """Where a rank is that records nothing now."""
        if self.tracer.latest_step >= 0:
            yield "progress", {"step": self.tracer.latest_step}

    def _requests(self) -> list[tuple[str, Any]]:
        if self._triggers is None:
            return []
        try:
            return list(self._triggers.marks())
        except Exception as error:
            self._triggers = None
            self.tracer.failed(triggers.PART, error)
            return []

    def _what_is_going_on(self) -> list[tuple[str, Any]]:
        """The marks that a hang report starts from."""
        if self._activity is None:
            return []
        marks: list[tuple[str, Any]] = []
        try:
            in_flight = self._in_flight(self._activity)
            if in_flight != self._told_in_flight:
                self._told_in_flight = in_flight
                marks.append(("in_flight", in_flight))
            marks += self._activity.marks()
        except Exception as error:
            self._activity = None
            self.tracer.failed(ACTIVITY, error)
        return marks

    def _look_for_invisible_paths(self) -> None:
        told = self._told_invisible
        if told is None:
            return
        try:
            found = find_invisible()
            if self.tracer.saw_graph_capture:
                found[CAPTURED_COMMUNICATION] = ACTIVE
            found.update({f"ProcessGroup.{name}": ACTIVE for name in sorted(self.tracer.unknown_methods)})
            # What was active once stays told: what it communicated is missing from the recording.
            found = {**told, **{name: ACTIVE if told.get(name) == ACTIVE else state for name, state in found.items()}}
            if found != told:
                self._told_invisible = found
                self.tracer.set_topology({"invisible_paths": found})
        except Exception as error:
            self._told_invisible = None
            self.tracer.failed(INVISIBLE, error)

    def _refresh_device_clock(self) -> None:
        clock = self._device_clock
        if clock is None or clock.is_off:
            return
        try:
            clock.refresh()
        except Exception as error:
            clock.switch_off()
            self.tracer.failed("timing of the device", error)

    def _tell_device(self) -> None:
        """When the rank became known it may not have used its device yet."""
        used = None if self._device_clock is None else self._device_clock.used_device
        if used is None or used == self._told_device:
            return
        self._told_device = used
        try:
            name, uuid = identity.device(used)
            self.tracer.set_topology({"device": {"name": name, "uuid": uuid}})
        except Exception as error:
            self.tracer.failed("the name of the device", error)

    def _group_marks(self) -> Iterator[tuple[str, Any]]:
        groups = self.tracer.groups
        version = groups.version
        if version == self._told_groups_version:
            return
        self._told_groups_version = version
        for group in groups.known_groups():
            if self._told_groups.get(group.id) != group:
                self._told_groups[group.id] = group
                yield "process_group", {**group._asdict(), "ranks": list(group.ranks)}

    def _in_flight(self, activity: Activity) -> list[dict[str, Any]]:
        """Communications that have been under way since before the last pass: what a hang report starts from."""
        return activity.in_flight(self._unfinished())[:MOST_IN_FLIGHT]

    def _unfinished(self) -> list[Launch]:
        return [*self._process_groups.unfinished(), *self._functional.unfinished(), *self._issued.unfinished()]


def recording_options(config: Config) -> dict[str, Any]:
    """Options that are not left at their default and say what is recorded: readers must not take it for a loss."""
    options = ("steps", "sample", "keep_steps", "keep_bytes", "skip_roles")
    usual = Config()
    return {name: getattr(config, name) for name in options if getattr(config, name) != getattr(usual, name)}


def _holds_a_recording(directory: Path) -> bool:
    own = rank_directory(directory, 0)
    return own.is_dir() and bool(segment_paths(own))


def _announce(directory: Path) -> None:
    """Where rank 0 records, once. ``commtrace run`` says it itself, at the end, where it is not scrolled away."""
    if _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers():
        _logger.info("commtrace records to %s", directory)
    elif not _is_below_commtrace_run():
        try:
            print(f"commtrace: recording to {directory}. Read it with: commtrace summary {directory}", file=sys.stderr)
        except (OSError, ValueError) as error:  # The job has closed its stderr: recording must not depend on it.
            _logger.debug("commtrace could not say where it records: %s", error)


def _is_below_commtrace_run() -> bool:
    search_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return any(Path(entry).parts[-2:] == ("commtrace", "_inject") for entry in search_path)


def _is_initialized() -> bool:
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _device_clock() -> CudaClock | None:
    """Where torch is built for CUDA or HIP. Whether there is a device is not asked: that starts the driver, and a
    process that is forked then cannot use it any more."""
    import torch

    return None if torch.version.cuda is None and torch.version.hip is None else CudaClock()
