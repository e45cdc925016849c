"""Several slow ranks of synthetic jobs: who is named, and what they cost together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.stragglers.search import find_stragglers
from commtrace.synth import Fault, Job, synthesize
from commtrace.trace.metadata import DeviceState
from tests.analysis.stragglers.judged_jobs import cost_ms_of, found, judged, made_with
from tests.findings.reading import ms, why_not


@pytest.mark.parametrize(
    ("faults", "ranks"),
    [
        (("slow-rank=1:1.5", "slow-rank=3:1.5"), {1, 3}),
        (("slow-rank=1:1.5", "slow-rank=3:1.4"), {1, 3}),
        (("slow-rank=1:1.3", "slow-rank=2:1.3", "slow-rank=3:1.3", "slow-rank=6:1.2"), {1, 2, 3, 6}),
        (tuple(f"slow-rank={rank}:1.2" for rank in (0, 1, 4, 7)), {0, 1, 4, 7}),
        (("slow-rank=2:1.05",), {2}),
    ],
)
def test_all_slow_ranks_are_named_with_what_they_cost_together(faults: Sequence[str], ranks: set[int]) -> None:
    findings, cost_ms = judged(faults)

    (verdict,) = findings.slow
    assert (set(verdict.ranks), verdict.cause) == (ranks, "compute")
    assert ms(verdict.cost_ns) == ms(findings.together_ns) == pytest.approx(cost_ms, rel=0.2, abs=1)


@pytest.mark.parametrize(
    ("fault", "cause", "steps", "once"),
    [
        ("checkpoint=2:8000@20:21", "checkpoint", 40, True),
        ("checkpoint=2:2000@9:40:10", "checkpoint", 40, True),
        ("evaluation=1:100", "evaluation", 12, False),
    ],
)
def test_one_rank_that_saves_or_evaluates_alone_is_named(fault: str, cause: str, steps: int, once: bool) -> None:
    findings, cost_ms = judged([fault], dp=4, steps=steps)

    (verdict,) = findings.slow
    assert (verdict.ranks, verdict.cause) == ((int(fault.partition("=")[2][0]),), cause)
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.2)
    assert bool(verdict.occurrence) == once


@pytest.mark.parametrize("ranks", [(3,), (2, 5)])
@pytest.mark.parametrize(
    ("fault", "cause", "phase"),
    [("slow-optimizer={}:6", "optimizer", "optimizer step"), ("slow-forward={}:1.5", "forward", "forward")],
)
def test_the_phase_is_named_in_which_a_rank_is_slow(fault: str, cause: str, phase: str, ranks: Sequence[int]) -> None:
    findings, cost_ms = judged([fault.format(",".join(map(str, ranks)))])

    (verdict,) = findings.slow
    assert (set(verdict.ranks), verdict.cause) == (set(ranks), cause)
    assert f"Only the {phase} takes longer" in verdict.evidence
    assert "peers" not in verdict.evidence or f"per {phase} (peers" in verdict.evidence
    assert verdict.advice.startswith(f"Profile the {phase} here and on another rank")
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.2)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("slow-forward=3:4", "forward"), ("slow-rank=3:4", "compute"), ("slow-forward=3:1.2", "compute")],
)
def test_the_phase_that_is_most_of_the_work_is_named_if_a_slow_device_would_slow_the_others_far_more(
    fault: str, cause: str
) -> None:
    findings = found([fault], forward_ns=24_000_000, backward_ns=3_000_000, optimizer_ns=1_000_000)

    (verdict,) = findings.slow
    assert (verdict.ranks, verdict.cause) == ((3,), cause)


def test_a_slow_device_is_no_slow_phase_even_if_nearly_all_work_is_in_one_phase() -> None:
    findings = found(["slow-rank=3:4"], forward_ns=60_000_000, backward_ns=2_000_000, optimizer_ns=1_000_000)

    (verdict,) = findings.slow
    assert (verdict.ranks, verdict.cause) == ((3,), "compute")


@pytest.mark.parametrize("every", [3, 5, 10])
def test_a_rank_whose_work_takes_far_longer_in_some_steps_is_named_with_these(every: int) -> None:
    findings, cost_ms = judged([f"slow-rank=4:2@3:60:{every}"], steps=60)

    (verdict,) = findings.slow
    assert (verdict.ranks, verdict.cause) == ((4,), "compute")
    assert verdict.evidence.endswith(f"in {len(range(3, 60, every))} of 59 steps.")
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.2)
    assert "See what happens in those steps" in verdict.advice


def test_work_that_takes_far_longer_once_on_a_rank_is_chance() -> None:
    struck = ((4, 20), (2, 30), (4, 41), (7, 55))
    findings = found([f"slow-rank={rank}:4@{step}:{step + 1}" for rank, step in struck], steps=60)

    assert findings.slow == ()


def test_stalls_that_strike_any_rank_by_chance_name_none() -> None:
    struck = ((2, 5), (2, 17), (2, 31), (0, 9), (3, 12), (5, 22), (5, 36), (6, 27))
    findings = found([f"data={rank}:300@{step}:{step + 1}" for rank, step in struck], steps=40)

    assert findings.slow == ()


def test_stalls_that_strike_one_rank_again_and_again_name_it() -> None:
    findings, cost_ms = judged(["data=2:300@5:40:7"], steps=40)

    (verdict,) = findings.slow
    assert (verdict.ranks, verdict.cause) == ((2,), "data")
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.2)


def test_a_device_whose_clock_is_held_down_is_the_cause() -> None:
    made = synthesize(Job(dp=4, steps=12, jitter=0.02, faults=(Fault.parse("slow-rank=2:1.5"),)))
    states = {
        rank: (DeviceState(0, clock_mhz=1980), DeviceState(1, clock_mhz=1980))
        if rank != 2
        else (DeviceState(0, clock_mhz=1320, slowdowns=("thermal slowdown",), temperature_c=92),) * 2
        for rank in range(4)
    }
    ranks = {rank: replace(trace, device_states=states[rank]) for rank, trace in made.run.ranks.items()}
    analysis = analyse(replace(made.run, ranks=ranks))
    (verdict,) = find_stragglers(analysis.run, analysis.matches).slow

    assert (verdict.ranks, verdict.cause) == ((2,), "throttled_device")
    assert verdict.evidence.endswith(
        "Its device: 1320 MHz (the others 1980 MHz), held down by thermal slowdown in 2 of 2 readings; 92 °C."
    )
    assert "cooling" in verdict.advice


def test_readings_of_a_device_are_those_of_the_steps_in_which_its_rank_is_slow() -> None:
    made = synthesize(Job(dp=4, steps=60, jitter=0.02, faults=(Fault.parse("slow-rank=2:1.5@45:60"),)))
    of_steps = made.truth["steps"]

    def states(rank: int) -> tuple[DeviceState, ...]:
        held = {"clock_mhz": 1320, "slowdowns": ("power brake",)} if rank == 2 else {"clock_mhz": 1980}
        at = [(of_steps[step]["start_ns"], {"clock_mhz": 1980} if step < 45 else held) for step in range(1, 60)]
        return tuple(DeviceState(at_ns, **reading) for at_ns, reading in at)

    ranks = {rank: replace(trace, device_states=states(rank)) for rank, trace in made.run.ranks.items()}
    analysis = analyse(replace(made.run, ranks=ranks))
    (verdict,) = find_stragglers(analysis.run, analysis.matches).slow

    assert (verdict.ranks, verdict.cause) == ((2,), "throttled_device")
    assert "1320 MHz (the others 1980 MHz), held down by power brake in 1" in verdict.evidence


@pytest.mark.parametrize("ranks", [(1,), (1, 3)])
def test_half_of_the_ranks_are_compared_with_the_fastest(ranks: Sequence[int]) -> None:
    findings, cost_ms = judged([f"slow-rank={rank}:1.5" for rank in ranks], dp=2 * len(ranks))

    (verdict,) = findings.slow
    assert set(verdict.ranks) == set(ranks)
    assert "than the fastest ranks that do the same work" in verdict.evidence
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.2)


@pytest.mark.parametrize(("hosts", "slow"), [(2, (1,)), (4, (0, 1, 3)), (4, (2,))])
def test_slow_hosts_are_named_also_where_they_are_the_larger_half(hosts: int, slow: Sequence[int]) -> None:
    faults = [f"slow-host={host}:1.3" for host in slow]
    findings, cost_ms = judged(faults, dp=4 * hosts, gpus_per_host=4, steps=12)

    named = {(verdict.place, verdict.cause, tuple(sorted(verdict.ranks))) for verdict in findings.slow}
    assert named == {("host", "compute", tuple(range(4 * host, 4 * host + 4))) for host in slow}
    assert ms(findings.together_ns) == pytest.approx(cost_ms, rel=0.2)


def test_a_slow_tensor_parallel_group_is_one_verdict() -> None:
    findings, cost_ms = judged([f"slow-rank={rank}:1.3" for rank in (2, 3)], tp=2, dp=4, steps=12)

    (verdict,) = findings.slow
    assert (verdict.place, verdict.cause, verdict.ranks) == ("tensor_group", "compute", (2, 3))
    assert verdict.who.startswith("tensor-parallel group of ranks 2–3 on ")
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.2)


def test_ranks_with_different_causes_have_a_verdict_each() -> None:
    findings, cost_ms = judged(("slow-rank=1:1.5", "data=5:40"))

    assert {(verdict.ranks, verdict.cause) for verdict in findings.slow} == {((1,), "compute"), ((5,), "data")}
    assert ms(findings.together_ns) == pytest.approx(cost_ms, rel=0.2)


def test_two_ranks_that_wait_for_input_are_both_named() -> None:
    findings, cost_ms = judged(("data=2:25", "data=6:25"))

    (verdict,) = findings.slow
    assert (set(verdict.ranks), verdict.cause) == ({2, 6}, "data")
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.2)


@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_named_in_a_clean_run(seed: int) -> None:
    ranks = (4, 8, 16)[seed % 3]
    findings = found((), seed=seed, dp=ranks, steps=(9, 30)[seed % 2], jitter=0.01 * (1 + seed))

    assert findings.slow == ()
    # Sixteen ranks are on two hosts, and wait for the network two thirds of the time.
    assert [said.split(" take ")[0] for said in why_not(findings.findings)] == ["Transfers between hosts"] * (
        ranks == 16
    )


def test_a_rank_that_is_slow_for_most_of_a_short_run_costs_what_a_step_loses_in_the_mean() -> None:
    findings, cost_ms = judged(["slow-rank=2:1.5@6:24"], dp=4, steps=24)

    (verdict,) = findings.slow
    assert verdict.ranks == (2,)
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.1)


def test_a_rank_whose_host_launches_late_is_named_with_all_of_its_pauses() -> None:
    findings, cost_ms = judged(["late-launch=1:60"], dp=4, steps=12)

    (verdict,) = findings.slow
    assert (verdict.ranks, verdict.cause) == ((1,), "late_launch")
    assert " more of it before its phases, in no span: " in verdict.evidence
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.1)


LARGE_MESSAGES = {
    "pp": 4, "dp": 2, "layers": 4, "microbatches": 8, "steps": 12, "jitter": 0.0, "gpus_per_host": 2,
    "sequence": 16_384, "forward_ns": 15_000_000, "backward_ns": 30_000_000,
}  # fmt: skip


def test_a_link_between_others_is_named_beside_a_slow_rank() -> None:
    findings, cost_ms = judged(["slow-rank=7:1.3", "slow-link=0-2:4"], **LARGE_MESSAGES)

    rank, link = findings.slow
    assert (rank.ranks, rank.cause) == ((7,), "compute")
    assert (link.ranks, link.cause) == ((0, 2), "communication")
    assert ms(findings.together_ns) == pytest.approx(cost_ms, rel=0.2)
    alone = cost_ms_of(made_with(["slow-rank=7:1.3"], **LARGE_MESSAGES))
    assert ms(rank.cost_ns) == pytest.approx(alone, rel=0.2)


def test_the_cost_of_a_slow_rank_assumes_a_slow_stage_mended() -> None:
    findings, cost_ms = judged(["uneven-stage=1:1.5", "slow-rank=6:1.2"], **LARGE_MESSAGES)

    stage, rank = findings.slow
    assert (stage.cause, rank.ranks) == ("stage_imbalance", (6,))
    assert ms(findings.together_ns) == pytest.approx(cost_ms, rel=0.2)
    alone = cost_ms_of(made_with(["slow-rank=6:1.2"], **LARGE_MESSAGES))
    assert ms(rank.cost_ns) == pytest.approx(alone, rel=0.2)


def test_the_network_of_a_host_is_named_though_most_links_end_there() -> None:
    findings, cost_ms = judged(["slow-network=2:5"], **LARGE_MESSAGES)

    (verdict,) = findings.slow
    assert (verdict.who, verdict.ranks) == ("network of host node2 (ranks 4–5)", (4, 5))
    assert ms(verdict.cost_ns) == pytest.approx(cost_ms, rel=0.2)


def test_a_slow_rank_and_an_uneven_stage_that_hide_each_other_are_both_named() -> None:
    """Alone, each costs next to nothing: the others wait for the other one."""
    faults = ("uneven-stage=0:1.25", "slow-rank=7:1.2")
    job = {"pp": 4, "dp": 3, "layers": 4, "schedule": "zero-bubble"}
    findings = found(faults, **job, microbatches=8, steps=20)

    assert {(verdict.place, verdict.ranks) for verdict in findings.slow} == {("stage", (0, 1, 2)), ("ranks", (7,))}


def test_ranks_that_are_slow_in_different_phases_are_told_apart() -> None:
    findings = found(("slow-forward=2:1.5", "slow-backward=5:1.3"), microbatches=2)

    (verdict,) = findings.slow
    assert (set(verdict.ranks), verdict.cause) == ({2, 5}, "compute")
    assert "on rank 2 only the forward, on rank 5 only the backward." in verdict.evidence


def test_ranks_that_launch_late_are_said_to_do_so() -> None:
    findings = found(("late-launch=2,7:40",), microbatches=2)

    (verdict,) = findings.slow
    assert (verdict.ranks, verdict.cause) == ((2, 7), "late_launch")
    assert "most of it before their phases, in no span (medians over steps)." in verdict.evidence
