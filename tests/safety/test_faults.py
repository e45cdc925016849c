"""An exception in any line of any hook never reaches training.

Every job of :mod:`tests.safety.jobs` is run once for every line of commtrace that it executes, and that line raises.
The job must compute what it computes without commtrace; what training itself raises must reach it; somebody must be
told, once; and in the end every replaced function must be back in its place.
"""

from __future__ import annotations

import ast
import atexit
import dataclasses
import gc
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import wrapt.importer
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer

import commtrace
from commtrace import _native, session
from commtrace.capture import hooks
from commtrace.capture.collectives.cpp_communication import torch_has_hooks
from commtrace.capture.instrumentation import Instrumentation
from commtrace.capture.model import phases
from commtrace.capture.model.optimizers import STEP_HOOKS
from commtrace.capture.native import NativeClock
from commtrace.capture.triggers import Triggers
from commtrace.recorder import Recorder
from commtrace.trace import selection
from tests.capture.recording import MemorySink
from tests.safety import devices, engines, faults, jobs, models
from tests.safety.faults import Place, Sort

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]

TRIES = 5
EVERY_INTERRUPTED = 5
PARTS = [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in (1, 2))]
"""Of the lines, every third; the others take their turn in `make test-thorough`."""
NO_HOOKS = frozenset(function.__code__ for function in (Triggers.open, selection.make_request, selection.write_request))
"""What jobs call themselves, in place of the harvester's thread or of a command."""
ALONE = {**jobs.ALONE, **models.ALONE}
UNREACHED = "never reached again"
_OPTIMIZERS = "hooks of optimizers"
_WAITING = "waits to be imported"
_WAITING_HOOKS: dict[str, list[Any]] = wrapt.importer._post_import_hooks


class InjectedError(Exception):
    """What no code of ours expects."""


USUAL = commtrace.Config(dir="/nowhere")
CONFIGS = {
    job: commtrace.Config(dir="/nowhere", **options) for job, options in {**jobs.OPTIONS, **models.OPTIONS}.items()
}
CONFIGS_OF_ENGINE = {
    (config, engine): dataclasses.replace(config, engine=engine)
    for config in (USUAL, *CONFIGS.values())
    for engine in ("python", "native")
}
"""Made before anything is broken: a script that makes a configuration is told at once what is wrong with it."""


class Recorded:
    """The recording of a job: everything but the thread and the files.

    Attributes:
        messages: what was logged.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.messages: list[str] = []
        self.unraisable: list[BaseException | None] = []
        self.sink = MemorySink()
        self.instrumentation: Instrumentation | None = None
        self.started = 0

    def run(self, job: Callable[[], str]) -> str:
        """The result of the job, which starts and stops the recording as a script does."""
        config = CONFIGS.get(getattr(job, "__name__", ""), USUAL)
        commtrace.start(CONFIGS_OF_ENGINE[config, self.engine])
        self.instrumentation = session._current
        try:
            return job()
        finally:
            commtrace.stop()

    def harvest(self) -> None:
        if self.instrumentation is not None:
            self.instrumentation.recorder._guarded_pass(last=True)

    def lost(self) -> int:
        return 0 if self.instrumentation is None else sum(self.instrumentation.recorder.dropped.values())


@pytest.fixture
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Makes recordings; no thread of commtrace's runs beside the training."""
    monkeypatch.setattr(Recorder, "start", lambda recorder: None)
    monkeypatch.setattr(phases, "SHORTEST_GARBAGE_NS", 0)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    # What takes most of the time of a start: Dynamo's list of what it skips is compiled anew.
    monkeypatch.setattr(hooks, "_skip_own_files", lambda rules: lambda: None)
    monkeypatch.setattr(NativeClock, "close", lambda _: True)  # nothing is harvested before a recording has ended
    models.alive.clear()
    # Looking for models among all objects takes most of the time.
    monkeypatch.setattr(gc, "get_objects", lambda: list(models.alive))

    usual_engine = getattr(request, "param", "python")

    @contextmanager
    def record(engine: str = usual_engine) -> Iterator[Recorded]:
        recording = Recorded(engine)
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: recording.messages.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("commtrace")
        logger.addHandler(handler)
        monkeypatch.setattr(Instrumentation, "_open_sinks", lambda _: [recording.sink])
        monkeypatch.setattr(sys, "unraisablehook", lambda told: recording.unraisable.append(told.exc_value))
        monkeypatch.setattr(threading, "excepthook", lambda told: recording.unraisable.append(told.exc_value))
        gc.disable()
        try:
            yield recording
        finally:
            gc.enable()
            logger.removeHandler(handler)
            if recording.instrumentation is not None and torch_has_hooks():
                # They stay where another thread runs, as those of pytest's plugins do, and would be broken, idle, next.
                recording.instrumentation._cpp._hooks._take_out()  # type: ignore[attr-defined]

    record.engine = usual_engine  # type: ignore[attr-defined]
    logging.getLogger("commtrace").propagate = False
    yield record
    logging.getLogger("commtrace").propagate = True


