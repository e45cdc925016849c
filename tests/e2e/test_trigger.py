"""Detail on request: all ranks of a running job record the same steps, and go back."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commtrace.analysis.summary import summarise
from commtrace.cli.main import app
from commtrace.errors import RunNotFoundError
from commtrace.trace import schema
from commtrace.trace.aggregates import read_aggregates
from commtrace.trace.files.reader import load_newest, load_run
from commtrace.trace.quiet import quiet_steps
from commtrace.trace.run import Run
from tests.e2e.launch import REPOSITORY, Completed, fork
from tests.e2e.traces import rows
from tests.json_schemas import errors

pytestmark = pytest.mark.e2e

RANKS = 4
SECONDS = 90.0


class Job:
    """A job in the background that steps until it is told to end."""

    def __init__(
        self,
        directory: Path,
        pool: ThreadPoolExecutor,
        program: str = "steps_until_told",
        ranks: int = RANKS,
        **environment: str,
    ) -> None:
        self.directory = directory / "run"
        self._ranks = ranks
        self._stop = directory / "stop"
        script = REPOSITORY / "tests" / "e2e" / "programs" / f"{program}.py"
        variables = {"COMMTRACE_DIR": str(self.directory), **environment}
        self._future: Future[Completed] = pool.submit(fork, [script, self._stop], ranks, variables, SECONDS)

    def until(self, reached: Callable[[Run], bool]) -> Run:
        """Wait for something to be in the newest files of the job."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and not self._future.done():
            try:
                run = load_newest(self.directory)
                if len(run.ranks) == self._ranks and reached(run):
                    return run
            except RunNotFoundError:
                pass
            time.sleep(0.3)
        self.end()
        raise AssertionError(f"the job did not get there: {self._future.result().stdout}")

    def end(self) -> None:
        self._stop.touch()
        completed = self._future.result()
        assert completed.returncode == 0, completed.stdout


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as own:
        yield own
        (tmp_path / "stop").touch()


def latest(run: Run) -> int:
    return min(max(trace.spans.step.tolist(), default=-1) for trace in run.ranks.values())


def steps_in_detail(run: Run) -> list[list[int]]:
    """By rank: the steps that have communication rows of their own."""
    spans = [trace.spans for trace in run.ranks.values()]
    return [sorted(set(own.step[(own.kind == schema.COLLECTIVE) & (own.step >= 0)].tolist())) for own in spans]


def trigger(job: Job, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["trigger", str(job.directory), "--json", "--wait", "30", *options])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert list(errors("trigger", report)) == []
    return report


def test_all_ranks_record_the_same_steps_in_detail_and_go_back(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    job = Job(
        tmp_path, pool, COMMTRACE_SAMPLE="0", COMMTRACE_TRIGGER_SIGNAL="SIGUSR2", COMMTRACE_STEPS_PER_SEGMENT="20"
    )
    job.until(lambda run: latest(run) > 20)
    told = trigger(job, "--num-steps", "7", "--modules", "depth=2")
    assert told["seen_by"] == list(range(RANKS))
    assert (told["late"], told["not_seen_by"]) == ({}, [])
    asked = list(range(told["first"], told["end"]))
    assert len(asked) == 7
    assert told["first"] > told["latest_step"]

    run = job.until(lambda run: latest(run) >= told["end"])
    os.kill(run.ranks[2].metadata.pid, signal.SIGUSR2)
    signalled = job.until(lambda run: any("signal" in one.id for one in run.ranks[0].triggers)).ranks[0].triggers[-1]
    asked += list(range(signalled.first, signalled.end))
    job.until(lambda run: latest(run) >= signalled.end + 5)
    late = trigger(job, "--after", "1", "--num-steps", "2")  # 20 ms from now: nobody can have seen it by then
    job.until(lambda run: latest(run) >= late["end"])
    job.end()

    run = load_run(job.directory)
    rest = {step for own in steps_in_detail(run) for step in own} - set(asked)
    assert rest <= {late["first"], late["end"] - 1}
    assert [[step for step in own if step in asked] for own in steps_in_detail(run)] == [asked] * RANKS
    for trace in run.ranks.values():
        recorded = trace.spans.step[trace.spans.kind == schema.STEP].tolist()
        assert recorded == list(range(len(recorded)))
        summed = {step for step in trace.aggregates if step >= 0}
        assert summed >= set(recorded) - set(asked) - rest - quiet_steps(trace.quiet)
        for step in summed - {max(recorded)} - rest:
            sums = {(one.kind, one.name): one.num_spans for one in read_aggregates(trace.aggregates[step])}
            assert sums["collective", "all_reduce"] == 2
    detail = summarise(run).detail
    assert detail.steps_in_detail - len(asked) in (0, 1, 2)
    assert [one.late for one in detail.triggers[:2]] == [{}, {}]
    assert late["late"] or detail.steps_in_detail == len(asked) + 2


def test_modules_are_recorded_in_the_steps_that_were_asked_for_and_in_no_other(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    job = Job(tmp_path, pool, "trains_until_told", ranks=2)
    job.until(lambda run: latest(run) > 20)
    first = trigger(job, "--num-steps", "4", "--modules", "depth=2")
    job.until(lambda run: latest(run) >= first["end"] + 5)
    second = trigger(job, "--num-steps", "3", "--modules", "*.inner")
    run = job.until(lambda run: latest(run) >= second["end"] + 5)
    job.end()

    run = load_run(job.directory)
    blocks = {f"{block}{part}" for block in "01" for part in ("", ".inner")}
    in_depth = {"Sequential", *blocks}
    expected = dict.fromkeys(range(first["first"], first["end"]), in_depth)
    expected |= {step: {"0.inner", "1.inner"} for step in range(second["first"], second["end"])}
    assert first["seen_by"] == second["seen_by"] == [0, 1]
    for rank in run.ranks:
        calls = Counter((row["step"], row["name"]) for row in rows(run, rank, schema.MODULE))
        assert calls == {
            (step, f"{name}{way}"): 1 for step, names in expected.items() for name in names for way in ("", " backward")
        }
        assert {row["step"] for row in rows(run, rank, schema.STEP)} >= set(range(second["end"] + 5))


def test_a_run_that_has_ended_cannot_be_triggered(tmp_path: Path) -> None:
    from tests.trace.rows import mark, steps, write_rank

    write_rank(tmp_path, [*steps(0, 3), mark("end", {})])
    result = CliRunner().invoke(app, ["trigger", str(tmp_path)])

    assert result.exit_code == 2
    assert "this run has ended" in result.output
    assert not (tmp_path / "triggers").exists()
