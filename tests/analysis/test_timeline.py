from __future__ import annotations

import json
from typing import Literal

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.timeline import RankBoxes, Timeline, members, rank_label, step_durations
from commtrace.trace.run import Run
from tests.factory import collective, group, make_run, p2p, span, stall
from tests.pipeline_factory import PipelineJob


def timeline_of(run: Run) -> Timeline:
    return Timeline.of_recording(run)


def words(timeline: Timeline, vocabulary: Literal["kinds", "names", "roles", "states"], codes: list[int]) -> list[str]:
    return [timeline.outline()[vocabulary][code] for code in codes]


def of_rank(timeline: Timeline, step: int, rank: int) -> RankBoxes:
    return next(columns for columns in timeline.step(step)["ranks"] if columns["rank_index"] == rank)


def a_receive_that_waits() -> Run:
    """Rank 1 waits from 10 to 30 for a send that starts at 22; both steps begin at 5 at the earliest."""
    pipeline = group("pp", 0, 1)
    receive = p2p("recv", pipeline, 0, 0, 10, 30, id=1, step=0, microbatch=2, chunk=0, stage=1)
    return make_run(
        {
            0: [
                span("step", 5, 40, step=0),
                span("forward", 5, 22, step=0, microbatch=2, chunk=0, stage=0),
                p2p("send", pipeline, 1, 0, 22, 30, id=1, step=0, microbatch=2, chunk=0, stage=0),
            ],
            1: [
                span("step", 8, 40, step=0),
                receive,
                stall(receive, 10, 30),
                span("forward", 30, 38, step=0, microbatch=2, chunk=0, stage=1),
                span("gc", 38, 39, step=0),
            ],
        },
        [pipeline],
    )


def test_times_are_relative_to_the_rank_that_begins_first() -> None:
    step = timeline_of(a_receive_that_waits()).step(0)

    assert (step["base_ns"], step["duration_ns"]) == (5, 35)
    assert [(rank["start"], rank["end"]) for rank in step["ranks"]] == [(0, 35), (3, 35)]


def test_work_is_boxes_with_a_place_in_the_schedule() -> None:
    timeline = timeline_of(a_receive_that_waits())

    work = of_rank(timeline, 0, 0)["work"]

    assert words(timeline, "kinds", work["kind"]) == ["forward"]
    assert {name: values for name, values in work.items() if name not in ("kind", "name")} == {
        "start": [0],
        "duration": [17],
        "microbatch": [2],
        "chunk": [0],
        "stage": [0],
        "depth": [0],
    }


def test_a_stall_on_pipeline_p2p_is_a_bubble_until_the_send_starts_and_transfer_after_it() -> None:
    timeline = timeline_of(a_receive_that_waits())

    stalls = of_rank(timeline, 0, 1)["stalls"]

    assert words(timeline, "states", stalls["state"]) == ["bubble", "transfer"]
    assert words(timeline, "roles", stalls["role"]) == ["pp", "pp"]
    assert (stalls["start"], stalls["duration"]) == ([5, 17], [12, 8])
    assert stalls["communication"] == [0, 0]


def test_a_stall_on_a_collective_is_a_wait_until_its_last_participant_arrives() -> None:
    replicas = group("dp", 0, 1)
    late = collective("all_reduce", replicas, 0, 7, 10, id=1, step=0)
    early = collective("all_reduce", replicas, 0, 2, 10, id=1, step=0)
    run = make_run(
        {
            0: [span("step", 0, 10, step=0), late, stall(late, 7, 10)],
            1: [span("step", 0, 10, step=0), early, stall(early, 2, 10)],
        },
        [replicas],
    )
    timeline = timeline_of(run)

    assert words(timeline, "states", of_rank(timeline, 0, 0)["stalls"]["state"]) == ["transfer"]
    assert words(timeline, "states", of_rank(timeline, 0, 1)["stalls"]["state"]) == ["wait", "transfer"]
    assert of_rank(timeline, 0, 1)["communication"]["wait"] == [5]
    assert of_rank(timeline, 0, 1)["communication"]["transfer"] == [3]