def problems_of(place: Place, job: Callable[[], str], expected: str, record: Callable[[], Any]) -> list[str]:
    """What is wrong when this line raises."""
    error = InjectedError("injected")
    raised: BaseException | None = None
    for _ in range(TRIES):
        result = None
        before = replaced_now()
        with record() as recording:
            with faults.broken(place, error) as fault:
                try:
                    result = recording.run(job)
                except BaseException as escaped:
                    raised = escaped
            if fault.raised:
                break
    else:
        return [UNREACHED]
    problems = []
    if place.sort is Sort.HANDS_ON:
        if not carries(raised, error):
            problems.append(f"what training raised became {raised!r}")
    else:
        if raised is not None:
            problems.append(f"reached training: {raised!r}")
        elif result != expected:
            problems.append("the result differs")
        recording.harvest()
        # What fails in the callback of a weak reference is told by Python.
        if not (recording.messages or recording.lost() or recording.unraisable):
            problems.append("nobody was told")
        if len(recording.messages) > len(set(recording.messages)):
            problems.append(f"told more than once: {recording.messages}")
    after = replaced_now()
    if after != before:
        names = sorted(str(name) for name in {*before, *after} if before.get(name) != after.get(name))
        problems.append(f"not put back: {names}")
        put_back(before)
    return problems


def carries(raised: BaseException | None, error: BaseException) -> bool:
    """Whether it is the error, or what torch raises because of it: distributed checkpoints, stages of pipelines."""
    if raised is None or raised is error:
        return raised is error
    if isinstance(raised, CheckpointException):  # with what came from a rank, pickled
        return any(repr(failure) == repr(error) for failure, _ in raised.failures.values())
    return carries(raised.__cause__, error) or carries(raised.__context__, error)


def replaced_now() -> dict[tuple[Any, str], Any]:
    """What hooks stand in for, and what waits to be imported to be hooked."""
    owners = [
        dist.ProcessGroup, dist.Work, dist.distributed_c10d, DeviceMesh, DistributedDataParallel, torch.autograd,
        torch.nn.Module, torch.optim.Optimizer, torch.nn.Linear, models.Net, models.Block,
    ]  # fmt: skip
    attributes = {(owner, name): value for owner in owners for name, value in vars(owner).items() if callable(value)}
    callbacks: dict[tuple[Any, str], Any] = {(gc, str(index)): value for index, value in enumerate(gc.callbacks)}
    for table in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):
        callbacks |= {(_OPTIMIZERS, str(key)): hook for key, hook in table.items()}
    callbacks[_OPTIMIZERS, "listener"] = STEP_HOOKS.listener
    return attributes | callbacks | {(_WAITING, module): tuple(hooks) for module, hooks in _WAITING_HOOKS.items()}


def put_back(before: dict[tuple[Any, str], Any]) -> None:
    for (owner, name), value in before.items():
        if owner not in (gc, _OPTIMIZERS, _WAITING) and vars(owner).get(name) is not value:
            setattr(owner, name, value)
    STEP_HOOKS.listener = None
    gc.callbacks[:] = [value for (owner, _), value in before.items() if owner is gc]
    _WAITING_HOOKS.clear()
    _WAITING_HOOKS.update({module: list(hooks) for (owner, module), hooks in before.items() if owner is _WAITING})


Way = tuple[tuple[CodeType, int], tuple[CodeType, int]]
"""From a line of a hook to a line beneath it. One stands for all between them: what is there guards nothing."""


def ways_through(job: Callable[[], str], record: Callable[[], Any]) -> dict[Way, Place]:
    """Return the ways that a job goes through commtrace."""
    expected = job()
    with record() as recording:
        assert recording.run(job) == expected  # also imports what is imported late
    with record() as recording:
        found = faults.places(lambda: recording.run(job))
        recording.harvest()
        assert recording.messages == []
    return {(place.path[0], place.path[-1]): place for place in reversed(found)}


_WAYS: dict[tuple[Callable[[], str], str], dict[Way, Place]] = {}
"""Of the jobs so far, by engine: every time that a job runs it goes the same ways."""


def new_ways(
    job: Callable[[], str], record: Callable[[], Any], others: Sequence[Callable[[], str]]
) -> dict[Way, Place]:
    """Return the ways that a job goes and none of the other jobs does."""
    engine: str = record.engine  # type: ignore[attr-defined]
    for each in (*others, job):
        if (each, engine) not in _WAYS:
            _WAYS[each, engine] = ways_through(each, record)
    known = {way for other in others for way in _WAYS[other, engine]}
    return {way: place for way, place in _WAYS[job, engine].items() if way not in known}


