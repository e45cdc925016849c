"""Which numbers of communication are missing on purpose."""

from __future__ import annotations

from itertools import pairwise

from commtrace.trace.quiet import QuietChange, quiet_steps, unrecorded
from commtrace.trace.selection import QUIET_STEPS, QuietPlan

BEGIN = QuietChange(10, True, collectives=((5, 100), (6, 7)), messages=((6, 4),))
NEXT = QuietChange(11, True)
END = QuietChange(12, False, collectives=((5, 120), (6, 7), (8, 3)), messages=((6, 10),))
AGAIN = QuietChange(30, True, collectives=((5, 300), (6, 7), (8, 3)), messages=((6, 30),))


def test_a_stretch_is_from_its_first_step_to_the_first_recorded_one() -> None:
    assert quiet_steps([BEGIN, NEXT, END]) == {10, 11}
    assert unrecorded([BEGIN, NEXT, END], 5, collectives=500).collectives == ((100, 120),)
    assert unrecorded([BEGIN, NEXT, END], 6, collectives=7, messages=10) == unrecorded([BEGIN, END], 6, 7, 10)
    assert unrecorded([BEGIN, NEXT, END], 6, collectives=7, messages=10).messages == 6
    assert unrecorded([BEGIN, NEXT, END], 6, collectives=7).collectives == ()


def test_a_group_that_was_made_in_a_quiet_step_began_at_0() -> None:
    assert unrecorded([BEGIN, END], 8, collectives=50).collectives == ((0, 3),)


def test_a_stretch_without_an_end_reaches_to_what_was_launched() -> None:
    last = unrecorded([BEGIN, END, AGAIN], 5, collectives=302)

    assert last.collectives == ((100, 120), (300, 302))
    assert [last.among(0, 101), last.among(110, 301), last.among(120, 300)] == [1, 11, 0]


def test_stretches_are_drawn_and_as_many_as_asked_for() -> None:
    for percent in (1, 3, 7, 10):
        plan = QuietPlan(percent)
        quiet = [step for step in range(100_000) if plan.is_quiet(step)]
        block = 300 // percent
        places = {step % block for step in quiet}
        assert len(quiet) / 100_000 == percent / 100 or abs(len(quiet) / 100_000 - QUIET_STEPS / block) < 2e-3
        assert quiet[0] >= block
        assert len(places) > block // 2
        stretches = [step for step in quiet if step - 1 not in quiet]
        assert len(quiet) == QUIET_STEPS * len(stretches)
        assert all(later - earlier >= 3 * QUIET_STEPS for earlier, later in pairwise(stretches))


def test_no_step_is_quiet_where_that_is_off() -> None:
    assert not any(QuietPlan(0).is_quiet(step) for step in range(10_000))
