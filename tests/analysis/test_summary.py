"""The whole summary, from made runs and from files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from commtrace.analysis.breakdown.rank_means import PARTS, ExposedTime
from commtrace.analysis.matched import Context
from commtrace.analysis.memory import RankMemory
from commtrace.analysis.problems import NO_COMMUNICATION, NO_COMPUTE, StepNumbers, find_step_numbers
from commtrace.analysis.summary import Summary, summarise
from commtrace.errors import ConfigurationError, RunNotFoundError
from commtrace.synth import Job, synthesize
from commtrace.trace import schema
from commtrace.trace.hang_report import InFlight
from commtrace.trace.metadata import PeakMemory
from commtrace.trace.run import OsExit, Run
from tests.factory import Row, collective, group, make_run, p2p, span, stall
from tests.pipeline_factory import Clock, PipelineJob

MS = 1_000_000
COLUMNS = ("compute", "exposed_total", "exposed_memory", "bubble", "idle", "data", "checkpoint", "gc", "other")
PAIR = group("dp", 0, 1)


def summarised(run: Run, steps: str | None = None) -> Summary:
    summary = summarise(run, steps)
    json.dumps(summary.to_json(), allow_nan=False)
    return summary


def test_its_json_has_the_promised_shape() -> None:
    printed = summarised(PipelineJob(2, 4, data_parallel=2, transfer_ns=1_000, all_reduce_ns=MS).run()).to_json()
    summary: dict[str, Any] = json.loads(json.dumps(printed))
    assert {"id", "attempt", "world_size", "hosts", "steps", "backend", "device", "versions", "parallel"} <= set(
        summary["run"]
    )
    assert {"method", "observations", "residual_ns", "hosts"} <= set(summary["alignment"])
    for rank in summary["ranks"]:
        expected = {
            "rank",
            "host",
            "coordinates",
            "wall_ns",
            "exposed_ns",
            "hidden_ns",
            *(f"{part}_ns" for part in COLUMNS),
        }
        assert expected <= set(rank)
        assert all({"wait", "transfer"} == set(parts) for parts in rank["exposed_ns"].values())
    for row in summary["communication"]:
        assert {"role", "operation", "group_size", "count", "bytes", "duration_ns", "algbw_gbps"} <= set(row)
        assert {"busbw_gbps", "exposed_ns", "hidden_ns", "wait_ns"} <= set(row)
        assert {"p50", "p99", "max", "sum"} == set(row["duration_ns"])
    assert {"captured", "dropped", "missing", "not_visible", "replays"} == set(summary["coverage"])
    assert isinstance(summary["findings"], list)
    assert isinstance(summary["verdict"], str)


def test_the_peak_memory_of_each_rank_stands_beside_its_stage() -> None:
    run = PipelineJob(2, 4, transfer_ns=1_000).run()
    assert summarised(run).peak_memory == ()
    full = {0: replace(run.ranks[0], peak_memory=PeakMemory(3, 700, 1000))}

    summary = summarised(replace(run, ranks={**run.ranks, **full}))

    assert summary.peak_memory == (RankMemory(0, 0, 700, 1000, 3),)
    printed = summary.to_json()["peak_memory"]
    assert printed == [{"rank": 0, "stage": 0, "allocated_bytes": 700, "reserved_bytes": 1000, "step": 3}]


@pytest.mark.parametrize("extra", [0, 333_333])
def test_the_parts_of_every_rank_add_up_to_its_step(extra: int) -> None:
    run = PipelineJob(3, 5, data_parallel=2, transfer_ns=777, all_reduce_ns=11, extra_forward_ns={1: extra}).run()
    for rank in summarised(run).ranks:
        assert sum(map(rank.part, PARTS)) == rank.wall_ns
        assert sum(exposed.total_ns for exposed in rank.exposed.values()) == rank.part("exposed")


def test_an_ideal_pipeline_reads_as_its_formula() -> None:
    job = PipelineJob(4, 8, forward_ns=MS, backward_ns=2 * MS)
    summary = summarised(job.run())
    assert [rank.wall_ns for rank in summary.ranks] == [33 * MS] * 4
    assert [rank.part("compute") for rank in summary.ranks] == [24 * MS] * 4
    assert [rank.part("bubble") for rank in summary.ranks] == [9 * MS, 7 * MS, 5 * MS, 3 * MS]
    assert [rank.part("other") for rank in summary.ranks] == [0] * 4
    assert summary.problems == ()


def test_the_first_step_is_left_out_as_warm_up_and_that_is_reported() -> None:
    steps = summarised(PipelineJob(2, 2, steps=5).run()).run.steps.to_json()
    warm_up = {"first": 0, "last": 0, "count": 1, "reason": "warm-up"}
    assert steps == {"first": 1, "last": 4, "count": 4, "left_out": [warm_up]}


@pytest.mark.parametrize(("steps", "first", "last", "count"), [("0:2", 0, 1, 2), ("3", 3, 3, 1), ("0:5:2", 0, 4, 3)])
def test_the_user_chooses_the_steps(steps: str, first: int, last: int, count: int) -> None:
    summary = summarised(PipelineJob(2, 2, steps=5).run(), steps)
    assert summary.run.steps.to_json() == {"first": first, "last": last, "count": count, "left_out": []}


def test_steps_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="write A:B"):
        summarise(PipelineJob(1, 1).run(), "two")


def test_nothing_recorded_is_reported_as_such(tmp_path: Any) -> None:
    with pytest.raises(RunNotFoundError):
        summarise(tmp_path)


def test_ranks_that_number_their_steps_differently_are_reported() -> None:
    """Rank 1 resumed from another checkpoint: its step 4 is everybody else's step 1."""
    run = synthesize(Job(pp=2, dp=2, microbatches=4, steps=8)).run
    shifted = run.ranks[1].spans.replace(step=run.ranks[1].spans.step + np.int32(3))
    summary = summarised(replace(run, ranks={**run.ranks, 1: replace(run.ranks[1], spans=shifted)}))

    (problem,) = [text for text in summary.problems if "number their steps differently" in text]
    found = re.search(r"what rank (\d) does in step (\d+) meets what rank (\d) does in step (\d+)", problem)
    assert found
    one, step, other, other_step = map(int, found.groups())
    assert 1 in (one, other)
    assert abs(step - other_step) == 3
    assert not any("number their steps differently" in text for text in summarised(run).problems)


