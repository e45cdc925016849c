"""For whom others waited, and what that rank did meanwhile: by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import add
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.matching.match import match
from commtrace.analysis.stragglers import awaited
from commtrace.analysis.stragglers.awaited import awaited_totals
from commtrace.analysis.stragglers.search import find_stragglers
from commtrace.analysis.summary import summarise
from commtrace.trace.run import Run
from tests.factory import Row, collective, group, make_run, span, stall
from tests.findings.reading import why_not

MS = 1_000_000
DP = group("dp", 0, 1)


def job(late: dict[int, tuple[str, int]], num_steps: int = 8) -> Run:
    """Steps of 100 ms: both ranks compute 90 ms, then reduce for 10 ms. Rank 0 is late in some of them.

    Args:
        late: by step, what rank 0 does before its forward, and for how many ms.
    """
    rows: dict[int, list[Row]] = {0: [], 1: []}
    now = 0
    for step in range(num_steps):
        kind, more = late.get(step, ("", 0))
        begin = {0: now + more * MS, 1: now}
        arrive = {rank: begin[rank] + 90 * MS for rank in begin}
        end = max(arrive.values()) + 10 * MS
        for rank, own in rows.items():
            if rank == 0 and more:
                own.append(span(kind, now, now + more * MS, step=step if kind == "gc" else -1))
            reduction = collective("all_reduce", DP, step, arrive[rank], end, step=step, id=step)
            own += [
                span("step", now if kind == "gc" else begin[rank], end, step=step),
                span("forward", begin[rank], arrive[rank], step=step),
                reduction,
                stall(reduction, arrive[rank], end, step=step),
            ]
        now = end
    return make_run(rows, [DP])


def test_the_awaited_ranks_activity_between_steps_is_named() -> None:
    (rank_0,) = awaited_totals(analyse(job({3: ("evaluation", 300), 6: ("checkpoint", 100)})).context).longest()

    assert (rank_0.rank, rank_0.wait_ns, rank_0.share) == (0, 400 * MS, 1.0)
    # Rank 0 computes for as long as rank 1 does, though much of that while rank 1 waits already.
    assert [(one.activity, one.wait_ns, one.when.steps) for one in rank_0.activities] == [
        ("evaluation", 300 * MS, (3,)),
        ("checkpoint", 100 * MS, (6,)),
    ]
    assert rank_0.describe() == (
        "rank 0 (100% of all waiting), which was evaluating (75%, once, in step 3: 0.3 s, summed over ranks) and "
        "saving or loading a checkpoint (25%, once, in step 6: 0.1 s, summed over ranks)"
    )


def test_a_collection_of_garbage_that_happened_once_is_reported_once() -> None:
    sentence = summarise(job({5: ("gc", 2_200)}, num_steps=9)).verdict

    assert sentence.startswith("Garbage collection: once, in step 5: 1.1 s"), "the mean of two ranks"
    assert "every step" not in sentence


def test_no_sentence_names_a_rank_after_seven_steps() -> None:
    summary = summarise(job({5: ("gc", 2_200)}))

    assert "too few steps: 7" in why_not(summary.findings)[0]
    said = " ".join((summary.verdict, *why_not(summary.findings)))
    assert "rank 0" not in said.lower()
    assert [one.stands_out for one in summary.awaited] == [False]


def test_work_that_is_long_in_few_steps_is_compared_in_these() -> None:
    """Before a reduction that only every fourth step has, rank 0 works 40 ms longer."""
    rows: dict[int, list[Row]] = {0: [], 1: []}
    now, number = 0, 0
    for step in range(16):
        is_longer = step % 4 == 3
        arrive = {0: now + (60 if is_longer else 20) * MS, 1: now + 20 * MS}
        end = max(arrive.values()) + (10 * MS if is_longer else 0)
        for rank, own in rows.items():
            own.append(span("step", now, end, step=step))
            own.append(span("forward", now, now + 20 * MS, step=step))
            if is_longer:
                reduction = collective("all_reduce", DP, number, arrive[rank], end, step=step, id=step)
                own += [reduction, stall(reduction, arrive[rank], end, step=step)]
        now, number = end, number + is_longer
    run = make_run(rows, [DP])

    findings = find_stragglers(run, match(run))

    assert findings.slow == ()
    assert "in 4 of 15 steps: 60.0 against 20.0 ms, medians over these steps" in findings.waited_for
    assert "over all steps the medians are 20.0 and 20.0 ms" in findings.waited_for


def test_nothing_is_said_about_time_before_the_previous_step() -> None:
    rows: dict[int, list[Row]] = {0: [], 1: []}
    for step in range(9):
        begin = 100 * step * MS
        late = 30 * MS if step == 8 else 0
        for rank, own in rows.items():
            own.append(span("step", begin, begin + 100 * MS, step=step))
            if step in (1, 8):
                arrive = begin + 20 * MS + (late if rank == 0 else 0)
                reduction = collective("all_reduce", DP, step // 8, arrive, begin + 60 * MS, step=step, id=step)
                own += [reduction, stall(reduction, arrive, begin + 60 * MS, step=step)]
        rows[0].append(span("gc", begin + 20 * MS, begin + 50 * MS, step=step))
        if step in (2, 7):
            rows[0].append(span("evaluation", begin + 70 * MS, begin + 80 * MS, step=step))

    (rank_0,) = awaited_totals(analyse(make_run(rows, [DP])).context).longest()

    # Since step 7 began: two collections (60 ms) and one evaluation (10 ms), not those of steps 2 to 6.
    assert [(one.activity, one.wait_ns) for one in rank_0.activities] == [
        ("gc", 25_714_286),
        ("evaluation", 4_285_714),
    ]


def test_the_activity_of_a_rank_on_another_clock_is_unknown() -> None:
    # Nothing ties the clock of rank 2 to the others, so that none of them is brought together.
    rows: dict[int, list[Row]] = {0: [], 1: [], 2: []}
    for step in range(4):
        begin = 100 * step * MS
        for rank, own in rows.items():
            own.append(span("step", begin, begin + 100 * MS, step=step))
            if rank < 2:
                arrive = begin + (20 + 30 * rank) * MS
                reduction = collective("all_reduce", DP, step, arrive, begin + 60 * MS, step=step, id=step)
                own += [span("forward", begin, arrive, step=step), reduction]

    (rank_1,) = awaited_totals(analyse(make_run(rows, [DP], nodes={0: "a", 1: "b", 2: "c"})).context).longest()

    assert (rank_1.rank, rank_1.wait_ns, rank_1.activities) == (1, 3 * 30 * MS, ())
    assert rank_1.describe() == "rank 1 (100% of all waiting)"
    assert "clock" in rank_1.next_step


def test_a_long_run_keeps_the_longest_steps_of_each_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    late = dict.fromkeys(range(3, 20, 2), ("gc", 10)) | {6: ("evaluation", 300), 10: ("evaluation", 400)}
    exact = awaited_totals(analyse(job(late, num_steps=20)).context)
    (dues,) = exact.parts
    windows = [
        replace(
            exact, parts=(dues.take(np.flatnonzero(np.isin(dues.step, steps))),), steps=(np.array(steps, np.int64),)
        )
        for steps in (range(1, 5), range(5, 9), range(9, 16), range(16, 20))
    ]
    (whole,) = exact.longest()
    monkeypatch.setattr(awaited, "_MOST_EXACT", 3)
    monkeypatch.setattr(awaited, "_LONGEST_STEPS", 2)
    in_turn, in_pairs = reduce(add, windows), (windows[0] + windows[1]) + (windows[2] + windows[3])

    for totals in (in_turn, in_pairs):
        (rank_0,) = totals.longest()
        assert (rank_0.wait_ns, rank_0.share) == (whole.wait_ns, 1.0)
        of_activity = {one.activity: one for one in rank_0.activities}
        assert of_activity["evaluation"] == next(one for one in whole.activities if one.activity == "evaluation")
        collections = of_activity["gc"]
        assert (collections.when.steps, collections.when.is_rare, collections.when.num_steps) == ((), False, 19)
        assert collections.when.total_ns == collections.wait_ns == 9 * 8 * MS
        assert {one.activity: one.wait_ns for one in whole.activities} == {
            one.activity: one.wait_ns for one in rank_0.activities
        }


def test_work_of_a_few_steps_is_counted_and_no_median_over_others_is_made_of_it() -> None:
    """Rank 0 works 100 ms longer in every fifth step; its medians are those of the other rank."""
    usual = np.full(30, 22e6)
    rare = usual + np.where(np.arange(30) % 5 == 4, 100e6, 0.2e6)
    work = SimpleNamespace(
        ranks=np.array([0, 1]), stages=np.array([0, 0]), stage_of_rank={0: 0, 1: 0}, work_ns=np.array([rare, usual])
    )

    words = awaited._rarely_longer(cast(Any, work), 0, 0.03)

    assert words == (
        "Its own work takes longer than that of the ranks that do the same in 6 of 30 steps: 122.0 against 22.0 ms, "
        "medians over these steps; over all steps the medians are 22.2 and 22.0 ms."
    )
    always = SimpleNamespace(**{**vars(work), "work_ns": np.array([usual * 1.5, usual])})
    assert awaited._rarely_longer(cast(Any, always), 0, 0.03) == ""