def test_the_two_ends_of_a_message_share_a_number() -> None:
    timeline = timeline_of(a_receive_that_waits())

    sent, received = (of_rank(timeline, 0, rank)["communication"]["join"] for rank in (0, 1))

    assert sent == received
    assert sent[0] >= 0


def test_a_call_seen_on_one_rank_has_no_number_and_no_known_wait() -> None:
    pipeline = group("pp", 0, 1)
    run = make_run(
        {0: [span("step", 0, 9, step=0), p2p("send", pipeline, 1, 0, 2, 5, id=1, step=0)]}, [pipeline], world_size=2
    )

    communication = of_rank(timeline_of(run), 0, 0)["communication"]

    assert (communication["join"], communication["wait"], communication["transfer"]) == ([-1], [-1], [-1])


def test_overlapping_communications_of_a_group_lie_on_different_sublanes() -> None:
    replicas = group("dp", 0)
    rows = [
        collective("all_gather", replicas, number, start, end, id=number, step=0)
        for number, (start, end) in enumerate([(0, 5), (2, 8), (5, 6), (6, 7)])
    ]
    timeline = timeline_of(make_run({0: [span("step", 0, 9, step=0), *rows]}, [replicas]))

    assert of_rank(timeline, 0, 0)["communication"]["sublane"] == [0, 1, 0, 0]


def test_depth_counts_the_boxes_around_a_box() -> None:
    rows = [
        span("backward", 0, 9, step=0),
        span("recompute", 0, 4, step=0),
        span("module", 1, 3, step=0),
        span("forward", 9, 10, step=0),
    ]
    timeline = timeline_of(make_run({0: [span("step", 0, 10, step=0), *rows]}))

    assert of_rank(timeline, 0, 0)["work"]["depth"] == [0, 1, 2, 0]


def test_data_and_garbage_collection_are_beside_the_work() -> None:
    timeline = timeline_of(a_receive_that_waits())

    host = of_rank(timeline, 0, 1)["host"]

    assert (words(timeline, "kinds", host["kind"]), host["start"], host["duration"]) == (["gc"], [33], [1])


def test_a_message_over_the_world_group_lies_on_the_lane_of_its_pipeline() -> None:
    world, pipeline = group("world", 0, 1, 2, 3), group("pp", 0, 2)
    rows = [
        p2p("send", world, 2, 0, 1, 2, id=1, step=0),
        collective("barrier", world, 0, 3, 4, id=2, step=0),
    ]
    timeline = timeline_of(make_run({0: [span("step", 0, 5, step=0), *rows]}, [world, pipeline], world_size=4))

    lanes = timeline.outline()["ranks"][0]["lanes"]

    assert [lane["label"] for lane in lanes] == ["pp · 0, 2", "world · 0–3"]
    assert of_rank(timeline, 0, 0)["communication"]["lane"] == [0, 1]


def test_an_unfinished_communication_says_so() -> None:
    replicas = group("dp", 0)
    row = collective("all_reduce", replicas, 0, 3, 3, id=7, step=0)
    run = make_run({0: [span("step", 0, 9, step=0), row]}, [replicas], details={7: '{"unfinished": true}'})

    communication = of_rank(timeline_of(run), 0, 0)["communication"]

    assert (communication["finished"], communication["wait"]) == ([0], [-1])


def test_stalls_add_up_to_what_the_partition_says() -> None:
    job = PipelineJob(stages=3, microbatches=5, data_parallel=2, transfer_ns=70_000, all_reduce_ns=900_000, steps=4)
    analysis = analyse(job.run())
    timeline = Timeline.of_analysis(analysis)
    bubble = timeline.outline()["states"].index("bubble")

    for rank, step, expected in zip(
        analysis.partition.rank, analysis.partition.step, analysis.partition.total("bubble"), strict=True
    ):
        stalls = of_rank(timeline, int(step), int(rank))["stalls"]
        drawn = sum(ns for ns, state in zip(stalls["duration"], stalls["state"], strict=True) if state == bubble)
        assert drawn == expected


