"""Predict changes of a real Megatron job (gloo) from recorded runs, and compare them with jobs that have the changes.

    PYTHONPATH=. python bench/whatif_megatron.py    # about ten minutes; prints the table of docs/whatif.md

The job is examples/train_megatron_gpt.py: megatron-core's model, schedules, messages, gradient reduction, distributed
optimizer, 4 stages, 16 layers, one of the ranks slower than the others. Each layer also sleeps in its forward and its
backward, so that four ranks need a small part of two cores; a recomputed layer sleeps again. On a machine with other
work, put `chrt -r 5` in front.

Each setting is a job of its own, and all of them are run one after the other, several times. What a step takes is what
the example prints. A prediction is made from each of the runs of its source; the table has medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch


from bench.whatif_real import Row, errors, predicted, table
from tests.e2e.launch import REPOSITORY, fork_with_megatron

RANKS: Final = 4
LAYERS: Final = 16
FORWARD_S, BACKWARD_S = 0.004, 0.008
"""Sleep of a layer."""

SLOW_RANK, SLOWER = 2, 1.4
WARM_UP: Final = 3
BASE: Final = "base"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One job."""

    name: str
    microbatches: int = 8
    chunks: int = 1
    slower: float = SLOWER
    recompute: bool = False
    outer_layers: int = 4  # of the first and of the last stage; the others have the rest

    def arguments(self) -> list[str]:
        """Return the arguments of the example."""
        words = f"--pipeline {RANKS} --layers {LAYERS} --microbatches {self.microbatches} --hidden 64 --sequence 32"
        return [*words.split(), *(["--virtual-pipeline", str(self.chunks)] if self.chunks > 1 else [])]


SETTINGS: Final = {
    setting.name: setting
    for setting in (
        Setting(BASE),
        Setting("no slow rank", slower=1.0),
        Setting("16 microbatches", microbatches=16),
        Setting("4 microbatches", microbatches=4),
        Setting("interleaved, 2 chunks", chunks=2),
        Setting("recompute", recompute=True),
        Setting("layers 5, 3, 3, 5", outer_layers=5),
        Setting("no slow rank, 16 microbatches", slower=1.0, microbatches=16),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A change, predicted from a run of one setting and measured on a run of another."""

    name: str
    source: str
    target: str
    options: tuple[str, ...] = ()


PAIRS: Final = (
    Pair("none (base)", BASE, BASE),
    Pair("no slow rank", BASE, "no slow rank", ("--without-slow-rank", str(SLOW_RANK))),
    Pair("16 microbatches", BASE, "16 microbatches", ("--microbatches", "16")),
    Pair("4 microbatches", BASE, "4 microbatches", ("--microbatches", "4")),
    Pair("interleaved, 2 chunks", BASE, "interleaved, 2 chunks", ("--schedule", "interleaved", "--chunks", "2")),
    Pair("recompute", BASE, "recompute", ("--recompute", "on")),
    Pair("layers 5, 3, 3, 5", BASE, "layers 5, 3, 3, 5", ("--layers", "5,3,3,5")),
    Pair(
        "no slow rank, 16 microbatches",
        BASE,
        "no slow rank, 16 microbatches",
        ("--without-slow-rank", str(SLOW_RANK), "--microbatches", "16"),
    ),
    Pair("from recompute: none", "recompute", BASE, ("--recompute", "off")),
    Pair("from interleaved: 1F1B", "interleaved, 2 chunks", BASE, ("--schedule", "1f1b")),
    Pair("from 16 microbatches: 8", "16 microbatches", BASE, ("--microbatches", "8")),
    Pair(
        "from layers 5, 3, 3, 5: 4 each",
        "layers 5, 3, 3, 5",
        BASE,
        ("--layers-before", "5,3,3,5", "--layers", "4,4,4,4"),
    ),
)


# The job


def train(setting: Setting, arguments: list[str]) -> None:
    """Run the example on this rank, with layers that sleep."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    from megatron.core.tensor_parallel import random

    example: Any = importlib.import_module("train_megatron_gpt")

    # There is no CUDA generator whose state a recomputed layer would need.
    random._get_cuda_rng_state = lambda *_, **__: None
    random._set_cuda_rng_state = lambda *_, **__: None
    config_of, build = example.transformer_config, example.build_model

    def transformer_config(*options: object) -> Any:
        changes: dict[str, Any] = {}
        if setting.recompute:
            changes |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if setting.outer_layers * RANKS != LAYERS:
            changes["num_layers_in_first_pipeline_stage"] = setting.outer_layers
            changes["num_layers_in_last_pipeline_stage"] = setting.outer_layers
        return dataclasses.replace(config_of(*options), **changes)

    def build_model(*options: object) -> Any:
        chunks = build(*options)
        add_sleeps(chunks, setting.slower)
        return chunks

    example.transformer_config = transformer_config
    example.build_model = build_model
    sys.argv = ["train_megatron_gpt.py", *arguments]
    example.main()


def add_sleeps(chunks: Sequence[torch.nn.Module], slower: float) -> None:
    """Let each layer sleep in its forward and in its backward, also where it is recomputed."""
    import torch
    import torch.distributed as dist
    from megatron.core.transformer.transformer_layer import TransformerLayer

    scale = slower if dist.get_rank() == SLOW_RANK else 1.0

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context: object, values: torch.Tensor) -> torch.Tensor:
            time.sleep(FORWARD_S * scale)
            return values.clone()

        @staticmethod
        def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(BACKWARD_S * scale)
            return gradient

    sleep: Any = Sleep

    def sleep_too(layer: object, arguments: object, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, *others = output
        return sleep.apply(hidden), *others

    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)]
    for layer in layers:
        layer.register_forward_hook(sleep_too)


