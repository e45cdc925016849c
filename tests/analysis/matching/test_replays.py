"""A job whose forward and backward are replayed from a graph, beside the same job without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.hangs.examination import examine
from commtrace.analysis.step_totals import step_totals
from commtrace.analysis.stragglers.search import ReplayedShare
from commtrace.analysis.summary import Summary, summarise
from commtrace.planning.call_counts import count_calls, shape
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.findings.reading import why_not
from tests.graphed_runs import MS, OPERATIONS, STAMPS, graph_mark, replay, write_run
from tests.trace.rows import row, write_rank


@pytest.fixture
def eager(tmp_path: Path) -> Path:
    return write_run(tmp_path / "eager", is_graphed=False)


@pytest.fixture
def graphed(tmp_path: Path) -> Path:
    return write_run(tmp_path / "graphed", is_graphed=True)


def sent(summary: Summary) -> list[tuple[str, str, int, int | None]]:
    return sorted((row.role, row.operation, row.count, row.num_bytes) for row in summary.communication)


def test_counts_and_bytes_are_those_of_the_job_without_graphs(eager: Path, graphed: Path) -> None:
    without, replayed = summarise(eager), summarise(graphed)

    assert sent(replayed) == sent(without)
    assert replayed.coverage.captured["collective"] == without.coverage.captured["collective"]
    assert replayed.missing == without.missing == 0


def test_a_plan_is_compared_with_the_same_calls(eager: Path, graphed: Path) -> None:
    shapes = [shape(count_calls(analyse(folder)).usual(1).counts) for folder in (eager, graphed)]
    assert shapes[0] == shapes[1]
    assert count_calls(analyse(graphed)).usual(1).steps == (1, 2, 3)


def test_time_in_replays_is_neither_compute_nor_exposed_nor_hidden(graphed: Path) -> None:
    for rank in summarise(graphed).ranks:
        assert rank.part("replay") == 80 * MS
        assert (rank.part("compute"), rank.hidden_ns, rank.part("exposed")) == (0, 0, 10 * MS)
        assert rank.wall_ns == 100 * MS
        assert rank.to_json()["replay_ns"] == 80 * MS


def test_calls_in_replays_have_no_times_of_their_own(graphed: Path) -> None:
    rows = {row.operation: row for row in summarise(graphed).communication}

    gathered = rows["all_gather"]
    assert (gathered.count, gathered.replayed, gathered.unfinished, gathered.unmatched) == (12, 12, 0, 0)
    assert (gathered.duration_p50_ns, gathered.busbw_gbps, gathered.exposed_ratio) == (None, None, None)
    assert (gathered.exposed_ns, gathered.hidden_ns, gathered.upper_bounds) == (0, 0, 0)
    assert not gathered.durations_are_bounds
    assert gathered.to_json()["replayed"] == 12
    assert rows["all_reduce"].replayed == 0
    assert rows["all_reduce"].duration_max_ns == 10 * MS


def test_members_that_disagree_are_found_in_replays_too(tmp_path: Path) -> None:
    other = [["all_gather", 0, at, 0, 4_001, -1, "float32", -1, True, -1, -1, -1, ""] for at in range(3)]
    write_run(tmp_path, is_graphed=True, changes={1: {"operations": other}})

    # In each of three steps: the first two differ in bytes, the third in the operation.
    assert sum(row.mismatched for row in summarise(tmp_path).communication) == 2 * 3 * 3


def test_a_sentence_says_what_was_replayed(graphed: Path) -> None:
    summary = summarise(graphed)

    (replays,) = summary.coverage.replays
    assert replays.sentence == (
        "Forward+backward replayed from a CUDA graph: 80 ms per step, which contains 2 all_gather (8 kB), "
        "1 reduce_scatter (6 kB): when in it they ran, and whether they were exposed, is not known."
    )
    assert any(
        sentence.startswith("80% of the step is replayed from CUDA graphs that communicate")
        for sentence in why_not(summary.findings)
    )
    assert summary.coverage.not_visible == ()
    (in_doctor,) = examine(graphed, now_ns=0).coverage.replays
    assert in_doctor.calls == replays.calls


def test_a_rank_that_waits_inside_graph_replays_is_not_judged(tmp_path: Path) -> None:
    abstentions = why_not(summarise(write_run(tmp_path, is_graphed=True, steps=12)).findings)

    assert any(sentence.startswith("80% of the step is replayed from CUDA graphs") for sentence in abstentions)


def test_windows_of_a_run_add_up(tmp_path: Path) -> None:
    whole = summarise(write_run(tmp_path, is_graphed=True, steps=8))
    (replays,) = whole.coverage.replays
    parts = [analyse(tmp_path, steps) for steps in ("1:4", "4:8")]

    (joined,) = (step_totals(parts[0]) + step_totals(parts[1])).captured.coverage(load_run(tmp_path)).replays
    assert joined == replays


def test_several_replays_in_a_step_are_counted(tmp_path: Path) -> None:
    rows = [graph_mark(), row(kind=schema.STEP, name="step", step=0, start=0, end=100 * MS)]
    first = 0
    for at in range(4):
        rows.append(replay(0, at * 10 * MS, at * 10 * MS + 5 * MS, first, seq=at, name="forward", microbatch=at))
        first += len(OPERATIONS)
    write_rank(tmp_path, rows, rank=0, world_size=2)

    (replays,) = examine(tmp_path, now_ns=0).coverage.replays
    assert replays.sentence.startswith(
        "Forward replayed from CUDA graphs: 20 ms per step in 4 replays, which contain 8"
    )


def test_unknown_contents_are_said_to_be_unknown(tmp_path: Path) -> None:
    rows = [row(kind=schema.STEP, name="step", step=0, start=0, end=100), replay(0, 0, 50, 0, name="graph")]
    write_rank(tmp_path, rows, rank=0, world_size=2)

    (replays,) = examine(tmp_path, now_ns=0).coverage.replays
    assert not replays.is_known
    assert replays.sentence.startswith("Work replayed from a CUDA graph: ")
    assert "what they contain is not known" in replays.sentence


@pytest.mark.parametrize(("name", "phase"), [("forward", "forward"), ("forward+backward", "other"), ("graph", "other")])
def test_replays_without_communication_are_compute(name: str, phase: str, tmp_path: Path) -> None:
    graph = graph_mark(counters=[], operations=[])
    rows = [graph]
    for step in range(2):
        rows.append(row(kind=schema.STEP, name="step", step=step, start=100 * step, end=100 * step + 100))
        inside = {"detail": '{"first":[]}', "bytes": 0, "op_in_seq": 0, "name": name}
        rows.append(replay(step, 100 * step, 100 * step + 60, 0, **inside))
    write_rank(tmp_path, rows, rank=0, world_size=1)

    (rank,) = summarise(tmp_path).ranks
    assert rank.part("replay") == 0
    assert {state.detail: ns for state, ns in rank.of_state.items() if state.kind == "compute" and ns} == {phase: 60}


def test_little_that_is_replayed_keeps_nothing_from_being_judged() -> None:
    assert ReplayedShare(4, 100).sentences() == ()
    assert ReplayedShare(0, 0).sentences() == ()
    (sentence,) = ReplayedShare(3, 100).plus(ReplayedShare(47, 0)).sentences()
    assert sentence.startswith("50% of the step is replayed")


# With stamps


def times(summary: Summary) -> dict[str, tuple[object, ...]]:
    """What is said of each operation, but for whether it came from a graph."""
    return {
        row.operation: (
            row.count, row.num_bytes, row.unmatched, row.duration_p50_ns, row.busbw_gbps, row.wait_ns, row.hidden_ns,
            row.exposed_ns,
        )
        for row in summary.communication
    }  # fmt: skip


def test_stamped_calls_have_the_times_of_the_job_without_graphs(eager: Path, tmp_path: Path) -> None:
    stamped = write_run(tmp_path / "stamped", is_graphed=True, waits_ms={0: (10, 10, 10), 1: (10, 10, 10)})
    without, replayed = summarise(eager), summarise(stamped)

    assert times(replayed) == times(without)
    assert sent(replayed) == sent(without)
    assert [row.replayed for row in replayed.communication] == [0, 0, 0]
    assert (replayed.missing, without.missing) == (0, 0)
    shapes = [shape(count_calls(analyse(folder)).usual(1).counts) for folder in (eager, stamped)]
    assert shapes[0] == shapes[1]


def test_a_replay_that_is_stamped_throughout_is_compute_and_stalls(tmp_path: Path) -> None:
    waits = (10, 10, 2)  # the last is waited for 2 ms after its launch, and takes 5
    for rank in summarise(write_run(tmp_path, is_graphed=True, waits_ms={0: waits, 1: waits})).ranks:
        assert rank.part("replay") == 0
        assert rank.part("exposed") == pytest.approx(13 * MS, abs=2)
        assert rank.part("compute") == pytest.approx(77 * MS, abs=2)
        assert rank.hidden_ns == pytest.approx(12 * MS, abs=4)


def test_a_rank_without_times_leaves_the_others_unmatched(tmp_path: Path) -> None:
    summary = summarise(write_run(tmp_path, is_graphed=True, waits_ms={0: (10, 10, 10)}))
    rows = {row.operation: row for row in summary.communication}

    assert rows["all_gather"].count == 12
    assert rows["all_gather"].replayed == 6
    assert summary.missing == 0
    by_rank = {rank.rank: rank.part("replay") for rank in summary.ranks}
    assert by_rank == {0: 0, 1: 80 * MS}


def test_doctor_says_how_many_are_stamped_and_why_others_are_not(tmp_path: Path) -> None:
    changes = {"stamps": STAMPS[:2], "unstamped": {"the driver has refused": 1}}
    waits = dict.fromkeys(range(2), (10, 10, 10))
    write_run(tmp_path, is_graphed=True, waits_ms=waits, changes=dict.fromkeys(range(2), changes))

    (replays,) = examine(tmp_path, now_ns=0).coverage.replays
    assert replays.stamped is not None
    assert replays.sentence.endswith(f"some with device times of their own. {replays.stamped.sentence}")
    assert replays.stamped.sentence == (
        "2 of 3 calls per step have device times of their own, by stamps; 1 have none: the driver has refused; "
        "1 stamp in 13,333 µs of the replays."
    )
    assert {rank.part("replay") for rank in summarise(tmp_path).ranks} == {80 * MS}


def test_overwritten_replays_are_reported(tmp_path: Path) -> None:
    write_run(tmp_path, is_graphed=True, waits_ms={0: (10, 10, 10)})

    (replays,) = examine(tmp_path, now_ns=0).coverage.replays
    assert replays.stamped is not None
    assert replays.stamped.lost == 1.5
    assert "the times of 1.5 were lost" in replays.stamped.sentence
    assert replays.to_json()["stamped"] == replays.stamped.to_json()