def test_everything_is_ready_for_json_and_every_column_of_a_table_is_as_long() -> None:
    timeline = timeline_of(PipelineJob(stages=2, microbatches=3, data_parallel=2, steps=2).run())

    assert json.loads(json.dumps([timeline.outline(), timeline.step(1)])) == [timeline.outline(), timeline.step(1)]
    for columns in timeline.step(1)["ranks"]:
        for table in ("work", "stalls", "host", "communication"):
            assert len({len(values) for values in columns[table].values()}) == 1


def test_a_recording_without_steps_is_one_step() -> None:
    timeline = timeline_of(make_run({0: [span("forward", 3, 9)]}))

    assert timeline.steps == [-1]
    assert of_rank(timeline, -1, 0)["work"]["duration"] == [6]


def test_an_unknown_step_is_an_error() -> None:
    with pytest.raises(KeyError):
        timeline_of(a_receive_that_waits()).step(99)


def test_the_analysed_steps_leave_out_the_warm_up_and_the_recording_has_it() -> None:
    run = PipelineJob(stages=2, microbatches=2, steps=4).run()

    assert Timeline.of_analysis(analyse(run)).steps == [1, 2, 3]
    assert timeline_of(run).steps == [0, 1, 2, 3]


def test_clocks_that_cannot_be_aligned_have_no_residual() -> None:
    apart = make_run({0: [span("step", 0, 5, step=0)], 1: [span("step", 0, 5, step=0)]}, nodes={1: "node1"})

    assert timeline_of(apart).outline()["residual_ns"] is None
    assert timeline_of(a_receive_that_waits()).outline()["residual_ns"] == {"p50": 0, "p99": 0, "max": 0}


def test_a_label_names_the_dimensions_that_are_split() -> None:
    run = make_run(
        {3: [span("step", 0, 1, step=0)]},
        coordinates={"tp": 0, "dp": 1, "pp": 1},
        parallel={"tp": 1, "dp": 2, "pp": 2},
    )

    assert rank_label(run.ranks[3]) == "rank 3 · pp1 dp1 · node0"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([4], "4"),
        ([0, 1], "0, 1"),
        ([0, 1, 2, 3, 8], "0–3, 8"),
        ([*range(0, 64, 8)], "0, 8, …, 56"),
    ],
)
def test_members_are_written_short(ranks: list[int], text: str) -> None:
    assert members(ranks) == text


def test_a_communication_says_which_of_its_times_are_bounds() -> None:
    pair = group("dp", 0, 1)
    rows = {
        rank: [
            span("step", 0, 99, step=0),
            collective("all_reduce", pair, 0, 5, 40, step=0, end_exact=False),
            collective("all_reduce", pair, 1, 10 + rank, 60, step=0, start_exact=rank == 0),
        ]
        for rank in (0, 1)
    }
    timeline = timeline_of(make_run(rows, [pair]))

    known, late = (of_rank(timeline, 0, rank)["communication"] for rank in (0, 1))

    assert (known["start_exact"], known["end_exact"], known["transfer_exact"]) == ([1, 1], [0, 1], [0, 0])
    assert (late["start_exact"], late["end_exact"], late["transfer_exact"]) == ([1, 0], [0, 1], [0, 0])
    assert (known["wait"], late["wait"]) == ([0, 1], [0, -1])


def test_the_lengths_of_steps_add_up_to_the_time_of_the_run() -> None:
    """Rank 1 begins and ends each step 30 later than rank 0, so that from first begin to last end steps overlap."""
    rows = {
        rank: [span("step", 100 * step + late, 100 * step + 100 + late, step=step) for step in range(5)]
        for rank, late in ((0, 0), (1, 30))
    }
    lengths = step_durations(make_run(rows), range(5))

    assert list(lengths.values()) == [100] * 5
    assert sum(lengths.values()) == 500
