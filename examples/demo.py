"""Trains a GPT on four ranks with one of them slowed on purpose, and shows what commtrace says about it.

    python examples/demo.py                                         # pipeline 2 x data 2
    python examples/demo.py --tensor 2 --pipeline 2 --slow-rank 3   # any layout of train_megatron_gpt.py
    python examples/demo.py --slow-rank -1                          # nobody is slowed

``make demo`` installs what it needs first. It runs without a GPU, and on GPUs where there is one for every rank.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

TRAINING = Path(__file__).with_name("train_megatron_gpt.py")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train on four ranks, one of them slow, and show where the time went.",
        epilog="Every other option is one of train_megatron_gpt.py, such as --tensor, --microbatches or --iterations.",
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline stages (default 2)")
    parser.add_argument("--slow-rank", type=int, default=1, help="the rank that sleeps in every forward (default 1)")
    parser.add_argument("--slow-ms", type=float, default=30.0, help="for so long (default 30)")
    parser.add_argument(
        "--run", type=Path, default=Path("demo-run"), help="directory of the trace; it is emptied first"
    )
    parser.add_argument("--report", type=Path, default=Path("report.html"))
    options, of_the_training = parser.parse_known_args()

    for earlier in options.run.glob("rank-*"):
        shutil.rmtree(earlier)
    layout = [f"--pipeline={options.pipeline}", f"--slow-rank={options.slow_rank}", f"--slow-ms={options.slow_ms}"]
    torchrun = ["torchrun", "--standalone", f"--nproc-per-node={options.ranks}"]
    execute([*torchrun, str(TRAINING), *layout, *of_the_training], environment(options.ranks, options.run))
    execute(["commtrace", "summary", str(options.run)])
    execute(["commtrace", "report", str(options.run), "-o", str(options.report)])

    if options.slow_rank >= 0:
        print(f"\nRank {options.slow_rank} slept {options.slow_ms:g} ms in every forward: the summary should name it.")
    print(f"Open {options.report.resolve()} in a browser; the run is in {options.run.resolve()}.")
    print(f"Ask it more: {Path(sys.executable).parent / 'commtrace'} straggler {options.run}")


def environment(ranks: int, run: Path) -> dict[str, str]:
    """For the ranks: where to record, one thread each, and no GPU where there are too few for NCCL."""
    chosen = {**os.environ, "COMMTRACE_DIR": str(run), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if torch.cuda.device_count() < ranks:
        chosen["CUDA_VISIBLE_DEVICES"] = ""
    return chosen


def execute(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a program that is installed beside this Python, and stop here if it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    program = Path(sys.executable).with_name(command[0])
    completed = subprocess.run([str(program), *command[1:]], env=environment, check=False)
    if completed.returncode:
        raise SystemExit(completed.returncode)


if __name__ == "__main__":
    main()