def test_spans_that_end_before_they_start_are_reported() -> None:
    run = synthesize(Job(dp=2, microbatches=2, steps=4)).run
    spans = run.ranks[1].spans
    end = spans.end.copy()
    end[spans.kind == schema.FORWARD] -= 10**9
    summary = summarised(replace(run, ranks={**run.ranks, 1: replace(run.ranks[1], spans=spans.replace(end=end))}))

    assert any("8 spans of rank 1 end before they start" in text for text in summary.problems)
    assert all(sum(map(rank.part, PARTS)) == rank.wall_ns for rank in summary.ranks)


def test_ranks_without_a_common_step_are_not_said_to_miss_one() -> None:
    run = synthesize(Job(dp=2, microbatches=2, steps=4)).run
    halves = {
        rank: replace(trace, spans=trace.spans.take(np.flatnonzero((trace.spans.step < 2) == (rank == 0))))
        for rank, trace in run.ranks.items()
    }
    summary = summarised(replace(run, ranks=halves))

    assert summary.coverage.not_visible == ()
    assert summary.problems == (
        "No step was recorded in full by every rank; there is nothing to show. The ranks number their steps "
        "differently: 0–1; 2–3.",
    )


def test_a_rank_killed_in_its_last_step_does_not_spoil_the_others() -> None:
    run = PipelineJob(2, 2, steps=4).run()
    last = run.ranks[1].spans
    cut = last.take((last.step < 3) | (last.kind != 0))
    in_flight = (InFlight("recv", group=1, seq=9, start=5),)
    summary = summarised(
        replace(run, ranks={**run.ranks, 1: replace(run.ranks[1], spans=cut, closed=False, in_flight=in_flight)})
    )
    assert summary.run.steps.used == (1, 2)
    assert "Not ended cleanly (killed, or still running): rank 1. See commtrace doctor." in summary.problems
    assert "Rank 1 was last seen in recv number 9." in summary.problems
    assert "1 step was left out because not every rank recorded them in full." in summary.problems


def test_ranks_that_called_os_exit_are_reported() -> None:
    run = PipelineJob(2, 2, steps=4).run()
    ended = replace(run.ranks[1], closed=False, exit=OsExit(3))
    problems = summarised(replace(run, ranks={**run.ranks, 1: ended})).problems
    assert "Ended by os._exit(3): rank 1. See commtrace doctor." in problems
    assert not any(problem.startswith("Not ended cleanly") for problem in problems)


