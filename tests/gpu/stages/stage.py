"""What all stages have: a folder for their files, answers, and a job of one rank."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.e2e.launch import Completed
from tests.gpu.programs.start import start_program
from tests.gpu.stages import QUESTIONS
from tests.gpu.table import FAILS, HOLDS, MEASURED, Row

REHEARSED: Final = "rehearsed: there is no GPU"
ANSWERS: Final = "answers.jsonl"


class Answers:
    """Writes rows of the table to the stage's folder, one by one.

    Args:
        output: the folder; made if it is not there.
    """

    def __init__(self, output: Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self.output = output

    def add(self, question: str, figures: str, variant: str = "", *, misses: Sequence[str] | None = None) -> None:
        """Add an answer.

        Args:
            question: one of ``QUESTIONS``.
            figures: what was measured.
            variant: an engine, where it matters.
            misses: what does not hold; None if no limit is set.
        """
        assert question in QUESTIONS, question
        verdict = MEASURED if misses is None else f"{FAILS}: {'; '.join(misses)}" if misses else HOLDS
        if not torch.cuda.is_available():
            # No figure of a machine without a GPU may be taken for one of a GPU; a fault must show all the same.
            verdict = REHEARSED if not misses else f"{REHEARSED}; {FAILS}: {'; '.join(misses)}"
        with (self.output / ANSWERS).open("a") as file:
            file.write(json.dumps(Row(question, variant, verdict, figures)._asdict()) + "\n")


def read_answers(output: Path) -> list[Row]:
    """Return the answers of a stage so far; the last one may be half written."""
    if not (output / ANSWERS).exists():
        return []
    lines = (output / ANSWERS).read_text().splitlines(keepends=True)
    return [Row(**json.loads(line)) for line in lines if line.endswith("\n")]


def run_stage(stage: Callable[[Answers], None], doc: str | None) -> None:
    """Run a stage as a program whose argument is its folder."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    stage(Answers(parser.parse_args().output))


def run_job(
    arguments: Sequence[str | Path], environment: Mapping[str, str], *, ranks: int = 0, timeout: float
) -> Completed:
    """Run a program of tests/gpu/programs.

    Raises:
        RuntimeError: it failed, or did not end in time; with the end of what it printed.
    """
    completed = start_program(arguments, environment, ranks=ranks, timeout=patient(timeout))
    if completed.returncode or completed.timed_out or "switched off" in completed.stdout:
        raise RuntimeError(f"{arguments[0]} ended with {completed.returncode}: {completed.stdout[-4_000:]}")
    return completed


def start_one_rank() -> torch.device:
    """Make a job of this process alone, with NCCL where there is a GPU."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=device)
    return device


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def patient(seconds: float) -> float:
    """Return the limit of a program in seconds: a rehearsal runs where others work too, and may take longer."""
    return seconds if torch.cuda.is_available() else 3 * seconds


def sized(on_gpu: int, rehearsed: int) -> int:
    """Return a number of repetitions: a rehearsal makes few."""
    return on_gpu if torch.cuda.is_available() else rehearsed
