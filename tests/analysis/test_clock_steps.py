"""Clocks of many hosts, some of them stepped in mid-run: recovered within 20 µs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from commtrace.analysis.align import COLLECTIVE_ENDS, align, apply
from commtrace.analysis.clock_observations import Observations, observe
from commtrace.analysis.clock_steps import ClockStep, find_steps, split_at
from commtrace.synth import Job, synthesize
from commtrace.synth import random_clocks as synthetic_clocks
from commtrace.trace.run import Run
from commtrace.trace.spans import Spans
from tests.analysis.clock_jobs import MICROSECOND, MILLISECOND, SECOND, ClockJob, TrueClock

CLOSE_NS = 20 * MICROSECOND


def random_clocks(count: int, seed: int) -> list[TrueClock]:
    random = np.random.default_rng(seed)
    return [TrueClock(int(random.uniform(-10, 10) * SECOND), float(random.uniform(-100, 100))) for _ in range(count)]


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(8, 1), (2, 8), (16, 4), (64, 8)])
def test_offsets_and_drifts_of_8_to_512_ranks_are_recovered(hosts: int, ranks_per_host: int) -> None:
    job = ClockJob(random_clocks(hosts, seed=hosts), ranks_per_host, seconds=120, seed=hosts)
    assert np.quantile(job.errors_ns(job.run()), 0.99) < CLOSE_NS


@pytest.mark.parametrize("stepped", [0, 1, 3, 7])
@pytest.mark.parametrize("size_ns", [10 * SECOND, -5 * SECOND, 40 * MILLISECOND, -30 * MILLISECOND, 200 * MICROSECOND])
def test_a_clock_that_was_stepped_is_followed(stepped: int, size_ns: int) -> None:
    clocks = random_clocks(8, seed=stepped)
    clocks[stepped] = TrueClock(clocks[stepped].offset_ns, clocks[stepped].drift_ppm, 110 * SECOND, size_ns)
    job = ClockJob(clocks, seed=stepped)
    run = job.run()
    alignment = align(run)
    later = {clock.host: clock.later for clock in alignment.hosts if clock.later.parts}
    assert list(later) == [f"host{stepped:04}"]
    (begin,) = later[f"host{stepped:04}"].begins
    around = clocks[stepped].read(np.array([109, 110, 111]) * SECOND - np.array([0, 1, 0]))
    assert min(around) <= begin <= max(around)
    assert np.quantile(job.errors_ns(run), 0.99) < CLOSE_NS


@pytest.mark.parametrize(
    ("jumps", "wrong"),
    [
        ({1: (-2.0, 5.0)}, 0.0),  # shows readings of eleven steps twice
        ({1: (-0.05, 5.0)}, 0.003),  # less than a step: in the one in which it happened nobody can tell
        ({0: (-1.0, 4.0), 3: (3.0, 6.0)}, 0.0),
    ],
)
def test_what_a_clock_showed_twice_is_told_apart_by_the_steps_of_training(
    jumps: dict[int, tuple[float, float]], wrong: float
) -> None:
    """Row by row: the very times that the job would have recorded had its clocks been perfect."""
    job = Job(pp=2, dp=4, microbatches=4, steps=120, gpus_per_host=2, seed=4)
    clocks = dict(synthetic_clocks(job.hosts, wall_error_ns=10 * SECOND, drift_ppm=100, seed=4))
    for host, (seconds, at) in jumps.items():
        step_at_ns = job.start_ns + round(at * SECOND)
        clocks[host] = replace(clocks[host], step_ns=round(seconds * SECOND), step_at_ns=step_at_ns)
    run = synthesize(replace(job, clocks=clocks)).run
    perfect = synthesize(job).run

    aligned = apply(run, align(run))

    assert all((np.diff(trace.spans.start) >= 0).all() for trace in aligned.ranks.values())
    unmoved = next(host for host in range(job.hosts) if host not in jumps) * job.gpus_per_host
    at, ahead = _ahead(aligned, perfect, unmoved)
    line = np.polyfit(at - at.mean(), ahead - ahead[0], 1)  # the reference clock has a drift of its own
    errors = []
    for rank in run.ranks:
        own_at, own_ahead = _ahead(aligned, perfect, rank)
        errors.append(np.abs(own_ahead - ahead[0] - np.polyval(line, own_at - at.mean())))
    assert np.mean(np.concatenate(errors) > CLOSE_NS) <= wrong


def _ahead(aligned: Run, perfect: Run, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """When each row of a rank truly began, and by how much later it is said to have begun; seconds and ns."""
    ours, true = (_in_order(run.ranks[rank].spans) for run in (aligned, perfect))
    return true.start / SECOND, (ours.start - true.start).astype(np.float64)


def _in_order(spans: Spans) -> Spans:
    """By what the rows are, whenever they were."""
    keys = (spans.chunk, spans.seq, spans.microbatch, spans.step, spans.name, spans.kind, spans.id)
    return spans.take(np.lexsort(keys))


def test_of_two_hosts_the_other_than_the_reference_is_taken_to_have_been_stepped() -> None:
    job = ClockJob([TrueClock(), TrueClock(3 * SECOND, 50, 200 * SECOND, 5 * MILLISECOND)], ranks_per_host=4)
    run = job.run()
    alignment = align(run)
    assert [bool(clock.later.parts) for clock in alignment.hosts] == [False, True]
    assert np.quantile(job.errors_ns(run), 0.99) < CLOSE_NS


def test_two_steps_of_different_hosts_are_two() -> None:
    clocks = random_clocks(6, seed=6)
    clocks[2] = TrueClock(clocks[2].offset_ns, clocks[2].drift_ppm, 100 * SECOND, 2 * SECOND)
    clocks[4] = TrueClock(clocks[4].offset_ns, clocks[4].drift_ppm, 220 * SECOND, 700 * MICROSECOND)
    job = ClockJob(clocks)
    run = job.run()
    assert {clock.host for clock in align(run).hosts if clock.later.parts} == {"host0002", "host0004"}
    assert np.quantile(job.errors_ns(run), 0.99) < CLOSE_NS


@pytest.mark.parametrize("seed", range(20))
def test_clocks_that_were_not_stepped_are_left_whole(seed: int) -> None:
    job = ClockJob(random_clocks(5, seed), seed=seed, outliers=0.03, seconds=200)
    run = job.run()
    assert find_steps(observe(run, sorted({trace.clock_key for trace in run.ranks.values()}))) == []


def test_ends_that_are_seen_late_by_every_other_operation_are_no_steps() -> None:
    """Operations of one kind leave host b 300 µs later, and take turns with others."""
    count = 400
    true = np.arange(count) * SECOND
    zeros = np.zeros(count, np.int64)
    for turn in (2, 5, 11):
        seen = true + 300 * MICROSECOND * (np.arange(count) // turn % 2)
        assert find_steps(Observations(zeros, zeros + 1, true, seen)) == []


def test_a_clock_that_wanders_is_not_cut() -> None:
    """A crystal that warms up: 50 µs over ten minutes."""
    true = np.arange(1200) * SECOND // 2
    wandering = true + np.rint(50 * MICROSECOND * np.sin(true / (600 * SECOND) * np.pi)).astype(np.int64)
    noise = np.random.default_rng(0).normal(0, 5 * MICROSECOND, (2, 1200)).astype(np.int64)
    zeros = np.zeros(1200, np.int64)
    assert find_steps(Observations(zeros, zeros + 1, true + noise[0], wandering + noise[1])) == []


def test_too_few_readings_show_no_step() -> None:
    times = np.arange(20) * SECOND
    stepped = times + np.where(times > 10 * SECOND, SECOND, 0)
    zeros = np.zeros(20, np.int64)
    assert find_steps(Observations(zeros, zeros + 1, times, stepped)) == []


def test_a_split_gives_later_readings_a_number_of_their_own() -> None:
    times = np.array([0, 10, 20, 30])
    zeros = np.zeros(4, np.int64)
    observations = Observations(zeros, zeros + 1, times, times + 5)
    parts, owner = split_at(observations, [ClockStep(1, 17), ClockStep(1, 30)], 2)
    assert (parts.clock_a.tolist(), parts.clock_b.tolist(), owner) == ([0, 0, 0, 0], [1, 1, 2, 3], [0, 1, 1, 1])


def test_spans_on_a_stepped_clock_are_moved_by_their_own_part() -> None:
    clocks = [TrueClock(), TrueClock(), TrueClock(0, 0.0, 150 * SECOND, 4 * SECOND)]
    job = ClockJob(clocks, jitter_ns=0, outliers=0.0, missing=0.0)
    run = job.run()
    aligned = apply(run, align(run))
    assert align(run).method == COLLECTIVE_ENDS
    for rank in (1, 2):
        np.testing.assert_allclose(aligned.ranks[rank].spans.end, aligned.ranks[0].spans.end, atol=5)