def test_ranks_that_ended_with_an_exception_are_reported() -> None:
    run = PipelineJob(2, 2, steps=4).run()
    failed = {rank: replace(run.ranks[rank], exception=name) for rank, name in enumerate(("KeyError", "ValueError"))}

    assert summarised(replace(run, ranks=failed)).problems == (
        "Ended with an uncaught exception: KeyError on rank 0, ValueError on rank 1. See commtrace doctor.",
    )


def test_a_run_without_steps_is_shown_whole() -> None:
    message = collective("all_reduce", PAIR, 0, 40, 60, id=1)
    run = make_run({rank: [span("forward", 0, 40), message, stall(message, 40, 60)] for rank in (0, 1)}, [PAIR])
    summary = summarised(run)
    assert summary.run.steps.to_json() == {"first": None, "last": None, "count": 0, "left_out": []}
    assert [rank.wall_ns for rank in summary.ranks] == [60, 60]
    assert [rank.exposed for rank in summary.ranks] == [{"dp": ExposedTime(wait_ns=0, transfer_ns=20)}] * 2
    assert summary.problems[0].startswith("No step was recorded; all of the recording is shown as one.")


def test_ranks_that_share_no_step_leave_nothing_to_show() -> None:
    summary = summarised(make_run({0: [span("step", 0, 10, step=0)], 1: [span("step", 0, 10, step=1)]}))
    assert (summary.ranks, summary.communication, summary.pipeline) == ((), (), None)
    assert summary.verdict == "Not judged: No step was recorded in full, so nothing can be compared."


def test_steps_that_ranks_number_differently_are_said_to_be_so() -> None:
    summary = summarised(make_run({0: [span("step", 0, 10, step=0)], 1: [span("step", 0, 10, step=1)]}))
    assert (
        "No step was recorded in full by every rank; there is nothing to show. The ranks number their steps "
        "differently: 0; 1."
    ) in summary.problems


