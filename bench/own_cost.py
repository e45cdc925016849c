"""Does a run know what recording costs it? Its own figure against runs with and without commtrace, in turns.

    python bench/own_cost.py [--rounds 8] [--steps 1500] [--engine python]

One process of torch's fake backend trains a small model with many communications, bound by what its thread does. Each
round runs it without commtrace and with it; the true cost is the mean of the ratios of the mean step without outliers,
with Student's interval, the own one what ``commtrace summary`` prints of each recorded run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from commtrace.analysis.breakdown.run_steps import is_outlier
from commtrace.analysis.statistics import Float64, half_width_of_mean
from commtrace.analysis.summary import summarise

_WARM_UP: Final = 100

_PROGRAM: Final = """
import sys, time
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(64, 128)
lengths, before = [], 0
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(batch).sum().backward()
    for _ in range(int(sys.argv[2])):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    now = time.perf_counter_ns()
    lengths.append(now - before)
    before = now
print(*lengths)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--calls", type=int, default=10, help="all_reduces of each gradient in a step")
    parser.add_argument("--engine", default="auto", choices=["auto", "native", "python"])
    given = parser.parse_args()
    ratios = []
    print("round  plain ms  recorded ms  A/B cost  own figure")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "train.py")
        program.write_text(_PROGRAM)
        for number in range(given.rounds):
            run = Path(folder, f"run-{number}")
            plain = _mean_step(program, given, {"COMMTRACE_ENABLED": "0"})
            variables = {"COMMTRACE_DIR": str(run), "COMMTRACE_ENGINE": given.engine, "COMMTRACE_QUIET": "3"}
            recorded = _mean_step(program, given, variables)
            ratios.append(recorded / plain - 1)
            own = summarise(run).own_cost
            figure = "too few stretches" if own is None else f"{own.share:7.2%} ± {own.error_share:.2%}"
            print(f"{number:5}  {plain / 1e6:8.3f}  {recorded / 1e6:11.3f}  {ratios[-1]:8.2%}  {figure}", flush=True)
    print(f"A/B: {np.mean(ratios):.2%} ± {half_width_of_mean(np.array(ratios)):.2%} of a plain step, 95 %")


def _mean_step(program: Path, given: argparse.Namespace, variables: dict[str, str]) -> float:
    """Return the mean length of a step, ns, of a run with these variables, without warm-up and outliers."""
    command = [sys.executable, "-m", "commtrace", "run", "--", sys.executable, str(program)]
    words = [*command, str(given.steps), str(given.calls)]
    done = subprocess.run(words, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True)
    lengths: Float64 = np.array(done.stdout.split()[-given.steps :], np.float64)[_WARM_UP:]
    return float(lengths[~is_outlier(lengths.astype(np.int64))].mean())


if __name__ == "__main__":
    main()
