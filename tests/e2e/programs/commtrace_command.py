"""A command of commtrace on every rank, as ``torchrun -m commtrace`` starts it.

RANKS_PER_NODE=1 gives each rank a node. FAULT=SIGINT@12 sends rank 1 a signal before the twelfth call that is timed.
"""

from __future__ import annotations

import os
import signal

from commtrace.benchmarks import timing
from commtrace.cli.main import main

_TIMED = timing.timed
_calls = 0


def _timed_until_the_fault(*arguments: object) -> int:
    global _calls
    _calls += 1
    name, _, number = os.environ["FAULT"].partition("@")
    if _calls == int(number):
        os.kill(os.getpid(), signal.Signals[name])
    return _TIMED(*arguments)  # type: ignore[arg-type]


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    if "RANKS_PER_NODE" in os.environ:
        os.environ["COMMTRACE_NODE_ID"] = f"node{rank // int(os.environ['RANKS_PER_NODE'])}"
    if "FAULT" in os.environ and rank == 1:
        timing.timed = _timed_until_the_fault
    main()