def break_every_line(
    job: Callable[[], str],
    record: Callable[[], Any],
    chosen: Callable[[Place], bool],
    part: int,
    others: Sequence[Callable[[], str]] = (),
) -> None:
    """Break a part of the chosen lines of a job, one at a time, but for those that one of the others breaks."""
    expected = job()
    ways = new_ways(job, record, others)
    all_lines = [place for place in ways.values() if chosen(place) and place.sort is not Sort.CANNOT_FAIL]
    breakable = [place for place in all_lines if is_of_part(place, part)]
    wrong = {place: problems for place in breakable if (problems := problems_of(place, job, expected, record))}
    text = "\n".join(f"{place}: {'; '.join(problems)}" for place, problems in wrong.items())
    assert not wrong, f"{len(wrong)} of {len(breakable)} lines:\n{text}"
    assert all_lines


def interrupt_lines(job: Callable[[], str], record: Callable[[], Any]) -> None:
    """Ctrl-C in one in so many lines of the hooks reaches the script as it is, and everything can be put back."""
    with record() as recording:
        recording.run(job)
        found = [place for place in faults.places(lambda: recording.run(job)) if is_of_a_hook(place)]
    interrupted = 0
    for place in found[::EVERY_INTERRUPTED]:
        error, before = KeyboardInterrupt(), replaced_now()
        escaped: BaseException | None = None
        with record() as recording, faults.broken(place, error) as fault:
            try:
                recording.run(job)
            except BaseException as raised:
                escaped = raised
        interrupted += escaped is error
        # torch and Python keep what is raised in the callbacks of futures, of weak references and of the collector.
        is_kept = error in recording.unraisable or any(code.co_name == "completed" for code, _ in place.path)
        assert escaped is error or not fault.raised or is_kept, place
        assert replaced_now() == before, place
    assert interrupted > 10


def is_of_part(place: Place, part: int) -> bool:
    """By the number of the line: processes that try other parts may find the lines in another order."""
    return place.line % len(PARTS) == part


def is_of_a_hook(place: Place) -> bool:
    return not is_of_start_or_stop(place) and place.path[0][0] not in NO_HOOKS


def is_of_start_or_stop(place: Place) -> bool:
    return place.path[0][0] in (commtrace.start.__code__, commtrace.stop.__code__)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", jobs.OF_FOUR)
def test_of_four_ranks(name: str, part: int, recorded: Any) -> None:
    with jobs.rank_1_of_4():
        break_every_line(jobs.OF_FOUR[name], recorded, is_of_a_hook, part, earlier_jobs(name, jobs.OF_FOUR))


NATIVELY = pytest.mark.parametrize("recorded", ["native"], indirect=True)
"""Lines of Python are broken that are left where the native part records; the other tests are of the Python engine."""


@NATIVELY
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["collectives", "functional_collectives", "meshes"])
def test_of_four_ranks_natively(name: str, part: int, recorded: Any) -> None:
    with jobs.rank_1_of_4():
        break_every_line(jobs.OF_FOUR[name], recorded, is_of_a_hook, part)


