"""history/facts.py: what a list shows of a run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commtrace.analysis.clocks.time_of_day import date_and_time, step_end_ns
from commtrace.analysis.hangs.job_end import CUT_OFF, ENDED, FAILED, RUNNING
from commtrace.errors import RunNotFoundError
from commtrace.history.facts import RunFacts, facts_of, fingerprint, read_facts
from commtrace.interchange.dumps.flight_recorder import import_flight_recorder
from commtrace.synth import Job, synthesize
from commtrace.trace.files.reader import load_run
from commtrace.trace.hang_report import Activity, OpenPhase
from commtrace.trace.metadata import RankMetadata
from commtrace.trace.processes import RUNS
from tests.analysis.hangs.flight_calls import hung
from tests.analysis.hung_runs import NOW_NS
from tests.history.factory import BEGIN_NS, write_run
from tests.interchange.dumps.flight_recorder_files import gloo_hang
from tests.trace.rows import Row, mark, steps, write_rank

LATER_NS = BEGIN_NS + 3600 * 10**9


def read(directory: Path, now_ns: int = LATER_NS) -> RunFacts:
    return read_facts(directory, now_ns=now_ns)


def test_all_facts_of_an_ended_run_are_known(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", hosts=("alpha", "beta"))

    assert read(run) == RunFacts(
        run="r1",
        attempt=0,
        session=1_000,
        started_ns=BEGIN_NS,
        ended_ns=BEGIN_NS + 795,  # the anchor stands at 5 ns of the monotonic clock
        world_size=2,
        ranks_recorded=2,
        hosts=("alpha", "beta"),
        first_step=0,
        last_step=7,
        step_ns=100,
        state=ENDED,
        ending="",
        problems=(),
    )
    assert (read(run).steps, read(run).duration_ns) == (8, 795)


def test_a_run_that_was_loaded_in_full_has_the_same_facts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", hosts=("alpha", "beta"))

    assert facts_of(load_run(run), now_ns=LATER_NS) == read(run)


def test_steps_that_no_mark_tells_are_no_facts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")

    inferred = facts_of(replace(load_run(run), steps_inferred=True), now_ns=LATER_NS)

    assert (inferred.steps, inferred.step_ns) == (None, None)


def test_only_the_ends_of_a_long_run_are_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = write_rank(run, [*steps(0, 60), mark("end", {})], steps_per_segment=10)
    for segment in sorted(folder.iterdir())[:2]:
        segment.write_bytes(b"no segment")

    found = read(run)

    assert (found.last_step, found.step_ns, found.state, found.problems) == (59, 100, ENDED, ())


def test_steps_are_counted_from_the_first_of_the_attempt(tmp_path: Path) -> None:
    write_rank(tmp_path / "run", [mark("topology", {"first_step": 20}), *steps(20, 30), mark("end", {})], attempt=1)

    found = read(tmp_path / "run")

    assert (found.attempt, found.first_step, found.last_step, found.steps) == (1, 20, 29, 10)


def test_an_exception_on_some_ranks_is_a_failure(tmp_path: Path) -> None:
    write_run(tmp_path / "run", hosts=("alpha", "beta", "gamma"), world_size=4, end={"exception": "RuntimeError"})
    write_rank(tmp_path / "run", steps(0, 8), rank=3, world_size=4, host="delta", node="delta")

    found = read(tmp_path / "run")

    assert (found.state, found.ending) == (FAILED, "rank 3 cut off; RuntimeError on ranks 0–2")


def test_a_rank_without_an_end_was_cut_off_or_still_runs(tmp_path: Path) -> None:
    write_rank(tmp_path / "run", steps(0, 8))

    after, meanwhile = read(tmp_path / "run"), read(tmp_path / "run", BEGIN_NS + 10**9)

    assert (after.state, after.ending) == (CUT_OFF, "rank 0")
    assert (meanwhile.state, meanwhile.ending) == (RUNNING, "")


def test_a_job_that_hung_before_it_was_cut_off_says_so() -> None:
    facts = facts_of(hung(), now_ns=NOW_NS)

    assert (facts.state, facts.ending) == (CUT_OFF, "ranks 0–1, which hung")


def test_dumps_say_nothing_about_the_end_of_a_run(tmp_path: Path) -> None:
    import_flight_recorder(gloo_hang(tmp_path), tmp_path / "run")

    found = read(tmp_path / "run")

    assert (found.state, found.ending) == ("dumped", "")


def test_a_silent_rank_of_a_run_that_goes_on_is_named(tmp_path: Path) -> None:
    write_rank(tmp_path / "run", steps(0, 8), rank=0, world_size=2)
    late = [one._replace(start=one.start + 60 * 10**9, end=one.end + 60 * 10**9) for one in steps(0, 8)]
    write_rank(tmp_path / "run", late, rank=1, world_size=2)

    found = read(tmp_path / "run", BEGIN_NS + 61 * 10**9)

    assert (found.state, found.ending) == (RUNNING, "rank 0 silent")


def test_a_suspended_process_belongs_to_a_run_that_goes_on(tmp_path: Path) -> None:
    def suspended(metadata: RankMetadata) -> str:
        return "suspended"

    write_rank(tmp_path / "run", steps(0, 8))

    found = read_facts(tmp_path / "run", now_ns=LATER_NS, ask=suspended)

    assert (found.state, found.ending) == (RUNNING, "hangs since 2023-11-14 22:13:20 UTC, rank 0 silent")


def test_ranks_without_files_are_a_problem(tmp_path: Path) -> None:
    write_rank(tmp_path / "run", [*steps(0, 8), mark("end", {})], world_size=3)

    found = read(tmp_path / "run")

    assert (found.world_size, found.ranks_recorded) == (3, 1)
    assert found.problems[0].startswith("2 of 3 ranks have no readable files: 1, 2.")


def test_a_run_without_steps_has_no_step_time(tmp_path: Path) -> None:
    write_rank(tmp_path / "run", [mark("end", {})])

    found = read(tmp_path / "run")

    assert (found.first_step, found.last_step, found.steps, found.step_ns) == (None, None, None, None)


def test_a_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError):
        read(tmp_path)


def test_an_unknown_start_has_no_duration(tmp_path: Path) -> None:
    assert replace(read(write_run(tmp_path / "run")), started_ns=None).duration_ns is None


def test_the_fingerprint_changes_with_the_files_only(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    first = fingerprint(run)
    (run / "notes.txt").write_text("of the user")
    same = fingerprint(run)
    (segment,) = (run / "rank-00000").iterdir()
    os.utime(segment, ns=(1, 1))
    touched = fingerprint(run)
    (run / "monitor.json").write_text("{}")

    assert first == same
    assert len({first, touched, fingerprint(run)}) == 3


def test_a_running_job_of_which_no_step_ends_any_more_hangs() -> None:
    made = synthesize(Job(dp=2, steps=6)).run
    ranks = {rank: replace(trace, closed=False) for rank, trace in made.ranks.items()}
    ended_ns = step_end_ns(made, 5)
    assert ended_ns is not None

    def facts(later_s: int) -> RunFacts:
        return facts_of(replace(made, ranks=ranks), now_ns=ended_ns + later_s * 10**9, ask=lambda process: RUNS)

    assert (facts(5).state, facts(5).ending) == ("running", "")
    assert (facts(60).state, facts(60).ending) == ("running", f"hangs since {date_and_time(ended_ns)}")


def mark_at(second: int, name: str, detail: Any) -> Row:
    return mark(name, detail)._replace(start=second * 10**9, end=second * 10**9)


WRITES = mark_at(59, "left", {"has_left": False})
"""A rank is not silent, and says nothing of its steps."""

EVALUATES = Activity(open=(OpenPhase("evaluation", "evaluation", 10**9),)).to_json()


@pytest.mark.parametrize(
    ("marks", "ending"),
    [
        pytest.param([], "hangs since 2023-11-14 22:13:20 UTC", id="none"),
        pytest.param([mark_at(59, "progress", {"step": 20})], "", id="goes on with steps that are not recorded"),
        pytest.param(
            [mark_at(59, "activity", {**EVALUATES, "no_progress_ns": 0, "again_within_ns": 3 * 10**9})],
            "",
            id="evaluates",
        ),
    ],
)
def test_a_job_without_a_recorded_step_for_a_minute_may_go_on(tmp_path: Path, marks: list[Row], ending: str) -> None:
    write_rank(tmp_path / "run", [*steps(0, 8), *marks, WRITES])

    found = read_facts(tmp_path / "run", now_ns=BEGIN_NS + 60 * 10**9, ask=lambda process: RUNS)

    assert (found.state, found.ending) == (RUNNING, ending)


def test_a_rank_that_is_further_than_the_part_read_goes_on(tmp_path: Path) -> None:
    goes_on = [one._replace(end=59 * 10**9) if one.step == 19 else one for one in steps(0, 20)]
    write_rank(tmp_path / "run", [*steps(0, 8), WRITES], world_size=2)
    write_rank(tmp_path / "run", goes_on, rank=1, world_size=2)

    found = read_facts(tmp_path / "run", now_ns=BEGIN_NS + 60 * 10**9, ask=lambda process: RUNS)

    assert (found.state, found.ending, found.last_step) == (RUNNING, "", 19)


def test_a_job_of_which_no_step_is_recorded_hangs_as_well(tmp_path: Path) -> None:
    reports = [mark_at(second, "progress", {"step": second}) for second in range(5)]  # its clock began at 5 ns
    write_rank(tmp_path / "run", [*reports, WRITES])

    def ending(seconds: int) -> str:
        return read_facts(tmp_path / "run", now_ns=BEGIN_NS + seconds * 10**9, ask=lambda process: RUNS).ending

    assert (ending(15), ending(60)) == ("", f"hangs since {date_and_time(BEGIN_NS + 4 * 10**9 - 5)}")
