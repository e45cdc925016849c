"""Runs the sections of a program, each as one step, with torch.profiler watching: see :mod:`tests.e2e.oracle`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import commtrace

SECTION = "section:"


def watch(sections: Sequence[Callable[[], None]]) -> None:
    """Run the sections one after another and leave ``profiler-RANK.json`` in the folder that is the last argument.

    A section that cannot run here raises :class:`CannotRunError` on every rank; ``cannot-run-RANK.json`` says why.
    Sections named before the folder are the only ones to run.
    """
    *chosen, folder = sys.argv[1:]
    cannot_run = {}
    rank = int(os.environ["RANK"])
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=all_threads) as profiler:
        for number, section in enumerate(sections):
            if chosen and section.__name__ not in chosen:
                continue
            try:
                with commtrace.step(number), record_function(f"{SECTION}{number}:{section.__name__}"):
                    section()
            except CannotRunError as reason:
                cannot_run[section.__name__] = str(reason)
            if dist.is_initialized():
                dist.barrier()
    profiler.export_chrome_trace(str(Path(folder) / f"profiler-{rank}.json"))
    (Path(folder) / f"cannot-run-{rank}.json").write_text(json.dumps(cannot_run))
    if dist.is_initialized():
        dist.destroy_process_group()


class CannotRunError(Exception):
    """This machine, or this version of torch, lacks what a section needs."""
