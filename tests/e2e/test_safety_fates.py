"""However a job ends, and whatever becomes of its disk: training is not affected, and what was written is readable."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from commtrace.errors import RunNotFoundError
from commtrace.trace import schema
from commtrace.trace.files.reader import load_earlier_attempts, load_run
from commtrace.trace.run import Run
from tests.e2e.launch import REPOSITORY, run
from tests.e2e.traces import rows

pytestmark = pytest.mark.e2e

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "fates.py"
SECOND_NS = 1_000_000_000

FINDINGS = "commtrace: Run "
"""The begin of what is said of a job that has ended."""


STATUSES = {
    "returns": 0,
    "returns_at_once": 0,
    "never_destroys_its_groups": 0,
    "never_waits": 0,
    "calls_sys_exit": 3,
    "raises": 1,
    "calls_os_exit": 4,
    "is_terminated": -15,
    "is_killed_after_1.3": -9,
    "is_killed_after_1.7": -9,
    "is_killed_after_2.1": -9,
    "fills_its_disk": 0,
    "may_not_write": 0,
    "loses_its_directory": 0,
    "is_disabled": 0,
    "has_a_wrong_value": 0,
    "has_an_unknown_variable": 0,
    "records_twice": 0,
    "handles_signals": 0,
    "makes_its_groups_again": 0,
    "sets_its_clock": 0,
    "fills_its_buffer": 0,
    "forks_all_the_time": 0,
    "fills_a_small_disk": 0,
    "has_a_read_only_disk": 0,
    "lacks_permission": 0,
    "aborts_its_group_and_goes_on_alone": 0,
    "runs_out_of_descriptors": 0,
    "aborts": -6,
    "has_a_slow_disk": 0,
    "waits_for_its_disk": 0,
    "is_short_of_memory": 0,
}
"""What a job would end with, too, if nothing were recorded."""

KILLED = [name for name in STATUSES if name.startswith("is_killed")]
"""Killed at an instant that is not known in advance, perhaps in the middle of a write."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fates")
    completed = run([sys.executable, str(PROGRAM), str(path)], timeout=240)
    assert completed.returncode == 0, completed.stdout
    return path


def test_a_job_ends_as_it_would_have_ended(folder: Path) -> None:
    assert json.loads((folder / "statuses.json").read_text()) == STATUSES


def test_the_result_is_the_same_in_every_case(folder: Path) -> None:
    results = {name: (folder / f"{name}.result") for name in STATUSES if name not in (*KILLED, "records_twice")}
    plain = results["is_disabled"].read_text()

    assert {name: path.read_text() for name, path in results.items()} == dict.fromkeys(results, plain)


@pytest.mark.parametrize(
    "name", ["returns", "returns_at_once", "never_destroys_its_groups", "never_waits", "calls_sys_exit", "raises"]
)
def test_a_job_that_ends_through_python_is_recorded_to_its_end(folder: Path, name: str) -> None:
    recorded = load_run(folder / name)

    assert recorded.problems == ()
    assert recorded.ranks[0].closed
    assert recorded.ranks[0].dropped == {}
    assert recorded.any_metadata.backend == "gloo"
    assert steps(recorded) == list(range(len(progress(folder, name))))
    unwaited = 3 if name == "never_waits" else 0
    assert_every_step_is_whole(recorded, but_after_the_last_step=unwaited)


@pytest.mark.parametrize("name", ["calls_os_exit", "is_terminated", "aborts", *KILLED])
def test_a_job_that_is_killed_loses_at_most_its_last_second(folder: Path, name: str) -> None:
    done = progress(folder, name)
    try:
        recorded = load_run(folder / name)
    except RunNotFoundError:  # killed before the first write, on a machine too busy to do it earlier
        written = []
    else:
        assert not recorded.ranks[0].closed
        assert_every_step_is_whole(recorded, but_after_the_last_step=None)
        written = steps(recorded)

    assert written == list(range(len(written)))
    lost_ns = done[-1] - done[max(0, len(written) - 1)]
    assert lost_ns <= SECOND_NS + lateness(folder, name)


