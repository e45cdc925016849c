"""Who is named, for what, at which price; and who is not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.engines import on_gpu
from commtrace.analysis.matched import of_ranks
from commtrace.analysis.matching.match import match
from commtrace.analysis.stragglers.search import Judgement, find_stragglers
from commtrace.trace.run import Run
from tests.analysis.stragglers.judged_jobs import found
from tests.factory import Row, collective, group, make_run, span, stall
from tests.findings.reading import ms, why_not
from tests.pipeline_factory import PipelineJob

MS = 1_000_000
JOB = PipelineJob(2, 8, data_parallel=2, transfer_ns=20_000, all_reduce_ns=300_000, optimizer_ns=MS, steps=10)


def findings_of(run: Run) -> Judgement:
    return find_stragglers(run, match(run))


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
def test_a_slow_rank_is_named_with_what_it_costs(slow: int) -> None:
    job = replace(JOB, extra_forward_ns={slow: 3 * MS})
    plain, delayed = JOB.run(), job.run()

    findings = findings_of(delayed)

    (verdict,) = findings.slow
    assert (verdict.rank, verdict.host, verdict.cause, verdict.persistence) == (slow, "node0", "forward", 1.0)
    assert ms(verdict.cost_ns) == pytest.approx(_step_ms(delayed) - _step_ms(plain))
    assert "needs 4.0 ms per forward (peers 1.0): 24.0 ms per step more" in verdict.evidence
    assert verdict.gpu_hours_per_day == pytest.approx(4 * 24 * (1 - _step_ms(plain) / _step_ms(delayed)))
    assert findings.replay_error < 0.001


def test_nobody_is_named_when_all_are_alike() -> None:
    findings = findings_of(JOB.run())

    assert findings.slow == ()
    assert why_not(findings.findings) == ()
    assert ms(findings.together_ns) == 0.0


def test_ranks_without_a_recording_are_named_and_make_costs_lower_bounds() -> None:
    job = replace(JOB, extra_forward_ns={1: 3 * MS})
    whole = findings_of(job.run())
    without_3, without_2_and_3 = (findings_of(of_ranks(job.run(), range(count))) for count in (3, 2))

    assert whole.not_judged == ()
    assert without_3.not_judged[0].evidence == (
        "Rank 3 was not compared: no complete step was recorded there. Costs are lower bounds, as waiting for rank 3 "
        "counts as transfer."
    )
    assert without_2_and_3.not_judged[0].evidence.startswith("Ranks 2–3 were not compared: ")
    assert [verdict.rank for verdict in without_3.slow] == [1]
    assert 0 < ms(without_3.slow[0].cost_ns) < ms(whole.slow[0].cost_ns)


def test_time_that_nobody_waits_for_costs_nothing() -> None:
    # The last forward of the last stage is on the critical path of both replicas; 10 µs of 8 forwards are not worth a
    # verdict.
    assert findings_of(replace(JOB, extra_forward_ns={3: 10_000}).run()).slow == ()


def test_without_peers_stages_are_compared_and_no_ranks() -> None:
    findings = findings_of(PipelineJob(4, 8, steps=9, extra_forward_ns={2: 5 * MS}).run())

    (verdict,) = findings.slow
    assert (verdict.who, verdict.cause) == ("stage 2 (rank 2)", "stage_imbalance")
    assert "Rank 2 is all of it and may be slow instead" in verdict.evidence
    assert why_not(findings.findings) == ()


def test_without_peers_and_with_even_stages_it_is_said_that_no_ranks_were_compared() -> None:
    (said,) = why_not(findings_of(PipelineJob(4, 8, steps=9).run()).findings)

    assert "no two ranks do the same work" in said


def test_a_run_without_common_steps() -> None:
    run = make_run({0: [span("step", 0, 10, step=0)], 1: [span("forward", 0, 10, step=0)]})

    assert "No step was recorded by all ranks" in why_not(findings_of(run).findings)[0]


def test_a_host_all_of_whose_ranks_are_slow() -> None:
    job = PipelineJob(
        2,
        8,
        data_parallel=3,
        optimizer_ns=MS,
        steps=9,
        nodes={0: "a", 1: "b", 2: "c", 3: "a", 4: "b", 5: "c"},
        extra_forward_ns={1: 2 * MS, 4: 2 * MS},
    )

    (verdict,) = findings_of(job.run()).slow

    assert (verdict.host, verdict.place, verdict.cause) == ("b", "host", "forward")
    assert verdict.who == "host b (ranks 1, 4)"
    assert ms(verdict.cost_ns) == pytest.approx(_step_ms(job.run()) - _step_ms(replace(job, extra_forward_ns={}).run()))
    assert verdict.evidence.startswith("Both ranks on b need 64% longer per step")


@pytest.mark.parametrize("cause", ["data", "gc"])
def test_a_delay_with_a_span_of_its_own_is_named_after_it(cause: str) -> None:
    run = replace(JOB, extra_forward_ns={1: 4 * MS}).run()
    run = _with_spans_in_forwards(run, rank=1, kind=cause, duration_ns=4 * MS)

    (verdict,) = findings_of(run).slow

    assert (verdict.rank, verdict.cause) == (1, cause)
    assert ms(verdict.cost_ns) == pytest.approx(32, rel=0.1)
    assert "needs 32.0 ms per step for " in verdict.evidence


@pytest.mark.parametrize(("steps", "named"), [(1, 0), (2, 0), (8, 0), (9, 1)])
def test_a_slow_rank_is_not_told_from_noise_by_few_steps(steps: int, named: int) -> None:
    # Of several steps the first, number 0, does not count.
    findings = findings_of(replace(JOB, steps=steps, extra_forward_ns={1: 3 * MS}).run())

    assert len(findings.slow) == named
    counted = max(steps - 1, 1)
    too_few = f"too few steps: {counted}, at least 8 are needed to separate a slow rank from noise"
    assert [too_few in sentence for sentence in why_not(findings.findings)] == [True] * (1 - named)


def test_too_few_steps_name_no_rank_not_even_for_garbage_collection() -> None:
    run = replace(JOB, steps=8, extra_forward_ns={1: 4 * MS}).run()

    findings = findings_of(_with_spans_in_forwards(run, rank=1, kind="gc", duration_ns=4 * MS))

    assert (findings.slow, findings.waited_for) == ((), "")
    (sentence,) = why_not(findings.findings)
    assert "too few steps: 7" in sentence
    assert "rank 1" not in sentence


def test_a_finding_says_what_normal_is_and_how_sure_its_cost_is() -> None:
    (finding,) = findings_of(replace(JOB, extra_forward_ns={0: 3 * MS}).run()).slow

    assert (finding.norm, finding.since_first_compared, finding.occurrence) == ("fastest", True, None)
    assert (finding.rank, finding.host) == (0, finding.members[0].host)
    assert finding.sigmas is None  # its steps do not scatter
    (scattered,) = found(["slow-rank=0:1.5"], dp=4).slow
    assert scattered.sigmas is not None
    assert scattered.sigmas > 3


def test_a_slow_rank_behind_a_slower_one_is_named_as_well() -> None:
    job = replace(JOB, extra_forward_ns={0: 3 * MS, 3: 2 * MS})
    (verdict,) = findings_of(job.run()).slow

    assert (verdict.who, verdict.cause) == ("ranks 0, 3 on node0", "forward")
    slow, plain = _step_ms(job.run()), _step_ms(JOB.run())
    assert ms(verdict.cost_ns) == pytest.approx(slow - plain)
    first, second = verdict.members
    assert (first.rank, second.rank) == verdict.ranks == (0, 3)
    # Of the hidden one: nothing alone, and all that is left once the other is mended.
    without_first = _step_ms(replace(JOB, extra_forward_ns={3: 2 * MS}).run())
    assert ms(second.share_ns) == pytest.approx(without_first - plain)
    assert ms(first.alone_ns) == pytest.approx(slow - without_first)


def test_without_a_straggler_the_most_awaited_rank_is_named_with_why_it_is_none() -> None:
    # 0.1 ms more in each of 8 forwards; forwards, backwards and the optimizer take 25 ms.
    findings = findings_of(replace(JOB, extra_forward_ns={1: 100_000}).run())

    assert findings.slow == ()
    assert findings.waited_for.startswith("Others waited longest for rank 1 on node0: ")
    assert "Its own work takes 3.20% longer than that of the ranks that do the same" in findings.waited_for
    assert findings.waited_for.endswith("a straggler is named from 5.00% on.")


def test_the_most_awaited_rank_is_among_those_that_count() -> None:
    run = replace(JOB, extra_forward_ns={1: 100_000}).run()
    findings = find_stragglers(of_ranks(run, [0, 2, 3]), match(run))

    assert re.match("Others waited longest for rank [023] on node0: ", findings.waited_for)


def test_the_warm_up_is_not_among_the_steps_that_would_be_needed() -> None:
    findings = findings_of(replace(JOB, steps=3, extra_forward_ns={1: 3 * MS}).run())

    assert "the first step, in which everything warms up, does not count" in why_not(findings.findings)[0]


@pytest.mark.parametrize(
    ("device", "is_gpu"), [("NVIDIA H200", True), ("x86_64 cpu", False), ("simulated device", False), ("", False)]
)
def test_gpu_hours_are_of_gpus(device: str, is_gpu: bool) -> None:
    run = JOB.run()
    metadata = replace(run.any_metadata, device=device)

    assert on_gpu(replace(run, ranks={0: replace(run.ranks[0], metadata=metadata)})) == is_gpu


def test_a_rank_that_evaluates_and_then_saves_between_steps_gets_two_verdicts() -> None:
    run = _with_an_evaluation_between_steps(evaluation_ms=1000, saving_ms=20)

    evaluation, checkpoint = findings_of(run).slow
    assert evaluation.line() == "rank 0 on node0, evaluation: once, in step 6: 1.0 s (93.1%)"
    assert checkpoint.line() == "rank 0 on node0, checkpoint: once, in step 6: 20 ms (1.9%)"
    assert ms(evaluation.cost_ns) == pytest.approx(1000 / 9, rel=0.01)
    assert 0 < (evaluation.gpu_hours_per_day or 0) < 2 * 24


@pytest.mark.parametrize("slower_ms", [0, 3])
def test_an_evaluation_is_named_also_of_a_rank_that_is_slow(slower_ms: int) -> None:
    run = _with_an_evaluation_between_steps(evaluation_ms=1000, saving_ms=0, slower_ms=slower_ms)

    causes = [verdict.cause for verdict in findings_of(run).slow]
    assert causes == ["evaluation", "compute"][: 2 if slower_ms else 1]


def _step_ms(run: Run) -> float:
    spans = run.ranks[0].spans
    steps = spans.kind == 0
    return float(np.median((spans.end - spans.start)[steps])) / MS


def _with_spans_in_forwards(run: Run, rank: int, kind: str, duration_ns: int) -> Run:
    """The same run, where the rank spent the beginning of every forward in a span of this kind."""
    names = list(run.names)
    trace = run.ranks[rank]
    forwards = np.flatnonzero(trace.spans.kind == 1)
    rows = [
        span(kind, start, start + duration_ns, step=step)
        for start, step in zip(trace.spans.start[forwards].tolist(), trace.spans.step[forwards].tolist(), strict=True)
    ]
    spans = trace.spans.concatenate([trace.spans, trace.spans.from_rows(rows, names)])
    ordered = spans.take(np.lexsort((-spans.end, spans.start)))
    return replace(run, names=names, ranks={**run.ranks, rank: replace(trace, spans=ordered)})


def _with_an_evaluation_between_steps(evaluation_ms: int, saving_ms: int, slower_ms: int = 0) -> Run:
    """Ten steps of two ranks, the steps of which lie around their work; rank 0 evaluates before step 6, and saves in
    it."""
    world = group("dp", 0, 1)
    rows: dict[int, list[Row]] = {0: [], 1: []}
    now = 0
    for step in range(10):
        begin = now + evaluation_ms * MS * (step == 6)
        saved = begin + saving_ms * MS * (step == 6)
        arrival = {0: saved + (5 + slower_ms) * MS, 1: now + 5 * MS}
        end = max(arrival.values()) + MS
        if begin > now:
            rows[0].append(span("evaluation", now, begin, step=-1))
        if saved > begin:
            rows[0].append(span("checkpoint", begin, saved, step=step))
        for rank, start, work in ((0, begin, saved), (1, now, now)):
            on = collective("all_reduce", world, step, arrival[rank], end, id=step, step=step)
            rows[rank] += [
                span("step", start, end, step=step),
                span("forward", work, arrival[rank], step=step),
                on,
                stall(on, arrival[rank], end),
            ]
        now = end
    return make_run(rows, [world])


def evaluating(rank_1_ms: Sequence[int], *, num_steps: int = 21, meets: bool = True) -> Run:
    """Two ranks with steps of 100 ms, after every fifth of which rank 0 evaluates for 50 ms, and rank 1 as given.

    They meet behind it, or in the next step, which begins with the first of them.
    """
    rows: dict[int, list[Row]] = {0: [], 1: []}
    now, longest = {0: 0, 1: 0}, 0
    events = iter(rank_1_ms)
    for step in range(num_steps):
        meeting = max(now.values()) + 90 * MS
        for rank, own in rows.items():
            reduction = collective("all_reduce", DP, step, now[rank] + 90 * MS, meeting + 10 * MS, step=step, id=step)
            own += [
                span("step", now[rank], meeting + 10 * MS, step=step),
                span("forward", now[rank], now[rank] + 90 * MS, step=step),
                reduction,
                stall(reduction, now[rank] + 90 * MS, meeting + 10 * MS, step=step),
            ]
            now[rank] = meeting + 10 * MS
        if step % 5 == 4 and (more := next(events, None)) is not None:
            done = {0: now[0] + 50 * MS, 1: now[1] + more * MS}
            longest = max(done.values())
            for rank, own in rows.items():
                end = longest if meets else done[rank]
                own.append(span("evaluation", now[rank], end, step=-1))
                if meets:
                    barrier = collective("barrier", EVALUATED, step, done[rank], end, step=-1, id=1_000 + step)
                    own += [barrier, stall(barrier, done[rank], end, step=-1)]
                now[rank] = end
    return make_run(rows, [DP, EVALUATED])


DP, EVALUATED = group("dp", 0, 1), group("evaluated", 0, 1)


def of_summary(run: Run) -> Judgement:
    analysis = analyse(run)
    return find_stragglers(analysis.run, analysis.matches, around=analysis.context.run)


def test_waits_between_steps_count_with_those_after_the_last_one() -> None:
    (verdict,) = of_summary(evaluating([250] * 4, num_steps=20)).slow

    assert (verdict.rank, verdict.cause) == (1, "evaluation")
    # Of 19 steps without the warm-up: four times 200 ms more than rank 0, which waits for them.
    assert ms(verdict.cost_ns) == pytest.approx(4 * 200 / 19)
    assert verdict.format_cost() == "in 4 of 19 steps (5, 10, 15, 19): 0.8 s in all (42.1%)"
    assert "4 times, by 200 ms each (median), 800 ms in all" in verdict.evidence
    assert f"needs {4 * 250 / 19:.1f} ms per step for evaluation (mean)" in verdict.evidence


def test_a_delay_costs_the_same_when_ranks_meet_in_the_next_step() -> None:
    run = evaluating([250] * 4, meets=False)
    (verdict,) = of_summary(run).slow

    assert (verdict.rank, verdict.cause) == (1, "evaluation")
    assert ms(verdict.cost_ns) == pytest.approx(4 * 200 / 20)


@pytest.mark.parametrize("rank_1_ms", [[50] * 4, [90, 30, 95, 25], [250, 250], [30, 120, 20, 110]])
@pytest.mark.parametrize("meets", [False, True])
def test_evaluations_that_scatter_or_are_few_name_nobody(rank_1_ms: list[int], meets: bool) -> None:
    assert of_summary(evaluating(rank_1_ms, meets=meets)).slow == ()