# What it took, and what was said


def run(setting: Setting, directory: Path, steps: int) -> float:
    """Run a job and record it. Return the mean step after the warm-up, seconds, by the example's own clock."""
    arguments = [__file__, "--train", setting.name, *setting.arguments(), "--iterations", str(steps)]
    modules = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "bench")])
    environment = {"COMMTRACE_DIR": str(directory), "PYTHONPATH": modules}
    completed = fork_with_megatron(arguments, RANKS, environment, timeout=300)
    taken = [float(ms) for ms in re.findall(r"^iteration .* ([0-9.]+) ms$", completed.stdout, re.MULTILINE)]
    if completed.returncode or len(taken) != steps:
        raise SystemExit(f"{setting.name}: the job failed\n{completed.stdout}")
    return statistics.fmean(taken[WARM_UP:]) / 1e3


def judge(folder: Path, rounds: int) -> list[Row]:
    """Return each pair: medians over the rounds."""
    taken_s = {
        name: statistics.median(float((folder / f"{name} {turn}.txt").read_text()) for turn in range(rounds))
        for name in SETTINGS
    }
    rows = []
    for pair in PAIRS:
        answers = [predicted(folder / f"{pair.source} {turn}", pair.options, WARM_UP) for turn in range(rounds)]
        answer_s, uncertainty_s = (statistics.median(own) for own in zip(*answers, strict=True))
        rows.append(Row(pair.name, pair.options, answer_s, uncertainty_s, taken_s[pair.target]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=13, help="of each job")
    parser.add_argument("--rounds", type=int, default=3, help="how often each job is run")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, and judge those that are there")
    parser.add_argument("--train", metavar="SETTING", help=argparse.SUPPRESS)
    options, others = parser.parse_known_args()
    if options.train:
        train(SETTINGS[options.train], others)
        return
    if others:
        parser.error(f"unknown arguments: {' '.join(others)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for turn in range(options.rounds):
            for name, setting in SETTINGS.items():
                result = folder / f"{name} {turn}.txt"
                if not result.exists():
                    result.write_text(str(run(setting, folder / f"{name} {turn}", options.steps)))
                    print(f"{name}, run {turn + 1}: {float(result.read_text()) * 1e3:.1f} ms", file=sys.stderr)
        rows = judge(folder, options.rounds)
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {os.cpu_count()} cores, medians of {options.rounds} runs of {options.steps} steps\n")
    print(table(rows))
    print(f"\n{errors(rows)}")


if __name__ == "__main__":
    main()
