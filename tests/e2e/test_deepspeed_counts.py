"""Every communication of real DeepSpeed jobs is recorded once, in its phase, and training computes the same bits."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from commtrace.analysis.communication.bandwidth import bus_factor
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from commtrace.trace.run import Run
from tests.e2e.launch import REPOSITORY, fork
from tests.e2e.traces import compared_with_plan, role_of, rows
from tests.reference import reference_data

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="deepspeed is not installed: pip install 'commtrace[deepspeed]'",
    ),
]

PROGRAMS = REPOSITORY / "tests" / "e2e" / "programs"
COUNTED = PROGRAMS / "deepspeed_counts.py"
PIPELINE = PROGRAMS / "deepspeed_pipeline.py"
ON_CPU = {"DS_ACCELERATOR": "cpu"}  # which DeepSpeed reads when it is imported
ITERATIONS, ACCUMULATION = 3, 2
STEPS = range(1, ITERATIONS + 1)

STAGES = ("0", "1", "3", "3-released")
MODEL_BYTES = 48_096 * 2

OPERATIONS = {
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "reduce": "reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""The reference counts calls of torch's functions, commtrace the operations that reach a process group. For these
functions it is one each, of the same bytes: the tensor, an all_gather's output, a reduce_scatter's input, 0 for a
barrier. It is not for object collectives: all_gather_object, say, was counted with 0 bytes, as were the two all_gather
inside of it, of which alone there are spans. ZeRO 0, 1 and 3 call none: any that were there would fail to be mapped."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a run of each stage, and what the job printed."""
    folder = tmp_path_factory.mktemp("counted")
    return folder, recorded([COUNTED, *STAGES, "--runs", folder])


def test_counts_are_those_of_deepspeed_itself(counted: tuple[Path, str]) -> None:
    folder, output = counted

    for stage in (0, 1, 3):
        run = load_run(folder / f"zero{stage}")
        assert run.problems == ()
        for rank in (0, 1):
            assert_is_as_deepspeed_counted(run, rank, stage)
        comparison = compared_with_plan(folder / f"zero{stage}")
        assert {row.verdict for row in comparison.rows} == {"same"}, [row for row in comparison.rows if row.reason]
    assert digests(output) == digests(unrecorded([COUNTED, *STAGES]))


@pytest.mark.parametrize(
    ("stage", "gradients", "parameters", "small"),
    [
        # An all_reduce of the gradients when the accumulation ends: what reduces and gathers them.
        ("0", 2.0, 0.0, 0),
        # The same, as DeepSpeed reduces whole buckets, and a gather of the parameters: one more than with a
        # reduce_scatter. Overflow and norm are reduced, 1 and 4 bytes.
        ("1", 2.0, 1.0, 2 * 5),
        # A reduce_scatter for each backward, and a gather for each forward and each backward: 3 for each micro-step.
        ("3-released", 1.0 * ACCUMULATION, 2.0 * ACCUMULATION, 2 * 8),
        # Parameters that stay until the backward are gathered once: 2 for each micro-step.
        ("3", 1.0 * ACCUMULATION, 1.0 * ACCUMULATION, 2 * 8),
    ],
)
def test_volumes_are_those_of_the_formulas(
    stage: str, gradients: float, parameters: float, small: int, counted: tuple[Path, str]
) -> None:
    """An all_reduce moves the model twice, a gather or a reduce_scatter once: (n - 1)/n of it with n ranks."""
    run = load_run(counted[0] / f"zero{stage}")
    for rank, step in ((rank, step) for rank in (0, 1) for step in STEPS[1:]):
        moved: Counter[str] = Counter()
        for row in rows(run, rank, schema.COLLECTIVE, step=step):
            moved[row["name"]] += round(row["bytes"] * bus_factor(row["name"], 2) * 2)

        of_gradients = moved["all_reduce"] - small + moved["reduce_scatter"]
        assert of_gradients == gradients * MODEL_BYTES
        # Weights of norms are persistent: they are gathered once per step, with the update.
        assert moved["all_gather"] == pytest.approx(parameters * MODEL_BYTES, rel=0.01)
        assert set(moved) <= {"all_reduce", "reduce_scatter", "all_gather"}


def assert_is_as_deepspeed_counted(run: Run, rank: int, zero_stage: int) -> None:
    assert communication(run, rank) == reference(zero_stage, rank)
    assert work(run, rank) == [
        (kind, step, microbatch, 0)
        for step in STEPS
        for microbatch in range(ACCUMULATION)
        for kind in ("forward", "backward")
    ]
    assert [row["step"] for row in rows(run, rank, schema.STEP)] == list(STEPS)
    # DeepSpeed also makes the optimizer step once while it initialises, which belongs to no step.
    optimizer_steps = [row["step"] for row in rows(run, rank, schema.OPTIMIZER) if row["step"] >= 0]
    assert optimizer_steps == list(STEPS)
    trained = [row for row in rows(run, rank, schema.COLLECTIVE) if row["step"] >= 0]
    assert {role_of(run.ranks[rank], row["group"]) for row in trained} == {"dp"}
    phases = [(row["step"], row["microbatch"], row["name"]) for row in rows(run, rank, schema.PHASE)]
    named = {name for _, _, name in phases}
    assert named == ({"gather", "prefetch", "reduce"} if zero_stage == 3 else {"reduce"})
    # ZeRO 3 prefetches as soon as it has seen in which order parameters are used.
    prefetching = sorted({(step, microbatch) for step, microbatch, name in phases if name == "prefetch"})
    places = [(step, microbatch) for step in STEPS for microbatch in range(ACCUMULATION)]
    assert prefetching == (places[1:] if zero_stage == 3 else [])


