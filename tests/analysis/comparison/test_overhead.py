from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commtrace.analysis.comparison.overhead import Measured, RankStamps, Stamp, summarise_overhead
from tests.json_schemas import errors

MS = 1_000_000


def run(
    step_ms: float, cpu_ms: float = 8, *, ranks: int = 2, rss: int = 500, cpu_ns: int = 10**9, **recording: Any
) -> Measured:
    """Twelve steps of two optimizers, of which the second steps once; the first three are four times as long."""
    ends, used, stamps = 0.0, 0.0, []
    for number in range(12):
        ends += step_ms * (4 if number <= 3 else 1)
        used += cpu_ms
        stamps.append(Stamp(1, int(ends * MS), int(used * MS)))
        if number == 5:
            stamps.append(Stamp(2, int(ends * MS) + 1, int(used * MS) + 1))
    processes = [RankStamps(rank, rss + rank, stamps) for rank in range(ranks)]
    return Measured(wall_ns=int(ends * MS), cpu_ns=cpu_ns, ranks=processes, **recording)


def test_ratios_are_medians_over_pairs_of_steps_without_the_warm_up() -> None:
    recorded: dict[str, Any] = {"steps": 24, "spans": 2400, "num_bytes": 24_000, "dropped": {"p2p": 1}}
    pairs = [
        (run(10), run(11, 9, rss=700, cpu_ns=2 * 10**9, **recorded)),
        (run(20), run(20, 8, rss=650, **recorded)),
        (run(10), run(12, 8.8, rss=650, **recorded)),
    ]
    result: Any = summarise_overhead(pairs).to_json()

    assert result["clock"] == "optimizer"
    assert result["step_time"]["without"] == 10 * MS
    assert result["step_time"]["with"] == 12 * MS
    assert result["step_time"]["ratio"] == {"median": pytest.approx(1.1), "low": 1.0, "high": pytest.approx(1.2)}
    assert result["step_cpu"]["ratio"]["median"] == pytest.approx(1.1)
    assert result["job_cpu"]["ratio"]["median"] == 1.0
    assert result["noise"]["median"] == pytest.approx((2 + 0.5) / 2)
    assert result["memory_bytes"] == {"median": 150, "max": 200}
    assert result["recorded"] == {
        "steps": 72,
        "spans_per_step": 100.0,
        "bytes_per_step": 1000.0,
        "bytes_per_span": 10.0,
        "dropped": {"p2p": 3},
    }


def test_without_stamps_whole_runs_are_compared() -> None:
    result: Any = summarise_overhead([(run(10, ranks=0), run(11, ranks=0))]).to_json()

    assert result["clock"] == "wall"
    assert result["step_time"]["ratio"]["median"] == pytest.approx(1.1)
    assert (result["step_cpu"], result["memory_bytes"], result["noise"]) == (None, None, None)
    assert result["recorded"]["bytes_per_span"] is None


def test_a_command_of_one_step_is_compared_as_a_whole() -> None:
    without, recorded = (
        replace(measured, ranks=[replace(rank, stamps=rank.stamps[:1]) for rank in measured.ranks])
        for measured in (run(10), run(11))
    )
    overhead = summarise_overhead([(without, recorded)])

    assert (overhead.clock, overhead.step_cpu, overhead.memory_bytes) == ("wall", None, None)
    assert overhead.step_time.ratio.median == pytest.approx(1.1)


def test_ranks_that_stamped_on_one_side_only_say_nothing_about_memory() -> None:
    without, recorded = run(10, ranks=1), run(11, ranks=1)
    recorded = replace(recorded, ranks=[replace(rank, rank=3) for rank in recorded.ranks])
    overhead = summarise_overhead([(without, recorded)])

    assert (overhead.clock, overhead.memory_bytes) == ("optimizer", None)


def test_its_json_matches_the_schema() -> None:
    pairs = [(run(10), run(11, steps=24, spans=2400, num_bytes=24_000, dropped={"p2p": 1}))] * 2
    for overhead in (summarise_overhead(pairs), summarise_overhead([(run(10, ranks=0), run(11, ranks=0))])):
        assert list(errors("bench", {"command": ["torchrun", "train.py"], **overhead.to_json()})) == []
