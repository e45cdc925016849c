"""Predict changes of a real pipeline (gloo) from one recorded run, then really run each of them.

    python bench/whatif_real.py                  # about ten minutes; prints the table of docs/whatif.md

Four ranks train with schedules of torch.distributed.pipelining, 16 layers, one of the ranks slower than the others.
Work is sleep, so that four ranks need a small part of two cores; order, messages and waits are torch's and gloo's own.
On a machine with other work, sleeps last longer now and then: run it with `chrt -r 5` in front, if that is allowed.
Every prediction is made from the first run. What a run takes is measured by the job with a clock of its own, without
commtrace's spans: the mean step of rank 0, without the first ones. Recording is on in all runs, so that they compare.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import torch


RANKS: Final = 4
LAYERS: Final = (4, 4, 4, 4)
FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS = 0.003, 0.003, 0.003
"""Of a layer, seconds."""

SLOW_RANK, SLOWER = 2, 1.4
WARM_UP: Final = 3
BASE: Final = "base"


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of the job, and what asks for it in a prediction."""

    name: str
    options: tuple[str, ...] = ()
    schedule: str = "Schedule1F1B"
    chunks: int = 1
    microbatches: int = 8
    layers: tuple[int, ...] = LAYERS
    slower: float = SLOWER
    recompute: bool = False
    gather_ms: float = 0.0  # longer all_reduce at the end of a step


SETTINGS: Final = (
    Setting(BASE),
    Setting("no slow rank", ("--without-slow-rank", str(SLOW_RANK)), slower=1.0),
    Setting("16 microbatches", ("--microbatches", "16"), microbatches=16),
    Setting("4 microbatches", ("--microbatches", "4"), microbatches=4),
    Setting("GPipe", ("--schedule", "gpipe"), schedule="ScheduleGPipe"),
    Setting(
        "interleaved, 2 chunks",
        ("--schedule", "interleaved", "--chunks", "2"),
        schedule="ScheduleInterleaved1F1B",
        chunks=2,
    ),
    Setting(
        "zero bubble, 2 chunks",
        ("--schedule", "zero-bubble", "--chunks", "2"),
        schedule="ScheduleInterleavedZeroBubble",
        chunks=2,
    ),
    Setting("recompute", ("--recompute", "on"), recompute=True),
    Setting("layers 4, 5, 3, 4", ("--layers-before", "4,4,4,4", "--layers", "4,5,3,4"), layers=(4, 5, 3, 4)),
    Setting(
        "no slow rank, 16 microbatches",
        ("--without-slow-rank", str(SLOW_RANK), "--microbatches", "16"),
        slower=1.0,
        microbatches=16,
    ),
    Setting("all_reduce 30 ms longer", ("--latency", "mp=+30ms"), gather_ms=30.0),
)


# The job


def train(folder: Path, steps: int) -> None:
    """Run every setting on this rank, each recorded as a run of its own."""
    import torch
    import torch.distributed as dist

    import commtrace

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    longer = _longer_waits()
    for setting in SETTINGS:
        gc.collect()
        gc.freeze()  # else a collection of all that torch made, 190 ms, falls into a step of some setting
        commtrace.start(commtrace.Config(dir=str(folder / setting.name)))
        seconds = _train(setting, steps, longer)
        commtrace.stop()
        if dist.get_rank() == 0:
            (folder / f"{setting.name}.json").write_text(json.dumps(seconds))
        dist.barrier()
    dist.destroy_process_group()


class _Longer:
    """Milliseconds that the next all_reduce takes longer."""

    ms = 0.0


def _longer_waits() -> _Longer:
    import torch.distributed as dist

    process_group: Any = dist.distributed_c10d.ProcessGroup
    longer, original = _Longer(), process_group.allreduce

    def allreduce(group: object, *arguments: object, **keywords: object) -> dist.Work:
        work: dist.Work = original(group, *arguments, **keywords)
        if longer.ms:
            work.wait()
            time.sleep(longer.ms / 1e3)
        return work

    process_group.allreduce = allreduce
    return longer


