"""An exception in any line of any hook never reaches training.

Every job of :mod:`tests.safety.jobs` is run once for every line of commtrace that it executes, and that line raises.
The job must compute what it computes without commtrace; what training itself raises must reach it; somebody must be
told, once; and in the end every replaced function must be back in its place.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException

from commtrace import _native
from tests.safety import devices, engines, faults, jobs
from tests.safety.faults import Place, Sort
from tests.safety.recorded import (
    ALONE,
    FILTERS,
    PARTS,
    earlier_jobs,
    is_of_a_hook,
    is_of_part,
    is_of_start_or_stop,
    new_ways,
    put_back,
    replaced_now,
)

pytestmark = FILTERS

TRIES = 5
EVERY_INTERRUPTED = 5
UNREACHED = "never reached again"


class InjectedError(Exception):
    """What no code of ours expects."""


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
        gpu = devices.SimulatedGpu(monkeypatch).prepare_stamps()
        break_every_line(gpu.stamped_job, recorded, is_of_a_hook, part)


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
    "capture/graphs/stamps.py": "the job of `test_with_a_gpu` has stamps, which are off elsewhere",
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
