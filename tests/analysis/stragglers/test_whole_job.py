"""Causes that are not one slow worker: an uneven stage, uneven sequences, a slow link."""

from __future__ import annotations

import numpy as np
import pytest

from commtrace.analysis.matching.match import match
from commtrace.analysis.stragglers.search import Judgement, find_stragglers
from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, p2p, span, stall
from tests.findings.reading import ms, why_not
from tests.pipeline_factory import PipelineJob

MS = 1_000_000
STEPS, MICROBATCHES = 10, 8


def findings_of(run: Run) -> Judgement:
    return find_stragglers(run, match(run))


def test_an_uneven_stage() -> None:
    job = PipelineJob(2, 8, data_parallel=2, steps=9, extra_forward_ns={2: 3 * MS, 3: 3 * MS})

    (verdict,) = findings_of(job.run()).slow

    assert (verdict.rank, verdict.cause) == (2, "stage_imbalance")
    assert (
        "works at least 48.0 ms per step in forward and backward, 100% more than the other stage " in verdict.evidence
    )
    # 1 + 8·6 + 2 = 51; with 1.5 per forward and 1.5 … per backward, 3 in all on both stages: 27.
    assert ms(verdict.cost_ns) == pytest.approx(51 - 27, abs=1)


def test_the_last_of_two_stages_may_do_more_work() -> None:
    job = PipelineJob(2, 8, data_parallel=2, steps=9, extra_forward_ns={2: MS, 3: MS})
    findings = findings_of(job.run())

    assert findings.slow == ()
    assert why_not(findings.findings) == (
        "The last of two stages works 33% longer than the first (32.0 against 24.0 ms per step): either its output "
        "layer and loss take that, or it has too many layers. A healthy run (--baseline RUN) decides.",
    )


def test_the_first_of_two_stages_has_no_reason_to_do_more_work() -> None:
    job = PipelineJob(2, 8, data_parallel=2, steps=9, extra_forward_ns={0: MS, 1: MS})

    (verdict,) = findings_of(job.run()).slow

    assert (verdict.who, verdict.cause) == ("stage 0 (ranks 0–1)", "stage_imbalance")
    assert "33% more than the other stage (24.0 ms" in verdict.evidence


def test_sequences_of_different_length_that_move_between_ranks() -> None:
    (verdict,) = findings_of(_data_parallel_run(_lengths(backward_follows_forward=True))).slow

    assert (verdict.rank, verdict.host, verdict.cause) == (-1, "", "sequence_length_imbalance")
    assert "(rank correlation 1.00)" in verdict.evidence


def test_uneven_sequences_on_a_machine_that_holds_up_single_microbatches() -> None:
    lengths = _lengths(backward_follows_forward=True)
    lengths[0][::5, 5, 0] += 30
    lengths[1][1::5, 2, 1] += 40

    (verdict,) = findings_of(_data_parallel_run(lengths)).slow

    assert (verdict.rank, verdict.cause) == (-1, "sequence_length_imbalance")


def test_single_long_microbatches_on_changing_ranks() -> None:
    """All others scatter by 2 %, so that a correlation over all of them tells nothing."""
    random = np.random.default_rng(3)
    lengths = {rank: 10 * (1 + 0.02 * random.standard_normal((STEPS, MICROBATCHES, 2))) for rank in range(2)}
    for step in range(STEPS):
        lengths[int(random.integers(2))][step, int(random.integers(MICROBATCHES))] *= 3

    (verdict,) = findings_of(_data_parallel_run(lengths)).slow

    assert (verdict.rank, verdict.cause) == (-1, "sequence_length_imbalance")
    assert "(so are 100% of those that take half as long again as usual)" in verdict.evidence
    # Each step waits for one rank that takes 2 * 20 ms longer; shared evenly by two ranks that would be half of it.
    assert ms(verdict.cost_ns) == pytest.approx(20, rel=0.1)


def test_single_forwards_that_the_machine_holds_up_are_no_long_microbatches() -> None:
    random = np.random.default_rng(3)
    lengths = {rank: 10 * (1 + 0.02 * random.standard_normal((STEPS, MICROBATCHES, 2))) for rank in range(2)}
    for step in range(STEPS):
        lengths[int(random.integers(2))][step, int(random.integers(MICROBATCHES)), step % 2] *= 3

    assert findings_of(_data_parallel_run(lengths)).slow == ()


def test_durations_that_vary_without_reason_have_no_verdict() -> None:
    assert findings_of(_data_parallel_run(_lengths(backward_follows_forward=False))).slow == ()


def test_a_slow_link_whose_end_is_known() -> None:
    findings = findings_of(_linked_run(slow_pairs=((1, 3), (0, 1))))

    (verdict,) = findings.slow
    assert (verdict.rank, verdict.cause) == (1, "communication")
    assert "take up to 5.0 times as long" in verdict.evidence
    # Ten messages to the next stage and ten all-reduces, 4 ms more each.
    assert ms(verdict.cost_ns) == pytest.approx(80)


