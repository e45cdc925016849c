"""Does training see nothing of commtrace in what goes wrong easily: ends of processes, aborted groups, captures?

    python -m tests.gpu.stages.robustness OUTPUT

Jobs run side by side: nothing is timed but the end of a process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import torch

from bench.engines import OFF, details, engines, environment, recorded_rows
from tests.e2e.launch import run
from tests.gpu import replays
from tests.gpu.programs.exits import WAYS
from tests.gpu.programs.start import PROGRAMS, python_path
from tests.gpu.stages.stage import Answers, patient, run_job, run_stage

JOB_SECONDS: Final = 50.0
MOST_ADDED_SECONDS: Final = 2.5
"""commtrace waits two seconds at the most for the device to reach its last marks."""


def main(answers: Answers) -> None:
    variants = [OFF, *engines()]
    jobs: list[Callable[[], None]] = [partial(tell_of_ends, answers, variants), partial(tell_of_captures, answers)]
    if torch.cuda.is_available():
        jobs.append(partial(tell_of_aborts, answers, variants))
        jobs.append(partial(tell_of_replays, answers, variants))
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()


def tell_of_ends(answers: Answers, variants: list[str]) -> None:
    """Answer how processes end that do not stop commtrace."""
    begin = {(variant, way): answers.output / f"{way}-{variant}" for variant in variants for way in WAYS}
    with ThreadPoolExecutor() as pool:
        seconds = dict(zip(begin, pool.map(end_one_process, begin, begin.values()), strict=True))
    for engine in variants[1:]:
        parts, misses = [], []
        for way in WAYS:
            added = seconds[engine, way] - seconds[OFF, way]
            parts.append(f"{way} {seconds[OFF, way]:.2f} s off, {added:+.2f} s")
            if added > MOST_ADDED_SECONDS and torch.cuda.is_available():  # a rehearsal runs where others work too
                misses.append(f"{way} takes {added:.1f} s longer")
            if not details(recorded_rows(begin[engine, way]), "end"):
                misses.append(f"{way}: the recording has no end")
        answers.add("end of the process", "; ".join(parts), engine, misses=misses)


def end_one_process(job: tuple[str, str], output: Path) -> float:
    """Return the seconds from the last line of a program to the end of its process."""
    variant, way = job
    # A process of its own on any machine: a forked one ends otherwise.
    command = [sys.executable, str(PROGRAMS / "exits.py"), way]
    completed = run(command, {"PYTHONPATH": python_path(), **environment(variant, output)}, patient(JOB_SECONDS))
    if completed.returncode:
        raise RuntimeError(
            f"exits.py {way} with {variant} ended with {completed.returncode}: {completed.stdout[-2_000:]}"
        )
    (said,) = [line for line in completed.stdout.splitlines() if line.startswith("ends at ")]
    return time.time() - float(said.split()[2])


def tell_of_captures(answers: Answers) -> None:
    """Answer whether graphs can be captured while commtrace's threads run."""
    if not torch.cuda.is_available():
        return
    for engine in engines():
        output = answers.output / f"capture-{engine}"
        try:
            run_job(["graph_capture.py", "nccl"], environment(engine, output), timeout=JOB_SECONDS)
            misses = []
        except RuntimeError as error:
            misses = [str(error)[-300:]]
        answers.add("graph capture", "five graphs of 0.7 s each", engine, misses=misses)


def tell_of_replays(answers: Answers, variants: list[str]) -> None:
    """Answer whether replays contain what was captured, by the kernels and the results of two ranks."""
    outputs = {variant: answers.output / f"replays-{variant}" for variant in variants}
    with ThreadPoolExecutor() as pool:
        failures = dict(zip(variants, pool.map(failure_of_replays, variants, outputs.values()), strict=True))
    for engine in variants[1:]:
        failed = [f"{variant}: {failures[variant]}" for variant in (OFF, engine) if failures[variant]]
        if failed:
            answers.add("replays of graphs", "not recorded", engine, misses=failed)
            continue
        misses = [
            f"rank {rank}: {miss}" for rank in range(2) for miss in replays.misses(outputs[engine], outputs[OFF], rank)
        ]
        figures = "; ".join(f"rank {rank}: {replays.figures(outputs[engine], rank)}" for rank in range(2))
        answers.add("replays of graphs", figures, engine, misses=misses)


def failure_of_replays(variant: str, output: Path) -> str:
    """Run the program; return the end of what it printed if it failed, else nothing."""
    try:
        run_job(["graph_replays.py", output, "nccl"], environment(variant, output), ranks=2, timeout=JOB_SECONDS)
    except RuntimeError as error:
        return str(error)[-300:]
    return ""


def tell_of_aborts(answers: Answers, variants: list[str]) -> None:
    """Answer what a job sees that aborts its group during a collective with a missing rank."""
    outputs = [answers.output / f"abort-{variant}" for variant in variants]
    with ThreadPoolExecutor() as pool:
        raised = dict(zip(variants, pool.map(raised_by_abort, variants, outputs), strict=True))
    for engine, output in zip(variants[1:], outputs[1:], strict=True):
        misses = [] if raised[engine] == raised[OFF] else ["not what it sees without"]
        steps = [row["step"] for row in recorded_rows(output / "run") if row["kind"] == "step"]
        misses += [] if steps == list(range(6)) else [f"recorded steps are {steps}"]
        answers.add("aborted group", f"training sees {raised[OFF]} off, {raised[engine]}", engine, misses=misses)


def raised_by_abort(variant: str, output: Path) -> str:
    """Return the type of the exception that the job sees."""
    run_job(["aborts_nccl.py", output, "nccl"], environment(variant, output / "run"), ranks=2, timeout=JOB_SECONDS)
    return json.loads((output / "rank-0.json").read_text())["raised"] or "nothing"


if __name__ == "__main__":
    run_stage(main, __doc__)
