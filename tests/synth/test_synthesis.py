"""Synthetic runs hold what was asked for, and the analysis finds the truth in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.clocks.align import align
from commtrace.analysis.pipeline.observed import find_pipeline
from commtrace.analysis.stragglers.search import find_stragglers
from commtrace.analysis.windows.run import OpenedRun
from commtrace.errors import ConfigurationError
from commtrace.synth import FREE, Fault, Job, SimulatedClock, Synthetic, random_clocks, synthesize, write
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.spans import DTYPE_OF_COLUMN
from tests.findings.reading import ms

SMALL = Job(tp=2, pp=2, dp=2, microbatches=4, steps=3)
JUDGED = Job(tp=1, pp=2, dp=4, microbatches=4, steps=12)


def test_a_rank_does_every_microbatch_and_talks_to_every_dimension() -> None:
    run = synthesize(SMALL).run
    spans = run.ranks[5].spans
    roles = {run.ranks[5].groups[number].role for number in np.unique(spans.group[spans.group >= 0]).tolist()}

    assert sum(spans.kind == schema.FORWARD) == sum(spans.kind == schema.BACKWARD) == 4 * 3
    assert roles == {"tp", "pp", "dp", "mp", "embedding"}
    assert run.ranks[5].coordinates == {"tp": 1, "pp": 1, "dp": 0, "cp": 0, "ep": 0}


def test_all_dimensions_at_once() -> None:
    job = Job(tp=2, pp=2, dp=2, cp=2, ep=4, chunks=2, microbatches=2, steps=2, overlap_grad_reduce=True)
    analysis = analyse(synthesize(job).run)
    roles = {analysis.roles.words[code] for code in np.unique(analysis.roles.ranks[0].role) if code >= 0}

    assert {"tp", "cp", "ep", "dp-cp", "pp"} <= roles
    assert all(analysis.matches.ranks[0].complete[analysis.matches.ranks[0].bucket >= 0])
    np.testing.assert_array_equal(analysis.partition.ns.sum(axis=1), analysis.partition.wall_ns)
    assert analysis.partition.hidden_ns.max() > 0


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    ends = [synthesize(replace(SMALL, seed=seed)).run.ranks[7].spans.end.tolist() for seed in (0, 0, 1)]

    assert ends[0] == ends[1] != ends[2]


def test_a_written_run_is_read_back_whole(tmp_path: Path) -> None:
    made = synthesize(replace(SMALL, missing=0.05, clocks=random_clocks(1)))
    counted: list[int] = []
    written = write(made, tmp_path / "run", progress=counted.append)
    read, expected = load_run(tmp_path / "run"), made.run

    assert written == sum(counted) == sum(len(trace.spans) for trace in expected.ranks.values())
    for rank, trace in expected.ranks.items():
        for column in DTYPE_OF_COLUMN:
            own, wanted = (getattr(one.spans, column).tolist() for one in (read.ranks[rank], trace))
            if column in ("name", "dtype"):
                own = [read.names[code] if code >= 0 else None for code in own]
                wanted = [expected.names[code] if code >= 0 else None for code in wanted]
            assert own == wanted, column
        for field in ("groups", "coordinates", "parallel", "topology", "dropped", "anchors", "closed"):
            assert getattr(read.ranks[rank], field) == getattr(trace, field), field
    assert json.loads((tmp_path / "run" / "truth.json").read_text()) == made.truth


def test_some_ranks_can_be_lost(tmp_path: Path) -> None:
    write(synthesize(SMALL), tmp_path / "run", ranks=[0, 1, 2])

    assert list(load_run(tmp_path / "run").ranks) == [0, 1, 2]


def test_a_second_run_is_not_mixed_into_the_first(tmp_path: Path) -> None:
    write(synthesize(SMALL), tmp_path / "run")

    with pytest.raises(ConfigurationError, match="holds a run already"):
        write(synthesize(SMALL), tmp_path / "run")


@pytest.mark.parametrize(
    ("fault", "place", "cause", "ranks"),
    [
        ("slow-rank=3:1.3", "ranks", "compute", (3,)),
        ("slow-backward=3:1.3", "ranks", "backward", (3,)),
        ("data=2:40", "ranks", "data", (2,)),
        ("gc=5:60", "ranks", "gc", (5,)),
        ("slow-host=1:1.3", "host", "compute", (2, 3)),
        ("data=2,3:40", "host", "data", (2, 3)),
    ],
)
def test_a_fault_is_found_and_costs_what_it_truly_costs(
    fault: str, place: str, cause: str, ranks: tuple[int, ...]
) -> None:
    # Four ranks a host, so that the second stage is on another host than the first one; peers are inside a stage.
    job = replace(JUDGED, faults=(Fault.parse(fault),), gpus_per_host=2 if place == "host" else 4)
    made = synthesize(job)
    analysis = analyse(made.run)
    (verdict,) = find_stragglers(analysis.run, analysis.matches).slow

    (fault_truth,) = made.truth["faults"]
    assert (verdict.place, verdict.cause, tuple(sorted(verdict.ranks))) == (place, cause, ranks)
    assert fault_truth["cause"] == cause
    true_ms = fault_truth["cost_ns_per_step"] / 1e6
    assert ms(verdict.cost_ns) == pytest.approx(true_ms, rel=0.1)


def test_a_slow_link_lengthens_only_its_own_transfers() -> None:
    job = replace(SMALL, jitter=0.0, end_scatter_ns=0, faults=(Fault.parse("slow-link=2-6:50"),))
    plain = _longest_message(synthesize(replace(job, faults=())))

    assert _longest_message(synthesize(job)) == {rank: plain[rank] * (50 if rank in (2, 6) else 1) for rank in plain}


def test_a_slow_send_lengthens_one_direction_only() -> None:
    job = replace(SMALL, jitter=0.0, end_scatter_ns=0)
    plain, slow, of_sender = (
        _longest_receive(synthesize(replace(job, faults=faults)))
        for faults in ((), (Fault.parse("slow-send=2-6:50"),), (Fault.parse("slow-send=6:50"),))
    )

    assert slow == {rank: plain[rank] * (50 if rank == 6 else 1) for rank in plain}
    assert of_sender == {rank: plain[rank] * (50 if rank == 2 else 1) for rank in plain}


def test_a_slow_network_lengthens_what_leaves_the_host() -> None:
    job = Job(tp=2, dp=2, microbatches=2, layers=1, steps=2, jitter=0.0, end_scatter_ns=0, gpus_per_host=2)
    plain, slow = synthesize(job), synthesize(replace(job, faults=(Fault.parse("slow-network=1:10"),)))
    times = [_transfers(one, "reduce_scatter") + _transfers(one, "all_reduce") for one in (plain, slow)]

    gradients, *inside = times[0]
    assert times[1] == [gradients * 10, *inside]


@pytest.mark.parametrize(
    ("fault", "ranks", "place", "cause", "cost_ms"),
    [
        ("slow-rank=1,2:1.5", [1, 2], "ranks", "compute", 20 * 0.5),
        ("slow-host=0:1.5", [0, 1, 2, 3], "host", "compute", 20 * 0.5),
        ("slow-forward=1:1.5", [1], "ranks", "forward", 5 * 0.5),
        ("slow-backward=1:1.5", [1], "ranks", "backward", 10 * 0.5),
        ("slow-optimizer=1:1.5", [1], "ranks", "optimizer", 5 * 0.5),
        ("checkpoint=3:8", [3], "ranks", "checkpoint", 8),
        ("evaluation=3:8@0:4:2", [3], "ranks", "evaluation", 4),
        ("late-launch=0:6", [0], "ranks", "late_launch", 6),
        ("slow-link=0-1:2", [0, 1], "link", "communication", 0),
        ("slow-link=0:2", [0], "ranks", "communication", 0),
        ("long-microbatch=1:3", [], "job", "sequence_length_imbalance", 7.5 * 2),
        ("long-microbatch=1-2:3", [2], "job", "sequence_length_imbalance", 7.5 * 2),
    ],
)
def test_the_truth_about_a_fault(fault: str, ranks: list[int], place: str, cause: str, cost_ms: float) -> None:
    job = Job(
        dp=4, microbatches=2, steps=4, forward_ns=2_500_000, backward_ns=5_000_000, optimizer_ns=5_000_000, data_ns=0,
        jitter=0.0, end_scatter_ns=0, network=FREE,
    )  # fmt: skip
    (fault_truth,) = synthesize(replace(job, faults=(Fault.parse(fault),))).truth["faults"]

    assert (fault_truth["ranks"], fault_truth["place"], fault_truth["cause"]) == (ranks, place, cause)
    assert fault_truth["cost_ns_per_step"] == cost_ms * 1e6


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [("slow-host=1:2", [4, 5, 6, 7]), ("slow-network=0:2", [0, 1, 2, 3]), ("uneven-stage=1:2", [4, 5, 6, 7]),
     ("slow-link=6-2:2", [2, 6]), ("long-microbatch=0-1:2", [2, 3, 6, 7])],
)  # fmt: skip
def test_a_fault_has_the_ranks_that_its_text_selects(fault: str, ranks: list[int]) -> None:
    made = synthesize(replace(SMALL, steps=1, gpus_per_host=4, faults=(Fault.parse(fault),)))

    assert made.truth["faults"][0]["ranks"] == ranks


def test_a_fault_can_be_confined_to_some_steps() -> None:
    job = replace(SMALL, jitter=0.0, faults=(Fault.parse("data=0:30@1:2"),))
    lengths = [step["duration_ns"] for step in synthesize(job).truth["steps"]]

    assert lengths[1] > lengths[0] + 25_000_000
    assert lengths[1] > lengths[2] + 25_000_000


def test_sequence_lengths_are_those_of_a_replica() -> None:
    run = synthesize(replace(SMALL, jitter=0.0, network=FREE, faults=(Fault.parse("sequence-imbalance=0.5"),))).run
    work = {
        rank: [
            trace.spans.end[row] - trace.spans.start[row] for row in np.flatnonzero(trace.spans.kind == schema.FORWARD)
        ]
        for rank, trace in run.ranks.items()
    }

    assert np.std(work[0]) > 0.1 * np.mean(work[0])
    assert np.abs(np.array(work[0]) - work[1]).max() < 100_000  # tensor-parallel ranks share their microbatches
    assert np.abs(np.array(work[0]) - work[2]).max() > 500_000


def test_offset_and_drift_are_recovered() -> None:
    clocks = random_clocks(4, wall_error_ns=4_000_000, drift_ppm=30, seed=3)
    job = Job(dp=4, pp=2, microbatches=4, steps=12, gpus_per_host=2, clocks=clocks)
    made = synthesize(replace(job, outliers=0.02, missing=0.02))
    alignment = align(made.run)

    assert alignment.refused is None
    assert alignment.residual_ns["p50"] < 5_000
    true = np.arange(1, 3, 0.1) * 1e9
    by_node = {f"node{host}": clock for host, clock in clocks.items()}
    wanted = by_node[alignment.hosts[0].host].read(true.astype(np.int64))
    for host in alignment.hosts:
        on_reference = host.to_reference(by_node[host.host].read(true.astype(np.int64)))
        assert np.abs(on_reference - wanted).max() < 50_000


def test_clocks_step() -> None:
    clock = SimulatedClock(offset_ns=10, step_at_ns=100, step_ns=1_000, wall_step_ns=5)

    assert clock.read(np.array([0, 99, 100])).tolist() == [10, 109, 1_110]
    before, after = SimulatedClock(step_at_ns=1, wall_step_ns=5).anchors(0, 10_000_000_000)
    assert (after.realtime_ns - after.monotonic_ns) - (before.realtime_ns - before.monotonic_ns) == 5


@pytest.mark.parametrize(
    ("job", "schedule"),
    [
        (replace(SMALL, pp=4, microbatches=8), "1f1b"),
        (replace(SMALL, pp=4, microbatches=8, schedule="gpipe"), "gpipe"),
        (replace(SMALL, pp=4, microbatches=8, chunks=2), "interleaved_1f1b"),
        (replace(SMALL, pp=4, microbatches=8, schedule="zero-bubble"), "zb1p"),
    ],
)
def test_the_schedule_is_recognised(job: Job, schedule: str) -> None:
    analysis = analyse(synthesize(job).run)
    found = find_pipeline(OpenedRun.of(analysis))

    assert found is not None
    assert (found.schedule, found.stages, found.microbatches) == (schedule, 4, 8)


@pytest.mark.parametrize(
    "settings",
    [{"tp": 0}, {"chunks": 2, "schedule": "1f1b"}, {"ep": 3}, {"pp": 3, "chunks": 2}, {"schedule": "other"}],
)
def test_impossible_jobs_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Job(**settings)


@pytest.mark.parametrize(
    "text",
    [
        "slow-rank=9:1.2", "slow-rank", "slow-rank=1", "slow-rank=1-2:2", "data=1:-3", "nothing=1:2", "gc=a:1",
        "slow-link=1-2-3:2", "long-microbatch=4:2", "slow-network=1:2",
    ],
)  # fmt: skip
def test_impossible_faults_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        replace(SMALL, faults=(Fault.parse(text),))


def _longest_receive(made: Synthetic) -> dict[int, int]:
    """Of each rank that receives, the longest transfer of a message to it, ns."""
    longest = _longest_message(made, made.names.index("recv"))
    return {rank: ns for rank, ns in longest.items() if ns}


def _transfers(made: Synthetic, operation: str) -> list[int]:
    """The transfer times of one collective in the whole run, ns."""
    analysis = analyse(made.run)
    transfers: set[int] = set()
    for rank, trace in analysis.run.ranks.items():
        chosen = trace.spans.name == made.names.index(operation)
        transfers |= set(analysis.matches.ranks[rank].transfer_ns(trace.spans)[chosen].tolist())
    return sorted(transfers)


def _longest_message(made: Synthetic, name: int | None = None) -> dict[int, int]:
    """Of each rank, the longest transfer of a message, ns; of messages of one name only, if given."""
    analysis = analyse(made.run)
    longest = {}
    for rank, trace in analysis.run.ranks.items():
        chosen = (trace.spans.kind == schema.P2P) & ((name is None) | (trace.spans.name == name))
        longest[rank] = int(analysis.matches.ranks[rank].transfer_ns(trace.spans)[chosen].max(initial=0))
    return longest
