from __future__ import annotations

from datetime import datetime
from typing import Any

from msgspec.structs import replace

from commtrace.analysis.breakdown.rank_means import RankMean
from commtrace.analysis.breakdown.states import State
from commtrace.analysis.largest_loss import verdict
from commtrace.analysis.summary import summarise
from commtrace.findings.causes import format_cause
from commtrace.findings.finding import Finding, Occurrence, Stretch
from tests.factory import make_run, span
from tests.findings.reading import slow

MS = 1_000_000


def mean(**times: int) -> RankMean:
    """A step of 100 ms; what is not given is compute."""
    of_state = {State(*name.replace("_", " ").split("__")): time * MS for name, time in times.items()}
    compute = {State("compute", "forward"): 100 * MS - sum(of_state.values())}
    return RankMean(0, "node0", {}, 100 * MS, 0, {**compute, **of_state})


def exposed(role: str, wait: int, transfer: int) -> RankMean:
    of_state = {State("exposed wait", role): wait * MS, State("exposed transfer", role): transfer * MS}
    return RankMean(0, "node0", {}, 100 * MS, 0, of_state)


def straggler(**changes: Any) -> Finding:
    """One that is slow in all that it computes."""
    plain = slow(30.0, rank=5, host="b", share=0.3, advice="Look at its clocks.")
    return replace(plain, **changes)


def iso_ns(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000) * MS


def test_a_straggler_comes_first() -> None:
    stragglers = [
        straggler(who="rank 1 on a", cause="data", cost_ns=3.0 * MS, advice="Prefetch."),
        straggler(),
    ]
    assert verdict([mean(bubble=40)], stragglers) == (
        "Rank 5 on b holds up the others (compute): it costs 30 ms of every step, 30.0% of it. Look at its clocks."
    )


def test_work_that_takes_long_in_a_few_steps_is_reported_with_its_cause() -> None:
    now_and_then = straggler(
        who="rank 2 on node0", occurrence=Occurrence((5, 10, 15), 60 * MS, 20),
        advice="See what happens in those steps.",
    )  # fmt: skip
    assert verdict([mean(FORWARD=100_000_000)], [now_and_then]) == (
        "Rank 2 on node0 (compute) held up the others in 3 of 20 steps (5, 10, 15): 60 ms in all. See what happens in "
        "those steps."
    )


def test_problems_of_a_part_of_the_run_are_reported_with_its_steps() -> None:
    stretch = Stretch(
        30, 49, 50.0 * MS, iso_ns("2026-11-23T14:03:22.512+00:00"), iso_ns("2026-11-23T14:05:09.001+00:00")
    )
    in_part = straggler(who="rank 3 on a", cost_ns=20.0 * MS, share=0.2, stretches=(stretch,))
    assert verdict([mean(bubble=40)], [in_part]) == (
        "Rank 3 on a held up the others (compute) in steps 30–49 (2026-11-23 14:03:22–14:05:09 UTC): it cost 50 ms of "
        "each, 20.0% of all steps. Look at its clocks."
    )
    twice = replace(in_part, stretches=(stretch, Stretch(60, 69, 10.0 * MS)))
    assert "14:05:09 UTC) and 60–69: it cost up to 50 ms of each, 20.0%" in verdict([mean(bubble=40)], [twice])


def test_slowness_that_moves_between_ranks_names_none() -> None:
    moving = straggler(ranks=(), who="", cause="sequence_length_imbalance", cost_ns=8.0 * MS, advice="Sort.")
    assert verdict([mean()], [moving]).startswith(
        "Now one rank, now another holds up the others (sequence length imbalance): it costs 8 ms"
    )


def test_the_largest_loss_is_named_with_its_share() -> None:
    sentence = verdict([mean(bubble=30, data=10), mean(bubble=20)], [])
    assert sentence.startswith("Largest loss: waiting for pipeline neighbours (bubble), 25.0% of the step (25 ms).")


def test_communication_is_reported_with_its_role_and_whether_it_is_waiting() -> None:
    assert "dp communication, 40.0% of the step (40 ms). 75% of it is waiting" in verdict([exposed("dp", 30, 10)], [])
    assert "tp communication, 40.0% of the step (40 ms). Most of it is transfer" in verdict([exposed("tp", 10, 30)], [])


def test_waiting_is_not_shown_where_it_is_unknown() -> None:
    why = {"tp": "How much of it is waiting is unknown, because rank 3 is missing."}
    assert verdict([exposed("tp", 10, 30)], [], why).endswith(f"(40 ms). {why['tp']}")
    assert "Most of it is transfer" in verdict([exposed("dp", 10, 30)], [], why)


def test_time_in_no_span_is_not_excused() -> None:
    assert "time outside all spans, 60.0%" in verdict([mean(other=60)], [])


def test_a_recording_of_steps_alone_rules_nothing_out() -> None:
    steps_only = RankMean(0, "node0", {}, 100 * MS, 0, {State("other"): 100 * MS})
    assert "so it may be either" in verdict([steps_only], [])
    assert "so it may be either" in verdict([steps_only], [], captured={"step": 4, "mark": 2})
    assert "It is no communication that was seen" in verdict([mean(other=40)], [])


def test_spans_that_say_nothing_about_the_time_are_not_called_nothing() -> None:
    rows = {
        rank: [
            *(span("step", 100 * MS * step, 100 * MS * (step + 1), step=step) for step in range(3)),
            span("kernel", 110 * MS, 160 * MS, step=1, timing="unknown"),
        ]
        for rank in range(2)
    }
    assert summarise(make_run(rows, [])).verdict == (
        "Largest loss: time outside all spans, 100.0% of the step (100 ms). Spans of kind kernel were recorded, but "
        "none that says when a rank computes or waits: how the time divides is not known."
    )


def test_steps_without_length_are_not_said_to_be_missing() -> None:
    assert verdict([RankMean(0, "node0", {}, 0, 0, {})], []) == "The steps have no length: there is nothing to judge."


def test_a_cause_that_is_not_known_is_called_so() -> None:
    assert [format_cause(cause) for cause in ("unknown", "stage_imbalance", "gc")] == [
        "cause unknown",
        "stage imbalance",
        "garbage collection",
    ]


def test_small_losses_are_not_made_large() -> None:
    assert verdict([mean(gc=2)], []) == (
        "The ranks compute; the largest loss is garbage collection with 2.0% of the step. Nothing stands out."
    )


def test_without_steps_there_is_no_verdict() -> None:
    assert verdict([], []) == "No step was recorded by all ranks: there is nothing to judge."
