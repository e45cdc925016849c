"""Logs of workers."""

from __future__ import annotations

from pathlib import Path

BASE_MS = 1697793307000


def job(kind: str, microbatch: int, start: float, end: float) -> str:
    return (
        f"I1020 09:15:07.265326 22317 standalone_executor.cc:217] Profiler Info: Job ({microbatch}), type = {kind}, "
        f"micro_batch_id = {microbatch}, job_start_time = {BASE_MS + start:.6f}, job_end_time = {BASE_MS + end:.6f}\n"
    )


def write_log(path: Path, *jobs: str, first_step: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"[2026-01-01] [    INFO] utils.py:250 - Schedule Profiler start at step {first_step} and end at step 5\n"
    path.write_text(head + "I1020 program_interpreter.cc:243] New Executor is Running.\n" + "".join(jobs))
    return path
