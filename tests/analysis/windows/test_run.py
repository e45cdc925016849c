"""Who measures the windows of a run changes nothing; what goes wrong there is said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from commtrace.analysis.chain import Analysis
from commtrace.analysis.windows.run import Workers, measure_run, open_run
from commtrace.cli.arguments import chosen_workers
from commtrace.errors import CommtraceError, RunNotFoundError
from commtrace.synth import Fault, Job, synthesize
from commtrace.synth import write as write_synthetic
from tests.analysis.windows.made_runs import Told, plain, stragglers_of, summary_of, tell
from tests.analysis.windows.recording import record
from tests.findings.reading import in_json
from tests.pipeline_factory import PipelineJob

MS = 1_000_000


def write(directory: Path, steps: int = 6) -> Path:
    job = PipelineJob(2, 3, data_parallel=2, all_reduce_ns=9 * MS, steps=steps, nodes={0: "a", 1: "b", 2: "a", 3: "b"})
    return record(job.run(), directory)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("run") / "run")


@contextmanager
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield pool


@contextmanager
def dask() -> Iterator[Executor]:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


class Here(Executor):
    """Does everything where it is submitted, and something else before the first window."""

    def __init__(self, before_windows: Callable[[], object] = lambda: None) -> None:
        self._before_windows = before_windows
        self.num_windows = 0

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if function.func.__name__ == "_measure_window":
            self.num_windows += 1
            if self.num_windows == 1:
                self._before_windows()
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def by_step(directory: Path, measure: Callable[[Analysis], Told], executor: Executor) -> Any:
    return measure_run(directory, measure, workers=Workers(executor, 2), most_bytes=0, most_rows=1)


@pytest.mark.filterwarnings("default")  # Dask warns where a machine is busy
@pytest.mark.parametrize("workers", [processes, dask])
def test_workers_find_what_this_process_finds(workers: Any, directory: Path) -> None:
    with workers() as executor:
        assert plain(by_step(directory, tell, executor)) == plain(measure_run(directory, tell))


@dataclass(frozen=True)
class SlowJob:
    """A run, what is said of it as a whole, and a size of windows that cuts it into three."""

    directory: Path
    stragglers: str
    summary: str
    most_rows: int


@pytest.fixture(scope="module")
def slow_job(tmp_path_factory: pytest.TempPathFactory) -> SlowJob:
    """Two slow ranks, a slow link, and pauses: each has to be replayed."""
    faults = "slow-rank=1:1.4@4:10", "slow-rank=2:1.3", "gc=3:40", "slow-link=0-4:8"
    job = Job(dp=4, pp=2, microbatches=4, steps=10, jitter=0.02, faults=(*map(Fault.parse, faults),))
    directory = tmp_path_factory.mktemp("slow") / "run"
    num_rows = write_synthetic(synthesize(job), directory)
    whole = open_run(directory)
    return SlowJob(directory, stragglers_of(whole), summary_of(whole), 9 * num_rows // (2 * job.steps))


@pytest.mark.filterwarnings("default")  # Dask warns where a machine is busy
@pytest.mark.parametrize("workers", [processes, dask])
def test_workers_summarise_and_find_stragglers_as_this_process_does(workers: Any, slow_job: SlowJob) -> None:
    with workers() as executor:
        workers_of_run = Workers(executor, 2)
        in_windows = open_run(slow_job.directory, workers=workers_of_run, most_bytes=0, most_rows=slow_job.most_rows)
        assert (stragglers_of(in_windows), summary_of(in_windows)) == (slow_job.stragglers, slow_job.summary)
    assert in_json(json.loads(slow_job.stragglers))


def test_the_slow_job_is_cut_into_three_windows(slow_job: SlowJob) -> None:
    here = Here()
    in_windows = open_run(slow_job.directory, workers=Workers(here, 2), most_bytes=0, most_rows=slow_job.most_rows)

    assert in_windows.measure(lambda analysis: analysis.context.steps).result == (*range(1, 10),)
    assert here.num_windows == 3


@pytest.mark.parametrize(("most_kept", "times_read"), [(1 << 30, 1), (0, 4)])
def test_replays_read_no_window_again_whose_model_is_kept(
    slow_job: SlowJob, monkeypatch: pytest.MonkeyPatch, most_kept: int, times_read: int
) -> None:
    monkeypatch.setattr("commtrace.analysis.windows.run.MOST_KEPT", most_kept)
    here = Here()
    in_windows = open_run(slow_job.directory, workers=Workers(here, 2), most_bytes=0, most_rows=slow_job.most_rows)

    assert summary_of(in_windows) == slow_job.summary
    assert here.num_windows >= 3 * times_read if times_read > 1 else here.num_windows == 3


def test_models_that_fit_are_kept_and_the_others_read_again(slow_job: SlowJob, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here()
    in_windows = open_run(slow_job.directory, workers=Workers(here, 2), most_bytes=0, most_rows=slow_job.most_rows)
    sizes = in_windows.measure(lambda analysis: (analysis.observed.num_bytes,)).result
    monkeypatch.setattr("commtrace.analysis.windows.run.MOST_KEPT", max(sizes) + 1)
    some = open_run(slow_job.directory, workers=Workers(here, 2), most_bytes=0, most_rows=slow_job.most_rows)
    some.measure(lambda analysis: (analysis.observed.num_bytes,))
    read = here.num_windows

    assert some.read(lambda observed: observed.steps.tolist()) == [*range(1, 10)]
    assert here.num_windows == read + 2


def end_at_once(_: Analysis) -> Told:
    os._exit(1)


def test_a_worker_that_dies_is_reported_with_its_window(directory: Path) -> None:
    message = r"before the window of steps 1 to 1 was measured, for which \d+ rows are read\. .* use --workers 1"
    with processes() as executor, pytest.raises(CommtraceError, match=message):
        by_step(directory, end_at_once, executor)


def test_a_worker_that_dies_while_it_looks_at_a_rank_is_reported(directory: Path) -> None:
    with processes() as executor:
        with pytest.raises(BrokenExecutor):
            executor.submit(os._exit, 1).result()
        with pytest.raises(CommtraceError, match=r"A worker died while it looked for the steps of .* use --workers 1"):
            by_step(directory, tell, executor)


@pytest.mark.filterwarnings("default")
def test_a_worker_of_a_cluster_that_dies_is_reported_with_its_window(directory: Path) -> None:
    distributed, dask_config = pytest.importorskip("distributed"), pytest.importorskip("dask.config")
    with (
        dask_config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        chosen_workers(None, cluster.scheduler_address.removeprefix("tcp://")) as workers,
        pytest.raises(CommtraceError, match=r"before the window of steps 1 to 1 .* use --workers 1"),
    ):
        measure_run(directory, end_at_once, workers=workers, most_bytes=0, most_rows=1)


def test_a_file_that_is_deleted_meanwhile_takes_its_steps_away(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    whole = measure_run(run, tell)
    second = sorted((run / "rank-00001").glob("*.arrows"))[1]

    cut = by_step(run, tell, Here(second.unlink))

    assert (whole.steps.used, cut.steps.used) == ((1, 2, 3, 4, 5), (1, 4, 5))
    assert cut.result.series.wall_ns.tolist() == whole.result.series.wall_ns[[0, 3, 4]].tolist()
    assert cut.recorded.problems == (f"{second}: was deleted while the run was read, to keep to its budget.",)


def test_a_machine_that_does_not_see_the_run_says_so(tmp_path: Path) -> None:
    run = write(tmp_path / "run")

    with pytest.raises(RunNotFoundError, match="Workers must see the run under the same path"):
        by_step(run, tell, Here(lambda: run.rename(tmp_path / "elsewhere")))


def test_few_windows_are_on_their_way_at_a_time(directory: Path) -> None:
    class Waiting(Executor):
        ahead = 0
        most = 0

        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            owner = self

            class Result(Future[Any]):
                def result(self, timeout: float | None = None) -> Any:
                    owner.ahead -= 1
                    return super().result(timeout)

            done = Result()
            done.set_result(function(*args, **kwargs))
            self.ahead += 1
            self.most = max(self.most, self.ahead)
            return done

    executor = Waiting()
    found = measure_run(directory, tell, workers=Workers(executor, 1), most_bytes=0, most_rows=1)

    assert len(found.steps.used) == 5
    assert executor.most <= 4  # the ranks, and then two windows and the one that is asked for


def test_steps_that_were_asked_for_are_one_window(directory: Path) -> None:
    executor = Here()
    found = measure_run(directory, tell, "2:4", Workers(executor, 2), most_bytes=0, most_rows=1)

    assert (found.steps.used, executor.num_windows) == ((2, 3), 0)


@pytest.mark.parametrize(("steps", "num_windows"), [(4, 0), (5, 4)])
def test_a_run_of_so_few_steps_that_each_window_would_hold_it_is_read_at_once(
    steps: int, num_windows: int, tmp_path: Path
) -> None:
    executor = Here()
    found = by_step(write(tmp_path / "run", steps), tell, executor)

    assert (len(found.steps.used), executor.num_windows) == (steps - 1, num_windows)


def test_an_empty_directory_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError):
        measure_run(tmp_path, tell)