def communication(run: Run, rank: int) -> Counter[tuple[str, str, int]]:
    """The phase of a communication is the program's own span that it was launched in."""
    phases = [(row["start"], row["end"], row["name"]) for row in rows(run, rank, schema.USER)]
    counted: Counter[tuple[str, str, int]] = Counter()
    for row in rows(run, rank, schema.COLLECTIVE, schema.P2P):
        phase = next((name for start, end, name in phases if start <= row["start"] <= end), "init")
        counted[phase, row["name"], row["bytes"]] += 1
    return counted


def reference(zero_stage: int, rank: int) -> Counter[tuple[str, str, int]]:
    recorded = json.loads(reference_data("deepspeed_counts", f"z{zero_stage}.r{rank}.json").read_text())["rec"]
    return Counter(
        {(phase, OPERATIONS[operation], num_bytes): calls for phase, operation, num_bytes, calls in recorded}
    )


def test_a_pipeline_is_its_schedules_instructions(tmp_path: Path) -> None:
    batches, microbatches = 2, 4

    run, output = record([PIPELINE, str(batches), str(microbatches)], tmp_path / "run")

    assert re.findall(r"steps: (\d+) loss", output) == ["1", "2"]  # DeepSpeed's own log, whose numbers the steps have
    for stage in (0, 1):
        trace = run.ranks[stage]
        for kind in (schema.FORWARD, schema.BACKWARD):
            assert [(row["step"], row["microbatch"], row["chunk"], row["stage"]) for row in rows(run, stage, kind)] == [
                (step, microbatch, 0, stage) for step in range(1, batches + 1) for microbatch in range(microbatches)
            ]
        assert [row["step"] for row in rows(run, stage, schema.STEP)] == list(range(1, batches + 1))
        assert [row["step"] for row in rows(run, stage, schema.OPTIMIZER)] == list(range(1, batches + 1))
        assert [row["name"] for row in rows(run, stage, schema.EVALUATION)] == ["evaluation"]
        assert len(list(rows(run, stage, schema.RECOMPUTE))) == batches * microbatches * 2
        assert {role_of(trace, row["group"], row["peer"]) for row in rows(run, stage, schema.P2P)} == {"pp"}
        assert trace.coordinates == {"tp": 0, "pp": stage, "dp": 0}
        assert {name: trace.topology[name] for name in ("schedule", "stages", "microbatches")} == {
            "schedule": "1f1b",
            "stages": 2,
            "microbatches": microbatches,
        }
    assert order(run, 0)[:4] == [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2)]
    assert order(run, 1)[:4] == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    assert digests(output) == digests(unrecorded([PIPELINE, str(batches), str(microbatches)]))


def order(run: Run, rank: int) -> list[tuple[str, int]]:
    return [(kind, microbatch) for kind, _, microbatch, _ in work(run, rank)]


def work(run: Run, rank: int) -> list[tuple[str, int, int, int]]:
    return [
        (row["kind"], row["step"], row["microbatch"], row["stage"])
        for row in rows(run, rank, schema.FORWARD, schema.BACKWARD)
    ]


def record(command: list[str | Path], directory: Path) -> tuple[Run, str]:
    output = recorded(command, {"COMMTRACE_DIR": str(directory)}, imports=())  # commtrace comes before DeepSpeed
    run = load_run(directory)
    assert run.problems == ()
    return run, output


def recorded(
    command: list[str | Path], env: Mapping[str, str] | None = None, imports: Sequence[str] = ("deepspeed",)
) -> str:
    completed = fork(command, 2, {**ON_CPU, **(env or {})}, timeout=180, imports=imports)
    assert completed.returncode == 0, completed.stdout
    told = [line for line in completed.stdout.splitlines() if "commtrace" in line]
    assert [line for line in told if "recording to" not in line] == []
    return completed.stdout


def unrecorded(command: list[str | Path]) -> str:
    completed = fork(command, 2, {**ON_CPU, "COMMTRACE_ENABLED": "0"}, timeout=180, imports=["deepspeed"])
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


def digests(output: str) -> dict[tuple[int, str], str]:
    """By rank, and by what it computed."""
    found = {(int(rank), what): digest for rank, what, digest in re.findall(r"rank (\d) (.*)computed (\w{64})", output)}
    assert {rank for rank, _ in found} == {0, 1}, output
    return found