@pytest.mark.parametrize("name", ["fills_its_disk", "fills_a_small_disk"])
def test_rows_that_cannot_be_written_are_counted_in_the_log_and_beside_the_files(folder: Path, name: str) -> None:
    skip_what_could_not_be_done(folder, name)
    recorded = load_run(folder / name)

    written, done = len(steps(recorded)), len(progress(folder, name))
    assert 0 < written < done
    failed, lost = warnings_of(folder, name)
    assert "cannot write its trace" in failed
    assert f"commtrace: {sum(recorded.ranks[0].dropped.values())} spans of this process were lost" in lost
    assert f"({done - written} step, " in lost
    assert recorded.ranks[0].dropped.get("step", done - written) == done - written
    assert recorded.ranks[0].closed, "it has not been killed"


def test_a_process_that_runs_out_of_descriptors_tells_what_it_lost(folder: Path) -> None:
    recorded = load_run(folder / "runs_out_of_descriptors")
    lost = recorded.ranks[0].dropped
    assert recorded.ranks[0].closed
    assert len(steps(recorded)) + lost.get("step", 0) == len(progress(folder, "runs_out_of_descriptors"))
    log = (folder / "runs_out_of_descriptors.log").read_text()
    assert ("spans of this process were lost" in log) == bool(lost)
    assert "Exception ignored" not in log


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("may_not_write", "Not a directory"),
        ("loses_its_directory", "deleted while it was written"),
        ("has_a_read_only_disk", "Read-only file system"),
        ("lacks_permission", "Permission denied"),
    ],
)
def test_a_directory_that_cannot_be_written_costs_two_lines(folder: Path, name: str, reason: str) -> None:
    skip_what_could_not_be_done(folder, name)
    failed, lost = warnings_of(folder, name)

    assert "commtrace: cannot write its trace" in failed
    assert reason in failed
    assert "Training goes on" in failed
    assert "spans of this process were lost" in lost
    if name != "loses_its_directory":
        assert f"{len(progress(folder, name))} step" in lost


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("is_disabled", ""),
        ("has_a_wrong_value", "commtrace is off in this process: steps 'x': write A:B"),
    ],
)
def test_a_job_that_is_not_recorded_leaves_nothing_but_a_line(folder: Path, name: str, line: str) -> None:
    log = (folder / f"{name}.log").read_text()

    assert not (folder / name).exists()
    assert log.startswith(line)
    assert log.count("\n") == (1 if line else 0)


def test_a_variable_that_is_not_known_costs_a_line_and_no_span(folder: Path) -> None:
    (warning,) = warnings_of(folder, "has_an_unknown_variable")
    assert "commtrace does not know the variable 'COMMTRACE_UNKNOWN', and ignores it" in warning
    recorded = load_run(folder / "has_an_unknown_variable")
    assert steps(recorded) == list(range(len(progress(folder, "has_an_unknown_variable"))))


def test_the_newest_of_two_runs_in_one_directory_is_shown(folder: Path) -> None:
    recorded = load_run(folder / "records_twice")

    assert recorded.any_metadata.run_id == "second"
    assert recorded.ranks[0].closed
    assert recorded.problems == (
        "1 segment of other runs or attempts in the same directory was left out (run first, attempt 1); "
        "shown is run second, attempt 1.",
    )


@pytest.mark.parametrize(
    "name",
    [
        "handles_signals", "forks_all_the_time", "sets_its_clock", "makes_its_groups_again", "has_a_slow_disk",
        "is_short_of_memory",
    ],
)  # fmt: skip
def test_work_beside_training_costs_no_span(folder: Path, name: str) -> None:
    skip_what_could_not_be_done(folder, name)
    recorded = load_run(folder / name)

    assert recorded.problems == ()
    assert recorded.ranks[0].closed
    assert recorded.ranks[0].dropped == {}
    assert steps(recorded) == list(range(len(progress(folder, name))))


def test_a_disk_that_never_answers_holds_up_neither_training_nor_its_end(folder: Path) -> None:
    recorded = load_run(folder / "waits_for_its_disk")
    written = steps(recorded)
    assert written == list(range(len(written)))
    assert len(written) < len(progress(folder, "waits_for_its_disk"))
    assert not recorded.ranks[0].closed
    (warning,) = warnings_of(folder, "waits_for_its_disk")
    told = re.fullmatch(
        "commtrace: the harvester did not end within 5.0 s: the disk or an exporter holds it up. ([1-9][0-9]*) spans, "
        "and what it is writing now, are lost unless the process goes on",
        warning,
    )
    assert told is not None, warning
    assert FINDINGS not in (folder / "waits_for_its_disk.log").read_text()


