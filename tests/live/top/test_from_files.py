"""Frames of made runs, whose every number is known, and of files that are still written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commtrace.analysis.summary import summarise
from commtrace.errors import RunNotFoundError, TraceFormatError
from commtrace.findings.causes import LOSSES, advice
from commtrace.findings.finding import Finding
from commtrace.findings.status import MonitorStatus
from commtrace.live.top.frame import PARTS, Exposed, Frame
from commtrace.live.top.from_files import FileSource, make_frame, read_monitor, steps_of
from commtrace.synth import Fault, Job, synthesize
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.files.tail import Newest, RunTail
from commtrace.trace.files.writer import SegmentWriter
from commtrace.trace.hang_report import Activity, OpenPhase
from commtrace.trace.json_values import fields_to_json
from commtrace.trace.spans import Spans
from tests.factory import EPOCH_NS, make_run, span
from tests.live.findings import hang_finding, not_judged, silent_finding, slow_finding, status
from tests.live.top.made_frames import MS, newest, two_ranks
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import row_at, write_run


def test_every_rank_has_its_parts_and_they_add_up() -> None:
    frame = make_frame(newest(two_ranks(), 1, 3), 2, EPOCH_NS + 30 * MS)

    assert (frame.first_step, frame.last_step, frame.num_steps) == (1, 2, 2)
    assert (frame.step_ns, frame.world_size, frame.hosts, frame.run_id) == (10 * MS, 2, 1, "made-run")
    first, second = frame.ranks
    assert dict(first.parts) == {**dict.fromkeys(PARTS, 0), "compute": 2 * MS, "exposed": 7 * MS, "other": MS}
    assert first.exposed == {"dp": Exposed(7 * MS, 4 * MS, 3 * MS)}
    assert second.exposed == {"dp": Exposed(3 * MS, 0, 3 * MS)}
    assert all(sum(row.parts.values()) == row.step_ns for row in frame.ranks)


def test_the_frame_shows_which_rank_waits_for_which() -> None:
    first, second = make_frame(newest(two_ranks(), 0, 3), 3, EPOCH_NS).ranks
    assert (first.waits_for, first.waits_ns, first.blame_ns) == (1, 4 * MS, 0)
    assert (second.waits_for, second.waits_ns, second.blame_ns) == (None, 0, 4 * MS)


def test_the_trend_is_against_the_run_so_far() -> None:
    frame = make_frame(newest(two_ranks(), 0, 3), 3, EPOCH_NS, before=[8 * MS] * 7)
    assert (frame.step_ns, frame.before_ns) == (10 * MS, 8 * MS)
    assert make_frame(newest(two_ranks(), 0, 3), 3, EPOCH_NS, before=[8 * MS] * 3).before_ns is None


def test_after_a_rollback_both_attempts_are_told_and_the_last_one_is_shown() -> None:
    lengths = [(4, 100), (5, 300), (6, 100), (5, 110), (6, 100)]
    ends = np.cumsum([length for _, length in lengths]).tolist()
    rows = [
        span("step", (end - length) * MS, end * MS, step=step)
        for (step, length), end in zip(lengths, ends, strict=True)
    ]
    frame = make_frame(newest(make_run({0: rows, 1: rows}), 4, 6), 2, EPOCH_NS + ends[-1] * MS)

    assert "Step 5 was done 2 times: attempt 1 took 0.3 s, attempt 2 took 0.1 s. The last one is shown." in frame.notes
    assert (frame.num_steps, frame.step_ns) == (2, 105 * MS)


def test_a_job_that_was_started_again_says_so() -> None:
    run = two_ranks()
    again = {rank: replace(trace, metadata=replace(trace.metadata, attempt=2)) for rank, trace in run.ranks.items()}
    frame = make_frame(newest(replace(run, ranks=again), 0, 3), 3, EPOCH_NS)

    assert any(note.startswith("Attempt 3 of the job is shown.") for note in frame.notes)


def test_a_slow_rank_is_named_with_its_cost() -> None:
    job = PipelineJob(2, 8, data_parallel=4, steps=12, extra_forward_ns={2: MS})
    frame = make_frame(newest(job.run(), 1, 12), 11, EPOCH_NS)
    (slow,) = frame.slow
    assert (slow.rank, slow.cause, frame.sources[slow.id]) == (2, "forward", "steps shown")
    assert slow.cost_ns is not None
    assert slow.cost_ns > 5 * MS
    assert slow.since_ns is None, "it may have begun before the steps shown"
    assert frame.verdict == f"Straggler: {slow.line()}."


def test_a_job_whose_hosts_are_late_is_launch_bound_on_every_rank() -> None:
    late = synthesize(Job(dp=4, steps=20, faults=(Fault.parse("late-launch=0,1,2,3:20"),))).run
    frame = make_frame(newest(late, 4, 20), 16, EPOCH_NS)

    (slow,) = frame.slow
    assert (slow.words, slow.place) == ("launch-bound work, late host", "job")
    assert slow.cost_ns == pytest.approx(20 * MS, rel=0.05)
    assert slow.advice == advice("host", 0, "job")
    assert [row.launch_bound_ns for row in frame.ranks] == [pytest.approx(20 * MS, rel=0.05)] * 4


def test_time_that_is_lost_without_a_straggler_is_told_as_in_the_summary() -> None:
    run = PipelineJob(2, 4, data_parallel=2, steps=12).run()
    frame = make_frame(newest(run, 1, 12), 11, EPOCH_NS)
    lost = [finding for finding in frame.findings if finding.kind == "lost"]

    assert lost == [finding for finding in summarise(run, "1:12").findings if finding.kind == "lost"]
    assert (lost[0].words, lost[0].advice) == (LOSSES["schedule"].words, LOSSES["schedule"].advice)
    assert (lost[0].share or 0) > 0.1
    assert {frame.sources[finding.id] for finding in lost} == {"steps shown"}


def test_too_few_steps_are_said_to_be_too_few() -> None:
    frame = make_frame(newest(PipelineJob(2, 8, data_parallel=4, steps=4).run(), 1, 4), 20, EPOCH_NS)
    assert [finding.kind for finding in frame.findings] == ["not_judged"]
    assert "too few steps" in frame.findings[0].evidence


def test_a_job_whose_fast_ranks_go_on_makes_progress(tmp_path: Path) -> None:
    ended = {0: 60, 1: 30}  # nothing couples them
    rows = {
        rank: [span("step", step * 1_000 * MS, (step + 1) * 1_000 * MS, step=step) for step in range(steps)]
        for rank, steps in ended.items()
    }
    run = make_run(rows)
    writers = [SegmentWriter(tmp_path, trace.metadata) for trace in run.ranks.values()]  # not closed: the job runs
    for writer, trace in zip(writers, run.ranks.values(), strict=True):
        writer.write([row_at(run, trace, position) for position in range(len(trace.spans))])

    frame = make_frame(RunTail(tmp_path).read(5), 5, EPOCH_NS + 61_000 * MS)

    assert (frame.first_step, frame.last_step) == (25, 29)
    assert {row.rank: row.last_step for row in frame.ranks} == {0: 59, 1: 29}
    assert [finding for finding in frame.findings if finding.kind == "hang"] == []


def test_a_rank_that_fell_silent_is_said_first() -> None:
    run = two_ranks()
    ranks = {**run.ranks, 1: replace(run.ranks[1], last_written_ns=10 * MS)}
    now = EPOCH_NS + 60_000 * MS
    ranks[0] = replace(ranks[0], last_written_ns=now - EPOCH_NS)
    frame = make_frame(newest(replace(run, ranks=ranks), 0, 3), 3, now)
    assert [row.state for row in frame.ranks] == ["running", "silent"]
    assert frame.ranks[1].age_ns == 60_000 * MS - 10 * MS
    assert frame.notes[0] == "SILENT: rank 1 wrote nothing for 60 s."
    stopped = frame.findings[0]
    assert (stopped.kind, stopped.ranks) == ("hang", ())
    assert stopped.evidence.startswith("No step has ended for 60 s (a step takes ")
    assert stopped.advice.endswith(f"commtrace doctor {run.path}")


@pytest.mark.parametrize(
    ("seconds", "step_ms", "is_stalled"), [(15, 10, False), (16, 10, True), (19, 2_000, False), (21, 2_000, True)]
)
def test_no_step_for_ten_usual_ones_and_15_seconds_is_no_progress(seconds: int, step_ms: int, is_stalled: bool) -> None:
    rows = [span("step", step * step_ms * MS, (step + 1) * step_ms * MS, step=step) for step in range(3)]
    now = (3 * step_ms + 1_000 * seconds) * MS
    run = make_run({0: rows, 1: rows[:2]}, last_written_ns=now, closed=False)
    frame = make_frame(Newest(run, 0, 2, {0: 2, 1: 1}), 3, EPOCH_NS + now)
    said = [(one.line(), one.ranks) for one in frame.findings if one.kind == "hang"]
    a_step = {10: "10 ms", 2_000: "2.0 s"}[step_ms]
    sentence = (
        f"No step has ended for {seconds} s (a step takes {a_step}). The last one is 2; rank 1 ended none after 1."
    )
    assert said == ([(sentence, (1,))] if is_stalled else [])


def test_steps_that_are_not_recorded_are_progress() -> None:
    rows = [span("step", step * 10 * MS, (step + 1) * 10 * MS, step=step) for step in range(3)]

    def hangs(at_ms: int) -> list[tuple[str, int | None]]:
        reports = ((10, 20_000 * MS), (at_ms, at_ms * MS))
        run = make_run({0: rows, 1: rows}, last_written_ns=60_000 * MS, closed=False, progress=reports)
        frame = make_frame(Newest(run, 0, 3, {0: 2, 1: 2}), 3, EPOCH_NS + 60_000 * MS)
        return [(one.line(), one.since_ns) for one in frame.findings if one.kind == "hang"]

    assert hangs(at_ms=59_000) == []
    sentence = "No step has ended for 30 s (a step takes 10 ms)."
    assert hangs(at_ms=30_000) == [(sentence, EPOCH_NS + 30_000 * MS)]


def test_the_rank_that_is_behind_is_named_by_the_steps_that_are_not_recorded() -> None:
    rows = [span("step", step * 10 * MS, (step + 1) * 10 * MS, step=step) for step in range(3)]
    reports = {0: ((10, 20_000 * MS),), 1: ((8, 20_000 * MS),)}
    run = make_run({0: rows, 1: rows}, last_written_ns=60_000 * MS, closed=False, progress=lambda rank: reports[rank])
    frame = make_frame(Newest(run, 0, 3, {0: 2, 1: 2}), 3, EPOCH_NS + 60_000 * MS)

    (hang,) = (one for one in frame.findings if one.kind == "hang")
    assert hang.ranks == (1,)
    assert hang.evidence.endswith("The last one is 9; rank 1 ended none after 7.")


def test_a_first_step_that_takes_long_is_no_hang() -> None:
    reports = ((0, 1_000 * MS), (0, 11_000 * MS))
    run = make_run({0: [], 1: []}, last_written_ns=60_000 * MS, closed=False, progress=reports)
    frame = make_frame(Newest(run, 0, 0, {0: -1, 1: -1}), 3, EPOCH_NS + 60_000 * MS)

    assert [one.kind for one in frame.findings] == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [("checkpoint", "a checkpoint is saved or loaded on rank 1"), ("evaluation", "evaluation on rank 1")],
)
def test_a_job_that_saves_or_evaluates_says_why_no_step_ends(kind: str, said: str) -> None:
    run = two_ranks()
    now = 60_000 * MS
    saves = Activity(open=(OpenPhase(kind, kind, 30 * MS),))
    ranks = {rank: replace(trace, last_written_ns=now) for rank, trace in run.ranks.items()}
    ranks[1] = replace(ranks[1], activity=saves, activity_ns=now, again_within_ns=3_000 * MS)
    frame = make_frame(newest(replace(run, ranks=ranks), 0, 3), 3, EPOCH_NS + now)
    assert frame.notes[0].startswith("No step has ended for 60 s (a step takes ")
    assert frame.notes[0].endswith(said)
    assert [one for one in frame.findings if one.kind == "hang"] == []


def test_a_dead_process_is_said_to_be_gone() -> None:
    run = two_ranks()
    frame = make_frame(newest(run, 0, 3), 3, EPOCH_NS + 40 * MS, ask=lambda one: "runs" if one.rank == 0 else "gone")
    assert frame.notes[0] == "SILENT: rank 1 wrote nothing for 10 ms; the process of rank 1 is gone."


def test_a_run_that_has_ended_is_not_silent() -> None:
    run = two_ranks()
    closed = replace(run, ranks={rank: replace(trace, closed=True) for rank, trace in run.ranks.items()})
    frame = make_frame(newest(closed, 0, 3), 3, EPOCH_NS + 10**15)
    assert {row.state for row in frame.ranks} == {"ended"}
    assert frame.notes == ("The run has ended: these are its last steps.",)


def test_a_job_that_was_killed_is_said_to_have_stopped() -> None:
    frame = make_frame(newest(two_ranks(), 0, 3), 3, EPOCH_NS + 10**12)
    assert {row.state for row in frame.ranks} == {"stopped"}
    assert frame.notes[0].startswith("STOPPED: no rank writes any more, and ranks 0–1 did not end cleanly")


def test_steps_that_were_only_summed_up_have_a_length_and_no_parts() -> None:
    frame = make_frame(newest(two_ranks(sampled=True), 0, 3), 3, EPOCH_NS + 30 * MS)
    assert (frame.num_steps, frame.step_ns) == (0, 10 * MS)
    assert [(row.step_ns, dict(row.parts), row.waits_for) for row in frame.ranks] == [(10 * MS, {}, None)] * 2
    assert any("None of the steps 0:3 was recorded in detail" in note for note in frame.notes)


def test_ranks_without_a_common_step_are_shown_all_the_same() -> None:
    run = make_run({0: [span("forward", 0, 5)], 1: [span("forward", 0, 5)]}, closed=False, last_written_ns=5)
    frame = make_frame(Newest(run, 0, 0, {0: -1, 1: -1}), 20, EPOCH_NS)
    assert [(row.step_ns, row.last_step) for row in frame.ranks] == [(None, -1)] * 2
    assert any("No step has ended on all ranks yet" in note for note in frame.notes)


def test_steps_that_nothing_marked_are_inferred() -> None:
    job = PipelineJob(2, 4, data_parallel=2, steps=40)
    run = job.run()
    unmarked = {rank: replace(trace, spans=_unmarked(trace.spans)) for rank, trace in run.ranks.items()}
    frame = make_frame(Newest(replace(run, ranks=unmarked), 0, 0, dict.fromkeys(run.ranks, -1)), 5, EPOCH_NS)
    assert frame.num_steps in (4, 5)
    assert frame.ranks[0].parts


def _unmarked(spans: Spans) -> Spans:
    rest = spans.take(spans.kind != schema.STEP)
    return rest.replace(step=np.full(len(rest), -1, np.int32))


def monitor_file(*findings: Finding) -> MonitorStatus:
    return MonitorStatus(time_ns=EPOCH_NS, findings=findings)


MONITOR = monitor_file(slow_finding(1, cause="data"))


def test_the_monitor_is_told_first_while_it_speaks() -> None:
    frame = make_frame(newest(two_ranks(), 0, 3), 3, EPOCH_NS + 10_000 * MS, monitor=MONITOR)
    (slow,) = frame.slow
    assert (slow.rank, frame.sources[slow.id], slow.since_ns) == (1, "monitor", 5_000 * MS)
    old = make_frame(newest(two_ranks(), 0, 3), 3, EPOCH_NS + 100_000 * MS, monitor=MONITOR)
    assert old.slow == ()
    assert "The monitor last reported 100 s ago." in old.notes


def test_a_rank_named_by_the_monitor_and_by_the_steps_is_shown_once() -> None:
    job = PipelineJob(2, 8, data_parallel=4, steps=12, extra_forward_ns={2: MS})
    monitor = monitor_file(slow_finding(2, cause="unknown", cost_ns=9e9), slow_finding(5, cause="unknown", cost_ns=MS))
    frame = make_frame(newest(job.run(), 1, 12), 11, EPOCH_NS, monitor=monitor)

    both, other = frame.slow
    assert (both.rank, both.cause, both.since_ns) == (2, "forward", 5_000 * MS)
    assert (frame.sources[both.id], both.evidence[:6]) == ("monitor and the steps shown", "Rank 2")
    assert (other.who, frame.sources[other.id]) == ("rank 5 on node0", "monitor")
    assert other.evidence == "Evidence. Not, or no longer, in the steps shown."


def test_ranks_that_the_monitor_names_one_by_one_and_the_steps_together_are_shown_once() -> None:
    job = PipelineJob(2, 8, data_parallel=4, steps=12, extra_forward_ns={0: MS, 2: MS})
    monitor = monitor_file(slow_finding(2), slow_finding(0))
    frame = make_frame(newest(job.run(), 1, 12), 11, EPOCH_NS, monitor=monitor)

    (both,) = frame.slow
    assert (both.who, frame.sources[both.id]) == ("ranks 0, 2 on node0", "monitor and the steps shown")
    assert {*both.ranks} == {0, 2}


def test_a_hang_that_the_monitor_knows_more_of_is_shown_once_and_silent_ranks_by_their_files() -> None:
    run = two_ranks()
    now = EPOCH_NS + 60_000 * MS
    ranks = {rank: replace(trace, last_written_ns=now - EPOCH_NS) for rank, trace in run.ranks.items()}
    monitor = MonitorStatus(time_ns=now, findings=(hang_finding("Hung at seq 5."), silent_finding(1), not_judged("E.")))
    frame = make_frame(newest(replace(run, ranks=ranks), 0, 3), 3, now, monitor=monitor)

    hang, *rest = frame.findings
    assert (hang.evidence, frame.sources[hang.id]) == ("Hung at seq 5.", "monitor")
    assert [finding.kind for finding in rest] == ["not_judged", "not_judged"]
    assert {*frame.sources} == {finding.id for finding in frame.findings}


def test_a_monitor_file_is_read_as_what_a_monitor_writes_or_refused(tmp_path: Path) -> None:
    assert read_monitor(tmp_path) is None
    (tmp_path / "monitor.json").write_text('{"time_ns": 1}')
    assert read_monitor(tmp_path) == MonitorStatus(time_ns=1)
    (tmp_path / "monitor.json").write_text(json.dumps(fields_to_json(status(slow_finding(1)))))
    assert read_monitor(tmp_path) == status(slow_finding(1))
    for text in ('{"time_ns": 1', '{"time_ns": "now"}', '{"time_ns": 1, "findings": [{"rank": 1}]}', "[" * 100_000):
        (tmp_path / "monitor.json").write_text(text)
        with pytest.raises(TraceFormatError, match="is not a valid state of the monitor"):
            read_monitor(tmp_path)


def test_a_frame_of_files_is_that_of_the_same_run_in_memory(tmp_path: Path) -> None:
    directory = write_run(tmp_path, PipelineJob(2, 4, data_parallel=2, steps=12).run())
    frame = FileSource(directory, last=5).look()
    expected = make_frame(newest(load_run(directory), 7, 12), 5, EPOCH_NS)
    assert (frame.first_step, frame.last_step) == (7, 11)
    assert [row.parts for row in frame.ranks] == [row.parts for row in expected.ranks]
    assert [row.waits_for for row in frame.ranks] == [row.waits_for for row in expected.ranks]
    assert frame.took_ns > 0


def test_json_holds_no_number_that_is_none_in_json(tmp_path: Path) -> None:
    frame: Frame = make_frame(newest(two_ranks(), 0, 3), 3, EPOCH_NS)
    assert json.loads(json.dumps(frame.to_json(), allow_nan=False))["ranks"][0]["exposed"]["dp"]["wait_ns"] == 4 * MS


def test_a_run_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError):
        FileSource(tmp_path / "none", last=5).look()


@pytest.mark.parametrize(("ranks", "steps"), [(0, 20), (4, 20), (256, 20), (512, 10), (1_024, 8), (10_000, 8)])
def test_fewer_steps_of_a_large_job_are_read_but_enough_to_judge(ranks: int, steps: int) -> None:
    assert steps_of(ranks) == steps