@NATIVELY
@pytest.mark.parametrize("part", PARTS)
def test_with_a_gpu_natively(part: int, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with jobs.rank_1_of_4():
        break_every_line(devices.SimulatedGpu(monkeypatch).job, recorded, is_of_a_hook, part)


@NATIVELY
@pytest.mark.parametrize("part", PARTS)
def test_alone_natively(part: int, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.call_back_at_once(monkeypatch)
    with jobs.alone():
        break_every_line(jobs.data_parallel, recorded, is_of_a_hook, part)


@NATIVELY
@pytest.mark.parametrize("part", PARTS)
def test_start_and_stop_natively(part: int, recorded: Any) -> None:
    with jobs.rank_1_of_4():
        break_every_line(jobs.collectives, recorded, is_of_start_or_stop, part)


@pytest.mark.long
@pytest.mark.parametrize("part", range(len(PARTS)))
@pytest.mark.parametrize("name", jobs.OF_FOUR)
def test_of_four_ranks_with_what_earlier_jobs_break(name: str, part: int, recorded: Any) -> None:
    with jobs.rank_1_of_4():
        break_every_line(jobs.OF_FOUR[name], recorded, is_of_a_hook, part)


@pytest.mark.parametrize("name", ["collectives", "point_to_point", "functional_collectives", "meshes"])
def test_an_interrupt_passes_through_unchanged(name: str, recorded: Any) -> None:
    with jobs.rank_1_of_4():
        interrupt_lines(jobs.OF_FOUR[name], recorded)


@pytest.mark.parametrize("name", ["data_parallel", "found_steps", "fully_sharded", "pipelined", "module_spans"])
def test_an_interrupt_of_a_model_passes_through_unchanged(
    name: str, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.call_back_at_once(monkeypatch)
    with jobs.alone():
        interrupt_lines(ALONE[name], recorded)


@pytest.mark.parametrize("part", PARTS)
def test_start_and_stop(part: int, recorded: Any) -> None:
    with jobs.rank_1_of_4():
        break_every_line(jobs.collectives, recorded, is_of_start_or_stop, part)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ALONE)
def test_alone(name: str, part: int, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs.call_back_at_once(monkeypatch)
    with jobs.alone():
        break_every_line(ALONE[name], recorded, is_of_a_hook, part, earlier_jobs(name, ALONE))


@pytest.mark.long
@pytest.mark.parametrize("part", range(len(PARTS)))
@pytest.mark.parametrize("name", ALONE)
def test_alone_with_what_earlier_jobs_break(
    name: str, part: int, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.call_back_at_once(monkeypatch)
    with jobs.alone():
        break_every_line(ALONE[name], recorded, is_of_a_hook, part)


def earlier_jobs(name: str, all_jobs: Mapping[str, Callable[[], str]]) -> list[Callable[[], str]]:
    """Return the jobs before one: the ways that they go are broken there, and here only in `make test-long`."""
    names = list(all_jobs)
    return [all_jobs[other] for other in names[: names.index(name)]]


@pytest.mark.parametrize("part", PARTS)
def test_with_a_gpu(part: int, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with jobs.rank_1_of_4():
        break_every_line(devices.SimulatedGpu(monkeypatch).job, recorded, is_of_a_hook, part)


@pytest.mark.parametrize("part", PARTS)
def test_under_megatron(part: int, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'commtrace[megatron]'")
    from megatron.core import parallel_state

    engines.empty_megatron(monkeypatch)
    with jobs.rank_1_of_4():
        parallel_state.initialize_model_parallel(2, 1, create_gloo_process_groups=False)
        try:
            break_every_line(engines.megatron, recorded, is_of_a_hook, part)
        finally:
            parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("part", PARTS)
def test_under_deepspeed(part: int, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install 'commtrace[deepspeed]'")
    engines.empty_deepspeed(monkeypatch)
    with jobs.rank_1_of_4():
        break_every_line(engines.deepspeed, recorded, is_of_a_hook, part)


NOT_REACHED = {
    "capture/collectives/group_members.py": "the harvester and a thread of its own exchange them",
    "capture/collectives/untraced_paths.py": "the harvester asks it",
    "capture/device/facts.py": "the harvester makes rows of them",
    "capture/model/late_numbers.py": "no job joins one that has begun: tests/capture/model has its tests",
    "integrations/layout.py": "no job is told a layout, which is read once, as the recording starts",
    "capture/hangs/stack_timer.py": "the thread of the watch for hangs sets it",
}
"""Modules that no job breaks, and why."""


@pytest.mark.thorough
def test_every_module_of_capture_and_every_integration_is_broken_by_a_job(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: set[str] = set()

    def go_through(*trainings: Callable[[], str]) -> None:
        for job in trainings:
            for engine in ("python", "native"):
                with recorded(engine) as recording:
                    found = faults.places(lambda: recording.run(job))  # noqa: B023
                reached.update(
                    code.co_filename.removeprefix(faults.SOURCES + "/") for place in found for code, _ in place.path
                )

    with jobs.rank_1_of_4():
        go_through(*jobs.OF_FOUR.values())
        with monkeypatch.context() as simulated:
            go_through(devices.SimulatedGpu(simulated).job)
        if importlib.util.find_spec("megatron"):
            parallel_state = pytest.importorskip("megatron.core").parallel_state
            parallel_state.initialize_model_parallel(2, 1, create_gloo_process_groups=False)
            engines.empty_megatron(monkeypatch)
            go_through(engines.megatron)
            parallel_state.destroy_model_parallel()
        if importlib.util.find_spec("deepspeed"):
            pytest.importorskip("deepspeed")
            engines.empty_deepspeed(monkeypatch)
            go_through(engines.deepspeed)
    with jobs.alone():
        jobs.call_back_at_once(monkeypatch)
        go_through(*ALONE.values())

    modules = {
        str(path.relative_to(faults.SOURCES))
        for folder in ("capture", "integrations")
        for path in Path(faults.SOURCES, folder).rglob("*.py")
        if any(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse(path.read_text())))
    }
    absent = tuple(f"integrations/{name}" for name in ("megatron", "deepspeed") if not importlib.util.find_spec(name))
    if _native.load()[0] is None:
        absent += ("capture/native.py", "capture/model/native_modules.py")
    missing = {name for name in modules - reached if not name.startswith(absent)}
    assert missing == set(NOT_REACHED)
