"""Mixtures of experts in Megatron, one microbatch after the other and two at a time: the same work, all of it seen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from commtrace.analysis.chain import analyse
from commtrace.analysis.pipeline.observed import find_pipeline
from commtrace.analysis.windows.run import OpenedRun
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.e2e.launch import REPOSITORY, fork_with_megatron
from tests.e2e.traces import compared_with_plan, role_of, rows

pytestmark = pytest.mark.e2e
pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'commtrace[megatron]'")

PROGRAM = REPOSITORY / "tests" / "e2e" / "programs" / "megatron_experts.py"
LAYERS, MICROBATCHES, ITERATIONS = 2, 4, 2


def train(directory: Path, *options: str, ranks: int = 2) -> tuple[Run, list[str]]:
    completed = fork_with_megatron([PROGRAM, *options], ranks, {"COMMTRACE_DIR": str(directory)})
    assert completed.returncode == 0, completed.stdout
    run = load_run(directory)
    assert run.problems == ()
    comparison = compared_with_plan(directory)
    assert {row.operation for row in comparison.rows if row.verdict != "same"} <= {"all_to_all"}, comparison.verdict
    assert comparison.differences == 0, comparison.verdict
    return run, sorted(line for line in completed.stdout.splitlines() if "loss [" in line)


def test_dispatch_and_combine_in_both_schedules(tmp_path: Path) -> None:
    plain, losses = train(tmp_path / "plain")
    combined, losses_of_combined = train(tmp_path / "combined", "--combined")

    assert losses_of_combined == losses
    for run in (plain, combined):
        assert sorted(run.ranks) == [0, 1]
        for rank, trace in run.ranks.items():
            for step in range(ITERATIONS):
                work = rows(run, rank, schema.FORWARD, schema.BACKWARD, step=step)
                assert sorted((row["name"], row["microbatch"], row["chunk"], row["stage"]) for row in work) == sorted(
                    (name, microbatch, 0, 0) for name in ("forward", "backward") for microbatch in range(MICROBATCHES)
                )
                phases = Counter((row["name"], row["microbatch"]) for row in rows(run, rank, schema.PHASE, step=step))
                assert {phase: count for phase, count in phases.items() if phase[0] in ("dispatch", "combine")} == {
                    (name, microbatch): LAYERS for name in ("dispatch", "combine") for microbatch in range(MICROBATCHES)
                }
                places = Counter(
                    row["microbatch"]
                    for row in rows(run, rank, schema.COLLECTIVE, step=step)
                    if row["name"] == "all_to_all"
                )
                assert places == dict.fromkeys(range(MICROBATCHES), 2 * 3 * LAYERS), "half of them of its backward"
                sent = Counter(
                    (row["name"], role_of(trace, row["group"])) for row in rows(run, rank, schema.COLLECTIVE, step=step)
                )
                # Tokens and their probabilities to the experts, tokens back; all of it again in the backward.
                assert sent["all_to_all", "ep"] == 2 * 3 * LAYERS * MICROBATCHES
    for rank in combined.ranks:
        spans = {
            (row["name"], row["microbatch"]): row
            for row in rows(combined, rank, schema.FORWARD, schema.BACKWARD, step=1)
        }
        for microbatch in range(MICROBATCHES - 1):
            forward, backward = spans["forward", microbatch + 1], spans["backward", microbatch]
            assert backward["start"] <= forward["start"] < forward["end"] <= backward["end"]


def test_combined_forwards_and_backwards_in_an_interleaved_pipeline(tmp_path: Path) -> None:
    run, _ = train(tmp_path, "--combined", "--interleaved", ranks=4)

    assert sorted(run.ranks) == list(range(4))
    for rank, trace in run.ranks.items():
        stage = trace.coordinates["pp"]
        work = list(rows(run, rank, schema.FORWARD, schema.BACKWARD, step=1))
        assert sorted((row["name"], row["microbatch"], row["chunk"], row["stage"]) for row in work) == sorted(
            (name, microbatch, chunk, stage)
            for name in ("forward", "backward")
            for microbatch in range(MICROBATCHES)
            for chunk in (0, 1)
        )
        # One forward more than without the overlap runs ahead; then each is inside the backward it is combined with.
        ahead = 2 * (1 - stage) + 2 + 1
        alone = [row for row in work if row["name"] == "forward"][:ahead]
        combined = [(one, other) for one in work for other in work if one["start"] < other["start"] < one["end"]]
        assert {one["name"] for one, _ in combined} == {"backward"}
        assert {other["name"] for _, other in combined} == {"forward"}
        assert len(combined) == 2 * MICROBATCHES - len(alone)
        phases = Counter(
            (row["name"], row["microbatch"], row["chunk"])
            for row in rows(run, rank, schema.PHASE, step=1)
            if row["name"] in ("dispatch", "combine")
        )
        assert set(phases.values()) == {LAYERS}
        assert len(phases) == 2 * 2 * MICROBATCHES
        sent = Counter(
            (row["microbatch"], row["chunk"])
            for row in rows(run, rank, schema.COLLECTIVE, step=1)
            if row["name"] == "all_to_all"
        )
        assert set(sent.values()) == {2 * 3 * LAYERS}
        assert len(sent) == 2 * MICROBATCHES
        assert {row["microbatch"] for row in rows(run, rank, schema.P2P, step=1)} == {-1}
    analysis = analyse(run)
    pipeline = find_pipeline(OpenedRun.of(analysis))
    assert pipeline is not None
    assert (pipeline.stages, pipeline.chunks, pipeline.microbatches) == (2, 2, MICROBATCHES)
