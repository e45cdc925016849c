"""Eight real ranks that share a clock, read as if each had a wrong one of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from commtrace.analysis.chain import Analysis, analyse
from commtrace.analysis.clocks.align import COLLECTIVE_ENDS, align, apply
from commtrace.cli.main import app
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import RankTrace, Run
from tests.analysis.clock_jobs import MICROSECOND, SECOND, TrueClock
from tests.interchange.traces.reference_traces import dlrm


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("dlrm") / "run"
    made = CliRunner().invoke(app, ["import", "kineto", *map(str, dlrm()), "-o", str(directory)])
    assert made.exit_code == 0, made.output
    return load_run(Path(directory))


def on_wrong_clocks(run: Run, clocks: dict[int, TrueClock]) -> Run:
    return replace(run, ranks={rank: _moved(trace, clocks[rank]) for rank, trace in run.ranks.items()})


def _moved(trace: RankTrace, clock: TrueClock) -> RankTrace:
    host = f"host{trace.rank}"
    # Drift counts from the beginning of the trace, or an epoch of years would be an offset of days.
    begin = int(trace.spans.start.min())
    start, end = (clock.read(times - begin) + begin for times in (trace.spans.start, trace.spans.end))
    metadata = replace(trace.metadata, node=host, host=host, boot_id=host)
    return replace(trace, metadata=metadata, spans=trace.spans.replace(start=start, end=end))


def errors_ns(recorded: Run, aligned: Run) -> np.ndarray:
    """How far each rank's starts are from where they were, less how far the first rank's are."""
    moved = {rank: aligned.ranks[rank].spans.start - trace.spans.start for rank, trace in recorded.ranks.items()}
    reference = float(np.median(moved[min(moved)]))
    return np.concatenate([np.abs(own - reference) for own in moved.values()])


def exposed(analysis: Analysis) -> dict[int, int]:
    table = analysis.partition
    total = table.total("exposed wait") + table.total("exposed transfer")
    return dict(zip(table.rank.tolist(), total.tolist(), strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_offsets_are_recovered_within_10_us_and_change_nothing(recorded: Run, seed: int) -> None:
    random = np.random.default_rng(seed)
    clocks = {rank: TrueClock(int(random.uniform(-10, 10) * SECOND)) for rank in recorded.ranks}
    wrong = on_wrong_clocks(recorded, clocks)
    alignment = align(wrong)
    assert alignment.method == COLLECTIVE_ENDS
    assert errors_ns(recorded, apply(wrong, alignment)).max() < 10 * MICROSECOND
    assert exposed(analyse(wrong)) == exposed(analyse(recorded))


@pytest.mark.parametrize("seed", range(10))
def test_drifts_on_top_are_too_small_to_see_in_20_ms_and_do_no_harm(recorded: Run, seed: int) -> None:
    random = np.random.default_rng(seed)
    clocks = {
        rank: TrueClock(int(random.uniform(-10, 10) * SECOND), float(random.uniform(-100, 100)))
        for rank in recorded.ranks
    }
    wrong = on_wrong_clocks(recorded, clocks)
    assert errors_ns(recorded, apply(wrong, align(wrong))).max() < 10 * MICROSECOND
    before, after = exposed(analyse(recorded)), exposed(analyse(wrong))
    # 100 ppm of 20 ms is 2 µs: what is left of an injected drift that eight collectives cannot show.
    assert all(abs(after[rank] - before[rank]) < 2 * MICROSECOND for rank in before)
