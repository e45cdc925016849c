"""Recordings of jobs, the lines of commtrace that they go through, and what hooks stand in for."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import wrapt.importer
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer

import commtrace
from commtrace.capture.instrumentation import Instrumentation
from commtrace.capture.model.optimizers import STEP_HOOKS
from commtrace.capture.triggers import Triggers
from commtrace.recording import session
from commtrace.trace import selection
from tests.capture.recording import MemorySink
from tests.safety import faults, jobs, models
from tests.safety.faults import Place

FILTERS = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]
"""Of warnings: ``pytestmark`` of every module of tests."""

PARTS = [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in (1, 2))]
"""Of the lines, every third; the others take their turn in `make test-thorough`."""
NO_HOOKS = frozenset(function.__code__ for function in (Triggers.open, selection.make_request, selection.write_request))
"""What jobs call themselves, in place of the harvester's thread or of a command."""
ALONE = {**jobs.ALONE, **models.ALONE}
_OPTIMIZERS = "hooks of optimizers"
_WAITING = "waits to be imported"
_WAITING_HOOKS: dict[str, list[Any]] = wrapt.importer._post_import_hooks
USUAL = commtrace.Config(dir="/nowhere", quiet=3)
CONFIGS = {job: dataclasses.replace(USUAL, **options) for job, options in {**jobs.OPTIONS, **models.OPTIONS}.items()}
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
        places = faults.places(lambda: recording.run(job))
        recording.harvest()
        assert recording.messages == []
    return {(place.path[0], place.path[-1]): place for place in reversed(places)}


_WAYS: dict[tuple[Callable[[], str], str], dict[Way, Place]] = {}
"""Of the jobs so far, by engine: every time that a job runs it goes the same ways."""


def new_ways(job: Callable[[], str], record: Any, others: Sequence[Callable[[], str]]) -> dict[Way, Place]:
    """Return the ways that a job goes and none of the other jobs does."""
    engine: str = record.engine
    for each in (*others, job):
        if (each, engine) not in _WAYS:
            _WAYS[each, engine] = ways_through(each, record)
    known = {way for other in others for way in _WAYS[other, engine]}
    return {way: place for way, place in _WAYS[job, engine].items() if way not in known}


def is_of_part(place: Place, part: int) -> bool:
    """By the number of the line: processes that try other parts may find the lines in another order."""
    return place.line % len(PARTS) == part


def is_of_a_hook(place: Place) -> bool:
    return not is_of_start_or_stop(place) and place.path[0][0] not in NO_HOOKS


def is_of_start_or_stop(place: Place) -> bool:
    return place.path[0][0] in (commtrace.start.__code__, commtrace.stop.__code__)


def earlier_jobs(name: str, all_jobs: Mapping[str, Callable[[], str]]) -> list[Callable[[], str]]:
    """Return the jobs before one: the ways that they go are broken there, and here only in `make test-long`."""
    names = list(all_jobs)
    return [all_jobs[other] for other in names[: names.index(name)]]
