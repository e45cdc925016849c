"""The critical path, by hand on small runs, and on simulated jobs whose schedule says it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from commtrace.analysis.breakdown.critical_path import CriticalPath, Piece, StepPath, critical_paths
from commtrace.analysis.matching.match import match
from commtrace.analysis.matching.roles import find_roles
from commtrace.synth import FREE, Fault, Job, Network, synthesize
from commtrace.trace import schema
from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, p2p, span, stall

DP = group("dp", 0, 1)
PP = group("pp", 0, 1, ordinal=1)


def paths_of(run: Run, steps: tuple[int, ...] = (0,), residual_ns: int = 0) -> list[StepPath]:
    return critical_paths(run, match(run), find_roles(run), steps, residual_ns)


def path_of(rows: dict[int, list[Row]], residual_ns: int = 0, nodes: dict[int, str] | None = None) -> list[Piece]:
    """Of the only step; ``nodes`` where ranks have clocks of their own."""
    run = make_run({rank: [{"step": 0, **row} for row in own] for rank, own in rows.items()}, [DP, PP], nodes=nodes)
    (path,) = paths_of(run, residual_ns=residual_ns)
    return list(path.pieces)


def reduced(rank_0_arrives: int, rank_1_arrives: int, ends: int = 100) -> dict[int, list[Row]]:
    """Both ranks work from 0 on, reduce once both are there, and optimize for 20 (rank 1: for 10)."""
    rows = {}
    for rank, (arrives, optimized) in enumerate([(rank_0_arrives, 20), (rank_1_arrives, 10)]):
        reduction = collective("all_reduce", DP, 0, arrives, ends, id=1)
        rows[rank] = [
            span("step", 0, ends + optimized),
            span("data", 0, 5),
            span("forward", 5, 30),
            span("backward", 30, arrives),
            reduction,
            stall(reduction, arrives, ends),
            span("optimizer", ends, ends + optimized),
        ]
    return rows


def test_the_path_goes_through_the_transfer_to_the_rank_that_arrived_last() -> None:
    assert path_of(reduced(rank_0_arrives=60, rank_1_arrives=90)) == [
        Piece(0, 5, 1, "input"),
        Piece(5, 30, 1, "forward"),
        Piece(30, 90, 1, "backward"),
        Piece(90, 100, 0, "transfer", "dp"),
        Piece(100, 120, 0, "optimizer"),
    ]


def test_it_stays_on_a_rank_that_arrived_last_itself() -> None:
    assert {piece.rank for piece in path_of(reduced(rank_0_arrives=90, rank_1_arrives=60))} == {0}


def test_a_path_of_a_pipeline_goes_from_stage_to_stage() -> None:
    """1F1B of two stages and two microbatches, forwards of 10, backwards of 20, messages of 1."""
    sent = [p2p("send", PP, 1, number, start, start + 1, id=number) for number, start in enumerate([10, 20])]
    back = [p2p("recv", PP, 1, 0, 20, 43, id=10), p2p("recv", PP, 1, 1, 63, 74, id=11)]
    came = [p2p("recv", PP, 0, 0, 0, 11, id=20), p2p("recv", PP, 0, 1, 41, 42, id=21)]
    gave = [p2p("send", PP, 0, 0, 42, 43, id=30), p2p("send", PP, 0, 1, 73, 74, id=31)]
    rows = {
        0: [
            span("step", 0, 94),
            span("forward", 0, 10, microbatch=0),
            span("forward", 10, 20, microbatch=1),
            *sent,
            *back,
            stall(back[0], 20, 43),
            span("backward", 43, 63, microbatch=0),
            stall(back[1], 63, 74),
            span("backward", 74, 94, microbatch=1),
        ],
        1: [
            span("step", 0, 73),
            *came,
            stall(came[0], 0, 11),
            span("forward", 11, 21, microbatch=0),
            span("backward", 21, 41, microbatch=0),
            stall(came[1], 41, 42),
            span("forward", 42, 52, microbatch=1),
            span("backward", 53, 73, microbatch=1),
            *gave,
        ],
    }

    assert path_of(rows) == [
        Piece(0, 10, 0, "forward"),
        Piece(10, 11, 1, "transfer", "pp"),
        Piece(11, 21, 1, "forward"),
        Piece(21, 41, 1, "backward"),
        Piece(41, 42, 1, "transfer", "pp"),
        Piece(42, 52, 1, "forward"),
        Piece(52, 53, 1, "host"),
        Piece(53, 73, 1, "backward"),
        Piece(73, 74, 0, "transfer", "pp"),
        Piece(74, 94, 0, "backward"),
    ]


def test_time_hidden_by_an_overlapped_transfer_is_not_on_the_path() -> None:
    """Both launch the reduction at 20 and 25 and compute on to 40; it lasts to 70."""
    rows = {}
    for rank, launched in enumerate([20, 25]):
        reduction = collective("all_reduce", DP, 0, launched, 70, id=1, is_async=True)
        rows[rank] = [span("step", 0, 80), span("backward", 0, 40), reduction, stall(reduction, 40, 70)]

    assert path_of(rows) == [
        Piece(0, 25, 1, "backward"),
        Piece(25, 70, 0, "transfer", "dp"),
        Piece(70, 80, 0, "host"),
    ]


def test_an_overlapped_transfer_that_nobody_waits_for_is_not_on_the_path() -> None:
    rows = {}
    for rank in range(2):
        reduction = collective("all_reduce", DP, 0, 20, 40, id=1, is_async=True)
        rows[rank] = [span("step", 0, 80), span("backward", 0, 80), reduction]

    assert path_of(rows) == [Piece(0, 80, 0, "backward")]


def test_the_time_before_its_own_launch_is_the_hosts() -> None:
    """Rank 1 stands from 50 on, but its operation starts at 60 only."""
    rows = reduced(rank_0_arrives=40, rank_1_arrives=60)
    rows[1][5]["start"] = 50
    rows[1][3]["end"] = 50

    assert path_of(rows)[2:4] == [Piece(30, 50, 1, "backward"), Piece(50, 60, 1, "host")]


def test_a_step_that_begins_late_on_the_awaited_rank_has_what_that_rank_did_before() -> None:
    rows = reduced(rank_0_arrives=60, rank_1_arrives=90)
    rows[1][:3] = [span("step", 20, 110), span("checkpoint", 0, 20), span("forward", 20, 30)]

    assert path_of(rows)[:2] == [Piece(0, 20, 1, "checkpoint"), Piece(20, 30, 1, "forward")]


def test_unmatched_communication_is_unknown_and_not_guessed() -> None:
    rows = reduced(rank_0_arrives=60, rank_1_arrives=90)
    del rows[1][4:6]

    assert path_of(rows)[-2:] == [Piece(60, 100, 0, "unknown", "dp"), Piece(100, 120, 0, "optimizer")]


HOSTS = {0: "a", 1: "b"}


def test_arrivals_that_the_clocks_cannot_tell_apart_leave_the_path_where_it_is() -> None:
    assert path_of(reduced(rank_0_arrives=87, rank_1_arrives=90), residual_ns=4, nodes=HOSTS)[2:] == [
        Piece(30, 87, 0, "backward"),
        Piece(87, 90, 0, "unknown", "dp", uncertain=True),
        Piece(90, 100, 0, "transfer", "dp"),
        Piece(100, 120, 0, "optimizer"),
    ]


def test_a_transfer_between_hosts_that_is_shorter_than_the_residual_is_uncertain() -> None:
    rows = reduced(rank_0_arrives=60, rank_1_arrives=90)

    assert path_of(rows, residual_ns=11, nodes=HOSTS)[3] == Piece(90, 100, 0, "transfer", "dp", uncertain=True)
    assert path_of(rows, residual_ns=11)[3] == Piece(90, 100, 0, "transfer", "dp")  # one clock


def test_two_that_seem_to_wait_for_each_other_end_the_walk_of_neither() -> None:
    """Each stands until 30 for what the other one launches at 30, when it goes on itself: nobody was first."""
    one, other = collective("all_reduce", DP, 0, 10, 30, id=1), collective("all_reduce", PP, 0, 5, 30, id=2)
    rows = {
        0: [span("step", 0, 40), one, stall(one, 10, 30), {**other, "start": 30}],
        1: [span("step", 0, 40), {**one, "start": 30}, other, stall(other, 5, 30)],
    }

    assert path_of(rows) == [Piece(0, 5, 1, "host"), Piece(5, 30, 1, "unknown", "pp"), Piece(30, 40, 0, "host")]


def test_it_comes_back_to_a_rank_that_another_one_had_waited_for_until_then() -> None:
    first = [collective("all_reduce", DP, 0, 90, 100, id=1), collective("all_reduce", DP, 0, 30, 101, id=1)]
    second = [collective("all_reduce", DP, 1, 100, 110, id=2), collective("all_reduce", DP, 1, 101, 109, id=2)]
    rows = {
        0: [
            span("step", 0, 110),
            span("backward", 0, 90),
            first[0],
            stall(first[0], 90, 100),
            second[0],
            stall(second[0], 100, 110),
        ],
        1: [
            span("step", 0, 109),
            span("backward", 0, 30),
            first[1],
            stall(first[1], 30, 101),
            second[1],
            stall(second[1], 101, 109),
        ],
    }

    assert path_of(rows) == [
        Piece(0, 90, 0, "backward"),
        Piece(90, 101, 1, "transfer", "dp"),
        Piece(101, 110, 0, "transfer", "dp"),
    ]


def test_members_of_a_bracket_wait_for_whom_the_last_one_waits_for() -> None:
    """Rank 0 receives from 1 and from 2 in one bracket; 2 sends later. Its stall names the first member."""
    world = group("pp", 0, 1, 2)
    first = p2p("recv", world, 1, 0, 10, 60, id=1, op_in_seq=0)
    second = p2p("recv", world, 2, 0, 10, 60, id=2, op_in_seq=1)
    rows = {
        0: [span("step", 0, 70), first, second, stall(first, 10, 60), span("forward", 60, 70)],
        1: [span("step", 0, 30), span("forward", 0, 20), p2p("send", world, 0, 0, 20, 25, id=1)],
        2: [span("step", 0, 60), span("backward", 0, 50), p2p("send", world, 0, 0, 50, 60, id=1)],
    }
    run = make_run({rank: [{"step": 0, **row} for row in own] for rank, own in rows.items()}, [world])
    (path,) = paths_of(run)

    assert path.pieces == (
        Piece(0, 50, 2, "backward"),
        Piece(50, 60, 0, "transfer", "pp"),
        Piece(60, 70, 0, "forward"),
    )


EXACT = Job(dp=4, steps=3, microbatches=2, jitter=0.0, end_scatter_ns=0)


def shares(job: Job) -> dict[tuple[int, str, str], int]:
    run = synthesize(job).run
    sums = CriticalPath.of(paths_of(run, tuple(range(job.steps))))
    return {(one.rank, one.kind, one.role): one.ns for one in sums.shares}


def test_a_slow_rank_has_all_of_the_work() -> None:
    """The schedule says it: rank 2 computes twice as long, then all reduce, optimize and gather."""
    found = shares(replace(EXACT, faults=(Fault("slow-rank", (2,), 2.0),)))
    slow = {kind: ns for (rank, kind, _), ns in found.items() if rank == 2 and kind != "transfer"}

    assert slow["forward"] == 3 * 2 * 2 * EXACT.forward_ns
    assert slow["backward"] == 3 * 2 * 2 * EXACT.backward_ns
    assert slow["optimizer"] == 3 * 2 * EXACT.optimizer_ns
    assert slow["input"] == 3 * EXACT.data_ns
    assert not any(rank != 2 and kind != "transfer" for rank, kind, _ in found)


def test_input_that_comes_late_on_one_rank_is_on_the_path() -> None:
    found = shares(replace(EXACT, faults=(Fault("data", (1,), 30.0),)))

    assert found[1, "input", ""] == 3 * (EXACT.data_ns + 30_000_000)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 8), (8, 16)])
def test_the_path_of_1f1b_holds_m_plus_p_minus_1_forwards_and_backwards(stages: int, microbatches: int) -> None:
    """Durations of which no other sum makes the length of the step."""
    job = Job(
        pp=stages, layers=stages, microbatches=microbatches, steps=1, forward_ns=10_007, backward_ns=20_021,
        optimizer_ns=0, data_ns=0, jitter=0.0, end_scatter_ns=0, network=FREE,
    )  # fmt: skip
    found = shares(job)
    of_kind = {kind: sum(ns for key, ns in found.items() if key[1] == kind) for kind in ("forward", "backward")}

    on_path = microbatches + stages - 1
    assert of_kind == {"forward": on_path * 10_007, "backward": on_path * 20_021}


RANDOM = [
    Job(dp=3, steps=3, microbatches=2, jitter=0.2, seed=1, overlap_grad_reduce=True),
    Job(pp=4, dp=2, steps=2, microbatches=5, jitter=0.1, seed=2, network=Network()),
    Job(tp=2, pp=2, dp=2, steps=2, jitter=0.3, seed=3, microbatches=4, layers=4, missing=0.02),
    Job(pp=2, chunks=2, microbatches=4, steps=2, jitter=0.05, seed=4, faults=(Fault("gc", (1,), 5.0),)),
    Job(pp=3, layers=9, microbatches=4, steps=2, jitter=0.1, seed=5, schedule="zero-bubble", outliers=0.05),
]


@pytest.mark.parametrize("job", RANDOM)
def test_the_pieces_divide_every_step_exactly(job: Job) -> None:
    run = synthesize(job).run
    steps = tuple(range(job.steps))
    begins, ends = {}, {}
    for step in steps:
        rows = [
            (trace.spans, (trace.spans.kind == schema.STEP) & (trace.spans.step == step))
            for trace in run.ranks.values()
        ]
        begins[step] = min(int(spans.start[own].min()) for spans, own in rows)
        ends[step] = max(int(spans.end[own].max()) for spans, own in rows)

    paths = paths_of(run, steps, residual_ns=2_000)

    assert [path.step for path in paths] == list(steps)
    for path in paths:
        edges = [path.pieces[0].start, *(piece.end for piece in path.pieces)]
        assert [piece.start for piece in path.pieces] == edges[:-1]
        # Some ranks begin a step while others are in the one before, to which that time belongs.
        assert (edges[0], edges[-1]) == (max(begins[path.step], ends.get(path.step - 1, 0)), ends[path.step])
        assert all(piece.ns > 0 for piece in path.pieces)
    assert CriticalPath.of(paths).ns == ends[steps[-1]] - begins[0]


@pytest.mark.parametrize("job", RANDOM)
def test_the_order_of_rows_means_nothing(job: Job) -> None:
    run = synthesize(job).run
    random = np.random.default_rng(job.seed)
    shuffled = replace(
        run,
        ranks={
            rank: replace(trace, spans=trace.spans.take(random.permutation(len(trace.spans))))
            for rank, trace in reversed([*run.ranks.items()])
        },
    )
    steps = tuple(range(job.steps))

    assert paths_of(shuffled, steps) == paths_of(run, steps)


def test_the_critical_path_of_kernels_is_the_time_that_no_kernel_hides() -> None:
    """Two devices compute until 40 and 70; they reduce behind that, until 90, and compute on until 100."""
    rows = {}
    for rank, computes in enumerate([40, 70]):
        rows[rank] = [
            span("step", 0, 100),
            span("kernel", 0, computes, timing="kernel"),
            collective("all_reduce", DP, 0, computes - 10, 90, id=1, timing="kernel"),
            span("kernel", 90, 100, timing="kernel"),
        ]

    assert path_of(rows) == [
        Piece(0, 60, 1, "other compute"),
        Piece(60, 90, 0, "transfer", "dp"),
        Piece(90, 100, 0, "other compute"),
    ]


def test_a_rank_that_recorded_nothing_then_was_not_idle_but_unknown() -> None:
    rows = reduced(rank_0_arrives=60, rank_1_arrives=90)
    rows[1] = [span("step", 80, 110), *rows[1][4:]]

    assert path_of(rows)[:2] == [Piece(0, 80, 1, "unknown"), Piece(80, 90, 1, "host")]


def test_a_transfer_that_began_at_a_bound_is_uncertain() -> None:
    rows = reduced(rank_0_arrives=60, rank_1_arrives=90)
    rows[1][4]["start_exact"] = False

    assert path_of(rows)[3] == Piece(90, 100, 0, "transfer", "dp", uncertain=True)
    assert sum(piece.ns for piece in path_of(rows)) == 120


def test_a_transfer_whose_end_is_that_of_a_late_wait_is_no_longer_than_the_stall() -> None:
    rows = reduced(rank_0_arrives=60, rank_1_arrives=90)
    reduction = {**rows[0][4], "end_exact": False}
    rows[0][3:6] = [span("backward", 30, 98), reduction, stall(reduction, 98, 100)]

    assert path_of(rows)[-3:] == [
        Piece(30, 98, 0, "backward"),
        Piece(98, 100, 0, "transfer", "dp", uncertain=True),
        Piece(100, 120, 0, "optimizer"),
    ]