def _train(setting: Setting, steps: int, longer: _Longer) -> list[float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.utils.checkpoint import checkpoint

    rank = dist.get_rank()
    scale = setting.slower if rank == SLOW_RANK else 1.0

    class Input(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(values)  # so that a checkpoint has to recompute it
            time.sleep(FORWARD * scale)
            return values.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(BACKWARD_INPUT * scale)
            (values,) = context.saved_tensors
            passed_on: torch.Tensor = gradient + 0 * values
            return passed_on

    class Weights(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(BACKWARD_WEIGHTS * scale)
            return gradient

    through_input: Any = Input
    through_weights: Any = Weights

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(64))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = through_input.apply(values) + through_weights.apply(self.weight)
            return output

    class Layers(torch.nn.Sequential):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            forward: Any = super().forward
            output: torch.Tensor
            output = checkpoint(forward, values, use_reentrant=False) if setting.recompute else forward(values)
            return output

    group = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",)).get_group("pp")
    count = RANKS * setting.chunks
    per_chunk = setting.layers[rank] // setting.chunks
    stages = [
        PipelineStage(
            Layers(*(Layer() for _ in range(per_chunk))), rank + RANKS * chunk, count, torch.device("cpu"), group=group
        )
        for chunk in range(setting.chunks)
    ]
    schedule = getattr(schedules, setting.schedule)(
        stages if setting.chunks > 1 else stages[0],
        n_microbatches=setting.microbatches,
        loss_fn=torch.nn.functional.mse_loss,
    )
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    batch = torch.randn(setting.microbatches, 64, requires_grad=True)
    target = torch.randn(setting.microbatches, 64)
    inputs = (batch,) if rank == 0 else ()
    wanted = {"target": target} if rank == RANKS - 1 else {}
    norm, everyone = torch.ones(1), dist.new_group(list(range(RANKS)), group_desc="mp")
    longer.ms = setting.gather_ms
    ends = []
    for _ in range(steps):
        schedule.step(*inputs, **wanted)
        dist.all_reduce(norm, group=everyone)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    longer.ms = 0.0
    return ends


# What it took, and what was said


class Row(NamedTuple):
    """A change: predicted and measured, seconds."""

    name: str
    options: tuple[str, ...]
    predicted_s: float
    uncertainty_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def run(folder: Path, steps: int) -> None:
    """Run and record every setting once."""
    folder.mkdir(parents=True, exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*torchrun, __file__, "--train", str(folder), "--steps", str(steps)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMMTRACE_")}
    subprocess.run(command, check=True, timeout=900, env={**environment, "OMP_NUM_THREADS": "1"})


def judge(folder: Path, base: Path) -> list[Row]:
    """Predict every setting from the base run, beside what it took."""
    rows = []
    for setting in SETTINGS:
        ends = json.loads((folder / f"{setting.name}.json").read_text())[WARM_UP - 1 :]
        taken_s = (ends[-1] - ends[0]) / (len(ends) - 1)
        name = setting.name if setting.options else f"none ({setting.name})"
        rows.append(Row(name, setting.options, *predicted(base, setting.options, WARM_UP), taken_s))
    return rows


def predicted(run: Path, options: Sequence[str], first_step: int) -> tuple[float, float]:
    """Return the predicted step time of a run with changes and its uncertainty, seconds."""
    command = [sys.executable, "-m", "commtrace", "whatif", str(run), "--json", *options]
    command += ["--steps", f"{first_step}:{1_000_000}"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if completed.returncode:
        raise SystemExit(f"{shlex.join(command)}: {completed.stderr}")
    answer = json.loads(completed.stdout)
    return answer["predicted_ns"] / 1e9, answer["uncertainty_ns"] / 1e9


def medians(rounds: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the rows of several rounds as one: medians of what was predicted and measured."""
    found = []
    for rows in zip(*rounds, strict=True):
        predicted_s, uncertainty_s, measured_s = (
            statistics.median(own) for own in zip(*(row[2:] for row in rows), strict=True)
        )
        found.append(Row(rows[0].name, rows[0].options, predicted_s, uncertainty_s, measured_s))
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown; changes are relative to the measured base run."""
    base = rows[0].measured_s
    lines = [
        "| change | predicted, ms | measured, ms | error | predicted change | measured change |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        changes = (f"{time_s / base - 1:+.1%}" for time_s in (row.predicted_s, row.measured_s))
        name = f"{row.name} (`{' '.join(row.options)}`)" if row.options else row.name
        lines.append(
            f"| {name} | {row.predicted_s * 1e3:.1f} ± {row.uncertainty_s * 1e3:.1f} | {row.measured_s * 1e3:.1f} | "
            f"{row.error:+.1%} | {' | '.join(changes)} |"
        )
    return "\n".join(lines)


def errors(rows: Sequence[Row]) -> str:
    """Return a sentence on the errors of all changes; the first row has none."""
    changed = rows[1:]
    shares = sorted(abs(row.error) for row in changed)
    within = sum(abs(row.predicted_s - row.measured_s) <= row.uncertainty_s for row in changed)
    return (
        f"Of {len(changed)} changes: median error {statistics.median(shares):.1%}, largest {shares[-1]:.1%}; "
        f"{within} within ±."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="how often all of them are run, one after the other")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, or judge those that are there")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.steps)
        return
    with tempfile.TemporaryDirectory() as temporary:
        rounds = [(arguments.keep or Path(temporary)) / str(turn) for turn in range(arguments.rounds)]
        for folder in rounds:
            if not (folder / f"{SETTINGS[-1].name}.json").exists():
                run(folder, arguments.steps)
        rows = medians([judge(folder, folder / BASE) for folder in rounds])
    machine = platform.processor() or platform.machine()
    repeated = f"medians of {arguments.rounds} times {arguments.steps} steps of each run"
    print(f"{machine}, {os.cpu_count()} cores, {repeated}\n")
    print(table(rows))
    print(f"\n{errors(rows)}")


if __name__ == "__main__":
    main()
