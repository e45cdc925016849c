from __future__ import annotations

import json
from io import StringIO
from typing import Any

from rich.console import Console

from commtrace.analysis.steps.choice import choose_steps
from commtrace.analysis.steps.detail import SampledStepTimes, SpanSum, find_detail
from commtrace.analysis.summary import summarise
from commtrace.cli.commands.summary import print_summary
from commtrace.trace.run import DiscardedSegments, Run, TriggeredDetail
from tests.factory import collective, group, make_run, span, stall

DP = group("dp", 0, 1)


def sums(*entries: list[object]) -> tuple[str, ...]:
    return (json.dumps(list(entries)),)


def sampled_run(**extras: Any) -> Run:
    """Steps 0 to 5 of 100 ns (step 5: 300 ns), of which 0, 2 and 4 are in detail."""
    rows = {}
    for rank in (0, 1):
        rows[rank] = [
            span("step", 100 * step, 100 * step + (300 if step == 5 else 100), step=step) for step in range(6)
        ]
        for seq, step in enumerate((0, 2, 4)):
            reduce = collective("all_reduce", DP, seq, 100 * step + 10, 100 * step + 30, step=step, id=seq)
            rows[rank] += [reduce, stall(reduce, 100 * step + 10, 100 * step + 30)]
    aggregates = {
        1: sums(["collective", "all_reduce", DP.id, -1, 2, 40, 128, 25]),
        3: sums(["collective", "all_reduce", DP.id, -1, 1, 20, 64, 20]),
        5: sums(["collective", "all_reduce", DP.id, -1, 3, 60, 192, 30], ["forward", "forward", -1, -1, 1, 90, 0, 90]),
    }
    topology = {"recording": {"sample": 2}}
    return make_run(rows, [DP], aggregates=aggregates, topology=topology, **extras)


def test_only_steps_in_detail_count_and_the_others_have_a_duration() -> None:
    run = sampled_run()
    choice = choose_steps(run, keep_warm_up=False)
    assert choice.used == (2, 4)
    assert choice.to_json()["left_out"] == [{"first": 0, "last": 0, "count": 1, "reason": "warm-up"}]

    detail = find_detail(run)
    assert (detail.every, detail.steps, detail.steps_in_detail) == (2, 6, 3)
    assert detail.step_time_ns == SampledStepTimes(mean=133, p50=100, p99=290, max=300)
    assert detail.sums == (
        SpanSum("collective", "dp", "all_reduce", count=2.0, time_ns=40, num_bytes=128, longest_ns=30),
        SpanSum("forward", "", "forward", count=1 / 3, time_ns=30, num_bytes=0, longest_ns=90),
    )
    assert detail.sums[0].to_json()["bytes"] == 128
    assert not [problem for problem in summarise(run).problems if "left out" in problem]


def test_detail_that_begins_later_has_no_warm_up() -> None:
    run = sampled_run()
    later = make_run(
        {0: [span("step", 100 * step, 100 * step + 100, step=step) for step in range(10)]},
        aggregates={step: sums() for step in range(5)},
    )
    assert choose_steps(later, keep_warm_up=False).used == (5, 6, 7, 8, 9)
    assert choose_steps(run, keep_warm_up=True).used == (0, 2, 4)


def test_the_summary_says_what_is_in_detail_what_was_asked_for_and_what_is_gone() -> None:
    def triggers(rank: int) -> tuple[TriggeredDetail, ...]:
        return (TriggeredDetail("t1", 4, 5, seen_at_step=4, by="cli", late=rank == 1),)

    discarded = DiscardedSegments(3, 5_000_000, first_step=0, last_step=99, at_ns=1_700_000_000 * 10**9)
    text = StringIO()
    run = sampled_run(triggers=triggers, discarded=discarded)
    print_summary(Console(file=text, width=200), summarise(run))

    lines = text.getvalue().splitlines()
    assert any(line.startswith("Detail: 1 step in 2 (3 of 6 steps). Step times of all steps: ") for line in lines)
    assert "Triggered: steps 4–4 in detail; seen too late by rank 1 (at step 4): these begin later" in lines
    assert [line for line in lines if line.startswith("Discarded")] == [
        "Discarded to keep to the budget: up to step 99, 6 files, 10.0 MB on 2 ranks, last at 2023-11-14 22:13:20 UTC"
    ]
    assert "Steps not in detail, mean per rank and step" in text.getvalue()


def test_without_any_step_in_detail_the_summary_says_what_to_do() -> None:
    run = make_run(
        {0: [span("step", 100 * step, 100 * step + 100, step=step) for step in range(3)]},
        aggregates={step: sums() for step in range(3)},
    )
    result = summarise(run)
    assert result.run.steps.used == ()
    assert "`commtrace trigger RUN`" in " ".join(result.problems)


def test_a_run_in_detail_has_nothing_to_say() -> None:
    text = StringIO()
    print_summary(Console(file=text, width=200), summarise(make_run({0: [span("step", 0, 9, step=0)]})))
    assert "Detail" not in text.getvalue()