def test_steps_of_one_number_are_reported() -> None:
    rows = [span("step", start, start + 10, step=start % 20 // 10) for start in range(0, 40, 10)]
    summary = summarised(make_run({0: rows, 1: rows[:2]}))
    assert any(problem.startswith("Step numbers occur more than once on rank 0:") for problem in summary.problems)


def test_steps_of_no_length_are_no_error() -> None:
    rows = [span("step", 5, 5, step=0), span("step", 5, 5, step=1)]
    assert summarised(make_run({0: rows, 1: rows})).slow == ()


def test_calls_that_send_nothing_are_not_to_be_overlapped() -> None:
    alone = group("tp", 0)
    call = collective("all_reduce", alone, 0, 1, 8, step=0, id=1)
    summary = summarised(make_run({0: [span("step", 0, 10, step=0), call, stall(call, 1, 8)]}, [alone]))
    assert "Exposed communication: " in summary.verdict
    assert "By role: tp 100%." in summary.verdict
    assert "Its groups have one rank and send nothing" in summary.verdict


def test_no_communication_is_explained_in_words() -> None:
    summary = summarised(make_run({0: [span("step", 0, 10, step=0), span("forward", 0, 10)]}))
    assert NO_COMMUNICATION in summary.problems
    assert summary.communication == ()
    assert summary.ranks[0].exposed == {}


def test_hosts_with_different_clocks_give_the_same_summary() -> None:
    job = PipelineJob(2, 4, data_parallel=2, transfer_ns=5_000, all_reduce_ns=MS, steps=8)
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    plain = summarised(replace(job, nodes=nodes).run())
    skewed = summarised(replace(job, nodes=nodes, clocks={"b": Clock(-9 * 10**9, 70.0)}).run())
    assert skewed.alignment.method == "collective ends"
    assert skewed.run.hosts == ("a", "b")
    for one, other in zip(plain.ranks, skewed.ranks, strict=True):
        assert math.isclose(one.part("bubble"), other.part("bubble"), abs_tol=3_000)
        assert math.isclose(one.wall_ns, other.wall_ns, rel_tol=1e-5)
        assert sum(map(other.part, PARTS)) == other.wall_ns


def test_hosts_that_cannot_be_aligned_are_reported_with_what_that_means() -> None:
    pipeline = group("pp", 0, 1)
    rows = {
        0: [span("step", 0, 100, step=0), p2p("send", pipeline, 1, 0, 0, 10, step=0)],
        1: [span("step", 0, 100, step=0), p2p("recv", pipeline, 0, 0, 0, 10, step=0)],
    }
    summary = summarised(make_run(rows, [pipeline], nodes={0: "a", 1: "b"}))
    assert summary.alignment.refused is not None
    assert any(problem.startswith("Clocks are not aligned") for problem in summary.problems)
    assert {row.wait_ns for row in summary.communication} == {None}


def test_spoiled_numbers_are_reported() -> None:
    rows = {0: [span("step", 0, 100, step=0), collective("all_reduce", PAIR, 0, 0, 0, id=1, step=0)]}
    summary = summarised(make_run(rows, [PAIR], world_size=2, dropped={"p2p": 5}, details={1: '{"unfinished": true}'}))
    text = " ".join(summary.problems)
    assert "5 spans were dropped on rank 0" in text
    assert "1 of 1 communications could not be matched on all members" in text
    assert "1 communications were never seen to end" in text
    assert summary.coverage.dropped == {"p2p": 5}


def test_members_that_disagree_are_reported() -> None:
    rows = {
        rank: [span("step", 0, 100, step=0), collective("all_reduce", PAIR, 0, 0, 10, bytes=rank, step=0)]
        for rank in (0, 1)
    }
    summary = summarised(make_run(rows, [PAIR]))
    assert "2 communications differ between their members in operation, bytes or dtype." in summary.problems


def test_problems_of_the_reader_come_first() -> None:
    run = replace(make_run({0: [span("step", 0, 10, step=0)]}), problems=("torn",))
    assert summarised(run).problems[0] == "torn"


@pytest.mark.parametrize(
    ("stages", "missing", "why"),
    [(2, [1], "because rank 1 is missing."), (4, [1, 3], "because ranks 1, 3 are missing.")],
)
def test_waiting_for_missing_ranks_is_not_called_transfer(stages: int, missing: list[int], why: str) -> None:
    run = PipelineJob(stages, 8, extra_forward_ns={stages - 1: 4 * MS}).run()
    partial = replace(run, ranks={rank: trace for rank, trace in run.ranks.items() if rank not in missing})

    summary = summarised(partial).verdict

    assert f"How much of it is waiting is unknown, {why}" in summary
    assert "transfer" not in summary


def test_waiting_for_what_began_at_an_unknown_time_is_not_called_transfer() -> None:
    """Both ranks stall for most of each step on an all_reduce that was launched behind another one."""
    pair = group("dp", 0, 1)
    rows: dict[int, list[Row]] = {0: [], 1: []}
    for number in range(10):
        at = 100 * MS * number
        reduce = collective(
            "all_reduce", pair, number, at + 11 * MS, at + 90 * MS, id=number, step=number, start_exact=False
        )
        for own in rows.values():
            own += [
                span("step", at, at + 100 * MS, step=number), span("forward", at, at + 20 * MS, step=number), reduce,
                stall(reduce, at + 20 * MS, at + 90 * MS),
            ]  # fmt: skip

    bound = summarised(make_run(rows, [pair])).verdict
    exact = summarised(make_run({rank: [{**one, "start_exact": True} for one in own] for rank, own in rows.items()},
                                [pair])).verdict  # fmt: skip

    assert "How much of it is waiting is unknown, because it began behind earlier communication" in bound
    assert "is waiting is unknown" not in exact


def test_communication_without_anything_that_computes_is_explained_in_words() -> None:
    reduce = collective("all_reduce", group("dp", 0), 0, 10, 20, step=0, id=1)
    summary = summarise(make_run({0: [span("step", 0, 100, step=0), reduce]}, [group("dp", 0)]))
    assert NO_COMPUTE in summary.problems
    computed = [span("step", 0, 100, step=0), span("forward", 0, 10, step=0), reduce]
    assert NO_COMPUTE not in summarise(make_run({0: computed}, [group("dp", 0)])).problems


def test_the_numbers_of_steps_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Context] = []

    def counted(context: Context) -> StepNumbers:
        compared.append(context)
        return find_step_numbers(context)

    for module in ("judged_run", "step_totals", "stragglers.search"):
        monkeypatch.setattr(f"commtrace.analysis.{module}.find_step_numbers", counted)
    summarise(PipelineJob(2, 2, steps=3).run())

    assert len(compared) == 1
