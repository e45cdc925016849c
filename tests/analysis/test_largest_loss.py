from __future__ import annotations

from typing import Any

from commtrace.analysis.breakdown.rank_means import RankMean
from commtrace.analysis.breakdown.states import State
from commtrace.analysis.largest_loss import losses_of_states
from commtrace.analysis.summary import summarise
from commtrace.findings.causes import format_cause
from commtrace.findings.finding import Finding, ranked, worth_naming
from tests.factory import make_run, span

MS = 1_000_000


def mean(**times: float) -> RankMean:
    """A step of 100 ms; what is not given is compute."""
    of_state = {State(*name.replace("_", " ").split("__")): round(time * MS) for name, time in times.items()}
    compute = {State("compute", "forward"): 100 * MS - sum(of_state.values())}
    return RankMean(0, "node0", {}, 100 * MS, 0, {**compute, **of_state})


def exposed(role: str, wait: int, transfer: int) -> RankMean:
    of_state = {State("exposed wait", role): wait * MS, State("exposed transfer", role): transfer * MS}
    return RankMean(0, "node0", {}, 100 * MS, 0, of_state)


def largest(*arguments: Any, **options: Any) -> Finding:
    return ranked(losses_of_states(*arguments, **options))[0]


def test_the_largest_loss_has_its_cost_and_share() -> None:
    loss = largest([mean(bubble=30, data=10), mean(bubble=20)])
    assert loss.line() == "waiting for pipeline neighbours (bubble): 25 ms per step (25.0% of it)"
    assert loss.advice == "More microbatches or chunks, or stages of equal length, make it smaller."


def test_communication_is_reported_with_its_role_and_whether_it_is_waiting() -> None:
    waiting, transfer = largest([exposed("dp", 30, 10)]), largest([exposed("tp", 10, 30)])
    assert waiting.line() == "exposed dp communication: 40 ms per step (40.0% of it)"
    assert waiting.evidence == "75% of it is waiting for the last rank to arrive."
    assert transfer.evidence == "Most of it is transfer."
    assert waiting.id != transfer.id


def test_waiting_is_not_shown_where_it_is_unknown() -> None:
    why = {"tp": "How much of it is waiting is unknown, because rank 3 is missing."}
    assert largest([exposed("tp", 10, 30)], why).evidence == why["tp"]
    assert largest([exposed("dp", 10, 30)], why).evidence == "Most of it is transfer."


def test_time_in_no_span_is_not_excused() -> None:
    assert largest([mean(other=60)]).line() == "time outside all spans: 60 ms per step (60.0% of it)"


def test_a_recording_of_steps_alone_rules_nothing_out() -> None:
    steps_only = RankMean(0, "node0", {}, 100 * MS, 0, {State("other"): 100 * MS})
    assert "so it may be either" in largest([steps_only]).evidence
    assert "so it may be either" in largest([steps_only], captured={"step": 4, "mark": 2}).evidence
    assert "It is no communication that was seen" in largest([mean(other=40)]).evidence


def test_spans_that_say_nothing_about_the_time_are_not_called_nothing() -> None:
    rows = {
        rank: [
            *(span("step", 100 * MS * step, 100 * MS * (step + 1), step=step) for step in range(3)),
            span("kernel", 110 * MS, 160 * MS, step=1, timing="unknown"),
        ]
        for rank in range(2)
    }
    (loss,) = worth_naming(summarise(make_run(rows, [])).findings)
    assert loss.line() == "time outside all spans: 100 ms per step (100.0% of it)"
    assert loss.evidence == (
        "Spans of kind kernel were recorded, but none that says when a rank computes or waits: how the time divides is "
        "not known."
    )


def test_steps_without_length_are_not_said_to_be_missing() -> None:
    (why_not,) = losses_of_states([RankMean(0, "node0", {}, 0, 0, {})])
    assert why_not.line() == "Not judged: The steps have no length: there is nothing to judge."


def test_a_cause_that_is_not_known_is_called_so() -> None:
    assert [format_cause(cause) for cause in ("unknown", "stage_imbalance", "gc")] == [
        "cause unknown",
        "stage imbalance",
        "garbage collection",
    ]


def test_small_losses_are_left_out() -> None:
    assert [loss.cause for loss in losses_of_states([mean(gc=2, data=0.5)])] == ["gc"]


def test_without_steps_there_is_no_loss() -> None:
    assert losses_of_states([]) == ()
