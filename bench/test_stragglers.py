"""The bench that injects faults knows what it has injected, and judges what is said of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from bench import straggler_cases
from bench import stragglers as bench
from commtrace.findings.causes import format_cause
from commtrace.synth import synthesize


def test_there_are_at_least_80_kinds_of_faults() -> None:
    titles = [case.title for case in straggler_cases.cases()]

    assert len(set(titles)) == len(titles) >= 80
    assert all(case.job.faults for case in straggler_cases.cases())


def test_a_slow_rank_is_named_both_ways_with_its_cost() -> None:
    (case,) = (one for one in straggler_cases.cases() if one.title == "one rank: 20 %, jitter 0%")
    judged = bench.judge(case)

    # Four microbatches of 120 ms and 10 ms of optimizer, a fifth longer.
    assert (judged.ranks, round(judged.cost_ms, 1)) == (frozenset({1}), 98.0)
    for answer in (judged.offline, judged.live):
        assert (answer.hit, answer.cause, answer.cost_is_right, answer.false_alarms) == (True, "compute", True, 0)
    assert (
        judged.live.seconds == 8.0
    )  # the job begins at second 1; windows end at 4 and 8, and are joined a second later


def test_the_truth_about_a_fault_that_moves() -> None:
    job = straggler_cases.with_faults(
        straggler_cases.DP4, *straggler_cases.moving((3, 0), 5, 1.5), steps=15, jitter=0.0
    )
    truth = bench.Truth(synthesize(job))
    first, second = truth.stretches

    assert [(first.steps, first.ranks), (second.steps, second.ranks)] == [
        (range(5), frozenset({3})),
        (range(5, 10), frozenset({0})),
    ]
    assert first.end == pytest.approx(second.begin, abs=1e-3)
    # Five of 15 steps are half as long again in 4 · 120 ms of work, and 5 ms in the optimizer; five others likewise.
    assert truth.cost_ms == pytest.approx(245 * 10 / 15, abs=0.1)
    assert truth.cost_of_ms(frozenset({3})) == pytest.approx(245 * 5 / 15, abs=0.1)
    assert truth.cost_of_ms(frozenset({3}), first) == pytest.approx(245, abs=0.1)


CASES = [
    ("phase: forward 50 %", "rank 4 on node0", "forward"),
    ("data: 100 ms, of a host", "host node1 (ranks 4–7)", "data"),
    ("stage: 20% more, of 4", "stage 1 (ranks 2–3)", "stage_imbalance"),
    ("link: one direction", "link from rank 2 on node1 to rank 4 on node2", "communication"),
    ("sequences: scatter 30%", "changing ranks", "sequence_length_imbalance"),
    ("gc: 500 ms, every 10th step", "rank 2 on node0", "gc"),
    ("checkpoint: 8 s, once", "rank 2 on node0", "checkpoint"),
    ("evaluation: 100 ms, every step", "rank 0 on node0", "evaluation"),
]
MORE_CASES = [
    ("one rank: 10 %, 4 stages", "rank 3 on node0", "compute"),
    ("several: two of 8, 50 and 40 %", "ranks 1, 3 on node0", "compute"),
    ("half: half of 8", "ranks 0–3 on node0", "compute"),
    ("tensor group: 20 %", "tensor-parallel group of ranks 4–7 on node0", "compute"),
    ("host: 20 %, one of four", "host node2 (ranks 8–11)", "compute"),
    ("stage: 20 % more, the first three of 4, late", "stages 0–2 (ranks 0–5)", "stage_imbalance"),
    ("link: all-reduce between two hosts, late", "group of ranks 0–7", "communication"),
    (
        "one microbatch: of one replica, from step 30 on",
        "data-parallel replica 1 (ranks 1, 3, 5, 7)",
        "sequence_length_imbalance",
    ),
]


@pytest.mark.parametrize(
    ("title", "who", "cause"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE_CASES)],
)
def test_the_monitor_names_what_a_recording_names(title: str, who: str, cause: str) -> None:
    (case,) = (one for one in straggler_cases.cases() if one.title == title)
    judged = bench.judge(case)
    answer = judged.live

    assert judged.same_name
    assert answer.names == {(who, cause)}
    assert (answer.hit, answer.cause, answer.cost_is_right, answer.false_alarms) == (True, cause, True, 0)
    assert f"Straggler: {who}, {format_cause(cause)}: " in answer.sentences[0]


def test_a_single_event_is_reported_as_such() -> None:
    (case,) = (one for one in straggler_cases.cases() if one.title == "checkpoint: 8 s, once")
    made = synthesize(case.job)
    found, over = bench.live(case, bench.Truth(made), made.run).sentences

    said = r"checkpoint: once, in step 30: 8.0 s \([\d.]+%\), from \d\d:\d\d:\d\d UTC on; on average it costs "
    assert re.search(said, found)
    assert "Rank 2 on node0 goes on as its peers do (checkpoint) at 00:00:" in over
    assert over.endswith(" UTC: once, in step 30: 8.0 s.")


@pytest.mark.parametrize(
    ("named", "count"),
    [
        ([], 0),
        ([{1, 3}], 1),
        ([{1}, {3}, {5}], 2),
        ([{1}, {5}, {3}], 0),
        ([{1, 5}, {3}], 0),
        ([{1}], 0),
        ([set(), {1, 3}], 0),
    ],
)
def test_a_hit_is_all_of_the_guilty_before_anybody_else(named: list[set[int]], count: int) -> None:
    said = [bench.Named(frozenset(ranks), "", "ranks", "compute", 1.0, "") for ranks in named]

    assert bench.count_until_found(("compute",), frozenset({1, 3}), said) == count


def test_ranks_are_read_from_what_is_said() -> None:
    assert bench.ranks_in("rank 3 on node0", 3) == {3}
    assert bench.ranks_in("host node1 (ranks 4–6, 9)", 4) == {4, 5, 6, 9}
    assert bench.ranks_in("changing ranks", -1) == set()


def test_a_clean_run_is_one_in_which_nobody_is_named() -> None:
    judged = bench.judge(straggler_cases.Case("clean", "a test", replace(straggler_cases.DP4, steps=30), causes=()))

    assert [answer.hit for answer in (judged.offline, judged.live)] == [True, True]
