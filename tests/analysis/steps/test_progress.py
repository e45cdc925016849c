from __future__ import annotations

from commtrace.analysis.steps.progress import find_progress
from tests.factory import EPOCH_NS, make_run, span

MS = 1_000_000


def steps(last: int, length: int = 100 * MS) -> list[dict[str, object]]:
    return [span("step", length * step, length * (step + 1), step=step) for step in range(last + 1)]


def test_the_foremost_rank_and_the_time_since_its_last_report_say_where_the_run_is() -> None:
    run = make_run({0: steps(9), 1: steps(11)}, closed=False)
    progress = find_progress(run, EPOCH_NS + 1_750 * MS)

    assert (progress.latest, progress.step_ns, progress.age_ns, progress.closed) == (12 + 5, 100 * MS, 550 * MS, False)


def test_a_run_that_stands_still_is_not_taken_to_go_on() -> None:
    run = make_run({0: steps(9)}, closed=False)
    progress = find_progress(run, EPOCH_NS + 3_600_000 * MS)

    assert progress.latest == 10 + 101
    assert progress.age_ns == 3_599_000 * MS


def test_a_rank_that_records_nothing_now_tells_where_it_is() -> None:
    run = make_run({0: []}, closed=False, progress=((100, 0), (150, 10_000 * MS)))
    progress = find_progress(run, EPOCH_NS + 11_000 * MS)

    assert (progress.latest, progress.step_ns) == (155, 200 * MS)


def test_without_any_step_nothing_is_known() -> None:
    progress = find_progress(make_run({0: []}), EPOCH_NS)

    assert (progress.latest, progress.step_ns, progress.closed) == (-1, None, True)
