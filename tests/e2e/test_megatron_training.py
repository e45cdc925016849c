"""The example trains as if commtrace were not there, and every microbatch of it is in the trace."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.e2e.everything_on import EVERYTHING, NOTHING, assert_everything_was_on, assert_nobody_complained, places
from tests.e2e.launch import Starter, fork_with_megatron, launch
from tests.e2e.traces import compared_with_plan, role_of, rows

pytestmark = pytest.mark.e2e
pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'commtrace[megatron]'")

EXAMPLE = "examples/train_megatron_gpt.py"
ITERATIONS, MICROBATCHES = 3, 4
SMALL = ["--iterations", ITERATIONS, "--microbatches", MICROBATCHES, "--hidden", 64, "--sequence", 32]


def train(
    directory: Path,
    *options: object,
    processes: int = 4,
    variables: Mapping[str, str] | None = None,
    start: Starter = fork_with_megatron,
) -> str:
    """Run the example; the losses and gradient norms of its iterations, bit for bit."""
    losses = directory / "losses.txt"
    directory.mkdir(exist_ok=True)
    arguments = [EXAMPLE, *map(str, [*SMALL, *options]), "--print-losses", str(losses)]
    environment = {**places(directory / "run"), **(variables or {})}
    completed = start(arguments, processes, environment, timeout=200)
    assert completed.returncode == 0, completed.stdout
    # On a busy machine, exporters of a job of three iterations may still be opening when it ends.
    assert_nobody_complained(re.sub(r"no export to \w+: the job ended before it had begun", "", completed.stdout))
    return losses.read_text()


@pytest.mark.timeout(700)  # three trainings
def test_losses_are_bitwise_equal_with_commtrace_with_all_that_it_can_do_and_without(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "--pipeline", 2, "--overlap", variables=NOTHING)
    recorded = train(tmp_path, "--pipeline", 2, "--overlap")
    with_everything = train(tmp_path / "everything", "--pipeline", 2, "--overlap", variables=EVERYTHING)

    assert recorded == with_everything == plain
    assert len(set(plain.splitlines())) == ITERATIONS  # the loss changes: it does train
    assert_everything_was_on(load_run(tmp_path / "everything" / "run"), tmp_path / "everything" / "run", first_step=0)

    run = load_run(tmp_path / "run")
    assert run.problems == ()
    assert_is_as_planned(tmp_path / "run")
    assert sorted(run.ranks) == [0, 1, 2, 3]
    for rank, trace in run.ranks.items():
        assert trace.coordinates["pp"] == rank // 2
        assert trace.coordinates["dp"] == rank % 2
        assert trace.topology["schedule"] == "1f1b"
        assert trace.topology["microbatches"] == MICROBATCHES
        assert [row["step"] for row in rows(run, rank, schema.STEP)] == list(range(ITERATIONS))
        for step in range(ITERATIONS):
            assert phases(run, rank, step) == {("forward", 0): [0, 1, 2, 3], ("backward", 0): [0, 1, 2, 3]}
            assert [row["name"] for row in rows(run, rank, schema.OPTIMIZER, step=step)] == ["ChainedOptimizer"]
        data_parallel = [row for row in rows(run, rank, schema.COLLECTIVE, step=1) if row["is_async"]]
        assert {(row["name"], role_of(trace, row["group"])) for row in data_parallel} == {
            ("reduce_scatter", "dp"),
            ("all_gather", "dp"),
        }
    assert_pipeline_talks_between_neighbours(run)


def test_interleaved_schedule_with_two_chunks_per_rank(tmp_path: Path) -> None:
    train(tmp_path, "--pipeline", 2, "--virtual-pipeline", 2, processes=2)

    run = load_run(tmp_path / "run")
    assert run.problems == ()
    comparison = compared_with_plan(tmp_path / "run")
    assert comparison.differences == 0, comparison.verdict
    # The chunks behind the first one reduce all of their buckets together.
    explained = {(row.ranks, row.operation) for row in comparison.rows if row.verdict == "explained"}
    assert explained == {((1,), "all_gather"), ((1,), "reduce_scatter")}
    every = [0, 1, 2, 3]
    for rank, trace in run.ranks.items():
        assert trace.topology["schedule"] == "interleaved_1f1b"
        assert trace.topology["chunks"] == trace.parallel["vpp"] == 2
        for step in range(ITERATIONS):
            assert phases(run, rank, step) == {
                (kind, chunk): every for kind in ("forward", "backward") for chunk in (0, 1)
            }
    # In this layout Megatron sends one direction over the world group.
    assert_pipeline_talks_between_neighbours(run)


def test_tensor_and_sequence_parallelism(tmp_path: Path) -> None:
    train(tmp_path, "--tensor", 2, "--sequence-parallel", processes=2, start=launch)

    run = load_run(tmp_path / "run")
    assert_is_as_planned(tmp_path / "run")
    for rank, trace in run.ranks.items():
        assert trace.topology["schedule"] == "no_pipelining"
        in_forward = [row for row in rows(run, rank, schema.COLLECTIVE, step=1) if row["microbatch"] == 2]
        assert {"all_gather", "reduce_scatter"} <= {row["name"] for row in in_forward}
        assert {role_of(trace, row["group"]) for row in in_forward} == {"tp"}


def assert_is_as_planned(directory: Path) -> None:
    comparison = compared_with_plan(directory)
    assert {row.verdict for row in comparison.rows} == {"same"}, [row for row in comparison.rows if row.reason]
    assert "dist-opt" in {row.role for row in comparison.rows}


def phases(run: Run, rank: int, step: int) -> dict[tuple[str, int], list[int]]:
    """Microbatches by phase and chunk, in the order in which they ran; all of them on the rank's own stage."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in rows(run, rank, schema.FORWARD, schema.BACKWARD, step=step):
        assert row["stage"] == run.ranks[rank].coordinates["pp"]
        assert row["end"] > row["start"]
        found[row["kind"], row["chunk"]].append(row["microbatch"])
    return dict(found)


def assert_pipeline_talks_between_neighbours(run: Run) -> None:
    for rank, trace in run.ranks.items():
        transfers = list(rows(run, rank, schema.P2P))
        assert transfers
        for row in transfers:
            assert role_of(trace, row["group"], row["peer"]) == "pp"
            assert abs(run.ranks[row["peer"]].coordinates["pp"] - trace.coordinates["pp"]) == 1