def test_a_slow_link_is_named_with_both_of_its_ends() -> None:
    findings = findings_of(_linked_run(slow_pairs=((1, 3),)))

    (verdict,) = findings.slow
    assert (verdict.ranks, verdict.cause) == ((1, 3), "communication")
    assert verdict.who == "link between rank 1 on node0 and rank 3 on node0"  # nothing passes in the other direction
    assert ms(verdict.cost_ns) == pytest.approx(40)


def test_links_that_are_alike() -> None:
    findings = findings_of(_linked_run(slow_pairs=()))

    assert (findings.slow, why_not(findings.findings)) == ((), ())


def _lengths(*, backward_follows_forward: bool) -> dict[int, np.ndarray]:
    """By rank, forward and backward of each step and microbatch, ms: the same in total over the run."""
    random = np.random.default_rng(1)
    forward = np.tile([1, 2, 4, 1, 8, 1, 2, 5], (STEPS, 1))
    lengths = {}
    for rank in range(2):
        own = np.stack([random.permutation(row) for row in forward])
        # In every other step a rank has the longer sequences.
        own = own * (1 + 0.4 * (-1.0) ** (np.arange(STEPS) + rank))[:, None]
        other = own if backward_follows_forward else np.stack([random.permutation(row) for row in own])
        lengths[rank] = np.stack([own, 2 * other], axis=2)
    return lengths


def _data_parallel_run(lengths: dict[int, np.ndarray]) -> Run:
    """Two replicas that compute microbatches of these lengths and meet at the end of each step."""
    world = group("dp", 0, 1)
    rows: dict[int, list[Row]] = {0: [], 1: []}
    now = 0
    for step in range(STEPS):
        busy = {}
        for rank, own in lengths.items():
            at = now
            for microbatch, phases in enumerate((own[step] * MS).astype(int).tolist()):
                for kind, duration in zip(("forward", "backward"), phases, strict=True):
                    where = {"step": step, "microbatch": microbatch, "chunk": 0, "stage": 0}
                    rows[rank].append(span(kind, at, at + duration, **where))
                    at += duration
            busy[rank] = at
        end = max(busy.values()) + MS
        for rank, at in busy.items():
            reduced = collective("all_reduce", world, step, at, end, id=step, step=step)
            rows[rank] += [reduced, stall(reduced, at, end), span("step", now, end, step=step)]
        now = end
    return make_run(rows, [world], coordinates=lambda rank: {"dp": rank})


def _linked_run(slow_pairs: tuple[tuple[int, int], ...]) -> Run:
    """Two stages of two replicas: rank + 2 is the next stage. Transfers take 1 ms, 5 ms between slow pairs."""
    rows: dict[int, list[Row]] = {rank: [] for rank in range(4)}
    now = dict.fromkeys(rows, 0)
    ids = iter(range(1, 10_000))
    pipelines = [group("pp", 0, 2), group("pp", 1, 3)]
    replicas = [group("dp", 0, 1), group("dp", 2, 3)]

    def exchange(pair: tuple[int, int], names: tuple[str, str], where: Row, step: int, seq: int) -> None:
        end = max(now[rank] for rank in pair) + (5 if pair in slow_pairs else 1) * MS
        for rank, name, peer in zip(pair, names, reversed(pair), strict=True):
            columns = {"id": next(ids), "step": step}
            if name == "all_reduce":
                row = collective(name, where["group"], seq, now[rank], end, **columns)
            else:
                row = p2p(name, where["group"], peer, seq, now[rank], end, **columns)
            rows[rank] += [row, stall(row, now[rank], end)]
            now[rank] = end

    for step in range(STEPS):
        begins = dict(now)
        for number in range(10):
            for rank in rows:
                where = {"step": step, "microbatch": number, "chunk": 0, "stage": rank // 2}
                rows[rank] += [
                    span("forward", now[rank], now[rank] + MS, **where),
                    span("backward", now[rank] + MS, now[rank] + 2 * MS, **where),
                ]
                now[rank] += 2 * MS
            seq = step * 10 + number
            for pipeline in pipelines:
                exchange((pipeline.ranks[0], pipeline.ranks[1]), ("send", "recv"), {"group": pipeline}, step, seq)
            for replica in replicas:
                pair = (replica.ranks[0], replica.ranks[1])
                exchange(pair, ("all_reduce", "all_reduce"), {"group": replica}, step, seq)
        for rank, begin in begins.items():
            rows[rank].append(span("step", begin, now[rank], step=step))
    return make_run(rows, [*pipelines, *replicas], coordinates=lambda rank: {"pp": rank // 2, "dp": rank % 2})
