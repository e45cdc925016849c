"""The critical paths of a run that grows, and is started again: every step of every attempt counts once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commtrace.analysis.breakdown.critical_path import CriticalPath, critical_path
from commtrace.analysis.matched import match_run
from commtrace.analysis.path_totals import PathTotals
from commtrace.errors import RunNotFoundError
from commtrace.trace.files.writer import SegmentWriter
from tests.pipeline_factory import PipelineJob
from tests.trace.rows import mark, row_at

SECOND = 1_000_000_000
MS = 1_000_000


class Recording:
    """A job of two stages that writes its files while somebody reads them."""

    def __init__(self, directory: Path, attempt: int = 0) -> None:
        run = PipelineJob(stages=2, microbatches=2, steps=6, transfer_ns=1_000).run()
        self._run = run
        self._writers = {
            rank: SegmentWriter(
                directory, replace(trace.metadata, attempt=attempt, session=trace.metadata.session + attempt)
            )
            for rank, trace in run.ranks.items()
        }
        for rank, trace in run.ranks.items():
            groups = [mark("process_group", group.to_json()) for group in trace.groups.values()]
            self._writers[rank].write([*groups, mark("topology", {"coordinates": {"pp": rank}})])

    def write(self, steps: range, later_ns: int = 0) -> None:
        for rank, trace in self._run.ranks.items():
            rows = np.flatnonzero(np.isin(trace.spans.step, steps)).tolist()
            if rows:
                own = trace.spans
                seq = np.where(own.seq >= 0, own.seq + later_ns // MS, own.seq)  # numbers go on after a rollback
                spans = own.replace(start=own.start + later_ns, end=own.end + later_ns, seq=seq)
                self._writers[rank].write([row_at(self._run, replace(trace, spans=spans), at) for at in rows])

    def end(self) -> None:
        for writer in self._writers.values():
            writer.write([mark("end", {"exception": ""})])
            writer.close()


def whole(path: Path, steps: str) -> CriticalPath:
    matched = match_run(path, steps)
    found = critical_path(matched.context, matched.alignment)
    assert found is not None
    return found


def test_pieces_of_a_run_add_up_to_the_whole(tmp_path: Path) -> None:
    recording, totals = Recording(tmp_path), PathTotals(tmp_path)
    counted = []
    for steps in (range(1), range(1, 3), range(3, 3), range(3, 6)):
        recording.write(steps)
        counted.append((totals.read_on(), totals.last_step, totals.has_ended))
    recording.end()
    counted.append((totals.read_on(), totals.last_step, totals.has_ended))

    # The newest step may still be waited for in the next one, until the run has ended.
    assert counted == [(0, -1, False), (2, 1, False), (0, 1, False), (3, 4, False), (1, 5, True)]
    assert totals.path == whole(tmp_path, "0:")
    assert (totals.run_id, totals.num_left_out) == ("made-run", 0)


def test_the_newest_step_of_a_job_that_was_killed_counts_if_nothing_more_is_expected(tmp_path: Path) -> None:
    recording, totals = Recording(tmp_path), PathTotals(tmp_path)
    recording.write(range(4))

    assert (totals.read_on(), totals.read_on(to_the_end=True), totals.has_ended) == (3, 1, False)


def test_both_attempts_of_a_step_count(tmp_path: Path) -> None:
    first, totals = Recording(tmp_path), PathTotals(tmp_path)
    first.write(range(5))
    totals.read_on()
    assert totals.path.num_steps == 4
    of_first = whole(tmp_path, "0:5")

    second = Recording(tmp_path, attempt=1)
    second.write(range(2, 6))
    second.end()

    assert totals.read_on() == 1 + 4  # the last step of the first attempt, and four of the second
    assert totals.path == of_first.plus(whole(tmp_path, "2:6"))


def test_a_run_that_is_not_there_yet_is_no_end(tmp_path: Path) -> None:
    totals = PathTotals(tmp_path / "run")
    with pytest.raises(RunNotFoundError):
        totals.read_on()
    recording = Recording(tmp_path / "run")
    recording.write(range(3))

    assert totals.read_on() == 2


def test_every_attempt_of_a_step_counts_after_a_rollback(tmp_path: Path) -> None:
    """Steps 2 and 3 are done again by the same processes, read at once or while they run."""
    recording, totals = Recording(tmp_path), PathTotals(tmp_path)
    recording.write(range(4))
    looked = [totals.read_on()]
    recording.write(range(2, 6), later_ns=SECOND)
    looked.append(totals.read_on())
    recording.end()
    looked.append(totals.read_on())
    at_once = PathTotals(tmp_path)
    at_once.read_on()

    assert looked == [3, 1 + 2 + 1, 1]  # then the first 3, the second 2 and 3 … and the newest at the end
    assert (totals.path.num_steps, at_once.path.num_steps) == (8, 8)
    assert sum(share.ns for share in totals.path.shares) == sum(share.ns for share in at_once.path.shares)
    assert totals.last_step == 5


def test_a_rollback_right_before_the_end_counts(tmp_path: Path) -> None:
    recording, totals = Recording(tmp_path), PathTotals(tmp_path)
    recording.write(range(5))
    totals.read_on()
    recording.write(range(2, 4), later_ns=SECOND)
    totals.read_on()
    recording.end()
    totals.read_on()

    assert totals.path.num_steps == 7