def test_a_wall_clock_that_jumps_bends_no_step(folder: Path) -> None:
    spans = [(row["start"], row["end"]) for row in rows(load_run(folder / "sets_its_clock"), 0, schema.STEP)]

    ended = progress(folder, "sets_its_clock")
    assert all(start < end <= told for (start, end), told in zip(spans, ended, strict=True))


def test_groups_that_are_made_again_have_names_of_their_own(folder: Path) -> None:
    recorded = load_run(folder / "makes_its_groups_again")

    groups = [row["group"] for row in rows(recorded, 0, schema.COLLECTIVE) if row["step"] < 0]
    assert len(groups) == 2
    assert len(set(groups)) == 2


def test_an_aborted_group_and_its_smaller_successor_are_both_recorded(folder: Path) -> None:
    name = "aborts_its_group_and_goes_on_alone"
    recorded = load_run(folder / name)
    (before,) = load_earlier_attempts(recorded)

    assert recorded.ranks[0].closed
    assert (before.world_size, recorded.world_size) == (2, 1)
    assert list(before.ranks) == [0], "its peer is not recorded"
    assert before.ranks[0].dropped == recorded.ranks[0].dropped == {}
    assert steps(recorded) == list(range(len(progress(folder, name))))
    spans = [row["step"] >= 0 for row in rows(before, 0, schema.COLLECTIVE)]
    assert spans == [False] * 6  # the aborted one as well
    assert all(row["step"] >= 0 for row in rows(recorded, 0, schema.COLLECTIVE))


def test_a_full_buffer_drops_spans_and_counts_every_one(folder: Path) -> None:
    recorded = load_run(folder / "fills_its_buffer")

    for kind, made in ((schema.STEP, 30), (schema.COLLECTIVE, 300), (schema.STALL, 300)):
        dropped = recorded.ranks[0].dropped.get(schema.KINDS[kind], 0)
        assert dropped > 0
        assert len(list(rows(recorded, 0, kind))) + dropped == made


def skip_what_could_not_be_done(folder: Path, name: str) -> None:
    reason = folder / f"{name}.skipped"
    if reason.exists():
        pytest.skip(reason.read_text())


def warnings_of(folder: Path, name: str) -> list[str]:
    """The lines on stderr but for the one that says where the recording is, and what the job lost time to."""
    lines = (folder / f"{name}.log").read_text().splitlines()
    end = next((number for number, line in enumerate(lines) if line.startswith(FINDINGS)), len(lines))
    return [line for line in lines[:end] if not line.startswith("commtrace: recording to ")]


def progress(folder: Path, name: str) -> list[int]:
    """When each step had ended, in ns."""
    return [int(line) for line in (folder / f"{name}.progress").read_text().splitlines()]


def lateness(folder: Path, name: str) -> int:
    """By how many ns the machine was too busy to run a thread of the job when it wanted to."""
    wakes = [[int(time) for time in line.split()] for line in (folder / f"{name}.lateness").read_text().splitlines()]
    last_wanted = wakes[-1][1] + SECOND_NS // 2 if wakes else progress(folder, name)[0]
    return sum(woke - wanted for wanted, woke in wakes) + max(0, progress(folder, name)[-1] - last_wanted)


def steps(recorded: Run) -> list[int]:
    return [row["step"] for row in rows(recorded, 0, schema.STEP)]


def assert_every_step_is_whole(recorded: Run, but_after_the_last_step: int | None) -> None:
    """10 all_reduces with their stalls per step; after the last step a known number more, or those of a torn step."""
    for kind in (schema.COLLECTIVE, schema.STALL):
        numbers = [row["step"] for row in rows(recorded, 0, kind)]
        for step in steps(recorded)[:-1]:
            assert numbers.count(step) == 10
    if but_after_the_last_step is not None:
        total = len(list(rows(recorded, 0, schema.COLLECTIVE)))
        assert total == 10 * len(steps(recorded)) + but_after_the_last_step
