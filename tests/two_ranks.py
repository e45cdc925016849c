"""The run of two ranks that the tests of tables, of ``commtrace.open`` and of SQL read; every number is known.

Three steps of 100 ns, the first of which is the warm-up. In each, rank 1 computes for 20 ns longer than rank 0, which
waits for it in an all_reduce over both (dp)::

    rank 0  |forward 0-40 |all_reduce 40-80: waits until 60, transfers until 80|other 80-100|
    rank 1  |forward 0-60        |all_reduce 60-80                             |other 80-100|
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from commtrace.trace import schema
from commtrace.trace.schema import Row
from tests.factory import group
from tests.trace.rows import mark, row, write_rank

GROUP: Final = group("dp", 0, 1)
_COMPUTE_NS: Final = {0: 40, 1: 60}
_TABLE: Final = {
    "id": GROUP.id, "ranks": [0, 1], "ordinal": 0, "role": "dp", "name": "dp", "description": "", "backend": "gloo",
}  # fmt: skip


def write_two_ranks(directory: Path, steps: int = 3, world_size: int = 2) -> Path:
    """Write the run, of a job of so many ranks, and return its directory."""
    for rank in _COMPUTE_NS:
        coordinates = mark("topology", {"coordinates": {"dp": rank}, "parallel": {"dp": 2}})
        rows = [
            mark("process_group", _TABLE),
            coordinates,
            *(row for step in range(steps) for row in _step(rank, step)),
        ]
        write_rank(directory, [*rows, mark("end", {})], rank=rank, world_size=world_size)
    return directory


def _step(rank: int, step: int) -> list[Row]:
    begin, ready, end = 100 * step, 100 * step + _COMPUTE_NS[rank], 100 * step + 80
    where = {"name": "all_reduce", "group": GROUP.id, "seq": step, "op_in_seq": 0, "step": step}
    return [
        row(kind=schema.STEP, name="step", step=step, start=begin, end=begin + 100),
        row(kind=schema.FORWARD, step=step, microbatch=0, start=begin, end=ready),
        row(
            kind=schema.COLLECTIVE, lane=schema.COMMUNICATION, start=ready, end=end, id=step + 1, bytes=1024,
            dtype="float32", **where,
        ),
        row(kind=schema.STALL, start=ready, end=end, stalled_on=step + 1, **where),
    ]  # fmt: skip
