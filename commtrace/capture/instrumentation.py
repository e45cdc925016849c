"""Install and remove everything that commtrace hooks in one training process."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, Protocol, cast

from msgspec import structs

from commtrace.capture import engine, hooks, triggers
from commtrace.capture.collectives.cpp_communication import capture_of_cpp
from commtrace.capture.collectives.group_members import GroupMeetings
from commtrace.capture.collectives.groups import GroupRegistry
from commtrace.capture.collectives.process_groups import ProcessGroupCapture
from commtrace.capture.device.clock import CudaClock
from commtrace.capture.device.device_watch import DeviceWatch
from commtrace.capture.device.peak_memory import PART as PEAK_MEMORY
from commtrace.capture.device.peak_memory import PeakMemoryReader
from commtrace.capture.device.synchronizations import PART as SYNCHRONIZATIONS
from commtrace.capture.device.synchronizations import Synchronizations
from commtrace.capture.graphs import replays, warm_ups
from commtrace.capture.graphs.replays import GraphReplays
from commtrace.capture.graphs.stamps import NEEDS_NATIVE, StampingOfGraphs
from commtrace.capture.graphs.warm_ups import WarmUps
from commtrace.capture.hangs.hang_watch import HangWatch
from commtrace.capture.hangs.setup_recording import SetupRecording
from commtrace.capture.model import modules
from commtrace.capture.model.compiled_steps import CompiledSteps
from commtrace.capture.model.modules import ModuleSelection
from commtrace.capture.model.optimizers import OptimizerPhase
from commtrace.capture.model.phases import GarbageCollections, PhaseCapture
from commtrace.capture.native import Native, NativeClock
from commtrace.capture.peer_watch import PeerWatch
from commtrace.capture.records import Launch
from commtrace.capture.run_marks import RunMarks
from commtrace.capture.tracer import Tracer
from commtrace.capture.triggers import Triggers
from commtrace.config import (
    BY_SHELL,
    FORWARDED,
    NOTES_VARIABLE,
    Config,
    changed_variables,
    has_variables,
    own_variables,
)
from commtrace.recording import identity, launchers
from commtrace.recording.agreement import Predecessor
from commtrace.recording.findings_at_end import findings_told
from commtrace.recording.identity import Identity, WorldNames
from commtrace.recording.installation import own_command, warn_if_untried
from commtrace.recording.options import OFF, STAMPS
from commtrace.recording.process_end import ExitCall, uncaught_exception
from commtrace.recording.recorder import Recorder, Sink
from commtrace.trace.aggregates import AggregatingSink
from commtrace.trace.files.budget import Budget
from commtrace.trace.files.file_process import FileProcess
from commtrace.trace.files.rank_files import end_path, holds_a_recording, link_as_latest, rank_directory
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.hang_report import HangReport
from commtrace.trace.metadata import GroupMember, RankMetadata
from commtrace.trace.schema import MarkDetail, mark_row
from commtrace.trace.selection import DetailPlan, QuietPlan, StepRange

if TYPE_CHECKING:
    from commtrace.trace.topology import Recording

_logger = logging.getLogger("commtrace")

SETTLE_SECONDS: Final = 1.0
"""A thread of the backend drops its references as soon as it gets a core."""
QUIET_SECONDS: Final = 5.0
EXIT_SECONDS: Final = 1800.0
"""At exit torch waits for unfinished communications until its own timeout, by default 30 minutes. So do we, unless the
process groups have been destroyed: then nothing more will come."""


class Observer(Sink, Protocol):
    """A sink beside the trace that gives up in forked children: see commtrace.live."""

    def abandon_after_fork(self) -> None:
        """Give up everything, in a forked child: it belongs to the parent."""


_IN_RAY: Final = (
    ' Variables reach workers of Ray by ray.init(runtime_env={"env_vars": {…}}), or those of an actor: what an actor '
    "sets in os.environ comes too late if torch was imported before."
)

_FEWEST_STEPS: Final = 9
"""Of a job with fewer steps nothing is said at its end: it could not be judged."""

_LEAVING_SECONDS: Final = 1.0
"""The longest delay of a process that may be killed next: one pass of the harvester."""

_FAILING_SECONDS: Final = 4.0
"""The longest delay of os._exit with another status than 0: on a busy machine a pass may take longer than a second, and
without it nothing says what ended the rank. The launcher looks at the others only afterwards."""

NAME_SECONDS: Final = 2.0
"""The longest wait of the end of the recording, or of its process groups, for the name of the run from rank 0."""


Hang = Callable[[], "HangReport | None"]
"""Returns the state of this process since training stopped; None while it goes on."""

OpenObservers = Callable[[RankMetadata, Path, Recorder, Hang, Callable[[], str]], Sequence[Observer]]
"""Opens what looks on beside the trace, when the rank is known; called on the harvester thread."""

GoOn = Callable[[Predecessor], None]
"""Ends this recording and begins one for another world in the same process."""

Install = Callable[[Tracer], Callable[[], None]]
"""An integration: installs itself and returns what takes it out again."""


class Instrumentation:
    """The recorder, the tracer and the hooks of one process; ``open_observers`` opens further sinks."""

    def __init__(
        self,
        config: Config,
        integrations: Sequence[tuple[str, Install]] = (),
        open_observers: OpenObservers | None = None,
        predecessor: Predecessor | None = None,
        go_on: GoOn | None = None,
    ) -> None:
        warn_if_untried("torch", _torch_version())
        self.config = config
        self._engine = engine.choose(config)
        self._integrations = integrations
        self._open_observers = open_observers
        self._observers: Sequence[Observer] = ()
        self._files = FileProcess()
        self._identity = Identity(config, predecessor=predecessor, files=self._files)
        self._identity.name_worlds(WorldNames(config, self._files, self._identity.predecessors))
        self._variables = own_variables(os.environ)
        self._is_in_ray = launchers.is_ray_worker(os.environ, os.getppid())
        self._go_on = go_on
        self._is_first = predecessor is None  # recording of this process
        self._has_joined = False
        core = self._engine.core
        native = None if core is None else Native(core, config.buffer_spans)
        self.recorder = Recorder(
            self._open_sinks,
            ready=self._is_identified,
            capacity=config.buffer_spans,
            before_pass=self._since_last_pass,
            note_losses=self._note_losses,
            at_end=self._at_end,
            source=native,
        )
        self._writer: SegmentWriter | None = None
        self._tells_of: Path | None = None
        """The run, if this is the process that says at its end what was found."""
        self._device_clock = _device_clock(native)
        window = StepRange.parse(config.steps) if config.steps else None
        self.tracer = Tracer(
            self.recorder,
            clock=self._device_clock,
            window=window,
            groups=GroupRegistry(config.skip_roles, None if native is None else native.make_counters),
            detail=DetailPlan(config.sample),
            quiet=QuietPlan(config.quiet),
            native=native,
            first_step=0 if predecessor is None else predecessor.first_step,
        )
        self._modules = ModuleSelection(self.tracer, config.modules)
        self._triggers = Triggers(self.tracer, self._modules, self._files)
        self._process_groups = ProcessGroupCapture(self.tracer, self._device_clock)
        self._cpp = capture_of_cpp(self.tracer, self._process_groups.devices)
        self._optimizers = OptimizerPhase(self.tracer)
        self._compiled_steps = CompiledSteps(self.tracer)
        self._garbage = GarbageCollections(self.tracer)
        self._phases = PhaseCapture(self.tracer)
        self._peak_memory = None if self._device_clock is None else PeakMemoryReader(self.tracer, self._device_clock)
        clock = self._device_clock
        self._synchronizations = None if clock is None else Synchronizations(self.tracer, clock)
        has_graphs = self._device_clock is not None and config.graphs != OFF
        self._replays = GraphReplays(self.tracer, stamping=self._stamping(core)) if has_graphs else None
        self._warm_ups = WarmUps(self.tracer) if has_graphs else None
        self._device_watch = DeviceWatch(self.tracer.failed)
        self._marks = RunMarks(self.tracer, self._device_clock, self._triggers, self._unfinished, self._device_watch)
        self._hang_watch = HangWatch(self.tracer, self._unfinished, config.hang_seconds, self._files)
        self._peer_watch = PeerWatch(self.tracer.failed, self._files)
        self._setup = SetupRecording(self.tracer, config, self._identity, self._files, _note_folder)
        self._exit_call = ExitCall(self._before_exit)
        self._uninstallers: list[tuple[str, Callable[[], None]]] = []

    def start(self) -> None:
        """Install everything and start the harvester. A part that cannot be installed is left out, with a warning."""
        from commtrace.capture.collectives import (
            cpp_communication,
            ddp_reducer,
            functional,
            group_lifecycle,
            process_groups,
            waits,
        )
        from commtrace.capture.device import device_calls
        from commtrace.capture.model import compiled_steps, optimizers, phases

        for part, switch_off in (
            # Together: if one of them stopped alone, this rank would number its communications otherwise than others.
            (process_groups.PART, self._stop_capture),
            (device_calls.PART, self._stop_capture),
            (cpp_communication.PART, self._stop_capture),
            (functional.PART, self._stop_capture),
            (ddp_reducer.PART, self._stop_capture),
            (cpp_communication.HOOKS_PART, self._stop_capture),
            (replays.PART, self._stop_capture),
            (optimizers.PART, self._optimizers.uninstall),
            (compiled_steps.PART, self._compiled_steps.uninstall),
            (phases.GARBAGE, self._garbage.uninstall),
            (phases.PART, self._phases.uninstall),
            (modules.PART, self._modules.uninstall),
        ):
            self.tracer.guard.on_failure(part, switch_off)
        self._install(process_groups.PART, self._process_groups.install, self._process_groups.uninstall)
        self._install(cpp_communication.PART, self._cpp.install, self._cpp.uninstall)
        self._install(optimizers.PART, self._optimizers.install, self._optimizers.uninstall)
        self._install(compiled_steps.PART, self._compiled_steps.install, self._compiled_steps.uninstall)
        self._install(phases.GARBAGE, self._garbage.install, self._garbage.uninstall)
        self._install(phases.PART, self._phases.install, self._phases.uninstall)
        self._install(modules.PART, self._modules.install, self._modules.uninstall)
        peak_memory = self._peak_memory
        if peak_memory is not None:
            self.tracer.guard.on_failure(PEAK_MEMORY, peak_memory.uninstall)
            self._install(PEAK_MEMORY, peak_memory.install, peak_memory.uninstall)
        synchronizations = self._synchronizations
        if synchronizations is not None:
            self.tracer.guard.on_failure(SYNCHRONIZATIONS, synchronizations.uninstall)
            self._install(SYNCHRONIZATIONS, synchronizations.install, synchronizations.uninstall)
        if self._replays is not None and self._warm_ups is not None:
            self.tracer.guard.on_failure(warm_ups.PART, self._warm_ups.uninstall)
            self._install(replays.PART, self._replays.install, self._replays.uninstall)
            self._install(warm_ups.PART, self._warm_ups.install, self._warm_ups.uninstall)
        for name, install in (
            (hooks.COMPILER, hooks.keep_compiler_out),
            (group_lifecycle.CREATION, self._install_creation),
            (group_lifecycle.MESH_NAMES, group_lifecycle.watch_meshes),
            (group_lifecycle.DESTRUCTION, self._install_destruction),
            (waits.FUTURES, self._install_futures),
            *self._integrations,
        ):
            try:
                self._uninstallers.append((name, install(self.tracer)))
            except Exception as error:
                self.tracer.failed(name, error)
        self._install("os._exit", self._exit_call.install, self._exit_call.uninstall)
        self._listen()
        self.tracer.set_topology({"engine": {"name": self._engine.name, "reason": self._engine.reason}})
        if self._is_in_ray:
            self.tracer.set_topology({"launcher": "ray"})
        options = recording_options(self.config)
        if options:
            self.tracer.set_topology({"recording": options})
        began = identity.process_start_ns()
        if began is not None:
            self.tracer.set_topology({"process_start_ns": began})
        ranks_per_node = identity.ranks_per_node()
        if ranks_per_node is not None:
            self.tracer.set_topology({"ranks_per_node": ranks_per_node})
        self._has_joined = _is_initialized()
        self._setup.start()
        self.recorder.start()

    def _listen(self) -> None:
        if self.config.trigger_signal:
            listening = partial(self._triggers.listen, self.config.trigger_signal)
            self._install(triggers.PART, listening, self._triggers.uninstall)

    def stop(self) -> None:
        """Close the last step, put every original back, and write the rest."""
        self._finish_last_step()
        self.take_out()
        self._close()

    def take_out(self) -> None:
        """Put every original back."""
        while self._uninstallers:
            name, uninstall = self._uninstallers[-1]
            try:
                uninstall()
            except Exception as error:
                self.tracer.failed(name, error)
                uninstall()  # They begin where they were interrupted.
            self._uninstallers.pop()

    def _finish_last_step(self) -> None:
        try:
            self.tracer.finish()
            self.tracer.recording = False
        except Exception as error:
            self.tracer.failed("the end of the last step", error)

    def _close(self) -> None:
        self.tracer.guard.has_ended = True
        self._hang_watch.stop()
        self._peer_watch.stop(ended_cleanly=not self.tracer.failures_recorded and not uncaught_exception())
        self._device_watch.stop()
        self._marks.has_ended = True
        self._setup.stop()
        self.recorder.stop()
        if isinstance(self._device_clock, NativeClock):
            self._device_clock.close()

    def telling_findings(self) -> AbstractContextManager[None]:
        """Return what says, as it is left, what the job lost time to: the process ends. Files are closed inside.

        On other ranks than 0, after an exception, of a short job, and below ``commtrace run``, it says nothing.
        """
        directory, self._tells_of = self._tells_of, None
        is_short = self.tracer.num_steps < _FEWEST_STEPS
        if directory is None or is_short or uncaught_exception() is not None or hasattr(sys, "ps1"):
            return contextlib.nullcontext()
        return findings_told(directory, self.config.findings_seconds, lambda: self.recorder.is_end_written)

    def _before_exit(self, status: int, how: MarkDetail) -> None:
        """Write the rest before os._exit ends this process: its files are closed if the status is 0, else ``how``."""
        if not self.recorder.recording:
            return
        try:
            if status == 0:
                with self.telling_findings():
                    self._finish_last_step()
                    self._close()
            else:
                self._marks.has_left = False  # whatever it did before: it says itself that it failed
                self._marks.exit = self._marks.exit or how
                self._setup.exit = self._marks.exit
                self.recorder.harvest_soon(_FAILING_SECONDS)
        except Exception:
            _logger.exception("commtrace could not stop cleanly; its files may miss the last second")

    def _at_end(self) -> None:
        try:
            self._setup.end()
        finally:
            self._files.close()

    def _joined(self) -> bool:
        """Handle a new default group; return True if another recording goes on in the world that it makes."""
        place = identity.current_place()
        if not self._has_joined or place is None or self._go_on is None or not self.recorder.recording:
            self._has_joined = True
            return False
        if self._identity.goes_on_at(place):
            return False
        agreed = self._identity.settled(0.0)
        next_step = max(self.tracer.latest_step + 1, self._identity.first_step)
        self._go_on(Predecessor(agreed.world, agreed.job, agreed.attempt, next_step))
        return True

    def _left(self) -> None:
        """Write what there is once the default group is destroyed: many a launcher kills the process from here on."""
        self._marks.has_left = True
        self.recorder.harvest_soon(_LEAVING_SECONDS)

    @property
    def awaits_callbacks(self) -> bool:
        return self.tracer.completions.unsettled

    def await_callbacks(self, *, is_patient: bool = True) -> bool:
        """Wait, before Python ends, for communications without a wait, as torch does in any case.

        Return whether threads of the backend are done with us, after a second if ``is_patient``.
        """
        if not self.tracer.completions.wait(QUIET_SECONDS) and _is_initialized():
            _logger.warning("commtrace: waiting, as torch does, for communications that nobody has waited for")
            self.tracer.completions.wait(EXIT_SECONDS)
        return self.tracer.completions.settle(SETTLE_SECONDS if is_patient else 0.0)

    def abandon_after_fork(self) -> None:
        """Stay silent in a forked child. The hooks stay and pass everything through."""
        self.tracer.abandon_after_fork()
        self.recorder.abandon_after_fork()
        self._hang_watch.abandon_after_fork()
        self._peer_watch.abandon_after_fork()
        self._files.abandon_after_fork()
        for observer in self._observers:
            observer.abandon_after_fork()

    def before_joining(self, action: Callable[[], None]) -> None:
        """Call ``action`` once, before this forked child makes a default process group. Never raises."""
        from commtrace.capture.collectives import group_lifecycle

        try:
            group_lifecycle.before_joining(action)
        except Exception as error:
            self.tracer.failed("recording in a forked child", error)

    def _stamping(self, core: ModuleType | None) -> StampingOfGraphs | None:
        if self.config.graphs != STAMPS:
            return None
        if core is None:
            self.tracer.guard.noticed(NEEDS_NATIVE)
            return None
        return StampingOfGraphs(core, self.tracer.guard.noticed)

    def _stop_capture(self) -> None:
        for capture in (self._process_groups, self._cpp, self._replays):
            if capture is not None:
                capture.uninstall()

    def _install(self, name: str, install: Callable[[], None], uninstall: Callable[[], None]) -> None:
        self._uninstallers.append((name, uninstall))
        try:
            install()
        except Exception as error:
            self.tracer.failed(name, error)
            uninstall()

    def _install_creation(self, tracer: Tracer) -> Callable[[], None]:
        from commtrace.capture.collectives import group_lifecycle

        return group_lifecycle.watch_creation(tracer, self._joined)

    def _install_destruction(self, tracer: Tracer) -> Callable[[], None]:
        from commtrace.capture.collectives import group_lifecycle

        return group_lifecycle.watch_destruction(tracer, before=self._identify_before_the_end, after=self._left)

    def _identify_before_the_end(self) -> None:
        # Not in a forked child: the connection to the store is its parent's.
        if self.recorder.recording and _is_initialized():
            self._identity.settled(NAME_SECONDS, self.tracer.groups.place)

    def _install_futures(self, tracer: Tracer) -> Callable[[], None]:
        from commtrace.capture.collectives.waits import FutureWaits

        captured = self._process_groups
        return hooks.installed(
            FutureWaits(tracer, captured.pending, captured.dead, captured.devices, captured.surrendered)
        )

    def _open_sinks(self) -> list[Sink]:
        agreed = self._identity.settled(NAME_SECONDS, self.tracer.groups.place)
        self._setup.discard()
        late = self.tracer.count_from(self._identity.first_step)
        self.recorder.renumber = None if late is None else late.renumber
        directory = identity.own_directory(self.config, agreed, self._files, self._identity.predecessors)
        metadata = identity.collect(self.config, agreed)
        self._marks.world = metadata.world
        member = GroupMember(metadata.world, metadata.run_id, metadata.rank, metadata.host, metadata.pid)
        self._marks.members = GroupMeetings(self.tracer.groups, member)
        if metadata.rank == 0 and metadata.attempt == 0 and self._files.call(holds_a_recording, directory):
            _logger.warning(
                "commtrace: %s holds a recording already. Both are kept, and the newest one is shown: give each job, "
                "and each start() of a script, a --run-id or COMMTRACE_DIR of its own to see them all.%s",
                directory,
                _IN_RAY if self._is_in_ray else "",
            )
        changed = changed_variables(self._variables, os.environ)
        if changed and not metadata.local_rank:
            _logger.warning(
                "commtrace: %s changed after the options had been read, and has no effect. They are read at `import "
                "commtrace.auto` and commtrace.start(), and below `commtrace run` as torch is imported; "
                "commtrace.start(commtrace.Config(…)) takes them too, after commtrace.stop() if it records already.%s",
                ", ".join(changed),
                _IN_RAY if self._is_in_ray else "",
            )
        writer = self._writer = SegmentWriter(
            directory,
            metadata,
            steps_per_segment=self.config.steps_per_segment,
            budget=Budget(self.config.keep_steps, self.config.keep_bytes),
            files=self._files,
        )
        # At once: of a rank that is killed while exporters are loaded nothing else would be known.
        writer.write([mark_row("clock_anchor", structs.asdict(identity.clock_anchor()))])
        is_noted = announce(directory, metadata, is_new=self._is_first)
        if metadata.rank == 0 and not is_noted and self.config.findings_seconds:
            self._tells_of = directory
        with contextlib.suppress(OSError):  # the process that would note it has died; the next one is told
            self._files.note_end(end_path(rank_directory(directory, metadata.rank), metadata.session))
        if metadata.rank == 0 and identity.is_one_of_many(self.config):
            try:
                self._files.call(link_as_latest, directory)
            except OSError as error:  # Nothing depends on it: commands look for the newest run themselves.
                _logger.debug("commtrace: no link to the newest run: %s", error)
        self._peer_watch.start(directory, metadata)
        if self.config.hang_seconds:
            self._hang_watch.start(directory, metadata)
        # Before the writer, which may thin out what it is given.
        self._observers = self._opened_observers(metadata, directory)
        self._triggers.open(directory, metadata)
        detail = self.tracer.detail
        thinned = writer if detail.every == 1 else AggregatingSink(writer, detail.details)
        return [*self._observers, thinned]

    def _note_losses(self, lost: Mapping[str, int]) -> None:
        if self._writer is not None:
            self._writer.write_losses(lost)

    def _opened_observers(self, metadata: RankMetadata, directory: Path) -> Sequence[Observer]:
        if self._open_observers is None:
            return ()
        try:
            watch = self._hang_watch
            return self._open_observers(metadata, directory, self.recorder, lambda: watch.report, watch.slow_phase)
        except Exception as error:
            self.tracer.failed("live metrics", error)
            return ()

    def _is_identified(self, is_last_pass: bool) -> bool:
        # In the last pass the name of the run is waited for: a job may be shorter than it takes to agree on one.
        is_identified = self._is_rank_known() and (
            is_last_pass or not _is_initialized() or self._identity.found(self.tracer.groups.place) is not None
        )
        if not is_identified:
            self._setup.look()
        return is_identified

    def _is_rank_known(self) -> bool:
        if self.tracer.groups.place is not None or _is_initialized():
            return True
        # A job of one process never initialises torch.distributed. A child of a training process (a data loading
        # worker) is no rank.
        return self.tracer.has_begun_a_step and multiprocessing.parent_process() is None

    def _since_last_pass(self) -> Iterator[tuple[str, MarkDetail]]:
        self._identity.look_for_others()
        return self._marks.since_last_pass()

    def _unfinished(self) -> list[Launch]:
        return [*self._process_groups.unfinished(), *self._cpp.unfinished()]


def recording_options(config: Config) -> Recording:
    """Return the options that limit the recording and are not at their default: readers see no loss in them."""
    options = ("steps", "sample", "keep_steps", "keep_bytes", "skip_roles")
    usual = Config()
    changed = {name: getattr(config, name) for name in options if getattr(config, name) != getattr(usual, name)}
    return cast("Recording", changed)


def _is_initialized() -> bool:
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _torch_version() -> str:
    import torch

    return torch.__version__


def _device_clock(native: Native | None) -> CudaClock | NativeClock | None:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return None
    return CudaClock() if native is None else NativeClock(native.core, torch.cuda)


def announce(directory: Path, metadata: RankMetadata, *, is_new: bool = True) -> bool:
    """Note the rank's folder for ``commtrace run`` on this node; without one, print it on rank 0 of a new job.

    Return whether it is noted.
    """
    is_noted = _note(rank_directory(directory, metadata.rank))
    if metadata.rank == 0:
        if _logger.isEnabledFor(logging.INFO) and _logger.hasHandlers():
            _logger.info("commtrace records to %s", directory)
        elif is_new and not is_noted:
            _print(f"commtrace: recording to {directory}. Read it with: {own_command()} summary {directory}")
    if metadata.local_rank == 0 and _lacks_variables():
        _logger.warning(
            "commtrace: the launcher has brought PYTHONPATH of `commtrace run` to %s, and none of its options: this "
            "node records with the defaults, to %s. Let it forward %s as well, for example with mpirun -x %s.",
            metadata.node,
            directory,
            FORWARDED,
            FORWARDED,
        )
    return is_noted


_SHELLS: Final = frozenset({"ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "mksh", "sh", "tcsh", "zsh"})
_MOST_ANCESTORS: Final = 64


def _note_folder(directory: Path, metadata: RankMetadata) -> None:
    _note(rank_directory(directory, metadata.rank))


def _note(folder: Path) -> bool:
    notes = os.environ.get(NOTES_VARIABLE)
    if not notes:
        return False
    try:
        with open(os.open(notes, os.O_WRONLY | os.O_APPEND), "w") as file:
            file.write(f"{folder}{BY_SHELL if _is_below_shell() else ''}\n")
    except OSError:  # it runs on another node, or the disk of its notes is full
        return False
    return True


def _is_below_shell() -> bool:
    """Return whether a shell below ``commtrace run`` has started this process, or one that started it."""
    pid = os.getpid()
    for _ in range(_MOST_ANCESTORS):
        process = Path("/proc", str(pid))
        try:
            # What `commtrace run` has started has its variable, and it itself has not.
            if f"{NOTES_VARIABLE}=".encode() not in (process / "environ").read_bytes():
                return False
            if os.path.basename(os.readlink(process / "exe")) in _SHELLS:
                return True
            pid = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # another user's, gone, or a system without /proc
            return False
    return False


def _print(line: str) -> None:
    try:
        print(line, file=sys.stderr)
    except (OSError, ValueError) as error:  # The job has closed its stderr: recording must not depend on it.
        _logger.debug("commtrace could not print where it records: %s", error)


def _lacks_variables() -> bool:
    """Return whether ``commtrace run`` of another node did not get its variables forwarded."""
    search_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    is_injected = any(Path(entry).parts[-2:] == ("commtrace", "_inject") for entry in search_path)
    return is_injected and not has_variables(os.environ)
