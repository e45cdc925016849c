"""The findings of two runs are matched by what they are, whatever they cost."""

from __future__ import annotations

from msgspec.structs import replace

from commtrace.analysis.comparison.findings import compare_findings
from tests.findings.reading import slow

MS = 1_000_000


def test_new_ones_stand_first_then_those_that_cost_more_less_and_that_have_gone() -> None:
    before = [slow(5.0, rank=1), slow(9.0, rank=2), slow(4.0, rank=3), slow(7.0, rank=4)]
    after = [slow(8.0, rank=1), slow(3.0, rank=2), slow(4.5, rank=3), slow(2.0, rank=5)]

    compared = compare_findings(before, after, step_ns=100 * MS)

    assert [(one.change, one.finding.rank) for one in compared] == [
        ("new", 5), ("more", 1), ("less", 2), ("gone", 4), ("same", 3),
    ]  # fmt: skip
    assert [(one.before_ns, one.after_ns) for one in compared[:2]] == [(None, 2.0 * MS), (5.0 * MS, 8.0 * MS)]


def test_a_loss_that_was_too_small_to_name_is_not_new() -> None:
    loss = replace(slow(0.5), id="lost/job/data", kind="lost", place="job", cause="data", share=0.005)
    grown = replace(loss, cost_ns=20.0 * MS, share=0.2)

    (compared,) = compare_findings([loss], [grown], step_ns=100 * MS)

    assert (compared.change, compared.before_ns, compared.after_ns) == ("more", 0.5 * MS, 20.0 * MS)
    assert compare_findings([loss], [loss], step_ns=100 * MS) == ()
